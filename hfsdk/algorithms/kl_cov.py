"""KL-Cov (arXiv 2505.22617): GRPO that keeps its entropy by holding the few tokens that cost it most to the policy that sampled.

The step is GRPO's, without its clip. The tokens of the largest covariance of log-probability and advantage
(:mod:`hfsdk.algorithms.covariance`) have a KL to the policy that sampled in their loss. It holds what several updates on a batch
do: with ``mini_batches=1`` it holds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.choices import Aggregation, MiniBatches, TokenShare
from hfsdk.algorithms.covariance import MarkedLoss, Marks, ShareOptions, marks_at
from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.losses import check
from hfsdk.core.checks import NonNegative, checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class KLCovOptions(ShareOptions):
    """Options of `Largest`, and with them of `KLCov`."""

    share: TokenShare = 2e-3
    """Share of all response tokens that are held, at least one token; the paper has 2e-3 for 7B and 2e-4 for 32B."""


@dataclass(frozen=True, kw_only=True)
class KLCovLoss(MarkedLoss):
    """``-r A`` per token and, on the held ones, ``-r A + beta |log r|``: the ratio r is not clipped."""

    old_kl_coef: NonNegative = 1.0
    """beta, as in `KLCov`."""

    def surrogate(self, out: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same as `PolicyLoss.surrogate`."""
        import torch

        from hfsdk.algorithms import rlmath

        ratio_T = rlmath.importance_ratio(out.log_probs, b["old_log_probs"], self.log_ratio_clamp)
        apart_T = (out.log_probs - b["old_log_probs"]).abs()
        held_T = self.old_kl_coef * torch.where(b["covariance_mask"] > 0, apart_T, 0.0)  # elsewhere it may be infinite
        no_T = torch.zeros_like(ratio_T, dtype=torch.bool)
        return -ratio_T * b["advantages"] + held_T, ratio_T, no_T, no_T


@dataclass(frozen=True, kw_only=True)
class KLCov(KLCovOptions, GRPO):
    """GRPO without a clip, whose tokens of the largest covariance are held to the policy that sampled (verl's ``kl_cov``).

    ``clip`` has no part in it.
    """

    old_kl_coef: NonNegative = 1.0
    """beta: weight of ``|log pi - log pi_old|`` on the held tokens, in units of advantage per nat; the paper's is 1."""
    mini_batches: MiniBatches = 2
    """Optimizer steps per epoch, at least 2 for the held tokens to be held."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL, as in `GRPO`."""
    aggregation: Aggregation = "token_mean"
    """How the loss is averaged, as in `PolicyLoss`."""

    loss_kind = KLCovLoss

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_high", "dual_clip"):
            check(getattr(self, name) is None, name, getattr(self, name), "None: KL-Cov does not clip")

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with advantages, and ``covariance_mask``: 1 on the held tokens."""
        return Largest.of(self).over(super().with_advantages(batch))


@dataclass(frozen=True, kw_only=True)
class Largest(KLCovOptions, Marks):
    """The choice of the tokens of the largest covariance."""

    def marked(self, covariances_T: Tensor) -> Tensor:
        """Return which tokens are marked, bool, shape [T]."""
        return marks_at(covariances_T.topk(self.count(len(covariances_T))).indices, covariances_T)
