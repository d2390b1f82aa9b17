"""``HistoryLog``: the training of a session, step by step and branch by branch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any

from hfsdk.algorithms.step import as_named_now
from hfsdk.core.errors import OptionError
from hfsdk.core.functions import Shipped
from hfsdk.core.history import Branch, History, Mark
from hfsdk.core.methods import LOAD_STATE
from hfsdk.core.rows import Row, Rows
from hfsdk.core.snapshot import Snapshot
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.queries import Change
from hfsdk.engine.controller.records import MAIN
from hfsdk.session.client import ControllerClient, uninterrupted
from hfsdk.session.role_book import RoleBook

ORDER = "order"
"""Key of a row that is not for the reader: the number of the last call before it."""


class HistoryLog:
    """The rows of the history but for updates by hand, its branches, and the snapshots' marks on them.

    Attributes:
        branch: the branch that is trained now.
        branches: all of them, by name.
        marks: snapshots by name, each where it was taken.
        rows: the steps', in the order in which they were recorded.
        since: the last call before the history was loaded: what came before is in it, or gone with the weights it made.
    """

    def __init__(self, client: ControllerClient, book: RoleBook) -> None:
        self.branch = MAIN
        self.branches: dict[str, Branch] = {MAIN: Branch(MAIN)}
        self.marks: dict[str, Mark] = {}
        self._client, self._book = client, book
        self.rows = Rows()
        self.since = 0

    def history(self) -> History:
        """Return the history: steps and updates, branches, functions."""
        entries = [(int(row.pop(ORDER)), row) for row in self.rows]
        entries += self._by_hand()
        entries.sort(key=itemgetter(0))
        rows = [row for _, row in entries]
        for mark in self.marks.values():
            before = [i for i, (order, row) in enumerate(entries) if order <= mark.order and row["branch"] == mark.branch]
            if before:
                row = rows[before[-1]]
                row["snapshot"] = ", ".join(filter(None, [row.get("snapshot", ""), mark.name]))
        return History(
            rows=tuple(rows), branches=tuple(self.branches.values()), marks=tuple(self.marks.values()), branch=self.branch,
            sources=dict(self._client.sources), orders=tuple(order for order, _ in entries),
        )  # fmt: skip

    def _by_hand(self) -> list[tuple[int, Row]]:
        """Return (call, row) for every update that was no part of a step of ``train``."""
        changes: list[Change] = self._client.send(q.Changes())
        of_run = self._client.send(q.CurrentStep()) if changes and self._client.run_goes_on() else -1
        entries = []
        for c in changes:
            if c.call_id <= self.since or c.method == LOAD_STATE.name or c.state in ("failed", "cancelled"):
                continue
            if c.step == of_run:  # its row comes when the step has ended
                continue
            row = {
                "kind": "update", "branch": c.branch, "parent": self.branches[c.branch].parent, "role": c.role,
                "updates": c.num_updates, "loss_function": c.function, "line": c.line,
            }  # fmt: skip
            entries.append((c.call_id, row))
        return entries

    def record(
        self, row: Mapping[str, Any], algorithm: Any = None, calls: Collection[int] = (), metrics: Sequence[Any] = ()
    ) -> None:
        """Carry out ``session.record``; its text says what the arguments are."""
        functions = {h.name: h.role.function for h in self._book.functions}
        for function in functions.values():
            if function is not None:
                self._client.sources.setdefault(f"{function.name}@{function.version}", function.source)
        versions = {f"{name}_function": f"{f.name}@{f.version}" for name, f in functions.items() if f}
        versions |= {"metrics": ", ".join(self._version_of(metric) for metric in metrics)} if metrics else {}
        place = {"kind": "step", "branch": self.branch, "parent": self.branches[self.branch].parent}
        if algorithm is not None:
            place["algorithm"] = repr(algorithm)
        with uninterrupted():
            self.rows.append({ORDER: self._client.last_call, **place, **row, **versions})
        if calls:
            self._client.send(m.MarkRecorded(tuple(calls)))

    def amend(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to the last step's row."""
        self.rows.amend(numbers)

    def _version_of(self, function: Any) -> str:
        """Return ``name@version`` of a function that runs here and need not travel, and remember its source."""
        try:
            shipped = Shipped.of(function)
        except OptionError:  # it holds what cannot be copied: only its name is known
            return str(getattr(function, "__name__", type(function).__name__))
        name = f"{shipped.name}@{shipped.version}"
        self._client.sources[name] = shipped.source
        return name

    def go_to(self, name: str, snapshot: Snapshot) -> None:
        """Go on with a branch from a snapshot: with a new one, or with the one the snapshot was taken on."""
        if name not in self.branches:
            self.branches[name] = Branch(name, snapshot.branch, snapshot.name, snapshot.order)
        self.branch = name

    def to_save(self) -> dict[str, Any]:
        """Return the history as a checkpoint keeps it: a branch by how many of the rows were there when it began."""
        history = self.history()
        began = {b.name: sum(order <= b.order for order in history.orders) for b in history.branches}
        return {
            "history": [dict(row) for row in history], "branch": self.branch, "sources": dict(history.sources),
            "branches": [[b.name, b.parent, b.snapshot, began[b.name]] for b in history.branches],
        }  # fmt: skip

    def take(self, saved: Mapping[str, Any]) -> None:
        """Take over the history of a checkpoint in place of this session's own; snapshots stay."""
        rows, here = list(saved["history"]), {"kind": "step", "branch": MAIN, "parent": ""}
        self.rows = Rows({**here, **as_named_now(row), ORDER: i - len(rows)} for i, row in enumerate(rows))
        branches = [Branch(name, parent, mark, began - 1 - len(rows)) for name, parent, mark, began in saved.get("branches", ())]
        self.branches |= {branch.name: branch for branch in branches}
        self.marks, self.since, self.branch = {}, self._client.last_call, saved.get("branch", MAIN)
        self._client.sources.update(saved.get("sources", {}))
        self._client.send(m.Rewind((), self.branch))  # what is trained from here on is of that branch
