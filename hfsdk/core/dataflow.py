"""The RLHF dataflow as it ran: calls, and the edges between them (columns or weights).

An edge knows who reads what from whom, as it was ordered when the call ran::

    actor.generate -> critic.compute_values     response: 8 rows

                              read by rank 0    rank 1
      written by rank 0               4 rows    .           the part that rank 0 put into its node's object store
                 rank 1               1 row     3 rows

Bytes are those of values; the offsets of variable-length columns are not counted, and a text counts as the mean of its column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hfsdk.core.checks import checked
from hfsdk.core.errors import OptionError
from hfsdk.core.field_texts import documented
from hfsdk.core.layout import Mesh
from hfsdk.core.methods import PUT
from hfsdk.core.text import printable

if TYPE_CHECKING:
    import pandas as pd


MOST_RANKS = 64
"""Number of ranks above which the view brings together ranks that read the same rows, and, where even those are more, nodes."""


@documented
@dataclass(frozen=True)
class Dataflow:
    """Calls and what flows between them."""

    calls: tuple[Call, ...]
    """The nodes, in order of submission."""
    edges: tuple[Edge, ...] = ()
    """The columns that go from one call to another."""
    inputs: tuple[Call, ...] = ()
    """The sources of columns that these calls did not write: the user's data, calls of earlier steps."""
    runs: Mapping[int, CallRun] = field(default_factory=dict, repr=False)
    """Id of a call -> how it ran."""
    nodes: tuple[int, ...] = (0,)
    """The node of every device."""
    controller_bytes: int | None = None
    """Column bytes that passed through the controller in this session so far."""
    title: str = "dataflow"
    """The title above the picture."""

    @classmethod
    def of(
        cls, flows: tuple[CallFlow, ...], step: int, *, nodes: tuple[int, ...] = (0,), controller_bytes: int | None = None
    ) -> Dataflow:
        """Return the dataflow of a step; calls of other steps among ``flows`` are its inputs."""
        by_id = {flow.call.id: flow for flow in flows}
        of_step = [flow for flow in flows if flow.call.step == step and flow.call.method != PUT.name]
        edges = [edge for flow in of_step for edge in _edges(flow, by_id)]
        used = {edge.source for edge in edges} - {flow.call.id for flow in of_step}
        return cls(
            tuple(flow.call for flow in of_step), tuple(edges), tuple(by_id[number].call for number in sorted(used)),
            {number: flow.run for number, flow in by_id.items()}, nodes, controller_bytes, f"dataflow of step {step}",
        )  # fmt: skip

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    @cached_property
    def _by_id(self) -> dict[int, Call]:
        return {call.id: call for call in (*self.inputs, *self.calls)}

    @checked
    def edge(self, source: int, target: int) -> Edge:
        """Return the edge between two calls, given their ids.

        Raises:
            OptionError: there is none.
        """
        for edge in self.edges:
            if (edge.source, edge.target) == (source, target):
                return edge
        there = ", ".join(f"{e.source} -> {e.target}" for e in self.edges) or "none"
        raise OptionError(f"nothing flows from call {source!r} to call {target!r}; edges: {there}")

    @checked
    def node_of(self, call: int, rank: int | None) -> int:
        """Return the node of a call's rank; ``None`` is a process on the user's node, which is the first."""
        devices = self.runs[call].devices if call in self.runs else ()
        if rank is None or not 0 <= rank < len(devices) or devices[rank] >= len(self.nodes):
            return 0
        return self.nodes[devices[rank]]

    @checked
    def network_bytes(self, edge: Edge) -> int | None:
        """Return the bytes read by ranks on another node than the object's.

        An object comes whole, with every column its call wrote, and once to each node; the rest is mapped there. ``None`` where
        nothing is planned yet.
        """
        if edge.transfer is None:
            return None
        holder_nodes = [self.node_of(edge.source, holder.rank) for holder in edge.transfer.holders]
        total = 0
        for share in edge.transfer.shares:
            for rank in share.ranks:
                here = self.node_of(edge.target, rank)
                total += sum(piece.num_bytes for piece in share.pieces if holder_nodes[piece.holder] != here)
        return total

    # ---- tables

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per call: when it ran, where, what it read and wrote, in bytes."""
        import pandas as pd

        rows = []
        for call in self.calls:
            run = self.runs.get(call.id, CallRun())
            incoming = [edge for edge in self.edges if edge.target == call.id]
            rows.append({
                "call": call.id, "role": call.role, "method": call.method, "phase": call.phase, "step": call.step,
                "state": run.state, "start_ns": run.start_ns if run.start_ns or run.predicted else None,
                "seconds": run.duration_s, "predicted": run.predicted,
                "rows": call.num_rows, "reads": ", ".join(call.reads), "writes": ", ".join(call.writes),
                "bytes_in": _total([e.num_bytes for e in incoming]), "bytes_read": _total([e.bytes_read for e in incoming]),
                "bytes_written": sum(run.column_bytes.values()) if run.state == "done" else None,
                "protocol": call.protocol, "pool": run.pool, "devices": len(run.devices), "line": call.line,
                "function": call.function,
            })  # fmt: skip
        return pd.DataFrame(rows)

    def edges_to_pandas(self) -> pd.DataFrame:
        """Return one row per edge: its columns, and bytes: each row once, as read, and as read across nodes."""
        import pandas as pd

        rows = [
            {
                "source": edge.source, "target": edge.target, "from": str(self._by_id[edge.source]),
                "to": str(self._by_id[edge.target]), "kind": edge.kind, "columns": ", ".join(edge.columns),
                "num_bytes": edge.num_bytes, "bytes_read": edge.bytes_read, "network_bytes": self.network_bytes(edge),
                "from_protocol": self._by_id[edge.source].protocol, "to_protocol": self._by_id[edge.target].protocol,
            }
            for edge in self.edges
        ]  # fmt: skip
        return pd.DataFrame(rows)

    @checked
    def transfer_to_pandas(self, source: int, target: int) -> pd.DataFrame:
        """Return one row per pair of ranks between which something flowed from one call to another, by writer, then reader.

        Columns: ``from_rank``, ``to_rank``, their devices, ``rows``, ``num_bytes``, ``same_node``, ``which`` (the rows' numbers).

        Raises:
            OptionError: there is no such edge.
        """
        import pandas as pd

        edge = self.edge(source, target)
        rows: list[dict[str, Any]] = []
        order: list[tuple[int, int]] = []
        for share in edge.transfer.shares if edge.transfer else ():
            for rank in share.ranks:
                for piece in share.pieces:
                    assert edge.transfer is not None
                    # A reader without a rank (a process on the user's node) cannot be compared with a number, so it sorts as -1.
                    order.append((piece.holder, -1 if rank is None else rank))
                    holder = edge.transfer.holders[piece.holder].rank
                    rows.append({
                        "from_rank": holder, "to_rank": rank, "from_device": self._device(source, holder),
                        "to_device": self._device(target, rank), "rows": piece.rows, "num_bytes": piece.num_bytes,
                        "same_node": self.node_of(source, holder) == self.node_of(target, rank), "which": piece.which,
                    })  # fmt: skip
        return pd.DataFrame([row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])])

    def _device(self, call: int, rank: int | None) -> int | None:
        devices = self.runs[call].devices if call in self.runs else ()
        return devices[rank] if rank is not None and rank < len(devices) else None

    # ---- to look at

    def view(self) -> dict[str, Any]:
        """Return plain data for a picture: calls, and edges with their transfers."""
        calls = []
        starts = [run.start_ns for call in self.calls if (run := self.runs.get(call.id)) and (run.start_ns or run.predicted)]
        first = min(starts, default=0)
        for call in (*self.inputs, *self.calls):
            run = self.runs.get(call.id, CallRun())
            begun = bool(run.start_ns) or run.predicted
            calls.append({
                "id": call.id, "role": call.role, "method": call.method, "name": str(call), "phase": call.phase,
                "input": call in self.inputs, "step": call.step, "state": run.state, "predicted": run.predicted,
                "start_s": (run.start_ns - first) / 1e9 if begun and call not in self.inputs else None,
                "seconds": run.duration_s, "rows": call.num_rows, "writes": dict(run.column_bytes) or dict.fromkeys(call.writes),
                "protocol": call.protocol, "pool": run.pool, "ranks": len(run.devices),
                "layout": str(run.mesh.layout) if run.mesh else "", "line": call.line, "function": call.function,
                "fetched": sum(run.fetched.values()) if run.fetched else None, "resharded": run.resharded,
            })  # fmt: skip
        return {
            "title": self.title, "calls": calls, "edges": [self._edge_view(edge) for edge in self.edges],
            "nodes": len(set(self.nodes)), "controller_bytes": self.controller_bytes,
        }  # fmt: skip

    def _edge_view(self, edge: Edge) -> dict[str, Any]:
        moved = edge.transfer
        data: dict[str, Any] = {
            "source": edge.source, "target": edge.target, "kind": edge.kind, "columns": list(edge.columns),
            "column_bytes": list(moved.column_bytes) if moved else [None] * len(edge.columns), "num_bytes": edge.num_bytes,
            "bytes_read": edge.bytes_read, "network_bytes": self.network_bytes(edge), "by": "", "writers": [], "readers": [],
            "cells": [],
        }  # fmt: skip
        return data if moved is None else {**data, **_Matrix(self, edge, moved).view()}

    def to_text(self) -> str:
        """Return one line per call: its number, what it reads and writes, and from whom."""
        lines = []
        for call in self.calls:
            incoming = [edge for edge in self.edges if edge.target == call.id]
            sources = ", ".join(f"{'+'.join(e.columns)} <- #{e.source}{_bytes(e.num_bytes)}" for e in incoming)
            lines.append(f"#{call.id} {call} [{call.phase}] writes {', '.join(call.writes) or '-'}  ({sources or 'no input'})")
        return printable("\n".join(lines))

    def __repr__(self) -> str:
        return f"Dataflow({len(self.calls)} calls, {len(self.edges)} edges)\n{self.to_text()}"


class _Matrix:
    """The cells of an edge, rank by rank where they are few, else by ranks that read the same, else by node."""

    def __init__(self, flow: Dataflow, edge: Edge, moved: Transfer) -> None:
        self._flow, self._edge, self._moved = flow, edge, moved
        self._holders = [flow.node_of(edge.source, holder.rank) for holder in moved.holders]
        self._cells: dict[tuple[int, int], list[Any]] = {}

    def view(self) -> dict[str, Any]:
        """Return ``by``, ``writers``, ``readers`` and ``cells`` [writer, reader, rows, bytes, bytes across nodes, which]."""
        # Thousands of ranks can be neither drawn nor read: those that read the same are put together, then whole nodes.
        moved, ranks = self._moved, sum(len(share.ranks) for share in self._moved.shares)
        by_node = max(len(moved.shares), len(moved.holders)) > MOST_RANKS
        by = "node" if by_node else "rank" if ranks <= MOST_RANKS else "group"
        writers, readers = self._by_node() if by_node else self._by_rank(grouped=by == "group")
        cells = [[*at, *cell] for at, cell in sorted(self._cells.items())]
        return {"by": by, "writers": writers, "readers": readers, "cells": cells}

    def _add(self, writer: int, reader: int, piece: ObjectRead, far: bool, which: str) -> None:
        cell = self._cells.setdefault((writer, reader), [0, 0, 0, which])
        cell[1] += piece.num_bytes
        cell[2] += piece.num_bytes * far

    def _by_rank(self, *, grouped: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        flow, edge = self._flow, self._edge
        holders = self._moved.holders
        writers = [
            _entry(_who([h.rank]), 1, [node], h.rows, h.num_bytes, _at(flow, edge.source, h.rank))
            for h, node in zip(holders, self._holders, strict=True)
        ]
        members = [(share, [rank]) for share in self._moved.shares for rank in share.ranks]
        if grouped:
            members = [(share, list(share.ranks)) for share in self._moved.shares]
        members.sort(key=lambda m: -1 if m[1][0] is None else m[1][0])
        readers = []
        for number, (share, ranks) in enumerate(members):
            nodes = [flow.node_of(edge.target, rank) for rank in ranks]
            for piece in share.pieces:
                for node in nodes:
                    self._add(piece.holder, number, piece, node != self._holders[piece.holder], piece.which)
                self._cells[piece.holder, number][0] += piece.rows
            # Every rank of a group reads the pieces for itself, so bytes count once per rank, rows once.
            total = len(ranks) * sum(p.num_bytes for p in share.pieces)
            at = _at(flow, edge.target, ranks[0]) if len(ranks) == 1 else ""
            readers.append(_entry(_who(ranks), len(ranks), sorted(set(nodes)), sum(p.rows for p in share.pieces), total, at))
        return writers, readers

    def _by_node(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        flow, edge = self._flow, self._edge
        sources: dict[int, dict[str, Any]] = {}
        targets: dict[int, dict[str, Any]] = {}

        def entry(entries: dict[int, dict[str, Any]], node: int) -> dict[str, Any]:
            return entries.setdefault(node, _entry(f"node {node}", 0, [node], 0, 0, ""))

        for holder, node in zip(self._moved.holders, self._holders, strict=True):
            source = entry(sources, node)
            source["count"], source["rows"], source["num_bytes"] = (
                source["count"] + 1, source["rows"] + holder.rows, source["num_bytes"] + holder.num_bytes,
            )  # fmt: skip
        order = {node: number for number, node in enumerate(sorted(sources))}
        spread = [(share, flow.node_of(edge.target, rank)) for share in self._moved.shares for rank in share.ranks]
        columns = {node: number for number, node in enumerate(sorted({node for _, node in spread}))}
        for share, node in spread:
            target = entry(targets, node)
            target["count"] += 1
            for piece in share.pieces:
                at = order[self._holders[piece.holder]], columns[node]
                self._add(*at, piece, node != self._holders[piece.holder], "")
                self._cells[at][0] += piece.rows
                target["rows"], target["num_bytes"] = target["rows"] + piece.rows, target["num_bytes"] + piece.num_bytes
        return [sources[node] for node in sorted(sources)], [targets[node] for node in sorted(targets)]


def _entry(label: str, count: int, nodes: list[int], rows: int, num_bytes: int, at: str) -> dict[str, Any]:
    """Return a row or a column of the matrix: one rank, or some together."""
    return {"label": label, "count": count, "nodes": nodes, "rows": rows, "num_bytes": num_bytes, "at": at}


def _edges(flow: CallFlow, by_id: Mapping[int, CallFlow]) -> list[Edge]:
    """Return the edges into a call: as planned when it ran, or by name only while it waits."""
    call, planned = flow.call, {(t.source, t.kind): t for t in flow.reads}
    edges = []
    for source in call.inputs:
        columns = tuple(name for name, writer in zip(call.reads, call.read_from, strict=True) if writer == source)
        moved = planned.get((source, "columns"))
        if source in by_id:
            edges.append(Edge(source, call.id, columns, sum(moved.column_bytes) if moved else None, "columns", moved))
    for moved in flow.reads:
        if moved.kind == "weights" and moved.source in by_id:
            edges.append(Edge(moved.source, call.id, moved.columns, sum(moved.column_bytes), "weights", moved))
    return edges


def _at(flow: Dataflow, call: int, rank: int | None) -> str:
    """Say where a rank stands: its device, node, and coordinates."""
    run = flow.runs.get(call, CallRun())
    if rank is None or rank >= len(run.devices):
        return "a process on the user's node"
    words = [f"device {run.devices[rank]}", f"node {flow.node_of(call, rank)}"]
    if run.mesh is not None:
        words.append(str(run.mesh.coordinates(rank)))
    return ", ".join(words)


def _who(ranks: list[int | None]) -> str:
    """Name one rank, or several: ``"rank 3"``, ``"ranks 0-7"``."""
    numbers = sorted(rank for rank in ranks if rank is not None)
    if not numbers:
        return "process"
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    step = numbers[1] - numbers[0]
    if numbers == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"ranks {numbers[0]}-{numbers[-1]}" + (f" by {step}" if step > 1 else "")
    return "ranks " + ", ".join(map(str, numbers[:4])) + (" …" if len(numbers) > 4 else "")


def _total(values: list[int | None]) -> int | None:
    counted = [value for value in values if value is not None]
    return sum(counted) if len(counted) == len(values) else None


def _bytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f", {num_bytes} bytes"


# -- calls, how they ran, and the columns that flow between them

PHASES = ("generation", "preparation", "learning")
"""HybridFlow's three stages of an RLHF iteration (section 2.1)."""


@documented
@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a role's method: a node of the dataflow."""

    id: int
    """Number of the call in its session."""
    role: str
    """The role whose method it is."""
    method: str
    """The method's name, e.g. ``"generate"``."""
    phase: str = ""
    """``"generation"``, ``"preparation"`` or ``"learning"``."""
    reads: tuple[str, ...] = ()
    """Columns that it reads."""
    read_from: tuple[int, ...] = ()
    """Id of the call that wrote each of ``reads``, perhaps under another name (``batch.alias``)."""
    writes: tuple[str, ...] = ()
    """Columns that it writes."""
    inputs: tuple[int, ...] = ()
    """Ids of the calls whose columns this one reads."""
    protocol: str = ""
    """How rows go to the ranks and back, e.g. ``"THREE_D"``."""
    num_rows: int = 0
    """Rows of the batch."""
    step: int = 0
    """The step that it belongs to."""
    line: str = ""
    """The user's line that started it, e.g. ``"cell 4, line 2"``."""
    function: str = ""
    """Name and version of the user's function it runs, e.g. ``"positive@3f2a91c0"``."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


@dataclass(frozen=True, kw_only=True)
class CallRun:
    """How a call ran, or where it stands."""

    state: str = "pending"
    start_ns: int = 0
    duration_s: float | None = None
    """Seconds; ``None`` while it runs."""
    predicted: bool = False
    pool: str = ""
    """Empty for a CPU task and the user's own data."""
    devices: tuple[int, ...] = ()
    """The device of every rank."""
    mesh: Mesh | None = None
    column_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every column it wrote."""
    resharded: int | None = None
    """Bytes of weights that its ranks received of each other before it; ``None`` where nothing was resharded or measured."""
    fetched: Mapping[int, int] = field(default_factory=dict)
    """Rank -> bytes that it mapped, as it measured them itself: values and offsets of numeric columns."""


@dataclass(frozen=True)
class Holder:
    """One object that a call wrote, or one part of the weights."""

    rank: int | None
    """``None``: a CPU task, or the user's process."""
    rows: int
    num_bytes: int


@dataclass(frozen=True)
class ObjectRead:
    """The part of one object that a rank reads."""

    holder: int
    """Number of the object among the transfer's ``holders``."""
    rows: int
    num_bytes: int
    which: str
    """The rows' numbers in the batch of the call that wrote them, e.g. ``"0-3, 7"``; long lists end in ``"…"``."""


@dataclass(frozen=True)
class Share:
    """Ranks that read the same, and the pieces that each of them reads."""

    ranks: tuple[int | None, ...]
    pieces: tuple[ObjectRead, ...]


@dataclass(frozen=True)
class Transfer:
    """The columns, or weights, that one call reads of another."""

    source: int
    """Id of the call that wrote it."""
    columns: tuple[str, ...]
    column_bytes: tuple[int, ...]
    """Bytes of every column, each row once, however many ranks read it."""
    holders: tuple[Holder, ...]
    shares: tuple[Share, ...]
    kind: str = "columns"
    """``"columns"`` or ``"weights"``."""


@dataclass(frozen=True)
class CallFlow:
    """A call, how it ran, and what it read."""

    call: Call
    run: CallRun
    reads: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Edge:
    """Columns, or weights, that flow from one call to another."""

    source: int
    target: int
    columns: tuple[str, ...]
    num_bytes: int | None = None
    """Bytes, each row once; ``None`` until the call has been planned."""
    kind: str = "columns"
    """``"columns"``, or ``"weights"`` (from a trained role to its shadow)."""
    transfer: Transfer | None = field(default=None, repr=False)

    @property
    def bytes_read(self) -> int | None:
        """Bytes summed over everyone who reads them: ranks that hold one model together read the same rows."""
        if self.transfer is None:
            return None
        return sum(p.num_bytes * len(share.ranks) for share in self.transfer.shares for p in share.pieces)
