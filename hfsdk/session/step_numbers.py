"""Numbers of a step that an algorithm or a metric of the user's returned: floats by name, or an error that says whose they are."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from hfsdk.core.batch import Batch
from hfsdk.core.errors import OptionError, SimulatedValueError
from hfsdk.core.rows import Row
from hfsdk.session.history_log import ORDER

Metric = Callable[[Batch], Mapping[str, float] | float]


def own_metric(metric: Metric, batch: Batch, others: Container[str]) -> dict[str, float]:
    """Return what a metric of the user's says of a step's batch; one number has the function's name.

    Args:
        metric: the function.
        batch: the step's.
        others: names of numbers that the step has already, the algorithm's and other metrics'.

    Raises:
        OptionError: it returned no numbers, or one of a name that is taken.
    """
    value = metric(batch)
    name = getattr(metric, "__name__", type(metric).__name__)
    found = numbers_of(value if isinstance(value, Mapping) else {name: value}, f"the metric {name}", (float,))
    if taken := [key for key in found if key in others]:
        raise OptionError(
            f"the metric {name} calls a number {taken[0]!r}, which the algorithm or another metric gives already: call the "
            "function, or the key of the dict that it returns, something else"
        )
    return found


TAKEN = frozenset({
    "kind", "branch", "parent", "algorithm", "snapshot", "role", "line", "loss_function", "updates", "metrics", "step", "seconds",
    ORDER,
})  # fmt: skip
"""Columns of the history that no number of the user's may have the name of."""


def numbers_of(numbers: Any, who: str, kept: tuple[type, ...] = (int, float, str, type(None))) -> Row:
    """Return the numbers of a step by name; what is of no kept type, e.g. a tensor, as a float.

    Raises:
        OptionError: they are none, or the history has a column of this name already.
    """
    if not isinstance(numbers, Mapping):
        raise OptionError(f"{who} must return a dict of numbers by name; it returned {type(numbers).__name__}")
    row: Row = {}
    for key, value in numbers.items():
        if key in TAKEN:
            raise OptionError(f"{who} calls a number {key!r}, which is a column of the history already; give it another name")
        try:
            row[str(key)] = value if type(value) in kept else float(value)
        except SimulatedValueError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(value).__name__
            raise OptionError(f"{who} must return a number or a dict of numbers; {key!r} is of type {kind}") from error
    return row
