"""``RemoteController``: a kernel's way to the keeper of its session; to the session's parts it is a controller like any other.

Messages go one by one, each with what has changed here; what has changed there, and the controller's events, come on a thread that
listens. Columns do not come by the keeper: they are put into, and fetched from, the cluster's store directly.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from hfsdk.core.call_events import Listener
from hfsdk.core.errors import HfsdkError, SessionClosedError
from hfsdk.core.runtime import Pick
from hfsdk.core.table import Table
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.replies import Reply
from hfsdk.engine.controller.records import stored_table
from hfsdk.kept import requests as k
from hfsdk.kept.shared_state import SharedState
from hfsdk.session.client import ControllerClient, uninterrupted

LISTEN_S = 1.0
"""How long a question for events waits for some."""

CATCH_UP_S = 30.0
"""How long what was answered may wait for the events before it."""

LEAVE_S = 2.0

QUIET_S = 0.1
"""How long after a message what changes without one waits for the next."""

MOST_OUTCOMES = 512

SMALL_BYTES = 100_000
"""Tables up to this travel with the message, as Ray itself passes such arguments."""


def left(name: str) -> str:
    """Return the message for a kernel that has left a session."""
    return f"this kernel has left the session {name!r}, which goes on; hf.Session.attach({name!r}) comes back to it"


class SessionActorClient(Protocol):
    """The way to ask a keeper: :class:`hfsdk.engine.ray.kept.RayKeeper`, or from elsewhere ``RemoteSession``."""

    @property
    def near(self) -> bool:
        """Whether this process can use the cluster's store itself."""
        ...

    @property
    def client(self) -> ControllerClient | None:
        """The client of this side's session."""
        ...

    @client.setter
    def client(self, client: ControllerClient | None) -> None: ...

    def ask(self, request: Any, timeout_s: float | None = None) -> Reply:
        """Ask, and wait for the answer; raises SessionClosedError when the keeper has ended."""
        ...

    def start(self, request: Any) -> Callable[[float | None], Reply]:
        """Ask; return what waits for the answer, at most so many seconds."""
        ...

    def tell(self, request: Any) -> None:
        """Ask, and wait for nothing."""
        ...

    def put(self, table: Table) -> Any:
        """Put a table into the cluster's store; return its reference."""
        ...

    def fetch(self, picks: Sequence[Pick]) -> Table:
        """Bring columns here."""
        ...

    def leave(self) -> None:
        """Have done with the cluster in this process."""
        ...

    def forgo(self) -> None:
        """Have done with a keeper that has ended: this process need not stay with its cluster."""
        ...


class RemoteController:
    """The controller of a kept session as a kernel reaches it; the session's parts use it like any other controller.

    Attributes:
        turn: the kernel's; 0 where it only looks.
        name: the name of the session.
    """

    def __init__(self, keeper: SessionActorClient, welcome: k.Welcome) -> None:
        self._keeper, self.turn, self.name = keeper, welcome.turn, welcome.name
        self._welcome: k.Welcome | None = welcome
        self._listeners: list[Listener] = []
        self._released: tuple[int, ...] = ()
        self._asked_s = 0.0
        self._outcomes: dict[int, k.Outcome] = {}
        """Outcomes of calls that are done, the newest last: nothing about them changes any more."""
        self._shared: SharedState | None = None
        self._heard = welcome.heard
        self._advanced = threading.Condition()
        self._over = threading.Event()
        self._telling, self._serial = threading.Lock(), 0
        self._left = False
        self._lost = ""
        self._saved: Callable[[], Mapping[str, Any] | None] = lambda: None
        self._closed: Callable[[str], None] = lambda why: None
        self._forgone: Callable[[str], None] = lambda why: None
        self._threads: list[threading.Thread] = []

    def begin(
        self,
        shared: SharedState,
        saved: Callable[[], Mapping[str, Any] | None],
        closed: Callable[[str], None],
        lost: Callable[[str], None],
    ) -> None:
        """Take over the session's state, and begin to listen.

        Args:
            shared: the state of the session as this side knows it.
            saved: gives the last save of the run.
            closed: a function that hears why the session cannot be used from here any more.
            lost: a function that hears why nothing is heard of it any more.
        """
        assert self._welcome is not None
        self._saved, self._closed, self._forgone = saved, closed, lost
        shared.take(self._welcome.notes)
        self._shared, self._welcome = shared, None
        self._threads = [threading.Thread(target=self._listen, name="hfsdk-kept", daemon=True)]
        if self.turn:
            self._threads.append(threading.Thread(target=self._tell_changes, name="hfsdk-kept-tell", daemon=True))
        for thread in self._threads:
            thread.start()

    def belongs_to(self, client: ControllerClient) -> None:
        """Let the way to the keeper know whose the batches are that come."""
        self._keeper.client = client

    @property
    def near(self) -> bool:
        """Whether this process is on the session's cluster."""
        return self._keeper.near

    # -- as a controller

    def send(self, message: m.Message | q.Query[Any]) -> Any:
        """Have the session's controller handle a message.

        Raises:
            SessionClosedError: the keeper has ended, or another kernel has taken over.
            HfsdkError: the controller's answer.
        """
        match message:
            case m.Put(table=table, step=step) if self._keeper.near and table.nbytes > SMALL_BYTES:
                stored = stored_table("your data", table, ())
                return self._ask(m.PutByReference(stored, self._keeper.put(table), table.nbytes, step))
            case m.Fetch(columns=columns) if self._keeper.near:
                return self._keeper.fetch(self._ask(m.Locate(columns)))
            case m.Release(call_ids=call_ids):
                with self._telling:
                    for call_id in call_ids:
                        self._outcomes.pop(call_id, None)
                    self._released += call_ids
                return None
            case m.Forget(kept=()):
                return None
            case m.Wait(call_ids=call_ids) if all(call_id in self._outcomes for call_id in call_ids):
                return True
            case q.StateOf(call_id=call_id) if call_id in self._outcomes:
                return "done"
            case q.WriterOf(call_id=call_id) if call_id in self._outcomes:
                return self._outcomes[call_id].writer
            case q.ResultOf(call_id=call_id) if call_id in self._outcomes:
                return self._outcomes[call_id].result
        return self._ask(message)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(event)`` for every event of a call; return a function that ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def _ask(self, message: m.Message | q.Query[Any]) -> Any:
        looks = isinstance(message, (q.Query, m.Wait))
        reply = self.ask(lambda: k.Ask(self.turn, message) if looks else self._with_changes(message))
        if reply.besides:
            self._outcomes.update(reply.besides)
            while len(self._outcomes) > MOST_OUTCOMES:
                self._outcomes.pop(next(iter(self._outcomes)), None)
        return reply.unpack()

    def news(self) -> k.News:
        """Return what has changed here since the last news."""
        if self._shared is None or not self.turn:
            return k.NO_NEWS
        with self._telling:
            notes = self._shared.news()
            if not notes:
                return k.NO_NEWS
            self._serial += 1
            return k.News(self._serial, notes)

    # -- to the keeper

    def ask(self, make: Callable[[], Any]) -> Reply:
        """Ask the keeper what ``make`` returns; an interrupt finds that sent, with all its news, or not made.

        Raises:
            SessionClosedError: it has ended; says what is lost.
        """
        if self._lost:
            raise SessionClosedError(self._lost)
        if self._left:
            raise SessionClosedError(left(self.name))
        try:
            with uninterrupted():
                answer = self._keeper.start(make())
            return answer(None)
        except SessionClosedError as error:
            self._lose(str(error))
            raise SessionClosedError(self._lost) from None

    def ask_and_hear(self, make: Callable[[], Any]) -> Any:
        """Ask the keeper, and return when all events before its answer have been taken over here."""
        reply = self.ask(make)
        with self._advanced:
            self._advanced.wait_for(lambda: self._heard >= reply.heard or self._over.is_set(), CATCH_UP_S)
        return reply.unpack()

    def _lose(self, why: str) -> None:
        if self._lost:
            return
        saved = self._last_save()
        near = self._keeper.near  # from afar the server says what has ended, or refuses
        self._lost = self._what_is_lost(why, saved) if near else f"{why}. {saved}" if saved else why
        self._over.set()
        self._keeper.forgo()
        self._closed(self._lost)
        self._forgone(self._lost)
        with self._advanced:
            self._advanced.notify_all()

    def _last_save(self) -> str:
        saved = self._saved()
        if saved is None:
            return ""
        return (
            f"Its run was saved after step {saved['step']}: make the session and its roles again, and "
            f"session.load({saved['folder']!r})."
        )

    def _what_is_lost(self, why: str, saved: str) -> str:
        advice = saved or "Nothing of it was saved by a run (session.train(..., folder=..., save_every=10) saves)."
        return (
            f"the process that kept session {self.name!r} has ended ({why}), and its workers with it: weights, batches and what "
            f"was trained since the last save are gone. {advice}"
        )

    # -- listening

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                heard: k.Heard = self._keeper.ask(k.Listen(self.turn, self._heard, LISTEN_S)).unpack()
            except SessionClosedError as error:
                if not self._over.is_set():
                    self._lose(str(error))
                return
            except Exception:
                if self._over.is_set():
                    return
                traceback.print_exc()
                self._over.wait(LISTEN_S)
                continue
            # more happened than the keeper remembers: all of the state is taken anew
            if heard.missed:
                self._take_all()
                continue
            for event in heard.events:
                self._take(event)
            with self._advanced:
                self._heard = heard.last
                self._advanced.notify_all()

    def _tell_changes(self) -> None:
        """Send what has changed here without a message: a snapshot's name, a seed, a prompts' place."""
        while not self._over.wait(QUIET_S):
            if time.monotonic() - self._asked_s < QUIET_S:
                continue
            ask = self._with_changes(None)
            if ask.news.serial or ask.released:
                with suppress(SessionClosedError):
                    self._keeper.tell(ask)

    def _with_changes(self, message: m.Message | q.Query[Any] | None) -> k.Ask:
        """Return a message with the changes here, and the columns that nothing refers to any more."""
        self._asked_s = time.monotonic()
        with self._telling:
            released, self._released = self._released, ()
        return k.Ask(self.turn, message, self.news(), released)

    def _take_all(self) -> None:
        """Take over everything anew: more has happened than the keeper keeps events of."""
        welcome: k.Welcome = self.ask(lambda: k.Everything(self.turn)).unpack()
        assert self._shared is not None
        self._shared.take(welcome.notes)
        with self._advanced:
            self._heard = welcome.heard
            self._advanced.notify_all()

    def _take(self, event: Mapping[str, Any]) -> None:
        assert self._shared is not None
        match event["type"]:
            case "noted":
                if event["by"] != self.turn or not self.turn:
                    self._shared.take(event["notes"])
            case "taken":
                if self.turn and event["turn"] > self.turn:
                    self._closed(
                        f"{event['kernel']} has taken over the session {self.name!r}; hf.Session.attach({self.name!r}, "
                        "take_over=True) takes it back"
                    )
            case "closed":
                self._closed(f"the session {self.name!r} was closed; make a new one with hf.Session(...)")
            case _:
                for listener in list(self._listeners):
                    try:
                        listener(event)  # type: ignore[arg-type]  # as the controller made it
                    except Exception:  # a picture that cannot be drawn must not stop the listening
                        traceback.print_exc()
                        if listener in self._listeners:
                            self._listeners.remove(listener)

    # -- the end

    def leave(self) -> None:
        """Have done with the session, which goes on; safe to call twice."""
        if self._left:
            return
        self._left = True
        self._over.set()
        with suppress(HfsdkError, TimeoutError):  # one that has ended is not asked: this process may be on another cluster
            if not (self._lost and self._keeper.near):
                self._keeper.ask(k.Leave(self.turn, k.NO_NEWS if self._lost else self.news()), LEAVE_S)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(LEAVE_S)
        self._keeper.leave()
