"""The memory picture: what every device holds through one step.

::

    device 0   1.4 GB planned at most  - - - - - - - - - - - - - - - - - -   the plan's peak, dashed; its parts hatched at the right
                                         ____/~~~~~~~~~~~ process             resident memory of the process at each span's end
                     [kv cache.................................]
                     [optimizer................................]             the tensors after each call, by what they are for
                     [weights..................................]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from hfsdk.viz.frame import Hatches, Picture, bytes_text, svg_document, svg_text, tag

PARTS = {
    "weights": "#3b76c4", "gradients": "#c4a02e", "optimizer": "#7a6cc9", "rollout": "#4f9d55", "kv_cache": "#2a9d8f",
    "working": "#d64545", "process": "#8b949e",
}  # fmt: skip
"""What memory is for, bottom to top, and its colour."""
WORDS = {
    "kv_cache": "KV cache", "rollout": "rollout copy", "working": "working (activations, logits)", "process": "rest of the process",
}  # fmt: skip
MOST_DEVICES = 16
WIDTH, HEIGHT, LEFT, STACK = 460, 168, 62, 46


class DeviceMemoryView(TypedDict):
    """One device."""

    device: int
    name: str
    limit_bytes: int | None
    planned: dict[str, int] | None
    calls: list[dict[str, Any]]
    """``{"row", "call", "start_s", "end_s", "<part>_bytes", ..., "rss_bytes", ...}``: the tensors when the call had ended.

    ``asleep_bytes`` of them are not there, because a rollout sleeps: an empty box on top of those that are.
    """
    samples: list[list[float | None]]
    """``[seconds, rss, allocated, reserved]``; the last two on GPUs."""
    top_bytes: float


class MemoryView(TypedDict):
    """All the picture needs."""

    picture: Literal["memory"]
    title: str
    summary: str
    duration_s: float
    parts: list[dict[str, str]]
    predicted: bool
    """Whether the tensors and the line are predicted; they are then hatched and dashed."""
    devices: list[DeviceMemoryView]
    left_out: int
    """Devices that are not drawn: those with the least planned or measured."""


def memory_view(data: Mapping[str, Any]) -> MemoryView:
    """Turn ``MemoryUse.view()`` into the view of the picture."""
    devices: list[DeviceMemoryView] = []
    for device in data["devices"]:
        planned = device["planned"]
        most = max([v for s in device["samples"] for v in s[1:] if v is not None], default=0.0)
        drawn_parts = {f"{part}_bytes" for part in (*PARTS, "asleep")}
        held = max([sum(v for k, v in c.items() if k in drawn_parts) for c in device["calls"]], default=0)
        top = 1.08 * max(most, held, planned["asked"] if planned else 0, 1)
        samples = [[round(s[0], 6), *s[1:]] for s in device["samples"]]
        drawn: Any = {**device, "samples": samples, "top_bytes": top}
        devices.append(drawn)
    kept = sorted(sorted(devices, key=lambda d: -d["top_bytes"])[:MOST_DEVICES], key=lambda d: d["device"])
    predicted = bool(data.get("predicted"))
    words = [_words(d, predicted) for d in kept[:4]]
    return {
        "picture": "memory", "title": data["title"], "summary": "Memory through a step: " + ("; ".join(words) or "no device"),
        "duration_s": max(data["duration_s"], 1e-9), "devices": kept, "predicted": predicted, "left_out": len(devices) - len(kept),
        "parts": [{"name": name, "label": WORDS.get(name, name), "color": color} for name, color in PARTS.items()],
    }  # fmt: skip


class MemoryPicture(Picture):
    """``MemoryPicture(memory_view(session.memory.view()))``."""

    name = "memory"

    def to_text(self) -> str:
        """Return a line per device."""
        return "\n".join([self.view["title"], *(f"  {_words(d, self.view['predicted'])}" for d in self.view["devices"])])

    def to_svg(self) -> str:
        """Return all devices as one static SVG, two side by side."""
        view, hatch, body = self.view, Hatches(), ""
        for i, device in enumerate(view["devices"]):
            place = f"translate({i % 2 * (WIDTH + 16)} {26 + i // 2 * (HEIGHT + 14)})"
            body += tag("g", self._device(device, hatch), transform=place)
        rows = -(-len(view["devices"]) // 2)
        if not rows:
            body = svg_text(4, 44, "no device has a role yet", font_style="italic", class_="sub")
        x, y = 4.0, 34 + max(1, rows) * (HEIGHT + 14)
        for part in view["parts"]:
            body += tag("rect", x=x, y=y - 9, width=14, height=9, rx=2, fill=part["color"])
            body += svg_text(x + 19, y, part["label"], font_size=10.5, class_="sub")
            x += 36 + 6.1 * len(part["label"])
        title = svg_text(4, 15, view["title"], font_weight=600, font_size=13)
        return svg_document(2 * WIDTH + 16, y + 12, view["title"], view["summary"], title + body + hatch.defs())

    def _device(self, device: Mapping[str, Any], hatch: Hatches) -> str:
        right, bottom, top = WIDTH - STACK - 14, HEIGHT - 18, 20
        seconds, planned = self.view["duration_s"], device["planned"]

        across, down = (right - LEFT) / float(seconds), (bottom - top) / float(device["top_bytes"])

        def at(t: float) -> float:
            return LEFT + t * across

        def level(num_bytes: float) -> float:
            return bottom - num_bytes * down

        parts = [
            svg_text(4, 12, f"device {device['device']} ({device['name']})", font_weight=600),
            tag("rect", x=LEFT, y=top, width=right - LEFT, height=bottom - top, class_="panel"),
        ]
        for share in (0.0, 0.5, 1.0):
            amount = share * device["top_bytes"] / 1.08
            parts.append(svg_text(LEFT - 4, level(amount) + 3, bytes_text(amount), text_anchor="end", font_size=9, class_="sub"))
        for call in device["calls"]:
            base = 0.0
            for name, color in PARTS.items():
                held = call.get(f"{name}_bytes") or 0
                width = max(1.0, at(call["end_s"]) - at(call["start_s"]))
                if held:
                    y = level(base + held)
                    fill = hatch(color) if self.view["predicted"] else color
                    parts.append(tag("rect", x=at(call["start_s"]), y=y, width=width, height=level(base) - y, fill=fill))
                base += held
            asleep = call.get("asleep_bytes") or 0
            if asleep:
                box = {"x": at(call["start_s"]), "y": level(base + asleep), "width": width, "height": asleep * down}
                parts.append(tag("rect", **box, fill="none", stroke=PARTS["rollout"], stroke_dasharray="2 2"))
        gauge = 1 if any(s[1] is not None for s in device["samples"]) else 2  # a simulated accelerator has no host process
        known = [s for s in device["samples"] if s[gauge] is not None]
        line = " ".join(f"{'L' if i else 'M'}{at(s[0]):.1f},{level(s[gauge]):.1f}" for i, s in enumerate(known))
        if line:
            dashes = {"stroke_dasharray": "4 3"} if self.view["predicted"] else {}
            parts.append(tag("path", d=line, fill="none", class_="edge", stroke_width=1.4, **dashes))
        else:
            parts.append(svg_text(LEFT + 8, (top + bottom) / 2, "not measured", font_style="italic", class_="sub"))
        if planned:
            y, base = level(planned["asked"]), 0.0
            parts.append(tag("line", x1=LEFT, x2=right + STACK, y1=y, y2=y, class_="edge", stroke_dasharray="5 3"))
            peak = f"planned at most {bytes_text(planned['asked'])}"
            parts.append(svg_text(right - 4, y + 11, peak, text_anchor="end", font_size=9, class_="sub"))
            for name, color in PARTS.items():
                held = planned.get(name, 0)
                rect = {"x": right + 10, "y": level(base + held), "width": STACK - 12, "height": level(base) - level(base + held)}
                parts.append(tag("rect", **rect, fill=hatch(color), stroke=color) if held else "")
                base += held
            parts.append(svg_text(right + 10, bottom + 12, "planned", font_size=9, class_="sub"))
        return "".join(parts)


def _words(device: Mapping[str, Any], predicted: bool) -> str:
    asleep = [call for call in device["calls"] if call.get("asleep_bytes")]
    sleeps = f"; rollout asleep after {len(asleep)} of {len(device['calls'])} calls, " if asleep else ""
    sleeps += f"{bytes_text(max(call['asleep_bytes'] for call in asleep))} not there" if asleep else ""
    return _gauged(device, predicted) + sleeps


def _gauged(device: Mapping[str, Any], predicted: bool) -> str:
    planned, samples = device["planned"], [v for s in device["samples"] for v in s[1:] if v is not None]
    if predicted and samples:
        asked = bytes_text(planned["asked"] if planned else 0)
        return f"device {device['device']}: {asked} planned at most, {bytes_text(max(samples))} predicted"
    told = "nothing planned" if planned is None else f"{bytes_text(planned['asked'])} planned at most"
    return f"device {device['device']}: {told}, " + (
        f"{bytes_text(max(s[1] for s in device['samples'] if s[1] is not None))} resident at most" if samples else "not measured"
    )
