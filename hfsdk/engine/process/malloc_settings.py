"""How glibc's heap keeps the memory that torch frees, in workers on processors, and when it gives that back.

A step of training allocates and frees the same blocks every time. By default glibc maps those of more than 32 MB (logits, the
gradient of a vocabulary) anew each time, and every page of them is a fault, zeroed first. And torch asks for aligned memory, for
which glibc wants a hole that is larger than the block. So what one layer freed is too small for the same block of the next, unless
the few bytes that aligning left over are joined to the hole again, which its caches of small blocks prevent::

    block of layer 1    [.|aaaaaaaaaaaa|.]     freed: the hole and its rests apart    12: too small for 12 and its alignment
                                               joined again                           14: the same block fits

So workers that are forks have one heap for all threads, that maps nothing on its own, caches no small blocks and keeps what is
freed for the next step; :func:`give_back` returns it once roles are gone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

TUNABLES = "GLIBC_TUNABLES"
"""The variable that glibc reads when a program begins, and never again: forks have the settings of their first process."""

SETTINGS = {"arena_max": 1, "mmap_threshold": 2**30, "mxfast": 0, "tcache_count": 0, "trim_threshold": 2**40}
"""Settings of ``glibc.malloc``; other C libraries do not read them."""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with these settings; those that it has already win, as they come last."""
    tunables = [f"glibc.malloc.{name}={value}" for name, value in SETTINGS.items()]
    return {**environment, TUNABLES: ":".join([*tunables, *filter(None, [environment.get(TUNABLES)])])}


def give_back() -> None:
    """Return all free pages to the system, also those between used ones; without glibc nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
