"""The static drawing of a plan: the same picture as ``static/plan_parts.js`` draws in the browser, of the best plan."""

from __future__ import annotations

import textwrap
import uuid
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from hfsdk.viz.frame import Hatches, bytes_text, count_text, fit_text, seconds_text, shade, svg_document, svg_text, tag
from hfsdk.viz.plain import cut

WIDTH, LEFT, RIGHT, MEMORY = 980, 118, 76, 190
GREY, MOVE = "#8b949e", "#d64545"
MOVES = ("reshard", "sync", "export", "export_weights", "fetch", "onload", "offload")
"""Parts of a call that move data."""
TONES = {"prefill": 0.3, "decode": -0.05, "forward": 0.22, "backward": -0.12, "optimizer": -0.35}
CALL, PARTS = 20, 8
"""Heights of a call's bar and of the strip with its parts."""


def money_text(amount: float | None) -> str:
    """Money for people, without a currency."""
    if amount is None:
        return "–"
    return count_text(round(amount)) if abs(amount) >= 100 else f"{amount:.{2 if abs(amount) >= 1 or amount == 0 else 4}f}"


def step_text(seconds: float | None) -> str:
    """Seconds of a step; steps of plans differ by little, and minutes would hide it."""
    if seconds is None:
        return "not predicted"
    return f"{seconds:.1f} s" if 120 <= seconds < 6000 else seconds_text(seconds)


def band_text(choice: Mapping[str, Any]) -> str:
    """Say between which seconds a step lies."""
    low, high = choice["low_s"], choice["high_s"]
    return "" if low is None or high is None else f"{step_text(low)} to {step_text(high)}"


class PlanDrawing:
    """A plan as SVG: its pools, its step, the table of what lost, and the sentences."""

    def __init__(self, view: Mapping[str, Any], above: Sequence[str] = ()) -> None:
        self.view = view
        self._above = above
        self.hatch = Hatches()
        self._defs: list[str] = []
        self._parts: list[str] = []
        self._y = 22.0

    def svg(self) -> str:
        """Return the whole document."""
        view = self.view
        self._text(view["title"], font_weight=600, font_size=13)
        for text in (view["subtitle"], *self._above):
            self._text(text, class_="sub")
        self._y -= 8
        if view["choices"]:
            best = view["choices"][0]
            for pool in best["pools"]:
                self._pool(pool)
            self._step(best)
            self._table()
        else:
            self._text("there is no plan", class_="sub", font_style="italic")
        self._words()
        body = "".join(self._parts) + self.hatch.defs() + (tag("defs", "".join(self._defs)) if self._defs else "")
        return svg_document(WIDTH, self._y + 4, view["title"], view["summary"], body)

    def _text(self, text: str, **attrs: Any) -> None:
        for line in textwrap.wrap(text, 160) or [""]:
            self._parts.append(svg_text(4, self._y - 6, line, **attrs))
            self._y += 16

    def _color(self, role: int) -> str:
        return str(self.view["roles"][role]["color"]) if 0 <= role < len(self.view["roles"]) else GREY

    # -- pools

    def _pool(self, pool: Mapping[str, Any]) -> None:
        y, roles_at, memory_at = self._y, LEFT + 334, WIDTH - MEMORY - 4
        squares, tall = self._devices(pool, LEFT, y + 8, 320)
        height = max(38.0, tall + 16, 14 + 16 * len(pool["roles"]), 42 if pool["memory"] else 0)
        plural = "" if pool["num_devices"] == 1 else "s"
        parts = [
            tag("rect", x=0.5, y=y, width=WIDTH - 1, height=height, rx=5, class_="paper grid"),
            svg_text(8, y + 17, cut(pool["title"], 18), font_weight=600),
            svg_text(8, y + 31, f"{count_text(pool['num_devices'])} device{plural}", font_size=10, class_="sub"), squares,
        ]  # fmt: skip
        for i, role in enumerate(pool["roles"]):
            at, name = y + 17 + 16 * i, cut(role["name"], 20)
            room = int((memory_at - roles_at - 25) / 5.6) - len(name)
            layout = tag("tspan", escape(cut(role["layout"], max(6, room)), quote=False) or " ", class_="sub", font_size=10.5, dx=8)
            parts += [
                tag("rect", x=roles_at, y=at - 9, width=10, height=10, rx=2, fill=self._color(role["role"])),
                tag("text", tag("tspan", escape(name, quote=False) or " ", font_weight=600) + layout, x=roles_at + 15, y=at,
                    class_="fg"),
            ]  # fmt: skip
        if not pool["roles"]:
            parts.append(svg_text(roles_at, y + 17, "nothing runs here", font_style="italic", class_="sub"))
        if pool["memory"]:
            parts.append(self._memory(pool["memory"], memory_at, y + 9))
        self._parts += parts
        self._y = y + height + 5

    def _devices(self, pool: Mapping[str, Any], x: float, y: float, room: float) -> tuple[str, float]:
        """Draw the pool's devices node by node, each striped in its roles' colours; return that and its height."""
        everything = sum(self.view["node_sizes"])
        side = 13 if everything <= 32 else 8 if everything <= 256 else 5 if everything <= 1024 else 3
        gap = 1 if side > 4 else 0
        colors = [self._color(role["role"]) for role in pool["roles"]]
        paint: dict[str, Any] = {"fill": self._striped(colors)} if colors else {"class_": "idle"}
        squares, at, down = [], x, y
        for count, size in _by_node(self.view["node_sizes"], pool["devices"]):
            if at > x and at + size * (side + gap) > x + room:
                at, down = x, down + side + 3
            widths = [max(1, count * side - 1)] if side < 4 else [side] * count
            squares += [tag("rect", x=at + i * (side + gap), y=down, width=w, height=side, **paint) for i, w in enumerate(widths)]
            at += size * (side + gap) + 4
        return tag("g", "".join(squares) or " ", data_pool=pool["name"], data_devices=pool["num_devices"]), down + side - y

    def _striped(self, colors: Sequence[str]) -> str:
        made, n = "g" + uuid.uuid4().hex[:8], len(colors)
        stops = "".join(
            tag("stop", offset=f"{at / n:.4f}", stop_color=color) for i, color in enumerate(colors) for at in (i, i + 1)
        )
        self._defs.append(tag("linearGradient", stops, id=made, x1=0, y1=0, x2=0, y2=1))
        return f"url(#{made})"

    def _memory(self, memory: Mapping[str, Any], x: float, y: float) -> str:
        scale = MEMORY / (self.view["memory_scale_bytes"] * 1.04)
        parts, at = [tag("rect", x=x, y=y, width=MEMORY, height=12, rx=2, class_="panel")], x
        for part in memory["parts"]:
            if part["bytes"] is not None:
                color, wide = self._color(part["role"]), part["bytes"] * scale
                parts.append(tag("rect", x=at, y=y, width=max(0.5, wide), height=12, fill=self.hatch(color), stroke=color))
                at += wide
        asked, exists = memory["asked_bytes"], memory["exists_bytes"]
        if exists is not None:
            parts.append(tag("line", x1=x + exists * scale, x2=x + exists * scale, y1=y - 3, y2=y + 15, class_="edge"))
        words = "memory not predicted" if asked is None else bytes_text(asked)
        words += "" if None in (asked, exists) else f" of {bytes_text(exists)}" + (", too much" if asked > exists else "")
        return "".join(parts) + svg_text(x, y + 24, words, font_size=10, class_="sub")

    # -- the step

    def _step(self, choice: Mapping[str, Any]) -> None:
        known = [c for c in choice["calls"] if c["start_s"] is not None and c["seconds"] is not None]
        lanes = sorted({c["lane"] for c in known})
        scale = (WIDTH - LEFT - RIGHT) / self.view["scale_s"]
        top, parts = self._y + 6, []
        for i, lane in enumerate(lanes):
            y = top + i * (CALL + PARTS + 5)
            parts.append(svg_text(8, y + 14, cut(choice["lanes"][lane], 18)))
            if choice["step_s"] is not None:
                parts.append(tag("rect", x=LEFT, y=y, width=choice["step_s"] * scale, height=CALL + PARTS + 1, class_="idle"))
        for call in known:
            parts += self._call(call, top + lanes.index(call["lane"]) * (CALL + PARTS + 5), scale)
        axis = top + len(lanes) * (CALL + PARTS + 5) + 6
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=axis, y2=axis, class_="grid"))
        parts.append(svg_text(LEFT, axis + 16, "0 s", font_size=10, class_="sub"))
        if choice["step_s"] is not None:
            parts += self._whisker(choice, LEFT, scale, axis, 5)
            end, band = LEFT + choice["step_s"] * scale, band_text(choice)
            words = step_text(choice["step_s"]) + (f" ({band})" if band else "")
            anchor = "end" if end > WIDTH * 0.6 else "middle"
            parts.append(svg_text(min(end, WIDTH - 6), axis + 16, words, text_anchor=anchor, font_size=10))
        self._parts += parts
        self._y = axis + 34

    def _call(self, call: Mapping[str, Any], y: float, scale: float) -> Iterator[str]:
        x, wide, color = LEFT + call["start_s"] * scale, max(1.0, call["seconds"] * scale), self._color(call["role"])
        yield tag("rect", x=x, y=y, width=wide, height=CALL, rx=2, class_="paper")
        yield tag("rect", x=x, y=y, width=wide, height=CALL, rx=2, fill=self.hatch(color), stroke=color, data_row=call["row"])
        for part in call["parts"]:
            if part["start_s"] is not None and part["seconds"] is not None:
                tone = MOVE if part["name"] in MOVES else shade(color, TONES.get(part["name"], 0.0))
                yield tag("rect", x=LEFT + part["start_s"] * scale, y=y + CALL + 1, width=max(0.8, part["seconds"] * scale),
                          height=PARTS, fill=self.hatch(tone), stroke=tone)  # fmt: skip
        text = fit_text(call["call"], wide)
        if text:
            yield tag("rect", x=x + 2, y=y + 4, width=len(text) * 5.8 + 4, height=12, class_="paper")
            yield svg_text(x + 4, y + 14, text, font_size=10)

    def _whisker(self, choice: Mapping[str, Any], left: float, scale: float, y: float, half: float) -> Iterator[str]:
        low, high = choice["low_s"], choice["high_s"]
        if low is not None and high is not None:
            yield tag("line", x1=left + low * scale, x2=left + high * scale, y1=y, y2=y, class_="edge", stroke_width=1.6)
            for end in (low, high):
                yield tag("line", x1=left + end * scale, x2=left + end * scale, y1=y - half, y2=y + half, class_="edge")
        yield tag("circle", cx=left + choice["step_s"] * scale, cy=y, r=3, class_="paper edge")

    # -- what lost, and the sentences

    def _table(self) -> None:
        scale, y = 124 / self.view["scale_s"], self._y
        self._parts += [
            svg_text(x, y, word, font_weight=600, class_="sub")
            for x, word in ((4, "plan"), (44, "pools"), (430, "a step takes"), (640, "costs"), (700, "why not"))
        ]
        for i, choice in enumerate(self.view["choices"]):
            y += 18
            self._parts += [
                svg_text(8, y, str(i + 1)), svg_text(640, y, money_text(choice["dollars_step"]), font_size=10),
                svg_text(488, y, step_text(choice["step_s"]) if choice["step_s"] is not None else "–", text_anchor="end"),
            ]  # fmt: skip
            if choice["step_s"] is not None:
                box = {"x": 500, "y": y - 9, "width": max(1.0, choice["step_s"] * scale), "height": 8}
                self._parts.append(tag("rect", **box, fill=self.hatch("#3b76c4"), stroke="#3b76c4", data_row=i))
                self._parts += self._whisker(choice, 500, scale, y - 5, 4)
            columns = [(44, _lines(choice["text"], 64), "fg"), (700, _lines(_why(choice, i), 50), "sub")]
            for x, lines, style in columns:
                self._parts += [svg_text(x, y + 13 * k, line, font_size=10, class_=style) for k, line in enumerate(lines)]
            y += 13 * (max(len(lines) for _, lines, _ in columns) - 1)
        self._y = y + 26

    def _words(self) -> None:
        view = self.view
        for text in (view["close"], *view["rejected"], *view["sensitivity"], view["family"], view["searched"]):
            if text:
                self._text(text, class_="fg" if text == view["close"] else "sub")
        x = 4.0
        for role in view["roles"]:
            name = cut(role["name"], 24)
            self._parts.append(tag("rect", x=x, y=self._y - 10, width=14, height=9, rx=2, fill=role["color"]))
            self._parts.append(svg_text(x + 19, self._y - 2, name, font_size=10.5, class_="sub"))
            x += 36 + 6.2 * len(name)
        self._parts.append(tag("rect", x=x, y=self._y - 10, width=14, height=9, rx=2, fill=self.hatch("#77808a"), stroke="#77808a"))
        self._parts.append(svg_text(x + 19, self._y - 2, "predicted", font_size=10.5, class_="sub"))
        self._y += 8


def _lines(text: str, width: int) -> list[str]:
    """Break a text into at most three lines."""
    return textwrap.wrap(text, width, max_lines=3, placeholder=" …") or [""]


def _why(choice: Mapping[str, Any], index: int) -> str:
    close = "too close to call. " if choice["close"] and index else ""
    return close + (choice["why"] or ("" if index else "the plan"))


def _by_node(node_sizes: Sequence[int], runs: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield (devices of these runs on a node, devices of the node) for every node that has some."""
    first = 0
    for size in node_sizes:
        here = sum(max(0, min(end, first + size) - max(start, first)) for start, end in runs)
        if here:
            yield here, size
        first += size
