"""A role's state in files, in the format of ``megatron.core.dist_checkpointing``: saved in any layout, loaded into any other.

What is stored are the pieces of :mod:`hfsdk.engine.role_state`, under the names ``weights.<Hugging Face name>``,
``exp_avg.<...>`` and so on, and a :class:`~hfsdk.engine.role_state.Summary` in ``common.pt``. Saving has three parts, of which only
the first needs the other ranks::

    begin_save   every rank, in the call       who writes what is agreed; returns a Saving that holds CPU tensors
    Saving       every rank, on its thread     __<rank>_0.distcp, then written-<rank>.pkl (which byte range holds what)
    finish_save  rank 0, when all are written  .metadata and, last, metadata.json: now it is a checkpoint

Megatron writes in processes that it forks, and spawns one more for their results. Ours hold gloo's threads, Ray's and vLLM's,
whose locks a fork would copy in any state; hence the thread, which runs no collective.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms

from hfsdk.engine.megatron_groups import RoleGroups
from hfsdk.engine.role_state import Piece, Shard, State, Summary, fill, pieces
from hfsdk.errors import CheckpointError

SUMMARY = "hfsdk"
"""Key of the summary in ``common.pt``."""


class Saving(threading.Thread):
    """A rank's share of a save, written in the background.

    Attributes:
        error: what went wrong, once the thread has ended.
    """

    def __init__(self, role: str, folder: Path, rank: int, num_ranks: int) -> None:
        super().__init__(name=f"hfsdk-save-{role}", daemon=True)
        self.folder, self.rank, self.num_ranks = folder, rank, num_ranks
        self.error: CheckpointError | None = None
        self.metadata: Any = None
        """Which pieces there are, over all ranks; on rank 0."""
        self.writer: _Writer | None = None

    def run(self) -> None:
        """Write this rank's files."""
        assert self.writer is not None
        try:
            results = self.writer.write()
            (self.folder / f"written-{self.rank}.pkl").write_bytes(pickle.dumps(results))
        except Exception as error:  # whatever it is, the user is told by the thread that waits
            self.error = _unwritable(self.folder, error)
        finally:
            self.writer = None if self.rank else self.writer  # its tensors go

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


class _Writer(FileSystemWriterAsync):
    """Keeps the plan and its tensors until :meth:`write`, which needs no other process."""

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        self._items = [(item, planner.resolve_data(item)) for item in plan.items]
        self._file = f"{plan.storage_data.prefix}0.distcp"

    def write(self) -> list[Any]:
        """Write the file and return where in it each item lies."""
        answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        running: queue.Queue[int] = queue.Queue()
        running.put(0)
        # torch.save stores whole storages, and the pieces are views; one copy at a time
        copies = ((item, tensor.clone()) for item, tensor in self._items)
        bucket = (str(Path(self.checkpoint_dir) / self._file), self._file, ([], copies))
        self.write_preloaded_data([_StorageWriterTransforms()], 0, bucket, answers, running, use_fsync=True)
        self._items = []
        _, results = answers.get()
        if isinstance(results, Exception):
            raise results
        return list(results)


class _InThread(TorchDistSaveShardedStrategy):
    """Megatron's strategy with our writer and the role's own group; plans only."""

    def __init__(self, groups: RoleGroups, saving: Saving) -> None:
        super().__init__("torch_dist", 1)
        self._groups, self._saving = groups, saving

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        by_key, *_ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        writer = _Writer(checkpoint_dir)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        converted = mcore_to_pyt_state_dict(by_key)
        planned, *_ = save_state_dict_async_plan(converted, writer, self._groups.control, 0, planner)
        self._saving.writer, self._saving.metadata = writer, planned[1]
        return AsyncRequest(None, (), [])


def begin_save(role: str, state: Mapping[str, Any], shard: Shard, groups: RoleGroups, folder: Path) -> Saving:
    """Agree with the role's ranks on who writes what, and start writing.

    Args:
        role: for the thread's name.
        state: this rank's, on the CPU; it must not change until all is written.
        shard: what of the role it is.
        groups: the role's.
        folder: the role's own, new or empty; one that every rank sees.

    Raises:
        CheckpointError: on every rank, when one cannot write there.
    """
    saving = Saving(role, folder, groups.rank, groups.mesh.layout.size)
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = str(error)
    _agree(groups, folder, problem)
    sharded = {str(i): _sharded(piece) for i, piece in enumerate(pieces(state, shard)) if piece.first}
    content = {SUMMARY: asdict(Summary.of(state)), "pieces": sharded}
    try:
        dist_checkpointing.save(
            content, str(folder), _InThread(groups, saving), validate_access_integrity=False, async_sharded_save=True
        )  # the planner checks that the pieces cover every tensor once; Megatron's own check takes the default group
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    _agree(groups, folder, problem)
    saving.start()
    return saving


def finish_save(saving: Saving) -> None:
    """Complete a checkpoint, on rank 0, when every rank's files are written.

    Raises:
        CheckpointError: it cannot be written.
    """
    assert saving.writer is not None
    parts = [saving.folder / f"written-{rank}.pkl" for rank in range(saving.num_ranks)]
    try:
        results = [pickle.loads(part.read_bytes()) for part in parts]  # written by this save's ranks
        saving.writer.finish(saving.metadata, results)
        for part in parts:
            part.unlink()
        save_config(CheckpointingConfig("torch_dist", 1), str(saving.folder))
    except OSError as error:
        raise _unwritable(saving.folder, error) from error


def read_summary(folder: Path) -> Summary:
    """Return what a folder's checkpoint holds.

    Raises:
        CheckpointError: there is none, or it is of something else.
    """
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))
        saved = common[SUMMARY]
        return Summary(saved["num_updates"], tuple(saved["kinds"]), saved["step"])
    except Exception as error:  # a missing or damaged file, or one of another program: pickle raises anything
        raise CheckpointError(f"{folder} holds no state of a role that can be read: {error}") from error


def load(folder: Path, state: State, shard: Shard) -> None:
    """Fill a state (see :func:`hfsdk.engine.role_state.blank`) from a checkpoint of any layout.

    Collective over the pool, whose world is the role's: Megatron plans reading over the default group.

    Raises:
        CheckpointError: on every rank, when a tensor is missing or of another shape, or a file cannot be read.
    """
    wanted = pieces(state, shard)
    content = {"pieces": {str(i): _sharded(piece) for i, piece in enumerate(wanted)}}
    try:
        dist_checkpointing.load(content, str(folder), TorchDistLoadShardedStrategy(), validate_access_integrity=False)
    except (CheckpointException, Exception) as error:  # the former is no Exception
        raise CheckpointError(f"the state in {folder} cannot be loaded: {_first_line(error)}") from None
    fill(state, shard, wanted)


def _sharded(piece: Piece) -> ShardedTensor:
    """Return a piece as Megatron describes it; the grid of pieces is irregular (``axis_fragmentations=None``)."""
    size = tuple(piece.data.shape)
    return ShardedTensor(
        f"{piece.kind}.{piece.tensor}", piece.data, piece.data.dtype, size, piece.shape, piece.start, None,
        replica_id=0 if piece.first else 1,
    )  # fmt: skip


def _agree(groups: RoleGroups, folder: Path, problem: str | None) -> None:
    problems = [text for text in groups.gather_objects(problem) if text]
    if problems:
        raise _unwritable(folder, problems[0])


def _unwritable(folder: Path, why: object) -> CheckpointError:
    return CheckpointError(f"cannot save to {folder}: {why}")


def _first_line(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if failures else error
    return f"{type(first).__name__}: {first}".splitlines()[0][:400]
