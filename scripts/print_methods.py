"""Writes the table of built-in calls into docs/methods.md, from their declarations; ``--check`` only compares."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from pathlib import Path

from hfsdk.core.arguments import Arguments
from hfsdk.core.methods import METHODS, Method

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
BEGIN, END = "<!-- calls: printed by scripts/print_methods.py -->\n", "<!-- end of calls -->\n"


def table() -> str:
    """Return the calls as Markdown."""
    lines = ["| call | of | phase | reads | writes | protocol | arguments | what it does | result |", "|" + "---|" * 9]
    lines += [f"| {' | '.join(_row(method))} |" for method in METHODS.values()]
    return "\n".join(lines) + "\n"


def _row(method: Method) -> list[str]:
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
        "generate": "generates", "pass": "a pass over prompt + response", "loss": "takes a loss", "step": "optimizer",
        "code": "the user's code on the ranks", "state": "a role's state", "look": "looks", "move": "hands weights to a shadow",
        "task": "the user's code over columns", "data": "brings columns",
    }  # fmt: skip
    found = [words[method.work]]
    found += (
        ["balanced by tokens"] * method.balanced + ["learns"] * method.learns + ["changes the weights"] * method.changes_weights
    )
    return [*found, f"needs {', '.join(method.needs)}"] if method.needs else found


def page() -> str:
    """Return docs/methods.md with the table as it is declared."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if page() == PAGE.read_text(encoding="utf-8") else "docs/methods.md is not what scripts/print_methods.py prints")
    PAGE.write_text(page(), encoding="utf-8")
