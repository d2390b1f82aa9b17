"""RLOO (Back to Basics, arXiv 2402.14740): REINFORCE, and the other responses to the same prompt are the baseline.

Against `PPO.step` the lines with the critic are gone and ``n`` responses answer each prompt. The whole response is one action:
its reward is the score minus the KL of all its tokens, its advantage that reward minus the mean reward of the others, and the
loss sums over its tokens. With one optimizer step per batch the ratio is 1, so the gradient is REINFORCE's and nothing is
clipped; with more steps the clip of PPO keeps them near the policy that sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfsdk.algorithms.choices import Aggregation, Alone, Copies
from hfsdk.algorithms.handles import StepModels, need_roles, reference_of
from hfsdk.algorithms.on_policy import KLReward, KLRewardFunction, OnPolicy
from hfsdk.algorithms.options import with_options
from hfsdk.algorithms.step import Step
from hfsdk.core.checks import checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class RLOO(KLReward, OnPolicy):
    """REINFORCE with a leave-one-out baseline. ``kl_coef`` is TRL's, the loss is the paper's."""

    @checked
    def step(self, models: StepModels, prompts: Batch) -> Step:
        """Run one step; returns at once."""
        need_roles(models, self.roles)
        batch = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens, temperature=self.temperature, n=self.n)
        if self.old_log_probs == "recompute":
            batch = models.actor.compute_log_probs(batch)
        else:
            batch = batch.alias("old_log_probs", "rollout_log_probs")
        if reference := reference_of(models):
            batch = reference.compute_log_probs(batch)
        batch = models.reward.compute_scores(batch)
        batch = self.with_advantages(batch)
        actor = models.actor.update(self.weighed(batch), self.policy_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        return Step(batch, None, actor)

    n: Copies = 4
    """k: responses per prompt, at least 2, which is TRL's."""
    aggregation: Aggregation = "sequence_sum"
    """How the loss is averaged: the sum over a response's tokens, as log pi(y|x) is one; others as in `PolicyLoss`."""

    compares = True

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with its advantages; a variant has others (`hfsdk.algorithms.opo.OPO`)."""
        return Advantages.of(self).over(batch)


@dataclass(frozen=True, kw_only=True)
class Advantages(KLReward, KLRewardFunction):
    """The function that `advantages` runs over the whole batch."""

    alone: Alone = "zero"
    """Advantage of a group of one: ``"zero"``, or its ``"score"``, less its KL (verl)."""

    needs = ("scores", "group", "response")
    gives = ("advantages",)

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import rlmath, tensors

        rewards_N = tensors.finite(table, "scores")
        if self.score_clip is not None:
            rewards_N = rewards_N.clamp(-self.score_clip, self.score_clip)
        kl_T, columns = self.kl_of(table)
        lengths_N = tensors.lengths(table)
        rewards_N = rewards_N - self.kl_coef * rlmath.sequence_sum(kl_T, lengths_N)
        advantages_N = self.compared(rewards_N, tensors.groups(table), lengths_N)
        return {"advantages": tensors.on_every_token(table, advantages_N), **tensors.all_on_tokens(table, columns)}

    def compared(self, rewards_N: Tensor, group_N: Tensor, lengths_N: Tensor) -> Tensor:
        """Return each reward minus its baseline, shape [N]."""
        return leave_one_out(rewards_N, group_N, self.alone)


def leave_one_out(scores_N: Tensor, group_N: Tensor, alone: str = "zero") -> Tensor:
    """Return each score minus the mean of the *others* of its group (section 4.1); shape [N].

    That is ``n / (n - 1)`` times the distance to the group's own mean. 0 where all scores of a group are the same, and in a group
    of one, which has no others (TRL: the same; verl: the score itself, which ``alone="score"`` gives).
    """
    from hfsdk.algorithms import groups

    size_N = groups.group_size(group_N)
    return (scores_N - groups.group_mean(scores_N, group_N, alone)) * size_N / (size_N - 1).clamp(min=1)


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn scores into leave-one-out advantages, in a CPU task over the whole batch.

    Args:
        batch: rows with scores and group; with old_log_probs and ref_log_probs where ``kl_coef`` is not 0. Groups may differ in
            size; one whose rewards are all the same gets 0.
        options: the fields of `Advantages`.

    Returns:
        The batch with advantages and, where ``kl_coef`` is not 0, ``kl`` (old minus reference log-probability), per token.
    """
    return options.over(batch)
