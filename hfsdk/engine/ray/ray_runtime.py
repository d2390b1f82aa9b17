"""The real runtime: Ray starts the workers, moves orders and keeps columns; the work happens in ``worker.py``."""

from __future__ import annotations

import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from hfsdk.core.call_flow import Call
from hfsdk.core.errors import (
    CallCancelledError,
    CallError,
    CheckpointError,
    HfsdkError,
    PlacementError,
    RewardFunctionError,
    SessionClosedError,
    WorkerDiedError,
)
from hfsdk.core.files import FileSum
from hfsdk.core.methods import REDUCE, TAKE_WEIGHTS, method_of
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.placement import Pool
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import (
    DeviceStatus,
    Kept,
    Order,
    Outcome,
    Part,
    Pick,
    Progress,
    RoleState,
    StateGoneError,
    Stored,
    Taker,
    TransferBrokenError,
    Weights,
    Work,
)
from hfsdk.core.table import Table
from hfsdk.core.trace import Span
from hfsdk.engine.calls.host_memory import free_host_bytes
from hfsdk.engine.process.gpus import SHOW_ALL, goes_direct
from hfsdk.engine.process.interrupts import held
from hfsdk.engine.process.rendezvous import LOOPBACK, Link
from hfsdk.engine.ray import own_folders, ray_start
from hfsdk.engine.ray.own_folders import OwnFolder
from hfsdk.engine.ray.ray_cluster import Node, check_present, describe, num_cores
from hfsdk.engine.ray.ray_links import DeviceWorker, PoolState, RayLinks, without_consequences
from hfsdk.engine.ray.ray_worker import Answer, RayTasks, RayWorker, read, tail
from hfsdk.engine.weights.model_folders import Manifest, read_pieces
from hfsdk.engine.worker.role_host import WorkerSetup

GRACE_S = 15.0
"""How long the other ranks of a call may take to come back after one failed outside a safe point."""

JOIN_TRIES = 2
"""How often the workers of a pool are started, where one of them ends while they join it."""

USER_GRACE_S = 600.0
"""The same where the user's own function runs on the ranks (``run``, ``call``): one may have much more to do than another.

An interrupt ends the wait.
"""

START_S = 300.0
"""How long a pool's processes may take to start and join, unless the session says otherwise."""

WORKER_GONE = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""What Ray raises where a worker has ended; the second where Ray itself ended it, as its node had no memory left."""

LOOK_S = 5.0
"""How long a worker may take to send the end of its log, or to clear up."""

END_SEEN_S = 2.0
"""How long Ray may take to tell of a process on this machine that has ended."""

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
    ) -> None:
        self._job_id = uuid.uuid4().hex[:12]
        self._start_s, self._collective_s = start_timeout_s, collective_timeout_s
        self._deterministic = deterministic
        self._num_threads = num_threads or 0
        self._nodes: tuple[Node, ...] = ()
        self._own_folder: OwnFolder | None = None
        self._pools: dict[str, PoolState] = {}
        self._stores = itertools.count()
        self._tasks_lock, self._sending = threading.Lock(), threading.Lock()
        self._cancelled: set[int] = set()
        self._column_bytes = 0
        self._inside = threading.Condition()
        self._num_inside, self._closed = 0, False
        self._tasks: Any = None
        self._devices: dict[int, DeviceWorker] = {}
        self._own_calls = itertools.count(-2, -1)
        self._links = RayLinks(partial(self._meeting_place, link=True), collective_timeout_s)
        self.direct_on_cpus = False
        """Whether weights go straight between pools without GPUs too; for tests."""
        try:
            with held():
                self._start(num_devices, address)
        except BaseException:
            with held():
                self.close()
            raise

    def _start(self, num_devices: int | None, address: str | None) -> None:
        """Get to a Ray, look at its devices, and have their processes begin to start where it is ours."""
        self.notices = ray_start.enter(self._job_id, num_devices, address)
        self._shares_cpus = ray_start.owns(self._job_id) and address in (None, "local")
        self.cluster, self._nodes = describe(num_devices, self._shares_cpus)
        self._num_threads = self._num_threads or _num_threads(self._nodes)
        self._own_folder = own_folders.create(self._job_id)
        self._folder = self._own_folder.path
        if ray_start.owns(self._job_id):
            for device in range(self.cluster.num_devices):
                self._worker_of(device).handle.prepare.remote()

    # -- pools

    @_while_open
    def open_pool(self, pool: Pool) -> None:
        """Join the workers of the pool's devices, started where there are none yet; a part of a pool is joined already."""
        if pool.within:
            whole = self._pools[pool.within]
            self._pools[pool.name] = PoolState(pool, [member for member in whole.members if member.device in pool.devices])
            return
        check_present(self._nodes, pool.devices)
        for tries_left in reversed(range(JOIN_TRIES)):
            state = self._pools[pool.name] = PoolState(pool, [self._living_worker(device) for device in pool.devices])
            try:
                setups = self._setups(state)
                joined = [w.join.remote(setup) for w, setup in zip(state.workers, setups, strict=True)]
                pids = ray.get(joined, timeout=self._start_s)
                break
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                self.close_pool(pool.name, kill=True)
                if tries_left and isinstance(error, WORKER_GONE):
                    continue  # one was killed meanwhile: the others wait for it, all are started again
                if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, PlacementError):
                    raise error.cause from None
                late = isinstance(error, ray.exceptions.GetTimeoutError)
                why = f"within {self._start_s:g} s; hf.Session(start_timeout_s=...) waits longer" if late else f": {error}"
                raise PlacementError(
                    f"the {pool.size} workers of pool {pool.name!r} did not start{' ' * late}{why}. Is there memory and a free "
                    "device for each?"
                ) from error
        for member, pid in zip(state.members, pids, strict=True):
            member.pid = pid

    def _living_worker(self, device: int) -> DeviceWorker:
        """Return a device's worker; another one where it has ended since it left its last pool."""
        member = self._worker_of(device)
        if member.pid is None:
            return member  # it has never joined: on its way up
        try:
            ray.get(member.handle.pid.remote(), timeout=LOOK_S)
        except (*WORKER_GONE, ray.exceptions.GetTimeoutError):
            self._end([member])
        return self._worker_of(device)

    def _setups(self, state: PoolState) -> list[WorkerSetup]:
        """Tell the workers of a pool how they find each other: by a file on one node, else by a store on rank 0's node."""
        pool, nodes = state.pool, [self._nodes[device] for device in state.pool.devices]
        store, addresses = self._meeting_place(state.members)
        several = len(set(nodes)) > 1
        return [
            WorkerSetup(
                device,
                rank,
                pool.size,
                pool.name,
                _job_on(self._job_id, nodes[rank]) if several else self._job_id,
                store,
                self._num_threads,
                addresses[rank] if addresses else "",
                self._collective_s,
                self._deterministic,
            )
            for rank, device in enumerate(pool.devices)
        ]

    def _meeting_place(self, members: Sequence[DeviceWorker], *, link: bool = False) -> tuple[str, tuple[str, ...]]:
        """Return where workers find each other, and the addresses of their nodes where these are several machines.

        That is a file on one node, else a store that the first of them serves; with ``link`` they are of two pools.
        """
        nodes = [self._nodes[member.device] for member in members]
        addresses = tuple(node.address for node in nodes)
        one_machine = len(set(addresses)) == 1
        if len(set(nodes)) == 1:
            return f"file://{self._folder / f'store{next(self._stores)}'}", ()
        host = LOOPBACK if one_machine else addresses[0]
        store = ray.get(members[0].handle.serve_store.remote(host, link), timeout=self._start_s)
        return store, () if one_machine else addresses

    def _worker_of(self, device: int) -> DeviceWorker:
        """Return a device's worker process; start it where there is none. It may not be up yet."""
        if device not in self._devices:
            gpus = 1 if self.cluster.devices[device].name != "cpu" else 0
            log_file = str(self._folder / f"device{device}.log")
            cpus = 0 if self._shares_cpus else 1
            node = NodeAffinitySchedulingStrategy(self._nodes[device].ray_id, soft=False)
            shown: dict[str, Any] = {"runtime_env": {"env_vars": SHOW_ALL}} if gpus else {}
            handle = RayWorker.options(num_gpus=gpus, num_cpus=cpus, scheduling_strategy=node, **shown).remote(
                device, log_file, self._num_threads, self._deterministic
            )
            self._devices[device] = DeviceWorker(device, handle, log_file)
        return self._devices[device]

    def close_pool(self, name: str, *, kill: bool = False) -> None:
        """Take the pool apart. Its workers leave it and stay, with the columns they wrote; with ``kill`` they end."""
        state = self._pools.pop(name, None)
        if state is None or not ray.is_initialized():
            return
        self._links.forget(state)
        if state.pool.within and not kill:
            return
        if not kill:
            try:
                ray.get([w.leave.remote() for w in state.workers], timeout=GRACE_S)
                return
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                pass  # one of them ended or hangs: all of them are started again
        self._end(state.members)
        if not self._pools:
            _remove_segments(self._job_id)

    def _end(self, members: Sequence[DeviceWorker]) -> None:
        for member in members:
            ray.kill(member.handle)
            self._devices.pop(member.device, None)
        mine = {node.address for node in self._nodes if node.here}
        near = [member for member in members if self._nodes[member.device].address in mine]
        _wait_gone([member.pid for member in near if member.pid is not None])

    @_while_open
    def load(self, role: RoleSpec, pool: Pool, state: RoleState | None = None, source: Pool | None = None) -> None:
        """Build a role on its pool, with the state that it has in ``source`` where that is given."""
        here = self._pools[pool.name]
        self._bring_folder(role, here)
        parts = () if state is None else state.handles
        first = self._pools[pool.within].pool.devices.index(pool.devices[0]) if pool.within else None
        refs = [w.load.remote(role, parts, first) for w in here.workers]
        call = Call(id=-1, role=role.name, method="load")
        answers: dict[int, Exception | None] = self._gather(refs, here, call, lambda error: error is not None)
        failed = {rank: error for rank, error in answers.items() if error is not None}
        if failed:
            raise next(iter(failed.values()))
        if source is not None:
            self._move(role.name, self._pools[source.name], here)
        self._ensure_tasks()  # by now the workers have done their importing: the cores are free for this process's

    def _bring_folder(self, role: RoleSpec, state: PoolState) -> None:
        """Have the model's folder on every node of the pool, as it is here; sent once to each node that lacks it."""
        far = [rank for rank, device in enumerate(state.pool.devices) if not self._nodes[device].here]
        if not role.folder or not far:
            return
        with self._sending:  # one at a time, so that two pools on a node do not both send it
            manifest = Manifest.of(role.folder)
            found = self._ask(state, far, role, lambda w: w.find_folder.remote(manifest))
            lacking = {self._nodes[state.pool.devices[rank]]: rank for rank, path in zip(far, found, strict=True) if not path}
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
                node = self._nodes[state.pool.devices[rank]]
                raise PlacementError(f"{role.folder} cannot be brought to {node}: {error.cause}") from None
            except WORKER_GONE as error:
                raise self._died(state, Call(id=-1, role=role.name, method="load"), rank, _reason(error)) from None
        return answers

    def _move(self, role: str, giver: PoolState, taker: PoolState) -> None:
        """Have the ranks of one pool give a role's state to those of another, where it is built; they keep it."""
        number = next(self._own_calls)
        give, take = Call(id=number, role=role, method="give_state"), Call(id=number, role=role, method="take_state")
        asking = giver
        try:
            given = self._each(giver.pool, give, lambda w: w.offer.remote(role))
            asking = taker
            taken = self._each(taker.pool, take, lambda w: w.need.remote(role, given))
        except WorkerDiedError as error:
            raise TransferBrokenError([(asking.pool, error)]) from None
        members = [*giver.members, *taker.members]
        nodes = tuple(self._nodes[member.device].number for member in members)

        def ask(link: Link) -> Iterator[Any]:
            for rank, member in enumerate(members):
                yield member.handle.move_state.remote(give if rank < len(given) else take, link, rank, given, taken, nodes)

        outcome = self._together((giver, give), (taker, take), ask)
        if outcome.error is not None:
            raise outcome.error

    def rename_pool(self, old: str, new: str) -> None:
        """Call an open pool by another name."""
        state = self._pools[new] = self._pools.pop(old)
        state.pool = replace(state.pool, name=new)

    @_while_open
    def export(self, role: str, pool: Pool) -> RoleState:
        """Put a role's state into the object stores of its workers."""
        sent = self._each(pool, Call(id=-1, role=role, method="export"), lambda w: w.export.remote(role))
        return RoleState(tuple(part.handle for part in sent), sum(part.num_bytes for part in sent))

    @_while_open
    def keep(self, role: str, pool: Pool, number: int) -> Kept:
        """Have every worker of the pool keep its part in its own memory: the object store may be smaller than a state."""
        answers = self._each(pool, Call(id=-1, role=role, method="keep"), lambda w: w.keep.remote(role, number))
        layout, num_updates, _ = answers[0]
        return Kept(number, role, layout, pool.devices, tuple(size for _, _, size in answers), num_updates)

    @_while_open
    def free_host_bytes(self, devices: Sequence[int]) -> dict[int, int]:
        """Ask this machine, and of every other node one worker; a node whose worker does not answer is left out."""
        found, asked = {}, {}
        for device in devices:
            node = self._nodes[device]
            if node.here:
                found[node.number] = free_host_bytes()
            elif device in self._devices:
                asked[node.number] = self._devices[device].handle
        for number, worker in asked.items():
            with suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                found[number] = int(ray.get(worker.free_host_bytes.remote(), timeout=LOOK_S))
        return found

    @_while_open
    def holds(self, kept: Kept) -> bool:
        """Ask the workers of its devices."""
        workers = [self._devices[device].handle for device in kept.devices if device in self._devices]
        try:
            return len(workers) == len(kept.devices) and all(ray.get([w.holds.remote(kept.number) for w in workers]))
        except WORKER_GONE:
            return False

    @_while_open
    def restore(self, role: RoleSpec, pool: Pool, kept: Kept) -> None:
        """Have every worker take its own part back; elsewhere, or in another layout, the parts go through the object store."""
        call, parts = Call(id=-1, role=role.name, method="restore"), []
        if (str(role.train), pool.devices) != (kept.layout, kept.devices):
            holders = [self._devices[device].handle for device in kept.devices]
            try:
                sent = ray.get([holder.send_kept.remote(kept.number) for holder in holders])
            except WORKER_GONE as error:
                raise CheckpointError(f"a worker that kept {role.name}'s state ended: {_reason(error)}") from None
            failed = [answer for answer in sent if isinstance(answer, Exception)]
            if failed:
                raise failed[0]
            parts = [part.handle for part in sent]
        try:
            self._each(pool, call, lambda w: w.restore.remote(role.name, kept.number, parts))
        except StateGoneError as gone:  # perhaps of some ranks only: none of them can be used as it is
            raise WorkerDiedError(str(gone), role=role.name, method="restore") from None

    def _each(self, pool: Pool, call: Call, ask: Callable[[Any], Any]) -> list[Any]:
        """Ask every worker of a pool for something collective and return their answers, by rank; raise what one answers."""
        here = self._pools[pool.name]
        refs = [ask(worker) for worker in here.workers]
        answers = self._gather(refs, here, call, lambda answer: isinstance(answer, Exception))
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        return [answers[rank] for rank in range(len(refs))]

    @_while_open
    def forget(self, kept: Kept) -> None:
        """Tell the workers of its devices."""
        for device in kept.devices:
            if device in self._devices:
                self._devices[device].handle.forget.remote(kept.number)

    @_while_open
    def release(self, role: str, pool: Pool) -> None:
        """Free a role."""
        for ref in [w.release.remote(role) for w in self._pools[pool.name].workers] if pool.name in self._pools else ():
            try:
                ray.get(ref)
            except WORKER_GONE:  # gone, and the role with it; the next call of the pool says so
                continue

    # -- calls

    @_while_open
    def call(self, work: Work) -> Outcome:
        """Run a call on a pool."""
        assert work.pool is not None
        state = self._pools[work.pool.name]
        if work.taker is not None:
            return self._transfer(work, state, work.taker)
        weights = work.weights
        refs = [
            w.execute.remote(work.call, order, weights.of_rank(rank) if weights else None, work.version)
            for rank, (w, order) in enumerate(zip(state.workers, work.orders, strict=True))
        ]
        answers = self._gather(refs, state, work.call, lambda answer: answer.status == "error")
        ordered = [answers[rank] for rank in range(len(refs))]
        spans = tuple(span for answer in ordered for span in answer.spans)
        error = self._failure(ordered, work.call)
        if error is not None:
            return Outcome(None, (), spans, error)
        self._column_bytes += sum(_inlined_bytes(a.result) for a in ordered)
        return Outcome(self._store(work.call, ordered), tuple(a.result for a in ordered), spans)

    @_while_open
    def goes_direct(self, giver: Pool, taker: Pool) -> bool:
        """Return whether weights go from one pool to the other by NCCL, and not by the object store."""
        cpus = [number for number, device in enumerate(self.cluster.devices) if device.name == "cpu"]
        return goes_direct(giver.devices, taker.devices, cpus, on_cpus=self.direct_on_cpus)

    def _transfer(self, work: Work, giver: PoolState, to: Taker) -> Outcome:
        """Have a role give its weights to its shadow."""
        taker = self._pools[to.pool.name]
        take = replace(work.call, role=to.shadow.name, method=TAKE_WEIGHTS.name)

        def ask(link: Link) -> Iterator[Any]:
            for worker, order in zip(giver.workers, work.orders, strict=True):
                yield worker.execute.remote(work.call, replace(order, link=link))
            takes, weights = Order(np.zeros(0, dtype=np.int64), (), False), Weights(to.trained, (), to.num_updates, link)
            for worker in taker.workers:
                yield worker.execute.remote(take, takes, weights, to.version)

        return self._together((giver, work.call), (taker, take), ask)

    def _together(
        self, giving: tuple[PoolState, Call], taking: tuple[PoolState, Call], ask: Callable[[Link], Iterable[Any]]
    ) -> Outcome:
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
            link = self._links.between(giver, taker)
            refs += ask(link)
            answers = self._gather(refs, both, give, lambda answer: answer.status != "ok")
        except WORKER_GONE as error:  # it was to serve the place where they meet
            lost = self._died(giver, give, 0, _reason(error))
            raise TransferBrokenError([(giver.pool, lost)]) from None
        except WorkerDiedError as error:
            raise self._broken(error, refs, giving, taking) from None
        ordered = [answers[rank] for rank in range(len(refs))]
        spans = tuple(span for answer in ordered for span in answer.spans)
        if all(answer.status == "ok" for answer in ordered):
            return Outcome(None, tuple(answer.result for answer in ordered[:num_givers]), spans)
        self._links.drop(link)
        causes = without_consequences(ordered)
        cause = self._failure(causes[:num_givers], give) or self._failure(causes[num_givers:], take)
        if cause is None and give.id in self._cancelled:
            cause = CallCancelledError("cancelled while weights were on their way", role=give.role, method=give.method)
        return Outcome(None, (), spans, cause or CallError("the weights did not arrive: a rank stopped", role=give.role))

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
        self.close_pool(here[0].pool.name, kill=True)
        of = {"role": here[1].role, "method": here[1].method, "rank": rank - (num_givers if here is taker else 0)}
        lost = [(here[0].pool, WorkerDiedError(error.message, **{**error.fields(), **of}))]
        _, late = ray.wait(list(rest), num_returns=len(rest), timeout=GRACE_S)
        if late:
            why = f"it waits for weights of another pool, whose worker is gone (nothing came for {GRACE_S:g} s)"
            lost.append((other[0].pool, self._died(*other, list(rest).index(late[0]), why)))
        return TransferBrokenError(lost)

    def _gather(self, refs: list[Any], state: PoolState, call: Call, failed: Any) -> dict[int, Any]:
        """Collect every rank's answer.

        Raises:
            WorkerDiedError: a process ended, or ranks did not come back after another one failed.
        """
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        answers: dict[int, Any] = {}
        pending, failed_s = list(refs), None
        while pending:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=0.5)
            for ref in ready:
                rank = rank_of[ref]
                try:
                    answers[rank] = ray.get(ref)
                except WORKER_GONE as error:
                    raise self._died(state, call, rank, _reason(error)) from None
            if pending and failed_s is None and any(failed(answer) for answer in answers.values()):
                failed_s = time.monotonic()
                for worker in state.workers:  # replicas that do not run in lockstep with the failed rank stop here
                    worker.cancel.remote(call.id)
            patient = method_of(call.method).work == "code" and call.id not in self._cancelled
            grace_s = USER_GRACE_S if patient else GRACE_S
            if pending and failed_s is not None and time.monotonic() > failed_s + grace_s:
                stuck = rank_of[pending[0]]
                reasons = [str(a.error if isinstance(a, Answer) else a) for a in answers.values() if failed(a)]
                why = f"it hangs in a collective (nothing came for {grace_s:g} s) after another rank failed: {reasons[0]}"
                raise self._died(state, call, stuck, why)
        return answers

    def _died(self, state: PoolState, call: Call, rank: int, why: str) -> WorkerDiedError:
        spans = [
            f"  {s.role}.{s.method} {s.name} (started {(time.time_ns() - s.start_ns) / 1e9:.1f} s ago)"
            for s in state.last_seen
            if s.rank == rank and s.call_id == call.id
        ]
        member = state.members[rank]
        device, pid = member.device, member.pid
        where = f" on {self._nodes[device]}" if len(set(self._nodes)) > 1 else ""
        details = "its last spans:\n" + ("\n".join(spans) or "  none seen")
        output = self._output(device, 2000)
        details += f"\nits last output:\n{output}" if output else ""
        return WorkerDiedError(
            f"the worker of device {device}{where} (pid {pid}) ended or hangs: {why.rstrip('.')}.",
            role=call.role,
            method=call.method,
            rank=rank,
            details=details,
        )

    @staticmethod
    def _failure(answers: Sequence[Answer], call: Call) -> HfsdkError | None:
        for rank, answer in enumerate(answers):
            if isinstance(answer.error, CallError):
                return type(answer.error)(answer.error.message, **{**answer.error.fields(), "rank": rank})
            if answer.error is not None:
                return answer.error
        if any(answer.status == "cancelled" for answer in answers):
            return CallCancelledError("cancelled at a safe point", role=call.role, method=call.method)
        return None

    def _store(self, call: Call, answers: Sequence[Answer]) -> Stored | None:
        kept = [(rank, a) for rank, a in enumerate(answers) if a.part is not None]
        if not kept:
            return None
        kept = [(rank, a) for rank, a in kept if len(a.rows)] or kept[:1]  # without rows no column has its kind
        parts = tuple(Part(a.rows, a.part, a.num_bytes, rank) for rank, a in kept)
        return Stored(str(call), call.num_rows, parts, _merge_infos([a for _, a in kept], call.num_rows))

    # -- CPU tasks

    @_while_open
    def task(self, work: Work) -> Outcome:
        """Run a function over columns; kill its process when it takes longer than it may."""
        call, order = work.call, work.orders[0]
        tasks = self._ensure_tasks()
        self._await_tasks(call)
        ref, written = tasks.execute.options(num_returns=2).remote(call, order)
        answer = self._await_task(ref, call, work.timeout_s)
        if answer.status == "error":
            assert answer.error is not None
            raise answer.error
        answer.part = None if answer.columns is None else [written]
        self._column_bytes += _inlined_bytes(answer.result) if call.method != REDUCE.name else 0
        return Outcome(self._store(call, [answer]), (answer.result,))

    def _await_tasks(self, call: Call) -> None:
        """Wait until the process for functions is up, so that its start does not count as the function's time."""
        deadline = time.monotonic() + self._start_s
        while not ray.wait([self._tasks_up], timeout=0.2)[0] and time.monotonic() < deadline:
            if call.id in self._cancelled:
                raise CallCancelledError("cancelled before it started")

    def _await_task(self, ref: Any, call: Call, timeout_s: float | None) -> Answer:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ready, _ = ray.wait([ref], timeout=0.2)
            if ready:
                try:
                    answer: Answer = ray.get(ready[0])
                    return answer
                except WORKER_GONE as error:
                    self._restart_tasks()
                    raise self._task_ended(call, str(error)) from None
            if self._tasks_ended():
                ready, _ = ray.wait([ref], timeout=END_SEEN_S)
                if not ready:  # Ray waits until processes that the function forked let go of the worker's sockets
                    self._restart_tasks()
                    raise self._task_ended(call, "it is gone, without a word")
            if call.id in self._cancelled:
                self._restart_tasks()
                raise CallCancelledError("cancelled; its process was ended")
            if deadline is not None and time.monotonic() > deadline:
                self._restart_tasks()
                raise RewardFunctionError(
                    f"{call.function.split('@')[0]} took longer than {timeout_s:g} s and was ended. "
                    "Make it faster, or allow more with session.reward(..., timeout_s=...)."
                )

    def _tasks_ended(self) -> bool:
        """Return whether the process for functions, which is on this machine, has ended."""
        try:
            return bool(psutil.Process(ray.get(self._tasks_up, timeout=0)).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return False  # Ray knows it, or the process is not up yet

    @staticmethod
    def _task_ended(call: Call, why: str) -> CallError:
        kind = RewardFunctionError if method_of(call.method).arguments is Scoring else CallError
        return kind(f"the process that ran {call.function or call.method} ended: {why}")

    def _ensure_tasks(self) -> Any:
        """Return the process of the user's functions; start it where there is none."""
        with self._tasks_lock:
            if self._tasks is None:
                here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
                self._tasks = RayTasks.options(scheduling_strategy=here).remote(str(self._folder / "tasks.log"))
                self._tasks_up = self._tasks.prepare.remote()
            return self._tasks

    def _restart_tasks(self) -> None:
        with self._tasks_lock:
            ray.kill(self._tasks)
            self._tasks = None
        self._ensure_tasks()

    # -- columns

    @_while_open
    def put(self, table: Table) -> Part:
        """Store a local table in this node's object store."""
        return Part(np.arange(table.num_rows), [ray.put(dict(table))], table.nbytes)

    @_while_open
    def fetch(self, picks: Sequence[Pick]) -> Table:
        """Bring columns here."""
        first = picks[0]
        return read(picks, np.arange(sum(len(rows) for rows in first.local_rows)))

    def controller_bytes(self) -> int:
        """Return the column bytes that came through the controller (objects inlined into answers)."""
        return self._column_bytes

    # -- looking and stopping

    def cancel(self, call_id: int, pool: Pool | None) -> None:
        """Ask a call's ranks (or task) to stop."""
        self._cancelled.add(call_id)
        if pool is not None and pool.name in self._pools:
            for worker in self._pools[pool.name].workers:
                worker.cancel.remote(call_id)

    @_while_open
    def progress(self, pool: Pool) -> tuple[Progress | None, tuple[Span, ...]]:
        """Ask the pool's workers how far they are."""
        state = self._pools.get(pool.name)
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
        state = self._pools.get(pool.name)
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
        found: Mapping[str, FileSum] | None = None
        state = self._pools.get(pool.name)
        if state is None:
            raise CheckpointError(f"the workers that were writing {role}'s state ended; save again")
        try:
            written = all(ray.get([w.saved.remote(role) for w in state.workers]))
            if written:
                found = ray.get(state.workers[0].finish_save.remote(role))
        except ray.exceptions.RayTaskError as error:
            raise CheckpointError(str(error.cause)) from None
        except WORKER_GONE:
            raise CheckpointError(f"a worker ended while it wrote {role}'s state; save again") from None
        return found

    @_while_open
    def logs(self, pool: Pool, rank: int) -> str:
        """Return a worker's output, from its node."""
        if not 0 <= rank < pool.size:
            raise PlacementError(f"pool {pool.name!r} has ranks 0 to {pool.size - 1}; asked for rank {rank}")
        return self._output(pool.devices[rank], 20000)

    def _output(self, device: int, num_chars: int) -> str:
        """Return the end of a worker's log; where it is on another node, the worker reads it or, if that is dead, a neighbour."""
        path, node = str(self._folder / f"device{device}.log"), self._nodes[device]
        near = [] if node.here else [member for member in self._devices.values() if self._nodes[member.device] == node]
        for member in sorted(near, key=lambda member: member.device != device):
            try:
                return str(ray.get(member.handle.output.remote(path, num_chars), timeout=LOOK_S))
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                continue
        return tail(path, num_chars)

    def close(self) -> None:
        """End the workers, Ray where this session started it, and remove files and segments."""
        with self._inside:
            self._closed = True
        self._pools.clear()
        if ray.is_initialized():
            self._clear_far_nodes()
            self._end(list(self._devices.values()))
            if self._tasks is not None:
                ray.kill(self._tasks)
        with self._inside:
            self._inside.wait_for(lambda: self._num_inside == 0, CLOSE_S)
        ray_start.leave(self._job_id)
        _remove_segments(self._job_id)
        if self._own_folder is not None:
            self._own_folder.remove()

    def _clear_far_nodes(self) -> None:
        """Have one worker of every other node remove the session's files there."""
        near = {self._nodes[device]: member for device, member in self._devices.items() if not self._nodes[device].here}
        refs = [m.handle.clear.remote(str(self._folder), (self._job_id, _job_on(self._job_id, node))) for node, m in near.items()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=LOOK_S)


def _merge_infos(answers: Sequence[Answer], num_rows: int) -> dict[str, ColumnInfo]:
    """Put the ranks' descriptions together: total bytes, and lengths in row order."""
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
        merged[name] = ColumnInfo(info.kind, info.dtype, sum(i.num_bytes for i in infos), lengths)
    return merged


def _inlined_bytes(value: Any) -> int:
    """Return the bytes of the arrays in a small result, which came through the controller."""
    if isinstance(value, Mapping):
        return sum(_inlined_bytes(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_inlined_bytes(v) for v in value)
    return int(getattr(value, "nbytes", 0)) if getattr(value, "shape", ()) or isinstance(value, Table) else 0


def _sum_progress(seen: Sequence[tuple[int, Mapping[str, float]]]) -> Progress | None:
    running = [(call_id, counters) for call_id, counters in seen if call_id >= 0 and counters]
    if not running:
        return None
    call_id = running[0][0]
    unit = next(iter(running[0][1]))
    done = sum(c.get(unit, 0.0) for _, c in running)
    return Progress(call_id, done, sum(c.get("total", 0.0) for _, c in running), unit.replace("_", "-"))


def _job_on(job_id: str, node: Node) -> str:
    """Return a job's name on one node: ranks with equal names share memory, which those of two nodes cannot."""
    return f"{job_id}-{node.number}"


def _write_piece(name: str, piece: Any, worker: Any) -> Any:
    return worker.write_piece.remote(name, piece)


def _num_threads(nodes: Sequence[Node]) -> int:
    """Return the threads of each worker, such that no node has more of them than processors."""
    cores = {node: (os.cpu_count() or 1) if node.here else num_cores(node) for node in set(nodes)}
    return max(1, min(cores[node] // nodes.count(node) for node in cores))


def _reason(error: Exception) -> str:
    return "its node left the cluster" if "node has died" in str(error) else str(error).splitlines()[0].rstrip(".")


def _wait_gone(pids: Sequence[int], timeout_s: float = 10.0) -> None:
    """Wait until processes have ended, so that their memory is free when this returns."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(psutil.pid_exists(pid) for pid in pids):
        time.sleep(0.02)


def _remove_segments(job_id: str) -> None:
    """Unlink shared memory of this job that killed ranks left behind."""
    for path in Path("/dev/shm").glob(f"hfsdk.{job_id}*") if Path("/dev/shm").is_dir() else ():
        path.unlink(missing_ok=True)
