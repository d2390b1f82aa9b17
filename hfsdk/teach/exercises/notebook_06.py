"""Rewards: the tokens that count, where the score and the KL go, the state that a rewind brings back."""

from __future__ import annotations

import re

from hfsdk.teach.exercise_kinds import Choice, Code, Exercise


def _distinct(completions: list[str]) -> list[float]:
    return [float(len({w for w in re.findall("[a-z']+", text.lower()) if len(w) > 3})) for text in completions]


def _every(completions: list[str]) -> list[float]:
    return [float(len([w for w in re.findall("[a-z']+", text.lower()) if len(w) > 3])) for text in completions]


def _with_case(completions: list[str]) -> list[float]:
    return [float(len({w for w in re.findall("[A-Za-z']+", text) if len(w) > 3})) for text in completions]


def _with_marks(completions: list[str]) -> list[float]:
    return [float(len({w for w in text.lower().split() if len(w) > 3})) for text in completions]


def _short_too(completions: list[str]) -> list[float]:
    return [float(len(set(re.findall("[a-z']+", text.lower())))) for text in completions]


def _rewards(score: float, kl: list[float], kl_coef: float) -> list[float]:
    return [-kl_coef * k + (score if at == len(kl) - 1 else 0.0) for at, k in enumerate(kl)]


def _on_every_token(score: float, kl: list[float], kl_coef: float) -> list[float]:
    return [score - kl_coef * k for k in kl]


def _paid_for(score: float, kl: list[float], kl_coef: float) -> list[float]:
    return [kl_coef * k + (score if at == len(kl) - 1 else 0.0) for at, k in enumerate(kl)]


def _last_token_free(score: float, kl: list[float], kl_coef: float) -> list[float]:
    return [*(-kl_coef * k for k in kl[:-1]), score]


def _at_first_token(score: float, kl: list[float], kl_coef: float) -> list[float]:
    return [-kl_coef * k + (0.0 if at else score) for at, k in enumerate(kl)]


EXERCISES: dict[str, Exercise] = {
    "06.1": Choice(
        right="a file that the cell wrote",
        wrong={
            "the optimizer's moments": "They are in the snapshot: the next step after a rewind is bit-equal.",
            "the place in the prompts": "It is in the snapshot: the stream goes on from there.",
            "the reward function": "Its version is in the snapshot, which is why notebook cells declare the new one again.",
            "the critic's weights": "Every trained role is in the snapshot, not the actor alone.",
        },
        because="a snapshot holds what belongs to the session; your files and variables are yours.",
    ),
    "06.2": Code(
        right=_distinct,
        cases=((["Good film, good film!", "a an the", "", "Film film FILM story"],), (["like like like", "great, great. Great"],)),
        wrong=(
            (_every, "A word that is repeated counts each time: that is the hole that the policy found."),
            (_short_too, "Words of up to three letters count too: that is the other hole."),
            (_with_case, "Film and film count as two words."),
            (_with_marks, "great, and great. count as two words: marks are no letters."),
        ),
        otherwise="Distinct words, in lower case, of at least four letters; letters and apostrophes make a word.",
        because="repeating pays nothing, and neither do short words, capitals or marks. The next hole is yours to find.",
    ),
    "06.3": Code(
        right=_rewards,
        cases=((1.0, [0.1, 0.2, 0.3], 0.5), (-2.0, [0.0, 1.0], 0.1), (0.5, [0.4], 1.0)),
        wrong=(
            (_on_every_token, "The score is paid at every token: long responses earn most. It belongs to one token."),
            (_paid_for, "Straying from the reference is paid for here; it shall cost."),
            (_last_token_free, "At the last token the KL is left out; it costs there too."),
            (_at_first_token, "The score is known when the response is complete."),
        ),
        otherwise="Every token costs kl_coef x its KL, and one of them earns the score.",
        because="every token pays for its KL, and the score arrives with the last one.",
    ),
}
