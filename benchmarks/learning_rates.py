"""Which learning rate suits which model? GRPO from one start at several rates, a few steps each; suggestions stand on it.

`tiny` learns the additions of recipe.py, SmolLM2-135M-Instruct to continue movie reviews so that VADER finds them positive. Each
rate is warmed up over as many steps as `hf.AdamW()` does. Scores are those of held-out prompts, the same for all rates.

Targets, for each model: at the suggested rate (`hfsdk.core.learning_rates`) the held-out score rises, by at least half of what it
rises at the best rate tried; at the largest rate tried it does not rise as much as at the best, or the policy has one answer left
(under a tenth of its entropy): the suggestion is below the cliff.

    python benchmarks/learning_rates.py --check            two worker processes of one thread, or one of two (SmolLM2)
    python benchmarks/learning_rates.py --only tiny
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from additions_task import NEW_TOKENS
from common import Report, parser, say, short, table
from recipe import sets

import hfsdk as hf
from hfsdk.core.learning_rates import WARMUP_STEPS, suggested_rate
from hfsdk.quickstart import beginnings

SHARE = 0.5
"""Of the best rate's gain that the suggested one must have."""
ENTROPY_LEFT = 0.1
"""Of the first step's entropy, below which a policy has one answer left."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a task of its size."""

    model: str
    rates: tuple[float, ...]
    steps: int
    batch_size: int
    new_tokens: int
    num_held_out: int
    devices: int
    mini_batches: int = 1
    """Optimizer steps of a step: what is learned in so few steps depends on how many there are."""


CASES = {
    "tiny": Case(
        model="tiny", rates=(1e-5, 5e-5, 1e-4, 3e-4), steps=40, batch_size=32, new_tokens=NEW_TOKENS, num_held_out=200,
        devices=2,
    ),
    "smollm2": Case(
        model="smollm2-135m-instruct", rates=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3), steps=20, batch_size=4, new_tokens=16,
        num_held_out=96, devices=1, mini_batches=4,
    ),
}  # fmt: skip


def streams(session: hf.Session, case: Case, seed: int) -> tuple[hf.PromptStream, hf.PromptStream]:
    """Declare the reward; return (prompts, held-out prompts)."""
    rows: list[tuple[Any, dict[str, Any]]]
    if case.model == "tiny":
        train, held_out, _ = sets()
        session.reward(hf.data.exact_match)
        rows = [(train, {"column": "prompt"}), (held_out, {"column": "prompt"})]
    else:
        texts = beginnings()
        session.reward(hf.data.vader_sentiment)
        rows = [(texts[case.num_held_out :], {}), (texts[: case.num_held_out], {})]
    prompts, held_out_prompts = (session.prompts(data, batch_size=case.batch_size, seed=seed, **more) for data, more in rows)
    return prompts, held_out_prompts


def one(case: Case, lr: float, seed: int) -> dict[str, Any]:
    """Train at one rate and measure before and after."""
    since = time.perf_counter()
    with hf.Session(devices=case.devices, seed=seed) as session:
        session.actor(case.model, rollout="tp1", optimizer=hf.AdamW(lr=lr, warmup_steps=WARMUP_STEPS))
        prompts, held_out = streams(session, case, seed)

        def score() -> float:
            found = session.evaluate(held_out, num_prompts=case.num_held_out, max_new_tokens=case.new_tokens, num_samples=0)
            return float(found["score_mean"][0])

        before = score()
        grpo = hf.GRPO(n=8, max_new_tokens=case.new_tokens, kl_coef=0.0, mini_batches=case.mini_batches)
        run = session.train(grpo, prompts, steps=case.steps, progress=False)
        after = score()
    return {
        "model": case.model, "lr": lr, "seed": seed, "before": before, "after": after, "gain": after - before,
        "entropy": run.rows[-1]["entropy"], "entropy_left": run.rows[-1]["entropy"] / run.rows[0]["entropy"],
        "seconds": time.perf_counter() - since, "warnings": run.warnings,
        "scores": [row["score_mean"] for row in run.rows],
    }  # fmt: skip


def note(report: Report, case: Case, found: Sequence[dict[str, Any]]) -> None:
    """Add a model's figures to a report: means over the seeds."""
    suggested = suggested_rate(size_of(case.model), "policy").lr
    gains = {lr: sum(f["gain"] for f in found if f["lr"] == lr) / sum(f["lr"] == lr for f in found) for lr in case.rates}
    best = max(gains, key=lambda lr: gains[lr])
    for lr, gain in gains.items():
        least = SHARE * gains[best] if lr == suggested else None
        words = " (suggested)" * (lr == suggested) + " (best)" * (lr == best)
        report.add(f"gain of {case.model} at {lr:.0e}{words}", gain, at_least=least)
    left = min(f["entropy_left"] for f in found if f["lr"] == max(gains))
    fallen = left < ENTROPY_LEFT
    report.add(f"  the largest rate's gain, of {case.model}", gains[max(gains)], at_most=None if fallen else gains[best] - 1e-9)
    report.add("  the entropy that is left there", left, at_most=ENTROPY_LEFT if fallen else None)


def size_of(model: str) -> int:
    """Return the number of parameters of a model that hfsdk brings."""
    from hfsdk.assets import model_folder

    return hf.ModelSpec.from_folder(model_folder(model)).num_parameters()


def main() -> int:
    arguments = parse()
    report = Report("learning_rates", "tiny: 2 worker processes of one thread; SmolLM2: one process of two threads")
    report.details = {"runs": []}
    for name in arguments.only:
        case = CASES[name]
        found = []
        for lr in arguments.rates or case.rates:
            for seed in arguments.seeds:
                found.append(one(case, lr, seed))
                f = found[-1]
                say(f"{name} at {lr:.0e}, seed {seed}: {f['before']:.3f} -> {f['after']:.3f}, {f['seconds']:.0f} s")
        names = ("model", "lr", "seed", "before", "after", "gain", "entropy", "seconds")
        rows = [tuple(value if isinstance(value, str) else short(value) for value in (f[n] for n in names)) for f in found]
        say(table(names, rows))
        report.details["runs"] += found
        if not arguments.rates:
            note(report, case, found)
    return report.finish(arguments)


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="MODEL", help="tiny, smollm2")
    made.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED")
    made.add_argument("--rates", type=float, nargs="+", default=[], metavar="LR", help="these instead; nothing is checked")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
