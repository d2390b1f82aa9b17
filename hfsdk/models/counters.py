"""``Counters``: the named numbers that belong to a session's state and are saved with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Counters:
    """Numbers by name: how often a role was updated, how many steps were taken, what a scorer was calibrated to."""

    def __init__(self, numbers: Mapping[str, float] | None = None) -> None:
        self._numbers: dict[str, float] = dict(numbers or {})

    def next(self, name: str) -> int:
        """Count up and return a named counter, starting at 0."""
        self._numbers[name] = count = self.count(name)
        return count

    def count(self, name: str) -> int:
        """Return how often a named counter was counted up."""
        return int(self._numbers.get(name, -1)) + 1

    def get(self, name: str) -> float | None:
        """Return a named number; ``None`` where nobody has set it."""
        return self._numbers.get(name)

    def set(self, name: str, value: float) -> None:
        """Set a named number."""
        self._numbers[name] = float(value)

    def forget(self, names: Collection[str]) -> None:
        """Forget named numbers, those that are there."""
        for name in names:
            self._numbers.pop(name, None)

    def all(self) -> dict[str, float]:
        """Return the numbers as they are."""
        return dict(self._numbers)

    def replace(self, numbers: Mapping[str, float]) -> None:
        """Put other numbers in the place of all."""
        self._numbers = dict(numbers)
