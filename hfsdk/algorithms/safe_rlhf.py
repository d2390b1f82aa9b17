"""Safe-RLHF (arXiv 2310.12773): the highest reward whose cost stays below a limit.

Against `PPO.step` five kinds of lines come (HybridFlow, figure 6): costs, the cost critic's values, the mixed advantages, the cost
critic's update and the multiplier's. lambda, the multiplier, belongs to the cost model (``session.cost(...).multiplier``).
Half of the KL lowers the reward, half raises the cost; ``score_clip`` cuts both (the authors' code: at 50, and no ``whiten``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfsdk.algorithms.choices import MiniBatches
from hfsdk.algorithms.handles import StepModels, need_roles, reference_of
from hfsdk.algorithms.losses import ValueLoss, check
from hfsdk.algorithms.on_policy import GAEOptions, KLRewardFunction, OnPolicy
from hfsdk.algorithms.options import with_options
from hfsdk.algorithms.preferences import CrossEntropy, PretrainingMix
from hfsdk.algorithms.step import SafeStep, Statistics, Step, update_numbers
from hfsdk.core.checks import Positive, checked

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class SafeRLHF(GAEOptions, OnPolicy):
    """PPO with a cost below a limit. ``multiplier_lr`` and ``most_multiplier`` are the authors' code's, the rest is `PPO`'s."""

    @checked
    def step(self, models: StepModels, prompts: Batch) -> SafeStep:
        """Run one step; waits for its costs, which move lambda."""
        need_roles(models, self.roles)
        batch = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens, temperature=self.temperature, n=self.n)
        if self.old_log_probs == "recompute":
            batch = models.actor.compute_log_probs(batch)
        else:
            batch = batch.alias("old_log_probs", "rollout_log_probs")
        if reference := reference_of(models):
            batch = reference.compute_log_probs(batch)
        batch = models.cost_critic.compute_values(batch)
        batch = batch.alias("cost_values", "values")
        batch = models.critic.compute_values(batch)
        batch = models.reward.compute_scores(batch)
        batch = models.cost.compute_costs(batch)
        multiplier = models.cost.multiplier
        batch = Advantages.of(self, multiplier=multiplier).over(batch)
        cost_critic = models.cost_critic.update(batch, self.cost_value_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        critic = models.critic.update(batch, self.value_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        actor = models.actor.update(self.weighed(batch), self.policy_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        ptx, ptx_loss = None, None
        if self.ptx is not None:  # one optimizer step, after the actor's own, as in the authors' code
            demonstrations = next(self.ptx)
            ptx_loss = models.actor.compute_loss(demonstrations, CrossEntropy())
            ptx = models.actor.update(demonstrations, PretrainingMix(weight=self.ptx_coef))
        moved = models.cost.adapt_multiplier(batch, limit=self.cost_limit, lr=self.multiplier_lr, most=self.most_multiplier)
        return SafeStep(batch, critic, actor, cost_critic, multiplier, moved, ptx, ptx_loss)

    cost_limit: float = 0.0
    """d: the mean cost of a response shall not exceed this, in cost units."""
    multiplier_lr: Positive = 0.1
    """alpha: how fast ln lambda moves, per cost unit."""
    most_multiplier: Positive | None = 5.0
    """Largest lambda."""
    value_clip: Positive | None = 0.2
    """How far values may move, in value units; ``None`` is off."""
    ptx: Any = field(default=None, compare=False, repr=False)
    """Batches of demonstrations (``session.demonstrations``) for the pre-training loss; ``None`` is off."""
    ptx_coef: Positive = 1.0
    """Weight of that loss; the paper's is 16 on its own scale of rewards."""
    mini_batches: MiniBatches = 2
    """Optimizer steps per epoch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        stream = self.ptx is None or isinstance(self.ptx, Iterator)
        check(stream, "ptx", self.ptx, "a stream of batches, e.g. session.demonstrations(texts, batch_size=16), or None")

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses."""
        return ("actor", "critic", "cost_critic", "reward", "cost") + ("reference",) * (self.kl_coef > 0)

    @property
    def value_loss(self) -> ValueLoss:
        """The critic's loss."""
        return ValueLoss(clip=self.value_clip)

    @property
    def cost_value_loss(self) -> ValueLoss:
        """The cost critic's loss."""
        return ValueLoss(clip=self.value_clip, values="cost_values", returns="cost_returns")

    def metrics(self, step: Step) -> dict[str, float]:
        """Return `Step.numbers`, and multiplier (as it was used), the cost critic's and ptx_loss (before its update); waits."""
        assert isinstance(step, SafeStep)
        numbers = step.numbers(Statistics(reference="ref_log_probs" in step.batch, costs=True))
        costs = update_numbers("cost_critic", step.cost_critic)
        numbers |= {f"cost_{name}" if name.startswith("value_") else name: number for name, number in costs.items()}
        numbers["multiplier"] = step.multiplier
        return numbers if step.ptx_loss is None else numbers | {"ptx_loss": float(step.ptx_loss.value)}


@dataclass(frozen=True, kw_only=True)
class Advantages(GAEOptions, KLRewardFunction):
    """The function that `advantages` runs over the whole batch."""

    multiplier: Positive
    """lambda."""

    needs = ("scores", "costs", "values", "cost_values", "response")
    gives = ("rewards", "returns", "token_costs", "cost_returns", "cost_advantages", "advantages")

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import rlmath, tensors

        lengths_N = tensors.lengths(table)
        kl_T, columns = self.kl_of(table)
        scores_N, costs_N = tensors.finite(table, "scores"), tensors.finite(table, "costs")
        rewards_T = rlmath.token_rewards(scores_N, kl_T, lengths_N, self.kl_coef / 2, self.score_clip)
        costs_T = rlmath.token_rewards(costs_N, kl_T, lengths_N, -self.kl_coef / 2, self.score_clip)
        advantages_T, returns_T = rlmath.gae(rewards_T, tensors.flat(table, "values"), lengths_N, self.gamma, self.lam)
        cost_values_T = tensors.flat(table, "cost_values")
        cost_advantages_T, cost_returns_T = rlmath.gae(costs_T, cost_values_T, lengths_N, self.gamma, self.lam)
        mixed_T = (advantages_T - self.multiplier * cost_advantages_T) / (1.0 + self.multiplier)  # appendix B.3
        columns |= {"rewards": rewards_T, "returns": returns_T, "token_costs": costs_T, "cost_returns": cost_returns_T}
        columns |= {"cost_advantages": cost_advantages_T, "advantages": rlmath.whiten(mixed_T) if self.whiten else mixed_T}
        return tensors.all_on_tokens(table, columns)


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Mix the advantages of rewards and of costs, in a CPU task over the whole batch.

    Args:
        batch: rows with scores, costs, values and cost_values; with old_log_probs and ref_log_probs where ``kl_coef`` is not 0.
        options: the fields of `Advantages`.

    Returns:
        The batch with rewards, returns, token_costs, cost_returns, cost_advantages, advantages (mixed) and maybe kl, per token.
    """
    return options.over(batch)
