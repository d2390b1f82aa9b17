"""Variants of the critic-free algorithms on real engines: a step of each, rewards of single steps, prompts that are replaced."""

import numpy as np
import pytest
from expect import refuses
from test_system_critic_free import SHORT, letters, one_row

import hfsdk as hf
from hfsdk.algorithms import grpo
from hfsdk.algorithms.invariants import invariants

pytestmark = pytest.mark.filterwarnings("ignore:reward goes on with")


@pytest.fixture(autouse=True)
def scores_that_differ(give_reward):
    give_reward(letters)


VARIANTS = [
    hf.GSPO(**SHORT, mini_batches=2), hf.CISPO(**SHORT, mini_batches=2), hf.DrGRPO(**SHORT), hf.OPO(**SHORT),
    hf.ReinforcePlusPlusBaseline(**SHORT), hf.KLCov(**SHORT), hf.ClipCov(**SHORT), hf.Distillation(**SHORT),
    hf.SAPO(**SHORT, mini_batches=2), hf.GMPO(**SHORT, mini_batches=2), hf.GPG(**SHORT), hf.DPPO(**SHORT, mini_batches=2),
    hf.GDPO(**SHORT), hf.GRPO(**SHORT, tis_cap=2.0, tis_level="geometric", tis_normalise=True, mini_batches=2),
    hf.GRPO(**SHORT, tis_cap=1.0 + 1e-6, tis_floor=1.0 - 1e-6, tis_level="sequence", tis_bounds="mask"),
]  # fmt: skip


def test_a_step_of_each_variant(live):
    """One after the other, from one batch of prompts."""
    for algorithm in VARIANTS:
        step = algorithm.step(live.session.models, live.prompts[7][:4])
        numbers = algorithm.metrics(step)
        assert invariants(step.actor.rows) == []
        assert all(np.isfinite(number) for number in numbers.values()), algorithm
        assert len(step.actor.rows) == algorithm.mini_batches
        assert {"score_mean", "kl_mean"} - set(numbers) == ({"score_mean"} if isinstance(algorithm, hf.Distillation) else set())
        if isinstance(algorithm, hf.KLCov):
            marked = step.batch["covariance_mask"].flat
            assert marked.sum() == max(1, int(algorithm.share * len(marked)))


def test_steps_have_rewards_of_their_own(live):
    """The first half of a response's tokens earns 1 each, where it answers a prompt of an odd place."""

    def early(completion_ids, position, **columns):
        return [[float(i % 2 and k < len(ids) // 2) for k in range(len(ids))] for i, ids in enumerate(completion_ids)]

    try:
        live.session.reward(early, per_token=True)
        algorithm = hf.ProcessGRPO(**SHORT, step_ends=list(range(0, 256, 2)))
        table = algorithm.step(live.session.models, live.prompts[7][:4]).batch.table()
    finally:
        live.session.reward(letters)
    assert {"token_scores", "scores"} <= set(table)
    firsts, lasts = (np.array([row[at] for row in table["advantages"] if len(row)]) for at in (0, -1))
    assert (firsts != lasts).any(), "a response's tokens have advantages of their own"


def test_replacements_are_drawn_where_the_columns_are(live):
    """Of four prompts two are wanted; the first two teach nothing. All is as if the four had been generated at once."""
    batch_of = live.prompts[8][:4]
    places = batch_of["position"].tolist()

    def scores(completions, position, **columns):
        return [float(i % 3 == 0) if p in places[2:] else 0.0 for i, p in enumerate(position)]

    whole = live.actor.generate(batch_of, max_new_tokens=6, n=3).table()
    try:
        live.session.reward(scores)
        algorithm = hf.DAPO(**SHORT)
        step = algorithm.step(live.session.models, batch_of)
        table = step.batch.table()
        assert algorithm.metrics(step)["identical_groups"] == 0.5
    finally:
        live.session.reward(letters)
    for name in ("prompt", "response", "rollout_log_probs"):
        np.testing.assert_array_equal(table[name].flat, whole[name].flat)
    for name in ("group", "position", "finish_reason", "temperature"):
        assert list(table[name]) == list(whole[name])
    assert [row["num_samples"] for row in step.actor.rows] == [6]


def test_groups_of_any_size_and_scores_that_are_not_finite(live):
    scored = live.reward.compute_scores(live.actor.generate(live.prompts[6][:3], max_new_tokens=6, n=3))
    uneven = grpo.advantages(scored.take([8, 0, 3, 4, 5, 1])).table("advantages", "scores")
    first = one_row(uneven["advantages"])
    assert first[0] == 0, "alone in its group"
    scores = np.asarray(uneven["scores"], np.float64)
    np.testing.assert_allclose(first[1] + first[5], 0, atol=1e-6)
    np.testing.assert_allclose(first[2:5], (scores[2:5] - scores[2:5].mean()) / (scores[2:5].std(ddof=1) + 1e-6), atol=1e-5)
    spoilt = scored.with_columns(scores=[0.0, float("inf")] + [1.0] * 7)
    with refuses(hf.CallError, "'scores' is inf", "sample 1", "finite"):
        grpo.advantages(spoilt).wait()
