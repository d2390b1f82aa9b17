"""OPO (arXiv 2505.23585): exact on-policy training with the optimal baseline, the group's mean score weighed by length.

The step is RLOO's. One of the baselines that leave the gradient unbiased has the least variance: the scores weighed by the squared
norm of each response's gradient, which grows with its length. One optimizer step on each batch, no KL and no entropy bonus: nothing
else holds the policy, and nothing is off-policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfsdk.algorithms import rloo
from hfsdk.algorithms.choices import Copies
from hfsdk.algorithms.options import with_options
from hfsdk.core.checks import NonNegative, checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class OPO(rloo.RLOO):
    """REINFORCE with an optimal reward baseline. ``epochs`` and ``mini_batches`` of 1 are the algorithm: exact on-policy."""

    n: Copies = 8
    """K: responses per prompt, at least 2."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL, as in `RLOO`; the paper has no KL."""

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with its advantages."""
        return Advantages.of(self).over(batch)


@dataclass(frozen=True, kw_only=True)
class Advantages(rloo.Advantages):
    """The function that `advantages` runs over the whole batch."""

    def compared(self, rewards_N: Tensor, group_N: Tensor, lengths_N: Tensor) -> Tensor:
        """Return each reward minus the optimal baseline, shape [N]."""
        return over_optimal_baseline(rewards_N, group_N, lengths_N, self.alone)


def over_optimal_baseline(scores_N: Tensor, group_N: Tensor, lengths_N: Tensor, alone: str = "zero") -> Tensor:
    """Return each score minus ``sum(length * score) / sum(length)`` of its group, shape [N] (section 3.2).

    0 where all scores of a group are the same, and in a group of one (verl: the score itself, which ``alone="score"`` gives).
    """
    from hfsdk.algorithms import groups

    means_N = groups.group_mean(scores_N, group_N, alone)
    weighed_N = groups.group_mean(lengths_N * (scores_N - means_N), group_N)
    share_N = groups.group_mean(lengths_N.to(scores_N.dtype), group_N)
    many_N = groups.group_size(group_N) > 1
    return scores_N - means_N - (weighed_N / share_N.clamp(min=1e-9)).where(many_N, 0.0)


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn scores into advantages over the optimal baseline, in a CPU task over the whole batch.

    Args:
        batch: rows as those of `hfsdk.algorithms.rloo.advantages`.
        options: the fields of `Advantages`.

    Returns:
        The batch with advantages and, where ``kl_coef`` is not 0, ``kl``, per token.
    """
    return options.over(batch)
