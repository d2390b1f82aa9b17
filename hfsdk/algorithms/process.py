"""GRPO with process supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3): a reward for each step of a response.

The step is GRPO's. The reward is per token (``session.reward(f, per_token=True)``); a response is cut into steps behind each of
``step_ends``, and what its tokens earned within a step is the step's reward. Rewards are brought to mean 0 and deviation 1 over
all steps of the group's responses, and a token's advantage is the sum of those of its own step and of the steps after it: a good
first step stays good when a later one fails. `PPO` and `ReinforcePlusPlus` take the same rewards as they are, one for each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfsdk.algorithms import grpo
from hfsdk.algorithms.options import Options, with_options
from hfsdk.core.checks import Index, checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """Options of `advantages`, and with them of `ProcessGRPO`."""

    step_ends: tuple[Index, ...] = ()
    r"""Token ids that end a step, e.g. ``session.prompts(["\n"], batch_size=1)[0]["prompt"].flat``; a response's last token always
    does."""


@dataclass(frozen=True, kw_only=True)
class ProcessGRPO(StepOptions, grpo.GRPO):
    """GRPO whose rewards are of steps. Without ``step_ends`` a response is one step: that is GRPO."""

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with its advantages."""
        return Advantages.of(self).over(batch)


@dataclass(frozen=True, kw_only=True)
class Advantages(StepOptions, grpo.Advantages):
    """The function that `advantages` runs over the whole batch."""

    needs = ("token_scores", "group", "response")

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32."""
        from hfsdk.algorithms import rlmath, tensors

        lengths_N, group_N = tensors.lengths(table), tensors.groups(table)
        ends_T = step_ends(tensors.flat(table, "response", "int64"), lengths_N, self.step_ends)
        step_T = ends_T.cumsum(0) - ends_T.long()
        rewards_T = tensors.flat(table, "token_scores")
        rewards_S = rewards_T.new_zeros(int(ends_T.sum())).index_add(0, step_T, rewards_T)
        rewards_T = rewards_T.new_zeros(len(rewards_T))
        rewards_T[ends_T] = self.compared(rewards_S, group_N.repeat_interleave(lengths_N)[ends_T])
        return tensors.all_on_tokens(table, {"advantages": rlmath.reward_to_go(rewards_T, lengths_N)})


def step_ends(tokens_T: Tensor, lengths_N: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Return which tokens end a step: those of ``ends``, and each response's last; bool, shape [T]."""
    import torch

    ends_T = torch.isin(tokens_T, torch.tensor(ends, dtype=tokens_T.dtype))
    ends_T[(lengths_N.cumsum(0) - 1)[lengths_N > 0]] = True
    return ends_T


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn the rewards of steps into advantages relative to the group, in a CPU task over the whole batch.

    Args:
        batch: rows with token_scores and group; groups may differ in size.
        options: the fields of `Advantages`.

    Returns:
        The batch with advantages: on each token the sum of the rewards, in deviations of the group's steps, from its own step on.
    """
    return options.over(batch)
