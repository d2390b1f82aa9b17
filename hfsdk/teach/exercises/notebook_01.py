"""One PPO step: GAE by hand, the first mini-batch, the clipped loss."""

from __future__ import annotations

from typing import Any

from hfsdk.teach.exercise_kinds import Choice, Exercise, Loss, Number


def _clipped(out: Any, b: Any) -> Any:
    ratio, advantages = (out.log_probs - b["old_log_probs"]).exp(), b["advantages"]
    return -(ratio * advantages).minimum(ratio.clamp(0.8, 1.2) * advantages)


def _unclipped(out: Any, b: Any) -> Any:
    return -(out.log_probs - b["old_log_probs"]).exp() * b["advantages"]


def _always_clipped(out: Any, b: Any) -> Any:
    return -(out.log_probs - b["old_log_probs"]).exp().clamp(0.8, 1.2) * b["advantages"]


def _turned_round(out: Any, b: Any) -> Any:
    return -_clipped(out, b)


def _larger_of_both(out: Any, b: Any) -> Any:
    ratio, advantages = (out.log_probs - b["old_log_probs"]).exp(), b["advantages"]
    return -(ratio * advantages).maximum(ratio.clamp(0.8, 1.2) * advantages)


EXERCISES: dict[str, Exercise] = {
    "01.1": Number(
        right=0.5,
        wrong={
            1.0: "That is all that is still earned. The critic expected a part of it already.",
            0.0: "That is lambda = 0: one token ahead only. With lambda = 1 the whole rest of the response counts.",
            -0.5: "Expected minus earned would punish what went better than expected.",
            1.5: "The critic's value is taken away, not added.",
        },
        otherwise="With gamma = lambda = 1 the advantage is all that is still earned, minus what the critic expected there.",
        because="1 is still earned at the first token, and the critic expected 0.5 there.",
    ),
    "01.2": Choice(
        right="the ratio's old log-probs",
        wrong={
            "the learning rate": "It changes how far a step goes. The first mini-batch is looked at before any step.",
            "the critic": "The clip of the policy compares two log-probs of the actor; values are not in it.",
            "the reward function": "Scores become advantages. Whether a ratio is clipped depends on log-probs alone.",
        },
        because="before any step the policy is the one that wrote the batch, so a ratio other than 1 has a wrong denominator.",
    ),
    "01.3": Loss(
        right=_clipped,
        wrong=(
            (_unclipped, "The ratio is not clipped: nothing holds the policy back once it has moved beyond 0.8 and 1.2."),
            (_turned_round, "The sign: an optimizer makes a loss smaller, and the objective shall become larger."),
            (
                _always_clipped,
                "A clipped ratio has no gradient, also where the policy went the wrong way and should come back. PPO takes the "
                "worse of the clipped and the unclipped objective.",
            ),
            (_larger_of_both, "Of the two objectives it takes the better one; PPO is pessimistic."),
        ),
        otherwise="Ratio first: exp(new minus old log-probs). Then two objectives, with the ratio as it is and cut to 0.8 ... 1.2.",
        because="the pessimistic one of two objectives: no reason to move further, and a gradient back where a step went wrong.",
    ),
}
