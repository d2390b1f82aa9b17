"""``Acceptor``: accepts connections; a peer that has proven nothing costs the others nothing.

A connection has ``HANDSHAKE_S`` to prove itself, however slowly it speaks; so many at a time may be doing that, and the oldest is
ended for the next one, so that a thousand silent ones keep nobody out. None has a thread, and none takes a file descriptor that
is needed elsewhere. Who is refused is told in a line for each kind, then at most once a minute with how many there were since.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from hfsdk.kept.wire import FrameConnection, StrangerError

HANDSHAKES = 128
"""Most connections that have proven nothing yet."""

HANDSHAKE_S = 10.0

SHARE = 4
"""They take at most this part of the file descriptors that the process may have."""

PAUSE_S = 0.05
"""How long nobody is accepted where there is no file descriptor."""

TELL_S = 60.0

HEAD_BYTES = 2**15
"""Most that is read of a browser's request."""

TLS_BEGINS = b"\x16"
"""The first byte of a peer that speaks TLS."""

LATE, CROWDED = f"nothing that lets it in came within {HANDSHAKE_S:g} s", "others came, and it had proven nothing yet"


STRANGE = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)
"""Errors that meet a peer who speaks another protocol, or nothing."""


class Refusals:
    """Reports refused connections: each kind once, then at most once in ``TELL_S`` with how many there were since."""

    def __init__(self, tell: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._now = tell, now
        self._told_s: dict[str, float] = {}
        self._since: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, why: str, peer: str) -> None:
        """Note that a peer at an address was refused; ``why`` is one of few sentences, and says nothing that came from there."""
        with self._lock:
            self._since[why] = self._since.get(why, 0) + 1
            if why not in self._told_s:
                self._told_s[why], self._since[why] = self._now(), 0
                self._tell(f"a connection from {peer} was refused: {why}. Nothing else has changed.")

    def rest(self) -> None:
        """Report those that came since a kind was reported last, where that is long ago."""
        with self._lock:
            for why, num in self._since.items():
                if num and self._now() - self._told_s[why] >= TELL_S:
                    self._told_s[why], self._since[why] = self._now(), 0
                    self._tell(f"{num} more connections were refused: {why}.")


def _most_files() -> int:
    """Return how many files and sockets this process may have open."""
    if sys.platform == "win32":
        return 8192
    else:
        import resource

        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Arrival:
    """A connection that has proven nothing yet."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock, self.peer = sock, peer
        self.line: FrameConnection | None = None
        self.why = ""
        """Why it was refused from here."""

    def refuse(self, why: str) -> None:
        """End it: a task that reads from it, or waits to write, finds it ended."""
        self.why = self.why or why
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    async def speaks_tls(self) -> bool:
        """Wait for the first byte, and leave it there.

        Raises:
            StrangerError: it has ended without one.
        """
        while True:
            try:
                first = self._sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                await self._readable()
                continue
            if not first:
                raise StrangerError("it went away without a word")
            return first == TLS_BEGINS

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def came() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(self._sock, came)
        try:
            await ready
        finally:
            loop.remove_reader(self._sock)

    async def take_line(self, context: ssl.SSLContext | None) -> FrameConnection:
        """Return it as a line, within TLS if there is a context."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, self._sock, ssl=context)
        self.line = FrameConnection(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        return self.line

    def abort(self) -> None:
        """End it at once."""
        if self.line is not None:
            self.line.abort()
        else:
            self._sock.close()


class Acceptor:
    """The listening end of a server: a peer that has proven nothing has a deadline, and takes no thread.

    Args:
        listener: a socket that listens.
        meet: a coroutine that has a connection prove itself, or raises one of ``STRANGE``; it returns the work with the connection
            from then on, which ends it.
        refusals: the refusals, to which the others are added.
    """

    def __init__(self, listener: socket.socket, meet: Callable[[Arrival], Awaitable[Awaitable[None]]], refusals: Refusals) -> None:
        self._listener, self._meet, self._refusals = listener, meet, refusals
        self._arrivals: dict[Arrival, None] = {}
        """The oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._most = min(HANDSHAKES, max(1, _most_files() // SHARE))

    async def accept(self) -> None:
        """Accept connections until this is cancelled."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError:  # no file descriptor is left, or it was gone before it was accepted
                self._end_oldest()
                await asyncio.sleep(PAUSE_S)
                continue
            arrival = Arrival(sock, f"{address[0]}:{address[1]}")
            self._arrivals[arrival] = None
            if len(self._arrivals) > self._most:
                self._end_oldest()
            task = asyncio.create_task(self._take(arrival))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # those that were ended are closed meanwhile

    def _end_oldest(self) -> None:
        oldest = next(iter(self._arrivals), None)
        if oldest is not None:
            del self._arrivals[oldest]
            oldest.refuse(CROWDED)

    async def _take(self, arrival: Arrival) -> None:
        deadline = asyncio.get_running_loop().call_later(HANDSHAKE_S, arrival.refuse, LATE)
        try:
            goes_on = await self._meet(arrival)
        except BaseException as error:
            arrival.abort()
            if not isinstance(error, STRANGE):
                raise
            problem = str(error) if isinstance(error, StrangerError) else "what came is neither a kernel's nor a browser's"
            self._refusals.add(arrival.why or problem, arrival.peer)
            return
        finally:
            deadline.cancel()
            self._arrivals.pop(arrival, None)
        await goes_on
