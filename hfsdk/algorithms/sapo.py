"""SAPO (arXiv 2511.20347): the clip is a soft gate, which lets a token count the less the further its ratio is from 1.

The step is GRPO's. Where PPO's clip takes a token's gradient at once, the gate's weight falls smoothly, by the same share on both
sides of 1, and faster for negative advantages: these raise many tokens that were not drawn, the noisier side of an update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.losses import PolicyLoss, check
from hfsdk.algorithms.options import Options
from hfsdk.core.checks import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TemperatureOptions(Options):
    """Options of `SAPOLoss`, and with them of `SAPO`."""

    tau_pos: Positive = 1.0
    """tau_pos: how fast the gate closes where the advantage is above 0."""
    tau_neg: Positive = 1.05
    """tau_neg: how fast it closes elsewhere; above ``tau_pos`` the negative side is held closer."""


@dataclass(frozen=True, kw_only=True)
class SAPOLoss(TemperatureOptions, PolicyLoss):
    """``-f(r) A`` per token, ``f(r) = 4 / tau * sigmoid(tau (r - 1))`` (section 3); clips have no part in it.

    The gradient is ``4 p (1 - p) r A`` times that of log pi, with p the sigmoid: PPO's at a ratio of 1, and near 0 far from it. So
    nothing is cut off, and ``clip_fraction`` is 0.
    """

    def surrogate(self, out: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same as `PolicyLoss.surrogate`."""
        import torch

        from hfsdk.algorithms import rlmath

        ratio_T = rlmath.importance_ratio(out.log_probs, b["old_log_probs"], self.log_ratio_clamp)
        tau_T = torch.where(b["advantages"] > 0, self.tau_pos, self.tau_neg)
        no_T = torch.zeros_like(ratio_T, dtype=torch.bool)
        return -4.0 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1.0)) * b["advantages"], ratio_T, no_T, no_T


@dataclass(frozen=True, kw_only=True)
class SAPO(TemperatureOptions, GRPO):
    """Soft adaptive policy optimisation. Temperatures are the paper's, which has no KL; ``clip`` has no part in it."""

    kl_coef: NonNegative = 0.0
    """Weight of the KL, as in `GRPO`."""

    loss_kind = SAPOLoss

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_high", "dual_clip"):
            check(getattr(self, name) is None, name, getattr(self, name), "None: SAPO's gate is in the place of a clip")
