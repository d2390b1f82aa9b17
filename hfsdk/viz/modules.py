"""The files of ``hfsdk/viz/static``, and the ES module of a picture: its own file with its imports in front."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)
_FUNCTION = re.compile(r"^function (\w+)\([^\n]*(?<!\})\n.*?^\}\n", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^[ \t]*//[^\n]*\n", re.MULTILINE)
_BLANKS = re.compile(r"^[ \t]+|^\n", re.MULTILINE)


@cache
def static(name: str) -> str:
    """Return the text of a file of ``hfsdk/viz/static``."""
    return (Path(__file__).parent / "static" / name).read_text(encoding="utf-8")


@cache
def has_module(name: str) -> bool:
    """Return whether a picture has an ES module; the others are images."""
    return (Path(__file__).parent / "static" / f"{name}.js").is_file()


@cache
def esm(name: str) -> str:
    """Return one ES module that imports nothing.

    Comments, indentation and the functions that nothing names are left out, for every frozen picture holds it.
    """
    parts = [_EXPORT.sub("", _IMPORT.sub("", static(f"{part}.js"))) for part in reversed(_needed(name))]
    return _BLANKS.sub("", _without_unused(_COMMENT.sub("", "\n".join(parts))))


def _without_unused(module: str) -> str:
    """Return a module without top-level functions whose name is nowhere but where it is declared."""
    uses = Counter(re.findall(r"\w+", module))
    shorter = _FUNCTION.sub(lambda function: function[0] if uses[function[1]] > 1 else "", module)
    return module if shorter == module else _without_unused(shorter)


def _needed(name: str) -> list[str]:
    """Return a file and its imports, each behind its own imports."""
    names: dict[str, None] = {name: None}
    for part in _IMPORT.findall(static(f"{name}.js")):
        for needed in _needed(part):
            names.pop(needed, None)
            names[needed] = None
    return list(names)


def js_literal(value: Any) -> str:
    """Return JSON that is safe inside ``<script>`` and inside XML: no ``<``, ``>``, ``&`` or control character is left in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\x7f", "\\u007f")
