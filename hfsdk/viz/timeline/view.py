"""The timeline picture: when what ran.

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

from hfsdk.core.trace import Span, Trace
from hfsdk.viz.frame import PHASE_COLORS, TRANSFER_COLOR, Picture, role_colors, seconds_text
from hfsdk.viz.timeline.lanes import WAITS, Lanes, LaneView, add_drains, end_s, gaps
from hfsdk.viz.timeline.parts import DrainView, PipelineRow, critical_rows, drains_of, pipelines_of

MARK_FIELDS = (
    "row", "lane", "sub_row", "depth", "start_s", "duration_s", "name",
    "role", "method", "label", "flags", "call_id", "rank", "attrs",
)  # fmt: skip
"""What the numbers of one mark are; ``name``, ``role``, ``method`` and ``label`` index the view's lists."""

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
    """What spans of a colour of their own have in common; empty for the others."""


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
    """For how long these pools, and no others, were at work."""

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
    """Of several traces on one axis; else empty."""


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
    """When what ran. ``TimelinePicture(timeline_view(trace))``."""

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
            found = sorted(sums.items(), key=lambda item: -item[1])
            found += [("between sub-spans", rest)] if rest > 0.005 * total_s else []
            for name, seconds in [*found, ("idle", idle)]:
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
