"""``Snapshots``: remembering moments of a session, and going back to them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from hfsdk.core.checks import Length, Name, checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.history import Mark
from hfsdk.core.roles import DECLARED_BY
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.unscored import PART
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls.host_memory import HostRoom, check_room
from hfsdk.models import ModelHandle, RewardModel
from hfsdk.models.reward import RewardSum, WeightedScores
from hfsdk.run.run import CurrentRun
from hfsdk.session.client import uninterrupted
from hfsdk.session.context import Context
from hfsdk.session.placing import Deployment
from hfsdk.session.role_book import change_of
from hfsdk.session.streams import RowStream, StreamPlaces
from hfsdk.state.history import HistoryLog

if TYPE_CHECKING:
    from hfsdk.core.roles import RoleSpec
    from hfsdk.core.runtime import StateCopy

MUST_AGREE = (
    ("kind", "kind"),
    ("model", "model"),
    ("dtype", "dtype"),
    ("head", "head"),
    ("optimizer", "optimizer"),
    ("lora", "lora"),
)
"""Fields of a role, and their names in messages, that must be as in the snapshot: with another one it is another role."""


class Snapshots:
    """The snapshots of a session."""

    def __init__(self, context: Context, deployment: Deployment, places: StreamPlaces, log: HistoryLog, run: CurrentRun) -> None:
        self._context, self._client, self._deployment = context, context.client, deployment
        self._places, self._log, self._run = places, log, run
        self._snapshots: dict[str, Snapshot] = {}
        context.find_snapshot = self.find
        self._own_places: weakref.WeakKeyDictionary[Snapshot, weakref.WeakKeyDictionary[RowStream, int]]
        self._own_places = weakref.WeakKeyDictionary()
        """The place of each stream, by snapshot."""
        self._forgetters: weakref.WeakKeyDictionary[Snapshot, weakref.finalize[Any, Any]] = weakref.WeakKeyDictionary()

    def snapshot(self, name: Annotated[str, Length(0, 200)] = "") -> Snapshot:
        """Carry out ``session.snapshot``; its text says what the arguments are."""
        self._client.check_open()
        self._run.check_between_steps("snapshot")
        log = self._log
        trained = self.trained
        if not trained:
            raise OptionError("there is nothing to go back to: no role is trained; call session.actor('tiny') first")
        advice = "Let earlier snapshots go with session.forget(...), or place the roles over more nodes."
        if notice := check_room(self.room(), "the snapshot", advice):
            self._context.notice(notice)
        with uninterrupted():  # what is kept is also known
            name = name or next(n for i in range(1, len(log.marks) + 2) if (n := f"snapshot {i}") not in log.marks)
            made = self.keep(name)
            if (old := self._snapshots.get(name)) is not None and old not in self._forgetters:
                self._client.forget(old.kept)  # taken by a process that is gone
            self._snapshots[name], log.marks[name] = made, Mark(name, log.branch, made.order)
        return made

    def room(self) -> tuple[HostRoom, ...]:
        """Return a snapshot's bytes on each node, and the node's free host memory; waits for the calls submitted so far."""
        trained = self.trained
        for handle in trained:
            self._deployment.ready(handle)
        self._client.drain()
        room: tuple[HostRoom, ...] = self._client.send(m.AskHostRoom(tuple(h.name for h in trained), unless_kept=True))
        return room

    def keep(self, name: str) -> Snapshot:
        """Take a snapshot that neither the session's ``snapshots`` nor its history list; :meth:`room` was asked before."""
        context, book = self._context, self._deployment.book
        states: tuple[StateCopy, ...] = self._client.send(m.TakeSnapshot(tuple(handle.name for handle in self.trained)))
        names = {k.number: s.name for s in reversed(self._snapshots.values()) for k in s.kept}
        made = Snapshot(
            name=name, branch=self._log.branch, steps=context.next_step(), seed=context.seed, kept=states,
            shared={k.role: names[k.number] for k in states if k.number in names}, roles=tuple(book.declared(h) for h in book),
            positions=self._places.positions(), counters=context.kept_counters(),
            nodes={d: context.cluster.node_of(d) for k in states for d in k.devices}, order=self._client.last_call,
        )  # fmt: skip
        self._own(made)
        self._own_places[made] = self._places.of_each()
        return made

    @property
    def trained(self) -> list[ModelHandle]:
        """The handles whose state a snapshot keeps."""
        return [handle for handle in self._deployment.book.models if handle.role.trainable]

    def _own(self, snapshot: Snapshot) -> None:
        """Free a snapshot when nothing refers to it any more."""
        forget = weakref.finalize(snapshot, self._client.forget, snapshot.kept)
        forget.atexit = False
        self._forgetters[snapshot] = forget

    def take_known(self, taken_elsewhere: Mapping[str, Snapshot], gone: Sequence[str]) -> None:
        """Add snapshots that another process of this session has taken, and drop those that it has let go."""
        for name, snapshot in taken_elsewhere.items():
            self._snapshots[name] = snapshot
        for name in gone:
            self._snapshots.pop(name, None)

    def by_name(self) -> Mapping[str, Snapshot]:
        """Return the snapshots by name, the oldest first."""
        return MappingProxyType(self._snapshots)

    def place_of(self, snapshot: Snapshot, stream: RowStream) -> int:
        """Return a stream's place at a snapshot; one that was made since begins where the one like it was."""
        own, like_it = self._own_places.get(snapshot), snapshot.positions.get(stream._fingerprint, 0)
        return like_it if own is None else own.get(stream, like_it)

    def forget(self, snapshot: Snapshot | str) -> None:
        """Carry out ``session.forget``; its text says what the arguments are."""
        forgotten = self.find(snapshot)
        listed = self._snapshots.get(forgotten.name) is forgotten
        if listed:
            del self._snapshots[forgotten.name]
        if forgotten in self._forgetters:
            self._forgetters.pop(forgotten)()
        elif listed:  # another process of this session took it, and nobody else frees it
            self._client.forget(forgotten.kept)
        self._client.send(m.Forget(()))  # whatever is sent takes along what is not needed any more

    @checked
    def find(self, snapshot: Snapshot | str) -> Snapshot:
        """Return a snapshot by its name, or as it is.

        Raises:
            OptionError: there is none of this name.
        """
        if isinstance(snapshot, Snapshot):
            return snapshot
        if snapshot not in self._snapshots:
            names = ", ".join(map(repr, self._snapshots)) or "none; session.snapshot('before') takes one"
            raise OptionError(f"there is no snapshot {shown(snapshot)}; the session has {names}")
        return self._snapshots[snapshot]

    # -- going back

    def rewind(self, snapshot: Snapshot | str) -> str:
        """Carry out ``session.rewind``; its text says what the arguments are."""
        target = self.find(snapshot)
        name = self._new_branch(target)
        self._go_back(target, name)
        return name

    def _new_branch(self, snapshot: Snapshot) -> str:
        branches = self._log.branches
        number = 1 + sum(b.snapshot == snapshot.name for b in branches.values())
        return next(n for i in range(number, number + len(branches) + 1) if (n := f"{snapshot.name}/{i}") not in branches)

    def fork(self, snapshot: Snapshot | str, name: Name) -> str:
        """Carry out ``session.fork``; its text says what the arguments are."""
        branches = self._log.branches
        if name in branches:
            raise OptionError(f"a new branch needs a new name; got {name!r}, and there are {', '.join(map(repr, branches))}")
        self._go_back(self.find(snapshot), name)
        return name

    def come_home(self, snapshot: Snapshot, *, anew: bool = False) -> tuple[str, ...]:
        """Go back to where the session was before it went elsewhere for a while, or (``anew``) there on a new branch.

        A role whose state is gone with a worker has what is behind that state at its next call: nothing that was done meanwhile
        stays. Returns the notice that says so, if that is.
        """
        lost = self._go_back(snapshot, self._new_branch(snapshot) if anew else snapshot.branch, from_elsewhere=True)
        return (f"the session is back, but for what went with a worker: {'; '.join(lost)}",) if lost else ()

    def resume(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot on its own branch, which goes on from there; what came after it must be on other branches."""
        self._go_back(snapshot, snapshot.branch)

    def _go_back(self, snapshot: Snapshot, name: str, *, from_elsewhere: bool = False) -> tuple[str, ...]:
        """Rewind onto a branch, a new one or the one the snapshot was taken on; ``from_elsewhere`` as far as it is there.

        Returns what roles come back with whose state is gone, in words.
        """
        self._client.check_open()
        self._run.check_between_steps("rewind")
        self._check_roles(snapshot)
        handles = {h.name: h for h in self._deployment.book}
        for copy in snapshot.kept:
            self._deployment.ready(handles[copy.role])
        self._client.drain()
        with uninterrupted():  # all of it or nothing
            lost: tuple[str, ...] = ()
            if from_elsewhere:
                lost = self._client.send(m.Return(snapshot.kept, name))
            else:
                self._client.send(m.Rewind(snapshot.kept, name))
            self._context.seed = snapshot.seed
            self._context.counters.replace(snapshot.counters)
            self._places.go_back(snapshot.positions, self._own_places.get(snapshot, {}))
            self._log.go_to(name, snapshot)
            for role in snapshot.roles:
                if role.function is not None:
                    handle = self._deployment.declare(type(handles[role.name]), role)
                    if isinstance(handle, RewardSum):
                        self._take_weights(handle, role.function.load())
        return lost

    def _take_weights(self, handle: RewardSum, scores: Any) -> None:
        """Give a weighted sum the parts and weights of its function."""
        parts = [self._deployment.book.find(column.removeprefix(PART)) for column in scores.columns]
        handle.parts = tuple(part for part in parts if isinstance(part, RewardModel))
        handle.weights = tuple(scores.weights)

    def _check_roles(self, snapshot: Snapshot) -> None:
        """Refuse a snapshot of other roles than there are.

        Raises:
            OptionError: names the role and what is different.
        """
        what = f"the snapshot {snapshot.name!r}"
        handles = {h.name: h for h in self._deployment.book}
        for role in snapshot.roles:
            again = DECLARED_BY.get(role.kind, "")
            if role.name not in handles:
                raise OptionError(
                    f"{what} has {role.name}, which was released since; nothing was changed. Declare it as it was, e.g. {again}, "
                    "and rewind again"
                )
            handle = handles[role.name]
            difference = _difference(role, self._deployment.book.declared(handle))
            # a weighted sum is a role with a function of ours: its declaration alone does not tell it from the user's
            summed = role.function is not None and role.function.name == WeightedScores.__name__
            if not difference and summed != isinstance(handle, RewardSum):
                difference = "a weighted sum then, a function now" if summed else "a function then, a weighted sum now"
            if difference:
                raise OptionError(
                    f"{what} has another {role.name}, which was replaced since ({difference}); nothing was changed. Declare it as "
                    "it was, and rewind again"
                )
        there = {role.name for role in snapshot.roles}
        for handle in self._deployment.book.models:
            if handle.role.trainable and handle.name not in there:
                raise OptionError(
                    f"{what} has no {handle.name}, which was declared after it; nothing was changed. {handle.name}.release() it "
                    "first, or take snapshots once all roles are declared"
                )


def _difference(before: RoleSpec, now: RoleSpec) -> str:
    """Return the difference of two declarations in words; ``""`` where they are the same, layouts and functions aside."""
    if (before.function is None) != (now.function is None):
        return "a function then, a model now" if before.function is not None else "a model then, a function now"
    for field, word in MUST_AGREE:
        old, new = getattr(before, field), getattr(now, field)
        if field == "model" and old is not None and new is not None:
            old, new = replace(old, name=""), replace(new, name="")
            same_weights = before.trainable or before.folder == now.folder
            if old == new and not same_weights:
                return f"{word} {before.folder} then, {now.folder} now"
        if old != new:
            return f"{word} {change_of(getattr(before, field), getattr(now, field))}"
    return ""
