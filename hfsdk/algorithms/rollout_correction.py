"""Importance sampling for a rollout that is not quite the trainer: truncated (TIS) and masked (MIS), per token and per response.

The generating engine draws tokens with probabilities that differ from the trainer's by rounding, kernels or stale weights, so that
even the first update is off-policy. A loss times ``pi_trainer / pi_rollout`` is that of tokens drawn by the trainer; what bounds
such weights bounds their variance ("Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", Yao et al. 2025;
IcePop, Ling team 2025). Every algorithm with a ratio takes these options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfsdk.algorithms.choices import Level, WeightBounds
from hfsdk.algorithms.options import BatchFunction, Options
from hfsdk.core.checks import Positive, shown
from hfsdk.core.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class CorrectionOptions(Options):
    """How the loss of each token is weighed by the difference between trainer and rollout."""

    tis_cap: Positive | None = None
    """Importance sampling from rollout to trainer: the loss of each token, without its bonus and KL, times ``min(trainer /
    rollout, tis_cap)``, for what the generating engine's numerics differ from the trainer's; verl takes 2.0. ``None`` is off;
    needs old log-probs by the trainer."""
    tis_floor: Positive | None = None
    """The smallest such weight; ``None`` is none."""
    tis_level: Level = "token"
    """The unit that a weight is of: each ``"token"``; the whole ``"sequence"``, the product of its tokens': unbiased, with more
    variance; or their ``"geometric"`` mean, which does not grow with the length."""
    tis_bounds: WeightBounds = "truncate"
    """The effect on a weight outside: ``"truncate"`` takes the bound in its place (TIS), ``"mask"`` takes 0, so that the token or
    the response is not learned from (MIS; per token it is IcePop's)."""
    tis_normalise: bool = False
    """Divide the weights by their mean over the batch, of its tokens or, of whole responses, of these (self-normalised importance
    sampling): bounds that cut large weights then do not make the whole update smaller (verl's ``rollout_is_batch_normalize``)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        floor, cap = self.tis_floor, self.tis_cap
        if floor is not None and (cap is None or floor > cap):
            raise OptionError(f"tis_floor must be None, or at most tis_cap; got tis_floor={shown(floor)}, tis_cap={shown(cap)}")
        if self.tis_normalise and cap is None:
            raise OptionError("tis_normalise must be False without tis_cap, as there are no weights; got tis_normalise=True")


@dataclass(frozen=True, kw_only=True)
class NormalisedWeights(CorrectionOptions, BatchFunction):
    """A function that writes weights of mean 1 over the rows that an update learns from: no mini-batch or layout changes them."""

    needs = ("old_log_probs", "rollout_log_probs", "advantages")
    gives = ("tis_weights",)
    judged = ("advantages",)
    like = "old_log_probs"

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return ``tis_weights``: each token's weight over their mean; as they are where all are 0. float32."""
        from hfsdk.algorithms import tensors

        lengths_N = tensors.lengths(table, self.like)
        old_T, rollout_T = (tensors.flat(table, name) for name in self.needs[:2])
        weights_T, _ = rollout_weights(old_T, rollout_T, self, lengths_N)
        each = weights_T
        if self.tis_level != "token":  # one of each response that has a token
            each = weights_T[(lengths_N.cumsum(0) - 1)[lengths_N > 0]]
        mean = float(each.mean()) if len(each) else 0.0
        return {"tis_weights": tensors.on_tokens(table, weights_T / mean if mean > 0 else weights_T, self.like)}


def rollout_weights(
    old_log_probs_T: Tensor, rollout_log_probs_T: Tensor, options: CorrectionOptions, lengths_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return each token's weight ``pi_trainer / pi_rollout`` within its bounds.

    Per token with a cap it is verl's ``rollout_is="token"`` and TRL's ``token_truncate``; the other three are TRL's
    ``token_mask``, ``sequence_truncate`` and ``sequence_mask``. Log-ratios are cut at `rlmath.MAX_LOG_RATIO` on both sides, where
    ``exp`` would overflow. They are not normalised here (`NormalisedWeights`).

    Args:
        old_log_probs_T: the trainer's, of the weights that generated, shape [T].
        rollout_log_probs_T: the generating engine's, shape [T].
        options: cap, floor, level and what happens outside.
        lengths_N: tokens of each response, for the levels ``"sequence"`` and ``"geometric"``.

    Returns:
        Weights without gradient, and where a bound changed them (bool); both of shape [T].
    """
    import torch

    from hfsdk.algorithms import rlmath

    log_weights_T = (old_log_probs_T - rollout_log_probs_T).detach()
    if options.tis_level != "token":
        assert lengths_N is not None
        log_weights_N = rlmath.sequence_sum(log_weights_T, lengths_N)
        if options.tis_level == "geometric":
            log_weights_N = log_weights_N / lengths_N.clamp(min=1)
        log_weights_T = log_weights_N.repeat_interleave(lengths_N)
    weights_T = log_weights_T.clamp(-rlmath.MAX_LOG_RATIO, rlmath.MAX_LOG_RATIO).exp()
    bounded_T = weights_T.clamp(options.tis_floor, options.tis_cap)
    outside_T = bounded_T != weights_T
    return torch.where(outside_T, 0.0, weights_T) if options.tis_bounds == "mask" else bounded_T, outside_T


def check_correction(options: CorrectionOptions, old_log_probs: str) -> None:
    """Refuse these weights where the trainer's own log-probs of the samples are not computed."""
    if options.tis_cap is not None and old_log_probs != "recompute":
        raise OptionError(
            f'tis_cap must be None with old_log_probs="rollout": trainer over rollout would be 1 on every token; got '
            f"tis_cap={shown(options.tis_cap)}"
        )
