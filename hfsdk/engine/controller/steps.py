"""``Steps``: which step of the trace a call is of."""

from __future__ import annotations

from collections.abc import Callable


class Steps:
    """Counts steps: a generation after learning begins the next one, and so does the first call after :meth:`end`.

    Attributes:
        number: of the current step.
    """

    def __init__(self, begun: Callable[[int], None]) -> None:
        self.number = 0
        self._begun = begun
        self._learned = False
        """Whether something was learned since the last generation."""
        self._ended = False

    @property
    def upcoming(self) -> int:
        """The number that a step has which begins now."""
        return self.number + self._learned

    def end(self, least: int = 0) -> None:
        """The next call is of another step, if something was learned in this one; its number is at least ``least``."""
        self._ended = True
        if self.number < least:
            self._begin(least)
            self._learned = False

    def note(self, phase: str) -> None:
        """A call of a phase is submitted."""
        if phase == "generation" or (self._ended and phase in ("preparation", "learning")):
            if self._learned:
                self._begin(self.number + 1)
            self._learned = self._ended = False
        self._learned = self._learned or phase == "learning"

    def _begin(self, number: int) -> None:
        self.number = number
        self._begun(number)
