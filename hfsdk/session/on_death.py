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

from hfsdk.core.errors import HfsdkError, LostColumnError, OptionError, WorkerDiedError
from hfsdk.engine.calls import messages as m
from hfsdk.session.keep_best import Keeper
from hfsdk.session.run_control import RunControl
from hfsdk.session.run_record import Restored
from hfsdk.session.session_parts import Parts

RAISE, RESTORE = "raise", "restore"

MOST_CHARACTERS = 160
"""Of an error that is told; the whole of it is in the trace."""


def check_on_death(on_death: str, save_every: int) -> None:
    """Refuse what cannot be gone on with.

    Raises:
        OptionError: there is no such way, or nothing would be saved.
    """
    if on_death not in (RAISE, RESTORE):
        raise OptionError(f'on_death is "{RAISE}" or "{RESTORE}"; got {on_death!r}')
    if on_death == RESTORE and not save_every:
        raise OptionError(
            'on_death="restore" goes on from the last save, and this run makes none: give it a folder and say how many steps a '
            'death may cost, e.g. folder="checkpoint", save_every=10'
        )


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

    def begin(self) -> None:
        """Save the start, for a death before the first save."""
        parts = self.parts
        with self.control.saving():
            parts.saves.save(self.folder, keep=self.keep)
        self.control.record.saved = {"folder": str(self.folder), "step": parts.context.next_step() - 1}

    def go_back(self, error: HfsdkError) -> None:
        """Restore the last save: roles, prompts, counters and history; of the run, the steps until then are left.

        Raises:
            HfsdkError: ``error`` itself, where there were as many deaths before; or what the save cannot be loaded by.
        """
        record, parts, begun = self.control.record, self.parts, time.monotonic()
        died_in = parts.context.next_step()
        while True:
            if len(record.restores) == self.most:
                parts.context.notice(f"the run went on after {self.most} deaths of workers, and may after no more (max_restores)")
                raise error
            text = textwrap.shorten(str(error).split("\n", 1)[0], MOST_CHARACTERS, placeholder=" ...")
            record.restores.append(Restored(died_in, died_in, 0.0, text))
            try:
                with self._seen():
                    parts.saves.load(self.folder)
                break
            except HfsdkError as again:  # another one died meanwhile
                if not is_death(again):
                    raise
                error = again
        back_to = parts.context.next_step() - 1  # as the save has it: the worker may have died when it was complete
        if self.best is not None:
            self.best.count_again()
        record.cut_after(back_to)
        record.restores[-1] = Restored(died_in, back_to, time.monotonic() - begun, text)
        parts.context.notice(f"{record.restores[-1]} ({len(record.restores)} of {self.most} restores)")

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """While calls end that the death has failed: they tell nothing new."""
        self.parts.client.drain()
        self.parts.client.send(m.Overlook())
        with self.control.saving():
            yield


def restorer(
    parts: Parts, control: RunControl, best: Keeper | None, on_death: str, most: int, saving: tuple[int, str | Path, int]
) -> Restorer | None:
    """Return what a run goes on by after a death, if that was asked for."""
    _, folder, keep = saving
    return Restorer(parts, control, best, most, folder, keep) if on_death == RESTORE else None
