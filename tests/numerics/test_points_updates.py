"""Points 29 to 34 of docs/checklist.md on the real trainer: what an optimizer step is made of. Plain PyTorch is the reference."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numerics_helpers import FP32, forget_gradient
from system_helpers import ppo_batch

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.algorithms.invariants import invariants
from hfsdk.core.learning_rates import WARMUP_STEPS, suggested_rate

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")


@pytest.mark.parametrize("name", ["PPO", "GRPO", "RLOO", "ReMax", "ReinforcePlusPlus"])
def test_point_29_first_mini_batch_of_every_algorithm_on_the_real_trainer(live, name):
    """fp32: ratio 1 up to rounding on every token, approximate KL 0, nothing clipped; the second mini-batch is another matter."""
    algorithm = getattr(hf, name)(max_new_tokens=8, mini_batches=2, **({} if name == "PPO" else {"n": 2}))
    rows = algorithm.step(live.session.models, live.prompts[2].take(list(range(8)))).actor.rows
    assert invariants(rows) == []
    assert rows[0]["ratio_max"] == pytest.approx(1, abs=FP32)
    assert abs(rows[0]["approx_kl"]) < 1e-7
    assert rows[0]["clip_fraction"] == 0
    assert rows[1]["ratio_max"] != rows[0]["ratio_max"]


def test_point_29_breaks_are_seen_on_the_real_trainer(live):
    """A temperature left out, and old log-probs of other weights."""
    batch = ppo_batch(live, temperature=0.7)
    left_out = batch.with_columns(temperature=np.ones(len(batch), np.float32))
    others = batch.alias("old_log_probs", "ref_log_probs")
    for broken in (left_out, others):
        row = live.actor.forward_backward(broken, ppo.PolicyLoss()).rows[0]
        assert any("ratio" in warning for warning in invariants([row])), row
        live.actor.run(forget_gradient)
    assert invariants(live.actor.forward_backward(batch, ppo.PolicyLoss()).rows) == []
    live.actor.run(forget_gradient)


def test_point_21_the_multiplier_moves_after_the_advantages_are_mixed(live):
    """The actor learns from advantages mixed with lambda of before this step's costs; the next step has the new one."""
    session = live.session
    cost = session.cost(lambda completions: [float(text.count("e")) for text in completions])
    cost_critic = session.critic("tiny", train="dp2", optimizer=hf.AdamW(lr=1e-4), name="cost_critic")
    try:
        cost.multiplier = 0.5
        algorithm = hf.SafeRLHF(max_new_tokens=10, cost_limit=0.1, multiplier_lr=0.5, most_multiplier=None, whiten=False)
        step = algorithm.step(session.models, live.prompts[3])
        table = step.batch.table("advantages", "returns", "values", "cost_advantages", "costs")
        mixed = (table["returns"].flat - table["values"].flat - 0.5 * table["cost_advantages"].flat) / 1.5
        np.testing.assert_allclose(table["advantages"].flat, mixed, atol=1e-5)
        moved = 0.5 * math.exp(0.5 * 0.5 * (np.mean(table["costs"]) - 0.1))
        assert step.multiplier == 0.5
        assert step.next_multiplier == cost.multiplier == pytest.approx(moved)
        assert moved > 0.55
        assert algorithm.metrics(step)["multiplier"] == 0.5
    finally:
        cost_critic.release()
        cost.release()


def targets(rows):
    rng = np.random.default_rng(1)
    return [rng.normal(0, 1, len(r)).astype(np.float32) for r in rows["response"]]


def plain_gradient(judge, rows, aggregation, which=slice(None)):
    """Gradient of half the squared error, by autograd over rows one by one, with the mean written as its name says."""
    losses = []
    for prompt, response, wanted in list(zip(rows["prompt"], rows["response"], targets(rows), strict=True))[which]:
        hidden = judge.model.model(torch.tensor([[*prompt, *response]])).last_hidden_state
        values = judge.model.score(hidden)[0, len(prompt) - 1 : -1, 0]
        losses.append(0.5 * (values - torch.tensor(wanted)).square())
    total = {
        "token_mean": lambda: torch.cat(losses).mean(),
        "sequence_mean": lambda: torch.stack([x.mean() for x in losses]).mean(),
        "sequence_sum": lambda: torch.stack([x.sum() for x in losses]).mean(),
        "fixed_length": lambda: torch.stack([x.sum() / 32 for x in losses]).mean(),
    }[aggregation]()
    judge.model.zero_grad()
    total.backward()
    found = {name: p.grad.clone() for name, p in judge.model.named_parameters() if p.grad is not None}
    return total.item(), found["score.weight"][0].numpy(), math.sqrt(sum(g.double().square().sum() for g in found.values()))


def head_gradient(rank):
    gradient = rank._hosted.trainer.gradients()
    return None if gradient is None else gradient["score.weight"].flatten().tolist()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_point_30_means_are_global_over_micro_batches_and_ranks(live, judge, rows, aggregation):
    """Rows of 1 to 30 tokens in micro-batches of at most 50 on two ranks: loss and gradient of the whole batch at once."""
    loss = ppo.ValueLoss(clip=None, aggregation=aggregation, fixed_length=32 if aggregation == "fixed_length" else 0)
    batch = live.session.batch(**rows, returns=targets(rows), values=targets(rows))
    judge.critic.run(forget_gradient)
    row = judge.critic.forward_backward(batch, loss).rows[0]
    total, head, norm = plain_gradient(judge, rows, aggregation)
    assert row["loss"] == pytest.approx(total, rel=1e-5)
    assert judge.critic.grad_norm == pytest.approx(norm, rel=1e-4)
    np.testing.assert_allclose(judge.critic.run(head_gradient)[0], head, rtol=1e-3, atol=1e-5)
    judge.critic.run(forget_gradient)


def test_point_31_epochs_are_reshuffled_and_cut_into_mini_batches_that_hold_each_row_once(live, judge, rows):
    """Each row has a bit of its own: a mini-batch's sum says who was in it."""
    bits = np.array([1, 2, 4, 8, 16, 32], np.float32)
    batch = live.session.batch(**rows, bits=bits)

    def who(out, b):
        return out.values, {"who": b["bits"]}

    done = judge.critic.update(batch, who, epochs=6, mini_batches=3, seed=1).rows
    members = [round(row["who"] * row["num_samples"]) for row in done]
    assert [(row["epoch"], row["mini_batch"]) for row in done] == [(e, m) for e in range(6) for m in range(3)]
    assert {row["num_samples"] for row in done} == {2}
    epochs = [tuple(members[3 * e : 3 * e + 3]) for e in range(6)]
    assert all(sum(epoch) == 63 and all(m.bit_count() == 2 for m in epoch) for epoch in epochs)
    assert len({tuple(sorted(epoch)) for epoch in epochs}) > 1, "other rows come together in another epoch"
    assert judge.critic.update(batch, who, mini_batches=3, seed=2).rows[0]["who"] != done[0]["who"]


def step_beside_pytorch(rank, wanted):
    """Take steps with the gradient that is there; return how far PyTorch's own AdamW on the same parameters comes out."""
    from hfsdk.engine.training import megatron_optimizer

    trainer = rank._hosted.trainer
    before, role = trainer.share(), trainer.role
    names = dict(trainer.model.named_parameters())
    weights = {name: tensor.clone() for name, tensor in trainer.local_tensors().items()}
    theirs = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in weights.items()}
    adam = torch.optim.AdamW(theirs.values(), lr=wanted.lr, betas=wanted.betas, eps=wanted.eps, weight_decay=0.0)
    trainer._reduce()
    gradients = {name: p.main_grad.clone() for name, p in names.items()}
    megatron_optimizer.start_afresh(trainer.model, trainer._optimizer, None)  # no moments yet
    trainer.num_updates, trainer.role = 0, replace(role, optimizer=wanted)
    told, norms = [], []
    for number in range(3):
        for name, p in names.items():
            p.main_grad.copy_(gradients[name] * (number + 1))
        trainer._reduced = True
        clipped = {name: (g * (number + 1)).clone() for name, g in gradients.items()}
        norm = torch.sqrt(sum(g.double().square().sum() for g in clipped.values()))  # dp2: every rank has the whole model
        for name, p in theirs.items():
            p.grad = clipped[name] * min(1.0, wanted.max_grad_norm / (float(norm) + 1e-6))
        for group in adam.param_groups:
            group["lr"] = wanted.lr_at(number)
        adam.step()
        told.append(trainer.step())
        norms.append(float(norm))
    after = trainer.local_tensors()
    moved = max(float((after[n] - weights[n]).abs().max()) for n in after)
    off = max(float((after[n] - theirs[n].detach()).abs().max()) for n in after)
    eps = {group["eps"] for group in trainer._optimizer.param_groups}
    trainer.role = role
    trainer.take_share(before)
    return {"told": told, "norms": norms, "moved": moved, "off": off, "eps": eps}


@pytest.fixture(scope="module")
def stepped(live, judge, rows):
    """Three steps after two accumulated passes, beside torch.optim.AdamW clipped by hand; per rank."""
    wanted = hf.AdamW(lr=1e-2, eps=1e-3, max_grad_norm=0.05, warmup_steps=2, schedule="linear", total_steps=4)
    batch = live.session.batch(**rows, returns=targets(rows), values=targets(rows))
    judge.critic.run(forget_gradient)
    for half in ([0, 1, 2], [3, 4, 5]):
        judge.critic.forward_backward(batch.take(half), ppo.ValueLoss(clip=None)).wait()
    _, _, first = plain_gradient(judge, rows, "token_mean", slice(0, 3))
    judge.model.zero_grad()
    found = judge.critic.run(step_beside_pytorch, wanted)
    halves = [plain_gradient(judge, rows, "token_mean", part)[0] for part in (slice(0, 3), slice(3, 6))]
    return {"ranks": found, "wanted": wanted, "first": first, "halves": halves}


def test_point_32_adams_epsilon_is_pytorchs(stepped):
    """An epsilon large enough to matter, outside the square root and after the correction of the bias, as PyTorch has it."""
    for found in stepped["ranks"]:
        assert found["eps"] == {1e-3}
        assert found["moved"] > 1e-3
        assert found["off"] < 1e-6
    assert hf.AdamW().eps == 1e-8


def test_point_33_gradients_are_clipped_once_after_accumulation_by_the_global_norm(live, judge, rows, stepped):
    """The norm told is before clipping, of both passes together and of all ranks; what the step took is clipped (point 32)."""
    norms = [math.dist([0.0], [row["grad_norm"]]) for row in stepped["ranks"][0]["told"]]
    assert norms == pytest.approx(stepped["ranks"][0]["norms"], rel=1e-5)
    assert norms[0] > 10 * stepped["wanted"].max_grad_norm
    assert norms[0] != pytest.approx(stepped["first"], rel=1e-2), "both passes are in it"
    assert stepped["ranks"][0]["norms"] == stepped["ranks"][1]["norms"]
    assert stepped["ranks"][0]["off"] < 1e-6, "the weights are those of AdamW with gradients scaled to max_grad_norm"
    # over tp: the critic's shards on two ranks, against the norm of the gathered gradient
    batch = ppo_batch(live)
    live.critic.forward_backward(batch, ppo.ValueLoss()).wait()
    norm = live.critic.grad_norm

    def gathered(rank):
        gradient = rank._hosted.trainer.gradients()
        return None if gradient is None else math.sqrt(sum(g.double().square().sum().item() for g in gradient.values()))

    assert live.critic.layouts["train"].tp == 2
    assert norm == pytest.approx(live.critic.run(gathered)[0], rel=1e-5)
    live.critic.run(forget_gradient)


def test_point_34_warm_up_and_schedule(stepped):
    wanted = stepped["wanted"]
    assert [wanted.lr_at(k) for k in range(6)] == pytest.approx([5e-3, 1e-2, 1e-2, 5e-3, 0.0, 0.0])
    assert [row["lr"] for row in stepped["ranks"][0]["told"]] == pytest.approx([5e-3, 1e-2, 1e-2])
    cosine = hf.AdamW(lr=1.0, min_lr=0.1, schedule="cosine", total_steps=4)
    assert [cosine.lr_at(k) for k in (0, 2, 4, 9)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert {hf.AdamW(lr=2e-5).lr_at(k) for k in (0, 10**6)} == {2e-5}


def test_point_34_a_learning_rate_that_is_left_out_is_the_suggested_one(live):
    """On the workers: by the model's size and the loss, from the start of its warm-up."""
    batch = live.session.batch(prompt=[[1, 2, 3], [4]], response=[[5, 6], [7, 8, 9]])
    batch = batch.with_columns(returns=[[1.0, 2.0], [0.0, 1.0, 2.0]], values=[[0.0] * 2, [0.0] * 3])
    fresh = live.session.critic("tiny", name="fresh", train="dp2")
    try:
        rows = fresh.update(batch, ppo.ValueLoss(), mini_batches=2).rows
        rate = suggested_rate(fresh.spec.num_parameters(), "values").lr
        assert [row["lr"] for row in rows] == pytest.approx([rate / WARMUP_STEPS, 2 * rate / WARMUP_STEPS])
    finally:
        fresh.release()
