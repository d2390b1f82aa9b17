"""The controller's part in snapshots: states of trained roles that are kept, given back and freed.

A state is kept once however many snapshots refer to it: nothing but calls that touch weights (``Method.touches_weights``) changes a
role, so a snapshot without one of them since the last refers to the same state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hfsdk.core.arguments import Learning
from hfsdk.core.errors import CheckpointError, HfsdkError, StaleBatchError
from hfsdk.core.methods import LOAD_STATE, STEP, UPDATE, method_of
from hfsdk.core.placement import Pool
from hfsdk.core.runtime import Runtime, StateCopy
from hfsdk.engine.calls.dispatch import mesh_of
from hfsdk.engine.calls.messages import Submit
from hfsdk.engine.controller.records import CallRecord, Lineage, RoleRecord, Version

Post = Callable[[RoleRecord, Callable[[Pool], None]], Callable[[], None]]
"""Runs a function on a role's lane, with the role loaded; returns what waits for it."""


@dataclass(eq=False)
class _StateEntry:
    """A kept state, the version of its weights, and the number of snapshots that refer to it."""

    state: StateCopy
    version: Version
    num_users: int


class SnapshotStore:
    """The states that snapshots refer to. The controller calls it under its lock, but for ``forget``, which may come from anywhere.

    Attributes:
        lineage: the versions of the weights that there were.
    """

    def __init__(self, runtime: Runtime, roles: Mapping[str, RoleRecord], post: Post) -> None:
        self.lineage = Lineage()
        self._runtime, self._roles, self._post = runtime, roles, post
        self._entries: dict[int, _StateEntry] = {}
        self._next = 0
        self._lock = threading.Lock()

    # -- snapshots

    def keep(self, names: Sequence[str]) -> tuple[StateCopy, ...]:
        """Keep the state of roles, behind the calls on their lanes."""
        unchanged: dict[str, StateCopy] = {}
        waits = []
        there = [name for name in names if (state := self._roles[name].kept) and self.still_has(state)]
        with self._lock:
            for record in (self._roles[name] for name in there):
                entry = None if record.kept is None else self._entries.get(record.kept.number)
                if entry is not None:
                    entry.num_users += 1
                    unchanged[record.spec.name] = entry.state
        made: dict[str, StateCopy] = {}
        try:
            for record in (self._roles[name] for name in names if name not in unchanged):
                self._next += 1
                waits.append(self._post(record, self._keeper(record, self._next, made)))
            for wait in waits:
                wait()
        except BaseException:
            for wait in waits:  # copies that are still to come would stay
                with suppress(Exception):
                    wait()
            for state in made.values():
                self._runtime.forget(state)
            self.forget(unchanged.values())
            raise
        with self._lock:
            for name, state in made.items():
                self._roles[name].kept = state
                self._entries[state.number] = _StateEntry(state, self.head(self._roles[name]), 1)
        return tuple((unchanged | made)[name] for name in names)

    def _keeper(self, record: RoleRecord, number: int, made: dict[str, StateCopy]) -> Callable[[Pool], None]:
        name = record.spec.name

        def keep(pool: Pool) -> None:
            try:
                made[name] = self._runtime.keep(name, pool, number)
            except HfsdkError:  # of some ranks perhaps: the others have their parts
                with suppress(HfsdkError):
                    self._runtime.forget(StateCopy(number, name, "", pool.devices, (), 0))
                raise

        return keep

    def check(self, states: Iterable[StateCopy]) -> None:
        """Refuse states that are not there any more, before anything changes.

        Raises:
            CheckpointError: names them.
        """
        for state in states:
            if state.number not in self._entries:
                raise CheckpointError(f"{state.role}'s state was let go with its snapshot; take another with session.snapshot(...)")
            if not self._runtime.holds(state):
                devices = ", ".join(map(str, state.devices))
                raise CheckpointError(
                    f"{state.role}'s state is gone with a worker that ended (it lay in the host memory of device {devices}); "
                    "nothing was changed. Load a checkpoint with session.load(...)."
                )

    def give_back(self, states: Sequence[StateCopy], branch: str) -> None:
        """Give roles their states back; the lanes are empty, the states were checked."""
        waits = []
        for state in states:
            record, entry = self._roles[state.role], self._entries[state.number]
            waits.append((record, entry, self._post(record, self._giver(record, state))))
        failure: HfsdkError | None = None
        for record, entry, wait in waits:
            # also where that fails: some ranks may have the old state by then, so a shadow's weights are out of date
            record.changes += 1
            try:
                wait()
            except HfsdkError as error:
                failure = failure or error
                continue
            record.num_updates, record.version, record.kept = entry.state.num_updates, entry.version, entry.state
        if failure is not None:
            raise failure
        self.lineage.branch = branch or self.lineage.branch

    def back_at(self, record: RoleRecord, state: StateCopy) -> None:
        """Count a role as what it was when a state of it was kept, for the choice of what it comes back with."""
        with self._lock:
            entry = self._entries.get(state.number)
        if entry is not None:
            record.num_updates, record.version, record.kept = state.num_updates, entry.version, None

    def _giver(self, record: RoleRecord, state: StateCopy) -> Callable[[Pool], None]:
        return lambda pool: self._runtime.restore(record.spec, pool, state)

    def forget(self, states: Iterable[StateCopy]) -> None:
        """Free what no other snapshot refers to."""
        for state in states:
            with self._lock:
                entry = self._entries.get(state.number)
                if entry is None:
                    continue
                entry.num_users -= 1
                if entry.num_users > 0:
                    continue
                del self._entries[state.number]
            with suppress(HfsdkError):  # the session is being closed
                self._runtime.forget(state)

    def has(self, state: StateCopy) -> bool:
        """Whether a state was not let go."""
        return state.number in self._entries

    def still_has(self, state: StateCopy) -> bool:
        """Whether a state was not let go, and all workers that keep it are there."""
        return self.has(state) and self._runtime.holds(state)

    def newest(self, record: RoleRecord) -> StateCopy | None:
        """Return the newest state that a role's weights come from and whose workers are still there; ``None`` where none is."""
        return next(self._behind(record), None)

    def of_version(self, record: RoleRecord, num_updates: int) -> StateCopy | None:
        """Return the state after so many updates that a role's weights come from, of those that its ranks keep as they have it."""
        if record.pool is None:
            return None
        here = str(mesh_of(record.spec)), record.pool.devices
        states = (state for state in self._behind(record) if (state.layout, state.devices) == here)
        return next((state for state in states if state.num_updates == num_updates), None)

    def _behind(self, record: RoleRecord) -> Iterator[StateCopy]:
        if record.version is None:
            return
        with self._lock:
            entries = [entry for entry in self._entries.values() if entry.state.role == record.spec.name]
        entries = [entry for entry in entries if record.version.made_of(entry.version)]
        for entry in sorted(entries, key=lambda entry: (entry.version.number, entry.state.number), reverse=True):
            with suppress(HfsdkError):  # the session is being closed
                if self._runtime.holds(entry.state):
                    yield entry.state

    # -- lineage

    def head(self, record: RoleRecord) -> Version:
        """Return the version of a role's weights as submitted so far."""
        if record.version is None:
            record.version = self.lineage.first(record.spec.name)
        return record.version

    def stamp(self, record: CallRecord, role: RoleRecord | None, sources: Iterable[CallRecord]) -> None:
        """Note the weights that a call sees, itself or in what it reads, and the version that it makes.

        What a generation reads does not count: it is on-policy whatever its prompts were made of.
        """
        record.branch = self.lineage.branch
        seen: set[Version] = set()
        if record.call.phase != "generation":
            seen.update(*(source.saw for source in sources))
        if role is not None and role.spec.trainable:
            before = self.head(role)
            seen.add(before)
            if method_of(record.call.method).touches_weights:
                role.kept = None
            if method_of(record.call.method).changes_weights:
                loads = record.call.method == LOAD_STATE.name
                record.made = role.version = self.lineage.next(before, before.num_updates + _num_steps(record), apart=loads)
        record.saw = frozenset(seen)

    def check_fresh(self, message: Submit, sources: Sequence[CallRecord]) -> None:
        """Refuse to train on what weights of another branch wrote.

        Raises:
            StaleBatchError: names the branches and the updates.
        """
        if not message.kind.learns:
            return
        now = [role.version for role in self._roles.values() if role.version is not None]
        for source in sources:
            stale = self.lineage.stale(source.saw, now)
            if stale is not None:
                raise StaleBatchError(_stale_words(message, source, *stale, self.lineage.branch))

    def changed(self, role: RoleRecord, num_updates: int, *, apart: bool) -> None:
        """Note that a role's weights became others without a call: initial ones (``apart``), or those of a state behind them."""
        if role.spec.trainable:
            role.version, role.kept = self.lineage.next(self.head(role), num_updates, apart=apart), None


def _num_steps(record: CallRecord) -> int:
    """Return the optimizer steps that a call is to take."""
    if record.call.method == UPDATE.name and record.request is not None and isinstance(record.request.arguments, Learning):
        return record.request.arguments.num_steps
    return int(record.call.method in (UPDATE.name, STEP.name))


def _stale_words(message: Submit, source: CallRecord, old: Version, head: Version, branch: str) -> str:
    columns = ", ".join(source.call.writes) or "its columns"
    common = old.shared_with(head)
    left = f", which left that line at update {common.num_updates}" if common is not None else ""
    where = f" ({source.call.line})" if source.call.line else ""
    return (
        f"{message.role}.{message.method} was given a batch of another branch: {source.call}{where} wrote {columns} on branch "
        f"{source.branch!r} with {old.role} at update {old.num_updates}; the session is on branch {branch!r}{left}. Generate anew, "
        "e.g. actor.generate(prompts[k]), or take the batch over as data of your own: batch.adopt()."
    )
