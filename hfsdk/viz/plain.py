"""View data as every host can hold it: values unknown to JSON, UTF-8 or XML are replaced before anything is drawn."""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate
from typing import Any

from hfsdk.core.text import printable

_NOT_UTF8 = re.compile("[\ud800-\udfff]")


def plain(view: Any) -> Any:
    """Return view data in which lone surrogates are ``�`` and numbers that are not finite are missing (``None``)."""
    try:
        json.dumps(view, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:  # also UnicodeEncodeError; far quicker to find out than to walk over a large view
        return _walk(view)
    return view


def clean(text: str) -> str:
    """Return text without control characters and those that no XML and no UTF-8 can hold."""
    return printable(text)


def letters(text: str) -> int:
    """Return how many letters' room a text takes: those of East Asia, pictographs and ``�`` are as wide as two."""
    return sum(1 + (character >= "\u2e80") for character in text)


def cut(text: str, most: int) -> str:
    """Return a text that takes the room of at most so many letters."""
    if letters(text) <= most:
        return text
    rooms = accumulate(map(letters, text))
    return "".join(character for character, room in zip(text, rooms, strict=True) if room < most) + "…"


def finite(value: Any) -> Any:
    """Return a finite number as it is, and ``None`` for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def _walk(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_UTF8.sub("�", value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_walk(k): _walk(v) for k, v in value.items()}
    return [_walk(v) for v in value] if isinstance(value, list | tuple) else value
