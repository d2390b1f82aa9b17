"""Scores within groups of responses to one prompt: pure functions on flat tensors, as in `hfsdk.algorithms.rlmath` (N: sequences).

``group_N`` is whole numbers: sequences with the same number answer the same prompt. Groups may differ in size and stand in any
order. A NaN stays within its group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfsdk.core.errors import OptionError


def group_mean(scores_N: Tensor, group_N: Tensor, alone: str = "zero") -> Tensor:
    """Return the mean score of each sequence's group, shape [N]; exactly the score where all of a group are the same.

    Args:
        scores_N: one score per sequence, shape [N].
        group_N: the group of every response, shape [N].
        alone: the rule for a group of one: ``"zero"`` takes its own score as the mean, so that its distance is 0 (it has
            nobody to be better than), ``"score"`` takes 0 (verl: mean 0 and deviation 1).

    Raises:
        OptionError: another ``alone``.
    """
    if alone not in ("zero", "score"):
        raise OptionError(f'a group of one gets "zero" or "score"; got alone={alone!r}')
    index_N, num_groups = _groups(group_N)
    size_N = group_size(group_N)
    totals = scores_N.new_zeros(num_groups).index_add(0, index_N, scores_N)
    mean_N = torch.where(identical_in_group(scores_N, group_N), scores_N, totals[index_N] / size_N)
    return torch.where(size_N == 1, 0.0, mean_N) if alone == "score" else mean_N


def group_std(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Return the standard deviation of each sequence's group, shape [N]: unbiased (divided by n - 1); 1 in a group of one."""
    index_N, num_groups = _groups(group_N)
    size_N = group_size(group_N)
    centred_N = scores_N - group_mean(scores_N, group_N)
    squares = scores_N.new_zeros(num_groups).index_add(0, index_N, centred_N.square())
    deviation_N = (squares[index_N] / (size_N - 1).clamp(min=1)).sqrt()
    return torch.where(size_N > 1, deviation_N, 1.0)


def group_size(group_N: Tensor) -> Tensor:
    """Return how many sequences each one's group has, shape [N]."""
    index_N, num_groups = _groups(group_N)
    return torch.bincount(index_N, minlength=num_groups)[index_N]


def identical_in_group(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Say for each sequence whether its whole group has one and the same score; bool, shape [N].

    Such a group teaches nothing: nobody in it is better than another. A group of one is one of them.
    """
    index_N, num_groups = _groups(group_N)
    start = scores_N.new_zeros(num_groups)
    lowest = start.scatter_reduce(0, index_N, scores_N, "amin", include_self=False)
    highest = start.scatter_reduce(0, index_N, scores_N, "amax", include_self=False)
    return (lowest == highest)[index_N]


def increase_variance(scores_N: Tensor, group_N: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Move the scores of each group as far apart as their order, their mean and a range allow (Yang et al. 2025, GRPOVI).

    It solves ``max sum z_i^2`` over ``low <= z_i <= high`` with the group's mean kept and ``z_i >= z_j`` where ``r_i > r_j``
    (arXiv 2505.23247, the reward adjustment model, with the same weight for each response that was sampled). The objective is
    convex, so a corner of that set is the best: steps from ``high`` down to ``low``, and at most one score of another value
    between them, which the mean fixes. Scores that are equal stay equal (the paper lets them part), so that value may be
    several responses'.

    ::

        scores 0.1 0.2 0.4 0.9, range 0 to 1, mean 0.4      0 0 0.6 1

    Args:
        scores_N: one score per sequence, shape [N].
        group_N: whole numbers; sequences with the same number answer the same prompt; shape [N].
        low: the range's lower end; by default the lowest of all the scores.
        high: its upper end; by default the highest of them.

    Returns:
        The new scores, shape [N]; a group whose scores are all the same keeps them, and so does a group of one.

    Raises:
        OptionError: a score lies outside the range.
    """
    low = float(scores_N.min()) if low is None else low
    high = float(scores_N.max()) if high is None else high
    if bool((scores_N < low).any() | (scores_N > high).any()):
        raise OptionError(
            f"the scores reach from {float(scores_N.min()):g} to {float(scores_N.max()):g}; the range of {low:g} to {high:g} "
            "must hold them all"
        )
    spread_N = scores_N.clone()
    for group in group_N.unique():
        of_group = group_N == group
        levels, which, counts = scores_N[of_group].unique(return_inverse=True, return_counts=True)
        if len(levels) < 2:
            continue
        excess = float((scores_N[of_group] - low).sum())  # what there is to hand out, from the best responses down
        new = torch.full_like(levels, low)
        for level in range(len(levels) - 1, -1, -1):
            share = min(excess, (high - low) * int(counts[level]))
            new[level] = low + share / int(counts[level])
            excess -= share
        spread_N[of_group] = new[which]
    return spread_N


def _groups(group_N: Tensor) -> tuple[Tensor, int]:
    """Number the groups from 0: the group of each sequence, shape [N], and how many groups there are."""
    names, index_N = torch.unique(group_N, return_inverse=True)
    return index_N, len(names)
