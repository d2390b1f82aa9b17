"""A line of progress in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Bar:
    """A progress bar with the last row's main numbers, or nothing."""

    SHOWN = ("score_mean", "kl_mean", "seconds")

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def show(self, row: Mapping[str, Any]) -> None:
        """Advance by one step."""
        if self._bar is not None:
            self._bar.set_postfix({k: f"{row[k]:.3f}" for k in self.SHOWN if k in row}, refresh=False)
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
