"""Wrong values: of other types, extreme, strange, cyclic, hostile. Nothing here is large until somebody unrolls it."""

from __future__ import annotations

import decimal
import fractions
import functools
import itertools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st


class DeliberateError(Exception):
    """Raised by hostile values; where a function of the user raises it, it may come through."""


class Hostile:
    """Raises in the methods named, e.g. ``Hostile("__repr__")``."""

    def __new__(cls, *methods: str) -> Hostile:
        def fail(*args: Any, **options: Any) -> Any:
            raise DeliberateError("a value that raises")

        return object.__new__(type("Hostile", (cls,), dict.fromkeys(methods, fail)))

    def __init__(self, *methods: str) -> None:
        pass


def raises(*args: Any, **options: Any) -> Any:
    """Raise whatever it is given."""
    raise DeliberateError("a function that raises")


def takes_none() -> None:
    """Take no arguments."""


def takes_many(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> None:
    """Take more arguments than anybody gives."""


def cyclic_list() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def cyclic_dict() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["a"] = made
    return made


def deep_list() -> list[Any]:
    made: list[Any] = []
    for _ in range(5000):
        made = [made]
    return made


NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**9, 10**18, -(10**18), 10**400, -(10**400),
    0.0, -0.0, 0.5, 1.5, -1.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf, 1j,
    decimal.Decimal("NaN"), decimal.Decimal("0.1"), fractions.Fraction(1, 3),
    np.int64(3), np.int8(-1), np.uint64(2**64 - 1), np.float32("nan"), np.float64(0.5), np.float16("inf"), np.True_, np.str_("x"),
    np.datetime64("2020-01-01"), True, False,
)  # fmt: skip

TEXTS: tuple[str, ...] = (
    "", " ", "a", "a b", "\0", "a\nb\r\nc", "\x1b[31mred", "\ud800", "‮abc", "é́́", "💥", "%s {} {0} $x", "nan", "None", "-1", "1e400",
    "a" * 5000, "x" * 10**6, "../..", "tp2 xp2", "samples", "auto", "x=1,y=2", "'\"", "\x85\x9b",
)  # fmt: skip

MAKERS: tuple[Callable[[], Any], ...] = (
    list, dict, tuple, set, object, cyclic_list, cyclic_dict, deep_list, itertools.count,
    lambda: [None], lambda: [[]], lambda: [1, "a"], lambda: [float("nan")], lambda: ["\ud800"], lambda: [[[1]]], lambda: ("a",),
    lambda: [10**400], lambda: [-1], lambda: [True], lambda: {"a": 1}, lambda: {1: 2}, lambda: {None: None}, lambda: {"a b": [1]},
    lambda: {"actor": 1}, lambda: {"actor": math.nan}, lambda: range(2**40), lambda: range(3),
    lambda: iter([1, 2]), lambda: slice(None),
    lambda: slice("a", None, 0), lambda: b"bytes", lambda: bytearray(b"x"), lambda: memoryview(b"x"), lambda: pathlib.Path("a\0b"),
    lambda: np.array(3), lambda: np.array([1, 2]), lambda: np.array([]), lambda: np.zeros((2, 0)), lambda: np.array([None, 1]),
    lambda: np.array(["x"]), lambda: np.array([math.nan, math.inf]), lambda: np.array([True, False]),
    lambda: np.arange(4).reshape(2, 2),
    lambda: np.ma.masked, lambda: _torch("tensor", 3), lambda: _torch("tensor", 0.5), lambda: _torch("tensor", [1, 2]),
    lambda: _torch("tensor", math.nan), lambda: _torch("tensor", True), lambda: _torch("zeros", 0),
    lambda: raises, lambda: takes_none, lambda: takes_many, lambda: len, lambda: int, lambda: Hostile, lambda: math, lambda: print,
    lambda: functools.partial(raises, 1), lambda: (lambda: 1), lambda: (lambda *a, **k: "nonsense"), lambda: (i for i in (1, 2)),
    lambda: Hostile("__repr__", "__str__"), lambda: Hostile("__len__"), lambda: Hostile("__eq__", "__hash__"),
    lambda: Hostile("__bool__"),
    lambda: Hostile("__iter__"), lambda: Hostile("__getattr__"), lambda: Hostile("__call__", "__repr__"),
    lambda: Hostile("__float__", "__int__"),
    lambda: [Hostile("__repr__")], lambda: {"a": Hostile("__repr__")}, lambda: Hostile("__array__"), lambda: Hostile("__fspath__"),
    lambda: None, lambda: Ellipsis, lambda: NotImplemented, lambda: type, lambda: {1, 2}, lambda: frozenset("ab"),
)  # fmt: skip


def _torch(name: str, *args: Any) -> Any:
    import torch

    return getattr(torch, name)(*args)


def wrong() -> st.SearchStrategy[Any]:
    """Return the strategy of wrong values."""
    return st.one_of(
        st.sampled_from(NUMBERS),
        st.sampled_from(TEXTS),
        safe_text(),
        st.sampled_from(range(len(MAKERS))).map(lambda i: MAKERS[i]()),
    )


def safe_text() -> st.SearchStrategy[str]:
    """Return texts that, taken as a path, stay in the working folder."""
    return st.text(max_size=30).map(lambda text: text.lstrip("/~").replace("..", "_"))


def shown(value: Any, width: int = 80) -> str:
    """Return a value in a few characters, whatever its methods do."""
    try:
        text = ascii(value) if not isinstance(value, str) or len(value) < 1000 else f"{value[:20]!a}... ({len(value)} characters)"
    except BaseException as error:
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= width else f"{text[: width - 3]}..."
