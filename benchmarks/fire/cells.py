"""SIGINT in a cell of a session with workers: once, or twice, at any moment of any deed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from fire.deeds import arrange, deeds_of, seconds, tidy, took
from fire.stage import FORMS, Stage, ground, typed
from fire.trials import Note, TrialError

__all__ = ["CEILING_S", "ground", "trial"]

CEILING_S = 240.0

SAME = 6
"""Trials in a row in the same form: to change it takes a while."""

STOPPED_S = 60.0
"""Ceiling from the interrupt to the prompt; a ``place`` and a load are finished first."""


def trial(stage: Stage, note: Note) -> None:
    """Press Ctrl-C in the middle of one deed; then the session is idle at once, and the next step is right."""
    rng = note.rng
    deed = rng.choice(deeds_of(stage))
    form, moment, twice = FORMS[note.number // SAME % 2], rng.uniform(0.0, 0.95), rng.random() < 0.2
    note.doing(f"preparing {deed.name}, {form}")
    tidy(stage)
    arrange(stage, deed, form)
    at = moment * seconds(stage, deed)
    if deed.start_up:
        note.tags.append("start-up")
    note.count = 2 if twice else 1
    note.doing(f"SIGINT {'twice ' * twice}in {deed.name} ({form}), {at:.2f} s after it began")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pressed: list[float] = []
    lifted = threading.Event()
    threading.Thread(target=_press, args=(at, 2 if twice else 1, rng.uniform(0.05, 0.6), pressed, lifted)).start()
    started, over = time.monotonic(), 0.0
    try:
        with typed(KeyboardInterrupt) as said:
            try:
                deed.do(stage, form)
            finally:
                over = time.monotonic()
    finally:
        while not lifted.is_set():  # the second one may come here; a join that is interrupted takes the thread for ended
            with contextlib.suppress(KeyboardInterrupt):
                lifted.wait()
    took(stage, deed, over - started, whole=not said)
    if over - pressed[0] > STOPPED_S:
        raise TrialError("hang", f"stopped {over - pressed[0]:.1f} s after the interrupt")
    if stage.session.run is not None and stage.session.run.running:
        raise TrialError("unusable", f"{stage.session.run!r} is still running")
    stage.idle()
    if not deed.parts:
        stage.is_known("before")
    deed.check(stage)
    with typed():
        tidy(stage)
    stage.prove(form)


def _press(after_s: float, times: int, between_s: float, pressed: list[float], lifted: threading.Event) -> None:
    time.sleep(after_s)
    for _ in range(times):
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(between_s)
    lifted.set()
