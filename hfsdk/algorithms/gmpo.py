"""GMPO (arXiv 2507.20673): GRPO by the geometric mean of a response's ratios, each clipped before it enters.

The step is GRPO's. GRPO averages ``r A`` over the tokens of a response, so that one token of a large ratio outweighs the rest; the
geometric mean hardly moves by one, which allows a much wider clip. GSPO takes the mean first and clips the whole response; here
each token is clipped by itself, in log space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.choices import Clip
from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.losses import PolicyLoss, check
from hfsdk.core.checks import NonNegative

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GMPOLoss(PolicyLoss):
    """``-G A`` per token, with ``G`` the geometric mean of the response's clipped ratios, which every token carries.

    A log-ratio above ``clip_high`` is cut to it where the advantage is positive, one below ``-clip`` where it is negative: the
    clips are nats, not distances from 1. Value and gradient of a response are the paper's with ``aggregation="sequence_mean"``.
    ``ratio`` among the metrics is G. With ``tis_level="geometric"`` the weight of a response is verl's.
    """

    def surrogate(self, out: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same as `PolicyLoss.surrogate`; a token that is clipped has no gradient, its response's others have."""
        import torch

        from hfsdk.algorithms import rlmath

        (low, high), positive_T = self.bounds, b["advantages"] > 0
        log_ratio_T = out.log_probs - b["old_log_probs"]
        bounded_T = torch.where(positive_T, log_ratio_T.clamp(max=high), log_ratio_T.clamp(min=-low))
        clipped_T = (bounded_T != log_ratio_T) & (b["advantages"] != 0)
        mean_T = b.expand(b.segment_mean(bounded_T.detach())) + bounded_T - bounded_T.detach()
        ratio_T = rlmath.importance_ratio(mean_T, torch.zeros_like(mean_T), self.log_ratio_clamp)
        return -ratio_T * b["advantages"], ratio_T, clipped_T, torch.zeros_like(clipped_T)


@dataclass(frozen=True, kw_only=True)
class GMPO(GRPO):
    """Geometric-mean policy optimisation. The clip is the paper's (section 4: e^-0.4 to e^0.4), which has no KL."""

    clip: Clip = 0.4
    """How far a token's log-ratio may fall below 0, in nats, and without ``clip_high`` rise above it."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL, as in `GRPO`."""

    loss_kind = GMPOLoss

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.dual_clip is None, "dual_clip", self.dual_clip, "None: a geometric mean needs no second bound")
