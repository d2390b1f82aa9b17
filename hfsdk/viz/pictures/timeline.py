"""The timeline picture: calls and spans over time.

::

                 | generation        | preparation  | learning      |     phases: bands with their name on top
    actor        |[generate.........]               [update.......]|     one lane of calls per role
    critic       |                    [values]  [update]           |
    pool all
    device 0     |[reshard|prefill|decode...][fwd]..[fwd|bwd|opt]  | 93 % busy
    device 1     |[reshard|prefill|decode.....][fwd]....[fwd|...]  | 88 % busy; the rest is shaded: idle

Where a trace has several pools, the lanes of each stand together under its name, and a table says who was at work with whom.
Sub-spans are drawn inside the span that their ``parent`` names. A running span has an open end. Predicted spans are hatched
and have lanes of their own. ``marks[i][0]`` (the fields are
``MARK_FIELDS``) is the span's row in ``Trace.to_pandas()``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.core.trace import Span, Trace, Traced, is_traced
from hfsdk.viz.frame import PHASE_COLORS, TRANSFER_COLOR, Picture, role_colors, seconds_text
from hfsdk.viz.plain import cut

MARK_FIELDS = (
    "row", "lane", "sub_row", "depth", "start_s", "duration_s", "name",
    "role", "method", "label", "flags", "call_id", "rank", "attrs",
)  # fmt: skip
"""The numbers of one mark; ``name``, ``role``, ``method`` and ``label`` index the view's lists."""

PREDICTED, RUNNING, PARENT = 1, 2, 4
"""Bits of ``flags``."""

TONES = {"prefill": 0.3, "decode": -0.05, "forward": 0.22, "backward": -0.12, "optimizer": -0.35, "sleep": 0.6, "wake": 0.6}
TRANSFERS = {"reshard": 0.0, "sync": 0.2, "export_weights": -0.3, "export": -0.3, "fetch": 0.45}
"""Kinds of spans that move data: drawn in red whatever their role."""
WAIT_COLOR = "#8b949e"
MOST_OVERLAPS = 8
"""Longest list of pools at work at once."""

UNSHOWN = ("drain", "after")
"""Attributes that are drawn otherwise than by their text."""


class NameView(TypedDict):
    """How one kind of span is drawn."""

    name: str
    tone: float
    color: str | None
    note: str
    """The common property of spans that have their own colour; empty for the others."""


class PhaseView(TypedDict):
    """A stretch of one phase; ``end_s`` is ``None`` while it goes on."""

    phase: str
    start_s: float
    end_s: float | None
    row: int


class CallRow(TypedDict):
    """A row of the share-of-the-time table."""

    call: str
    num_calls: int
    predicted: bool
    color: str
    seconds: float
    share: float
    cpu_s: float | None
    tokens: float | None
    tokens_per_s: float | None
    bytes: float | None


class ActivityRow(TypedDict):
    """Mean time per device of one kind of span, or of none (idle)."""

    name: str
    predicted: bool
    seconds: float
    share: float


class OverlapRow(TypedDict):
    """Seconds for which these pools, and no others, were at work."""

    pools: str
    seconds: float
    share: float


class CaseRow(TypedDict):
    """One of several traces on one time axis."""

    title: str
    seconds: float
    predicted: bool
    num_devices: int
    device_s: float
    idle_device_s: float
    idle_share: float


class TimelineView(TypedDict):
    """All the timeline needs."""

    picture: Literal["timeline"]
    title: str
    summary: str
    live: bool
    now_s: float
    duration_s: float
    height: float
    bands_height: float
    lanes: list[LaneView]
    roles: list[dict[str, str]]
    names: list[NameView]
    methods: list[str]
    labels: list[str]
    marks: list[list[Any]]
    phases: list[PhaseView]
    phase_colors: dict[str, str]
    steps: list[dict[str, float]]
    breakdown: list[CallRow]
    activities: list[ActivityRow]
    overlaps: list[OverlapRow]
    critical: list[int]
    """Rows of the calls on the critical path."""
    decisive: bool
    """Whether some calls are on it and others not."""
    critical_words: str
    """How many of the calls these are."""
    drains: list[DrainView]
    pipelines: list[PipelineRow]
    cases: list[CaseRow]
    """The cases of several traces on one axis; else empty."""


def timeline_view(trace: Trace, now_ns: int | None = None) -> TimelineView:
    """Turn a trace into the view of the picture.

    Args:
        trace: measured or predicted spans, or both.
        now_ns: the time now, on the spans' clock, while something runs: running spans then grow. Without it the picture
            stands still, and spans without an end reach to the end of the trace.
    """
    spans, origin = trace.spans, trace.start_ns
    duration_s = trace.duration_s
    latest = max([(s.start_ns - origin) / 1e9 for s in spans], default=0.0)
    now_s = max(duration_s, latest, 0.0 if now_ns is None else (now_ns - origin) / 1e9)
    running = any(s.duration_s is None for s in spans)
    total_s = now_s if running else duration_s
    placed = Lanes(trace, now_s)
    roles = {s.role: s.role for s in spans}
    colors = role_colors(roles)
    bands = _phases(trace.calls, origin, now_s)
    words: dict[str, dict[str, int]] = {"name": {}, "role": {}, "method": {}, "label": {}}
    for role in roles:
        words["role"][role] = len(words["role"])
    marks = [_mark(row, span, placed, words, origin) for row, span in enumerate(spans)]
    lanes = placed.views(total_s)
    critical, decisive, critical_words = critical_rows(trace)
    drains = add_drains(lanes, drains_of(trace))
    return {
        "picture": "timeline",
        "title": trace.title or "timeline",
        "summary": _summary(trace, total_s),
        "live": now_ns is not None and running,
        "now_s": round(now_s, 9),
        "duration_s": round(total_s, 9),
        "height": lanes[-1]["y"] + lanes[-1]["height"] if lanes else 20.0,
        "bands_height": 16.0 * (1 + max(b["row"] for b in bands)) + 2 if bands else 0.0,
        "lanes": lanes,
        "roles": [{"name": r or "session", "color": colors[r]} for r in roles],
        "names": [_name_view(n) for n in words["name"]],
        "methods": list(words["method"]),
        "labels": list(words["label"]),
        "marks": marks,
        "phases": bands,
        "phase_colors": PHASE_COLORS,
        "steps": _steps(trace, origin),
        "breakdown": _breakdown(trace, total_s, now_s, colors),
        "activities": _activities(trace, total_s, now_s),
        "overlaps": _overlaps(trace), "critical": critical, "decisive": decisive, "critical_words": critical_words,
        "drains": drains, "pipelines": pipelines_of(trace), "cases": [],
    }  # fmt: skip


class TimelinePicture(Picture):
    """The calls and spans over time. ``TimelinePicture(timeline_view(trace))``."""

    name = "timeline"

    def to_text(self) -> str:
        """Return the share of the time per call, with bars, and how busy every device was."""
        view = self.view
        lines = [f"{view['title']}: {len(view['marks'])} spans in {seconds_text(view['duration_s'])}"]
        width = max([len(r["call"]) for r in view["breakdown"]], default=0)
        for row in view["breakdown"]:
            mark = "/" if row["predicted"] else "#"
            note = " predicted" if row["predicted"] else ""
            bar = (mark * round(30 * min(1.0, row["share"]))).ljust(30)
            lines.append(f"  {row['call']:<{width}} {bar} {100 * row['share']:3.0f} % {seconds_text(row['seconds'])}{note}")
        for lane in view["lanes"][:64]:
            if lane["busy_share"] is not None:
                lines.append(f"  {lane['label']}: {100 * lane['busy_share']:.0f} % busy")
        for drain in view["drains"]:
            half = [p[0] for run in drain["runs"] for p in run if p[1] * 2 >= drain["most"]]
            tail = max(run[-1][0] for run in drain["runs"]) - max(half)
            words = f"at most {drain['most']}, the last half took {seconds_text(tail)}"
            lines.append(f"  sequences of device {drain['device']}: {words}")
        for stage in view["pipelines"]:
            waits = f"{seconds_text(stage['wait_s'])} waiting, a bubble of {100 * stage['bubble']:.0f} %"
            lines.append(f"  {stage['call']} on device {stage['device']}: {stage['micro_batches']} micro-batches, {waits}")
        for together in view["overlaps"]:
            lines.append(f"  {together['pools']}: {seconds_text(together['seconds'])} ({100 * together['share']:.0f} %)")
        if view["critical_words"]:
            lines.append(f"  {view['critical_words']}")
        return "\n".join(lines)


# ---------------------------------------------------------------- view: lanes and rows


def _mark(row: int, span: Span, lanes: Lanes, words: dict[str, dict[str, int]], origin: int) -> list[Any]:
    lane, sub, depth, parent = lanes.of(row)
    method = span.method or span.name
    if span.device is None:
        label = method
    else:
        label = f"{span.role}.{method}" if parent or (not depth and span.name == method) else span.name
        label = label if depth or parent or span.name == method else f"{span.role} {span.name}"
        label += f" {span.attrs['micro_batch']}" if "micro_batch" in span.attrs else ""

    # Texts are sent once and marks name them by number: a trace has few texts and many marks.
    def word(table: str, text: str) -> int:
        return words[table].setdefault(text, len(words[table]))

    shown = {k: v for k, v in span.attrs.items() if k not in UNSHOWN}
    attrs = {k: (v if not isinstance(v, float) or math.isfinite(v) else None) for k, v in shown.items()}
    flags = PREDICTED * span.predicted + RUNNING * (span.duration_s is None) + PARENT * parent
    duration = None if span.duration_s is None else round(span.duration_s, 9)
    return [
        row, lane, sub, depth, round((span.start_ns - origin) / 1e9, 9), duration, word("name", span.name), word("role", span.role),
        word("method", method), word("label", label), flags, span.call_id, span.rank, attrs or None,
    ]  # fmt: skip


def _name_view(name: str) -> NameView:
    if name in TRANSFERS:
        return {"name": name, "tone": TRANSFERS[name], "color": TRANSFER_COLOR, "note": "moves data"}
    if name in WAITS:
        return {"name": name, "tone": WAITS[name], "color": WAIT_COLOR, "note": "for a neighbouring stage"}
    return {"name": name, "tone": TONES.get(name, 0.0), "color": None, "note": ""}


# ---------------------------------------------------------------- view: phases, steps, shares


def _phases(calls: Trace, origin: int, now_s: float) -> list[PhaseView]:
    """Merge calls of one phase that follow each other; phases that overlap in time get rows of their own."""
    bands: list[PhaseView] = []
    open_end: list[tuple[float, bool]] = []
    # A trace may hold a step twice, measured and predicted; phases are drawn of the measured one where there is one.
    shown = [s for s in calls if s.phase and not s.predicted] or [s for s in calls if s.phase]
    for span in shown:
        start, end = (span.start_ns - origin) / 1e9, end_s(span, origin, now_s)
        if bands and bands[-1]["phase"] == span.phase:
            open_end[-1] = (max(open_end[-1][0], end), open_end[-1][1] or span.duration_s is None)
        else:
            bands.append({"phase": span.phase, "start_s": round(start, 9), "end_s": None, "row": 0})
            open_end.append((end, span.duration_s is None))
    rows: list[float] = []
    for band, (end, still_open) in zip(bands, open_end, strict=True):
        band["end_s"] = None if still_open else round(end, 9)
        # A phase that begins up to a millisecond before the last one of a row ends shares the row: nobody sees the overlap.
        free = [i for i, until in enumerate(rows) if until <= band["start_s"] + 1e-3]
        band["row"] = free[0] if free else len(rows)
        rows[band["row"] : band["row"] + 1] = [end]
    return bands


def _steps(trace: Trace, origin: int) -> list[dict[str, float]]:
    starts: dict[int, int] = {}
    for span in trace:
        starts[span.step] = min(starts.get(span.step, span.start_ns), span.start_ns)
    return [{"step": step, "start_s": round((ns - origin) / 1e9, 9)} for step, ns in sorted(starts.items())]


def _breakdown(trace: Trace, total_s: float, now_s: float, colors: Mapping[str, str]) -> list[CallRow]:
    origin = trace.start_ns
    groups: dict[tuple[str, str, bool], list[Span]] = {}
    for span in trace.calls:
        groups.setdefault((span.role, span.method or span.name, span.predicted), []).append(span)
    rows: list[CallRow] = []
    for (role, method, predicted), spans in groups.items():
        seconds = sum(end_s(s, origin, now_s) - (s.start_ns - origin) / 1e9 for s in spans)
        tokens, cpu_s, num_bytes = (_total(spans, k) for k in ("tokens", "cpu_s", "bytes"))
        rows.append({
            "call": f"{role}.{method}" if role else method, "num_calls": len(spans), "predicted": predicted, "color": colors[role],
            "seconds": round(seconds, 9), "share": seconds / total_s if total_s else 0.0, "cpu_s": cpu_s, "tokens": tokens,
            "tokens_per_s": tokens / seconds if tokens is not None and seconds else None, "bytes": num_bytes,
        })  # fmt: skip
    return rows


def _total(spans: Iterable[Span], key: str) -> float | None:
    values = [s.attrs[key] for s in spans if key in s.attrs]
    return sum(float(v) for v in values) if values else None


def _activities(trace: Trace, total_s: float, now_s: float) -> list[ActivityRow]:
    """Mean seconds per device of each kind of span; of nested ones only the innermost count."""
    origin = trace.start_ns
    rows: list[ActivityRow] = []
    for predicted in (False, True):
        spans = [s for s in trace if s.device is not None and s.predicted == predicted]
        devices = {s.device for s in spans}
        outer = {(s.device, s.call_id, s.parent) for s in spans if s.parent}
        sums: dict[str, float] = defaultdict(float)
        busy: dict[int | None, list[tuple[float, float]]] = defaultdict(list)
        for span in spans:
            start, end = (span.start_ns - origin) / 1e9, end_s(span, origin, now_s)
            busy[span.device].append((start, end))
            if (span.device, span.call_id, span.name) not in outer:
                sums[span.name] += (end - start) / len(devices)
        if devices and total_s:
            idle = sum(b - a for parts in busy.values() for a, b in gaps(parts, total_s)) / len(devices)
            rest = total_s - idle - sum(sums.values())
            by_seconds = sorted(sums.items(), key=lambda item: -item[1])
            by_seconds += [("between sub-spans", rest)] if rest > 0.005 * total_s else []
            for name, seconds in [*by_seconds, ("idle", idle)]:
                rows.append({"name": name, "predicted": predicted, "seconds": round(seconds, 9), "share": seconds / total_s})
    return rows


def _overlaps(trace: Trace) -> list[OverlapRow]:
    """Say which pools were at work at once, longest first; nothing where there is one pool, or none has ended a call."""
    seconds, total_s = trace.overlap(), trace.duration_s
    if len({pool for pools in seconds for pool in pools}) < 2:
        return []
    rows: list[OverlapRow] = []
    for pools, spent in sorted(seconds.items(), key=lambda item: -item[1])[:MOST_OVERLAPS]:
        words = " and ".join([", ".join(pools[:-1]), pools[-1]] if pools[1:] else pools)
        words += "" if not pools else " at once" if pools[1:] else " alone"
        rows.append({"pools": words or "none", "seconds": round(spent, 9), "share": spent / total_s})
    return rows


def _summary(trace: Trace, total_s: float) -> str:
    idle = trace.idle()
    devices = f" on {len(idle)} devices, {100 * (1 - sum(idle.values()) / len(idle)):.0f} % busy on average" if idle else ""
    return f"Timeline of {len(trace.calls)} calls in {seconds_text(total_s)}{devices}: {trace.title or 'untitled'}"


# -- lanes: calls of a role, spans of a device

WAITS = {"wait": 0.0}
"""Kinds of spans that wait for others: drawn in grey whatever their role."""
POOL_HEIGHT = 15.0
"""Room for a pool's name above its lanes."""
SAME_ROW_S = 1e-4
"""Spans of one lane that overlap by less than this share a row (clocks of two processes)."""


class LaneView(TypedDict):
    """One lane: the calls of a role, or a device."""

    label: str
    kind: Literal["calls", "device", "drain"]
    device: int | None
    case: str
    """The name above the lanes of one of several traces; empty elsewhere."""
    pool: str
    """The name above the lane where a pool's lanes begin; empty elsewhere and where there is one pool."""
    predicted: bool
    y: float
    height: float
    row_height: float
    show_label: bool
    busy_share: float | None
    """Share of the time that the device was busy; waiting for another pipeline stage is not busy."""
    idle: list[list[float]]


class Lanes:
    """The lane, row and depth of every span."""

    def __init__(self, trace: Trace, now_s: float) -> None:
        origin = trace.start_ns
        self.keys = sorted({_lane_key(s): None for s in trace}, key=self._order(trace))
        self._index = {key: i for i, key in enumerate(self.keys)}
        self._busy: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        self._waits: dict[Any, float] = defaultdict(float)
        self._rows: dict[Any, list[float]] = defaultdict(list)
        self._depths: dict[Any, int] = defaultdict(int)
        self._place: list[tuple[int, int, int]] = []
        self._parents: set[int] = set()
        self._pools = {s.device: s.pool for s in trace if s.device is not None}
        enclosing: dict[Any, tuple[int, int, int]] = {}
        spans = trace.spans
        # Spans come before those inside them: of two that begin at once the one without a parent, then the longer one.
        order = sorted(
            range(len(spans)),
            key=lambda i: (spans[i].start_ns, bool(spans[i].parent), -(spans[i].duration_s or math.inf)),
        )
        placed: dict[int, tuple[int, int, int]] = {}
        for i in order:
            span = spans[i]
            key, start = _lane_key(span), (span.start_ns - origin) / 1e9
            end = end_s(span, origin, now_s)
            self._busy[key].append((start, end))
            self._waits[key] += (end - start) * (span.name in WAITS)
            outer = enclosing.get((key, span.call_id, span.parent)) if span.parent and span.device is not None else None
            if outer is None:
                sub, depth = self._free_row(key, start, end), 0
            else:
                sub, depth = outer[1], outer[2] + 1
                self._parents.add(outer[0])
            self._depths[key] = max(self._depths[key], depth)
            enclosing[key, span.call_id, span.name] = (i, sub, depth)
            placed[i] = (self._index[key], sub, depth)
        self._place = [placed[i] for i in range(len(spans))]

    def _order(self, trace: Trace) -> Any:
        first: dict[Any, int] = {}
        for i, span in enumerate(trace):
            first.setdefault(_lane_key(span)[1:3], i)
        return lambda key: (key[0], key[2] if key[0] else first[key[1:3]], key[3])

    def _free_row(self, key: Any, start: float, end: float) -> int:
        rows = self._rows[key]
        for i, busy_until in enumerate(rows):
            if busy_until <= start + SAME_ROW_S:
                rows[i] = end
                return i
        rows.append(end)
        return len(rows) - 1

    def of(self, row: int) -> tuple[int, int, int, bool]:
        """Return lane, sub-row, depth and whether the span has sub-spans."""
        return (*self._place[row], row in self._parents)

    def views(self, total_s: float) -> list[LaneView]:
        """Return the lanes from top to bottom."""
        num_devices = sum(1 for key in self.keys if key[0])
        several = len(set(self._pools.values())) > 1
        lanes: list[LaneView] = []
        y, above = 0.0, ""
        for i, key in enumerate(self.keys):
            on_device, role, device, predicted = key
            if i and on_device != self.keys[i - 1][0]:
                y += 8
            pool = self._pools.get(device, "") if on_device and several else ""
            y += POOL_HEIGHT if pool != above else 0.0
            nested = self._depths[key] > 0
            height = (
                22.0 if not on_device else (34.0 if nested else 24.0) if num_devices <= 12 else 16.0 if num_devices <= 40 else 7.0
            )
            rows = max(1, len(self._rows[key]))
            # Labels of lanes that are lower than their text would cover each other.
            every = 1 if height >= 16 else 8
            label = f"device {device}" if on_device else cut(role or "session", 24)
            label += " (predicted)" if predicted else ""
            idle = gaps(self._busy[key], total_s) if on_device else []
            unused = sum(b - a for a, b in idle) + self._waits[key]
            busy = max(0.0, 1 - unused / total_s) if on_device and total_s else None
            lanes.append({
                "label": label, "kind": "device" if on_device else "calls", "device": device if on_device else None, "case": "",
                "pool": pool if pool != above else "", "predicted": predicted, "y": y,
                "height": height * rows, "row_height": height,
                "show_label": not on_device or device % every == 0, "busy_share": busy, "idle": idle,
            })  # fmt: skip
            y += height * rows + (3 if height >= 16 else 1)
            above = pool
        return lanes


def add_drains(lanes: list[LaneView], drains: list[DrainView]) -> list[DrainView]:
    """Add a lane per device whose generations have points, and say in each drain which one is its own."""
    y = lanes[-1]["y"] + lanes[-1]["height"] + 8 if lanes else 0.0
    for drain in drains:
        drain["lane"] = len(lanes)
        lanes.append({
            "label": f"sequences of {drain['device']}", "kind": "drain", "device": drain["device"], "case": "", "pool": "",
            "predicted": False, "y": y, "height": DRAIN_HEIGHT, "row_height": DRAIN_HEIGHT, "show_label": True,
            "busy_share": None, "idle": [],
        })  # fmt: skip
        y += DRAIN_HEIGHT + 3
    return drains


def end_s(span: Span, origin: int, now_s: float) -> float:
    """Return when a span ends, in seconds after the origin; one that runs ends now."""
    start = (span.start_ns - origin) / 1e9
    return max(now_s, start) if span.duration_s is None else start + span.duration_s


def _lane_key(span: Span) -> tuple[bool, str, int, bool]:
    on_device = span.device is not None
    return on_device, "" if on_device else span.role, span.device if span.device is not None else 0, span.predicted


def gaps(busy: list[tuple[float, float]], total_s: float) -> list[list[float]]:
    """Return the times between 0 and the end in which nothing was busy."""
    gaps, end = [], 0.0
    for start, stop in sorted(busy):
        if start > end:
            gaps.append([round(end, 9), round(start, 9)])
        end = max(end, stop)
    if total_s > end:
        gaps.append([round(end, 9), round(total_s, 9)])
    return gaps


# -- drains of generations, pipelines and their bubbles, and the critical path

MOST_DRAINS = 8
"""Most devices that have their own lane for sequences; those whose generations ended last."""
DRAIN_HEIGHT = 38.0
ALL_CRITICAL = "every call is on the critical path"
PASSES = ("forward", "backward", "wait")


class DrainView(TypedDict):
    """The generations of one device: sequences running and the cache in use, over time."""

    lane: int
    device: int
    most: int
    """Most sequences running at once, the top of the lane."""
    runs: list[list[list[float]]]
    """The points ``[seconds, running, waiting, kv_usage]`` of every generation."""


class PipelineRow(TypedDict):
    """One pipeline stage in one call: where its time went."""

    call_id: int
    call: str
    device: int
    micro_batches: int
    start_s: float
    end_s: float
    forward_s: float
    backward_s: float
    wait_s: float
    bubble: float
    """Share of forward + backward + waiting that was waiting for a neighbouring stage."""


def drains_of(trace: Trace) -> list[DrainView]:
    """Return the drains by device; their lanes are numbered from 0."""
    by_device: dict[int, list[list[list[float]]]] = defaultdict(list)
    for _, points in trace.drains():
        device = points[0][1]
        if device is not None:
            by_device[device].append([[round(max(0.0, p[2]), 4), p[3], p[4], p[5]] for p in points])
    ended = {device: max(run[-1][0] for run in runs) for device, runs in by_device.items()}
    shown = sorted(sorted(ended, key=lambda d: -ended[d])[:MOST_DRAINS])
    return [
        {"lane": i, "device": d, "most": int(max(p[1] for run in by_device[d] for p in run)), "runs": by_device[d]}
        for i, d in enumerate(shown)
    ]


def pipelines_of(trace: Trace) -> list[PipelineRow]:
    """Return one row per call and device that waited for a neighbouring stage."""
    spans: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in trace:
        if span.device is not None and span.duration_s is not None and span.name in PASSES:
            spans[span.call_id, span.device].append(span)
    staged = {call_id for (call_id, _), passes in spans.items() if any(s.name == "wait" for s in passes)}
    rows: list[PipelineRow] = []
    for (call_id, device), passes in sorted(spans.items()):
        if call_id not in staged:
            continue
        seconds = {name: sum(s.duration_s or 0.0 for s in passes if s.name == name) for name in PASSES}
        total = sum(seconds.values())
        rows.append({
            "call_id": call_id, "call": f"{passes[0].role}.{passes[0].method}", "device": device,
            "micro_batches": sum(s.name == "forward" for s in passes),
            "start_s": round((min(s.start_ns for s in passes) - trace.start_ns) / 1e9, 6),
            "end_s": round((max(s.end_ns or 0 for s in passes) - trace.start_ns) / 1e9, 6),
            "forward_s": round(seconds["forward"], 6), "backward_s": round(seconds["backward"], 6),
            "wait_s": round(seconds["wait"], 6), "bubble": seconds["wait"] / total if total else 0.0,
        })  # fmt: skip
    return rows


def critical_rows(trace: Trace) -> tuple[list[int], bool, str]:
    """Return the rows (of ``to_pandas``) of the calls that decided how long the trace took, whether others did not, and words.

    The words say how many of the calls these are; they are empty where no call has ended. Where there are measured calls, predicted
    ones do not count.
    """
    path = {id(span) for span in trace.critical_path()}
    ended = [span for span in trace.calls if span.end_ns is not None]
    ended = [span for span in ended if not span.predicted] or ended
    rows, decisive = [row for row, span in enumerate(trace.spans) if id(span) in path], len(path) < len(ended)
    words = f"{len(path)} of {len(ended)} calls are on the critical path" if decisive else ALL_CRITICAL if ended else ""
    return rows, decisive, words


# -- several traces on one time axis

CASE_HEIGHT = 26.0
"""Room for a trace's name above its lanes."""

_LANE, _NAME, _ROLE, _METHOD, _LABEL, _CALL = 1, 6, 7, 8, 9, 11
_CALLS_APART = 10**9
"""Distance between the call ids of two traces."""


def timelines_view(traces: Mapping[str, Traced], title: str = "") -> TimelineView:
    """Turn traces into one view; a mark's row is its row in its own trace's ``to_pandas``.

    Every trace begins at 0 and has its lanes under its own name; a table totals device-seconds and how many of them were idle.

    Raises:
        OptionError: there is no trace, or something else.
    """
    if not traces:
        raise OptionError("there is no trace to draw; give them by name: {'colocate': session.trace[0], 'split': other.trace[0]}")
    for name, trace in traces.items():
        if not is_traced(trace):
            raise OptionError(f"{shown(name)} is a {type(trace).__name__}; give a trace, e.g. session.trace[0]")
    snapshots = {str(name): trace.snapshot() for name, trace in traces.items()}
    views = {name: timeline_view(trace) for name, trace in snapshots.items()}
    merged = _Merged([span.role for trace in snapshots.values() for span in trace])
    for number, (name, view) in enumerate(views.items()):
        merged.add(number, name, view)
    cases = [_case(name, trace) for name, trace in snapshots.items()]
    longest = max(view["duration_s"] for view in views.values())
    words = "; ".join(f"{c['title']} {seconds_text(c['seconds'])}, {100 * c['idle_share']:.0f} % idle" for c in cases)
    merged.view |= {
        "title": title or ", ".join(views), "summary": f"Timelines on one axis: {words}", "now_s": longest,
        "duration_s": longest, "height": merged.y, "cases": cases,
        "roles": [{"name": r or "session", "color": c} for r, c in merged.colors.items()],
        "names": list(merged.names.values()), "methods": list(merged.methods), "labels": list(merged.labels),
    }  # fmt: skip
    whole: TimelineView = merged.view
    return whole


def timelines_picture(traces: Mapping[str, Traced], title: str = "") -> TimelinePicture:
    """Draw several traces on one time axis; see ``hfsdk.viz.pictures.timeline``."""
    return TimelinePicture(timelines_view(traces, title))


class _Merged:
    """Views laid one under the other, with one list of words."""

    def __init__(self, roles: list[str]) -> None:
        self.colors = role_colors(dict.fromkeys(roles, ""))
        self._roles = list(self.colors)
        self.names: dict[str, Any] = {}
        self.methods: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        self.y = 0.0
        self.view: Any = {
            "picture": "timeline", "live": False, "bands_height": 0.0, "lanes": [], "marks": [], "phases": [],
            "phase_colors": PHASE_COLORS, "steps": [], "breakdown": [], "activities": [], "overlaps": [], "critical": [],
            "decisive": False, "critical_words": "", "drains": [], "pipelines": [],
        }  # fmt: skip

    def add(self, number: int, name: str, view: TimelineView) -> None:
        lanes, first, calls = self.view["lanes"], len(self.view["lanes"]), number * _CALLS_APART
        self.y += CASE_HEIGHT
        for i, lane in enumerate(view["lanes"]):
            lanes.append({**lane, "y": lane["y"] + self.y, "case": cut(name, 120) if i == 0 else ""})
        words = [r["name"] for r in view["roles"]]
        for mark in view["marks"]:
            moved = list(mark)
            method, label, kind = view["methods"][mark[_METHOD]], view["labels"][mark[_LABEL]], view["names"][mark[_NAME]]
            role = words[mark[_ROLE]]
            moved[_LANE] += first
            moved[_ROLE] = self._roles.index("" if role == "session" and "session" not in self.colors else role)
            self.names.setdefault(kind["name"], kind)
            moved[_NAME] = list(self.names).index(kind["name"])
            moved[_METHOD] = self.methods.setdefault(method, len(self.methods))
            moved[_LABEL] = self.labels.setdefault(label, len(self.labels))
            moved[_CALL] += calls
            self.view["marks"].append(moved)
        self.view["decisive"] = self.view["decisive"] or view["decisive"]
        if view["critical_words"]:
            more = f"{name}: {view['critical_words']}"
            self.view["critical_words"] += f"; {more}" if self.view["critical_words"] else more
        self.view["critical"] += [row + len(self.view["marks"]) - len(view["marks"]) for row in view["critical"]]
        self.view["drains"] += [{**d, "lane": d["lane"] + first} for d in view["drains"]]
        for row in view["pipelines"]:
            self.view["pipelines"].append({**row, "call_id": row["call_id"] + calls, "call": f"{name}: {row['call']}"})
        for table, key in (("breakdown", "call"), ("activities", "name")):
            self.view[table] += [{**row, key: f"{name}: {row[key]}"} for row in view[table]]  # type: ignore[literal-required]
        self.y += max((lane["y"] + lane["height"] for lane in view["lanes"]), default=14.0) + 6


def _case(name: str, trace: Trace) -> CaseRow:
    total, idle = trace.device_seconds()
    return {
        "title": name, "seconds": trace.duration_s, "predicted": trace.source == "predicted", "num_devices": len(trace.idle()),
        "device_s": total, "idle_device_s": idle, "idle_share": idle / total if total else 0.0,
    }  # fmt: skip
