"""``SessionActor``: the part of a kept session that outlives kernels; it lives with the controller, in a process of the cluster.

::

    kernel (may die)                       keeper's process                          workers
    Session, handles     -- messages -->   Controller      -- as in any session -->  roles, columns
    pictures             <-- events ---    EventLog
                         <-- notes  -->    Notebook: roles, history, counters, prompts' places, snapshots, batches by reference
    Run, as it is seen   -- steers   -->   Home: the parts of a session, on which the runs of session.train go on

One kernel has the session at a time, and others may look. Every kernel that attaches gets a turn; what comes from an earlier turn
is refused, so that a kernel that was thought dead changes nothing any more.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hfsdk.assets.folder_tokenizer import FolderTokenizer
from hfsdk.core.call_events import Listener
from hfsdk.core.errors import HfsdkError, OptionError, SessionClosedError
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.replies import Reply
from hfsdk.kept import requests as k
from hfsdk.kept.codec import to_plain
from hfsdk.kept.near_cluster import text_of
from hfsdk.kept.requests import Heard
from hfsdk.kept.shared_state import (
    OF_KERNELS,
    RUN_SECTIONS,
    SECTIONS,
    KnownBatch,
    Notebook,
    SectionChange,
    SharedState,
    history_rows,
    run_rows,
)
from hfsdk.run.train import carry_out
from hfsdk.run.train_config import TrainConfig
from hfsdk.session.client import ControllerClient, calls_of
from hfsdk.session.context import Context
from hfsdk.session.parts import Parts
from hfsdk.session.session_pickle import pack, unpack
from hfsdk.session.start import Started, start_kept
from hfsdk.session.streams import streams_of

TICK_S = 0.1
"""How often the keeper looks at its runs, and at who is there."""

ANSWERED_S = 1.0
"""The seconds that the process stays after the end of its session, to answer the request that ended it."""

ORDER_S = 5.0
"""The seconds that news of a kernel wait for the news before them."""

SILENT_S = 5.0
"""The seconds of silence after which a kernel on another machine is taken for dead."""

LOOKING = (q.Query, m.Wait, m.Locate, m.Logs)
"""Messages that change nothing."""

KERNEL, HOME = "kernel", "home"
"""Holders of columns: the kernel's variables, or the session here."""


class SessionActor:
    """The part of a kept session that outlives kernels; many threads call it at once."""

    def __init__(self, options: k.KeepOptions) -> None:
        self._options, self._started_s = options, time.time()
        self._here = k.Kernel.here()
        self._started: Started = start_kept(options.devices, options.own_machine, options.price_per_device_hour, options.runtime)
        self._controller = self._started.controller
        self._events, self._notebook = EventLog(), Notebook()
        self._controller.subscribe(self._events.add)
        self._telling, self._lock = threading.RLock(), threading.RLock()
        self._home: BackgroundSession | None = None
        self._kernel: k.Kernel | None = None
        self._turn, self._heard_s = 0, time.monotonic()
        self._idle_s: float | None = time.monotonic()
        """The time since when nobody has the session and no run goes on."""
        self._holders: dict[int, set[str]] = {}
        """The holders of each call's columns."""
        self._closed_s: float | None = None
        self._ended_s: float | None = None
        """The time when its end began, and when it was done."""
        self._tokenizers: dict[str, FolderTokenizer] = {}
        self._in_order = threading.Condition()
        self._serial = 0
        """The number of the kernel's last news."""
        self._handlers: dict[type, Callable[[Any], Any]] = {
            k.Hello: self._hello, k.Ask: self._ask, k.Listen: self._listen, k.Train: self._train, k.Steer: self._steer,
            k.DeclareRemotely: self._declare, k.SaveOrLoad: self._save_or_load, k.Tokenise: self._texts,
            k.LastStep: self._last_step, k.Everything: lambda request: self._welcome(request.turn), k.Leave: self._leave,
            k.End: lambda request: self._end(), k.About: lambda request: self._account(),
        }  # fmt: skip
        threading.Thread(target=self._tick, name="hfsdk-keeper", daemon=True).start()

    def answer(self, request: k.Request) -> Reply:
        """Answer one request, with a value or an error."""
        return Reply.of(lambda: self._handlers[type(request)](request), lambda: self._events.last)

    # -- who has the session

    def _hello(self, hello: k.Hello) -> k.Welcome | k.SessionTaken:
        if self._closed_s is not None:
            raise SessionClosedError(f"the session {self._options.name!r} is closed")
        if hello.read_only:
            return self._welcome(0)
        with self._lock:
            other = self._kernel
            if other is not None and other != hello.kernel and not hello.take_over:
                seen, heard_s = other.lives(), time.monotonic() - self._heard_s
                # on another machine a kernel cannot be looked for (None): then it counts as there while it speaks
                if seen or (seen is None and heard_s < SILENT_S):
                    return k.SessionTaken(other, heard_s, bool(seen))
            self._turn += 1
            self._kernel, self._heard_s, self._serial = hello.kernel, time.monotonic(), 0
            turn = self._turn
        self._events.add({"type": "taken", "turn": turn, "kernel": str(hello.kernel)})
        self._let_go_of_the_dead()
        if self._home is not None:
            self._home.nobody_waits()
        return self._welcome(turn)

    def _let_go_of_the_dead(self) -> None:
        """Release the columns that a kernel that is gone has held, but for those of its batches."""
        batches = self._notebook.section(OF_KERNELS.name).values()
        needed = {call_id for batch in batches if isinstance(batch, KnownBatch) for _, call_id, _, _ in batch.columns}
        with self._lock:
            unneeded = [call_id for call_id, who in self._holders.items() if KERNEL in who and call_id not in needed]
        self.release(unneeded, KERNEL)

    def _welcome(self, turn: int) -> k.Welcome:
        self.flush()
        with self._telling:
            return k.Welcome(turn, self._options.name, self._started.cluster, self._notebook.whole(), self._events.last)

    def _check(self, turn: int) -> None:
        """Refuse what comes from a kernel that does not have the session.

        Raises:
            OptionError: it only looks.
            SessionClosedError: another one has it now.
        """
        if turn == 0:
            raise OptionError(
                f"{self._options.name!r} was attached with read_only=True, which only looks; "
                f"hf.Session.attach({self._options.name!r}) takes it over"
            )
        if turn != self._turn:
            raise SessionClosedError(
                f"{self._kernel or 'another kernel'} has taken over the session {self._options.name!r}; nothing was done. "
                f"hf.Session.attach({self._options.name!r}, take_over=True) takes it back"
            )

    def _leave(self, leave: k.Leave) -> None:
        if leave.turn and leave.turn == self._turn:
            self._take(leave.news, leave.turn)
            with self._lock:
                self._kernel = None
                self._turn += 1
            self._events.wake()

    @property
    def _attended(self) -> bool:
        """Whether a kernel has the session."""
        kernel = self._kernel
        if kernel is None:
            return False
        seen = kernel.lives()
        return time.monotonic() - self._heard_s < SILENT_S if seen is None else seen

    # -- messages

    def _ask(self, ask: k.Ask) -> Any:
        message = ask.message
        if message is not None and not isinstance(message, LOOKING):
            self._check(ask.turn)
        if ask.turn and ask.turn == self._turn:
            self._take(ask.news, ask.turn)
            self.release(ask.released, KERNEL)
        if message is None:
            return None
        if isinstance(message, m.Close):
            return self._end()
        reply = self.send(message, KERNEL)
        if ask.turn != self._turn and isinstance(message, k.HELD):  # of a kernel that has gone meanwhile
            self.release((reply,), KERNEL)
        ended: tuple[int, ...] = ()
        if isinstance(message, m.Wait) and reply:
            ended = message.call_ids
        elif isinstance(message, m.Submit) and message.wait_s:
            with suppress(HfsdkError):  # raised where it is waited for
                ended = (reply,) if self._controller.send(m.Wait((reply,), message.wait_s)) else ()
        return Reply(reply, besides=self._outcomes(ended), heard=self._events.last) if ended else reply

    def _outcomes(self, call_ids: Sequence[int]) -> dict[int, k.Outcome]:
        """Return the outcomes of calls that are done: a kernel that has waited for them asks next."""
        outcomes = {}
        for call_id in call_ids:
            if self._controller.send(q.StateOf(call_id)) == "done":
                writer, result = self._controller.send(q.WriterOf(call_id)), self._controller.send(q.ResultOf(call_id))
                outcomes[call_id] = k.Outcome(writer, result)
        return outcomes

    def send(self, message: m.Message | q.Query[Any], who: str) -> Any:
        """Have the controller handle a message of the kernel, or of the run here."""
        reply = self._controller.send(message)
        if isinstance(message, k.HELD):
            self.hold(reply, who)
        return reply

    def hold(self, call_id: int, who: str) -> None:
        """Note that somebody refers to a call's columns."""
        with self._lock:
            self._holders.setdefault(call_id, set()).add(who)

    def release(self, call_ids: Sequence[int], who: str) -> None:
        """Drop a holder of calls' columns; those without any holder are freed."""
        free = []
        with self._lock:
            for call_id in call_ids:
                holders = self._holders.get(call_id, set())
                holders.discard(who)
                if not holders:
                    self._holders.pop(call_id, None)
                    free.append(call_id)
        if free:
            self._controller.send(m.Release(tuple(free)))

    # -- what is shared

    def _take(self, news: k.News, turn: int) -> None:
        """Take over a kernel's news, in their order, and pass them on to those who look."""
        if not news.serial:
            return
        with self._in_order:
            # requests are answered on several threads, so news 5 may be here before news 4
            self._in_order.wait_for(lambda: self._serial >= news.serial - 1 or turn != self._turn, ORDER_S)
            if turn != self._turn:
                return
            with self._telling:
                self._notebook.take(news.notes)
                self._events.add({"type": "noted", "notes": news.notes, "by": turn})
            if self._home is not None:
                self._home.shared.take(news.notes)
            self._serial = max(self._serial, news.serial)
            self._in_order.notify_all()

    def flush(self) -> None:
        """Send what the run here has changed."""
        home = self._home
        if home is None:
            return
        with self._telling:
            notes = home.shared.news()
            if notes:
                self._notebook.take(notes)
                self._events.add({"type": "noted", "notes": notes, "by": HOME})

    def _listen(self, listen: k.Listen) -> k.Heard:
        owns = listen.turn != 0
        if owns and listen.turn == self._turn:
            self._heard_s = time.monotonic()
        return self._events.after(listen.since, listen.timeout_s, listen.turn, lambda: owns and listen.turn != self._turn)

    # -- runs

    def _at_home(self, turn: int, news: k.News) -> BackgroundSession:
        """Return the parts of the session here, as the kernel knows them."""
        self._check(turn)
        self._take(news, turn)
        with self._lock:
            if self._home is None:
                self._home = BackgroundSession(self)
        return self._home

    def _declare(self, declare: k.DeclareRemotely) -> str:
        home = self._at_home(declare.turn, declare.news)
        args, kwargs = unpack(home.parts, declare.packed)
        handle = getattr(home.parts.declarations, declare.kind)(*args, **kwargs)
        self.flush()
        return str(handle.name)

    def _save_or_load(self, request: k.SaveOrLoad) -> str:
        saves = self._at_home(request.turn, request.news).parts.saves
        folder: Any = request.folder
        if request.what == "save":
            folder = saves.save(request.folder, keep=request.keep)
        else:
            saves.load(request.folder)
        self.flush()
        return str(folder)

    def _texts(self, request: k.Tokenise) -> Any:
        return text_of(request.folder, request.what, request.value, self._tokenizer)

    def _tokenizer(self, folder: str) -> FolderTokenizer:
        with self._lock:
            return self._tokenizers.setdefault(folder, FolderTokenizer(folder))

    def _train(self, train: k.Train) -> int:
        home = self._at_home(train.turn, train.news)
        with calls_of(train.line):
            config = unpack(home.parts, train.packed)
            home.adopt_streams(config)
            carry_out(home.parts, config, False, aside=True)
        self.flush()
        return home.parts.runs.number

    def _steer(self, steer: k.Steer) -> None:
        self._check(steer.turn)
        home = self._home
        run = None if home is None else home.parts.runs.run
        if run is None:
            raise OptionError("there is no run")
        steers = {"pause": run.pause, "resume": run.resume, "step": run.step, "stop": run.stop}
        steers[steer.what]()
        self.flush()

    def _last_step(self, request: k.LastStep) -> Any:
        home = self._home
        last = None if home is None or home.parts.runs.run is None else home.parts.runs.run.last
        if home is None or last is None:
            return None
        owns = bool(request.turn) and request.turn == self._turn
        hold = (lambda call_id: self.hold(call_id, KERNEL)) if owns else (lambda call_id: None)  # who only looks keeps nothing
        return to_plain(last, hold) if request.plain else pack(home.parts, last, hold)

    # -- the end

    def _end(self) -> None:
        with self._lock:
            if self._closed_s is not None:
                return
            self._closed_s = time.monotonic()
        if self._home is not None:
            self._home.parts.runs.close()
            self._home.parts.pending_save.settle()
            self.flush()
        self._controller.send(m.Close())
        self._events.add({"type": "closed"})
        self._ended_s = time.monotonic()

    def _tick(self) -> None:
        """Send what runs change; end a session that nobody has looked after for too long, and the process of one that is closed."""
        looked_s = 0.0
        while True:
            time.sleep(TICK_S)
            try:
                self.flush()
            except Exception:  # a row that cannot be told must not end the telling
                traceback.print_exc()
            now = time.monotonic()
            if now - looked_s < 1.0:
                continue
            looked_s = now
            attended = self._attended
            if self._ended_s is not None and not attended and now - self._ended_s > ANSWERED_S:
                os._exit(0)
            busy = attended or (self._home is not None and self._home.goes_on)
            self._idle_s = None if busy else self._idle_s or now
            if self._idle_s is not None and now - self._idle_s > self._options.unattended_s:
                self._end()

    def _account(self) -> k.Account:
        options, kernel = self._options, self._kernel
        batches = self._controller.send(q.HeldBytes()) if self._closed_s is None else 0
        run = None if self._home is None else self._home.parts.runs.run
        return k.Account(
            name=options.name, version=options.version, devices=str(self._started.cluster), host=self._here.host,
            pid=self._here.pid, started=self._started_s, roles=tuple(self._notebook.section("roles")),
            run="" if run is None else repr(run), attached=str(kernel) if kernel is not None and self._attended else "",
            unattended_s=None if self._idle_s is None else time.monotonic() - self._idle_s,
            most_unattended_s=options.unattended_s, column_bytes=batches, closed=self._closed_s is not None,
        )  # fmt: skip

    def parts(self, sender: HomeSender) -> Parts:
        """Return the parts of a session over this controller."""
        client = ControllerClient(sender, shared=True)
        context = Context(self._options.name, self._started.cluster, self._started.kind, client, self._options.seed)
        return Parts.of(context)

    @property
    def all_changes(self) -> tuple[SectionChange, ...]:
        """All changes of the sections since the beginning."""
        return self._notebook.whole()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(event)`` for every event of the controller."""
        return self._controller.subscribe(listener)


class HomeSender:
    """The way of the run here to the controller: what it has changed before is sent first."""

    def __init__(self, keeper: SessionActor) -> None:
        self._keeper = keeper

    def send(self, message: m.Message | q.Query[Any]) -> Any:
        """Handle one message and return its reply."""
        if isinstance(message, m.Release):
            return self._keeper.release(message.call_ids, HOME)
        if not isinstance(message, LOOKING):
            self._keeper.flush()
        return self._keeper.send(message, HOME)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(event)`` for every event."""
        return self._keeper.subscribe(listener)


class BackgroundSession:
    """The parts of the session on which its runs go on, and what of them is shared with the kernel."""

    def __init__(self, keeper: SessionActor) -> None:
        self.parts = parts = keeper.parts(HomeSender(keeper))

        def control() -> Any:
            return None if parts.runs.run is None else parts.runs.run._control

        rows = (history_rows(parts), run_rows(control))
        self.shared = SharedState(parts, (*SECTIONS, *RUN_SECTIONS), SECTIONS, rows, frozenset(rows_of.name for rows_of in rows))
        self.shared.take(keeper.all_changes)

    @property
    def goes_on(self) -> bool:
        """Whether a run is under way, and not paused."""
        run = self.parts.runs.run
        return run is not None and run.running and not run.paused

    def adopt_streams(self, config: TrainConfig) -> None:
        """Adopt the streams that a run takes from, so that their places are shared."""
        for stream in streams_of(config.algorithm, config.prompts):
            self.parts.places.adopt(stream)

    def nobody_waits(self) -> None:
        """The kernel whose cell waited for the run is gone: from now on it is one in the background."""
        run = self.parts.runs.run
        if run is not None and run.running:
            run._control.background = True


def make_keeper(options: k.KeepOptions) -> SessionActor:
    """Return the keeper of a new session, in the process that this is called in."""
    return SessionActor(options)


KEPT_EVENTS = 4096
"""The number of events that are kept for a kernel that was away for a moment; one that missed more gets everything anew."""

GATHER_S = 0.05
"""How long an event waits for others, to travel with them."""

NOBODY = object()


class EventLog:
    """The last events, numbered, for those who listen from afar."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=KEPT_EVENTS)
        self._added = threading.Condition()
        self.last = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event."""
        with self._added:
            self.last += 1
            self._events.append((self.last, event))
            self._added.notify_all()

    def after(self, since: int, timeout_s: float, by: object, over: Callable[[], bool]) -> Heard:
        """Return the events after one, but for those ``by`` this kernel; wait for some, until the listener is over."""
        deadline = time.monotonic() + timeout_s
        with self._added:
            self._added.wait_for(lambda: self._is_news(since, by) or over(), timeout_s)
        if not over():
            time.sleep(max(0.0, min(GATHER_S, deadline - time.monotonic())))  # few answers, with several events each
        with self._added:
            first = self._events[0][0] if self._events else self.last + 1
            events = [event for number, event in self._events if number > since and event.get("by", NOBODY) != by]
            return Heard(tuple(events), self.last, missed=first > since + 1 and self.last > since)

    def _is_news(self, since: int, by: object) -> bool:
        """Whether an event has come that is not the listener's own."""
        if self.last <= since:
            return False
        return any(number > since and event.get("by", NOBODY) != by for number, event in reversed(self._events))

    def wake(self) -> None:
        """Have those who wait look whether it is over for them."""
        with self._added:
            self._added.notify_all()
