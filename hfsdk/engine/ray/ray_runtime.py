"""The real runtime: Ray starts the workers, moves requests and keeps columns; the work happens in ``engine.worker``."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import ray

from hfsdk.core.call_flow import Call
from hfsdk.core.errors import CheckpointError, PlacementError, SessionClosedError, WorkerDiedError, unsaved
from hfsdk.core.files import FileSum
from hfsdk.core.methods import REDUCE
from hfsdk.core.placement import Pool
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import (
    CallOutcome,
    DeviceStatus,
    Kept,
    NodeStatus,
    Part,
    Pick,
    Progress,
    RoleState,
    StateGoneError,
    Work,
)
from hfsdk.core.system import keep_nothing_temporary_in, keep_temporary_in
from hfsdk.core.table import Table
from hfsdk.core.trace import Span
from hfsdk.engine.calls.dispatch import mesh_of
from hfsdk.engine.calls.host_memory import free_host_bytes
from hfsdk.engine.process.gpus import goes_direct
from hfsdk.engine.process.interrupts import held
from hfsdk.engine.ray import own_folders, ray_access, ray_start
from hfsdk.engine.ray.own_folders import OwnFolder, remove_segments
from hfsdk.engine.ray.ray_calls import RayCalls, inlined_bytes, store_of
from hfsdk.engine.ray.ray_cluster import Node, describe, num_cores
from hfsdk.engine.ray.ray_folders import FolderSender
from hfsdk.engine.ray.ray_pools import LOOK_S, RayPools, WorkerOptions
from hfsdk.engine.ray.ray_store import WORKER_GONE, fetch, reason_of
from hfsdk.engine.ray.ray_tasks import TaskRunner
from hfsdk.engine.ray.ray_worker import RayShelf
from hfsdk.engine.worker.requests import Export, Keep, Load, Restore, SendKept

LOG_CHARS = 20_000
"""How much of the end of a log is shown."""
START_S = 300.0
"""How long a pool's processes may take to start and join, unless the session says otherwise."""

ANSWER_S = 30.0
"""How long a worker may take to say what it keeps, whatever it computes meanwhile."""

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

    Without ``address`` Ray is started here for ``num_devices`` workers (see ``ray_start.py``). A Ctrl-C while this is being made
    leaves nothing behind.

    Attributes:
        notices: what the user has to know about who can reach this Ray.
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
            address: of a cluster; ``None`` for a Ray of this process's own.
            num_threads: of each worker; by default the processors are shared.
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
        self.notices = ray_start.enter(self._job_id, num_devices, address)
        shares_cpus = self._own_machine or (ray_start.owns(self._job_id) and address in (None, "local"))
        self.cluster, nodes = describe(num_devices, shares_cpus)
        self._own_folder = own_folders.create(self._job_id, ray_access.private_place(""))
        folder = self._own_folder.path
        keep_temporary_in(folder)
        options = WorkerOptions(self._job_id, folder, num_threads or _num_threads(nodes), shares_cpus, start_s, *of_worker)
        self._pools = pools = RayPools(self.cluster, nodes, options)
        self._calls = RayCalls(pools)
        self._folders = FolderSender(pools)
        self._tasks = TaskRunner(folder / "tasks.log", start_s, self._calls.cancelled)
        if shares_cpus or ray_start.owns(self._job_id):
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
    def keep(self, role: str, pool: Pool, number: int) -> Kept:
        """Have every worker of the pool keep its part in its own memory: the object store may be smaller than a state."""
        kept = [answer.result for answer in self._calls.each(pool, Keep(role, number), _own_call(role, "keep"))]
        layout, num_updates, _ = kept[0]
        return Kept(number, role, layout, pool.devices, tuple(size for _, _, size in kept), num_updates)

    @_while_open
    def holds(self, kept: Kept) -> bool:
        """Ask the workers of its devices; one that does not answer has hung, and what it keeps is out of reach."""
        workers = [self.pools.devices[device].handle for device in kept.devices if device in self.pools.devices]
        asked = [worker.holds.remote(kept.number) for worker in workers]
        try:
            return len(workers) == len(kept.devices) and all(ray.get(asked, timeout=ANSWER_S))
        except (*WORKER_GONE, ray.exceptions.GetTimeoutError):
            return False

    @_while_open
    def restore(self, role: RoleSpec, pool: Pool, kept: Kept) -> None:
        """Have every worker take its own part back; elsewhere, or in another layout, the parts go through the object store."""
        parts: list[Any] = []
        if (str(mesh_of(role)), pool.devices) != (kept.layout, kept.devices):
            if not self.holds(kept):
                raise CheckpointError(f"a worker that kept {role.name}'s state ended")
            holders = [self.pools.devices[device].handle for device in kept.devices]
            try:
                sent = ray.get([holder.ask.remote(SendKept(role.name, kept.number)) for holder in holders])
            except WORKER_GONE as error:
                raise CheckpointError(f"a worker that kept {role.name}'s state ended: {reason_of(error)}") from None
            failed = [answer.error for answer in sent if answer.error is not None]
            if failed:
                raise failed[0]
            parts = [answer.part for answer in sent]
        try:
            self._calls.each(pool, Restore(role.name, kept.number, parts), _own_call(role.name, "restore"))
        except StateGoneError as gone:  # perhaps of some ranks only: none of them can be used as it is
            raise WorkerDiedError(str(gone), role=role.name, method="restore") from None

    @_while_open
    def forget(self, kept: Kept) -> None:
        """Tell the workers of its devices."""
        for device in kept.devices:
            if device in self.pools.devices:
                self.pools.devices[device].handle.forget.remote(kept.number)

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
        free_bytes, asked = {}, {}
        for device in devices:
            node = self.pools.nodes[device]
            if node.here:
                free_bytes[node.number] = free_host_bytes()
            elif device in self.pools.devices:
                asked[node.number] = self.pools.devices[device].handle
        for number, worker in asked.items():
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
            self._inside.wait_for(lambda: self._num_inside == 0, CLOSE_S)
        ray_start.leave(self._job_id)
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
    """Return what the calls returned, once each was looked at; Ray writes an error that nobody looks at into the user's output.

    Raises:
        RayError: the first one's.
    """
    found, errors = [], []
    for ref in refs:
        try:
            found.append(ray.get(ref))
        except ray.exceptions.RayError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found
