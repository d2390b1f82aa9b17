"""What a what-if asks and what comes back: ``Question``, ``Point``, ``Curve``, and the values that its sliders and menus offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AUTO = "auto"
AS_DECLARED = "as declared"
"""The kind of device where the session's cluster has several."""
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TOKENS = tuple(sorted(2**k * base // 2 for base in (2, 3) for k in range(6, 17)))
PROMPTS = tuple(2**k for k in range(4, 14))
PRICES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0)
CURVE_POINTS = 12
LABELS = {
    "devices": ("devices", ""), "prompts": ("prompts a step", ""), "prompt_tokens": ("prompt length", "tokens"),
    "response_tokens": ("response length", "tokens"), "price_per_device_hour": ("price a device-hour", ""),
}  # fmt: skip
"""What can be slid -> its words and its unit."""
LAYOUTS = (AUTO, "tp1", "tp2", "tp4", "tp8", "tp1 pp2", "tp2 pp2", "tp4 pp2", "tp8 pp2", "tp4 pp4", "tp8 pp4", "tp8 pp8")
ROLLOUTS = (AUTO, "tp1", "tp2", "tp4", "tp8")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of the planner: a cluster, a workload, and what of the plan is fixed."""

    devices: int
    """Over all nodes."""
    device: str
    """A preset's name, or ``"as declared"``."""
    price_per_device_hour: float
    prompts: int
    prompt_tokens: int
    response_tokens: int
    placement: str = AUTO
    layouts: tuple[tuple[str, str], ...] = ()
    """(role, or role and ``" rollout"``; layout), those that are fixed."""


@dataclass(frozen=True)
class Point:
    """One answer, as curves need it."""

    value: float
    seconds: float | None
    cost_per_step: float | None
    plan: str
    """Who shares devices with whom; empty where nothing fits."""
    error: str = ""


@dataclass
class Curve:
    """What a step takes over one of the sliders, the others as they are."""

    name: str
    others: Question
    stops: tuple[float, ...]
    points: list[Point] = field(default_factory=list)
    done: bool = False


LAYOUT_OF = "layout of "
"""Before a role's name, what a question's layouts are called where they are changed."""


def flat(layouts: Mapping[str, str]) -> dict[str, str]:
    """Return layouts by role under the names by which a question is changed."""
    return {LAYOUT_OF + str(name): text for name, text in layouts.items()}
