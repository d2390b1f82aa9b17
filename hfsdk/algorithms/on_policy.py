"""What algorithms that learn from their own responses share: `OnPolicy`, options and parts of a step; `KLReward`.

Each algorithm's own file has its defaults, its advantages and its ``step``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from hfsdk.algorithms.losses import (
    KL,
    Aggregation,
    Clamp,
    Clip,
    Copies,
    Epochs,
    MiniBatches,
    NewTokens,
    OldLogProbs,
    PolicyLoss,
    check,
    check_tis,
)  # fmt: skip
from hfsdk.algorithms.step import Statistics, Step, need_roles, with_old_log_probs
from hfsdk.core.checks import NonNegative, Positive, Within, check_fields

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch
    from hfsdk.core.pending import Metrics
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Options of an algorithm that learns from its own responses, and what such steps have in common."""

    max_new_tokens: NewTokens = 32
    """Longest response, in tokens."""
    temperature: Positive = 1.0
    """tau: logits are divided by it in sampling and in every log-probability pass."""
    n: Copies = 1
    """Responses per prompt."""
    kl_coef: NonNegative = 0.05
    """beta: weight of the KL to the reference, in score units per nat; with 0 no reference is needed."""
    kl: KL = "k1"
    """Estimator of that KL (`KL_KINDS`)."""
    clip: Clip = 0.2
    """epsilon of the ratio; without effect in the first optimizer step on a batch."""
    dual_clip: Annotated[float, Within(above=1)] | None = None
    """c of dual clip (arXiv 1912.09729); verl has 3 by default."""
    aggregation: Aggregation = "token_mean"
    """How the loss is averaged, as in `PolicyLoss`; ``"fixed_length"`` divides by ``max_new_tokens``."""
    epochs: Epochs = 1
    """Passes over the batch."""
    mini_batches: MiniBatches = 1
    """Optimizer steps per epoch."""
    old_log_probs: OldLogProbs = "recompute"
    """The ratio's denominator: ``"recompute"`` by the trainer, or ``"rollout"``: as the generating engine gave them."""
    tis_cap: Positive | None = None
    """Truncated importance sampling for the rollout's numerics, as in `PolicyLoss`; needs old log-probs by the trainer."""
    log_ratio_clamp: Clamp = "above"
    """Where log-ratios are cut before ``exp``, as in `PolicyLoss`."""

    compares: ClassVar[bool] = False
    """Whether responses are compared with others to their prompt, so that there must be two."""

    def __post_init__(self) -> None:
        check_fields(self)
        enough = self.n >= 2 or not self.compares
        check(enough, "n", self.n, "at least 2 (responses are compared with others to their prompt)")
        check_tis(self.tis_cap, self.old_log_probs)
        _ = self.policy_loss

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses."""
        return ("actor", "reference", "reward") if self.kl_coef else ("actor", "reward")

    @property
    def policy_loss(self) -> PolicyLoss:
        """The actor's loss."""
        fixed_length = self.max_new_tokens if self.aggregation == "fixed_length" else 0
        return PolicyLoss(
            clip=self.clip, dual_clip=self.dual_clip, aggregation=self.aggregation, fixed_length=fixed_length,
            tis_cap=self.tis_cap, log_ratio_clamp=self.log_ratio_clamp,
        )  # fmt: skip

    def respond(self, models: Any, prompts: Batch) -> Batch:
        """Generate ``n`` responses per prompt."""
        need_roles(models, self.roles)
        batch: Batch = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens, temperature=self.temperature, n=self.n)
        return batch

    def with_log_probs(self, models: Any, batch: Batch) -> Batch:
        """Return the batch with old_log_probs and, where there is a KL, ref_log_probs."""
        batch = with_old_log_probs(models, batch, self.old_log_probs)
        if self.kl_coef:
            batch = models.reference.compute_log_probs(batch)
        return batch

    def learn(self, models: Any, batch: Batch) -> Metrics:
        """Train the actor on a batch that has advantages."""
        found: Metrics = models.actor.update(batch, self.policy_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        return found

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the numbers to watch, one each for the whole step (see `Step.numbers`); waits."""
        return step.numbers(Statistics(reference=self.kl_coef > 0, critic=False, groups=self.compares))


@dataclass(frozen=True, kw_only=True)
class KLReward:
    """Options of advantages whose reward is a score minus beta times a KL; a function over the whole batch."""

    kl_coef: NonNegative = 0.05
    kl: KL = "k1"
    score_clip: Positive | None = None

    needs: ClassVar[tuple[str, ...]] = ("scores", "response")
    gives: ClassVar[tuple[str, ...]] = ("advantages",)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        return [*self.needs] + ["old_log_probs", "ref_log_probs"] * (self.kl_coef > 0)

    @property
    def writes(self) -> list[str]:
        """Columns the function writes."""
        return [*self.gives] + ["kl"] * (self.kl_coef > 0)

    def kl_of(self, table: Table) -> tuple[Tensor, dict[str, Column]]:
        """Return the KL estimate of every response token, shape [T], and the column ``kl`` (k1) where there is a KL."""
        import torch

        from hfsdk.algorithms import columns, rlmath

        if not self.kl_coef:
            return torch.zeros(int(columns.lengths(table).sum()), dtype=torch.float64), {}
        old_T, ref_T = columns.flat(table, "old_log_probs"), columns.flat(table, "ref_log_probs")
        return rlmath.kl_estimate(old_T, ref_T, self.kl), {"kl": columns.on_tokens(table, rlmath.kl_estimate(old_T, ref_T, "k1"))}
