"""Kinds of right answers, and hints to wrong ones: numbers, words, functions, losses, steps.

Each kind has ``hint(answer)``, which is ``None`` for a right answer, and never says what the right one is. Typical wrong
answers are declared with it, each with the hint that leads on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from hfsdk.core.checks import shown

NOTHING_YET = "It does nothing yet: write its body in place of ... and run the cell again."
"""The hint to a function, loss or step that was not written yet."""


class Exercise(Protocol):
    """An exercise, which says something to an answer."""

    @property
    def because(self) -> str:
        """The reply to a right answer: why it is right."""

    def hint(self, answer: Any) -> str | None:
        """Return a hint for a wrong answer, ``None`` for a right one."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """The answer is a number."""

    right: float
    wrong: Mapping[float, str]
    """Typical wrong answers, and the hint to each."""
    otherwise: str
    """The hint to any other."""
    because: str
    tolerance: float = 0.01
    """Relative; absolute where the right answer is 0."""

    def hint(self, answer: Any) -> str | None:
        """Return a hint for a wrong answer, ``None`` for a right one."""
        if isinstance(answer, bool) or not isinstance(answer, Real):
            return f"The answer is a number; this is {shown(answer)}."
        try:
            number = float(answer)
        except OverflowError:
            return self.otherwise
        if self._near(number, self.right):
            return None
        return next((hint for wrong, hint in self.wrong.items() if self._near(number, wrong)), self.otherwise)

    def _near(self, answer: float, value: float) -> bool:
        return math.isclose(answer, value, rel_tol=self.tolerance, abs_tol=0.0 if value else self.tolerance)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The answer is one of some words."""

    right: str
    wrong: Mapping[str, str]
    """The other words, and the hint to each."""
    because: str

    def hint(self, answer: Any) -> str | None:
        """Return a hint for a wrong answer, ``None`` for a right one."""
        word = answer.strip().strip(".") if isinstance(answer, str) else ""
        word = next((choice for choice in (self.right, *self.wrong) if choice.casefold() == word.casefold()), word)
        if word == self.right:
            return None
        if word in self.wrong:
            return self.wrong[word]
        return f"The answer is one of {', '.join(map(repr, sorted([self.right, *self.wrong])))}; this is {shown(answer)}."


@dataclass(frozen=True, kw_only=True)
class Code:
    """The answer is a function; it is called, and must return the same as the right one."""

    right: Callable[..., Any]
    cases: tuple[tuple[Any, ...], ...]
    """Arguments of each call; on one of them at least, every wrong function differs."""
    wrong: tuple[tuple[Callable[..., Any], str], ...]
    """Functions as they are often written first, and the hint to each."""
    otherwise: str
    because: str

    def hint(self, answer: Any) -> str | None:
        """Return a hint for a wrong answer, ``None`` for a right one."""
        if not callable(answer):
            return f"The answer is a function; this is {shown(answer)}. Write it with def, and give its name."
        results: list[Any] = []
        for case in self.cases:
            result = _called(answer, deepcopy(case))  # an answer may work in place
            if isinstance(result, _Raised):
                return f"Called with {_listed(case)} it raises {result}."
            results.append(result)
        return NOTHING_YET if all(result is None or result is ... for result in results) else self._judged(results)

    def _judged(self, results: list[Any]) -> str | None:
        if self._same(results, self.right):
            return None
        for function, hint in self.wrong:
            if self._same(results, function):
                return hint
        for case, result in zip(self.cases, results, strict=True):
            if not _equal(result, self.right(*deepcopy(case))):
                return f"Called with {_listed(case)} it returns {shown(result)}, which is not it. {self.otherwise}"
        return self.otherwise

    def _same(self, results: list[Any], function: Callable[..., Any]) -> bool:
        return all(_equal(result, function(*deepcopy(case))) for case, result in zip(self.cases, results, strict=True))


NEEDS_TORCH = "A loss is looked at with torch, which is not installed here; pip install torch, or ask where the engines are."
ONE_NUMBER = "It returns one number. Return a value per token: the engine averages."


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The answer is a loss ``f(out, b)``: a value per token, whose gradient counts too."""

    right: Callable[..., Any]
    wrong: tuple[tuple[Callable[..., Any], str], ...]
    otherwise: str
    because: str

    def hint(self, answer: Any) -> str | None:
        """Return a hint for a wrong answer, ``None`` for a right one."""
        if not callable(answer):
            return f"The answer is a function of out and b; this is {shown(answer)}."
        if find_spec("torch") is None:  # a kernel without engines
            return NOTHING_YET if _called(answer, (None, None)) is None else NEEDS_TORCH
        result = _called(_value_and_gradient, (answer,))
        if isinstance(result, _Raised):
            return f"Called as a loss it raises {result}."
        if result is None:
            return NOTHING_YET
        if result == ONE_NUMBER:
            return ONE_NUMBER
        if _equal(result, _value_and_gradient(self.right)):
            return None
        for function, hint in self.wrong:
            if _equal(result, _value_and_gradient(function)):
                return hint
        return self.otherwise


@dataclass(frozen=True, kw_only=True)
class StepCode:
    """The answer is an algorithm; its step runs in a simulated session, and its calls are counted."""

    calls: Mapping[str, int]
    """How often each of these calls is made, e.g. ``{"critic.update": 0}``; others are free."""
    wrong: tuple[tuple[Callable[[list[str]], bool], str], ...]
    """Typical mistakes in a list of calls, each with its hint; the first that holds is given."""
    because: str
    order: Callable[[list[str]], bool] = lambda calls: True
    """The condition on the order of the calls, besides."""

    def hint(self, answer: Any) -> str | None:
        """Return a hint for a wrong answer, ``None`` for a right one."""
        if not callable(_called(getattr, (answer, "step", None))):
            return f"The answer is an algorithm, a class with a method step; this is {shown(answer)}."
        calls = _called(calls_of_step, (answer,))
        if isinstance(calls, _Raised):
            return f"In a simulated session its step raises {calls}."
        if not calls:
            return NOTHING_YET
        if all(calls.count(name) == times for name, times in self.calls.items()) and self.order(calls):
            return None
        said = next((hint for holds, hint in self.wrong if holds(calls)), "Compare with what is asked for.")
        return f"{said} Its calls are {', '.join(calls)}."


def calls_of_step(algorithm: Any) -> list[str]:
    """Run one step of an algorithm, or of a class of them, on a virtual clock; return the calls of models in their order."""
    from hfsdk.session.session import Session

    with Session.simulated("1x2 A100-80GB") as session:
        actor = session.actor("tiny")
        session.critic("tiny")
        session.reference(actor)
        session.reward("tiny")
        prompts = session.prompts([[1, 2, 3]] * 8, batch_size=8)
        (algorithm() if isinstance(algorithm, type) else algorithm).step(session.models, prompts[0])
        flows = [session.dataflow[k].snapshot() for k in range(session.dataflow.step + 1)]
        return [str(call) for flow in flows for call in flow if call.role in ROLES]


ROLES = ("actor", "critic", "reference", "reward")


class _Raised(str):
    """The error that a function of the reader's raised, in words."""


def _called(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # the reader's own code, whatever it raises
        return _Raised(f"{type(error).__name__}: {error}")


def _value_and_gradient(loss: Callable[..., Any]) -> list[list[float]] | str | None:
    """Per-token values of a loss on six tokens, and their sum's gradient by the log-probs; None where it returns nothing.

    Returns `ONE_NUMBER` where it returns that.
    """
    import torch

    log_probs = torch.tensor([-0.5, -1.0, -2.0, -0.5, -1.0, -2.0], requires_grad=True)
    columns = {
        "old_log_probs": torch.tensor([-0.5, -1.5, -1.5, -0.5, -1.5, -1.5]),
        "ref_log_probs": torch.tensor([-0.7, -0.9, -2.5, -0.4, -1.5, -2.0]),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
    }
    values = loss(SimpleNamespace(log_probs=log_probs), columns)
    values = values[0] if isinstance(values, tuple) else values  # with metrics, as losses may
    if values is None:
        return None
    if values.ndim == 0:
        return ONE_NUMBER
    (gradient,) = torch.autograd.grad(values.sum(), log_probs)
    return [values.expand(6).tolist(), gradient.tolist()]


def _equal(answer: Any, other: Any) -> bool:
    if isinstance(other, list) and any(isinstance(row, list) for row in other):
        answer = answer.tolist() if hasattr(answer, "tolist") else answer
        return isinstance(answer, list | tuple) and len(answer) == len(other) and all(map(_equal, answer, other))
    try:
        a, b = np.asarray(answer, dtype=float), np.asarray(other, dtype=float)
    except Exception:  # whatever the reader's object says when it is asked for a number
        return False
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True))


def _listed(arguments: tuple[Any, ...]) -> str:
    return ", ".join(map(shown, arguments))
