"""REINFORCE++ (arXiv 2501.03262): PPO without its critic; advantages are normalised over the whole batch.

Against `PPO.step` the lines with the critic are gone. Each token's reward is minus beta times its KL, the last one's plus the
score; a token's advantage is what the response still earns from it on (reward-to-go), brought to mean 0 and variance 1 over all
tokens of all responses, not within a group. The loss is PPO's, clip included, and the ratio keeps its token level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.losses import Copies, MiniBatches, PolicyLoss
from hfsdk.algorithms.on_policy import KLReward, OnPolicy
from hfsdk.algorithms.step import Step
from hfsdk.core.checks import Positive, Share, checked

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class Advantages(KLReward):
    """The function that `advantages` runs over the whole batch; see there for the fields."""

    gamma: Share = 1.0
    per_token: bool = False

    gives = ("rewards", "returns", "advantages")

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        return super().reads + ["token_scores"] * self.per_token

    def __call__(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import columns, rlmath

        scores_N, lengths_N = columns.finite(table, "scores"), columns.lengths(table)
        kl_T, written = self.kl_of(table)
        own_T = columns.flat(table, "token_scores") if self.per_token else None
        rewards_T = rlmath.token_rewards(scores_N, kl_T, lengths_N, self.kl_coef, self.score_clip, own_T)
        returns_T = rlmath.reward_to_go(rewards_T, lengths_N, self.gamma)
        per_token = {"rewards": rewards_T, "returns": returns_T, "advantages": rlmath.whiten(returns_T)}
        return {**written, **{name: columns.on_tokens(table, x_T) for name, x_T in per_token.items()}}


@checked
def advantages(
    batch: Batch, *, gamma: float = 1.0, kl_coef: float = 0.05, kl: str = "k1", score_clip: float | None = None
) -> Batch:
    """Turn scores into rewards, returns and normalised advantages, in a CPU task over the whole batch.

    Args:
        batch: with scores (and token_scores, where the reward is per token); with old_log_probs and ref_log_probs where
            ``kl_coef`` is not 0.
        gamma: discount per token.
        kl_coef: beta: each token's reward is lowered by beta times its KL, in score units per nat.
        kl: estimator of that KL (`KL_KINDS`).
        score_clip: scores are cut to [-score_clip, score_clip].

    Returns:
        The batch with rewards, returns (reward-to-go), advantages (the same with mean 0 and variance 1 over all tokens; all
        0 where the returns do not vary) and, where ``kl_coef`` is not 0, ``kl`` (old minus reference log-probability), all
        per token.

    Raises:
        OptionError: an argument is out of its range.
        ColumnError: a column is missing; at the first look: a score is not finite.
    """
    per_token = "token_scores" in batch
    fn = Advantages(gamma=gamma, kl_coef=kl_coef, kl=kl, score_clip=score_clip, per_token=per_token)
    return batch.map(fn, reads=fn.reads, writes=fn.writes)


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(OnPolicy):
    """REINFORCE++ without a group baseline. Options that `PPO` has too have its defaults."""

    n: Copies = 1
    """k: responses per prompt; they are not compared with each other."""
    gamma: Share = 1.0
    """Discount per token."""
    score_clip: Positive | None = None
    """Largest absolute score."""
    clip_high: Positive | None = None
    """Upper epsilon, where it differs (DAPO)."""
    mini_batches: MiniBatches = 2
    """Optimizer steps per epoch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Advantages(**self._advantage_options)

    @property
    def policy_loss(self) -> PolicyLoss:
        """The actor's loss."""
        return replace(super().policy_loss, clip_high=self.clip_high)

    @property
    def _advantage_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("gamma", "kl_coef", "kl", "score_clip")}

    @checked
    def step(self, models: Any, prompts: Batch) -> Step:
        """Run one step; returns at once.

        Args:
            models: has the handles named in `roles` as attributes, as ``session.models`` does.
            prompts: a batch with a column ``prompt``.
        """
        batch = self.with_log_probs(models, self.respond(models, prompts))
        batch = models.reward.compute_scores(batch)
        batch = advantages(batch, **self._advantage_options)
        return Step(batch, None, self.learn(models, batch))
