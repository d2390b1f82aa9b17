"""Time: the bubble, how many micro-batches make it small, a pass that can be left out."""

from __future__ import annotations

from hfsdk.teach.exercise_kinds import Code, Exercise, Number, StepCode


def _bubble(p: int, m: int) -> float:
    return (p - 1) / (m + p - 1)


def _of_the_work(p: int, m: int) -> float:
    return (p - 1) / m


def _of_one_stage(p: int, m: int) -> float:
    return 1 / (m + p - 1)


def _work(p: int, m: int) -> float:
    return m / (m + p - 1)


EXERCISES: dict[str, Exercise] = {
    "04.1": Number(
        right=0.25,
        wrong={
            1 / 13: "These are the micro-batches of the whole update. The pipeline drains at every optimizer step.",
            1 / 7: "These are the micro-batches of an epoch, which has two optimizer steps; the pipeline drains at each.",
            1 / 3: "That is the bubble divided by the work. The share of the *time* has the bubble in its denominator too.",
            0.75: "That is the share in which a stage works.",
        },
        otherwise="m counts the micro-batches between two optimizer steps, those of one mini-batch: how many are there?",
        because="3 micro-batches in a mini-batch and 2 stages: (2 - 1) / (3 + 2 - 1).",
    ),
    "04.2": Code(
        right=_bubble,
        cases=((2, 3), (2, 12), (4, 4), (8, 1), (1, 5)),
        wrong=(
            (_of_the_work, "That is the bubble divided by the work. A share of the time has both in its denominator."),
            (_of_one_stage, "Filling takes p - 1 turns, not one: the last stage waits for all before it."),
            (_work, "That is the share in which a stage works."),
        ),
        otherwise="A stage works m turns of m + p - 1. What does it do in the others?",
        because="each stage works m of m + p - 1 turns; one stage has no bubble, and more micro-batches make it smaller.",
    ),
    "04.3": StepCode(
        calls={"actor.compute_log_probs": 0, "reference.compute_log_probs": 1, "critic.compute_values": 1, "actor.update": 1},
        wrong=(
            (lambda calls: "actor.compute_log_probs" in calls, "The pass that can be left out is still there."),
            (
                lambda calls: "reference.compute_log_probs" not in calls,
                "This leaves out the reference. Its log-probs are known to nobody else; whose are known already?",
            ),
            (lambda calls: "critic.compute_values" not in calls, "Without values there are no advantages of PPO's kind."),
            (lambda calls: "actor.update" not in calls, "It saves the update too, and learns nothing."),
        ),
        because="the rollout told the log-probs while it drew the tokens. What that costs: two engines round differently.",
    ),
}
