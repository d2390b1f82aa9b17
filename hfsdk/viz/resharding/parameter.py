"""One parameter of a weight transition, box by box on every rank, as the trainer and as the rollout hold it; a still picture."""

from __future__ import annotations

from typing import ClassVar

from hfsdk.viz.frame import OTHER_COLORS, TRANSFER_COLOR, Picture, html_page
from hfsdk.viz.svg import Hatches, ink_on, svg_document, svg_text, tag


class ParameterPicture(Picture):
    """One parameter on every rank: its rows, or columns where it is cut by these, in the trainer's order and the rollout's."""

    name: ClassVar[str] = "parameter"
    HEIGHT: ClassVar[int] = 220

    def to_text(self) -> str:
        """Return one line a rank."""
        lines = [self.view["title"]]
        for rank in self.view["ranks"]:
            held = " ".join(box["label"] for box in rank["before"]) or "-"
            after = " ".join(box["label"] + ("" if box["own"] else f"(from {box['source']})") for box in rank["after"]) or "-"
            lines.append(f"rank {rank['rank']}: {held}  ->  {after}")
        return "\n".join(lines)

    def to_html(self, full: bool = False) -> str:
        """Return the SVG as HTML; ``full`` for a page of its own."""
        return html_page(self.view["title"], self.placeholder()) if full else self.placeholder()

    def to_svg(self) -> str:
        """Draw two columns a rank: before and after; what comes from another rank is outlined in red and hatched."""
        self._hatch = Hatches()
        boxes = [box for rank in self.view["ranks"] for box in (*rank["before"], *rank["after"])]
        names, by_columns = sorted({box["tensor"] for box in boxes}), any(box["place"].startswith(":") for box in boxes)
        colors = {name: OTHER_COLORS[i % len(OTHER_COLORS)] for i, name in enumerate(names)}
        most = max(sum(box["rows"] for box in rank[side]) for rank in self.view["ranks"] for side in ("before", "after")) or 1
        parts = [svg_text(2, 16, self.view["title"], font_weight=600, font_size=13)]
        for i, name in enumerate(names):
            parts.append(tag("rect", x=4 + i * 150, y=28, width=10, height=10, fill=colors[name]))
            parts.append(svg_text(18 + i * 150, 37, name + (", columns" if by_columns else ""), class_="sub"))
        for i, rank in enumerate(self.view["ranks"]):
            x = 8 + i * 224
            parts.append(svg_text(x, 58, f"rank {rank['rank']}", font_weight=600))
            for column, side in enumerate(("before", "after")):
                left = x + column * 106
                parts.append(svg_text(left, 72, {"before": "trainer", "after": "rollout"}[side], class_="sub"))
                y = 78.0
                for box in rank[side]:
                    height = self.HEIGHT * box["rows"] / most
                    own = side == "before" or box["own"]
                    fill = colors[box["tensor"]] if own else self._hatch(colors[box["tensor"]])
                    label = box["place"].removeprefix(":, ") if by_columns else box["label"]  # what does not fit would be cut
                    words = label + ("" if own else f" from {box['source']}")
                    hint = tag("title", f"{box['tensor']} {box['place']}: {words}")
                    parts.append(tag(
                        "rect", hint, x=left, y=y, width=98, height=max(1.0, height - 1), fill=fill,
                        stroke=TRANSFER_COLOR if not own else None,
                    ))  # fmt: skip
                    if height >= 11:
                        ink = {"fill": ink_on(colors[box["tensor"]]), "class_": None} if own else {}
                        if not own:  # words on a hatch are hard to read
                            behind = {"x": left + 2, "y": y + height / 2 - 6, "width": len(words) * 5.1, "height": 11}
                            parts.append(tag("rect", **behind, class_="paper"))
                        parts.append(svg_text(left + 4, y + height / 2 + 4, words, font_size=9, **ink))
                    y += height
        width = 8 + len(self.view["ranks"]) * 224
        return svg_document(
            max(width, 420), 90 + self.HEIGHT, self.view["title"], self.view["summary"], self._hatch.defs() + "".join(parts)
        )
