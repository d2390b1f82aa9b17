"""Snapshots, rewinding and the history of a session, as part of it."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from hfsdk.core.checks import Length, Name, checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.functions import Shipped
from hfsdk.core.history import Branch, History, Mark, Row
from hfsdk.core.rows import Rows
from hfsdk.core.snapshot import Snapshot
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.host_memory import check_room
from hfsdk.engine.calls.queries import Change
from hfsdk.engine.controller.lineage import MAIN
from hfsdk.models import RewardModel
from hfsdk.models.reward import PART, RewardSum, WeightedScores
from hfsdk.session.client import uninterrupted
from hfsdk.session.placing import Placing
from hfsdk.session.roles import EXAMPLES

if TYPE_CHECKING:
    from hfsdk.core.roles import RoleSpec
    from hfsdk.core.runtime import Kept
    from hfsdk.session.streams import RowStream

MUST_AGREE = (("kind", "kind"), ("model", "model"), ("dtype", "dtype"), ("head", "head"), ("optimizer", "optimizer"))
"""Fields of a role, and their names in messages, that must be as in the snapshot: with another one it is another role."""


ORDER = "order"
"""Key of a row that is not for the reader."""


class Branching(Placing):
    """The part of a session that goes back, and knows where it has been."""

    def _begin_history(self) -> None:
        self._streams: dict[str, RowStream] = {}
        """By fingerprint, the latest of those made alike."""
        self._all_streams: weakref.WeakSet[RowStream] = weakref.WeakSet()
        self._places: weakref.WeakKeyDictionary[Snapshot, weakref.WeakKeyDictionary[RowStream, int]] = weakref.WeakKeyDictionary()
        self._positions: dict[str, int] = {}
        self._rows = Rows()
        """Rows of the history, but for updates by hand; in each, as ``order``, the number of the last call before it."""
        self._branches: dict[str, Branch] = {MAIN: Branch(MAIN)}
        self._branch = MAIN
        self._since = 0
        """The last call before the history was loaded: what came before is in it, or gone with the weights it made."""
        self._marks: dict[str, Mark] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._forgetters: dict[int, weakref.finalize[Any, Any]] = {}

    @abstractmethod
    def _check_between_steps(self, what: str) -> None:
        """Refuse what would take a step half done."""

    # -- snapshots

    @checked
    def snapshot(self, name: Annotated[str, Length(0, 200)] = "") -> Snapshot:
        """Remember this moment: weights, optimizers, schedules, counters and seed, the prompts' places, functions' versions.

        Waits for what was submitted so far, and copies each trained role's state into the host memory of its workers, a share each:
        data-parallel ranks keep one copy together. A notice tells where that is much of what a node has free. Gathered
        gradients that no ``step`` has taken are not part of it.

        Args:
            name: to rewind by; the name of an earlier snapshot goes over to this one.

        Raises:
            OptionError: nothing is trained in this session, or a step of a run is under way.
            CallError: a failure of these roles that nobody has seen yet.
            CheckpointError: a node has not enough host memory free; says how much it takes and how much there is.
        """
        self._client.check_open()
        self._check_between_steps("snapshot")
        trained = [h for h in self._book.models if h.role.trainable]
        if not trained:
            raise OptionError("there is nothing to go back to: no role is trained; call session.actor('tiny') first")
        for handle in trained:
            self.ready(handle)
        self._client.drain()
        names = tuple(handle.name for handle in trained)
        room = self._client.send(m.AskHostRoom(names, unless_kept=True))
        advice = "Let earlier snapshots go with session.forget(...), or place the roles over more nodes."
        if notice := check_room(room, "the snapshot", advice):
            self.notice(notice)
        with uninterrupted():  # what is kept is also known
            kept: tuple[Kept, ...] = self._client.send(m.Snapshot(names))
            name = name or next(f"snapshot {i}" for i in range(1, len(self._marks) + 2) if f"snapshot {i}" not in self._marks)
            known = {k.number: s.name for s in reversed(self._snapshots.values()) for k in s.kept}
            shared = {k.role: known[k.number] for k in kept if k.number in known}
            made = Snapshot(
                name=name, branch=self._branch, steps=int(self._counters.get("steps", -1)) + 1, seed=self.seed, kept=kept,
                shared=shared, roles=tuple(self._book.declared(h) for h in self._book), positions=self._stream_positions(),
                counters=dict(self._counters), nodes={d: self.cluster.node_of(d) for k in kept for d in k.devices},
                order=self._client.last_call,
            )  # fmt: skip
            forget = weakref.finalize(made, self._client.forget, kept)
            forget.atexit = False
            self._forgetters[id(made)] = forget
            self._places[made] = weakref.WeakKeyDictionary({stream: stream.position for stream in self._all_streams})
            self._snapshots[name], self._marks[name] = made, Mark(name, self._branch, made.order)
        return made

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        """The snapshots by name, the oldest first."""
        return MappingProxyType(self._snapshots)

    @checked
    def forget(self, snapshot: Snapshot | str) -> None:
        """Free a snapshot; states that others share stay.

        Raises:
            OptionError: there is no such snapshot.
        """
        found = self.find_snapshot(snapshot)
        if self._snapshots.get(found.name) is found:
            del self._snapshots[found.name]
        self._forgetters.pop(id(found), lambda: None)()
        self._client.send(m.Forget(()))  # whatever is sent takes along what is not needed any more

    @checked
    def find_snapshot(self, snapshot: Snapshot | str) -> Snapshot:
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

    @checked
    def rewind(self, snapshot: Snapshot | str) -> str:
        """Go back to a snapshot, bit for bit; what is trained from here on is a new branch. Returns the branch's name.

        Roles may live elsewhere or in another layout by now: weights and optimizer state are the same bits all the same, but
        what is computed with them agrees within float32 rounding only. What runs is finished first. Functions become those of
        the snapshot (with a notice). Batches stay readable; training on one that later weights wrote raises StaleBatchError.

        Args:
            snapshot: what ``session.snapshot`` returned, or its name.

        Raises:
            OptionError: there is no such snapshot; a role was released, replaced or added since; a step of a run is under way.
            CheckpointError: the snapshot was let go, or is gone with a worker that ended. In both cases nothing was changed.
        """
        found = self.find_snapshot(snapshot)
        number = 1 + sum(b.snapshot == found.name for b in self._branches.values())
        name = next(n for i in range(number, number + len(self._branches) + 1) if (n := f"{found.name}/{i}") not in self._branches)
        self._go_back(found, name)
        return name

    @checked
    def fork(self, snapshot: Snapshot | str, name: Name) -> str:
        """Go back to a snapshot, as :meth:`rewind` does, onto a branch of this name.

        Raises:
            OptionError: there is a branch of this name; otherwise as in :meth:`rewind`.
        """
        if name in self._branches:
            raise OptionError(f"a new branch needs a new name; got {name!r}, and there are {', '.join(map(repr, self._branches))}")
        self._go_back(self.find_snapshot(snapshot), name)
        return name

    def resume(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot on its own branch, which goes on from there; what came after it must be on other branches."""
        self._go_back(snapshot, snapshot.branch)

    @property
    def branch(self) -> str:
        """The branch that is trained now."""
        return self._branch

    def _go_back(self, snapshot: Snapshot, name: str) -> None:
        """Rewind onto a branch, a new one or the one the snapshot was taken on."""
        self._client.check_open()
        self._check_between_steps("rewind")
        self._check_roles(snapshot)
        handles = {h.name: h for h in self._book}
        for kept in snapshot.kept:
            self.ready(handles[kept.role])
        self._client.drain()
        with uninterrupted():  # all of it or nothing
            self._client.send(m.Rewind(snapshot.kept, name))
            self.seed, self._counters = snapshot.seed, dict(snapshot.counters)
            self._positions = dict(snapshot.positions)
            for key in self._streams:
                self._positions.pop(key, 0)
            places: Mapping[RowStream, int] = self._places.get(snapshot, {})
            for stream in self._all_streams:  # those made alike have one fingerprint, and each a place of its own
                before = snapshot.positions.get(stream.fingerprint, 0)  # where this one was made since
                stream.position = places.get(stream, before)
            if name not in self._branches:
                self._branches[name] = Branch(name, snapshot.branch, snapshot.name, snapshot.order)
            self._branch = name
            for role in snapshot.roles:
                if role.function is not None:
                    handle = self._declare(type(handles[role.name]), role)
                    if isinstance(handle, RewardSum):
                        self._take_weights(handle, role.function.load())

    def _take_weights(self, handle: RewardSum, scores: Any) -> None:
        """Give a weighted sum the parts and weights of its function."""
        parts = [self._book.find(column.removeprefix(PART)) for column in scores.columns]
        handle.parts = tuple(part for part in parts if isinstance(part, RewardModel))
        handle.weights = tuple(scores.weights)

    def _check_roles(self, snapshot: Snapshot) -> None:
        """Refuse a snapshot of other roles than there are.

        Raises:
            OptionError: names the role and what is different.
        """
        what = f"the snapshot {snapshot.name!r}"
        handles = {h.name: h for h in self._book}
        for role in snapshot.roles:
            again = EXAMPLES.get(role.kind, "")
            if role.name not in handles:
                raise OptionError(
                    f"{what} has {role.name}, which was released since; nothing was changed. Declare it as it was, e.g. {again}, "
                    "and rewind again"
                )
            handle = handles[role.name]
            difference = _difference(role, self._book.declared(handle))
            summed = role.function is not None and role.function.name == WeightedScores.__name__
            if not difference and summed != isinstance(handle, RewardSum):
                difference = "a weighted sum then, a function now" if summed else "a function then, a weighted sum now"
            if difference:
                raise OptionError(
                    f"{what} has another {role.name}, which was replaced since ({difference}); nothing was changed. Declare it as "
                    "it was, and rewind again"
                )
        there = {role.name for role in snapshot.roles}
        for handle in self._book.models:
            if handle.role.trainable and handle.name not in there:
                raise OptionError(
                    f"{what} has no {handle.name}, which was declared after it; nothing was changed. {handle.name}.release() it "
                    "first, or take snapshots once all roles are declared"
                )

    def _add_stream(self, stream: RowStream) -> None:
        """Put a new stream where a checkpoint had one like it, and keep its place from now on."""
        stream.position = self._positions.pop(stream.fingerprint, 0)
        self._streams[stream.fingerprint] = stream
        self._all_streams.add(stream)

    def _stream_positions(self) -> dict[str, int]:
        return {**self._positions, **{key: stream.position for key, stream in self._streams.items()}}

    # -- history

    @property
    def history(self) -> History:
        """What was trained in this session (and before it, where it was loaded): steps and updates, branches, functions."""
        entries = [(int(row.pop(ORDER)), row) for row in self._rows]
        if not self._client.closed:
            entries += self._by_hand()
        entries.sort(key=itemgetter(0))
        rows = [row for _, row in entries]
        for mark in self._marks.values():
            before = [i for i, (order, row) in enumerate(entries) if order <= mark.order and row["branch"] == mark.branch]
            if before:
                row = rows[before[-1]]
                row["snapshot"] = ", ".join(filter(None, [row.get("snapshot", ""), mark.name]))
        return History(
            rows=tuple(rows), branches=tuple(self._branches.values()), marks=tuple(self._marks.values()), branch=self._branch,
            sources=dict(self._client.sources), orders=tuple(order for order, _ in entries),
        )  # fmt: skip

    def _by_hand(self) -> list[tuple[int, Row]]:
        """Return (call, row) for every update that was no part of a step of ``train``."""
        changes: list[Change] = self._client.send(q.Changes())
        entries = []
        for c in changes:
            if c.call_id <= self._since or c.method == "load_state" or c.state in ("failed", "cancelled"):
                continue
            row = {
                "kind": "update", "branch": c.branch, "parent": self._branches[c.branch].parent, "role": c.role,
                "updates": c.num_updates, "loss_function": c.function, "line": c.line,
            }  # fmt: skip
            entries.append((c.call_id, row))
        return entries

    def record(
        self, row: Mapping[str, Any], algorithm: Any = None, calls: Collection[int] = (), metrics: Sequence[Any] = ()
    ) -> None:
        """Add a step's row to the history, with the version of every function that scored it.

        Args:
            row: the step's numbers.
            algorithm: what ran it.
            calls: the calls that it made.
            metrics: the user's own metrics among the numbers.
        """
        functions = {h.name: h.role.function for h in self._book.functions}
        for function in functions.values():
            if function is not None:
                self._client.sources.setdefault(f"{function.name}@{function.version}", function.source)
        versions = {f"{name}_function": f"{f.name}@{f.version}" for name, f in functions.items() if f}
        versions |= {"metrics": ", ".join(self._known(metric) for metric in metrics)} if metrics else {}
        place = {"kind": "step", "branch": self._branch, "parent": self._branches[self._branch].parent}
        if algorithm is not None:
            place["algorithm"] = repr(algorithm)
        with uninterrupted():
            self._rows.append({ORDER: self._client.last_call, **place, **row, **versions})
        if calls:
            self._client.send(m.InRow(tuple(calls)))

    def _known(self, function: Any) -> str:
        """Return ``name@version`` of a function that runs here and need not travel, and remember its source."""
        try:
            shipped = Shipped.of(function)
        except OptionError:  # it holds what cannot be copied: only its name is known
            return str(getattr(function, "__name__", type(function).__name__))
        name = f"{shipped.name}@{shipped.version}"
        self._client.sources[name] = shipped.source
        return name

    def _history_to_save(self) -> dict[str, Any]:
        """Return the history as a checkpoint keeps it: a branch by how many of the rows were there when it began."""
        history = self.history
        began = {b.name: sum(order <= b.order for order in history.orders) for b in history.branches}
        return {
            "history": [dict(row) for row in history], "branch": self._branch, "sources": dict(history.sources),
            "branches": [[b.name, b.parent, b.snapshot, began[b.name]] for b in history.branches],
        }  # fmt: skip

    def _take_history(self, saved: Mapping[str, Any]) -> None:
        """Take over the history of a checkpoint in place of this session's own; snapshots stay."""
        rows, here = list(saved["history"]), {"kind": "step", "branch": MAIN, "parent": ""}
        self._rows = Rows({**here, **row, ORDER: i - len(rows)} for i, row in enumerate(rows))
        branches = [Branch(name, parent, mark, began - 1 - len(rows)) for name, parent, mark, began in saved.get("branches", ())]
        self._branches |= {branch.name: branch for branch in branches}
        self._marks, self._since, self._branch = {}, self._client.last_call, saved.get("branch", MAIN)
        self._client.sources.update(saved.get("sources", {}))
        self._client.send(m.Rewind((), self._branch))  # what is trained from here on is of that branch


def _difference(before: RoleSpec, now: RoleSpec) -> str:
    """Say in what a role is another one than it was; ``""`` where it is the same, layouts and functions aside."""
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
            return f"{word} {getattr(before, field)} then, {getattr(now, field)} now"
    return ""
