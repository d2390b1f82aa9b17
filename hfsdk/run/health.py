"""Signs that a run does not learn, and what to do about each. Pure: rows of numbers in, sentences out.

Each rule but the last compares the first `WINDOW` steps of a run with its newest ones, and says its sentence once per run::

    score      the score is well below its start            lr too high, no KL
    entropy    the policy has nearly one answer left        lr too high, an entropy bonus
    kl         it runs away from the reference              lr too high, kl_coef too low
    length     responses that used to end reach the limit   max_new_tokens, a penalty
    groups     all responses to a prompt score the same     the prompts, n, temperature
    empty      responses end before they begin              the model, the form of the prompts
    gradient   its norm is many times what it was           lr, warm-up, the reward's scale

The thresholds leave room for a healthy run's noise: tests/session/test_health.py has runs that must stay silent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, pstdev

WINDOW = 4
"""Steps of a run's start, and of its end, that are compared as means."""
LEAST_STEPS = 3 * WINDOW
"""The number of steps before which no rule speaks, but that of empty responses."""
EMPTY_STEPS = 3
"""Steps without any response after which that is said."""
KEPT = 32
"""Newest steps that a rule sees beside the first ones."""

NOISES = 6.0
"""Standard errors that lie between noise and a change."""
FALL_STD = 0.25
"""A score is well below its start by a quarter of the scores' deviation in a batch."""
ENTROPY_LEFT = 0.1
"""Share of the entropy at the start below which it has collapsed."""
KL_PER_TOKEN, KL_RISING, KL_TIMES = 1.0, 0.3, 3.0
"""Nats per response token that are too much, and those that are so where they are three times the mean of the steps before."""
ENDED_BEFORE, ENDED_NOW = 0.3, 0.05
"""Share of responses that ended by themselves, at the start and now, between which the lengths have pinned to the limit."""
IDENTICAL = 0.95
"""Share of responses in groups of equal scores from which there is nothing to learn."""
GRADIENT_TIMES = 10.0
"""Times the median of the steps before that make a gradient explode."""


@dataclass
class NumberSeries:
    """One number over the steps: the first ones, and the newest."""

    first: list[float] = field(default_factory=list)
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    num: int = 0

    def add(self, value: float) -> None:
        """Add a step's number."""
        self.num += 1
        self.newest.append(value)
        if len(self.first) < WINDOW:
            self.first.append(value)

    @property
    def start(self) -> float:
        """Mean of the first steps."""
        return fmean(self.first)

    @property
    def now(self) -> float:
        """Mean of the newest steps."""
        return fmean(list(self.newest)[-WINDOW:])


def noise(values: Sequence[float]) -> float:
    """Return the standard error of the difference of two means of `WINDOW` steps each.

    A step's deviation is taken from that of neighbours, to which a slow rise or fall adds next to nothing.
    """
    return pstdev([b - a for a, b in pairwise(values)]) / math.sqrt(WINDOW)


Numbers = Mapping[str, NumberSeries]


class Health:
    """The rules over one run: give it each step's row, it returns what is to be said now.

    Args:
        rows: the steps so far, of a run that goes on; what is to be said of them was said.
    """

    def __init__(self, rows: Iterable[Mapping[str, object]] = ()) -> None:
        self._numbers: dict[str, NumberSeries] = {}
        self._said: set[str] = set()
        for row in rows:
            self.take(row)

    def take(self, row: Mapping[str, object]) -> list[str]:
        """Return a sentence for each rule that has not spoken yet and whose condition this step's numbers complete."""
        for name, value in row.items():
            if name in READ and isinstance(value, int | float) and math.isfinite(value):
                self._numbers.setdefault(name, NumberSeries()).add(float(value))
        sentences = []
        for name, rule in RULES.items():
            text = None if name in self._said else rule(self._numbers)
            if text is not None:
                self._said.add(name)
                sentences.append(text)
        return sentences


def _long_enough(numbers: Numbers, *names: str) -> bool:
    """Whether there are enough steps that have these numbers."""
    return all(name in numbers and numbers[name].num >= LEAST_STEPS for name in names)


def _score(numbers: Numbers) -> str | None:
    if not _long_enough(numbers, "score_mean"):
        return None
    score = numbers["score_mean"]
    spread = numbers["score_std"].start if "score_std" in numbers else 0.0
    if score.start - score.now <= max(
        FALL_STD * spread, NOISES * max(noise(score.first), noise(list(score.newest)))
    ):  # a rare reward may be constant in one
        return None
    return (
        f"the score fell from {score.start:.3g} (first {WINDOW} steps) to {score.now:.3g} (last {WINDOW}): training makes the "
        f"policy worse. Take a lower learning rate{_rate(numbers)}, e.g. a third of it, or keep the policy near its start with "
        "kl_coef; go back to session.train(keep_best=...)'s checkpoint or to a snapshot"
    )


def _entropy(numbers: Numbers) -> str | None:
    if not _long_enough(numbers, "entropy"):
        return None
    entropy = numbers["entropy"]
    if entropy.start <= 0 or entropy.now >= ENTROPY_LEFT * entropy.start:
        return None
    return (
        f"the entropy collapsed from {entropy.start:.3g} to {entropy.now:.3g} nats per token: the policy nearly always gives one "
        f"answer and finds no better ones. Take a lower learning rate{_rate(numbers)}, entropy_coef above 0, clip_high=0.28 or a "
        "higher temperature; where the score is as high as it can be, stop here"
    )


def _kl(numbers: Numbers) -> str | None:
    if not _long_enough(numbers, "kl_mean", "response_tokens_mean"):
        return None
    pairs = zip(numbers["kl_mean"].newest, numbers["response_tokens_mean"].newest, strict=False)
    per_token = [kl / max(tokens, 1.0) for kl, tokens in pairs]
    now, before = fmean(per_token[-WINDOW:]), fmean(per_token[:-WINDOW][-2 * WINDOW :])
    rises = now > max(KL_RISING, KL_TIMES * before) and before > 0 and now - before > NOISES * noise(per_token)
    if now <= KL_PER_TOKEN and not rises:
        return None
    return (
        f"the KL to the reference runs away: {now:.2g} nats per token, {numbers['kl_mean'].now:.3g} per response: the policy "
        "leaves the language it started from, often for a flaw of the reward. Raise kl_coef, take a lower learning "
        f"rate{_rate(numbers)}, and read the samples"
    )


def _length(numbers: Numbers) -> str | None:
    if not _long_enough(numbers, "eos_rate"):
        return None
    ended = numbers["eos_rate"]
    fell = ended.start - ended.now > NOISES * noise(list(ended.newest))
    if ended.start < ENDED_BEFORE or ended.now > ENDED_NOW or not fell:
        return None
    return (
        f"responses pin to the length limit: {ended.now:.0%} end by themselves, {ended.start:.0%} did at the start, the others are "
        "cut off and scored unfinished. Raise max_new_tokens, or take away what longer responses gain: missing_eos_penalty of "
        "hf.PPO, or a reward that counts length"
    )


def _groups(numbers: Numbers) -> str | None:
    if not _long_enough(numbers, "identical_groups") or min(list(numbers["identical_groups"].newest)[-WINDOW:]) < IDENTICAL:
        return None
    score = f" ({numbers['score_mean'].now:.3g})" if "score_mean" in numbers else ""
    return (
        f"in the last {WINDOW} steps all responses to a prompt had one and the same score{score}, in {IDENTICAL:.0%} of the groups "
        "or more: advantages are 0 and there is nothing to learn from. Take prompts that are neither too hard nor solved, a larger "
        "n, a higher temperature, or a reward with steps in between"
    )


def _gradient(numbers: Numbers) -> str | None:
    for name in GRADIENTS:
        if not _long_enough(numbers, name):
            continue
        values = list(numbers[name].newest)
        before = [value for value in values[:-3] if value > 0]
        now = median(values[-3:])
        if len(before) >= WINDOW and now > GRADIENT_TIMES * median(before):
            return (
                f"gradients explode: {name} is {now:.3g} in the last 3 steps, {median(before):.3g} in those before. "
                f"Clipping (max_grad_norm) hides it, but the direction is lost: take a lower learning rate{_rate(numbers)} with a "
                "warm-up, look for scores out of scale (score_clip), or go back to an earlier checkpoint"
            )
    return None


def _rate(numbers: Numbers) -> str:
    """Name the learning rate of the actor, where the steps have it."""
    lr = numbers.get("actor_lr")
    return f" than {lr.newest[-1]:.2g}" if lr is not None else ""


def _empty(numbers: Numbers) -> str | None:
    if "eos_rate" not in numbers or "response_tokens_mean" not in numbers or numbers["eos_rate"].num != EMPTY_STEPS:
        return None
    if min(numbers["eos_rate"].first) < 1 or max(numbers["response_tokens_mean"].first) > 1:
        return None
    return (
        f"every response of the first {EMPTY_STEPS} steps is empty: the model ends at once, so there is nothing to score. Take a "
        "model that answers prompts of this form (the byte-level 'tiny' was not trained on conversations), or look at one: "
        "batch.text('prompt')"
    )


GRADIENTS = ("actor_grad_norm", "critic_grad_norm", "cost_critic_grad_norm")
RULES: Mapping[str, Callable[[Numbers], str | None]] = {
    "score": _score, "entropy": _entropy, "kl": _kl, "length": _length, "groups": _groups, "gradient": _gradient, "empty": _empty,
}  # fmt: skip
READ = frozenset({
    "score_mean", "score_std", "entropy", "kl_mean", "response_tokens_mean", "eos_rate", "identical_groups", "actor_lr",
    *GRADIENTS,
})  # fmt: skip
"""Numbers of a step's row that the rules read."""
