"""The public callables: what ``hf.__all__`` and the submodules name, and the methods of every class that these give."""

from __future__ import annotations

import collections.abc
import functools
import importlib
import inspect
import operator
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import hfsdk as hf
from hfsdk.core.hints import CompletableProperty

MODULES = ("data", "testing", "viz")
"""Submodules of ``hf`` whose functions a user types; those of ``protocols`` are its constants and one class."""

ROOTS = (
    "session.what_if.WhatIf", "session.session.Session", "planner.perf.calibration.Calibration", "configs.explain.Explanation",
    "planner.tails.long_tails.LongTails",
)  # fmt: skip
"""Classes that nothing in ``hf.__all__`` names but a user holds; others are found by what methods return."""

SESSION_HALF = (
    "hfsdk.session", "hfsdk.models", "hfsdk.core.batch", "hfsdk.core.pending", "hfsdk.core.snapshot", "hfsdk.core.functions",
)  # fmt: skip
"""Modules whose callables need a session, kind ``"session"``; all others are ``"pure"``."""

MADE_BY_SESSIONS = (
    "ActorModel", "Batch", "BestCheckpoint", "Calibration", "Census", "Coordinates", "CostModel", "CriticModel", "Dataflows",
    "Demonstrations", "LiveDataflow", "LivePlacement", "LiveTrace", "MemoryUse", "Metrics", "Models", "OneRowMetrics", "Pairs",
    "PromptStream", "ReferenceModel", "ReshardPlan", "ReshardReport", "RewardModel", "Rows", "Run", "Saving", "Snapshot", "Traces",
    "RewardProbe",
    "Value", "Comparison", "Judgement", "Measured", "Move", "Volume", "Step", "SafeStep", "Tokens", "Edge", "Call", "Dataflow",
    "Plan", "History", "Experiment", "Explanation", "FirstBad", "Gap", "Mesh", "RoleSpec", "Span", "WhatIf", "BatchRegistry",
    "LongTails", "SchemeStep", "StepReplay",
)  # fmt: skip

INNER = (
    "ControllerClient", "ColumnRef", "ColumnInfo", "Lease", "Tokenizer", "Host", "CallClient", "Client", "RowStream", "Runtime",
    "Sender", "ModelHandle", "ColumnState",
)  # fmt: skip

ENGINE_SIDE = {
    "BatchRegistry": ("take",),
    "Batch": ("known_lengths", "need", "from_columns", "column_states"),
    "Session": (
        "record", "measured",
    ),
    "WhatIf": ("attempt", "draw", "draw_curve"),
    "RowStream": ("rows", "row_at"),
    "PromptStream": ("token_ids",),
    "TensorBoard": ("start",),
    "WandB": ("start",),
    "MLflow": ("start",),
    "DPO": ("metrics",),
    "OnPolicy": ("metrics",),
    "PolicyLoss": ("surrogate",),
    "Options": ("of",),
    "Step": ("numbers",),
    "Saving": ("run", "run_in_background", "settle"),
    "Move": ("of_layer",),
    "PerfModel": (
        "agree", "costs", "decode", "forward", "gather", "generate_each", "host_task", "method_costs", "move", "onload",
        "optimizer", "planned_reshard", "prefill", "reduced_bytes", "reduction", "reshard", "rewrite", "seconds", "train",
    ),
    "TransferProtocol": ("collectors", "scatter"),
    "ResponseLengths": ("draw",),
    "Trace": ("drains", "of"),
    "Tokens": ("of", "shortened"),
    "Rows": ("append", "amend"),
    "Dataflow": ("of",),
    "CallError": ("fields",),
    "Table": ("get",),
}  # fmt: skip

EXCEPTED: Mapping[str, str] = {
    **{f"{name}()": "made by a session or by a function, never by a user" for name in MADE_BY_SESSIONS},
    **{f"{owner}.{name}": "called by the engine, the session or a picture" for owner, of in ENGINE_SIDE.items() for name in of},
    "algorithms.rlmath": "pure torch inside the engine; its functions take tensors, and torch checks them",
    "algorithms.tensors": "pure torch inside the engine; its functions take tensors, and torch checks them",
    "algorithms.groups": "pure torch inside the engine; its functions take tensors, and torch checks them",
    "algorithms.step": "what steps of algorithms share; called by them",
    "algorithms.losses.check": "raises for its callers",
    "algorithms.losses.check_kl_of_loss": "raises for its callers",
    "algorithms.losses.check_kl_by_ratio": "raises for its callers",
    "algorithms.pass_rate.pass_rates": "what the metric and session.evaluate share; called by them",
    "algorithms.gpg.accurate": "takes tensors, and torch checks them",
    "algorithms.rollout_correction.check_correction": "raises for its callers",
    "algorithms.rollout_correction.rollout_weights": "takes tensors, and torch checks them",
    "algorithms.preferences.check_pairs": "called by losses, inside the engine",
    "algorithms.preferences.pair_metrics": "called by losses, inside the engine",
    "algorithms.preferences.scores_of": "called by losses, inside the engine",
    "algorithms.preferences.log_probs_of": "called by losses, inside the engine",
    "algorithms.step.SafeStep": "made by steps of the algorithm",
    "algorithms.grpo.group_advantages": "takes tensors, and torch checks them",
    "algorithms.rloo.leave_one_out": "takes tensors, and torch checks them",
    "algorithms.opo.over_optimal_baseline": "takes tensors, and torch checks them",
    "algorithms.process.step_ends": "takes tensors, and torch checks them",
    "algorithms.covariance": "what KL-Cov and Clip-Cov share; called by them",
    "algorithms.dpo.dpo_loss": "takes tensors, and torch checks them",
    "algorithms.invariants": "what steps of algorithms share; called by them",
    "algorithms.handles": "what steps of algorithms share; called by them",
    "algorithms.options": "what algorithms are made from",
    "algorithms.aliases": "words of errors",
    "algorithms.filtering": "called by steps of algorithms, or runs where the columns are",
}
"""Name of a callable, a class's constructor (``X()``) or a module -> why it is left out."""

DUNDERS = ("__getitem__", "__contains__")


@dataclass(frozen=True)
class Target:
    """One public callable: a function, a constructor, a method, or the setter of a property."""

    name: str
    """As a user would write it, e.g. ``Session.prompts``, ``Layout()``, ``data.additions``."""
    owner: type | None
    """The class whose instance it is called on; ``None`` for functions, constructors and class methods."""
    call: Callable[..., Any]
    """Takes the owner's instance first, where there is one."""
    parameters: tuple[inspect.Parameter, ...]
    hints: Mapping[str, Any]
    """Type of each parameter; one that cannot be resolved is missing."""
    kind: str
    """``"session"`` or ``"pure"``."""


def modules() -> dict[str, ModuleType]:
    """Return every module of hfsdk that imports here without an engine being loaded."""
    found = {}
    for info in pkgutil.walk_packages(hf.__path__, "hfsdk."):
        if info.name.startswith("hfsdk.engine") or info.name.endswith("__main__"):
            continue
        found[info.name] = importlib.import_module(info.name)
    return found


@cache
def names() -> dict[str, Any]:
    """Return what annotations may name: every class of hfsdk, and the packages that are imported for types alone."""
    import pandas as pd

    found: dict[str, Any] = {}
    for module in modules().values():
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__.startswith("hfsdk"):
                found.setdefault(name, value)
    found |= {"pd": pd, "DataFrame": pd.DataFrame, "np": np, "Any": Any, "Array": np.ndarray, "Path": Path}
    found |= {name: getattr(collections.abc, name) for name in ("Callable", "Iterable", "Mapping", "Sequence")}
    return found


@cache
def targets() -> tuple[Target, ...]:
    """Return every public callable but those excepted, by name."""
    found = {target.name: target for target in everything() if not _excepted(target.name)}
    return tuple(found[name] for name in sorted(found))


def classes() -> list[type]:
    """Return the public classes: those ``hf`` names, and those that their methods return, and so on."""
    known = {name: value for name, value in names().items() if inspect.isclass(value)}
    todo = [value for name in hf.__all__ if inspect.isclass(value := getattr(hf, name))]
    for path in ROOTS:
        module, _, name = path.rpartition(".")
        todo.append(getattr(importlib.import_module(f"hfsdk.{module}"), name))
    seen: list[type] = []
    while todo:
        cls = todo.pop(0)
        if cls in seen or cls.__name__ in INNER or not cls.__module__.startswith("hfsdk"):
            continue
        seen.append(cls)
        for returned in _returned(cls):
            todo += [known[word] for word in re.findall(r"\w+", returned) if word in known]
    return [cls for cls in seen if not getattr(cls, "_is_protocol", False) and not cls.__module__.startswith("hfsdk.engine")]


def _returned(cls: type) -> Iterator[str]:
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        function = value.fget if isinstance(value, property | CompletableProperty) else getattr(value, "__func__", value)
        if inspect.isfunction(function) and (not name.startswith("_") or name in DUNDERS):
            yield str(function.__annotations__.get("return", ""))


def everything() -> Iterator[Target]:
    """Yield every public callable, those excepted too; some more than once."""
    for cls in classes():
        if issubclass(cls, BaseException):
            continue
        yield from _of_class(cls)
    for name in MODULES:
        yield from _of_module(getattr(hf, name), name)
    for path, module in modules().items():
        if path.startswith("hfsdk.algorithms."):
            yield from _of_module(module, path.removeprefix("hfsdk."))
    yield _target("primitive", None, hf.primitive, "session")
    yield _target("doctor", None, hf.doctor, "pure")
    yield _target("explain", None, hf.explain, "pure")
    yield _target("long_tails", None, hf.long_tails, "pure")


def _of_class(cls: type) -> Iterator[Target]:
    kind = "session" if cls.__module__.startswith(SESSION_HALF) else "pure"
    yield _target(f"{cls.__name__}()", None, cls, kind)
    for name in dir(cls):
        if name.startswith("_") and name not in DUNDERS:
            continue
        value = inspect.getattr_static(cls, name)
        if isinstance(value, classmethod | staticmethod):
            yield _target(f"{cls.__name__}.{name}", None, getattr(cls, name), kind)
        elif isinstance(value, property) and value.fset is not None:
            yield _target(f"{cls.__name__}.{name} =", cls, value.fset, kind)
        elif inspect.isfunction(value) and _ours(value):
            yield _target(f"{cls.__name__}.{name}", cls, value, kind)


def _ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("hfsdk")


def _of_module(module: ModuleType, name: str) -> Iterator[Target]:
    own = {k: v for k, v in vars(module).items() if not k.startswith("_") and getattr(v, "__module__", "") == module.__name__}
    for key, value in own.items():
        if inspect.isfunction(value):
            yield _target(f"{name}.{key}", None, value, "pure")
        elif inspect.isclass(value) and key not in hf.__all__ and name.startswith("algorithms"):
            yield _target(f"{name}.{key}()", None, value, "pure")


def _target(name: str, owner: type | None, call: Callable[..., Any], kind: str) -> Target:
    parameters = list(inspect.signature(call).parameters.values())
    if owner is not None:
        parameters = parameters[1:]
    return Target(name, owner, call, tuple(parameters), _hints(call, parameters), kind)


def _hints(call: Callable[..., Any], parameters: list[inspect.Parameter]) -> dict[str, Any]:
    function: Any = inspect.unwrap(call.__init__ if inspect.isclass(call) else call)
    module = importlib.import_module(call.__module__)
    found = {}
    for parameter in parameters:
        text = parameter.annotation
        if text is inspect.Parameter.empty:
            continue
        inherited = [vars(importlib.import_module(base.__module__)) for base in reversed(getattr(call, "__mro__", ()))]
        space = functools.reduce(operator.or_, inherited, names()) | vars(module) | getattr(function, "__globals__", {})
        try:
            found[parameter.name] = eval(text, space) if isinstance(text, str) else text  # an annotation of our own code
        except NameError:
            continue
    return found


def _excepted(name: str) -> bool:
    if any(name == key or name.startswith(f"{key}.") for key in EXCEPTED):
        return True
    owner, _, method = name.rpartition(".")
    cls = names().get(owner)
    if not inspect.isclass(cls):
        return False
    return any(f"{base.__name__}.{method}" in EXCEPTED for base in cls.__mro__)
