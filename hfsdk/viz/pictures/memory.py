"""The memory picture: the bytes that every device holds through one step.

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

from hfsdk.viz.frame import Picture, bytes_text

PARTS = {
    "weights": "#3b76c4", "gradients": "#c4a02e", "optimizer": "#7a6cc9", "rollout": "#4f9d55", "kv_cache": "#2a9d8f",
    "working": "#d64545", "process": "#8b949e",
}  # fmt: skip
"""The parts of memory, bottom to top, with their colours."""
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

    ``asleep_bytes`` of them are not there, because a rollout sleeps: an empty box on top of the bytes that are.
    """
    bases: list[str]
    """The roles of each frozen base that is there once for several: ``"actor, critic, reference"``."""
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
        highest_bar = max([sum(v for k, v in c.items() if k in drawn_parts) for c in device["calls"]], default=0)
        top = 1.08 * max(most, highest_bar, planned["asked"] if planned else 0, 1)
        samples = [[round(s[0], 6), *s[1:]] for s in device["samples"]]
        bases = [", ".join(names) for names in device.get("bases", ())]
        drawn: Any = {**device, "samples": samples, "top_bytes": top, "bases": bases}
        devices.append(drawn)
    shown = sorted(sorted(devices, key=lambda d: -d["top_bytes"])[:MOST_DEVICES], key=lambda d: d["device"])
    predicted = bool(data.get("predicted"))
    words = [_words(d, predicted) for d in shown[:4]]
    return {
        "picture": "memory", "title": data["title"], "summary": "Memory through a step: " + ("; ".join(words) or "no device"),
        "duration_s": max(data["duration_s"], 1e-9), "devices": shown,
        "predicted": predicted, "left_out": len(devices) - len(shown),
        "parts": [{"name": name, "label": WORDS.get(name, name), "color": color} for name, color in PARTS.items()],
    }  # fmt: skip


class MemoryPicture(Picture):
    """``MemoryPicture(memory_view(session.memory.view()))``."""

    name = "memory"

    def to_text(self) -> str:
        """Return a line per device."""
        return "\n".join([self.view["title"], *(f"  {_words(d, self.view['predicted'])}" for d in self.view["devices"])])


def _words(device: Mapping[str, Any], predicted: bool) -> str:
    asleep = [call for call in device["calls"] if call.get("asleep_bytes")]
    sleeps = f"; rollout asleep after {len(asleep)} of {len(device['calls'])} calls, " if asleep else ""
    sleeps += f"{bytes_text(max(call['asleep_bytes'] for call in asleep))} not there" if asleep else ""
    return _gauged(device, predicted) + sleeps + "".join(f"; one base for {names}" for names in device["bases"])


def _gauged(device: Mapping[str, Any], predicted: bool) -> str:
    planned, samples = device["planned"], [v for s in device["samples"] for v in s[1:] if v is not None]
    if predicted and samples:
        planned_text = bytes_text(planned["asked"] if planned else 0)
        return f"device {device['device']}: {planned_text} planned at most, {bytes_text(max(samples))} predicted"
    planned_words = "nothing planned" if planned is None else f"{bytes_text(planned['asked'])} planned at most"
    return f"device {device['device']}: {planned_words}, " + (
        f"{bytes_text(max(s[1] for s in device['samples'] if s[1] is not None))} resident at most" if samples else "not measured"
    )
