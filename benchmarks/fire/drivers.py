"""kill -9 of the user's process: at any moment, most often in a save. The next session starts at once, loads and clears up."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from fire import own
from fire.trials import Note, TrialError

CEILING_S = 600.0

START_S = 420.0
"""Ceiling for a start, the load included: Ray and a worker, on a machine with other work."""

NUMBER = "HFSDK_UNDER_FIRE_DRIVER"
"""Environment variable with which what one driver has started is told from what the next one has."""


class Driver:
    """A user's process that learns and saves."""

    def __init__(self, folder: Path, number: str, behind: bool) -> None:
        self.number, self.job = number, ""
        env = os.environ | {NUMBER: number, "PYTHONPATH": os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])}
        self.errors = folder.parent / f"driver-{number}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fire.victim", str(folder), str(int(behind))], stdout=subprocess.PIPE,
            stderr=self.errors.open("w"), text=True, env=env, start_new_session=True,
        )  # fmt: skip
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def until(self, key: str, within_s: float) -> dict[str, Any]:
        """Read on to a line with a key."""
        end = time.monotonic() + within_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise TrialError("hang", f"the driver did not say {key!r} within {within_s:.0f} s: {self.said()}") from None
            if line is None:
                raise TrialError("unusable", f"the driver ended before {key!r}: {self.said()}")
            self.job = line.get("job", self.job)
            if key in line:
                return line

    def rest(self) -> list[dict[str, Any]]:
        """Return what it has said since, up to its end."""
        found = []
        while (line := self._lines.get(timeout=30)) is not None:
            self.job = line.get("job", self.job)
            found.append(line)
        return found

    def said(self) -> str:
        """Return the end of its errors."""
        return self.errors.read_text(errors="replace")[-2500:]

    def kill(self) -> None:
        """Kill -9 it, and nothing else."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def left(self) -> list[psutil.Process]:
        """Return the living processes that it has started."""
        found = []
        for process in own.marked(os.environ.get(own.MARK, "")):
            try:
                if process.environ().get(NUMBER) == self.number:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found


class Chain:
    """One folder, and the drivers that follow each other on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "kept"
        self.temporary = Path(os.environ.get("TMPDIR", "/tmp"))
        self.count = 0
        self.complete: str | None = None
        """Digest of the last save that was told complete."""
        self.save_s = 0.5
        self.start_s = 20.0
        self.driver = self.start(False)
        self.driver.until("loaded", START_S)

    def start(self, behind: bool) -> Driver:
        """Start the next driver."""
        self.count += 1
        return Driver(self.folder, str(self.count), behind)

    def close(self) -> None:
        """End the last one, with all it has started."""
        self.driver.kill()
        until = time.monotonic() + own.GONE_S
        while (left := self.driver.left()) and time.monotonic() < until:
            for process in left:
                try:
                    process.kill()
                except psutil.Error:
                    continue
            time.sleep(0.1)
        for path in Path("/dev/shm").glob(f"hfsdk.{self.driver.job}*") if self.driver.job else ():
            path.unlink(missing_ok=True)
        import shutil

        for path in self.temporary.glob("hfsdk-*"):
            shutil.rmtree(path, ignore_errors=True)


def ground(folder: Path) -> Chain:
    """Start the first driver."""
    return Chain(folder)


def trial(chain: Chain, note: Note) -> None:
    """Kill the driver, start the next one at once and see what it finds."""
    rng, dying = note.rng, chain.driver
    moment, part, behind = rng.choices(["save", "learning", "start"], [0.72, 0.14, 0.14])[0], rng.random(), rng.random() < 0.4
    try:
        known = _kill(chain, dying, moment, part, note)
        started = time.monotonic()
        follower = chain.driver = chain.start(behind)
        loaded = follower.until("loaded", START_S)
        chain.start_s = time.monotonic() - started
        _found(chain, loaded, known)
        _cleared(chain, dying)
        saving = follower.until("saving", START_S)["saving"]
        states = follower.until("saved", START_S)["states"]
        chain.complete = saving
        if states != 1:
            raise TrialError("left behind", f"{states} states in the folder after the next save")
    except TrialError:
        _start_over(chain)
        raise


def _kill(chain: Chain, dying: Driver, moment: str, part: float, note: Note) -> set[str | None]:
    """Kill it; returns the digests that the folder may hold now."""
    known: set[str | None] = {chain.complete}
    if moment == "start":
        at = part * chain.start_s
        note.doing(f"kill -9 of a driver {at:.2f} s after it began to start")
        dying.kill()  # another one has to be starting: this one ends in the middle of what it does
        lines = dying.rest()
        known |= _later(chain, lines, None)
        chain.driver = chain.start(False)
        time.sleep(at)
        chain.driver.kill()
        lines = chain.driver.rest()
        return known | _later(chain, lines, None)
    saving = dying.until("saving", START_S)["saving"]
    if part < 0.1:  # one save more, for its seconds
        began = time.monotonic()
        dying.until("saved", START_S)
        chain.save_s, chain.complete = time.monotonic() - began, saving
        saving = dying.until("saving", START_S)["saving"]
    if moment == "save":
        at = part * 1.1 * chain.save_s
        note.tags.append("save")
    else:
        dying.until("saved", START_S)
        chain.complete, saving, at = saving, None, part * 0.3
    note.doing(f"kill -9 of a driver {at:.3f} s after it began {'a save' if moment == 'save' else 'to learn on'}")
    time.sleep(at)
    dying.kill()
    return {chain.complete} | _later(chain, dying.rest(), saving)


def _later(chain: Chain, lines: list[dict[str, Any]], saving: str | None) -> set[str | None]:
    """Return what may be in the folder by what a driver has said in its last moments; sets the last complete one."""
    for line in lines:
        if "saving" in line:
            saving = line["saving"]
        elif "saved" in line and saving is not None:
            chain.complete, saving = saving, None
    return {chain.complete, *([saving] if saving is not None else [])}


def _found(chain: Chain, loaded: dict[str, Any], known: set[str | None]) -> None:
    if loaded["loaded"] not in known | {chain.complete} or (loaded["loaded"] is None and chain.complete is not None):
        raise TrialError("wrong state", f"the next session loaded {loaded['loaded']}; complete or under way were {known}")
    if chain.complete is not None and loaded["loaded"] not in ({chain.complete} | (known - {None})):
        raise TrialError("wrong state", f"the next session loaded an older state than the last complete one: {loaded['loaded']}")
    chain.complete = loaded["loaded"] or chain.complete


def _cleared(chain: Chain, dead: Driver) -> None:
    """Check that the next session has cleared what the dead one left."""
    until = time.monotonic() + own.GONE_S
    while True:
        left = [own.words(process) for process in dead.left()]
        left += [str(path) for path in Path("/dev/shm").glob(f"hfsdk.{dead.job}*") if dead.job]
        left += [str(path) for path in chain.temporary.glob(f"hfsdk-{dead.job}*") if dead.job]
        if not left:
            return
        if time.monotonic() > until:
            raise TrialError("left behind", "of the killed driver, while the next session runs: " + "; ".join(left)[:2000])
        time.sleep(0.25)


def _start_over(chain: Chain) -> None:
    """Begin again with an empty folder after something did not hold."""
    import shutil

    chain.close()
    shutil.rmtree(chain.folder, ignore_errors=True)
    chain.complete, chain.driver = None, chain.start(False)
    chain.driver.until("loaded", START_S)
