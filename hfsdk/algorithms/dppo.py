"""DPPO (arXiv 2602.04879): a token is left out where the policy's distribution has moved too far, not where its ratio has.

The step is GRPO's. A ratio says little of how far two distributions are apart: one of 3 on a token of probability 1e-4 moves next
to nothing, one of 1.1 on a token of 0.9 moves a tenth of all. The gate looks at the divergence of the two distributions "this token
or another" (the paper's binary approximation), which costs no more than the log-probs that are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from hfsdk.algorithms.choices import DIVERGENCES, Aggregation, Clip
from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.losses import PolicyLoss, check
from hfsdk.algorithms.options import Options
from hfsdk.core.checks import NonNegative, OneOf, Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DivergenceOptions(Options):
    """Options of `DPPOLoss`, and with them of `DPPO`."""

    divergence: Annotated[str, OneOf(*DIVERGENCES)] = "tv"
    """The divergence that is bounded: ``"tv"``, the total variation ``|pi - pi_old|`` of the token's probability, or ``"kl"``,
    KL(pi_old || pi) of this token or another, in nats."""
    ratio_cap: Positive | None = None
    """The largest ratio that weighs a token (verl's ``clip_ratio_c``); ``None`` is none."""


@dataclass(frozen=True, kw_only=True)
class DPPOLoss(DivergenceOptions, PolicyLoss):
    """``-M sg[r] A log pi`` per token: its gradient is that of ``-M r A``, PPO's surrogate, with a mask in place of the clip.

    ``M`` is 0 on tokens whose divergence is above the bound and which the advantage would move further: up (above ``clip_high``)
    where it is positive, down (above ``clip``) where it is negative; 1 elsewhere.
    """

    def surrogate(self, out: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same as `PolicyLoss.surrogate`."""
        import torch

        from hfsdk.algorithms import rlmath

        (low, high), new_T, old_T = self.bounds, out.log_probs.detach(), b["old_log_probs"]
        ratio_T = rlmath.importance_ratio(new_T, old_T, self.log_ratio_clamp)
        apart_T = rlmath.binary_divergence(new_T, old_T, self.divergence)
        rising_T = (b["advantages"] > 0) & (new_T > old_T) & (apart_T > high)
        falling_T = (b["advantages"] < 0) & (new_T < old_T) & (apart_T > low)
        gated_T = rising_T | falling_T
        weight_T = ratio_T if self.ratio_cap is None else ratio_T.clamp(max=self.ratio_cap)
        weight_T, log_probs_T = (torch.where(gated_T, 0.0, x_T) for x_T in (weight_T, out.log_probs))  # either may be infinite
        return -weight_T * b["advantages"] * log_probs_T, ratio_T, gated_T, torch.zeros_like(gated_T)


@dataclass(frozen=True, kw_only=True)
class DPPO(DivergenceOptions, GRPO):
    """Divergence proximal policy optimisation, the binary one. The bound is the authors', who take 0.05 for ``"kl"``."""

    clip: Clip = 0.15
    """delta: the divergence above which a token is not pushed further down and, without ``clip_high``, up."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL, as in `GRPO`; the paper has no KL."""
    aggregation: Aggregation = "token_mean"
    """How the loss is averaged, as in `PolicyLoss`."""

    loss_kind = DPPOLoss

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.dual_clip is None, "dual_clip", self.dual_clip, "None: ratio_cap bounds the weight of a token, on both sides")
