"""GRPO (DeepSeekMath, arXiv 2402.03300): a group of responses to one prompt is its own baseline; there is no critic.

Against `PPO.step` the lines with the critic are gone, ``n`` responses answer each prompt, and a response's advantage, the
same on all its tokens, is its score in standard deviations from its group's mean. The KL to the reference is in the loss.

==========================  =====================================================================================
as in the paper             ``GRPO()``
Dr. GRPO (2503.20783)       ``GRPO(scale="none", aggregation="fixed_length", kl_coef=0.0)``
DAPO (2503.14476)           ``GRPO(clip_high=0.28, filter_groups=True, aggregation="token_mean", kl_coef=0.0)``
GRPOVI (2505.23247)         ``GRPO(increase_variance=True)``
==========================  =====================================================================================

DAPO's longer-response penalty belongs into the reward; its dynamic sampling is `GRPO.filter_groups`, without sampling again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from hfsdk.algorithms.losses import KL, Aggregation, Copies, PolicyLoss, check
from hfsdk.algorithms.on_policy import OnPolicy
from hfsdk.algorithms.step import Step
from hfsdk.core.checks import NonNegative, OneOf, Positive, check_fields, checked
from hfsdk.core.errors import SimulatedValueError

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table

SCALES = ("group", "batch", "none")
"""What advantages are divided by: the standard deviation of the group's scores (GRPO), of all, or nothing (Dr. GRPO)."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The function that `advantages` runs over the whole batch; see there for the fields."""

    scale: Annotated[str, OneOf(*SCALES)] = "group"
    epsilon: Positive = 1e-6
    increase_variance: bool = False
    alone: Annotated[str, OneOf("zero", "score")] = "zero"

    def __post_init__(self) -> None:
        check_fields(self)

    reads = ("scores", "group", "response")
    writes = ("advantages",)

    def __call__(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import columns, rlmath

        scores_N, group_N = columns.finite(table, "scores"), columns.groups(table)
        if self.increase_variance:
            scores_N = rlmath.increase_variance(scores_N, group_N)
        advantages_N = rlmath.group_advantages(scores_N, group_N, self.scale, self.epsilon, self.alone)
        return {"advantages": columns.on_every_token(table, advantages_N)}


@checked
def advantages(
    batch: Batch, *, scale: str = "group", epsilon: float = 1e-6, increase_variance: bool = False, alone: str = "zero"
) -> Batch:
    """Turn scores into advantages relative to the group, in a CPU task over the whole batch.

    Args:
        batch: with scores and group; groups may differ in size. One whose scores are all the same gets 0.
        scale: one of `SCALES`.
        epsilon: added to the standard deviation, in score units (verl's; TRL adds 1e-4).
        increase_variance: first move each group's scores as far apart as the batch's range, their order and their mean
            allow (`rlmath.increase_variance`).
        alone: what a group of one gets: ``"zero"``, or its ``"score"`` (verl).

    Returns:
        The batch with advantages, one per response token.

    Raises:
        OptionError: an argument is out of its range.
        ColumnError: a column is missing; at the first look: a score is not finite.
    """
    fn = Advantages(scale=scale, epsilon=epsilon, increase_variance=increase_variance, alone=alone)
    return batch.map(fn, reads=fn.reads, writes=fn.writes)


def informative_rows(table: Table) -> list[int]:
    """Return the rows whose group has scores that differ: all the others have advantage 0."""
    from hfsdk.algorithms import columns, rlmath

    identical_N = rlmath.identical_in_group(columns.finite(table, "scores"), columns.groups(table))
    return (~identical_N).nonzero().squeeze(1).tolist()


@dataclass(frozen=True, kw_only=True)
class GRPO(OnPolicy):
    """Group relative policy optimisation. Loss, KL and its coefficient are the paper's, ``n`` and clip TRL's."""

    n: Copies = 8
    """G: responses per prompt, at least 2; the paper has 64."""
    scale: Annotated[str, OneOf(*SCALES)] = "group"
    """One of `SCALES`."""
    epsilon: Positive = 1e-6
    """Added to that standard deviation, in score units (verl's; TRL adds 1e-4)."""
    clip_high: Positive | None = None
    """Upper epsilon, where it differs; DAPO's clip-higher has 0.28."""
    kl_coef: NonNegative = 0.04
    """beta: weight of the KL to the reference in the loss, per nat; with 0 no reference is needed."""
    kl: KL = "k3"
    """Estimator of that KL: ``"k3"`` (eq. 4), ``"k2"`` or ``"k3+"``."""
    filter_groups: bool = False
    """Update without the groups whose scores are all the same (DAPO's dynamic sampling). The step then waits for the scores;
    where all groups are so, there is no update and ``step.actor`` is ``None``; in a simulated session all are kept."""
    increase_variance: bool = False
    """Move each group's scores apart before they are compared, as far as their order and mean allow (GRPOVI)."""
    aggregation: Aggregation = "sequence_mean"
    """How the loss is averaged: ``"sequence_mean"`` (eq. 3), ``"token_mean"`` (DAPO) or ``"fixed_length"`` (Dr. GRPO: divided by
    ``max_new_tokens``), as in `PolicyLoss`."""

    compares = True

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "k2, k3 or k3+ (in a loss, k1 has no gradient in expectation)"
        check(self.kl in ("k2", "k3", "k3+"), "kl", self.kl, why)
        Advantages(**self._advantage_options)

    @property
    def policy_loss(self) -> PolicyLoss:
        """The actor's loss."""
        return replace(super().policy_loss, clip_high=self.clip_high, kl_coef=self.kl_coef, kl=self.kl)

    @property
    def _advantage_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("scale", "epsilon", "increase_variance")}

    @checked
    def step(self, models: Any, prompts: Batch) -> Step:
        """Run one step (the paper's algorithm 1, lines 6 to 11); returns at once, unless `filter_groups` waits for scores.

        Args:
            models: has the handles named in `roles` as attributes, as ``session.models`` does.
            prompts: a batch with a column ``prompt``.
        """
        batch = self.with_log_probs(models, self.respond(models, prompts))
        batch = models.reward.compute_scores(batch)
        batch = advantages(batch, **self._advantage_options)
        if not self.filter_groups:
            return Step(batch, None, self.learn(models, batch))
        kept = _informative(batch)
        if kept is None:
            return Step(batch, None, None)
        return Step(batch, None, replace(self, mini_batches=min(self.mini_batches, len(kept))).learn(models, kept))


def _informative(batch: Batch) -> Batch | None:
    """Return the rows that have something to teach, or ``None``; all in a simulated session, where there are no scores."""
    try:
        rows = list(batch.reduce(informative_rows, reads=["scores", "group"]).value)
    except SimulatedValueError:
        return batch
    return batch.take(rows) if rows else None
