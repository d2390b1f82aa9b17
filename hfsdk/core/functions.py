"""The user's functions on their way to the workers: shipped by value, so that a cell's function needs no module."""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import CodeType, ModuleType
from typing import Any

from hfsdk.core.errors import OptionError


@dataclass(frozen=True)
class Shipped:
    """A function with its pickled form and source.

    Example: ``Shipped.of(lambda prompts, completions: [0.0] * len(prompts)).load()``.
    """

    name: str
    pickled: bytes = field(repr=False)
    source: str = field(repr=False, default="")
    """Source text where Python can find it, for trace and history."""
    cells: tuple[tuple[str, str], ...] = field(repr=False, compare=False, default=())
    """(Name, text) of every notebook cell that it and the functions it calls come from: no file of these names exists elsewhere."""

    @classmethod
    def of(cls, function: Callable[..., Any] | Shipped) -> Shipped:
        """Pickle a function (or callable object) by value, user modules included.

        Raises:
            OptionError: it cannot be pickled, e.g. because it closes over a lock, a file or a handle.
        """
        if isinstance(function, Shipped):
            return function
        import cloudpickle

        name = getattr(function, "__name__", type(function).__name__)
        with users_by_value():
            try:
                pickled = cloudpickle.dumps(function)
            except Exception as error:  # whatever the pickling of what it closes over raises
                raise OptionError(
                    f"{name} cannot travel to the workers: {error}. It goes there by value with everything it uses from outside; "
                    "make what cannot be copied (a lock, a file, a connection, a session) inside the function."
                ) from error
        return cls(name, pickled, _source(function), tuple(_cells(function)))

    @property
    def version(self) -> str:
        """Short hash of the pickled form: changes when the code or a variable that it closes over changes."""
        return hashlib.sha256(self.pickled).hexdigest()[:8]

    def load(self) -> Callable[..., Any]:
        """Return the function; the lines of its cells are known here, so that tracebacks show them."""
        import cloudpickle

        for name, text in self.cells:
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        loaded: Callable[..., Any] = cloudpickle.loads(self.pickled)
        return loaded


_by_value = threading.RLock()
"""cloudpickle keeps one list of such modules for the process; two threads would take them from each other."""


@contextmanager
def users_by_value() -> Iterator[None]:
    """Have cloudpickle take code of the user's own modules by value: other processes may be unable to import it."""
    import cloudpickle

    with _by_value:
        modules = _user_modules()
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


_seen: tuple[dict[str, ModuleType], dict[str, ModuleType]] = {}, {}
"""The loaded modules when :func:`_user_modules` last looked, and those of them that are the user's own."""


def _user_modules() -> list[ModuleType]:
    """Return the loaded modules that are the user's own, which workers may be unable to import."""
    global _seen
    before, users = _seen
    if sys.modules != before:
        now = dict(sys.modules)
        users = {
            name: module for name, module in now.items()
            if (name in users if before.get(name) is module else _is_users(name, module))
        }  # fmt: skip
        _seen = now, users
    return list(users.values())


def _is_users(name: str, module: ModuleType) -> bool:
    path = str(getattr(module, "__file__", None) or "")
    own = os.path.isabs(path) and module.__name__ == name != "__main__"
    return own and name.split(".")[0] != "hfsdk" and not path.startswith(_installed())


@cache
def _installed() -> tuple[str, ...]:
    places = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(f"{place}{os.sep}" for place in places)


def _source(function: Callable[..., Any]) -> str:
    code = _code(function)
    return "" if code is None else _code_source(code)


def _code(function: Any) -> CodeType | None:
    """Return the code of a function, of what a partial one calls, or of the ``__call__`` of the user's own objects."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None and not type(function).__module__.startswith(("hfsdk", "builtins")):
        code = getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


@lru_cache(maxsize=256)
def _code_source(code: CodeType) -> str:
    try:
        return inspect.getsource(code)
    except OSError:
        return ""


def _cells(function: Any) -> list[tuple[str, str]]:
    """Return (name, text) of the cells in which a function and those it calls were defined."""
    texts: dict[str, str] = {}
    stack, seen = [function], set[int]()
    while stack:
        target = stack.pop()
        # A partial has no code of its own: what matters is the function in it.
        while isinstance(target, functools.partial):
            target = target.func
        code = _code(target)
        if code is None or id(code) in seen:
            continue
        seen.add(id(code))
        text = "".join(linecache.getlines(code.co_filename))
        # IPython registers a cell's source under a name that is no file; functions in files are found by their modules.
        if text and not os.path.exists(code.co_filename):
            texts[code.co_filename] = text
        inner = inspect.unwrap(target)
        inner = inner if hasattr(inner, "__globals__") else type(target).__call__
        global_names = getattr(inner, "__globals__", {})
        used = [global_names.get(name) for name in _names(code)] + [cell.cell_contents for cell in _filled(inner)]
        stack += [value for value in used if inspect.isfunction(value) and not value.__module__.startswith("hfsdk")]
    return sorted(texts.items())


def _names(code: CodeType) -> set[str]:
    """Return the global names that a code uses, inner functions and comprehensions included."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _filled(function: Any) -> list[Any]:
    """Return the cells of a closure that have a content."""
    cells = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:
            continue
        cells.append(cell)
    return cells
