"""Exercises on failures: lost work, an interrupt's effect, a ratio that stays finite."""

from __future__ import annotations

import math

from hfsdk.teach.exercise_kinds import Choice, Code, Exercise, Number


def _ratio(new: list[float], old: list[float]) -> list[float]:
    return [math.exp(min(max(n - o, -20.0), 20.0)) for n, o in zip(new, old, strict=True)]


def _unbounded(new: list[float], old: list[float]) -> list[float]:
    return [math.exp(n - o) if n - o < 700 else math.inf for n, o in zip(new, old, strict=True)]


def _cut_too_late(new: list[float], old: list[float]) -> list[float]:
    return [min(max(ratio, -20.0), 20.0) for ratio in _unbounded(new, old)]


def _upside_down(new: list[float], old: list[float]) -> list[float]:
    return _ratio(old, new)


EXERCISES: dict[str, Exercise] = {
    "11.1": Number(
        right=2,
        wrong={
            17: "Saves were made on the way. Which was the last one before the worker died?",
            5: "That is the most that can be lost. The last save was more recent.",
            15: "That many are kept.",
            3: "The step that was running had not finished; finished ones are asked for.",
        },
        otherwise="The last save before the worker died, and the steps that were finished after it.",
        because="the save after step 15 comes back; steps 16 and 17 are done again.",
    ),
    "11.2": Choice(
        right="it pauses after the running step",
        wrong={
            "it stops at once": "A step cut in two leaves an actor and a critic of different ages. What is a safe place?",
            "it cancels the running step": "That is what a second Ctrl-C does.",
            "it closes the session": "The session stays usable, with all that was learned.",
            "it takes the running step back": "Nothing is taken back: updates that are done stand.",
        },
        because="the step is finished first, so that train can go on from there; a second Ctrl-C does not wait.",
    ),
    "11.3": Code(
        right=_ratio,
        cases=(([-1.0, -2.0], [-1.0, -1.0]), ([-0.1], [-900.0]), ([-900.0, -1.0], [-0.1, -31.0])),
        wrong=(
            (
                _cut_too_late,
                "The ratio itself is cut: by then exp has overflowed. Cut what exp is given.",
            ),
            (_unbounded, "exp of a difference of 900 is infinite, and infinity times an advantage of 0 is NaN."),
            (_upside_down, "Upside down: the new policy's probability over the old one's."),
        ),
        otherwise="exp of (new - old), where new - old was cut to -20 ... 20.",
        because="one token that was all but impossible cannot make a batch infinite; exp(20) is 5e8, and large enough.",
    ),
}
