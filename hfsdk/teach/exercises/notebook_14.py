"""LoRA: an adapter's size and shards, the bytes that a shared base saves, the merge."""

from __future__ import annotations

from typing import Any

import numpy as np

from hfsdk.teach.exercise_kinds import Choice, Code, Exercise, Number


def _merged(W: Any, A: Any, B: Any, alpha: float, rank_stabilised: bool) -> Any:
    rank: int = A.shape[0]
    return W + alpha / (rank**0.5 if rank_stabilised else rank) * B @ A


def _unscaled(W: Any, A: Any, B: Any, alpha: float, rank_stabilised: bool) -> Any:
    return W + B @ A


def _alpha_alone(W: Any, A: Any, B: Any, alpha: float, rank_stabilised: bool) -> Any:
    return W + alpha * B @ A


def _never_stabilised(W: Any, A: Any, B: Any, alpha: float, rank_stabilised: bool) -> Any:
    return W + alpha / A.shape[0] * B @ A


def _change_alone(W: Any, A: Any, B: Any, alpha: float, rank_stabilised: bool) -> Any:
    return _merged(W, A, B, alpha, rank_stabilised) - W


def _case(rows: int, columns: int, rank: int, alpha: float, rank_stabilised: bool) -> tuple[Any, ...]:
    rng = np.random.default_rng(rank)
    shapes = ((rows, columns), (rank, columns), (rows, rank))
    return (*(rng.integers(-3, 4, shape).astype(float) for shape in shapes), alpha, rank_stabilised)


EXERCISES: dict[str, Exercise] = {
    "14.1": Number(
        right=15_360,
        wrong={
            180_224: "That is the weight itself, 704 x 256.",
            4_096: "That is A alone. B [out, rank] is trained too.",
            11_264: "That is B alone. A [rank, in] is trained too.",
            960: "Rows and columns together. How many of each does the rank give?",
        },
        otherwise="A is [rank, in], B is [out, rank]: the numbers of both.",
        because="16 x 256 + 704 x 16, a twelfth of the weight's 180,224.",
    ),
    "14.2": Choice(
        right="A",
        wrong={
            "B": "Its rows are the weight's rows, and tp cuts the columns.",
            "both": "One of them has neither rows nor columns that tp cuts.",
            "neither": "Each rank has a part of the input only. What is multiplied with it?",
        },
        because="it has the weight's columns; A x is summed over tp, and each rank multiplies it with all of B.",
    ),
    "14.3": Number(
        right=660,
        wrong={
            1_660: "That is a base for each of the three. They have it once.",
            1_160: "That is two bases. All three have one.",
            540: "Those are the weights. What is trained has a gradient and two moments besides.",
            620: "A gradient, two moments, and the adapters themselves: how many times 20 MB is that?",
            580: "That is one trained role. Actor and critic have adapters of their own.",
            4_500: "That is training all weights of both. Only adapters have gradients and moments.",
        },
        otherwise="The base once, and for each trained role its adapters with their gradient and both moments.",
        because="500 + 2 x 4 x 20; trained in full it would be 2 x 4 x 500 + 500 = 4,500.",
    ),
    "14.4": Choice(
        right="B is zero",
        wrong={
            "A is zero": "Were both zero, neither would ever have a gradient. One of them is drawn: the one nearer to the input.",
            "alpha is zero": "It is 32 here, and not trained.",
            "they are not moved yet": "The first generate moves them. What do they add?",
        },
        because="B A x is zero at first, and B has a gradient, since A is drawn.",
    ),
    "14.5": Code(
        right=_merged,
        cases=(_case(3, 4, 2, 8.0, False), _case(3, 4, 2, 8.0, True), _case(2, 5, 1, 3.0, False), _case(5, 3, 3, 6.0, True)),
        wrong=(
            (_unscaled, "The product is multiplied by a scale."),
            (_alpha_alone, "alpha is divided by something before it is the scale."),
            (_never_stabilised, "One of the arguments says by what alpha is divided."),
            (_change_alone, "That is the change. What is it added to?"),
        ),
        otherwise="W + scale B A, the scale alpha / rank, or alpha / sqrt(rank) where it is rank-stabilised.",
        because="what a linear layer computes is linear in its weight, so the sum of both is one weight.",
    ),
}
