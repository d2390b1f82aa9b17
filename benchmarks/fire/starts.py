"""SIGINT in the first moments of a fresh interpreter, simulated: its first declaration, placing, run, save and load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from fire.trials import Note, TrialError

CEILING_S = 240.0

DONE_S = 180.0
"""Ceiling for a process that does it twice."""

SCRIPT = """
import json, signal, sys, warnings
import hfsdk as hf
from hfsdk.session.parts import parts_of
warnings.simplefilter("ignore")
folder = sys.argv[1]

def work(open_ones):
    session = hf.Session.simulated("1x2 A100-80GB", seed=3)
    open_ones.append(session)
    actor = session.actor("tiny")
    session.critic("tiny")
    session.reference(actor)
    session.reward(lambda completions: [0.0] * len(completions))
    prompts = session.prompts(["the film is", "a warm and", "it never"], batch_size=2, seed=1)
    session.place("colocate")
    run = session.train(hf.PPO(max_new_tokens=8), prompts, steps=2, progress=False)
    if run.paused:
        raise KeyboardInterrupt
    session.save(folder)
    session.load(folder)
    kept = parts_of(session).saved.to_save()
    return [round(run.rows[1]["seconds"], 5), kept["counters"], kept["positions"], len(kept["history"])]

open_ones = []
signal.signal(signal.SIGINT, signal.default_int_handler)
print("go", flush=True)
try:
    found = work(open_ones)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    found = "interrupted"
except hf.HfsdkError as error:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    found = f"{type(error).__name__}: {error}"
print("first " + json.dumps(found), flush=True)
for session in open_ones:  # the interrupted one is usable itself
    if len(session.roles) == 4 and hasattr(session, "run"):
        prompts = session.prompts(["the film is", "a warm and", "it never"], batch_size=2, seed=1)
        session.train(hf.PPO(max_new_tokens=8), prompts, steps=1, progress=False)
        session.save(folder)
        session.load(folder)
        session.snapshot("here")
        session.rewind("here")
again = work([])
print("again " + json.dumps(again), flush=True)
"""


class Recorded:
    """What an undisturbed process says, and when."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 5.0
        self.seconds, said, errors, status = run(folder, None)
        if status or "again" not in said:
            raise RuntimeError(errors)
        self.expected = said["again"]

    def close(self) -> None:
        """Nothing is open between trials."""


def ground(folder: Path) -> Recorded:
    """Run it once undisturbed."""
    return Recorded(folder)


def trial(recorded: Recorded, note: Note) -> None:
    """Interrupt one start."""
    at = note.rng.random() * recorded.seconds
    note.tags.append("start-up")
    note.doing(f"SIGINT {at:.3f} s after a fresh interpreter began its first session ({recorded.seconds:.2f} s to its end)")
    _, said, errors, status = run(recorded.folder, at)
    if "again" not in said:
        failure = "hang" if status == -signal.SIGKILL else "unusable"
        raise TrialError(failure, f"it said {said}; exit status {status}\n{errors}")
    if said["again"] != recorded.expected:
        raise TrialError("wrong state", f"{said['again']}, not {recorded.expected}")
    first = json.loads(said["first"])
    if isinstance(first, str) and first != "interrupted" and "Cancelled" not in first:
        raise TrialError("unusable", first)


def run(folder: Path, at: float | None) -> tuple[float, dict[str, str], str, int]:
    """Run the script, interrupted after some time; returns the seconds of its first part, what it said, its errors, its status."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder / "start")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    watchdog = threading.Timer(DONE_S, process.kill)
    watchdog.start()
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    said: dict[str, str] = {}
    began = first = time.monotonic()
    for line in process.stdout:
        word, _, rest = line.strip().partition(" ")
        said[word] = rest
        if word == "go":
            began = time.monotonic()
            if at is not None:
                threading.Timer(at, _press, (process, said)).start()
        elif word == "first":
            first = time.monotonic()
    process.wait()
    watchdog.cancel()
    reader.join(10)
    return first - began, said, "".join(errors)[-3000:], process.returncode


def _press(process: subprocess.Popen[str], said: dict[str, str]) -> None:
    if "first" not in said and process.poll() is None:
        os.kill(process.pid, signal.SIGINT)
