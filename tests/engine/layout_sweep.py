"""Which checks a module of tests makes on which layouts: one spawn per world size makes them all, the tests look at the findings.

A module of laws has ``CHECKS`` (check -> function of a harness), ``HARNESS`` (its class) and tests marked with :func:`of`; a module
of tests imports those and has ``SWEEP``. The pairwise modules stand in this folder, those of every layout in ``sweeps``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sweep:
    """Layouts and, by check, those of them that it is made on."""

    layouts: dict[str, int]
    """Layout -> world size; "zero" has the distributed optimizer."""
    checks: dict[str, tuple[str, ...]]
    """Check -> its layouts."""
    models: dict[str, tuple[str, ...]]
    """Layout -> names of the models that checks of all models go over."""
    compared: tuple[str, ...] = ()
    """Checks that tp1 is made for in any case: other layouts must find what it finds."""

    def checks_of(self, layout):
        return [check for check in self.checks if layout in self.checks[check] or (layout == "tp1" and check in self.compared)]


def of(check):
    """Name the check whose findings a test looks at."""

    def mark(test):
        test.check = check
        return test

    return mark
