"""SIGKILL of a worker at every moment of every kind of call; most often while ``place`` moves roles that have learned."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import psutil

from fire.deeds import Deed, arrange, deeds_of, seconds, tidy, took
from fire.stage import FORMS, Stage, ground, typed
from fire.trials import Note, TrialError

__all__ = ["CEILING_S", "ground", "trial"]

CEILING_S = 420.0
"""A trial starts processes again, perhaps twice."""

SAME = 4
"""Trials in a row in the same form: to change it takes a while."""


def trial(stage: Stage, note: Note) -> None:
    """Kill one worker in the middle of one deed; then everything goes on from the checkpoint."""
    rng = note.rng
    deeds = deeds_of(stage)
    deed = rng.choices(deeds, [d.share for d in deeds])[0]
    form, moment, which = FORMS[note.number // SAME % len(FORMS)], rng.uniform(0.0, 1.0), rng.randrange(2)
    note.tags += [deed.name] * deed.tagged
    note.doing(f"preparing {deed.name}, {form}")
    tidy(stage)
    states = arrange(stage, deed, form)
    segments, pids = len(stage.segments()), stage.pids()
    victim, at = pids[which % len(pids)], moment * seconds(stage, deed)
    note.doing(f"SIGKILL of worker {which} in {deed.name} ({form}), {at:.2f} s after it began")
    said = _kill_in(stage, deed, form, victim, at)
    note.doing(f"{note.what}: {said or 'it went through'}; afterwards")
    _gone(victim)
    with typed():  # who died while nobody waited is told at the next call
        stage.digests()
    stage.is_known(*states)
    deed.check(stage)
    with typed():
        tidy(stage)
    stage.prove(form, news=1)
    left = stage.segments()
    if len(left) > max(segments, 8):
        raise TrialError("left behind", f"{len(left)} segments in /dev/shm, {segments} before the kill")


def _kill_in(stage: Stage, deed: Deed, form: str, victim: int, at: float) -> str:
    """Do it and kill a worker meanwhile; returns the name of the error, ``""`` where it went through."""
    killer, started = threading.Timer(at, _kill, (victim,)), time.monotonic()
    killer.start()
    try:
        with typed() as said:
            deed.do(stage, form)
            took(stage, deed, time.monotonic() - started, whole=True)
    finally:
        killer.join()
    if said:
        took(stage, deed, at, whole=False)
    return "".join(said)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # a place that restarts workers has ended it
        os.kill(pid, signal.SIGKILL)


def _gone(pid: int) -> None:
    until = time.monotonic() + 10.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            raise TrialError("left behind", f"worker {pid} is still there 10 s after SIGKILL")
        time.sleep(0.05)
