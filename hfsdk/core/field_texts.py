"""The docstrings below the fields of dataclasses as texts, so that ``?`` and ``help`` show them, inherited ones too.

``@documented``, above ``@dataclass``, is for what users make or look at; algorithms and losses have it from `Options`::

    AdamW?   ...   Fields:
                       lr: Peak learning rate. Default 1e-05.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MOST_CHARACTERS = 60
"""Longest ``repr`` of a default that a line shows; a longer one stands in the signature alone."""


def documented(kind: type[T]) -> type[T]:
    """Add a line for every field to the docstring of a dataclass."""
    defaults = {f.name: f.default for f in fields(kind) if f.default is not MISSING}  # type: ignore[arg-type]
    lines = field_lines(kind, defaults, [f.name for f in fields(kind)])  # type: ignore[arg-type]
    kind.__doc__ = f"{(kind.__doc__ or '').rstrip()}\n\n    Fields:{lines}\n    "
    return kind


def options_text(kind: Any) -> str:
    """Return the lines for the docstring of a class of options that is no dataclass yet: every option, those of its bases too."""
    lines = option_lines(kind)
    return f"\n\n    Options:{lines}\n    " if lines else ""


def option_lines(kind: Any) -> str:
    """Return a line for each option of a class, the nearest class's first word on it; its bases may be dataclasses already."""
    namespaces = (base.__dict__.items() for base in reversed(kind.__mro__))
    defaults = {
        name: value.default if isinstance(value, Field) else value
        for items in namespaces for name, value in items if not isinstance(value, (property, classmethod))
    }  # fmt: skip
    return field_lines(kind, defaults)


def field_lines(kind: Any, defaults: Mapping[str, Any], names: Iterable[str] = ()) -> str:
    """Return a line for each field that is written down with a docstring, the nearest class's first word on it.

    Args:
        kind: the class.
        defaults: defaults by name; a field that has none must be given.
        names: the fields to show, in their order; by default all that have a docstring.
    """
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        texts |= _field_texts(base.__module__).get(base.__name__, {})
    shown = [name for name in names if name in texts] or texts
    return "".join(f"\n        {name}: {texts[name]}{_default(defaults.get(name, MISSING))}" for name in shown)


def _default(value: Any) -> str:
    text = "" if value is MISSING else repr(value)
    return f" Default {text}." if text and len(text) <= MOST_CHARACTERS and " at 0x" not in text else ""


@cache
def _field_texts(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields by class, in a module of this package whose source is there."""
    file = getattr(sys.modules.get(module), "__file__", None) if module.startswith("hfsdk.") else None
    if not file or not Path(file).is_file():
        return {}
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: dict(_of_body(node.body)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _of_body(body: list[ast.stmt]) -> Iterable[tuple[str, str]]:
    for field, text in pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name) or not isinstance(text, ast.Expr):
            continue
        if isinstance(text.value, ast.Constant) and "ClassVar" not in ast.unparse(field.annotation):
            yield field.target.id, " ".join(str(text.value.value).split())
