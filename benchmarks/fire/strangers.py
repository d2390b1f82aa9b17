"""Who comes to a server and is no kernel of its user's: garbage, wrong tokens, pickles, giant frames, half a request for ever."""

from __future__ import annotations

import contextlib
import pickle
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hfsdk.kept import tls, wire

LINGER_S = 3.0
"""How long one stays after it has said what it says."""


class Marks:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return Path.touch, (Path(self.path),)  # type: ignore[return-value]


def frame(data: bytes, length: int | None = None) -> bytes:
    """Return a frame of a kernel; ``length`` is what it says of itself."""
    return (len(data) if length is None else length).to_bytes(wire.LENGTH_BYTES, "big") + data


def random_bytes(dice: random.Random, mark: Path) -> bytes:
    """Return what a scanner sends."""
    return dice.randbytes(dice.randint(1, 20_000))


def long_headers(dice: random.Random, mark: Path) -> bytes:
    """Return a request that is all headers."""
    return b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 4000) for i in range(dice.randint(100, 2000)))


def long_line(dice: random.Random, mark: Path) -> bytes:
    """Return a request without an end."""
    return b"GET /" + b"z" * dice.randint(10_000, 4_000_000)


def shown_token(dice: random.Random, mark: Path) -> bytes:
    """Return what a kernel of an older hfsdk says: a token in a header."""
    return f"GET /fire HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nAuthorization: Bearer {dice.random()}\r\n\r\n".encode()


def bare_pickle(dice: random.Random, mark: Path) -> bytes:
    """Return a pickle as the first thing said."""
    return (bytes(8) if dice.random() < 0.5 else b"") + pickle.dumps(Marks(mark))


def bad_handshake(dice: random.Random, mark: Path) -> bytes:
    """Return the beginning of TLS, damaged somewhere."""
    begin = bytearray(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(508))
    for _ in range(dice.randint(1, 6)):
        begin[dice.randrange(1, len(begin))] = dice.randrange(256)
    return bytes(begin[: dice.randint(1, len(begin))])


STRANGERS: Mapping[str, Callable[[random.Random, Path], bytes]] = {
    "random bytes": random_bytes, "long headers": long_headers, "a long line": long_line, "a shown token": shown_token,
    "a bare pickle": bare_pickle, "a bad handshake": bad_handshake,
}  # fmt: skip


def say(port: int, data: bytes, stay_s: float = LINGER_S) -> bytes:
    """Say something to a port; return what it answers first."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=stay_s) as line:
        with contextlib.suppress(OSError):
            line.sendall(data)
        return line.recv(4096)
    return b""


def say_in_tls(port: int, token: str, data: bytes, stay_s: float = LINGER_S) -> bytes:
    """Prove to a server, within TLS, that this side has a token, and say something; return what it answers first."""
    context = tls.kernel_context(by_authorities=False)
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=stay_s) as bare,
        context.wrap_socket(bare) as line,
    ):
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        line.sendall(nonce)
        nonces = nonce + line.recv(wire.NONCE_BYTES)
        line.recv(wire.PROOF_BYTES)
        certificate = tls.fingerprint(line.getpeercert(binary_form=True) or b"")
        with contextlib.suppress(OSError):
            line.sendall(wire.proof(token, "kernel", nonces, certificate) + data)
        return line.recv(4096)
    return b""


def without_token(dice: random.Random, mark: Path) -> tuple[str, bytes]:
    """Return a token that is wrong, and what is said behind it: a pickle."""
    return "".join(dice.choice("abcdefgh\xe9\xff") for _ in range(dice.randint(0, 60))), frame(
        bytes(16) + pickle.dumps(Marks(mark))
    )


def known(dice: random.Random, version: str) -> bytes:
    """Return what somebody with the token says who is no kernel: damaged, cut off, or giant."""
    hello = frame(wire.msgpack().encode({"client": f"{dice.random()}", "version": version, "name": "fire", "next": 1}))
    pieces = [
        frame(dice.randbytes(200)), hello + frame(dice.randbytes(dice.randint(0, 300))), frame(b"", 2**32 - 1),
        hello + frame(b"x" * 100, 2**31), hello + frame(bytes(16) + pickle.dumps({"no": "request"})), frame(b"text"),
        hello + frame(bytes(16) + b"\x80\x05cut"), frame(wire.msgpack().encode([1, 2])),
        frame(wire.msgpack().encode({"version": version})), hello[: dice.randint(1, len(hello))],
    ]  # fmt: skip
    return dice.choice(pieces)


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
