"""One call, judged by the law: it succeeds or raises one clear line, soon, before anything is changed, without gigabytes."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import hfsdk as hf
from hfsdk.core.pending import Pending

from .inventory import Target
from .strategies import Stage, bind
from .values import DeliberateError, shown

PACKAGE = str(Path(hf.__file__).parent)
MOST_CHARACTERS = 1000
"""Of a message of one line; messages of calls that failed on a worker bring its traceback along."""
BUSY = 4
"""How much longer a call may take where others use the machine: its limit is of processor time."""
REFUSAL_S = 1.0
"""Of the processor, until a call that is refused says so."""
MOST_BYTES = 600e6
"""That one call may add to the process at its largest."""

SHOWS_LATE = ("ProcessGRPO.step",)
"""Targets that may be refused after calls of theirs: that a reward says nothing of steps shows where its scores are there."""


class TooSlow(BaseException):
    """Raised by the alarm, past every ``except Exception``."""


@dataclass(frozen=True)
class Outcome:
    """What came of a call: ``kind`` is ``"succeeded"``, ``"refused"``, or what it did wrong."""

    kind: str
    text: str = ""
    trace: str = ""

    @property
    def held(self) -> bool:
        """Whether the law was kept."""
        return self.kind in ("succeeded", "refused")


def judge(target: Target, given: Mapping[str, Any], limit_s: float) -> Outcome:
    """Make one call and say what came of it."""
    receiver = [Stage.world.get(target.owner.__name__)] if target.owner is not None else []
    args, options = bind(target, given)
    _forget_peak()
    before, size = Stage.world.state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    try:
        with _alarm(BUSY * limit_s), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _finish(target.call(*receiver, *args, **options))
        outcome = Outcome("succeeded")
    except TooSlow:
        return Outcome("slow", f"still under way after {BUSY * limit_s:g} s", _where())
    except BaseException as error:
        outcome = _judged(target, error)
        late = isinstance(error, hf.CallError | hf.SimulatedValueError) or target.name in SHOWS_LATE
        if outcome.kind == "refused" and not late:
            changed = _difference(before, Stage.world.state())
            outcome = Outcome("changed", f"{changed} by a call that raised {error!s:.200}", _where()) if changed else outcome
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size) * 1024
    if grown > MOST_BYTES:
        return Outcome("memory", f"took {grown / 1e9:.1f} GB")
    seconds = time.process_time() - began
    limit_s = min(limit_s, REFUSAL_S) if outcome.kind == "refused" else limit_s
    return Outcome("slow", f"took {seconds:.1f} s of the processor") if seconds > limit_s else outcome


def _forget_peak() -> None:
    """Let the process's peak of memory start again from what it holds, or a call after a larger one would seem to take nothing."""
    with contextlib.suppress(OSError):  # elsewhere than on Linux the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def _finish(result: Any) -> None:
    """Wait for what a call has begun, and end what it has opened."""
    if isinstance(result, Pending):
        try:
            result.wait(2)
        except TimeoutError:  # much was asked for, and it goes on
            result.cancel()
    elif isinstance(result, hf.Session):
        result.close()
    elif isinstance(result, hf.Run) and result.running:
        result.stop()
        result.wait(2)
    elif type(result).__name__ == "Saving":
        result.wait()


def _judged(target: Target, error: BaseException) -> Outcome:
    try:
        text = str(error)
    except BaseException as inner:
        return Outcome("unclear", f"{type(error).__name__} whose text raises {type(inner).__name__}", _where())
    words = f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and frames[-1].filename.startswith(PACKAGE)
    if isinstance(error, DeliberateError):
        own = any(frame.name == "raises" for frame in frames)
        return Outcome("refused", words) if own else Outcome("bare", words, _where())
    if isinstance(error, hf.CallError):  # it ran, and failed on a worker, whose traceback comes along
        return Outcome("refused", words)
    if isinstance(error, TimeoutError) and ours:
        return Outcome("refused", words)
    if isinstance(error, KeyError | IndexError) and target.name.endswith("__getitem__") and ours:
        return Outcome("refused", words)
    if not isinstance(error, hf.HfsdkError):
        named = any(parameter.name in text for parameter in target.parameters)
        if not (isinstance(error, TypeError | ValueError) and ours and named):
            return Outcome("bare", f"{words[:300]}", _where())
    if len(text) > MOST_CHARACTERS or len(text.splitlines()) > _most_lines(error):
        return Outcome("unclear", f"{len(text)} characters in {len(text.splitlines())} lines: {ascii(words)[:300]}", _where())
    if not text.strip():
        return Outcome("unclear", f"{type(error).__name__} without a text", _where())
    return Outcome("refused", words)


def _most_lines(error: BaseException) -> int:
    return 12 if isinstance(error, hf.DeviceMemoryError) else 1  # one line per role


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    if not before or not after:
        return ""
    changed = [key for key in before if before[key] != after[key]]
    changed = [key for key in changed if key != "open" or after[key] > before[key]]  # others have ended meanwhile
    return ", ".join(f"{key}: {shown(before[key])} -> {shown(after[key])}" for key in changed)


def _where() -> str:
    return "".join(traceback.format_exc(limit=-6)[-3000:])


@contextlib.contextmanager
def _alarm(limit_s: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
