"""Placements: calls that overlap, how old a batch is, which calls a step needs."""

from __future__ import annotations

from hfsdk.teach.exercise_kinds import Choice, Exercise, Number, StepCode

EXERCISES: dict[str, Exercise] = {
    "02.1": Choice(
        right="critic.update and actor.update",
        wrong={
            "actor.generate and critic.compute_values": "Values are of the responses: the critic needs what is being generated.",
            "reference.compute_log_probs and actor.compute_log_probs": "Both live on one pool under split; there calls take turns.",
            "actor.generate and actor.update": "They are calls of one role, on the same devices.",
        },
        because="they live on disjoint pools, and neither reads what the other writes.",
    ),
    "02.2": Number(
        right=2,
        wrong={
            1: "Versions count optimizer steps, not batches. How many does one update make here?",
            0: "The batch was written before the update, so that the policy has moved on since.",
            4: "One epoch over the batch is one pass: its mini-batches are counted once.",
        },
        otherwise="Versions count optimizer steps: epochs x mini-batches of the update that came in between.",
        because="one epoch of two mini-batches is two optimizer steps, and each is a version.",
    ),
    "02.3": StepCode(
        calls={"actor.generate": 2, "critic.update": 1, "actor.update": 1},
        order=lambda calls: "actor.generate" in calls[2 : calls.index("critic.update")],
        wrong=(
            (lambda calls: calls.count("actor.generate") < 2, "There is one generation only: the next batch is not asked for."),
            (
                lambda calls: calls[:2] == ["actor.generate"] * 2,
                "The next batch comes before this one is prepared: what the shadow could do meanwhile is done already.",
            ),
            (
                lambda calls: "actor.update" in calls and "actor.generate" in calls[calls.index("actor.update") :],
                "The next batch is asked for after the updates: it waits for their weights, and nothing overlaps.",
            ),
            (
                lambda calls: "actor.update" not in calls or "critic.update" not in calls,
                "An update is missing.",
            ),
        ),
        because="submitted before the updates, it is generated with the weights of now, while they run.",
    ),
}
