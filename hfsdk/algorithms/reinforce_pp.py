"""REINFORCE++ (arXiv 2501.03262): PPO without its critic; advantages are normalised over the whole batch.

Against `PPO.step` the lines with the critic are gone. Each token's reward is minus beta times its KL, the last one's plus the
score; a token's advantage is what the response still earns from it on (reward-to-go), brought to mean 0 and variance 1 over all
tokens of all responses, not within a group. The loss is PPO's, clip included, and the ratio keeps its token level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hfsdk.algorithms.choices import MiniBatches
from hfsdk.algorithms.handles import StepModels, need_roles, reference_of
from hfsdk.algorithms.on_policy import KLReward, KLRewardFunction, OnPolicy
from hfsdk.algorithms.options import with_options
from hfsdk.algorithms.step import Step
from hfsdk.core.checks import Fraction, checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions(KLReward):
    """Options of `advantages`, and with them of `ReinforcePlusPlus`."""

    gamma: Fraction = 1.0
    """Discount per token."""


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(AdvantageOptions, OnPolicy):
    """REINFORCE++ without a group baseline: the ``n`` responses to a prompt are not compared. Defaults are those of `PPO`."""

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

    mini_batches: MiniBatches = 2
    """Optimizer steps per epoch."""

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with its advantages; a variant has others (:mod:`hfsdk.algorithms.reinforce_pp_baseline`)."""
        return Advantages.of(self).over(batch)


@dataclass(frozen=True, kw_only=True)
class Advantages(AdvantageOptions, KLRewardFunction):
    """The function that `advantages` runs over the whole batch."""

    needs: ClassVar[tuple[str, ...]] = ("scores", "response")
    takes: ClassVar[tuple[str, ...]] = ("token_scores",)
    gives = ("rewards", "returns", "advantages")

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import rlmath, tensors

        scores_N, lengths_N = self.scores_of(table), tensors.lengths(table)
        own_T = tensors.flat(table, "token_scores") if "token_scores" in table else None
        kl_T, columns = self.kl_of(table)
        columns["rewards"] = rlmath.token_rewards(scores_N, kl_T, lengths_N, self.kl_coef, self.score_clip, own_T)
        columns["returns"] = rlmath.reward_to_go(columns["rewards"], lengths_N, self.gamma)
        columns["advantages"] = rlmath.whiten(columns["returns"])
        return tensors.all_on_tokens(table, columns)

    def scores_of(self, table: Table) -> Tensor:
        """Return the sum that each response earned, shape [N]."""
        from hfsdk.algorithms import tensors

        return tensors.finite(table, "scores")


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn scores into rewards, returns and normalised advantages, in a CPU task over the whole batch.

    Args:
        batch: rows with scores (and token_scores, where the reward is per token); with old_log_probs and ref_log_probs where
            ``kl_coef`` is not 0.
        options: the fields of `Advantages`.

    Returns:
        The batch with rewards, returns (reward-to-go), advantages (the same with mean 0 and variance 1 over all tokens; all
        0 where the returns do not vary) and, where ``kl_coef`` is not 0, ``kl`` (old minus reference log-probability), all
        per token.
    """
    return options.over(batch)
