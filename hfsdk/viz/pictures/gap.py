"""The gap picture: each cause's part of the gap between trainer and generating engine, and where in the model they part.

::

    temperature           [##################]  0.13 nats a token, 100 %      named: solid
    top-k                                       not needed

    layer 2     - - - o - - x - - - - -         relative distance from transformers in fp32, logarithmic
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from hfsdk.viz.frame import Picture
from hfsdk.viz.plain import finite

ENGINES = {"trainer": ("#3b76c4", "trainer"), "rollout": ("#b06a00", "generating engine"), "bf16": ("#8b949e", "rounding in bf16")}
"""Colour and words of those whose hidden states are compared."""
LEAST, MOST = 1e-8, 1.0
"""Ends of the axis of relative distances."""
MOST_LAYERS = 40


class CauseView(TypedDict):
    """One cause that was looked for."""

    cause: str
    words: str
    nats: float | None
    share: float | None
    named: bool
    detail: str
    changed: str
    """The change that was made to find out; empty where nothing was left to explain."""


class PlaceView(TypedDict):
    """One place in the model; relative distances from transformers in fp32, ``None`` where nobody saw it."""

    place: str
    trainer: float | None
    rollout: float | None
    bf16: float | None


class WorstView(TypedDict):
    """The token with the largest gap."""

    row: int
    token: int
    text: str
    trainer: float | None
    recorded: float | None


class GapView(TypedDict):
    """All the picture needs."""

    picture: Literal["gap"]
    title: str
    summary: str
    causes: list[CauseView]
    most_nats: float
    layers: list[PlaceView]
    left_out: int
    """Layers in the middle that are not drawn."""
    worst: WorstView
    engines: list[dict[str, str]]
    axis: list[float]
    """Least and most of the distances that are drawn."""


def gap_view(data: Mapping[str, Any]) -> GapView:
    """Turn ``Gap.view()`` into the view of the picture."""
    causes: list[CauseView] = [
        {
            "cause": c["cause"], "words": c["words"], "nats": finite(c["nats"]), "share": finite(c["share"]), "named": c["named"],
            "detail": c["detail"], "changed": c["changed"],
        }
        for c in data["causes"]
    ]  # fmt: skip
    named = sorted((c for c in causes if c["named"]), key=lambda c: -(c["nats"] or 0.0))
    layers: list[PlaceView] = list(data["layers"])
    over = max(0, len(layers) - MOST_LAYERS)
    drawn_layers = layers if not over else layers[: MOST_LAYERS // 2] + layers[-(MOST_LAYERS // 2) :]
    title = f"{data['role']}: trainer against generating engine, {data['mean']:.2g} nats a token"
    return {
        "picture": "gap", "title": title, "summary": f"{title}: {data['verdict']}",
        "causes": named + [c for c in causes if not c["named"]],
        "most_nats": max([c["nats"] or 0.0 for c in causes], default=0.0) or 1.0,
        "layers": drawn_layers, "left_out": over, "worst": data["worst"], "axis": [LEAST, MOST],
        "engines": [{"name": name, "color": color, "words": words} for name, (color, words) in ENGINES.items()],
    }  # fmt: skip


class GapPicture(Picture):
    """``GapPicture(gap_view(actor.explain_gap(batch).view()))``."""

    name = "gap"

    def to_text(self) -> str:
        """Return the verdict, a line per cause, then a line per layer."""
        view = self.view
        lines = [view["summary"]]
        width = max([len(c["words"]) for c in view["causes"]], default=0)
        for c in view["causes"]:
            lines.append(f"  {c['words']:<{width}}  {cause_text(c)}")
        for place in view["layers"]:
            far = ", ".join(f"{e['words']} {_distance_text(place[e['name']])}" for e in view["engines"])
            lines.append(f"  {place['place']}: {far}")
        return "\n".join(lines)


def cause_text(cause: CauseView) -> str:
    """Return a cause's part in words: ``"0.13 nats a token, 100 %: generated at 0.7"``."""
    if cause["named"]:
        return f"{_short(cause['nats'])} nats a token, {_percent(cause['share'])}: {cause['detail']}"
    return "explains nothing" if cause["changed"] else "not needed"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _distance_text(value: float | None) -> str:
    return "not seen" if value is None else f"{value:.1e}"
