"""A TCP proxy on 127.0.0.1 that cuts its connections when it is told to, as a network does."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

RESET = struct.pack("ii", 1, 0)
"""Lets a socket go without a farewell."""


class Cutter:
    """Passes connections on to a port of this machine.

    Attributes:
        port: where it listens.
        num_connections: so far.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._server.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(("127.0.0.1", self._target), timeout=5.0)
                there.settimeout(None)
            except OSError:
                here.close()
                continue
            with self._lock:
                self._open |= {here, there}
                self.num_connections += 1
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(16384):
                other.sendall(data)
        with self._lock:
            self._open -= {one, other}
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self) -> int:
        """Cut every connection; return how many there were."""
        with self._lock:
            cut, self._open = self._open, set()
        for one in cut:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                one.shutdown(socket.SHUT_RDWR)
        return len(cut) // 2

    def await_connection(self, number: int, within_s: float) -> bool:
        """Wait until there were more connections than a number."""
        until = time.monotonic() + within_s
        while self.num_connections <= number and time.monotonic() < until:
            time.sleep(0.005)
        return self.num_connections > number

    def close(self) -> None:
        """End it."""
        self._server.close()
        self.cut()
