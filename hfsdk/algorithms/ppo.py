"""PPO for language models (arXiv 1707.06347, 2203.02155), call by call: `PPO.step` reads like figure 6 of HybridFlow.

Its parts can be used alone: `advantages` over a batch, `ValueLoss` and `PolicyLoss` given to ``critic.update`` and
``actor.update``; `hfsdk.algorithms.losses` says what a loss of one's own is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from hfsdk.algorithms.choices import AGGREGATIONS, KL_KINDS, MiniBatches
from hfsdk.algorithms.handles import StepModels, need_roles, reference_of
from hfsdk.algorithms.losses import KLLossOptions, PolicyLoss, ValueLoss, check, check_kl_of_loss
from hfsdk.algorithms.on_policy import GAEOptions, KLRewardFunction, OnPolicy
from hfsdk.algorithms.options import with_options
from hfsdk.algorithms.step import Statistics, Step, ended
from hfsdk.core.checks import NonNegative, OneOf, Positive, checked

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table

__all__ = ["AGGREGATIONS", "KL_KINDS", "PPO", "Advantages", "PolicyLoss", "ValueLoss", "advantages"]


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions(GAEOptions):
    """Options of `advantages`, and with them of `PPO`."""

    whiten_rewards: bool = False
    """Rewards get variance 1, before GAE; they keep their mean."""
    missing_eos_penalty: NonNegative = 0.0
    """Subtracted, in score units, at the last token of responses that were cut off, after score clipping (TRL)."""


@dataclass(frozen=True, kw_only=True)
class PPO(AdvantageOptions, KLLossOptions, OnPolicy):
    """PPO with a learned critic. gamma, lambda and both clips are those of the N details, ``kl_coef`` is TRL's."""

    @checked
    def step(self, models: StepModels, prompts: Batch) -> Step:
        """Run one step (HybridFlow, figure 6); returns at once."""
        need_roles(models, self.roles)
        batch = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens, temperature=self.temperature, n=self.n)
        if self.old_log_probs == "recompute":
            batch = models.actor.compute_log_probs(batch)
        else:
            batch = batch.alias("old_log_probs", "rollout_log_probs")
        if reference := reference_of(models):
            batch = reference.compute_log_probs(batch)
        batch = models.critic.compute_values(batch)
        batch = models.reward.compute_scores(batch)
        batch = Advantages.of(self, kl_coef=self.kl_coef if self.kl_in == "reward" else 0.0).over(batch)
        critic = models.critic.update(batch, self.value_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        actor = models.actor.update(self.weighed(batch), self.policy_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        return Step(batch, critic, actor)

    kl_in: Annotated[str, OneOf("reward", "loss")] = "reward"
    """The place of the KL: ``"reward"`` (InstructGPT) or ``"loss"`` (GRPO): two different algorithms."""
    value_clip: Positive | None = 0.2
    """How far values may move, in value units; ``None`` is off."""
    mini_batches: MiniBatches = 2
    """Optimizer steps per epoch; of epochs OpenAI's RLHF has 4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_in == "loss":
            check_kl_of_loss(self.kl, self.kl_by_ratio, ' with kl_in="loss"')
        else:
            check(not self.kl_by_ratio, "kl_by_ratio", self.kl_by_ratio, 'False with kl_in="reward": it weighs the KL in the loss')

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses."""
        return ("actor", "critic", "reference", "reward") if self.kl_coef else ("actor", "critic", "reward")

    @property
    def policy_loss(self) -> PolicyLoss:
        """The actor's loss."""
        return replace(super().policy_loss, kl_coef=self.kl_coef if self.kl_in == "loss" else 0.0)

    @property
    def value_loss(self) -> ValueLoss:
        """The critic's loss."""
        return ValueLoss(clip=self.value_clip)

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the numbers to watch, one each for the whole step (see `Step.numbers`); waits."""
        return step.numbers(Statistics(reference="ref_log_probs" in step.batch))


@dataclass(frozen=True, kw_only=True)
class Advantages(AdvantageOptions, KLRewardFunction):
    """The function that `advantages` runs over the whole batch."""

    dtype, like = "float32", "values"
    needs = ("scores", "values")
    takes = ("token_scores",)
    gives = ("rewards", "advantages", "returns")

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        return super().reads + ["finish_reason"] * (self.missing_eos_penalty > 0)

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        import torch

        from hfsdk.algorithms import rlmath, tensors

        values_T, lengths_N = tensors.flat(table, "values", self.dtype), tensors.lengths(table, self.like)
        scores_N = tensors.finite(table, "scores").float()
        own_T = tensors.flat(table, "token_scores", self.dtype) if "token_scores" in table else None
        kl_T, columns = self.kl_of(table)
        rewards_T = rlmath.token_rewards(scores_N, kl_T, lengths_N, self.kl_coef, self.score_clip, own_T)
        if self.missing_eos_penalty:
            rewards_T = rlmath.missing_eos_penalty(rewards_T, torch.tensor(ended(table)), lengths_N, self.missing_eos_penalty)
        if self.whiten_rewards:
            rewards_T = rlmath.whiten(rewards_T, shift_mean=False)
        advantages_T, returns_T = rlmath.gae(rewards_T, values_T, lengths_N, self.gamma, self.lam)
        columns |= {"rewards": rewards_T, "returns": returns_T}
        columns["advantages"] = rlmath.whiten(advantages_T) if self.whiten else advantages_T
        return tensors.all_on_tokens(table, columns, self.like)


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn scores and values into rewards, advantages and returns, in a CPU task over the whole batch.

    Args:
        batch: rows with scores and values (and token_scores, where the reward is per token); with old_log_probs and ref_log_probs
            where ``kl_coef`` is not 0.
        options: the fields of `Advantages`.

    Returns:
        The batch with rewards, advantages, returns (advantages before whitening, plus values) and, where ``kl_coef``
        is not 0, ``kl`` (old minus reference log-probability), all per token.
    """
    return options.over(batch)
