"""``hf.testing.exercise``: finds an exercise by its number and judges an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.errors import OptionError
from hfsdk.teach.exercise_kinds import NOTHING_YET
from hfsdk.teach.exercises import EXERCISES

UNANSWERED = "Put your answer in place of ... and run the cell again; a wrong one gets a hint."


@dataclass(frozen=True)
class Feedback:
    """The reply of an exercise to an answer; true where the answer is right."""

    number: str
    """The exercise, e.g. ``"04.1"``: notebook and place."""
    right: bool
    text: str
    """Why it is right, or a hint."""
    blank: bool = False
    """Whether nothing was written yet."""

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        return f"{self.number} {'right' if self.right else 'open' if self.blank else 'not yet'}: {self.text}"

    __repr__ = __str__


def exercise(number: str, answer: Any = ...) -> Feedback:
    """Look at an answer to an exercise of a notebook; a wrong one gets a hint, never the answer.

    Args:
        number: the numbers of the notebook and of the exercise in it, e.g. ``"04.1"``.
        answer: the answer: a number, a word, a function, or an algorithm; ``...`` is not answered yet.

    Returns:
        The reply, as a text; it is true where the answer is right.

    Raises:
        OptionError: there is no such exercise.
    """
    if isinstance(number, str) and number[1:2] == ".":
        number = f"0{number}"  # as its title has it
    entry = EXERCISES.get(number) if isinstance(number, str) else None
    if entry is None:
        of_notebook = [name for name in EXERCISES if isinstance(number, str) and name[:2] == number[:2]]
        listed = ", ".join(of_notebook or EXERCISES)
        raise OptionError(f"number must be an exercise's; got {shown(number)}; there are {listed}")
    if answer is None or answer is ... or (isinstance(answer, str) and not answer.strip()):
        return Feedback(number, False, UNANSWERED, blank=True)
    hint = entry.hint(answer)
    return Feedback(number, hint is None, entry.because if hint is None else hint, blank=hint == NOTHING_YET)
