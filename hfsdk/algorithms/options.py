"""`Options`: the base of algorithms, losses and advantages. Each option is declared once, its docstring below it.

A class that takes the same options inherits the class that declares them (as `hfsdk.algorithms.ppo.PPO` those of its advantages)
and hands them on whole, with `Options.of`. A function takes them as keywords with `with_options`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, Self, TypeVar, get_type_hints

from hfsdk.algorithms.aliases import check_value, unknown_option
from hfsdk.core.checks import check_fields
from hfsdk.core.errors import OptionError
from hfsdk.core.field_texts import option_lines, options_text

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Array, Column, Ragged, Table

P = ParamSpec("P")
F = TypeVar("F")

RAISES = """

    Raises:
        OptionError: an option is unknown or out of its range.
        ColumnError: a column is missing; at the first look: a number is not finite.
    """


class Options:
    """Base of frozen dataclasses whose fields a user gives: all are checked when made, and unknown ones refused by name."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse an option that does not exist, with more words than Python has.

        Raises:
            OptionError: says the nearest option, or what hfsdk calls that of another library.
        """
        if kwargs.keys() - _names(cls):
            parameters = inspect.signature(cls.__init__).parameters  # a subclass may take what is no field
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                refuse_unknown(cls.__name__, kwargs, [*parameters][1:])
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__.startswith("hfsdk.") and cls.__doc__:
            cls.__doc__ += options_text(cls)

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except OptionError:
            for name in _names(type(self)):
                check_value(type(self).__name__, name, getattr(self, name))
            raise

    @classmethod
    def of(cls, others: Options, **instead: Any) -> Self:
        """Return these options as ``others`` has them: the value of each that both have, the default of the rest.

        Args:
            others: e.g. the algorithm whose advantages or loss this is.
            instead: values to take instead.
        """
        return cls(**{name: getattr(others, name) for name in _names(cls) & _names(type(others))} | instead)


class BatchFunction(Options):
    """A function over whole columns of a batch, with its options; runs where the columns are."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Columns it cannot do without."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Columns it reads besides where the batch has them."""
    gives: ClassVar[tuple[str, ...]] = ()
    judged: ClassVar[tuple[str, ...]] = ()
    """Columns that say which samples were scored; by default all that it reads."""
    like: ClassVar[str] = "response"
    """A column it reads that has as many entries as the response has tokens."""

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        return [*self.needs]

    @property
    def writes(self) -> list[str]:
        """Columns the function writes."""
        return [*self.gives]

    def __call__(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes`, in float32.

        A sample that was not scored (:mod:`hfsdk.core.unscored`) takes no part, as if the batch were without it, and stays marked
        as such in texts; so a loss leaves it out too.

        Raises:
            ColumnError: no sample is scored.
        """
        from hfsdk.core.unscored import scored_rows

        scored = scored_rows({name: table[name] for name in self.judged or table}, table.num_rows)
        if len(scored) == table.num_rows:
            return self.of_scored(table)
        columns, whole = self.of_scored(table.take(scored)), table.ragged(self.like)
        return {name: _spread(column, scored, whole) for name, column in columns.items()}

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return the columns `writes` of samples that were all scored, in float32."""
        raise NotImplementedError

    def over(self, batch: Batch) -> Batch:
        """Return the batch with the columns that the function writes, in a CPU task over all its rows; returns at once."""
        return batch.map(self, reads=self.reads + [name for name in self.takes if name in batch], writes=self.writes)


def _spread(column: Column, scored: Array, whole: Ragged) -> Ragged:
    """Return a per-token column of the scored rows as one of all rows, as long as those of ``whole``, the others' tokens marked."""
    import numpy as np

    from hfsdk.core.table import Ragged
    from hfsdk.core.unscored import NOT_SCORED

    assert isinstance(column, Ragged)
    is_scored = np.isin(np.arange(len(whole)), scored)
    flat = np.full(len(whole.flat), NOT_SCORED, dtype=column.dtype)
    flat[np.repeat(is_scored, whole.lengths)] = column.flat
    return whole.map(flat)


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def refuse_unknown(what: str, names: Iterable[str], existing: Collection[str]) -> None:
    """Raise an OptionError for the first option that does not exist."""
    for name in names:
        if name not in existing:
            raise OptionError(unknown_option(what, name, existing))


class OverBatch(Protocol[P]):
    """A function of a batch and of options."""

    def __call__(self, batch: Batch, *args: P.args, **options: P.kwargs) -> Batch:
        """Return the batch with the columns that the function writes."""
        ...


def with_options(kind: Callable[P, F]) -> Callable[[Callable[[Batch, F], Batch]], OverBatch[P]]:
    """Let a function ``(batch, options)`` take the options as keywords: signature, defaults and texts are those of their class.

    Args:
        kind: the class of the options, a subclass of `Options`.
    """

    def decorated(function: Callable[[Batch, F], Batch]) -> OverBatch[P]:
        hints = get_type_hints(kind)
        parameters = {name: p.replace(annotation=hints[name]) for name, p in inspect.signature(kind).parameters.items()}

        @functools.wraps(function)
        def call(batch: Batch, *args: P.args, **options: P.kwargs) -> Batch:
            refuse_unknown(function.__name__, options, parameters)
            return function(batch, kind(*args, **options))

        whole: Any = call
        (batch, _), returned = inspect.signature(function).parameters.values(), inspect.signature(function).return_annotation
        first = sorted(parameters.values(), key=lambda option: option.default is not option.empty)
        whole.__signature__ = inspect.Signature([batch, *first], return_annotation=returned)
        whole.__doc__ = re.sub(r"\n +options: .*", lambda _: option_lines(kind), function.__doc__ or "").rstrip() + RAISES
        return call

    return decorated
