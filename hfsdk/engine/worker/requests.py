"""The requests to a rank's compute lane: to run a call, to build a role, to export or restore a role's state.

A state has two verbs. *Export*: the rank's share of it as any layout can read it, kept here for a snapshot (:class:`Keep`) or put
into the store for another place (:class:`Export`, :class:`SendKept`). *Restore*: from the rank's own share that it keeps, or from
the parts of all ranks of another place or layout. Where two pools can talk, the share goes straight from one to the other instead
(:class:`Offer`, :class:`Need`, :class:`MoveState`).
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hfsdk.core.arguments import StateMove
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import CallError, HfsdkError
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Order, StateGoneError, Weights
from hfsdk.engine.process.rendezvous import Link
from hfsdk.engine.worker.answer import NO_ROWS, Answer
from hfsdk.engine.worker.role_host import ObjectsGoneError
from hfsdk.engine.worker.worker import Worker

if TYPE_CHECKING:  # what controllers import: these import torch
    from hfsdk.engine.worker.kept_share import KeptShare


@dataclass(frozen=True, eq=False)
class Request:
    """A request to every rank of a pool; most are collective over the pool."""

    role: str
    what: ClassVar[str]
    """The request in words, for messages; the role's name follows."""

    def _on(self, worker: Worker) -> Answer:
        """Do this rank's share of it."""
        raise NotImplementedError


def carry_out(worker: Worker, request: Request) -> Answer:
    """Do a rank's share of a request; every way it can end is in the answer."""
    worker.use_this_thread()
    try:
        answer = request._on(worker)
    except (HfsdkError, StateGoneError) as error:
        answer = Answer("error", error=error)
    except Exception as error:  # told to the controller, which raises it at the user's line
        answer = Answer(
            "error", error=CallError(f"{request.what} {request.role} failed: {error!r}", details=traceback.format_exc())
        )
    if answer.error is not None:
        traceback.print_exception(answer.error)
    return answer


@dataclass(frozen=True, eq=False)
class Execute(Request):
    """Run a rank's share of a call."""

    call: Call
    order: Order
    weights: Weights | None = None
    """The trained role's weights, addressed to this rank; for a shadow that lacks them."""
    version: int = 0
    """The version of the weights that a shadow must have by then."""

    what = "running a call of"

    def _on(self, worker: Worker) -> Answer:
        return worker.execute(self.call, self.order, self.weights, self.version)


@dataclass(frozen=True, eq=False)
class Load(Request):
    """Build a role."""

    spec: RoleSpec
    state: Sequence[Any] = ()
    """References to the parts of the state that it takes over."""
    first: int | None = None
    """First rank of the part of the pool where it lives; ``None``: the whole pool."""

    what = "loading"

    def _on(self, worker: Worker) -> Answer:
        worker.load(self.spec, _state(worker, self.state, self.role), self.first)
        return Answer()


@dataclass(frozen=True, eq=False)
class Export(Request):
    """Put this rank's part of a role's state into the store, as any layout reads it."""

    what = "taking out the state of"

    def _on(self, worker: Worker) -> Answer:
        return _sent(worker, worker.roles[self.role].states.export())


@dataclass(frozen=True, eq=False)
class Keep(Request):
    """Keep a copy of this rank's part of a role's state; the result is its (layout, updates, bytes)."""

    number: int

    what = "keeping the state of"

    def _on(self, worker: Worker) -> Answer:
        share = worker.kept[self.number] = worker.roles[self.role].states.export()
        return Answer(result=(share.layout, share.num_updates, share.num_bytes))


@dataclass(frozen=True, eq=False)
class SendKept(Request):
    """Put this rank's part of a state that it keeps into the store, as any layout reads it."""

    number: int

    what = "sending the kept state of"

    def _on(self, worker: Worker) -> Answer:
        return _sent(worker, worker.kept[self.number])


@dataclass(frozen=True, eq=False)
class Restore(Request):
    """Give a role a kept state back."""

    number: int
    state: Sequence[Any] = ()
    """References to the parts of all that keep it; none where this rank keeps its own as it needs it."""

    what = "restoring the state of"

    def _on(self, worker: Worker) -> Answer:
        states = worker.roles[self.role].states
        if self.state:
            states.restore_parts(_state(worker, self.state, self.role))
        else:
            states.restore(worker.kept[self.number])
        return Answer()


@dataclass(frozen=True, eq=False)
class Offer(Request):
    """Put this rank's offer of a role's state, without the numbers, into the store."""

    what = "offering the state of"

    def _on(self, worker: Worker) -> Answer:
        return Answer(part=worker.store.put(worker.roles[self.role].states.offer()))


@dataclass(frozen=True, eq=False)
class Need(Request):
    """Put this rank's needs, of a state that others offer, into the store."""

    given: Sequence[Any]
    """References to what they offer."""

    what = "asking for the state of"

    def _on(self, worker: Worker) -> Answer:
        offered = _state(worker, self.given, self.role)
        return Answer(part=worker.store.put(worker.roles[self.role].states.need(offered[0].summary)))


@dataclass(frozen=True, eq=False)
class MoveState(Request):
    """Give a role's state to the ranks of another pool, or take it from them; collective over both."""

    call: Call
    link: Link
    rank: int
    """This rank's number in the link."""
    given: Sequence[Any]
    """References to what the old place's ranks offer."""
    taken: Sequence[Any]
    """References to what the new place's ranks need."""
    nodes: Sequence[int]
    """The nodes of the link's ranks."""

    what = "running a call of"

    def _on(self, worker: Worker) -> Answer:
        try:
            offered, needed = _state(worker, self.given, self.role), _state(worker, self.taken, self.role)
        except StateGoneError as gone:
            raise CallError(str(gone), role=self.role, method=self.call.method) from None
        move = StateMove(rank=self.rank, given=offered, taken=needed, nodes=self.nodes)
        return worker.execute(self.call, Order(NO_ROWS, (), False, arguments=move, link=self.link))


def _sent(worker: Worker, share: KeptShare) -> Answer:
    """Put a share of a state into the store."""
    from hfsdk.engine.weights.bridge import num_bytes_of

    summary, packed = share.packed()
    return Answer(part=worker.store.put((summary, packed)), num_bytes=num_bytes_of(packed))


def _state(worker: Worker, parts: Sequence[Any], role: str) -> list[Any]:
    """Map the parts of a role's state.

    Raises:
        StateGoneError: a worker that held one ended.
    """
    try:
        return worker.store.get(parts)
    except ObjectsGoneError:
        raise StateGoneError(f"the state of {role} is gone: it was on its way when a worker that held it ended.") from None
