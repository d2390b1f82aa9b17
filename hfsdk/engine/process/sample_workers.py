"""``SampleWorkers``: processes that run a reward function on one sample each, side by side; one that hangs is killed and named.

::

    this process            worker 0          worker 1
    sample 0, 1    ->       f([s0])           f([s1])   hangs: killed after timeout_s, its line noted, a new one started
    sample 2       ->       f([s2])           .
    sample 3       ->       .                 f([s3])

They live as long as the function does, so that what it keeps stays, and end with this process, even if that is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from hfsdk.core.errors import RewardFunctionError
from hfsdk.core.functions import Shipped
from hfsdk.core.sample_outcome import SampleOutcome
from hfsdk.engine.process.user_lines import line_of_trace

START_S = 120.0
"""How long a process may take to import the function's modules; its start is not the function's time."""

TRACE_S = 5.0
"""How long a process that hangs may take to say where, on a busy machine."""

MOST_TRACE_BYTES = 65536

MOST_FAILURES = 8
"""Failed samples after which a call that will raise does no more."""

Sample = tuple[Mapping[str, Any], int | None]
"""The arguments of the function, a list of one each, and how many numbers it shall return (``None``: one for the sample)."""


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    channel: Connection
    traces: int
    """The descriptor from which traces are read."""
    ready: bool = False
    row: int | None = None
    """Number of the sample that it runs."""
    since: float = 0.0

    def end(self) -> int:
        """Kill it with everything that it started, and return its exit code."""
        if sys.platform != "win32":
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.channel.close()
        os.close(self.traces)
        return self.process.wait()

    def where(self) -> tuple[str, str]:
        """Return the user's line at which it is, and its traceback."""
        if sys.platform != "win32":
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)
        text = b""
        deadline = time.monotonic() + TRACE_S
        while (left := deadline - time.monotonic()) > 0 and wait([self.traces], left):
            text += os.read(self.traces, MOST_TRACE_BYTES)
            deadline = min(deadline, time.monotonic() + 0.05)  # what is written at once
        return line_of_trace(text.decode(errors="replace"))


class SampleWorkers:
    """Processes that run a reward function sample by sample. One thread uses it."""

    def __init__(self, shipped: Shipped, count: int) -> None:
        """Have no process yet; they start when there is something to do, in the thread with which they shall end."""
        self._shipped, self._count = shipped, count
        self._workers: list[_Worker] = []

    def run(self, samples: Sequence[Sample], timeout_s: float, most_failures: int | None = None) -> list[SampleOutcome | None]:
        """Run every sample and return the outcomes, in order; ``None``: it was not run, because too many had failed.

        Args:
            samples: one after the other, each to the next worker that is free.
            timeout_s: the most seconds of one sample.
            most_failures: after so many no more are begun.

        Raises:
            RewardFunctionError: the function cannot be loaded in its process.
        """
        outcomes: list[SampleOutcome | None] = [None] * len(samples)
        waiting = deque(range(len(samples)))
        try:
            while waiting or any(worker.row is not None for worker in self._workers):
                if most_failures is not None and sum(bool(outcome and outcome.failure) for outcome in outcomes) >= most_failures:
                    waiting.clear()
                self._hand_out(waiting, samples)
                for worker in self._due(timeout_s):
                    self._take(worker, outcomes, timeout_s)
        except BaseException:
            self.close()
            raise
        return outcomes

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End all processes."""
        while self._workers:
            self._workers.pop().end()

    def _hand_out(self, waiting: deque[int], samples: Sequence[Sample]) -> None:
        """Give waiting samples to free workers, and start as many as there is work for."""
        for worker in [w for w in self._workers if w.row is None and w.process.poll() is not None]:
            self._workers.remove(worker)  # it ended while it had nothing to do, e.g. for want of memory
            worker.end()
        busy = sum(worker.row is not None for worker in self._workers)
        while len(self._workers) < min(self._count, busy + len(waiting)):
            self._workers.append(_start(self._shipped))
        for worker in self._workers:
            if waiting and worker.ready and worker.row is None:
                worker.row, worker.since = waiting.popleft(), time.monotonic()
                with suppress(ConnectionError):  # it has died: told when its end is read
                    worker.channel.send(samples[worker.row])

    def _due(self, timeout_s: float) -> list[_Worker]:
        """Wait for a worker that has something to say, or whose time is over."""
        at_work = [worker for worker in self._workers if worker.row is not None or not worker.ready]
        ends = [worker.since + (timeout_s if worker.ready else START_S) for worker in at_work]
        if not at_work:
            return []
        spoke = wait([worker.channel for worker in at_work], timeout=max(0.0, min(ends) - time.monotonic()))
        now = time.monotonic()
        return [worker for worker, end in zip(at_work, ends, strict=True) if worker.channel in spoke or now >= end]

    def _take(self, worker: _Worker, outcomes: list[SampleOutcome | None], timeout_s: float) -> None:
        """Take a worker's answer; end one whose time is over, or that has ended itself."""
        row = worker.row
        if worker.channel.poll():
            try:
                answer: SampleOutcome = worker.channel.recv()
            except (EOFError, ConnectionError):
                answer = self._gone(worker)
            if not worker.ready:
                if answer.failure:
                    raise RewardFunctionError(answer.message, details=answer.details)
                worker.ready = True
                return
        elif not worker.ready:
            raise RewardFunctionError(f"{self._shipped.name} could not be loaded in {START_S:g} s in a process of its own")
        else:
            line, details = worker.where()
            seconds = time.monotonic() - worker.since
            self._workers.remove(worker)
            worker.end()
            message = f"{self._shipped.name} took longer than {timeout_s:g} s and was ended"
            answer = SampleOutcome(failure="took too long", message=message, line=line, details=details, seconds=seconds)
        if row is not None:
            outcomes[row], worker.row = answer, None

    def _gone(self, worker: _Worker) -> SampleOutcome:
        """Return the words for a worker that ended itself."""
        self._workers.remove(worker)
        code = worker.end()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        message = f"the process that ran {self._shipped.name} ended {how}"
        return SampleOutcome(failure="ended its process", message=message, seconds=time.monotonic() - worker.since)


def _start(shipped: Shipped) -> _Worker:
    """Start a process, in its own session: a Ctrl-C in a terminal does not reach it, and it can be ended with its children."""
    ours, theirs = socket.socketpair()
    traces, write_traces = os.pipe()
    descriptors = map(str, (theirs.fileno(), write_traces, os.getpid()))
    arguments = [sys.executable, "-m", "hfsdk.engine.process.sample_process", *descriptors]
    try:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), write_traces), start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
    finally:
        theirs.close()
        os.close(write_traces)
    worker = _Worker(process, Connection(ours.detach()), traces, since=time.monotonic())
    with suppress(ConnectionError):
        worker.channel.send(shipped)
    return worker


MOST_POOLS = 4
"""Functions whose processes are kept, the last ones used."""

_pools: dict[tuple[Shipped, int], SampleWorkers] = {}


def workers_of(shipped: Shipped, count: int) -> SampleWorkers:
    """Return a function's processes, the same ones at its next call: models that it has loaded stay."""
    pool = _pools.pop((shipped, count), None) or SampleWorkers(shipped, count)
    _pools[shipped, count] = pool
    while len(_pools) > MOST_POOLS:
        _pools.pop(next(iter(_pools))).close()
    return pool
