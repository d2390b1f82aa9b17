"""Pass@k training (arXiv 2508.10751): a response is worth what it adds to the best of k, not to the mean of all.

The step is GRPO's. All subsets of k responses of a group are looked at: one passes where any of its responses does. A response's
advantage is the mean over the subsets that it is in, in deviations of all subsets, which has a closed form. Questions that are
mostly solved push no further, so that the policy keeps other ways to answer; rare right answers count most.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING

from hfsdk.algorithms import grpo
from hfsdk.algorithms.choices import Copies
from hfsdk.algorithms.losses import check
from hfsdk.algorithms.options import with_options
from hfsdk.core.checks import checked

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class PassOptions(grpo.AdvantageOptions):
    """Options of `advantages`, and with them of `PassAtKTraining`."""

    k: Copies = 4
    """Responses of which one has to pass, at most ``n``; 1 is GRPO with right and wrong alone."""
    pass_score: float = 0.5
    """The score from which on a response passes: rewards of 0 and 1, and of -1 and 1, are told apart by the default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.scale != "batch", "scale", self.scale, '"group" or "none": the deviation is that of a group\'s subsets')
        check(not self.increase_variance, "increase_variance", self.increase_variance, "False: a response passes or does not")


@dataclass(frozen=True, kw_only=True)
class PassAtKTraining(PassOptions, grpo.GRPO):
    """GRPO with the advantages of pass@k, in their analytic form."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.k <= self.n, "k", self.k, f"at most n, the responses to a prompt: {self.n}")

    @checked
    def with_advantages(self, batch: Batch) -> Batch:
        """Return the batch with its advantages."""
        return Advantages.of(self).over(batch)


@dataclass(frozen=True, kw_only=True)
class Advantages(PassOptions, grpo.Advantages):
    """The function that `advantages` runs over the whole batch."""

    def compared(self, scores_N: Tensor, group_N: Tensor) -> Tensor:
        """Return each response's advantage by pass@k, shape [N]; of a group smaller than k by that of its size."""
        import torch

        from hfsdk.algorithms import groups

        passed_N, size_N = scores_N >= self.pass_score, groups.group_size(group_N)
        wrong_N = (groups.group_mean((~passed_N).to(scores_N.dtype), group_N) * size_N).round()
        found_N = torch.zeros_like(scores_N)
        for size, wrong in {(int(a), int(b)) for a, b in zip(size_N, wrong_N, strict=True)}:
            here_N = (size_N == size) & (wrong_N == wrong)
            for right, advantage in zip((True, False), self.of_group(size, wrong), strict=True):
                found_N[here_N & (passed_N == right)] = advantage
        return torch.where(size_N == 1, scores_N, found_N) if self.alone == "score" else found_N

    def of_group(self, size: int, wrong: int) -> tuple[float, float]:
        """Return the advantages of a right and of a wrong response in a group with so many wrong ones.

        With ``R = 1 - C(wrong, k) / C(size, k)``, the share of subsets that pass, and ``sigma = sqrt(R (1 - R))`` they are
        ``(1 - R) / sigma`` and ``(1 - R - C(wrong - 1, k - 1) / C(size - 1, k - 1)) / sigma``; 0 where all subsets are alike.
        """
        k = min(self.k, size)
        fails = comb(wrong, k) / comb(size, k)
        if fails in (0.0, 1.0):
            return 0.0, 0.0
        with_this = comb(wrong - 1, k - 1) / comb(size - 1, k - 1)
        sigma = (fails * (1.0 - fails)) ** 0.5 + self.epsilon if self.scale == "group" else 1.0
        return fails / sigma, (fails - with_this) / sigma


@with_options(Advantages)
@checked
def advantages(batch: Batch, options: Advantages) -> Batch:
    """Turn scores into advantages by pass@k, in a CPU task over the whole batch.

    Args:
        batch: rows with scores and group; groups may differ in size. One in which all subsets of k pass, or none, gets 0.
        options: the fields of `Advantages`.

    Returns:
        The batch with advantages, one per response token.
    """
    return options.over(batch)
