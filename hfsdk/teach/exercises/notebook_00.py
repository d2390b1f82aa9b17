"""Words and pictures: layouts, a device's memory, the order of a step's calls."""

from __future__ import annotations

from hfsdk.teach.exercise_kinds import Exercise, Number, StepCode

EXERCISES: dict[str, Exercise] = {
    "00.1": Number(
        right=4,
        wrong={
            8: "That is what tp alone leaves. Every copy is cut into stages too.",
            16: "That is what pp alone leaves. Every stage is cut across its layers too.",
            26: "Parts of a layout are multiplied, not added: each copy has tp x pp devices.",
            32: "That would be a copy of the model on each device. How many devices does one copy take here?",
        },
        otherwise="Count the devices of one copy of the model first; how many such copies do 32 devices hold?",
        because="one copy takes tp x pp = 8 devices, and 32 devices hold four of them.",
    ),
    "00.2": Number(
        right=2.0,
        wrong={
            16.0: "That is the whole model: 8 billion weights of two bytes. It is cut.",
            4.0: "That is with tp alone. A device has the layers of one stage only.",
            8.0: "That is with pp alone. Each of its matrices is cut across tp devices too.",
            0.5: "Copies (dp) do not share weights: each has all of them. By what is a copy cut?",
            1.0: "bf16 has two bytes a weight.",
        },
        otherwise="Gigabytes of all weights first (bf16: two bytes each), then: which of tp, pp and dp cut them?",
        because="16 GB of weights are cut by tp x pp = 8; dp makes copies and cuts nothing.",
    ),
    "00.3": StepCode(
        calls={"actor.compute_log_probs": 2, "actor.update": 1, "actor.generate": 1},
        order=lambda calls: calls[-1] == "actor.compute_log_probs",
        wrong=(
            (lambda calls: calls.count("actor.compute_log_probs") < 2, "The actor is asked for log-probs as often as before."),
            (lambda calls: calls.count("actor.generate") > 1, "The same responses are asked for again: do not generate anew."),
            (
                lambda calls: calls[-1] != "actor.compute_log_probs",
                "The second pass does not come last: before the update the policy has not moved yet.",
            ),
        ),
        because="the same responses get log-probs before and after the update; their difference is how far the policy moved.",
    ),
}
