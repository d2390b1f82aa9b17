"""``RunRecord``: what the finished steps of a run left: their numbers, where their time went, a few samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hfsdk.core.rows import Row, Rows
from hfsdk.core.trace import KEPT_STEPS, Trace
from hfsdk.session.best_checkpoint import BestCheckpoint

NUM_SAMPLES = 3
MEASURED = ("seconds", "tokens_per_s", "busy_share", "memory_bytes", "cost")
"""Of a step's row what is measured, and so differs from run to run."""

CallTime = tuple[str, float, float]
"""A call's name, its start within the step in seconds, and its seconds."""


@dataclass(frozen=True)
class Restored:
    """A worker's death that a run went on after."""

    step: int
    """The step in which, or after which, it was told."""
    back_to: int
    """The step after whose save the run went on; one less than its first where that was its start."""
    seconds: float
    """From the error until everything was as it was saved; the workers' start included."""
    error: str
    """What died, in a line."""

    def __str__(self) -> str:
        return (
            f"a worker died in step {self.step}, and the run goes on from its save after step {self.back_to}, "
            f"{self.seconds:.1f} s later: {self.error}"
        )


@dataclass(frozen=True)
class Resized:
    """Nodes left the cluster or came back, and a run went on over other devices."""

    step: int
    """The step after which it did."""
    num_devices: int
    """That it goes on over."""
    of_devices: int
    """Of the whole cluster."""
    seconds: float
    """Until the roles were there."""
    why: str
    """Who left or came back, in words."""

    def __str__(self) -> str:
        over = f"{self.num_devices} of {self.of_devices}" if self.num_devices < self.of_devices else f"all {self.of_devices}"
        return f"{self.why}: after step {self.step} the run goes on over {over} devices ({self.seconds:.1f} s)"


@dataclass(eq=False)
class RunRecord:
    """The finished steps of a run. Calls and samples are kept of the newest steps alone."""

    rows: Rows = field(default_factory=Rows)
    """One dict of numbers per step."""
    last: Any = None
    """The last step, with its batch."""
    num_devices: int = 0
    """Devices that the run holds."""
    price_per_device_hour: float = 0.0
    """In any currency; 0 where it is not known."""
    predicted: bool = False
    """Whether the seconds are those of a virtual clock."""
    saved: dict[str, Any] | None = None
    """The last save of ``save_every``: its ``folder``, and the ``step`` after which it was written."""
    calls: dict[int, list[CallTime]] = field(default_factory=dict)
    """By step."""
    trace_steps: dict[int, int] = field(default_factory=dict)
    """A step's number in the run -> its number in ``session.trace``."""
    samples: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    """By step."""
    warnings: list[str] = field(default_factory=list)
    """What the numbers say is wrong (:mod:`hfsdk.session.health`), each with its step."""
    best: BestCheckpoint | None = None
    """The best checkpoint so far, of a run that keeps it."""
    restores: list[Restored] = field(default_factory=list)
    """The deaths that it went on after."""
    failed_step: int | None = None
    """The step in which the run ended by an error."""
    resized: list[Resized] = field(default_factory=list)
    """When it went on over fewer devices, and over all of them again."""

    @property
    def device_hours(self) -> float:
        """Devices times the hours of the steps."""
        seconds = [row.get("seconds") for row in self.rows]
        return self.num_devices * sum(s for s in seconds if isinstance(s, float | int) and math.isfinite(s)) / 3600

    @property
    def cost(self) -> float | None:
        """What these device-hours cost; ``None`` where there is no price."""
        return self.device_hours * self.price_per_device_hour if self.price_per_device_hour else None

    def add(self, row: Row, step: Any, trace: Trace, trace_step: int, samples: list[Mapping[str, Any]]) -> None:
        """Take a finished step: its numbers, where its time went, and a few samples."""
        self.rows.append(row)
        self.last = step
        number = row["step"]
        ended = [(s, s.duration_s) for s in trace.calls if s.duration_s is not None]
        calls = [(f"{s.role}.{s.method or s.name}".lstrip("."), (s.start_ns - trace.start_ns) / 1e9, took) for s, took in ended]
        self.predicted = trace.source == "predicted"
        self.calls[number], self.trace_steps[number], self.samples[number] = calls, trace_step, samples
        for kept in (self.calls, self.trace_steps, self.samples):
            for old in list(kept)[:-KEPT_STEPS]:
                del kept[old]

    def cut_after(self, step: int) -> None:
        """Leave of the run what was until a step."""
        self.rows = Rows(row for row in self.rows if row["step"] <= step)
        for kept in (self.calls, self.trace_steps, self.samples):
            for late in [number for number in kept if number > step]:
                del kept[late]


def resources(trace: Trace, seconds: float, num_devices: int, price_per_second: float) -> dict[str, float]:
    """Return what a step took of the devices: tokens_per_s, busy_share, memory_bytes of the fullest device, cost.

    Tokens are those generated; busy is the mean over the ``num_devices`` that have a role, those that ran nothing included.
    Numbers that nothing measured are left out.
    """
    taken: dict[str, float] = {}
    made = [float(s.attrs["tokens"]) for s in trace.calls if s.phase == "generation" and "tokens" in s.attrs]
    if made and seconds > 0:
        taken["tokens_per_s"] = sum(made) / seconds
    total, idle = trace.device_seconds()
    if total and num_devices:
        taken["busy_share"] = (total - idle) / (num_devices * trace.duration_s)
    for gauge in ("allocated_bytes", "rss_bytes"):  # of the GPU where there is one
        used = [float(s.attrs[gauge]) for s in trace if gauge in s.attrs]
        if used:
            break
    if used:
        taken["memory_bytes"] = max(used)
    if price_per_second > 0:
        taken["cost"] = price_per_second * seconds
    return taken
