"""GSPO (arXiv 2507.18071): GRPO whose ratio is of the whole response, ``s = (pi(y|x) / pi_old(y|x)) ** (1 / |y|)``.

The step is GRPO's; the loss differs. A score is of a response, so what corrects it for the old policy is too: a whole response is
clipped or learned from, where a ratio per token adds noise that grows with its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.choices import Clip
from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.losses import PolicyLoss
from hfsdk.core.checks import NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GSPOLoss(PolicyLoss):
    """The clipped surrogate of the response's ratio (eq. 5), which every token of it carries (section 4.3: GSPO-token).

    With ``tis_cap`` and ``tis_level="token"`` every token's part has its own weight. The loss is TRL's and verl's; the
    gradient is verl's, each token's under its own weight. (TRL differentiates a response's ratio as one: each token's under the
    mean weight of the response.) With ``tis_level="sequence"`` the three are the same.
    """

    def surrogate(self, out: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same as `PolicyLoss.surrogate`, of ``s_t = sg[s] * pi(y_t) / sg[pi(y_t)]`` (eq. 14), shape [T]."""
        from hfsdk.algorithms import rlmath

        sequence_T = b.expand(b.segment_mean(out.log_probs.detach() - b["old_log_probs"]))
        log_ratio_T = sequence_T + out.log_probs - out.log_probs.detach()
        old_T = log_ratio_T.new_zeros(log_ratio_T.shape)
        return rlmath.policy_loss_terms(log_ratio_T, old_T, b["advantages"], *self.bounds, self.dual_clip, self.log_ratio_clamp)


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """Group sequence policy optimisation. Clips are the paper's (section 5.1), which has no KL."""

    clip: Clip = 3e-4
    """epsilon: how far a response's ratio may fall below 1; a mean over its tokens varies much less than one token's ratio."""
    clip_high: Positive | None = 4e-4
    """How far it may rise above 1."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL, as in `GRPO`."""

    loss_kind = GSPOLoss
