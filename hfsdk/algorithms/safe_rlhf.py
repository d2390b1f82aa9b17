"""Safe-RLHF (arXiv 2310.12773): the highest reward whose cost stays below a limit.

Against `PPO.step` five kinds of lines come (HybridFlow, figure 6): costs, the cost critic's values, the mixed advantages, the cost
critic's update and the multiplier's; with ``ptx`` data one more update. A token's advantage is
``(A_reward - lambda A_cost) / (1 + lambda)``; lambda, the Lagrange multiplier, belongs to the cost model
(``session.cost(...).multiplier``) and moves after the advantages were mixed with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.losses import KL, MiniBatches, ValueLoss, check
from hfsdk.algorithms.on_policy import OnPolicy
from hfsdk.algorithms.preferences import CrossEntropy
from hfsdk.algorithms.step import Statistics, Step, over_mini_batches
from hfsdk.core.checks import NonNegative, Positive, Share, check_fields, checked

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.pending import Metrics, Value
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The function that `advantages` runs over the whole batch; see there for the fields."""

    multiplier: Positive
    gamma: Share = 1.0
    lam: Share = 0.95
    kl_coef: NonNegative = 0.05
    kl: KL = "k1"
    score_clip: Positive | None = None
    whiten: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        columns = ["scores", "costs", "values", "cost_values", "response"]
        return columns + ["old_log_probs", "ref_log_probs"] * (self.kl_coef > 0)

    @property
    def writes(self) -> list[str]:
        """Columns the function writes."""
        columns = ["rewards", "returns", "token_costs", "cost_returns", "cost_advantages", "advantages"]
        return columns + ["kl"] * (self.kl_coef > 0)

    def __call__(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        import torch

        from hfsdk.algorithms import columns, rlmath

        lengths_N, found = columns.lengths(table), {}
        kl_T = torch.zeros(int(lengths_N.sum()), dtype=torch.float64)
        if self.kl_coef:
            old_T, ref_T = columns.flat(table, "old_log_probs"), columns.flat(table, "ref_log_probs")
            kl_T = rlmath.kl_estimate(old_T, ref_T, self.kl)
            found["kl"] = rlmath.kl_estimate(old_T, ref_T, "k1")
        half, scores_N, costs_N = self.kl_coef / 2, columns.finite(table, "scores"), columns.finite(table, "costs")
        found["rewards"] = rlmath.token_rewards(scores_N, kl_T, lengths_N, half, self.score_clip)
        found["token_costs"] = rlmath.token_rewards(costs_N, kl_T, lengths_N, -half, self.score_clip)
        values_T, cost_values_T = columns.flat(table, "values"), columns.flat(table, "cost_values")
        advantages_T, found["returns"] = rlmath.gae(found["rewards"], values_T, lengths_N, self.gamma, self.lam)
        cost_advantages_T, found["cost_returns"] = rlmath.gae(found["token_costs"], cost_values_T, lengths_N, self.gamma, self.lam)
        found["cost_advantages"] = cost_advantages_T
        mixed_T = rlmath.lagrangian(advantages_T, cost_advantages_T, self.multiplier)
        found["advantages"] = rlmath.whiten(mixed_T) if self.whiten else mixed_T
        return {name: columns.on_tokens(table, x_T) for name, x_T in found.items()}


@checked
def advantages(
    batch: Batch,
    *,
    multiplier: float,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_coef: float = 0.05,
    kl: str = "k1",
    score_clip: float | None = None,
    whiten: bool = True,
) -> Batch:
    """Mix the advantages of rewards and of costs, in a CPU task over the whole batch.

    Args:
        batch: with scores, costs, values and cost_values; with old_log_probs and ref_log_probs where ``kl_coef`` is not 0.
        multiplier: lambda.
        gamma: discount per token.
        lam: lambda of GAE.
        kl_coef: beta: half of it lowers each token's reward by its KL, half of it raises the token's cost.
        kl: estimator of that KL (`KL_KINDS`).
        score_clip: scores and costs are cut to [-score_clip, score_clip].
        whiten: mixed advantages get mean 0 and variance 1 over the whole batch's tokens.

    Returns:
        The batch with rewards, returns, token_costs, cost_returns, cost_advantages, advantages (mixed) and, where ``kl_coef``
        is not 0, ``kl``, all per token.

    Raises:
        OptionError: an argument is out of its range.
        ColumnError: a column is missing; at the first look: a score or a cost is not finite.
    """
    fn = Advantages(multiplier=multiplier, gamma=gamma, lam=lam, kl_coef=kl_coef, kl=kl, score_clip=score_clip, whiten=whiten)
    return batch.map(fn, reads=fn.reads, writes=fn.writes)


@dataclass(frozen=True)
class SafeStep(Step):
    """A step with what Safe-RLHF has besides."""

    cost_critic: Metrics
    multiplier: float
    """lambda, as the advantages were mixed with it."""
    next_multiplier: float
    """lambda, as it has moved by this step's costs."""
    ptx: Metrics | None = None
    ptx_loss: Value | None = None


@dataclass(frozen=True, kw_only=True)
class SafeRLHF(OnPolicy):
    """PPO with a cost below a limit. ``multiplier_lr`` and ``most_multiplier`` are the authors' code's, the rest is `PPO`'s."""

    cost_limit: float = 0.0
    """d: what the mean cost of a response shall not exceed, in cost units."""
    multiplier_lr: Positive = 0.1
    """alpha: how fast ln lambda moves, per cost unit."""
    most_multiplier: Positive | None = 5.0
    """Largest lambda."""
    gamma: Share = 1.0
    """Discount per token."""
    lam: Share = 0.95
    """lambda of GAE."""
    kl_coef: NonNegative = 0.05
    """beta: weight of the KL to the reference, half in the reward and half in the cost; with 0 no reference is needed."""
    score_clip: Positive | None = None
    """Largest absolute score and cost; the authors' code has 50."""
    whiten: bool = True
    """Mixed advantages get mean 0 and variance 1, as `PPO`'s (the authors' code: no)."""
    value_clip: Positive | None = 0.2
    """How far values may move, in value units; ``None`` is off."""
    ptx: object = field(default=None, compare=False, repr=False)
    """Batches of demonstrations (``session.demonstrations``) for the pre-training loss; ``None`` is off."""
    ptx_coef: Positive = 1.0
    """Weight of that loss; the paper's is 16 on its own scale of rewards."""
    mini_batches: MiniBatches = 2
    """Optimizer steps per epoch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        stream = self.ptx is None or isinstance(self.ptx, Iterator)
        check(stream, "ptx", self.ptx, "a stream of batches, e.g. session.demonstrations(texts, batch_size=16), or None")
        Advantages(multiplier=1.0, **self._advantage_options)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses."""
        return ("actor", "critic", "cost_critic", "reward", "cost") + ("reference",) * (self.kl_coef > 0)

    @property
    def _advantage_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("gamma", "lam", "kl_coef", "kl", "score_clip", "whiten")}

    @checked
    def step(self, models: Any, prompts: Batch) -> SafeStep:
        """Run one step; waits for its costs, which move lambda.

        Args:
            models: has the handles named in `roles` as attributes, as ``session.models`` does.
            prompts: a batch with a column ``prompt``.
        """
        batch = self.with_log_probs(models, self.respond(models, prompts))
        batch = models.cost_critic.compute_values(batch).alias("cost_values", "values")
        batch = models.critic.compute_values(batch)
        batch = models.reward.compute_scores(batch)
        batch = models.cost.compute_costs(batch)
        multiplier = models.cost.multiplier
        batch = advantages(batch, multiplier=multiplier, **self._advantage_options)
        often = {"epochs": self.epochs, "mini_batches": self.mini_batches}
        of_cost = ValueLoss(clip=self.value_clip, values="cost_values", returns="cost_returns")
        cost_critic = models.cost_critic.update(batch, of_cost, **often)
        critic = models.critic.update(batch, ValueLoss(clip=self.value_clip), **often)
        actor = self.learn(models, batch)
        ptx_loss, ptx = self._imitate(models)
        moved = models.cost.adapt_multiplier(batch, limit=self.cost_limit, lr=self.multiplier_lr, most=self.most_multiplier)
        return SafeStep(batch, critic, actor, cost_critic, multiplier, moved, ptx, ptx_loss)

    def _imitate(self, models: Any) -> tuple[Value | None, Metrics | None]:
        """Take one optimizer step on the pre-training loss, as the authors' code does: after the actor's own."""
        if self.ptx is None:
            return None, None
        stream: Any = self.ptx
        batch = next(stream)
        loss = models.actor.compute_loss(batch, CrossEntropy())
        return loss, models.actor.update(batch, CrossEntropy(weight=self.ptx_coef))

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the numbers to watch, one each for the whole step (see `Step.numbers`); waits.

        Besides: ``cost_mean``, ``multiplier`` (as it was used), ``cost_value_loss``; with ptx ``ptx_loss``, before its update.
        """
        assert isinstance(step, SafeStep)
        found = step.numbers(Statistics(reference=self.kl_coef > 0, costs=True))
        found["multiplier"] = step.multiplier
        found["cost_value_loss"] = over_mini_batches(step.cost_critic.rows)["value_loss"]
        if step.ptx_loss is not None:
            found["ptx_loss"] = float(step.ptx_loss.value)
        return found
