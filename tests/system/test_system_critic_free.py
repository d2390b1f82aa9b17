"""GRPO, RLOO, ReMax and REINFORCE++ on real engines: two steps of each in one session, and what their columns hold."""

import numpy as np
import pytest
from system_helpers import fingerprint, lengths_reward

import hfsdk as hf
from hfsdk.algorithms import grpo
from hfsdk.algorithms.invariants import invariants

SHORT = {"max_new_tokens": 6, "n": 3}
pytestmark = pytest.mark.filterwarnings("ignore:reward goes on with")


def letters(completions):
    """Scores that differ between responses of one length."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


@pytest.fixture(autouse=True, scope="module")
def scores_that_differ(live):
    live.session.reward(letters)
    yield
    live.session.reward(lengths_reward)


def one_row(column):
    """The one number that every token of a response has."""
    assert all(len(row) and (row == row[0]).all() for row in column)
    return np.array([row[0] for row in column])


def by_group(table, name="scores"):
    order = np.argsort(table["group"], kind="stable")
    return np.asarray(table[name], np.float64)[order].reshape(-1, SHORT["n"]), order


def check_grpo(table):
    scores, order = by_group(table)
    spread = scores.std(axis=1, ddof=1, keepdims=True)
    wanted = (scores - scores.mean(axis=1, keepdims=True)) / (spread + 1e-6)
    np.testing.assert_allclose(one_row(table["advantages"])[order], wanted.ravel(), atol=1e-5)
    assert (spread > 0).any()


def check_rloo(table):
    kl = np.array([(old - ref).sum() for old, ref in zip(table["old_log_probs"], table["ref_log_probs"], strict=True)])
    scores, order = by_group(table)
    rewards = scores - 0.05 * kl[order].reshape(scores.shape)
    wanted = rewards - (rewards.sum(axis=1, keepdims=True) - rewards) / (SHORT["n"] - 1)
    np.testing.assert_allclose(one_row(table["advantages"])[order], wanted.ravel(), atol=1e-5)


def check_remax(table):
    kl = np.concatenate([(old - ref)[::-1].cumsum()[::-1] for old, ref in zip(
        table["old_log_probs"], table["ref_log_probs"], strict=True)])  # fmt: skip
    over = np.asarray(table["scores"]) - np.asarray(table["baseline_scores"])
    wanted = np.repeat(over, table["response"].lengths) - 0.05 * kl
    np.testing.assert_allclose(table["advantages"].flat, wanted, atol=1e-5)
    baselines, _ = by_group(table, "baseline_scores")
    assert (baselines == baselines[:, :1]).all()


def check_reinforce_pp(table):
    returns = table["returns"].flat
    ends = table["returns"].offsets[1:] - 1
    np.testing.assert_allclose(returns[ends], table["rewards"].flat[ends], atol=1e-6)
    np.testing.assert_allclose(table["advantages"].flat, (returns - returns.mean()) / returns.std(ddof=1), atol=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "check"),
    [
        (hf.GRPO(**SHORT), check_grpo), (hf.RLOO(**SHORT), check_rloo), (hf.ReMax(**SHORT), check_remax),
        (hf.ReinforcePlusPlus(**SHORT), check_reinforce_pp),
    ],
    ids=["grpo", "rloo", "remax", "reinforce_pp"],
)  # fmt: skip
def test_two_steps(live, algorithm, check):
    prompts = live.prompts[3][:4]
    before, critic = live.actor.version, live.critic.version
    for _ in range(2):
        step = algorithm.step(live.session.models, prompts)
        numbers = algorithm.metrics(step)
        table = step.batch.table()
        check(table)
        assert invariants(step.actor.rows) == []
        assert all(np.isfinite(number) for number in numbers.values())
        assert numbers["score_mean"] == pytest.approx(np.mean(table["scores"]), rel=1e-5)
        assert numbers["response_tokens_mean"] == pytest.approx(table["response"].lengths.mean())
        assert numbers["rollout_gap_max"] <= 1e-4
        assert numbers["actor_grad_norm"] > 0
        assert list(table["group"]) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert live.actor.version == before + 2 * algorithm.mini_batches
    assert live.critic.version == critic


def test_the_baseline_is_the_score_of_the_greedy_response(live):
    prompts = live.prompts[4][:4]
    greedy = live.actor.generate(prompts, max_new_tokens=6, temperature=0.0)
    scores = letters(greedy.text())
    table = hf.ReMax(max_new_tokens=6, n=2).step(live.session.models, prompts).batch.table("baseline_scores")
    assert list(table["baseline_scores"]) == [score for score in scores for _ in range(2)]


def test_filtered_groups(live):
    """Scores that differ in the second group only: only it is trained on; where none differ, no weight changes."""
    batch_of = live.prompts[5][:3]

    def second_alone(position, completions):
        first = min(position)
        return [float(i % 2) if p == first + 1 else 1.0 for i, p in enumerate(position)]

    try:
        live.session.reward(second_alone)
        algorithm = hf.GRPO(max_new_tokens=6, n=2, filter_groups=True)
        step = algorithm.step(live.session.models, batch_of)
        assert [row["num_samples"] for row in step.actor.rows] == [2]
        assert algorithm.metrics(step)["identical_groups"] == pytest.approx(2 / 3)
        assert step.actor.rows[0]["num_tokens"] == step.batch["response"].lengths[2:4].sum()

        live.session.reward(lambda completions: [0.1] * len(completions))
        before = live.actor.run(fingerprint)
        step = algorithm.step(live.session.models, batch_of)
        assert step.actor is None
        assert algorithm.metrics(step)["identical_groups"] == 1
        assert live.actor.run(fingerprint) == before
    finally:
        live.session.reward(letters)


VARIANTS = [
    hf.GSPO(**SHORT, mini_batches=2), hf.CISPO(**SHORT, mini_batches=2), hf.DrGRPO(**SHORT), hf.OPO(**SHORT),
    hf.ReinforcePlusPlusBaseline(**SHORT), hf.KLCov(**SHORT), hf.ClipCov(**SHORT), hf.Distillation(**SHORT),
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
    with pytest.raises(hf.CallError, match=r"column 'scores' is inf for sample 1; advantages need finite numbers"):
        grpo.advantages(spoilt).wait()
