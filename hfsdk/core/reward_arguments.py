"""The arguments of a reward function: TRL's ``f(prompts, completions, **columns)``, or the completions alone under any name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hfsdk.core.errors import OptionError

FORMS = "def {name}(prompts, completions, **columns), or def {name}(completions); return one number per completion"
"""The forms of a reward function, for messages."""

GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments that every reward function gets, besides the data's columns."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_reward_function(function: Callable[..., Any], kind: str) -> None:
    """Check that a function takes completions: by that name, or as its one argument.

    Raises:
        OptionError: it does not; says what it takes.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C
        raise OptionError(
            f"the {kind} function {name} does not show its arguments; wrap it: {FORMS.format(name='score')}"
        ) from None
    parameters = signature.parameters
    by_name = "completions" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not by_name and _sole_argument(parameters) is None:
        forms = FORMS.format(name=name if name.isidentifier() else "score")
        raise OptionError(f"the {kind} function {name}{signature} takes no completions, neither by name nor alone: {forms}")


def arguments_of(function: Callable[..., Any], values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the named arguments of a reward function, out of the values there are.

    Args:
        function: the reward, as :func:`check_reward_function` wants it.
        values: prompts, completions, completion_ids and the data's columns. A function of one argument under a name that is not
            among them, or that takes no columns, gets the completions there.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    sole = None if "completions" in parameters else _sole_argument(parameters)
    # A function of one argument means the completions by it, whatever its name, unless it takes columns and one is called so.
    if sole is not None and not (takes_any and sole in values):
        named = {name: value for name, value in values.items() if name != sole and (takes_any or name in parameters)}
        return [values["completions"]], named
    first = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and name in values]
    named = {name: value for name, value in values.items() if name not in first and (takes_any or name in parameters)}
    return [values[name] for name in first], named


def check_columns(function: Callable[..., Any], name: str, columns: Collection[str]) -> str:
    """Return in words the arguments that a reward function needs and does not get; ``""`` where none lacks.

    Args:
        function: the reward, as :func:`check_reward_function` wants it.
        name: the reward's name in the message.
        columns: columns of the data, in addition to :data:`GIVEN`.
    """
    parameters = inspect.signature(function).parameters
    kinds = (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind in kinds]
    sole = None if "completions" in parameters else _sole_argument(parameters)
    missing = [argument for argument in needed if argument != sole and argument not in GIVEN and argument not in columns]
    if not missing:
        return ""
    lacks = ", ".join(map(repr, missing))
    takes = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters.values())
    example = ", ".join(f"{argument!r}: [...]" for argument in ("prompt", *missing))
    return (
        f"{name}({takes}) needs {lacks}, which the data does not have; it is given {', '.join(GIVEN)} and the columns "
        f"{', '.join(columns) or '(none)'}. Bring it along with the prompts, e.g. session.prompts({{{example}}}, column='prompt'), "
        f"add it with batch.with_columns({missing[0]}=[...]), or give the argument a default."
    )


def _sole_argument(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Return the name of the one argument that a function must be given, if it is one by position and not the prompts."""
    needed = [p for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    first = next(iter(parameters.values()), None)
    alone = len(needed) == 1 and needed[0] is first and first.kind in _POSITIONAL
    return needed[0].name if alone and needed[0].name not in GIVEN else None
