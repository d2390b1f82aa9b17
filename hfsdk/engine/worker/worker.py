"""One worker process per device: hosts every role placed there and carries out its share of each call.

Plain Python over torch.distributed; the runtime that starts it (Ray) only moves orders in and columns out. The compute lane is
one thread; the control lane (progress, cancel, memory) reads what it must and never touches a model.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from hfsdk.core.dataflow import Call
from hfsdk.core.errors import CallError, CheckpointError, HfsdkError
from hfsdk.core.files import FileSum
from hfsdk.core.methods import method_of
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Order, Weights
from hfsdk.core.trace import Span
from hfsdk.engine.process import deterministic, gloo_groups, malloc_settings, rendezvous
from hfsdk.engine.process.clocks import EventClock
from hfsdk.engine.process.gpus import Seen
from hfsdk.engine.process.recorder import Recorder
from hfsdk.engine.process.safepoint import Cancelled, PeerFailed, SafePoint
from hfsdk.engine.process.tasks import user_traceback
from hfsdk.engine.worker import environment
from hfsdk.engine.worker.answer import Answer, read
from hfsdk.engine.worker.role_host import ObjectStore, OwnStore, WorkerSetup

if TYPE_CHECKING:
    from hfsdk.engine.process.keyed_store import StoreServer
    from hfsdk.engine.training.checkpoint import StateWriter
    from hfsdk.engine.weights.direct import DirectLinks, Tensors, Way
    from hfsdk.engine.worker.kept_share import KeptShare
    from hfsdk.engine.worker.role_engine import RoleEngine
    from hfsdk.resharding.reshard_report import TransportReport


class Worker:
    """The compute side of a worker process."""

    def __init__(self, device: int, num_threads: int = 1, store: ObjectStore | None = None) -> None:
        """Host no role yet.

        Args:
            device: the device's number.
            num_threads: the threads of torch.
            store: the store of large objects; without it this process is alone.
        """
        self.store = store or OwnStore()
        self.setup = WorkerSetup(device=device, rank=0, world_size=1, pool="", job_id="", store="", num_threads=num_threads)
        self.recorder = Recorder(device=device, rank=0, gauge=self._memory)
        self._process = psutil.Process()
        self.roles: dict[str, RoleEngine] = {}
        self.saves: dict[str, StateWriter] = {}
        """The last save of each role; it goes on when the role is released."""
        self.kept: dict[int, KeptShare] = {}
        """States of roles that snapshots refer to; they stay when the role moves or is released."""
        self._running_call = -1
        self._cancel_asked = -1
        self._served: dict[str, StoreServer] = {}
        """The stores that this process serves: for its pool, and for the last link of two pools."""
        self._links: DirectLinks | None = None
        self._half_built = False
        self._knocks = 0
        """Packets of strangers that were reported."""
        self.gpus: tuple[str, ...] = ()
        """Ray's ids of the GPUs that it gave this process; set by the runtime."""
        self._gpu: int | None = None
        """Torch's number of its GPU, named wherever another thread than the compute lane asks."""

    def serve_store(self, host: str, *, link: bool = False) -> str:
        """Serve the store through which the next pool's processes find each other, until this one leaves it; return its URL.

        With ``link`` it is for the ranks of two pools, this one's and another.
        """
        self._end_store("link" if link else "pool")
        self._served["link" if link else "pool"], url = rendezvous.serve(host)
        return url

    def _end_store(self, of: str) -> None:
        if of in self._served:
            self._served.pop(of).close()

    def join(self, setup: WorkerSetup) -> None:
        """Import the engines and join a pool's world; collective."""
        environment.import_trainer()
        import torch

        from hfsdk.engine.weights.direct import DirectLinks

        self._links = self._links or DirectLinks()  # before a call can be cancelled
        self.setup = setup
        self.recorder.rank, self.recorder.pool = setup.rank, setup.pool
        torch.set_num_threads(self.setup.num_threads)
        if self.gpus:
            seen = Seen(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count(), torch.__version__)
            self._gpu = seen.index(self.gpus)
            torch.cuda.set_device(self._gpu)  # of this thread, the compute lane
            if setup.deterministic:
                self._be_deterministic()
            self.recorder.clock = EventClock()
        rendezvous.set_interface(setup.address)
        rendezvous.join(setup.store, setup.rank, setup.world_size, self._gpu, setup.collective_timeout_s)

    def _be_deterministic(self) -> None:
        """Have every kernel of this process add in one order, before any of them has run.

        Raises:
            PlacementError: this GPU has none for it.
        """
        import torch

        from hfsdk.engine.generation import rollout_engine

        deterministic.check_gpu(torch.cuda.get_device_name(self._gpu), torch.cuda.get_device_capability(self._gpu))
        deterministic.switch_on()
        rollout_engine.use_batch_invariant_kernels()

    def _memory(self) -> dict[str, int]:
        """Return the bytes resident in host memory and, on a GPU, those torch's tensors have and those it holds."""
        usage = {"rss_bytes": int(self._process.memory_info().rss)}
        if self._gpu is not None:
            import torch

            away = self._away()
            allocated, reserved = torch.cuda.memory_allocated(self._gpu), torch.cuda.memory_reserved(self._gpu)
            usage |= {"allocated_bytes": max(0, allocated - away), "reserved_bytes": max(0, reserved - away)}
        return usage

    def _away(self) -> int:
        """Return the bytes that torch counts as allocated and that others have, because rollouts sleep."""
        return sum(hosted.rollout.away_bytes for hosted in list(self.roles.values()) if hosted.rollout is not None)

    def leave(self) -> None:
        """Free every role and leave the pool's world; the process is then as before :meth:`join`."""
        import torch.distributed as dist

        for role in list(self.roles):
            self.release(role)
        if self._links is not None:
            self._links.leave_all()
        if dist.is_initialized():
            from hfsdk.engine.training.megatron_groups import forget_groups

            forget_groups()
            dist.destroy_process_group()
        for of in list(self._served):
            self._end_store(of)

    @property
    def links(self) -> DirectLinks:
        """The worlds that this process shares with those of other pools."""
        assert self._links is not None  # it is in a pool
        return self._links

    def exchange(
        self, way: Way, link: rendezvous.Link, sources: Tensors, targets: Tensors, safe: SafePoint,
        report_to: Callable[[TransportReport], None] | None = None,
    ) -> TransportReport:  # fmt: skip
        """Give or take weights over a link, once all of its ranks have agreed that they can; collective over both pools.

        Args:
            way: the plan of what goes where.
            link: over which.
            sources: local tensors to give from.
            targets: local tensors to take into.
            safe: the point at which the call may stop.
            report_to: a function that is called with the report, also where weights did not arrive as they left.

        Raises:
            WeightMismatchError: on the rank where they did not.
        """
        from hfsdk.engine.weights.fingerprints import MOVE_AGAIN, mismatch

        with self.links.using(link, way.route.rank, self._running_call, self._gpu) as group:
            safe.agree(group, way.problem(sources, targets))
            sums = way.fingerprints(sources)
            report = way.move(sources, targets, group)
            self.links.settle()
            proof = way.proof(sums, targets, group)
            report = replace(report, proof=proof)
            if report_to is not None:
                report_to(report)
            safe.agree(group, mismatch(way.route.name, proof, MOVE_AGAIN))
            return report

    def drop_link(self, number: int) -> None:
        """Leave a link, as the other pool is gone."""
        if self._links is not None:
            self._links.leave(number)

    def load(self, role: RoleSpec, state: Sequence[Any] = (), first: int | None = None) -> None:
        """Build a role; collective over the pool.

        Args:
            role: the role to build.
            state: the state's parts, of the ranks of the place it comes from.
            first: the first rank of the part of the pool where it lives; ``None`` for the whole pool.
        """
        from hfsdk.engine.worker.role_engine import RoleEngine

        if self._half_built:  # the exception that ended it held its objects
            gc.collect()
        if role.name in self.roles:
            self.release(role.name)
        self.use_this_thread()
        self._half_built = True
        self.roles[role.name] = RoleEngine(role, self, state, first)
        self._half_built = False

    def rest(self) -> None:
        """Have every rollout here that sleeps give up its memory: another phase begins, of whichever role."""
        for hosted in self.roles.values():
            hosted.rest()

    def release(self, role: str) -> None:
        """Free a role."""
        hosted = self.roles.pop(role, None)
        if hosted is not None:
            hosted.close()
            del hosted
            malloc_settings.give_back()

    def forget_kept(self, number: int) -> None:
        """Free this rank's share of a snapshot's state."""
        if self.kept.pop(number, None) is not None:
            malloc_settings.give_back()

    def execute(self, call: Call, order: Order, weights: Weights | None = None, version: int = 0) -> Answer:
        """Carry out this rank's share of a call; every way it can end is in the answer.

        Args:
            call: the call, for spans.
            order: the arguments, and the rows of this rank.
            weights: the weights that the trained role's ranks have addressed to this rank; for a shadow that lacks it.
            version: the version of the weights that a shadow must have by then.
        """
        self.use_this_thread()
        self._running_call = call.id
        template = Span(
            name=call.method, role=call.role, call_id=call.id, method=call.method, step=call.step, start_ns=0, phase=call.phase
        )
        answer, columns = Answer(rows=order.rows), None
        try:
            with self.recorder.call(template), self.recorder.span(call.method) as whole:
                with self.recorder.span("fetch") as attrs:
                    table = read(order.picks, order.rows, self.store)
                    attrs["bytes"] = table.nbytes
                hosted = self.roles[call.role]
                if weights is not None:
                    with self.recorder.span("sync") as attrs:
                        transfer = hosted.take_weights(weights, version, self._safe_point(call.id))
                        attrs.update(bytes=transfer.bytes_received, sources=sum(count > 0 for count in transfer.received_from))
                # a shadow whose last transfer broke off must not compute with weights of two versions
                if method_of(call.method).uses_weights:
                    hosted.shadow.check_version(version)
                columns, answer.result = hosted.run(call.method, table, order, self._safe_point(call.id))
                whole.update(self._parts_of_memory())
                if (knocks := gloo_groups.knocks()) > self._knocks:
                    whole["strangers"], self._knocks = knocks - self._knocks, knocks
        except Cancelled:
            answer.status = "cancelled"
        except PeerFailed:
            answer.status = "peer"
        except Exception as error:  # everything is told to the controller, which knows the user's line
            answer.status, answer.error = "error", _as_hfsdk_error(error)
        self._running_call = -1
        answer.spans = tuple(self.recorder.take()[0])
        if answer.status == "ok" and order.keep and columns is not None:
            answer.describe(columns)
            answer.part = self.store.put(dict(columns))
        return answer

    def cancel(self, call_id: int) -> None:
        """Ask the running call to stop at its next safe point (control lane)."""
        self._cancel_asked = call_id
        if self._links is not None:
            self._links.cut(call_id)

    def progress(self) -> tuple[int, dict[str, float], list[Span]]:
        """Return the running call, its counters and the spans running now (control lane)."""
        with self.recorder._lock:
            running = list(self.recorder.running)
        return self._running_call, dict(self.recorder.progress), running

    def memory(self) -> tuple[int, dict[str, int], dict[str, int], dict[str, int]]:
        """Return the memory in use now (control lane).

        That is: bytes this process uses, bytes of each role, bytes in host memory of each that offloads, and bytes that are nowhere
        of each whose rollout can sleep, because it does.
        """
        import psutil
        import torch

        here = list(self.roles.items())
        roles = {name: hosted.memory_bytes() for name, hosted in here}
        offloaded = {name: hosted.offloaded_bytes() for name, hosted in here if hosted.spec.offloads}
        asleep = {name: hosted.asleep_bytes() for name, hosted in here if hosted.rollout is not None and hosted.rollout.sleeps}
        if self._gpu is not None:
            used = max(0, int(torch.cuda.memory_allocated(self._gpu)) - self._away())
        else:
            used = int(psutil.Process(os.getpid()).memory_full_info().pss)
        return used, roles, offloaded, asleep

    def _parts_of_memory(self) -> dict[str, int]:
        """Return the bytes of this worker's roles by what they are for (see ``hfsdk.core.trace``)."""
        parts: Counter[str] = Counter()
        for hosted in self.roles.values():
            parts.update(hosted.memory_parts())
            if hosted.rollout is not None and hosted.rollout.sleeps:
                parts["asleep"] += hosted.asleep_bytes()
        return {f"{name}_bytes": num for name, num in parts.items()}

    def saved(self, role: str) -> bool:
        """Return whether this rank's files of a role's last save are written (control lane).

        Raises:
            CheckpointError: they cannot be, or this process never began to.
        """
        if role not in self.saves:
            raise CheckpointError(f"the worker that was writing {role}'s state ended; save again")
        return self.saves[role].written()

    def finish_save(self, role: str) -> Mapping[str, FileSum]:
        """Complete a role's last save, on rank 0, when every rank has written (control lane); return what its files must be.

        Raises:
            CheckpointError: it cannot be written.
        """
        from hfsdk.engine.training.checkpoint import finish_save

        return finish_save(self.saves.pop(role))

    def _safe_point(self, call_id: int) -> SafePoint:
        cancelled: Callable[[], bool] = lambda: self._cancel_asked == call_id  # noqa: E731
        return SafePoint(cancelled)

    def use_this_thread(self) -> None:
        """Set what torch keeps per thread: actor methods do not run on the main thread."""
        import torch

        torch.set_num_threads(self.setup.num_threads)
        torch.set_grad_enabled(True)


def _as_hfsdk_error(error: Exception) -> HfsdkError:
    """Return an error as the controller can send it on: hfsdk's own as it is, others with the user's frames, or all."""
    if isinstance(error, HfsdkError):
        return error
    return CallError(f"{type(error).__name__}: {error}", details=user_traceback(error))
