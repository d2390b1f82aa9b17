"""The abilities of the system that hfsdk runs on: to run the engines, start threads, have temporary folders.

The engines run on Linux. Simulation, plans and pictures run wherever Python does, also without threads (a Python in a browser,
as Pyodide, has none to start): work that otherwise has its own thread is then done on the user's. A simulated session
carries each call out as it is submitted, a picture is sent as it is published, a save returns when it is complete.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

NAMES = {"darwin": "macOS", "win32": "Windows", "emscripten": "a browser"}
"""Names of systems, by ``sys.platform``."""


def without_engines() -> str:
    """Return why real sessions cannot run on this system, what can, and what to do; empty on Linux."""
    system: str = sys.platform
    if system == "linux":
        return ""
    linux = "WSL2, a Linux machine or Colab" if system == "win32" else "a Linux machine or Colab"
    return (
        f"real sessions run on Linux, and this is {NAMES.get(system, system)}. What works here: plans, pictures and "
        f"hf.Session.simulated('1x2 A100-80GB'), the same calls on a virtual clock. For real work use {linux}: "
        "see docs/where-it-runs.md"
    )


@cache
def can_start_threads() -> bool:
    """Return whether a thread can be started; tried once."""
    try:
        tried = threading.Thread(target=lambda: None, name="hfsdk-first", daemon=True)
        tried.start()
    except RuntimeError:
        return False
    tried.join()
    return True


_temporary: list[Path] = []
"""The folder for this process's temporary folders is the last of these; empty: the system's own."""


def keep_temporary_in(place: Path) -> None:
    """Have this process's temporary folders lie in a folder that another process removes if this one is killed."""
    _temporary.append(place)


def keep_nothing_temporary_in(place: Path) -> None:
    """Know that a folder of :func:`keep_temporary_in` is to be removed."""
    if place in _temporary:
        _temporary.remove(place)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """Give a folder of mode 0700 that is gone at the end."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=_temporary[-1] if _temporary else None) as folder:
        yield folder


exiting = threading.Event()
"""The interpreter ends: nothing is shown any more, since the display may be gone already."""
