"""GRPO (DeepSeekMath, arXiv 2402.03300): a group of responses to one prompt is its own baseline; there is no critic.

Against `PPO.step` the lines with the critic are gone, ``n`` responses answer each prompt, and a response's advantage, the
same on all its tokens, is its score in standard deviations from its group's mean. The KL is in the loss. GRPOVI is an option of it;
its variants (Dr. GRPO, DAPO, GSPO, SAPO, GDPO, ...) take its step and say in files of their own what they change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hfsdk.algorithms.choices import KL, SCALES, Aggregation, Alone, Copies, Epsilon, Scale
from hfsdk.algorithms.filtering import informative
from hfsdk.algorithms.handles import StepModels, need_roles, reference_of
from hfsdk.algorithms.losses import KLLossOptions, PolicyLoss, check, check_kl_of_loss
from hfsdk.algorithms.on_policy import OnPolicy
from hfsdk.algorithms.options import BatchFunction, Options, with_options
from hfsdk.algorithms.step import Step
from hfsdk.core.checks import NonNegative, checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions(Options):
    """Options of `advantages`, and with them of `GRPO`."""

    scale: Scale = "group"
    """One of `SCALES`."""
    epsilon: Epsilon = 1e-6
    """Added to that standard deviation, in score units (verl's; TRL adds 1e-4)."""
    increase_variance: bool = False
    """First move each group's scores apart as far as the batch's range, their order and their mean allow (GRPOVI)."""


@dataclass(frozen=True, kw_only=True)
class GRPO(AdvantageOptions, KLLossOptions, OnPolicy):
    """Group relative policy optimisation. Loss, KL and its coefficient are the paper's, ``n`` and clip TRL's."""

    @checked
    def step(self, models: StepModels, prompts: Batch) -> Step:
        """Run one step (the paper's algorithm 1, lines 6 to 11); returns at once, unless `filter_groups` waits for scores."""
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
        trained = informative(batch) if self.filter_groups else batch
        if trained is None:
            return Step(batch, None, None)
        mini_batches = min(self.mini_batches, len(trained)) if self.filter_groups else self.mini_batches
        actor = models.actor.update(self.weighed(trained), self.policy_loss, epochs=self.epochs, mini_batches=mini_batches)
        return Step(batch, None, actor)

    n: Copies = 8
    """G: responses per prompt, at least 2; the paper has 64."""
    kl_coef: NonNegative = 0.04
    """beta: weight of the KL to the reference in the loss, per nat; with 0 no reference is needed, and where there is one the KL is
    measured all the same (``kl_mean``)."""
    kl: KL = "k3"
    """Estimator of that KL: ``"k3"`` (eq. 4), ``"k2"``, ``"k1+"`` or ``"k3+"``."""
    aggregation: Aggregation = "sequence_mean"
    """``"sequence_mean"`` (eq. 3), ``"token_mean"`` (DAPO) or ``"fixed_length"`` (Dr. GRPO: divided by ``max_new_tokens``)."""
    filter_groups: bool = False
    """Update without the groups that have no advantage, as their scores are all the same (DAPO's dynamic sampling). The step then
    waits for the advantages; where all groups are so, there is no update and ``step.actor`` is ``None``; in a simulated session all
    are kept."""

    compares = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kl_of_loss(self.kl, self.kl_by_ratio)

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with its advantages; variants have others."""
        return Advantages.of(self).over(batch)

    @property
    def policy_loss(self) -> PolicyLoss:
        """The actor's loss."""
        return replace(super().policy_loss, kl_coef=self.kl_coef)


@dataclass(frozen=True, kw_only=True)
class Advantages(AdvantageOptions, BatchFunction):
    """The function that `advantages` runs over the whole batch."""

    alone: Alone = "zero"
    """Advantage of a group of one: ``"zero"``, or its ``"score"`` (verl)."""

    needs = ("scores", "group", "response")
    gives = ("advantages",)

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import tensors

        advantages_N = self.compared(tensors.finite(table, "scores"), tensors.groups(table))
        return {"advantages": tensors.on_every_token(table, advantages_N)}

    def compared(self, scores_N: Tensor, group_N: Tensor) -> Tensor:
        """Return each score's advantage over its group, shape [N]."""
        from hfsdk.algorithms import groups

        if self.increase_variance:
            scores_N = groups.increase_variance(scores_N, group_N)
        return group_advantages(scores_N, group_N, self.scale, self.epsilon, self.alone)


def group_advantages(scores_N: Tensor, group_N: Tensor, scale: str = "group", epsilon: float = 1e-6, alone: str = "zero") -> Tensor:
    """Return ``(score - mean) / (deviation + epsilon)``, shape [N] (section 4.1.2); the deviation is unbiased, as TRL's and verl's.

    Exactly 0 where all scores of a group are the same. `groups.group_mean` says what ``group_N`` and ``alone`` are.
    """
    from hfsdk.algorithms import groups, rlmath

    check(scale in SCALES, "scale", scale, '"group", "batch" or "none"')
    mean_N = groups.group_mean(scores_N, group_N, alone)
    if scale == "none":
        return scores_N - mean_N
    deviation_N = groups.group_std(scores_N, group_N) if scale == "group" else rlmath.masked_var(scores_N).sqrt()
    return (scores_N - mean_N) / (deviation_N + epsilon)


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn scores into advantages relative to the group, in a CPU task over the whole batch.

    Args:
        batch: rows with scores and group; groups may differ in size. One whose scores are all the same gets 0.
        options: the fields of `Advantages`.

    Returns:
        The batch with advantages, one per response token.
    """
    return options.over(batch)
