"""What the controller remembers of each call and each role."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from hfsdk.dataflow import Call
from hfsdk.engine.messages import Submit
from hfsdk.errors import CallError
from hfsdk.placement import Pool
from hfsdk.roles import RoleSpec
from hfsdk.runtime import Stored
from hfsdk.trace import Span

FINISHED = ("done", "failed", "cancelled")


@dataclass(eq=False)
class CallRecord:
    """One call from submission to its end."""

    call: Call
    request: Submit | None
    pool: Pool | None = None
    state: str = "pending"
    error: Exception | None = None
    seen: bool = False
    """Whether the user has seen the failure."""
    cancel_asked: bool = False
    stored: Stored | None = None
    result: Any = None
    released: bool = False
    finished: threading.Event = field(default_factory=threading.Event)
    start_ns: int = 0
    start_s: float = 0.0
    duration_s: float | None = None
    spans: tuple[Span, ...] = ()
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def begin(self) -> bool:
        """The call starts to run, unless it was cancelled before; return whether it does."""
        with self._turn:
            if self.cancel_asked or self.state in FINISHED:
                return False
            self.state, self.start_ns, self.start_s = "running", time.time_ns(), time.perf_counter()
            return True

    def ask_cancel(self) -> bool:
        """Note that the call shall stop; return whether it runs already, and so has to be told."""
        with self._turn:
            self.cancel_asked = True
            return self.state == "running"

    def end(self, state: str, error: Exception | None = None) -> None:
        """The call is over; whoever waits goes on."""
        if self.start_ns:
            self.duration_s = time.perf_counter() - self.start_s
        self.state, self.error = state, error
        self.finished.set()

    @property
    def span(self) -> Span:
        """The call's own span on the controller's lane."""
        duration = self.duration_s
        return Span(
            name=self.call.method, role=self.call.role, call_id=self.call.id, method=self.call.method, step=self.call.step,
            pool=self.pool.name if self.pool else "", start_ns=self.start_ns or time.time_ns(), duration_s=duration,
            phase=self.call.phase, attrs={"rows": self.call.num_rows, "state": self.state, "line": self.call.line},
        )  # fmt: skip


@dataclass(eq=False)
class RoleRecord:
    """A declared role and where it stands."""

    spec: RoleSpec
    loaded: bool = False
    pool: Pool | None = None
    num_updates: int = 0
    """Optimizer steps finished since the initial weights."""
    checkpoint: str = ""
    """Folder of the last checkpoint, for rebuilding its pool."""
    checkpoint_updates: int = 0
    restore: str = ""
    """Folder to load after the initial weights, once: the checkpoint of a role whose pool died."""
    unseen: CallRecord | None = None
    """A failure nobody has looked at: raised at the next call on this role."""


def raised(error: Exception) -> Exception:
    """Return a fresh copy of a stored error, so that each look has its own traceback."""
    if isinstance(error, CallError):
        copy = type(error)(error.message, **error.fields())
        copy.__cause__ = error.__cause__
        return copy
    return error.with_traceback(None)
