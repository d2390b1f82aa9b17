"""RLOO (Back to Basics, arXiv 2402.14740): REINFORCE, and the other responses to the same prompt are the baseline.

Against `PPO.step` the lines with the critic are gone and ``n`` responses answer each prompt. The whole response is one action:
its reward is the score minus the KL of all its tokens, its advantage that reward minus the mean reward of the others, and the
loss sums over its tokens. With one optimizer step per batch the ratio is 1, so the gradient is REINFORCE's and nothing is
clipped; with more steps the clip of PPO keeps them near the policy that sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from hfsdk.algorithms.losses import Aggregation, Copies, check
from hfsdk.algorithms.on_policy import KLReward, OnPolicy
from hfsdk.algorithms.step import Step
from hfsdk.core.checks import OneOf, Positive, checked

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class Advantages(KLReward):
    """The function that `advantages` runs over the whole batch; see there for the fields."""

    alone: Annotated[str, OneOf("zero", "score")] = "zero"

    needs = ("scores", "group", "response")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.alone in ("zero", "score"), "alone", self.alone, '"zero" or "score"')

    def __call__(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import columns, rlmath

        rewards_N = columns.finite(table, "scores")
        if self.score_clip is not None:
            rewards_N = rewards_N.clamp(-self.score_clip, self.score_clip)
        kl_T, written = self.kl_of(table)
        rewards_N = rewards_N - self.kl_coef * rlmath.sequence_sum(kl_T, columns.lengths(table))
        advantages_N = rlmath.leave_one_out(rewards_N, columns.groups(table), self.alone)
        return {"advantages": columns.on_every_token(table, advantages_N), **written}


@checked
def advantages(
    batch: Batch, *, kl_coef: float = 0.05, kl: str = "k1", score_clip: float | None = None, alone: str = "zero"
) -> Batch:
    """Turn scores into leave-one-out advantages, in a CPU task over the whole batch.

    Args:
        batch: with scores and group; with old_log_probs and ref_log_probs where ``kl_coef`` is not 0. Groups may differ in
            size; one whose rewards are all the same gets 0.
        kl_coef: beta: each response's reward is lowered by beta times the KL summed over its tokens.
        kl: estimator of that KL (`KL_KINDS`).
        score_clip: scores are cut to [-score_clip, score_clip], before the KL.
        alone: what a group of one gets: ``"zero"``, or its ``"score"``, less its KL (verl).

    Returns:
        The batch with advantages and, where ``kl_coef`` is not 0, ``kl`` (old minus reference log-probability), per token.

    Raises:
        OptionError: an argument is out of its range.
        ColumnError: a column is missing; at the first look: a score is not finite.
    """
    fn = Advantages(kl_coef=kl_coef, kl=kl, score_clip=score_clip, alone=alone)
    return batch.map(fn, reads=fn.reads, writes=fn.writes)


@dataclass(frozen=True, kw_only=True)
class RLOO(OnPolicy):
    """REINFORCE with a leave-one-out baseline. ``kl_coef`` is TRL's, the loss is the paper's."""

    n: Copies = 4
    """k: responses per prompt, at least 2, which is TRL's."""
    score_clip: Positive | None = None
    """Largest absolute score."""
    aggregation: Aggregation = "sequence_sum"
    """How the loss is averaged: the sum over a response's tokens, as log pi(y|x) is one; others as in `PolicyLoss`."""

    compares = True

    def __post_init__(self) -> None:
        super().__post_init__()
        Advantages(kl_coef=self.kl_coef, kl=self.kl, score_clip=self.score_clip)

    @checked
    def step(self, models: Any, prompts: Batch) -> Step:
        """Run one step; returns at once.

        Args:
            models: has the handles named in `roles` as attributes, as ``session.models`` does.
            prompts: a batch with a column ``prompt``.
        """
        batch = self.with_log_probs(models, self.respond(models, prompts))
        batch = models.reward.compute_scores(batch)
        batch = advantages(batch, kl_coef=self.kl_coef, kl=self.kl, score_clip=self.score_clip)
        return Step(batch, None, self.learn(models, batch))
