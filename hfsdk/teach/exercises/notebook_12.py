"""Come back later: the costs of a dead kernel and of a dead machine, a reward that needs nothing from outside."""

from __future__ import annotations

from hfsdk.teach.exercise_kinds import Choice, Code, Exercise, Number


def _full_stop(completions: list[str]) -> list[float]:
    return [1.0 if text.rstrip().endswith(".") else 0.0 for text in completions]


def _with_spaces(completions: list[str]) -> list[float]:
    return [1.0 if text.endswith(".") else 0.0 for text in completions]


def _anywhere(completions: list[str]) -> list[float]:
    return [1.0 if "." in text else 0.0 for text in completions]


def _of_the_first(completions: list[str]) -> list[float]:
    return [1.0 if completions[0].rstrip().endswith(".") else 0.0]


EXERCISES: dict[str, Exercise] = {
    "12.1": Number(
        right=0,
        wrong={
            1: "That would be a worker's death. Which process takes the steps?",
            3: "Steps went on while no kernel was there: who took them?",
            12: "Nothing starts again: what was trained is in the workers, which live.",
            15: "Nothing starts again: what was trained is in the workers, which live.",
        },
        otherwise="What has the kernel to do for a step of a kept run?",
        because="the run goes on beside the controller; no step of it needs a kernel.",
    ),
    "12.2": Choice(
        right="the last save in the run's folder",
        wrong={
            "the step it was in": "That needs weights and optimizers as they were: where did these lie?",
            "the batches of the last kernel": "Their columns lay with the workers, which are gone.",
            "the last snapshot": "A snapshot is a copy in the workers' memory: quick to take, and gone with them.",
        },
        because="files are all that is left; make the session again and session.load(folder), or train(resume=folder).",
    ),
    "12.3": Code(
        right=_full_stop,
        cases=((["A film.", "A film", "A film. ", "A. film"],), (["No", "Yes."],)),
        wrong=(
            (_with_spaces, "A space after the full stop hides it: strip the end first."),
            (_anywhere, "A full stop in the middle is not the end."),
            (_of_the_first, "One number for every completion, in their order."),
        ),
        otherwise="1.0 for each completion whose last character, spaces aside, is a full stop.",
        because="it uses its argument alone, so that its copy beside the controller does the same.",
    ),
}
