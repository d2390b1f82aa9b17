"""Why?: six broken runs, and a reward that says where it cannot tell."""

from __future__ import annotations

from hfsdk.teach.exercise_kinds import Choice, Code, Exercise, Number


def _where_there_is_text(completions: list[str]) -> list[float | None]:
    return [text.count("!") / len(text) if text.strip() else None for text in completions]


def _nothing(completions: list[str]) -> list[float | None]:
    return [text.count("!") / len(text) if text.strip() else 0.0 for text in completions]


def _only_empty(completions: list[str]) -> list[float | None]:
    return [text.count("!") / len(text) if text else None for text in completions]


CAUSES = {
    "a weight changed on its way": "Were the weights proven? actor.last_reshard.verified says so.",
    "a forgotten temperature": "Which experiment takes the gap away? Look at the rows of gap.to_pandas().",
    "weights of before an update": "Compare batch['policy_version'] with actor.version.",
    "a weight that is infinite": "Does the verdict name a parameter?",
    "a loss that divides by zero": "Whose loss is not a number: all samples', or one's? And are the weights finite?",
    "a reward that follows length": "What do the scores go with? reward.probe(batch) has the correlations.",
}
"""Possible mistakes, and the place to look before one names them."""


def _cause(right: str, because: str) -> Choice:
    return Choice(right=right, wrong={cause: hint for cause, hint in CAUSES.items() if cause != right}, because=because)


EXERCISES: dict[str, Exercise] = {
    "13.1": _cause("a weight changed on its way", "one box of one parameter has another fingerprint than the one that left."),
    "13.2": _cause("a forgotten temperature", "scored at 0.7, the trainer finds the log-probs that the rollout wrote."),
    "13.3": _cause(
        "weights of before an update", "with the weights of then the gap is rounding; the trainer has taken an update since."
    ),
    "13.4": _cause("a weight that is infinite", "the layer's output is infinite on one rank before any loss is computed."),
    "13.5": _cause(
        "a loss that divides by zero", "columns and weights are finite, and one sample of one mini-batch has a loss that is not."
    ),
    "13.6": _cause("a reward that follows length", "the ranks of scores are all but those of the lengths."),
    "13.7": Number(
        right=0,
        wrong={
            1: "Is there a change below 2^32 that an odd number takes to a multiple of 2^32?",
            2: "Is there a change below 2^32 that an odd number takes to a multiple of 2^32?",
        },
        otherwise="The change of one number's bits, times an odd number, modulo 2^32: when is nothing left of it?",
        because="an odd number has an inverse modulo 2^32, so that no change but none gives 0.",
    ),
    "13.8": Code(
        right=_where_there_is_text,
        cases=((["!", "", "no", "a!"],), (["  ", "!!"],), ([""],)),
        wrong=(
            (_nothing, "0 is a score, and a bad one here. What says that there is none?"),
            (_only_empty, "Spaces alone are no text either."),
        ),
        otherwise="The share of exclamation marks among the characters of each completion, None where it has no text.",
        because="samples without a score are left out of the group's mean, of the loss and of the statistics.",
    ),
}
