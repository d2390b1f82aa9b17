"""What a run's numbers say when it does not learn: each rule speaks on its series, once, and is silent on healthy noise."""

from __future__ import annotations

import math
import random
import warnings
from statistics import fmean

from expect import each

from hfsdk.run.health import EMPTY_STEPS, LEAST_STEPS, RULES, Health


def said(rows):
    """Return (step, text) of everything that is said over a run."""
    health = Health()
    return [(step, text) for step, row in enumerate(rows) for text in health.take(row)]


def healthy(seed, steps=200):
    """A noisy run of a small batch that slowly learns, its KL and length rising, its entropy falling by half."""
    rng = random.Random(seed)
    for step in range(steps):
        done = step / steps
        yield {
            "score_mean": 0.3 + 0.3 * done + rng.gauss(0, 0.08), "score_std": 0.45, "entropy": 1.2 - 0.6 * done + rng.gauss(0, 0.1),
            "kl_mean": 6.0 * done + rng.gauss(0, 0.5), "response_tokens_mean": 20 + 8 * done + rng.gauss(0, 2),
            "eos_rate": min(1.0, max(0.0, 0.5 - 0.3 * done + rng.gauss(0, 0.1))), "identical_groups": rng.uniform(0.2, 0.8),
            "actor_grad_norm": rng.lognormvariate(0.0, 0.6), "actor_lr": 1e-4,
        }  # fmt: skip


@each("seed", range(40))
def test_a_healthy_run_is_left_alone(seed):
    assert said(healthy(seed)) == []


@each("seed", range(40))
def test_a_run_that_stands_still_is_left_alone(seed):
    rng = random.Random(seed)
    rows = [{"score_mean": rng.gauss(0, 0.2), "score_std": 0.5, "kl_mean": rng.gauss(0, 1.0), "response_tokens_mean": 5.0,
             "entropy": rng.uniform(0.5, 1.5), "eos_rate": rng.uniform(0, 0.4)} for _ in range(300)]  # fmt: skip
    assert said(rows) == []


@each("seed", range(40))
def test_a_rare_reward_is_left_alone(seed):
    rng = random.Random(seed)
    scores = [fmean(rng.random() < 0.02 for _ in range(8)) for _ in range(1000)]
    assert said([{"score_mean": score, "score_std": math.sqrt(score * (1 - score))} for score in scores]) == []


def changed(name, values, **others):
    """A run of 60 steps in which one number is ``values(step)``."""
    rng = random.Random(1)
    return [
        {"score_std": 0.4, "response_tokens_mean": 20.0, **others, name: values(step) * (1 + rng.gauss(0, 0.02))}
        for step in range(60)
    ]


FALLING = [
    ("score_mean", lambda step: max(0.2, 0.69 - 0.04 * step), "the score fell from 0.6"),
    ("entropy", lambda step: 1.5 * 0.9**step, "the entropy collapsed from 1"),
    ("kl_mean", lambda step: 0.05 * 1.2**step, "the KL to the reference runs away"),
    ("kl_mean", lambda step: 0.8 * step, "the KL to the reference runs away"),
    ("eos_rate", lambda step: max(0.0, 0.9 - 0.05 * step), "responses pin to the length limit"),
    ("identical_groups", lambda step: min(1.0, 0.5 + 0.02 * step), "nothing to learn from"),
    ("actor_grad_norm", lambda step: 1.0 if step < 30 else 40.0, "gradients explode: actor_grad_norm is 4"),
    ("critic_grad_norm", lambda step: 1.0 if step < 30 else 40.0, "gradients explode: critic_grad_norm is 4"),
]


@each("name, values, words", FALLING)
def test_what_goes_wrong_is_said_once_with_what_to_do(name, values, words):
    found = said(changed(name, values))
    assert len(found) == 1
    step, text = found[0]
    assert step >= LEAST_STEPS - 1
    assert words in text
    assert any(advice in text for advice in ("Take ", "take ", "Raise "))


def test_each_rule_has_a_series_that_it_speaks_on():
    kinds = {text.partition(":")[0].split(" from ")[0] for *_, text in FALLING}
    assert set(RULES) == {"score", "entropy", "kl", "length", "groups", "gradient", "empty"}
    assert len(kinds) >= len(RULES) - 1


@each("name, values, words", FALLING)
def test_nothing_is_said_of_the_first_steps(name, values, words):
    rows = [{**row, name: values(10 * step)} for step, row in enumerate(changed(name, values))]
    assert said(rows[: LEAST_STEPS - 1]) == []


def test_the_learning_rate_is_named_where_it_is_known():
    rows = changed("score_mean", FALLING[0][1], actor_lr=3e-4, critic_lr=1e-3)
    assert "lower learning rate than 0.0003" in said(rows)[0][1]
    assert "lower learning rate, e.g." in said(changed("score_mean", FALLING[0][1]))[0][1]


def test_empty_responses_are_said_early():
    rows = [{"eos_rate": 1.0, "response_tokens_mean": 1.0, "score_mean": 0.0}] * 20
    ((step, text),) = said(rows)
    assert step == EMPTY_STEPS - 1
    assert "every response of the first 3 steps is empty" in text
    assert said([*rows[:2], {**rows[0], "response_tokens_mean": 1.2}, *rows]) == []


def test_a_short_limit_from_the_start_is_no_news():
    assert said(changed("eos_rate", lambda step: 0.02)) == []


def test_numbers_that_are_none_are_passed_over():
    rows = [{"score_mean": value, "entropy": None, "actor_grad_norm": "high"} for value in (math.nan, math.inf) * 30]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert said(rows) == []


def test_a_dip_that_comes_back_is_no_fall():
    assert said(changed("score_mean", lambda step: 0.3 if step == 20 else 0.6)) == []


def test_gradients_that_begin_at_zero_do_not_explode():
    assert said(changed("actor_grad_norm", lambda step: 0.0 if step < 12 else 1.0)) == []
