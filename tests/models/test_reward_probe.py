"""The statistics of ``reward.probe`` against oracles written by hand, and what its report finds."""

import math
from itertools import combinations

import numpy as np
import pytest

from hfsdk.core.reward_probe import RewardProbe, duplicates, pearson, ranks, repetition, same_order, spearman, summed
from hfsdk.core.sample_outcome import SampleOutcome, named


def by_hand(x, y):
    """Pearson's correlation with plain sums."""
    n = len(x)
    mx, my = sum(x) / n, sum(y) / n
    top = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return top / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


def ranks_by_hand(x):
    return [sum(b < a for b in x) + (sum(b == a for b in x) + 1) / 2 for a in x]


@pytest.mark.parametrize("seed", range(5))
def test_correlations_are_those_by_hand(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=12), rng.integers(0, 4, size=12).astype(float)
    assert pearson(x, y) == pytest.approx(by_hand(x, y))
    assert ranks(y).tolist() == ranks_by_hand(y)
    assert spearman(x, y) == pytest.approx(by_hand(ranks_by_hand(x), ranks_by_hand(y)))
    pairs = [(a, b) for a, b in combinations(range(12), 2) if x[a] != x[b] and y[a] != y[b]]
    agree = sum((x[a] < x[b]) == (y[a] < y[b]) for a, b in pairs)
    assert same_order(x, y) == (agree / len(pairs), len(pairs))


def test_correlations_of_what_does_not_vary_or_is_missing():
    x = np.array([1.0, 2.0, np.nan, 4.0])
    assert pearson(x, np.array([2.0, 4.0, 9.0, 8.0])) == pytest.approx(1.0)
    assert math.isnan(pearson(x, np.ones(4)))
    assert math.isnan(spearman(x[:1], x[:1]))
    assert math.isnan(same_order(np.ones(3), np.arange(3))[0])
    assert pearson(np.array([1e300, 2e300, 3e300]), np.array([1e-300, 2e-300, 3e-300])) == pytest.approx(1.0)


def test_repetition_and_duplicates():
    assert repetition("a b c d") == 0.0
    assert repetition("a b a b a b") == pytest.approx(1 - 2 / 5)
    assert repetition("word") == repetition("") == 0.0
    assert duplicates(["x", "y", "x", "z", "y", "x"]) == [[0, 2, 5], [1, 4]]


def probe_of(scores, *, seconds=None, completions=None, tokens=None, groups=None, other=None, **more):
    outcomes = [
        one if isinstance(one, SampleOutcome) else SampleOutcome(score=one, seconds=0.01 if seconds is None else seconds[i])
        for i, one in enumerate(scores)
    ]
    count = len(scores)
    return RewardProbe(
        "reward", ["p"] * count, completions or [f"text {i}" for i in range(count)], outcomes,
        np.asarray(tokens if tokens is not None else [5] * count), groups=None if groups is None else np.asarray(groups),
        other="other" if other is not None else "", other_outcomes=[SampleOutcome(score=one) for one in other or ()], **more,
    )  # fmt: skip


def test_a_healthy_reward_has_no_findings():
    rng = np.random.default_rng(0)
    probe = probe_of(rng.normal(size=40).tolist(), tokens=rng.integers(1, 9, size=40), groups=np.arange(40) // 4)
    assert probe.findings == []
    assert repr(probe).endswith("nothing strikes")


def test_what_failed_and_what_was_not_scored_is_told():
    late = SampleOutcome(failure="took too long", message="f took longer than 1 s and was ended", line="a.py:3 in f", seconds=1.0)
    nan = SampleOutcome(failure="is no score", message="f returned nan; return a finite number")
    probe = probe_of([1.0, late, None, nan, 2.0])
    assert list(probe.failed) == [1, 3]
    assert probe.not_scored == [2]
    assert probe.slowest(1) == [1]
    text = repr(probe)
    assert "2 scored, 1 not scored, 2 failed" in text
    assert "! 1 sample failed (took too long): sample 1 ('text 1'): f took longer than 1 s and was ended (at a.py:3 in f)" in text
    assert "! 1 sample took more than 10 times the median of 10 ms, sample 1 most (1.00 s)" in text
    assert "! 1 sample not scored (None): left out of the loss" in text
    row = probe.table.iloc[1]
    assert (row["failure"], row["line"], math.isnan(row["score"])) == ("took too long", "a.py:3 in f", True)


def test_groups_without_variance():
    probe = probe_of([1.0, 1.0, 0.0, 1.0, 2.0, None, None, 3.0], groups=[0, 0, 1, 1, 2, 2, 3, 3])
    assert probe.flat_groups == [0]
    assert probe.num_groups == 2
    assert any("no variance in 1 of 2 groups (0)" in one for one in probe.findings)


@pytest.mark.parametrize("name", ["tokens", "place", "place in group", "repetition"])
def test_what_scores_follow_is_found(name):
    rng = np.random.default_rng(1)
    count = 32
    groups = np.arange(count) // 4
    texts = [" ".join(["a b"] * int(k)) for k in rng.integers(1, 9, size=count)] if name == "repetition" else None
    tokens = rng.integers(1, 50, size=count)
    beside = {
        "tokens": tokens, "place": np.arange(count), "place in group": np.arange(count) % 4,
        "repetition": [repetition(text) for text in texts or ()],
    }[name]  # fmt: skip
    probe = probe_of([float(x) + 0.01 * rng.normal() for x in beside], tokens=tokens, completions=texts, groups=groups)
    assert any(one.startswith(f"scores follow {name}: rank correlation +") for one in probe.findings)
    assert not any(one.strong for one in probe.follows if one.name != name)


def test_duplicates_with_unequal_scores():
    texts = ["a", "b", "a", "b"]
    assert probe_of([1.0, 2.0, 1.0, 2.0], completions=texts).unequal_duplicates == []
    probe = probe_of([1.0, 2.0, 1.0, 3.0], completions=texts)
    assert probe.unequal_duplicates == [[1, 3]]
    assert any("samples 1, 3 have 2, 3" in one for one in probe.findings)


def test_agreement_of_two_rewards():
    probe = probe_of([1.0, 2.0, 3.0, 4.0, None], other=[10.0, 20.0, 40.0, 30.0, 1.0])
    agreement = probe.agreement
    assert (agreement.samples, agreement.pairs, agreement.same_order) == (4, 6, 5 / 6)
    assert agreement.spearman == pytest.approx(0.8)
    assert set(agreement.most_different) == {2, 3}
    assert "the same order in 83 % of 6 pairs" in repr(probe)
    assert probe_of([1.0]).agreement is None


def test_a_sum_leaves_out_a_part_that_does_not_score_a_sample():
    late = SampleOutcome(failure="took too long", message="too long", seconds=1.0)
    parts = {
        "a": (1.0, [SampleOutcome(score=1.0, seconds=0.5), SampleOutcome(score=2.0), late, SampleOutcome()]),
        "b": (0.5, [SampleOutcome(score=(1.0, 3.0), seconds=0.25), SampleOutcome(), SampleOutcome(score=1.0), SampleOutcome()]),
    }
    first, second, third, fourth = summed(parts)
    assert (first.score, first.seconds) == (3.0, 0.75)
    assert (second.score, second.failure) == (2.0, "")
    assert (third.failure, third.message) == ("took too long", "a: too long")
    assert (fourth.score, fourth.failure) == (None, "")


def test_a_sample_is_named_by_its_texts_beginning():
    words = named(3, "x" * 100, SampleOutcome(failure="raised", message="f raised ValueError('a')"))
    assert words == f"sample 3 ('{'x' * 59}…'): f raised ValueError('a')"
