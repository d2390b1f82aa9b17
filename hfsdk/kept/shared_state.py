"""``SharedState``: the state of a kept session that the user's kernel and the session's keeper both have.

Either side looks, before every message and a few times a second, for changes of its own parts since it last looked, and sends
them; changes of the other side it takes over, and does not send back::

    kernel                                        keeper
    critic.update(...): a counter goes up
    news() -> counters {"critic.updates": 3}  ->  take(...)          with the message itself
                                                  a step of a run: a row of the history, the prompts' places
    take(...)                                 <-  news()             as an event

What belongs to it is here, a section for each part; every section is a dict, of which the entries that differ travel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hfsdk.core.batch import Batch, refs_of
from hfsdk.core.pending import ColumnRef
from hfsdk.core.placement import Placement
from hfsdk.core.rows import Row, Rows
from hfsdk.engine.calls.replies import errors_of
from hfsdk.models.handle import set_role
from hfsdk.run.run import RunControl
from hfsdk.session.parts import Parts
from hfsdk.session.role_book import KINDS, known_role, sum_as_known

Entries = Mapping[Any, Any]

ROWS = ("history_rows", "run_rows")
"""Sections that are lists of rows."""


@dataclass(frozen=True, eq=False)
class SectionChange:
    """The changes of a section."""

    section: str
    entries: Entries
    """New and changed ones."""
    gone: tuple[Any, ...] = ()
    """Keys of those that are not there any more."""


class KnownBatch(NamedTuple):
    """A batch of the user's, by reference."""

    columns: tuple[tuple[str, int, str, Any], ...]
    """(Name, call, its name there, rows) of every column."""
    num_rows: int


@dataclass(frozen=True)
class SharedSection:
    """A part of what is shared."""

    name: str
    collect: Callable[[Parts], Entries]
    take: Callable[[Parts, Entries, Sequence[Any]], None]


# -- what a session is


def _about(parts: Parts) -> Entries:
    context = parts.context
    return {"name": context.name, "seed": context.seed, "last_call": context.client.last_call}


def _take_about(parts: Parts, entries: Entries, gone: Sequence[Any]) -> None:
    context = parts.context
    context.name, context.seed = entries.get("name", context.name), entries.get("seed", context.seed)
    context.client.last_call = max(context.client.last_call, entries.get("last_call", 0))


def _messages(parts: Parts) -> Entries:
    return dict(enumerate(parts.context.messages))


def _take_messages(parts: Parts, entries: Entries, gone: Sequence[Any]) -> None:
    messages = parts.context.messages
    for index, text in sorted(entries.items()):
        if index >= len(messages):
            messages.append(text)


def _take_counters(parts: Parts, entries: Entries, gone: Sequence[Any]) -> None:
    for name, value in entries.items():
        parts.context.counters.set(name, value)
    parts.context.counters.forget(tuple(gone))


def _take_sources(parts: Parts, entries: Entries, gone: Sequence[Any]) -> None:
    parts.client.sources.update(entries)


def _take_places(parts: Parts, entries: Entries, gone: Sequence[Any]) -> None:
    parts.places.move(entries)


# -- roles and where they live


def _roles(parts: Parts) -> Entries:
    book = parts.deployment.book
    return {handle.name: known_role(handle, book.declared(handle)) for handle in list(book)}


def _take_roles(parts: Parts, entries: Entries, gone: Sequence[Any]) -> None:
    deployment = parts.deployment
    for role in entries.values():
        handle = deployment.take_known(KINDS[role.kind], role.declared)
        set_role(handle, role.live)
        sum_as_known(handle, role, deployment.book)
    for name in gone:
        deployment.book.drop(name)


def _deployment(parts: Parts) -> Entries:
    deployment = parts.deployment
    asked_for = deployment.asked
    if not isinstance(asked_for, (str, Mapping, Placement)):  # a plan, or one of its runners-up
        asked_for = asked_for.placement
    return {
        "placement": deployment.placement, "specs": dict(deployment.specs), "asked": asked_for,
        "loaded": frozenset(deployment.loaded), "absent": deployment.absent,
    }  # fmt: skip


def _take_deployment(parts: Parts, entries: Entries, gone: Sequence[Any]) -> None:
    deployment = parts.deployment
    deployment.placement = entries.get("placement", deployment.placement)
    deployment.specs = dict(entries.get("specs", deployment.specs))
    deployment.asked = entries.get("asked", deployment.asked)
    deployment.loaded = set(entries.get("loaded", deployment.loaded))
    deployment.absent = entries.get("absent", deployment.absent)


# -- what was trained


def _lineage(parts: Parts) -> Entries:
    log = parts.log
    return {"branch": log.branch, "since": log.since, "branches": dict(log.branches), "marks": dict(log.marks)}


def _take_lineage(parts: Parts, entries: Entries, gone: Sequence[Any]) -> None:
    log = parts.log
    log.branch, log.since = entries.get("branch", log.branch), entries.get("since", log.since)
    log.branches, log.marks = dict(entries.get("branches", log.branches)), dict(entries.get("marks", log.marks))


def _snapshots(parts: Parts) -> Entries:
    return dict(parts.snapshots.by_name())


def _take_snapshots(parts: Parts, entries: Entries, gone: Sequence[Any]) -> None:
    parts.snapshots.take_known(entries, gone)


def _perf(parts: Parts) -> Entries:
    return {"perf": parts.predictions.perf, "errors": parts.predictions.errors}


def _take_perf(parts: Parts, entries: Entries, gone: Sequence[Any]) -> None:
    predictions = parts.predictions
    predictions.perf, predictions.errors = entries.get("perf", predictions.perf), entries.get("errors", predictions.errors)


# -- what the user holds


def known_batch(batch: Batch) -> KnownBatch:
    """Return a batch by reference."""
    refs: Mapping[str, ColumnRef] = refs_of(batch).by_name
    columns = tuple((name, ref.call_id, ref.name, ref.rows) for name, ref in refs.items())
    return KnownBatch(columns, batch.num_rows)


def _batches(parts: Parts) -> Entries:
    return {name: known_batch(batch) for name, batch in parts.batches.items()}


def _take_nothing(parts: Parts, entries: Entries, gone: Sequence[Any]) -> None:
    """Ignore entries that only the next kernel to attach has a use for."""


# -- the run


CONTROL = ("steps", "background", "running", "paused", "stopped")
RECORD = ("num_devices", "price_per_device_hour", "predicted", "saved", "best")


def _run(parts: Parts) -> Entries:
    run = parts.runs.run
    if run is None:
        return {}
    control, record = run._control, run._control.record
    return {
        **{name: getattr(control, name) for name in CONTROL}, **{name: getattr(record, name) for name in RECORD},
        "error": _errors(control.error),
        "number": parts.runs.number, "asked": control.asked, "warnings": tuple(record.warnings),
        "restores": tuple(record.restores), "resized": tuple(record.resized),
    }  # fmt: skip


_last_errors: list[tuple[Exception, tuple[Exception, ...]]] = []
"""The last error, as it travels: the same object as long as it is the same error."""


def _errors(error: Exception | None) -> tuple[Exception, ...]:
    if error is None:
        return ()
    if not _last_errors or _last_errors[0][0] is not error:
        _last_errors[:] = [(error, errors_of(error))]
    return _last_errors[0][1]


def _run_steps(parts: Parts) -> Entries:
    run = parts.runs.run
    if run is None:
        return {}
    record = run._control.record
    return {step: (calls, record.trace_steps.get(step), record.samples.get(step)) for step, calls in list(record.calls.items())}


def run_sections(
    take: Callable[[Entries], None], take_steps: Callable[[Entries, Sequence[Any]], None]
) -> tuple[SharedSection, SharedSection]:
    """Return the sections of a run, as a kernel takes them of one that goes on elsewhere."""
    return (
        SharedSection("run", _run, lambda parts, entries, gone: take(entries)),
        SharedSection("run_steps", _run_steps, lambda parts, entries, gone: take_steps(entries, gone)),
    )


RUN_SECTIONS = (SharedSection("run", _run, _take_nothing), SharedSection("run_steps", _run_steps, _take_nothing))
"""The sections of the side that has the run."""

SECTIONS = (
    SharedSection("about", _about, _take_about),
    SharedSection("sources", lambda parts: dict(parts.client.sources), _take_sources),
    SharedSection("roles", _roles, _take_roles),
    SharedSection("deployment", _deployment, _take_deployment),
    SharedSection("counters", lambda parts: parts.context.counters.all(), _take_counters),
    SharedSection("places", lambda parts: parts.places.positions(), _take_places),
    SharedSection("lineage", _lineage, _take_lineage),
    SharedSection("snapshots", _snapshots, _take_snapshots),
    SharedSection("perf", _perf, _take_perf),
    SharedSection("messages", _messages, _take_messages),
)
"""The sections in the order in which they are taken."""

OF_KERNELS = SharedSection("batches", _batches, _take_nothing)


@dataclass(eq=False)
class SharedRows:
    """A list of rows that grows, of which the last one may still be amended."""

    name: str
    get: Callable[[], Rows | None]
    put: Callable[[Rows], None]
    _sent: tuple[Rows | None, int, Row] = (None, 0, {})
    """The list as it was sent last: itself, its length and its last row."""

    def news(self) -> SectionChange | None:
        """Return the rows since the last time; a change without a first row replaces all."""
        rows = self.get()
        if rows is None:
            return None
        rows_before, count, last = self._sent
        now = len(rows)
        tail = rows[now - 1] if now else {}
        if rows_before is rows and count == now and tail == last:
            return None
        # the last row may have been amended, so it is sent again
        grown = rows_before is rows and now >= count > 0
        first = count - 1 if grown else 0
        self._sent = (rows, now, tail)
        entries: dict[Any, Any] = {index: rows[index] for index in range(first, now)}
        return SectionChange(self.name, entries, () if grown else ("all",))

    def take(self, note: SectionChange) -> None:
        """Take over rows."""
        rows = self.get()
        if rows is None or note.gone:
            self.put(Rows())
            rows = self.get()
        if rows is None:  # of a run that is not known here
            return
        for index, row in sorted(note.entries.items()):
            if index == len(rows):
                rows.append(row)
            elif index == len(rows) - 1 and rows[index] != row:
                rows.amend(row)
        self._sent = (rows, len(rows), rows[len(rows) - 1] if len(rows) else {})


@dataclass(eq=False)
class SharedState:
    """One side of the state that kernel and session actor share; may be used from any thread."""

    parts: Parts
    sent: Sequence[SharedSection]
    """The sections that this side sends."""
    received: Sequence[SharedSection]
    """The sections that it takes."""
    rows: Sequence[SharedRows]
    """The tables of which this side sends those it may change, and takes all."""
    sent_rows: frozenset[str]
    _entries: dict[str, dict[Any, Any]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def news(self) -> tuple[SectionChange, ...]:
        """Return the changes here since the last time, but for those that were taken over."""
        notes = []
        with self._lock:
            for section in self.sent:
                entries = self._entries.setdefault(section.name, {})
                now = section.collect(self.parts)
                changed = {key: value for key, value in now.items() if key not in entries or not _same(entries[key], value)}
                gone = tuple(key for key in entries if key not in now)
                if changed or gone:
                    entries.update(changed)
                    for key in gone:
                        del entries[key]
                    notes.append(SectionChange(section.name, changed, gone))
            for rows in self.rows:
                note = rows.news() if rows.name in self.sent_rows else None
                if note is not None:
                    notes.append(note)
        return tuple(notes)

    def take(self, notes: Sequence[SectionChange]) -> None:
        """Take over the other side's changes."""
        by_name = {section.name: section for section in self.received}
        rows = {table.name: table for table in self.rows}
        with self._lock:
            for note in notes:
                if note.section in rows:
                    rows[note.section].take(note)
                    continue
                section = by_name.get(note.section)
                if section is None:
                    continue
                section.take(self.parts, note.entries, note.gone)
                # what the other side has sent must not go back to it as a change of this side's
                if section in self.sent:
                    entries, now = self._entries.setdefault(section.name, {}), section.collect(self.parts)
                    entries.update({key: now[key] for key in note.entries if key in now})
                    for key in note.gone:
                        entries.pop(key, None)


class Notebook:
    """All changes so far, for the kernel that comes next: the keeper's copy."""

    def __init__(self) -> None:
        self._sections: dict[str, dict[Any, Any]] = {}
        self._rows: dict[str, Rows] = {}
        """A run of days has a hundred thousand of them: kept as a history keeps them."""
        self._lock = threading.Lock()

    def take(self, notes: Sequence[SectionChange]) -> None:
        """Take over changes."""
        with self._lock:
            for note in notes:
                if note.section in ROWS:
                    self._take_rows(note)
                    continue
                section = self._sections.setdefault(note.section, {})
                for key in note.gone:
                    section.pop(key, None)
                section.update(note.entries)

    def whole(self) -> tuple[SectionChange, ...]:
        """Return all of it, as notes."""
        with self._lock:
            rows = [SectionChange(name, dict(enumerate(rows)), ("all",)) for name, rows in self._rows.items()]
            return (*(SectionChange(name, dict(section)) for name, section in self._sections.items()), *rows)

    def _take_rows(self, note: SectionChange) -> None:
        name = note.section
        SharedRows(name, lambda: self._rows.get(name), lambda rows: self._rows.update({name: rows})).take(note)

    def section(self, name: str) -> dict[Any, Any]:
        """Return one section."""
        with self._lock:
            return dict(self._sections.get(name, {}))


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    try:
        return type(old) is type(new) and bool(old == new)
    except Exception:  # of arrays, or of the user's own objects
        return False


def history_rows(parts: Parts) -> SharedRows:
    """Return the history's rows."""

    def put(rows: Rows) -> None:
        parts.log.rows = rows

    return SharedRows(ROWS[0], lambda: parts.log.rows, put)


def run_rows(control: Callable[[], RunControl | None]) -> SharedRows:
    """Return the rows of a run."""

    def get() -> Rows | None:
        now = control()
        return None if now is None else now.record.rows

    def put(rows: Rows) -> None:
        now = control()
        if now is not None:
            now.record.rows = rows

    return SharedRows(ROWS[1], get, put)
