"""The static drawing of a credit view: the same panels as ``static/credit.js`` draws in the browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hfsdk.viz.credit.gae import gae
from hfsdk.viz.frame import Hatches, svg_document, svg_text, tag
from hfsdk.viz.tokens.tokenmath import Array, unpack

WIDTH, LEFT, RIGHT = 980, 150, 14
MOST_TOKENS = 64
BLUE, ORANGE, GREEN, GREY = "#2f7fd0", "#e0761b", "#2a9d8f", "#77808a"


def credit_svg(view: Mapping[str, Any]) -> str:
    """Return rewards, values, deltas (arriving at the first token), weights, advantages and returns of the first tokens."""
    columns = {name: unpack(text) for name, text in view["columns"].items()}
    deltas, advantages = gae(columns["rewards"], columns["values"], view["gamma"], view["lam"])
    weights = (view["gamma"] * view["lam"]) ** np.arange(len(deltas), dtype=np.float64)
    draw = _Panels(view)
    draw.bars("rewards", columns["rewards"], 60, color=GREY)
    draw.bars("values", columns["values"], 50, color=GREEN)
    draw.bars("deltas", deltas, 70, arriving=weights * deltas)
    draw.bars("weight (γλ)^k", weights, 36, hatched=True, color=GREY)
    draw.bars("advantages", advantages, 80, hatched=True, line=columns.get("own"))
    draw.bars("returns", advantages + columns["values"], 50, hatched=True, color=GREEN, line=columns.get("returns"))
    return draw.document()


class _Panels:
    def __init__(self, view: Mapping[str, Any]) -> None:
        self.view = view
        self.count = min(len(view["tokens"]), MOST_TOKENS)
        self.cell = min(40.0, (WIDTH - LEFT - RIGHT) / max(1, self.count))
        self.hatch = Hatches()
        self.parts = [svg_text(2, 15, view["title"], font_weight=600, font_size=13), svg_text(2, 31, view["note"], class_="sub")]
        self.y = 48.0
        if not self.count:
            self.parts.append(svg_text(LEFT, self.y + 14, "no response tokens", class_="sub"))
        words = [token[:6] for token in view["tokens"][: self.count]]
        turned = max(map(len, words), default=0) * 7 > self.cell
        self.y += 36 if turned else 0
        for k, word in enumerate(words):
            x = LEFT + (k + 0.5) * self.cell
            place: dict[str, Any] = {"text_anchor": "middle"}
            if turned:
                x += 4
                place = {"text_anchor": "start", "transform": f"rotate(-90 {x:.1f} {self.y:g})"}
            self.parts.append(svg_text(x, self.y, word, font_family="monospace", **place))
        self.y += 10

    def bars(
        self, name: str, numbers: Array, height: float, *, color: str | None = None, hatched: bool = False,
        arriving: Array | None = None, line: Array | None = None,
    ) -> None:  # fmt: skip
        """Draw one panel; ``arriving`` fills the outlined bars in part, ``line`` is the batch's own."""
        numbers = numbers[: self.count]
        shown = np.concatenate([numbers, *([line[: self.count]] if line is not None else []), [0.0]])
        finite = shown[np.isfinite(shown)]
        low, high = float(finite.min()), float(finite.max())
        size = (high - low) or 1.0
        top = self.y

        def y_of(value: float) -> float:
            return top + (high - value) / size * height

        zero = y_of(0.0)
        parts = [svg_text(LEFT - 8, top + 11, name, text_anchor="end", font_weight=600)]
        parts.append(svg_text(LEFT - 8, top + 24, f"{low:.3g} to {high:.3g}", text_anchor="end", class_="sub", font_size=9.5))
        for k, value in enumerate(numbers):
            x, width = LEFT + k * self.cell + 0.5, max(1.0, self.cell - 1.5)
            row = self.view["first_row"] + k
            if not np.isfinite(value):
                parts.append(tag("rect", x=x, y=top, width=width, height=height, fill="none", class_="edge", stroke_dasharray="2 2",
                                 data_row=row))  # fmt: skip
                continue
            scored = name == "rewards" and self.view["score"] is not None and k == len(self.view["tokens"]) - 1
            own = color if color and not scored else BLUE if value >= 0 else ORANGE
            box = {"x": x, "width": width, "y": min(zero, y_of(value)), "height": max(0.6, abs(y_of(value) - zero))}
            if arriving is not None:
                parts.append(tag("rect", **box, fill="none", stroke=own, stroke_width=0.8, data_row=row))
                box |= {"y": min(zero, y_of(arriving[k])), "height": abs(y_of(arriving[k]) - zero)}
            fill = self.hatch(own) if hatched or arriving is not None else own
            parts.append(tag("rect", **box, fill=fill, data_row=row))
        parts.append(tag("line", x1=LEFT, x2=LEFT + self.count * self.cell, y1=zero, y2=zero, class_="edge"))
        if line is not None:
            for k, value in enumerate(line[: self.count]):
                if np.isfinite(value):
                    x = LEFT + k * self.cell
                    parts.append(tag("line", x1=x, x2=x + self.cell, y1=y_of(value), y2=y_of(value), class_="edge", stroke_width=2))
        self.parts += parts
        self.y += height + 14

    def document(self) -> str:
        """Return the whole SVG with its legend."""
        rest = len(self.view["tokens"]) - self.count
        words = "solid: the batch's columns · hatched: recomputed · line: the batch's own · filled part of a delta: what arrives "
        words += "at the first token" + (f" · and {rest} more tokens" if rest else "")
        self.parts.append(svg_text(2, self.y + 8, words, class_="sub"))
        body = self.hatch.defs() + "".join(self.parts)
        return svg_document(WIDTH, self.y + 20, self.view["title"], f"{self.view['summary']}. {self.view['note']}", body)
