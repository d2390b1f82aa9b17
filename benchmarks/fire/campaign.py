"""Runs the kinds in child processes for some minutes, on two lanes, and ends what hangs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, say

from fire import own
from fire.ledger import RATES_MINUTES, Ledger, Trial

SCRIPT = ROOT / "benchmarks" / "under_fire.py"

OVERTIME_S = 900.0
"""How long trials under way, and in a short run each kind's first, may go on after the minutes are over: a slow machine's pace
is not what is judged. Then they are ended, and count as not tried."""

ROUND_S = 600.0
"""A long run goes through all kinds again after this time, each time with new sessions."""

LEAST = 0.6
"""Part of its time that kinds have even where those before them took too long."""

STACKS_S = 3.0
"""How long a process may take to write its stacks."""


@dataclass(frozen=True)
class Job:
    """Kinds that one child tries by turns, and its share of its lane's time."""

    shares: Mapping[str, float]
    part: float


LANES = (
    (
        Job({"kills": 0.64, "cells": 0.11, "damage": 0.07, "disk": 0.06, "numbers": 0.06, "together": 0.06}, 0.49),
        Job({"drivers": 1.0}, 0.16),
        Job({"openings": 1.0}, 0.05),
        Job({"attach": 0.6, "serve": 0.4}, 0.3),
    ),
    (Job({"lines": 1.0}, 0.07), Job({"starts": 1.0}, 0.12), Job({"kernel": 1.0}, 0.08), Job({"fuzz": 1.0}, 0.35)),
)
"""The first lane has workers, two at most at a time. The second, beside it, has none, and leaves the processors to the first when
it has had its parts of the time."""


@dataclass
class Campaign:
    """One run."""

    seed: int
    minutes: float
    ledger: Ledger = field(init=False)
    only: Sequence[str] = ()
    trial: int | None = None
    """Only this one, of the kinds in ``only``."""
    lora: bool | None = None
    """Whether trained roles have adapters; ``None``: in every other round, of an odd seed in the first."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.minutes, runs=[{"seed": self.seed, "minutes": self.minutes}])
        self.mark = uuid.uuid4().hex[:12]
        self.folder = Path(tempfile.mkdtemp(prefix="fire-", dir="/tmp" if os.path.isdir("/tmp") else None))
        self._next: dict[str, int] = {}
        self._broken: list[BaseException] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._count = 0

    def run(self) -> Ledger:
        """Run it; ends what it started in any case."""
        started = time.monotonic()
        hard = started + 60.0 * self.minutes + OVERTIME_S
        if self.trial is not None:
            hard = started + 3600.0 + OVERTIME_S
        try:
            threads = [threading.Thread(target=self._guarded, args=(lane, started, hard), daemon=True) for lane in LANES]
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
        finally:
            self._ended.set()
            self._clear()
        if self._broken:
            raise self._broken[0]
        return self.ledger

    def _clear(self) -> None:
        own.end(self.mark)
        for path in self.folder.rglob("full-disk"):
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _guarded(self, jobs: Sequence[Job], started: float, hard: float) -> None:
        try:
            self._lane(jobs, started, hard)
        except BaseException as error:  # raised again by whoever asked for the run
            self._broken.append(error)
            self._ended.set()

    def _lane(self, jobs: Sequence[Job], started: float, hard: float) -> None:
        jobs = [job for job in (self._restricted(job) for job in jobs) if job.shares]
        total, seconds = sum(job.part for job in jobs) if self.only else 1.0, 60.0 * self.minutes
        rounds = max(1, round(seconds / ROUND_S))
        due = started
        for number in range(rounds):
            lora = (self.seed + number) % 2 == 1 if self.lora is None else self.lora
            for job in jobs:
                slot = seconds / rounds * job.part / total
                due += slot
                least = time.monotonic() + LEAST * slot  # what came before may have taken longer, and the minutes may be over
                until = max(min(due, hard - OVERTIME_S), least)
                in_vain = 0
                while not self._ended.is_set() and time.monotonic() < until - LEAST * slot / 2 and in_vain < 3:
                    in_vain = 0 if self._child(job, until - time.monotonic(), hard, lora) else in_vain + 1
                    if self.trial is not None:
                        break

    def _restricted(self, job: Job) -> Job:
        return Job({k: v for k, v in job.shares.items() if not self.only or k in self.only}, job.part)

    def _child(self, job: Job, seconds: float, hard: float, lora: bool) -> bool:
        """Start a child for some kinds and follow it to its end; returns whether it tried anything."""
        with self._lock:
            self._count += 1
            folder = self.folder / str(self._count)
        (folder / "tmp").mkdir(parents=True)
        log, output = folder / "log", folder / "output"
        log.touch()
        first = {kind: self._next.get(kind, 0) if self.trial is None else self.trial for kind in job.shares}
        short = self.trial is None and self.minutes < RATES_MINUTES
        plan = {
            "shares": dict(job.shares), "first": first, "seed": self.seed, "seconds": seconds, "log": str(log),
            "folder": str(folder), "once": self.trial is not None, "each": [k for k in job.shares if short and k not in self._next],
        }  # fmt: skip
        env = os.environ | {own.MARK: self.mark, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        if lora:
            env[own.ADAPTERS] = "1"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), "--child", json.dumps(plan)], stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, env=env, cwd=folder, start_new_session=True,
            )  # fmt: skip
        return _Follower(self, job, process, folder, hard, lora).follow()

    def took(self, trial: Trial) -> None:
        """Note a trial."""
        with self._lock:
            self.ledger.trials.append(trial)
            self._next[trial.kind] = max(self._next.get(trial.kind, 0), trial.trial + 1)
        if trial.failure:
            say(trial.failure_text())
        elif self.trial is not None or trial.seconds > 5:
            say(f"held: {trial.kind} {trial.trial}: {trial.what} ({trial.seconds:.1f} s)")

    @property
    def ended(self) -> bool:
        """Whether everything stops now."""
        return self._ended.is_set()


class _Follower:
    """Reads one child's log while it runs."""

    def __init__(
        self, campaign: Campaign, job: Job, process: subprocess.Popen[bytes], folder: Path, hard: float, lora: bool
    ) -> None:
        self.campaign, self.job, self.process, self.folder, self.hard = campaign, job, process, folder, hard
        self.tags = (own.LORA,) if lora else ()
        self.begun: dict[str, Any] = {"begins": "start", "number": 0, "of": next(iter(job.shares)), "ceiling_s": 300.0}
        self.doing = ""
        self.tried = 0

    def follow(self) -> bool:
        """Follow it to its end."""
        since = time.monotonic()
        with (self.folder / "log").open() as log:
            rest = ""
            while True:
                over = self.process.poll() is not None
                *lines, rest = (rest + log.read()).split("\n")  # a long line may be half written
                for line in lines:
                    self._line(json.loads(line))
                since = time.monotonic() if lines else since
                if over:
                    break
                if time.monotonic() > self.hard or self.campaign.ended:
                    self._end()
                    return True
                if self.begun and time.monotonic() - since > self.begun["ceiling_s"]:
                    self._hang(time.monotonic() - since)
                    return True
                time.sleep(0.1)
        if self.begun:
            self._failed("ended", f"exit status {self.process.returncode}\n{self._output()}")
        else:
            self._leftovers()
        self._end()
        return self.tried > 0

    def _line(self, found: dict[str, Any]) -> None:
        if "begins" in found:
            self.begun, self.doing = found, ""
        elif "doing" in found:
            self.doing = found["doing"]
        elif "kind" in found:
            self.begun = {}
            self.tried += 1
            self.campaign.took(Trial(**{**found, "tags": tuple(found["tags"])}))
        else:
            self.begun = {}

    def _failed(self, failure: str, why: str) -> None:
        kind = self.begun.get("of") or self.begun["begins"]
        what = self.doing or "the start or the end of its process"
        self.campaign.took(Trial(kind, self.begun["number"], what, 0.0, failure, why, self.tags, 1, 1, self.campaign.seed))
        self.tried += 1

    def _hang(self, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        time.sleep(STACKS_S)
        stacks = self.folder / "stacks"
        text = stacks.read_text()[-12000:] if stacks.exists() else "no stacks"
        self._failed("hang", f"nothing for {seconds:.0f} s\n{text}\n{self._output()}")
        self._end()

    def _leftovers(self) -> None:
        mine = [p for p in own.marked(self.campaign.mark) if self._is_mine(p)]
        until = time.monotonic() + own.GONE_S
        while mine and time.monotonic() < until:
            time.sleep(0.25)
            mine = [p for p in mine if p.is_running() and self._is_mine(p)]
        left = [own.words(p) for p in mine] + [str(path) for path in (self.folder / "tmp").glob("hfsdk-*")]
        if left:
            self.begun = {"begins": "end", "number": 0, "of": next(iter(self.job.shares))}
            self._failed("left behind", "\n".join(left))

    def _is_mine(self, process: Any) -> bool:
        try:
            return process.status() != "zombie" and process.environ().get("TMPDIR") == str(self.folder / "tmp")
        except Exception:  # it ended while we looked
            return False

    def _output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")[-3000:]

    def _end(self) -> None:
        """End the child and everything that it has started."""
        until = time.monotonic() + own.GONE_S
        while time.monotonic() < until:
            left = [p for p in own.marked(self.campaign.mark) if self._is_mine(p)]
            for process in left:
                with contextlib.suppress(Exception):
                    process.kill()
            if not left:
                break
            time.sleep(0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        for path in self.folder.rglob("full-disk"):
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
