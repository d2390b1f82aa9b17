"""Prints how the package is built: tree, lines, what is over a limit; ``--check`` exits 1 for new ones.

Limits: functions of 60 lines without their docstring, and 16 entries in ``hfsdk/``. A module holds one idea, however long that is.
What is still over a limit stands in ``KNOWN``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hfsdk"
MOST = {"function": 60, "entries": 16}
KNOWN: frozenset[str] = frozenset()
"""Still over a limit; nothing new joins them."""


def modules() -> Iterator[tuple[str, str]]:
    """Yield every module's path below the package, and its text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")


def over_limits() -> dict[str, int]:
    """Return what is over a limit, by name, and its lines or entries."""
    found = {}
    for _, text in modules():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1 - _docstring_lines(node)
                if lines > MOST["function"]:
                    found[f"function {node.name}"] = lines
    entries = [p for p in PACKAGE.iterdir() if p.name != "__pycache__"]
    if len(entries) > MOST["entries"]:
        found["entries of hfsdk/"] = len(entries)
    return found | long_js_functions()


MOST_JS = 150
"""Lines of a function of JavaScript, with what is nested in it."""


def long_js_functions() -> dict[str, int]:
    """Return the functions of JavaScript that are over their limit, as ``js FILE FUNCTION``, and their lines.

    The files are formatted: a function begins at a line that ends with ``{`` and has ``function`` or ``=> {``, and ends at the
    first later line that is indented no deeper.
    """
    found = {}
    for path in sorted(PACKAGE.rglob("*.js")):
        every = path.read_text(encoding="utf-8").split("\n")
        depths = [len(line) - len(line.lstrip()) if line.strip() else sys.maxsize for line in every]
        for start, line in enumerate(every):
            if line.endswith("{") and re.search(r"\bfunction\b|=> \{$", line):
                end = next(k for k in range(start + 1, len(every)) if depths[k] <= depths[start])
                name = re.search(r"function\*? (\w+)|([\w.]+)(?: =|:) [^=]*=> \{$", line)
                called = (name[1] or name[2]) if name else f"of line {start + 1}"
                if end - start + 1 > MOST_JS:
                    found[f"js {path.name} {called}"] = end - start + 1
    return found


def _docstring_lines(node: ast.AST) -> int:
    body = node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
    first = body[0] if body else None
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return (first.end_lineno or 0) - first.lineno + 1 if text and first is not None else 0


def lines() -> dict[str, int]:
    """Return the lines of Python (code, docstrings, comments and empty ones apart) and of JS and CSS."""
    found: Counter[str] = Counter()
    for _, text in modules():
        tree = ast.parse(text)
        documented = sum(_docstring_lines(node) for node in ast.walk(tree))
        every = text.split("\n")[:-1]
        empty = sum(not line.strip() for line in every)
        comments = sum(line.lstrip().startswith("#") for line in every)
        found += Counter({"Python": len(every), "docstrings": documented, "comments": comments, "empty": empty})
    found["code"] = found["Python"] - found["docstrings"] - found["comments"] - found["empty"]
    found["JS and CSS"] = sum(p.read_text().count("\n") for p in PACKAGE.rglob("*") if p.suffix in (".js", ".css"))
    return dict(found)


def tree() -> list[str]:
    """Return the tree two folders deep, with the lines of each."""
    sizes: Counter[tuple[str, ...]] = Counter()
    for name, text in modules():
        parts = tuple(name.split("/"))
        for depth in range(1, min(3, len(parts)) + (len(parts) < 3)):
            sizes[parts[:depth]] += text.count("\n")
    return [f"{'  ' * (len(parts) - 1)}{parts[-1]:24} {count:6,}" for parts, count in sorted(sizes.items())]


def main() -> int:
    """Print it all."""
    over = over_limits()
    say = sys.stdout.write
    say(
        "\n".join(tree())
        + "\n\nlines: "
        + ", ".join(f"{name} {count:,}" for name, count in lines().items())
        + "\n\nover a limit:\n"
    )
    say("".join(f"  {name:44} {count}{'' if name in KNOWN else '  NEW'}\n" for name, count in sorted(over.items())))
    for name in sorted(KNOWN - set(over)):
        say(f"no longer over a limit, take it out of KNOWN: {name}\n")
    return int("--check" in sys.argv and set(over) != KNOWN)


if __name__ == "__main__":
    sys.exit(main())
