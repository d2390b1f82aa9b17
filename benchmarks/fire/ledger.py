"""What was tried and what became of it: trials, counts by kind, targets, the sum of several runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import Report, table

from fire.own import LORA

FAILURES = {
    "unusable": "the session (or the next one) could not be used afterwards",
    "wrong state": "weights, counters or history are none of the known ones, and nothing said so",
    "bare error": "an error that is neither an HfsdkError nor a TypeError or ValueError that names the argument",
    "hang": "longer than the stated ceiling; the stacks are in the JSON",
    "left behind": "a process, a folder or a segment of /dev/shm that is still there 10 s later",
    "ended": "the process ended by itself",
}
"""Every failure is one of these."""

FULL_MINUTES = 60.0
"""What the targets are for, in one run or the sum of several."""
RATES_MINUTES = 10.0
"""A shorter run has to try each of them once."""


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    name: str
    what: str
    target: int = 0
    """Trials in ``FULL_MINUTES``."""
    tags: Mapping[str, int] = field(default_factory=dict)
    """Tag -> how many of these trials have it."""
    adapters: bool = False
    """Whether its sessions have roles with adapters in some rounds."""


KINDS = (
    Kind(
        "kills", "SIGKILL of a worker in a call, in place, save, load, snapshot, rewind, in what looks and what exports", 60,
        {"place": 20, "explain_gap": 3, "first_bad": 2, "sync": 1, "probe": 1, "export": 1, "merge": 1, "beside": 1, LORA: 20},
        adapters=True,
    ),
    Kind("cells", "SIGINT in a cell of a session with workers", adapters=True),
    Kind("lines", "SIGINT at a line of hfsdk's code, simulated session"),
    Kind("starts", "SIGINT in a fresh interpreter: its import, first train, place, load and save"),
    Kind("openings", "SIGINT inside hf.Session(...)"),
    Kind("kernel", "interrupts of a Jupyter kernel"),
    Kind("drivers", "kill -9 of the user's process", 30, {"save": 20, LORA: 10}, adapters=True),
    Kind("damage", "a checkpoint with one damaged file", 60),
    Kind("disk", "a full disk, or a limit on the size of files"),
    Kind("together", "several threads, sessions and processes at once"),
    Kind("numbers", "NaN in used weights, empty responses, batches of one, uneven dp"),
    Kind(
        "attach", "SIGKILL of a kernel that has a kept session, of its keeper and workers; taking over, closing", 35,
        {"kernel": 30, LORA: 10}, adapters=True,
    ),
    Kind("serve", "kept sessions from afar: cut connections, a server that is killed, garbage", 100, {"cut": 100}, adapters=True),
    Kind("fuzz", "a public call with hypothesis's values", 10_000),
)  # fmt: skip
WORDS = {
    "place": "in `place`", "save": "in or near a save", "kernel": "kernels", "cut": "cuts", "start-up": "in start-ups",
    LORA: "with LoRA roles", "sync": "in taking new weights to the rollout", "merge": "in exports with adapters merged",
    "export": "in exports", "beside": "in generations beside a snapshot", "explain_gap": "in `explain_gap`",
    "first_bad": "in `first_bad`", "probe": "in `probe`",
}  # fmt: skip
"""How tags are said in docs/reliability.md."""

BY_NAME = {kind.name: kind for kind in KINDS}

INTERRUPTS = ("cells", "lines", "starts", "openings", "kernel")
INTERRUPTS_TARGET, STARTS_TAG, STARTS_TARGET = 500, "start-up", 50
"""Interrupts have one target over all their kinds, and one for those in start-ups."""


@dataclass(frozen=True)
class Trial:
    """One thing that was tried."""

    kind: str
    trial: int
    what: str
    """In words, with the moment."""
    seconds: float
    failure: str = ""
    """One of ``FAILURES``; empty where it held."""
    why: str = ""
    tags: tuple[str, ...] = ()
    count: int = 1
    """Calls or signals in it."""
    num_failed: int = 0
    """Of these; the others held."""
    seed: int = 0

    def failure_text(self, num_lines: int = 12) -> str:
        """Return what did not hold, why, and what repeats it."""
        why = [f"    {line[:400]}" for line in self.why.strip().splitlines()[:num_lines]]
        return "\n".join([f"FAILED ({self.failure}) {self.kind} {self.trial}: {self.what}", *why, f"    {self.reproduction()}"])

    def reproduction(self) -> str:
        """Return the command that tries it once more."""
        lora = " --lora" if LORA in self.tags else ""
        return f"python benchmarks/under_fire.py --seed {self.seed} --only {self.kind} --trial {self.trial}{lora}"


@dataclass
class Ledger:
    """All trials of a run, or of several."""

    minutes: float
    trials: list[Trial] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Seed and minutes of the runs that were put together."""

    @classmethod
    def read(cls, path: str | Path) -> Ledger:
        """Read a run's JSON."""
        kept = json.loads(Path(path).read_text())
        trials = [Trial(**{**trial, "tags": tuple(trial["tags"])}) for trial in kept["trials"]]
        return cls(float(kept["minutes"]), trials, list(kept["runs"]))

    @classmethod
    def merged(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """Put several runs together."""
        every = list(ledgers)
        return cls(
            sum(one.minutes for one in every), [t for one in every for t in one.trials], [r for one in every for r in one.runs]
        )

    def tried(self, *kinds: str, tag: str = "") -> int:
        """Return how much of some kinds was tried."""
        return sum(t.count for t in self.trials if t.kind in kinds and (not tag or tag in t.tags))

    def num_failed(self, kind: str) -> int:
        """Return how much of a kind did not hold."""
        return sum(t.num_failed for t in self.trials if t.kind == kind)

    @property
    def failed(self) -> list[Trial]:
        """Trials that did not hold."""
        return [t for t in self.trials if t.failure]

    def targets(self) -> list[tuple[str, int, int]]:
        """Return (name, tried, what has to be tried): all of it in an hour, in less time half of the share, in minutes one."""
        part = 1.0 if self.minutes >= FULL_MINUTES else self.minutes / FULL_MINUTES / 2
        part = part if self.minutes >= RATES_MINUTES else 0.0  # how much comes about then is the machine's pace
        found = []
        for kind in KINDS:
            if kind.target:
                found.append((f"{kind.name} tried", self.tried(kind.name), kind.target))
            wanted_tags = ((tag, wanted) for tag, wanted in kind.tags.items() if wanted * part >= 1)
            found += [(f"{kind.name} ({tag}) tried", self.tried(kind.name, tag=tag), wanted) for tag, wanted in wanted_tags]
        found.append(("interrupts tried", self.tried(*INTERRUPTS), INTERRUPTS_TARGET))
        found.append(("interrupts in start-ups tried", self.tried(*INTERRUPTS, tag=STARTS_TAG), STARTS_TARGET))
        untargeted = [kind for kind in KINDS if not kind.target]
        found += [(f"{kind.name} tried", self.tried(kind.name), 1) for kind in untargeted]
        return [(name, tried, max(1, int(wanted * part))) for name, tried, wanted in found]

    def report(self, only: Sequence[str] = ()) -> Report:
        """Return the figures with their targets; with ``only`` nothing has to be tried but these."""
        report = Report("under fire", "at most two workers of one thread at a time", details=self.as_dict())
        for name, tried, wanted in self.targets():
            if not only or name.split()[0] in only:
                report.add(name, tried, at_least=wanted)
        for kind in KINDS:
            if not only or kind.name in only:
                report.add(f"{kind.name} failed", self.num_failed(kind.name), at_most=0)
        return report

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"minutes": self.minutes, "runs": self.runs, "trials": [asdict(t) for t in self.trials]}

    def counts(self) -> str:
        """Return kind | tried | held | failed as text."""
        rows = []
        for kind in KINDS:
            tried, failed = self.tried(kind.name), self.num_failed(kind.name)
            some = ", ".join(f"{tag} {self.tried(kind.name, tag=tag)}" for tag in kind.tags)
            tagged = f" ({some})" if some else ""
            rows.append((kind.name, kind.what, f"{tried}{tagged}", str(tried - failed), str(failed)))
        return table(("kind", "what", "tried", "held", "failed"), rows)

    def markdown(self) -> str:
        """Return the table of docs/reliability.md, of the kinds that were tried."""
        lines = ["| kind | tried | held | failed |", "|---|---|---|---|"]
        for kind in KINDS:
            tried, failed = self.tried(kind.name), self.num_failed(kind.name)
            if not tried:
                continue
            tags = [*kind.tags, *([STARTS_TAG] if kind.name in ("cells", "lines", "kernel") else [])]
            some = [f"{count:,} {WORDS[tag]}" for tag in tags if (count := self.tried(kind.name, tag=tag))]
            words = f"{kind.what} (of them {', '.join(some)})" if some else kind.what
            lines.append(f"| {words} | {tried:,} | {tried - failed:,} | {failed:,} |")
        return "\n".join(lines)

    def failures(self) -> str:
        """Return each failure with what repeats it."""
        return "\n".join(t.failure_text() for t in self.failed)
