"""Checks of what a user gives: is an option of the type it is declared with?"""

from __future__ import annotations

import dataclasses
import math
import numbers
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hfsdk.errors import OptionError


def is_whole(value: object) -> bool:
    """Whether a value is a whole number (numpy's too; ``True`` is none)."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def check_fields(options: Any) -> None:
    """Check that the fields of a dataclass of options are of the types they are declared with.

    Raises:
        OptionError: names the first that is not, and what it should be.
    """
    kind: Any = type(options)
    hints = _hints(kind)
    check_options("", **{f.name: (getattr(options, f.name), hints[f.name]) for f in dataclasses.fields(options)})


def check_options(what: str, **given: tuple[object, Any]) -> None:
    """Check ``name=(value, type)``: numbers, texts, bools, tuples of them, or None where the type says so.

    Raises:
        OptionError: names the first that is of another type, and what it should be.
    """
    for name, (value, wanted) in given.items():
        if not _fits(value, wanted):
            words = f"{what}: {name}" if what else name
            raise OptionError(f"{words} must be {_words(wanted)}; got {name}={value!r}")


_WORDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "True or False", type(None): "None"}


def _fits(value: object, wanted: Any) -> bool:
    if isinstance(wanted, UnionType):
        return any(_fits(value, one) for one in get_args(wanted))
    if get_origin(wanted) is tuple:
        kinds = get_args(wanted)
        kinds = kinds[:1] * len(value) if isinstance(value, tuple) and kinds[-1] is ... else kinds
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if wanted is int:
        return is_whole(value)
    if wanted is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, get_origin(wanted) or wanted)


def _words(wanted: Any) -> str:
    if isinstance(wanted, UnionType):
        return " or ".join(_words(one) for one in get_args(wanted))
    if get_origin(wanted) is tuple:
        one, *more = get_args(wanted)
        many = _WORDS[one].split(" ", 1)[1] + "s"
        return f"a tuple of {many}" if ... in more else f"a tuple of {len(more) + 1} {many}"
    return _WORDS.get(wanted) or f"an hf.{wanted.__name__}"
