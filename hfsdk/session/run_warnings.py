"""``RunWarnings``: what is said of a run's numbers step by step: what :mod:`health <hfsdk.session.health>` and `jumps` find."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hfsdk.core.errors import ColumnError, NonFiniteLossError, RewardFunctionError
from hfsdk.core.rows import Row
from hfsdk.core.snapshot import Snapshot
from hfsdk.session.context import Context
from hfsdk.session.health import Health
from hfsdk.session.jumps import Jumps
from hfsdk.session.run_control import RunControl

BY_A_NUMBER = (NonFiniteLossError, ColumnError, RewardFunctionError)
"""Errors that a number which is not finite may end in."""
FINDS = "session.run.first_bad() finds where it comes from"


class RunWarnings:
    """The warnings of one run."""

    def __init__(self, context: Context, control: RunControl) -> None:
        self._context, self._control = context, control
        self.go_back(())

    def go_back(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Know of these steps alone: the run goes on after them."""
        known = list(rows)
        self._health, self._jumps = Health(known), Jumps(known)

    def take(self, row: Row) -> bool:
        """Warn of what a step's row says is wrong; return whether a number of it jumps.

        Raises:
            NonFiniteLossError: a loss, gradient, KL or ratio of it is not finite.
        """
        record, bad = self._control.record, self._jumps.take(row)
        texts = [f"{number}{f'; {FINDS}' if self._good() else ''}" for number in bad if number.usual is not None]
        for text in self._health.take(row) + texts[:1]:
            said = f"step {row['step']}: {text}"
            if said not in record.warnings:  # as it is where a step is taken again after a death
                record.warnings.append(said)
                self._context.notice(said)
        if bad and bad[0].usual is None:
            record.failed_step = row["step"]
            raise NonFiniteLossError(f"{bad[0]}: what is trained with it is lost, and the run ends here")
        return bool(bad)

    def failed(self, error: Exception) -> None:
        """Note in which step a run has failed and, where that was by a number, say in the error what finds it."""
        record = self._control.record
        if record.failed_step is None and not self._context.client.closed:
            record.failed_step = self._context.next_step()
        good = self._good()
        if good is not None and isinstance(error, BY_A_NUMBER):
            error.add_note(f"{FINDS}; session.rewind(session.run.last_good) goes back to {good.name!r}")

    def _good(self) -> Snapshot | None:
        """Return the snapshot that a search would go back to."""
        search = self._control.search
        return None if search is None else search.last_good()
