"""``hf.replay``: an exported step, taken again in a session of its own, with every number compared."""

from __future__ import annotations

import os
import pickle
import stat
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hfsdk.assets import MODELS, model_folder
from hfsdk.core.batch import Batch
from hfsdk.core.checks import checked
from hfsdk.core.errors import CheckpointError, ModelNotFoundError, OptionError
from hfsdk.core.field_texts import documented
from hfsdk.core.files import as_path
from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import Column, Ragged, Table
from hfsdk.diagnose.step_export import (
    CONTENT,
    STATE,
    ExportedCall,
    ExportedStep,
    layouts_of,
    machine,
    read_summary,
    recorded,
    versions,
    weight_sums,
)  # fmt: skip
from hfsdk.diagnose.step_recorder import RollingSnapshots, StepRecorder, StepsAgain
from hfsdk.session.client import ControllerClient
from hfsdk.session.parts import Parts, parts_of
from hfsdk.session.role_book import KINDS, KnownRole, sum_as_known
from hfsdk.session.session import Session
from hfsdk.session.session_pickle import unpack


@dataclass(frozen=True)
class Difference:
    """The first number of a step that is another one than it was."""

    call: int | None
    """Place of the call among the step's; ``None`` for what the step led to: its numbers, or a weight."""
    what: str
    """The call and the column, the number's name, or the role, rank and parameter."""
    then: Any
    """The value that was recorded."""
    now: Any
    row: int | None = None
    """The sample."""
    token: int | None = None
    """The place in the sample's response or prompt."""

    def __str__(self) -> str:
        place = "".join(f", {name} {n}" for name, n in (("sample", self.row), ("token", self.token)) if n is not None)
        number = "" if self.call is None else f"call {self.call}, "
        return f"{number}{self.what}{place}: {self.then!r} then, {self.now!r} now"


@documented
@dataclass(frozen=True)
class StepReplay:
    """The result of a step that was taken again; true where every number is the same, bit for bit."""

    step: int
    """The number of the step in its run."""
    difference: Difference | None
    """The first number that differs; ``None`` where none does."""
    num_calls: int
    """Calls of the step."""
    num_values: int
    """Numbers that were compared before the first difference: of columns, results and the step's metrics."""
    num_weights: int
    """Parameters whose checksums were compared, on every rank."""
    notes: tuple[str, ...]
    """Differences between here and where the step was exported: machine, versions, layouts."""
    seconds: float
    """The seconds that all of it took, the session's start included."""
    session: Session | None = None
    """The session after the step, with ``stay=True``."""

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        compared = f"{self.num_calls} calls, {self.num_values:,} numbers, {self.num_weights} weights"
        said = f"the same bit for bit ({compared})" if self else f"differs first in {self.difference}"
        return "\n".join([f"step {self.step}: {said}; {self.seconds:.1f} s", *(f"  {note}" for note in self.notes)])

    __repr__ = __str__


@dataclass(eq=False)
class DrawnBatches:
    """The batches that a step drew from one stream, in their order."""

    client: ControllerClient
    tables: Sequence[Table]
    position: int = 0

    def __next__(self) -> Batch:
        if self.position == len(self.tables):
            raise OptionError(f"the step draws more from a stream than it did: {len(self.tables)} batches were exported")
        table = self.tables[self.position]
        self.position += 1
        return Batch.from_columns(self.client, dict(table))

    def __iter__(self) -> Iterator[Batch]:
        return self


@checked
def replay(
    folder: str | Path, *, devices: int | str | None = None, deterministic: bool = False, stay: bool = False, trusted: bool = False
) -> StepReplay:
    """Take an exported step again, in a new session, and compare every number of it with what it was.

    The folder's functions are run, as a script would be: replay only what you would run. Columns, results and metrics are compared
    in the order of the calls, then every weight on every rank after the step. Bit for bit is to be expected on the same kind of
    machine with the same versions; ``notes`` says what is otherwise.

    Args:
        folder: the folder of ``session.export_step``; it may have been moved or copied.
        devices: as in :class:`Session`; by default as many as the step had.
        deterministic: as in :class:`Session`, for GPUs.
        stay: leave the session open, behind the step (``replay.session``), to look into what is otherwise.
        trusted: replay a folder that is another user's, or that others may write to.

    Returns:
        What came of it; true where all is the same.

    Raises:
        OptionError: the folder belongs to somebody else, or others may write to it, and ``trusted`` is not set.
        CheckpointError: there is no exported step, or a part of it is damaged.
        ModelNotFoundError: a model's folder is not on this machine.
        CallError: a call fails that did not when the step was exported.
    """
    begun = time.perf_counter()
    root = as_path(folder, "an exported step")
    record = _read(root, trusted)
    session = Session(record.num_devices if devices is None else devices, seed=record.seed, deterministic=deterministic,
                      name=f"step {record.step} of {record.session}")  # fmt: skip
    done = False
    try:
        parts = parts_of(session)
        _declare(parts, record)
        session.load(root / STATE)
        tape = _take(parts, record)
        calls = recorded(parts.client, tape)
        counter = _Compared()
        difference = _first_call(record.calls, calls, counter) or _first_number(record.numbers, tape.numbers, counter)
        if difference is None and tape.error is not None and not any(call.error for call in record.calls):
            raise tape.error
        sums = weight_sums(parts.deployment.book) if difference is None else {}
        if difference is None:
            difference = _first_weight(record.weights, sums)
        result = StepReplay(
            record.step, difference, len(calls), counter.values, sum(len(rank) for ranks in sums.values() for rank in ranks),
            _notes(record, parts), time.perf_counter() - begun, session if stay else None,
        )  # fmt: skip
        done = True
    finally:
        if not (done and stay):
            session.close()
    return result


def _read(root: Path, trusted: bool) -> ExportedStep:
    summary = read_summary(root)
    path = root / CONTENT
    try:
        _check_owner(root, path, trusted)
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; export the step again") from error
    if zlib.crc32(content) != summary["content"]["crc32"]:
        raise CheckpointError(f"{path} is damaged, or of another export: its checksum is not the one in step.json")
    try:
        record = pickle.loads(content)
    except Exception as error:  # whatever unpickling another version's classes raises
        raise CheckpointError(f"{path} cannot be read by this version of hfsdk: {type(error).__name__}: {error}") from error
    if not isinstance(record, ExportedStep):
        raise CheckpointError(f"{path} holds no exported step")
    return record


def _check_owner(root: Path, path: Path, trusted: bool) -> None:
    """Refuse functions that another user has written, or may have.

    Raises:
        OptionError: says whose it is.
    """
    if trusted:
        return
    for place in (root, path):
        status = place.lstat()
        if sys.platform != "win32" and status.st_uid != os.getuid():
            raise OptionError(
                f"{place} belongs to another user, and replay runs its functions; pass trusted=True if you would run it"
            )
        # a group of one's own may write where the umask is 002, as many systems have it
        writers = stat.S_IWOTH if sys.platform == "win32" or status.st_gid == os.getgid() else stat.S_IWOTH | stat.S_IWGRP
        if sys.platform != "win32" and not stat.S_ISLNK(status.st_mode) and status.st_mode & writers:
            raise OptionError(f"others may write to {place}, and replay runs its functions; chmod go-w it, or pass trusted=True")


def _declare(parts: Parts, record: ExportedStep) -> None:
    """Declare the roles and place them as they were."""
    for role in record.roles:
        handle = parts.deployment.declare(KINDS[role.kind], _with_folder(role).declared)
        sum_as_known(handle, role, parts.deployment.book)
    if record.placement is not None:
        parts.deployment.place(record.placement)


def _with_folder(known_role: KnownRole) -> KnownRole:
    """Return a role whose model's folder is here: the one it was, or that of the same name."""
    role: RoleSpec = known_role.declared
    if not role.folder or Path(role.folder).is_dir():
        return known_role
    name = Path(role.folder).name
    if name not in MODELS:
        raise ModelNotFoundError(f"{role.name} has its model from {role.folder}, which is not on this machine; copy it there")
    return known_role._replace(declared=replace(role, folder=str(model_folder(name))))


def _take(parts: Parts, record: ExportedStep) -> StepRecorder:
    """Take the step, with its calls recorded."""
    streams: Any = [DrawnBatches(parts.client, tables) for tables in record.drawn]
    algorithm = unpack(parts, record.algorithm, own=streams)
    again = StepsAgain(parts, algorithm, streams[0], RollingSnapshots(parts, 0, warnings.catch_warnings))
    return again.take_step(record.step, StepRecorder(parts.client))


@dataclass
class _Compared:
    values: int = 0


def _first_call(then: Sequence[ExportedCall], now: Sequence[ExportedCall], counter: _Compared) -> Difference | None:
    """Return the first difference in the columns and results of the calls."""
    for index, (old, new) in enumerate(zip(then, now, strict=False)):
        if old.name != new.name:
            return Difference(index, "the call", old.name, new.name)
        if old.error != new.error:
            return Difference(index, f"{old.name}, how it ended", old.error or "done", new.error or "done")
        if sorted(old.columns) != sorted(new.columns):
            return Difference(index, f"{old.name}, the columns", sorted(old.columns), sorted(new.columns))
        for name in old.columns:
            difference = _first_in_column(old.columns[name], new.columns[name], counter)
            if difference is not None:
                before, after, row, token = difference
                return Difference(index, f"{old.name}, {name}", before, after, row, token)
        if (result := _first_in_result(old.result, new.result, counter)) is not None:
            return Difference(index, f"{old.name}, {result[0]}", *result[1:])
    if len(then) != len(now):
        return Difference(min(len(then), len(now)), "how many calls", len(then), len(now))
    return None


def _first_in_column(then: Column, now: Column, counter: _Compared) -> tuple[Any, Any, int | None, int | None] | None:
    """Return (then, now, sample, token) of the first value of a column that differs, by its bits."""
    if isinstance(then, Ragged) and isinstance(now, Ragged):
        if (place := _first_place(then.lengths, now.lengths)) is not None:
            return f"{then.lengths[place]} tokens", f"{now.lengths[place]} tokens", place, None
        place = _first_place(then.flat, now.flat)
        counter.values += len(then.flat)
        if place is None:
            return None
        row = int(np.searchsorted(then.offsets, place, side="right")) - 1
        return then.flat[place].item(), now.flat[place].item(), row, int(place - then.offsets[row])
    if isinstance(then, Ragged) or isinstance(now, Ragged):
        return type(then).__name__, type(now).__name__, None, None
    place = _first_place(then, now)
    counter.values += len(then)
    return None if place is None else (_item(then[place]), _item(now[place]), place, None)


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _first_place(then: Any, now: Any) -> int | None:
    """Return the first place at which two arrays differ, by their bits; the longer one differs where the other ends."""
    if then.dtype != now.dtype or len(then) != len(now):
        return min(len(then), len(now)) if len(then) != len(now) else 0
    if then.dtype.kind == "O":
        return next((i for i, (a, b) in enumerate(zip(then, now, strict=True)) if a != b), None)
    bits = (then.view(np.uint8).reshape(len(then), -1) != now.view(np.uint8).reshape(len(now), -1)).any(axis=1)
    places = np.flatnonzero(bits)
    return int(places[0]) if len(places) else None


def _first_in_result(then: Any, now: Any, counter: _Compared) -> tuple[str, Any, Any] | None:
    """Return (which number, then, now) of the first that differs among the rows of numbers that a call returned."""
    if not isinstance(then, list | tuple) or not all(isinstance(row, Mapping) for row in then):
        return None  # seconds, bytes and reports of moves
    if not isinstance(now, list | tuple) or len(then) != len(now):
        return "how many mini-batches", len(then), len(now) if isinstance(now, list | tuple) else type(now).__name__
    for index, (old, new) in enumerate(zip(then, now, strict=True)):
        if (difference := _first_number(old, new, counter)) is not None:
            return f"{difference.what} of mini-batch {index}", difference.then, difference.now
    return None


def _first_number(then: Mapping[str, Any], now: Mapping[str, Any], counter: _Compared) -> Difference | None:
    for name, value in then.items():
        counter.values += 1
        if name not in now or not _same(value, now[name]):
            return Difference(None, name, value, now.get(name))
    return None


def _same(then: Any, now: Any) -> bool:
    if isinstance(then, float) and isinstance(now, float):
        return np.float64(then).tobytes() == np.float64(now).tobytes()
    return bool(then == now)


def _first_weight(then: Mapping[str, Any], now: Mapping[str, Any]) -> Difference | None:
    for role, ranks in then.items():
        if len(now.get(role, ())) != len(ranks):
            return Difference(None, f"ranks of {role}", len(ranks), len(now.get(role, ())))
        for rank, (sums, here) in enumerate(zip(ranks, now[role], strict=True)):
            for name, checksum in sums.items():
                if here.get(name) != checksum:
                    return Difference(None, f"{name} of {role}, rank {rank}, after the step (checksums)", checksum, here.get(name))
    return None


def _notes(record: ExportedStep, parts: Parts) -> tuple[str, ...]:
    """Return the differences of machine, versions and layouts, in words."""
    here, kind, layouts = versions(), machine(), layouts_of(parts)
    notes = [f"{name} was {there}, and is {here.get(name, 'not installed')}" for name, there in record.versions.items()
             if here.get(name) != there]  # fmt: skip
    if kind != record.machine:
        notes.append(f"the machine was {record.machine}, and is {kind}")
    notes += [f"{name} was in {there}, and is in {layouts.get(name, 'no layout')}" for name, there in record.layouts.items()
              if layouts.get(name) != there]  # fmt: skip
    return tuple(notes)
