"""Clip-Cov (arXiv 2505.22617): GRPO that keeps its entropy by leaving out a few of the tokens that cost it most.

The step is GRPO's. Of the tokens whose covariance of log-probability and advantage (:mod:`hfsdk.algorithms.covariance`) is between
two bounds a few are drawn, and have no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.choices import Aggregation, MiniBatches
from hfsdk.algorithms.covariance import MarkedLoss, Marks, ShareOptions, marks_at
from hfsdk.algorithms.grpo import GRPO
from hfsdk.core.checks import NonNegative, Positive, checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions(ShareOptions):
    """Options of `Drawn`, and with them of `ClipCov`."""

    low: Positive = 1.0
    """omega_low: the covariance above which a token may be drawn."""
    high: Positive = 5.0
    """omega_high: the covariance below which it may."""


@dataclass(frozen=True, kw_only=True)
class ClipCovLoss(MarkedLoss):
    """PPO's loss, but 0 on the drawn tokens."""

    def surrogate(self, out: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same as `PolicyLoss.surrogate`."""
        import torch

        loss_T, *others = super().surrogate(out, b)
        ratio_T, clipped_T, dual_T = others
        return torch.where(b["covariance_mask"] > 0, 0.0, loss_T), ratio_T, clipped_T, dual_T


@dataclass(frozen=True, kw_only=True)
class ClipCov(ClipCovOptions, GRPO):
    """GRPO in which a few tokens of a large covariance have no gradient (verl's ``clip_cov``)."""

    mini_batches: MiniBatches = 2
    """Optimizer steps per epoch."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL, as in `GRPO`."""
    aggregation: Aggregation = "token_mean"
    """How the loss is averaged, as in `PolicyLoss`."""

    loss_kind = ClipCovLoss

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with advantages, and ``covariance_mask``: 1 on the drawn tokens."""
        return DrawnTokens.of(self).over(super().with_advantages(batch))


@dataclass(frozen=True, kw_only=True)
class DrawnTokens(ClipCovOptions, Marks):
    """The choice of tokens drawn from those whose covariance is within the bounds."""

    def marked(self, covariances_T: Tensor) -> Tensor:
        """Return which tokens are marked, bool, shape [T]; the numbers seed the draw, so that a batch always has the same."""
        import zlib

        import torch

        within = torch.nonzero((covariances_T > self.low) & (covariances_T < self.high)).squeeze(1)
        seeded = torch.Generator().manual_seed(zlib.crc32(covariances_T.numpy().tobytes()))
        order = torch.randperm(len(within), generator=seeded)
        return marks_at(within[order[: self.count(len(covariances_T))]], covariances_T)
