"""``RemoteSession``: the keeper of a session as a kernel outside its cluster asks it, through the server on the head node.

A lost connection comes back by itself: what was not answered is asked again, and the server does nothing twice. Whoever answers
has to prove anew that it knows the token (``wire.py``): of another program that listens at the server's port the user is told
once, and the server is looked for at the same pace. One thread runs the connection.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

from hfsdk.core.errors import HfsdkError, OptionError, SessionClosedError
from hfsdk.core.runtime import Pick
from hfsdk.core.table import Table
from hfsdk.core.user_line import warn_user
from hfsdk.engine.calls.replies import Reply
from hfsdk.kept import requests as k
from hfsdk.kept.tls import PROTOCOL, kernel_context
from hfsdk.kept.wire import (
    ANEW,
    HELLO_BYTES,
    PORT,
    THIS_CONNECTION,
    WITH_NEWS,
    FrameConnection,
    StrangerError,
    answer_of,
    may_repeat,
    msgpack,
    prove_to_server,
    request_bytes,
)
from hfsdk.session.client import ControllerClient, let_through

SCHEMES = ("hfsdk", "hfsdks")
"""Schemes of addresses; with the second the certificate must be one that this machine's authorities know, too."""

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses before the connection is tried again, the last one from then on."""

CONNECT_S = 10.0

CROWDED = 3
"""How often a connection that was ended in its first moments is tried again at once: the server ends the oldest of a crowd."""

ENDED = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""Errors by which an ended connection shows here."""

NAMED = "a session elsewhere is named hfsdk://HOST:PORT/NAME"

LEAVE_S = 3.0

READ_BYTES = 2**18
"""The bytes that are read ahead of a connection."""

LOST_S = 3.0
"""The seconds without a connection after which waiting calls hear of it, and an interrupt ends the waiting at once."""


def is_remote(name: str) -> bool:
    """Whether a session's name is an address of a server."""
    return name.partition("://")[0] in SCHEMES and "://" in name


def url_of(address: str) -> SplitResult:
    """Return the parts of a server's address.

    Raises:
        OptionError: it is none.
    """
    try:
        url = urlsplit(address)
        if url.scheme in SCHEMES and url.hostname and (url.port is None or url.port > 0):
            return url
    except ValueError:
        pass
    raise OptionError(f"{NAMED}; got {address!r}")


async def reach(url: SplitResult, token: str, version: str) -> tuple[FrameConnection, str]:
    """Get to the server of an address, which has proven that it knows the token, as has this side; return its id too.

    Raises:
        OSError: nothing answers there.
        StrangerError: the process there does not know the token.
        SessionClosedError: it is another version's.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            for pause_s in RETRY_S[:CROWDED]:
                with suppress(*ENDED):
                    return await _reached(url, token, version)
                await asyncio.sleep(pause_s)
            return await _reached(url, token, version)
    except TimeoutError:
        raise TimeoutError(f"no word within {CONNECT_S:g} s") from None
    except ENDED as error:
        raise ConnectionResetError(
            "what listens there ends each connection at once: it is another program, the server of an older hfsdk, a tunnel to "
            "nowhere, or a server that many others come to"
        ) from error


async def _reached(url: SplitResult, token: str, version: str) -> tuple[FrameConnection, str]:
    address = f"{url.scheme}://{url.netloc}"
    try:
        reader, writer = await asyncio.open_connection(
            url.hostname, url.port or PORT, ssl=kernel_context(by_authorities=url.scheme == "hfsdks"), limit=READ_BYTES
        )
    except ssl.SSLCertVerificationError as error:
        raise StrangerError(
            f"shows a certificate that this machine's authorities do not know ({error.verify_message}; SSL_CERT_FILE names others, "
            "and hfsdk:// needs none, for there the token alone proves whose it is)"
        ) from error
    except ssl.SSLError as error:
        if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            raise
        raise StrangerError("does not speak TLS: it is another program, or the server of an older hfsdk") from error
    line = FrameConnection(reader, writer)
    try:
        if line.protocol != PROTOCOL:
            raise StrangerError(f"does not speak {PROTOCOL}: it is another program, or the server of another hfsdk")
        await prove_to_server(line, token, line.certificate)
        said = msgpack().decode(await line.frame(HELLO_BYTES))
        theirs, server = said["version"], str(said["server"])
    except (ValueError, TypeError, LookupError):
        line.abort()
        raise SessionClosedError(f"what answers at {address} is no server of hfsdk's") from None
    except BaseException:
        line.abort()
        raise
    if theirs != version:
        line.abort()
        raise SessionClosedError(
            f"the server of {address} is hfsdk {theirs}, and this is {version}; nothing was sent. Use the same version."
        )
    return line, server


def strange(address: str, error: StrangerError) -> str:
    """Return the message about somebody else who answers at an address."""
    return (
        f"what answers at {address} {error}. It got nothing that lets it in. Either another program listens there (the server has "
        "ended, or an SSH tunnel leads elsewhere), or this is not the server's token: `python -m hfsdk.serve` says which file that "
        "is in"
    )


def page_link(address: str, token: str, version: str) -> str:
    """Ask a server for a link that shows a browser its sessions, once.

    Raises:
        OptionError: nothing answers there, or it shows no pages.
        SessionClosedError: the process there does not know the token, or is of another version.
    """
    url = url_of(address)

    async def ask() -> str:
        line, _ = await reach(url, token, version)
        try:
            line.send(msgpack().encode({"version": version, "name": url.path.strip("/"), "link": True}))
            said = msgpack().decode(await line.frame(HELLO_BYTES))
        finally:
            await line.close()
        if not said["web"]:
            raise OptionError(
                f"the server at {address} shows no pages: it listens to others without a --certificate. Have it listen on "
                "127.0.0.1, and reach it through an SSH tunnel"
            )
        return f"{said['web']}://{url.netloc}{said['path']}"

    try:
        return asyncio.run(ask())
    except StrangerError as error:
        raise SessionClosedError(strange(address, error)) from None
    except OSError as error:
        raise OptionError(f"nothing answers at {address} as it should: {error}. Does `python -m hfsdk.serve` run there?") from error


class _Waiting:
    """A request that is not answered."""

    def __init__(self, request: Any, frame: bytes) -> None:
        self.request, self.frame, self.sent = request, frame, False
        self.done = threading.Event()
        self.reply: Reply | None = None

    def answer(self, reply: Reply) -> None:
        self.reply = reply
        self.done.set()


class RemoteSession:
    """A kept session as a kernel outside its cluster asks it, through the server on the head node.

    Attributes:
        name: the name of the session.
        near: whether columns can be put into the cluster's store, and fetched from it, from here.
        client: the client of this side's session; what comes belongs to it.
    """

    near = False

    def __init__(self, address: str, token: str, version: str) -> None:
        self._address, self._url = address, url_of(address)
        self.name = self._url.path.strip("/")
        if not self.name:
            raise OptionError(f"{NAMED}; got {address!r}, which names no session")
        self._token, self._version, self._id = token, version, secrets.token_hex(8)
        self.client: ControllerClient | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._line: FrameConnection | None = None
        self._server = ""
        self._over = False
        self._failed: HfsdkError | None = None
        self._lost_s, self._said_lost, self._answered = math.inf, False, False
        self._why, self._told_stranger = "", False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run_until_left, args=(opened,), name="hfsdk-remote", daemon=True)
        self._thread.start()
        try:
            opened.result()
        except StrangerError as error:
            raise SessionClosedError(strange(address, error)) from None
        except BaseException:
            self.leave()
            raise

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
                f"the connection to {self._address} is lost ({self._why}), and tried again: what was asked is done when it "
                "is back. Ctrl-C ends the waiting."
            )

    def tell(self, request: Any) -> None:
        """Ask, and wait for nothing."""
        self._send(request)

    def put(self, table: Table) -> Any:
        """Refuse: from here a table travels with its message."""
        raise NotImplementedError

    def fetch(self, picks: Sequence[Pick]) -> Table:
        """Refuse: the server fetches."""
        raise NotImplementedError

    def forgo(self) -> None:
        """Ignore it: a kernel elsewhere is on no cluster."""

    def leave(self) -> None:
        """Have done with the server; requests that are under way are sent."""
        self._over = True
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._task.cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_S)

    def _send(self, request: Any) -> _Waiting:
        if self._failed is not None:
            raise self._failed
        with self._lock:
            self._number += 1
            refused: Exception | None = None
            try:
                frame = request_bytes(self._number, min(self._waiting, default=self._number), request)
            except Exception as error:  # too large, or it does not pickle
                refused = error
            else:
                waiting = self._waiting[self._number] = _Waiting(request, frame)
                line, waiting.sent = self._line, self._line is not None
        if refused is not None:
            if isinstance(request, WITH_NEWS) and not (isinstance(request, k.Ask) and request.message is None):
                released = request.released if isinstance(request, k.Ask) else ()
                self._send(k.Ask(request.turn, None, request.news, released))  # what came along is not told again
            raise refused
        if line is not None and self._loop is not None:
            with suppress(RuntimeError):  # it is on its way out
                self._loop.call_soon_threadsafe(line.send, waiting.frame)
        return waiting

    # -- the connection, in its thread

    def _run_until_left(self, opened: Future[None]) -> None:
        try:
            with asyncio.Runner() as runner:  # asyncio.run is another one where a notebook has changed it (nest_asyncio)
                runner.run(self._run(opened))
        except asyncio.CancelledError:
            pass
        except Exception as error:  # e.g. there is no file descriptor for its loop
            if opened.done():
                raise
            opened.set_exception(error)

    async def _run(self, opened: Future[None]) -> None:
        """Connect, report that or why not, then listen, and connect again, until this side leaves."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            await self._connect()
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        tries = 0
        while not self._over:
            try:
                line = self._line or await self._connect()
                while True:
                    frame = await line.frame()
                    tries = 0
                    self._hear(*answer_of(frame, self.client))
            except StrangerError as error:
                self._why = strange(self._address, error)
                self._tell_of_stranger()
            except SessionClosedError as error:
                self._fail(error)
            except OSError as error:
                self._why = str(error) or type(error).__name__
            except Exception as error:
                self._fail(HfsdkError(f"what the server sent cannot be read: {error}"))
            finally:
                await self._lose()
            if self._failed is not None:
                return
            await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1

    async def _lose(self) -> None:
        """The connection is lost, or this side leaves."""
        with self._lock:
            line, self._line = self._line, None
            if line is not None:
                self._lost_s = time.monotonic()
        if line is not None:
            await line.close()

    async def _connect(self) -> FrameConnection:
        """Get to the server, say who asks, and ask again what is not answered.

        Raises:
            OSError: nothing answers there.
            SessionClosedError: the server has another version.
        """
        line, server = await reach(self._url, self._token, self._version)
        line.beat()
        with self._lock:
            following = min((number for number, question in self._waiting.items() if not question.sent), default=self._number + 1)
        hello = {"client": self._id, "version": self._version, "name": self.name, "next": following}
        line.send(msgpack().encode(hello))
        with self._lock:
            # another server does not know what the one before it was asked
            anew, self._server = bool(self._server) and self._server != server, server
            waiting = sorted(self._waiting.items())
            self._line, self._lost_s, self._said_lost, self._told_stranger = line, math.inf, False, False
        for number, question in waiting:
            if anew and question.sent and not may_repeat(question.request):
                self._take(number, Reply(errors=(HfsdkError(ANEW),)))
            else:
                question.sent = True
                line.send(question.frame)
        return line

    def _tell_of_stranger(self) -> None:
        """Warn the user, once until the server is there again."""
        if not self._told_stranger:
            self._told_stranger = True
            with suppress(UserWarning):  # where warnings are errors
                warn_user(f"{self._why}. The server is looked for again and again meanwhile.")

    def _hear(self, number: int, reply: Reply) -> None:
        """Take an answer; that of the connection itself says why the server ends it."""
        if number != THIS_CONNECTION:
            self._answered = True
            self._take(number, reply)
            return
        error = reply.errors[0]
        if isinstance(error, OptionError) and not self._answered:
            self._fail(OptionError(f"{error} at {self._address}; hf.sessions() on the cluster lists them"))
        else:
            self._fail(SessionClosedError(f"the server of {self._address} says: {error}"))

    def _take(self, number: int, reply: Reply) -> None:
        with self._lock:
            waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting.answer(reply)

    def _fail(self, error: HfsdkError) -> None:
        self._failed = error
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for question in waiting:
            question.answer(Reply(errors=(error,)))
