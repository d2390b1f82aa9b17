"""Breaks the product in more than a hundred places, one at a time, and asks whether the tests notice.

Each mutation (``mutations.toml``) changes a line or a few in a copy of the tree and runs the tests that should fail of it: those of
``make test`` first, then those of ``make check``. The file of a test that fails is run without any mutation too (once), since one
that fails by itself kills nothing::

    python scripts/mutate.py -j 2 --json out/mutations.json     # all, an hour or two; goes on where it was stopped
    python scripts/mutate.py -j 2 --json FILE --minutes 30      # a share: those first that FILE knows least lately
    python scripts/mutate.py --only "KL" --whole                # all of `make test` and `make check` where the named tests pass
    python scripts/mutate.py --stale                            # only see whether every line is still there
    python scripts/mutate.py --check                            # exit 1 where too little is killed, or a line is gone
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = Path(__file__).with_name("mutations.toml")
NOT_COPIED = (".git", ".venv*", "out", "build", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".ipynb_checkpoints")
TIERS = ("test", "check")
"""What ``make test`` and ``make check`` run, for pytest's ``--tier``."""
LONGEST_S = 3600
"""A run of tests that takes longer hangs of the mutation, which kills it."""
FROM_MAKE_TEST = 0.9
"""The share of mutations that ``make test`` alone should kill."""
PASSED, NONE_CHOSEN = 0, 5
"""pytest's exit codes of a run in which nothing failed."""
FAILED_LINE = re.compile(r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
STOPPING = threading.Event()
"""Set when this script is interrupted: a run of tests that is ended for that says nothing."""
STALE, FAILS_ANYWAY, SURVIVED = "stale", "its tests fail without it", "SURVIVED"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A changed line or a few, and who should notice."""

    name: str
    """What a user would suffer from."""
    file: str
    """Below ``hfsdk/``."""
    old: str
    new: str
    tests: str
    """Arguments of pytest: files mostly, or tests of them."""

    @property
    def room(self) -> str:
        """The folder the file is in: below ``hfsdk/``, and one further below ``engine/`` and ``planner/``."""
        folders = self.file.split("/")[:-1]
        depth = 2 if folders[:1] in (["engine"], ["planner"]) else 1
        return "/".join(folders[:depth]) or self.file

    @property
    def text(self) -> str:
        """A fingerprint of the whole entry: with another one it is tried again."""
        return hashlib.sha256("\0".join(asdict(self).values()).encode()).hexdigest()[:16]

    def is_stale(self, package: Path) -> bool:
        """Return whether the line is no longer there, or there more than once."""
        path = package / self.file
        return not path.is_file() or path.read_text(encoding="utf-8").count(self.old) != 1 or self.old == self.new


@dataclass(frozen=True)
class Finding:
    """Who noticed a mutation."""

    name: str
    room: str
    who: str
    """``make test``, ``make check``, or one of :data:`STALE`, :data:`FAILS_ANYWAY`, :data:`SURVIVED`."""
    test: str
    """The test that failed first."""
    seconds: float
    text: str
    """Of the entry, :attr:`Mutation.text`."""
    when: float = 0.0
    """Seconds since the epoch."""

    @property
    def killed(self) -> bool:
        """Whether a test noticed it."""
        return self.who.startswith("make ")


def entries(path: Path = ENTRIES) -> tuple[Mutation, ...]:
    """Read the mutations."""
    return tuple(Mutation(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutation"])


class Copy:
    """A copy of the tree whose tests import the copy, in this process's stead and in all that they start."""

    def __init__(self, source: Path, folder: Path, passing: set[tuple[str, ...]]) -> None:
        self.folder = folder
        self._passing = passing
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True, dirs_exist_ok=True)
        self._results = folder / "out" / "mutation.jsonl"

    def env(self) -> dict[str, str]:
        """Return the environment in which ``hfsdk`` is the copy's, before the one that the ``.pth`` of the venv names."""
        path = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}

    def check(self) -> None:
        """Make sure of what the copy's processes import.

        Raises:
            RuntimeError: it is not the copy's.
        """
        command = [sys.executable, "-c", "import hfsdk; print(hfsdk.__file__)"]
        out = subprocess.run(command, cwd=self.folder, env=self.env(), capture_output=True, text=True, check=True).stdout
        if Path(out.strip()).parent != self.folder / "hfsdk":
            raise RuntimeError(f"tests of {self.folder} import {out.strip()}")

    def failing(self, arguments: Sequence[str], tier: str, *, whole: bool = False) -> list[str] | None:
        """Run tests until the first fails; return its id (none where pytest cannot name one), or ``None`` where all pass."""
        self._results.parent.mkdir(exist_ok=True)
        chosen = ["-n", "2"] if whole else ["-n", "0", *arguments]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--tier={tier}", *chosen]
        code, out = self._run([*command, f"--results={self._results}"])
        if code in (PASSED, NONE_CHOSEN):
            return None
        return [FAILED_LINE.findall(out)[0]] if FAILED_LINE.search(out) else []

    def tried(self, mutation: Mutation, whole: bool) -> tuple[str, str]:
        """Mutate, test, put back; return who noticed, and by which test."""
        path = self.folder / "hfsdk" / mutation.file
        text = path.read_text(encoding="utf-8")
        runs = [(shlex.split(mutation.tests), tier, False) for tier in TIERS] + [([], tier, True) for tier in TIERS if whole]
        self._results.unlink(missing_ok=True)  # what passed with this mutation is not run a second time for the larger tier
        for arguments, tier, all_tests in runs:
            path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
            try:
                failing = self.failing(arguments, tier, whole=all_tests)
            finally:
                path.write_text(text, encoding="utf-8")
            if failing is not None:
                test = "".join(failing)
                self._results.unlink(missing_ok=True)
                again = [one.partition("::")[0] for one in failing]  # the whole file: a test may fail after others alone
                passes = self._passes(again or arguments, tier, whole=all_tests and not again)
                return (f"make {tier}" if passes else FAILS_ANYWAY, test)
        return SURVIVED, ""

    def _passes(self, arguments: Sequence[str], tier: str, *, whole: bool) -> bool:
        """Whether tests pass without a mutation; those of which any copy has seen it are not run again."""
        known = (tier, *arguments, *["whole"] * whole)
        if known not in self._passing and self.failing(arguments, tier, whole=whole) is None:
            self._passing.add(known)
        return known in self._passing

    def _run(self, command: list[str]) -> tuple[int, str]:
        """Run a command in the copy; end whatever it leaves behind, since some mutations are leaks of processes."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
            if STOPPING.is_set():
                raise KeyboardInterrupt
            process = subprocess.Popen(command, cwd=self.folder, env=self.env(), stdout=out, stderr=out, start_new_session=True)
            try:
                code = process.wait(LONGEST_S)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                self.end_processes()
            if STOPPING.is_set():
                raise KeyboardInterrupt
            out.seek(0)
            return code, out.read()

    def end_processes(self) -> None:
        """End all processes that were started with the copy's ``PYTHONPATH``."""
        mark = f"PYTHONPATH={self.folder}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if any(part.startswith(mark) for part in (entry / "environ").read_bytes().split(b"\0")):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:  # it has ended meanwhile, or is somebody else's
                continue


class Findings:
    """What was found so far, in a file if there is one: a run that is stopped goes on from there."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        known = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else []
        self._by_name = {one["name"]: Finding(**one) for one in known}

    def of(self, mutations: Sequence[Mutation]) -> list[Finding]:
        """Return what is known of mutations whose entry is still the same; what says nothing of them is not."""
        found = [(m, self._by_name.get(m.name)) for m in mutations]
        return [one for m, one in found if one is not None and one.text == m.text and one.who not in (STALE, FAILS_ANYWAY)]

    def add(self, finding: Finding) -> None:
        """Write one down, and say it."""
        with self._lock:
            self._by_name[finding.name] = finding
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                part = self._path.with_suffix(".part")
                part.write_text(json.dumps([asdict(one) for one in self._by_name.values()], indent=1), encoding="utf-8")
                part.replace(self._path)
            say(row(finding))

    def now(self, mutations: Sequence[Mutation], since: float = 0.0) -> list[Finding]:
        """Return all that was found of mutations from a time on, stale ones as well."""
        found = [self._by_name[m.name] for m in mutations if m.name in self._by_name]
        return [one for one in found if one.when >= since]

    def oldest_first(self, mutations: Sequence[Mutation]) -> list[Mutation]:
        """Return mutations in the order of when they were tried last, those first of which nothing is known."""
        when = {one.name: one.when for one in self.of(mutations)}
        return sorted(mutations, key=lambda m: when.get(m.name, 0.0))


def say(text: str) -> None:
    """Write to the terminal at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def row(one: Finding) -> str:
    """Return a line of the table."""
    return f"{one.name:58} {one.room:20} {one.who:26} {one.seconds:6.0f} s  {one.test}\n"


def stale(mutations: Sequence[Mutation]) -> Iterator[Mutation]:
    """Yield those whose line is no longer in this tree, or there more than once."""
    return (m for m in mutations if m.is_stale(ROOT / "hfsdk"))


def try_all(mutations: Sequence[Mutation], findings: Findings, jobs: int, whole: bool, until: float) -> None:
    """Try each mutation in one of as many copies as there are jobs, all of the tree as it is now; begin none after ``until``."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        source, made, passing = ROOT, [], set[tuple[str, ...]]()
        for number in range(jobs):
            copy = Copy(source, Path(folder).resolve() / str(number), passing)
            copy.check()
            copies.put(copy)
            made.append(copy)
            source = Path(folder).resolve() / "0"

        def one(mutation: Mutation) -> None:
            if time.time() > until:
                return
            copy, began = copies.get(), time.monotonic()
            try:
                who, test = (STALE, "") if mutation.is_stale(copy.folder / "hfsdk") else copy.tried(mutation, whole)
            finally:
                copies.put(copy)
            seconds = round(time.monotonic() - began, 1)
            findings.add(Finding(mutation.name, mutation.room, who, test, seconds, mutation.text, time.time()))

        pool = ThreadPoolExecutor(jobs)
        try:
            for done in [pool.submit(one, mutation) for mutation in mutations]:
                done.result()
        finally:
            STOPPING.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in made:
                copy.end_processes()
            pool.shutdown()


def told(found: Sequence[Finding], num_asked: int, from_make_test: float = FROM_MAKE_TEST) -> bool:
    """Say how many were killed, by what, and which were not; return whether that is enough."""
    killed = [one for one in found if one.killed]
    fast = sum(one.who == "make test" for one in killed)
    say(f"{len(killed)} of {num_asked} killed, {fast} of them by make test\n")
    for one in found:
        if not one.killed:
            say(f"not killed: {one.name}: {one.who} {one.test}\n")
    return len(killed) == num_asked and fast >= from_make_test * num_asked


def main() -> int:
    """Try the mutations that were asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="names, rooms and tests; runs nothing")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="mutations whose name, or file, has one of these words"
    )
    parser.add_argument("-j", "--jobs", type=int, default=1, help="as many at once, each in a copy of its own")
    parser.add_argument("--whole", action="store_true", help="all tests of a tier where the named ones pass (hours)")
    parser.add_argument("--stale", action="store_true", help="only look whether every line is there, once")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 where one survives, or `make test` kills fewer than nine of ten"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write down what is found, and go on from what is there")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="begin none after so many, and try again what is known, the oldest first"
    )
    parser.add_argument("--entries", type=Path, default=ENTRIES, metavar="FILE", help="read mutations from elsewhere")
    given = parser.parse_args()
    chosen = [m for m in entries(given.entries) if not given.only or any(word in m.name or word in m.file for word in given.only)]
    if given.list:
        say("".join(f"{m.name:58} {m.room:20} {m.tests}\n" for m in chosen))
        return 0
    if given.stale:
        gone = list(stale(chosen))
        say("".join(f"stale: {m.name}: hfsdk/{m.file} does not have its line once\n" for m in gone))
        return int(bool(gone))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    findings, began = Findings(given.json), time.time()
    if given.minutes is not None:
        try_all(findings.oldest_first(chosen), findings, given.jobs, given.whole, began + 60 * given.minutes)
        tried = findings.now(chosen, since=began)
        return int(not told(tried, len(tried), 0.0) and given.check)  # of a share the quick ones may be fewer
    known = findings.of(chosen)
    say("".join(map(row, known)))
    try_all([m for m in chosen if m.name not in {one.name for one in known}], findings, given.jobs, given.whole, math.inf)
    return int(not told(findings.now(chosen), len(chosen)) and given.check)


if __name__ == "__main__":
    sys.exit(main())
