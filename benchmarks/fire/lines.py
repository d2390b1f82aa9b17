"""SIGINT at a line of hfsdk's code, the k-th that a cell of a simulated session executes: no window is too narrow to be met."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import hfsdk as hf
from fire.stage import OPENINGS, typed
from fire.trials import Note, TrialError
from hfsdk.algorithms import ppo
from hfsdk.session.parts import parts_of

CEILING_S = 120.0

USABLE_S = 30.0
"""Ceiling for being usable after an interrupt, with the checks."""

PACKAGE = str(Path(hf.__file__).parent)
MAIN = "main"


class Desk:
    """A simulated session, its checkpoint, and what the step after it is."""

    def __init__(self, folder: Path) -> None:
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.folder, self.fresh = folder, False
        self.lines: dict[tuple[str, bool], int] = {}
        self.open()
        self.session.train(self.algorithm, self.prompts, steps=1, progress=False)
        self.session.save(folder / "checkpoint")
        self.expected = self.step()

    def open(self) -> None:
        """Open a session and declare its roles; nothing is placed."""
        self.session = hf.Session.simulated("1x2 A100-80GB", seed=3)
        actor = self.session.actor("tiny")
        self.session.critic("tiny")
        self.session.reference(actor)
        self.session.reward(lengths)
        self.prompts = self.session.prompts(OPENINGS, batch_size=4, seed=1)
        self.algorithm = hf.PPO(max_new_tokens=8, mini_batches=2)

    def step(self) -> Any:
        """Load and take a step; returns what is known about it."""
        self.session.place("colocate")
        self.session.load(self.folder / "checkpoint")
        run = self.session.train(self.algorithm, self.prompts, steps=2, progress=False)
        kept = parts_of(self.session).saved.to_save()
        seconds = round(run.rows[-1]["seconds"], 5)  # the first one's clock begins with what was left to do before it
        return seconds, kept["counters"], kept["positions"], len(kept["history"]), self.session.models.actor.version

    def close(self) -> None:
        """End it."""
        self.session.close()


def lengths(completions: list[str]) -> list[float]:
    """Never called: it is simulated."""
    return [0.0] * len(completions)


def ground(folder: Path) -> Desk:
    """Open the session."""
    return Desk(folder)


def _train(desk: Desk) -> None:
    desk.session.train(desk.algorithm, desk.prompts, steps=2, progress=False)


def _train_and_save(desk: Desk) -> None:
    desk.session.train(desk.algorithm, desk.prompts, steps=2, save_every=1, folder=desk.folder / "second", progress=False)


def _train_behind(desk: Desk) -> None:
    desk.session.train(desk.algorithm, desk.prompts, steps=2, progress=False, wait=False).wait()


def _resume(desk: Desk) -> None:
    desk.session.train(desk.algorithm, desk.prompts, steps=1, resume=desk.folder / "checkpoint", progress=False)


def _place(desk: Desk) -> None:
    desk.session.place({"actor reference": 1, "critic": 1})
    desk.session.place("colocate")


def _by_hand(desk: Desk) -> None:
    models = desk.session.models
    batch = models.actor.generate(next(desk.prompts), max_new_tokens=8)
    batch = models.critic.compute_values(models.actor.compute_log_probs(batch)).wait()
    batch = models.reference.compute_log_probs(models.reward.compute_scores(batch))
    models.actor.update(ppo.advantages(batch), ppo.PolicyLoss()).wait()


def _rewind(desk: Desk) -> None:
    before = desk.session.snapshot("before")
    _train(desk)
    desk.session.rewind(before)
    desk.session.forget(before)


def _late(desk: Desk) -> None:
    late = desk.session.critic("tiny", name="late")
    try:
        late.compute_values(desk.session.batch(prompt=[[1]], response=[[2]])).wait()
    finally:
        late.release()


DEEDS: dict[str, Callable[[Desk], None]] = {
    "train": _train, "train with saves": _train_and_save, "train in the background": _train_behind, "train, resumed": _resume,
    "place": _place, "save": lambda desk: desk.session.save(desk.folder / "second"),  # type: ignore[dict-item]
    "save behind": lambda desk: desk.session.save(desk.folder / "second", wait=False).wait(),  # type: ignore[dict-item]
    "load": lambda desk: desk.session.load(desk.folder / "checkpoint"), "calls by hand": _by_hand, "rewind": _rewind,
    "first loads": _late,
    "plan": lambda desk: desk.session.plan(desk.algorithm, hf.Workload(prompts=8, prompt_tokens=8, response_tokens=8)),  # type: ignore[dict-item]
    "evaluate, history, trace": lambda desk: (desk.session.history, desk.session.trace, repr(desk.session.view())),  # type: ignore[dict-item]
}  # fmt: skip
START_UPS = ("train", "train in the background", "train, resumed", "place", "save", "save behind", "first loads")


def trial(desk: Desk, note: Note) -> None:
    """Interrupt one deed at one line, in a new session or one that has been used; then the step after ``load`` is the known one."""
    rng = note.rng
    name = rng.choice(list(DEEDS))
    fresh, where = name in START_UPS and rng.random() < 0.4, rng.random()
    note.tags += ["start-up"] if fresh else []
    note.doing(f"{name}, {'in a new session' if fresh else 'in a used one'}: how many lines")
    if (name, fresh) not in desk.lines:
        _ready(desk, fresh)
        counter = Tracer(0)
        counter.run(lambda: DEEDS[name](desk))
        desk.lines[name, fresh] = counter.count
    _ready(desk, fresh)
    at = 1 + int(where * desk.lines[name, fresh])
    tracer = Tracer(at)
    note.doing(f"{name}, {'in a new session' if fresh else 'in a used one'}: SIGINT at line {at} of {desk.lines[name, fresh]}")
    with typed(KeyboardInterrupt):
        tracer.run(lambda: DEEDS[name](desk))
    note.what += f" ({tracer.where})"
    note.doing(note.what)
    started = time.monotonic()
    _over(desk)
    with typed() as first:  # a background save that failed by the interrupt is told once
        desk.session.save(desk.folder / "third")
    try:
        step = desk.step()
    except hf.HfsdkError as error:
        raise TrialError("unusable", f"load and step: {type(error).__name__}: {error}") from error
    if step != desk.expected:
        raise TrialError("wrong state", f"the step after load is {step}; it was {desk.expected}"[:3000])
    if first:
        with typed() as again:
            desk.session.save(desk.folder / "third")
        if again:
            raise TrialError("unusable", f"save: {again}")
    if time.monotonic() - started > USABLE_S:
        raise TrialError("hang", f"usable after {time.monotonic() - started:.0f} s")


def _ready(desk: Desk, fresh: bool) -> None:
    for name in ("second", "third"):
        shutil.rmtree(desk.folder / name, ignore_errors=True)
    if fresh:
        desk.session.close()
        desk.open()
        return
    desk.session.place("colocate")
    desk.session.load(desk.folder / "checkpoint")


def _over(desk: Desk) -> None:
    """Wait until what was interrupted has come to its end; a run in the background goes on and is stopped."""
    for handle in desk.session.roles:
        if handle.name == "late":  # declared, and interrupted before anyone had its handle
            handle.release()
    run = desk.session.run
    if run is not None and run.running:
        run.stop()
    until = time.monotonic() + USABLE_S
    while desk.session.status != "idle" or (run is not None and run.running):
        if time.monotonic() > until:
            raise TrialError("unusable", f"{desk.session.status}, {run!r} {USABLE_S:g} s later, though it was told to stop")
        time.sleep(0.01)


class Tracer:
    """Counts the lines of hfsdk that this thread executes, and sends SIGINT at one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self.where = at, 0, "it was over before"

    def run(self, work: Callable[[], Any]) -> None:
        """Do something under the tracer."""
        sys.settrace(self._frame)
        try:
            work()
        finally:
            sys.settrace(None)

    def _frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.where = f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_lineno}"
                os.kill(os.getpid(), signal.SIGINT)
        return self._line
