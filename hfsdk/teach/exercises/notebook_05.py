"""Algorithms: group advantages, leave-one-out, a step without a critic."""

from __future__ import annotations

from hfsdk.teach.exercise_kinds import Code, Exercise, Number, StepCode


def _leave_one_out(scores: list[float]) -> list[float]:
    return [score - (sum(scores) - score) / (len(scores) - 1) for score in scores]


def _group_mean(scores: list[float]) -> list[float]:
    return [score - sum(scores) / len(scores) for score in scores]


def _baselines(scores: list[float]) -> list[float]:
    return [(sum(scores) - score) / (len(scores) - 1) for score in scores]


def _undivided(scores: list[float]) -> list[float]:
    return [score - (sum(scores) - score) / len(scores) for score in scores]


EXERCISES: dict[str, Exercise] = {
    "05.1": Number(
        right=1.5,
        wrong={
            0.75: "That is the score minus the group's mean. GRPO divides by the group's standard deviation too.",
            1.732: "That is with the biased deviation (divided by n). Here, as in TRL and verl, it is divided by n - 1.",
            1.0: "That is RLOO's: compared with the mean of the others, not divided by anything.",
            -0.5: "That is the advantage of the responses that failed.",
        },
        otherwise="(score - mean) / deviation, the deviation with n - 1.",
        because="(1 - 0.25) / 0.5: the only right one of four stands out by one and a half deviations.",
    ),
    "05.2": Code(
        right=_leave_one_out,
        cases=(([1.0, 0.0, 0.0, 0.0],), ([0.2, 0.4],), ([3.0, 3.0, 3.0],)),
        wrong=(
            (_group_mean, "The response's own score is in its baseline. What is expected must not know what came."),
            (_baselines, "These are the baselines; an advantage is the score minus its baseline."),
            (_undivided, "The others are one fewer than the group."),
        ),
        otherwise="Each score minus the mean of the other scores.",
        because="each response is compared with the mean of the others, so that its own luck is not in the baseline.",
    ),
    "05.3": StepCode(
        calls={
            **{"critic.compute_values": 0, "critic.update": 0, "actor.generate": 2},
            **{"reward.compute_scores": 2, "actor.update": 1},
        },
        wrong=(
            (
                lambda calls: "critic.compute_values" in calls or "critic.update" in calls,
                "The critic is still asked or trained; the second response takes its place.",
            ),
            (lambda calls: calls.count("actor.generate") < 2, "There is one generation only: nothing to compare with."),
            (lambda calls: calls.count("reward.compute_scores") < 2, "The second response needs a score as well."),
            (lambda calls: calls.count("actor.update") != 1, "The actor is updated once, with the sampled responses."),
        ),
        because="two generations and two scorings instead of a critic's two calls.",
    ),
}
