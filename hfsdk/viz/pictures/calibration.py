"""The calibration picture: seconds of every call as measured, and as predicted before and after the model was fitted.

Measured bars are solid, predicted ones hatched; next to them the error before and after, below them the constants that changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from hfsdk.viz.frame import Picture, seconds_text
from hfsdk.viz.plain import finite

SIDES = {"measured": "#3b76c4", "before": "#8b949e", "after": "#b06a00"}
"""Colour of each bar of a call, top to bottom."""


class CalibratedView(TypedDict):
    """One call; ``None`` is missing."""

    call: str
    measured_s: float | None
    before_s: float | None
    after_s: float | None
    error_before: float | None
    """Predicted over measured - 1."""
    error_after: float | None


class ConstantView(TypedDict):
    """One constant of the model."""

    name: str
    before: float | None
    after: float | None
    determined: bool


class BandView(TypedDict):
    """The multipliers between which four in five of measured over predicted lie, for one kind of work."""

    kind: str
    low: float | None
    high: float | None
    kept: str
    """How many measurements that were left out in turn were within, e.g. ``"9 of 11"``; empty where that is not known."""


class CalibrationView(TypedDict):
    """All the picture needs."""

    picture: Literal["calibration"]
    title: str
    summary: str
    colors: dict[str, str]
    calls: list[CalibratedView]
    constants: list[ConstantView]
    bands: list[BandView]
    """The bands by kind; that of all kinds together is the first."""
    most_s: float


def calibration_view(data: Mapping[str, Any]) -> CalibrationView:
    """Turn ``Calibration.view()`` into the view of the picture."""
    calls = [_call(row) for row in data["calls"]]
    errors = [finite(data[key]) for key in ("error_before", "error_after")]
    before, after = ("not known" if e is None else f"{100 * e:.0f} %" for e in errors)
    title = f"Calibration: median error of a call {before} before, {after} after"
    fitted = sum(bool(c["determined"]) for c in data["constants"])
    seconds = [row[key] for row in calls for key in ("measured_s", "before_s", "after_s")]
    bands = sorted(data["bands"].items(), key=lambda item: item[0] != "")
    return {
        "picture": "calibration", "title": title,
        "summary": f"{title}; {fitted} of {len(data['constants'])} constants fitted to {len(calls)} calls",
        "colors": SIDES, "calls": calls,
        "constants": [
            {"name": c["name"], "before": finite(c["before"]), "after": finite(c["after"]), "determined": bool(c["determined"])}
            for c in data["constants"]
        ],
        "bands": [
            {"kind": kind or "all kinds", "low": finite(low), "high": finite(high),
             "kept": _coverage(data.get("kept", {}).get(kind))}
            for kind, (low, high) in bands
        ],
        "most_s": max([s for s in seconds if s is not None], default=0.0) or 1.0,
    }  # fmt: skip


class CalibrationPicture(Picture):
    """``CalibrationPicture(calibration_view(session.calibrate().view()))``."""

    name = "calibration"

    def to_text(self) -> str:
        """Return a line per call, then a line per constant."""
        view = self.view
        width = max([len(row["call"]) for row in view["calls"]], default=0)
        lines = [view["title"]]
        for row in view["calls"]:
            three = " ".join(f"{seconds_text(row[f'{side}_s']):>12}" for side in SIDES)
            lines.append(f"  {row['call']:<{width}} {three}  {error_text(row['error_before'])} -> {error_text(row['error_after'])}")
        for c in view["constants"]:
            lines.append(f"  {c['name']}: {_change(c)}")
        return "\n".join(lines)


def error_text(error: float | None) -> str:
    """Say a signed error: ``"+25 %"``."""
    return "–" if error is None else f"{'+' if error >= 0 else '−'}{abs(100 * error):.0f} %"


def _coverage(coverage: Sequence[int] | None) -> str:
    return f"{coverage[0]} of {coverage[1]}" if coverage and coverage[1] else ""


def _change(constant: Mapping[str, Any]) -> str:
    before, after = ("not known" if constant[k] is None else f"{constant[k]:.4g}" for k in ("before", "after"))
    return f"{before} -> {after}" if constant["determined"] else f"{before} (the run says too little of it)"


def _call(row: Mapping[str, Any]) -> CalibratedView:
    measured, before, after = (finite(row[key]) for key in ("measured_s", "before_s", "after_s"))
    errors = [predicted / measured - 1 if measured and predicted is not None else None for predicted in (before, after)]
    return {
        "call": row["call"], "measured_s": measured, "before_s": before, "after_s": after,
        "error_before": errors[0], "error_after": errors[1],
    }  # fmt: skip
