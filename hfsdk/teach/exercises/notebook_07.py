"""Preferences: Bradley-Terry at its start, with a margin, and Lagrange's multiplier."""

from __future__ import annotations

import math

from hfsdk.teach.exercise_kinds import Code, Exercise, Number


def _margin(chosen: float, rejected: float, margin: float) -> float:
    return math.log1p(math.exp(-(chosen - rejected - margin)))


def _no_margin(chosen: float, rejected: float, margin: float) -> float:
    return math.log1p(math.exp(-(chosen - rejected)))


def _margin_given(chosen: float, rejected: float, margin: float) -> float:
    return math.log1p(math.exp(-(chosen - rejected + margin)))


def _turned(chosen: float, rejected: float, margin: float) -> float:
    return math.log1p(math.exp(chosen - rejected - margin))


def _log_probability(chosen: float, rejected: float, margin: float) -> float:
    return -_margin(chosen, rejected, margin)


def _multiplier(multiplier: float, cost: float, limit: float, lr: float) -> float:
    return multiplier * math.exp(lr * multiplier * (cost - limit))


def _added(multiplier: float, cost: float, limit: float, lr: float) -> float:
    return multiplier + lr * (cost - limit)


def _falling(multiplier: float, cost: float, limit: float, lr: float) -> float:
    return multiplier * math.exp(-lr * multiplier * (cost - limit))


def _without_itself(multiplier: float, cost: float, limit: float, lr: float) -> float:
    return multiplier * math.exp(lr * (cost - limit))


EXERCISES: dict[str, Exercise] = {
    "07.1": Number(
        right=0.6931,
        wrong={
            0.5: "That is the probability of the chosen one. The loss is minus its logarithm.",
            0.0: "A loss of 0 would be certainty; a model that cannot tell gives both the same.",
            1.0: "Minus log2 of a half. The loss has the natural logarithm.",
            -0.6931: "A logarithm of a probability is negative, the loss is minus that.",
        },
        otherwise="Minus the natural logarithm of the sigmoid of a difference of 0.",
        because="-ln(1/2): a curve that stays there has learned nothing, whatever its accuracy seems to be.",
    ),
    "07.2": Code(
        right=_margin,
        cases=((1.0, 0.0, 0.0), (1.0, 0.0, 1.0), (0.0, 2.0, 0.5), (3.0, -1.0, 2.0)),
        wrong=(
            (_no_margin, "The margin is not used."),
            (_margin_given, "The margin helps the chosen one; it shall have to win by at least that much."),
            (_turned, "The loss falls here when the rejected one scores higher."),
            (_log_probability, "That is the log-probability; a loss is minus that."),
        ),
        otherwise="Minus log sigmoid of: chosen minus rejected, minus what it has to win by.",
        because="the chosen one has to win by the margin before the loss calls it even (Llama 2 does that for clear preferences).",
    ),
    "07.3": Code(
        right=_multiplier,
        cases=((0.2, 1.0, 0.6, 3.0), (0.5, 0.1, 0.6, 1.0), (1.0, 0.6, 0.6, 2.0)),
        wrong=(
            (_added, "Added up it can become negative, and then the policy is paid for its cost. It is ln lambda that moves."),
            (_falling, "It falls here while the cost is above the limit."),
            (_without_itself, "The step of ln lambda has lambda itself as a factor: it is a gradient with respect to ln lambda."),
        ),
        otherwise="ln lambda gains lr x lambda x (cost - limit); what does lambda become?",
        because="it rises while the cost is above the limit, falls below it, and stays positive.",
    ),
}
