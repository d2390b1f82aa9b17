"""Who comes to a server and is no kernel of its user's: garbage, wrong tokens, pickles, giant frames, half a request for ever."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import random
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

LINGER_S = 3.0
"""How long one stays after it has said what it says."""


class Marks:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return Path.touch, (Path(self.path),)  # type: ignore[return-value]


def upgrade(name: str, token: str, more: str = "") -> bytes:
    """Return the request of a WebSocket."""
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET /{name} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
        f"Sec-WebSocket-Version: 13\r\nAuthorization: Bearer {token}\r\n{more}\r\n"
    ).encode("latin-1")


def frame(data: bytes, length: int | None = None, opcode: int = 2) -> bytes:
    """Return a frame of a client; ``length`` is what it says of itself."""
    said = len(data) if length is None else length
    head = struct.pack("!BB", 0x80 | opcode, 0x80 | 127) + struct.pack("!Q", said)
    return head + bytes(4) + data  # a mask of zeros


def random_bytes(dice: random.Random, mark: Path) -> bytes:
    """Return what a scanner sends."""
    return dice.randbytes(dice.randint(1, 20_000))


def long_headers(dice: random.Random, mark: Path) -> bytes:
    """Return a request that is all headers."""
    return b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 4000) for i in range(dice.randint(100, 2000)))


def long_line(dice: random.Random, mark: Path) -> bytes:
    """Return a request without an end."""
    return b"GET /" + b"z" * dice.randint(10_000, 4_000_000)


def wrong_token(dice: random.Random, mark: Path) -> bytes:
    """Return a pickle, in a frame, behind a wrong token."""
    token = "".join(dice.choice("abcdefgh\xe9\xff") for _ in range(dice.randint(0, 60)))
    return upgrade("fire", token) + frame(bytes(8) + pickle.dumps(Marks(mark)))


def bare_pickle(dice: random.Random, mark: Path) -> bytes:
    """Return a pickle as the first thing said."""
    return (bytes(8) if dice.random() < 0.5 else b"") + pickle.dumps(Marks(mark))


def bad_handshake(dice: random.Random, mark: Path) -> bytes:
    """Return a request that is damaged somewhere."""
    request = bytearray(upgrade("fire", "x" * 43, "Transfer-Encoding: chunked\r\nContent-Length: 99999999\r\n"))
    for _ in range(dice.randint(1, 6)):
        request[dice.randrange(len(request))] = dice.randrange(256)
    return bytes(request[: dice.randint(1, len(request))])


STRANGERS: Mapping[str, Callable[[random.Random, Path], bytes]] = {
    "random bytes": random_bytes, "long headers": long_headers, "a long line": long_line, "a wrong token": wrong_token,
    "a bare pickle": bare_pickle, "a bad handshake": bad_handshake,
}  # fmt: skip


def say(port: int, data: bytes, stay_s: float = LINGER_S) -> bytes:
    """Say something to a port; return what it answers first."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=stay_s) as line:
        with contextlib.suppress(OSError):
            line.sendall(data)
        return line.recv(4096)
    return b""


def known(dice: random.Random, token: str, version: str) -> bytes:
    """Return what somebody with the token says who is no kernel: damaged, cut off, or giant."""
    from hfsdk.session.wire import msgpack

    hello = frame(msgpack().encode({"client": f"{dice.random()}", "version": version, "next": 1}))
    pieces = [
        frame(dice.randbytes(200)), hello + frame(dice.randbytes(dice.randint(0, 300))), frame(b"", 2**62),
        hello + frame(b"x" * 100, 2**40), hello + frame(bytes(16) + pickle.dumps({"no": "request"})), frame(b"text", opcode=1),
        hello + frame(bytes(16) + b"\x80\x05cut"), frame(msgpack().encode([1, 2])), frame(msgpack().encode({"version": version})),
        hello[: dice.randint(1, len(hello))],
    ]  # fmt: skip
    return upgrade("fire", token) + dice.choice(pieces)


def slow(port: int, num: int) -> list[socket.socket]:
    """Open lines that say the beginning of a request, and no more."""
    lines = []
    for _ in range(num):
        with contextlib.suppress(OSError):
            line = socket.create_connection(("127.0.0.1", port), timeout=5.0)
            line.sendall(b"GET /fire HTT")
            lines.append(line)
    return lines


def are_ended(lines: list[socket.socket], within_s: float) -> bool:
    """Whether the other side has ended every line in time."""
    until = time.monotonic() + within_s
    for line in lines:
        line.settimeout(max(0.01, until - time.monotonic()))
        try:
            while line.recv(4096):
                pass
        except TimeoutError:
            return False
        except OSError:
            continue
        finally:
            line.close()
    return True
