"""A line of progress in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

SCORED, LEARNED = ("score_mean", "kl_mean"), ("actor_loss", "accuracy", "margin")
"""A step's main numbers: of what it scored, or of an algorithm that scores nothing, as DPO."""


def main_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's main numbers, by name."""
    return {name: row[name] for name in (SCORED if SCORED[0] in row else LEARNED) if name in row}


class Bar:
    """A progress bar with the last row's main numbers, or nothing."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def show(self, row: Mapping[str, Any]) -> None:
        """Advance by one step."""
        shown = main_numbers(row) | ({"seconds": row["seconds"]} if "seconds" in row else {})
        if self._bar is not None:
            self._bar.set_postfix({name: f"{number:.3f}" for name, number in shown.items()}, refresh=False)
            self._bar.update(1)

    def back_to(self, done: int) -> None:
        """Go back to so many steps."""
        if self._bar is not None:
            self._bar.n = done
            self._bar.refresh()


@contextmanager
def progress_bar(steps: int, shown: bool) -> Iterator[Bar]:
    """Show a bar in the terminal, or nothing."""
    if not shown:
        yield Bar(None)
        return
    from tqdm.std import tqdm  # plain text: it stays in a saved notebook as it was

    with tqdm(total=steps, desc="train", unit="step", file=sys.stdout, leave=True) as bar:
        yield Bar(bar)
