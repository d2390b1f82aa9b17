"""GRPO, RLOO, ReMax and REINFORCE++ on real engines: two steps of each in one session, and what their columns hold."""

import numpy as np
import pytest
from system_helpers import fingerprint

import hfsdk as hf
from hfsdk.algorithms.invariants import invariants

SHORT = {"max_new_tokens": 6, "n": 3}
pytestmark = pytest.mark.filterwarnings("ignore:reward goes on with")


def letters(completions):
    """Scores that differ between responses of one length."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


@pytest.fixture(autouse=True)
def scores_that_differ(give_reward):
    give_reward(letters)


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


def test_filtered_groups(live, give_reward):
    """Scores that differ in the second group only: only it is trained on; where none differ, no weight changes."""
    batch_of = live.prompts[5][:3]

    def second_alone(position, completions):
        first = min(position)
        return [float(i % 2) if p == first + 1 else 1.0 for i, p in enumerate(position)]

    give_reward(second_alone)
    algorithm = hf.GRPO(max_new_tokens=6, n=2, filter_groups=True)
    step = algorithm.step(live.session.models, batch_of)
    assert [row["num_samples"] for row in step.actor.rows] == [2]
    assert algorithm.metrics(step)["identical_groups"] == pytest.approx(2 / 3)
    assert step.actor.rows[0]["num_tokens"] == step.batch["response"].lengths[2:4].sum()

    give_reward(lambda completions: [0.1] * len(completions))
    before = live.actor.run(fingerprint)
    step = algorithm.step(live.session.models, batch_of)
    assert step.actor is None
    assert algorithm.metrics(step)["identical_groups"] == 1
    assert live.actor.run(fingerprint) == before


def test_a_data_set_s_answers_reach_the_reward_and_grpo_learns_from_0_and_1(live, give_reward):
    additions = hf.data.additions(64, seed=2)
    answers = dict(zip(additions["prompt"], additions["answer"], strict=True))
    give_reward(hf.data.exact_match)
    prompts = live.session.prompts(additions, column="prompt", batch_size=16, seed=0)
    run = live.session.train(hf.GRPO(n=4, max_new_tokens=5, kl_coef=0.0), prompts, steps=2, progress=False)
    table, texts, asked = run.last.batch.table(), run.last.batch.text("response"), run.last.batch.text("prompt")
    assert [str(answer) for answer in table["answer"]] == [answers[prompt] for prompt in asked]  # each reply has its own
    wanted = [float(text.split("\n")[0] == answers[prompt]) for prompt, text in zip(asked, texts, strict=True)]
    assert list(table["scores"]) == wanted
    assert 0 < sum(wanted) < len(wanted)
    assert run.history["score_mean"].iloc[1] == pytest.approx(sum(wanted) / len(wanted))
    for row in run.rows:
        assert 0 <= row["identical_groups"] < 1
        assert row["actor_grad_norm"] > 0
        assert row["clip_fraction"] == 0  # one mini-batch: the policy is the one that sampled
