"""PPO for language models (arXiv 1707.06347, 2203.02155), call by call: `PPO.step` reads like figure 6 of HybridFlow.

Its parts can be used alone: `advantages` over a batch, `ValueLoss` and `PolicyLoss` given to ``critic.update`` and
``actor.update``. A loss is any callable ``(out, b) -> per-token loss`` or ``-> (per-token loss, metrics)``:
``out.log_probs``, ``out.entropy``, ``out.values`` and the columns ``b[...]`` are flat tensors over the response
tokens of one micro-batch. The engine reduces the loss (by the loss's ``aggregation``) and the metrics (mean; maximum
where the name ends in ``_max``) over all ranks, with global counts; a loss therefore never divides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from hfsdk.algorithms.losses import (
    AGGREGATIONS,
    KL,
    KL_KINDS,
    Aggregation,
    Clamp,
    Clip,
    Copies,
    Epochs,
    MiniBatches,
    NewTokens,
    OldLogProbs,
    PolicyLoss,
    ValueLoss,
    check,
    check_tis,
)  # fmt: skip
from hfsdk.algorithms.step import Statistics, Step, ended, need_roles
from hfsdk.core.checks import NonNegative, OneOf, Positive, Share, Within, check_fields, checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table

__all__ = ["AGGREGATIONS", "KL_KINDS", "PPO", "Advantages", "PolicyLoss", "ValueLoss", "advantages"]


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The function that `advantages` runs over the whole batch; see there for the fields."""

    gamma: Share = 1.0
    lam: Share = 0.95
    kl_coef: NonNegative = 0.05
    kl: KL = "k1"
    whiten: bool = True
    whiten_rewards: bool = False
    missing_eos_penalty: NonNegative = 0.0
    score_clip: Positive | None = None
    per_token: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        kl, eos = self.kl_coef > 0, self.missing_eos_penalty > 0
        columns = ["scores", "values"] + ["old_log_probs", "ref_log_probs"] * kl + ["finish_reason"] * eos
        return columns + ["token_scores"] * self.per_token

    @property
    def writes(self) -> list[str]:
        """Columns the function writes."""
        return ["rewards", "advantages", "returns"] + ["kl"] * (self.kl_coef > 0)

    def __call__(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        import torch

        from hfsdk.algorithms import rlmath
        from hfsdk.algorithms.columns import finite

        def flat(name: str) -> Tensor:
            return torch.tensor(table.ragged(name).flat, dtype=torch.float32)

        shape = table.ragged("values")
        values, lengths = flat("values"), torch.tensor(shape.lengths)
        scores = finite(table, "scores").float()
        columns, kl = {}, torch.zeros_like(values)
        if self.kl_coef:
            kl = rlmath.kl_estimate(flat("old_log_probs"), flat("ref_log_probs"), self.kl)
            columns["kl"] = rlmath.kl_estimate(flat("old_log_probs"), flat("ref_log_probs"), "k1")
        own = flat("token_scores") if self.per_token else None
        rewards = rlmath.token_rewards(scores, kl, lengths, self.kl_coef, self.score_clip, own)
        if self.missing_eos_penalty:
            rewards = rlmath.missing_eos_penalty(rewards, torch.tensor(ended(table)), lengths, self.missing_eos_penalty)
        if self.whiten_rewards:
            rewards = rlmath.whiten(rewards, shift_mean=False)
        advantages, returns = rlmath.gae(rewards, values, lengths, self.gamma, self.lam)
        columns |= {"rewards": rewards, "advantages": advantages, "returns": returns}
        if self.whiten:
            columns["advantages"] = rlmath.whiten(advantages)
        return {name: shape.map(column.numpy()) for name, column in columns.items()}


@checked
def advantages(
    batch: Batch,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_coef: float = 0.05,
    kl: str = "k1",
    whiten: bool = True,
    whiten_rewards: bool = False,
    missing_eos_penalty: float = 0.0,
    score_clip: float | None = None,
) -> Batch:
    """Turn scores and values into rewards, advantages and returns, in a CPU task over the whole batch.

    Args:
        batch: with scores and values (and token_scores, where the reward is per token); with old_log_probs and ref_log_probs
            where ``kl_coef`` is not 0.
        gamma: discount per token (GAE, arXiv 1506.02438).
        lam: lambda of GAE: 0 is one-step TD, 1 is reward-to-go minus value.
        kl_coef: beta: each token's reward is lowered by beta times its KL, in score units per nat.
        kl: estimator of that KL (`KL_KINDS`).
        whiten: advantages get mean 0 and variance 1 over the whole batch's tokens.
        whiten_rewards: rewards get variance 1, before GAE; they keep their mean.
        missing_eos_penalty: subtracted at the last token of responses that were cut off, after score clipping.
        score_clip: scores are cut to [-score_clip, score_clip].

    Returns:
        The batch with rewards, advantages, returns (advantages before whitening, plus values) and, where ``kl_coef``
        is not 0, ``kl`` (old minus reference log-probability), all per token.

    Raises:
        OptionError: an argument is out of its range.
        ColumnError: a column is missing; at the first look: a score is not finite.
    """
    fn = Advantages(
        gamma=gamma,
        lam=lam,
        kl_coef=kl_coef,
        kl=kl,
        whiten=whiten,
        whiten_rewards=whiten_rewards,
        missing_eos_penalty=missing_eos_penalty,
        score_clip=score_clip,
        per_token="token_scores" in batch,
    )
    return batch.map(fn, reads=fn.reads, writes=fn.writes)


@dataclass(frozen=True, kw_only=True)
class PPO:
    """PPO with a learned critic. gamma, lambda and both clips are those of the N details, ``kl_coef`` is TRL's."""

    max_new_tokens: NewTokens = 32
    """Longest response, in tokens."""
    temperature: Positive = 1.0
    """tau: logits are divided by it in sampling and in every log-probability pass."""
    n: Copies = 1
    """Responses per prompt."""
    gamma: Share = 1.0
    """Discount per token (GAE)."""
    lam: Share = 0.95
    """lambda of GAE."""
    kl_coef: NonNegative = 0.05
    """beta: weight of the KL to the reference, in score units per nat; with 0 no reference is needed."""
    kl: KL = "k1"
    """Estimator of that KL (`KL_KINDS`)."""
    kl_in: Annotated[str, OneOf("reward", "loss")] = "reward"
    """``"reward"`` (InstructGPT) or ``"loss"`` (GRPO): two different algorithms."""
    clip: Clip = 0.2
    """epsilon of the ratio (PPO eq. 7)."""
    clip_high: Positive | None = None
    """Upper epsilon, where it differs (DAPO)."""
    dual_clip: Annotated[float, Within(above=1)] | None = None
    """c of dual clip (arXiv 1912.09729)."""
    value_clip: Positive | None = 0.2
    """How far values may move, in value units; ``None`` is off."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus, per nat."""
    aggregation: Aggregation = "token_mean"
    """One of `AGGREGATIONS`, for the actor; ``"fixed_length"`` divides by ``max_new_tokens``."""
    epochs: Epochs = 1
    """Passes over the batch, reshuffled each time; OpenAI's RLHF has 4."""
    mini_batches: MiniBatches = 2
    """Optimizer steps per epoch."""
    whiten: bool = True
    """Advantages get mean 0 and variance 1."""
    whiten_rewards: bool = False
    """Rewards get variance 1 and keep their mean."""
    missing_eos_penalty: NonNegative = 0.0
    """Subtracted, in score units, where the response was cut off (TRL)."""
    score_clip: Positive | None = None
    """Largest absolute score."""
    old_log_probs: OldLogProbs = "recompute"
    """The ratio's denominator: ``"recompute"`` by the trainer (one more forward pass, ratio exactly 1 at first), or
    ``"rollout"``: as the generating engine gave them."""
    tis_cap: Positive | None = None
    """Truncated importance sampling for the rollout's numerics, as in `PolicyLoss`; needs old log-probs by the trainer."""
    log_ratio_clamp: Clamp = "above"
    """Where log-ratios are cut before ``exp``, as in `PolicyLoss`."""

    def __post_init__(self) -> None:
        check_fields(self)
        useful = self.kl_in == "reward" or self.kl in ("k2", "k3", "k3+")
        check(useful, "kl", self.kl, 'k2, k3 or k3+ with kl_in="loss" (k1 has no gradient in expectation)')
        check_tis(self.tis_cap, self.old_log_probs)
        _ = self.policy_loss, self.value_loss, Advantages(**self._advantage_options)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses."""
        return ("actor", "critic", "reference", "reward") if self.kl_coef else ("actor", "critic", "reward")

    @property
    def policy_loss(self) -> PolicyLoss:
        """The actor's loss."""
        return PolicyLoss(
            clip=self.clip,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            entropy_coef=self.entropy_coef,
            kl_coef=self.kl_coef if self.kl_in == "loss" else 0.0,
            kl=self.kl,
            aggregation=self.aggregation,
            fixed_length=self.max_new_tokens if self.aggregation == "fixed_length" else 0,
            tis_cap=self.tis_cap,
            log_ratio_clamp=self.log_ratio_clamp,
        )

    @property
    def value_loss(self) -> ValueLoss:
        """The critic's loss."""
        return ValueLoss(clip=self.value_clip)

    @property
    def _advantage_options(self) -> dict[str, Any]:
        names = ("gamma", "lam", "kl", "whiten", "whiten_rewards", "missing_eos_penalty", "score_clip")
        options = {name: getattr(self, name) for name in names}
        return {**options, "kl_coef": self.kl_coef if self.kl_in == "reward" else 0.0}

    @checked
    def step(self, models: Any, prompts: Batch) -> Step:
        """Run one step (HybridFlow, figure 6); returns at once.

        Args:
            models: has the handles named in `roles` as attributes, as ``session.models`` does.
            prompts: a batch with a column ``prompt``.
        """
        need_roles(models, self.roles)
        sampling = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "n": self.n}
        batch = models.actor.generate(prompts, **sampling)
        if self.old_log_probs == "recompute":
            batch = models.actor.compute_log_probs(batch)
        else:
            batch = batch.alias("old_log_probs", "rollout_log_probs")
        if self.kl_coef:
            batch = models.reference.compute_log_probs(batch)
        batch = models.critic.compute_values(batch)
        batch = models.reward.compute_scores(batch)
        batch = advantages(batch, **self._advantage_options)
        critic = models.critic.update(batch, self.value_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        actor = models.actor.update(batch, self.policy_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        return Step(batch, critic, actor)

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the numbers to watch, one each for the whole step (see `Step.numbers`); waits."""
        return step.numbers(Statistics(reference=self.kl_coef > 0))
