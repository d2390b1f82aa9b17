"""Spans and progress of one worker: recorded where the work happens, collected by the control lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hfsdk.trace import Span


@dataclass
class Recorder:
    """Collects a worker's spans; safe to read from another thread.

    ``with recorder.span("forward", tokens=128): ...`` records wall time and the thread's CPU seconds (``cpu_s``), and what
    ``gauge`` reads at the span's end (memory).
    """

    device: int
    rank: int
    pool: str = ""
    gauge: Callable[[], Mapping[str, float | int]] = dict
    done: list[Span] = field(default_factory=list)
    running: list[Span] = field(default_factory=list)
    progress: dict[str, float] = field(default_factory=dict)
    """Counters of the running call, e.g. ``{"tokens": 120, "total": 512}``; replaced as a whole."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _call: Span | None = None

    @contextmanager
    def call(self, span: Span) -> Iterator[None]:
        """Make ``span`` the template (role, call_id, method, step, phase) of everything recorded inside."""
        self._call = span
        self.progress = {}
        try:
            yield
        finally:
            self._call = None

    @contextmanager
    def span(self, name: str, **attrs: float | int | str) -> Iterator[dict[str, float | int | str]]:
        """Record a span; the yielded dict takes attributes known only at the end."""
        template = self._call or Span(name=name, role="", call_id=-1, start_ns=0)
        more: dict[str, float | int | str] = dict(attrs)
        with self._lock:
            parent = self.running[-1].name if self.running else ""
            span = replace(
                template, name=name, device=self.device, rank=self.rank, pool=self.pool, parent=parent,
                start_ns=time.time_ns(), duration_s=None, attrs=more,
            )  # fmt: skip
            self.running.append(span)
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            yield more
        finally:
            seconds = time.perf_counter() - start
            more["cpu_s"] = time.thread_time() - cpu
            more.update(self.gauge())
            with self._lock:
                self.running.remove(span)
                self.done.append(replace(span, duration_s=seconds, attrs=dict(more)))

    def take(self) -> tuple[list[Span], list[Span]]:
        """Return (finished spans since the last take, running spans)."""
        with self._lock:
            done, self.done = self.done, []
            return done, list(self.running)
