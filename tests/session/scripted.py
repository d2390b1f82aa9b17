"""``ScriptedRuntime``: the simulated runtime, whose calls write stated values, wait until they are let go, or fail.

It goes under a session as Ray does (``hf.Session(runtime=ScriptedRuntime())``): everything above the seam is the real thing.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.columns import dtype_of
from hfsdk.core.errors import CallCancelledError, WorkerDiedError
from hfsdk.core.runtime import CallOutcome
from hfsdk.core.table import Ragged, Table
from hfsdk.engine.controller.records import stored_table
from hfsdk.engine.process.tasks import run_task
from hfsdk.engine.simulation.runtime import SimulatedRow, SimulatedRuntime
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.session.client import ControllerClient
from tests.expect import until

LEARNED = {"loss": 0.5, "grad_norm": 1.0}
"""What every optimizer step measures."""


class ScriptedRuntime(SimulatedRuntime):
    """Model calls write ``columns``; functions over columns are called, in this process."""

    kind = "ray"  # a session takes its values for measured ones

    def __init__(self, cluster="1x2 cpu"):
        super().__init__(ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster, PerfModel())
        self.columns = {"response": ord("h"), "finish_reason": "stop", "temperature": 1.0}
        """Column -> the value of all its entries, where that is not 0."""
        self.results = {"grad_norm": 1.5, "compute_loss": 0.5}
        """Method -> what every rank reports."""
        self.failing = {}
        """Method -> the error that its calls end with; ``"saved"``: of the files of a save."""
        self.works = []
        """What reached the runtime, in order."""
        self.asked_to_stop, self.deaf, self.closed = [], False, 0
        self._holding, self._stopped, self._changed = set(), set(), threading.Condition()

    def sent(self, *methods):
        """Return the works of these methods, of all without any."""
        return [work for work in self.works if not methods or work.call.method in methods]

    def hold(self, method):
        """Keep its calls running until they are let go or, unless the runtime is ``deaf``, cancelled."""
        self._holding.add(method)

    def let_go(self):
        """Let all that is held go on, whether it was cancelled or not."""
        with self._changed:
            self._holding.clear()
            self._stopped.update(self.asked_to_stop)
            self._changed.notify_all()

    # -- the seam

    def call(self, work):
        error = self._end_of(work)
        if error is not None:
            return CallOutcome(None, error=error)
        outcome, method = super().call(work), work.call.method
        result = self.results.get(method, measured(outcome.results[0]))
        stored = outcome.stored and replace(outcome.stored, parts=tuple(self._valued(work, p) for p in outcome.stored.parts))
        return CallOutcome(stored, (result,) * len(outcome.results))

    def task(self, work):
        error, call, order = self._end_of(work), work.call, work.orders[0]
        if error is not None:
            return CallOutcome(None, error=error)
        columns, value = run_task(call.method, self.fetch(order.picks), order.arguments, call.writes)
        if not columns:
            return CallOutcome(None, (value,))
        return CallOutcome(stored_table(str(call), Table(columns), (self.put(Table(columns)),)), (value,))

    def cancel(self, call_id, pool):
        with self._changed:
            self.asked_to_stop.append(call_id)
            self._stopped.update(() if self.deaf else [call_id])
            self._changed.notify_all()

    def saved(self, role, pool):
        if "saved" in self.failing:
            raise self.failing["saved"]
        return None if "saved" in self._holding else super().saved(role, pool)

    def close(self):
        self.closed += 1
        self.let_go()
        super().close()

    def _end_of(self, work):
        """Wait while the call is held; return the error that it ends with, or ``None``."""
        call = work.call
        with self._changed:
            self.works.append(work)
            self._changed.wait_for(lambda: call.method not in self._holding or call.id in self._stopped)
        error = CallCancelledError("cancelled") if call.id in self._stopped else self.failing.get(call.method)
        if isinstance(error, WorkerDiedError):
            raise error
        return error

    def _valued(self, work, part):
        """Return a part of what was simulated, with values."""
        columns = {}
        for name, lengths in part.handle.lengths.items():
            value = part.rows // work.orders[0].arguments.copies if name == "group" else self.columns.get(name, 0)
            values = np.full(len(part.rows) if lengths is None else int(lengths.sum()), value, dtype_of(name))
            columns[name] = values if lengths is None else Ragged.from_lengths(values, lengths)
        return replace(part, handle=replace(part.handle, table=Table(columns)))


def measured(result):
    """Return what a rank of a real session would report where a simulated one has seconds and no numbers."""
    if isinstance(result, list):
        return [measured(row) for row in result]
    if not isinstance(result, SimulatedRow):
        return result
    return {name: value for name, value in result.items() if name != "seconds"} | LEARNED


def waits(*functions):
    """Whether the main thread is blocked in one of these: by default where it waits for calls, or for cancelled ones to stop."""
    codes = [function.__code__ for function in functions or (ControllerClient.wait, ControllerClient.settle)]
    frame = sys._current_frames()[threading.main_thread().ident]
    blocked = frame.f_code.co_name in ("wait", "settle")
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return blocked and frame is not None


@contextmanager
def let_go_when(runtime, wanted):
    """Let go what is held as soon as ``wanted()`` while the block runs, or when it has ended."""
    over = threading.Event()

    def watch():
        until("somebody waits for what is held", lambda: over.is_set() or wanted())
        runtime.let_go()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


def learn(model, num_updates):
    """Take so many optimizer steps: how much a state has learned tells it from others."""
    for _ in range(num_updates):
        model.step().wait()


def lengths(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
