"""Where in the user's code a call was started: ``cell 4, line 2`` in a notebook, ``ppo.py, line 17`` in a script."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hfsdk.core.asked_from import user_frame

_CELL = re.compile(r"In\[(\d+)\]")


_started = threading.local()


@contextmanager
def calls_of(line: str) -> Iterator[None]:
    """Say that what this thread starts was asked for at ``line``: a thread of hfsdk's own has no frame of the user's below."""
    _started.line = line
    try:
        yield
    finally:
        del _started.line


def user_line() -> str:
    """Return the place of the innermost frame outside hfsdk, or ``""`` when there is none."""
    asked: str | None = getattr(_started, "line", None)
    if asked is not None:
        return asked
    frame = user_frame()
    if frame is None:
        return ""
    filename, line = frame.f_code.co_filename, frame.f_lineno
    cell = _cell_number(filename)
    if cell is not None:
        return f"cell {cell}, line {line}"
    return f"{Path(filename).name}, line {line}"


def _cell_number(filename: str) -> int | None:
    """Return the number of the cell that was compiled under ``filename``, where IPython runs and knows it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return None
    if not hasattr(shell.compile, "format_code_name"):
        return _cell_of_text(shell, filename)
    label = shell.compile.format_code_name(filename)  # ("Cell", "In[4]"), or None for a file
    match = _CELL.search(label[1]) if label else None
    return int(match[1]) if match else None


def _cell_of_text(shell: Any, filename: str) -> int | None:
    """Return the number of the newest cell with the text of ``filename``: IPython 7, which Colab has, keeps no numbers by name."""
    text = "".join(linecache.getlines(filename)).rstrip()
    cells = shell.history_manager.input_hist_parsed
    return max((number for number, cell in enumerate(cells) if text and cell.rstrip() == text), default=None)
