"""REINFORCE++-baseline (arXiv 2501.03262): REINFORCE++ whose scores are compared within a group first, and whose KL is in the loss.

The step is REINFORCE++'s. The mean of the group's scores is subtracted, as in GRPO, but what is left is divided by the deviation
over the whole batch's tokens, not by the group's own: a question that is nearly always solved does not weigh more than others. The
KL is in the loss, by k2, whose gradient is that of the KL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hfsdk.algorithms import reinforce_pp
from hfsdk.algorithms.choices import KL, Alone, Copies
from hfsdk.algorithms.losses import KLLossOptions, PolicyLoss, check_kl_of_loss
from hfsdk.algorithms.options import with_options
from hfsdk.core.checks import NonNegative, checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Table


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaseline(KLLossOptions, reinforce_pp.ReinforcePlusPlus):
    """REINFORCE++ with the group's mean as baseline."""

    n: Copies = 8
    """Responses per prompt, at least 2."""
    kl_coef: NonNegative = 0.01
    """lambda: weight of the KL to the reference in the loss, per nat; with 0 no reference is needed."""
    kl: KL = "k2"
    """Estimator of that KL: ``"k2"`` (the paper's), ``"k3"``, ``"k1+"`` or ``"k3+"``."""

    compares = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kl_of_loss(self.kl, self.kl_by_ratio)

    @property
    def policy_loss(self) -> PolicyLoss:
        """The actor's loss."""
        return replace(super().policy_loss, kl_coef=self.kl_coef)

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with its advantages, without the KL."""
        return Advantages.of(self, kl_coef=0.0).over(batch)


@dataclass(frozen=True, kw_only=True)
class Advantages(reinforce_pp.Advantages):
    """The function that `advantages` runs over the whole batch."""

    alone: Alone = "zero"
    """Advantage of a group of one before the batch's mean is subtracted: ``"zero"``, or its ``"score"`` (verl)."""

    needs = ("scores", "group", "response")
    takes = ()

    def scores_of(self, table: Table) -> Tensor:
        """Return each score minus its group's mean, shape [N]."""
        from hfsdk.algorithms import groups, tensors

        scores_N = super().scores_of(table)
        return scores_N - groups.group_mean(scores_N, tensors.groups(table), self.alone)


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn scores into advantages over the group's mean, normalised over the batch's tokens, in a CPU task over the whole batch.

    Args:
        batch: rows with scores and group; with old_log_probs and ref_log_probs where ``kl_coef`` is not 0, which puts the KL
            into the reward. ``score_clip`` cuts the score minus its group's mean.
        options: the fields of `Advantages`.

    Returns:
        The batch with rewards, returns, advantages and, where ``kl_coef`` is not 0, ``kl``, per token.
    """
    return options.over(batch)
