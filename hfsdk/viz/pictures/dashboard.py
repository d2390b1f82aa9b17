"""The dashboard of a training run: curves over its steps, the calls that run now, and every step's time, numbers and samples.

::

    train: 12 of 50 steps, running          [pause] [step] [stop]      actor.generate 120 of 512 tokens
    score_mean        kl_mean           response_tokens_mean           <- one panel per curve; a click selects a step
    step 11: |generate 1.2 s      |values|update        |              <- where its time went
             prompt -> response  +0.75                                 <- its samples
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, TypedDict

from hfsdk.viz.frame import Picture, role_colors, seconds_text

MAIN = (
    "score_mean", "kl_mean", "response_tokens_mean", "accuracy", "margin", "held_out_score", "entropy", "clip_fraction",
    "explained_variance", "tokens_per_s", "busy_share", "memory_bytes", "cost",
)  # fmt: skip
"""Curves that are drawn first; the others are under "all numbers"."""
LOSSES = ("actor_loss", "loss")
"""Curves that are drawn before ``MAIN`` in a run that scores nothing, as DPO's."""
TOTALLED = ("cost",)
"""Curves that are drawn as sums over the steps so far."""
MOST_POINTS = 400
"""A longer curve shows one of every two, three, ... steps."""
MOST_STEPS = 50
"""Steps that can be opened, the newest."""
MOST_CHARACTERS = 4_000
"""Most characters of a sample's prompt, and of its response; ``batch.tokens()`` shows more."""


class CurveView(TypedDict):
    """One panel."""

    name: str
    main: bool
    points: list[list[float | None]]
    """``[step, value or None]``."""
    last: float | None


class StepView(TypedDict):
    """A step that can be opened."""

    step: int
    trace_step: int
    seconds: float | None
    calls: list[dict[str, Any]]
    """``{"call", "start_s", "seconds", "color", "row"}``: on one time axis, one row per role."""
    numbers: list[list[Any]]
    """``[name, value or None]``."""
    samples: list[dict[str, Any]]


class DashboardView(TypedDict):
    """All the dashboard needs."""

    picture: Literal["dashboard"]
    title: str
    summary: str
    state: str
    error: str
    warnings: list[str]
    """The warnings that the numbers give, with advice."""
    restores: list[str]
    """The workers' deaths that the run went on after."""
    steps_done: int
    steps_asked: int
    background: bool
    predicted: bool
    """Whether the steps were simulated: their times are the performance model's."""
    asked: str
    """``"pause"`` or ``"stop"`` while that was asked and the step still runs."""
    live: bool
    now: dict[str, Any]
    saved: dict[str, Any] | None
    """The run's last save: its ``folder``, and the ``step`` after which it was written; ``None`` where it kept none."""
    curves: list[CurveView]
    steps: list[StepView]


def dashboard_view(data: Mapping[str, Any], live: bool = False) -> DashboardView:
    """Turn ``Run.view()`` into the view of the picture; ``live`` shows the buttons."""
    rows: Sequence[Mapping[str, Any]] = data["rows"]
    columns = dict.fromkeys(k for row in rows for k in row if k != "step")
    names = [k for k in columns if any(number(row.get(k)) is not None for row in rows)]
    main = MAIN if "score_mean" in names else (*LOSSES, *MAIN)
    ordered = [n for n in main if n in names] + [n for n in names if n not in main]
    title = f"train: {len(rows)} of {data['steps']} steps, {data['state']}" + (" (predicted)" if data["predicted"] else "")
    last = rows[-1] if rows else {}
    numbers = [(name, number(last.get(name))) for name in ordered if name in main][:3]
    figures = [f"{name} {value:.4g}" for name, value in numbers if value is not None]
    return {
        "picture": "dashboard", "title": title, "summary": ", ".join([title, *figures]),
        "state": data["state"], "error": data["error"], "warnings": list(data["warnings"]),
        "restores": list(data["restores"]),
        "steps_done": len(rows), "steps_asked": data["steps"],
        "background": data["background"], "asked": data["asked"], "live": live,
        "predicted": data["predicted"],
        "now": {k: data["now"].get(k) for k in ("call", "done", "total", "unit")} if data["now"] else {},
        "saved": data["saved"], "curves": [_curve(name, rows, main=name in main) for name in ordered], "steps": _steps(data),
    }  # fmt: skip


class DashboardPicture(Picture):
    """``DashboardPicture(dashboard_view(run.view()))``."""

    name = "dashboard"

    def to_text(self) -> str:
        """Return first, last and best value of every main curve, and the last step's samples."""
        view = self.view
        lines = [view["title"]] + ([f"  {view['error']}"] if view["error"] else [])
        lines += [f"  {text}" for text in (*view["restores"], *view["warnings"])]
        for curve in view["curves"]:
            values = [y for _, y in curve["points"] if y is not None]
            if curve["main"] and values:
                ends = f"{values[0]:.4g} -> {values[-1]:.4g}"
                lines.append(f"  {curve['name']:<22} {ends}   ({min(values):.4g} to {max(values):.4g})")
        for step in view["steps"][-1:]:
            lines.append(f"  step {step['step']}: {seconds_text(step['seconds'])}")
            for sample in step["samples"]:
                score = "" if sample["score"] is None else f"{sample['score']:+.2f} "
                lines.append(f"    {score}{sample['prompt']!r} -> {sample['response']!r}")
        return "\n".join(lines)


def number(value: Any) -> float | None:
    """Return a finite number, or ``None`` for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _curve(name: str, rows: Sequence[Mapping[str, Any]], *, main: bool) -> CurveView:
    """Return a curve: of every few steps the last that has a number, so that rare measurements are not missed."""
    every = max(1, -(-len(rows) // MOST_POINTS))
    totals = list(accumulate(number(row.get(name)) or 0.0 for row in rows)) if name in TOTALLED else None
    points: list[list[float | None]] = []
    for end in range(len(rows) % every or every, len(rows) + 1, every):
        bucket = range(end - 1, max(0, end - every) - 1, -1)
        at = next((i for i in bucket if number(rows[i].get(name)) is not None), end - 1)
        value = number(rows[at].get(name))
        points.append([number(rows[at].get("step", at)), value if totals is None or value is None else number(totals[at])])
    return {"name": name, "main": main, "points": points, "last": points[-1][1] if points else None}


def _steps(data: Mapping[str, Any]) -> list[StepView]:
    roles = dict.fromkeys(call.partition(".")[0] for calls in data["calls"].values() for call, _, _ in calls)
    colors, lanes = role_colors(dict.fromkeys(roles, "")), {role: i for i, role in enumerate(roles)}
    steps: list[StepView] = []
    for row in data["rows"][-MOST_STEPS:]:
        step = row.get("step")
        calls = [(call, call.partition(".")[0], start, took) for call, start, took in data["calls"].get(step, ())]
        steps.append({
            "step": step, "trace_step": data["trace_steps"].get(step, step), "seconds": number(row.get("seconds")),
            "calls": [
                {"call": call, "start_s": round(start, 6), "seconds": round(took, 6), "color": colors[role], "row": lanes[role]}
                for call, role, start, took in calls
            ],
            "numbers": [[k, number(v)] for k, v in row.items() if k != "step" and (number(v) is not None or isinstance(v, float))],
            "samples": [
                {**s, "prompt": _short(s["prompt"]), "response": _short(s["response"]), "score": number(s.get("score"))}
                for s in data["samples"].get(step, ())
            ],
        })  # fmt: skip
    return steps


def _short(text: Any) -> Any:
    return text[:MOST_CHARACTERS] + "…" if isinstance(text, str) and len(text) > MOST_CHARACTERS else text
