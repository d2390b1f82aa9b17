"""The static drawing of a timeline view: the same picture as ``static/timeline.js`` draws in the browser."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hfsdk.viz.frame import Hatches, fit_text, ink_on, shade, svg_document, svg_text, tag

MARK_FIELDS = (
    "row", "lane", "sub_row", "depth", "start_s", "duration_s", "name",
    "role", "method", "label", "flags", "call_id", "rank", "attrs",
)  # fmt: skip
"""What the numbers of one mark are; ``name``, ``role``, ``method`` and ``label`` index the view's lists."""

PREDICTED, RUNNING, PARENT = 1, 2, 4
"""Bits of ``flags``."""

WIDTH, LEFT, RIGHT, TOP = 980, 150, 64, 24
LONG_LABEL = 22
"""Labels of lanes with more characters are written smaller."""
STATIC_MARKS = 3000
MANY_GAPS = 60
"""With more, gaps of less than half a unit are left out."""
DRAIN_COLOR = "#2a78a8"


class Drawing:
    """The whole trace as SVG."""

    def __init__(self, view: Mapping[str, Any]) -> None:
        self.view = view
        self.hatch = Hatches()
        self.top = TOP + view["bands_height"]
        self.bottom = self.top + view["height"]
        room = 1.03 if any(m[10] & RUNNING for m in view["marks"]) else 1.0  # for the open ends
        self.scale: float = (WIDTH - LEFT - RIGHT) / max(view["duration_s"] * room, 1e-6)

    def _x(self, seconds: float) -> float:
        return LEFT + seconds * self.scale

    def svg(self) -> str:
        """Return the whole document."""
        view = self.view
        marks = view["marks"]
        if len(marks) > STATIC_MARKS:
            marks = self._thinned([m for m in marks if m[3] == 0])
        body = "".join(
            [
                *map(self._lane, view["lanes"]),
                *map(self._phase, view["phases"]),
                *self._axis(),
                *map(self._mark, marks),
                *map(self._drain, view["drains"]),
            ]
        )
        title = svg_text(2, 14, view["title"], font_weight=600, font_size=13)
        inside = title + tag("g", body + self._legend(), transform="translate(0 20)")
        return svg_document(WIDTH, self.bottom + 44, view["title"], view["summary"], self.hatch.defs() + inside)

    def _thinned(self, marks: list[list[Any]]) -> list[list[Any]]:
        """Leave out marks that end where, to the eye, the one drawn before them in their row ends, so that about 3,000 stay."""
        rows = len({(m[1], m[2]) for m in marks})
        least = max(0.8, rows * (WIDTH - LEFT - RIGHT) / STATIC_MARKS)
        drawn: dict[tuple[int, int], float] = {}
        kept = []
        for mark in marks:
            end = self._x(mark[4] + (mark[5] or 0.0))
            if end - drawn.get((mark[1], mark[2]), -math.inf) >= least:
                drawn[mark[1], mark[2]] = end
                kept.append(mark)
        return kept

    def _lane(self, lane: Mapping[str, Any]) -> str:
        y, middle = self.top + lane["y"], self.top + lane["y"] + lane["height"] / 2 + 4
        parts = [tag("rect", x=LEFT, y=y, width=WIDTH - LEFT - RIGHT, height=lane["height"], class_="panel")]
        parts += [
            tag("rect", x=self._x(a), y=y + 1, width=(b - a) * self.scale, height=lane["height"] - 2, class_="idle")
            for a, b in lane["idle"]
            if len(lane["idle"]) < MANY_GAPS or (b - a) * self.scale >= 0.5
        ]
        if lane["case"]:
            parts.append(svg_text(2, y - 6, lane["case"], font_size=12, font_weight=600))
        if lane["pool"]:
            parts.append(svg_text(LEFT, y - 4, f"pool {lane['pool']}", font_size=10, font_weight=600, class_="sub"))
        if lane["show_label"]:
            style = "italic" if lane["predicted"] else None
            size = 9 if lane["height"] < 14 else 9.5 if len(lane["label"]) > LONG_LABEL else 11
            parts.append(svg_text(LEFT - 8, middle, lane["label"], text_anchor="end", font_size=size, font_style=style))
            if lane["busy_share"] is not None:
                busy = f"{100 * lane['busy_share']:.0f} % busy"
                parts.append(svg_text(WIDTH - RIGHT + 6, middle, busy, class_="sub", font_size=min(size, 10.5)))
        return "".join(parts)

    def _drain(self, drain: Mapping[str, Any]) -> str:
        """Draw sequences running as an area and the share of the cache in use as a dashed line."""
        lane = self.view["lanes"][drain["lane"]]
        top, bottom = self.top + lane["y"] + 2, self.top + lane["y"] + lane["height"] - 1
        room, parts = bottom - top, list[str]()
        for run in drain["runs"]:
            xs = [self._x(p[0]) for p in run]
            area = f"M{xs[0]:.1f},{bottom:.1f}"
            usage = ""
            for i, point in enumerate(run):
                end = xs[i + 1] if i + 1 < len(run) else xs[i]
                y, full = bottom - room * point[1] / max(1, drain["most"]), bottom - room * min(1.0, point[3])
                area += f" L{xs[i]:.1f},{y:.1f} L{end:.1f},{y:.1f}"
                usage += f" {'L' if usage else 'M'}{xs[i]:.1f},{full:.1f}"
            area += f" L{xs[-1]:.1f},{bottom:.1f} Z"
            parts.append(tag("path", d=area, fill=DRAIN_COLOR, fill_opacity=0.45, stroke=DRAIN_COLOR))
            parts.append(tag("path", d=usage.strip(), fill="none", class_="edge", stroke_dasharray="3 2"))
        parts.append(svg_text(WIDTH - RIGHT + 6, top + 12, f"most {drain['most']}", class_="sub", font_size=10))
        return "".join(parts)

    def _phase(self, band: Mapping[str, Any]) -> str:
        x0, x1 = self._x(band["start_s"]), self._x(self.view["now_s"] if band["end_s"] is None else band["end_s"])
        color, y, width = (
            self.view["phase_colors"].get(band["phase"], "#77808a"),
            TOP + band["row"] * 16,
            max(1.0, x1 - x0 - 1),
        )
        text = svg_text(x0 + 4, y + 10, fit_text(band["phase"], width), font_size=10)
        return (
            tag(
                "rect",
                x=x0,
                y=self.top,
                width=max(1.0, x1 - x0),
                height=self.view["height"],
                fill=color,
                fill_opacity=0.1,
            )
            + tag("rect", x=x0, y=y, width=width, height=14, rx=2, fill=color, fill_opacity=0.22)
            + tag("rect", x=x0, y=y + 12, width=width, height=2, fill=color)
            + text
        )

    def _axis(self) -> list[str]:
        total = max(self.view["duration_s"], 1e-6)
        power = 10.0 ** math.floor(math.log10(total / 8))
        size = next(k * power for k in (1, 2, 5, 10) if k * power >= total / 8)
        digits = max(0, min(6, -math.floor(math.log10(size) + 1e-9)))
        parts = []
        for k in range(math.floor(total / size + 1e-9) + 1):
            x = self._x(k * size)
            parts.append(tag("line", x1=x, x2=x, y1=self.top, y2=self.bottom, class_="grid"))
            parts.append(svg_text(x, 14, f"{k * size:.{digits}f} s", text_anchor="middle", font_size=10, class_="sub"))
        for step in self.view["steps"] if len(self.view["steps"]) > 1 else []:
            x = self._x(step["start_s"])
            parts.append(tag("line", x1=x, x2=x, y1=TOP - 4, y2=self.bottom, class_="edge", stroke_width=1.2))
            parts.append(svg_text(x + 3, self.bottom + 12, f"step {step['step']:.0f}", font_size=10, class_="sub"))
        return parts

    def _mark(self, mark: list[Any]) -> str:
        view = self.view
        fields = dict(zip(MARK_FIELDS, mark, strict=True))
        lane, name, flags = view["lanes"][fields["lane"]], view["names"][fields["name"]], fields["flags"]
        color = shade(name["color"] or view["roles"][fields["role"]]["color"], name["tone"])
        row_height, depth = lane["row_height"], fields["depth"]
        inset, pad = (13 if row_height >= 30 else 4 if row_height >= 16 else 1), (2 if row_height >= 16 else 0.5)
        end = view["now_s"] if fields["duration_s"] is None else fields["start_s"] + fields["duration_s"]
        x, width = self._x(fields["start_s"]), max(0.6, (end - fields["start_s"]) * self.scale)
        y = self.top + lane["y"] + fields["sub_row"] * row_height + pad + depth * inset
        height = max(1.5, row_height - 2 * pad - depth * (inset + 1))
        predicted, parent, running = flags & PREDICTED, flags & PARENT, flags & RUNNING
        outlined = predicted or parent
        drawn = tag(
            "rect", x=x, y=y, width=width, height=height, rx=2 if width > 4 else 0, data_row=fields["row"],
            fill=self.hatch(color) if predicted and not parent else color,
            fill_opacity=(0.08 if predicted else 0.3) if parent else 0.72 if running else None,
            stroke=color if outlined or running else None, stroke_dasharray="3 2" if running else None,
        )  # fmt: skip
        if running:
            drawn += tag("path", d=f"M{x + width:.1f},{y:.1f} l5,{height / 2:.1f} l-5,{height / 2:.1f} z", fill=color)
        text = fit_text(view["labels"][fields["label"]], width)
        if not text or height < 11:
            return drawn
        baseline = y + 10 if parent and height > 20 else y + height / 2 + 3.5
        if predicted and not parent:
            drawn += tag("rect", x=x + 2, y=baseline - 9, width=len(text) * 5.7 + 4, height=12, class_="paper")
        ink = {"class_": "fg"} if outlined else {"class_": None, "fill": ink_on(color)}
        return drawn + svg_text(x + 4, baseline, text, font_size=10, **ink)

    def _legend(self) -> str:
        view, grey = self.view, "#77808a"
        entries: list[tuple[str, dict[str, Any]]] = [(r["name"], {"fill": r["color"]}) for r in view["roles"]]
        entries += [(n["name"], {"fill": shade(n["color"], n["tone"])}) for n in view["names"] if n["color"]]
        entries += [("measured", {"fill": grey}), ("predicted", {"fill": self.hatch(grey), "stroke": grey})]
        entries += [
            ("running", {"fill": grey, "fill_opacity": 0.5, "stroke": grey, "stroke_dasharray": "3 2"}),
            ("idle", {"class_": "idle"}),
        ]
        if view["drains"]:
            entries.append(("sequences running; dashed: cache in use", {"fill": DRAIN_COLOR, "fill_opacity": 0.45}))
        x, y, parts = 2.0, self.bottom + (14 if len(view["steps"]) > 1 else 8), list[str]()
        for text, style in entries:
            if x + 30 + len(text) * 6 > WIDTH:
                break
            parts.append(tag("rect", x=x, y=y + 1, width=14, height=9, rx=2, **style))
            parts.append(svg_text(x + 19, y + 9, text, font_size=10.5, class_="sub"))
            x += 34 + len(text) * 6
        return "".join(parts)
