"""GPG (arXiv 2504.02546): the plain policy gradient of a group, without a ratio, a clip or a KL.

The step is GRPO's; the loss is REINFORCE's. An advantage is a score minus its group's mean, and all are raised by a factor alpha
for the groups of one score, which have no gradient and lower the mean that the others are in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms import grpo
from hfsdk.algorithms.choices import Aggregation, Scale
from hfsdk.algorithms.losses import PolicyLoss, check
from hfsdk.algorithms.options import with_options
from hfsdk.core.checks import NonNegative, checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class GPGLoss(PolicyLoss):
    """``-A log pi`` per token (the paper's objective); the ratio is measured and has no part in it."""

    def surrogate(self, out: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same as `PolicyLoss.surrogate`."""
        import torch

        from hfsdk.algorithms import rlmath

        ratio_T = rlmath.importance_ratio(out.log_probs.detach(), b["old_log_probs"], self.log_ratio_clamp)
        no_T = torch.zeros_like(ratio_T, dtype=torch.bool)
        return -b["advantages"] * out.log_probs, ratio_T, no_T, no_T


@dataclass(frozen=True, kw_only=True)
class GPG(grpo.GRPO):
    """Group policy gradient. ``epochs`` and ``mini_batches`` of 1 are the algorithm: nothing corrects or holds a second update.

    ``clip`` has no part in it, nor has ``log_ratio_clamp`` but for the KL.
    """

    scale: Scale = "none"
    """F_norm: ``"none"`` is 1, the paper's; others as in `GRPO`."""
    aggregation: Aggregation = "token_mean"
    """How the loss is averaged, as in `PolicyLoss`; the paper's loss is a mean over tokens."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL, as in `GRPO`; the paper has no KL."""

    loss_kind = GPGLoss

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_high", "dual_clip"):
            check(getattr(self, name) is None, name, getattr(self, name), "None: GPG has no ratio that is clipped")
        wanted = "False: alpha makes up for the groups of one score, which must be in the mean"
        check(not self.filter_groups, "filter_groups", self.filter_groups, wanted)

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with its advantages."""
        return Advantages.of(self).over(batch)


@dataclass(frozen=True, kw_only=True)
class Advantages(grpo.Advantages):
    """The function that `advantages` runs over the whole batch."""

    scale: Scale = "none"
    """F_norm: ``"none"`` is 1, the paper's; others as in `GRPO`."""

    def compared(self, scores_N: Tensor, group_N: Tensor) -> Tensor:
        """Return ``alpha`` times each score's advantage over its group, shape [N]."""
        return accurate(super().compared(scores_N, group_N), group_N)


def accurate(advantages_N: Tensor, group_N: Tensor) -> Tensor:
    """Return the advantages times ``alpha = B / (B - M)``, shape [N] (the paper's accurate gradient estimation).

    M of B responses are in groups that have no advantage, all right or all wrong; where all are, nothing changes. (verl has B over
    the number of scores other than 0.)
    """
    from hfsdk.algorithms import groups

    taught_N = groups.group_mean((advantages_N != 0).to(advantages_N.dtype), group_N) > 0
    return advantages_N * (len(advantages_N) / max(1, int(taught_N.sum())))


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn scores into advantages over the group's mean, raised for the groups of one score, in a CPU task over the whole batch.

    Args:
        batch: rows with scores and group; groups may differ in size. One whose scores are all the same gets 0.
        options: the fields of `Advantages`.

    Returns:
        The batch with advantages, one per response token.
    """
    return options.over(batch)
