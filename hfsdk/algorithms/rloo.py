"""RLOO (Back to Basics, arXiv 2402.14740): REINFORCE, and the other responses to the same prompt are the baseline.

Against `PPO.step` the lines with the critic are gone and ``n`` responses answer each prompt. The whole response is one action:
its reward is the score minus the KL of all its tokens, its advantage that reward minus the mean reward of the others, and the
loss sums over its tokens. With one optimizer step per batch the ratio is 1, so the gradient is REINFORCE's and nothing is
clipped; with more steps the clip of PPO keeps them near the policy that sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.losses import KL_KINDS, PolicyLoss, check
from hfsdk.algorithms.step import Statistics, Step, check_sampling, need_roles, with_old_log_probs
from hfsdk.checks import check_fields

if TYPE_CHECKING:
    from hfsdk.batch import Batch
    from hfsdk.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The function that `advantages` runs over the whole batch; see there for the fields."""

    kl_coef: float = 0.05
    kl: str = "k1"
    score_clip: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check(self.kl_coef >= 0, "kl_coef", self.kl_coef, "at least 0")
        check(self.kl in KL_KINDS, "kl", self.kl, f"one of {', '.join(KL_KINDS)}")
        check(self.score_clip is None or self.score_clip > 0, "score_clip", self.score_clip, "above 0, or None")

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        return ["scores", "group", "response"] + ["old_log_probs", "ref_log_probs"] * (self.kl_coef > 0)

    @property
    def writes(self) -> list[str]:
        """Columns the function writes."""
        return ["advantages"] + ["kl"] * (self.kl_coef > 0)

    def __call__(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import columns, rlmath

        rewards_N, written = columns.finite(table, "scores"), {}
        if self.score_clip is not None:
            rewards_N = rewards_N.clamp(-self.score_clip, self.score_clip)
        if self.kl_coef:
            old_T, ref_T = columns.flat(table, "old_log_probs"), columns.flat(table, "ref_log_probs")
            kl_N = rlmath.sequence_sum(rlmath.kl_estimate(old_T, ref_T, self.kl), columns.lengths(table))
            rewards_N = rewards_N - self.kl_coef * kl_N
            written["kl"] = columns.on_tokens(table, rlmath.kl_estimate(old_T, ref_T, "k1"))
        advantages_N = rlmath.leave_one_out(rewards_N, columns.groups(table))
        return {"advantages": columns.on_every_token(table, advantages_N), **written}


def advantages(batch: Batch, *, kl_coef: float = 0.05, kl: str = "k1", score_clip: float | None = None) -> Batch:
    """Turn scores into leave-one-out advantages, in a CPU task over the whole batch.

    Args:
        batch: with scores and group; with old_log_probs and ref_log_probs where ``kl_coef`` is not 0. Groups may differ in
            size; a group of one gets 0, and so does one whose rewards are all the same.
        kl_coef: beta: each response's reward is lowered by beta times the KL summed over its tokens.
        kl: estimator of that KL (`KL_KINDS`).
        score_clip: scores are cut to [-score_clip, score_clip], before the KL.

    Returns:
        The batch with advantages and, where ``kl_coef`` is not 0, ``kl`` (old minus reference log-probability), per token.

    Raises:
        OptionError: an argument is out of its range.
        ColumnError: a column is missing; at the first look: a score is not finite.
    """
    fn = Advantages(kl_coef=kl_coef, kl=kl, score_clip=score_clip)
    return batch.map(fn, reads=fn.reads, writes=fn.writes)


@dataclass(frozen=True, kw_only=True)
class RLOO:
    """REINFORCE with a leave-one-out baseline. ``kl_coef`` is TRL's, the loss is the paper's."""

    max_new_tokens: int = 32
    """Longest response, in tokens."""
    temperature: float = 1.0
    """tau: logits are divided by it in sampling and in every log-probability pass."""
    n: int = 4
    """k: responses per prompt, at least 2, which is TRL's."""
    kl_coef: float = 0.05
    """beta: weight of the KL to the reference in the reward, in score units per nat; with 0 no reference is needed."""
    kl: str = "k1"
    """Estimator of that KL (`KL_KINDS`)."""
    score_clip: float | None = None
    """Largest absolute score."""
    clip: float = 0.2
    """epsilon of the ratio; without effect in the first optimizer step on a batch."""
    aggregation: str = "sequence_sum"
    """How the loss is averaged: the sum over a response's tokens, as log pi(y|x) is one; others as in `PolicyLoss`."""
    epochs: int = 1
    """Passes over the batch."""
    mini_batches: int = 1
    """Optimizer steps per epoch."""
    old_log_probs: str = "recompute"
    """The ratio's denominator: ``"recompute"`` by the trainer, or ``"rollout"``: as the generating engine gave them."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_sampling(self, least_n=2)
        _ = self.policy_loss, Advantages(kl_coef=self.kl_coef, kl=self.kl, score_clip=self.score_clip)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses."""
        return ("actor", "reference", "reward") if self.kl_coef else ("actor", "reward")

    @property
    def policy_loss(self) -> PolicyLoss:
        """The actor's loss."""
        fixed_length = self.max_new_tokens if self.aggregation == "fixed_length" else 0
        return PolicyLoss(clip=self.clip, aggregation=self.aggregation, fixed_length=fixed_length)

    def step(self, models: Any, prompts: Batch) -> Step:
        """Run one step; returns at once.

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
        batch = advantages(batch, kl_coef=self.kl_coef, kl=self.kl, score_clip=self.score_clip)
        actor = models.actor.update(batch, self.policy_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        return Step(batch, None, actor)

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the numbers to watch, one each for the whole step (see `Step.numbers`); waits."""
        return step.numbers(Statistics(reference=self.kl_coef > 0, critic=False, groups=True))
