"""Exercises on what-if: money, bytes a trained parameter, a step that does less."""

from __future__ import annotations

from hfsdk.teach.exercise_kinds import Exercise, Number, StepCode

EXERCISES: dict[str, Exercise] = {
    "09.1": Number(
        right=14.222,
        wrong={
            0.1111: "That is one device. All of them are paid for.",
            51200.0: "Prices are per hour, and the step is given in seconds.",
            853.33: "That is with minutes; prices are per hour.",
            7.111: "Two dollars an hour, not one.",
        },
        otherwise="Seconds to hours, times devices, times the price of a device-hour.",
        because="200 s on 128 devices are 7.1 device-hours.",
    ),
    "09.2": Number(
        right=18,
        wrong={
            2: "That is the weight itself. A trained one has a gradient and an optimizer besides.",
            6: "Weight and gradient; the optimizer has a master copy and two moments.",
            10: "AdamW has two moments, and a master copy in fp32.",
            14: "AdamW has two moments: the mean of the gradients, and that of their squares.",
            16: "With gradients in bf16. Here they are fp32.",
        },
        otherwise="bf16 weight, fp32 gradient, fp32 master copy, two fp32 moments.",
        because="2 + 4 + 4 + 4 + 4. With distributed=True the last 12 are cut by dp.",
    ),
    "09.3": StepCode(
        calls={"critic.update": 0, "critic.compute_values": 1, "actor.update": 1, "actor.generate": 1},
        wrong=(
            (lambda calls: "critic.update" in calls, "The critic still learns."),
            (
                lambda calls: "critic.compute_values" not in calls,
                "The critic is gone altogether. Its values still make the advantages, it just does not learn.",
            ),
            (lambda calls: "actor.update" not in calls, "The actor does not learn any more."),
        ),
        because="values as before, and no second update. What it saves is in the plan; what it costs is in no plan.",
    ),
}
