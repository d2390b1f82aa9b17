"""``KeyedStore``: a store for processes on several machines that only those who know its secret can read or write.

torch's ``TCPStore`` takes anybody's connection. This one is served by one process on one address, and asks each connection first::

    server      nonce                                   ->
                                                        <-      nonce, hash(secret, "client", both nonces)       client
                hash(secret, "server", both nonces)     ->

    then        length, hash(key of this connection, who sends, how many before it, content), content       in both directions

Nothing is said before both have proven that they know the secret, nothing that was overheard can be said again, and nobody in
between can change a message. A message is a list of text and bytes (msgpack), at most :data:`MOST_BYTES` long. Contents are not
encrypted: what ranks store is where they listen.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
from torch._C._distributed_c10d import Store

MOST_BYTES = 1 << 20
"""Largest message; gloo and NCCL store a few kilobytes for one rank."""

MOST_CONNECTIONS = 4096
"""Most connections of one store; each rank has one for each pool or link that it meets in."""

MOST_UNPROVEN = 64
"""Connections that have not proven themselves yet; the oldest goes for the next."""

PROOF_LIMIT_S = 10.0
"""How long a connection may take to prove that it knows the secret."""

LOOK_S = 0.005
"""How often a rank looks whether a key is there that it waits for."""

NONCE_BYTES = HASH_BYTES = 32
HEADER = struct.Struct("!I")


class StoreError(RuntimeError):
    """The store has ended, or another process that does not know its secret answers at its address."""


def _hash(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(HEADER.pack(len(part)) + part for part in parts), "sha256")


class _Sealed:
    """One direction of a proven connection: numbers its messages and puts a hash before each."""

    def __init__(self, key: bytes, who: bytes) -> None:
        self._key, self._who, self._number = key, who, 0

    def hash_of(self, content: bytes) -> bytes:
        """Return the hash of the next message."""
        self._number += 1
        return _hash(self._key, self._who, str(self._number).encode(), content)

    def frame(self, message: Any) -> bytes:
        """Return the next message as it travels."""
        content = msgspec.msgpack.encode(message)
        if len(content) > MOST_BYTES:
            raise StoreError(f"a message of {len(content):,} bytes is too long for the store; {MOST_BYTES:,} are the most")
        return HEADER.pack(len(content)) + self.hash_of(content) + content


def _directions(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> tuple[_Sealed, _Sealed]:
    """Return both directions, sealed by one key: the server's and the client's."""
    key = _hash(secret, b"key", server_nonce, client_nonce)
    return _Sealed(key, b"server"), _Sealed(key, b"client")


# -- serving


@dataclass(eq=False)
class _Connection:
    """A client, or a stranger that wants to be one."""

    socket: socket.socket
    until: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    read: bytearray = field(default_factory=bytearray)
    says: _Sealed | None = None
    """The key and counter of the server's messages to it; ``None`` before it has proven itself."""
    hears: _Sealed | None = None


class StoreServer:
    """Serves a store on one address of this machine until it is closed.

    Attributes:
        port: the port that it listens on.
        strangers: connections that were refused.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self.strangers = 0
        self._values: dict[str, bytes] = {}
        self._connections: dict[_Connection, None] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ)
        self._woken = woken
        threading.Thread(target=self._serve, name="hfsdk-store", daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        with suppress(OSError):
            self._wake.close()

    def _serve(self) -> None:
        """Take connections and answer them, all in one thread; no stranger can make it wait."""
        while True:
            # With nobody to throw out there is nothing to wake up for.
            for key, _ in self._selector.select(1.0 if self._unproven() else None):
                if key.fileobj is self._woken:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._take()
                else:
                    self._read(key.data)
            for late in [connection for connection in self._unproven() if connection.until < time.monotonic()]:
                self._refuse(late)

    def _unproven(self) -> list[_Connection]:
        return [connection for connection in self._connections if connection.says is None]

    def _take(self) -> None:
        with suppress(OSError):
            accepted, _ = self._listener.accept()
            accepted.setblocking(False)
            connection = _Connection(accepted, time.monotonic() + PROOF_LIMIT_S)
            unproven = self._unproven()
            # The oldest goes: a rank proves itself at once, so a connection that has not done so for long is a stranger's.
            if len(unproven) >= MOST_UNPROVEN:
                self._refuse(unproven[0])
            if len(self._connections) >= MOST_CONNECTIONS:
                accepted.close()
                return
            self._connections[connection] = None
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._send(connection, connection.nonce)

    def _read(self, connection: _Connection) -> None:
        """Read the bytes that a connection has sent, and answer each whole message."""
        try:
            part = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._refuse(connection, counts=connection.says is None)
            return
        connection.read += part
        if connection.says is None and not self._prove(connection):
            return
        # One packet may bring several messages, or part of one.
        while connection.says is not None and connection.hears is not None and len(connection.read) >= HEADER.size + HASH_BYTES:
            (length,) = HEADER.unpack_from(connection.read)
            whole = HEADER.size + HASH_BYTES + length
            # A length alone must not make this process keep bytes without end.
            if length > MOST_BYTES:
                self._refuse(connection)
                return
            if len(connection.read) < whole:
                return
            signature = bytes(connection.read[HEADER.size : HEADER.size + HASH_BYTES])
            content = bytes(connection.read[whole - length : whole])
            del connection.read[:whole]
            if not hmac.compare_digest(signature, connection.hears.hash_of(content)):
                self._refuse(connection)
                return
            try:
                answer = self._answer(*msgspec.msgpack.decode(content, type=tuple[str, list[str], list[bytes]]))
            except (msgspec.MsgspecError, ValueError, IndexError):
                self._refuse(connection)
                return
            self._send(connection, connection.says.frame(answer))

    def _prove(self, connection: _Connection) -> bool:
        """Look at a connection's proof; return whether there is one."""
        if len(connection.read) < NONCE_BYTES + HASH_BYTES:
            return False
        nonce, signature = bytes(connection.read[:NONCE_BYTES]), bytes(connection.read[NONCE_BYTES : NONCE_BYTES + HASH_BYTES])
        del connection.read[: NONCE_BYTES + HASH_BYTES]
        if not hmac.compare_digest(signature, _hash(self._secret, b"client", connection.nonce, nonce)):
            self._refuse(connection)
            return False
        self._send(connection, _hash(self._secret, b"server", connection.nonce, nonce))
        connection.says, connection.hears = _directions(self._secret, connection.nonce, nonce)
        return True

    def _send(self, connection: _Connection, content: bytes) -> None:
        try:
            connection.socket.setblocking(True)
            # A stranger that reads nothing holds the one thread for a tenth of a second; a rank may take its time.
            connection.socket.settimeout(PROOF_LIMIT_S if connection.says is not None else 0.1)
            connection.socket.sendall(content)
            connection.socket.setblocking(False)
        except OSError:
            self._refuse(connection, counts=False)

    def _refuse(self, connection: _Connection, *, counts: bool = True) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self.strangers += counts

    def _end(self) -> None:
        for connection in list(self._connections):
            self._refuse(connection, counts=False)
        for other in (self._listener, self._woken):
            other.close()
        self._selector.close()

    def _answer(self, what: str, keys: list[str], values: list[bytes]) -> tuple[bool, bytes]:
        """Carry one request out; return whether it was so, and a value."""
        entries = self._values
        if what == "set":
            entries[keys[0]] = values[0]
            return True, b""
        if what == "get":
            return keys[0] in entries, entries.get(keys[0], b"")
        if what == "add":
            entries[keys[0]] = str(int(entries.get(keys[0], b"0")) + int(values[0])).encode()
            return True, entries[keys[0]]
        if what == "check":
            return all(key in entries for key in keys), b""
        if what == "delete":
            return entries.pop(keys[0], None) is not None, b""
        if what == "count":
            return True, str(len(entries)).encode()
        if what == "swap":  # as torch has it: a key that is not there is set where nothing is expected
            there = entries.get(keys[0])
            if there == values[0] or (there is None and not values[0]):
                entries[keys[0]] = values[1]
            return True, entries.get(keys[0], values[0])
        raise ValueError(what)


# -- using


class KeyedStore(Store):
    """One process's connection to a :class:`StoreServer`, as torch's groups use it.

    Keep a reference to it while groups do: torch refers to the part of it that is not written in Python.

    Raises:
        StoreError: nobody answers at the address, or who does so does not know the secret.
    """

    def __init__(self, host: str, port: int, secret: bytes, limit_s: float = 300.0) -> None:
        super().__init__()
        self._where, self._secret, self._limit_s = (host, port), secret, limit_s
        self._lock = threading.Lock()
        self.set_timeout(timedelta(seconds=limit_s))
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.settimeout(PROOF_LIMIT_S)
        try:
            self._socket.connect((host, port))
            nonce = secrets.token_bytes(NONCE_BYTES)
            theirs = self._receive(NONCE_BYTES)
            self._socket.sendall(nonce + _hash(secret, b"client", theirs, nonce))
            proof = self._receive(HASH_BYTES)
        except OSError as error:
            self._socket.close()
            raise StoreError(f"the store at {host}:{port} is not there, or does not take this process's secret: {error}") from error
        if not hmac.compare_digest(proof, _hash(secret, b"server", theirs, nonce)):
            self._socket.close()
            raise StoreError(f"the process at {host}:{port} does not know the secret of this pool's store; it was told nothing")
        self._hears, self._says = _directions(secret, theirs, nonce)
        self._socket.settimeout(limit_s)

    def __del__(self) -> None:
        """Leave the server."""
        self._socket.close()

    def _receive(self, num_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            part = self._socket.recv(num_bytes - len(parts))
            if not part:
                raise OSError("the connection was closed")
            parts += part
        return bytes(parts)

    def _ask(self, what: str, keys: list[str], *values: bytes) -> tuple[bool, bytes]:
        with self._lock:
            try:
                self._socket.sendall(self._says.frame((what, keys, list(values))))
                (length,) = HEADER.unpack(self._receive(HEADER.size))
                if length > MOST_BYTES:
                    raise OSError(f"it sends {length:,} bytes at once")
                signature, content = self._receive(HASH_BYTES), self._receive(length)
            except OSError as error:
                raise StoreError(f"the store at {self._where[0]}:{self._where[1]} has ended: {error}") from error
            if not hmac.compare_digest(signature, self._hears.hash_of(content)):
                raise StoreError(f"a message from {self._where[0]}:{self._where[1]} was changed on its way")
        return msgspec.msgpack.decode(content, type=tuple[bool, bytes])

    # the names, and the arguments, are torch's

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", [key], value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value, once it is there."""
        self.wait([key])
        return self._ask("get", [key])[1]

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return it."""
        return int(self._ask("add", [key], str(amount).encode())[1])

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are there."""
        return self._ask("check", list(keys))[0]

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        """Wait until all of these keys are there.

        Raises:
            StoreError: they are not within the limit, or the store's own.
        """
        limit_s = self._limit_s if limit is None else limit.total_seconds()
        end = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() > end:
                raise StoreError(f"no process set {', '.join(keys)} within {limit_s:g} s")
            time.sleep(LOOK_S)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return self._ask("delete", [key])[0]

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._ask("count", [])[1])

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  # as torch's own stores call them from inside

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key where it has the value that is expected; return what it has then."""
        both = [value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired)]
        return self._ask("swap", [key], *both)[1]

    def clone(self) -> KeyedStore:
        """Return another connection to it; NCCL's watchdog has one of its own."""
        return KeyedStore(*self._where, self._secret, self._limit_s)
