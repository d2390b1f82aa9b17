"""Public calls with bad input: ``benchmarks/fuzzing`` makes and judges them, here they are counted."""

from __future__ import annotations

from pathlib import Path

from fire.trials import Note, TrialError

CEILING_S = 1800.0
"""Each call has a watchdog of its own, and so has each process."""

TARGETS, CALLS = 100, 800
"""Public callables of one trial, and calls of all of them together."""

CALL_S = 20.0
"""Ceiling for a call: a right one may search for a plan, on a machine with other work."""

FAILURES = {"bare": "bare error", "unclear": "bare error", "changed": "wrong state", "ended": "ended"}
"""What the fuzz calls a failure -> what it is here; anything else is a hang, or as bad."""


class Nothing:
    """The fuzz has processes of its own."""

    def close(self) -> None:
        """Nothing is open between trials."""


def ground(folder: Path) -> Nothing:
    """Nothing is shared."""
    return Nothing()


def trial(nothing: Nothing, note: Note) -> None:
    """Make some hundred calls, with a seed of their own."""
    from fuzzing import fuzz, targets

    seed, names = note.rng.randrange(2**31), sorted(target.name for target in targets())
    note.doing(f"about {CALLS} calls of {TARGETS} callables, seed {seed}")
    report = fuzz(seed, CALLS, limit_s=CALL_S, only=note.rng.sample(names, min(TARGETS, len(names))))
    note.count = report.counts["tried"]
    counts = report.counts
    note.doing(f"{note.count} calls, {counts['succeeded']} succeeded, {counts['refused']} were refused in one clear line")
    if report.failures:
        note.num_failed = len(report.failures)
        kinds = [FAILURES.get(failure.kind, "hang") for failure in report.failures]
        raise TrialError(max(set(kinds), key=kinds.count), str(report))
