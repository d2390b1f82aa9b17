"""How a kernel outside the cluster and the server on its head node talk: one WebSocket, numbered requests and answers.

::

    kernel                                             server
    GET /exp7, Authorization: Bearer <token>   ->      401 without the token: nothing else is read
                                               <-      {"version", "server", "protocol"}: told before anything is sent
    {"client": ..., "version": ..., "next": n} ->      which kernel this is, also after the connection was lost; its next number
    number, answered + pickled request         ->      the kernel has the token: it may run code there anyway
                                               <-      {"id": number, "value" | "errors", ...} as plain data, never a pickle

After a lost connection the kernel sends what was not answered again; the server knows the numbers, and does nothing twice. All
below ``answered`` has come to the kernel: the server forgets it.
"""

from __future__ import annotations

import pickle
from typing import Any

from hfsdk.core.errors import ModelNotFoundError
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.replies import Reply
from hfsdk.session import keeper_requests as k
from hfsdk.session.client import ControllerClient
from hfsdk.session.plain_data import from_plain, to_plain

PROTOCOL = 2

PORT = 8267
"""Of the server, where none is said."""

NO_SESSION = 4404
"""With what the server closes a connection to a session that is not there."""

NUMBER_BYTES = 8

ANEW = (
    "the server was started anew while this was under way, so that it is not known whether it was done; look at the session before "
    "you do it again"
)

AGAIN = (k.Listen, k.About, k.Everything, k.LastStep, k.Leave)
"""Requests that may be asked again of a server that does not remember them; and questions."""


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


def request_bytes(number: int, answered: int, request: Any) -> bytes:
    """Return a request as it is sent."""
    return number.to_bytes(NUMBER_BYTES, "big") + answered.to_bytes(NUMBER_BYTES, "big") + pickle.dumps(request)


def request_of(frame: bytes) -> tuple[int, int, Any]:
    """Return (number, answered, request) of a frame; only of somebody who has shown the token."""
    number, answered = (int.from_bytes(frame[start : start + NUMBER_BYTES], "big") for start in (0, NUMBER_BYTES))
    return number, answered, pickle.loads(frame[2 * NUMBER_BYTES :])


def may_repeat(request: Any) -> bool:
    """Whether a request may be answered twice: it only looks."""
    looks = isinstance(request, k.Ask) and isinstance(request.message, (q.Query, m.Wait, m.Fetch, m.Logs))
    return looks or isinstance(request, AGAIN)


def answer_bytes(number: int, reply: Reply) -> bytes:
    """Return an answer as it is sent; what cannot be said in plain data is an error."""
    try:
        said = {"value": to_plain(reply.value), "errors": to_plain(list(reply.errors)), "besides": to_plain(reply.besides)}
    except Exception as error:
        said = {"value": None, "errors": [to_plain(error)], "besides": None}
    encoded: bytes = msgpack().encode({"id": number, "heard": reply.heard, **said})
    return encoded


def answer_of(frame: bytes, client: ControllerClient | None) -> tuple[int, Reply]:
    """Return (number, reply) of a frame."""
    said = msgpack().decode(frame)
    value, besides = from_plain(said["value"], client), from_plain(said["besides"], client)
    return int(said["id"]), Reply(value, tuple(from_plain(said["errors"])), besides, int(said["heard"]))
