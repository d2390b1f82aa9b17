"""The static drawing of a dataflow view: the same picture as ``static/dataflow.js`` draws in the browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfsdk.viz.dataflow.layering import OUT
from hfsdk.viz.frame import Hatches, svg_document, svg_text, tag


def drawing(view: Mapping[str, Any]) -> str:
    """Return the whole document."""
    hatch = Hatches()
    body = "".join([*map(_band, _with_height(view)), *map(_line, view["edges"]), *(_box(c, view, hatch) for c in view["calls"])])
    if not view["calls"]:
        body = svg_text(12, 40, "no calls in this step yet", class_="sub", font_style="italic")
    width = max(view["width"], 420.0)
    title = svg_text(4, 14, view["title"], font_weight=600, font_size=13)
    note = svg_text(4, view["height"] + 34, view["note"], class_="sub", font_size=10.5)
    inside = title + tag("g", body, transform="translate(0 20)") + note
    return svg_document(width, view["height"] + 42, view["title"], view["summary"], hatch.defs() + inside)


def _with_height(view: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [dict(band, height=view["height"]) for band in view["bands"]]


def _band(band: Mapping[str, Any]) -> str:
    x, width = band["x"], band["width"]
    back = tag("rect", x=x, y=6.0, width=width, height=band["height"] - 8, rx=4, fill=band["color"], fill_opacity=0.09)
    return back + svg_text(x + 8, 21, band["phase"], font_size=10.5, font_weight=600, class_="sub")


def _line(edge: Mapping[str, Any]) -> str:
    dashes = "2 3" if edge["num_bytes"] is None else "6 3" if edge["predicted"] else None
    wide = 3.2 if edge["kind"] == "weights" else 1.5
    return tag("path", tag("title", _plain(edge)), d=edge["path"], stroke=edge["color"], stroke_width=wide, stroke_dasharray=dashes,
               fill="none", stroke_opacity=0.75, data_row=edge["row"])  # fmt: skip


def _plain(edge: Mapping[str, Any]) -> str:
    from html import escape

    return escape(f"{edge['title']}: {', '.join(edge['columns'])}, {edge['bytes']}")


def _box(call: Mapping[str, Any], view: Mapping[str, Any], hatch: Hatches) -> str:
    x, y, width, height, color = call["x"], call["y"], call["width"], call["height"], call["color"]
    dashed = "5 3" if call["predicted"] else "2 2" if call["state"] == "pending" else None
    fill = hatch(color) if call["predicted"] else color
    parts = [
        tag("rect", x=x, y=y, width=width, height=height, rx=5, class_="paper", stroke=color, stroke_dasharray=dashed),
        tag("rect", x=x, y=y, width=6.0, height=height, rx=2, fill=fill),
        svg_text(x + 12, y + 15, call["title"], font_weight=600),
        svg_text(x + 12, y + 29, cut(call["under"], width - 18, 5.4), font_size=10, class_="sub"),
    ]
    for edge in view["edges"]:
        if edge["target"] == call["id"]:
            at = edge["port_y"]
            words = cut(edge["label"], width - 34 - 5.4 * len(edge["bytes"]), 5.4)
            parts.append(tag("circle", cx=x, cy=at, r=3.2, fill=edge["color"]))
            parts.append(svg_text(x + 12, at + 3.5, words, font_size=10))
            parts.append(svg_text(x + width - 6, at + 3.5, edge["bytes"], font_size=10, text_anchor="end", class_="sub"))
    if call["out"]:
        at = y + height - OUT / 2
        parts.append(tag("line", x1=x + 6, x2=x + width, y1=y + height - OUT, y2=y + height - OUT, class_="grid"))
        words = cut("writes " + call["out"], width - 18, 5.2)
        parts.append(svg_text(x + width - 8, at + 4, words, font_size=10, text_anchor="end", class_="sub"))
        parts.append(tag("circle", cx=x + width, cy=at, r=3.2, fill=color))
    return tag("g", "".join(parts), data_row=call["row"], data_call=call["id"])


def cut(text: str, width: float, per_letter: float) -> str:
    """Return as much of a text as fits."""
    room = int(width / per_letter)
    return text if len(text) <= room else text[: max(1, room - 1)] + "…"
