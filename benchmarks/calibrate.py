"""Calibrate the planner's performance model on this machine, and hold what it then predicts against what is measured.

Calibrates (``PerfModel.fit``) on one step of `tiny` and one of SmolLM2-135M, and predicts

- one step of `tiny` in three other layouts, call by call;
- one step under the six strategies of ``strategies.py``: their seconds, and their order.

Every prediction is ``session.predict()``: the same calls, with the lengths that were measured, on a simulated twin of the session.
It is made with the constants of the two calibration steps; no step that is predicted is fitted to. A calibration step is the one
of three whose duration is their median, after one to warm up: on shared machines single steps are off by a third.

Targets: median absolute error of the three layouts' calls and steps, and of the six strategies' steps, at most 25 %; the predicted
order of two strategies is wrong only where their measured times differ by less than 10 %.

Uses two worker processes of one thread for calibration and layouts, four for the strategies: there ranks may share cores, by the
rule of ``hfsdk.engine.simulation.clock`` (n ranks at work on C cores run at C / n of their speed).

    python benchmarks/calibrate.py --check          about 10 minutes on two quiet cores
"""

from __future__ import annotations

import argparse
import sys
import warnings
from itertools import combinations
from typing import Any

import numpy as np
from common import Report, parser, say, short, table
from strategies import DEVICES, NEW_TOKENS, PROMPTS, STRATEGIES

import hfsdk as hf
from hfsdk.data import movie_reviews
from hfsdk.planner.perf.calibration import Calibration, Measured
from hfsdk.planner.perf.perf_model import PerfModel

ERROR_TARGET, TIE = 0.25, 0.10
MODELS = {"tiny": ("tiny", PROMPTS, NEW_TOKENS), "smollm2": ("smollm2-135m-instruct", 8, 16)}
"""What is calibrated on: model, prompts, longest response."""
LAYOUTS = {"tp2": ("tp2", "tp2"), "tp2, rollout tp1": ("tp2", "tp1"), "pp2": ("pp2", "tp1")}
"""Training and rollout layouts that are predicted; calibration is data parallel."""
ROUNDS = 2
"""How often all strategies are measured, one after the other."""
SHORT_S = 0.02
"""Calls shorter than this are shown, not judged: they are mostly dispatch."""


def declare(session: Any, model: str, train: str = "auto", rollout: str = "tp1") -> None:
    """Declare the four models of a PPO step."""
    actor = session.actor(model, train=train, rollout=rollout, optimizer=hf.AdamW(lr=1e-4))
    session.critic(model, train=train, optimizer=hf.AdamW(lr=1e-4))
    session.reference(actor)
    session.reward(model, layout=train)


def steps(session: Any, prompts: int, new_tokens: int, count: int) -> list[int]:
    """Take ``count`` PPO steps and one before them to warm up; return the numbers of those that count."""
    stream = session.prompts(movie_reviews(), batch_size=prompts, max_prompt_tokens=32, seed=1)
    algorithm = hf.PPO(max_new_tokens=new_tokens, epochs=1, mini_batches=2)
    numbers = []
    for k in range(count + 1):
        algorithm.metrics(algorithm.step(session.models, stream[k]))
        numbers.append(session.trace.step)
    return numbers[1:]


def calibrate(names: list[str]) -> Calibration:
    """Measure one step of each model, the median of three, and fit."""
    measured: list[Measured] = []
    for name in names:
        model, prompts, new_tokens = MODELS[name]
        with hf.Session(devices=2, seed=0) as session:
            declare(session, model)
            session.place("colocate")
            taken = [session.measured(number) for number in steps(session, prompts, new_tokens, 3)]
            measured.append(sorted(taken, key=lambda one: one.trace.duration_s)[1])
        say(f"measured one step of {name}: {measured[-1].trace.duration_s:.2f} s")
    return PerfModel.fit(measured)


def layout_rows(perf: PerfModel, count: int) -> list[dict[str, Any]]:
    """Predict and measure the calls of a step in the other layouts: medians of ``count`` steps."""
    found = []
    for name, (train, rollout) in LAYOUTS.items():
        with hf.Session(devices=2, seed=0) as session:
            declare(session, "tiny", train, rollout)
            session.place("colocate")
            numbers = steps(session, PROMPTS, NEW_TOKENS, count)
            pairs = [session.trace[number].compare(session.predict(number, perf=perf)) for number in numbers]
        calls = [row.call for row in (*pairs[0].rows, pairs[0].total) if row.this_s is not None and row.other_s is not None]
        for call in calls:
            rows = [row for one in pairs for row in (*one.rows, one.total) if row.call == call]
            measured, predicted = (float(np.median([getattr(row, side) for row in rows])) for side in ("this_s", "other_s"))
            found.append({"layout": name, "call": call, "measured_s": measured, "predicted_s": predicted})
        say(f"{name}: {found[-1]['measured_s']:.2f} s measured, {found[-1]['predicted_s']:.2f} s predicted")
    return found


def strategy_rows(perf: PerfModel, strategies: list[str], count: int) -> list[dict[str, Any]]:
    """Predict and measure a step under each strategy: medians of ``count`` steps in each of ``ROUNDS`` rounds.

    In rounds, because a machine's speed drifts: two strategies that place all roles alike differed by a quarter in one.
    """
    seen: dict[str, list[tuple[float, float]]] = {strategy: [] for strategy in strategies}
    with hf.Session(devices=DEVICES, seed=0) as session:
        declare(session, "tiny")
        for _ in range(ROUNDS):
            for strategy in strategies:
                session.place(strategy)
                numbers = steps(session, PROMPTS, NEW_TOKENS, count)
                times = [(session.trace[number].duration_s, session.predict(number, perf=perf).duration_s) for number in numbers]
                seen[strategy] += times
    found = []
    for strategy, times in seen.items():
        measured, predicted = (float(x) for x in np.median(times, axis=0))
        found.append({"strategy": strategy, "measured_s": measured, "predicted_s": predicted})
        say(f"{strategy}: {measured:.2f} s measured, {predicted:.2f} s predicted")
    return found


def misordered(rows: list[dict[str, Any]]) -> list[str]:
    """Return the pairs of strategies whose predicted order is not the measured one, ties left out."""
    wrong = []
    for a, b in combinations(rows, 2):
        apart = abs(a["measured_s"] - b["measured_s"]) / min(a["measured_s"], b["measured_s"])
        if apart >= TIE and (a["measured_s"] < b["measured_s"]) != (a["predicted_s"] < b["predicted_s"]):
            wrong.append(f"{a['strategy']} and {b['strategy']}")
    return wrong


def error(row: dict[str, Any]) -> float:
    """Return the relative error of a prediction."""
    return float(row["predicted_s"] / row["measured_s"] - 1)


def shown(rows: list[dict[str, Any]], *names: str) -> str:
    """Return rows as a table with their errors."""
    lines = [[*(r[n] for n in names), short(r["measured_s"]), short(r["predicted_s"]), f"{100 * error(r):+.0f} %"] for r in rows]
    return table((*names, "measured s", "predicted s", "error"), lines)


def main() -> int:
    arguments = parse()
    warnings.simplefilter("ignore", UserWarning)  # the reward model's head is random: its scores mean nothing here
    report = Report("calibrate", "2 worker processes of one thread, then 4 that may share cores")
    found = calibrate(arguments.models)
    say("\n", found, "\n")
    report.details |= {"calibration": found.view()}
    report.add("calibration: median error of a call before", found.error_before)
    report.add("calibration: median error of a call after", found.error_after)
    if not arguments.only or arguments.only == "layouts":
        rows = layout_rows(found.perf, arguments.steps)
        say("\n", shown(rows, "layout", "call"), "\n", sep="")
        judged = [abs(error(row)) for row in rows if row["measured_s"] >= SHORT_S]
        report.add("three layouts: median error of calls and steps", float(np.median(judged)), at_most=ERROR_TARGET)
        whole = [abs(error(row)) for row in rows if row["call"] == "the whole"]
        report.add("three layouts: largest error of a step", max(whole))
        report.details["layouts"] = rows
    if not arguments.only or arguments.only == "strategies":
        rows = strategy_rows(found.perf, arguments.strategies, arguments.steps)
        say("\n", shown(rows, "strategy"), "\n", sep="")
        wrong = misordered(rows)
        say(f"order: wrong for {', '.join(wrong) or 'no two'} (those within {TIE:.0%} of each other left out)")
        report.add("six strategies: median error of a step", float(np.median([abs(error(r)) for r in rows])), at_most=ERROR_TARGET)
        report.add("six strategies: pairs in the wrong order", len(wrong), "pairs", at_most=0)
        report.details |= {"strategies": rows, "misordered": wrong}
    return report.finish(arguments)


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="what to calibrate on")
    made.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    made.add_argument("--only", choices=("layouts", "strategies"), help="predict these alone")
    made.add_argument("--steps", type=int, default=3, help="measured steps of each, after one to warm up")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
