"""``Span`` and ``Trace``: the events of a session, measured or predicted, with their times.

A call of the dataflow is a *call span* on the controller's lane; under it every worker rank records *worker spans* with the
names below. Measured and predicted spans have the same type and differ in ``predicted``.

================  ============================================================
name              what the time covers
================  ============================================================
reshard           moving the trainer's weights into the rollout engine
prefill, decode   reading prompts; producing tokens
export            taking weights out of a trained role, for its shadow
sync              a shadow taking over the weights of its role
forward           forward passes of inference calls and of training
backward          backward passes, with gradient reduction
optimizer         clipping and the optimizer step
wait              a pipeline stage waiting for its neighbour
sleep, wake       a rollout on a GPU giving its weights and cache up, and getting memory for them again (with bytes)
fetch             mapping input columns
reward, map       the user's functions in CPU tasks
================  ============================================================
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, runtime_checkable

from hfsdk.core.checks import check_options, checked
from hfsdk.core.comparison import ComparedCall, Comparison, against_guess, side_by_side
from hfsdk.core.errors import OptionError
from hfsdk.core.field_texts import documented
from hfsdk.core.files import export
from hfsdk.core.hints import CompletableProperty
from hfsdk.core.text import printable

if TYPE_CHECKING:
    import pandas as pd


KEPT_STEPS = 50
"""Newest steps of which a session keeps calls and spans; of older ones only the history is left."""
DISPATCH_NS = 5_000_000
"""A call that began at most so long after the end of its inputs had waited for them."""
CLOCK_SLACK_NS = 1_000_000
"""A call that ended at most so long after another began counts as before it (clocks of two processes)."""


@documented
@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of time on one lane.

    ``start_ns`` is ``time.time_ns`` of the machine that recorded it (virtual nanoseconds in simulation), ``duration_s`` comes
    from ``time.perf_counter``; a running span has ``duration_s=None``. On a GPU both are those of CUDA events in the stream of the
    span's kernels, so that a span is what it takes of the GPU's time; while it runs, ``start_ns`` is the host's.
    """

    name: str
    """The work that the time covers; see the module's table."""
    role: str
    """The role whose work it is, or ``"session"``."""
    call_id: int
    """The call it belongs to."""
    method: str = ""
    """The method of that call."""
    step: int = 0
    """The step of that call."""
    pool: str = ""
    """Name of the pool, empty for the controller's lane."""
    device: int | None = None
    """Device number in the cluster, or ``None`` for the controller's own lane."""
    rank: int | None = None
    """Rank in the pool, or ``None`` for the controller's lane."""
    start_ns: int
    """Start, in nanoseconds since 1970 (or of the virtual clock)."""
    duration_s: float | None = None
    """How long it took, in seconds; ``None`` while it runs."""
    parent: str = ""
    """Name of the enclosing worker span, empty at the top."""
    phase: str = ""
    """``"generation"``, ``"preparation"`` or ``"learning"``."""
    predicted: bool = False
    """Whether a performance model says so, and no clock."""
    attrs: Mapping[str, float | int | str] = field(default_factory=dict)
    """Numbers that belong to the span: tokens, bytes, cpu_s, and at its end rss_bytes (host memory that is resident) and, on a
    GPU, host_s (seconds from the span's beginning to its end in the program: launching kernels, not running them),
    allocated_bytes (torch's tensors) and reserved_bytes (what torch holds). A call's span on a device also has the bytes
    of that device's weights, gradients, optimizer, rollout and kv_cache."""

    @property
    def end_ns(self) -> int | None:
        """End in nanoseconds, or ``None`` while it runs (also where the recorded one is no number)."""
        took = self.duration_s
        return None if took is None or not math.isfinite(took) else self.start_ns + round(took * 1e9)


@runtime_checkable
class Traced(Protocol):
    """A source of spans: a ``Trace``, or a session's ``trace``."""

    def snapshot(self) -> Trace:
        """Return the spans so far."""
        ...

    def critical_path(self) -> Trace:
        """Return the calls that decided how long it took."""
        ...


def is_traced(value: object) -> TypeGuard[Traced]:
    """Return whether something is :class:`Traced`; its class is asked, for an object of the user's may raise at any question."""
    return all(callable(getattr(type(value), name, None)) for name in ("snapshot", "critical_path"))


@documented
@dataclass(frozen=True)
class Trace:
    """The spans of one step (or of any stretch), in order of their start."""

    spans: tuple[Span, ...]
    """The spans in order of their start."""
    title: str = ""
    """The title above the picture."""

    @classmethod
    def of(cls, spans: Iterable[Span], title: str = "") -> Trace:
        """Sort the spans by start; numbers that are none (NaN, infinity) are left out, as if nothing had been measured."""
        return cls(tuple(sorted(map(_measured, spans), key=lambda s: (s.start_ns, s.device is not None, s.device or 0))), title)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    def snapshot(self) -> Trace:
        """Return the trace itself."""
        return self

    @property
    def calls(self) -> Trace:
        """The call spans alone: one per call of the dataflow."""
        return Trace(tuple(s for s in self.spans if s.device is None), self.title)

    @property
    def start_ns(self) -> int:
        """Start of the first span (0 without spans)."""
        return min((s.start_ns for s in self.spans), default=0)

    @property
    def duration_s(self) -> float:
        """Seconds from the first start to the last end."""
        ends = [s.end_ns for s in self.spans if s.end_ns is not None]
        return (max(ends) - self.start_ns) / 1e9 if ends else 0.0

    def idle(self) -> dict[int, float]:
        """Return, for every device, the share of the trace's time in which it ran no span."""
        total = self.duration_s
        busy: dict[int, list[tuple[int, int]]] = {}
        for span in self.spans:
            if span.device is not None and span.end_ns is not None and not span.parent:
                busy.setdefault(span.device, []).append((span.start_ns, span.end_ns))
        return {d: 1.0 - _union_s(parts) / total if total else 0.0 for d, parts in sorted(busy.items())}

    def overlap(self) -> dict[tuple[str, ...], float]:
        """Return for how many seconds which pools were at work at once, e.g. ``{("actor", "critic"): 1.5, ("critic",): 2.0}``.

        The empty tuple stands for the time in which none was. Pools are named in the order of their devices; a pool is at work
        while one of its devices is.
        """
        device_of: dict[str, int] = {}
        events = []
        for span in self.spans:
            if span.device is not None and span.end_ns is not None and not span.parent:
                device_of[span.pool] = min(span.device, device_of.get(span.pool, span.device))
                events += [(span.start_ns, 1, span.pool), (span.end_ns, -1, span.pool)]
        seconds: dict[tuple[str, ...], float] = {}
        at_work: Counter[str] = Counter()
        last = self.start_ns
        # At one instant ends sort before starts (-1 < 1), so calls that follow each other do not count as overlapping.
        for now, change, pool in [*sorted(events), (self.start_ns + round(self.duration_s * 1e9), 0, "")]:
            if now > last:
                pools = tuple(sorted((p for p, n in at_work.items() if n), key=device_of.__getitem__))
                seconds[pools] = seconds.get(pools, 0.0) + (now - last) / 1e9
                last = now
            at_work[pool] += change
        return seconds

    def critical_path(self) -> Trace:
        """Return the calls that decided how long the trace took, in their order.

        From the call that ended last, back each time to what it waited for: of the calls whose columns it read and those that
        ran before it on one of its devices, the one that ended last. Where all of them had long ended, the program itself
        waited, for the call that ended last of all. To make the trace shorter, one of these has to become shorter, or wait less.
        """
        calls = [s for s in self.calls if s.end_ns is not None]
        # A comparison holds each step twice; only the measured calls can be made shorter.
        calls = [s for s in calls if not s.predicted] or calls
        devices: dict[int, set[int]] = {}
        for span in self.spans:
            if span.device is not None:
                devices.setdefault(span.call_id, set()).add(span.device)
        path: list[Span] = []
        seen: set[int] = set()
        here = max(calls, key=_end_ns, default=None)
        while here is not None:
            path.append(here)
            seen.add(id(here))
            start = here.start_ns
            before = [s for s in calls if _end_ns(s) <= start + CLOCK_SLACK_NS and id(s) not in seen]
            read = set(map(int, str(here.attrs.get("after", "")).split()))
            own_devices = devices.get(here.call_id, set())
            waited = [s for s in before if s.call_id in read or own_devices & devices.get(s.call_id, set())]
            # Later than a dispatch after all of these, the call did not wait for them: the user's program did, for what ended last.
            at_once = any(_end_ns(s) >= start - DISPATCH_NS for s in waited)
            here = max(waited if at_once else before, key=_end_ns, default=None)
        return Trace(tuple(reversed(path)), f"critical path of {self.title or 'the trace'}")

    def compare(self, other: Traced | Mapping[str, float], *, names: tuple[str, str] | None = None) -> Comparison:
        """Hold this trace against another, measured or predicted, or against a guess in seconds.

        Args:
            other: a trace, or seconds by call or method: ``trace.compare({"generate": 4.0, "update": 9.0})``.
            names: names for this trace and the other; by default their titles.

        Raises:
            OptionError: a guess that names no call of this trace or is not a number of seconds, or another type.
        """
        own_seconds = self.seconds_by_call()
        if isinstance(other, Mapping):
            rows = against_guess(own_seconds, other)
            sums = [sum(getattr(r, name) or 0.0 for r in rows) for name in ("this_s", "other_s")]
            total, title, source = ComparedCall(call="all of these", this_s=sums[0], other_s=sums[1]), "a guess", "guess"
        else:
            if not is_traced(other):
                has = (
                    "; it has one, .trace"
                    if isinstance(getattr(type(other), "trace", None), property | CompletableProperty)
                    else ""
                )
                raise OptionError(f"compare takes a trace or a guess like {{'generate': 4.0}}; got {type(other).__name__}{has}")
            theirs = other.snapshot()
            rows = side_by_side(own_seconds, theirs.seconds_by_call())
            total = ComparedCall(call="the whole", this_s=self.duration_s, other_s=theirs.duration_s)
            title, source = theirs.title or "the other", theirs.source
            title = f"the other {title}" if title == self.title else title
            title = f"the other {title}" if (title, source) == (self.title, self.source) else title
        check_options("compare", names=(names, tuple[str, str] | None))
        this, title = names or (self.title or "trace", title)
        return Comparison(
            this=this, other=title, this_source=self.source, other_source=source,  # type: ignore[arg-type]
            rows=tuple(rows), total=total,
        )  # fmt: skip

    @property
    def source(self) -> Literal["measured", "predicted"]:
        """Whether it was measured; a trace of predicted spans alone was not."""
        return "predicted" if self.spans and all(s.predicted for s in self.spans) else "measured"

    def seconds_by_call(self) -> dict[str, float]:
        """Return the seconds of every kind of call that has ended, e.g. ``{"actor.generate": 1.2, "actor.update": 0.7}``."""
        seconds: dict[str, float] = {}
        for span in self.calls:
            if span.duration_s is not None and span.end_ns is not None:
                name = f"{span.role}.{span.method or span.name}" if span.role else span.method or span.name
                seconds[name] = seconds.get(name, 0.0) + span.duration_s
        return seconds

    def device_seconds(self) -> tuple[float, float]:
        """Return (device-seconds in all, those of them idle), of the devices that ran something in this trace.

        In all is their number times the trace's duration; idle is what no span filled.
        """
        idle = self.idle()
        return len(idle) * self.duration_s, sum(idle.values()) * self.duration_s

    def drain(self) -> pd.DataFrame:
        """Return how every generation ran dry: call_id, device, seconds (since the trace's start), running, waiting, kv_usage.

        ``running`` counts sequences in the engine's batch, ``kv_usage`` is the share of its key/value cache in use.
        """
        import pandas as pd

        columns = ["call_id", "device", "seconds", "running", "waiting", "kv_usage"]
        return pd.DataFrame([row for _, rows in self.drains() for row in rows], columns=columns)

    def drains(self) -> Iterator[tuple[int, list[tuple[int, int | None, float, int, int, float]]]]:
        """Yield (row of the span, its points as in :meth:`drain`) for every span that carries them."""
        for row, span in enumerate(self.spans):
            drained = json.loads(str(span.attrs["drain"])) if "drain" in span.attrs else []
            points = [p for p in drained if all(map(math.isfinite, p))]
            if points:  # the last point was taken when the span ended
                end = (span.start_ns - self.start_ns) / 1e9 + (span.duration_s or 0.0)
                shift = end - points[-1][0]
                yield row, [(span.call_id, span.device, s + shift, running, waiting, kv) for s, running, waiting, kv in points]

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per span: start_s (from the trace's start), duration_s and every field and attribute."""
        import pandas as pd

        rows = []
        for span in self.spans:
            row = asdict(span)
            row.update(row.pop("attrs"))
            row["start_s"] = (span.start_ns - self.start_ns) / 1e9
            rows.append(row)
        columns = ["name", "role", "method", "device", "rank", "start_s", "duration_s"]
        frame = pd.DataFrame(rows, columns=None if rows else columns)
        return frame[columns + [c for c in frame.columns if c not in columns]]

    @checked
    def to_perfetto(self, path: str | Path) -> Path:
        """Write Chrome trace events (``ph`` X and M, microseconds), which Perfetto and chrome://tracing open.

        Raises:
            OptionError: ``path`` is no path, or a folder.
            OutputError: it cannot be written; what was there is unchanged.
        """
        lanes = sorted({(s.device is not None, s.device or 0, s.role if s.device is None else "") for s in self.spans})
        events: list[dict[str, Any]] = []
        for tid, (on_device, device, role) in enumerate(lanes):
            name = f"device {device}" if on_device else f"calls of {role}"
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}})
        for span in self.spans:
            if span.duration_s is None or span.end_ns is None:
                continue
            lane = lanes.index((span.device is not None, span.device or 0, span.role if span.device is None else ""))
            events.append({
                "ph": "X", "name": f"{span.role}.{span.method} {span.name}".strip(), "pid": 0, "tid": lane,
                "ts": (span.start_ns - self.start_ns) / 1e3, "dur": span.duration_s * 1e6, "args": dict(span.attrs),
            })  # fmt: skip
        return export(path, json.dumps({"traceEvents": events}), "the trace")

    def __repr__(self) -> str:
        return printable(f"Trace({self.title or 'untitled'}: {len(self.calls)} calls, {self.duration_s:.3f} s)")


def _measured(span: Span) -> Span:
    """Leave out values that are no numbers."""
    unended = span.duration_s is not None and not math.isfinite(span.duration_s)
    if not unended and all(not isinstance(v, float) or math.isfinite(v) for v in span.attrs.values()):
        return span
    attrs = {k: v for k, v in span.attrs.items() if not isinstance(v, float) or math.isfinite(v)}
    return replace(span, duration_s=None if unended else span.duration_s, attrs=attrs)


def _end_ns(span: Span) -> int:
    return span.start_ns if span.end_ns is None else span.end_ns


def _union_s(parts: list[tuple[int, int]]) -> float:
    total, end = 0, 0
    for start, stop in sorted(parts):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e9
