"""Counts which lines of ``hfsdk/`` a command runs, in every process that it starts, also those that are killed.

    python scripts/covered.py run out/covered/check -- make check
    python scripts/covered.py compare out/covered/nightly out/covered/check [--lines] [--json FILE] [--check]

A file that all processes map into their memory has one byte per statement; a hook at Python's start (a ``.pth`` file in ``.venv``
while the command runs) writes ``hits[k] = 1`` before statement k of a module of hfsdk. coverage.py keeps its counts in each process
until it ends: workers of Ray are killed, and would lose theirs.

``compare`` prints the share of each room that the first and the second run reached. Target of ``--check``: the second reaches at
most 3 points less of the package than the first.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AT_MOST_LESS = 3.0
"""Points of the whole package."""
PTH = "import os; p = os.environ.get('HFSDK_COVERED'); p and exec(open(p + '/hook.py').read())\n"

HOOK = """
def _install(folder):
    import ast, builtins, importlib.machinery, importlib.util, json, marshal, mmap, os, sys

    with open(folder + "/statements.json") as file:
        statements = json.load(file)
    with open(folder + "/hits", "r+b") as file:
        builtins.__hfsdk_hits__ = mmap.mmap(file.fileno(), 0)

    def counted(tree, numbers):
        def marked(body, documented):
            for place, node in enumerate(body):
                is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
                if str(node.lineno) in numbers and not is_text and not is_future:
                    mark = ast.parse(f"__hfsdk_hits__[{numbers[str(node.lineno)]}] = 1").body[0]
                    for part in ast.walk(mark):
                        if hasattr(part, "lineno"):
                            ast.copy_location(part, node)
                    yield mark
                yield node

        for node in list(ast.walk(tree)):
            for field in ("body", "orelse", "finalbody"):
                body = getattr(node, field, None)
                if isinstance(body, list):
                    setattr(node, field, list(marked(body, field == "body")))
        return tree

    class Counting(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname):
            file = fullname.replace(".", "/")
            file = file + ("/__init__.py" if self.path.endswith("__init__.py") else ".py")
            cached = f"{folder}/code/{fullname}-{os.stat(self.path).st_mtime_ns}"
            try:
                with open(cached, "rb") as stored:
                    return marshal.loads(stored.read())
            except OSError:
                pass
            tree = counted(ast.parse(self.get_data(self.path)), statements.get(file, {}))
            code = compile(tree, self.path, "exec", dont_inherit=True)
            with open(f"{cached}.{os.getpid()}", "wb") as stored:
                stored.write(marshal.dumps(code))
            os.replace(f"{cached}.{os.getpid()}", cached)
            return code

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "hfsdk" or name.startswith("hfsdk."):
                spec = importlib.machinery.PathFinder.find_spec(name, path, target)
                if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
                    spec.loader = Counting(spec.loader.name, spec.loader.path)
                return spec

    sys.meta_path.insert(0, Finder())

_install(p)
"""


def statements(text: str) -> Iterator[int]:
    """Yield the line of every statement but docstrings and imports of the future."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not is_text and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                yield node.lineno


def run(folder: Path, command: list[str]) -> int:
    """Run the command with every process counting into ``folder``; return its exit status."""
    (folder / "code").mkdir(parents=True, exist_ok=True)
    numbered, count = {}, 0
    for path in sorted((ROOT / "hfsdk").rglob("*.py")):
        lines = sorted(set(statements(path.read_text(encoding="utf-8"))))
        numbered[path.relative_to(ROOT).as_posix()] = {line: count + k for k, line in enumerate(lines)}
        count += len(lines)
    (folder / "statements.json").write_text(json.dumps(numbered))
    (folder / "hits").write_bytes(bytes(count))
    (folder / "hook.py").write_text(HOOK)
    pth = Path(sysconfig.get_path("purelib")) / "hfsdk-covered.pth"
    pth.write_text(PTH)
    try:
        return subprocess.run(command, env=os.environ | {"HFSDK_COVERED": str(folder.resolve())}, check=False).returncode
    finally:
        pth.unlink()


def reached(folder: Path) -> dict[str, dict[int, bool]]:
    """Return of every file, by line, whether the run reached it."""
    hits = (folder / "hits").read_bytes()
    numbered = json.loads((folder / "statements.json").read_text())
    return {file: {int(line): bool(hits[k]) for line, k in lines.items()} for file, lines in numbered.items()}


def compare(first: Path, second: Path, show_lines: bool) -> dict[str, list[float]]:
    """Print a table by room; return lines and both shares in percent, by room."""
    before, after = reached(first), reached(second)
    size, one, two = Counter[str](), Counter[str](), Counter[str]()
    lost: dict[str, list[int]] = {}
    for file, lines in before.items():
        parts = file.split("/")
        room = "/".join(parts[1 : 3 if parts[1] == "engine" else 2]) if len(parts) > 2 else "hfsdk"
        later = after.get(file, {})
        for name in (room, "all"):
            size[name] += len(lines)
            one[name] += sum(lines.values())
            two[name] += sum(later.values())
        lost[file] = [line for line, hit in lines.items() if hit and not later.get(line)]
    table = {name: [size[name], 100 * one[name] / size[name], 100 * two[name] / size[name]] for name in sorted(size) if size[name]}
    say = sys.stdout.write
    say(f"{'room':24}{'statements':>11}{'first %':>9}{'second %':>9}{'less':>7}\n")
    for name, (count, a, b) in table.items():
        say(f"{name:24}{count:11,.0f}{a:9.1f}{b:9.1f}{a - b:7.1f}\n")
    if show_lines:
        say("\nreached by the first alone:\n")
        for file, missed in sorted(lost.items(), key=lambda entry: -len(entry[1])):
            if missed:
                say(f"{len(missed):5} {file}: {' '.join(map(str, missed))}\n")
    return table


def main() -> int:
    """Read the arguments, count or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    counting = ways.add_parser("run")
    counting.add_argument("folder", type=Path)
    counting.add_argument("command", nargs=argparse.REMAINDER)
    comparing = ways.add_parser("compare")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    comparing.add_argument("--lines", action="store_true")
    comparing.add_argument("--json", type=Path)
    comparing.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.way == "run":
        return run(options.folder, [word for word in options.command if word != "--"])
    table = compare(options.first, options.second, options.lines)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    less = table["all"][1] - table["all"][2]
    if options.check and less > AT_MOST_LESS:
        sys.stdout.write(f"missed: {less:.1f} points less than the first run, at most {AT_MOST_LESS}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
