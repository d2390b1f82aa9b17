"""Breaks the product in some forty places, one at a time, and asks whether the tests notice.

Each mutation (``mutations.toml``) changes one line of a copy of the tree and runs the tests that should fail of it, those of
``make test`` first. Run it by hand: ``python scripts/mutate.py``, ``--list``, ``--only NAME ...``, ``--check`` (exit 1 names the
survivors and the mutations whose line is no longer there), ``--tier`` runs all of ``make test`` for each instead (hours).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "hfsdk",
    "tests",
    "benchmarks",
    "scripts",
    "notebooks",
    "docs",
    "pyproject.toml",
    "README.md",
    "SECURITY.md",
    "requirements",
)


@dataclass(frozen=True)
class Mutation:
    """One changed line, and who should notice."""

    name: str
    file: str
    """Below ``hfsdk/``."""
    old: str
    new: str
    tests: str
    """Arguments of pytest, tests of ``make test``."""
    slow: str = ""
    """Others, of ``make test-all``."""


MUTATIONS = tuple(Mutation(**entry) for entry in tomllib.loads(Path(__file__).with_name("mutations.toml").read_text())["mutation"])


def copied(folder: Path) -> None:
    """Copy the tree that tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
        elif source.is_file():
            shutil.copy(source, folder / name)


def survives(folder: Path, tests: str, tier: bool) -> bool:
    """Run tests on the copy; return whether all pass."""
    import shlex

    chosen = ["-m", "not slow", "-n", "2"] if tier else shlex.split(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen]
    env = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False).returncode == 0


def tried(mutation: Mutation, folder: Path, tier: bool) -> str:
    """Mutate, test, put back; return who noticed."""
    path = folder / "hfsdk" / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        return "its line is no longer there, or there more than once"
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        if not survives(folder, mutation.tests, tier):
            return "killed by make test"
        if mutation.slow and not survives(folder, mutation.slow, tier=False):
            return "killed by make test-all"
        return "SURVIVED"
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    """Try the mutations that were asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tier", action="store_true")
    given = parser.parse_args()
    chosen = [m for m in MUTATIONS if not given.only or any(word in m.name for word in given.only)]
    say = sys.stdout.write
    if given.list:
        say("".join(f"{m.name:48} {m.file}\n" for m in chosen))
        return 0
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        for mutation in chosen:
            began = time.monotonic()
            found[mutation.name] = tried(mutation, Path(folder), given.tier)
            say(f"{mutation.name:48} {found[mutation.name]:28} {time.monotonic() - began:6.0f} s\n")
            sys.stdout.flush()
    killed = {name: word for name, word in found.items() if word.startswith("killed")}
    fast = sum(word == "killed by make test" for word in killed.values())
    say(f"{len(killed)} of {len(found)} killed, {fast} of them by make test\n")
    for name in found.keys() - killed.keys():
        say(f"not killed: {name}: {found[name]}\n")
    return int(given.check and (len(killed) < len(found) or fast < 0.9 * len(found)))


if __name__ == "__main__":
    sys.exit(main())
