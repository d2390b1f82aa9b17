"""One rollout replica, event by event: between two ends of rows its steps are alike but for the keys and values that they read.

::

    rows      a ======|            a, b and c are decoded together; when a ends its place is free and d comes in
              b ==============|
              c ====|
              d     .======|       k steps of n rows with C keys and values: k step(n) + read (k C + n k^2 / 2)

A row comes in where the cache has room for all that it will ever hold, so that none is thrown out again. (Engines do not know that
length: they let rows in sooner and compute some of them again.)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

from hfsdk.planner.tails.token_costs import TokenCosts


@dataclass(slots=True)
class PendingResponse:
    """One response, of which some tokens may be there already."""

    number: int
    group: int
    """Rows of one prompt are scored together."""
    prompt: int
    length: int
    """Tokens of the whole response."""
    done: int = 0
    stale: int = 0
    """The part of ``done`` that an older policy wrote."""

    def copy(self) -> PendingResponse:
        """Return the row as it stands; generating changes rows."""
        return PendingResponse(self.number, self.group, self.prompt, self.length, self.done, self.stale)

    @property
    def context(self) -> int:
        """Tokens whose keys and values are read for the next one."""
        return self.prompt + self.done

    @property
    def most(self) -> int:
        """Tokens that it holds at its end."""
        return self.prompt + self.length


class Replica:
    """Decodes rows; its clock stands at its last event."""

    def __init__(self, costs: TokenCosts, clock_s: float = 0.0) -> None:
        self.clock_s, self.busy_s = clock_s, 0.0
        self._costs, self._steps = costs, 0
        self._ends: list[tuple[int, int, PendingResponse]] = []
        """(step at which it ends, number, row), a heap."""
        self._context = self._cache_tokens = 0.0

    @property
    def num_rows(self) -> int:
        """Rows under way."""
        return len(self._ends)

    def has_room(self, row: PendingResponse) -> bool:
        """Whether a row may come in; one alone always may."""
        return not self._ends or (
            len(self._ends) < self._costs.most_rows and self._cache_tokens + row.most <= self._costs.cache_tokens
        )

    def take(self, rows: Iterable[PendingResponse], *, moved: bool = False) -> None:
        """Let rows in: their tokens are read first, or their keys and values come from another replica."""
        tokens = 0
        for row in rows:
            heapq.heappush(self._ends, (self._steps + row.length - row.done, row.number, row))
            self._context += row.context
            self._cache_tokens += row.most
            tokens += row.context
        if tokens:
            self._pass(tokens * self._costs.move_token_s + self._costs.move_s if moved else tokens * self._costs.prefill_s)

    def next_s(self) -> float:
        """Return when the next row ends; infinite where there is none."""
        return self.clock_s + self._seconds(self._ends[0][0] - self._steps) if self._ends else math.inf

    def finish(self) -> list[PendingResponse]:
        """Go on to the next end, and return the rows that end there."""
        self._go(self._ends[0][0] - self._steps)
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            row = heapq.heappop(self._ends)[2]
            row.done = row.length
            self._context -= row.most
            self._cache_tokens -= row.most
            ended.append(row)
        return ended

    def halt(self, at_s: float) -> None:
        """Go on by as many whole steps as are over by then; no row may end before."""
        left = at_s - self.clock_s
        if self._ends and left > 0:
            linear, square = self._seconds(1) - self._half(), self._half()
            steps = left / linear if not square else (math.sqrt(linear**2 + 4 * square * left) - linear) / (2 * square)
            self._go(min(math.floor(steps + 1e-9), self._ends[0][0] - self._steps - 1))

    def give(self, share: float = 1.0) -> list[PendingResponse]:
        """Give away a share of the rows, evenly by their numbers; those that stay go on."""
        for end, _, row in self._ends:
            row.done = row.length - (end - self._steps)
        rows = sorted((row for _, _, row in self._ends), key=lambda row: row.number)
        every = max(1, round(1 / share))
        leaving = rows[::every]
        staying = [row for number, row in enumerate(rows) if number % every]
        self._ends, self._context, self._cache_tokens = [], 0.0, 0.0
        for row in staying:
            heapq.heappush(self._ends, (self._steps + row.length - row.done, row.number, row))
            self._context += row.context
            self._cache_tokens += row.most
        return leaving

    def _half(self) -> float:
        return self._costs.read_s * len(self._ends) / 2

    def _seconds(self, steps: int) -> float:
        rows = len(self._ends)
        return steps * self._costs.step_s[rows] + self._costs.read_s * (steps * self._context + rows * steps**2 / 2)

    def _go(self, steps: int) -> None:
        if steps > 0:
            self._pass(self._seconds(steps))
            self._context += len(self._ends) * steps
            self._steps += steps

    def _pass(self, seconds: float) -> None:
        self.clock_s += seconds
        self.busy_s += seconds
