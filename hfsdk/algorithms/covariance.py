"""KL-Cov and Clip-Cov (arXiv 2505.22617): GRPO that keeps its entropy by holding the few tokens that cost it most.

The step is GRPO's. An update lowers the entropy by the covariance of log-probability and advantage over tokens (section 3), and a
few tokens in ten thousand carry nearly all of it. KL-Cov holds those of the largest covariance to the policy that sampled;
Clip-Cov draws a few of those above a bound and takes their gradient away (section 4.2).

Which tokens they are is said once for the whole batch, by the log-probs of the policy that sampled, so that no mini-batch,
micro-batch or layout changes it. KL-Cov holds what several updates on a batch do: with ``mini_batches=1`` it holds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.choices import Aggregation, MiniBatches, TokenShare
from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.losses import PolicyLoss, check
from hfsdk.algorithms.options import BatchFunction, Options
from hfsdk.core.checks import NonNegative, Positive, checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class KLCovOptions(Options):
    """Options of `Largest`, and with them of `KLCov`."""

    share: TokenShare = 2e-3
    """Of all response tokens, so many are held, at least one; the paper has 2e-3 for 7B and 2e-4 for 32B."""


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions(Options):
    """Options of `Drawn`, and with them of `ClipCov`."""

    share: TokenShare = 2e-4
    """r: of all response tokens, at most so many lose their gradient; one may always."""
    low: Positive = 1.0
    """omega_low: the covariance above which a token may be drawn."""
    high: Positive = 5.0
    """omega_high: the covariance below which it may."""


@dataclass(frozen=True, kw_only=True)
class KLCovLoss(PolicyLoss):
    """``-r A`` per token and, on the held ones, ``-r A + beta |log r|``: the ratio r is not clipped."""

    old_kl_coef: NonNegative = 1.0
    """beta, as in `KLCov`."""

    @property
    def reads(self) -> list[str]:
        """Columns the loss reads."""
        return [*super().reads, "covariance_mask"]

    def surrogate(self, out: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what `PolicyLoss.surrogate` does."""
        import torch

        from hfsdk.algorithms import rlmath

        ratio_T = rlmath.importance_ratio(out.log_probs, b["old_log_probs"], self.log_ratio_clamp)
        held_T = self.old_kl_coef * b["covariance_mask"] * (out.log_probs - b["old_log_probs"]).abs()
        no_T = torch.zeros_like(ratio_T, dtype=torch.bool)
        return -ratio_T * b["advantages"] + held_T, ratio_T, no_T, no_T


@dataclass(frozen=True, kw_only=True)
class ClipCovLoss(PolicyLoss):
    """PPO's loss, but 0 on the drawn tokens."""

    @property
    def reads(self) -> list[str]:
        """Columns the loss reads."""
        return [*super().reads, "covariance_mask"]

    def surrogate(self, out: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what `PolicyLoss.surrogate` does."""
        loss_T, *others = super().surrogate(out, b)
        ratio_T, clipped_T, dual_T = others
        return loss_T * (1.0 - b["covariance_mask"]), ratio_T, clipped_T, dual_T


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
    """As in `GRPO`."""
    aggregation: Aggregation = "token_mean"
    """As in `PolicyLoss`."""

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
class ClipCov(ClipCovOptions, GRPO):
    """GRPO in which a few tokens of a large covariance have no gradient (verl's ``clip_cov``)."""

    mini_batches: MiniBatches = 2
    """As in `KLCov`."""
    kl_coef: NonNegative = 0.0
    """As in `GRPO`."""
    aggregation: Aggregation = "token_mean"
    """As in `PolicyLoss`."""

    loss_kind = ClipCovLoss

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with advantages, and ``covariance_mask``: 1 on the drawn tokens."""
        return Drawn.of(self).over(super().with_advantages(batch))


@dataclass(frozen=True, kw_only=True)
class Marks(BatchFunction):
    """A function over a batch that marks tokens by their covariance."""

    needs = ("advantages", "old_log_probs")
    gives = ("covariance_mask",)
    like = "advantages"

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return ``covariance_mask``: 1 on the tokens that are marked, 0 on the others; float32."""
        from hfsdk.algorithms import tensors

        covariances_T = covariances(tensors.flat(table, "old_log_probs"), tensors.flat(table, "advantages"))
        return {"covariance_mask": tensors.on_tokens(table, self.marked(covariances_T), "advantages")}

    def marked(self, covariances_T: Tensor) -> Tensor:
        """Return which tokens are marked, bool, shape [T]."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Largest(KLCovOptions, Marks):
    """Marks the tokens of the largest covariance."""

    def marked(self, covariances_T: Tensor) -> Tensor:
        """Return which tokens are marked, bool, shape [T]."""
        return _at(covariances_T.topk(_count(self.share, covariances_T)).indices, covariances_T)


@dataclass(frozen=True, kw_only=True)
class Drawn(ClipCovOptions, Marks):
    """Marks tokens drawn from those whose covariance is within the bounds."""

    def marked(self, covariances_T: Tensor) -> Tensor:
        """Return which tokens are marked, bool, shape [T]; the numbers seed the draw, so that a batch always has the same."""
        import zlib

        import torch

        within = torch.nonzero((covariances_T > self.low) & (covariances_T < self.high)).squeeze(1)
        seeded = torch.Generator().manual_seed(zlib.crc32(covariances_T.numpy().tobytes()))
        order = torch.randperm(len(within), generator=seeded)
        return _at(within[order[: _count(self.share, covariances_T)]], covariances_T)


def covariances(log_probs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Return ``(log pi - mean log pi) (A - mean A)`` of each token, shape [T]; their mean is the covariance (section 4.2)."""
    return (log_probs_T - log_probs_T.mean()) * (advantages_T - advantages_T.mean())


def _count(share: float, like_T: Tensor) -> int:
    return min(len(like_T), max(1, int(share * len(like_T))))


def _at(places: Tensor, like_T: Tensor) -> Tensor:
    import torch

    marked_T = torch.zeros_like(like_T, dtype=torch.bool)
    marked_T[places] = True
    return marked_T
