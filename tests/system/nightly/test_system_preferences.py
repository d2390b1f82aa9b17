"""Reward models, DPO, demonstrations and Safe-RLHF on real engines: they learn, and no layout changes what they compute."""

from types import SimpleNamespace

import numpy as np
import pytest
from system_helpers import OPENINGS, lengths_reward

import hfsdk as hf

pytestmark = pytest.mark.filterwarnings("ignore:.*no trained scalar head", "ignore:.*goes on with", "ignore:.*is replaced")

FEW = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def lab(ray_here):
    """Two devices: actor and critics dp2, a reward model under training in tp2, a cost function."""
    session = hf.Session(devices=2, seed=3)
    actor = session.actor("tiny", rollout="tp1", optimizer=hf.AdamW(lr=3e-4))
    roles = SimpleNamespace(
        session=session, actor=actor, reference=session.reference(actor),
        critic=session.critic("tiny", optimizer=hf.AdamW(lr=1e-3)),
        cost_critic=session.critic("tiny", optimizer=hf.AdamW(lr=1e-3), name="cost_critic"),
        judge=session.reward("tiny", layout="tp2", optimizer=hf.AdamW(lr=1e-3), micro_batch_tokens=300, name="judge"),
        reward=session.reward(lengths_reward), cost=session.cost(words),
        prompts=session.prompts(OPENINGS, batch_size=8, seed=1),
        pairs=session.pairs(hf.data.review_pairs("train", 400), batch_size=8, max_tokens=64),
    )  # fmt: skip
    session.place("colocate")
    yield roles
    session.close()


def words(completions):
    return [float(len(text.split())) for text in completions]


def naive_scores(folder, batch):
    """The scalar head at each row's last token, by transformers."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()
    model.config.pad_token_id = None
    rows = [np.concatenate([p, r]) for p, r in zip(batch["prompt"], batch["response"], strict=True)]
    with torch.no_grad():
        return np.array([model(torch.tensor(row[None].astype(np.int64))).logits[0, 0].item() for row in rows])


def test_a_reward_model_learns_from_pairs_and_scores_as_transformers_does(lab, tmp_path):
    pairs, loss = lab.pairs[0], hf.BradleyTerry()
    before = lab.judge.compute_loss(pairs, loss).value
    rows = lab.judge.update(pairs, loss, epochs=6).rows
    assert rows[0]["loss"] == pytest.approx(before, abs=1e-4)
    assert rows[-1]["loss"] < 0.7 * before
    assert rows[0]["num_samples"] == 16
    assert set(rows[0]) >= {"accuracy", "margin", "chosen_score", "rejected_score"}
    scores = lab.judge.compute_scores(pairs)["scores"]
    folder = lab.judge.save_pretrained(tmp_path / "judge")
    np.testing.assert_allclose(scores, naive_scores(folder, pairs), atol=2e-4)
    assert (scores[0::2] > scores[1::2]).mean() > 0.8


def test_the_gradient_does_not_depend_on_layout_or_micro_batches(lab):
    """A second judge, dp2 with large micro-batches, starts from the same random head: the same loss and gradient norm."""
    alike = lab.session.reward("tiny", layout="tp2", optimizer=hf.AdamW(lr=1e-3), micro_batch_tokens=300, name="one")
    other = lab.session.reward("tiny", layout="dp2", optimizer=hf.AdamW(lr=1e-3), name="other")
    pairs = lab.pairs[1]
    first, second = alike.forward_backward(pairs, hf.BradleyTerry()), other.forward_backward(pairs, hf.BradleyTerry())
    assert first.rows[0]["loss"] == pytest.approx(second.rows[0]["loss"], abs=1e-5)
    assert alike.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
    alike.release()
    other.release()


def test_normalised_scores_have_mean_0_and_variance_1_and_stay_so_in_a_folder(lab, tmp_path):
    raw = lab.judge.compute_scores(lab.pairs[2])["scores"]
    mean, std = lab.judge.normalise(lab.pairs[2])
    assert (mean, std) == pytest.approx((raw.mean(), raw.std(ddof=1)), rel=1e-4)
    found = lab.judge.compute_scores(lab.pairs[2])["scores"]
    assert found.mean() == pytest.approx(0.0, abs=1e-5)
    assert found.std(ddof=1) == pytest.approx(1.0, rel=1e-4)
    assert lab.judge.normalise(lab.pairs[2]) == pytest.approx((mean, std), rel=1e-4)
    folder = lab.judge.save_pretrained(tmp_path / "judge")
    loaded = lab.session.reward(str(folder), name="loaded")
    np.testing.assert_allclose(loaded.compute_scores(lab.pairs[2])["scores"], found, atol=2e-4)
    loaded.release()


def test_a_cost_model_learns_signs(lab):
    data = hf.data.review_pairs("train", 64, seed=2)
    signs = {f"{side}_sign": np.where(np.array(data[f"{side}_rating"]) < 0, 1, -1).tolist() for side in ("chosen", "rejected")}
    source = {"prompt": data["prompt"], "chosen": data["chosen"], "rejected": data["rejected"], **signs}
    pairs = lab.session.pairs(source, batch_size=16, max_tokens=64)
    model = lab.session.cost("tiny", optimizer=hf.AdamW(lr=1e-3), name="harm")
    rows = model.update(pairs[0], hf.CostLoss(), epochs=6).rows
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["sign_accuracy"] > 0.7
    costs = model.compute_costs(pairs[0])["costs"]
    assert ((costs > 0) == (pairs[0]["sign"] > 0)).mean() > 0.7
    model.release()


def test_dpo_learns_to_prefer_and_starts_at_log_2(lab):
    algorithm, pairs = hf.DPO(beta=0.2, epochs=3), lab.pairs[3]
    step = algorithm.step(lab.session.models, pairs)
    rows = step.actor.rows
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-3)
    assert rows[0]["accuracy"] == pytest.approx(0.5, abs=0.5)
    numbers = algorithm.metrics(algorithm.step(lab.session.models, pairs))
    assert numbers["actor_loss"] < 0.69
    assert numbers["accuracy"] > 0.6
    assert numbers["margin"] > 0


def test_demonstrations_lower_the_cross_entropy(lab):
    demonstrations = lab.session.demonstrations(["the same words every time , and nothing else"] * 8, batch_size=8)
    batch, loss = next(demonstrations), hf.CrossEntropy()
    before = lab.actor.compute_loss(batch, loss).value
    rows = lab.actor.update(batch, loss, epochs=5).rows
    assert rows[0]["loss"] == pytest.approx(before, abs=1e-4)
    assert rows[-1]["loss"] < 0.8 * before


class TestSafeRLHF:
    def test_the_multiplier_moves_after_the_mix_by_the_excess(self, lab):
        lab.cost.multiplier = 1.5
        algorithm = hf.SafeRLHF(**FEW, cost_limit=0.5, multiplier_lr=0.2, most_multiplier=10.0)
        step = algorithm.step(lab.session.models, lab.prompts[0])
        table, numbers = step.batch.table(), algorithm.metrics(step)
        excess = float(np.mean(table["costs"])) - 0.5
        assert step.multiplier == numbers["multiplier"] == 1.5
        assert step.next_multiplier == lab.cost.multiplier == pytest.approx(1.5 * np.exp(0.2 * 1.5 * excess), rel=1e-5)
        assert numbers["cost_mean"] == pytest.approx(np.mean(table["costs"]), rel=1e-5)
        reward_advantages = table["returns"].flat - table["values"].flat
        mixed = (reward_advantages - 1.5 * table["cost_advantages"].flat) / 2.5
        whitened = (mixed - mixed.mean()) / mixed.std(ddof=1)
        np.testing.assert_allclose(table["advantages"].flat, whitened, atol=1e-4)
        assert all(np.isfinite(number) for number in numbers.values())
        second = algorithm.step(lab.session.models, lab.prompts[1])
        assert second.multiplier == step.next_multiplier
        second.actor.wait()

    def test_with_pre_training_data(self, lab):
        demonstrations = lab.session.demonstrations(OPENINGS, batch_size=4)
        algorithm = hf.SafeRLHF(**FEW, ptx=demonstrations, ptx_coef=0.5, mini_batches=1)
        before = lab.actor.version
        step = algorithm.step(lab.session.models, lab.prompts[2])
        numbers = algorithm.metrics(step)
        assert demonstrations.position == 1
        assert step.ptx.rows[0]["loss"] == pytest.approx(0.5 * step.ptx.rows[0]["nll"], rel=1e-4)
        assert numbers["ptx_loss"] == pytest.approx(step.ptx.rows[0]["nll"], abs=1e-3)
        assert lab.actor.version == before + 2

    def test_two_critics_learn_two_things(self, lab):
        batch = lab.actor.generate(lab.prompts[3], **FEW)
        values = lab.critic.compute_values(batch)["values"].flat
        costs = lab.cost_critic.compute_values(batch)["values"].flat
        assert not np.allclose(values, costs)

    @pytest.mark.parametrize("missing", ["cost_critic", "cost"])
    def test_what_is_missing_is_told_before_anything_runs(self, lab, missing):
        models = lab.session.models
        without = SimpleNamespace(actor=models.actor, critic=models.critic, reward=models.reward, reference=models.reference)
        if missing == "cost":
            without.cost_critic = models.cost_critic
        calls = len(lab.session.trace)
        with pytest.raises(hf.OptionError, match=f"^models must have {missing}: "):
            hf.SafeRLHF(**FEW).step(without, lab.prompts[0])
        assert len(lab.session.trace) == calls


class TestSums:
    def test_models_and_functions_are_added(self, lab):
        def brevity(completions):
            return [-float(len(text)) for text in completions]

        total = lab.session.reward([lab.judge, brevity], weights=[2.0, 0.1], name="total")
        batch = total.compute_scores(lab.actor.generate(lab.prompts[4], **FEW))
        parts = batch["scores_of_judge"], batch["scores_of_total.brevity"]
        np.testing.assert_allclose(batch["scores"], 2.0 * parts[0] + 0.1 * parts[1], rtol=1e-5)
        np.testing.assert_allclose(parts[1], brevity(batch.text()))
        again = lab.actor.generate(batch, **FEW)
        assert not [name for name in again if name.startswith("scores")]
        total.release()


class TestPerToken:
    def test_each_token_gets_its_own_reward(self, lab):
        def vowels(completions, completion_ids):
            return [[float(chr(token) in "aeiou") for token in ids] for ids in completion_ids]

        def too_few(completions, completion_ids):
            return [[1.0] * (len(ids) - (i == 2)) for i, ids in enumerate(completion_ids)]

        reward = lab.session.reward(vowels, per_token=True, name="vowels")
        batch = lab.actor.generate(lab.prompts[5], **FEW)
        batch = lab.reference.compute_log_probs(lab.actor.compute_log_probs(batch))
        batch = reward.compute_scores(lab.critic.compute_values(batch))
        wanted = [[float(chr(token) in "aeiou") for token in row] for row in batch["response"]]
        assert [list(row) for row in batch["token_scores"]] == wanted
        np.testing.assert_allclose(batch["scores"], [sum(row) for row in wanted])
        from hfsdk.algorithms import ppo, reinforce_pp

        table = ppo.advantages(batch, kl_coef=0.1).table()
        np.testing.assert_allclose(table["rewards"].flat, np.concatenate(wanted) - 0.1 * table["kl"].flat, atol=1e-5)
        table = reinforce_pp.advantages(batch, kl_coef=0.0).table()
        np.testing.assert_allclose(table["returns"].flat, np.concatenate([np.cumsum(row[::-1])[::-1] for row in wanted]), atol=1e-5)
        wrong = lab.session.reward(too_few, per_token=True, name="vowels")
        with pytest.raises(hf.RewardFunctionError, match=r"sample 2 has \d tokens .*: too_few returned \d scores for \d tokens"):
            wrong.compute_scores(batch)["scores"]
        wrong.release()
