"""What a simulated call leaves behind: a :class:`Timeline`, and its spans, made when somebody looks.

A call is *stages* one after the other; in a stage every group of ranks runs its phases, and the next stage starts when the slowest
group is through (as the gradient reduction makes it)::

    rank 0, 1   | forward ..... | backward .......... |  (waits)   | optimizer |
    rank 2, 3   | forward ...... | backward .................. |   | optimizer |
                  stage 0                                            stage 1

On 128 devices a step has thousands of spans, which most steps never need. So a call keeps its stages, and spans are made at the
first look; they are then kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from hfsdk.core.call_flow import Call
from hfsdk.core.trace import Span

Phases = Mapping[str, float]
"""Span name -> seconds, in order."""
Attributes = Mapping[str, Mapping[str, int]]
"""Span name -> its attributes."""

PASSES = ("forward", "backward")
"""Phases that need a role's working memory."""


@dataclass(frozen=True, eq=False)
class Held:
    """Bytes on a device after a call, as the memory model predicts them."""

    parts: Mapping[str, int]
    """Attribute of a call's span on the device -> bytes, e.g. ``weights_bytes``."""
    gauge: str
    """What a real worker reads its memory as: ``rss_bytes`` on CPU, ``allocated_bytes`` on accelerators."""
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
    """One call on the virtual clock."""

    call: Call
    devices: tuple[int, ...]
    """By rank; none for a CPU task."""
    pool: str
    started_s: float
    """When the call starts: its devices are free and its inputs there."""
    dispatch_s: float = 0.0
    """Seconds from there until its ranks work."""
    queued_s: float = 0.0
    """Seconds that its inputs had been there before it started."""
    stages: list[list[StagePart]] = field(default_factory=list)
    now_s: float = field(init=False)
    """Where the next stage starts; at last the call's end."""
    stage_starts: list[float] = field(default_factory=list)
    held: Mapping[int, Held] = field(default_factory=dict)
    """By device."""
    shared: Mapping[tuple[int, int], Sequence[tuple[str, float, float]]] | None = None
    """Where ranks share cores: (stage, rank) -> its phases as (name, start, seconds)."""

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
    """Makes the same span for many ranks."""

    def __init__(self, line: Timeline, name: str, parent: str, attrs: Mapping[str, Any]) -> None:
        self._line, self._name, self._parent, self._attrs = line, name, parent, attrs
        self._attrs_of: dict[Held | None, Mapping[str, Any]] = {}

    def __call__(self, rank: int, start_s: float, seconds: float) -> Span:
        line, call = self._line, self._line.call
        device = line.devices[rank]
        held = line.held.get(device)
        if held not in self._attrs_of:
            parts = {} if held is None else {**({} if self._parent else held.parts), **held.of_phase(self._name)}
            self._attrs_of[held] = {**self._attrs, **parts}
        return Span(
            name=self._name, role=call.role, call_id=call.id, method=call.method, step=call.step, pool=line.pool,
            start_ns=_ns(start_s), duration_s=seconds, device=device, rank=rank, parent=self._parent, phase=call.phase,
            predicted=True, attrs=self._attrs_of[held],
        )  # fmt: skip


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
