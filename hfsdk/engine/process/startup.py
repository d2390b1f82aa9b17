"""What makes worker processes start quickly: no import that nothing needs, and little garbage collection.

The engines' modules are hundreds of thousands of objects, all of which a full collection goes through; it would again and again
while they are imported, and vLLM asks for more whenever it builds an engine. So what has been made to stay is frozen
(``gc.freeze``: set aside, still freed when nothing refers to it), and only the release of a role, whose models hold themselves in
cycles, searches everything once.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


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
def making_what_stays() -> Iterator[None]:
    """Keep the collector off (imports make few cycles), and set aside afterwards what is there."""
    with without_collector():
        try:
            yield
        finally:
            gc.freeze()


def collect_everything() -> None:
    """Collect cycles among all objects, and set aside again what stays."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class NotImported:
    """Stands for every class of a module that :func:`stood_in` has kept from being imported; nothing is one."""


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
    are not imported either. Whoever imports it afterwards gets the module.
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
