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
class _Held:
    kept: StateCopy
    version: Version
    num_users: int


class SnapshotStore:
    """The states that snapshots refer to. The controller calls it under its lock, but for ``forget``, which may come from anywhere.

    Attributes:
        lineage: which versions of the weights there were.
    """

    def __init__(self, runtime: Runtime, roles: Mapping[str, RoleRecord], post: Post) -> None:
        self.lineage = Lineage()
        self._runtime, self._roles, self._post = runtime, roles, post
        self._held: dict[int, _Held] = {}
        self._next = 0
        self._lock = threading.Lock()

    # -- snapshots

    def keep(self, names: Sequence[str]) -> tuple[StateCopy, ...]:
        """Keep the state of roles, behind what is on their lanes."""
        unchanged: dict[str, StateCopy] = {}
        waits = []
        there = [name for name in names if (kept := self._roles[name].kept) and self.still_has(kept)]
        with self._lock:
            for record in (self._roles[name] for name in there):
                held = None if record.kept is None else self._held.get(record.kept.number)
                if held is not None:
                    held.num_users += 1
                    unchanged[record.spec.name] = held.kept
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
            for kept in made.values():
                self._runtime.forget(kept)
            self.forget(unchanged.values())
            raise
        with self._lock:
            for name, kept in made.items():
                self._roles[name].kept = kept
                self._held[kept.number] = _Held(kept, self.head(self._roles[name]), 1)
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
        for kept in states:
            if kept.number not in self._held:
                raise CheckpointError(f"{kept.role}'s state was let go with its snapshot; take another with session.snapshot(...)")
            if not self._runtime.holds(kept):
                devices = ", ".join(map(str, kept.devices))
                raise CheckpointError(
                    f"{kept.role}'s state is gone with a worker that ended (it lay in the host memory of device {devices}); "
                    "nothing was changed. Load a checkpoint with session.load(...)."
                )

    def give_back(self, states: Sequence[StateCopy], branch: str) -> None:
        """Give roles their states back; the lanes are empty, the states were checked."""
        waits = []
        for kept in states:
            record, held = self._roles[kept.role], self._held[kept.number]
            waits.append((record, held, self._post(record, self._giver(record, kept))))
        failure: HfsdkError | None = None
        for record, held, wait in waits:
            record.changes += 1
            try:
                wait()
            except HfsdkError as error:
                failure = failure or error
                continue
            record.num_updates, record.version, record.kept = held.kept.num_updates, held.version, held.kept
        if failure is not None:
            raise failure
        self.lineage.branch = branch or self.lineage.branch

    def back_at(self, record: RoleRecord, kept: StateCopy) -> None:
        """Count a role as what it was when a state of it was kept, for the choice of what it comes back with."""
        with self._lock:
            held = self._held.get(kept.number)
        if held is not None:
            record.num_updates, record.version, record.kept = kept.num_updates, held.version, None

    def _giver(self, record: RoleRecord, kept: StateCopy) -> Callable[[Pool], None]:
        return lambda pool: self._runtime.restore(record.spec, pool, kept)

    def forget(self, states: Iterable[StateCopy]) -> None:
        """Free what no other snapshot refers to."""
        for kept in states:
            with self._lock:
                held = self._held.get(kept.number)
                if held is None:
                    continue
                held.num_users -= 1
                if held.num_users > 0:
                    continue
                del self._held[kept.number]
            with suppress(HfsdkError):  # the session is being closed
                self._runtime.forget(kept)

    def has(self, kept: StateCopy) -> bool:
        """Whether a state was not let go."""
        return kept.number in self._held

    def still_has(self, kept: StateCopy) -> bool:
        """Whether a state was not let go, and all workers that keep it are there."""
        return self.has(kept) and self._runtime.holds(kept)

    def newest(self, record: RoleRecord) -> StateCopy | None:
        """Return the newest state that a role's weights come from and whose workers are still there; ``None`` where none is."""
        return next(self._behind(record), None)

    def of_version(self, record: RoleRecord, num_updates: int) -> StateCopy | None:
        """Return the state after so many updates that a role's weights come from, of those that its ranks keep as they have it."""
        if record.pool is None:
            return None
        here = str(mesh_of(record.spec)), record.pool.devices
        found = (kept for kept in self._behind(record) if (kept.layout, kept.devices) == here)
        return next((kept for kept in found if kept.num_updates == num_updates), None)

    def _behind(self, record: RoleRecord) -> Iterator[StateCopy]:
        if record.version is None:
            return
        with self._lock:
            mine = [held for held in self._held.values() if held.kept.role == record.spec.name]
        mine = [held for held in mine if record.version.made_of(held.version)]
        for held in sorted(mine, key=lambda held: (held.version.number, held.kept.number), reverse=True):
            with suppress(HfsdkError):  # the session is being closed
                if self._runtime.holds(held.kept):
                    yield held.kept

    # -- lineage

    def head(self, record: RoleRecord) -> Version:
        """Return the version of a role's weights as submitted so far."""
        if record.version is None:
            record.version = self.lineage.first(record.spec.name)
        return record.version

    def stamp(self, record: CallRecord, role: RoleRecord | None, sources: Iterable[CallRecord]) -> None:
        """Note which weights a call sees, itself or in what it reads, and the version that it makes.

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
        now = [known.version for known in self._roles.values() if known.version is not None]
        for source in sources:
            found = self.lineage.stale(source.saw, now)
            if found is not None:
                raise StaleBatchError(_stale_words(message, source, *found, self.lineage.branch))

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
