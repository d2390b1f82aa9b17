"""The server of kept sessions: one port on the head node of their cluster, for kernels elsewhere and for a look with a browser.

It holds nothing of a session: it passes requests on to the keepers, and answers as plain data. Whoever has its token can run code
in the sessions, as whoever has the cluster's: see ``wire.py`` for how both sides prove that they know it, ``acceptor.py`` for what
those cost who do not, and ``page_access.py`` for who sees the pages. One thread runs the connections; threads of a pool wait for
the keepers.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from http import HTTPStatus
from pathlib import Path
from typing import Any

from hfsdk.core.errors import HfsdkError, OptionError, SessionClosedError
from hfsdk.core.trace import Trace
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls.replies import Reply, errors_of
from hfsdk.kept import requests as k
from hfsdk.kept.acceptor import Acceptor, Arrival, Refusals
from hfsdk.kept.attach import done_with, keeper_of, package_version, sessions
from hfsdk.kept.page_access import LOOPBACK, POLICY_BEGINS, PageAccess, PageRequest, Visit, refused, response
from hfsdk.kept.tls import PROTOCOL, server_context
from hfsdk.kept.wire import (
    ANEW,
    HELLO_BYTES,
    PORT,
    THIS_CONNECTION,
    FrameConnection,
    StrangerError,
    answer_bytes,
    may_repeat,
    msgpack,
    prove_to_kernel,
    request_of,
)
from hfsdk.session.session import Session

AT_ONCE = 64
"""Requests that are answered at once; one that waits for events takes a second."""

IDLE_S = 2.0
"""How long the server uses Ray after the last kernel: the Ray of kept sessions ends with the last of them."""

REMEMBERED_S = 600.0
"""The seconds that a kernel's requests are remembered after its connection was lost; later they are refused as unknown."""

TOKEN_CHARS = 16
"""Fewest of a token."""

WAITING = 1024
"""Connections that the system keeps until they are accepted."""

SHOWN_S = 30.0
"""How long a browser may take to read a page."""


def token_file() -> Path:
    """Return where the server's token is, in a file that this user alone can read; it is made where there is none."""
    folder: Path = importlib.import_module("hfsdk.engine.ray.head").state_folder()
    path = folder / "serve-token"
    with suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, secrets.token_urlsafe(32).encode())
        os.close(fd)
    return path


@dataclass(frozen=True)
class ServeOptions:
    """The place and the manner of serving."""

    host: str = "127.0.0.1"
    port: int = PORT
    token: str = ""
    address: str | None = None
    """The address of the Ray cluster; ``None``: the sessions of this machine alone."""
    certificate: str | None = None
    key: str | None = None

    @property
    def shows_pages(self) -> bool:
        """Whether a browser can know whom it asks: by a certificate, or because nothing leaves this machine."""
        return self.certificate is not None or self.host in LOOPBACK

    def check(self) -> None:
        """Refuse a token that could be guessed.

        Raises:
            OptionError: says what to do.
        """
        if len(self.token) < TOKEN_CHARS:
            raise OptionError(
                f"the server needs a token of at least {TOKEN_CHARS} random characters, and got {len(self.token)}; without "
                "--token-file it makes one"
            )


class AnsweredRequests:
    """The requests of a kernel, by number: one that is repeated is not done again.

    Attributes:
        users: connections of the kernel.
        left_s: when the last of them ended.
    """

    def __init__(self, following: int) -> None:
        self._replies: dict[int, Future[Reply]] = {}
        self._lock = threading.Lock()
        self._following = following
        self.users, self.left_s = 0, 0.0

    def once(self, number: int, answered: int, request: k.Request, start: Callable[[], Future[Reply]]) -> Future[Reply]:
        """Return the answer to come: that of before, where there was one.

        Args:
            number: the number of the request.
            answered: all answers below have come to the kernel, and are forgotten.
            request: the request, which may not be done again where it was asked before all that is known here.
            start: the function that carries it out.
        """
        with self._lock:
            for old in [old for old in self._replies if old < answered]:
                del self._replies[old]
            if number not in self._replies:
                # an earlier server was sent this request and may have done it
                if number < self._following and not may_repeat(request):
                    unknown: Future[Reply] = Future()
                    unknown.set_result(Reply(errors=(HfsdkError(ANEW),)))
                    return unknown
                self._replies[number] = start()
            return self._replies[number]


class Keepers:
    """The keepers that kernels ask through this server; it has done with Ray a moment after the last of them has gone.

    Not at once, for a kernel whose connection was lost comes back, and what it asked is still under way.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._keepers: dict[str, Any] = {}
        self._users: dict[str, int] = {}
        self._idle_s = time.monotonic()
        self._lock = threading.Lock()

    def enter(self, name: str) -> Any:
        """Return the keeper of a session, for one more kernel; ``None`` where there is none.

        Raises:
            HfsdkError: the cluster is not there, or the session does not answer.
        """
        with self._lock:
            keeper = self._keepers.get(name)
            if keeper is not None and not keeper.lives():
                done_with(self._keepers.pop(name))
                keeper = None
        new = keeper_of(name, self._address) if keeper is None else None  # others are answered meanwhile
        with self._lock:
            other = self._keepers.get(name)
            if new is not None and other is not None:  # another kernel was quicker
                done_with(new)
            keeper = other or new
            if keeper is None:
                return None
            self._keepers[name] = keeper
            self._users[name] = self._users.get(name, 0) + 1
            return keeper

    def leave(self, name: str) -> None:
        """Note that a kernel has gone."""
        with self._lock:
            self._users[name] -= 1
            self._idle_s = time.monotonic()

    def rest(self, after_s: float = IDLE_S) -> None:
        """Have done with Ray, where no kernel was there for a while."""
        with self._lock:
            if self._keepers and not any(self._users.values()) and time.monotonic() - self._idle_s >= after_s:
                for keeper in self._keepers.values():
                    done_with(keeper)
                self._keepers.clear()


class Server:
    """The server of kept sessions. It listens from the start, and answers when it runs.

    Args:
        options: the place and the manner of serving.
        tell: a function that gets a line about those who were refused.

    Attributes:
        port: the port on which it listens.
    """

    def __init__(self, options: ServeOptions, tell: Callable[[str], None] = lambda text: None) -> None:
        options.check()
        msgpack()
        self._options, self._id = options, secrets.token_hex(8)
        self._context, self._certificate = server_context(options.certificate, options.key)
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        self._listener = socket.create_server((options.host, options.port), family=family, backlog=WAITING)
        self.port = int(self._listener.getsockname()[1])
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hfsdk-serve")
        self._kernels: dict[str, AnsweredRequests] = {}
        self._lock = threading.Lock()
        self._pages, self._keepers = Pages(options.address), Keepers(options.address)
        self._access = PageAccess(self.port, encrypted=options.certificate is not None)
        self._refusals = Refusals(tell)
        self._over = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends: asyncio.Event | None = None

    def run(self) -> None:
        """Serve until :meth:`close`."""
        threading.Thread(target=self._rest, name="hfsdk-serve-rest", daemon=True).start()
        with self._listener, asyncio.Runner() as runner:
            runner.run(self._serve_all())
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _serve_all(self) -> None:
        self._ends, self._loop = asyncio.Event(), asyncio.get_running_loop()
        if self._over.is_set():
            return
        accepting = asyncio.create_task(Acceptor(self._listener, self._meet, self._refusals).accept())
        await self._ends.wait()
        accepting.cancel()

    def _rest(self) -> None:
        while not self._over.wait(IDLE_S / 2):
            self._keepers.rest()
            self._pages.rest()
            self._refusals.rest()
            self._forget()

    def close(self) -> None:
        """End."""
        self._over.set()
        if self._loop is None or self._ends is None:  # nobody was served
            self._listener.close()
        else:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._ends.set)
        self._pages.close()

    def page_link(self, name: str = "") -> str:
        """Return the path of a link for a browser, good once; from any thread."""
        return self._access.link(name)

    # -- who comes

    async def _meet(self, arrival: Arrival) -> Awaitable[None]:
        """Have a kernel or a browser prove itself."""
        tls = await arrival.speaks_tls()
        line = await arrival.take_line(self._context if tls else None)
        # TLS has agreed on a protocol by now, so a kernel is known from a browser before either has said a word
        if line.protocol == PROTOCOL:
            await prove_to_kernel(line, self._options.token, self._certificate)
            return self._talk(line)
        visit = self._visit(await line.head(), tls=tls)
        if visit.cookie is not None:
            return self._show(line, visit)
        line.send_bare(response(visit.status, visit.text, None))
        await line.close()
        raise StrangerError("a browser, or another program, came without a link or a cookie of this server")

    def _visit(self, head: bytes, *, tls: bool) -> Visit:
        try:
            request = PageRequest.of(head)
        except ValueError:
            return refused(HTTPStatus.BAD_REQUEST, "what came is no request")
        if not self._options.shows_pages or (not tls and self._options.certificate is not None):
            return refused(
                HTTPStatus.FORBIDDEN, "pages are shown at https://, with a --certificate of this server's, or through an SSH tunnel"
            )
        return self._access.visit(request)

    async def _show(self, line: FrameConnection, visit: Visit) -> None:
        """Answer a browser that was let in."""
        try:
            status, text = visit.status, visit.text
            if visit.name is not None:
                status, text = await self._in_pool(self._pages.page, visit.name)
            line.send_bare(response(status, text, visit.cookie))
        finally:
            await line.close(SHOWN_S)

    # -- kernels

    async def _talk(self, line: FrameConnection) -> None:
        """Answer one kernel until its connection ends."""
        line.beat()
        try:
            error = await self._answer_kernel(line)
            if error is not None:
                line.send(answer_bytes(THIS_CONNECTION, Reply(errors=(error,))))
        except OSError:
            pass  # it comes back
        finally:
            await line.close()

    async def _answer_kernel(self, line: FrameConnection) -> Exception | None:
        """Answer a kernel; return why that ends, where it is not the kernel that ends it.

        Raises:
            OSError: the connection is lost.
        """
        line.send(msgpack().encode({"version": package_version(), "server": self._id}))
        try:
            hello = msgpack().decode(await line.frame(HELLO_BYTES))
            if hello["version"] != package_version():
                return SessionClosedError("another version of hfsdk")
            name = str(hello["name"])
            if hello.get("link"):
                web = "https" if self._options.certificate else "http"
                line.send(msgpack().encode({"web": web if self._options.shows_pages else "", "path": self._access.link(name)}))
                return None
            client, following = str(hello["client"]), int(hello["next"])
        except (ValueError, TypeError, LookupError):
            return SessionClosedError("this is no kernel")
        try:
            keeper = await self._in_pool(self._keepers.enter, name)
        except HfsdkError as error:
            return SessionClosedError(str(error))
        if keeper is None:
            return OptionError(f"there is no session {name!r}")
        try:
            answers = self._answers(f"{name}/{client}", following)
            try:
                return await self._serve(line, keeper, answers)
            finally:
                self._left(answers)
        finally:
            self._keepers.leave(name)

    async def _in_pool(self, do: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, do, *arguments)

    def _answers(self, kernel: str, following: int) -> AnsweredRequests:
        with self._lock:
            answers = self._kernels.setdefault(kernel, AnsweredRequests(following))
            answers.users += 1
            return answers

    def _left(self, answers: AnsweredRequests) -> None:
        with self._lock:
            answers.users -= 1
            answers.left_s = time.monotonic()

    def _forget(self) -> None:
        """Forget the requests of kernels that were not there for long."""
        with self._lock:
            for kernel, answers in list(self._kernels.items()):
                if not answers.users and time.monotonic() - answers.left_s > REMEMBERED_S:
                    del self._kernels[kernel]

    async def _serve(self, line: FrameConnection, keeper: Any, answers: AnsweredRequests) -> Exception:
        """Answer requests, as they come; return why that ends."""
        loop = asyncio.get_running_loop()

        def answer(number: int, done: Future[Reply]) -> None:
            reply = done.result()
            frames = [answer_bytes(number, reply)]
            if any(isinstance(error, SessionClosedError) for error in reply.errors) and not keeper.lives():
                frames.append(answer_bytes(THIS_CONNECTION, Reply(errors=reply.errors[:1])))
            with suppress(RuntimeError):  # the server has ended
                for frame in frames:
                    loop.call_soon_threadsafe(line.send, frame)

        while True:
            try:
                frame = await line.frame()
            except OptionError as error:
                return SessionClosedError(str(error))
            try:
                number, answered, request = await self._in_pool(request_of, frame)
            except Exception:  # whatever it unpickles to
                return SessionClosedError("what came is no request")
            future = answers.once(number, answered, request, lambda request=request: self._pool.submit(_reply, keeper, request))  # type: ignore[misc]
            future.add_done_callback(lambda done, number=number: answer(number, done))  # type: ignore[misc]


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


# -- the pages that a browser sees of a kept session

REFRESH_S = 3

UNSEEN_S = 30.0
"""The seconds that the server goes on looking at a session after the last request for its page."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 1100px; padding: 0 .8rem }
body { color: #1c1c1c; background: #fff }
h1 { font-size: 1.1rem; margin: .6rem 0 } h2 { font-size: 1rem; margin: 1rem 0 .3rem } section { overflow-x: auto }
@media (scripting: enabled) { .hf-picture:not([data-ready]) { visibility: hidden } }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #161616 } a { color: #8ab4f8 } }
"""


class Pages:
    """The pages of the server; it attaches to a session, to look, when somebody asks for its page."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._looking: dict[str, Session] = {}
        self._asked_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def page(self, name: str) -> tuple[HTTPStatus, str]:
        """Return the page of a session, or with no name the list of them."""
        try:
            with self._lock:
                if not name:
                    return HTTPStatus.OK, _html("kept sessions", self._list())
                return HTTPStatus.OK, _html(name, self._of(name))
        except HfsdkError as error:
            with self._lock:
                self._leave(name)
            return HTTPStatus.NOT_FOUND, _html("not found", f"<p>{escape(str(error))}</p>")

    def _list(self) -> str:
        sessions_here = sessions(self._address)
        rows = "".join(
            f'<li><a href="{escape(session.name)}">{escape(session.name)}</a>: {escape(session.words)}</li>'
            for session in sessions_here
        )
        return f"<ul>{rows}</ul>" if rows else "<p>no kept sessions</p>"

    def _of(self, name: str) -> str:
        self._asked_s[name] = time.monotonic()
        session = self._looking.get(name)
        if session is None or session.status == "closed":
            self._leave(name)
            session = self._looking[name] = Session.attach(name, self._address, read_only=True)
        from hfsdk.viz.drawn import picture_of

        parts = []
        if session.run is not None:
            parts.append(("the run", picture_of(session.run).to_html()))
        if session.placement.view()["devices"]:
            parts.append(("who lives where", picture_of(session.placement).to_html()))
        trace = _last_step(session)
        if len(trace):
            parts.append(("where the time goes", picture_of(trace).to_html()))
        text = "".join(f"<h2>{title}</h2><section>{html}</section>" for title, html in parts)
        return text or f"<p>{escape(repr(session))}</p>"

    def _leave(self, name: str) -> None:
        session = self._looking.pop(name, None)
        if session is not None:
            session.detach()

    def rest(self) -> None:
        """Leave sessions that have ended, or whose page nobody has opened lately."""
        with self._lock:
            for name, session in list(self._looking.items()):
                if session.status == "closed" or time.monotonic() - self._asked_s.get(name, 0.0) > UNSEEN_S:
                    self._leave(name)

    def close(self) -> None:
        """Leave the sessions."""
        with self._lock:
            for session in self._looking.values():
                session.detach()
            self._looking.clear()


def _last_step(session: Session) -> Trace:
    """Return the trace of the run's last whole step, while it is kept; without one the current step's so far."""
    ended = list(session.run.view()["trace_steps"].values()) if session.run is not None else []
    trace: Trace = session.trace.snapshot()
    if ended:
        with suppress(OptionError):
            trace = session.trace[ended[-1]].snapshot()
    return trace


def _html(title: str, body: str) -> str:
    from hfsdk.viz.frame import content_policy

    return (
        f'{POLICY_BEGINS}{content_policy(body)}"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH_S}"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>{body}</html>"
    )
