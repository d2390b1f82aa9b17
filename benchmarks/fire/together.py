"""Several at once: threads that save to one folder, that call, that place; two sessions and two processes on one folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hfsdk as hf
from fire.stage import OPENINGS, Stage, difference, ground, typed
from fire.trials import Note, TrialError

__all__ = ["CEILING_S", "ground", "trial"]

CEILING_S = 300.0

JOINED_S = 150.0
"""Ceiling for threads and processes that do a second of work each."""

SAVER = """
import sys, warnings
warnings.simplefilter("ignore")
import hfsdk as hf
session = hf.Session.simulated("1x2 A100-80GB", seed=int(sys.argv[2]))
actor = session.actor("tiny")
critic = session.critic("tiny")
session.place("colocate")
saved = 0
for k in range(20):
    try:
        session.save(sys.argv[1])
        saved += 1
    except hf.HfsdkError:
        pass
print("saved", saved)
"""


def at_once(works: list[Callable[[], Any]]) -> list[Any]:
    """Do several things in threads and return what each gave, or the typed error that it raised."""
    found: list[Any] = [None] * len(works)
    bare: list[str] = []

    def run(k: int) -> None:
        try:
            found[k] = works[k]()
        except hf.HfsdkError as error:
            found[k] = error
        except Exception as error:
            bare.append(f"{type(error).__name__}: {error}\n{traceback.format_exc()[-2000:]}")

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOINED_S)
        if thread.is_alive():
            raise TrialError("hang", f"a thread is still at work after {JOINED_S:g} s")
    if bare:
        raise TrialError("bare error", bare[0])
    return found


def _complete(stage: Stage, folder: Path) -> None:
    """Check that a folder of saves of the stage's state holds one complete save of it."""
    try:
        stage.session.load(folder)
    except Exception as error:
        raise TrialError("wrong state", f"the folder does not load: {type(error).__name__}: {error}") from error
    stage.is_known()
    states = sorted(path.name for path in folder.glob("state-*"))
    if len(states) != 1:
        raise TrialError("left behind", f"{', '.join(states)} in the folder")


def _threads_save(stage: Stage, note: Note) -> None:
    folder, num = stage.folder / "shared", note.rng.choice([2, 3, 4])
    note.doing(f"{num} threads save to one folder, twice each")
    found = at_once([lambda: [stage.session.save(folder) for _ in range(2)]] * num)
    if all(isinstance(each, hf.HfsdkError) for each in found):
        raise TrialError("unusable", f"no save went through: {found[0]}")
    _complete(stage, folder)


def _save_and_save_behind(stage: Stage, note: Note) -> None:
    folder = stage.folder / "shared"
    note.doing("saves in the background and in threads")
    found = at_once([lambda: stage.session.save(folder, wait=False).wait(), lambda: stage.session.save(folder)])
    if all(isinstance(each, hf.HfsdkError) for each in found):
        raise TrialError("unusable", f"no save went through: {found[0]}")
    _complete(stage, folder)


def _threads_call(stage: Stage, note: Note) -> None:
    note.doing("four threads generate and compute at once")

    def work(seed: int) -> Any:
        batch = stage.actor.generate(OPENINGS[:4], max_new_tokens=8, seed=seed)
        batch = stage.critic.compute_values(stage.actor.compute_log_probs(batch))
        table = batch.table("response", "old_log_probs", "values")
        return [column.flat.tobytes() for column in table.values()]

    alone = [work(seed) for seed in range(4)]
    found = at_once([lambda seed=seed: work(seed) for seed in range(4)])  # type: ignore[misc]
    if found != alone:
        raise TrialError("wrong state", "numbers differ from those of one after the other")


def _place_while_called(stage: Stage, note: Note) -> None:
    note.doing("a thread places while others generate and save")
    folder = stage.folder / "shared"
    at_once(
        [
            lambda: stage.place("two pools"),
            lambda: [stage.actor.generate(OPENINGS, max_new_tokens=30).wait() for _ in range(3)],
            lambda: stage.session.save(folder),
        ]
    )
    if (folder / "session.json").exists():
        _complete(stage, folder)


def _a_listener_that_calls(stage: Stage, note: Note) -> None:
    note.doing("a listener of the session's events calls and waits")
    done = threading.Event()

    def listener(event: dict[str, Any]) -> None:
        if event["type"] == "call_done" and not done.is_set():
            done.set()
            with typed():
                stage.critic.compute_values(stage.session.batch(prompt=[[1]], response=[[2]])).wait()

    stop = stage.session.subscribe(listener)
    try:
        at_once([lambda: stage.batch(4).wait()])
    finally:
        stop()


def _two_sessions(stage: Stage, note: Note) -> None:
    note.doing("a simulated session and the real one train at once, and save to one folder")
    folder = stage.folder / "shared"
    with hf.Session.simulated("1x2 A100-80GB") as other:
        other.actor("tiny")
        other.critic("tiny")
        other.place("colocate")
        found = at_once([lambda: stage.step(), lambda: [other.save(folder) for _ in range(5)], lambda: stage.session.save(folder)])
    if isinstance(found[0], hf.HfsdkError):
        raise TrialError("unusable", f"the step failed: {found[0]}")
    if found[0] != stage.expected["dp2"]:
        raise TrialError("wrong state", difference(found[0], stage.expected["dp2"]))
    states = sorted(path.name for path in folder.glob("state-*"))
    if len(states) != 1 or not (folder / "session.json").exists():
        raise TrialError("wrong state", f"the folder holds {', '.join(states)}")
    with typed():
        stage.session.load(folder)


def _two_processes(stage: Stage, note: Note) -> None:
    note.doing("two processes save to one folder, twenty times each")
    folder = stage.folder / "shared"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAVER, str(folder), str(k)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for k in range(2)
    ]
    said = []
    for process in processes:
        try:
            out, errors = process.communicate(timeout=JOINED_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise TrialError("hang", f"not done after {JOINED_S:g} s") from None
        if process.returncode:
            raise TrialError("bare error", errors[-2500:])
        said.append(out.strip())
    with hf.Session.simulated("1x2 A100-80GB") as reader:
        reader.actor("tiny")
        reader.critic("tiny")
        try:
            reader.load(folder)
        except hf.HfsdkError as error:
            raise TrialError("wrong state", f"after {said} the folder does not load: {error}") from error
    states = sorted(path.name for path in folder.glob("state-*"))
    if len(states) != 1:
        raise TrialError("left behind", f"{', '.join(states)} in the folder after {said}")


CASES = (
    _threads_save,
    _two_processes,
    _threads_call,
    _two_sessions,
    _save_and_save_behind,
    _place_while_called,
    _a_listener_that_calls,
)


def trial(stage: Stage, note: Note) -> None:
    """Try one case; then the step after ``load`` is the recorded one."""
    note.doing("preparing")
    stage.arrange("dp2")
    shutil.rmtree(stage.folder / "shared", ignore_errors=True)
    CASES[note.number % len(CASES)](stage, note)
    stage.prove("dp2")
    shutil.rmtree(stage.folder / "shared", ignore_errors=True)
