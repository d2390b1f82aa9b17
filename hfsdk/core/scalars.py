"""Single values as rules take them: numbers as Python's own, texts that have a UTF-8 form, paths that can be files."""

from __future__ import annotations

import math
import numbers
import os
import re
from typing import Any

from hfsdk.core.bounds import NO, Refused, Rule

MOST_CHARACTERS = 1_000_000
"""Longest text that is taken where nothing else is said."""

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters and ends of lines, which a path may have and nobody means."""

MOST_OF_PATH, MOST_OF_PART = 4096, 255
"""Longest path, and longest name in one, in bytes (Linux's PATH_MAX and NAME_MAX)."""


def is_whole(value: object) -> bool:
    """Whether a value is a whole number (numpy's too; ``True`` is none)."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def plain_scalar(value: Any) -> Any:
    """Return a scalar of numpy or torch, or an array of theirs without axes, as plain Python; everything else as it is."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and getattr(value, "shape", None) == ():
        try:
            return value.item()
        except (AttributeError, RuntimeError):  # a dtype; a tensor without storage
            return value
    return value


def _take_int(value: Any) -> Any:
    if type(value) is not int:
        value = plain_scalar(value)
        if not is_whole(value):
            return NO
        value = int(value)
    return value if -(2**63) <= value < 2**63 else Refused("a whole number of at most 64 bits")


def take_any_float(value: Any) -> Any:
    """Take a number, infinite ones and NaN too."""
    if type(value) is float:
        return value
    value = plain_scalar(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return NO
    try:
        number = float(value)
    except OverflowError:
        return NO
    return int(value) if isinstance(value, numbers.Integral) else number


def _take_float(value: Any) -> Any:
    value = take_any_float(value)
    return value if type(value) is Refused or math.isfinite(value) else NO


def _take_bool(value: Any) -> Any:
    value = value if type(value) is bool else plain_scalar(value)
    return value if type(value) is bool else NO


def _take_text(value: Any) -> Any:
    if not isinstance(value, str):
        return NO
    if len(value) > MOST_CHARACTERS:
        return Refused(f"a text of at most {MOST_CHARACTERS:,} characters")
    if not value.isascii() and not _is_unicode(value):
        return Refused("a text without lone surrogates (U+D800 to U+DFFF), which have no UTF-8 form")
    return value if type(value) is str else "".join([value])


def take_slice(value: Any) -> Any:
    """Take a slice of whole numbers."""
    if not isinstance(value, slice) or value.step == 0:
        return NO
    ends = [end if end is None else _take_int(end) for end in (value.start, value.stop, value.step)]
    return NO if any(type(end) is Refused for end in ends) else slice(*ends)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def take_path(value: Any) -> Any:
    """Take a text or a path that can be the name of a file."""
    try:
        text = os.fspath(value) if isinstance(value, str | os.PathLike) else b""
    except Exception:  # of the user's own kind of path
        return NO
    if not isinstance(text, str):
        return NO
    if len(text) > MOST_OF_PATH or CONTROL.search(text) or not _is_unicode(text):
        return Refused(f"a path of at most {MOST_OF_PATH:,} bytes without control characters or lone surrogates")
    if len(text) > MOST_OF_PART or not text.isascii():
        longest = max(len(part.encode()) for part in text.split(os.sep))
        if longest > MOST_OF_PART or len(text.encode()) > MOST_OF_PATH:
            return Refused(f"a path of at most {MOST_OF_PATH:,} bytes, {MOST_OF_PART} in each name")
    return value


ANYTHING = Rule(lambda value: value, "anything", "things")
SCALARS = {
    Any: ANYTHING,
    int: Rule(_take_int, "a whole number", "whole numbers"),
    float: Rule(_take_float, "a finite number", "finite numbers"),
    bool: Rule(_take_bool, "True or False", "truth values"),
    str: Rule(_take_text, "a text", "texts"),
    type(None): Rule(lambda value: value if value is None else NO, "None", "None"),
}
PATH = Rule(take_path, "a path", "paths")
