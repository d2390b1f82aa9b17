"""The user's own primitives: functions that run SPMD on a role's ranks, beside the built-in methods (HybridFlow, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hfsdk.core.builtin import Method
from hfsdk.core.checks import Name, check_fields, checked
from hfsdk.core.methods import CALL
from hfsdk.core.protocol import THREE_D, TransferProtocol
from hfsdk.core.table import Table

RankFunction = Callable[..., Mapping[str, Any]]
"""``fn(model, rows, **options)`` -> the columns it writes, one entry per row it got."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Primitive(Method):
    """A function with what it reads and writes and how rows are spread. Made by :func:`primitive`; run by ``handle.call``.

    It is of the type of the built-in calls (``hfsdk.core.methods``), with the function that carries it out.
    """

    function: RankFunction

    def __post_init__(self) -> None:
        check_fields(self)
        super().__post_init__()

    def __call__(self, model: Any, rows: Table, **options: Any) -> Mapping[str, Any]:
        """Run it here, on local rows, as in a test."""
        return self.function(model, rows, **options)

    def __repr__(self) -> str:
        return f"Primitive({self.name}: reads {', '.join(self.reads)}; writes {', '.join(self.writes)}; {self.protocol})"


@checked
def primitive(
    *, reads: Sequence[Name], writes: Sequence[Name], protocol: TransferProtocol = THREE_D
) -> Callable[[RankFunction], Primitive]:
    """Turn ``fn(model, rows)`` into a primitive that runs SPMD on every rank of a role.

    On each rank ``model`` is the worker's model and ``rows`` a :class:`hfsdk.core.table.Table` with the columns ``reads`` of the
    rows that the protocol gives this rank; the function returns a dict with the columns ``writes``, one entry per row. With the
    default protocol all tp and pp ranks of a dp rank get the same rows and must make the same collective calls.

    Example::

        @hf.primitive(reads=["prompt", "response"], writes=["margins"])
        def margins(model, rows): ...
        batch = actor.call(margins, batch)

    Raises:
        OptionError: an argument is not what it should be.
    """

    @checked
    def decorate(function: RankFunction) -> Primitive:
        name = getattr(function, "__name__", "primitive")
        own = replace(CALL, name=name, reads=tuple(reads), writes=tuple(writes), protocol=protocol)
        return Primitive(**{f.name: getattr(own, f.name) for f in fields(own)}, function=function)

    return decorate
