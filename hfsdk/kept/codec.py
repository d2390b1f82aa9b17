"""hfsdk's nouns as plain data, and back: messages of a server to a kernel that does not trust it to run code.

What travels is what msgpack has: numbers, texts, bytes, lists, dicts. All else is a dict with the key ``""`` that says what it was;
arrays are their bytes. Reading it makes arrays, containers, errors, and objects of hfsdk's own frozen classes, by their
constructors, which check them; nothing else can be named, so that nothing of it runs. Functions stay the bytes they travelled as,
and are never loaded.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from hfsdk.core import errors as core_errors
from hfsdk.core.batch import Batch, refs_of
from hfsdk.core.errors import CallError, HfsdkError, OptionError
from hfsdk.core.pending import ColumnRef, Metrics, Value
from hfsdk.core.rows import Rows
from hfsdk.core.table import Table
from hfsdk.models.handle import OneRowMetrics
from hfsdk.session.client import ControllerClient

KIND = ""
"""Key that says what a dict stands for."""

HOMES = ("hfsdk.core.", "hfsdk.engine.calls.", "hfsdk.planner.", "hfsdk.resharding.", "hfsdk.algorithms.", "hfsdk.models.")
"""Packages whose classes may be named; and those of the next list."""
ALSO = ("hfsdk.kept.requests", "hfsdk.kept.shared_state", "hfsdk.run.run", "hfsdk.session.context", "hfsdk.session.role_book")

BUILTIN_ERRORS = (
    "TypeError",
    "ValueError",
    "KeyError",
    "IndexError",
    "RuntimeError",
    "TimeoutError",
    "NotImplementedError",
    "OSError",
)

PENDING: Mapping[str, type[Metrics] | type[Value]] = {cls.__name__: cls for cls in (Metrics, OneRowMetrics, Value)}


Hold = Callable[[int], None]
"""A function that hears of every call to whose columns something refers."""


def to_plain(value: Any, hold: Hold = lambda call_id: None) -> Any:
    """Return something as plain data.

    Args:
        value: a value made of nouns, arrays, containers, errors and what belongs to a session.
        hold: a function that hears of every call to whose columns it refers.

    Raises:
        OptionError: it has something else in it.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is list:
        return [to_plain(item, hold) for item in value]
    if type(value) is dict and all(type(key) is str and key != KIND for key in value):
        return {key: to_plain(item, hold) for key, item in value.items()}
    # nouns may be tuples or mappings as well, and must keep their class
    noun = is_dataclass(value) or hasattr(value, "_fields")
    for cls, kind, write in WRITERS:
        if isinstance(value, cls) and not (noun and kind in ("tuple", "map")):
            return {KIND: kind, **write(value, hold)}
    if noun:
        return {KIND: "object", "of": _name_of(type(value)), "f": {n: to_plain(item, hold) for n, item in _fields(value).items()}}
    raise OptionError(f"a {type(value).__name__} cannot be looked at from afar; look at it on the cluster")


def _each(value: Any, hold: Hold) -> dict[str, Any]:
    return {"v": [to_plain(item, hold) for item in value]}


def _pairs(value: Any, hold: Hold) -> dict[str, Any]:
    return {"v": [[to_plain(key, hold), to_plain(item, hold)] for key, item in value.items()]}


def _table(value: Table, hold: Hold) -> dict[str, Any]:
    return {"columns": to_plain(dict(value), hold), "rows": to_plain(value.row_ids)}


def _batch(value: Batch, hold: Hold) -> dict[str, Any]:
    return {"columns": to_plain(dict(refs_of(value).by_name), hold), "num_rows": value.num_rows}


def _pending(value: Metrics | Value, hold: Hold) -> dict[str, Any]:
    for call_id in value.call_ids:
        hold(call_id)
    return {"of": type(value).__name__, "calls": list(value.call_ids), "dtype": getattr(value, "dtype", "")}


def _ref(value: ColumnRef, hold: Hold) -> dict[str, Any]:
    if value.lease is not None:
        hold(value.call_id)
    return {"call": value.call_id, "name": value.name, "rows": to_plain(value.rows), "leased": value.lease is not None}


def _number(value: Any, hold: Hold) -> dict[str, Any]:
    return {"v": next(kind(value) for kind in (int, float, str) if isinstance(value, kind))}


def _array(value: np.ndarray[Any, Any], hold: Hold) -> dict[str, Any]:
    if value.dtype.hasobject:
        return {"dtype": "O", "v": [to_plain(item, hold) for item in value.ravel().tolist()], "shape": list(value.shape)}
    return {"dtype": value.dtype.str, "v": np.ascontiguousarray(value).tobytes(), "shape": list(value.shape)}


def _error(error: BaseException, hold: Hold) -> dict[str, Any]:
    cls = type(error)
    if cls.__module__ == core_errors.__name__:
        more = error.fields() if isinstance(error, CallError) else {}
        return {"of": cls.__name__, "v": error.message if isinstance(error, CallError) else str(error), "f": to_plain(more)}
    if cls.__name__ in BUILTIN_ERRORS and cls.__module__ == "builtins":
        return {"of": cls.__name__, "v": str(error), "f": {}}
    return {"of": "HfsdkError", "v": f"{cls.__name__}: {error}", "f": {}}


def _fields(value: Any) -> dict[str, Any]:
    if hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


def _name_of(cls: type) -> str:
    if not (cls.__module__.startswith(HOMES) or cls.__module__ in ALSO):
        raise OptionError(f"a {cls.__name__} cannot be looked at from afar; look at it on the cluster")
    return f"{cls.__module__}:{cls.__qualname__}"


WRITERS: tuple[tuple[type | tuple[type, ...], str, Callable[[Any, Hold], dict[str, Any]]], ...] = (
    (Table, "table", _table), (Batch, "batch", _batch), ((Metrics, Value), "pending", _pending), (ColumnRef, "ref", _ref),
    (Rows, "rows", _each), (np.ndarray, "array", _array),
    (np.generic, "scalar", lambda value, hold: {"dtype": value.dtype.str, "v": value.tobytes()}),
    (PurePath, "path", lambda value, hold: {"v": str(value)}), (BaseException, "error", _error), (tuple, "tuple", _each),
    ((set, frozenset), "set", _each), (list, "list", _each), (Mapping, "map", _pairs), ((int, float, str), "number", _number),
)  # fmt: skip
"""(class, kind, how it is written); the first that fits counts."""


def from_plain(data: Any, client: ControllerClient | None = None) -> Any:
    """Return the value of plain data.

    Args:
        data: plain data as :func:`to_plain` makes it, perhaps by somebody else.
        client: the client of this side's session, which batches and metrics then belong to.

    Raises:
        ValueError: it names what may not be named, or is not well formed.
    """
    if isinstance(data, list):
        return [from_plain(item, client) for item in data]
    if not isinstance(data, dict):
        return data
    if KIND not in data:
        return {key: from_plain(item, client) for key, item in data.items()}
    try:
        return _made(data, client)
    except (KeyError, TypeError, AttributeError, HfsdkError) as error:
        raise ValueError(f"what came is no {data[KIND]!r}: {error}") from error


def _made(data: dict[str, Any], client: ControllerClient | None) -> Any:
    read = READERS.get(data[KIND])
    if read is not None:
        return read(data, client)
    bound = BOUND.get(data[KIND])
    if bound is None:
        raise ValueError(f"nothing is called {data[KIND]!r}")
    if client is None:
        raise ValueError(f"a {data[KIND]!r} belongs to a session, and there is none here")
    return bound(data, client)


def _listed(data: dict[str, Any], client: ControllerClient | None) -> list[Any]:
    return [from_plain(item, client) for item in data["v"]]


def _object_of(data: dict[str, Any], client: ControllerClient | None) -> Any:
    return _class(data["of"])(**{name: from_plain(item, client) for name, item in data["f"].items()})


def _ref_of(data: dict[str, Any], client: ControllerClient) -> ColumnRef:
    lease = client.lease(int(data["call"])) if data["leased"] else None
    return ColumnRef(int(data["call"]), str(data["name"]), from_plain(data["rows"]), lease)


def _pending_of(data: dict[str, Any], client: ControllerClient) -> Metrics | Value:
    lease, cls = client.lease(int(data["calls"][0])), PENDING[data["of"]]
    return cls(client, lease, data["dtype"]) if issubclass(cls, Metrics) else cls(client, lease)


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError("an array of objects has no bytes")
    return dtype


def _array_of(data: dict[str, Any], client: ControllerClient | None) -> np.ndarray[Any, Any]:
    shape = [int(n) for n in data["shape"]]
    if data["dtype"] == "O":
        array = np.empty(len(data["v"]), dtype=object)
        array[:] = [from_plain(item, client) for item in data["v"]]
        return array.reshape(shape)
    return np.frombuffer(bytearray(data["v"]), dtype=_dtype(data["dtype"])).reshape(shape)


def _error_of(data: dict[str, Any]) -> Exception:
    name, text = str(data["of"]), str(data["v"])
    if name in BUILTIN_ERRORS:
        made: Exception = getattr(builtins, name)(text)
        return made
    cls = getattr(core_errors, name, None)
    if not (isinstance(cls, type) and issubclass(cls, HfsdkError)):
        raise ValueError(f"there is no error {name!r}")
    return cls(text, **from_plain(data["f"])) if issubclass(cls, CallError) else cls(text)


def _class(name: str) -> Any:
    module, _, qualified = name.partition(":")
    if not (module.startswith(HOMES) or module in ALSO) or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"{name!r} may not be named")
    named: Any = importlib.import_module(module)
    for part in qualified.split("."):
        named = vars(named).get(part)
    if not isinstance(named, type) or named.__module__ != module or not (is_dataclass(named) or hasattr(named, "_fields")):
        raise ValueError(f"{name!r} is no noun")
    return named


READERS: Mapping[str, Callable[[dict[str, Any], ControllerClient | None], Any]] = {
    "tuple": lambda data, client: tuple(_listed(data, client)),
    "set": lambda data, client: frozenset(_listed(data, client)),
    "list": _listed,
    "map": lambda data, client: {from_plain(key, client): from_plain(item, client) for key, item in data["v"]},
    "number": lambda data, client: data["v"],
    "rows": lambda data, client: Rows(_listed(data, client)),
    "path": lambda data, client: Path(data["v"]),
    "array": _array_of,
    "scalar": lambda data, client: np.frombuffer(data["v"], dtype=_dtype(data["dtype"]))[0],
    "table": lambda data, client: Table(from_plain(data["columns"], client), from_plain(data["rows"])),
    "error": lambda data, client: _error_of(data),
    "object": _object_of,
}
BOUND: Mapping[str, Callable[[dict[str, Any], ControllerClient], Any]] = {
    "ref": _ref_of,
    "batch": lambda data, client: Batch(client, from_plain(data["columns"], client), int(data["num_rows"])),
    "pending": _pending_of,
}
"""Readers of values that belong to a session, by kind."""
