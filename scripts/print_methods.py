"""Writes the tables of built-in calls and columns into docs/methods.md, from their declarations; ``--check`` only compares."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from hfsdk.core.arguments import Arguments
from hfsdk.core.builtin import BuiltinColumn, Method
from hfsdk.core.columns import COLUMNS
from hfsdk.core.methods import METHODS

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
CALLS = ("call", "of", "phase", "reads", "writes", "protocol", "arguments", "what it does", "result")
ENTRIES = {
    "prompt": "one per prompt token",
    "token": "one per response token",
    "sample": "one per sample",
    "text": "a text per sample",
}


def tables() -> dict[str, str]:
    """Return the calls and the columns as Markdown."""
    return {
        "calls": _table(CALLS, map(_call, METHODS.values())),
        "columns": _table(("column", "entries", "dtype", "what it is", "written by"), map(_column, COLUMNS.values())),
    }


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def _column(column: BuiltinColumn) -> list[str]:
    dtype = "-" if column.kind == "text" else column.dtype
    return [f"`{column.name}`", ENTRIES[column.kind], dtype, column.meaning, f"`{column.writer}`"]


def _call(method: Method) -> list[str]:
    reads = [*method.reads, *(f"[{name}]" for name in method.reads_if_there)]
    if method.work == "loss":
        reads.append("every other column")
    writes = "as its arguments say" if method.writes == ("*",) else ", ".join(method.writes)
    protocol = method.protocol.name if method.protocol else "none"
    return [
        f"`{method.name}`",
        method.roles,
        method.phase,
        ", ".join(reads) or "-",
        writes or "-",
        protocol,
        _arguments(method.arguments),
        "; ".join(_effects(method)),
        method.result or "-",
    ]


def _arguments(kind: type[Arguments]) -> str:
    words = []
    for f in fields(kind):
        if f.name != "function":
            default = "" if f.default is MISSING else f" = {f.default!r}"
            words.append(f"{f.name}{default}")
    return f"{kind.__name__}: {', '.join(words)}" if words else "-"


def _effects(method: Method) -> list[str]:
    words = {
        "generate": "generates", "score": "has the generating engine score tokens that are there",
        "pass": "a pass over prompt + response", "loss": "takes a loss", "step": "optimizer",
        "code": "the user's code on the ranks", "state": "a role's state", "look": "looks", "move": "hands weights to a shadow",
        "task": "the user's code over columns", "data": "brings columns", "transition": "brings weights back to the trainer",
    }  # fmt: skip
    found = [words[method.work]]
    found += (
        ["balanced by tokens"] * method.balanced + ["learns"] * method.learns + ["changes the weights"] * method.changes_weights
    )
    return [*found, f"needs {', '.join(method.needs)}"] if method.needs else found


def page() -> str:
    """Return docs/methods.md with the tables as they are declared."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        begin, end = f"<!-- {name}: printed by scripts/print_methods.py -->\n", f"<!-- end of {name} -->\n"
        before, rest = text.split(begin)
        text = f"{before}{begin}{table}{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if page() == PAGE.read_text(encoding="utf-8") else "docs/methods.md is not what scripts/print_methods.py prints")
    PAGE.write_text(page(), encoding="utf-8")
