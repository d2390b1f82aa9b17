"""Does GRPO learn what can be checked? `tiny` adds; the reward is 1 where the sum is right, else 0 (`hfsdk.data.exact_match`).

Prompts are ``"12+7="``, both numbers from 0 to 29: `tiny`, trained on numbers to 99, gets about every second of these right when it
samples. Of the 465 pairs of numbers 200 are held out, in either order; GRPO trains on the others, 100 steps of 32.

Target, each of three seeds: exact match on the 200 held-out additions, four samples of each at temperature 1 from a fixed seed,
judged by plain transformers, rises by at least 0.20.

    python benchmarks/additions_task.py --check            about 8 minutes, two worker processes of one thread
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import Report, parser, say, short, table
from learning_task import Evaluator

from hfsdk import data

GAIN = 0.20
SEEDS = (0, 1, 2)
LARGEST = 29
NUM_HELD_OUT = 200
NEW_TOKENS = 5
"""Three more than the longest sum: one for the end of the line, one for the end of the text."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of GRPO."""

    steps: int = 100
    batch_size: int = 32
    n: int = 8
    lr: float = 1e-4
    warmup: int = 5
    """Steps over which the learning rate rises; it then falls linearly to 0."""


OURS = Settings()


def additions(pairs: list[tuple[int, int]]) -> dict[str, list[str]]:
    """Return the columns of `hfsdk.data.additions` for some pairs."""
    return {"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]}


def split() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return (train, held out). No pair of the one is in the other in any order; train has both orders of its pairs."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(a, LARGEST + 1)]
    pairs.sort(key=lambda pair: hashlib.sha256(f"{pair}".encode()).digest())
    held_out = [pair if i % 2 else pair[::-1] for i, pair in enumerate(pairs[:NUM_HELD_OUT])]
    train = [both for a, b in pairs[NUM_HELD_OUT:] for both in dict.fromkeys([(a, b), (b, a)])]
    return additions(train), additions(held_out)


class ExactMatch(Evaluator):
    """Judges policies by their sums."""

    new_tokens = NEW_TOKENS

    def __init__(self, initial: str | Path, held_out: dict[str, list[str]], *, copies: int = 4) -> None:
        super().__init__(initial, held_out["prompt"], copies=copies)
        self._answers = dict(zip(held_out["prompt"], held_out["answer"], strict=True))

    def score(self, prompts: list[str], continuations: list[str]) -> list[float]:
        """Return 1 for each right sum."""
        return data.exact_match(continuations, [self._answers[prompt] for prompt in prompts])


def train(settings: Settings, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Train, leaving the policy before and after in ``before`` and ``after``; return the history."""
    import hfsdk as hf

    decay = {"schedule": "linear", "warmup_steps": settings.warmup, "total_steps": settings.steps}
    with hf.Session(devices=2, seed=seed) as session:
        actor = session.actor("tiny", rollout="tp1", optimizer=hf.AdamW(lr=settings.lr, **decay))
        session.reward(data.exact_match)
        session.place("colocate")
        prompts = session.prompts(split()[0], column="prompt", batch_size=settings.batch_size, seed=seed)
        actor.save_pretrained(str(folder / "before"))
        grpo = hf.GRPO(n=settings.n, max_new_tokens=NEW_TOKENS, kl_coef=0.0)
        history: list[dict[str, Any]] = []
        while len(history) < settings.steps:
            history += session.train(grpo, prompts, steps=min(20, settings.steps - len(history)), progress=False).rows
            last, right = history[-1], sum(row["score_mean"] for row in history[-20:]) / len(history[-20:])
            say(f"  step {len(history)}: right {right:.3f} (the last 20 steps), {last['seconds']:.2f} s a step")
        actor.save_pretrained(str(folder / "after"))
    return history


def run(seed: int, settings: Settings = OURS) -> dict[str, Any]:
    """Train from one seed and judge before and after.

    Returns:
        ``seed``; ``before`` and ``after``, each a judgement as a dict whose ``score`` is the share of exact matches; ``gain``;
        ``history``.
    """
    from hfsdk.assets import model_folder

    judge = ExactMatch(model_folder("tiny"), split()[1])
    with tempfile.TemporaryDirectory(prefix="hfsdk-additions-") as name:
        history = train(settings, seed, Path(name))
        before, after = (asdict(judge(Path(name) / which)) for which in ("before", "after"))
    return {"seed": seed, "before": before, "after": after, "gain": after["score"] - before["score"], "history": history}


def note(report: Report, found: dict[str, Any]) -> None:
    """Add a run's figures to a report."""
    seed = found["seed"]
    report.add(f"exact match gained, GRPO on additions, seed {seed}", found["gain"], at_least=GAIN)
    report.add(f"  before, seed {seed}", found["before"]["score"])
    report.add(f"  after, seed {seed}", found["after"]["score"])
    report.add(f"  KL after, seed {seed}", found["after"]["kl"], "nats")
    report.add(f"  seconds of training, seed {seed}", sum(row["seconds"] for row in found["history"]), "s")


def main() -> int:
    arguments = parse()
    report = Report("additions", "hfsdk: 2 worker processes of one thread; evaluator: one process of two threads")
    report.details = {"settings": asdict(OURS), "runs": []}
    for seed in arguments.seeds:
        say(f"seed {seed}: {OURS.steps} steps of {OURS.batch_size} additions, {OURS.n} replies each")
        found = run(seed)
        names = ("score", "score_error", "kl", "tokens", "ended")
        say(table(("", *names), [(at, *(short(found[at][name]) for name in names)) for at in ("before", "after")]))
        note(report, found)
        report.details["runs"].append(found)
    return report.finish(arguments)


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), metavar="SEED")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
