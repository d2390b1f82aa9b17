"""The shared parts of losses: options (`SurrogateOptions`), `PolicyLoss`, `ValueLoss`, checks.

A loss is any callable ``(out, b) -> per-token loss`` or ``-> (per-token loss, metrics)``: ``out.log_probs``, ``out.entropy``,
``out.values`` and the columns ``b[...]`` are flat tensors over the response tokens of one micro-batch. The engine reduces the loss
(by the loss's ``aggregation``) and the metrics (mean; maximum where the name ends in ``_max``) over all ranks, with global counts;
a loss therefore never divides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hfsdk.algorithms.choices import KL, KL_KINDS_BY_RATIO, KL_KINDS_OF_LOSS, Aggregation, Clamp, Clip, DualClip
from hfsdk.algorithms.options import Options
from hfsdk.algorithms.rollout_correction import CorrectionOptions, rollout_weights
from hfsdk.core.checks import Index, Name, NonNegative, Positive, shown
from hfsdk.core.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SurrogateOptions(CorrectionOptions):
    """Options of the clipped surrogate loss, of algorithms and of `PolicyLoss`."""

    clip: Clip = 0.2
    """epsilon: how far the ratio may fall below 1 (all the way with 1.0) and, without ``clip_high``, rise above it (PPO eq. 7);
    without effect in the first optimizer step on a batch."""
    clip_high: Positive | None = None
    """How far the ratio may rise above 1, where it differs; DAPO's clip-higher takes 0.28 (arXiv 2503.14476)."""
    dual_clip: DualClip | None = None
    """c: the loss of a negative advantage is at most ``-c A`` (arXiv 1912.09729, verl: c = 3); ``None`` is off."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus, per nat; the loss is lowered by it."""
    aggregation: Aggregation = "token_mean"
    """How the loss is averaged, one of `AGGREGATIONS`; an algorithm's ``"fixed_length"`` divides by ``max_new_tokens``."""
    log_ratio_clamp: Clamp = "above"
    """Bounds at which log-ratios are cut before ``exp``: one of `LOG_RATIO_CLAMPS`."""


@dataclass(frozen=True, kw_only=True)
class KLLossOptions(Options):
    """How the KL counts in a loss, of algorithms that have it there and of `PolicyLoss`."""

    kl_by_ratio: bool = False
    """Weigh each token's estimate in the loss by the ratio, gradient included: after the first of several updates on a batch, too,
    its mean is the KL of the policy as it is now, and so is its gradient (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, "unbiased
    KL estimate"); with ``kl="k3"`` or ``"k1"``."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(KLLossOptions, SurrogateOptions):
    """The clipped surrogate loss of PPO (eq. 7), with an entropy bonus and a KL penalty where asked for."""

    kl_coef: NonNegative = 0.0
    """beta: weight of the KL to the reference in the *loss*, per nat (GRPO); PPO proper puts it into the reward."""
    kl: KL = "k3"
    """Estimator of that KL; k2, k1+ and k3+ have the right gradient, k3 nearly, k1 none."""
    fixed_length: Index = 0
    """Tokens to divide each sequence's sum by, with ``aggregation="fixed_length"``."""

    learns: ClassVar[str] = "policy"
    """The kind of suggested learning rate that fits it (:mod:`hfsdk.core.learning_rates`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = (self.fixed_length >= 1) == (self.aggregation == "fixed_length")
        check(fits, "fixed_length", self.fixed_length, 'at least 1 with aggregation="fixed_length" and 0 otherwise')
        check_kl_by_ratio(self.kl, self.kl_by_ratio)

    @property
    def reads(self) -> list[str]:
        """Columns the loss reads."""
        more = ["ref_log_probs"] * (self.kl_coef > 0) + ["rollout_log_probs"] * (self.tis_cap is not None)
        more += ["tis_weights"] * self.tis_normalise
        return ["old_log_probs", "advantages", *more]

    @property
    def bounds(self) -> tuple[float, float]:
        """How far the ratio may fall below 1 and rise above it."""
        return self.clip, self.clip if self.clip_high is None else self.clip_high

    def surrogate(self, out: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return loss, ratio, where it was clipped and where doubly: those of `rlmath.policy_loss_terms`; all of shape [T]."""
        from hfsdk.algorithms import rlmath

        return rlmath.policy_loss_terms(
            out.log_probs, b["old_log_probs"], b["advantages"], *self.bounds, self.dual_clip, self.log_ratio_clamp
        )

    def __call__(self, out: Any, b: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss per token, shape [T], and metrics per token."""
        import torch

        from hfsdk.algorithms import rlmath

        old = b["old_log_probs"]
        policy_loss, ratio, clipped, dual_clipped = self.surrogate(out, b)
        weights = {}
        if self.tis_cap is not None:
            lengths = None if self.tis_level == "token" else b.lengths
            tis, cut = rollout_weights(old, b["rollout_log_probs"], self, lengths)
            tis = b["tis_weights"] if self.tis_normalise else tis
            policy_loss = torch.where(tis == 0, 0.0, policy_loss * tis)  # what is left out may be infinite
            weights = {"tis_mean": tis, "tis_clip_fraction": cut.to(tis.dtype)}
        loss = policy_loss
        metrics = {**weights, "policy_loss": policy_loss, "ratio": ratio, "ratio_max": ratio, "entropy": out.entropy}
        metrics["clip_fraction"] = clipped.to(ratio.dtype)
        metrics["approx_kl"] = rlmath.kl_estimate(old, out.log_probs, "k3")
        metrics["approx_kl_k1"] = rlmath.kl_estimate(old, out.log_probs, "k1")
        if self.dual_clip is not None:
            metrics["dual_clip_fraction"] = dual_clipped.to(ratio.dtype)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * out.entropy
        if self.kl_coef:
            kl_T = rlmath.kl_estimate(out.log_probs, b["ref_log_probs"], self.kl, self.log_ratio_clamp)
            if self.kl_by_ratio:  # each token's own ratio, whatever the surrogate has
                kl_T = kl_T * rlmath.importance_ratio(out.log_probs, old, self.log_ratio_clamp)
            metrics["kl_loss"] = kl_T
            loss = loss + self.kl_coef * kl_T
        return loss, {name: metric.detach() for name, metric in metrics.items()}


@dataclass(frozen=True, kw_only=True)
class ValueLoss(Options):
    """Half the squared error of the critic, clipped around the values that the batch was made with."""

    clip: Positive | None = 0.2
    """How far a value may move from the old one before its gradient stops, in value units; ``None`` is off."""
    aggregation: Aggregation = "token_mean"
    """One of `AGGREGATIONS`."""
    fixed_length: Index = 0
    """Tokens to divide each sequence's sum by, as in `PolicyLoss`."""
    values: Name = "values"
    """Column of the old values; Safe-RLHF's cost critic has ``"cost_values"``."""
    returns: Name = "returns"
    """Column of the target; Safe-RLHF's cost critic has ``"cost_returns"``."""

    learns: ClassVar[str] = "values"

    def __post_init__(self) -> None:
        super().__post_init__()
        PolicyLoss(aggregation=self.aggregation, fixed_length=self.fixed_length)

    @property
    def reads(self) -> list[str]:
        """Columns the loss reads."""
        return [self.values, self.returns]

    def __call__(self, out: Any, b: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss per token, shape [T], and metrics per token."""
        from hfsdk.algorithms import rlmath

        loss, clipped = rlmath.value_loss_terms(out.values, b[self.values], b[self.returns], self.clip)
        metrics = {"value_loss": loss, "value_clip_fraction": clipped.to(loss.dtype), "value_mean": out.values}
        return loss, {name: metric.detach() for name, metric in metrics.items()}


def check_kl_of_loss(kl: str, by_ratio: bool, where: str = "") -> None:
    """Refuse an estimator that has not the gradient of a KL in a loss.

    Args:
        kl: the KL's estimator.
        by_ratio: whether the ratio weighs it.
        where: the option's companion, for the message.
    """
    wanted = f"{', '.join(KL_KINDS_OF_LOSS[:-1])} or {KL_KINDS_OF_LOSS[-1]}{where} (in a loss, k1 has no gradient in expectation)"
    check(by_ratio or kl in KL_KINDS_OF_LOSS, "kl", kl, wanted)
    check_kl_by_ratio(kl, by_ratio)


def check_kl_by_ratio(kl: str, by_ratio: bool) -> None:
    """Refuse an estimator whose mean, weighed by the ratio, is not the KL or has not its gradient."""
    wanted = f"{' or '.join(KL_KINDS_BY_RATIO)} with kl_by_ratio=True (of the others, the mean or its gradient is not the KL's)"
    check(not by_ratio or kl in KL_KINDS_BY_RATIO, "kl", kl, wanted)


def check(condition: bool, name: str, value: object, wanted: str) -> None:
    """Raise an OptionError that names the option, its rule and its value, unless the condition holds."""
    if not condition:
        raise OptionError(f"{name} must be {wanted}; got {name}={shown(value)}")
