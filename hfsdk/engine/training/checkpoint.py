"""A role's state in files, in the format of ``megatron.core.dist_checkpointing``: saved in any layout, loaded into any other.

It stores the pieces (:mod:`hfsdk.engine.weights.role_state`) of every rank's share (:mod:`hfsdk.engine.weights.shares`), so that
all ranks write and read, each its part and no number twice, under the names ``weights.<Hugging Face name>``, ``exp_avg.<...>`` and
so on, and a :class:`~hfsdk.engine.weights.role_state.Summary` in ``common.pt``. Saving has three parts, of which only the first
needs the other ranks::

    begin_save   every rank, in the call       who writes what is agreed; returns a Saving that holds CPU tensors
    Saving       every rank, on its thread     __<rank>_0.distcp, then written-<rank>.pkl (which byte range holds what; checksum)
    finish_save  rank 0, when all are written  .metadata and, last, metadata.json: now it is a checkpoint

In an object store (``hfsdk.core.store``) the numbers are sent as they are written, and read by ranges; what Megatron writes itself,
small files, is in a temporary folder for a moment.

Megatron writes in processes that it forks, and spawns one more for their results. Ours hold gloo's threads, Ray's and vLLM's,
whose locks a fork would copy in any state; hence the thread, which runs no collective.

torch reads ``.metadata`` with plain pickle, which runs what a file says. Here every pickle is read by :class:`_Unpickler`, which
knows the few names that a real file has, none of which does anything but hold numbers.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from hfsdk.core.errors import CheckpointError, HfsdkError
from hfsdk.core.files import INDEX, SAVE, WITHOUT_CHECKSUMS, FileSum, check_files, content_of, parse_files, why_unwritten
from hfsdk.core.store import AnyPath, StorePath
from hfsdk.core.system import temporary_folder
from hfsdk.core.untrusted import open_file, parse_json
from hfsdk.engine.process import malloc_settings, plain_objects
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.weights.role_state import Shard, StatePiece, Summary
from hfsdk.engine.weights.shares import StateShare, fill, pieces
from hfsdk.engine.weights.summed_file import SummedFile

SUMMARY = "hfsdk"
"""Key of the summary in ``common.pt``."""

GROUP_BYTES = 1 << 26
"""Bytes that are asked of a store at a time, and those of the last piece."""


class StateWriter(threading.Thread):
    """A rank's share of a save, written in the background.

    Attributes:
        error: the error that ended the save, or ``None``; to be read once the thread has ended.
        small: Megatron's own files of a save to a store, on rank 0.
    """

    def __init__(self, role: str, folder: AnyPath, rank: int, num_ranks: int) -> None:
        super().__init__(name=f"hfsdk-save-{role}", daemon=True)
        self.folder, self.rank, self.num_ranks = folder, rank, num_ranks
        self.small: dict[str, bytes] = {}
        self.error: CheckpointError | None = None
        self.metadata: Any = None
        """The pieces that there are over all ranks; on rank 0."""
        self.writer: _Writer | None = None

    def run(self) -> None:
        """Write this rank's files."""
        assert self.writer is not None
        try:
            results, name, file_sum = self.writer.write()
            written = (results, name, file_sum.num_bytes, file_sum.crc32)
            (self.folder / f"written-{self.rank}.pkl").write_bytes(pickle.dumps(written))
        except Exception as error:  # whatever it is, the user is told by the thread that waits
            self.error = _unwritable(self.folder, error)
        finally:
            self.writer = None  # its tensors go
            malloc_settings.give_back()

    def written(self) -> bool:
        """Return whether this rank's files are complete.

        Raises:
            CheckpointError: they cannot be written.
        """
        if self.is_alive():
            return False
        if self.error is not None:
            raise self.error
        return True


_writing, _writers = threading.Lock(), [0]


@contextlib.contextmanager
def one_checksum() -> Iterator[None]:
    """Keep torch from counting its own checksum, which nobody reads and which takes as long as ours; any number of threads."""
    with _writing:
        _writers[0] += 1
        torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        with _writing:
            _writers[0] -= 1
            # The option is the process's: another save may still be writing.
            if not _writers[0]:
                torch.serialization.set_crc32_options(True)


class _Writer(FileSystemWriterAsync):
    """The plan of a save and its tensors until :meth:`write`, which needs no other process; ``folder``: where that writes."""

    folder: AnyPath

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        # Data is taken now and written later, when the planner may be gone.
        self._items = [(item, planner.resolve_data(item)) for item in plan.items]
        self._file = f"{plan.storage_data.prefix}0.distcp"

    def write(self) -> tuple[list[Any], str, FileSum]:
        """Write the file; return where in it each item lies, its name, and its sum."""
        results = []
        with one_checksum(), SummedFile(self.folder / self._file) as file:
            for item, tensor in self._items:
                # torch.save stores whole storages, and the pieces are views; one copy at a time
                copy, transforms = tensor.clone(), _StorageWriterTransforms()
                results.append(_write_item(transforms, file, copy, item, self._file, SerializationFormat.TORCH_SAVE))
                file.check()
            self._items = []
        return results, self._file, file.sum


class _InThread(TorchDistSaveShardedStrategy):
    """Megatron's strategy with our writer and the role's own group; plans only."""

    def __init__(self, groups: RoleGroups, saving: StateWriter) -> None:
        super().__init__("torch_dist", 1)
        self._groups, self._saving = groups, saving

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        by_key, *_ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        writer = _Writer(checkpoint_dir)
        writer.folder = self._saving.folder
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        converted = mcore_to_pyt_state_dict(by_key)
        with plain_objects.written_by(pickle.dumps, _unpickled):
            planned, *_ = save_state_dict_async_plan(converted, writer, self._groups.world, 0, planner)
        self._saving.writer, self._saving.metadata = writer, planned[1]
        return AsyncRequest(None, (), [])


def begin_save(role: str, share: StateShare, shard: Shard, groups: RoleGroups, folder: AnyPath) -> StateWriter:
    """Agree with the role's ranks on the files that each writes, and start writing.

    Args:
        role: the role's name, for the thread's name.
        share: this rank's; it must not change until all is written.
        shard: this rank's part of the role.
        groups: the role's process groups.
        folder: the role's own, new or empty; one that every rank sees.

    Raises:
        CheckpointError: on every rank, when one cannot write there.
    """
    saving = StateWriter(role, folder, groups.rank, groups.mesh.layout.size)
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, HfsdkError) as error:
        problem = str(error)
    # A rank that raised alone would leave the others inside Megatron's collectives.
    _agree(groups, folder, problem)
    sharded = {str(i): _sharded(piece) for i, piece in enumerate(pieces(share, shard)) if piece.first}
    content = {SUMMARY: asdict(share.summary), "pieces": sharded}
    try:
        with _nearby(folder) as here:
            dist_checkpointing.save(
                content, str(here), _InThread(groups, saving), validate_access_integrity=False, async_sharded_save=True
            )  # the planner checks that the pieces cover every tensor once; Megatron's own check takes the default group
            if isinstance(folder, StorePath):
                saving.small = {path.name: path.read_bytes() for path in here.iterdir()}
    except Exception as error:
        problem = str(error)
    _agree(groups, folder, problem)
    saving.start()
    return saving


def finish_save(saving: StateWriter) -> dict[str, FileSum]:
    """Complete a checkpoint, on rank 0, when every rank's files are written; return the sum of each of its files.

    Raises:
        CheckpointError: it cannot be written.
    """
    parts = [saving.folder / f"written-{rank}.pkl" for rank in range(saving.num_ranks)]
    try:
        written = [_unpickled(content_of(part)) for part in parts]
        sums = {name: FileSum(num_bytes, crc32) for _, name, num_bytes, crc32 in written}
        with _nearby(saving.folder) as here:
            # The index of all pieces: written once every rank's file is complete.
            _Writer(str(here)).finish(saving.metadata, [results for results, *_ in written])
            for part in parts:
                part.unlink()
            save_config(CheckpointingConfig("torch_dist", 1), str(here))
            small = [path for path in here.iterdir() if path.name not in sums]
            if isinstance(saving.folder, Path):
                return sums | {path.name: FileSum.of(path) for path in small}
            saving.small |= {path.name: path.read_bytes() for path in small}
        for name, content in saving.small.items():
            (saving.folder / name).write_bytes(content)
        return sums | {name: FileSum(len(content), zlib.crc32(content)) for name, content in saving.small.items()}
    except OSError as error:
        raise _unwritable(saving.folder, error) from error


@contextlib.contextmanager
def _nearby(folder: AnyPath) -> Iterator[Path]:
    """Give the folder that Megatron writes into: the role's own, or a temporary one where that is in a store."""
    if isinstance(folder, Path):
        yield folder
        return
    with temporary_folder("hfsdk-save-") as here:
        yield Path(here)


def read_checked(folder: AnyPath, groups: RoleGroups, *, checked: bool) -> Summary:
    """Return the content of a folder's checkpoint, after its ranks have compared its files with their checksums; collective.

    Args:
        folder: the role's own folder.
        groups: the role's; each of its ranks reads a share of the files.
        checked: whether they were compared already.

    Raises:
        CheckpointError: on every rank, when there is none, or a file is missing or damaged.
    """
    problem, summary = None, None
    try:
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder.name}'s checkpoint is gone: there is no {folder}. Put it back, or load another with session.load(...)."
            )
        if not checked:
            _check_share(folder, groups)
        summary = read_summary(folder)
    except HfsdkError as error:
        problem = str(error)
    problems = [text for text in groups.gather(problem, str | None) if text]
    if problems or summary is None:
        raise CheckpointError(problems[0])
    return summary


def _check_share(folder: AnyPath, groups: RoleGroups) -> None:
    state = folder.parent
    file = state / SAVE
    index: dict[str, Any] = {}
    try:
        index = parse_json(content_of(state.parent / INDEX))
    except CheckpointError:  # of a store that does not answer
        raise
    except (OSError, ValueError, RecursionError):
        pass  # gone or damaged since: the save tells of itself
    try:
        if index.get("format") == WITHOUT_CHECKSUMS and index.get("state") == state.name:
            return
        listed = {name: FileSum(size, crc) for name, size, crc in index.get("saves", ())}
        if state.name in listed:
            check_files(state, {SAVE: listed[state.name]})
        noted = parse_files(parse_json(content_of(file))["files"])
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint is damaged: {file} cannot be read: {error}") from None
    own_files = {name: file_sum for name, file_sum in noted.items() if name.split("/")[0] == folder.name}
    # Every rank knows of all files, and reads a share of them: the checksums of a large model take as long as reading it.
    check_files(state, own_files, parts=sorted(own_files)[groups.rank :: groups.mesh.layout.size])


def read_summary(folder: AnyPath) -> Summary:
    """Return the content of a folder's checkpoint.

    Raises:
        CheckpointError: there is none, or it is of something else.
    """
    try:
        common = torch.load(io.BytesIO(content_of(folder / "common.pt")), map_location="cpu", weights_only=True)
        saved = common[SUMMARY]
        step = None if saved["step"] is None else float(saved["step"])
        sums = {str(name): (str(dtype), int(number)) for name, (dtype, number) in saved.get("fingerprints", {}).items()}
        return Summary(int(saved["num_updates"]), tuple(map(str, saved["kinds"])), step, sums)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no state of a role, it has no common.pt: a simulated session saved it, or the copy lacks a part"
        ) from None
    except Exception as error:  # a damaged file, or one of another program: pickle raises anything
        raise CheckpointError(f"{folder} holds no state of a role that can be read: {_first_line(error)}") from error


def load(folder: AnyPath, share: StateShare, shard: Shard) -> None:
    """Fill a rank's share (see :meth:`hfsdk.engine.weights.shares.StateShare.blank`) from a checkpoint of any layout.

    Collective over the pool, whose world is the role's: each rank plans its own reading, and all hear of one that cannot.

    Raises:
        CheckpointError: on every rank, when a tensor is missing or of another shape, or a file cannot be read.
    """
    wanted = pieces(share, shard)
    sharded = [_sharded(piece) for piece in wanted]
    by_key, *_ = _replace_state_dict_keys_with_sharded_keys({str(i): tensor for i, tensor in enumerate(sharded)})
    planner = MCoreLoadPlanner(shapes_validation_sharded_tensors=sharded)
    problem = None
    try:
        _load_state_dict(mcore_to_pyt_state_dict(by_key, True), _Reader(folder), planner=planner, no_dist=True)
    except (CheckpointException, Exception) as error:  # the former is no Exception
        problem = _first_line(error)
    if problems := [text for text in plain_objects.gather(problem, str | None, dist.group.WORLD) if text]:
        raise CheckpointError(f"the state in {folder} cannot be loaded: {problems[0]}")
    fill(share, shard, wanted)


# -- pickles of others

_TORCH = "torch.distributed.checkpoint"

ALLOWED = frozenset({
    ("torch", "Size"), ("torch", "float32"), ("torch", "float16"), ("torch", "bfloat16"), ("torch.serialization", "_get_layout"),
    (f"{_TORCH}.filesystem", "_StorageInfo"), (f"{_TORCH}.storage", "WriteResult"),
    *((f"{_TORCH}.metadata", name) for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )),
    *((f"{_TORCH}.planner", name) for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
})  # fmt: skip
"""The globals that a checkpoint's pickles may name: sizes, dtypes and places in files."""


class _Unpickler(pickle.Unpickler):
    """An unpickler of the classes in torch's and Megatron's checkpoints; it refuses every other name, so no file runs code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of hfsdk does; nothing of it was run")
        return super().find_class(module, name)


def _unpickled(content: bytes) -> Any:
    return _Unpickler(io.BytesIO(content)).load()


class _Reader(FileSystemReader):
    """A reader of a checkpoint's index by :class:`_Unpickler`, and of files of its own folder alone; payloads are tensors alone."""

    def __init__(self, folder: AnyPath) -> None:
        super().__init__(str(folder))
        self._folder = folder

    def read_data(self, plan: Any, planner: Any) -> Any:
        if not isinstance(self._folder, StorePath):
            for name in {self._place(item)[0] for item in plan.items}:
                with open_file(self._folder, name, error=CheckpointError):  # torch opens it by its name, whatever it is
                    pass
            return super().read_data(plan, planner)
        group, size = [], 0
        for item in sorted(plan.items, key=lambda item: self._place(item)):
            group.append(item)
            size += self._place(item)[2]
            if size >= GROUP_BYTES:
                self._read(group, planner)
                group, size = [], 0
        self._read(group, planner)
        done = torch.futures.Future()
        done.set_result(None)
        return done

    def _place(self, item: Any) -> tuple[str, int, int]:
        storage = self.storage_data[item.storage_index]
        return storage.relative_path, storage.offset, storage.length

    def _read(self, items: Sequence[Any], planner: Any) -> None:
        """Read the wanted items; a piece that several are in is read once."""
        places = sorted({self._place(item) for item in items})
        read = dict(zip(places, self._folder.ranges(places), strict=True))
        for item in items:
            tensor = torch.load(io.BytesIO(read[self._place(item)]), map_location="cpu", weights_only=True)
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = _unpickled(content_of(self._folder / ".metadata"))
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(".metadata is no index of a checkpoint")
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):  # torch would read it with plain pickle
                raise pickle.UnpicklingError(f"{name} is no tensor")
        for place in metadata.storage_data.values():
            if Path(place.relative_path).name != place.relative_path or place.transform_descriptors:
                raise pickle.UnpicklingError(f"{place.relative_path!r} is no file of the checkpoint")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _sharded(piece: StatePiece) -> ShardedTensor:
    """Return a piece as Megatron describes it; the grid of pieces is irregular (``axis_fragmentations=None``)."""
    size = tuple(piece.data.shape)
    return ShardedTensor(
        f"{piece.kind}.{piece.tensor}", piece.data, piece.data.dtype, size, piece.shape, piece.start, None,
        replica_id=0 if piece.first else 1,
    )  # fmt: skip


def _agree(groups: RoleGroups, folder: AnyPath, problem: str | None) -> None:
    problems = [text for text in groups.gather(problem, str | None) if text]
    if problems:
        raise _unwritable(folder, problems[0])


def _unwritable(folder: AnyPath, why: BaseException | str) -> CheckpointError:
    reason = why_unwritten(folder, why)
    left = "The save" if isinstance(folder, StorePath) else "Nothing of this save is left, and the one"
    return CheckpointError(f"cannot save to {folder}: {reason}. {left} before it is untouched.")


def _first_line(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if failures else error
    return f"{type(first).__name__}: {first}".splitlines()[0][:400]
