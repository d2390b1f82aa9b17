"""The exercises of the notebooks: solutions pass, each typical wrong answer gets its own hint, and no hint tells the answer."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.teach.exercise_kinds import NOTHING_YET, Choice, Code, Loss, Number, StepCode
from hfsdk.teach.exercises import EXERCISES
from hfsdk.teach.grading import UNANSWERED

FOLDER = Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(FOLDER / "solutions"))
SOLUTIONS = {
    number: answer
    for path in sorted((FOLDER / "solutions").glob("notebook_*.py"))
    for number, answer in importlib.import_module(path.stem).ANSWERS.items()
}
WRONG = [(number, *pair) for number, e in EXERCISES.items() if isinstance(e, Number | Choice) for pair in e.wrong.items()]
WRONG += [(number, *pair) for number, e in EXERCISES.items() if isinstance(e, Code | Loss) for pair in e.wrong]


@each("number", EXERCISES)
def test_the_solution_is_right(number):
    found = hf.testing.exercise(number, SOLUTIONS[number])
    assert found, str(found)
    assert found.text == EXERCISES[number].because


@each("number, wrong, hint", WRONG)
def test_a_typical_wrong_answer_gets_its_hint(number, wrong, hint):
    found = hf.testing.exercise(number, wrong)
    assert not found
    assert found.text == hint


class NoCritic(hf.PPO):
    """RLOO's calls, as a PPO."""

    def step(self, models, prompts):
        return hf.RLOO(kl_coef=0.1).step(models, prompts)


class Twice(hf.PPO):
    """Two steps in one."""

    def step(self, models, prompts):
        super().step(models, prompts)
        return super().step(models, prompts)


class Passes(hf.PPO):
    """PPO with one call of the actor more."""

    def step(self, models, prompts):
        batch = models.actor.generate(prompts)
        models.actor.compute_log_probs(batch)
        return super().step(models, prompts)


class NoReference(hf.PPO):
    """Takes the rollout's log-probs, and leaves out the reference too."""

    def step(self, models, prompts):
        others = SimpleNamespace(actor=models.actor, critic=models.critic, reward=models.reward)
        return hf.PPO(old_log_probs="rollout", kl_coef=0.0).step(others, prompts)


class GeneratesAfter(hf.PPO):
    """Asks for the next batch after the updates."""

    def step(self, models, prompts):
        step = super().step(models, prompts)
        models.actor.generate(prompts)
        return step


class GeneratesFirst(hf.PPO):
    """Asks for the next batch before this one is prepared."""

    def step(self, models, prompts):
        models.actor.generate(prompts)
        return super().step(models, prompts)


WRONG_STEPS = [
    ("00.3", hf.PPO, "as often as before"),
    ("00.3", Twice, "do not generate anew"),
    ("02.3", hf.PPO, "one generation only"),
    ("02.3", GeneratesAfter, "waits for their weights"),
    ("02.3", GeneratesFirst, "before this one is prepared"),
    ("04.3", hf.PPO, "still there"),
    ("04.3", NoReference, "leaves out the reference"),
    ("05.3", hf.PPO, "still asked or trained"),
    ("05.3", NoCritic, "one generation only"),
    ("09.3", hf.PPO, "still learns"),
    ("09.3", NoCritic, "gone altogether"),
]


@each("number, wrong, words", WRONG_STEPS)
def test_a_wrong_step_is_told_what_its_calls_are(number, wrong, words):
    found = hf.testing.exercise(number, wrong)
    assert not found
    assert words in found.text
    assert "Its calls are actor.generate, " in found.text


def test_every_exercise_of_a_step_has_wrong_answers_here():
    of_steps = {number for number, e in EXERCISES.items() if isinstance(e, StepCode)}
    assert of_steps == {number for number, _, _ in WRONG_STEPS}


def unwritten(*arguments): ...


class UnwrittenStep(hf.PPO):
    """Still to be written."""

    def step(self, models, prompts): ...


@each("blank", [..., None, "", "  "])
@each("number", EXERCISES)
def test_a_blank_answer_is_refused_kindly(number, blank):
    found = hf.testing.exercise(number, blank)
    assert (found.right, found.blank, found.text) == (False, True, UNANSWERED)
    assert str(found).startswith(f"{number} open: ")


def test_an_answer_may_be_left_out():
    assert hf.testing.exercise("00.1").blank


@each("number", [number for number, e in EXERCISES.items() if isinstance(e, Code | Loss | StepCode)])
def test_a_body_that_is_not_written_yet_is_a_blank(number):
    found = hf.testing.exercise(number, UnwrittenStep if isinstance(EXERCISES[number], StepCode) else unwritten)
    assert (found.right, found.blank, found.text) == (False, True, NOTHING_YET)


class Touchy:
    """Raises whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError("do not touch")


def needs_grad():
    """A tensor that refuses to be an array."""
    return pytest.importorskip("torch").ones(3, requires_grad=True)


ODD = [object(), [], np.zeros(3), {"a": 1}, "what?", needs_grad, 12345.678, 10**400, True, lambda: 1 / 0, lambda *_: "?", object]


@each("number", EXERCISES)
@each("answer", ODD)
def test_any_answer_gets_a_text(number, answer):
    found = hf.testing.exercise(number, answer() if answer is needs_grad else answer)
    assert not found
    assert found.text


@each("number", EXERCISES)
def test_an_answer_that_raises_when_it_is_looked_at_gets_a_text(number):
    assert hf.testing.exercise(number, Touchy()).text


def test_an_error_in_the_answer_is_told_with_what_it_was_called_with():
    found = hf.testing.exercise("04.2", lambda p, m: 1 / (p - p))
    assert found.text == "Called with 2, 3 it raises ZeroDivisionError: division by zero."


def pops(scores):
    """RLOO's advantages, by an answer that uses its list up."""
    total, left = sum(scores), []
    while scores:
        score, others = scores[0], len(left) + len(scores) - 1
        left.append(scores.pop(0) - (total - score) / others)
    return left


def test_an_answer_may_work_on_what_it_is_given():
    assert hf.testing.exercise("05.2", pops)
    assert hf.testing.exercise("05.2", SOLUTIONS["05.2"]), "the cases are as before"


def test_a_loss_may_return_metrics_too():
    assert hf.testing.exercise("01.3", lambda out, b: (SOLUTIONS["01.3"](out, b), {}))


def test_without_torch_a_loss_is_open_or_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert hf.testing.exercise("01.3", lambda out, b: None).blank
    assert "pip install torch" in hf.testing.exercise("01.3", lambda out, b: out.log_probs).text


def test_numbers_may_be_numpys():
    assert hf.testing.exercise("00.1", np.int64(4))
    assert hf.testing.exercise("04.1", np.float32(0.25))


def test_an_unknown_number_lists_those_of_its_notebook():
    with refuses(hf.OptionError, "'04.9'", "04.1, 04.2, 04.3") as caught:
        hf.testing.exercise("04.9", 1)
    assert "00.1" not in str(caught.value)
    with refuses(hf.OptionError, *EXERCISES):
        hf.testing.exercise(4, 1)


def test_hints_do_not_hold_the_answer():
    for number, e in EXERCISES.items():
        if isinstance(e, Number):
            spelled = re.compile(rf"(?<![\d.]){re.escape(f'{e.right:g}')}(?![\d.]*\d)")
            for hint in (*e.wrong.values(), e.otherwise):
                assert not spelled.search(hint), f"{number}: {hint}"
        if isinstance(e, Choice):
            assert all(e.right not in hint for hint in e.wrong.values()), number


def test_solutions_are_those_of_the_exercises():
    assert list(SOLUTIONS) == list(EXERCISES)
