"""What is asked of every rank of a pool, or of two at once, and what becomes of their answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from hfsdk.core.call_flow import Call
from hfsdk.core.errors import CallCancelledError, CallError, HfsdkError, WorkerDiedError
from hfsdk.core.methods import GIVE_STATE, METHODS, TAKE_STATE, TAKE_WEIGHTS
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.placement import Pool
from hfsdk.core.runtime import CallOutcome, Order, Part, Stored, Taker, TransferBrokenError, Weights, Work
from hfsdk.core.table import Table
from hfsdk.engine.process.rendezvous import Link
from hfsdk.engine.ray.ray_links import PoolState, without_consequences
from hfsdk.engine.ray.ray_pools import GRACE_S, RayPools
from hfsdk.engine.ray.ray_store import WORKER_GONE, reason_of
from hfsdk.engine.worker.answer import NO_ROWS, Answer
from hfsdk.engine.worker.requests import Execute, MoveState, Need, Offer, Request

USER_GRACE_S = 600.0
"""As ``GRACE_S``, where the user's own function runs on the ranks (``run``, ``call``): one may have much more to do than another.

An interrupt ends the wait.
"""


class RayCalls:
    """See the module's text.

    Attributes:
        cancelled: numbers of the calls that were asked to stop.
        column_bytes: of small results that came through this process.
    """

    def __init__(self, pools: RayPools) -> None:
        self._pools = pools
        self.cancelled: set[int] = set()
        self.column_bytes = 0
        self._moves = itertools.count(-2, -1)

    def each(self, pool: Pool, request: Request, call: Call) -> list[Answer]:
        """Ask every worker of a pool the same and return their answers, by rank; raise what one answers."""
        here = self._pools.open[pool.name]
        refs = [worker.ask.remote(request) for worker in here.workers]
        answers = self.gather(refs, here, call)
        for answer in answers.values():
            if answer.error is not None:
                raise answer.error
        return [answers[rank] for rank in range(len(refs))]

    def run(self, work: Work) -> CallOutcome:
        """Run a call on a pool."""
        assert work.pool is not None
        state = self._pools.open[work.pool.name]
        if work.taker is not None:
            return self._transfer(work, state, work.taker)
        weights, role = work.weights, work.call.role
        refs = [
            w.ask.remote(Execute(role, work.call, order, weights.of_rank(rank) if weights else None, work.version))
            for rank, (w, order) in enumerate(zip(state.workers, work.orders, strict=True))
        ]
        answers = self.gather(refs, state, work.call)
        ordered = [answers[rank] for rank in range(len(refs))]
        spans = tuple(span for answer in ordered for span in answer.spans)
        error = failure(ordered, work.call)
        if error is not None:
            return CallOutcome(None, (), spans, error)
        self.column_bytes += sum(inlined_bytes(a.result) for a in ordered)
        return CallOutcome(store_of(work.call, ordered), tuple(a.result for a in ordered), spans)

    def _transfer(self, work: Work, giver: PoolState, to: Taker) -> CallOutcome:
        """Have a role give its weights to its shadow."""
        taker = self._pools.open[to.pool.name]
        take = replace(work.call, role=to.shadow.name, method=TAKE_WEIGHTS.name)

        def ask(link: Link) -> Iterator[Any]:
            for worker, order in zip(giver.workers, work.orders, strict=True):
                yield worker.ask.remote(Execute(work.call.role, work.call, replace(order, link=link)))
            takes, weights = Order(NO_ROWS, (), False), Weights(to.trained, (), to.num_updates, link)
            for worker in taker.workers:
                yield worker.ask.remote(Execute(take.role, take, takes, weights, to.version))

        return self._together((giver, work.call), (taker, take), ask)

    def move(self, role: str, source: Pool, target: Pool) -> None:
        """Have the ranks of one pool give a role's state to those of another, where it is built; they keep it."""
        giver, taker = self._pools.open[source.name], self._pools.open[target.name]
        number = next(self._moves)
        give, take = (Call(id=number, role=role, method=method.name) for method in (GIVE_STATE, TAKE_STATE))
        asking = giver
        try:
            given = [answer.part for answer in self.each(giver.pool, Offer(role), give)]
            asking = taker
            taken = [answer.part for answer in self.each(taker.pool, Need(role, given), take)]
        except WorkerDiedError as error:
            raise TransferBrokenError([(asking.pool, error)]) from None
        members = [*giver.members, *taker.members]
        nodes = tuple(self._pools.nodes[member.device].number for member in members)

        def ask(link: Link) -> Iterator[Any]:
            for rank, member in enumerate(members):
                call = give if rank < len(given) else take
                yield member.handle.ask.remote(MoveState(role, call, link, rank, given, taken, nodes))

        outcome = self._together((giver, give), (taker, take), ask)
        if outcome.error is not None:
            raise outcome.error

    def _together(
        self, giving: tuple[PoolState, Call], taking: tuple[PoolState, Call], ask: Callable[[Link], Iterable[Any]]
    ) -> CallOutcome:
        """Have two pools give and take at once; both are done, or neither has anything of it.

        Args:
            giving: the pool that gives, and its call.
            taking: the other one, and its call of the same number.
            ask: asks the workers of both, in the order of the link's ranks.
        """
        (giver, give), (taker, take) = giving, taking
        num_givers = len(giver.members)
        both = PoolState(giver.pool, [*giver.members, *taker.members], (*giver.last_seen, *taker.last_seen))
        refs: list[Any] = []
        try:
            link = self._pools.links.between(giver, taker)
            refs += ask(link)
            answers = self.gather(refs, both, give, well=("ok",))
        except WORKER_GONE as error:  # it was to serve the place where they meet
            lost = self._pools.died(giver, give, 0, reason_of(error))
            raise TransferBrokenError([(giver.pool, lost)]) from None
        except WorkerDiedError as error:
            raise self._broken(error, refs, giving, taking) from None
        ordered = [answers[rank] for rank in range(len(refs))]
        spans = tuple(span for answer in ordered for span in answer.spans)
        if all(answer.status == "ok" for answer in ordered):
            return CallOutcome(None, tuple(answer.result for answer in ordered[:num_givers]), spans)
        self._pools.links.drop(link)
        causes = without_consequences(ordered)
        cause = failure(causes[:num_givers], give) or failure(causes[num_givers:], take)
        if cause is None and give.id in self.cancelled:
            cause = CallCancelledError("cancelled while weights were on their way", role=give.role, method=give.method)
        return CallOutcome(None, (), spans, cause or CallError("the weights did not arrive: a rank stopped", role=give.role))

    def _broken(
        self, error: WorkerDiedError, refs: Sequence[Any], giver: tuple[PoolState, Call], taker: tuple[PoolState, Call]
    ) -> TransferBrokenError:
        """A worker ended or hangs while weights were on their way: end its pool, and the other one if it hangs for it."""
        num_givers = len(giver[0].members)
        rank = error.rank or 0
        here, other = (giver, taker) if rank < num_givers else (taker, giver)
        rest = refs[num_givers:] if here is giver else refs[:num_givers]
        for worker in other[0].workers:
            worker.cancel.remote(other[1].id)
        self._pools.close(here[0].pool.name, kill=True)
        of = {"role": here[1].role, "method": here[1].method, "rank": rank - (num_givers if here is taker else 0)}
        lost = [(here[0].pool, WorkerDiedError(error.message, **{**error.fields(), **of}))]
        _, late = ray.wait(list(rest), num_returns=len(rest), timeout=GRACE_S)
        if late:
            why = f"it waits for weights of another pool, whose worker is gone (nothing came for {GRACE_S:g} s)"
            lost.append((other[0].pool, self._pools.died(*other, list(rest).index(late[0]), why)))
        return TransferBrokenError(lost)

    def gather(
        self, refs: list[Any], state: PoolState, call: Call, well: Sequence[str] = ("ok", "cancelled", "peer")
    ) -> dict[int, Answer]:
        """Collect every rank's answer.

        Raises:
            WorkerDiedError: a process ended, or ranks did not come back after another one failed.
        """
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        answers: dict[int, Answer] = {}
        pending, failed_s = list(refs), None
        while pending:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=0.5)
            for ref in ready:
                rank = rank_of[ref]
                try:
                    answers[rank] = ray.get(ref)
                except WORKER_GONE as error:
                    raise self._pools.died(state, call, rank, reason_of(error)) from None
            if pending and failed_s is None and any(answer.status not in well for answer in answers.values()):
                failed_s = time.monotonic()
                for worker in state.workers:  # replicas that do not run in lockstep with the failed rank stop here
                    worker.cancel.remote(call.id)
            kind = METHODS.get(call.method)  # none: the ranks load a role, or keep its state
            patient = kind is not None and kind.work == "code" and call.id not in self.cancelled
            grace_s = USER_GRACE_S if patient else GRACE_S
            if pending and failed_s is not None and time.monotonic() > failed_s + grace_s:
                stuck = rank_of[pending[0]]
                reasons = [str(a.error) for a in answers.values() if a.status not in well]
                why = f"it hangs in a collective (nothing came for {grace_s:g} s) after another rank failed: {reasons[0]}"
                raise self._pools.died(state, call, stuck, why)
        return answers


def failure(answers: Sequence[Answer], call: Call) -> HfsdkError | None:
    """Return what a call ended with on its ranks, if not well."""
    for rank, answer in enumerate(answers):
        if isinstance(answer.error, CallError):
            return type(answer.error)(answer.error.message, **{**answer.error.fields(), "rank": rank})
        if isinstance(answer.error, HfsdkError):
            return answer.error
    if any(answer.status == "cancelled" for answer in answers):
        return CallCancelledError("cancelled at a safe point", role=call.role, method=call.method)
    return None


def store_of(call: Call, answers: Sequence[Answer]) -> Stored | None:
    """Return what a call wrote, by reference; ``None``: nothing."""
    kept = [(rank, a) for rank, a in enumerate(answers) if a.part is not None]
    if not kept:
        return None
    kept = [(rank, a) for rank, a in kept if len(a.rows)] or kept[:1]  # without rows no column has its kind
    parts = tuple(Part(a.rows, a.part, a.num_bytes, rank) for rank, a in kept)
    return Stored(str(call), call.num_rows, parts, _merge_infos([a for _, a in kept], call.num_rows))


def _merge_infos(answers: Sequence[Answer], num_rows: int) -> dict[str, ColumnInfo]:
    """Put the ranks' descriptions together: total bytes, lengths in row order, and which rows are not scored."""
    merged = {}
    first = answers[0].columns or {}
    order = np.concatenate([a.rows for a in answers])
    cache: dict[tuple[int, ...], Any] = {}
    for name, info in first.items():
        infos = [(a.columns or {})[name] for a in answers]
        lengths = None
        if info.lengths is not None:
            key = tuple(id(i.lengths) for i in infos)
            if key not in cache:
                cache[key] = np.zeros(num_rows, dtype=np.int64)
                cache[key][order] = np.concatenate([i.lengths for i in infos])
            lengths = cache[key]
        lacking = [a.rows[i.unscored] for a, i in zip(answers, infos, strict=True) if i.unscored is not None]
        unscored = np.concatenate(lacking) if lacking else None
        merged[name] = ColumnInfo(info.kind, info.dtype, sum(i.num_bytes for i in infos), lengths, unscored)
    return merged


def inlined_bytes(value: Any) -> int:
    """Return the bytes of the arrays in a small result, which came through the controller."""
    if isinstance(value, Mapping):
        return sum(inlined_bytes(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(inlined_bytes(v) for v in value)
    return int(getattr(value, "nbytes", 0)) if getattr(value, "shape", ()) or isinstance(value, Table) else 0
