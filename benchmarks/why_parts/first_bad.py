"""The first bad number: what a run's own snapshots cost, and what is planted is named. All on CPU; quiet machine, two cores.

``rows()`` returns ``{"part", "what", "value", "unit", "target", "ok"}`` each. Costs are ratios of times measured in turns in one
process, with and without snapshots, over the same steps of `tiny` on two devices. A run in which nothing is planted must name
nothing, over layouts and dtypes.

    python -m benchmarks.why_parts.first_bad             about 3 minutes
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from .planted_runs import NAME, SAMPLE, TOKEN, Planted, lengths, nan_where_marked, prompts

PART = "first bad number"
MOST_SHARE = 0.05
"""Of a run's time that its snapshots may take."""
TURNS, STEPS = 3, 20
HEALTHY = [("dp2", "fp32"), ("tp2", "fp32"), ("pp2", "fp32"), ("dp2", "bf16"), ("tp2", "bf16")]
OPENINGS = ["the film is a", "a warm and funny", "it never quite", "one of the best", "the plot is thin but", "too long and too"]
CAUSES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "a NaN reward": ("reward", 1, {"kind": "reward", "sample": SAMPLE}),
    "an exploding advantage": ("advantage", 3, {"kind": "advantage", "column": "advantages", "sample": SAMPLE, "token": TOKEN}),
    "a weight set to inf on rank 1": (
        "weight", 1, {"kind": "weight", "parameter": NAME, "ranks": (1,), "layer": NAME.removesuffix(".weight")}
    ),
    "a loss that divides by zero": ("loss", 1, {"kind": "loss", "call": "actor.update", "sample": SAMPLE, "token": None}),
    "a loss that explodes for a sample": ("burst", 3, {"kind": "loss", "call": "actor.update", "sample": SAMPLE}),
    "a loss that explodes for all": ("scale", 3, {"kind": "update", "call": "actor.update", "sample": None}),
}  # fmt: skip
"""What is planted -> its name, the step, and what must be found."""


@contextlib.contextmanager
def roles(layout: str, dtype: str) -> Iterator[SimpleNamespace]:
    """The four roles of PPO on two devices."""
    import hfsdk as hf

    with hf.Session(devices=2, seed=7, name=f"first bad {layout} {dtype}") as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rollout = "tp2" if layout == "tp2" else "tp1"
        actor = session.actor("tiny", train=layout, rollout=rollout, dtype=dtype, optimizer=hf.AdamW(lr=3e-5))
        session.critic("tiny", train=layout, dtype=dtype, optimizer=hf.AdamW(lr=3e-5))
        session.reference(actor)
        session.reward(lengths)
        yield SimpleNamespace(session=session, actor=actor)


def rows() -> list[dict[str, Any]]:
    """Return all figures."""
    return list(figures())


def figures() -> Iterator[dict[str, Any]]:
    """Give one figure after the other, as they are measured."""
    for layout, dtype in HEALTHY:
        with roles(layout, dtype) as here:
            yield _healthy(here.session, f"{layout} {dtype}")
            if (layout, dtype) == HEALTHY[0]:
                yield from _costs(here.session)
                for cause in CAUSES:
                    yield _planted(here.session, cause)


def _row(what: str, value: float, unit: str, target: str, ok: bool) -> dict[str, Any]:
    return {"part": PART, "what": what, "value": value, "unit": unit, "target": target, "ok": ok}


def _healthy(session: Any, where: str) -> dict[str, Any]:
    run = session.train(Planted(), prompts(session, OPENINGS, 4), steps=5, progress=False)
    bad, jumps = run.first_bad(), [text for text in run.warnings if "first_bad" in text]
    return _row(f"healthy run, {where}: causes named", float(bad is not None) + len(jumps), "", "0", bad is None and not jumps)


def _costs(session: Any) -> list[dict[str, Any]]:
    """Time the same steps with and without snapshots, in turns."""
    stream = prompts(session, OPENINGS, STEPS)
    start, shares = session.snapshot("start"), []
    took: dict[int, list[float]] = {0: [], 2: []}
    for turn in range(TURNS):
        for look_back in ((0, 2), (2, 0))[turn % 2]:
            session.rewind(start)
            begun = time.perf_counter()
            run = session.train(Planted(), stream, steps=STEPS, progress=False, look_back=look_back)
            took[look_back].append(time.perf_counter() - begun)
            if look_back:
                kept = run._control.search.look_back
                shares.append(kept.seconds / kept.steps_s)
    share, ratio = statistics.median(shares), min(took[2]) / min(took[0])
    return [
        _row(f"snapshots' seconds over those of {STEPS} steps", share, "", f"<= {MOST_SHARE}", share <= MOST_SHARE),
        _row(f"{STEPS} steps with over without, fastest of {TURNS}", ratio, "", f"<= {1 + MOST_SHARE}", ratio <= 1 + MOST_SHARE),
        _row("one snapshot", kept.last_s, "s", "", True),
    ]


def _planted(session: Any, cause: str) -> dict[str, Any]:
    import hfsdk as hf

    what, step, wanted = CAUSES[cause]
    session.reward(nan_where_marked if what == "reward" else lengths)
    start = session.snapshot("before what is planted")
    with contextlib.suppress(hf.HfsdkError):
        session.train(Planted("" if what == "reward" else what), prompts(session, OPENINGS, step), steps=step + 2, progress=False)
    bad = session.run.first_bad()
    session.rewind(start)
    verdict = "nothing" if bad is None else bad.verdict
    ok = bad is not None and all(getattr(bad, name) == value for name, value in wanted.items())
    return _row(f"{cause}: {verdict}", float("nan") if bad is None else bad.seconds, "s", "named right", ok)


if __name__ == "__main__":
    for row in figures():
        mark, target = "ok" if row["ok"] else "missed", row["target"]
        print(f"{mark:6} {row['value']:10.4g} {row['unit']:2} {target:12} {row['what']}", flush=True)
