"""The worker processes of the devices, and the pools that they form; one process serves one pool after another."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import PlacementError, WorkerDiedError
from hfsdk.core.placement import Pool
from hfsdk.core.trace import Span
from hfsdk.engine.process.gpus import SHOW_ALL
from hfsdk.engine.process.rendezvous import LOOPBACK, Link
from hfsdk.engine.ray.access import remove_segments
from hfsdk.engine.ray.cluster import Node, check_present, present
from hfsdk.engine.ray.ray_store import WORKER_GONE
from hfsdk.engine.ray.worker_process import RayWorker, said_in, tail
from hfsdk.engine.worker.role_host import WorkerSetup

if TYPE_CHECKING:
    from hfsdk.engine.worker.answer import Answer


GRACE_S = 15.0
"""How long the other ranks of a call may take to come back after one failed outside a safe point."""

JOIN_TRIES = 2
"""How often the workers of a pool are started, where one of them ends while they join it."""

LOOK_S = 5.0
"""How long a worker may take to send the end of its log, or to clear up."""


@dataclass(frozen=True)
class WorkerOptions:
    """How the worker processes of a session are started."""

    job_id: str
    folder: Path
    """The session's own, for logs and for the files by which processes meet."""
    num_threads: int
    shares_cpus: bool
    """Whether Ray is ours: then its workers reserve no processors of it."""
    start_s: float
    collective_s: float | None = None
    deterministic: bool = False


class RayPools:
    """The workers of all devices, and the pools that they form.

    Attributes:
        open: the open pools, by name.
        devices: the worker process of every device that has one.
        nodes: the node of every device.
        links: between open pools.
    """

    def __init__(self, cluster: ClusterSpec, nodes: Sequence[Node], options: WorkerOptions) -> None:
        self._cluster, self.nodes, self._options = cluster, tuple(nodes), options
        self._stores = itertools.count()
        self.open: dict[str, PoolState] = {}
        self.devices: dict[int, DeviceWorker] = {}
        self._looking = threading.Lock()
        self.links = RayLinks(partial(self._meeting_place, link=True), options.collective_s)

    def join(self, pool: Pool) -> None:
        """Join the workers of the pool's devices, started where there are none yet; a part of a pool is joined already."""
        if pool.within:
            whole = self.open[pool.within]
            self.open[pool.name] = PoolState(pool, [member for member in whole.members if member.device in pool.devices])
            return
        check_present(self.nodes, self.look(), pool.devices)
        for tries_left in reversed(range(JOIN_TRIES)):
            state = self.open[pool.name] = PoolState(pool, [self._living_worker(device) for device in pool.devices])
            try:
                setups = self.setups(state)
                joined = [w.join.remote(setup) for w, setup in zip(state.workers, setups, strict=True)]
                pids = ray.get(joined, timeout=self._options.start_s)
                break
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                self.close(pool.name, kill=True)
                if tries_left and isinstance(error, WORKER_GONE):
                    continue  # one was killed meanwhile: the others wait for it, all are started again
                if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, PlacementError):
                    raise error.cause from None
                late = isinstance(error, ray.exceptions.GetTimeoutError)
                why = f"within {self._options.start_s:g} s; hf.Session(start_timeout_s=...) waits longer" if late else f": {error}"
                raise PlacementError(
                    f"the {pool.size} workers of pool {pool.name!r} did not start{' ' * late}{why}. Is there memory and a free "
                    "device for each?"
                ) from error
        for member, pid in zip(state.members, pids, strict=True):
            member.pid = pid

    def look(self) -> frozenset[str]:
        """Put other nodes in place of those that left; return Ray's names of the nodes that are there."""
        with self._looking:
            before, (self.nodes, alive) = self.nodes, present(self.nodes, self._cluster)
            for device, (old, new) in enumerate(zip(before, self.nodes, strict=True)):
                if old != new:
                    self.devices.pop(device, None)  # its process ended with the node
        return alive

    def _living_worker(self, device: int) -> DeviceWorker:
        """Return a device's worker; another one where it has ended since it left its last pool."""
        member = self.worker_of(device)
        if member.pid is None:
            return member  # it has never joined: on its way up
        try:
            ray.get(member.handle.pid.remote(), timeout=LOOK_S)
        except (*WORKER_GONE, ray.exceptions.GetTimeoutError):
            self.end([member])
        return self.worker_of(device)

    def setups(self, state: PoolState) -> list[WorkerSetup]:
        """Give the workers of a pool the address where they meet: a file on one node, else a store on rank 0's node."""
        pool, nodes = state.pool, [self.nodes[device] for device in state.pool.devices]
        store, addresses = self._meeting_place(state.members)
        several = len(set(nodes)) > 1
        return [
            WorkerSetup(
                device,
                rank,
                pool.size,
                pool.name,
                _job_on(self._options.job_id, nodes[rank]) if several else self._options.job_id,
                store,
                self._options.num_threads,
                addresses[rank] if addresses else "",
                self._options.collective_s,
                self._options.deterministic,
            )
            for rank, device in enumerate(pool.devices)
        ]

    def _meeting_place(self, members: Sequence[DeviceWorker], *, link: bool = False) -> tuple[str, tuple[str, ...]]:
        """Return where workers find each other, and the addresses of their nodes where these are several machines.

        That is a file on one node, else a store that the first of them serves; with ``link`` they are of two pools.
        """
        nodes = [self.nodes[member.device] for member in members]
        addresses = tuple(node.address for node in nodes)
        one_machine = len(set(addresses)) == 1
        if len(set(nodes)) == 1:
            return f"file://{self._options.folder / f'store{next(self._stores)}'}", ()
        host = LOOPBACK if one_machine else addresses[0]
        store = ray.get(members[0].handle.serve_store.remote(host, link), timeout=self._options.start_s)
        return store, () if one_machine else addresses

    def worker_of(self, device: int) -> DeviceWorker:
        """Return a device's worker process; start it where there is none. It may not be up yet."""
        if device not in self.devices:
            gpus = 1 if self._cluster.devices[device].name != "cpu" else 0
            log_file = str(self._options.folder / f"device{device}.log")
            cpus = 0 if self._options.shares_cpus else 1
            node = NodeAffinitySchedulingStrategy(self.nodes[device].ray_id, soft=False)
            shown: dict[str, Any] = {"runtime_env": {"env_vars": SHOW_ALL}} if gpus else {}
            handle = RayWorker.options(num_gpus=gpus, num_cpus=cpus, scheduling_strategy=node, **shown).remote(
                device, log_file, self._options.num_threads, self._options.deterministic
            )
            self.devices[device] = DeviceWorker(device, handle, log_file)
        return self.devices[device]

    def close(self, name: str, *, kill: bool = False) -> None:
        """Take the pool apart. Its workers leave it and stay, with the columns they wrote; with ``kill`` they end."""
        state = self.open.pop(name, None)
        if state is None or not ray.is_initialized():
            return
        self.links.forget(state)
        if state.pool.within and not kill:
            return
        if not kill:
            try:
                ray.get([w.leave.remote() for w in state.workers], timeout=GRACE_S)
                return
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                pass  # one of them ended or hangs: all of them are started again
        self.end(state.members)
        if not self.open:
            remove_segments(self._options.job_id)

    def end(self, members: Sequence[DeviceWorker]) -> None:
        """Kill workers, and wait until those of this machine are gone."""
        for member in members:
            ray.kill(member.handle)
            self.devices.pop(member.device, None)
        own_addresses = {node.address for node in self.nodes if node.here}
        near = [member for member in members if self.nodes[member.device].address in own_addresses]
        _wait_gone([member.pid for member in near if member.pid is not None])

    def rename(self, old: str, new: str) -> None:
        """Call an open pool by another name."""
        state = self.open[new] = self.open.pop(old)
        state.pool = replace(state.pool, name=new)

    def died(self, state: PoolState, call: Call, rank: int, why: str) -> WorkerDiedError:
        """Return the error for a rank that ended or hangs: its last spans, and what it wrote during the call."""
        spans = [
            f"  {s.role}.{s.method} {s.name} (started {(time.time_ns() - s.start_ns) / 1e9:.1f} s ago)"
            for s in state.last_seen
            if s.rank == rank and s.call_id == call.id
        ]
        member = state.members[rank]
        device, pid = member.device, member.pid
        where = f" on {self.nodes[device]}" if len(set(self.nodes)) > 1 else ""
        details = "its last spans:\n" + ("\n".join(spans) or "  none seen")
        output = said_in(self.output(device, 2000), call.id)
        details += f"\nits last output:\n{output}" if output else ""
        return WorkerDiedError(
            f"the worker of device {device}{where} (pid {pid}) ended or hangs: {why.rstrip('.')}.",
            role=call.role,
            method=call.method,
            rank=rank,
            details=details,
        )

    def output(self, device: int, num_chars: int) -> str:
        """Return the end of a worker's log; where it is on another node, the worker reads it or, if that is dead, a neighbour."""
        path, node = str(self._options.folder / f"device{device}.log"), self.nodes[device]
        near = [] if node.here else [member for member in self.devices.values() if self.nodes[member.device] == node]
        for member in sorted(near, key=lambda member: member.device != device):
            try:
                return str(ray.get(member.handle.output.remote(path, num_chars), timeout=LOOK_S))
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                continue
        return tail(path, num_chars)

    def clear_far_nodes(self) -> None:
        """Have one worker of every other node remove the session's files there."""
        near = {self.nodes[device]: member for device, member in self.devices.items() if not self.nodes[device].here}
        refs = [
            m.handle.clear.remote(str(self._options.folder), (self._options.job_id, _job_on(self._options.job_id, node)))
            for node, m in near.items()
        ]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=LOOK_S)


def _job_on(job_id: str, node: Node) -> str:
    """Return a job's name on one node: ranks with equal names share memory, which those of two nodes cannot."""
    return f"{job_id}-{node.number}"


def _wait_gone(pids: Sequence[int], timeout_s: float = 10.0) -> None:
    """Wait until processes have ended, so that their memory is free when this returns."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(psutil.pid_exists(pid) for pid in pids):
        time.sleep(0.02)


# -- the open pools of Ray's workers, and the links between two of them over which weights go straight (see ``direct.py``)

PEER_LEFT = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
)
"""The messages of gloo and NCCL on a rank whose peer has left, or that has left itself."""


@dataclass(eq=False)
class DeviceWorker:
    """The worker process of one device, which joins one pool after another."""

    device: int
    handle: Any
    log_file: str
    pid: int | None = None
    """Known once it has joined a pool."""


@dataclass(eq=False)
class PoolState:
    """An open pool and its workers, by rank."""

    pool: Pool
    members: list[DeviceWorker]
    last_seen: tuple[Span, ...] = ()
    """Spans that were running at the last look, for messages about a death."""

    @property
    def workers(self) -> list[Any]:
        """The workers' handles."""
        return [member.handle for member in self.members]


class RayLinks:
    """The links between open pools: made when weights first go from one to the other, and again where one was opened again."""

    def __init__(
        self, meeting_place: Callable[[Sequence[DeviceWorker]], tuple[str, tuple[str, ...]]], timeout_s: float | None
    ) -> None:
        """Have none yet.

        Args:
            meeting_place: returns where workers find each other and, where these are several machines, their addresses.
            timeout_s: how long a rank waits for the others; ``None``: 10 minutes.
        """
        self._meeting_place, self._timeout_s = meeting_place, timeout_s
        self._numbers = itertools.count()
        self._links: dict[Link, tuple[PoolState, PoolState]] = {}
        self._lock = threading.Lock()

    def between(self, giver: PoolState, taker: PoolState) -> Link:
        """Return the link of two pools as they are open now; their workers join it when they first use it."""
        with self._lock:
            opened = next((link for link, ends in self._links.items() if ends == (giver, taker)), None)
        if opened is None:
            members = [*giver.members, *taker.members]
            store, addresses = self._meeting_place(members)
            names = giver.pool.name, taker.pool.name
            opened = Link(next(self._numbers), names, store, len(members), addresses, self._timeout_s)
            with self._lock:
                self._links[opened] = giver, taker
        return opened

    def drop(self, link: Link) -> None:
        """Have the workers of both pools leave a link; the next transfer makes another."""
        with self._lock:
            ends = self._links.pop(link, ())
        for state in ends:
            for worker in state.workers:
                worker.drop_link.remote(link.number)

    def forget(self, pool: PoolState) -> None:
        """Have all leave the links of a pool that closes."""
        with self._lock:
            links = [link for link, ends in self._links.items() if pool in ends]
        for link in links:
            self.drop(link)


def without_consequences(answers: Sequence[Answer]) -> list[Answer]:
    """Leave out errors of ranks whose peer had left, unless there are no others."""
    causes = [answer.error is not None and not any(words in str(answer.error) for words in PEER_LEFT) for answer in answers]
    if not any(causes):
        return list(answers)
    return [answer if is_cause else replace(answer, error=None) for answer, is_cause in zip(answers, causes, strict=True)]
