"""Transfer protocols: how a batch is scattered over a role's ranks and gathered again (HybridFlow, table 3 and appendix B).

A protocol is two pure functions: ``scatter`` says which rows every rank gets, ``collectors`` whose outputs are kept. For the
protocols that split, the law is ``gather(scatter(batch)) == batch``, for any number of rows (uneven splits are fine)::

    THREE_D on tp2 dp2, 5 rows of 9 7 4 4 2 tokens      rank 0, 1 (dp 0): rows 0 3 (13 tokens)   <- kept from rank 0
                                                        rank 2, 3 (dp 1): rows 1 2 4 (13 tokens) <- kept from rank 2
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hfsdk.core.checks import checked
from hfsdk.core.field_texts import documented
from hfsdk.core.layout import Mesh

RowIndices = npt.NDArray[np.int64]
Scatter = Callable[[int, "npt.NDArray[np.int64] | None", Mesh], tuple[RowIndices, ...]]
Collect = Callable[[Mesh], tuple[int, ...]]


@checked
def balanced_split(weights: Sequence[int] | npt.NDArray[np.int64], parts: int) -> list[RowIndices]:
    """Split rows into ``parts`` groups of about equal weight: heaviest first, each to the lightest group so far.

    Ties go to the group with fewer rows, then to the lower number, so the result is the same everywhere.
    """
    values = np.asarray(weights, dtype=np.int64)
    if len(values) and (values == values[0]).all() and values[0] >= 0:  # by turns, without the heap
        return [np.arange(number, len(values), parts) for number in range(parts)]
    groups: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, 0, number) for number in range(parts)]  # (weight so far, rows so far, group): the lightest is on top
    for row in np.argsort(-values, kind="stable").tolist():
        load, count, number = heap[0]
        groups[number].append(row)
        heapq.heapreplace(heap, (load + int(values[row]), count + 1, number))
    return [np.array(sorted(group), dtype=np.int64) for group in groups]


@documented
@dataclass(frozen=True)
class TransferProtocol:
    """A named pair of scatter and collect. Users make their own the same way."""

    name: str
    """Name for messages and pictures."""
    scatter_rows: Scatter
    """(num_rows, tokens per row or None, mesh) -> the rows of every rank."""
    collect_ranks: Collect
    """mesh -> the ranks whose outputs are kept."""
    splits: bool = True
    """Whether every row goes to exactly one collecting rank."""

    @checked
    def scatter(self, num_rows: int, mesh: Mesh, tokens: npt.NDArray[np.int64] | None = None) -> tuple[RowIndices, ...]:
        """Return, for every rank, the numbers of the rows it gets."""
        return self.scatter_rows(num_rows, tokens, mesh)

    @checked
    def collectors(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the ranks whose outputs are gathered, in gathering order."""
        return self.collect_ranks(mesh)

    def __repr__(self) -> str:
        return self.name


def _split(num_rows: int, tokens: npt.NDArray[np.int64] | None, parts: int) -> list[RowIndices]:
    return balanced_split(np.ones(num_rows, dtype=np.int64) if tokens is None else tokens, parts)


def _all_rows(num_rows: int, tokens: npt.NDArray[np.int64] | None, mesh: Mesh) -> tuple[RowIndices, ...]:
    return tuple(np.arange(num_rows) for _ in mesh.ranks)


def _by_dp(num_rows: int, tokens: npt.NDArray[np.int64] | None, mesh: Mesh) -> tuple[RowIndices, ...]:
    shards = _split(num_rows, tokens, mesh.layout.num_replicas)
    return tuple(shards[dp] for dp in mesh.replicas)


def _by_rank(num_rows: int, tokens: npt.NDArray[np.int64] | None, mesh: Mesh) -> tuple[RowIndices, ...]:
    return tuple(_split(num_rows, tokens, mesh.layout.size))


def _by_micro_dp(num_rows: int, tokens: npt.NDArray[np.int64] | None, mesh: Mesh) -> tuple[RowIndices, ...]:
    shards = _split(num_rows, tokens, mesh.layout.size // mesh.rollout_tp)
    return tuple(shards[rank // mesh.rollout_tp] for rank in mesh.ranks)


def _every_rank(mesh: Mesh) -> tuple[int, ...]:
    return tuple(mesh.ranks)


@lru_cache(maxsize=256)
def _dp_leaders(mesh: Mesh) -> tuple[int, ...]:
    # The last stage has the outputs; of its tp and cp ranks, which all have the same, the first gives them.
    return tuple(r for r in mesh.ranks if (at := mesh.coordinates(r)).tp == at.cp == 0 and at.pp == mesh.layout.pp - 1)


def _micro_dp_leaders(mesh: Mesh) -> tuple[int, ...]:
    return tuple(r for r in mesh.ranks if r % mesh.rollout_tp == 0)


@lru_cache(maxsize=256)
def _pp_leaders(mesh: Mesh) -> tuple[int, ...]:
    return tuple(r for r in mesh.ranks if (at := mesh.coordinates(r)).tp == at.cp == at.dp == 0)


ONE_TO_ALL = TransferProtocol("ONE_TO_ALL", _all_rows, _every_rank, splits=False)
"""Every rank gets all rows; kept from every rank. For initialisation and inspection."""
THREE_D = TransferProtocol("THREE_D", _by_dp, _dp_leaders)
"""Split over dp, the same rows for all tp and pp ranks of a dp rank; kept from the last pp rank, tp 0, of every dp rank."""
MICRO_DP = TransferProtocol("MICRO_DP", _by_micro_dp, _micro_dp_leaders)
"""Split over the rollout replicas (training dp x micro dp); kept from the first rank of every replica."""
PP_ONLY = TransferProtocol("PP_ONLY", _all_rows, _pp_leaders, splits=False)
"""Every rank gets all rows; kept from tp 0, dp 0 of every pp rank."""
DP = TransferProtocol("DP", _by_rank, _every_rank)
"""Split over all ranks; kept from every rank."""
ALL_TO_ALL = TransferProtocol("ALL_TO_ALL", _all_rows, _every_rank, splits=False)
"""Nothing is split: the caller gives every rank its own input, and every rank's output comes back. For debugging."""

PROTOCOLS = {p.name: p for p in (ONE_TO_ALL, THREE_D, MICRO_DP, PP_ONLY, DP, ALL_TO_ALL)}
"""HybridFlow's protocols by name (its 3D_PROTO, 3D_ALL_MICRO_DP, 3D_PP_ONLY, DP_PROTO)."""
