"""What the timeline shows besides its spans: how generations run dry, pipelines and their bubbles, and what was decisive."""

from __future__ import annotations

from collections import defaultdict
from typing import TypedDict

from hfsdk.core.trace import Span, Trace

MOST_DRAINS = 8
"""At most so many devices have a lane of their own for sequences; those whose generations ended last."""
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
    """For every generation its points ``[seconds, running, waiting, kv_usage]``."""


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
    staged = {call_id for (call_id, _), mine in spans.items() if any(s.name == "wait" for s in mine)}
    rows: list[PipelineRow] = []
    for (call_id, device), mine in sorted(spans.items()):
        if call_id not in staged:
            continue
        seconds = {name: sum(s.duration_s or 0.0 for s in mine if s.name == name) for name in PASSES}
        total = sum(seconds.values())
        rows.append({
            "call_id": call_id, "call": f"{mine[0].role}.{mine[0].method}", "device": device,
            "micro_batches": sum(s.name == "forward" for s in mine),
            "start_s": round((min(s.start_ns for s in mine) - trace.start_ns) / 1e9, 6),
            "end_s": round((max(s.end_ns or 0 for s in mine) - trace.start_ns) / 1e9, 6),
            "forward_s": round(seconds["forward"], 6), "backward_s": round(seconds["backward"], 6),
            "wait_s": round(seconds["wait"], 6), "bubble": seconds["wait"] / total if total else 0.0,
        })  # fmt: skip
    return rows


def critical_rows(trace: Trace) -> tuple[list[int], bool, str]:
    """Return the rows (of ``to_pandas``) of the calls that decided how long the trace took, whether others did not, and words.

    The words say how many of the calls these are; they are empty where no call has ended. Beside measured calls, predicted ones
    do not count.
    """
    path = {id(span) for span in trace.critical_path()}
    ended = [span for span in trace.calls if span.end_ns is not None]
    ended = [span for span in ended if not span.predicted] or ended
    rows, decisive = [row for row, span in enumerate(trace.spans) if id(span) in path], len(path) < len(ended)
    words = f"{len(path)} of {len(ended)} calls are on the critical path" if decisive else ALL_CRITICAL if ended else ""
    return rows, decisive, words
