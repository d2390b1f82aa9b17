"""The recipe for rewards that can be verified: `tiny` adds numbers up to 29; GRPO; the reward is 1 where the sum is right, else 0.

What docs/algorithms.md shows, run as it stands (`recipe`): the suggested learning rate with its warm-up; the checkpoint is kept
that is best on held-out additions; before and after are measured on a third set, which neither trained nor chose anything. No
addition is in two of the three sets, in either order of its numbers.

Targets:

* each of three seeds: the share of right sums, two samples of each of 300 additions at temperature 1, rises by at least 0.10;
* the three together take at most 600 s on two cores that are free, Ray's start and all measurements included.

    python benchmarks/recipe.py --check            two worker processes of one thread
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from additions_task import LARGEST, NEW_TOKENS, additions
from common import Report, parser, say, short, table

import hfsdk as hf

GAIN = 0.10
MOST_S = 600.0
SEEDS = (0, 1, 2)
MOST = 1000
"""Prompts that are measured: all there are."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run; ``lr=None`` takes the suggested rate."""

    steps: int = 60
    batch_size: int = 32
    n: int = 8
    lr: float | None = None
    every: int = 10


OURS = Settings()


def sets() -> tuple[dict[str, list[str]], ...]:
    """Return (train, held out, test): both orders of 215, 100 and 150 pairs of numbers; the test has each twice."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(a, LARGEST + 1)]
    pairs.sort(key=lambda pair: hashlib.sha256(f"{pair}".encode()).digest())
    parts = pairs[250:], pairs[150:250], pairs[:150]
    train, held_out, test = ([both for a, b in part for both in dict.fromkeys([(a, b), (b, a)])] for part in parts)
    return additions(train), additions(held_out), additions(test * 2)


def recipe(session: hf.Session, folder: Path, settings: Settings, seed: int) -> tuple[hf.Run, float, float]:
    """Train, keep the best, go back to it; returns the run and the share of right sums before and after."""
    train, held_out, test = sets()
    session.actor("tiny", rollout="tp1", optimizer=hf.AdamW(lr=settings.lr))
    session.reward(hf.data.exact_match)
    prompts = session.prompts(train, column="prompt", batch_size=settings.batch_size, seed=seed)
    held_out, test = (session.prompts(rows, column="prompt", batch_size=100) for rows in (held_out, test))
    before = session.evaluate(test, num_prompts=MOST, max_new_tokens=NEW_TOKENS)
    run = session.train(
        hf.GRPO(n=settings.n, max_new_tokens=NEW_TOKENS, kl_coef=0.0), prompts, steps=settings.steps, folder=folder,
        keep_best=hf.KeepBest(held_out, every=settings.every, num_prompts=MOST), progress=False,
    )  # fmt: skip
    session.load(run.best.folder)
    after = session.evaluate(test, num_prompts=MOST, max_new_tokens=NEW_TOKENS)
    return run, float(before["score_mean"][0]), float(after["score_mean"][0])


def one(seed: int, settings: Settings) -> dict[str, Any]:
    """Run the recipe with a seed, in a session of its own."""
    since = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hfsdk-recipe-") as folder, hf.Session(devices=2, seed=seed) as session:
        run, before, after = recipe(session, Path(folder), settings, seed)
        cpu_s = cpu_seconds()
    held_out = {row["step"]: row["held_out_score"] for row in run.rows if "held_out_score" in row}
    return {
        "seed": seed, "before": before, "after": after, "gain": after - before, "best_step": run.best.step,
        "held_out": {-1: run.best.start, **held_out}, "seconds": time.perf_counter() - since, "cpu_s": cpu_s,
        "step_s": sum(row["seconds"] for row in run.rows) / len(run.rows), "lr": run.rows[-1]["actor_lr"], "warnings": run.warnings,
        "entropy": [run.rows[0]["entropy"], run.rows[-1]["entropy"]],
    }  # fmt: skip


def cpu_seconds() -> float:
    """Return the processor seconds of this process and of those it started that still run."""
    try:
        import psutil
    except ImportError:
        return float("nan")
    here = psutil.Process()
    total = 0.0
    for process in (here, *here.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def main() -> int:
    arguments = parse()
    settings = Settings(steps=arguments.steps, lr=arguments.lr, batch_size=arguments.batch_size, n=arguments.n)
    report = Report("recipe", "2 worker processes of one thread")
    report.details = {"settings": asdict(settings), "runs": []}
    for seed in arguments.seeds:
        found = one(seed, settings)
        report.details["runs"].append(found)
        held_out = ", ".join(f"{step}: {score:.3f}" for step, score in found["held_out"].items())
        gained = f"{found['before']:.3f} -> {found['after']:.3f} in {found['seconds']:.0f} s"
        say(f"seed {seed}: {gained}; held out after step {held_out}")
        report.add(f"right sums gained, seed {seed}", found["gain"], at_least=GAIN)
    runs = report.details["runs"]
    names = ("seed", "before", "after", "gain", "best_step", "lr", "step_s", "seconds", "cpu_s")
    say(table(names, [tuple(short(run[name]) for name in names) for run in runs]))
    report.add("seconds of all seeds", sum(run["seconds"] for run in runs), "s", at_most=MOST_S * len(runs) / len(SEEDS))
    return report.finish(arguments)


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), metavar="SEED")
    made.add_argument("--steps", type=int, default=OURS.steps)
    made.add_argument("--lr", type=float, default=OURS.lr, help="by default the suggested one")
    made.add_argument("--batch-size", type=int, default=OURS.batch_size)
    made.add_argument("--n", type=int, default=OURS.n)
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
