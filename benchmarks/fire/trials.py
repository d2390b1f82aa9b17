"""What a child process of the campaign does: trials one after the other, each told to a log that the campaign reads.

A line of the log is JSON: ``{"begins": ..., "ceiling_s": ...}`` when a trial starts, and the trial when it ends. Whoever reads it
ends the process when no end comes within the ceiling, after SIGUSR1 has had it write its stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fire import own
from fire.ledger import BY_NAME, Trial

NEWS_S = 900.0
"""Longest time in which a child may say nothing while it starts its sessions."""


CLOSE_S = 180.0
"""Ceiling for closing what the trials shared."""


class TrialError(Exception):
    """What was tried did not hold."""

    def __init__(self, failure: str, why: str) -> None:
        super().__init__(failure, why)
        self.failure, self.why = failure, why


@dataclass
class Note:
    """What a trial says about itself while it runs."""

    kind: str
    number: int
    rng: random.Random
    what: str = ""
    tags: list[str] = field(default_factory=list)
    count: int = 1
    num_failed: int = 1
    """Of ``count``, where not all held."""
    say: Callable[[str], None] = lambda what: None

    def doing(self, what: str) -> None:
        """Say what is tried; it is in the report should the process hang in it."""
        self.what = what
        self.say(what)


class Ground(Protocol):
    """What the trials of some kinds share, e.g. a session with workers."""

    def close(self) -> None:
        """End all of it."""
        ...


class Module(Protocol):
    """A module of a kind."""

    CEILING_S: float

    def ground(self, folder: Path) -> Any:
        """Make what trials need."""
        ...

    def trial(self, ground: Any, note: Note) -> None:
        """Try once; raises TrialError where it does not hold."""
        ...


def rng_of(seed: int, kind: str, number: int) -> random.Random:
    """Return a trial's own dice: they do not depend on the trials before it."""
    return random.Random(f"{seed}/{kind}/{number}")


class Log:
    """Writes the child's lines."""

    def __init__(self, path: Path, seed: int) -> None:
        self._file = path.open("a", buffering=1)
        self.seed = seed

    def line(self, **found: Any) -> None:
        """Write one line."""
        self._file.write(json.dumps(found) + "\n")

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    @contextlib.contextmanager
    def trial(self, kind: str, number: int, ceiling_s: float, *, start: bool = False) -> Iterator[Note]:
        """Tell that a trial begins and how it ended; nothing that it raises goes further. A start is told of where it failed."""
        note = Note(kind, number, rng_of(self.seed, kind, number))
        note.say = lambda what: self.line(doing=what)
        self.line(begins=kind, number=number, ceiling_s=ceiling_s)
        started, failure, why = time.monotonic(), "", ""
        try:
            yield note
        except TrialError as broken:
            failure, why = broken.failure, broken.why
        except KeyboardInterrupt:
            failure, why = "unusable", "an interrupt came out of nowhere:\n" + traceback.format_exc()[-3000:]
        except Exception as error:
            failure, why = "unusable", f"{type(error).__name__}: {error}\n{traceback.format_exc()[-4000:]}"
        self.useless = failure in ("unusable", "hang")
        if start and not failure:
            self.line(started=kind)
            return
        lora = [own.LORA] * (BY_NAME[kind].adapters and own.ADAPTERS in os.environ)
        trial = Trial(
            kind, number, note.what, round(time.monotonic() - started, 3), failure, why, (*note.tags, *lora), note.count,
            note.num_failed if failure else 0, self.seed,
        )  # fmt: skip
        self.line(**asdict(trial))


def run_child(
    modules: Mapping[str, Module], shares: Mapping[str, float], first: Mapping[str, int], log: Log, folder: Path, seconds: float,
    once: bool, each: Collection[str],
) -> None:  # fmt: skip
    """Try kinds by turns, such that each has its share of the time, until the time is over or something left them useless.

    Args:
        modules: of the kinds.
        shares: of the time.
        first: number of the first trial of each kind.
        log: where it is told.
        folder: for files, of this child's own.
        seconds: how long.
        once: one trial of each kind, and the end.
        each: kinds that are tried once also where the time is over before.
    """
    faulthandler.enable()
    stacks = (folder / "stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    until, spent, numbers = time.monotonic() + seconds, dict.fromkeys(shares, 0.0), dict(first)
    grounds: dict[Any, Any] = {}
    try:
        while True:
            kinds = shares if time.monotonic() < until else [kind for kind in each if numbers[kind] == first[kind]]
            if not kinds:
                break
            kind = min(kinds, key=lambda k: (spent[k] / shares[k], k))
            module = modules[kind]
            if module.ground not in grounds:
                with log.trial(kind, numbers[kind], NEWS_S, start=True) as note:
                    note.doing("the start of what the trials share")
                    grounds[module.ground] = module.ground(folder)
                if log.useless:
                    break
            started = time.monotonic()
            with log.trial(kind, numbers[kind], module.CEILING_S) as note:
                module.trial(grounds[module.ground], note)
            spent[kind] += time.monotonic() - started
            numbers[kind] += 1
            if log.useless or (once and all(numbers[k] > first[k] for k in shares)):
                break
    finally:
        with log.trial(next(iter(shares)), 0, CLOSE_S, start=True) as note:
            note.doing("the end of what the trials shared")
            for ground in grounds.values():
                ground.close()
        faulthandler.unregister(signal.SIGUSR1)
        stacks.close()
        sys.stdout.flush()
