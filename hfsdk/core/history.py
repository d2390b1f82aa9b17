"""``History``: what was trained in a session, in the order it happened, on which branch and with which functions.

A session starts on the branch ``main``; every rewind starts another one::

    main          0 --- 1 --- 2 --- 3          steps of session.train
                        |
    'before'            '--- 2 --- 3           rewound to the snapshot 'before', taken after step 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfsdk.core.checks import checked, shown
from hfsdk.core.errors import OptionError
from hfsdk.core.field_texts import documented
from hfsdk.core.rows import Row

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Branch:
    """One line of training."""

    name: str
    parent: str = ""
    """The branch it left; ``""`` for the first one."""
    snapshot: str = ""
    """The snapshot where it left it."""
    order: int = -1
    """Number of the last call of its parent that it shares."""


@dataclass(frozen=True)
class Mark:
    """A snapshot in the history."""

    name: str
    branch: str
    order: int


@documented
@dataclass(frozen=True, eq=False)
class History:
    """One row per step of ``session.train``, and per update that was called by hand; see the module's text.

    Columns: kind (``"step"`` or ``"update"``), branch, parent, step, algorithm, score_mean and kl_mean (and whatever else the
    algorithm counts), ``<role>_function`` (``name@version``; :attr:`sources` has the text), role, updates and line of an update by
    hand, and snapshot: the names of those taken after it.
    """

    rows: tuple[Row, ...]
    """In order of time."""
    branches: tuple[Branch, ...]
    """In the order in which they began."""
    marks: tuple[Mark, ...] = ()
    """Snapshots, each where it was taken."""
    branch: str = "main"
    """The branch of now."""
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    """``name@version`` of a function -> its source text."""
    orders: tuple[int, ...] = field(default=(), repr=False)
    """Of each row the number of its last call."""

    def __post_init__(self) -> None:
        """Refuse branches that come from each other.

        Raises:
            OptionError: names one of them.
        """
        known, fine = {b.name: b.parent for b in self.branches}, {""}
        for name in known:
            line: list[str] = []
            while name in known and name not in fine:
                if name in line:
                    raise OptionError(f"branches come from one another: {' from '.join(map(repr, [*line, name]))}")
                line.append(name)
                name = known[name]
            fine.update(line)

    @checked
    def to_pandas(self, branch: str | None = None) -> pd.DataFrame:
        """Return the rows as a DataFrame; of one branch, those that its weights come from, older branches included.

        Raises:
            OptionError: there is no such branch.
        """
        import pandas as pd

        return pd.DataFrame(list(self.rows) if branch is None else self.path(branch))

    @checked
    def path(self, branch: str | None = None) -> list[Row]:
        """Return the rows that a branch's weights come from, the oldest first; by default those of the present branch.

        Raises:
            OptionError: there is no such branch.
        """
        known = {b.name: b for b in self.branches}
        name, before, rows = branch or self.branch, float("inf"), list[tuple[int, Row]]()
        if name not in known:
            raise OptionError(f"there is no branch {shown(name)}; the session has {', '.join(map(repr, known))}")
        while name:
            rows += [(i, row) for i, (row, order) in enumerate(self._ordered()) if row.get("branch") == name and order <= before]
            name, before = known[name].parent, min(before, known[name].order)
        return [row for _, row in sorted(rows, key=lambda pair: pair[0])]

    def _ordered(self) -> Iterator[tuple[Row, int]]:
        return zip(self.rows, self.orders or range(len(self.rows)), strict=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, column: str) -> pd.Series[Any]:
        """``history["score_mean"]``: one column, as of :meth:`to_pandas`.

        Raises:
            OptionError: there is no such column.
        """
        frame = self.to_pandas()
        if not isinstance(column, str) or column not in frame:
            raise OptionError(f"the history has no column {shown(column)}; it has {', '.join(map(str, frame)) or 'no rows yet'}")
        return frame[column]

    def tree(self) -> list[dict[str, Any]]:
        """Return the branches as plain data: name, parent, snapshot, steps, updates, score of the last step, current.

        Branches on which nothing has happened are left out, but for the present one and those that others come from.
        """
        parents = {b.parent for b in self.branches}
        branches = []
        for b in self.branches:
            mine = [row for row in self.rows if row.get("branch") == b.name]
            marks = [mark.name for mark in self.marks if mark.branch == b.name]
            if not (mine or marks or b.name in parents or b.name == self.branch):
                continue
            steps = [row for row in mine if row.get("kind") == "step"]
            scores = [row["score_mean"] for row in steps if row.get("score_mean") is not None]
            branches.append({
                "name": b.name, "parent": b.parent, "snapshot": b.snapshot, "steps": [row.get("step") for row in steps],
                "updates": len(mine) - len(steps), "score": scores[-1] if scores else None, "snapshots": marks,
                "current": b.name == self.branch, "depth": self._depth(b),
            })  # fmt: skip
        return branches

    def _depth(self, branch: Branch) -> int:
        known, depth = {b.name: b for b in self.branches}, 0
        while branch.parent:
            branch, depth = known[branch.parent], depth + 1
        return depth

    def view(self) -> dict[str, Any]:
        """Return plain data for display."""
        return {"tree": self.tree(), "rows": [dict(row) for row in self.rows], "branch": self.branch}

    def __repr__(self) -> str:
        lines = [f"History({len(self.rows)} row{'s' * (len(self.rows) != 1)}, now on branch {self.branch!r})"]
        for b in self.tree():
            came = f" from {b['parent']!r} at {b['snapshot']!r}" if b["parent"] else ""
            did = [f"{len(b['steps'])} step{'s' * (len(b['steps']) != 1)}"]
            did += [f"{b['updates']} update{'s' * (b['updates'] != 1)} by hand"] if b["updates"] else []
            score = f", score {b['score']:.3f}" if b["score"] is not None else ""
            marks = f"; snapshots {', '.join(map(repr, b['snapshots']))}" if b["snapshots"] else ""
            lines.append(f"{'*' if b['current'] else ' '} {'  ' * b['depth']}{b['name']}{came}: {', '.join(did)}{score}{marks}")
        return "\n".join(lines)
