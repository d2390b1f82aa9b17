"""The user's own line: of an error's traceback, and of the text that :mod:`faulthandler` wrote of a process that hangs."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path

HFSDK = f"{Path(__file__).parents[2]}{os.sep}"

FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
"""A frame as faulthandler writes it, the innermost first."""


@lru_cache(maxsize=256)
def is_library(file: str) -> bool:
    """Return whether a file of a frame is Python's, an installed package's or hfsdk's."""
    places = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return file.startswith(("<frozen ", HFSDK, *(f"{place}{os.sep}" for place in places))) or "site-packages" in file


def line_of(file: str, line: int | str, name: str) -> str:
    """Return a line as messages have it: ``"rewards.py:12 in score"``."""
    return f"{os.path.basename(file)}:{line} in {name}"


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's that an error came from, ``""`` where there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    return line_of(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name) if frames else ""


def line_of_trace(trace: str) -> tuple[str, str]:
    """Return the innermost line of the user's in faulthandler's text, and the user's frames from there on."""
    user_frames = [frame for frame in FRAME.finditer(trace) if not is_library(frame["file"])]
    if not user_frames:
        return "", ""
    first = user_frames[0]
    return line_of(first["file"], first["line"], first["name"]), "\n".join(frame[0].strip() for frame in user_frames)
