"""The process on this machine that runs the user's functions over columns; it is killed when one takes too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hfsdk.core.arguments import Scoring
from hfsdk.core.call_flow import Call
from hfsdk.core.errors import CallCancelledError, CallError, RewardFunctionError
from hfsdk.core.methods import method_of
from hfsdk.core.runtime import Order
from hfsdk.engine.ray.ray_store import WORKER_GONE
from hfsdk.engine.ray.ray_worker import RayTasks, tail
from hfsdk.engine.worker.answer import Answer

END_SEEN_S = 2.0
"""How long Ray may take to tell of a process on this machine that has ended."""


class TaskRunner:
    """See the module's text."""

    def __init__(self, log_file: Path, start_s: float, cancelled: Set[int]) -> None:
        """Have no process yet.

        Args:
            log_file: of the process.
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
