"""Distillation on the student's own responses: it learns what a teacher would have said (arXiv 2306.13649).

The teacher is the reference role, a model with the same tokenizer: ``session.reference("folder-of-the-teacher")``. Each token of
the student's own responses earns minus the reverse KL there, ``log pi_teacher - log pi_student``: a signal per token, no reward
and no critic ("On-Policy Distillation", Thinking Machines 2025; GKD with a student's data alone, by a sample of the KL).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfsdk.algorithms.handles import StepModels, check_same_vocabulary, need_roles
from hfsdk.algorithms.on_policy import KLOptions, KLRewardFunction, OnPolicy
from hfsdk.algorithms.options import with_options
from hfsdk.algorithms.step import Statistics, Step
from hfsdk.core.checks import Fraction, Positive, checked

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions(KLOptions):
    """Options of `advantages`, and with them of `Distillation`."""

    kl_coef: Positive = 1.0
    """Weight of the reverse KL to the teacher, per nat."""
    gamma: Fraction = 0.0
    """Discount of what later tokens earn: 0 judges each token by itself (Thinking Machines), 1 by all that follow (MiniLLM,
    2306.08543)."""


@dataclass(frozen=True, kw_only=True)
class Distillation(AdvantageOptions, OnPolicy):
    """Distillation by the reverse KL, on-policy, from a teacher with the student's tokenizer."""

    @checked
    def step(self, models: StepModels, prompts: Batch) -> Step:
        """Run one step; returns at once."""
        need_roles(models, self.roles)
        check_same_vocabulary(models.actor, models.reference)
        batch = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens, temperature=self.temperature, n=self.n)
        if self.old_log_probs == "recompute":
            batch = models.actor.compute_log_probs(batch)
        else:
            batch = batch.alias("old_log_probs", "rollout_log_probs")
        batch = models.reference.compute_log_probs(batch)
        batch = Advantages.of(self).over(batch)
        actor = models.actor.update(self.weighed(batch), self.policy_loss, epochs=self.epochs, mini_batches=self.mini_batches)
        return Step(batch, None, actor)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses; the reference is the teacher."""
        return ("actor", "reference")

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the numbers to watch, one each for the whole step (see `Step.numbers`); waits. ``kl_mean`` is to the teacher."""
        return step.numbers(Statistics(scores=False, critic=False))


@dataclass(frozen=True, kw_only=True)
class Advantages(AdvantageOptions, KLRewardFunction):
    """The function that `advantages` runs over the whole batch."""

    needs = ("response",)
    gives = ("rewards", "advantages")

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import rlmath, tensors

        kl_T, columns = self.kl_of(table)
        columns["rewards"] = -self.kl_coef * kl_T
        columns["advantages"] = rlmath.reward_to_go(columns["rewards"], tensors.lengths(table), self.gamma)
        return tensors.all_on_tokens(table, columns)


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn the teacher's log-probs into advantages, in a CPU task over the whole batch.

    Args:
        batch: rows with old_log_probs and ref_log_probs, which are the teacher's.
        options: the fields of `Advantages`.

    Returns:
        The batch with rewards (minus the reverse KL of each token), advantages and ``kl`` (student's minus teacher's
        log-probability), all per token.
    """
    return options.over(batch)
