"""The comparison picture: two accounts of the same calls as paired bars, with the signed error of the second.

Measured bars are solid, predicted and guessed ones hatched; a call that one account lacks says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from hfsdk.viz.frame import Picture, seconds_text

THIS, OTHER = "#3b76c4", "#b06a00"
WIDTH, LEFT, RIGHT, ROW = 900, 210, 190, 34


class AccountView(TypedDict):
    """One of the two accounts."""

    title: str
    source: str
    """"measured", "predicted" or "guess"."""


class ComparedView(TypedDict):
    """One row; ``None`` is missing."""

    call: str
    this_s: float | None
    other_s: float | None
    error_s: float | None
    error: float | None


class ComparisonView(TypedDict):
    """All the picture needs; the last row is the total."""

    picture: Literal["comparison"]
    title: str
    summary: str
    this: AccountView
    other: AccountView
    colors: dict[str, str]
    rows: list[ComparedView]
    points: float | None
    most_s: float


def comparison_view(data: Mapping[str, Any]) -> ComparisonView:
    """Turn ``Comparison.view()`` into the view of the picture."""
    rows: list[ComparedView] = [{k: _finite(row[k]) if k != "call" else row[k] for k in row} for row in data["rows"]]  # type: ignore[misc]
    this, other = data["this"], data["other"]
    score = "" if data["points"] is None else f", {data['points']:.0f} of 100 points"
    total = rows[-1]
    words = f"{other['title']} says {seconds_text(total['other_s'])}, {this['title']} {seconds_text(total['this_s'])}"
    return {
        "picture": "comparison", "title": f"{other['title']} against {this['title']}{score}", "summary": words + score,
        "this": this, "other": other, "colors": {"this": THIS, "other": OTHER}, "rows": rows, "points": _finite(data["points"]),
        "most_s": max([v for row in rows for v in (row["this_s"], row["other_s"]) if v is not None], default=0.0) or 1.0,
    }  # fmt: skip


class ComparisonPicture(Picture):
    """``ComparisonPicture(comparison_view(comparison.view()))``."""

    name = "comparison"

    def to_text(self) -> str:
        """Return one line per call: both times and the signed error."""
        view = self.view
        width = max(len(row["call"]) for row in view["rows"])
        lines = [view["title"]]
        for row in view["rows"]:
            both = f"{seconds_text(row['this_s']):>12} {seconds_text(row['other_s']):>12}"
            lines.append(f"  {row['call']:<{width}} {both} {error_text(row)}".rstrip())
        return "\n".join(lines)


def error_text(row: Mapping[str, Any]) -> str:
    """Say how far the other account is off: ``"+25 % (+0.30 s)"``."""
    if row["error_s"] is None:
        return ""
    sign = "+" if row["error_s"] >= 0 else "−"
    share = "" if row["error"] is None else f"{sign}{abs(100 * row['error']):.0f} % "
    return f"{share}({sign}{seconds_text(abs(row['error_s']))})"


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
