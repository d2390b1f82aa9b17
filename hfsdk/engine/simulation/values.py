"""Columns of a simulated call, with lengths and bytes and without values; and stand-ins for numbers that nobody has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, overload

import numpy as np

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.columns import dtype_of, is_per_token, writes_per_token
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import ColumnError, SimulatedValueError
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Order, Part, Pick, Stored
from hfsdk.core.table import Array, Column, RowLengths, Table
from hfsdk.core.trace import Span


@dataclass(frozen=True, eq=False)
class SimulatedPart:
    """The handle of one stored object: which call's end made it ready, and the shape of its columns."""

    writer: str
    line: Timeline | None
    """The call that wrote it; ``None`` for the user's own data, which is ready at the start of time."""
    lengths: Mapping[str, Array | None]
    """Column -> length of every row here, ``None`` for columns with one value per sample."""
    table: Table | None = None
    """The user's own data; ``None`` for simulated columns."""


class SimulatedRow(dict[str, Any]):
    """The report of a simulated call. Looking for a number that needs values raises ``SimulatedValueError``."""

    def __missing__(self, name: str) -> NoReturn:
        raise SimulatedValueError(
            f"a simulated run has no {name!r}, only shapes and times: {', '.join(self) or 'nothing'}. "
            "Run the same cells on a real session to see it."
        )


class SimulatedValue(np.lib.mixins.NDArrayOperatorsMixin):
    """A stand-in for a number that no simulated run has: printing it is fine, using it raises ``SimulatedValueError``."""

    __hash__ = object.__hash__

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<no value: {self.name} was simulated>"

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise SimulatedValueError(
            f"{self.name} has no value: the run is simulated and has shapes and times only. "
            "Run the same cells on a real session to see it."
        )

    __float__ = __int__ = __index__ = __bool__ = __len__ = __iter__ = __getitem__ = __array__ = __array_ufunc__ = _refuse


def _arrange(pick: Pick, pieces: list[Array]) -> Array:
    joined = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    return joined if pick.order is None else joined[pick.order]


def lengths_of(order: Order) -> dict[str, Array]:
    """Return the length of every row of each variable-length column an order reads."""
    by_column: dict[str, Array] = {}
    for pick in order.picks:
        for name, stored in pick.columns.items():
            pieces = []
            for handle, rows in zip(pick.handles, pick.local_rows, strict=True):
                lengths = handle.lengths[stored]
                if lengths is not None:
                    pieces.append(lengths[rows])
            if pieces:
                by_column[name] = _arrange(pick, pieces)
    return by_column


def values_of(order: Order, name: str) -> Array | None:
    """Return a scalar column of the user's own data as an order reads it, ``None`` where there is none."""
    for pick in order.picks:
        stored = pick.columns.get(name)
        if stored is not None and pick.handles and all(h.table is not None for h in pick.handles):
            pieces = zip(pick.handles, pick.local_rows, strict=True)
            return _arrange(pick, [np.asarray(h.table[stored])[rows] for h, rows in pieces])
    return None


def response_lengths(lengths: Mapping[str, Array]) -> Array | None:
    """Return the response lengths: of ``response`` itself, else of the first per-token column."""
    if "response" in lengths:
        return lengths["response"]
    return next((counts for name, counts in lengths.items() if is_per_token(name)), None)


def store(call: Call, gathered: Sequence[tuple[int | None, Order, Array | None]], line: Timeline) -> Stored | None:
    """Describe the columns that a call writes: one part per rank that is gathered."""
    if not call.writes:
        return None
    name = str(call)
    dtypes = {column: np.dtype(dtype_of(column)) for column in call.writes}
    whole: dict[str, Array] = {}
    parts = []
    for rank, order, responses in gathered:
        lengths: dict[str, Array | None] = {}
        num_bytes = 0
        for column in call.writes:
            ragged = responses is not None and writes_per_token(call.method, column)
            lengths[column] = responses if ragged else None
            if ragged:
                # Parts come by rank and not in row order: each writes its lengths at its own rows.
                whole.setdefault(column, np.zeros(call.num_rows, dtype=np.int64))[order.rows] = responses
            count = int(responses.sum()) if ragged and responses is not None else len(order.rows)
            num_bytes += count * dtypes[column].itemsize
        parts.append(Part(order.rows, SimulatedPart(name, line, lengths), num_bytes, rank))
    columns = {}
    for column, dtype in dtypes.items():
        counts = whole.get(column)
        count = call.num_rows if counts is None else int(counts.sum())
        columns[column] = ColumnInfo("scalar" if counts is None else "ragged", str(dtype), count * dtype.itemsize, counts)
    return Stored(name, call.num_rows, tuple(parts), columns)


def real_column(handle: SimulatedPart, name: str) -> Column:
    """Return a column of the user's own data.

    Raises:
        SimulatedValueError: it was simulated.
    """
    if handle.table is not None:
        return handle.table[name]
    if name not in handle.lengths:
        raise ColumnError(f"{handle.writer} wrote no column {name!r}; it wrote {', '.join(handle.lengths)}")
    raise SimulatedValueError(
        f"column {name!r} has no values: {handle.writer} was simulated and wrote shapes only. "
        "Its lengths and bytes are readable: batch.column_states(). To see values, run the same cells on a real session."
    )


# -- timelines of calls, and their spans, made at the first look

Phases = Mapping[str, float]
"""Span name -> seconds, in order."""
Attributes = Mapping[str, Mapping[str, int]]
"""Span name -> its attributes."""

PASSES = ("forward", "backward")
"""Phases that need a role's working memory."""


@dataclass(frozen=True, eq=False)
class PredictedBytes:
    """Bytes on a device after a call, as the memory model predicts them."""

    parts: Mapping[str, int]
    """Attribute of a call's span on the device -> bytes, e.g. ``weights_bytes``."""
    gauge: str
    """The gauge that a real worker reads its memory as: ``rss_bytes`` on CPU, ``allocated_bytes`` on accelerators."""
    resident: int
    """Bytes of all that stays, the process included."""
    working: int
    """Further bytes while the call's passes run."""

    def of_phase(self, name: str) -> dict[str, int]:
        """Return the attribute of a phase's span."""
        return {self.gauge: self.resident + (self.working if name in PASSES else 0)}


@dataclass(frozen=True, eq=False)
class StagePart:
    """Ranks that do the same in a stage."""

    ranks: Sequence[int]
    phases: Phases
    attrs: Attributes


@dataclass(eq=False)
class Timeline:
    """One call on the virtual clock.

    A call is *stages* one after the other; in a stage every group of ranks runs its phases, and the next stage starts when the
    slowest group is through (as the gradient reduction makes it)::

        rank 0, 1   | forward ..... | backward .......... |  (waits)   | optimizer |
        rank 2, 3   | forward ...... | backward .................. |   | optimizer |
                      stage 0                                            stage 1

    On 128 devices a step has thousands of spans, which most steps never need. So a call keeps its stages, and spans are made at the
    first look; they are then kept.
    """

    call: Call
    devices: tuple[int, ...]
    """Devices by rank; none for a CPU task."""
    pool: str
    started_s: float
    """Start of the call: its devices are free and its inputs there."""
    dispatch_s: float = 0.0
    """Seconds from there until its ranks work."""
    queued_s: float = 0.0
    """Seconds that its inputs had been there before it started."""
    stages: list[list[StagePart]] = field(default_factory=list)
    now_s: float = field(init=False)
    """Start of the next stage; at last the call's end."""
    stage_starts: list[float] = field(default_factory=list)
    device_bytes: Mapping[int, PredictedBytes] = field(default_factory=dict)
    """Bytes by device."""
    shared: Mapping[tuple[int, int], Sequence[tuple[str, float, float]]] | None = None
    """The phases of each (stage, rank) as (name, start, seconds), where ranks share cores."""

    def __post_init__(self) -> None:
        self.now_s = self.started_s + self.dispatch_s

    def lay(self, ranks: Sequence[Iterable[int]], costs: Sequence[Phases], attrs: Sequence[Attributes]) -> None:
        """Run each group's phases one after the other; the next stage starts when the slowest group is through."""
        pieces = [StagePart(tuple(group), phases, more) for group, phases, more in zip(ranks, costs, attrs, strict=True)]
        self.stages.append(pieces)
        self.stage_starts.append(self.now_s)
        self.now_s += max((sum(piece.phases.values()) for piece in pieces), default=0.0)


class SimulatedSpans(Sequence[Span]):
    """The spans of a simulated call: the call's own, then those of its devices."""

    def __init__(self, line: Timeline, attrs: Mapping[str, float | int | str], settle: Callable[[], None]) -> None:
        self._line, self._attrs, self._settle = line, attrs, settle
        self._made: tuple[float, tuple[Span, ...]] | None = None

    @property
    def call_span(self) -> Span:
        """The call's own span."""
        self._settle()
        line, call = self._line, self._line.call
        attrs = {**self._attrs, "queued_s": line.queued_s} if line.queued_s > 0 else self._attrs
        return Span(
            name=call.method, role=call.role, call_id=call.id, method=call.method, step=call.step, pool=line.pool,
            start_ns=_ns(line.started_s), duration_s=line.now_s - line.started_s, phase=call.phase, predicted=True, attrs=attrs,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Span]:
        yield self.call_span
        yield from self._of_devices()

    def __len__(self) -> int:
        return 1 + len(self._of_devices())

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Span, ...]: ...
    def __getitem__(self, index: int | slice) -> Span | tuple[Span, ...]:
        return self.call_span if index == 0 else (self.call_span, *self._of_devices())[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def _of_devices(self) -> tuple[Span, ...]:
        self._settle()
        end = self._line.now_s  # moves while later calls share cores with this one
        if self._made is None or self._made[0] != end:
            self._made = end, tuple(self._whole() + self._phases()) if self._line.devices else ()
        return self._made[1]

    def _whole(self) -> list[Span]:
        """Return the call's span on every device, from its ranks' start to their own end, with the bytes after it."""
        line = self._line
        began = line.started_s + line.dispatch_s
        ends: dict[int, float] = dict.fromkeys(range(len(line.devices)), began)
        for number, pieces in enumerate(line.stages):
            for piece in pieces:
                took = sum(piece.phases.values())
                for rank in piece.ranks:
                    if line.shared is None:
                        ends[rank] = line.stage_starts[number] + took
                    elif own := line.shared.get((number, rank)):
                        ends[rank] = sum(own[-1][1:])
        copy = _Copies(line, line.call.method, "", {})
        return [copy(rank, began, end - began) for rank, end in ends.items()]

    def _phases(self) -> list[Span]:
        line, spans = self._line, []
        for number, pieces in enumerate(line.stages):
            for piece in pieces:
                if line.shared is not None:
                    copies = {name: _Copies(line, name, line.call.method, piece.attrs.get(name, {})) for name in piece.phases}
                    spans += [copies[n](rank, at, s) for rank in piece.ranks for n, at, s in line.shared.get((number, rank), ())]
                    continue
                at = line.stage_starts[number]
                for name, seconds in piece.phases.items():
                    if seconds:
                        copy = _Copies(line, name, line.call.method, piece.attrs.get(name, {}))
                        spans += [copy(rank, at, seconds) for rank in piece.ranks]
                    at += seconds
        return spans


class _Copies:
    """A maker of the same span for many ranks."""

    def __init__(self, line: Timeline, name: str, parent: str, attrs: Mapping[str, Any]) -> None:
        self._line, self._name, self._parent, self._attrs = line, name, parent, attrs
        self._attrs_of: dict[PredictedBytes | None, Mapping[str, Any]] = {}

    def __call__(self, rank: int, start_s: float, seconds: float) -> Span:
        line, call = self._line, self._line.call
        device = line.devices[rank]
        predicted = line.device_bytes.get(device)
        if predicted not in self._attrs_of:
            parts = {} if predicted is None else {**({} if self._parent else predicted.parts), **predicted.of_phase(self._name)}
            self._attrs_of[predicted] = {**self._attrs, **parts}
        return Span(
            name=self._name, role=call.role, call_id=call.id, method=call.method, step=call.step, pool=line.pool,
            start_ns=_ns(start_s), duration_s=seconds, device=device, rank=rank, parent=self._parent, phase=call.phase,
            predicted=True, attrs=self._attrs_of[predicted],
        )  # fmt: skip


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


# -- predictors that the simulated runtime asks: ``Costs`` for seconds, ``Estimate`` for bytes


class Costs(Protocol):
    """A predictor of seconds. Every answer must be a pure function of its arguments."""

    @property
    def dispatch_s(self) -> float:
        """Seconds between a call's start and its work on the devices."""
        ...

    def method_costs(
        self,
        method: str,
        role: RoleSpec,
        cluster: ClusterSpec,
        devices: Sequence[int],
        rows: Sequence[RowLengths],
        stale: bool = False,
        first: bool = False,
    ) -> Sequence[Phases]:
        """Return, for each (prompt lengths, response lengths) of ranks that share rows, seconds by span name, in order."""
        ...

    def host_task(self, num_rows: int, num_tokens: int) -> float:
        """Return the seconds of a CPU task."""
        ...


@dataclass(frozen=True, eq=False)
class CostQuestion:
    """A question to a performance model for a call: the seconds of a method for groups of ranks that share rows."""

    method: str
    role: RoleSpec
    devices: tuple[int, ...]
    rows: tuple[RowLengths, ...]
    """Prompt lengths and response lengths of each group."""
    weights: tuple[int, ...]
    """Number of ranks of each group."""
    stale: bool = False
    first: bool = False
    """Whether the rollout has had no weights before."""


class Estimate(Protocol):
    """Bytes of a role on one device, as a memory model predicts them (``hfsdk.planner.perf.memory.MemoryEstimate`` is one)."""

    @property
    def weights(self) -> int:
        """The trainer's weights."""
        ...

    @property
    def gradients(self) -> int:
        """The weights' gradients."""
        ...

    @property
    def optimizer(self) -> int:
        """Masters and moments."""
        ...

    @property
    def rollout_weights(self) -> int:
        """The generating engine's copy."""
        ...

    @property
    def kv_cache(self) -> int:
        """The rollout's key/value cache."""
        ...

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The parts that are in host memory while they are not used."""
        ...

    @property
    def base(self) -> int:
        """The part of ``weights`` that is not trained here, which roles on a device may have together."""
        ...

    @property
    def asleep(self) -> int:
        """The part of the rollout's weights and cache that is there only while it generates."""
        ...

    @property
    def resident(self) -> int:
        """Bytes held all the time."""
        ...

    @property
    def passes(self) -> int:
        """Further bytes while the trainer works."""
        ...
