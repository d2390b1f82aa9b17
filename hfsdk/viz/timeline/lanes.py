"""The lanes of a timeline: calls of a role, spans of a device; which row of which lane a span stands in."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Literal, TypedDict

from hfsdk.core.trace import Span, Trace
from hfsdk.viz.plain import cut
from hfsdk.viz.timeline.parts import DRAIN_HEIGHT, DrainView

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
    """Written above the lanes of one of several traces; empty elsewhere."""
    pool: str
    """Written above the lane where a pool's lanes begin; empty elsewhere and where there is one pool."""
    predicted: bool
    y: float
    height: float
    row_height: float
    show_label: bool
    busy_share: float | None
    """Of the time; waiting for another pipeline stage is not busy."""
    idle: list[list[float]]


class Lanes:
    """Which lane, row and depth every span has."""

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
