"""The processes Ray starts: one ``RayWorker`` per device, and one ``RayTasks`` for the user's functions.

A worker has two lanes: *compute* (one thread, orders one after the other) and *control* (progress, cancel and memory while the
other is busy). Columns are put into the node's object store by the rank that wrote them, one object per call and rank, and
read from there without a copy; the controller sees references and lengths.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from hfsdk.core.dataflow import Call
from hfsdk.core.errors import CallError, HfsdkError
from hfsdk.core.files import FileSum
from hfsdk.core.runtime import Order
from hfsdk.core.system import keep_temporary_in
from hfsdk.core.table import Column
from hfsdk.core.trace import Span
from hfsdk.engine.calls.host_memory import free_host_bytes
from hfsdk.engine.generation.cpu_support_vllm import remove_segments
from hfsdk.engine.process.tasks import run_task
from hfsdk.engine.ray.ray_process import LoggedProcess
from hfsdk.engine.ray.ray_store import RayStore
from hfsdk.engine.weights.model_folders import Manifest, Receiver, find
from hfsdk.engine.worker import environment
from hfsdk.engine.worker.answer import Answer, read
from hfsdk.engine.worker.environment import import_engines
from hfsdk.engine.worker.requests import Execute, Load, Request, carry_out
from hfsdk.engine.worker.role_host import WorkerSetup
from hfsdk.engine.worker.worker import Worker


def tail(path: str, num_chars: int) -> str:
    """Return the end of a text file, ``""`` where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")[-num_chars:].strip()
    except FileNotFoundError:
        return ""


def begins(call_id: int) -> str:
    """Return how the line of a worker's log begins that its part of a call starts with."""
    return f"-- call {call_id}: "


def write_begin(call: Call) -> None:
    """Write to this process's log that its part of a call starts; on a full disk it starts all the same."""
    with contextlib.suppress(OSError):  # past sys.stderr, which would keep the line and raise at a print of the user's
        os.write(2, f"{begins(call.id)}{call}\n".encode())


def said_in(output: str, call_id: int) -> str:
    """Return the lines of a call from the end of a worker's log; earlier calls wrote to it, too."""
    if begins(call_id) in output:
        return output.rpartition(begins(call_id))[2].partition("\n")[2].strip()
    return "" if any(line.startswith("-- call ") for line in output.splitlines()) else output


class WorkerProcess(LoggedProcess):
    """The worker process of one device; it joins one pool after another."""

    def __init__(self, device: int, log_file: str, num_threads: int, deterministic: bool = False) -> None:
        super().__init__(log_file, environment.of_worker(num_threads, deterministic))
        keep_temporary_in(Path(log_file).parent)
        self._worker = Worker(device, num_threads, RayStore())
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
        import_engines()

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
    def ask(self, request: Request) -> Answer:
        """Carry out this rank's share of a request; an error is in the answer."""
        if isinstance(request, Load):
            spec = request.spec
            request = replace(request, spec=replace(spec, folder=self._folders.get(spec.folder, spec.folder)))
        elif isinstance(request, Execute):
            write_begin(request.call)
        return carry_out(self._worker, request)

    @ray.method(concurrency_group="control")
    def holds(self, number: int) -> bool:
        """Return whether this process keeps a part of a state."""
        return number in self._worker.kept

    @ray.method(concurrency_group="control")
    def forget(self, number: int) -> None:
        """Free this process's part of a kept state."""
        self._worker.forget_kept(number)

    @ray.method(concurrency_group="compute")
    def release(self, role: str) -> None:
        """Free a role."""
        self._worker.release(role)

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


class TaskProcess(LoggedProcess):
    """The process that runs the user's functions over columns."""

    def __init__(self, log_file: str) -> None:
        super().__init__(log_file, environment.of_process(1))
        keep_temporary_in(Path(log_file).parent)

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
            table = read(order.picks, order.rows, RayStore())
            columns, result = run_task(call.method, table, order.arguments, call.writes)
        except HfsdkError as error:
            return Answer("error", order.rows, error=error), None
        except Exception as error:  # told to the controller, which raises it at the user's line
            return Answer("error", order.rows, error=CallError(f"{error!r}", details=traceback.format_exc())), None
        answer = Answer(rows=order.rows, result=result)
        if order.keep and columns:
            answer.describe(columns)
        return answer, columns or None


class Shelf:
    """Copies tables of other owners: the caller owns the copy."""

    def copy(self, content: dict[str, Column]) -> dict[str, Column]:
        """Return the table as it came."""
        return content


_remote: Any = ray.remote  # Ray's overloads do not know concurrency groups
RayWorker = _remote(num_cpus=1, max_restarts=0, concurrency_groups={"compute": 1, "control": 2})(WorkerProcess)
NOT_INLINED = {"env_vars": {"RAY_max_direct_call_object_size": "0"}}
"""Return values stay in the object store of the node, small ones too, until the caller gets them."""
RayTasks = _remote(num_cpus=0, max_restarts=0, runtime_env=NOT_INLINED)(TaskProcess)
RayShelf = _remote(num_cpus=0, max_restarts=0, runtime_env=NOT_INLINED)(Shelf)
