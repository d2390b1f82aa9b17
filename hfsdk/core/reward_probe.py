"""``RewardProbe``: what ``reward.probe(batch)`` found out about a reward: seconds, failures, and what its scores follow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hfsdk.core.checks import Count, checked
from hfsdk.core.field_texts import documented
from hfsdk.core.sample_outcome import FAILURES, SampleOutcome, named
from hfsdk.core.table import Array
from hfsdk.core.text import printable

if TYPE_CHECKING:
    import pandas as pd


FOLLOWS = 0.5
"""Rank correlation from which on a reward is said to follow something."""

NOT_CHANCE = 3.0
"""Standard errors of a rank correlation without any relation, ``1 / sqrt(n - 1)``, that it must have as well: no chance then."""

SLOW = 10.0
"""A sample is slow that takes so many times the median."""

LEAST_SLOW_S = 0.05
"""Seconds that a slow sample takes at least, however short the median."""

SHOWN = 5
"""Rows of each kind in the text form."""


@dataclass(frozen=True)
class Follows:
    """How much scores go with something else, over the scored samples."""

    name: str
    """``"tokens"``, ``"place"`` (in the batch), ``"place in group"`` or ``"repetition"``."""
    spearman: float
    """Correlation of ranks, -1 to 1; NaN where one of the two does not vary."""
    pearson: float
    """Correlation of the numbers."""
    samples: int

    @property
    def strong(self) -> bool:
        """Whether it is strong, and no chance."""
        least = max(FOLLOWS, NOT_CHANCE / math.sqrt(self.samples - 1)) if self.samples > 1 else math.inf
        return abs(self.spearman) >= least


@dataclass(frozen=True)
class Agreement:
    """How far two rewards agree on the samples that both score."""

    other: str
    samples: int
    pearson: float
    spearman: float
    same_order: float
    """Share of the pairs of samples, told apart by both, that both put in the same order."""
    pairs: int
    most_different: tuple[int, ...]
    """Rows whose ranks differ most, the first one most."""


@documented
@dataclass(frozen=True, eq=False)
class RewardProbe:
    """Scores of a reward on some samples, one by one. It draws itself; ``probe.table`` has a row for each sample."""

    reward: str
    """The reward's name."""
    prompts: Sequence[str] = field(repr=False)
    """Texts."""
    completions: Sequence[str] = field(repr=False)
    """Texts."""
    outcomes: Sequence[SampleOutcome] = field(repr=False)
    """The outcome of each sample."""
    tokens: Array = field(repr=False)
    """Tokens of each response; shape [rows]."""
    groups: Array | None = field(repr=False, default=None)
    """The prompt that each sample answers, by number; ``None`` where the batch has no groups; shape [rows]."""
    timed: bool = True
    """Whether seconds were measured, which a model's are not."""
    other: str = ""
    """The name of the reward it was held against."""
    other_outcomes: Sequence[SampleOutcome] = field(repr=False, default=())
    """The outcome of each sample with that reward."""

    @cached_property
    def scores(self) -> Array:
        """One number per sample, of a reward per token their sum; NaN where there is none; shape [rows]."""
        return _scores(self.outcomes)

    @cached_property
    def other_scores(self) -> Array:
        """The same of the reward it was held against; shape [rows], or [0]."""
        return _scores(self.other_outcomes)

    @cached_property
    def seconds(self) -> Array:
        """Seconds of the function per sample; NaN where they were not measured; shape [rows]."""
        return np.asarray([outcome.seconds if self.timed else math.nan for outcome in self.outcomes], dtype=np.float64)

    @property
    def failed(self) -> dict[int, SampleOutcome]:
        """Row -> its failure: raised, took too long, ended its process, is no score (NaN, infinite, no number)."""
        return {row: outcome for row, outcome in enumerate(self.outcomes) if outcome.failure}

    @property
    def not_scored(self) -> list[int]:
        """Rows for which the reward gave ``None``: they are left out of the loss."""
        return [row for row, outcome in enumerate(self.outcomes) if outcome.score is None and not outcome.failure]

    @checked
    def slowest(self, count: Count = SHOWN) -> list[int]:
        """Return the rows that took longest, the slowest first; empty where seconds were not measured."""
        return np.argsort(-self.seconds, kind="stable")[:count].tolist() if self.timed else []

    @cached_property
    def flat_groups(self) -> list[int]:
        """Groups of two or more scored samples with one and the same score: a group's comparison teaches nothing there."""
        return [group for group, scores in self._by_group.items() if len(scores) > 1 and len(set(scores)) == 1]

    @property
    def num_groups(self) -> int:
        """Groups with two or more scored samples."""
        return sum(len(scores) > 1 for scores in self._by_group.values())

    @cached_property
    def duplicates(self) -> list[list[int]]:
        """Rows of exactly the same prompt and response, for each that is there twice or more."""
        return duplicates([f"{prompt}\0{completion}" for prompt, completion in zip(self.prompts, self.completions, strict=True)])

    @property
    def unequal_duplicates(self) -> list[list[int]]:
        """Duplicates whose scores differ: the reward depends on more than the text, or on chance."""
        scored = ([row for row in same if math.isfinite(self.scores[row])] for same in self.duplicates)
        return [rows for rows in scored if len(set(self.scores[rows].tolist())) > 1]

    @cached_property
    def follows(self) -> tuple[Follows, ...]:
        """How much the scores go with length, place in the batch, place in the group and repetition."""
        columns = self._beside
        scored = np.isfinite(self.scores)
        return tuple(
            Follows(name, spearman(self.scores, column), pearson(self.scores, column), int(scored.sum()))
            for name, column in columns.items()
        )

    @cached_property
    def agreement(self) -> Agreement | None:
        """How far it agrees with the reward it was held against; ``None`` without one."""
        if not self.other:
            return None
        own, others = self.scores, self.other_scores
        both = np.flatnonzero(np.isfinite(own) & np.isfinite(others))
        apart = np.abs(ranks(own[both]) - ranks(others[both]))
        order = both[np.argsort(-apart, kind="stable")][: int((apart > 0).sum())]
        share, pairs = same_order(own, others)
        return Agreement(
            self.other, len(both), pearson(own, others), spearman(own, others), share, pairs, tuple(order[:SHOWN].tolist())
        )

    @property
    def findings(self) -> list[str]:
        """The findings, one sentence each; empty where nothing strikes."""
        sentences = []
        for kind in FAILURES:
            rows = [row for row, outcome in self.failed.items() if outcome.failure == kind]
            if rows:
                first = named(rows[0], self.completions[rows[0]], self.failed[rows[0]])
                sentences.append(f"{_samples(len(rows))} failed ({kind}): {first}" + (" and others" if len(rows) > 1 else ""))
        if self.not_scored:
            sentences.append(f"{_samples(len(self.not_scored))} not scored (None): left out of the loss")
        if self.timed and len(self.seconds):
            usual = float(np.median(self.seconds))
            slow = [row for row in self.slowest(len(self.seconds)) if self.seconds[row] > max(SLOW * usual, LEAST_SLOW_S)]
            if slow:
                times = f"more than {SLOW:g} times the median of {_seconds(usual)}"
                sentences.append(f"{_samples(len(slow))} took {times}, sample {slow[0]} most ({_seconds(self.seconds[slow[0]])})")
        if self.flat_groups:
            few = ", ".join(map(str, self.flat_groups[:SHOWN])) + (", ..." if len(self.flat_groups) > SHOWN else "")
            sentences.append(
                f"no variance in {len(self.flat_groups)} of {self.num_groups} groups ({few}): equal scores teach nothing where "
                "they are compared within a group"
            )
        for relation in self.follows:
            if relation.strong:
                sentences.append(
                    f"scores follow {relation.name}: rank correlation {relation.spearman:+.2f} over {relation.samples} samples"
                )
        if self.unequal_duplicates:
            rows = self.unequal_duplicates[0]
            scores = ", ".join(f"{self.scores[row]:g}" for row in rows[:SHOWN])
            sentences.append(f"the same text has different scores: samples {', '.join(map(str, rows[:SHOWN]))} have {scores}")
        return sentences

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row per sample: texts, score, seconds, tokens, repetition, failure, message, line; group, other score where known."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_pandas(self) -> pd.DataFrame:
        """Return :attr:`table`."""
        return self.table

    def view(self) -> dict[str, Any]:
        """Return plain data for display."""
        return {
            "reward": self.reward, "other": self.other, "timed": self.timed, "rows": self._rows(), "findings": self.findings,
            "lines": self._lines(), "follows": [[relation.name, relation.spearman, relation.strong] for relation in self.follows],
            "flat_groups": self.flat_groups,
        }  # fmt: skip

    # -- inside

    @cached_property
    def _by_group(self) -> dict[int, list[float]]:
        grouped: dict[int, list[float]] = {}
        for group, score in zip(() if self.groups is None else self.groups.tolist(), self.scores.tolist(), strict=False):
            if math.isfinite(score):
                grouped.setdefault(group, []).append(score)
        return grouped

    @cached_property
    def _beside(self) -> dict[str, Array]:
        """The columns that scores are compared with."""
        columns = {"tokens": self.tokens.astype(np.float64), "place": np.arange(len(self.tokens), dtype=np.float64)}
        if self.groups is not None and len(set(self.groups.tolist())) < len(self.groups):
            seen: dict[int, int] = {}
            places = []
            for group in self.groups.tolist():
                places.append(seen.setdefault(group, 0))
                seen[group] += 1
            columns["place in group"] = np.asarray(places, dtype=np.float64)
        columns["repetition"] = np.asarray([repetition(text) for text in self.completions])
        return columns

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for row, outcome in enumerate(self.outcomes):
            entry: dict[str, Any] = {
                "prompt": self.prompts[row], "completion": self.completions[row], "score": float(self.scores[row]),
                "seconds": float(self.seconds[row]), "tokens": int(self.tokens[row]),
                "repetition": float(self._beside["repetition"][row]), "failure": outcome.failure, "message": outcome.message,
                "line": outcome.line,
            }  # fmt: skip
            if self.groups is not None:
                entry["group"] = int(self.groups[row])
            if "place in group" in self._beside:
                entry["place_in_group"] = int(self._beside["place in group"][row])
            if self.other:
                entry["other_score"] = float(self.other_scores[row])
            rows.append(entry)
        return rows

    def _lines(self) -> list[str]:
        finite = self.scores[np.isfinite(self.scores)]
        head = f"{self.reward} on {_samples(len(self.outcomes))}: {len(finite)} scored, {len(self.not_scored)} not scored, "
        lines = [head + f"{len(self.failed)} failed"]
        if len(finite):
            lines.append(f"scores {finite.min():.4g} to {finite.max():.4g}, mean {finite.mean():.4g}, deviation {finite.std():.4g}")
        if self.timed and len(self.seconds):
            slow = ", ".join(f"sample {row} {_seconds(self.seconds[row])}" for row in self.slowest())
            lines.append(f"seconds per sample: median {_seconds(float(np.median(self.seconds)))}; slowest {slow}")
        strengths = [f"{relation.name} {_number(relation.spearman)}" for relation in self.follows]
        lines.append(f"rank correlation of the scores with {', '.join(strengths)}")
        if self.groups is not None:
            lines.append(f"groups without variance: {len(self.flat_groups)} of {self.num_groups}")
        if self.duplicates:
            count = sum(len(same) for same in self.duplicates)
            unequal = f"{len(self.unequal_duplicates)} with unequal scores"
            lines.append(f"duplicates: {count} samples of {len(self.duplicates)} texts, {unequal}")
        if self.agreement is not None:
            a = self.agreement
            order = f"the same order in {100 * a.same_order:.0f} % of {a.pairs} pairs" if a.pairs else "no two told apart by both"
            lines.append(f"against {a.other}: Pearson {_number(a.pearson)}, Spearman {_number(a.spearman)}, {order}")
            if a.most_different:
                words = ", ".join(f"{row} ({self.scores[row]:.4g} and {self.other_scores[row]:.4g})" for row in a.most_different)
                lines.append(f"their ranks differ most on samples {words}")
        return lines

    def __repr__(self) -> str:
        lines = [f"! {sentence}" for sentence in self.findings] or ["nothing strikes"]
        return printable("\n".join([*self._lines(), *lines]))


def _scores(outcomes: Sequence[SampleOutcome]) -> Array:
    def number(outcome: SampleOutcome) -> float:
        if outcome.score is None:
            return math.nan
        return float(sum(outcome.score)) if isinstance(outcome.score, tuple) else float(outcome.score)

    return np.asarray([number(outcome) for outcome in outcomes], dtype=np.float64)


def summed(parts: Mapping[str, tuple[float, Sequence[SampleOutcome]]]) -> list[SampleOutcome]:
    """Return the outcomes of a weighted sum: parts that do not score a sample are left out of its sum; it fails where one does.

    Args:
        parts: name -> weight and outcomes.
    """
    outcomes = []
    for row in range(len(next(iter(parts.values()))[1])):
        ones = {name: (weight, of_part[row]) for name, (weight, of_part) in parts.items()}
        failed = next(((name, outcome) for name, (_, outcome) in ones.items() if outcome.failure), None)
        seconds = sum(outcome.seconds for _, outcome in ones.values())
        if failed is not None:
            name, outcome = failed
            outcomes.append(SampleOutcome(
                seconds=seconds, failure=outcome.failure, message=f"{name}: {outcome.message}", line=outcome.line,
                details=outcome.details,
            ))  # fmt: skip
            continue
        scores = [weight * float(_scores([outcome])[0]) for weight, outcome in ones.values() if outcome.score is not None]
        outcomes.append(SampleOutcome(score=math.fsum(scores) if scores else None, seconds=seconds))
    return outcomes


def _samples(count: int) -> str:
    return f"{count} sample{'s' * (count != 1)}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{round(value, 2) + 0.0:+.2f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


# -- statistics of scores and texts; a pair of which one number is missing (NaN) is left out

WORDS_TOGETHER = 2
"""n of the n-grams of words whose repetition is counted."""


def pearson(x: Array, y: Array) -> float:
    """Return the correlation of two lists, shape [N] each; NaN for fewer than two pairs, or where one of them does not vary."""
    x, y = _both_finite(x, y)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    dx, dy = (scaled - scaled.mean() for scaled in (x / np.abs(x).max(), y / np.abs(y).max()))
    size = float(np.sqrt(np.sum(dx**2) * np.sum(dy**2)))
    return float(np.clip(np.sum(dx * dy) / size, -1.0, 1.0)) if size else float("nan")


def spearman(x: Array, y: Array) -> float:
    """Return the correlation of two lists' ranks (Spearman 1904; ties have their mean rank); NaN as :func:`pearson`."""
    x, y = _both_finite(x, y)
    return pearson(ranks(x), ranks(y))


def ranks(x: Array) -> Array:
    """Return each number's rank from 1, ties the mean of theirs; shape [N]."""
    values, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Array = (last - (counts - 1) / 2)[which] if len(values) else np.zeros(0)
    return mean


def same_order(x: Array, y: Array) -> tuple[float, int]:
    """Return the share of pairs that two lists have in the same order, and the number of pairs that both tell apart.

    Pairs that are equal in a list have no order there and are not counted; NaN where there is none.
    """
    x, y = _both_finite(x, y)
    agree = differ = 0
    for i in range(len(x) - 1):
        signs = np.sign(x[i + 1 :] - x[i]) * np.sign(y[i + 1 :] - y[i])
        agree, differ = agree + int((signs > 0).sum()), differ + int((signs < 0).sum())
    return (agree / (agree + differ) if agree + differ else float("nan")), agree + differ


def repetition(text: str) -> float:
    """Return the share of a text's word pairs that were there before (seq-rep-n, Welleck et al., arXiv 1908.04319, section 3)."""
    words = text.split()
    grams = [tuple(words[i : i + WORDS_TOGETHER]) for i in range(len(words) - WORDS_TOGETHER + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def duplicates(texts: Sequence[str]) -> list[list[int]]:
    """Return the numbers of texts that are exactly the same, for each text that is there twice or more."""
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        rows.setdefault(text, []).append(row)
    return [same for same in rows.values() if len(same) > 1]


def _both_finite(x: Array, y: Array) -> tuple[Array, Array]:
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    both = np.isfinite(x) & np.isfinite(y)
    return x[both], y[both]
