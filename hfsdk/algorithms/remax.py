"""ReMax (arXiv 2310.10505): REINFORCE; the score of the greedy response to the same prompt is the baseline.

Against `PPO.step` the lines with the critic are gone, and one more ``generate``, at temperature 0, is there, with one more
``compute_scores`` over its responses. With one optimizer step per batch the ratio is 1, so the gradient is REINFORCE's and
nothing is clipped; with more steps the clip of PPO keeps them near the policy that sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hfsdk.algorithms.losses import Aggregation, Copies
from hfsdk.algorithms.on_policy import KLReward, OnPolicy
from hfsdk.algorithms.step import Step
from hfsdk.core.checks import Positive, checked
from hfsdk.core.errors import ColumnError

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class Advantages(KLReward):
    """The function that `advantages` runs over the whole batch; see there for the fields."""

    needs = ("scores", "baseline_scores", "response")
    gives = ("rewards", "advantages")

    def __call__(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import columns, rlmath

        scores_N, baselines_N = columns.finite(table, "scores"), columns.finite(table, "baseline_scores")
        lengths_N = columns.lengths(table)
        kl_T, written = self.kl_of(table)
        rewards_T = rlmath.token_rewards(scores_N - baselines_N, kl_T, lengths_N, self.kl_coef, self.score_clip)
        advantages_T = rlmath.reward_to_go(rewards_T, lengths_N)
        per_token = {"rewards": rewards_T, "advantages": advantages_T}
        return {**written, **{name: columns.on_tokens(table, x_T) for name, x_T in per_token.items()}}


@checked
def with_baselines(batch: Batch, greedy: Batch) -> Batch:
    """Return the batch with ``baseline_scores``: the score of the greedy response to each row's prompt; nothing is copied.

    Args:
        batch: n responses per prompt, one after the other, as ``actor.generate(prompts, n=n)`` writes them.
        greedy: one response per prompt, with scores: ``actor.generate(prompts, temperature=0.0)`` of the same prompts.

    Raises:
        ColumnError: greedy has no scores, or the batch has not the same number of rows for each of its prompts.
    """
    n, rest = divmod(len(batch), len(greedy))
    if rest:
        raise ColumnError(
            f"the batch has {len(batch)} rows for {len(greedy)} greedy responses; each prompt needs one greedy response and the "
            "same number of sampled ones. Generate both from the same prompts."
        )
    return batch.join(greedy.take(np.repeat(np.arange(len(greedy)), n)), baseline_scores="scores")


@checked
def advantages(batch: Batch, *, kl_coef: float = 0.05, kl: str = "k1", score_clip: float | None = None) -> Batch:
    """Turn scores and those of the greedy responses into rewards and advantages, in a CPU task over the whole batch.

    Args:
        batch: with scores and baseline_scores; with old_log_probs and ref_log_probs where ``kl_coef`` is not 0.
        kl_coef: beta: each token's reward is lowered by beta times its KL, in score units per nat.
        kl: estimator of that KL (`KL_KINDS`).
        score_clip: the score minus its baseline is cut to [-score_clip, score_clip].

    Returns:
        The batch with rewards (score minus baseline on the last token, minus beta times KL on each), advantages (the sum of
        the rewards from the token on) and, where ``kl_coef`` is not 0, ``kl`` (old minus reference log-probability), all
        per token.

    Raises:
        OptionError: an argument is out of its range.
        ColumnError: a column is missing; at the first look: a score is not finite.
    """
    fn = Advantages(kl_coef=kl_coef, kl=kl, score_clip=score_clip)
    return batch.map(fn, reads=fn.reads, writes=fn.writes)


@dataclass(frozen=True, kw_only=True)
class ReMax(OnPolicy):
    """REINFORCE with the greedy response as baseline. ``kl_coef`` is PPO's here, the loss is the paper's."""

    n: Copies = 1
    """Sampled responses per prompt; all share one greedy response."""
    score_clip: Positive | None = None
    """Largest absolute difference of score and baseline; the paper's code has 5."""
    aggregation: Aggregation = "sequence_sum"
    """How the loss is averaged: the sum over a response's tokens (the paper; its code has ``"token_mean"``), or as in
    `PolicyLoss`; ``"fixed_length"`` divides by ``max_new_tokens``."""

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
        batch = self.respond(models, prompts)
        greedy = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens, temperature=0.0)
        batch = self.with_log_probs(models, batch)
        batch = models.reward.compute_scores(batch)
        batch = with_baselines(batch, models.reward.compute_scores(greedy))
        batch = advantages(batch, kl_coef=self.kl_coef, kl=self.kl, score_clip=self.score_clip)
        return Step(batch, None, self.learn(models, batch))
