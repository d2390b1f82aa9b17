"""Hypothesis strategies of a callable's arguments: mostly good ones, one or two of them of any value of its type or wrong."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import operator
import pathlib
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
from hypothesis import strategies as st

from .inventory import Target, names
from .values import raises, safe_text, wrong
from .world import CLUSTER, MAKERS, TEXTS, World, my_loss, num_rows, score


class Stage:
    """Where the world stands that strategies take our own types from."""

    world = World()


def _ours(name: str) -> st.SearchStrategy[Any]:
    return st.builds(lambda: Stage.world.get(name))


def _fresh(make: Any) -> st.SearchStrategy[Any]:
    return st.builds(make)


GOOD: dict[str, st.SearchStrategy[Any]] = {
    "source": _fresh(lambda: list(TEXTS)),
    "Session.pairs.source": _fresh(lambda: [{"prompt": "a", "chosen": "b", "rejected": "c"}]),
    "Session.reward.source": st.just(score),
    "Session.cost.source": st.just(score),
    "Session.reference.source": _ours("ActorModel"),
    "Session.train.prompts": _ours("PromptStream"),
    "Session.compare.prompts": _ours("PromptStream"),
    "Session.compare.algorithms": _fresh(lambda: [Stage.world.get("PPO")]),
    "Session.evaluate.prompts": _ours("PromptStream"),
    "Session.batch.columns": _fresh(lambda: {"prompt": [[1, 2]], "response": [[3]]}),
    "Session().runtime": _ours("Runtime"),
    "Session.load.folder": st.just("saved"),
    "Session.rewind.snapshot": _ours("Snapshot"),
    "Session.fork.snapshot": _ours("Snapshot"),
    "Session.forget.snapshot": _ours("Snapshot"),
    "Session.place.what": st.sampled_from(["colocate", "split"]),
    "Session.simulated.cluster": st.just(CLUSTER),
    "ActorModel.generate.prompts": _ours("PromptStream").map(lambda stream: stream[0]),
    "ActorModel.chat.message": st.just("hello"),
    "ModelSpec.preset.name": st.just("llama3-1b"),
    "WhatIf.sweep.name": st.sampled_from(["devices", "prompts"]),
    "Batch.text.column": st.just("response"),
    "Batch.alias.source": st.just("scores"),
    "Batch.join.columns": _fresh(lambda: {"other": "scores"}),
    "Batch.with_columns.columns": _fresh(lambda: {"mine": [1.0, 2.0]}),
    "model": st.just("tiny"),
    "batch_size": st.just(2),
    "steps": st.just(1),
    "seeds": _fresh(lambda: [0]),
    "folder": st.just("out"),
    "path": st.just("out.html"),
    "role": st.just("actor"),
    "rank": st.just(0),
    "fn": st.just(num_rows),
    "reads": _fresh(lambda: ["prompt"]),
    "writes": _fresh(lambda: ["mine"]),
    "loss": st.just(my_loss),
    "name": st.just("mine"),
    "names": st.just("scores"),
    "options": _fresh(dict),
    "k": st.just(0),
    "key": st.just("scores"),
    "row": st.just(0),
    "rows": _fresh(lambda: [0, 1]),
    "limit": st.just(1.0),
    "lr": st.just(0.1),
    "algorithm": _ours("PPO"),
    "prompts": _ours("PromptStream").map(lambda stream: stream[0]),
    "models": _ours("Models"),
    "listener": st.just(lambda *event: None),
    "num": st.just(3),
}  # fmt: skip
"""``target.parameter``, or a parameter of any: what to give where another argument is the wrong one."""

OWN = {"PerfModel.fit.measured": wrong()}
"""Parameters whose type is a Protocol that tells no instance."""

BOUNDED = {"Session.train.steps": 2, "Session.compare.steps": 1, "Session.compare.seeds": 2}
"""Work that a user may ask for at length; more is not given, because it would be done."""

STARTS_RAY = ("Session()",)


def _functions() -> st.SearchStrategy[Any]:
    return st.sampled_from([score, num_rows, my_loss, raises, lambda *args, **options: True, len])


@cache
def register() -> None:
    """Teach hypothesis our own types."""
    known = names()
    for name in MAKERS:
        if name in known:
            st.register_type_strategy(known[name], _ours(name))
    st.register_type_strategy(collections.abc.Callable, _functions())
    st.register_type_strategy(np.ndarray, st.sampled_from([[1, 0], [0.5], [], [True, False]]).map(np.array))
    st.register_type_strategy(pathlib.Path, safe_text().map(pathlib.Path))
    st.register_type_strategy(str, safe_text())
    st.register_type_strategy(object, wrong())


def typed(target: Target, parameter: inspect.Parameter) -> st.SearchStrategy[Any]:
    """Return values of the type that a parameter is declared with.

    Raises:
        Exception: hypothesis knows none.
    """
    register()
    hint = target.hints[parameter.name]
    if f"{target.name}.{parameter.name}" in OWN:
        return OWN[f"{target.name}.{parameter.name}"]
    untold = getattr(hint, "_is_protocol", False) and not getattr(
        hint, "_is_runtime_protocol", False
    )  # nobody can tell an instance
    return wrong() if hint in (Any, object) or untold else st.from_type(_plain(hint))


def _plain(hint: Any) -> Any:
    """Return a type without ``Any``, of which hypothesis knows no values: everything is an object."""
    parts = get_args(hint)
    if hint is Any:
        return object
    if get_origin(hint) is Annotated:  # its bounds are what is tried
        return _plain(parts[0])
    if not parts or get_origin(hint) in (Literal, collections.abc.Callable):
        return hint
    if get_origin(hint) is UnionType:
        return functools.reduce(operator.or_, map(_plain, parts))
    return hint.copy_with(tuple(map(_plain, parts))) if hasattr(hint, "copy_with") else get_origin(hint)[tuple(map(_plain, parts))]


def without_strategy(target: Target) -> dict[str, str]:
    """Return the parameters for which there is none, and why."""
    found = {}
    for parameter in target.parameters:
        try:
            typed(target, parameter).validate()
        except Exception as error:  # whatever hypothesis says of it
            found[parameter.name] = f"{parameter.annotation}: {type(error).__name__}: {error}"[:200]
    return found


def _good(target: Target, parameter: inspect.Parameter) -> st.SearchStrategy[Any]:
    for key in (f"{target.name}.{parameter.name}", parameter.name):
        if key in GOOD:
            return GOOD[key]
    return typed(target, parameter)


@st.composite
def arguments(draw: st.DrawFn, target: Target) -> dict[str, Any]:
    """Draw a value for each parameter that is given one, by name."""
    parameters = target.parameters
    if not parameters:
        return {}
    wild = draw(st.sets(st.integers(0, len(parameters) - 1), min_size=1, max_size=2))
    given: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        optional = parameter.default is not parameter.empty or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if number in wild:
            given[parameter.name] = _bounded(target, parameter, draw(typed(target, parameter) | wrong() | wrong()))
        elif not optional or f"{target.name}.{parameter.name}" in GOOD:
            given[parameter.name] = draw(_good(target, parameter))
    return _without_ray(target, given)


def _bounded(target: Target, parameter: inspect.Parameter, value: Any) -> Any:
    most = BOUNDED.get(f"{target.name}.{parameter.name}")
    if most is None:
        return value
    if isinstance(value, numbers.Real) and value > most:
        return most
    return [0] if isinstance(value, collections.abc.Sequence) and not isinstance(value, str) and len(value) > most else value


def _without_ray(target: Target, given: dict[str, Any]) -> dict[str, Any]:
    """Keep a session from being started on real workers: with wrong ``devices`` alone it is refused before."""
    if target.name not in STARTS_RAY:
        return given
    devices = given.get("devices")
    would = devices is None or (isinstance(devices, str) and (devices == "auto" or ":" in devices))
    would |= isinstance(devices, numbers.Number | np.bool_) or hasattr(devices, "__index__")
    if would and given.get("runtime") is None:
        given["runtime"] = Stage.world.get("Runtime")
        Stage.world.forget("Runtime")
    return given


def bind(target: Target, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return what to call with: positional arguments and those by name."""
    args: list[Any] = []
    options: dict[str, Any] = {}
    for parameter in target.parameters:
        if parameter.name not in given:
            continue
        value = given[parameter.name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            args.append(value)
        elif parameter.kind is parameter.VAR_KEYWORD:
            options |= value if _named(value) else {"x": value}
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            args.append(value)
        else:
            options[parameter.name] = value
    spread = any(p.kind is p.VAR_POSITIONAL for p in target.parameters)
    if spread:  # what stands before them goes by place
        before = [p.name for p in target.parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name in options]
        args = [options.pop(name) for name in before] + args
    return args, options


def _named(value: Any) -> bool:
    return type(value) is dict and all(isinstance(key, str) for key in value)
