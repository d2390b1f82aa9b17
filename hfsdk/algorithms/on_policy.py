"""`OnPolicy`, the options of algorithms that learn from their own responses; `KLReward`, the options of their rewards.

Each algorithm's own file has its ``step``, the options that only it has, and its advantages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hfsdk.algorithms.choices import KL, Copies, Epochs, MiniBatches, NewTokens, OldLogProbs, Temperature
from hfsdk.algorithms.losses import PolicyLoss, SurrogateOptions, check
from hfsdk.algorithms.options import BatchFunction, Options
from hfsdk.algorithms.rollout_correction import NormalisedWeights, check_correction
from hfsdk.algorithms.step import Statistics, Step
from hfsdk.core.checks import Fraction, NonNegative, Positive, checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Table


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Options):
    """How a step generates its responses."""

    max_new_tokens: NewTokens = 32
    """Longest response, in tokens."""
    temperature: Temperature = 1.0
    """tau: logits are divided by it in sampling and in every log-probability pass."""
    n: Copies = 1
    """Responses per prompt."""


@dataclass(frozen=True, kw_only=True)
class KLOptions(Options):
    """The KL to the reference, in the reward or in the loss."""

    kl_coef: NonNegative = 0.05
    """beta: weight of the KL to the reference, in score units per nat; with 0 no reference is needed, and where there is one the
    KL is measured all the same (``kl_mean``)."""
    kl: KL = "k1"
    """Estimator of that KL (`KL_KINDS`)."""


@dataclass(frozen=True, kw_only=True)
class OnPolicy(SurrogateOptions, KLOptions, SamplingOptions):
    """Options of an algorithm that learns from its own responses, its loss, and its numbers to watch."""

    epochs: Epochs = 1
    """Passes over the batch, reshuffled each time."""
    mini_batches: MiniBatches = 1
    """Optimizer steps per epoch."""
    old_log_probs: OldLogProbs = "recompute"
    """The ratio's denominator: ``"recompute"`` by the trainer (one more forward pass, ratio exactly 1 at first), or
    ``"rollout"``: as the generating engine gave them."""

    loss_kind: ClassVar[type[PolicyLoss]] = PolicyLoss
    """Class of the actor's loss."""
    compares: ClassVar[bool] = False
    """Whether responses are compared with others to their prompt, so that there must be two."""

    def __post_init__(self) -> None:
        super().__post_init__()
        enough = self.n >= 2 or not self.compares
        check(enough, "n", self.n, "at least 2 (responses are compared with others to their prompt)")
        check_correction(self, self.old_log_probs)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses."""
        return ("actor", "reference", "reward") if self.kl_coef else ("actor", "reward")

    @property
    def policy_loss(self) -> PolicyLoss:
        """The actor's loss."""
        fixed_length = self.max_new_tokens if self.aggregation == "fixed_length" else 0
        return self.loss_kind.of(self, kl_coef=0.0, fixed_length=fixed_length)

    @checked
    def weighed(self, batch: Batch) -> Batch:
        """Return the batch that is learned from; with ``tis_normalise`` its ``tis_weights`` have mean 1 over it."""
        return NormalisedWeights.of(self).over(batch) if self.tis_normalise else batch

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the numbers to watch, one each for the whole step (see `Step.numbers`); waits."""
        return step.numbers(Statistics(reference="ref_log_probs" in step.batch, critic=False, groups=self.compares))


@dataclass(frozen=True, kw_only=True)
class KLReward(KLOptions):
    """A reward that is a score minus beta times the KL to the reference."""

    score_clip: Positive | None = None
    """Scores are cut to [-score_clip, score_clip], before the KL."""


@dataclass(frozen=True, kw_only=True)
class GAEOptions(KLReward):
    """How such a reward becomes advantages over a critic's values."""

    gamma: Fraction = 1.0
    """Discount per token (GAE, arXiv 1506.02438)."""
    lam: Fraction = 0.95
    """lambda of GAE: 0 is one-step TD, 1 is reward-to-go minus value."""
    whiten: bool = True
    """Advantages get mean 0 and variance 1 over the whole batch's tokens."""


@dataclass(frozen=True, kw_only=True)
class KLRewardFunction(KLOptions, BatchFunction):
    """Advantages of a reward that has a KL in it."""

    dtype: ClassVar[str] = "float64"
    """The dtype in which the function computes."""

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        return [*self.needs] + ["old_log_probs", "ref_log_probs"] * (self.kl_coef > 0)

    @property
    def writes(self) -> list[str]:
        """Columns the function writes."""
        return [*self.gives] + ["kl"] * (self.kl_coef > 0)

    def kl_of(self, table: Table) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the KL estimate of every response token and, where there is a KL, the column ``kl`` (k1); both of shape [T]."""
        import torch

        from hfsdk.algorithms import rlmath, tensors

        if not self.kl_coef:
            return torch.zeros(int(tensors.lengths(table, self.like).sum()), dtype=getattr(torch, self.dtype)), {}
        old_T, ref_T = (tensors.flat(table, name, self.dtype) for name in ("old_log_probs", "ref_log_probs"))
        return rlmath.kl_estimate(old_T, ref_T, self.kl), {"kl": rlmath.kl_estimate(old_T, ref_T, "k1")}
