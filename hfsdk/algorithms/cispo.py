"""CISPO (MiniMax-M1, arXiv 2506.13585): the weight of a token is clipped, not its update, so that every token has a gradient.

The step is GRPO's; the loss is REINFORCE's times the ratio, clipped and without its own gradient. PPO's clip takes the
gradient of rare tokens that the update makes much likelier ("However", "Wait"), which then are never learned after the first of
several updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.choices import Aggregation, Clip
from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.losses import PolicyLoss, check
from hfsdk.core.checks import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CISPOLoss(PolicyLoss):
    """``-sg[clip(r, 1 - clip, 1 + clip_high)] A log pi`` per token (eq. 4 and 5)."""

    def surrogate(self, out: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same as `PolicyLoss.surrogate`; a clipped token keeps its gradient, at the bound's weight."""
        import torch

        from hfsdk.algorithms import rlmath

        low, high = self.bounds
        ratio_T = rlmath.importance_ratio(out.log_probs.detach(), b["old_log_probs"], self.log_ratio_clamp)
        weight_T = ratio_T.clamp(1.0 - low, 1.0 + high)
        clipped_T = weight_T != ratio_T
        return -weight_T * b["advantages"] * out.log_probs, ratio_T, clipped_T, torch.zeros_like(clipped_T)


@dataclass(frozen=True, kw_only=True)
class CISPO(GRPO):
    """Clipped importance-sampling policy optimisation: no KL and, as in the paper, a mean over tokens."""

    clip: Clip = 1.0
    """How far a weight may fall below 1: all the way, the paper has no lower bound."""
    clip_high: Positive | None = 4.0
    """How far a weight may rise above 1: up to 5, which TRL recommends (ScaleRL, arXiv 2510.13786); the paper says no number."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL, as in `GRPO`."""
    aggregation: Aggregation = "token_mean"
    """How the loss is averaged, as in `PolicyLoss`."""

    loss_kind = CISPOLoss

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.dual_clip is None, "dual_clip", self.dual_clip, "None: a weight is clipped on both sides of its advantage")
