"""The outcome of one sample in a reward function that runs sample by sample: its score, its seconds, or how it failed."""

from __future__ import annotations

from dataclasses import dataclass

FAILURES = ("raised", "took too long", "ended its process", "is no score")
"""How a sample can fail: the function raised; was ended after ``timeout_s``; took its process with it; gave NaN, or no number."""

TEXT_CHARS = 60
"""Characters of a sample's text in a message."""


@dataclass(frozen=True, kw_only=True)
class SampleOutcome:
    """The outcome of one sample."""

    score: float | tuple[float, ...] | None = None
    """One number, of a reward per token one for each; ``None``: not scored."""
    seconds: float = 0.0
    """Seconds of the function alone."""
    failure: str = ""
    """One of :data:`FAILURES`, or ``""``."""
    message: str = ""
    """The error in words, without the sample."""
    line: str = ""
    """The user's line at which it did, e.g. ``"rewards.py:12 in score"``; ``""`` where none is known."""
    details: str = ""
    """The traceback from the user's own frames on."""


def named(row: int, text: str, outcome: SampleOutcome) -> str:
    """Return the message on a sample that failed: its number, its text's beginning, what went wrong and where."""
    shown = text if len(text) <= TEXT_CHARS else text[: TEXT_CHARS - 1] + "…"
    at = f" (at {outcome.line})" if outcome.line else ""
    return f"sample {row} ({shown!r}): {outcome.message}{at}"
