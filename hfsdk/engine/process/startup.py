"""Quick starts of worker processes: no import that nothing needs, and little garbage collection.

The engines' modules are hundreds of thousands of objects, all of which a full collection goes through, and writes to: a fork would
get its own page of nearly all that it shares. So what was imported is frozen (``gc.freeze``: set aside, still freed when
nothing refers to it) and stays so: vLLM, which freezes what its engine made and melts everything when that ends, is kept from both
(:func:`keep_frozen`). Roles, whose models hold themselves in cycles, are never frozen, and are collected when they are released.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python's garbage collector off, where many objects are made and few of them are garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Keep the collector off (imports make few cycles), and set the objects aside afterwards. Not where roles are."""
    with without_collector():
        try:
            yield
        finally:
            gc.freeze()


class Collector(ModuleType):
    """The module ``gc`` as a module sees it whose calls of ``freeze`` and ``unfreeze`` are to do nothing."""

    def __init__(self) -> None:
        super().__init__("gc")

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)

    def freeze(self) -> None:
        """Do nothing: the caller's objects would never be collected."""

    def unfreeze(self) -> None:
        """Do nothing: imported objects stay frozen."""


def keep_frozen(*modules: str) -> None:
    """Have the collector's frozen objects be those of imports alone, whatever these modules would do, if they are imported."""
    for name in modules:
        if name in sys.modules:
            sys.modules[name].gc = Collector()  # type: ignore[attr-defined]


class NotImported:
    """A stand-in for every class of a module that :func:`stood_in` has kept from being imported; nothing is one."""


class StandIn(ModuleType):
    """A module whose names are all `NotImported`, but those of Python's own (``__file__``), which it has not."""

    def __getattr__(self, name: str) -> type[NotImported]:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} stands in for a module; it has no {name}")
        return NotImported


@contextmanager
def stood_in(module: str) -> Iterator[None]:
    """Let imports of a module find a stand-in, unless it was imported before: each of its names is `NotImported`.

    For modules whose classes are only asked whether something is one, or written in annotations. The packages around the module
    are not imported either. An import after that gets the module.
    """
    if module in sys.modules:
        yield
        return
    stand_in = sys.modules[module] = StandIn(module)
    try:
        yield
    finally:
        if sys.modules.get(module) is stand_in:
            del sys.modules[module]


@contextmanager
def not_there(module: str) -> Iterator[None]:
    """Let optional imports of a module fail that was not imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
