"""Many calls in a child process, which has a memory limit and a watchdog; deterministic by its seed."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfsdk import HfsdkError

from .inventory import Target, targets
from .law import Outcome, judge
from .strategies import Stage, arguments
from .values import shown
from .world import World

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
LIMIT_S = 5.0
"""That a call may take; a second is promised, and the machine may be busy."""
REAL_LIMIT_S = 60.0
"""The same where the call may be good and does real work."""
SPARE_BYTES = 4_000_000_000
"""Address space that the child may take beyond what it has when it begins."""
SILENT_S = 60.0
"""Without a word for so long, the child hangs where no alarm is heard."""
START_S = 300.0
"""Until its first call; it imports every module."""
LOST = 3
"""Exit status of a child whose last call was too slow: its session may be anywhere, the next child goes on."""
CALLS_A_WORLD = 20
GIVE_UP = 3
"""Calls of one target that may hang or end the child before the rest of its calls is left out."""


@dataclass(frozen=True)
class Failure:
    """A call that broke the law, and how to see it again."""

    target: str
    kind: str
    """``"bare"``, ``"unclear"``, ``"changed"``, ``"slow"``, ``"memory"``, ``"hang"`` or ``"ended"`` (the process)."""
    given: str
    text: str
    trace: str
    seed: int
    number: int

    @property
    def reproduction(self) -> str:
        """The command that makes this call again."""
        return f"python -m benchmarks.fuzzing --target {self.target!r} --seed {self.seed} --at {self.number}"


@dataclass
class Report:
    """Counts of calls by target and by what came of them, and the failures."""

    counts: Counter[str] = field(default_factory=Counter)
    """``"tried"``, ``"succeeded"``, ``"refused"`` and the kinds of failures."""
    tried: Counter[str] = field(default_factory=Counter)
    """Calls by target."""
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, target: str, outcome: Outcome, given: str, seed: int, number: int) -> None:
        """Count a call."""
        self.counts.update(["tried", outcome.kind])
        self.tried[target] += 1
        if not outcome.held:
            self.failures.append(Failure(target, outcome.kind, given, outcome.text, outcome.trace, seed, number))

    def __str__(self) -> str:
        lines = [", ".join(f"{kind} {count:,}" for kind, count in self.counts.most_common()) + f"; {self.seconds:.0f} s"]
        seen: Counter[tuple[str, str]] = Counter((f.target, f.kind) for f in self.failures)
        for (target, kind), count in sorted(seen.items()):
            first = next(f for f in self.failures if (f.target, f.kind) == (target, kind))
            lines.append(f"{target}: {kind} x {count}, e.g. {first.given}\n    {first.text}\n    {first.reproduction}")
        return "\n".join(lines)


def fuzz(
    seed: int = 0, num: int = 1000, kinds: Sequence[str] = ("session", "pure"), *, real: bool = False, only: Sequence[str] = (),
    limit_s: float | None = None,
) -> Report:  # fmt: skip
    """Make about ``num`` calls with bad input, in a child process, and return what came of them.

    Args:
        seed: the same one makes the same calls.
        num: calls over all targets, each target gets its share.
        kinds: ``"session"`` (what needs one) and ``"pure"``.
        real: whether the session has real workers; then only what needs a session is called.
        only: names of targets, or parts of them; by default all.
        limit_s: that one call may take; by default 5 s, and a minute where it may do real work.
    """
    limit_s = limit_s or (REAL_LIMIT_S if real else LIMIT_S)
    chosen = [t.name for t in targets() if t.kind in kinds and (not only or any(part in t.name for part in only))]
    if real:
        chosen = [name for name in chosen if not name.endswith("()") and not name.startswith(("WhatIf", "Session.simulated"))]
    share = max(1, -(-num // max(1, len(chosen))))
    report, began = Report(), time.monotonic()
    todo = [(name, seed, 0) for name in chosen]
    while todo:
        todo = _child(todo, share, real, limit_s, report)
    report.seconds = time.monotonic() - began
    return report


def _child(todo: list[tuple[str, int, int]], share: int, real: bool, limit_s: float, report: Report) -> list[tuple[str, int, int]]:
    """Run targets in one child until they are done or it is gone; return those that are left."""
    job = json.dumps({"todo": todo, "share": share, "real": real, "limit_s": limit_s})
    silent_s = SILENT_S * (5 if real else 1) + limit_s
    with tempfile.TemporaryDirectory(prefix="hfsdk-fuzz-") as folder:
        environment = {**os.environ, "PYTHONPATH": PATHS, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                       "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # fmt: skip
        with Path(folder, "errors").open("w+b") as errors:
            child = subprocess.Popen(
                [sys.executable, "-c", f"from {__package__}.campaign import run; run()", job], stdout=subprocess.PIPE,
                stderr=errors, cwd=folder, env=environment,
            )  # fmt: skip
            try:
                at = _listen(child, report, silent_s, START_S * (3 if real else 1))
                code = child.wait(10) if at is not None and not at[-1] else 0
            finally:
                child.kill()
                child.wait()
                child.stdout.close()
            if at is None:
                return []
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            said = said if len(said) <= 4000 else f"{said[:2000]}\n[...]\n{said[-2000:]}"
    target, seed, number, given, stuck = at
    if not target:
        raise RuntimeError(f"the child {'made no call' if stuck else 'ended before its first call'}: {said}")
    kind = "hang" if stuck else "ended"
    if given:
        report.add(target, Outcome(kind, f"the process {'said nothing any more' if stuck else 'ended'}", said), given, seed, number)
    elif code != LOST:
        raise RuntimeError(f"the child {'hangs' if stuck else 'ended'} after a call of {target}: {said}")
    names = [name for name, _, _ in todo]
    rest = todo[names.index(target) + 1 :] if target in names else todo
    again = sum(f.target == target and f.kind in ("hang", "ended", "slow") for f in report.failures)
    return ([(target, seed, number + 1)] if again < GIVE_UP else []) + rest


def _listen(
    child: subprocess.Popen[bytes], report: Report, silent_s: float, start_s: float
) -> tuple[str, int, int, str, bool] | None:
    """Count what the child says; return the call it was in when it ended, or ``None`` when all is done."""
    assert child.stdout is not None
    target, seed, number, given = "", 0, 0, ""
    waiting = selectors.DefaultSelector()
    waiting.register(child.stdout, selectors.EVENT_READ)
    rest = b""
    while True:
        if not waiting.select(silent_s if target else start_s):
            return target, seed, number, given, True
        data = os.read(child.stdout.fileno(), 1 << 16)
        if not data:
            return target, seed, number, given, False
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            word = json.loads(line)
            if word[0] == "begin":
                _, target, seed, number, given = word
            elif word[0] == "end":
                report.add(target, Outcome(*word[1:]), given, seed, number)
                given = ""
            else:
                return None


# -- in the child


def run() -> None:
    """Do the job that the command line names, as the child."""
    import torch  # noqa: F401  before the limit: its libraries take address space

    job = json.loads(sys.argv[1])
    words = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if not job["real"]:
        resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, size + SPARE_BYTES))
    known = {target.name: target for target in targets()}
    Stage.world = World(job["real"])
    Stage.world.warm_up()

    def say(*word: Any) -> None:
        words.write(json.dumps(word) + "\n")

    for name, seed, first in job["todo"]:
        calls(known[name], seed, job["share"], job["limit_s"], job["real"], say, first=first)
    Stage.world.close()
    say("done")


def calls(
    target: Target, seed: int, num: int, limit_s: float, real: bool, say: Callable[..., None], *, first: int = 0,
    last: int | None = None,
) -> None:  # fmt: skip
    """Make the calls ``first`` to ``last`` of ``num`` of one target; the values of those before are drawn all the same."""
    import hypothesis

    number = -1

    def one(given: dict[str, Any]) -> None:
        nonlocal number
        if number < first or (last is not None and number > last):
            return
        say("begin", target.name, seed, number, ", ".join(f"{k}={shown(v)}" for k, v in given.items()) or "nothing")
        outcome = judge(target, given, limit_s)
        say("end", outcome.kind, outcome.text, outcome.trace)
        if outcome.kind == "slow":
            os._exit(LOST)

    def drawn(data: Any) -> None:
        nonlocal number
        number += 1
        if (number % CALLS_A_WORLD == 0 and not real) or Stage.world.broken:
            Stage.world.close()
            Stage.world = World(real)
        try:
            given = data.draw(arguments(target))
        except HfsdkError:  # a value of our own type, which refuses what hypothesis would make it of
            hypothesis.reject()
        one(given)

    Stage.world.real = real
    test = hypothesis.given(hypothesis.strategies.data())(drawn)
    test = hypothesis.settings(
        max_examples=num if target.parameters else 1, database=None, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck), derandomize=False,
    )(test)  # fmt: skip
    digest = hashlib.sha256(f"{seed} {target.name}".encode()).digest()
    hypothesis.seed(int.from_bytes(digest[:8], "big"))(test)()


def reproduce(name: str, seed: int, number: int, num: int, *, real: bool = False, limit_s: float = LIMIT_S) -> None:
    """Make one call of a campaign again, here, and print what came of it."""
    target = next(t for t in targets() if t.name == name)
    calls(target, seed, num, limit_s, real, print, first=number, last=number)
