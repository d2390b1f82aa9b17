"""SIGINT inside ``hf.Session(...)``: in a process of its own, twice; then the same process opens one and uses it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from fire import own
from fire.trials import Note, TrialError

CEILING_S = 600.0

OURS = ("under_fire.py", "fuzzing.campaign")
"""Processes of the campaign beside this one."""

USED_S = 420.0
"""Ceiling from the last interrupt to a session that has worked and is closed."""

SCRIPT = """
import signal, sys, time
import hfsdk as hf
opened = []
for k in range(int(sys.argv[1])):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("go", flush=True)
    try:
        opened.append(hf.Session(devices=1, name=f"opening {k}"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("opened", flush=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("interrupted", flush=True)
    for session in opened:
        session.close()
began = time.monotonic()
with hf.Session(devices=1, name="after") as session:
    critic = session.critic("tiny")
    number = len(critic.compute_values(session.batch(prompt=[[1, 2]], response=[[3, 4]]))["values"])
print(f"used {number}", flush=True)
"""


class Times:
    """How long an opening takes here."""

    def __init__(self) -> None:
        self.open_s = 12.0

    def close(self) -> None:
        """Nothing is open between trials."""


def ground(folder: Path) -> Times:
    """Nothing is shared but a time."""
    return Times()


def trial(times: Times, note: Note) -> None:
    """Interrupt two openings."""
    rng = note.rng
    moments = [rng.random() for _ in range(2)]
    note.tags.append("start-up")
    note.count = len(moments)
    words = ", ".join(f"{m * times.open_s:.2f} s" for m in moments)
    note.doing(f"SIGINT in hf.Session(devices=1), {words} after it began")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(len(moments))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"HFSDK_UNDER_FIRE_DRIVER": f"opening {note.number}"},
    )  # fmt: skip
    errors: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    said: list[str] = []
    began = time.monotonic()
    timer = threading.Timer(USED_S, process.kill)
    timer.start()
    left_moments = list(moments)
    for line in process.stdout:
        said.append(line.strip())
        if line.startswith("go"):
            began = time.monotonic()
            at = left_moments.pop(0) * times.open_s
            threading.Timer(at, _press, (process, began, times, said, len(said))).start()
        elif line.startswith("opened"):
            times.open_s = max(2.0, time.monotonic() - began)
    process.wait()
    timer.cancel()
    reader.join(10)
    text = "".join(errors)[-3000:]
    if "used 1" not in said:
        failure = "hang" if process.returncode == -signal.SIGKILL else "unusable"
        raise TrialError(failure, f"it said {', '.join(said)}; exit status {process.returncode}\n{text}")
    left = own.left_behind(os.environ.get(own.MARK, ""), Path(os.environ["TMPDIR"])) if own.MARK in os.environ else []
    left = [words for words in left if not words.startswith(f"{os.getppid()} ") and not any(name in words for name in OURS)]
    if left:
        raise TrialError("left behind", "; ".join(left)[:2500])


def _press(process: subprocess.Popen[str], began: float, times: Times, said: list[str], length: int) -> None:
    if len(said) == length and process.poll() is None:
        os.kill(process.pid, signal.SIGINT)
