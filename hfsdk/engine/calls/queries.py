"""Questions to the controller that change nothing: a message for each, typed by its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from hfsdk.core.dataflow import Call, CallFlow
from hfsdk.core.pending import ColumnInfo, ColumnRef
from hfsdk.core.placement import Placement
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import DeviceStatus, NodeStatus, StateCopy, Stored
from hfsdk.core.trace import Span
from hfsdk.engine.calls.rerun import Rerun

T_co = TypeVar("T_co", covariant=True)


class Query(Generic[T_co]):
    """A question whose answer is a ``T_co``."""


class RoleStatus(NamedTuple):
    """A role's status."""

    spec: RoleSpec
    state: str
    """``"declared"`` or ``"loaded"``."""
    num_updates: int
    """Updates its weights have seen; -1: a shadow has none yet."""


@dataclass(frozen=True)
class Change:
    """A call that changed a role's weights, for the history."""

    call_id: int
    role: str
    method: str
    function: str
    """The call's loss as ``name@version``."""
    line: str
    branch: str
    num_updates: int
    """Optimizer steps that the role's weights have seen after it."""
    state: str
    """The call's state: ``"done"``, ``"pending"``, ..."""
    step: int
    """The step of the trace."""


# -- of one call


@dataclass(frozen=True)
class StateOf(Query[str]):
    """The state of a call: ``"pending"``, ``"running"``, ``"done"``, ...; ``"gone"`` of one that is no longer kept."""

    call_id: int


@dataclass(frozen=True)
class ResultOf(Query[Any]):
    """The small result of a call that is done."""

    call_id: int


@dataclass(frozen=True)
class WriterOf(Query[str]):
    """A call's name, e.g. ``"actor.generate"``; ``"your data"`` of what was put."""

    call_id: int


@dataclass(frozen=True)
class StoredOf(Query[Stored | None]):
    """The columns that a call wrote, by reference; ``None`` while it is pending."""

    call_id: int


@dataclass(frozen=True, eq=False)
class InfoOf(Query[ColumnInfo | None]):
    """A column's kind, dtype and lengths, without its values; ``None`` while it is pending."""

    ref: ColumnRef


# -- of steps


@dataclass(frozen=True)
class CurrentStep(Query[int]):
    """The number of the current step."""


@dataclass(frozen=True)
class UpcomingStep(Query[int]):
    """The number that a step has which begins now."""


@dataclass(frozen=True)
class FirstStep(Query[int]):
    """The number of the oldest step whose calls are kept."""


@dataclass(frozen=True)
class CallsOf(Query[list[Call]]):
    """The calls of a step, or (``None``) of all that are kept."""

    step: int | None = None


@dataclass(frozen=True)
class RunningCalls(Query[list[Call]]):
    """The calls that are not over."""


@dataclass(frozen=True)
class SpansOf(Query[list[Span]]):
    """The spans of a step's calls, those that run included."""

    step: int | None = None


@dataclass(frozen=True)
class FlowsOf(Query[tuple[CallFlow, ...]]):
    """Every call of a step, and those whose columns they read, as nodes of the dataflow."""

    step: int | None = None


@dataclass(frozen=True)
class RerunsOf(Query[list[Rerun]]):
    """How to carry out a step's calls again, of those that are done, while that is kept."""

    step: int | None = None


@dataclass(frozen=True)
class Changes(Query[list[Change]]):
    """Every optimizer step or update that is in no row of the history (``MarkRecorded``), in the order of submission."""


# -- of roles and devices


@dataclass(frozen=True)
class Roles(Query[Mapping[str, RoleStatus]]):
    """Every role, shadows included, by name."""


@dataclass(frozen=True)
class KeptOf(Query[StateCopy | None]):
    """The state of a role after so many updates, which its weights of now come from, if its ranks keep it in their layout."""

    role: str
    num_updates: int


@dataclass(frozen=True)
class CurrentPlacement(Query[Placement | None]):
    """The placement of the roles; ``None`` before the first."""


@dataclass(frozen=True)
class Devices(Query[list[DeviceStatus]]):
    """The workers as they are now."""


@dataclass(frozen=True)
class Nodes(Query[tuple[NodeStatus, ...]]):
    """The nodes of the cluster as they are now; where one has left and there is another like it, that one takes its place."""


@dataclass(frozen=True)
class ControllerBytes(Query[int]):
    """The column bytes that passed through the controller."""


@dataclass(frozen=True)
class HeldBytes(Query[int]):
    """The bytes of the columns that somebody still refers to."""


OF_WORKERS: frozenset[type[Query[Any]]] = frozenset({Devices, Nodes})
"""Questions that workers, or the cluster, answer; the controller answers the rest itself, in a closed session too."""
