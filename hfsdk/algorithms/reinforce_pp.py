"""REINFORCE++ (arXiv 2501.03262): PPO without its critic; advantages are normalised over the whole batch.

Against `PPO.step` the lines with the critic are gone. Each token's reward is minus beta times its KL, the last one's plus the
score; a token's advantage is what the response still earns from it on (reward-to-go), brought to mean 0 and variance 1 over all
tokens of all responses, not within a group. The loss is PPO's, clip included, and the ratio keeps its token level.
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

    gamma: float = 1.0
    kl_coef: float = 0.05
    kl: str = "k1"
    score_clip: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check(0 <= self.gamma <= 1, "gamma", self.gamma, "between 0 and 1")
        check(self.kl_coef >= 0, "kl_coef", self.kl_coef, "at least 0")
        check(self.kl in KL_KINDS, "kl", self.kl, f"one of {', '.join(KL_KINDS)}")
        check(self.score_clip is None or self.score_clip > 0, "score_clip", self.score_clip, "above 0, or None")

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        return ["scores", "response"] + ["old_log_probs", "ref_log_probs"] * (self.kl_coef > 0)

    @property
    def writes(self) -> list[str]:
        """Columns the function writes."""
        return ["rewards", "returns", "advantages"] + ["kl"] * (self.kl_coef > 0)

    def __call__(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        import torch

        from hfsdk.algorithms import columns, rlmath

        scores_N, lengths_N, written = columns.finite(table, "scores"), columns.lengths(table), {}
        kl_T = torch.zeros(int(lengths_N.sum()), dtype=torch.float64)
        if self.kl_coef:
            old_T, ref_T = columns.flat(table, "old_log_probs"), columns.flat(table, "ref_log_probs")
            kl_T = rlmath.kl_estimate(old_T, ref_T, self.kl)
            written["kl"] = rlmath.kl_estimate(old_T, ref_T, "k1")
        rewards_T = rlmath.token_rewards(scores_N, kl_T, lengths_N, self.kl_coef, self.score_clip)
        returns_T = rlmath.reward_to_go(rewards_T, lengths_N, self.gamma)
        written |= {"rewards": rewards_T, "returns": returns_T, "advantages": rlmath.whiten(returns_T)}
        return {name: columns.on_tokens(table, x_T) for name, x_T in written.items()}


def advantages(
    batch: Batch, *, gamma: float = 1.0, kl_coef: float = 0.05, kl: str = "k1", score_clip: float | None = None
) -> Batch:
    """Turn scores into rewards, returns and normalised advantages, in a CPU task over the whole batch.

    Args:
        batch: with scores; with old_log_probs and ref_log_probs where ``kl_coef`` is not 0.
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
    fn = Advantages(gamma=gamma, kl_coef=kl_coef, kl=kl, score_clip=score_clip)
    return batch.map(fn, reads=fn.reads, writes=fn.writes)


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus:
    """REINFORCE++ without a group baseline. Options that `PPO` has too have its defaults."""

    max_new_tokens: int = 32
    """Longest response, in tokens."""
    temperature: float = 1.0
    """tau: logits are divided by it in sampling and in every log-probability pass."""
    n: int = 1
    """k: responses per prompt; they are not compared with each other."""
    gamma: float = 1.0
    """Discount per token."""
    kl_coef: float = 0.05
    """beta: weight of the KL to the reference in the reward, in score units per nat; with 0 no reference is needed."""
    kl: str = "k1"
    """Estimator of that KL (`KL_KINDS`)."""
    score_clip: float | None = None
    """Largest absolute score."""
    clip: float = 0.2
    """epsilon of the ratio (PPO eq. 7)."""
    clip_high: float | None = None
    """Upper epsilon, where it differs (DAPO)."""
    aggregation: str = "token_mean"
    """How the loss is averaged, as in `PolicyLoss`; ``"fixed_length"`` divides by ``max_new_tokens``."""
    epochs: int = 1
    """Passes over the batch."""
    mini_batches: int = 2
    """Optimizer steps per epoch."""
    old_log_probs: str = "recompute"
    """The ratio's denominator: ``"recompute"`` by the trainer, or ``"rollout"``: as the generating engine gave them."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_sampling(self)
        _ = self.policy_loss, Advantages(**self._advantage_options)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses."""
        return ("actor", "reference", "reward") if self.kl_coef else ("actor", "reward")

    @property
    def policy_loss(self) -> PolicyLoss:
        """The actor's loss."""
        fixed_length = self.max_new_tokens if self.aggregation == "fixed_length" else 0
        return PolicyLoss(
            clip=self.clip, clip_high=self.clip_high, aggregation=self.aggregation, fixed_length=fixed_length
        )

    @property
    def _advantage_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("gamma", "kl_coef", "kl", "score_clip")}

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
        batch = advantages(batch, **self._advantage_options)
        actor = models.actor.update(batch, self.policy_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        return Step(batch, None, actor)

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the numbers to watch, one each for the whole step (see `Step.numbers`); waits."""
        return step.numbers(Statistics(reference=self.kl_coef > 0, critic=False))
