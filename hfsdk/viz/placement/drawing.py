"""The static drawing of a placement view: the same picture as ``static/placement.js`` draws in the browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfsdk.viz.frame import Hatches, bytes_text, svg_document, svg_text, tag
from hfsdk.viz.placement.data import BoxView, DeviceView, ShardView
from hfsdk.viz.plain import cut

WIDTH = 980


def drawn(view: Mapping[str, Any]) -> str:
    """Return the whole document, with its legend."""
    geometry = view["geometry"]
    hatch = Hatches()
    body = [_draw_node(view, n, hatch) for n in range(len(view["nodes"]))]
    legend, height = _draw_legend(view, geometry["height"] + 8, hatch)
    title = svg_text(2, 14, view["title"] + ("" if view["nodes"] else ": no devices"), font_weight=600, font_size=13)
    inside = title + tag("g", "".join(body) + legend, transform="translate(0 22)")
    width = max(geometry["width"], min(WIDTH, 420))
    return svg_document(width, height + 22, view["title"], view["summary"], hatch.defs() + inside)


def _draw_node(view: Mapping[str, Any], index: int, hatch: Hatches) -> str:
    geometry, node = view["geometry"], view["nodes"][index]
    box: BoxView = geometry["nodes"][index]
    parts = [
        tag("rect", x=box["x"], y=box["y"], width=box["width"], height=box["height"], rx=6, class_="panel grid"),
        svg_text(box["x"] + 8, box["y"] + 14, node["name"], font_weight=600),
    ]
    for span in node["pools"]:
        x = box["x"] + geometry["gap"] + span["first"] * (geometry["column"] + geometry["gap"])
        width = span["num_devices"] * (geometry["column"] + geometry["gap"]) - geometry["gap"]
        parts.append(svg_text(x + 2, box["y"] + 29, span["text"], font_size=10, class_="sub"))
        parts.append(tag("rect", x=x, y=box["y"] + 32.5, width=width, height=2, class_="bracket"))
    for d, device in enumerate(node["devices"]):
        x = box["x"] + geometry["gap"] + d * (geometry["column"] + geometry["gap"])
        parts.append(_draw_device(view, device, x, box, hatch))
    return "".join(parts)


def _draw_device(view: Mapping[str, Any], device: DeviceView, x: float, box: BoxView, hatch: Hatches) -> str:
    geometry, full, tiny = view["geometry"], view["density"] == "full", view["density"] == "tiny"
    column, y, pad = geometry["column"], box["y"] + geometry["top"], 3 if tiny else 6
    height = box["height"] - geometry["top"] - geometry["gap"]
    parts = [
        tag("rect", x=x, y=y, width=column, height=height, rx=4, class_="paper grid", data_device=device["number"]),
        svg_text(
            x + pad,
            y + 13,
            str(device["number"]) if tiny else f"device {device['number']}",
            font_size=9 if tiny else 11,
        ),
    ]
    if full:
        process = f"process {device['pid']}" if device["pid"] is not None else "" if view["predicted"] else "no process"
        parts.append(svg_text(x + column - pad, y + 13, device["name"], text_anchor="end", font_size=9.5, class_="sub"))
        parts.append(svg_text(x + pad, y + 25, process, font_size=9.5, class_="sub"))
    y += geometry["header"]
    for shard in device["shards"]:
        parts.append(_draw_card(view, shard, x + pad, y, column - 2 * pad))
        y += geometry["card"] + geometry["card_gap"]
    if not device["shards"]:
        parts.append(svg_text(x + pad, y + 12, "–" if tiny else "no role here", font_size=10, font_style="italic", class_="sub"))
    return "".join(parts) + _draw_memory(view, device, x + pad, box["y"] + geometry["memory_top"], column - 2 * pad, hatch)


def _draw_card(view: Mapping[str, Any], shard: ShardView, x: float, y: float, width: float) -> str:
    role, height, density = view["roles"][shard["role"]], view["geometry"]["card"], view["density"]
    color, declared = role["color"], role["state"] == "declared"
    dash = "4 3" if declared else None
    tx, right = x + (6 if density == "tiny" else 10), x + width - 4
    parts = [
        tag(
            "rect",
            x=x,
            y=y,
            width=width,
            height=height,
            rx=3,
            fill=color,
            fill_opacity=0.16,
            stroke=color,
            stroke_dasharray=dash,
        ),
        _bar(x, y, 3 if density == "tiny" else 5, height, color, role["shadow_of"]),
    ]
    if density == "full":
        parts.append(svg_text(tx, y + 14, cut(role["name"], 15), font_weight=600))
        state = "declared" if declared else f"rank {shard['rank']}"
        parts.append(svg_text(right, y + 14, state, text_anchor="end", font_size=10, class_="sub"))
        parts.append(svg_text(tx, y + 28, shard["place"], font_size=10))
        if shard["note"]:
            parts.append(svg_text(right, y + 28, shard["note"], text_anchor="end", font_size=10, class_="sub"))
    else:
        tiny = density == "tiny"
        name, size = (role["letter"], 8.5) if tiny else (role["short"], 10)
        parts.append(svg_text(tx, y + height - 4, name, font_size=size))
        parts.append(svg_text(right, y + height - 4, shard["short"], text_anchor="end", font_size=min(size, 9.5), class_="sub"))
    return tag("g", "".join(parts), data_row=shard["row"], data_role=role["name"])


def _bar(x: float, y: float, width: float, height: float, color: str, shadow_of: str) -> str:
    """Draw the bar at a card's left edge: solid, or hollow for a shadow."""
    if shadow_of:
        return tag("rect", x=x + 0.5, y=y + 0.5, width=width, height=height - 1, rx=1.5, class_="paper", stroke=color)
    return tag("rect", x=x, y=y, width=width, height=height, rx=1.5, fill=color)


def _draw_memory(view: Mapping[str, Any], device: DeviceView, x: float, y: float, width: float, hatch: Hatches) -> str:
    full = view["density"] == "full"
    height, scale = (9 if full else 5), width / max(1, view["memory_scale_bytes"])
    shards, used, limit = device["shards"], device["used_bytes"], device["memory_bytes"]
    frame = {"width": width, "height": height, "rx": 2}
    parts = []
    if full:
        planned = bytes_text(sum(s["planned_bytes"] or 0 for s in shards))
        parts.append(svg_text(x, y + 9, f"predicted {planned}", font_size=9.5, class_="sub"))
        if limit is not None:
            parts.append(svg_text(x + width, y + 9, f"of {bytes_text(limit)}", text_anchor="end", font_size=9.5, class_="sub"))
        y += 13
    parts.append(tag("rect", x=x, y=y, class_="paper grid", **frame))
    at = x
    for shard in shards:
        size, color = (shard["planned_bytes"] or 0) * scale, view["roles"][shard["role"]]["color"]
        parts.append(
            tag(
                "rect",
                x=at,
                y=y,
                width=max(0.5, size),
                height=height,
                fill=hatch(color),
                stroke=color,
                data_row=shard["row"],
            )
        )
        at += size
    if limit is not None:
        edge = x + min(width, limit * scale)
        parts.append(tag("line", x1=edge, x2=edge, y1=y - 2, y2=y + height + 2, class_="edge", stroke_width=1.5))
    y += height + (4 if full else 2)
    per_shard = any(s["measured_bytes"] is not None for s in shards)
    missing = used is None and not per_shard
    if full:
        text = f"measured {bytes_text(used)} in the process" if used is not None else "not measured" if missing else "measured"
        parts.append(svg_text(x, y + 9, text, font_size=9.5, class_="sub", font_style="italic" if missing else None))
        y += 13
    if missing:
        return "".join(parts) + tag("rect", x=x, y=y, class_="none edge", stroke_dasharray="3 3", **frame)
    parts.append(tag("rect", x=x, y=y, class_="paper grid", **frame))
    at = x
    for shard in shards:
        size = (shard["measured_bytes"] or 0) * scale
        if size:
            color = view["roles"][shard["role"]]["color"]
            parts.append(tag("rect", x=at, y=y, width=max(0.5, size), height=height, fill=color, data_row=shard["row"]))
            at += size
    if used is not None and x + used * scale > at:
        rest = min(used * scale + x - at, x + width - at)
        parts.append(tag("rect", x=at, y=y, width=rest, height=height, fill="#8b949e"))
    return "".join(parts)


def _draw_legend(view: Mapping[str, Any], y: float, hatch: Hatches) -> tuple[str, float]:
    parts = []
    for role in view["roles"]:
        dash = "4 3" if role["state"] == "declared" else None
        swatch = {"x": 1.0, "y": y, "height": 9}
        parts.append(
            tag(
                "rect",
                width=14,
                fill=role["color"],
                fill_opacity=0.16,
                stroke=role["color"],
                stroke_dasharray=dash,
                **swatch,
            )
        )
        parts.append(_bar(1.0, y, 4, 9, role["color"], role["shadow_of"]))
        parts.append(svg_text(21, y + 8.5, role["label"], class_="sub", font_size=10.5))
        y += 15
    grey, x = "#77808a", 1.0
    for label, style in (
        ("predicted memory", {"fill": hatch(grey), "stroke": grey}),
        ("measured memory", {"fill": grey}),
        ("not measured", {"class_": "none edge", "stroke_dasharray": "3 2"}),
    ):
        parts.append(tag("rect", x=x, y=y + 1, width=14, height=8, **style))
        parts.append(svg_text(x + 20, y + 8.5, label, class_="sub", font_size=10.5))
        x += 125
    return "".join(parts), y + 16
