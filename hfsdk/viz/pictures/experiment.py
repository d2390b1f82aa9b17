"""The experiment's picture: mean and spread of every measure by algorithm, score against KL, and the verdict.

A line is the mean over the seeds, the band around it reaches from the lowest to the highest; in the last panel every step is a
point (KL, score), joined in order, so that who gets more score for the same KL stands above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from hfsdk.viz.frame import Picture, html_page
from hfsdk.viz.plain import cut, finite
from hfsdk.viz.svg import svg_document, svg_text, tag

PANEL_WIDTH, PANEL_HEIGHT, PANELS_PER_ROW = 300, 150, 3
WIDTH = PANELS_PER_ROW * (PANEL_WIDTH + 16)
MOST_NAME = 40
"""Characters of an algorithm's name."""

COLORS = ("#3b76c4", "#e08a1e", "#2a9d8f", "#b5487f", "#7a6cc9", "#6b8e23")
DASHES = (None, "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
"""Colour and dash of the algorithms, in order: either tells them apart."""

PANELS = {
    "score": "score", "kl": "KL per sequence (nats)", "length": "response length (tokens)", "seconds": "seconds per step",
    "tokens": "tokens generated per step",
}  # fmt: skip

Point = tuple[float, float]


class ExperimentView(TypedDict):
    """All the picture needs."""

    picture: str
    title: str
    summary: str
    curves: dict[str, dict[str, list[dict[str, float | None]]]]
    verdict: list[dict[str, Any]]
    judged: bool
    finished: str
    """How many of the runs are there, where an interrupt left some out; else empty."""


def experiment_view(data: Mapping[str, Any]) -> ExperimentView:
    """Turn ``Experiment.view()`` into the view of the picture."""
    seeds = len(data["seeds"])
    title = f"{' against '.join(data['algorithms'])}: {seeds} seed{'s' * (seeds != 1)}, {data['steps']} steps"
    scores = [f"{row['algorithm']} {row['score']:.3f}" for row in data["verdict"] if finite(row["score"]) is not None]
    finished = data["finished"]
    verdict = (" The baseline is met." if data["ok"] else " Below the baseline.") if data["judged"] and not finished else ""
    title += f"; {finished}" if finished else ""
    summary = f"{title}. Final scores: {', '.join(scores) or 'none'}.{verdict}"
    rows = [{k: v if isinstance(v, str) else finite(v) for k, v in row.items()} for row in data["verdict"]]
    for row in rows:
        row["over"] = "the seeds" if row["runs"] == seeds else f"{row['runs']} of {seeds} seeds"
    return {
        "picture": "experiment", "title": title, "summary": summary, "curves": data["curves"], "verdict": rows,
        "judged": data["judged"], "finished": finished,
    }  # fmt: skip


class ExperimentPicture(Picture):
    """``ExperimentPicture(experiment_view(experiment.view()))``; a still picture."""

    name = "experiment"

    def to_text(self) -> str:
        """Return the final scores and the verdict, one line per algorithm."""
        return "\n".join([self.view["title"], *(f"  {_words(row)}" for row in self.view["verdict"])])

    def to_html(self, full: bool = False) -> str:
        """Return the SVG as HTML; ``full`` for a whole page."""
        return html_page(self.view["title"], self.placeholder()) if full else self.placeholder()

    def to_svg(self) -> str:
        """Return small multiples, the frontier and the verdict as one SVG."""
        curves, body = self.view["curves"], svg_text(4, 15, cut(self.view["title"], 100), font_weight=600, font_size=13)
        styles = {name: (COLORS[i % len(COLORS)], DASHES[i % len(DASHES)]) for i, name in enumerate(curves)}
        x, y = 4.0, 30
        for name, (color, dash) in styles.items():
            room = 48 + 7 * min(MOST_NAME, len(name))
            if x + room > WIDTH:
                x, y = 4.0, y + 16
            body += tag("line", x1=x, x2=x + 24, y1=y, y2=y, stroke=color, stroke_width=2.4, stroke_dasharray=dash)
            body += svg_text(x + 29, y + 4, cut(name, MOST_NAME))
            x += room
        top = y + 16
        panels = [
            _panel(title, {name: _band(curves[name][key]) for name in curves}, styles, "step") for key, title in PANELS.items()
        ]
        panels.append(_panel("score against KL", {name: _frontier(curves[name]) for name in curves}, styles, "KL (nats)"))
        for i, panel in enumerate(panels):
            across, down = i % PANELS_PER_ROW, i // PANELS_PER_ROW
            body += tag("g", panel, transform=f"translate({across * (PANEL_WIDTH + 16)} {top + down * (PANEL_HEIGHT + 18)})")
        bottom = top + 2 * (PANEL_HEIGHT + 18) + 14
        for i, row in enumerate(self.view["verdict"]):
            body += tag("rect", x=4, y=bottom + 18 * i - 9, width=10, height=10, rx=2, fill=styles[row["algorithm"]][0])
            bold = 600 if row["verdict"] == "fail" else None
            body += svg_text(20, bottom + 18 * i, _words({**row, "algorithm": cut(row["algorithm"], MOST_NAME)}), font_weight=bold)
        height = bottom + 18 * len(self.view["verdict"]) + 4
        return svg_document(WIDTH, height, self.view["title"], self.view["summary"], body)


def _words(row: Mapping[str, Any]) -> str:
    """Say how one algorithm did."""
    if row["score"] is None:
        return f"{row['algorithm']}: no scores ({'simulated' if row['runs'] else 'no run is finished'})"
    text = f"{row['algorithm']}: final score {row['score']:.4f} ± {row['spread']:.4f} over {row['over']}"
    if row["least"] is None:
        return text
    sign = "✓" if row["verdict"] == "pass" else "✕"
    return f"{text}; baseline {row['baseline']:.4f}, at least {row['least']:.4f}: {sign} {row['verdict']}"


Series = tuple[Sequence[Point], Sequence[tuple[float, float, float]]]
"""A line's points, and its band as (x, low, high)."""


def _band(points: Sequence[Mapping[str, float | None]]) -> Series:
    drawn = [p for p in points if p["mean"] is not None]
    line = [(float(p["step"] or 0), float(p["mean"] or 0)) for p in drawn]
    return line, [(float(p["step"] or 0), float(p["low"] or 0), float(p["high"] or 0)) for p in drawn]


def _frontier(curves: Mapping[str, Sequence[Mapping[str, float | None]]]) -> Series:
    pairs = zip(curves["kl"], curves["score"], strict=True)
    return [(k["mean"], s["mean"]) for k, s in pairs if k["mean"] is not None and s["mean"] is not None], []


def _panel(title: str, series: Mapping[str, Series], styles: Mapping[str, tuple[str, str | None]], below: str) -> str:
    left, top, right, bottom = 52, 22, PANEL_WIDTH - 10, PANEL_HEIGHT - 18
    head = svg_text(left, 13, title, font_weight=600)
    xs = [x for line, _ in series.values() for x, _ in line]
    ys = [y for line, band in series.values() for y in [*(y for _, y in line), *(y for _, *ends in band for y in ends)]]
    if not xs:
        box = tag("rect", x=left, y=top, width=right - left, height=bottom - top, class_="none edge", stroke_dasharray="3 3")
        middle = {"text_anchor": "middle", "font_style": "italic", "class_": "sub"}
        return head + box + svg_text((left + right) / 2, (top + bottom) / 2, "not measured", **middle)
    pad = (max(ys) - min(ys)) * 0.06 or abs(ys[0]) * 0.1 or 1.0
    low, high, x0, x1 = min(ys) - pad, max(ys) + pad, min(xs), max(xs)

    def at(x: float, y: float) -> str:
        across = 0.5 if x1 == x0 else (x - x0) / (x1 - x0)
        return f"{left + across * (right - left):.1f},{bottom - (y - low) / (high - low) * (bottom - top):.1f}"

    parts = [head, tag("rect", x=left, y=top, width=right - left, height=bottom - top, class_="panel")]
    for value in _ticks(low, high):
        y = bottom - (value - low) / (high - low) * (bottom - top)
        parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(svg_text(left - 5, y + 3.5, f"{value:.4g}", text_anchor="end", font_size=9.5, class_="sub"))
    parts.append(svg_text(left, bottom + 12, f"{x0:.4g}", font_size=9.5, class_="sub"))
    parts.append(svg_text(right, bottom + 12, f"{x1:.4g}", text_anchor="end", font_size=9.5, class_="sub"))
    parts.append(svg_text((left + right) / 2, bottom + 12, below, text_anchor="middle", font_size=9.5, class_="sub"))
    for name, (line, band) in series.items():
        color, dash = styles[name]
        around = [at(x, high_y) for x, _, high_y in band] + [at(x, low_y) for x, low_y, _ in reversed(band)]
        if len(band) > 1:
            parts.append(tag("polygon", points=" ".join(around), fill=color, fill_opacity=0.16))
        points = [at(x, y) for x, y in line]
        parts.append(tag("polyline", points=" ".join(points), fill="none", stroke=color, stroke_width=1.7, stroke_dasharray=dash))
        if points:
            x_last, y_last = points[-1].split(",")
            parts.append(tag("circle", cx=x_last, cy=y_last, r=3, fill=color))
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Return about three round numbers between two."""
    raw = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(k * power for k in (1, 2, 5, 10) if k * power >= raw)
    first = math.ceil(low / size)
    return [k * size for k in range(first, first + 8) if k * size <= high]
