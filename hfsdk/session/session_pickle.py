"""Pickling of what belongs to a session (batches, handles, metrics, functions) for another process that has the session.

A batch is a list of references and the client to ask for them; in the other process it is the same references and *its* client.
So are handles, prompts, metrics. Everything else travels by value, the user's functions and classes too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from hfsdk.core.errors import OptionError
from hfsdk.core.functions import users_by_value
from hfsdk.core.pending import ColumnRef, Lease
from hfsdk.models import ModelHandle
from hfsdk.session.client import ControllerClient
from hfsdk.session.context import Context
from hfsdk.session.parts import Parts
from hfsdk.session.placing import HandleHost


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, parts: Parts, hold: Callable[[int], None], own: Sequence[Any]) -> None:
        super().__init__(file)
        self._parts, self._hold, self._own = parts, hold, own

    def persistent_id(self, obj: Any) -> Any:
        """Name what the other side has its own of."""
        parts = self._parts
        for place, part in enumerate(self._own):
            if obj is part:
                return ("own", place)
        if isinstance(obj, ControllerClient):
            if obj is not parts.client:
                raise OptionError("it belongs to another session")
            return ("client",)
        if isinstance(obj, Lease):
            self._hold(obj.call_id)
            return ("lease", obj.call_id)
        if isinstance(obj, ModelHandle):
            parts.deployment.book.check(obj)
            return ("handle", obj.name)
        if isinstance(obj, Parts):
            return ("parts",)
        if isinstance(obj, Context):
            return ("context",)
        if isinstance(obj, HandleHost):
            return ("host",)
        if obj is not None and obj is parts.client.tokenizer:
            return ("tokenizer",)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Take the lease of a column along, which by itself belongs to one process."""
        if isinstance(obj, ColumnRef):
            return ColumnRef, (obj.call_id, obj.name, obj.rows, obj.lease)
        return super().reducer_override(obj)


class _SessionUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parts: Parts, own: Sequence[Any]) -> None:
        super().__init__(file)
        self._parts, self._own = parts, own

    def persistent_load(self, pid: Any) -> Any:
        """Return this side's own object."""
        parts, (kind, *rest) = self._parts, pid
        match kind:
            case "own":
                return self._own[rest[0]]
            case "client":
                return parts.client
            case "lease":
                return parts.client.lease(rest[0])
            case "handle":
                return parts.deployment.book.find(rest[0])
            case "parts":
                return parts
            case "context":
                return parts.context
            case "host":
                return parts.deployment.host
            case "tokenizer":
                return parts.client.tokenizer
        raise pickle.UnpicklingError(f"nothing here is called {kind!r}")


def pack(parts: Parts, what: Any, hold: Callable[[int], None] = lambda call_id: None, own: Sequence[Any] = ()) -> bytes:
    """Return something of a session as bytes.

    Args:
        parts: the session, on this side.
        what: the object to be packed.
        hold: a function that hears of every call whose columns travel along: the other side refers to them, too.
        own: objects that the other side has its own of, in this order.

    Raises:
        OptionError: it holds what cannot travel, e.g. a lock, a file or another session.
    """
    file = io.BytesIO()
    with users_by_value():
        try:
            _Pickler(file, parts, hold, own).dump(what)
        except OptionError:
            raise
        except Exception as error:  # whatever the pickling of the user's objects raises
            raise OptionError(
                f"this cannot travel to the process that keeps the session: {error}. The run goes on there, with copies of what it "
                "is given; make what cannot be copied (a lock, a file, a connection) inside your functions."
            ) from error
    return file.getvalue()


def unpack(parts: Parts, packed: bytes, own: Sequence[Any] = ()) -> Any:
    """Return a packed object, as of this side's session."""
    return _SessionUnpickler(io.BytesIO(packed), parts, own).load()
