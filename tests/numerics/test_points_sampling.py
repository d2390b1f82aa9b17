"""Points 9 to 16 and 27 of docs/checklist.md on the real engines: sampling, log-probs, heads."""

import warnings
from dataclasses import fields

import numpy as np
import pytest
import torch
from numerics_helpers import FP32, Plain, each_row, flat, forget_gradient
from system_helpers import OPENINGS, gap

import hfsdk as hf
from hfsdk import algorithms
from hfsdk.core.roles import Sampling
from hfsdk.engine.training.vocab_parallel import log_probs_and_entropy
from hfsdk.engine.worker.role_engine import sample_seed


def off_by(out, b):
    """How far the update's log-probs are from old_log_probs, as a loss that is only looked at."""
    return (out.log_probs - b["old_log_probs"]).abs()


def test_point_09_the_temperature_is_in_every_log_prob_pass(live, plain, rows):
    """Sampler, old log-probs, reference and update; left out of one, the numbers are far apart."""
    batch = live.actor.generate(OPENINGS, max_new_tokens=10, temperature=0.6)
    batch = live.actor.compute_log_probs(batch)
    assert set(batch["temperature"]) == {np.float32(0.6)}
    assert gap(batch) < FP32
    assert live.actor.compute_loss(batch, off_by).value < FP32
    warm = live.reference.compute_log_probs(live.session.batch(**rows, temperature=[0.6] * 6))
    np.testing.assert_allclose(flat(warm, "ref_log_probs"), each_row(rows, lambda p, r: plain.log_probs(p, r, 0.6)), atol=FP32)
    left_out = batch.with_columns(temperature=np.ones(len(batch), np.float32))
    assert live.actor.compute_loss(left_out, off_by).value > 0.05
    assert gap(live.actor.compute_log_probs(left_out)) > 0.1


def test_point_10_top_k_renormalises_and_no_algorithm_offers_it(live, tmp_path):
    """Of the k likeliest tokens the rollout's log-probs are renormalised; the trainer's are of the whole vocabulary."""
    only = live.actor.generate(OPENINGS[:4], max_new_tokens=6, top_k=1)
    assert np.abs(flat(only, "rollout_log_probs")).max() < 1e-6
    batch = live.actor.compute_log_probs(live.actor.generate(OPENINGS[:4], max_new_tokens=6, top_k=5))
    policy = Plain(live.actor.save_pretrained(tmp_path))
    whole, among = [], []
    for prompt, response in zip(batch["prompt"], batch["response"], strict=True):
        logits = policy.logits(prompt.tolist(), response.tolist())
        chosen = torch.tensor(response.astype(np.int64))[:, None]
        kept = logits.masked_fill(logits < logits.topk(5).values[:, -1:], -torch.inf)
        whole.append(logits.log_softmax(-1).gather(-1, chosen)[:, 0])
        among.append(kept.log_softmax(-1).gather(-1, chosen)[:, 0])
    np.testing.assert_allclose(flat(batch, "rollout_log_probs"), torch.cat(among).numpy(), atol=FP32)
    np.testing.assert_allclose(flat(batch, "old_log_probs"), torch.cat(whole).numpy(), atol=FP32)
    assert gap(batch) > 0.01
    assert Sampling(top_k=5).renormalised
    for name in algorithms.__all__:
        assert not {"top_k", "top_p"} & {field.name for field in fields(getattr(algorithms, name))}


@pytest.fixture(scope="module")
def with_costs(live):
    """The shared session with the two roles that Safe-RLHF has besides."""
    cost = live.session.cost(lambda completions: [float(text.count("e")) for text in completions])
    cost_critic = live.session.critic("tiny", train="dp2", optimizer=hf.AdamW(lr=1e-4), name="cost_critic")
    yield live
    cost_critic.release()
    cost.release()


@pytest.mark.parametrize("make", [hf.PPO, hf.GRPO, hf.RLOO, hf.ReMax, hf.ReinforcePlusPlus, hf.SafeRLHF])
def test_point_11_the_gap_of_trainer_and_rollout_is_reported(live, make, request):
    """For every algorithm that generates, as a mean and a maximum over tokens; it is that of the columns."""
    if make is hf.SafeRLHF:
        request.getfixturevalue("with_costs")
    algorithm = make(max_new_tokens=8)
    step = algorithm.step(live.session.models, live.prompts[1])
    numbers, table = algorithm.metrics(step), step.batch.table("rollout_log_probs", "old_log_probs")
    apart = np.abs(table["old_log_probs"].flat - table["rollout_log_probs"].flat)
    assert numbers["rollout_gap_mean"] == pytest.approx(apart.mean(), rel=1e-4)
    assert numbers["rollout_gap_max"] == pytest.approx(apart.max(), rel=1e-4)
    assert 0 < apart.max() < FP32


def test_point_13_no_two_samples_share_a_seed_whatever_the_rank(live):
    """One prompt on all rows of both ranks, and copies: every response is another one, and the same on whichever rank."""
    assert len({sample_seed(7, position, copy) for position in range(500) for copy in range(20)}) == 10_000
    options = {"max_new_tokens": 16, "ignore_eos": True, "n": 4}
    same = live.session.batch(prompt=[[65, 32]] * 8, position=list(range(8)))
    drawn = live.actor.generate(same, **options)
    assert len({tuple(row) for row in drawn["response"]}) == 32
    turned = live.actor.generate(same.take(list(range(7, -1, -1))), **options)
    there = [tuple(row) for row in turned["response"]]
    here = [tuple(row) for row in drawn["response"]]
    assert [there[4 * i : 4 * i + 4] for i in range(7, -1, -1)] == [here[4 * i : 4 * i + 4] for i in range(8)]


def test_point_14_dropout_is_off_whatever_the_folder_says(live, judge, rows):
    """A critic that trains, of a folder with attention_dropout 0.5: transformers' values without it, twice the same bits."""

    def dropouts(rank):
        found = [m.p for m in rank.module.modules() if isinstance(m, torch.nn.Dropout)]
        return [*found, rank.module.config.hidden_dropout, rank.module.config.attention_dropout], rank.module.training

    for found, training in judge.critic.run(dropouts):
        assert set(found) == {0.0}
        assert training, "in training mode a dropout would act"
    batch = live.session.batch(**rows)
    first, second = (judge.critic.compute_values(batch)["values"] for _ in range(2))
    assert first == second

    def values(out, b):
        return out.values

    trained_on = judge.critic.forward_backward(batch, values).mean("loss")
    judge.critic.run(forget_gradient)
    assert trained_on == pytest.approx(each_row(rows, judge.values).mean(), abs=1e-5)


def test_point_15_log_softmax_is_in_fp32(live, plain, rows):
    """Of logits in bf16: what torch gives in float32, and numbers that bf16 does not have."""
    logits = (4 * torch.randn(64, 320, generator=torch.Generator().manual_seed(0))).bfloat16()
    targets = torch.arange(64)
    found, entropy = log_probs_and_entropy(logits, targets, 320)
    exact = logits.float().log_softmax(-1)
    torch.testing.assert_close(found, exact[targets, targets], atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy, -(exact.exp() * exact).sum(-1), atol=1e-5, rtol=0)
    half = live.session.reference("tiny", name="half", dtype="bf16")
    column = half.compute_log_probs(live.session.batch(**rows))["ref_log_probs"]
    half.release()
    assert column.dtype == np.float32
    assert np.abs(column.flat - each_row(rows, plain.log_probs)).max() < 0.3
    rounded = torch.tensor(column.flat).bfloat16().float().numpy()
    assert (rounded != column.flat).mean() > 0.9


def test_point_16_a_new_reward_head_is_small_and_has_no_bias(live, rows):
    """N(0, 1 / (d + 1)) with d = 256, and no bias at all."""

    def head(rank):
        names = [name for name in rank.parameters() if name.startswith("output_layer")]
        return names, rank.module.output_layer.weight.detach().flatten().tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that its head is random is said
        fresh = live.session.reward("tiny", name="fresh")
    (names, weight), *_ = fresh.run(head)
    scores = fresh.compute_scores(live.session.batch(**rows))["scores"]
    fresh.release()
    assert names == ["output_layer.weight"]
    assert len(weight) == 256
    assert np.std(weight) == pytest.approx(257**-0.5, rel=0.15)
    assert abs(np.mean(weight)) < 3 * 257**-0.5 / 16
    assert len(set(scores)) == 6


def test_point_16_a_reward_model_is_normalised_on_reference_samples(live, rows):
    """Mean 0 and variance 1 on them, by numbers that other samples then get too."""
    reference, others = live.session.batch(**rows), live.session.batch(prompt=[[5, 6], [9]], response=[[7, 8], [1, 2, 3]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = live.session.reward("tiny", name="unscaled")
    raw, raw_others = (np.asarray(model.compute_scores(b)["scores"], np.float64) for b in (reference, others))
    mean, std = model.normalise(reference)
    scores, scores_others = (np.asarray(model.compute_scores(b)["scores"], np.float64) for b in (reference, others))
    model.release()
    assert (mean, std) == (pytest.approx(raw.mean(), abs=1e-6), pytest.approx(raw.std(ddof=1), rel=1e-5))
    assert scores.mean() == pytest.approx(0, abs=1e-5)
    assert scores.std(ddof=1) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(scores_others, (raw_others - mean) / std, atol=1e-5)


def test_point_27_a_value_head_starts_at_zero_or_from_the_reward_model(live, judge, rows):
    batch = live.session.batch(**rows)
    fresh = live.session.critic("tiny", name="fresh_critic")
    assert not flat(fresh.compute_values(batch), "values").any()
    fresh.release()

    values = flat(judge.critic.compute_values(batch), "values")
    np.testing.assert_allclose(values, each_row(rows, judge.values), atol=FP32)
    assert values.std() > 0.1
