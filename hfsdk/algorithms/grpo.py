"""GRPO (DeepSeekMath, arXiv 2402.03300): a group of responses to one prompt is its own baseline; there is no critic.

Against `PPO.step` the lines with the critic are gone, ``n`` responses answer each prompt, and a response's advantage, the
same on all its tokens, is its score in standard deviations from its group's mean. The KL to the reference is in the loss.

==========================  =====================================================================================
as in the paper             ``GRPO()``
Dr. GRPO (2503.20783)       ``GRPO(scale="none", aggregation="fixed_length", kl_coef=0.0)``
DAPO (2503.14476)           ``GRPO(clip_high=0.28, filter_groups=True, aggregation="token_mean", kl_coef=0.0)``
==========================  =====================================================================================

DAPO's longer-response penalty belongs into the reward; its dynamic sampling is `GRPO.filter_groups`, without sampling again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.losses import PolicyLoss, check
from hfsdk.algorithms.step import Statistics, Step, check_sampling, need_roles, with_old_log_probs
from hfsdk.checks import check_fields
from hfsdk.errors import SimulatedValueError

if TYPE_CHECKING:
    from hfsdk.batch import Batch
    from hfsdk.table import Column, Table

SCALES = ("group", "batch", "none")
"""What advantages are divided by: the standard deviation of the group's scores (GRPO), of all, or nothing (Dr. GRPO)."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The function that `advantages` runs over the whole batch; see there for the fields."""

    scale: str = "group"
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_fields(self)
        check(self.scale in SCALES, "scale", self.scale, f"one of {', '.join(SCALES)}")
        check(self.epsilon > 0, "epsilon", self.epsilon, "above 0")

    reads = ("scores", "group", "response")
    writes = ("advantages",)

    def __call__(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import columns, rlmath

        scores_N, group_N = columns.finite(table, "scores"), columns.groups(table)
        advantages_N = rlmath.group_advantages(scores_N, group_N, self.scale, self.epsilon)
        return {"advantages": columns.on_every_token(table, advantages_N)}


def advantages(batch: Batch, *, scale: str = "group", epsilon: float = 1e-6) -> Batch:
    """Turn scores into advantages relative to the group, in a CPU task over the whole batch.

    Args:
        batch: with scores and group; groups may differ in size. A group of one, and one whose scores are all the same,
            gets 0.
        scale: one of `SCALES`.
        epsilon: added to the standard deviation, in score units (verl's; TRL adds 1e-4).

    Returns:
        The batch with advantages, one per response token.

    Raises:
        OptionError: an argument is out of its range.
        ColumnError: a column is missing; at the first look: a score is not finite.
    """
    fn = Advantages(scale=scale, epsilon=epsilon)
    return batch.map(fn, reads=fn.reads, writes=fn.writes)


def informative_rows(table: Table) -> list[int]:
    """Return the rows whose group has scores that differ: all the others have advantage 0."""
    from hfsdk.algorithms import columns, rlmath

    identical_N = rlmath.identical_in_group(columns.finite(table, "scores"), columns.groups(table))
    return (~identical_N).nonzero().squeeze(1).tolist()


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Group relative policy optimisation. Loss, KL and its coefficient are the paper's, ``n`` and clip TRL's."""

    max_new_tokens: int = 32
    """Longest response, in tokens."""
    temperature: float = 1.0
    """tau: logits are divided by it in sampling and in every log-probability pass."""
    n: int = 8
    """G: responses per prompt, at least 2; the paper has 64."""
    scale: str = "group"
    """One of `SCALES`."""
    clip: float = 0.2
    """epsilon of the ratio."""
    clip_high: float | None = None
    """Upper epsilon, where it differs; DAPO's clip-higher has 0.28."""
    kl_coef: float = 0.04
    """beta: weight of the KL to the reference in the loss, per nat; with 0 no reference is needed."""
    kl: str = "k3"
    """Estimator of that KL: ``"k3"`` (eq. 4), ``"k2"`` or ``"k3+"``."""
    filter_groups: bool = False
    """Update without the groups whose scores are all the same (DAPO's dynamic sampling). The step then waits for the scores;
    where all groups are so, there is no update and ``step.actor`` is ``None``; in a simulated session all are kept."""
    aggregation: str = "sequence_mean"
    """How the loss is averaged: ``"sequence_mean"`` (eq. 3), ``"token_mean"`` (DAPO) or ``"fixed_length"`` (Dr. GRPO: divided by
    ``max_new_tokens``), as in `PolicyLoss`."""
    epochs: int = 1
    """Passes over the batch."""
    mini_batches: int = 1
    """Optimizer steps per epoch; fewer where `filter_groups` leaves fewer responses than that."""
    old_log_probs: str = "recompute"
    """The ratio's denominator: ``"recompute"`` by the trainer, or ``"rollout"``: as the generating engine gave them."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_sampling(self, least_n=2)
        check(
            self.kl in ("k2", "k3", "k3+"),
            "kl",
            self.kl,
            "k2, k3 or k3+ (in a loss, k1 has no gradient in expectation)",
        )
        _ = self.policy_loss, Advantages(scale=self.scale)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses."""
        return ("actor", "reference", "reward") if self.kl_coef else ("actor", "reward")

    @property
    def policy_loss(self) -> PolicyLoss:
        """The actor's loss."""
        fixed_length = self.max_new_tokens if self.aggregation == "fixed_length" else 0
        return PolicyLoss(
            clip=self.clip, clip_high=self.clip_high, kl_coef=self.kl_coef, kl=self.kl,
            aggregation=self.aggregation, fixed_length=fixed_length,
        )  # fmt: skip

    def step(self, models: Any, prompts: Batch) -> Step:
        """Run one step (the paper's algorithm 1, lines 6 to 11); returns at once, unless `filter_groups` waits for scores.

        Args:
            models: has the handles named in `roles` as attributes, as ``session.models`` does.
            prompts: a batch with a column ``prompt``.
        """
        need_roles(models, self.roles)
        batch = models.actor.generate(
            prompts, max_new_tokens=self.max_new_tokens, temperature=self.temperature, n=self.n
        )
        batch = with_old_log_probs(models, batch, self.old_log_probs)
        if self.kl_coef:
            batch = models.reference.compute_log_probs(batch)
        batch = models.reward.compute_scores(batch)
        batch = advantages(batch, scale=self.scale)
        kept = _informative(batch) if self.filter_groups else batch
        if kept is None:
            return Step(batch, None, None)
        mini_batches = min(self.mini_batches, len(kept)) if self.filter_groups else self.mini_batches
        return Step(
            batch, None, models.actor.update(kept, self.policy_loss, epochs=self.epochs, mini_batches=mini_batches)
        )

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the numbers to watch, one each for the whole step (see `Step.numbers`); waits."""
        return step.numbers(Statistics(reference=self.kl_coef > 0, critic=False, groups=True))


def _informative(batch: Batch) -> Batch | None:
    """Return the rows that have something to teach, or ``None``; all in a simulated session, where there are no scores."""
    try:
        rows = list(batch.reduce(informative_rows, reads=["scores", "group"]).value)
    except SimulatedValueError:
        return batch
    return batch.take(rows) if rows else None
