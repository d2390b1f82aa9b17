"""The real runtime: Ray starts the workers, moves requests and keeps columns; the work happens in ``engine.worker``."""

from __future__ import annotations

import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hfsdk.core.arguments import Scoring
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import (
    CallCancelledError,
    CallError,
    CheckpointError,
    HfsdkError,
    PlacementError,
    RewardFunctionError,
    SessionClosedError,
    WorkerDiedError,
    unsaved,
)
from hfsdk.core.files import FileSum
from hfsdk.core.methods import GIVE_STATE, METHODS, REDUCE, TAKE_STATE, TAKE_WEIGHTS, method_of
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.placement import Pool
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import (
    CallOutcome,
    DeviceStatus,
    NodeStatus,
    Order,
    Part,
    Pick,
    Progress,
    RoleState,
    ShadowReceiver,
    StateCopy,
    StateGoneError,
    Stored,
    TransferBrokenError,
    Weights,
    Work,
)
from hfsdk.core.system import keep_nothing_temporary_in, keep_temporary_in
from hfsdk.core.table import Table
from hfsdk.core.trace import Span
from hfsdk.engine.calls.dispatch import mesh_of
from hfsdk.engine.calls.host_memory import free_host_bytes
from hfsdk.engine.process.gpus import goes_direct
from hfsdk.engine.process.interrupts import held
from hfsdk.engine.process.rendezvous import Link
from hfsdk.engine.ray import access, start
from hfsdk.engine.ray.access import OwnFolder, remove_segments
from hfsdk.engine.ray.cluster import Node, describe, num_cores
from hfsdk.engine.ray.pools import GRACE_S, LOOK_S, PoolState, RayPools, WorkerOptions, without_consequences
from hfsdk.engine.ray.ray_store import WORKER_GONE, fetch, reason_of
from hfsdk.engine.ray.worker_process import RayShelf, RayTasks, tail
from hfsdk.engine.weights.model_folders import Manifest, read_pieces
from hfsdk.engine.worker.answer import NO_ROWS, Answer
from hfsdk.engine.worker.requests import Execute, Export, Keep, Load, MoveState, Need, Offer, Request, Restore, SendKept

LOG_CHARS = 20_000
"""How much of the end of a log is shown."""
START_S = 300.0
"""How long a pool's processes may take to start and join, unless the session says otherwise."""

ANSWER_S = 30.0
"""The seconds that a worker may take to say what it keeps, even while it computes."""

CLOSE_S = 10.0
"""How long ``close`` waits for calls under way to notice that their workers are gone."""

P = ParamSpec("P")
R = TypeVar("R")


def _while_open(method: Callable[Concatenate[RayRuntime, P], R]) -> Callable[Concatenate[RayRuntime, P], R]:
    """Count who is inside, so that ``close`` ends Ray only afterwards: a call to Ray after that would start another one."""

    @wraps(method)
    def guarded(self: RayRuntime, /, *args: P.args, **more: P.kwargs) -> R:
        with self._inside:
            if self._closed:
                raise SessionClosedError("the session is closed; make a new one with hf.Session(...)")
            self._num_inside += 1
        try:
            return method(self, *args, **more)
        finally:
            with self._inside:
                self._num_inside -= 1
                self._inside.notify_all()

    return guarded


class RayRuntime:
    """See :class:`hfsdk.core.runtime.Runtime`.

    Without ``address`` Ray is started here for ``num_devices`` workers (see ``start.py``). A Ctrl-C while this is being made
    leaves nothing behind.

    Attributes:
        notices: sentences for the user about who can reach this Ray.
    """

    kind = "ray"

    def __init__(
        self,
        num_devices: int | None = None,
        address: str | None = None,
        num_threads: int | None = None,
        start_timeout_s: float = START_S,
        collective_timeout_s: float | None = None,
        deterministic: bool = False,
        *,
        own_machine: bool = False,
    ) -> None:
        """Start.

        Args:
            num_devices: how many devices; ``None`` for all.
            address: the address of a cluster; ``None`` for a Ray of this process's own.
            num_threads: the threads of each worker; by default the processors are shared.
            start_timeout_s: how long a pool's processes may take to start and join.
            collective_timeout_s: how long a rank waits for others.
            deterministic: whether GPUs are held to one order.
            own_machine: whether the Ray that this process is in already runs for hfsdk alone, on this machine.

        Raises:
            PlacementError: there is no such Ray, or it has fewer devices.
        """
        self._own_machine = own_machine
        self._job_id = uuid.uuid4().hex[:12]
        self._inside = threading.Condition()
        self._num_inside, self._closed = 0, False
        self._own_folder: OwnFolder | None = None
        self._pools: RayPools | None = None
        self._tasks: TaskRunner | None = None
        self._shelf: Any = None
        """The process that copies tables of other owners; none until there is one."""
        self.direct_on_cpus = False
        """Whether weights go straight between pools without GPUs too; for tests."""
        try:
            with held():
                self._start(num_devices, address, num_threads, start_timeout_s, collective_timeout_s, deterministic)
        except BaseException:
            with held():
                self.close()
            raise

    def _start(
        self, num_devices: int | None, address: str | None, num_threads: int | None, start_s: float, *of_worker: Any
    ) -> None:
        """Get to a Ray, look at its devices, and have their processes begin to start where it is ours."""
        self.notices = start.enter(self._job_id, num_devices, address)
        shares_cpus = self._own_machine or (start.owns(self._job_id) and address in (None, "local"))
        self.cluster, nodes = describe(num_devices, shares_cpus)
        self._own_folder = access.create(self._job_id, access.private_place(""))
        folder = self._own_folder.path
        keep_temporary_in(folder)
        options = WorkerOptions(self._job_id, folder, num_threads or _num_threads(nodes), shares_cpus, start_s, *of_worker)
        self._pools = pools = RayPools(self.cluster, nodes, options)
        self._calls = RayCalls(pools)
        self._folders = FolderSender(pools)
        self._tasks = TaskRunner(folder / "tasks.log", start_s, self._calls.cancelled)
        if shares_cpus or start.owns(self._job_id):
            for device in range(self.cluster.num_devices):
                pools.worker_of(device).handle.prepare.remote()

    @property
    def pools(self) -> RayPools:
        """The worker processes and their pools."""
        assert self._pools is not None
        return self._pools

    # -- pools

    @_while_open
    def open_pool(self, pool: Pool) -> None:
        """Join the workers of the pool's devices, started where there are none yet; a part of a pool is joined already."""
        self.pools.join(pool)

    def close_pool(self, name: str, *, kill: bool = False) -> None:
        """Take the pool apart. Its workers leave it and stay, with the columns they wrote; with ``kill`` they end."""
        self.pools.close(name, kill=kill)

    def rename_pool(self, old: str, new: str) -> None:
        """Call an open pool by another name."""
        self.pools.rename(old, new)

    # -- roles and their states

    @_while_open
    def load(self, role: RoleSpec, pool: Pool, state: RoleState | None = None, source: Pool | None = None) -> None:
        """Build a role on its pool, with the state that it has in ``source`` where that is given."""
        self._folders.bring(role, self.pools.open[pool.name])
        parts = () if state is None else state.handles
        first = self.pools.open[pool.within].pool.devices.index(pool.devices[0]) if pool.within else None
        self._calls.each(pool, Load(role.name, role, parts, first), _own_call(role.name, "load"))
        if source is not None:
            self._calls.move(role.name, source, pool)
        assert self._tasks is not None
        self._tasks.ensure()  # by now the workers have done their importing: the cores are free for this process's

    @_while_open
    def export(self, role: str, pool: Pool) -> RoleState:
        """Put a role's state into the object stores of its workers."""
        sent = self._calls.each(pool, Export(role), _own_call(role, "export"))
        return RoleState(tuple(answer.part for answer in sent), sum(answer.num_bytes for answer in sent))

    @_while_open
    def keep(self, role: str, pool: Pool, number: int) -> StateCopy:
        """Have every worker of the pool keep its part in its own memory: the object store may be smaller than a state."""
        shares = [answer.result for answer in self._calls.each(pool, Keep(role, number), _own_call(role, "keep"))]
        layout, num_updates, _ = shares[0]
        return StateCopy(number, role, layout, pool.devices, tuple(size for _, _, size in shares), num_updates)

    @_while_open
    def holds(self, state_copy: StateCopy) -> bool:
        """Ask the workers of its devices; one that does not answer has hung, and what it keeps is out of reach."""
        workers = [self.pools.devices[device].handle for device in state_copy.devices if device in self.pools.devices]
        replies = [worker.holds.remote(state_copy.number) for worker in workers]
        try:
            return len(workers) == len(state_copy.devices) and all(ray.get(replies, timeout=ANSWER_S))
        except (*WORKER_GONE, ray.exceptions.GetTimeoutError):
            return False

    @_while_open
    def restore(self, role: RoleSpec, pool: Pool, state_copy: StateCopy) -> None:
        """Have every worker take its own part back; elsewhere, or in another layout, the parts go through the object store."""
        parts: list[Any] = []
        if (str(mesh_of(role)), pool.devices) != (state_copy.layout, state_copy.devices):
            if not self.holds(state_copy):
                raise CheckpointError(f"a worker that kept {role.name}'s state ended")
            holders = [self.pools.devices[device].handle for device in state_copy.devices]
            try:
                sent = ray.get([holder.ask.remote(SendKept(role.name, state_copy.number)) for holder in holders])
            except WORKER_GONE as error:
                raise CheckpointError(f"a worker that kept {role.name}'s state ended: {reason_of(error)}") from None
            failed = [answer.error for answer in sent if answer.error is not None]
            if failed:
                raise failed[0]
            parts = [answer.part for answer in sent]
        try:
            self._calls.each(pool, Restore(role.name, state_copy.number, parts), _own_call(role.name, "restore"))
        except StateGoneError as gone:  # perhaps of some ranks only: none of them can be used as it is
            raise WorkerDiedError(str(gone), role=role.name, method="restore") from None

    @_while_open
    def forget(self, state_copy: StateCopy) -> None:
        """Have the workers of its devices free it."""
        for device in state_copy.devices:
            if device in self.pools.devices:
                self.pools.devices[device].handle.forget.remote(state_copy.number)

    @_while_open
    def release(self, role: str, pool: Pool) -> None:
        """Free a role."""
        for ref in [w.release.remote(role) for w in self.pools.open[pool.name].workers] if pool.name in self.pools.open else ():
            try:
                ray.get(ref)
            except WORKER_GONE:  # gone, and the role with it; the next call of the pool says so
                continue

    # -- calls

    @_while_open
    def call(self, work: Work) -> CallOutcome:
        """Run a call on a pool."""
        return self._calls.run(work)

    @_while_open
    def goes_direct(self, giver: Pool, taker: Pool) -> bool:
        """Return whether weights go from one pool to the other by NCCL, and not by the object store."""
        cpus = [number for number, device in enumerate(self.cluster.devices) if device.name == "cpu"]
        return goes_direct(giver.devices, taker.devices, cpus, on_cpus=self.direct_on_cpus)

    @_while_open
    def task(self, work: Work) -> CallOutcome:
        """Run a function over columns; kill its process when it takes longer than it may."""
        assert self._tasks is not None
        answer = self._tasks.run(work.call, work.orders[0], work.timeout_s)
        self._calls.column_bytes += inlined_bytes(answer.result) if work.call.method != REDUCE.name else 0
        return CallOutcome(store_of(work.call, [answer]), (answer.result,))

    # -- columns

    @_while_open
    def put(self, table: Table) -> Part:
        """Store a local table in this node's object store."""
        return Part(np.arange(table.num_rows), [ray.put(dict(table))], table.nbytes)

    @_while_open
    def adopt(self, content: Any, num_rows: int, num_bytes: int) -> Part:
        """Have a process copy an object of another owner, so that this one owns the copy and holds nothing of it."""
        with self._inside:
            if self._shelf is None:
                self._shelf = RayShelf.remote()
            shelf = self._shelf
        copied = shelf.copy.remote(content[0])
        ray.wait([copied], fetch_local=False)
        return Part(np.arange(num_rows), [copied], num_bytes)

    @_while_open
    def fetch(self, picks: Sequence[Pick]) -> Table:
        """Bring columns here."""
        return fetch(picks)

    def controller_bytes(self) -> int:
        """Return the column bytes that came through the controller (objects inlined into answers)."""
        return self._calls.column_bytes

    # -- looking and stopping

    def cancel(self, call_id: int, pool: Pool | None) -> None:
        """Ask a call's ranks (or task) to stop."""
        self._calls.cancelled.add(call_id)
        if pool is not None and pool.name in self.pools.open:
            for worker in self.pools.open[pool.name].workers:
                worker.cancel.remote(call_id)

    @_while_open
    def progress(self, pool: Pool) -> tuple[Progress | None, tuple[Span, ...]]:
        """Ask the pool's workers how far they are."""
        state = self.pools.open.get(pool.name)
        if state is None:
            return None, ()
        try:
            seen = ray.get([w.progress.remote() for w in state.workers], timeout=2.0)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return None, state.last_seen
        spans = tuple(span for _, _, running in seen for span in running)
        state.last_seen = spans or state.last_seen
        return _sum_progress([(call_id, counters) for call_id, counters, _ in seen]), spans

    @_while_open
    def devices(self, pool: Pool) -> tuple[DeviceStatus, ...]:
        """Ask the pool's workers for their memory."""
        state = self.pools.open.get(pool.name)
        if state is None:
            return ()
        try:
            seen = ray.get([w.memory.remote() for w in state.workers], timeout=10.0)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):  # the next call of the pool says why
            return ()
        return tuple(
            DeviceStatus(member.device, rank, pool.name, member.pid, used, roles, offloaded, asleep)
            for rank, (member, (used, roles, offloaded, asleep)) in enumerate(zip(state.members, seen, strict=True))
        )

    @_while_open
    def saved(self, role: str, pool: Pool) -> Mapping[str, FileSum] | None:
        """Ask the pool's workers; when all have written, rank 0 completes the checkpoint."""
        files: Mapping[str, FileSum] | None = None
        state = self.pools.open.get(pool.name)
        if state is None:
            raise unsaved(role)
        try:
            written = all(_each_of([w.saved.remote(role) for w in state.workers]))
            if written:
                files = ray.get(state.workers[0].finish_save.remote(role))
        except ray.exceptions.RayTaskError as error:
            raise CheckpointError(str(error.cause)) from None
        except WORKER_GONE:
            raise (failed := unsaved(role)) from failed.__cause__
        return files

    @_while_open
    def logs(self, pool: Pool | None, rank: int) -> str:
        """Return a worker's output, from its node; without a pool, that of the user's functions."""
        if pool is None:
            return self._tasks.output(LOG_CHARS) if self._tasks is not None else ""
        if not 0 <= rank < pool.size:
            raise PlacementError(f"pool {pool.name!r} has ranks 0 to {pool.size - 1}; asked for rank {rank}")
        return self.pools.output(pool.devices[rank], LOG_CHARS)

    @_while_open
    def nodes(self) -> tuple[NodeStatus, ...]:
        """Ask Ray; where a node has left and there is another like it, that one takes its place."""
        alive = self.pools.look()
        numbered = {node.number: node for node in self.pools.nodes}
        return tuple(NodeStatus(str(node), node.here, node.ray_id in alive) for _, node in sorted(numbered.items()))

    @_while_open
    def free_host_bytes(self, devices: Sequence[int]) -> dict[int, int]:
        """Ask this machine, and of every other node one worker; a node whose worker does not answer is left out."""
        free_bytes, workers = {}, {}
        for device in devices:
            node = self.pools.nodes[device]
            if node.here:
                free_bytes[node.number] = free_host_bytes()
            elif device in self.pools.devices:
                workers[node.number] = self.pools.devices[device].handle
        for number, worker in workers.items():
            with suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                free_bytes[number] = int(ray.get(worker.free_host_bytes.remote(), timeout=LOOK_S))
        return free_bytes

    def close(self) -> None:
        """End the workers, Ray where this session started it, and remove files and segments."""
        with self._inside:
            self._closed = True
        if self._pools is not None:
            self._pools.open.clear()
        if ray.is_initialized() and self._pools is not None and self._tasks is not None:
            self._pools.clear_far_nodes()
            self._pools.end(list(self._pools.devices.values()))
            self._tasks.close()
            if self._shelf is not None:
                ray.kill(self._shelf)
        with self._inside:
            # threads inside a call of Ray's hear of the workers' end; Ray must not be left under them
            self._inside.wait_for(lambda: self._num_inside == 0, CLOSE_S)
        start.leave(self._job_id)
        remove_segments(self._job_id)
        if self._own_folder is not None:
            keep_nothing_temporary_in(self._own_folder.path)
            self._own_folder.remove()


def _own_call(role: str, method: str) -> Call:
    """Return a call of the runtime's own, for messages."""
    return Call(id=-1, role=role, method=method)


def _sum_progress(seen: Sequence[tuple[int, Mapping[str, float]]]) -> Progress | None:
    running = [(call_id, counters) for call_id, counters in seen if call_id >= 0 and counters]
    if not running:
        return None
    call_id = running[0][0]
    unit = next(iter(running[0][1]))
    done = sum(c.get(unit, 0.0) for _, c in running)
    return Progress(call_id, done, sum(c.get("total", 0.0) for _, c in running), unit.replace("_", "-"))


def _num_threads(nodes: Sequence[Node]) -> int:
    """Return the threads of each worker, such that no node has more of them than processors."""
    cores = {node: (os.cpu_count() or 1) if node.here else num_cores(node) for node in set(nodes)}
    return max(1, min(cores[node] // nodes.count(node) for node in cores))


def _each_of(refs: Sequence[Any]) -> list[Any]:
    """Return the calls' values, once each was looked at; Ray writes an error that nobody looks at into the user's output.

    Raises:
        RayError: the first one's.
    """
    values, errors = [], []
    for ref in refs:
        try:
            values.append(ray.get(ref))
        except ray.exceptions.RayError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return values


USER_GRACE_S = 600.0
"""The same as ``GRACE_S`` where the user's own function runs on the ranks (``run``, ``call``): one may have more to do.

An interrupt ends the wait.
"""


class RayCalls:
    """Calls of every rank of a pool, or of two pools at once, and their answers.

    Attributes:
        cancelled: numbers of the calls that were asked to stop.
        column_bytes: the bytes of small results that came through this process.
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

    def _transfer(self, work: Work, giver: PoolState, to: ShadowReceiver) -> CallOutcome:
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
            offered = [answer.part for answer in self.each(giver.pool, Offer(role), give)]
            asking = taker
            needed = [answer.part for answer in self.each(taker.pool, Need(role, offered), take)]
        except WorkerDiedError as error:
            raise TransferBrokenError([(asking.pool, error)]) from None
        members = [*giver.members, *taker.members]
        nodes = tuple(self._pools.nodes[member.device].number for member in members)

        def ask(link: Link) -> Iterator[Any]:
            for rank, member in enumerate(members):
                call = give if rank < len(offered) else take
                yield member.handle.ask.remote(MoveState(role, call, link, rank, offered, needed, nodes))

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
    """Return the error that a call ended with on its ranks; ``None`` where it ended well."""
    for rank, answer in enumerate(answers):
        if isinstance(answer.error, CallError):
            return type(answer.error)(answer.error.message, **{**answer.error.fields(), "rank": rank})
        if isinstance(answer.error, HfsdkError):
            return answer.error
    if any(answer.status == "cancelled" for answer in answers):
        return CallCancelledError("cancelled at a safe point", role=call.role, method=call.method)
    return None


def store_of(call: Call, answers: Sequence[Answer]) -> Stored | None:
    """Return the columns that a call wrote, by reference; ``None``: none."""
    written = [(rank, a) for rank, a in enumerate(answers) if a.part is not None]
    if not written:
        return None
    written = [(rank, a) for rank, a in written if len(a.rows)] or written[:1]  # without rows no column has its kind
    parts = tuple(Part(a.rows, a.part, a.num_bytes, rank) for rank, a in written)
    return Stored(str(call), call.num_rows, parts, _merge_infos([a for _, a in written], call.num_rows))


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


class FolderSender:
    """Brings a model's folder to the nodes of a pool that lack it."""

    def __init__(self, pools: RayPools) -> None:
        self._pools = pools
        self._sending = threading.Lock()

    def bring(self, role: RoleSpec, state: PoolState) -> None:
        """Have the model's folder on every node of the pool, as it is here; sent once to each node that lacks it."""
        far = [rank for rank, device in enumerate(state.pool.devices) if not self._pools.nodes[device].here]
        if not role.folder or not far:
            return
        with self._sending:  # one at a time, so that two pools on a node do not both send it
            manifest = Manifest.of(role.folder)
            paths = self._ask(state, far, role, lambda w: w.find_folder.remote(manifest))
            lacking = {self._pools.nodes[state.pool.devices[rank]]: rank for rank, path in zip(far, paths, strict=True) if not path}
            if not lacking:
                return
            takers = list(lacking.values())
            self._ask(state, takers, role, lambda w: w.receive.remote(manifest))
            for name, piece in read_pieces(manifest):
                self._ask(state, takers, role, partial(_write_piece, name, ray.put(piece)))
            self._ask(state, takers, role, lambda w: w.finish_folder.remote())
            self._ask(state, far, role, lambda w: w.find_folder.remote(manifest))

    def _ask(self, state: PoolState, ranks: Sequence[int], role: RoleSpec, ask: Callable[[Any], Any]) -> list[Any]:
        """Ask some ranks something about a role's folder and return their answers."""
        refs = [ask(state.workers[rank]) for rank in ranks]
        answers = []
        for rank, ref in zip(ranks, refs, strict=True):
            try:
                answers.append(ray.get(ref))
            except ray.exceptions.RayTaskError as error:
                node = self._pools.nodes[state.pool.devices[rank]]
                raise PlacementError(f"{role.folder} cannot be brought to {node}: {error.cause}") from None
            except WORKER_GONE as error:
                raise self._pools.died(state, Call(id=-1, role=role.name, method="load"), rank, reason_of(error)) from None
        return answers


def _write_piece(name: str, piece: Any, worker: Any) -> Any:
    return worker.write_piece.remote(name, piece)


END_SEEN_S = 2.0
"""The seconds that Ray may take to report a process on this machine that has ended."""


class TaskRunner:
    """The process on this machine that runs the user's functions over columns; it is killed when one takes too long."""

    def __init__(self, log_file: Path, start_s: float, cancelled: Set[int]) -> None:
        """Have no process yet.

        Args:
            log_file: the log file of the process.
            start_s: how long it may take to start.
            cancelled: numbers of the calls that were asked to stop, as they come.
        """
        self._log_file, self._start_s, self._cancelled = log_file, start_s, cancelled
        self._lock = threading.Lock()
        self._process: Any = None

    def run(self, call: Call, order: Order, timeout_s: float | None) -> Answer:
        """Run a function over columns.

        Raises:
            RewardFunctionError: it took too long, or its process ended.
            CallError: it raised something, or the process of another kind of function ended.
            CallCancelledError: it was asked to stop.
        """
        process = self.ensure()
        self._await_start(call)
        ref, written = process.execute.options(num_returns=2).remote(call, order)
        answer = self._await(ref, call, timeout_s)
        if answer.error is not None:
            raise answer.error
        answer.part = None if answer.columns is None else [written]
        return answer

    def output(self, num_chars: int) -> str:
        """Return the end of what functions printed, those of earlier processes too."""
        return tail(str(self._log_file), num_chars)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            ray.kill(self._process)

    def _await_start(self, call: Call) -> None:
        """Wait until the process for functions is up, so that its start does not count as the function's time."""
        deadline = time.monotonic() + self._start_s
        while not ray.wait([self._up], timeout=0.2)[0] and time.monotonic() < deadline:
            if call.id in self._cancelled:
                raise CallCancelledError("cancelled before it started")

    def _await(self, ref: Any, call: Call, timeout_s: float | None) -> Answer:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ready, _ = ray.wait([ref], timeout=0.2)
            if ready:
                try:
                    answer: Answer = ray.get(ready[0])
                    return answer
                except WORKER_GONE as error:
                    self._restart()
                    raise _ended_error(call, str(error)) from None
            if self._ended():
                ready, _ = ray.wait([ref], timeout=END_SEEN_S)
                if not ready:  # Ray waits until processes that the function forked let go of the worker's sockets
                    self._restart()
                    raise _ended_error(call, "it is gone, without a word")
            if call.id in self._cancelled:
                self._restart()
                raise CallCancelledError("cancelled; its process was ended")
            if deadline is not None and time.monotonic() > deadline:
                self._restart()
                raise RewardFunctionError(
                    f"{call.function.split('@')[0]} took longer than {timeout_s:g} s and was ended. "
                    "Make it faster, or allow more with session.reward(..., timeout_s=...)."
                )

    def _ended(self) -> bool:
        """Return whether the process for functions, which is on this machine, has ended."""
        try:
            return bool(psutil.Process(ray.get(self._up, timeout=0)).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return False  # Ray knows it, or the process is not up yet

    def ensure(self) -> Any:
        """Return the process of the user's functions; start it where there is none."""
        with self._lock:
            if self._process is None:
                here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
                self._process = RayTasks.options(scheduling_strategy=here).remote(str(self._log_file))
                self._up = self._process.prepare.remote()
            return self._process

    def _restart(self) -> None:
        with self._lock:
            ray.kill(self._process)
            self._process = None
        self.ensure()


def _ended_error(call: Call, why: str) -> CallError:
    kind = RewardFunctionError if method_of(call.method).arguments is Scoring else CallError
    return kind(f"the process that ran {call.function or call.method} ended: {why}")
