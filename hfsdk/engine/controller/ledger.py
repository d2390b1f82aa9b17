"""``Ledger``: the calls that the controller remembers, and what it keeps of the others.

A session runs for days; what it remembers must not grow with its steps. Calls of the last :data:`~hfsdk.core.trace.KEPT_STEPS`
steps are kept whole, with their spans, up to :data:`MOST_CALLS`: a loop that only evaluates is one long step. An older one stays
only while it is under way or somebody can still ask for what it wrote (a batch, a metric); of the others nothing stays but, where
the user trained by hand, one :class:`~hfsdk.engine.calls.queries.Change` for the history::

    step   0 ........ 149 | 150 ................... 199 |
           changes by hand | calls, spans, dataflow      |  <- now
           calls that a live batch refers to
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hfsdk.core.errors import ColumnError
from hfsdk.core.trace import KEPT_STEPS
from hfsdk.engine.calls.queries import Change
from hfsdk.engine.controller.records import FINISHED, CallRecord

MOST_CALLS = 10_000
"""Beyond these the oldest go, whatever step they are of."""


class Ledger:
    """See the module's text. Whoever adds or prunes holds the controller's lock; anyone may look."""

    def __init__(self) -> None:
        self._records: dict[int, CallRecord] = {}
        self._changes: list[Change] = []
        self._in_rows: set[int] = set()
        """Calls of steps that have a row of their own in the history, while they are kept."""
        self.first_step = 0
        """The oldest step whose calls are all kept; of the one that runs, those beyond :data:`MOST_CALLS` are not."""
        self._look_at = MOST_CALLS

    def add(self, record: CallRecord) -> None:
        """Remember a call."""
        self._records[record.call.id] = record
        if len(self._records) > self._look_at:
            old = list(self._records.values())[: -MOST_CALLS // 2]
            self._let_go(old)
            self.first_step = max(self.first_step, min(old[-1].call.step + 1, record.call.step))
            self._look_at = max(MOST_CALLS, len(self._records) + MOST_CALLS // 4)  # not at each call, where all are held

    def find(self, call_id: int) -> CallRecord | None:
        """Return a call, ``None`` where it is not kept any more."""
        return self._records.get(call_id)

    def __getitem__(self, call_id: int) -> CallRecord:
        """Return a call.

        Raises:
            ColumnError: it is not kept any more.
        """
        record = self._records.get(call_id)
        if record is None:
            raise ColumnError(
                f"call {call_id} is no longer kept: nothing referred to what it wrote, and a session keeps the calls of its last "
                f"{KEPT_STEPS} steps. Run it again."
            )
        return record

    def __iter__(self) -> Iterator[CallRecord]:
        """Go through the calls as they are now, in the order they were submitted in; without the controller's lock."""
        return iter(list(self._records.values()))

    def of_step(self, step: int | None) -> list[CallRecord]:
        """Return the calls of a step; ``None`` is all that are kept."""
        return [record for record in self if step in (None, record.call.step)]

    def in_row(self, call_ids: Sequence[int]) -> None:
        """Note calls whose step has a row of its own: the history tells of them there."""
        self._in_rows.update(call_id for call_id in call_ids if call_id in self._records)

    def changes(self) -> list[Change]:
        """Return what changed weights outside of steps with a row of their own, in the order of submission."""
        kept = [r.change for r in self if r.made is not None and r.call.id not in self._in_rows]
        return sorted([*self._changes, *kept], key=lambda change: change.call_id)

    def begin_step(self, step: int) -> None:
        """A step begins: let go what is too old and not needed."""
        self.first_step = max(self.first_step, step - KEPT_STEPS + 1)
        self._let_go([record for record in self._records.values() if record.call.step < self.first_step])

    def _let_go(self, old: Sequence[CallRecord]) -> None:
        """Forget those of some calls that are over and that nobody needs."""
        under_way = [record for record in self._records.values() if not _over(record)]
        needed = {call_id for record in under_way for call_id in record.call.inputs}
        for record in old:
            if not _over(record) or record.call.id in needed or not record.unasked:
                continue
            if record.made is not None and record.call.id not in self._in_rows:
                self._changes.append(record.change)
            del self._records[record.call.id]
            self._in_rows.discard(record.call.id)


def _over(record: CallRecord) -> bool:
    return record.state in (*FINISHED, "lost")
