"""Prints how the package is built: tree, lines, what breaks a law of its form; ``--check`` exits 1 for new ones.

The laws: a function has at most 60 lines without its docstring, one of JavaScript 150; a module says its one idea in its first
sentence, however long it is; no module under 80 lines is there for one sibling alone; a class name means one thing in the package.
``KNOWN`` lists what still breaks one. Words: docstrings that begin as a fragment, and names of a story; what is left of these
stands in ``KNOWN_WORDS``, folder by folder, and may only fall.
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
MOST_LINES = 60
"""Of a function, without its docstring."""
LEAST_LINES = 80
"""A module with fewer lines, which one module of its folder alone imports, belongs into that one."""
WITH_THEIR_MODULE = frozenset({"Advantages", "AdvantageOptions"})
"""Classes that every algorithm has, called with their module: ``grpo.Advantages``."""
KNOWN: frozenset[str] = frozenset()
"""Still against a law; nothing new joins them."""


def modules() -> Iterator[tuple[str, str]]:
    """Yield every module's path below the package, and its text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")


def over_limits() -> dict[str, int]:
    """Return what breaks a law, by name, with its lines or how often it is there."""
    return _long_functions() | long_js_functions() | _silent_modules() | _small_modules() | _ambiguous_classes()


def _long_functions() -> dict[str, int]:
    long = {}
    for _, text in modules():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1 - _docstring_lines(node)
                if lines > MOST_LINES:
                    long[f"function {node.name}"] = lines
    return long


def _silent_modules() -> dict[str, int]:
    """Return modules whose docstring has no first sentence of three words or more."""
    sentences = {name: (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0] for name, text in modules()}
    return {f"module {name} says nothing": len(said.split()) for name, said in sentences.items() if len(said.split()) < 3}


def _small_modules() -> dict[str, int]:
    texts = dict(modules())
    importers: dict[str, set[str]] = {name: set() for name in texts}
    for name, text in texts.items():
        for imported in _imported(text, texts):
            importers[imported].add(name)
    small = {}
    for name, by in importers.items():
        lines, reader = texts[name].count("\n"), next(iter(by), "")
        sibling = Path(reader).parent == Path(name).parent and Path(reader).name != "__init__.py"
        if lines < LEAST_LINES and len(by) == 1 and sibling and Path(name).name != "__init__.py":
            small[f"module {name} is for {reader} alone"] = lines
    return small


def _imported(text: str, texts: dict[str, str]) -> set[str]:
    """Return the files of the package that a module imports, lazily or for types too."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    files = {f"{name.removeprefix('hfsdk.').replace('.', '/')}.py" for name in names}
    return files & texts.keys()


def _ambiguous_classes() -> dict[str, int]:
    classes: Counter[str] = Counter()
    for _, text in modules():
        classes.update(node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    return {f"class {name}": times for name, times in classes.items() if times > 1 and name not in WITH_THEIR_MODULE}


MOST_JS = 150
"""Lines of a function of JavaScript, with what is nested in it."""


def long_js_functions() -> dict[str, int]:
    """Return the functions of JavaScript that are over their limit, as ``js FILE FUNCTION``, and their lines.

    The files are formatted: a function begins at a line that ends with ``{`` and has ``function`` or ``=> {``, and ends at the
    first later line that is indented no deeper.
    """
    long = {}
    for path in sorted(PACKAGE.rglob("*.js")):
        every = path.read_text(encoding="utf-8").split("\n")
        depths = [len(line) - len(line.lstrip()) if line.strip() else sys.maxsize for line in every]
        for start, line in enumerate(every):
            if line.endswith("{") and re.search(r"\bfunction\b|=> \{$", line):
                end = next(k for k in range(start + 1, len(every)) if depths[k] <= depths[start])
                name = re.search(r"function\*? (\w+)|([\w.]+)(?: =|:) [^=]*=> \{$", line)
                called = (name[1] or name[2]) if name else f"of line {start + 1}"
                if end - start + 1 > MOST_JS:
                    long[f"js {path.name} {called}"] = end - start + 1
    return long


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


# -- words

_FIRST_WORDS = """
Of As By To In With From For Than At On If When While Since Because Until Before After Beside Besides Between Among
Against Above Below Beyond Without Within Under Over Through Where Who Whoever What Whatever Whose Which That Those
These And Or But Nor So Not Also Too Only
"""
FRAGMENTS = frozenset(_FIRST_WORDS.split())
"""First words of a docstring that has no subject, or means nothing without the line above it."""
STORY_NAMES = frozenset(["found", "told", "asked", "taken", "kept", "held", "known", "given", "one", "mine", "whose", "lot"])
"""Names of variables and parameters that say nothing of what they hold."""
KNOWN_WORDS: dict[str, tuple[int, int]] = {
    ".": (3, 6),
    "core": (28, 20),
}
"""Folder -> docstrings that still begin as a fragment, and story names that are still bound. Lower a number where it has fallen."""


def folder_of(module: str) -> str:
    """Return the room of a module: its folder, one deeper below ``engine/``; a file of ``hfsdk/`` itself is in ``"."``."""
    folders = module.split("/")[:-1]
    return "/".join(folders[: 2 if folders[:1] == ["engine"] else 1]) or "."


def fragments(text: str) -> list[tuple[int, str]]:
    """Return (line, first word) of every docstring that begins as a fragment: modules, classes, functions, strings below fields."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                word = re.match(r"\W*(\w+)", statement.value.value)
                if word and word[1] in FRAGMENTS:
                    lines.append((statement.lineno, word[1]))
    return sorted(lines)


def story_names(text: str) -> list[tuple[int, str]]:
    """Return (line, name) of every story name that is bound: a variable, a parameter or a private attribute, but no field."""
    tree = ast.parse(text)
    bound = []
    fields = {
        id(target)
        for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
        for statement in node.body if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    }  # fmt: skip
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            name = node.name or ""
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.startswith("_"):
            name = node.attr
        if name.strip("_") in STORY_NAMES:
            bound.append((node.lineno, name))
    return sorted(bound)


def words() -> dict[str, tuple[list[str], list[str]]]:
    """Return, by folder, the places of its fragments and of its story names: ``"core/rows.py:3: Of"``."""
    places: dict[str, tuple[list[str], list[str]]] = {}
    for module, text in modules():
        here = places.setdefault(folder_of(module), ([], []))
        for kind, lines in zip(here, (fragments(text), story_names(text)), strict=True):
            kind += [f"{module}:{line}: {word}" for line, word in lines]
    return places


def new_words() -> list[str]:
    """Return a line for each folder with more fragments or story names than :data:`KNOWN_WORDS` has, with their places."""
    lines = []
    for folder, places in sorted(words().items()):
        for what, here, most in zip(("fragments", "story names"), places, KNOWN_WORDS.get(folder, (0, 0)), strict=True):
            if len(here) > most:
                lines.append(f"{folder}: {len(here)} {what}, {most} known: {', '.join(here)}")
    return lines


def main() -> int:
    """Print it all."""
    over = over_limits()
    say = sys.stdout.write
    say(
        "\n".join(tree())
        + "\n\nlines: "
        + ", ".join(f"{name} {count:,}" for name, count in lines().items())
        + "\n\nagainst a law:\n"
    )
    say("".join(f"  {name:44} {count}{'' if name in KNOWN else '  NEW'}\n" for name, count in sorted(over.items())))
    for name in sorted(KNOWN - set(over)):
        say(f"no longer against a law, take it out of KNOWN: {name}\n")
    counts = {folder: (len(starts), len(names)) for folder, (starts, names) in words().items()}
    more = new_words()
    say("\nfragments and story names by folder:\n")
    say("".join(f"  {folder:24} {starts:4} {names:4}\n" for folder, (starts, names) in sorted(counts.items()) if starts or names))
    say("".join(f"NEW {line}\n" for line in more))
    for folder, known in sorted(KNOWN_WORDS.items()):
        if counts.get(folder, (0, 0)) != known and all(a <= b for a, b in zip(counts.get(folder, (0, 0)), known, strict=True)):
            say(f"fallen, write it into KNOWN_WORDS: {folder} {counts.get(folder, (0, 0))}\n")
    return int("--check" in sys.argv and (set(over) != KNOWN or bool(more)))


if __name__ == "__main__":
    sys.exit(main())
