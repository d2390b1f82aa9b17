"""``RemoteKeeper``: the keeper of a session as a kernel outside its cluster asks it, through the server on the head node.

A lost connection comes back by itself: what was not answered is asked again, and the server does nothing twice.
"""

from __future__ import annotations

import math
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from hfsdk.core.asked_from import warn_user
from hfsdk.core.errors import HfsdkError, ModelNotFoundError, OptionError, SessionClosedError
from hfsdk.core.runtime import Pick
from hfsdk.core.table import Table
from hfsdk.engine.calls.replies import Reply
from hfsdk.session.client import ControllerClient, let_through
from hfsdk.session.wire import ANEW, NO_SESSION, PORT, PROTOCOL, answer_of, may_repeat, msgpack, request_bytes

SCHEMES = {"hfsdk": "ws", "hfsdks": "wss"}

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses before the connection is tried again, the last one from then on."""

CONNECT_S = 10.0

LOST_S = 3.0
"""After so long without a connection whoever waits is told, and an interrupt ends the waiting at once."""


def is_remote(name: str) -> bool:
    """Whether a session's name is an address of a server."""
    return name.partition("://")[0] in SCHEMES and "://" in name


class _Waiting:
    """A request that is not answered."""

    def __init__(self, request: Any, frame: bytes) -> None:
        self.request, self.frame, self.sent = request, frame, False
        self.done = threading.Event()
        self.reply: Reply | None = None

    def answer(self, reply: Reply) -> None:
        self.reply = reply
        self.done.set()


class RemoteKeeper:
    """See the module's text.

    Attributes:
        name: of the session.
        near: whether columns can be put into the cluster's store, and fetched from it, from here.
        client: of this side's session; what comes belongs to it.
    """

    near = False

    def __init__(self, address: str, token: str, version: str) -> None:
        url = urlsplit(address)
        self.name = url.path.strip("/")
        if not self.name or not url.hostname:
            raise OptionError(f"a session elsewhere is named hfsdk://HOST:PORT/NAME; got {address!r}")
        if url.scheme == "hfsdk" and url.hostname not in ("127.0.0.1", "::1", "localhost"):
            raise OptionError(
                f"the token would travel to {url.hostname} as it is: use hfsdks:// (TLS), or an SSH tunnel: ssh -L "
                f"{url.port or PORT}:127.0.0.1:{url.port or PORT} {url.hostname}, then "
                f"hfsdk://127.0.0.1:{url.port or PORT}/{self.name}"
            )
        host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
        self._address = address
        self._url = f"{SCHEMES[url.scheme]}://{host}:{url.port or PORT}/{self.name}"
        self._token, self._version, self._id = token, version, secrets.token_hex(8)
        self.client: ControllerClient | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._connection: Any = None
        self._server = ""
        self._over = threading.Event()
        self._failed: HfsdkError | None = None
        self._lost_s, self._said_lost, self._answered = math.inf, False, False
        self._connect()
        threading.Thread(target=self._run, name="hfsdk-remote", daemon=True).start()

    # -- as a keeper

    def ask(self, request: Any, timeout_s: float | None = None) -> Reply:
        """Ask, and wait for the answer.

        Raises:
            SessionClosedError: the session is not there any more, or the server refuses this kernel.
            TimeoutError: no answer came in time.
        """
        return self.start(request)(timeout_s)

    def start(self, request: Any) -> Callable[[float | None], Reply]:
        """Ask; return what waits for the answer, at most so many seconds."""
        waiting = self._send(request)
        return lambda timeout_s: self._answer(waiting, timeout_s)

    def _answer(self, waiting: _Waiting, timeout_s: float | None) -> Reply:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not waiting.done.wait(0.1 if deadline is None else max(0.0, min(0.1, deadline - time.monotonic()))):
            if self._failed is not None:
                raise self._failed
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"no answer within {timeout_s} s")
            if time.monotonic() - self._lost_s >= LOST_S and threading.current_thread() is threading.main_thread():
                self._say_lost()
                let_through()
        assert waiting.reply is not None
        return waiting.reply

    def _say_lost(self) -> None:
        if not self._said_lost:
            self._said_lost = True
            warn_user(
                f"the connection to {self._address} is lost, and tried again: what was asked is done when it is back. Ctrl-C ends "
                "the waiting."
            )

    def tell(self, request: Any) -> None:
        """Ask, and wait for nothing."""
        self._send(request)

    def put(self, table: Table) -> Any:
        """Not from here: a table travels with its message."""
        raise NotImplementedError

    def fetch(self, picks: Sequence[Pick]) -> Table:
        """Not from here: the server fetches."""
        raise NotImplementedError

    def forgo(self) -> None:
        """Nothing: a kernel elsewhere is on no cluster."""

    def leave(self) -> None:
        """Have done with the server."""
        self._over.set()
        connection = self._connection
        if connection is not None:
            connection.close()

    def _send(self, request: Any) -> _Waiting:
        if self._failed is not None:
            raise self._failed
        with self._lock:
            self._number += 1
            waiting = _Waiting(request, request_bytes(self._number, min(self._waiting, default=self._number), request))
            self._waiting[self._number] = waiting
            connection = self._connection
            waiting.sent = connection is not None
        if connection is not None:
            with suppress(Exception):  # it is lost: the thread that listens finds out, and sends it again
                connection.send(waiting.frame)
        return waiting

    # -- the connection

    def _connect(self) -> None:
        """Get to the server, and see that it is of this version.

        Raises:
            OSError: nothing answers there.
            SessionClosedError: the server refuses this kernel, or has another version.
        """
        try:
            from websockets.exceptions import InvalidStatus, WebSocketException
            from websockets.sync.client import connect
        except ModuleNotFoundError as error:
            raise ModelNotFoundError("sessions elsewhere need the package 'websockets': pip install 'hfsdk[remote]'") from error
        context = ssl.create_default_context() if self._url.startswith("wss") else None
        try:
            connection = connect(
                self._url, ssl=context, additional_headers={"Authorization": f"Bearer {self._token}"}, max_size=None,
                compression=None, open_timeout=CONNECT_S, ping_interval=10, ping_timeout=20, proxy=None,
            ).__enter__()  # fmt: skip  # a connection, in every version of the package; used without it is deprecated
        except InvalidStatus as error:
            text = "the token is not this server's" if error.response.status_code == 401 else str(error)
            raise SessionClosedError(f"{self._address}: {text}") from None
        except WebSocketException as error:  # cut in the middle of it
            raise OSError(str(error)) from error
        try:
            self._greet(connection)
        except BaseException:
            connection.close()
            raise

    def _greet(self, connection: Any) -> None:
        """Hear which server this is, say who asks, and ask again what is not answered."""
        from websockets.exceptions import WebSocketException

        try:
            said = msgpack().decode(connection.recv(CONNECT_S))
            server = said["server"]
        except WebSocketException as error:
            raise OSError(str(error)) from error
        except (ValueError, TypeError, LookupError):
            raise SessionClosedError(f"what answers at {self._address} is no server of hfsdk's") from None
        if said.get("version") != self._version or said.get("protocol") != PROTOCOL:
            raise SessionClosedError(
                f"the server of {self._address} is hfsdk {said.get('version')}, and this is {self._version}; nothing was sent. Use "
                "the same version."
            )
        with self._lock:
            following = min((number for number, one in self._waiting.items() if not one.sent), default=self._number + 1)
        with suppress(WebSocketException):  # as above; whoever listens finds out
            connection.send(msgpack().encode({"client": self._id, "version": self._version, "next": following}))
        with self._lock:
            anew, self._server = bool(self._server) and self._server != server, server
            waiting = sorted(self._waiting.items())
            self._connection, self._lost_s, self._said_lost = connection, math.inf, False
        for number, one in waiting:
            if anew and one.sent and not may_repeat(one.request):
                self._take(number, Reply(errors=(HfsdkError(ANEW),)))
            else:
                one.sent = True
                with suppress(WebSocketException):
                    connection.send(one.frame)

    def _run(self) -> None:
        from websockets.exceptions import WebSocketException

        tries = 0
        while not self._over.is_set():
            try:
                if self._connection is None:
                    self._connect()
                for frame in self._connection:
                    tries, self._answered = 0, True
                    number, reply = answer_of(frame, self.client)
                    self._take(number, reply)
            except SessionClosedError as error:
                self._fail(error)
                return
            except (OSError, TimeoutError, WebSocketException):
                pass
            except Exception as error:
                self._fail(HfsdkError(f"what the server sent cannot be read: {error}"))
                return
            if self._connection is not None:
                self._end_of(self._connection)
            if self._failed is not None:
                return
            with self._lock:
                if self._connection is not None:
                    self._lost_s = time.monotonic()
                self._connection = None
            self._over.wait(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1

    def _end_of(self, connection: Any) -> None:
        """See why the server has ended the connection."""
        if self._over.is_set():
            return
        if connection.close_code == NO_SESSION and not self._answered:
            self._fail(OptionError(f"{connection.close_reason} at {self._address}; hf.sessions() on the cluster lists them"))
        elif connection.close_code in (1002, 1011, NO_SESSION):
            self._fail(SessionClosedError(f"the server of {self._address} says: {connection.close_reason}"))

    def _take(self, number: int, reply: Reply) -> None:
        with self._lock:
            waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting.answer(reply)

    def _fail(self, error: HfsdkError) -> None:
        self._failed = error
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for one in waiting:
            one.answer(Reply(errors=(error,)))
