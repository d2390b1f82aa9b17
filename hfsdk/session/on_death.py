"""``train(on_death="restore")``: a worker that dies costs a run the steps since the last save, and it goes on by itself.

::

    step    0  1  2  3  4 [save]  5  6  7 x            a worker is killed in step 7
                                  5  6  7  8  9 [save] 10 ...    the same prompts and seeds again: the same numbers

A save has all that a step depends on: weights, optimizers, the prompts' places, counters of seeds; but for what a function of the
user's keeps between calls.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hfsdk.core.checks import check_options
from hfsdk.core.errors import HfsdkError, LostColumnError, OptionError, PlacementError, WorkerDiedError
from hfsdk.core.methods import RESTORE as RESTORED
from hfsdk.engine.calls import messages as m
from hfsdk.session.keep_best import Keeper
from hfsdk.session.run_control import RunControl
from hfsdk.session.run_record import Resized, Restored
from hfsdk.session.session_parts import Parts
from hfsdk.session.shrinking import Smaller

RAISE, RESTORE = "raise", "restore"

MOST_CHARACTERS = 160
"""Of an error that is told; the whole of it is in the trace."""


def check_on_death(on_death: str, save_every: int, *, shrink: bool = False) -> None:
    """Refuse what cannot be gone on with.

    Raises:
        OptionError: there is no such way, nothing would be saved, or nothing would shrink.
    """
    check_options("train", shrink=(shrink, bool))
    if on_death not in (RAISE, RESTORE):
        raise OptionError(f'on_death is "{RAISE}" or "{RESTORE}"; got {on_death!r}')
    if on_death == RESTORE and not save_every:
        raise OptionError(
            'on_death="restore" goes on from the last save, and this run makes none: give it a folder and say how many steps a '
            'death may cost, e.g. folder="checkpoint", save_every=10'
        )
    if shrink and on_death != RESTORE:
        raise OptionError('shrink=True says where a run goes on after a node\'s death; it needs on_death="restore"')


def is_death(error: BaseException) -> bool:
    """Whether an error tells of a worker that died: itself, or of a column that is gone with it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WorkerDiedError | LostColumnError):
            return True
        cause = cause.__cause__
    return False


@dataclass(eq=False)
class Restorer:
    """Goes back to the last save of a run after a death."""

    parts: Parts
    control: RunControl
    best: Keeper | None
    most: int
    """Deaths that the run goes on after."""
    folder: str | Path
    keep: int
    smaller: Smaller | None = None
    """Where it goes on without a node, if it may."""
    in_vain: frozenset[int] | None = None
    """What was missing when the roles could not move back."""

    def begin(self) -> None:
        """Save the start, for a death before the first save."""
        parts = self.parts
        with self.control.saving():
            parts.saves.save(self.folder, keep=self.keep)
        self.control.record.saved = {"folder": str(self.folder), "step": parts.context.next_step() - 1}

    def is_death(self, error: HfsdkError) -> bool:
        """Whether an error tells of a worker that died, or of a node that has left and is not gone without yet."""
        if self.control.is_stop(error):
            return False
        left = isinstance(error, PlacementError) and self.smaller is not None and not self.smaller.missing() <= self.smaller.absent
        return is_death(error) or left

    def go_back(self, error: HfsdkError) -> None:
        """Restore the last save: roles, prompts, counters and history; of the run, the steps until then are left.

        Raises:
            HfsdkError: ``error`` itself, where there were as many deaths before; or what the save cannot be loaded by.
        """
        record, parts, begun, begun_ns = self.control.record, self.parts, time.monotonic(), time.time_ns()
        died_in, before = parts.context.next_step(), parts.deployment.absent
        while True:
            if len(record.restores) == self.most:
                parts.context.notice(f"the run went on after {self.most} deaths of workers, and may after no more (max_restores)")
                raise error
            text = textwrap.shorten(str(error).split("\n", 1)[0], MOST_CHARACTERS, placeholder=" ...")
            missing = self._missing()
            if self.smaller is not None and missing:
                self.smaller.fit(missing)  # what fits nowhere is told as that
            record.restores.append(Restored(died_in, died_in, 0.0, text))
            try:
                with self._seen():
                    if self.smaller is not None and missing != self.smaller.absent:
                        self.smaller.move(missing, fresh=True)
                    parts.saves.load(self.folder)
                break
            except HfsdkError as again:  # another one died meanwhile
                if not self.is_death(again):
                    record.restores.pop()
                    raise
                if self._missing() != missing:
                    record.restores.pop()  # the same death: that its node had left was not known yet
                else:
                    error = again
        back_to = parts.context.next_step() - 1  # as the save has it: the worker may have died when it was complete
        if self.best is not None:
            self.best.count_again()
        record.cut_after(back_to)
        seconds = time.monotonic() - begun
        restored = record.restores[-1] = Restored(died_in, back_to, seconds, text)
        parts.client.send(m.Note(RESTORED.name, begun_ns, seconds, str(restored)))
        parts.context.notice(f"{restored} ({len(record.restores)} of {self.most} restores)")
        if self.smaller is not None and self.smaller.absent != before:
            self._tell_resized(self.smaller, before, back_to, seconds)

    def grow(self) -> None:
        """Between two steps: where nodes that had left are there again, have the roles move there with what they have learned.

        Where they cannot, the run goes on as it was, until other nodes are there.

        Raises:
            WorkerDiedError: a worker ended meanwhile.
        """
        if self.smaller is None or not self.smaller.absent:
            return
        missing, before = self.smaller.missing(), self.smaller.absent
        if not missing < before or missing == self.in_vain:
            return
        begun, begun_ns = time.monotonic(), time.time_ns()
        with self.control.saving():
            try:
                self.smaller.move(missing, fresh=False)
            except HfsdkError as error:
                if is_death(error) or self.control.is_stop(error):
                    raise
                self.in_vain = missing
                self.parts.context.notice(
                    f"a node came back, and the run cannot go on over it: {str(error).rstrip('.')}. It goes on without."
                )
                self.smaller.move(before, fresh=False)
                return
        seconds = time.monotonic() - begun
        resized = self._tell_resized(self.smaller, before, self.parts.context.next_step() - 1, seconds)
        self.parts.client.send(m.Note(RESTORED.name, begun_ns, seconds, str(resized)))

    def _missing(self) -> frozenset[int]:
        return self.smaller.missing() if self.smaller is not None else frozenset()

    def _tell_resized(self, smaller: Smaller, before: frozenset[int], step: int, seconds: float) -> Resized:
        why, of_devices = smaller.changes(before), self.parts.context.cluster.num_devices
        resized = Resized(step, smaller.num_devices(), of_devices, seconds, why)
        self.control.record.resized.append(resized)
        self.parts.context.notice(str(resized))
        return resized

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """While calls end that the death has failed: they tell nothing new."""
        self.parts.client.drain()
        self.parts.client.send(m.Overlook())
        with self.control.saving():
            yield


def restorer(
    parts: Parts, control: RunControl, best: Keeper | None, on_death: str, most: int, saving: tuple[int, str | Path, int],
    smaller: Smaller | None,
) -> Restorer | None:  # fmt: skip
    """Return what a run goes on by after a death, if that was asked for."""
    _, folder, keep = saving
    return Restorer(parts, control, best, most, folder, keep, smaller) if on_death == RESTORE else None
