"""ReMax (arXiv 2310.10505): REINFORCE; the score of the greedy response to the same prompt is the baseline.

Against `PPO.step` the lines with the critic are gone, and one more ``generate``, at temperature 0, is there, with one more
``compute_scores`` over its responses. With one optimizer step per batch the ratio is 1, so the gradient is REINFORCE's and
nothing is clipped; with more steps the clip of PPO keeps them near the policy that sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hfsdk.algorithms.choices import Aggregation
from hfsdk.algorithms.handles import StepModels, need_roles, reference_of
from hfsdk.algorithms.on_policy import KLReward, KLRewardFunction, OnPolicy
from hfsdk.algorithms.options import with_options
from hfsdk.algorithms.step import Step
from hfsdk.core.checks import checked
from hfsdk.core.errors import ColumnError

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class ReMax(KLReward, OnPolicy):
    """REINFORCE with the greedy response as baseline; the ``n`` responses to a prompt share it. The loss is the paper's.

    ``kl_coef`` is PPO's. ``score_clip`` cuts the difference of score and baseline; the paper's code has 5.
    """

    @checked
    def step(self, models: StepModels, prompts: Batch) -> Step:
        """Run one step; returns at once."""
        need_roles(models, self.roles)
        batch = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens, temperature=self.temperature, n=self.n)
        greedy = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens, temperature=0.0)
        if self.old_log_probs == "recompute":
            batch = models.actor.compute_log_probs(batch)
        else:
            batch = batch.alias("old_log_probs", "rollout_log_probs")
        if reference := reference_of(models):
            batch = reference.compute_log_probs(batch)
        batch = models.reward.compute_scores(batch)
        greedy = models.reward.compute_scores(greedy)
        batch = with_baselines(batch, greedy)
        batch = Advantages.of(self).over(batch)
        actor = models.actor.update(self.weighed(batch), self.policy_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        return Step(batch, None, actor)

    aggregation: Aggregation = "sequence_sum"
    """How the loss is averaged: the sum over a response's tokens (the paper; its code has ``"token_mean"``), or as in
    `PolicyLoss`; ``"fixed_length"`` divides by ``max_new_tokens``."""


@dataclass(frozen=True, kw_only=True)
class Advantages(KLReward, KLRewardFunction):
    """The function that `advantages` runs over the whole batch."""

    needs = ("scores", "baseline_scores", "response")
    gives = ("rewards", "advantages")

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import rlmath, tensors

        scores_N, baselines_N = tensors.finite(table, "scores"), tensors.finite(table, "baseline_scores")
        lengths_N = tensors.lengths(table)
        kl_T, columns = self.kl_of(table)
        columns["rewards"] = rlmath.token_rewards(scores_N - baselines_N, kl_T, lengths_N, self.kl_coef, self.score_clip)
        columns["advantages"] = rlmath.reward_to_go(columns["rewards"], lengths_N)
        return tensors.all_on_tokens(table, columns)


@checked
def with_baselines(batch: Batch, greedy: Batch) -> Batch:
    """Return the batch with ``baseline_scores``: the score of the greedy response to each row's prompt; nothing is copied.

    Args:
        batch: n responses per prompt, one after the other, as ``actor.generate(prompts, n=n)`` writes them.
        greedy: one response per prompt, with scores: ``actor.generate(prompts, temperature=0.0)`` of the same prompts.

    Raises:
        ColumnError: greedy has no scores, or the batch has not the same number of rows for each of its prompts.
    """
    n, rest = divmod(len(batch), len(greedy))
    if rest:
        raise ColumnError(
            f"the batch has {len(batch)} rows for {len(greedy)} greedy responses; each prompt needs one greedy response and the "
            "same number of sampled ones. Generate both from the same prompts."
        )
    return batch.join(greedy.take(np.repeat(np.arange(len(greedy)), n)), baseline_scores="scores")


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn scores and those of the greedy responses into rewards and advantages, in a CPU task over the whole batch.

    Args:
        batch: rows with scores and baseline_scores; with old_log_probs and ref_log_probs where ``kl_coef`` is not 0. ``score_clip``
            cuts the score minus its baseline.
        options: the fields of `Advantages`.

    Returns:
        The batch with rewards (score minus baseline on the last token, minus beta times KL on each), advantages (the sum of
        the rewards from the token on) and, where ``kl_coef`` is not 0, ``kl`` (old minus reference log-probability), all
        per token.
    """
    return options.over(batch)
