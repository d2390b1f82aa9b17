"""Runs in which one thing is planted that makes a number bad: a row of the data is marked, and it acts on that row alone."""

import dataclasses
from dataclasses import dataclass

import numpy as np

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.algorithms.step import Step

SAMPLE, TOKEN = 5, 3
"""The marked row is the sixth sample of its step's batch; and the token of it that explodes."""
BATCH = 8
NAME = "decoder.layers.1.mlp.linear_fc1.weight"


def prompts(session, openings, step):
    """Return a stream whose row ``SAMPLE`` of batch ``step`` is marked."""
    rows = [openings[i % len(openings)] for i in range(BATCH * (step + 2))]
    marks = [float(i == BATCH * step + SAMPLE) for i in range(len(rows))]
    return session.prompts({"prompt": rows, "marked": marks}, column="prompt", batch_size=BATCH, shuffle=False)


def lengths(completions):
    return [float(len(text) % 7) - 3.0 for text in completions]


def nan_where_marked(completions, marked):
    return [float("nan") if mark else float(len(text) % 7) - 3.0 for text, mark in zip(completions, marked, strict=True)]


def explode(table):
    advantages = table.ragged("advantages")
    flat = advantages.flat.copy()
    for row in np.flatnonzero(table["marked"]):
        flat[advantages.offsets[row] + TOKEN] *= 1e6
    return {"advantages": hf.Ragged(flat, advantages.offsets)}


def divides_by_zero(out, b):
    each, metrics = ppo.PolicyLoss()(out, b)
    keep = b.expand("marked") == 0
    return each * keep / keep, metrics  # 0/0 for the marked sample alone


def bursts(out, b):
    each, metrics = ppo.PolicyLoss()(out, b)
    return each * (1 + 1e6 * b.expand("marked")), metrics


def is_scaled(out, b):
    each, metrics = ppo.PolicyLoss()(out, b)
    return each * (1 + 1e6 * b.expand("any_marked")), metrics


def bursts_late(out, b):
    each, metrics = ppo.PolicyLoss()(out, b)
    has_learned = (out.log_probs - b["old_log_probs"]).abs().mean() > 1e-6  # so not in the update's first mini-batch
    return each * (1 + 1e6 * b.expand("any_marked") * has_learned), metrics


def any_marked(table):
    return {"any_marked": np.full(table.num_rows, max(table["marked"]), np.float32)}


LOSSES = {"loss": divides_by_zero, "burst": bursts, "scale": is_scaled, "late": bursts_late}


def set_inf(rank, name):
    """Spoil one number of a weight on rank 1."""
    import torch

    if rank.rank == 1:
        with torch.no_grad():
            dict(rank.module.named_parameters())[name].view(-1)[7] = float("inf")


@dataclass(frozen=True)
class Planted:
    """PPO, call by call, with one thing planted."""

    what: str = ""
    """``"advantage"``, ``"weight"``, or one of `LOSSES`; nothing is PPO as it is."""
    ppo: hf.PPO = dataclasses.field(default_factory=lambda: hf.PPO(max_new_tokens=8, mini_batches=2))

    @property
    def roles(self):
        return self.ppo.roles

    def step(self, models, prompts):
        batch = models.actor.generate(prompts, max_new_tokens=8, ignore_eos=True)
        if self.what == "weight" and any(batch["marked"]):
            models.actor.run(set_inf, NAME)
        batch = models.actor.compute_log_probs(batch)
        batch = models.reference.compute_log_probs(batch)
        batch = models.critic.compute_values(batch)
        batch = models.reward.compute_scores(batch)
        batch = ppo.advantages(batch)
        if self.what == "advantage":
            batch = batch.map(explode, reads=["advantages", "marked"], writes=["advantages"])
        critic = models.critic.update(batch, ppo.ValueLoss(), mini_batches=2)
        loss = LOSSES.get(self.what, ppo.PolicyLoss())
        if self.what in ("scale", "late"):
            batch = batch.map(any_marked, reads=["marked"], writes=["any_marked"])
        actor = models.actor.update(batch, loss, mini_batches=2)
        return Step(batch, critic, actor)

    def metrics(self, step):
        return self.ppo.metrics(step)
