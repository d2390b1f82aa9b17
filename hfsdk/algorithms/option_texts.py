"""The docstrings below the fields of options as texts, so that ``?`` and ``help`` show them, inherited ones too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any


def options_text(kind: Any) -> str:
    """Return the lines for the docstring of a class: every option, those of its bases too."""
    lines = option_lines(kind)
    return f"\n\n    Options:{lines}\n    " if lines else ""


def option_lines(kind: Any) -> str:
    """Return a line for each option that is written down with a docstring, the nearest class's first word on it."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        found |= _field_texts(base.__module__).get(base.__name__, {})
    return "".join(f"\n        {name}: {text}" for name, text in found.items())


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
