"""The processes Ray starts: one ``RayWorker`` per device, and one ``RayTasks`` for the user's functions.

A worker has two lanes: *compute* (one thread, orders one after the other) and *control* (progress, cancel and memory while the
other is busy). Columns are put into the node's object store by the rank that wrote them, one object per call and rank, and
read from there without a copy; the controller sees references and lengths.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from hfsdk.core.call_flow import Call
from hfsdk.core.errors import CallError, HfsdkError, LostColumnError
from hfsdk.core.files import FileSum
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Order, Pick, StateGoneError, Weights
from hfsdk.core.table import Column, Ragged, Table, concat, kind_of, take
from hfsdk.core.trace import Span
from hfsdk.engine.calls.host_memory import free_host_bytes
from hfsdk.engine.generation.cpu_support_vllm import remove_segments
from hfsdk.engine.process import startup
from hfsdk.engine.process.rendezvous import Link
from hfsdk.engine.process.tasks import run_task
from hfsdk.engine.weights.model_folders import Manifest, Receiver, find
from hfsdk.engine.weights.moves import StateMove
from hfsdk.engine.worker import environment
from hfsdk.engine.worker.role_host import Parcel, Sent, WorkerSetup
from hfsdk.engine.worker.worker import Reply, Worker

if TYPE_CHECKING:
    from hfsdk.engine.worker.worker import Worker as WorkerType


GONE = (
    ray.exceptions.OwnerDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.ReferenceCountingAssertionError,
)
"""What Ray raises for an object whose owner, or every copy of which, is gone."""


NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(eq=False)
class Answer:
    """What a rank or a task sends back: references and metadata only."""

    status: str
    rows: Any
    part: Any = None
    """``ObjectRef`` of the written columns, held in a list so that Ray does not fetch it."""
    columns: Mapping[str, ColumnInfo] | None = None
    result: Any = None
    error: HfsdkError | None = None
    spans: tuple[Span, ...] = ()
    num_bytes: int = 0


def describe(columns: Mapping[str, Column]) -> dict[str, ColumnInfo]:
    """Return what the controller learns of written columns; equal length arrays are shared, so that they travel once."""
    known: list[np.ndarray[Any, Any]] = []
    described = {}
    for name, column in columns.items():
        lengths = None
        if isinstance(column, Ragged):
            lengths = column.lengths.astype(np.int32)
            same = next((k for k in known if np.array_equal(k, lengths)), None)
            lengths = lengths if same is None else same
            known.append(lengths)
        dtype = "text" if isinstance(column, list) else str(column.dtype)
        described[name] = ColumnInfo(kind_of(column), dtype, _num_bytes(column), lengths)
    return described


def _num_bytes(column: Column) -> int:
    return len(pickle.dumps(column)) if isinstance(column, list) else int(column.nbytes)


def read(picks: Sequence[Pick], rows: Any) -> Table:
    """Map the objects that hold ``rows`` and assemble a table; whole, ordered parts are not copied."""
    columns: dict[str, Column] = {}
    for pick in picks:
        try:
            objects = ray.get([handle[0] for handle in pick.handles])
        except GONE:
            raise LostColumnError(
                f"columns {', '.join(pick.columns)} are gone: the worker that wrote them in {pick.source} died; run it again"
            ) from None
        for name, stored in pick.columns.items():
            parts = [take(held[stored], local) for held, local in zip(objects, pick.local_rows, strict=True)]
            column = parts[0] if len(parts) == 1 else concat(parts)
            columns[name] = column if pick.order is None else take(column, pick.order)
    return Table(columns, rows)


def _state(parts: Sequence[Any], role: str) -> list[Any]:
    """Map the parts of a role's state.

    Raises:
        StateGoneError: a worker that held one ended.
    """
    try:
        return list(ray.get([handle[0] for handle in parts]))
    except GONE:
        raise StateGoneError(f"the state of {role} is gone: it was on its way when a worker that held it ended.") from None


def _keep(content: Any) -> list[Any]:
    """Put an object into this node's store; return its reference, in a list so that Ray does not fetch it."""
    return [ray.put(content)]


def tail(path: str, num_chars: int) -> str:
    """Return the end of a text file, ``""`` where there is none."""
    try:
        return Path(path).read_text(errors="replace")[-num_chars:].strip()
    except FileNotFoundError:
        return ""


class _Process:
    """What both kinds of process share: environment, own log file."""

    def __init__(self, log_file: str, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)
        Path(log_file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # of the session; on other nodes it is made here
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)

    @staticmethod
    def sent(parcel: Parcel) -> Sent:
        """Put a parcel into the node's object store."""
        return Sent(_keep(parcel.content), parcel.num_bytes)

    @staticmethod
    def answer(reply: Reply, order: Order) -> Answer:
        """Describe what was written."""
        answer = Answer(reply.status, order.rows, result=reply.result, error=reply.error, spans=reply.spans)
        if reply.status == "ok" and order.keep and reply.columns is not None:
            answer.columns = describe(reply.columns)
            answer.num_bytes = sum(info.num_bytes for info in answer.columns.values())
        return answer


class WorkerProcess(_Process):
    """The worker process of one device; it joins one pool after another."""

    def __init__(self, device: int, log_file: str, num_threads: int, deterministic: bool = False) -> None:
        super().__init__(log_file, environment.of_worker(num_threads, deterministic))
        self._worker: WorkerType = Worker(device, num_threads)
        self._worker.keep = _keep
        self._worker.gpus = tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))
        self._own_paths = os.environ.get("HFSDK_FETCH_MODELS") != "always"
        self._folders: dict[str, str] = {}
        self._receiver: Receiver | None = None

    @ray.method(concurrency_group="compute")
    def serve_store(self, host: str, link: bool = False) -> str:
        """Serve the store through which the processes of a pool, or of two, find each other; return its URL."""
        return self._worker.serve_store(host, link=link)

    @ray.method(concurrency_group="compute")
    def drop_link(self, number: int) -> None:
        """Leave the world shared with a pool that is gone."""
        self._worker.drop_link(number)

    @ray.method(concurrency_group="compute")
    def join(self, setup: WorkerSetup) -> int:
        """Join a pool's world; return the process id."""
        self._worker.join(setup)
        return os.getpid()

    @ray.method(concurrency_group="compute")
    def leave(self) -> None:
        """Free every role and leave the pool."""
        self._worker.leave()

    @ray.method(concurrency_group="compute")
    def prepare(self) -> None:
        """Import the heavy engines ahead of their first use."""
        with startup.making_what_stays():
            from hfsdk.engine.training import cpu_support_megatron

            cpu_support_megatron.install()
            from hfsdk.engine.generation import rollout
            from hfsdk.engine.worker import hosted  # noqa: F401

            rollout.import_engine()

    @ray.method(concurrency_group="compute")
    def find_folder(self, manifest: Manifest) -> str:
        """Return this node's copy of a model's folder, which :meth:`load` then uses; ``""`` where there is none."""
        self._folders[manifest.folder] = find(manifest, own_path=self._own_paths)
        return self._folders[manifest.folder]

    @ray.method(concurrency_group="compute")
    def receive(self, manifest: Manifest) -> None:
        """Begin to take a model's folder in."""
        self._receiver = Receiver(manifest)

    @ray.method(concurrency_group="compute")
    def write_piece(self, name: str, piece: bytes) -> None:
        """Append to a file of the folder that is being taken in."""
        assert self._receiver is not None
        self._receiver.write(name, piece)

    @ray.method(concurrency_group="compute")
    def finish_folder(self) -> None:
        """Put the folder into this node's cache."""
        assert self._receiver is not None
        self._receiver.finish()
        self._receiver = None

    @ray.method(concurrency_group="compute")
    def load(self, role: RoleSpec, state: Sequence[Any] = (), first: int | None = None) -> Exception | None:
        """Build a role, with a state whose parts are in the object store; return what went wrong."""
        role = replace(role, folder=self._folders.get(role.folder, role.folder))
        try:
            self._worker.load(role, _state(state, role.name), first)
        except StateGoneError as gone:
            return gone
        except Exception as error:  # told to the controller, which raises it at the user's line
            traceback.print_exc()
            return (
                error
                if isinstance(error, HfsdkError)
                else CallError(f"loading {role.name} failed: {error!r}", details=traceback.format_exc())
            )
        return None

    @ray.method(concurrency_group="compute")
    def export(self, role: str) -> Sent | Exception:
        """Put this rank's part of a role's state into the object store."""
        try:
            return self.sent(self._worker.export(role))
        except Exception as error:  # told to the controller, which raises it at the user's line
            traceback.print_exc()
            return CallError(f"taking out the state of {role} failed: {error!r}", details=traceback.format_exc())

    @ray.method(concurrency_group="compute")
    def offer(self, role: str) -> list[Any] | Exception:
        """Put what this rank gives of a role's state, but for the numbers, into the object store."""
        try:
            return _keep(self._worker.offer(role))
        except Exception as error:  # told to the controller, which takes the state out
            traceback.print_exc()
            return CallError(f"offering the state of {role} failed: {error!r}", details=traceback.format_exc())

    @ray.method(concurrency_group="compute")
    def need(self, role: str, given: Sequence[Any]) -> list[Any] | Exception:
        """Put what this rank takes of a state that others offer, but for the numbers, into the object store."""
        try:
            return _keep(self._worker.need(role, _state(given, role)))
        except Exception as error:  # told to the controller, which takes the state out
            traceback.print_exc()
            return CallError(f"asking for the state of {role} failed: {error!r}", details=traceback.format_exc())

    @ray.method(concurrency_group="compute")
    def move_state(
        self, call: Call, link: Link, rank: int, given: Sequence[Any], taken: Sequence[Any], nodes: Sequence[int]
    ) -> Answer:
        """Give a role's state to the ranks of another pool, or take it from them; collective over both."""
        try:
            move = StateMove(rank=rank, given=_state(given, call.role), taken=_state(taken, call.role), nodes=nodes)
        except StateGoneError as gone:
            return Answer("error", NO_ROWS, error=CallError(str(gone), role=call.role, method=call.method))
        order = Order(NO_ROWS, (), False, arguments=move, link=link)
        return self.answer(self._worker.execute(call, lambda: Table({}), order), order)

    @ray.method(concurrency_group="compute")
    def keep(self, role: str, number: int) -> tuple[str, int, int] | Exception:
        """Keep a copy of this rank's part of a role's state; return its layout, updates and bytes."""
        try:
            kept = self._worker.keep_state(role, number)
        except Exception as error:  # told to the controller, which raises it at the user's line
            traceback.print_exc()
            return CallError(f"keeping the state of {role} failed: {error!r}", details=traceback.format_exc())
        return kept.layout, kept.num_updates, kept.num_bytes

    @ray.method(concurrency_group="compute")
    def send_kept(self, number: int) -> Sent | Exception:
        """Put this rank's part of a kept state into the object store."""
        try:
            return self.sent(self._worker.send_kept(number))
        except Exception as error:  # told to the controller, which raises it at the user's line
            traceback.print_exc()
            return CallError(f"sending a kept state failed: {error!r}", details=traceback.format_exc())

    @ray.method(concurrency_group="compute")
    def restore(self, role: str, number: int, state: Sequence[Any]) -> Exception | None:
        """Give a role a kept state: this rank's own, or one whose parts are in the object store; return what went wrong."""
        try:
            self._worker.restore(role, number, _state(state, role))
        except StateGoneError as gone:
            return gone
        except Exception as error:  # told to the controller, which raises it at the user's line
            traceback.print_exc()
            return CallError(f"giving {role} its kept state failed: {error!r}", details=traceback.format_exc())
        return None

    @ray.method(concurrency_group="control")
    def holds(self, number: int) -> bool:
        """Return whether this process keeps a part of a state."""
        return number in self._worker.kept

    @ray.method(concurrency_group="control")
    def forget(self, number: int) -> None:
        """Free this process's part of a kept state."""
        self._worker.kept.pop(number, None)

    @ray.method(concurrency_group="compute")
    def release(self, role: str) -> None:
        """Free a role."""
        self._worker.release(role)

    @ray.method(concurrency_group="compute")
    def execute(self, call: Call, order: Order, weights: Weights | None = None, version: int = 0) -> Answer:
        """Carry out this rank's share of a call."""

        def read_weights() -> Weights:
            assert weights is not None
            try:
                found = ray.get([bundle.content[0] for bundle in weights.bundles])
            except GONE:
                raise LostColumnError(
                    f"the weights of {weights.role.name} for its shadow are gone with the worker that sent them; run the call again"
                ) from None
            bundles = zip(weights.bundles, found, strict=True)
            return replace(weights, bundles=tuple(replace(bundle, content=content) for bundle, content in bundles))

        reply = self._worker.execute(call, lambda: read(order.picks, order.rows), order, read_weights if weights else None, version)
        if reply.error is not None:
            traceback.print_exception(reply.error)
        answer = self.answer(reply, order)
        if answer.columns is not None and reply.columns is not None:
            answer.part = _keep(dict(reply.columns))
        return answer

    @ray.method(concurrency_group="control")
    def cancel(self, call_id: int) -> None:
        """Ask the running call to stop."""
        self._worker.cancel(call_id)

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[int, dict[str, float], list[Span]]:
        """Return the running call's progress."""
        return self._worker.progress()

    @ray.method(concurrency_group="control")
    def memory(self) -> tuple[int, dict[str, int], dict[str, int], dict[str, int]]:
        """Return the bytes in use, by role, and of each role in host memory and asleep."""
        return self._worker.memory()

    @ray.method(concurrency_group="control")
    def free_host_bytes(self) -> int:
        """Return how much memory this node can still give."""
        return free_host_bytes()

    @ray.method(concurrency_group="control")
    def output(self, path: str, num_chars: int) -> str:
        """Return the end of a log of this node."""
        return tail(path, num_chars)

    @ray.method(concurrency_group="control")
    def clear(self, folder: str, job_ids: Sequence[str]) -> None:
        """Remove a session's files from this node: logs, and shared memory that killed ranks left behind."""
        shutil.rmtree(folder, ignore_errors=True)
        for job_id in job_ids:
            remove_segments(job_id)

    @ray.method(concurrency_group="control")
    def saved(self, role: str) -> bool:
        """Return whether this rank's files of a role's last save are written."""
        return self._worker.saved(role)

    @ray.method(concurrency_group="control")
    def finish_save(self, role: str) -> Mapping[str, FileSum]:
        """Complete a role's last save, on rank 0; return what its files must be."""
        return self._worker.finish_save(role)

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        """Return the process id (and show that the process is up)."""
        return os.getpid()


class TaskProcess(_Process):
    """The process that runs the user's functions over columns."""

    def __init__(self, log_file: str) -> None:
        super().__init__(log_file, environment.of_process(1))

    def prepare(self) -> int:
        """Import what nearly every task needs; return the process id."""
        import torch  # noqa: F401

        return os.getpid()

    def execute(self, call: Call, order: Order) -> tuple[Answer, dict[str, Column] | None]:
        """Run one task; return the answer and what it wrote.

        The latter is a return value, not put here: so the caller owns it, and it outlives this process, which is killed when a
        function takes too long.
        """
        try:
            table = read(order.picks, order.rows)
            columns, result = run_task(call.method, table, order.arguments, call.writes)
        except HfsdkError as error:
            return Answer("error", order.rows, error=error), None
        except Exception as error:  # told to the controller, which raises it at the user's line
            return Answer("error", order.rows, error=CallError(f"{error!r}", details=traceback.format_exc())), None
        return self.answer(Reply("ok", columns or None, result), order), columns or None


_remote: Any = ray.remote  # Ray's overloads do not know concurrency groups
RayWorker = _remote(num_cpus=1, max_restarts=0, concurrency_groups={"compute": 1, "control": 2})(WorkerProcess)
NOT_INLINED = {"env_vars": {"RAY_max_direct_call_object_size": "0"}}
"""Return values stay in the object store of the node, small ones too: none comes to the caller unless it is asked for."""
RayTasks = _remote(num_cpus=0, max_restarts=0, runtime_env=NOT_INLINED)(TaskProcess)
