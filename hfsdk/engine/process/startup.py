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
