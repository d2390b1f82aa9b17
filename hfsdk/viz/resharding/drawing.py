"""A weight transition drawn: what each rank keeps and receives, from whom, and how that compares; one parameter box by box.

::

    rank 0  [### own ###|// from 2 //]        to  0   1   2   3        DS-Chat       ===================
    rank 1  [### own ###|// from 3 //]   from 0   .       #            HybridFlow    =====
    ...                                       1       .       #        planned       /////

What is planned is hatched, what was measured is solid. In a browser (``static/reshard.js``) one parameter, or all, goes step by
step from the trainer's shards to the rollout's; the view is :func:`hfsdk.viz.resharding.view.reshard_view`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hfsdk.viz.frame import (
    OTHER_COLORS,
    TRANSFER_COLOR,
    Hatches,
    Picture,
    bytes_text,
    fit_text,
    ink_on,
    shade,
    svg_document,
    svg_text,
    tag,
)

OWN_COLOR = "#3b76c4"
ASIDE_COLOR = "#8a94a0"
PARTS = (("own", OWN_COLOR), ("received", TRANSFER_COLOR), ("aside", ASIDE_COLOR))
"""What a rank's bar is made of; aside is what it trains and does not generate with."""
MAX_RANKS = 16
"""More ranks are drawn as a matrix without words."""
LEFT, BAR, ROW, GAP, CELL = 62, 300, 20, 34, 46


class _Still(Picture):
    """A picture without a script of its own: the static one is all there is."""

    def to_html(self, full: bool = False) -> str:
        """Return the picture as HTML; ``full=True`` makes it a whole page."""
        from hfsdk.viz.frame import html_page

        body = f'<div class="hf-picture" data-picture="{self.name}">{self.placeholder()}</div>'
        return html_page(str(self.view.get("title", "hfsdk")), body) if full else body


class ReshardPicture(Picture):
    """A plan, what was measured beside it, or plans to choose from. ``ReshardPicture(reshard_view(plan))``."""

    name: ClassVar[str] = "reshard"

    def to_text(self) -> str:
        """Return the title and one line a rank."""
        lines = []
        for variant in self.view["variants"]:
            lines.append(f"{variant['title']} ({variant['grouping']})")
            for rank in variant["ranks"][:MAX_RANKS]:
                measured = "" if rank["measured"] is None else f", measured {bytes_text(rank['measured'])}"
                lines.append(
                    f"rank {rank['rank']}: holds {bytes_text(rank['held'])}, needs {bytes_text(rank['needed'])}: "
                    f"{bytes_text(rank['own'])} its own, {bytes_text(rank['received'])} received{measured}"
                )
            if variant["num_ranks"] > MAX_RANKS:
                lines.append(f"and {variant['num_ranks'] - MAX_RANKS} more ranks")
        return "\n".join(lines)

    def to_svg(self) -> str:
        """Draw every variant: ranks and matrix side by side, the ladder below."""
        self._hatch = Hatches()
        parts, top, wide = [], 0.0, 900.0
        for variant in self.view["variants"]:
            drawn, width, height = self._variant(variant)
            parts.append(tag("g", drawn, transform=f"translate(0 {top:.0f})"))
            top, wide = top + height + 16, max(wide, width)
        return svg_document(wide, top, self.view["title"], self.view["summary"], self._hatch.defs() + "".join(parts))

    def _variant(self, variant: Mapping[str, Any]) -> tuple[str, float, float]:
        ranks = variant["ranks"]
        title = variant["title"] + (f", grouped {variant['grouping']}" if len(self.view["variants"]) > 1 else "")
        parts = [svg_text(2, 16, title, font_weight=600, font_size=13)]
        bars, bars_height = self._ranks(ranks) if len(ranks) <= MAX_RANKS else ("", 0)
        parts.append(tag("g", bars, transform="translate(0 34)"))
        matrix, side = self._matrix(variant)
        across = LEFT + BAR + 150 if bars else 8
        parts.append(tag("g", matrix, transform=f"translate({across} 34)"))
        ladder, ladder_height = self._ladder(variant["ladder"])
        top = 34 + max(bars_height, side) + GAP
        parts.append(tag("g", ladder, transform=f"translate(0 {top})"))
        return "".join(parts), across + 18 + len(variant["matrix"]) * 14, top + ladder_height + 8

    def _ranks(self, ranks: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
        longest = max(sum(rank[name] for name, _ in PARTS) for rank in ranks) or 1
        words = "each rank after the transition: its own (blue), received (red)"
        words += ", kept aside (grey)" * any(rank["aside"] for rank in ranks)
        parts = [svg_text(LEFT, 0, words, class_="sub")]
        for i, rank in enumerate(ranks):
            y, x = 10 + i * (ROW + 4), float(LEFT)
            parts.append(svg_text(0, y + 14, f"rank {rank['rank']}", data_row=i))
            for name, color in PARTS:
                count = rank[name]
                width = BAR * count / longest
                if width:
                    measured = {"own": rank["own_measured"], "received": rank["measured"]}.get(name)
                    fill = color if measured is not None else self._hatch(color)
                    hint = tag("title", f"rank {rank['rank']}: {name} {bytes_text(count)}")
                    parts.append(tag("rect", hint, x=x, y=y, width=width, height=ROW, fill=fill, stroke=color, data_row=i))
                    label = fit_text(bytes_text(count), width)
                    if label and name == "own" and measured is None:
                        parts.append(tag("rect", x=x + 2, y=y + 4, width=len(label) * 6.4 + 4, height=ROW - 8, class_="paper"))
                    if label and name == "own":
                        ink = {} if measured is None else {"fill": ink_on(color), "class_": None}
                        parts.append(svg_text(x + 4, y + 14, label, **ink))
                    x += width
            sources = ", ".join(f"{s}" for s in rank["sources"])
            words = f"{bytes_text(rank['received'])} from {sources}" if sources else "nothing to receive"
            parts.append(svg_text(x + 6, y + 14, words, class_="sub"))
        return "".join(parts), 10 + len(ranks) * (ROW + 4)

    def _matrix(self, variant: Mapping[str, Any]) -> tuple[str, int]:
        measured, by = variant["measured"] is not None, self.view["by"]
        matrix = variant["measured"] if measured else variant["matrix"]
        count = len(matrix)
        cell = CELL if count <= 8 else max(3, 368 // count)
        most = max(max(row) for row in matrix) or 1
        parts = [svg_text(0, 0, f"bytes from {by} (row) to {by} (column), {'measured' if measured else 'planned'}", class_="sub")]
        if count > 8:
            return self._large_matrix(matrix, cell, parts, measured)
        for source, row in enumerate(matrix):
            for target, num_bytes in enumerate(row):
                x, y, height = 18 + target * cell, 24 + source * cell / 2, cell / 2
                color = OWN_COLOR if source == target else TRANSFER_COLOR
                hint = tag("title", f"{source} to {target}: {bytes_text(num_bytes)}")
                fill = shade(color, 0.85 - 0.6 * num_bytes / most) if measured else self._hatch(color)
                parts.append(tag(
                    "rect", hint, x=float(x), y=float(y), width=cell - 1.0, height=height - 1.0, fill=fill if num_bytes else None,
                    class_=None if num_bytes else "panel", stroke=color if num_bytes else None,
                ))  # fmt: skip
                if num_bytes:
                    words = bytes_text(num_bytes).replace(" ", "")
                    if not measured:
                        parts.append(tag("rect", x=x + 2, y=y + 5, width=len(words) * 5.4 + 2, height=height - 10, class_="paper"))
                    ink = {"fill": "#15181c", "class_": None} if measured else {}
                    parts.append(svg_text(x + 3, y + 15, words, font_size=9, **ink))
        parts += [svg_text(18 + i * cell + cell / 2 - 4, 18, str(i), class_="sub") for i in range(count)]
        parts += [svg_text(4, 24 + i * cell / 2 + 15, str(i), class_="sub") for i in range(count)]
        return "".join(parts), round(24 + count * cell / 2)

    def _large_matrix(self, matrix: Sequence[Sequence[int]], cell: int, parts: list[str], measured: bool) -> tuple[str, int]:
        """Draw cells without words, as one path for each of a few strengths."""
        count, most = len(matrix), max(max(row) for row in matrix) or 1
        parts.append(tag("rect", x=18, y=24, width=count * cell, height=count * cell, class_="panel"))
        paths: dict[tuple[str, int], list[str]] = {}
        for source, row in enumerate(matrix):
            for target, num_bytes in enumerate(row):
                if num_bytes:
                    color = OWN_COLOR if source == target else TRANSFER_COLOR
                    at = f"M{18 + target * cell} {24 + source * cell}h{cell - 1}v{cell - 1}h-{cell - 1}z"
                    paths.setdefault((color, round(4 * num_bytes / most)), []).append(at)
        for (color, strength), d in paths.items():
            fill = color if measured else self._hatch(color)
            parts.append(tag("path", d="".join(d), fill=fill, fill_opacity=0.3 + 0.17 * strength))
        return "".join(parts), 24 + count * cell

    def _ladder(self, rows: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
        longest = max(row["received"] for row in rows) or 1
        parts = [svg_text(0, 0, "bytes a rank receives, by formula and counted", class_="sub")]
        for i, row in enumerate(rows):
            y, width = 10 + i * (ROW + 2), BAR * row["received"] / longest
            fill = TRANSFER_COLOR if row["measured"] else self._hatch(TRANSFER_COLOR)
            parts.append(svg_text(0, y + 14, row["name"]))
            hint = tag("title", f"{row['name']}: {bytes_text(row['received'])}, {row['counts']}")
            parts.append(tag("rect", hint, x=110, y=y, width=max(width, 0.5), height=ROW - 4, fill=fill, stroke=TRANSFER_COLOR))
            words = f"{bytes_text(row['received'])}   {row['counts']}"
            if row["peak"] is not None:
                words += f"; {bytes_text(row['peak'])} at the end"
            parts.append(svg_text(110 + width + 6, y + 13, words, class_="sub"))
        return "".join(parts), 10 + len(rows) * (ROW + 2)


class ParameterPicture(_Still):
    """One parameter on every rank: its rows in the trainer's order, and in the rollout's (``ReshardPlan.view_of(...)``)."""

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

    def to_svg(self) -> str:
        """Draw two columns a rank: before and after; what comes from another rank is outlined in red and hatched."""
        self._hatch = Hatches()
        names = sorted({box["tensor"] for rank in self.view["ranks"] for box in (*rank["before"], *rank["after"])})
        colors = {name: OTHER_COLORS[i % len(OTHER_COLORS)] for i, name in enumerate(names)}
        most = max(sum(box["rows"] for box in rank[side]) for rank in self.view["ranks"] for side in ("before", "after")) or 1
        parts = [svg_text(2, 16, self.view["title"], font_weight=600, font_size=13)]
        for i, name in enumerate(names):
            parts.append(tag("rect", x=4 + i * 150, y=28, width=10, height=10, fill=colors[name]))
            parts.append(svg_text(18 + i * 150, 37, name, class_="sub"))
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
                    words = box["label"] + ("" if own else f" from {box['source']}")
                    hint = tag("title", f"{box['tensor']} rows {box['first']}:{box['first'] + box['rows']}: {words}")
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
