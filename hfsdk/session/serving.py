"""The server of kept sessions: one port on the head node of their cluster, for kernels elsewhere and for a look with a browser.

It holds nothing of a session: it passes requests on to the keepers, and answers as plain data. Whoever has its token can run code
in the sessions, as whoever has the cluster's; so it listens on this machine alone (for an SSH tunnel), or with TLS.
"""

from __future__ import annotations

import hmac
import importlib
import logging
import os
import secrets
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hfsdk.core.errors import HfsdkError, OptionError, SessionClosedError
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls.replies import Reply, errors_of
from hfsdk.session import keeper_requests as k
from hfsdk.session.attach import done_with, keeper_of, package_version
from hfsdk.session.served_page import Pages
from hfsdk.session.wire import ANEW, NO_SESSION, PORT, PROTOCOL, answer_bytes, may_repeat, msgpack, request_of

AT_ONCE = 64
"""Requests that are answered at once; one that waits for events takes a second."""

IDLE_S = 2.0
"""How long the server uses Ray after the last kernel: the Ray of kept sessions ends with the last of them."""

REMEMBERED_S = 600.0
"""How long what a kernel has asked is known after its connection was lost; later it is told that this is not known any more."""

HELLO_S = 20.0
"""How long a kernel that has shown the token may take to say which it is."""

HEADERS = (
    ("Content-Type", "text/html; charset=utf-8"), ("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline' blob:"),
    ("X-Frame-Options", "DENY"), ("X-Content-Type-Options", "nosniff"),
)  # fmt: skip


def token_file() -> Path:
    """Return where the server's token is, in a file that this user alone can read; it is made where there is none."""
    folder: Path = importlib.import_module("hfsdk.engine.ray.ray_head").state_folder()
    path = folder / "serve-token"
    with suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, secrets.token_urlsafe(32).encode())
        os.close(fd)
    return path


@dataclass(frozen=True)
class ServeOptions:
    """Where and how to serve."""

    host: str = "127.0.0.1"
    port: int = PORT
    token: str = ""
    address: str | None = None
    """Of the Ray cluster; ``None``: the sessions of this machine alone."""
    certificate: str | None = None
    key: str | None = None

    def check(self) -> None:
        """Refuse to listen to others without TLS, or without a token.

        Raises:
            OptionError: says what to do.
        """
        if len(self.token) < 16:
            raise OptionError("the server needs a token of at least 16 characters")
        if self.host not in ("127.0.0.1", "::1", "localhost") and self.certificate is None:
            raise OptionError(
                f"to listen on {self.host} give a certificate and its key (--certificate, --key), for the token and all else would "
                "travel as they are; or listen on 127.0.0.1, and reach it through an SSH tunnel: ssh -L "
                f"{self.port}:127.0.0.1:{self.port} HEAD"
            )


class Answers:
    """What a kernel has asked, by number: asked again, it is not done again.

    Attributes:
        users: connections of the kernel.
        left_s: when the last of them ended.
    """

    def __init__(self, following: int) -> None:
        self._known: dict[int, Future[Reply]] = {}
        self._lock = threading.Lock()
        self._following = following
        self.users, self.left_s = 0, 0.0

    def once(self, number: int, answered: int, request: k.Request, start: Callable[[], Future[Reply]]) -> Future[Reply]:
        """Return the answer to come: that of before, where there was one.

        Args:
            number: of the request.
            answered: all answers below have come to the kernel, and are forgotten.
            request: it may not be done again where it was asked before all that is known here.
            start: does it.
        """
        with self._lock:
            for one in [one for one in self._known if one < answered]:
                del self._known[one]
            if number not in self._known:
                if number < self._following and not may_repeat(request):
                    unknown: Future[Reply] = Future()
                    unknown.set_result(Reply(errors=(HfsdkError(ANEW),)))
                    return unknown
                self._known[number] = start()
            return self._known[number]


class Keepers:
    """The keepers that kernels ask through this server; it has done with Ray a moment after the last of them has gone.

    Not at once, for a kernel whose connection was lost comes back, and what it asked is still under way.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._known: dict[str, Any] = {}
        self._users: dict[str, int] = {}
        self._idle_s = time.monotonic()
        self._lock = threading.Lock()

    def enter(self, name: str) -> Any:
        """Return the keeper of a session, for one more kernel; ``None`` where there is none.

        Raises:
            HfsdkError: the cluster is not there, or the session does not answer.
        """
        with self._lock:
            keeper = self._known.get(name)
            if keeper is not None and not keeper.lives():
                done_with(self._known.pop(name))
                keeper = None
        new = keeper_of(name, self._address) if keeper is None else None  # others are answered meanwhile
        with self._lock:
            known = self._known.get(name)
            if new is not None and known is not None:  # another kernel was quicker
                done_with(new)
            keeper = known or new
            if keeper is None:
                return None
            self._known[name] = keeper
            self._users[name] = self._users.get(name, 0) + 1
            return keeper

    def leave(self, name: str) -> None:
        """A kernel has gone."""
        with self._lock:
            self._users[name] -= 1
            self._idle_s = time.monotonic()

    def rest(self, after_s: float = IDLE_S) -> None:
        """Have done with Ray, where no kernel was there for a while."""
        with self._lock:
            if self._known and not any(self._users.values()) and time.monotonic() - self._idle_s >= after_s:
                for keeper in self._known.values():
                    done_with(keeper)
                self._known.clear()


class Server:
    """See the module's text.

    Attributes:
        port: where it listens.
    """

    def __init__(self, options: ServeOptions) -> None:
        options.check()
        from websockets.sync.server import serve

        self._options, self._id = options, secrets.token_hex(8)
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hfsdk-serve")
        self._kernels: dict[str, Answers] = {}
        self._lock = threading.Lock()
        self._pages, self._keepers = Pages(options.address), Keepers(options.address)
        self._over = threading.Event()
        context = None
        if options.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(options.certificate, options.key)
        self._server = serve(
            self._talk, options.host, options.port, ssl=context, process_request=self._admit, max_size=None, compression=None,
            ping_interval=10, ping_timeout=20, logger=_silent(),
        )  # fmt: skip
        self.port = int(self._server.socket.getsockname()[1])

    def run(self) -> None:
        """Serve until :meth:`close`."""
        threading.Thread(target=self._rest, name="hfsdk-serve-rest", daemon=True).start()
        self._server.serve_forever()

    def _rest(self) -> None:
        while not self._over.wait(IDLE_S / 2):
            self._keepers.rest()
            self._pages.rest()
            self._forget()

    def close(self) -> None:
        """End."""
        self._over.set()
        self._server.shutdown()
        self._pages.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- who comes

    def _admit(self, connection: Any, request: Any) -> Any:
        """Let nobody in without the token; answer a browser with a page."""
        try:
            url = urlsplit(request.path)
            name, query = url.path.strip("/"), parse_qs(url.query)
            cookie = SimpleCookie(request.headers.get("Cookie", "")).get("hfsdk")
            bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
            is_kernel = "upgrade" in request.headers.get("Connection", "").lower()
        except (ValueError, LookupError, CookieError):  # damaged, or said twice
            return self._respond(connection, HTTPStatus.BAD_REQUEST, "what came is no request\n")
        shown = bearer if is_kernel else (query.get("token", [""])[0] or (cookie.value if cookie else "") or bearer)
        if not hmac.compare_digest(shown.encode(errors="replace"), self._options.token.encode()):
            return self._respond(connection, HTTPStatus.UNAUTHORIZED, "the token is missing, or not this server's\n")
        if is_kernel:
            return None
        status, text = self._pages.page(name)
        response = self._respond(connection, status, text)
        if query.get("token"):
            secure = "; Secure" if self._options.certificate else ""
            response.headers["Set-Cookie"] = f"hfsdk={shown}; HttpOnly; SameSite=Strict; Path=/{secure}"
        return response

    @staticmethod
    def _respond(connection: Any, status: HTTPStatus, text: str) -> Any:
        response = connection.respond(status, text)
        for name, value in HEADERS:
            if name in response.headers:
                del response.headers[name]
            response.headers[name] = value
        return response

    # -- kernels

    def _talk(self, connection: Any) -> None:
        """Answer one kernel until its connection ends."""
        from websockets.exceptions import ConnectionClosed

        name = urlsplit(connection.request.path).path.strip("/")
        with suppress(ConnectionClosed):
            connection.send(msgpack().encode({"version": package_version(), "server": self._id, "protocol": PROTOCOL}))
            try:
                hello = msgpack().decode(connection.recv(HELLO_S))
                client, theirs, following = str(hello["client"]), hello["version"], int(hello["next"])
            except (TimeoutError, ValueError, TypeError, LookupError):
                connection.close(1002, "this is no kernel")
                return
            if theirs != package_version():
                connection.close(1002, "another version of hfsdk")
                return
            try:
                keeper = self._keepers.enter(name)
            except HfsdkError as error:
                connection.close(1011, str(error)[:120])
                return
            if keeper is None:
                connection.close(NO_SESSION, f"there is no session {name!r}"[:120])
                return
            try:
                answers = self._answers(f"{name}/{client}", following)
                try:
                    self._serve(connection, keeper, answers)
                finally:
                    self._left(answers)
            finally:
                self._keepers.leave(name)

    def _answers(self, kernel: str, following: int) -> Answers:
        with self._lock:
            answers = self._kernels.setdefault(kernel, Answers(following))
            answers.users += 1
            return answers

    def _left(self, answers: Answers) -> None:
        with self._lock:
            answers.users -= 1
            answers.left_s = time.monotonic()

    def _forget(self) -> None:
        """Forget what kernels have asked that were not there for long."""
        with self._lock:
            for kernel, answers in list(self._kernels.items()):
                if not answers.users and time.monotonic() - answers.left_s > REMEMBERED_S:
                    del self._kernels[kernel]

    def _serve(self, connection: Any, keeper: Any, answers: Answers) -> None:
        from websockets.exceptions import ConnectionClosed

        sending = threading.Lock()

        def answer(number: int, done: Future[Reply]) -> None:
            reply = done.result()
            with suppress(ConnectionClosed), sending:
                connection.send(answer_bytes(number, reply))
                if any(isinstance(error, SessionClosedError) for error in reply.errors) and not keeper.lives():
                    connection.close(1011, str(reply.errors[0])[:120])

        for frame in connection:
            try:
                number, answered, request = request_of(frame)
            except Exception:  # whatever it unpickles to
                connection.close(1002, "what came is no request")
                return
            future = answers.once(number, answered, request, lambda request=request: self._pool.submit(_reply, keeper, request))  # type: ignore[misc]
            future.add_done_callback(lambda done, number=number: answer(number, done))  # type: ignore[misc]


def _silent() -> logging.Logger:
    """Return where the protocol tells of strangers: nowhere, for anybody could fill a disk with it."""
    logger = logging.getLogger("hfsdk.serve")
    logger.setLevel(logging.CRITICAL)
    return logger


def _reply(keeper: Any, request: k.Request) -> Reply:
    """Ask a keeper for somebody elsewhere: columns are brought here, and travel as they are."""
    try:
        if isinstance(request, k.Ask) and isinstance(request.message, m.Fetch):
            located = keeper.ask(replace(request, message=m.Locate(request.message.columns)))
            return located if located.errors else Reply(keeper.fetch(located.value), heard=located.heard)
        if isinstance(request, k.LastStep):
            request = replace(request, plain=True)
        reply: Reply = keeper.ask(request)
        return reply
    except SessionClosedError as error:
        return Reply(errors=(error,))
    except SystemExit:  # Ray, where this process is on its way out
        return Reply(errors=(SessionClosedError("the server ends"),))
    except Exception as error:
        return Reply(errors=errors_of(error))
