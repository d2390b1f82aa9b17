"""Which tier each test belongs to, read from ``tiers.toml``; and the results of a run that may be interrupted."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAP = Path(__file__).with_name("tiers.toml")
NAMES = ("laws", "unit", "engine", "system", "nightly")
RUNS = (*NAMES, "test", "check")
"""What ``--tier`` takes: a tier, or what ``make test`` and ``make check`` run."""


@dataclass(frozen=True)
class Tiers:
    """The map: folders, files or tests (the beginning of their ids) to tiers; the longest beginning counts."""

    by_prefix: dict[str, str]
    slice: tuple[str, ...]
    """Beginnings of the ids of engine and system tests that `make test` runs too."""

    def tier_of(self, nodeid: str) -> str:
        """Return the tier of a test, file or folder.

        Raises:
            KeyError: no entry begins its id.
        """
        return self.by_prefix[max((p for p in self.by_prefix if _begins(nodeid, p)), key=len)]

    def ids_of(self, run: str) -> Callable[[str], bool]:
        """Return whether a run takes the test of an id."""
        if run == "test":
            return lambda nodeid: self.tier_of(nodeid) in ("laws", "unit") or any(_begins(nodeid, p) for p in self.slice)
        if run == "check":
            return lambda nodeid: self.tier_of(nodeid) != "nightly"
        return lambda nodeid: self.tier_of(nodeid) == run

    def may_hold(self, file: str, run: str) -> bool:
        """Return whether some test of a file may belong to a run: by its own tier, or an entry for one of its tests."""
        takes = self.ids_of(run)
        inside = [p for p in (*self.by_prefix, *self.slice) if p.startswith(f"{file}::")]
        return takes(file) or any(map(takes, inside))


def _begins(nodeid: str, prefix: str) -> bool:
    """Whole names only (``test_a`` does not begin ``test_ab``, but ``test_a[x]``), of a parameter also a part."""
    rest = nodeid[len(prefix) :]
    return nodeid.startswith(prefix) and (not rest or prefix.endswith("/") or "[" in prefix or rest[0] in ":[/")


def read(path: Path = MAP) -> Tiers:
    """Read the map."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    by_prefix = {f"tests/{prefix}": tier for tier in NAMES for prefix in tables[tier]["tests"]}
    return Tiers(by_prefix, tuple(f"tests/{prefix}" for prefix in tables["slice"]["tests"]))


TIERS = read()


class Results:
    """A file with a line of JSON for each test that ended: its id, outcome and seconds."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._seconds: dict[str, float] = {}
        self._outcomes: dict[str, str] = {}

    def add(self, report) -> None:
        """Take pytest's report of a test's set-up, call or teardown; write the line after the teardown."""
        nodeid = report.nodeid
        self._seconds[nodeid] = self._seconds.get(nodeid, 0.0) + report.duration
        if report.failed or (report.skipped and self._outcomes.get(nodeid) != "failed"):
            self._outcomes[nodeid] = report.outcome
        if report.when == "teardown":
            outcome = self._outcomes.pop(nodeid, "passed")
            line = {"test": nodeid, "outcome": outcome, "seconds": round(self._seconds.pop(nodeid), 3)}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def results_in(path: Path) -> Iterator[dict[str, str | float]]:
    """Yield what a file of results holds; a line that was cut off is none."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.endswith("}"):
            yield json.loads(line)


def passed_in(path: Path) -> frozenset[str]:
    """Return the ids of tests that passed or were skipped, when they ran last."""
    last = {str(line["test"]): line["outcome"] for line in results_in(path)}
    return frozenset(test for test, outcome in last.items() if outcome != "failed")
