"""GDPO (arXiv 2601.05242): GRPO for several rewards, each compared within the group by itself before they are summed.

The step is GRPO's. A sum of rewards hides which of them was earned: right and long, wrong and short may have one score, and then
one advantage. Here each reward is brought to deviations of its own group, these are weighed and summed, and the sums are brought to
variance 1 over the batch, so that the number of rewards does not change the size of an update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hfsdk.algorithms import grpo
from hfsdk.algorithms.handles import StepModels, need_roles
from hfsdk.algorithms.losses import check
from hfsdk.algorithms.options import Options, with_options
from hfsdk.algorithms.step import Step
from hfsdk.core.checks import Name, checked
from hfsdk.core.unscored import PART, is_unscored

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class PartOptions(Options):
    """Options of `advantages`, and with them of `GDPO`."""

    parts: tuple[Name, ...] = ()
    """Names of the rewards, as columns ``scores_of_<name>`` have them: of ``session.reward([f, g])`` ``("reward.f", "reward.g")``.
    In a step the default is all parts of the session's reward; elsewhere it is ``scores`` alone."""
    weights: tuple[float, ...] = ()
    """w_n: how much each counts after it is normalised; in a step the default is ``session.reward``'s, else 1 each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = len(self.weights) in (0, len(self.parts))
        check(fits, "weights", self.weights, f"a number for each of parts, which are {len(self.parts)}, or ()")


@dataclass(frozen=True, kw_only=True)
class GDPO(PartOptions, grpo.GRPO):
    """Group reward-decoupled normalisation policy optimisation. With one reward it is GRPO with advantages of variance 1."""

    @checked
    def step(self, models: StepModels, prompts: Batch) -> Step:
        """Run one step of `GRPO` over the parts of the session's reward, where none are given; returns as it does."""
        need_roles(models, self.roles)
        return super(GDPO, self.of_reward(models)).step(models, prompts)

    def of_reward(self, models: StepModels) -> GDPO:
        """Return this algorithm with the names and weights of the session's reward, where it is a sum and no parts are given."""
        from hfsdk.models.reward import RewardSum

        need_roles(models, ("reward",))
        reward = models.reward
        if self.parts or not isinstance(reward, RewardSum):
            return self
        return replace(self, parts=tuple(part.name for part in reward.parts), weights=reward.weights)

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with its advantages."""
        return Advantages.of(self).over(batch)


@dataclass(frozen=True, kw_only=True)
class Advantages(PartOptions, grpo.Advantages):
    """The function that `advantages` runs over the whole batch."""

    judged = ("scores",)

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        return [*super().reads, *(f"{PART}{name}" for name in self.parts)]

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32; a part that does not score a sample is left out of its sum, as in TRL."""
        import numpy as np
        import torch

        from hfsdk.algorithms import tensors

        group_N = tensors.groups(table)
        total_N = torch.zeros(table.num_rows, dtype=torch.float64)
        names = [f"{PART}{name}" for name in self.parts] or ["scores"]
        for name, weight in zip(names, self.weights or (1.0,) * len(names), strict=True):
            scored = np.flatnonzero(~is_unscored(np.asarray(table[name])))
            if len(scored):
                scores_N = tensors.finite(table.take(scored), name)
                total_N[scored] += weight * self.compared(scores_N, group_N[scored])
        return {"advantages": tensors.on_every_token(table, self.over_batch(total_N))}

    def over_batch(self, advantages_N: Tensor) -> Tensor:
        """Return the sums with variance 1 over the batch's responses (the paper's last normalisation), shape [N].

        Their mean is 0 as that of each group is, so nothing is subtracted, and a group of equal scores keeps exactly 0; but where a
        group of one gets its score.
        """
        from hfsdk.algorithms import rlmath

        mean = rlmath.masked_mean(advantages_N) if self.alone == "score" else 0.0
        return (advantages_N - mean) / (rlmath.masked_var(advantages_N).sqrt() + self.epsilon)


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn the scores of several rewards into advantages relative to the group, in a CPU task over the whole batch.

    Args:
        batch: rows with scores, group and ``scores_of_<name>`` of each part; groups may differ in size.
        options: the fields of `Advantages`.

    Returns:
        The batch with advantages, one per response token; a response whose group has one score of each part gets 0.
    """
    return options.over(batch)
