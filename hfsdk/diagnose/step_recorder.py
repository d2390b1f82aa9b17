"""Steps of a run taken again, with their calls recorded, from the snapshots that the run takes of itself."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from hfsdk.core.arguments import Learning
from hfsdk.core.batch import Batch
from hfsdk.core.errors import CheckpointError, DependencyError, HfsdkError, OptionError
from hfsdk.core.methods import UPDATE
from hfsdk.core.pending import ColumnRef, Lease
from hfsdk.core.snapshot import Snapshot
from hfsdk.core.text import listed
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.host_memory import check_room, too_large
from hfsdk.run.recovery import is_death
from hfsdk.run.run import CurrentRun
from hfsdk.session.algorithm import Algorithm
from hfsdk.session.client import ControllerClient, uninterrupted
from hfsdk.session.context import STEPS, Context
from hfsdk.session.placing import Deployment
from hfsdk.session.streams import RowStream
from hfsdk.state.snapshots import Snapshots

Watch = Callable[[m.Submit], Mapping[int, Any]]
"""Looks at a call's message right before it is sent; what it returns is kept with the call."""


class StepHost(Protocol):
    """The part of a session that is needed to take steps again."""

    @property
    def context(self) -> Context:
        """The session's name, counters and notices."""
        ...

    @property
    def client(self) -> ControllerClient:
        """The client that calls are sent through."""
        ...

    @property
    def deployment(self) -> Deployment:
        """The roles, and where they are placed."""
        ...

    @property
    def runs(self) -> CurrentRun:
        """The session's current run, or its last."""
        ...

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots: taken, and gone back to."""
        ...


class StoppedHere(Exception):  # noqa: N818 - no failure: the step is done again up to here
    """The call before which a step was to stop is next."""


@dataclass(eq=False)
class SubmittedCall:
    """A call of a step."""

    index: int
    """The call's place among the step's calls."""
    message: m.Submit
    lease: Lease
    weights: Mapping[int, Any] = field(default_factory=dict)
    """The answer of the recorder's watcher, right before the call was sent."""

    @property
    def call_id(self) -> int:
        """The call's id."""
        return self.lease.call_id

    @property
    def name(self) -> str:
        """The role and the method, e.g. ``"actor.update"``."""
        return f"{self.message.role}.{self.message.method}"

    @property
    def written(self) -> dict[str, ColumnRef]:
        """The columns that it writes."""
        return {name: ColumnRef(self.call_id, name, lease=self.lease) for name in self.message.writes}

    @property
    def learning(self) -> Learning | None:
        """The arguments of an update; ``None`` of another call."""
        arguments = self.message.arguments
        return arguments if self.message.method == UPDATE.name and isinstance(arguments, Learning) else None


class StepRecorder:
    """The calls that this thread submits while it runs.

    Args:
        client: the client whose calls are recorded.
        watch: a function that is called with each call's message right before it is sent; what it returns is kept with the call.
        stop_before: the place of the call before which the step ends by `StoppedHere`.
    """

    def __init__(self, client: ControllerClient, watch: Watch = lambda message: {}, stop_before: int = -1) -> None:
        self._client, self._watch, self._stop_before = client, watch, stop_before
        self._thread, self._busy = threading.get_ident(), False
        self._seen: Mapping[int, Any] = {}
        self.calls: list[SubmittedCall] = []
        self.next: m.Submit | None = None
        """The call before which it has stopped."""
        self.error: HfsdkError | None = None
        """The error that the step failed with."""
        self.numbers: Mapping[str, float] = {}
        """The numbers that the algorithm's ``metrics`` returned for the step."""

    def before(self, message: m.Submit) -> None:
        """Stop before this call, or have the watcher look at it."""
        if self._others():
            return
        if len(self.calls) == self._stop_before:
            self.next = message
            raise StoppedHere
        self._busy = True
        try:
            self._seen = self._watch(message)
        finally:
            self._busy = False

    def take(self, message: m.Submit, lease: Lease) -> None:
        """Add a submitted call to the recording."""
        if not self._others():
            self.calls.append(SubmittedCall(len(self.calls), message, lease, self._seen))

    def _others(self) -> bool:
        """Whether the call is the watcher's, or another thread's."""
        return self._busy or threading.get_ident() != self._thread

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the calls that are made in this block."""
        self._client.tape = self
        try:
            yield
        finally:
            self._client.tape = None

    def batch(self, upto: int) -> Batch:
        """Return the columns that the calls so far read and wrote, of as many rows as call ``upto`` has.

        What a call has not written, because it failed or is not over, is left out.
        """
        rows = self.calls[upto].message.num_rows
        refs: dict[str, ColumnRef] = {}
        for call in self.calls[: upto + 1]:
            if call.message.num_rows == rows:
                done = call.written if self._client.state(call.call_id) == "done" else {}
                refs |= {**call.message.inputs, **done}
        whole = {n: ref for n, ref in refs.items() if self._client.state(ref.call_id) == "done"}
        return Batch(self._client, whole, rows)


# -- the snapshots that a run takes of itself, so that its steps can be taken again; bounded in time and memory

SHARE = 0.04
"""The share of the time of a run's steps that its snapshots may take; a run of a few steps has taken one all the same."""
MEMORY_SHARE = 0.25
"""The share of a node's free host memory that one of them may take."""
TOLD_SHARE = 0.05
"""The share of that memory from which on a notice says so."""


@dataclass(eq=False)
class RollingSnapshots:
    """The newest few snapshots that a run takes of itself.

    ::

        step        0   1   2   3   4   5   6   7      one before the first step; the next when the steps since have paid for it:
        snapshots   s               s           s      together they take SHARE of the steps' time at most
        kept                        s           s      the newest two; from a bad step on those from before it

    Each is a snapshot as ``session.snapshot`` takes it, but for that neither ``session.snapshots`` nor the history lists it.
    """

    host: StepHost
    most: int
    """Snapshots that are kept; 0 takes none."""
    saving: Callable[[], AbstractContextManager[None]]
    """Marks the moment between two steps in which the run's own thread may copy."""
    snapshots: list[Snapshot] = field(default_factory=list)
    """The oldest first."""
    seconds: float = 0.0
    """The seconds that they have taken."""
    last_s: float = 0.0
    """The seconds that the last one took."""
    steps_s: float = 0.0
    """The seconds that the run's steps have taken."""
    frozen: bool = False
    """Whether a step was bad, so that those from before it are to stay."""
    noticed: bool = False
    """Whether a notice said how much memory they take."""
    refused: str = ""
    """Why none is taken, where that is so."""

    def before_step(self) -> None:
        """Take one where the steps so far pay for it."""
        due = not self.snapshots or (not self.frozen and self.seconds + self.last_s <= SHARE * self.steps_s)
        if not self.most or self.refused or not due or not self.host.snapshots.trained:
            return
        with self.saving():
            room = self.host.snapshots.room()  # loads what is not loaded yet, which is no part of a snapshot
            begun = time.perf_counter()
            if words := too_large(room, MEMORY_SHARE):
                self._refuse(words)
                return
            if not self.noticed and (words := too_large(room, TOLD_SHARE)):
                self.noticed = True
                self.host.context.notice(
                    f"a snapshot of this run takes {words}, and the newest {self.most} are kept for run.first_bad(); "
                    "session.train(..., look_back=0) takes none"
                )
            del self.snapshots[: len(self.snapshots) + 1 - self.most]
            try:
                self.snapshots.append(self.host.snapshots.keep(f"before step {self.host.context.next_step()}"))
            except CheckpointError as error:
                self._refuse(str(error))
                return
        self.last_s = time.perf_counter() - begun
        self.seconds += self.last_s

    def after_step(self, seconds: float) -> None:
        """Count the seconds of a step that has ended."""
        self.steps_s += seconds

    def before(self, step: int) -> Snapshot | None:
        """Return the newest snapshot that is a step older than ``step``, or else one right before it; ``None`` where none is."""
        fit = [snapshot for snapshot in self.snapshots if snapshot.steps <= step]
        older = [snapshot for snapshot in fit if snapshot.steps < step]
        return (older or fit or [None])[-1]  # type: ignore[list-item]

    def forget(self) -> None:
        """Let them go, and begin anew."""
        self.snapshots.clear()
        self.frozen = False

    def _refuse(self, why: str) -> None:
        self.refused = why
        self.host.context.notice(
            f"this run takes no snapshots of itself, and run.first_bad() has none to go back to: one would take {why}. Place the "
            "roles over more nodes, or take one where there is room: session.snapshot('before')"
        )


@dataclass(eq=False)
class StepsAgain:
    """Takes steps of a run again, bit for bit, from the run's own snapshots, and brings the session back to where it was.

    What the user's functions keep between calls is not part of a snapshot.
    """

    host: StepHost
    algorithm: Algorithm
    prompts: RowStream
    look_back: RollingSnapshots

    def snapshot_before(self, step: int) -> Snapshot:
        """Return the newest snapshot from before a step.

        Raises:
            OptionError: there is none; says why.
        """
        snapshot = self.look_back.before(step)
        if snapshot is None:
            raise OptionError(self._no_snapshot(step))
        return snapshot

    def _no_snapshot(self, step: int) -> str:
        have = listed([snapshot.name for snapshot in self.look_back.snapshots])
        why = self.look_back.refused and f"none was taken: one would take {self.look_back.refused}"
        if not self.look_back.most:
            why = "it was told to take none (look_back=0)"
        why = why or (f"it has those {have}; more are kept with session.train(..., look_back=4)" if have else "")
        why = why or "they were let go when the session's next run began, or with a worker that died"
        return f"the run has no snapshot of itself from before step {step}: {why}"

    @contextmanager
    def coming_back(self, snapshot: Snapshot, what: str, *, stay: bool = False) -> Iterator[list[str]]:
        """Bring the session back to where it is now when all is done, or leave it at the snapshot; yields the words for that."""
        host, left = self.host, [""]
        here: Snapshot | None = None
        if not stay:
            try:
                advice = "first_bad(stay=True) needs none." if what == "first_bad" else ""
                check_room(host.snapshots.room(), "a copy of where the session is", advice)
                here = host.snapshots.keep("here")
            except CheckpointError as error:
                host.context.notice(f"{what} leaves the session at {snapshot.name!r}: {error}")
        left[0] = (
            "the session is where it was" if here is not None
            else f"the session is at the run's snapshot {snapshot.name!r}, on a new branch"
        )  # fmt: skip
        counters, last = host.context.counters.all(), host.client.last_call
        try:
            yield left
        finally:
            if not host.client.closed:
                with uninterrupted():  # what was done again stays nowhere
                    host.client.drain()
                    host.client.send(m.AcknowledgeFailures())
                    steps = tuple(change.call_id for change in host.client.send(q.Changes()) if change.call_id > last)
                    host.client.send(m.MarkRecorded(steps))  # what was done again is no update by hand in the history
                    notices = host.snapshots.come_home(snapshot if here is None else here, anew=here is None)
                    if here is not None:
                        host.context.counters.replace(counters)
                    for notice in notices:
                        host.context.notice(notice)

    def step(
        self, snapshot: Snapshot, step: int, watch: Watch = lambda message: {}, *, stop_before: int = -1
    ) -> tuple[StepRecorder | None, StepRecorder]:
        """Take the steps from a snapshot again; return the calls of the one before ``step``, where there is one, and its own."""
        before = self.go_to(snapshot, step)
        own = self.take_step(step, StepRecorder(self.host.client, watch, stop_before))
        if own.error is not None and is_death(own.error):
            raise own.error
        return before, own

    def go_to(self, snapshot: Snapshot, step: int) -> StepRecorder | None:
        """Take the steps between a snapshot and a step again; return the calls of the last one, if there was one."""
        self.host.client.drain()
        self.host.client.send(m.AcknowledgeFailures())
        self.host.snapshots.resume(snapshot)
        before = None
        while (number := self.host.context.next_step()) < step:
            before = self.take_step(number, StepRecorder(self.host.client))
            if before.error is not None:
                raise before.error
        return before

    def take_step(self, number: int, tape: StepRecorder) -> StepRecorder:
        """Take the step of a number again, with its calls recorded; an error of it stands in the recording."""
        host = self.host
        host.context.counters.set(STEPS, number - 1)
        with host.client.in_step(host.client.begin_step(number)), tape.running(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it was said when the step was taken
            try:
                step = self.algorithm.step(host.deployment.models, next(self.prompts))
                tape.numbers = self.algorithm.metrics(step)
            except StoppedHere:
                pass
            except HfsdkError as error:
                tape.error = _first(error)
        calls = [call.call_id for call in tape.calls]
        host.client.settle(calls)
        host.client.send(m.AcknowledgeFailures())
        host.context.counters.next(STEPS)
        return tape


def _first(error: HfsdkError) -> HfsdkError:
    """Return the error that came first, and not those of calls that waited for it."""
    while isinstance(error, DependencyError) and isinstance(error.__cause__, HfsdkError):
        error = error.__cause__
    return error
