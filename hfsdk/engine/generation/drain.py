"""How a generation runs dry: sequences still running and how full the key/value cache is, step by step.

::

    running 32 |#########################
            16 |                         #########
             1 |                                  ##################   the long tail: one response holds the device
               +----------------------------------------------------
"""

from __future__ import annotations

import json
import time

MOST_POINTS = 128
"""Points kept of one generation; a longer one keeps every second, fourth, ... step."""


class Drain:
    """Samples of one generation, at most ``MOST_POINTS``, evenly spread over its steps."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._points: list[tuple[float, int, int, float]] = []
        self._every = 1
        self._steps = 0

    def __bool__(self) -> bool:
        return bool(self._points)

    def sample(self, running: int, waiting: int, kv_usage: float, seconds: float | None = None) -> None:
        """Take one step: sequences in the running batch, sequences that wait for room, share of the cache in use.

        ``seconds`` since the generation began are now, where not given.
        """
        if self._steps % self._every == 0:
            at = time.perf_counter() - self._began if seconds is None else seconds
            self._points.append((round(at, 4), running, waiting, round(kv_usage, 4)))
            if len(self._points) > MOST_POINTS:
                self._points = self._points[::2]
                self._every *= 2
        self._steps += 1

    def __str__(self) -> str:
        """Return JSON: ``[[seconds, running, waiting, kv_usage], ...]``; spans carry it as their attribute ``drain``."""
        return json.dumps(self._points, separators=(",", ":"))
