"""The times of a span's ends: by the host's clock or, on a GPU, by events in the stream of its kernels.

The host launches kernels and runs ahead of the GPU. By its clock a forward pass takes as long as launching it does, and the span
that waits for the GPU next pays for it. An event fires when the GPU has done what was launched before it::

    host             | forward | backward |                 optimizer (reads a norm: waits)             |
    GPU              [ kernels of forward      ][ of backward                     ][ of the optimizer ]
    spans by events  | forward                  | backward                         | optimizer          |

So by events every span takes what it takes of the stream's time, and those of one stream follow each other and nest as they do in
the program. That holds for work of the host too: it counts where the GPU waits for it, and not where the GPU is busy meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol


@dataclass(frozen=True)
class Instant:
    """The time at which the host passed one end of a span, and the event it left there for the GPU to pass."""

    wall_ns: int
    """Nanoseconds since 1970, as ``time.time_ns`` has them."""
    host_s: float
    """``time.perf_counter``."""
    event: Any = None


class Clock(Protocol):
    """Notes instants, and tells later when spans between them were."""

    of_gpu: bool
    """Whether its times are those of a GPU's stream, and the host's own seconds are something else."""

    def anchor(self) -> None:
        """Begin a stretch of instants; those of the stretch before were told of."""
        ...

    def now(self) -> Instant:
        """Note an instant; does not wait for the GPU."""
        ...

    def times(self, spans: Sequence[tuple[Instant, Instant]]) -> list[tuple[int, float]]:
        """Return (start_ns, duration_s) of each span, once all of them are over; their instants are used up.

        Raises:
            RuntimeError: a kernel failed, and the GPU will not pass them.
        """
        ...


class WallClock:
    """The host's clock: ``time.perf_counter``, and where that stood by the wall clock at the anchor.

    Two clocks that are read one after the other at either end of a span disagree by as long as the thread was off its core between
    the two reads, and then a span ends before what happened inside it. One read an instant cannot.
    """

    of_gpu = False

    def __init__(self) -> None:
        self.anchor()

    def anchor(self) -> None:
        """Read both clocks, at once as nearly as can be: the wall clock may have been set, and drifts against the other."""
        reads = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(3)]
        before, wall, after = min(reads, key=lambda read: read[2] - read[0])
        self._ahead_ns = wall - (before + after) // 2

    def now(self) -> Instant:
        """Note an instant."""
        host_ns = time.perf_counter_ns()
        return Instant(host_ns + self._ahead_ns, host_ns / 1e9)

    def times(self, spans: Sequence[tuple[Instant, Instant]]) -> list[tuple[int, float]]:
        """Return when the host passed both ends."""
        return [(begin.wall_ns, end.host_s - begin.host_s) for begin, end in spans]


class EventClock:
    """Events in the stream that is current where they are noted, with one pair of event and wall clock to begin with.

    Events are kept and used again.

    Args:
        new_event: makes an event that knows its time; CUDA's, unless a test has none.
    """

    of_gpu = True

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        self._new_event = new_event or _cuda_event
        self._free: list[Any] = []
        self._host = WallClock()
        self._anchor: Any = None
        self._anchor_ns = 0

    def anchor(self) -> None:
        """Wait for the GPU once, and note that it is where the wall clock is."""
        event = self._record()
        event.synchronize()
        self._host.anchor()
        self._anchor_ns = self._host.now().wall_ns
        if self._anchor is not None:
            self._free.append(self._anchor)
        self._anchor = event

    def now(self) -> Instant:
        """Leave an event in the current stream."""
        if self._anchor is None:
            self.anchor()
        return replace(self._host.now(), event=self._record())

    def times(self, spans: Sequence[tuple[Instant, Instant]]) -> list[tuple[int, float]]:
        """Wait until the GPU has passed the last event, and return when it passed each."""
        offsets_ms = []
        for begin, end in spans:
            end.event.synchronize()
            offsets_ms.append((self._anchor.elapsed_time(begin.event), begin.event.elapsed_time(end.event)))
        self._free += [instant.event for span in spans for instant in span]
        return aligned(self._anchor_ns, offsets_ms)

    def _record(self) -> Any:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event


def aligned(anchor_ns: int, offsets_ms: Sequence[tuple[float, float]]) -> list[tuple[int, float]]:
    """Return (start_ns, duration_s) of spans whose (start after the anchor, duration) events tell in milliseconds.

    A duration is measured by itself: an event's time is a 32-bit float, whose steps an hour after the anchor are a quarter of a
    millisecond.
    """
    return [(anchor_ns + round(start * 1e6), took / 1e3) for start, took in offsets_ms]


def _cuda_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)
