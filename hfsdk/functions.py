"""The user's functions on their way to the workers: shipped by value, so that a cell's function needs no module."""

from __future__ import annotations

import hashlib
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import CodeType, ModuleType
from typing import Any

from hfsdk.errors import OptionError


@dataclass(frozen=True)
class Shipped:
    """A function with its pickled form and source.

    Example: ``Shipped.of(lambda prompts, completions: [0.0] * len(prompts)).load()``.
    """

    name: str
    pickled: bytes = field(repr=False)
    source: str = field(repr=False, default="")
    """Source text where Python can find it, for trace and history."""

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
        modules = _user_modules()
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            pickled = cloudpickle.dumps(function)
        except Exception as error:  # whatever the pickling of what it closes over raises
            raise OptionError(
                f"{name} cannot travel to the workers: {error}. It goes there by value with everything it uses from outside; "
                "make what cannot be copied (a lock, a file, a connection, a session) inside the function."
            ) from error
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
        return cls(name, pickled, _source(function))

    @property
    def version(self) -> str:
        """Short hash of the pickled form: changes when the code or what it closes over changes."""
        return hashlib.sha256(self.pickled).hexdigest()[:8]

    def load(self) -> Callable[..., Any]:
        """Return the function; its source lines are known here, so that tracebacks show them."""
        import cloudpickle

        loaded: Callable[..., Any] = cloudpickle.loads(self.pickled)
        code = getattr(loaded, "__code__", None)
        if code is not None and self.source and not os.path.exists(code.co_filename):
            lines = [""] * (code.co_firstlineno - 1) + self.source.splitlines(keepends=True)
            linecache.cache[code.co_filename] = (len(self.source), None, lines, code.co_filename)
        return loaded


_judged: dict[str, tuple[ModuleType, bool]] = {}
"""Name of a loaded module -> the module as it was looked at, and whether it is the user's own."""


def _user_modules() -> list[ModuleType]:
    """Return the loaded modules that are the user's own, which workers may be unable to import."""
    found = []
    for name, module in list(sys.modules.items()):
        seen = _judged.get(name)
        if seen is None or seen[0] is not module:
            seen = _judged[name] = (module, _is_users(name, module))
        if seen[1]:
            found.append(module)
    return found


def _is_users(name: str, module: ModuleType) -> bool:
    path = str(getattr(module, "__file__", None) or "")
    own = os.path.isabs(path) and module.__name__ == name != "__main__"
    return own and name.split(".")[0] != "hfsdk" and not path.startswith(_installed())


@cache
def _installed() -> tuple[str, ...]:
    places = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(f"{place}{os.sep}" for place in places)


def _source(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else _code_source(code)


@lru_cache(maxsize=256)
def _code_source(code: CodeType) -> str:
    try:
        return inspect.getsource(code)
    except OSError:
        return ""
