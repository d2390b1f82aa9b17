"""Several traces on one time axis: strategies side by side, or what was predicted over what was measured.

Every trace begins at 0 and has its lanes under its own name; a table totals device-seconds and how many of them were idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.core.trace import Trace, Traced, is_traced
from hfsdk.viz.frame import PHASE_COLORS, role_colors, seconds_text
from hfsdk.viz.plain import cut
from hfsdk.viz.timeline.view import CaseRow, TimelinePicture, TimelineView, timeline_view

CASE_HEIGHT = 26.0
"""Room for a trace's name above its lanes."""

_LANE, _NAME, _ROLE, _METHOD, _LABEL, _CALL = 1, 6, 7, 8, 9, 11
_CALLS_APART = 10**9
"""Between the call ids of two traces."""


def timelines_view(traces: Mapping[str, Traced], title: str = "") -> TimelineView:
    """Turn traces into one view; a mark's row is its row in its own trace's ``to_pandas``.

    Raises:
        OptionError: there is no trace, or something else.
    """
    if not traces:
        raise OptionError("there is no trace to draw; give them by name: {'colocate': session.trace[0], 'split': other.trace[0]}")
    for name, trace in traces.items():
        if not is_traced(trace):
            raise OptionError(f"{shown(name)} is a {type(trace).__name__}; give a trace, e.g. session.trace[0]")
    taken = {str(name): trace.snapshot() for name, trace in traces.items()}
    views = {name: timeline_view(trace) for name, trace in taken.items()}
    merged = _Merged([span.role for trace in taken.values() for span in trace])
    for number, (name, view) in enumerate(views.items()):
        merged.add(number, name, view)
    cases = [_case(name, trace) for name, trace in taken.items()]
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
    """Draw several traces on one time axis; see ``hfsdk.viz.timeline.several``."""
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
