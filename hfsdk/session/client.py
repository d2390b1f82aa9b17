"""``ControllerClient``: the user's side of the controller. Every request of a handle or a batch goes through here.

Waiting happens on the calling thread, in slices, so that an interrupt of the kernel is heard at once:

==================  ==================================================================================================
first interrupt     cancels the awaited calls and what depends on them, waits until they have stopped, then raises
second interrupt    detaches: raises at once, the work goes on
==================  ==================================================================================================
"""

from __future__ import annotations

import contextlib
import linecache
import math
import queue
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar, overload

import numpy as np

from hfsdk.assets.folder_tokenizer import FolderTokenizer
from hfsdk.core.arguments import Arguments
from hfsdk.core.call_events import Event, Listener
from hfsdk.core.errors import CallCancelledError, OptionError, SessionClosedError, SimulatedValueError
from hfsdk.core.functions import Shipped
from hfsdk.core.methods import method_of
from hfsdk.core.pending import ColumnInfo, ColumnRef, Lease
from hfsdk.core.prompt_data import foresee
from hfsdk.core.runtime import StateCopy
from hfsdk.core.system import can_start_threads
from hfsdk.core.table import Array, Column, Ragged, Table, take
from hfsdk.core.user_line import user_frame
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.session.tokenizer import Tokenizer

SLICE_S = 0.1
"""Longest stretch of waiting without looking for an interrupt."""

SETTLE_S = 0.02
"""The seconds between two looks at whether cancelled calls have stopped."""

ACTIVE = ("pending", "running")

CLOSED = (
    "the session is closed; make a new one with hf.Session(...). What this one measured stays readable: session.trace, dataflow, "
    "memory, history, placement, report(...), and columns of batches that were brought here before."
)

T = TypeVar("T")

_STEP: ContextVar[int | None] = ContextVar("step", default=None)
"""The step that calls are started for, as its number in the trace."""


class Sender(Protocol):
    """The part of a controller that the client needs."""

    def send(self, message: m.Message | q.Query[Any]) -> Any:
        """Handle one message and return its reply."""
        ...

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(event)`` for every event; return a function that unsubscribes."""
        ...


class Tape(Protocol):
    """An object that hears of the calls that are submitted."""

    def before(self, message: m.Submit) -> None:
        """A call is about to be sent; raising leaves it unsent."""
        ...

    def take(self, message: m.Submit, lease: Lease) -> None:
        """Take note that the call was sent."""
        ...


class ControllerClient:
    """Implements :class:`hfsdk.core.pending.Client` by messages to a controller.

    Once it is closed it still asks what the controller knows (traces, states, results), and reads the columns that came here.

    Attributes:
        wait_each: whether every call waits before it returns (``Session(wait=True)``).
        closed: whether the session is closed, or this process has done with it.
        closed_because: why, and what to do.
        shared: whether other processes start calls of this session, too.
        tokenizer: the tokenizer of the actor's model; ``None`` until a role with a tokenizer is declared.
        last_call: number of the call started last.
        kept_as: the name of a kept session, which goes on when this process ends; else ``""``.
        run_goes_on: whether a run is under way, also between two of its calls.
        sources: ``name@version`` of every function that was sent along with a call -> its source text.
        tape: a recorder that hears of every call before it is sent and once it has an id; ``None``: there is none.
    """

    def __init__(self, controller: Sender, *, wait_each: bool = False, simulated: bool = False, shared: bool = False) -> None:
        self._controller, self._simulated, self.shared = controller, simulated, shared
        self._fetched = Fetched()
        self._released: deque[int] = deque()
        self._forgotten: deque[tuple[StateCopy, ...]] = deque()
        self._recent: deque[int] = deque(maxlen=4096)
        self._relays: list[EventRelay] = []
        self._asides: list[Aside] = []
        self._leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
        self.wait_each = wait_each
        self.closed, self.closed_because = False, CLOSED
        self.tokenizer: Tokenizer | None = None
        self.last_call = 0
        self.kept_as = ""
        self.run_goes_on: Callable[[], bool] = lambda: False
        self.sources: dict[str, str] = {}
        self.tape: Tape | None = None

    def begin_step(self, least: int) -> int:
        """Begin a step, and return its number in the trace: ``least``, or more where the trace is further."""
        number: int = self.send(m.BeginStep(least))
        return number

    @contextmanager
    def in_step(self, number: int) -> Iterator[None]:
        """Say of each call that is started in this context that it is of a step that has begun; others may be under way too."""
        token = _STEP.set(number)
        try:
            yield
        finally:
            _STEP.reset(token)

    # -- sending

    @overload
    def send(self, message: q.Query[T]) -> T: ...

    @overload
    def send(self, message: m.Message) -> Any: ...

    def send(self, message: m.Message | q.Query[Any]) -> Any:
        """Send one message, after the releases that have gathered.

        Raises:
            SessionClosedError: the session is closed, and the message needs its workers.
            HfsdkError: the controller's answer.
        """
        if not isinstance(message, (q.Query, m.Wait)) or type(message) in q.OF_WORKERS:
            self.check_open()
        self._flush()
        return self._controller.send(message)

    def check_open(self) -> None:
        """Raise SessionClosedError when the session is closed."""
        if self.closed:
            raise SessionClosedError(self.closed_because)

    def lease(self, call_id: int) -> Lease:
        """Return the lease that keeps a call's columns alive for this process; all that refer to them share it."""
        lease = self._leases.get(call_id)
        if lease is None:
            lease = self._leases[call_id] = Lease(call_id, self.release)
        return lease

    def release(self, call_id: int) -> None:
        """Note that nobody refers to a call's columns any more; sent with the next message.

        Finalizers call this at any moment on any thread, perhaps inside ``send``: it must take no lock.
        """
        self._released.append(call_id)

    def _flush(self) -> None:
        gone: list[int] = []
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                gone.append(self._released.popleft())
        gone = [call_id for call_id in gone if call_id not in self._leases]  # somebody refers to it again
        for call_id in gone:
            self._fetched.let_go(call_id)
        if gone:
            self._controller.send(m.Release(tuple(gone)))
        with contextlib.suppress(IndexError):
            while True:
                self._controller.send(m.Forget(self._forgotten.popleft()))

    def forget(self, copies: tuple[StateCopy, ...]) -> None:
        """Note that a snapshot is not needed any more; sent with the next message, as :meth:`release`."""
        self._forgotten.append(copies)

    def submit(self, message: m.Submit, *, waits: bool = False) -> Lease:
        """Start a call, marked with the user's line; wait for it in a waiting session. ``waits``: somebody does so next."""
        wait_s = SLICE_S if waits or self.wait_each else 0.0
        message = replace(message, line=message.line or user_line(), wait_s=wait_s, step=_STEP.get())
        tape = self.tape
        if tape is not None:
            tape.before(message)
        with uninterrupted():
            call_id = self.send(message)
            lease = self.lease(call_id)
            self._recent.append(call_id)
            self.last_call = call_id
        if tape is not None:
            tape.take(message, lease)
        if message.arguments.function is not None:
            self.sources[message.function] = message.arguments.function.source
        for relay in list(self._relays):
            try:
                relay.announce(_started(call_id, message))
            except SessionClosedError:  # it waited for a call while the session was closed elsewhere
                with contextlib.suppress(ValueError):
                    self._relays.remove(relay)
            except Exception as error:  # the user's listener: the call has started all the same
                with contextlib.suppress(ValueError):  # another thread heard it raise, too
                    self._relays.remove(relay)
                warnings.warn(f"a listener of this session raised and is dropped: {error!r}", UserWarning, stacklevel=2)
        if self.wait_each:
            self.wait([call_id], None)
        return lease

    def open_calls(self) -> list[int]:
        """Return the calls that are not over: of this process and, of a session that is kept, of all others."""
        candidates = list(self._recent)
        if self.shared:
            candidates = list(dict.fromkeys([*candidates, *(call.id for call in self.send(q.RunningCalls()))]))
        active = [call_id for call_id in candidates if self.state(call_id) in ACTIVE]
        for call_id in set(candidates).difference(active):  # asked once: they do not come to life again
            with contextlib.suppress(ValueError):
                self._recent.remove(call_id)
        return active

    # -- hfsdk.core.pending.Client

    def state(self, call_id: int) -> str:
        """Return pending, running, done, failed, cancelled or lost."""
        return str(self.send(q.StateOf(call_id)))

    def wait(self, call_ids: Sequence[int], timeout: float | None) -> None:
        """Wait until all are done; see the module's text for interrupts.

        Raises:
            TimeoutError: they are not done after ``timeout`` seconds; they go on.
            CallError: the failure of one of them.
        """
        ids = tuple(call_ids)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self.send(m.Wait(ids, _slice(deadline))):
                if deadline is not None and time.monotonic() >= deadline:
                    names = ", ".join(self.writer(c) for c in ids if self.state(c) in ACTIVE) or "the calls"
                    raise TimeoutError(f"{names} not done after {timeout:g} s; still running. Wait again, or cancel.")
        except KeyboardInterrupt:
            self.cancel(ids)
            self.settle(ids)
            raise

    def settle(self, call_ids: Sequence[int], timeout_s: float = math.inf) -> None:
        """Wait until calls are over, however they end."""
        until = time.monotonic() + timeout_s
        while any(self.state(call_id) in ACTIVE for call_id in call_ids) and time.monotonic() < until:
            time.sleep(SETTLE_S)

    def drain(self, role: str = "") -> None:
        """Wait until what was submitted so far (to one role) is over; an interrupt ends the waiting, and the calls go on."""
        calls = self.open_calls()
        self.settle([call for call in calls if self.writer(call).startswith(f"{role}.")] if role else calls)

    def cancel(self, call_ids: Sequence[int]) -> None:
        """Ask to stop calls at their next safe point, and what depends on them."""
        if call_ids:
            with uninterrupted():
                self.send(m.Cancel(tuple(call_ids)))

    def result(self, call_id: int) -> Any:
        """Return a done call's small result."""
        return self.send(q.ResultOf(call_id))

    def info(self, ref: ColumnRef) -> ColumnInfo | None:
        """Return a column's kind, dtype and lengths, ``None`` while it is pending."""
        info: ColumnInfo | None = self.send(q.InfoOf(ref))
        return info

    def gone(self, ref: ColumnRef) -> bool:
        """Whether a column went with its session: nobody brought it here before that was closed."""
        return self.closed and not self._fetched.has(ref)

    def writer(self, call_id: int) -> str:
        """Return the call's name, e.g. ``actor.generate``."""
        return str(self.send(q.WriterOf(call_id)))

    def fetch(self, columns: Mapping[str, ColumnRef]) -> Table:
        """Wait for columns and bring their values here.

        Raises:
            SessionClosedError: one went with its session.
            SimulatedValueError: one has no values.
        """
        self.wait(list(dict.fromkeys(ref.call_id for ref in columns.values())), None)
        if self.closed:
            return Table({name: self._local_column(ref) for name, ref in columns.items()})
        table: Table = self.send(m.Fetch(columns))
        self._fetched.keep(columns, table)
        return table

    def _local_column(self, ref: ColumnRef) -> Column:
        column = self._fetched.find(ref)
        if column is not None:
            return column
        writer = self.writer(ref.call_id)
        if self._simulated:
            raise SimulatedValueError(f"{writer} was simulated: column {ref.name!r} has lengths and bytes, and never had values")
        there = ", ".join(map(repr, self._fetched.names(ref.call_id))) or "none"
        raise SessionClosedError(
            f"the values of column {ref.name!r} ({writer}) went with the workers: the session is closed; make a new one with "
            f"hf.Session(...). Columns of that call that were brought here before can be read ({there}), and so can session.trace, "
            f"history and report(...). Next time look at it, or call batch.table({ref.name!r}), before session.close()."
        )

    def put(self, table: Table) -> Lease:
        """Store local columns in the cluster."""
        call_id = self.send(m.Put(table, _STEP.get()))
        self._fetched.keep({name: ColumnRef(call_id, name) for name in table}, table)
        return self.lease(call_id)

    def task(self, method: str, function: Shipped, inputs: Mapping[str, ColumnRef], writes: Sequence[str], num_rows: int) -> Lease:
        """Run a function over columns in a CPU task."""
        kind = replace(method_of(method), writes=tuple(writes))
        message = m.Submit.of("session", kind, Arguments(function=function), inputs, num_rows)
        return self.submit(message)

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Turn rows of token ids into texts as a reward function sees them: without special tokens."""
        tokenizer = self.need_tokenizer()
        foresee(tokenizer, (("decode_plain", [int(token) for token in row]) for row in rows))
        return [tokenizer.decode(row, special=False) for row in rows]

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Turn token ids into one text per token."""
        return self.need_tokenizer().pieces(token_ids)

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token."""
        return self.need_tokenizer().token_bytes(token_ids)

    # -- the rest

    def use_tokenizer(self, tokenizer: Tokenizer | str | Path) -> None:
        """Set the tokenizer, or the model folder it is loaded from at first use."""
        self.tokenizer = FolderTokenizer(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer

    @property
    def tokenizer_folder(self) -> str:
        """The model folder whose tokenizer is used, or ``""``."""
        return str(self.tokenizer.folder) if isinstance(self.tokenizer, FolderTokenizer) else ""

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            OptionError: no role with a tokenizer is declared yet.
        """
        if self.tokenizer is None:
            raise OptionError("texts need a tokenizer, which comes with the actor's model; call session.actor(...) first")
        return self.tokenizer

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(event)`` for every start (on the calling thread), progress and end of a call (on others)."""
        relay = EventRelay(listener)
        self._relays.append(relay)
        unsubscribe = self._controller.subscribe(relay.on_event)

        def stop() -> None:
            unsubscribe()
            with contextlib.suppress(ValueError):
                self._relays.remove(relay)

        return stop

    def pass_notices(self, notice: Callable[[str], None]) -> None:
        """Call a method with what the engine has to say of no call in particular, as long as there is its object."""
        method = weakref.WeakMethod(notice)

        def on_event(event: Event) -> None:
            listener = method()
            if event["type"] == "notice" and listener is not None:
                listener(event["text"])

        self._controller.subscribe(on_event)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Subscribe a listener of the user's, which may ask the session anything (see :class:`Aside`)."""
        aside = Aside(listener, lambda: self.closed)
        unsubscribe = self.subscribe(aside)
        self._asides.append(aside)

        def stop() -> None:
            unsubscribe()
            aside.stop()
            with contextlib.suppress(ValueError):
                self._asides.remove(aside)

        return stop

    def close(self) -> None:
        """End everything; later messages are refused."""
        if not self.closed:
            self.closed = True
            self._controller.send(m.Close())
        while self._asides:
            self._asides.pop().stop()


def _started(call_id: int, message: m.Submit) -> Event:
    return {
        "type": "call_started", "call_id": call_id, "call": f"{message.role}.{message.method}", "line": message.line,
        "phase": message.phase, "step": None, "done": None, "total": None, "unit": "", "seconds": None, "error": None,
    }  # fmt: skip


def _slice(deadline: float | None) -> float:
    return SLICE_S if deadline is None else max(0.0, min(SLICE_S, deadline - time.monotonic()))


_HELD: list[list[Any]] = []
"""One list for every :func:`uninterrupted` that goes on in the main thread, the innermost last."""


def let_through() -> None:
    """Raise an interrupt that is held back, where the moment that it waits for may never end."""
    if threading.current_thread() is threading.main_thread() and _HELD and _HELD[-1]:
        _HELD[-1].clear()
        raise KeyboardInterrupt


@contextmanager
def uninterrupted() -> Iterator[list[Any]]:
    """Hold back an interrupt for the moment in which a call is handed over, or a rewind done: nothing is lost or half done.

    Yields those that were held back so far; the last one is heard at the end, unless they are taken out of the list.
    """
    caught: list[tuple[int, FrameType | None]] = []
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield caught
        return
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    _HELD.append(caught)
    try:
        yield caught
    finally:
        _HELD.pop()
        signal.signal(signal.SIGINT, previous)
    if caught:
        previous(*caught[-1])


# -- columns that came to this process

MOST_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class ColumnRows:
    """Some rows of a column, or (``rows`` is ``None``) all of them."""

    rows: Array | None
    values: Column
    num_bytes: int

    def position(self, wanted: Array | None) -> Array | None:
        """Return where the wanted rows of the column are in this piece; ``None`` where it lacks one."""
        if self.rows is None:
            return np.arange(len(self.values)) if wanted is None else wanted
        if wanted is None:
            return None
        order = np.argsort(self.rows, kind="stable")
        at = np.searchsorted(self.rows, wanted, sorter=order)
        places = order[np.minimum(at, len(order) - 1)]
        return places if np.array_equal(self.rows[places], wanted) else None


class Fetched:
    """Copies of the columns that came to this process, to look at after ``session.close()``.

    The columns of a batch live with the workers and end with them. A column that was brought here, or was the user's own, stays
    as long as some batch refers to it; beyond :data:`MOST_BYTES` the oldest go. Copies, because a fetch may return memory of a
    worker's node, which would outlive it, and which the user may change.

    Any thread may use them, but no finalizer: there is a lock.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._pieces: dict[tuple[int, str], list[ColumnRows]] = {}
        """Pieces by (call, column); the one that was brought last stands at the end."""
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return self._num_bytes

    def keep(self, columns: Mapping[str, ColumnRef], table: Table) -> None:
        """Keep a copy of a table that was fetched, or stored, under these references."""
        for name, ref in columns.items():
            if self.has(ref):
                continue
            num_bytes = _size(table[name])
            if num_bytes > self._most_bytes:
                continue
            piece = ColumnRows(ref.rows, _copy(table[name]), num_bytes)
            key = (ref.call_id, ref.name)
            with self._lock:
                before = self._pieces.pop(key, [])
                others = [] if ref.rows is None else before  # all rows: no need for some of them
                self._num_bytes += num_bytes - sum(old.num_bytes for old in before if old not in others)
                self._pieces[key] = [*others, piece]
                while self._num_bytes > self._most_bytes:
                    self._drop_oldest()

    def _drop_oldest(self) -> None:
        key = next(iter(self._pieces))
        self._num_bytes -= self._pieces[key].pop(0).num_bytes
        if not self._pieces[key]:
            del self._pieces[key]

    def find(self, ref: ColumnRef) -> Column | None:
        """Return a copy of a column's rows; ``None`` where one of them was never brought, or is not kept any more."""
        with self._lock:
            pieces = list(self._pieces.get((ref.call_id, ref.name), ()))
        for piece in reversed(pieces):
            at = piece.position(ref.rows)
            if at is not None:
                return _copy(take(piece.values, at))
        return None

    def has(self, ref: ColumnRef) -> bool:
        """Whether a column's rows are kept."""
        with self._lock:
            pieces = list(self._pieces.get((ref.call_id, ref.name), ()))
        return any(piece.position(ref.rows) is not None for piece in pieces)

    def names(self, call_id: int) -> list[str]:
        """Return the columns of a call of which copies are here."""
        with self._lock:
            return sorted(name for number, name in self._pieces if number == call_id)

    def let_go(self, call_id: int) -> None:
        """Drop the columns of a call: no batch refers to them any more."""
        with self._lock:
            for key in [key for key in self._pieces if key[0] == call_id]:
                self._num_bytes -= sum(piece.num_bytes for piece in self._pieces.pop(key))


def _size(column: Column) -> int:
    return sum(map(sys.getsizeof, column)) if isinstance(column, list) else int(column.nbytes)


def _copy(column: Column) -> Column:
    if isinstance(column, Ragged):
        return Ragged(column.flat.copy(), column.offsets.copy())
    return list(column) if isinstance(column, list) else column.copy()


# -- events of calls on their way to listeners: each call's start is sent on the thread that made the call, before all else
#
# The controller's own events come from its lanes. A notebook can only draw under a cell from the thread that runs the cell, so
# ``call_started`` is sent here, at submission, and a lane's events that come too early wait for it.

ENDS = ("call_done", "call_failed", "call_cancelled")


MOST_EARLY = 64
"""Calls whose events are kept until they are announced."""


STOP_S = 1.0
"""The seconds that ``unsubscribe`` waits for events that a listener has not heard yet."""


BEHIND_S = 0.25
"""How long a call's start waits for a listener that has not heard all that came before it."""


class Aside:
    """Calls a listener of the user's: at a call's start on the thread that made it, else on a thread of the listener's own.

    Where no thread can be started, always on the thread that made the call. So no lane of the controller ever waits for a
    listener, and whatever it asks of the session is served: it may look, wait, submit. What it submits itself it is not told
    of; it would answer its own answers for ever. It hears the end of a call before the start of one that was made after it,
    unless it is ``BEHIND_S`` behind.
    """

    def __init__(self, listener: Listener, is_closed: Callable[[], bool]) -> None:
        self._listener = listener
        self._is_closed = is_closed
        self._queue: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._here = threading.local()
        self._own: set[int] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def __call__(self, event: Event) -> None:
        """Take an event, on any thread."""
        if self._stopped or self._is_own(event):
            return
        if event["type"] == "call_started":
            self._await_earlier()
            self._tell(event)
            return
        if not can_start_threads():
            self._guarded(event)
            return
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="hfsdk-listener", daemon=True)
                thread.start()
                self._thread = thread
        self._queue.put(event)

    def _await_earlier(self) -> None:
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            heard = threading.Event()
            self._queue.put(heard)
            heard.wait(BEHIND_S)

    def _is_own(self, event: Event) -> bool:
        number = event.get("call_id", -1)
        if event["type"] == "call_started" and getattr(self._here, "inside", False):
            self._own.add(number)
        own = number in self._own
        if event["type"] in ENDS:
            self._own.discard(number)
        return own

    def _tell(self, event: Event) -> None:
        self._here.inside = True
        try:
            self._listener(event)
        finally:
            self._here.inside = False

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            if isinstance(event, threading.Event):
                event.set()
                continue
            if not self._stopped:
                self._guarded(event)

    def _guarded(self, event: Event) -> None:
        try:
            self._tell(event)
        except SessionClosedError:
            self._stopped = True
        except Exception as error:  # the user's: the work goes on, and the listener is dropped
            self._stopped = True
            if not (isinstance(error, CallCancelledError) and self._is_closed()):  # what it waited for ended with the session
                warnings.warn(f"a listener of this session raised and is dropped: {error!r}", UserWarning, stacklevel=2)

    def stop(self) -> None:
        """End after what the listener has not heard yet; wait a moment for that."""
        self._queue.put(None)
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S)


class EventRelay:
    """Passes a controller's events on to one listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._announced: set[int] = set()
        self._early: dict[int, list[Event]] = {}

    def announce(self, event: Event) -> None:
        """Announce that a call has started, then the events that came too early."""
        self._listener(event)
        with self._lock:
            self._announced.add(event["call_id"])
            early = self._early.pop(event["call_id"], [])
        for late in early:
            self._pass_on(late)

    def on_event(self, event: Event) -> None:
        """Take an event of the controller, on one of its threads."""
        if event["type"] == "call_started":
            return
        if "call_id" not in event:
            self._listener(event)
            return
        with self._lock:
            if event["call_id"] not in self._announced:
                self._early.setdefault(event["call_id"], []).append(event)
                if len(self._early) > MOST_EARLY:  # weights on their way to a shadow are never announced
                    del self._early[next(iter(self._early))]
                return
        self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        self._listener(event)
        if event["type"] in ENDS:
            with self._lock:
                self._announced.discard(event["call_id"])


# -- the line of the user's code that started a call: ``cell 4, line 2`` in a notebook, ``ppo.py, line 17`` in a script

_CELL = re.compile(r"In\[(\d+)\]")


_line_of_thread = threading.local()


@contextmanager
def calls_of(line: str) -> Iterator[None]:
    """Say that the calls of this thread belong to ``line``: a thread of hfsdk's own has no frame of the user's below."""
    _line_of_thread.line = line
    try:
        yield
    finally:
        del _line_of_thread.line


def user_line() -> str:
    """Return the place of the innermost frame outside hfsdk, or ``""`` when there is none."""
    declared: str | None = getattr(_line_of_thread, "line", None)
    if declared is not None:
        return declared
    frame = user_frame()
    if frame is None:
        return ""
    filename, line = frame.f_code.co_filename, frame.f_lineno
    cell = _cell_number(filename)
    if cell is not None:
        return f"cell {cell}, line {line}"
    return f"{Path(filename).name}, line {line}"


def _cell_number(filename: str) -> int | None:
    """Return the number of the cell that was compiled under ``filename``, where IPython runs and knows it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return None
    if not hasattr(shell.compile, "format_code_name"):
        return _cell_of_text(shell, filename)
    label = shell.compile.format_code_name(filename)  # ("Cell", "In[4]"), or None for a file
    match = _CELL.search(label[1]) if label else None
    return int(match[1]) if match else None


def _cell_of_text(shell: Any, filename: str) -> int | None:
    """Return the number of the newest cell with the text of ``filename``: IPython 7, which Colab has, keeps no numbers by name."""
    text = "".join(linecache.getlines(filename)).rstrip()
    cells = shell.history_manager.input_hist_parsed
    return max((number for number, cell in enumerate(cells) if text and cell.rstrip() == text), default=None)
