"""A controller that runs nothing: it remembers messages, and calls end at once unless they are held."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import CallCancelledError
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.runtime import Kept, NodeStatus
from hfsdk.core.table import Ragged, Table, kind_of, take
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.session import Session
from hfsdk.session.start import Started

CPU2 = ClusterSpec.parse("1x2 cpu")


def session_over(controller, cluster, kind="ray", **options):
    """Return a session over a stand-in for the controller."""
    return Session(runtime=Started(controller, cluster, kind), **options)


class FakeController:
    """``held`` names methods that run until they are cancelled or let go; ``failing`` maps methods to errors."""

    def __init__(self):
        self.messages = []
        self.held = set()
        self.failing = {}
        self.states = {}
        self.errors = {}
        self.submits = {}
        self.tables = {}
        self.roles = {}
        self.placement = None
        self.updates = {}
        self.step = 0
        self.results = {}
        self.listeners = []
        self.closed = 0
        self.cancel_delay_s = 0.0
        self.num_kept = 0
        self.rooms = ()
        self.nodes = (NodeStatus("node 0", True, True),)
        self.bonus = 0.0
        """Added to every score: how good the policy is by now."""

    def send(self, message):
        self.messages.append(pickle.loads(pickle.dumps(message)))  # every message travels
        return getattr(self, "_" + type(message).__name__.lower())(message)

    def subscribe(self, listener):
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def sent(self, kind):
        return [x for x in self.messages if isinstance(x, kind)]

    def last(self, method):
        return [x for x in self.sent(m.Submit) if x.method == method][-1]

    def let_go(self, call_id):
        self.states[call_id] = "done"

    # -- messages

    def _declare(self, message):
        changed = self.roles.get(message.role.name) != message.role
        self.roles[message.role.name] = message.role
        return changed

    def _askhostroom(self, message):
        return self.rooms

    def _nextstep(self, message):
        pass

    def _inrow(self, message):
        pass

    def _awaitloads(self, message):
        pass

    def _overlook(self, message):
        pass

    def _note(self, message):
        pass

    def _nodes(self, query):
        return self.nodes

    def _remove(self, message):
        del self.roles[message.role]
        self.updates.pop(message.role, None)

    def _place(self, message):
        self.placement = message.placement
        self.roles |= {role.name: role for role in message.roles}
        return message.placement

    def _put(self, message):
        self.tables[self._new_id("done")] = message.table
        return len(self.states)

    def _submit(self, message):
        call_id = self._new_id("running" if message.method in self.held else "done")
        self.submits[call_id] = self.messages[-1]  # without leases, as the real one after the call
        if message.method in self.failing:
            self.states[call_id], self.errors[call_id] = "failed", self.failing[message.method]
        self.tables[call_id] = self._outputs(message)
        self.results[call_id] = self._result(message)
        return call_id

    def _result(self, message):
        if message.method == "update":
            self.updates[message.role] = self.updates.get(message.role, 0) + message.arguments.mini_batches
            return [{"loss": 0.5, "grad_norm": 1.0}] * message.arguments.mini_batches
        if message.method == "save_state":
            Path(message.arguments.folder, message.role).mkdir()
            Path(message.arguments.folder, message.role, "rank0.pt").write_text(str(self.updates.get(message.role, 0)))
            return {"num_updates": self.updates.get(message.role, 0)}
        if message.method == "load_state":
            self.updates[message.role] = int(Path(message.arguments.folder, message.role, "rank0.pt").read_text())
            return {"num_updates": self.updates[message.role]}
        if message.method == "reduce":
            columns = {n: self._column(r) for n, r in message.inputs.items()}
            return message.arguments.shipped.load()(Table(columns))
        return {"run": [0, 1], "grad_norm": 1.5}.get(message.method, {"loss": 0.5})

    def _outputs(self, message):
        n = message.num_rows
        lengths = np.full(n, 3)
        made = {}
        for name in message.writes:
            if name == "response":
                made[name] = Ragged.from_lengths(np.full(3 * n, 104, np.int32), lengths)
            elif name == "finish_reason":
                made[name] = np.array(["stop"] * n)
            elif name == "scores":
                made[name] = np.arange(n, dtype=np.float32) + self.bonus
            elif name in ("policy_version", "temperature", "group"):
                made[name] = np.arange(n, dtype=np.float32)
            else:
                made[name] = Ragged.from_lengths(np.zeros(3 * n, np.float32), lengths)
        return Table(made)

    def _column(self, ref):
        column = self.tables[ref.call_id][ref.name]
        return column if ref.rows is None else take(column, ref.rows)

    def _wait(self, message):
        end = time.monotonic() + message.timeout_s
        while any(self.states[c] == "running" for c in message.call_ids):
            if time.monotonic() >= end:
                return False
            time.sleep(0.005)
        for call_id in message.call_ids:
            if call_id in self.errors:
                raise self.errors[call_id]
        return True

    def _cancel(self, message):
        def stop():
            for call_id in message.call_ids:
                if self.states[call_id] == "running":
                    self.states[call_id], self.errors[call_id] = "cancelled", CallCancelledError("cancelled")

        threading.Timer(self.cancel_delay_s, stop).start() if self.cancel_delay_s else stop()

    def _fetch(self, message):
        return Table({name: self._column(ref) for name, ref in message.columns.items()})

    def _stateof(self, query):
        return self.states[query.call_id]

    def _writerof(self, query):
        submit = self.submits.get(query.call_id)
        return f"{submit.role}.{submit.method}" if submit else "your data"

    def _resultof(self, query):
        return self.results[query.call_id]

    def _infoof(self, message):
        if self.states[message.ref.call_id] != "done":
            return None
        column = self.tables[message.ref.call_id][message.ref.name]
        ragged = isinstance(column, Ragged)
        return ColumnInfo(kind_of(column), "x", 0, column.lengths if ragged else None)

    def _release(self, message):
        for call_id in message.call_ids:
            self.tables.pop(call_id, None)

    def _roles(self, query):
        return {n: q.RoleStatus(r, "loaded", self.updates.get(n, 0)) for n, r in self.roles.items()}

    def _runningcalls(self, query):
        return [s for s in self.states.values() if s == "running"]

    def _upcomingstep(self, message):
        return self.step

    def _currentstep(self, query):
        return self.step

    def _currentplacement(self, query):
        return self.placement

    def _controllerbytes(self, query):
        return 0

    def _nothing(self, query):
        return []

    _callsof = _spansof = _flowsof = _rerunsof = _changes = _devices = _firststep = _nothing

    def _logs(self, message):
        return f"{message.role} rank {message.rank}"

    def _recover(self, message):
        pass

    def _saved(self, message):
        if "saved" in self.failing:
            raise self.failing["saved"]
        return None if "saved" in self.held else {}

    def _snapshot(self, message):
        self.num_kept += 1
        layouts = {name: str(role.train) for name, role in self.roles.items()}
        return tuple(
            Kept(100 * self.num_kept + i, name, layouts[name], (0, 1), (10, 10), self.updates.get(name, 0))
            for i, name in enumerate(message.roles)
        )

    def _rewind(self, message):
        self.updates |= {kept.role: kept.num_updates for kept in message.kept}

    def _forget(self, message):
        pass

    def _close(self, message):
        self.closed += 1

    def _new_id(self, state):
        self.states[len(self.states) + 1] = state
        return len(self.states)


@pytest.fixture
def controller():
    return FakeController()


@pytest.fixture
def session(controller):
    session = session_over(controller, CPU2)
    yield session
    session.close()


@pytest.fixture
def actor(session):
    return session.actor("tiny")


def lengths(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


@pytest.fixture
def length_reward():
    return lengths


@contextmanager
def interrupts_after(*delays_s):
    """Send interrupts so long after the block was entered; the time that starting the thread takes does not count."""
    entered = threading.Event()

    def send():
        entered.wait()
        last_s = 0.0
        for delay_s in delays_s:
            time.sleep(delay_s - last_s)
            last_s = delay_s
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        entered.set()
        yield
    finally:
        thread.join()
