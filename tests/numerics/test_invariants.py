"""The numbers of the first mini-batch are in the metrics of every algorithm, and a break is said: each time, in a run once."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from system_helpers import ppo_batch

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.algorithms.invariants import RATIO_TOLERANCE, WARNED
from hfsdk.algorithms.step import Statistics, Step
from hfsdk.core.pending import Metrics
from hfsdk.core.spec import DTYPE_BYTES

EVERY = ["PPO", "GRPO", "RLOO", "ReMax", "ReinforcePlusPlus"]
FIRST = ("first_ratio_error", "first_approx_kl", "first_clip_fraction")
GOOD = {"ratio": 1.0, "ratio_max": 1.000001, "approx_kl": 0.0, "clip_fraction": 0.0}
CLOSE = {"rollout_gap_mean": 1e-6, "rollout_gap_max": 1e-5}


class Rows(Metrics):
    """An update's metrics, as given."""

    def __init__(self, rows, dtype="fp32"):
        self.given, self.dtype = rows, dtype

    @property
    def rows(self):
        return self.given


def numbers(rows, dtype="fp32", **gap):
    batch = SimpleNamespace(columns=(), reduce=lambda fn, reads: SimpleNamespace(value={**CLOSE, **gap}))
    return Step(batch, None, Rows(rows, dtype)).numbers(Statistics())


def told(*args, **more):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        numbers(*args, **more)
    assert {w.category for w in caught} <= {hf.InvariantWarning}
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("name", EVERY)
def test_point_29_the_numbers_are_in_every_row_of_training_and_nothing_is_said(live, name):
    algorithm = getattr(hf, name)(max_new_tokens=6, mini_batches=2, **({} if name == "PPO" else {"n": 2}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf.InvariantWarning)
        row = live.session.train(algorithm, live.prompts, steps=1, progress=False).rows[0]
    assert row["first_ratio_error"] < 1e-4
    assert abs(row["first_approx_kl"]) < 1e-7
    assert row["first_clip_fraction"] == 0
    assert 0 < row["rollout_gap_mean"] <= row["rollout_gap_max"] < 1e-4


class LeavesTemperatureOut(hf.ReinforcePlusPlus):
    """Its update does not divide the logits by the temperature: a bug that many have had."""

    def step(self, models, prompts):
        def update(batch, loss, **options):
            return models.actor.update(batch.with_columns(temperature=np.ones(len(batch), np.float32)), loss, **options)

        actor = SimpleNamespace(generate=models.actor.generate, compute_log_probs=models.actor.compute_log_probs, update=update)
        return super().step(SimpleNamespace(actor=actor, reference=models.reference, reward=models.reward), prompts)


def test_point_29_a_run_says_once_what_breaks(live):
    algorithm = LeavesTemperatureOut(max_new_tokens=6, temperature=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = live.session.train(algorithm, live.prompts, steps=2, progress=False)
    kinds = [str(w.message).split()[0] for w in caught if w.category is hf.InvariantWarning]
    assert sorted(kinds) == sorted(set(kinds))
    assert {"ratio_max", "approx_kl"} <= set(kinds)
    assert all(row["first_ratio_error"] > 0.05 for row in run.rows), "in both rows"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(2):
            algorithm.metrics(algorithm.step(live.session.models, live.prompts[k]))
    kinds = [str(w.message).split()[0] for w in caught if w.category is hf.InvariantWarning]
    assert kinds.count("ratio_max") == 2, "by hand every step is told"
    assert caught[0].filename == __file__, "the warning points to who asked for the metrics"


def test_what_the_numbers_are():
    found = numbers([{**GOOD, "ratio_max": 1.00002, "approx_kl": 2e-6}, {**GOOD, "ratio": 7.0, "ratio_max": 9.0}])
    assert [found[name] for name in FIRST] == pytest.approx([2e-5, 2e-6, 0.0])
    assert not set(FIRST) & set(numbers([{"loss": 1.0}])), "of a loss without a ratio there is nothing to say"
    assert not told([{"loss": 1.0}])


def test_point_29_a_warning_names_the_number_the_tolerance_and_what_to_look_at():
    (ratio,) = told([{**GOOD, "ratio_max": 1.3}])
    assert ratio.startswith("ratio_max is 1.3 in the first mini-batch, where it must be 1 (within 0.0001)")
    assert "temperature" in ratio
    assert len(told([{**GOOD, "clip_fraction": 0.1}])) == 1
    assert told([GOOD]) == []


def test_point_11_a_gap_beyond_rounding_is_said():
    (gap,) = told([GOOD], rollout_gap_mean=2e-4)
    assert gap.startswith("rollout_gap of trainer and generating engine is 0.0002 nats per token and 1e-05 at most")
    assert "tis_cap" in gap
    assert len(told([GOOD], rollout_gap_max=2e-3)) == 1
    assert told([GOOD], rollout_gap_mean=float("nan"))


def test_bf16_may_be_rounded():
    rounded = [{**GOOD, "ratio": 1.001, "ratio_max": 1.04, "approx_kl": 1e-3}]
    assert told(rounded, "bf16", rollout_gap_mean=0.01, rollout_gap_max=0.4) == []
    assert len(told(rounded, "fp32")) == 3
    assert len(told([{**GOOD, "ratio_max": 1.2}], "bf16")) == 1


def test_inside_a_run_each_kind_is_told_once():
    token = WARNED.set(set())
    try:
        assert len(told([{**GOOD, "ratio_max": 2.0}])) == 1
        assert told([{**GOOD, "ratio_max": 3.0}]) == []
        assert len(told([{**GOOD, "approx_kl": 1.0}])) == 1
    finally:
        WARNED.reset(token)
    assert len(told([{**GOOD, "ratio_max": 2.0}])) == 1


def test_updates_say_what_they_computed_in(live):
    done = live.actor.update(ppo_batch(live), ppo.PolicyLoss())
    assert done.dtype == live.actor.role.dtype == "fp32"
    assert set(RATIO_TOLERANCE) == set(DTYPE_BYTES)
