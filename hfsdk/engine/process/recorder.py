"""Spans and progress of one worker: recorded where the work happens, collected by the control lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hfsdk.core.trace import Span
from hfsdk.engine.process.clocks import Clock, Instant, WallClock


@dataclass
class Recorder:
    """Collects a worker's spans; safe to read from another thread.

    ``with recorder.span("forward", tokens=128): ...`` records when ``clock`` says it was, the thread's CPU seconds (``cpu_s``), and
    what ``gauge`` reads at the span's end (memory); where the clock is a GPU's, the host's seconds too (``host_s``).
    """

    device: int
    rank: int
    pool: str = ""
    gauge: Callable[[], Mapping[str, float | int]] = dict
    clock: Clock = field(default_factory=WallClock)
    done: list[Span] = field(default_factory=list)
    running: list[Span] = field(default_factory=list)
    progress: dict[str, float] = field(default_factory=dict)
    """Counters of the running call, e.g. ``{"tokens": 120, "total": 512}``; replaced as a whole."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: list[tuple[Span, Instant, Instant]] = field(default_factory=list)
    """Spans that are over for the host, and whose times have not been told yet."""
    _call: Span | None = None

    @contextmanager
    def call(self, span: Span) -> Iterator[None]:
        """Make ``span`` the template (role, call_id, method, step, phase) of everything recorded inside.

        Raises:
            RuntimeError: at the end, a kernel failed; the spans then have the host's times.
        """
        self._file()
        self.clock.anchor()
        self._call = span
        self.progress = {}
        try:
            yield
        finally:
            self._call = None
            self._file()

    @contextmanager
    def span(self, name: str, **attrs: float | int | str) -> Iterator[dict[str, float | int | str]]:
        """Record a span; the yielded dict takes attributes known only at the end."""
        template = self._call or Span(name=name, role="", call_id=-1, start_ns=0)
        more: dict[str, float | int | str] = dict(attrs)
        begin = self.clock.now()
        with self._lock:
            parent = self.running[-1].name if self.running else ""
            span = replace(
                template, name=name, device=self.device, rank=self.rank, pool=self.pool, parent=parent,
                start_ns=begin.wall_ns, duration_s=None, attrs=more,
            )  # fmt: skip
            self.running.append(span)
        cpu = time.thread_time()
        try:
            yield more
        finally:
            with self._lock:
                self.running.remove(span)
            end = self.clock.now()
            more["cpu_s"] = time.thread_time() - cpu
            more.update(self.gauge())
            self._ended.append((replace(span, attrs=dict(more)), begin, end))

    def _file(self) -> None:
        """Find out when the ended spans were, which on a GPU waits for them, and add them to the finished ones."""
        ended, self._ended = self._ended, []
        pairs = [(begin, end) for _, begin, end in ended]
        host = times = WallClock().times(pairs)
        try:
            times = self.clock.times(pairs)
        finally:
            stamped: list[Span] = []
            for (span, *_), (start_ns, seconds), (_, host_s) in zip(ended, times, host, strict=True):
                attrs = {**span.attrs, "host_s": host_s} if self.clock.of_gpu else span.attrs
                stamped.append(replace(span, start_ns=start_ns, duration_s=seconds, attrs=attrs))
            with self._lock:
                self.done += stamped

    def take(self) -> tuple[list[Span], list[Span]]:
        """Return (finished spans since the last take, running spans)."""
        self._file()
        with self._lock:
            done, self.done = self.done, []
            return done, list(self.running)
