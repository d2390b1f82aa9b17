"""The talk of a kernel outside the cluster with its server: TLS, a proof each way, then numbered requests and answers.

Both know the server's token, and neither ever sends it. The server's certificate is its own, made at its start; that it is the
right one is proven by the token, so that no authority and no first use is trusted::

    kernel                                              server
    TLS 1.3, ALPN "hfsdk/3"                    <->      its certificate; F is that one's SHA-256, as each side sees it
    nonce K                                     ->
                                               <-       nonce S, HMAC(token, "server" K S F): proves itself first
    HMAC(token, "kernel" K S F)                 ->      until here: fixed sizes, a deadline, nothing is parsed
                                               <-       {"version", "server"}: told before anything is sent
    {"client", "version", "name", "next"}       ->      which kernel this is, also after the connection was lost; its next number
    number, answered + pickled request          ->      the kernel has the token: it may run code there anyway
                                               <-       answers by number as plain data, never a pickle; of number 0: why it ends

==============================================  ================================================================================
who answers or asks                             what comes of it
==============================================  ================================================================================
another program at the port of a server         has seen the nonce K, and cannot answer; the kernel says no more
one that passes all on, with a certificate      its F is another: the server's answer does not fit, the kernel says no more
one that passes all on as it is                 sees ciphertext alone; a changed byte ends the connection (TLS)
one that plays back what it has seen            both nonces are new each time, and "server" is not "kernel"
one that asks the server without the token      gets S and a hash; a token of 256 random bits cannot be tried out
==============================================  ================================================================================

A frame is four bytes of length and so many bytes; an empty one, every ten seconds, says that its sender is there. After a lost
connection both begin anew, the kernel sends what was not answered again, and the server, which knows the numbers, does nothing
twice. All below ``answered`` has come to the kernel: the server forgets it.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import secrets
from typing import Any, Literal

from hfsdk.core.errors import ModelNotFoundError, OptionError
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.replies import Reply
from hfsdk.kept import requests as k
from hfsdk.kept.codec import from_plain, to_plain
from hfsdk.kept.tls import fingerprint
from hfsdk.session.client import ControllerClient

PORT = 8267
"""The server's port, where none is given."""

NONCE_BYTES = PROOF_BYTES = 32

NUMBER_BYTES = 8

LENGTH_BYTES = 4

HELLO_BYTES = 4096
"""Most of the first frame each way."""

MOST_BYTES = 2**30
"""Most of a frame."""

BEAT_S, SILENCE_S = 10.0, 30.0
"""The seconds between two signs of life of either side, and those of silence after which it is taken for gone."""

CLOSE_S = 2.0
"""How long the end of a connection may take: what was written last is sent."""

THIS_CONNECTION = 0
"""The number of an answer that says why the server ends the connection."""

OTHER_TOKEN = "a kernel has not the token of this server, or went away before it proved that it has"

ANEW = (
    "the server was started anew while this was under way, so that it is not known whether it was done; look at the session before "
    "you do it again"
)

AGAIN = (k.Listen, k.About, k.Everything, k.LastStep, k.Leave)
"""Requests that may be repeated to a server that does not remember them; and questions."""

WITH_NEWS = (k.Ask, k.Train, k.DeclareRemotely, k.SaveOrLoad)
"""Requests that carry what has changed in the kernel."""


class StrangerError(ConnectionError):
    """The other side does not know the token, or is something else than was expected."""


# -- the connection


class FrameConnection:
    """A connection that carries frames; used in its event loop alone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._beating: asyncio.Task[None] | None = None

    async def frame(self, most: int | None = None) -> bytes:
        """Return the next frame; one that says it is larger than ``most`` (by default ``MOST_BYTES``) is not read.

        Raises:
            OSError: the connection is lost, or nothing came for ``SILENCE_S``.
            OptionError: a larger message comes.
        """
        most = MOST_BYTES if most is None else most
        while True:
            size = int.from_bytes(await self.exactly(LENGTH_BYTES), "big")
            if size > most:
                raise too_large("a message", size, most)
            if size:
                return await self.exactly(size)

    async def exactly(self, size: int) -> bytes:
        """Return so many bytes; memory is taken as they come."""
        parts = []
        while size:
            async with asyncio.timeout(SILENCE_S):
                part = await self._reader.read(size)
            if not part:
                raise ConnectionResetError("the other side has ended the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def send(self, frame: bytes) -> None:
        """Send a frame, unless the connection has ended; does not wait."""
        if not self._writer.is_closing():
            self._writer.writelines((len(frame).to_bytes(LENGTH_BYTES, "big"), frame))

    def send_bare(self, data: bytes) -> None:
        """Send bytes that are no frame: of the handshake, whose sizes are fixed."""
        self._writer.write(data)

    @property
    def protocol(self) -> str | None:
        """The protocol that TLS has agreed on; ``None`` of a peer who speaks another."""
        tls = self._writer.get_extra_info("ssl_object")
        return None if tls is None else tls.selected_alpn_protocol()

    @property
    def certificate(self) -> bytes:
        """The fingerprint of the other side's certificate."""
        return fingerprint(self._writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b"")

    def beat(self) -> None:
        """Begin to say, again and again, that this side is there."""

        async def beats() -> None:
            while not self._writer.is_closing():
                await asyncio.sleep(BEAT_S)
                self.send(b"")

        self._beating = asyncio.create_task(beats())

    async def close(self, within_s: float = CLOSE_S) -> None:
        """End the connection when what was sent is on its way, after so long in any case."""
        if self._beating is not None:
            self._beating.cancel()
        self._writer.close()
        try:
            async with asyncio.timeout(within_s):
                await self._writer.wait_closed()
        except OSError:
            self.abort()

    def abort(self) -> None:
        """End the connection at once."""
        if self._beating is not None:
            self._beating.cancel()
        self._writer.transport.abort()

    async def head(self) -> bytes:
        """Return the bytes up to an empty line, as many as the reader may hold.

        Raises:
            EOFError: it ended before.
            asyncio.LimitOverrunError: it is longer.
        """
        return await self._reader.readuntil(b"\r\n\r\n")


# -- the proofs


def proof(token: str, role: Literal["server", "kernel"], nonces: bytes, certificate: bytes) -> bytes:
    """Return a proof that only the owner of the token can make: all fields have fixed sizes.

    Args:
        token: the server's.
        role: the side whose proof it is.
        nonces: the kernel's and the server's.
        certificate: the certificate's fingerprint.
    """
    return hmac.digest(token.encode(), role.encode() + nonces + certificate, "sha256")


async def prove_to_kernel(line: FrameConnection, token: str, certificate: bytes) -> None:
    """Prove to a kernel that this is the server, and have it prove that it has the token.

    Raises:
        StrangerError: it has not.
    """
    kernel_nonce, server_nonce = await line.exactly(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    nonces = kernel_nonce + server_nonce
    line.send_bare(server_nonce + proof(token, "server", nonces, certificate))
    try:
        shown = await line.exactly(PROOF_BYTES)
    except ConnectionError:
        raise StrangerError(OTHER_TOKEN) from None
    if not hmac.compare_digest(shown, proof(token, "kernel", nonces, certificate)):
        raise StrangerError(OTHER_TOKEN)


async def prove_to_server(line: FrameConnection, token: str, certificate: bytes) -> None:
    """Have a server prove that it has the token, then prove the same to it.

    Raises:
        StrangerError: it has not; nothing but a nonce was sent.
    """
    kernel_nonce = secrets.token_bytes(NONCE_BYTES)
    line.send_bare(kernel_nonce)
    server_nonce, shown = await line.exactly(NONCE_BYTES), await line.exactly(PROOF_BYTES)
    nonces = kernel_nonce + server_nonce
    if not hmac.compare_digest(shown, proof(token, "server", nonces, certificate)):
        raise StrangerError("does not know this token")
    line.send_bare(proof(token, "kernel", nonces, certificate))


# -- requests and answers


def msgpack() -> Any:
    """Return msgspec's msgpack.

    Raises:
        ModelNotFoundError: it is not installed.
    """
    try:
        from msgspec import msgpack as found
    except ModuleNotFoundError as error:
        raise ModelNotFoundError("sessions elsewhere need the package 'msgspec': pip install 'hfsdk[remote]'") from error
    return found


def too_large(what: str, size: int, most: int) -> OptionError:
    """Return the message about a frame that is too large."""
    return OptionError(f"{what} of {size:,} bytes is larger than a connection takes at once ({most:,}): take it in parts")


def request_bytes(number: int, answered: int, request: Any) -> bytes:
    """Return a request as it is sent.

    Raises:
        OptionError: the server would not take it.
    """
    frame = number.to_bytes(NUMBER_BYTES, "big") + answered.to_bytes(NUMBER_BYTES, "big") + pickle.dumps(request)
    if len(frame) > MOST_BYTES:
        raise too_large("what you send: a message", len(frame), MOST_BYTES)
    return frame


def request_of(frame: bytes) -> tuple[int, int, Any]:
    """Return (number, answered, request) of a frame; only of somebody who has proven to know the token."""
    number, answered = (int.from_bytes(frame[start : start + NUMBER_BYTES], "big") for start in (0, NUMBER_BYTES))
    return number, answered, pickle.loads(frame[2 * NUMBER_BYTES :])


def may_repeat(request: Any) -> bool:
    """Whether a request may be answered twice: it only looks."""
    looks = isinstance(request, k.Ask) and isinstance(request.message, (q.Query, m.Wait, m.Fetch, m.Logs))
    return looks or isinstance(request, AGAIN)


def answer_bytes(number: int, reply: Reply) -> bytes:
    """Return an answer as it is sent; one that has no plain data, or is too large, is an error."""
    try:
        said = {"value": to_plain(reply.value), "errors": to_plain(list(reply.errors)), "besides": to_plain(reply.besides)}
    except Exception as error:
        said = {"value": None, "errors": [to_plain(error)], "besides": None}
    encoded: bytes = msgpack().encode({"id": number, "heard": reply.heard, **said})
    if len(encoded) > MOST_BYTES:
        refused = too_large("what you ask for: an answer", len(encoded), MOST_BYTES)
        return answer_bytes(number, Reply(errors=(refused,), heard=reply.heard))
    return encoded


def answer_of(frame: bytes, client: ControllerClient | None) -> tuple[int, Reply]:
    """Return (number, reply) of a frame."""
    said = msgpack().decode(frame)
    value, besides = from_plain(said["value"], client), from_plain(said["besides"], client)
    return int(said["id"]), Reply(value, tuple(from_plain(said["errors"])), besides, int(said["heard"]))
