"""What must move so that every rank has the weights of another layout: the plan of a weight transition, as pure data.

Shards are boxes of the Hugging Face tensors (:mod:`hfsdk.resharding.boxes`). What a rank needs and has stays or is copied in
place; only the rest is sent, by one rank that has it (HybridFlow, arXiv 2409.19256, section 5). One weight of four quarters, tp4
to tp2 dp2::

    rank                     0        1        2        3
    training shard           q0       q2       q1       q3      (the tp axis is permuted, see layout.Mesh)
    rollout shard            q0 q1    q2 q3    q0 q1    q2 q3
    moves                    0 -> 2: q0     2 -> 0: q1     1 -> 3: q2     3 -> 1: q3
    grouped "vanilla"        q0       q1       q2       q3      training shard: ranks 1 and 2 have nothing of what they need

A plan of a large model is small: layers that lie alike on both sides are one :class:`Section`, planned once.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt

from hfsdk.core.checks import OneOf, checked, is_whole, shown
from hfsdk.core.errors import LayoutError, OptionError
from hfsdk.core.layout import Coordinates, Layout, Mesh
from hfsdk.core.spec import DTYPE_BYTES, Dtype, ModelSpec
from hfsdk.resharding.boxes import (
    VOCAB_TABLES,
    Box,
    Offsets,
    inside,
    intersect,
    megatron_boxes,
    megatron_ends,
    megatron_layer,
    padded_vocab,
    vllm_boxes,
    vllm_ends,
    vllm_layer,
)

if TYPE_CHECKING:
    from pandas import DataFrame

GROUPINGS = ("strided", "vanilla")
"""How ranks stand in the two layouts: HybridFlow's, whose training shard lies inside the rollout shard, or consecutive in both."""

LINKS = ("same rank", "same node", "network")
"""Ways a piece may go, from the cheapest."""


@dataclass(frozen=True, slots=True)
class Move:
    """One piece of a tensor that goes from ``source`` rank's local parameter into ``target`` rank's (maybe itself)."""

    tensor: str
    source: int
    target: int
    source_local: str
    source_start: Offsets
    target_local: str
    target_start: Offsets
    size: Offsets

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def of_layer(self, by: int) -> Move:
        """Return the same move ``by`` layers further on."""
        return Move(
            _shifted(self.tensor, by), self.source, self.target, _shifted(self.source_local, by), self.source_start,
            _shifted(self.target_local, by), self.target_start, self.size,
        )  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A part of a plan: what is in no layer, or layers that move alike."""

    moves: tuple[Move, ...]
    """Those of the first layer."""
    layers: range
    """The layers that it stands for; empty for what is in none."""

    @property
    def count(self) -> int:
        """How often its moves happen."""
        return max(1, len(self.layers))

    def all_moves(self) -> Iterator[Move]:
        """Yield the moves of every layer."""
        yield from self.moves
        for by in range(1, self.count):
            for move in self.moves:
                yield move.of_layer(by)


@dataclass(frozen=True)
class Volume:
    """Bytes of one rank in a weight transition, by a formula or by counting."""

    name: str
    received: float
    """Bytes that come from other ranks."""
    peak: float
    """Bytes of weights on the rank at the end of the transition."""
    redundant: float
    """Bytes of the training shard that are kept beside a rollout copy that does not contain them."""
    counts: str
    """What it is made of."""


@dataclass(frozen=True)
class TransportReport:
    """What one rank moved."""

    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    """Bytes copied between this rank's own tensors, in the plan's dtype."""
    bytes_shared: int
    """Bytes that stayed where they are, because both engines use the same storage."""
    received_from: tuple[int, ...]
    """Bytes received from every rank."""
    seconds: float


@dataclass(frozen=True)
class Resident:
    """Bytes of weights that are on a rank at one moment, counted from storages."""

    moment: str
    """``"training"``, ``"generating"``, or ``"both"`` where each engine keeps its own weights."""
    trainer: int
    """In Megatron's parameters alone."""
    rollout: int
    """In vLLM's parameters alone."""
    shared: int
    """In storages that both use."""
    aside: int
    """Of the training shard, kept outside both while generating."""
    redundant: int
    """Numbers that are there twice in the same dtype."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.trainer + self.rollout + self.shared + self.aside


_Side = tuple[tuple[tuple[int, ...], tuple[Box, ...]], ...]
"""Who holds (or needs) which boxes of a section: (ranks, their boxes)."""

_Groups = dict[tuple[int, int], list[int]]
"""The ranks at each (pp, tp) of a layout."""


@dataclass(frozen=True)
class _Share:
    """Numbers of elements of one rank: of its shard before, of its shard after, and of both."""

    held: int
    needed: int
    common: int


@dataclass(frozen=True, repr=False)
class ReshardPlan:
    """What every rank copies, sends and receives so that the rollout has the trainer's weights (or, inverted, back).

    Made by :meth:`between`; checked byte for byte against what the transport counted.

    Attributes:
        spec: the model.
        train: the filled layout of training.
        rollout: the filled layout of generation; pp above 1 is planned, but no engine runs it.
        dtype: of what moves.
        grouping: ``"strided"`` or ``"vanilla"``.
        nodes: the node of every rank.
        to_train: whether it leads back to the training layout.
        apart: whether the rollout lives on ranks of its own, numbered after the trainer's.
    """

    spec: ModelSpec
    train: Layout
    rollout: Layout
    dtype: str
    grouping: str
    nodes: tuple[int, ...]
    to_train: bool
    apart: bool
    sections: tuple[Section, ...] = field(repr=False)
    _shares: tuple[_Share, ...] = field(repr=False)

    @classmethod
    @checked
    def between(
        cls,
        spec: ModelSpec,
        train: str | Layout,
        rollout: str | Layout,
        dtype: Dtype = "fp32",
        *,
        grouping: Annotated[str, OneOf(*GROUPINGS)] = "strided",
        nodes: Sequence[int] | int | None = None,
        apart: bool = False,
    ) -> ReshardPlan:
        """Plan the transition of ``spec`` from a training layout to a rollout layout.

        A piece is taken from the rank itself where it holds it, else from a holder on the same node, else from any; among
        those, from the one that has sent least so far. With ``apart`` all ranks of a node take a piece from the same holder, so
        that one object, which comes to the node once, serves them all.

        Args:
            spec: the model; ``hf.ModelSpec.preset("llama-70b")`` for one that exists only as numbers.
            train: e.g. ``"tp8 pp8 dp2"``; an open dp fills up to the rollout's size.
            rollout: e.g. ``"tp8 dp16"``.
            dtype: ``"fp32"`` or ``"bf16"``: what travels.
            grouping: ``"strided"`` (HybridFlow section 5.3) or ``"vanilla"`` (consecutive ranks in both layouts).
            nodes: the node of every rank, or how many ranks a node has; by default all are on one.
            apart: the rollout is on ranks of its own (another pool), numbered after the trainer's.

        Raises:
            LayoutError: a layout does not fit the model, or the two cover different numbers of ranks.
            OptionError: another dtype or grouping, or nodes for another number of ranks.
        """
        before, after = Layout.parse(train), Layout.parse(rollout)
        if apart:
            before, after = before.fill(before.size), after.fill(after.size)
        else:
            before = before.fill(max(before.size, after.size)) if before.dp is None else before
            if after.dp is not None and after.size != before.size:
                raise LayoutError(
                    f"the training layout '{before}' has {before.size} ranks, the rollout's '{after}' has {after.size}; on the "
                    "same devices both need as many. Change one, or say apart=True for a rollout on a pool of its own."
                )
            after = after.fill(before.size)
        before.check_model(spec)
        after.check_model(spec)
        num_ranks = before.size + after.size * apart
        found = _nodes(nodes, num_ranks)
        return cls(spec, before, after, dtype, grouping, found, False, apart, *_plan(spec, before, after, grouping, found, apart))

    def inverse(self) -> ReshardPlan:
        """Return the plan of the way back: from the rollout's weights to the training shards."""
        planned = _plan(self.spec, self.train, self.rollout, self.grouping, self.nodes, self.apart, to_train=not self.to_train)
        return replace(self, to_train=not self.to_train, sections=planned[0], _shares=planned[1])

    # ---- who stands where

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def rollout_tp(self) -> int:
        """Tensor-parallel size of the rollout."""
        return self.rollout.tp

    @checked
    def train_at(self, rank: int) -> Coordinates | None:
        """Return the position of a rank in the training layout (``None`` for one that only generates)."""
        self._check_rank(rank)
        return _train_at(self.train, self.rollout, self.grouping, rank, self.apart) if rank < self.train.size else None

    @checked
    def rollout_at(self, rank: int) -> Coordinates | None:
        """Return the position of a rank in the rollout layout (``None`` for one that only trains)."""
        self._check_rank(rank)
        if self.apart:
            rank -= self.train.size
        return _rollout_at(self.train, self.rollout, self.grouping, rank, self.apart) if rank >= 0 else None

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise OptionError(f"the plan has ranks 0 to {self.num_ranks - 1}; asked for {rank}")

    # ---- what moves

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Every move of every layer."""
        return tuple(move for section in self.sections for move in section.all_moves())

    @cached_property
    def matrix(self) -> npt.NDArray[np.int64]:
        """Bytes from source (row) to target (column) rank, [ranks, ranks]; the diagonal holds local copies. Read-only."""
        found = np.zeros((self.num_ranks, self.num_ranks), dtype=np.int64)
        for section in self.sections:
            for move in section.moves:
                found[move.source, move.target] += section.count * move.numel
        found *= DTYPE_BYTES[self.dtype]
        found.flags.writeable = False
        return found

    def bytes_matrix(self) -> list[list[int]]:
        """Return :attr:`matrix` as a list of rows."""
        return [[int(x) for x in row] for row in self.matrix]

    @checked
    def bytes_copied(self, rank: int) -> int:
        """Return the bytes ``rank`` has already: shared in place, or copied from its own shard."""
        self._check_rank(rank)
        return int(self.matrix[rank, rank])

    @checked
    def bytes_sent(self, rank: int) -> int:
        """Return the bytes ``rank`` sends to other ranks."""
        own = self.bytes_copied(rank)
        return int(self.matrix[rank].sum()) - own

    @checked
    def bytes_received(self, rank: int) -> int:
        """Return the bytes ``rank`` receives from other ranks."""
        own = self.bytes_copied(rank)
        return int(self.matrix[:, rank].sum()) - own

    @checked
    def bytes_held(self, rank: int) -> int:
        """Return the bytes of the shard ``rank`` starts from."""
        self._check_rank(rank)
        return self._shares[rank].held * DTYPE_BYTES[self.dtype]

    @checked
    def bytes_needed(self, rank: int) -> int:
        """Return the bytes of the shard ``rank`` ends with."""
        self._check_rank(rank)
        return self._shares[rank].needed * DTYPE_BYTES[self.dtype]

    @checked
    def bytes_missing(self, rank: int) -> int:
        """Return the bytes ``rank`` needs and does not hold: no transition can do with receiving less.

        Counted from the two shards, not from the moves.
        """
        self._check_rank(rank)
        share = self._shares[rank]
        return (share.needed - share.common) * DTYPE_BYTES[self.dtype]

    @checked
    def bytes_redundant(self, rank: int) -> int:
        """Return the bytes of the shard ``rank`` starts from that its new shard does not contain."""
        self._check_rank(rank)
        share = self._shares[rank]
        return (share.held - share.common) * DTYPE_BYTES[self.dtype]

    @checked
    def bytes_peak(self, rank: int) -> int:
        """Return the bytes ``rank`` has at the end if nothing is held twice and nothing given up."""
        self._check_rank(rank)
        share = self._shares[rank]
        return (share.held + share.needed - share.common) * DTYPE_BYTES[self.dtype]

    @property
    def bytes_moved(self) -> int:
        """Bytes that cross between ranks, in total."""
        return int(self.matrix.sum() - np.trace(self.matrix))

    @checked
    def link(self, source: int, target: int) -> str:
        """Return how a piece goes from one rank to another, one of :data:`LINKS`."""
        for rank in (source, target):
            self._check_rank(rank)
        return LINKS[0 if source == target else 1 if self.nodes[source] == self.nodes[target] else 2]

    def bytes_by_link(self) -> dict[str, int]:
        """Return the bytes that go each way, in total."""
        nodes = np.asarray(self.nodes)
        near = nodes[:, None] == nodes[None, :]
        own, node, far = np.trace(self.matrix), self.matrix[near].sum(), self.matrix[~near].sum()
        return dict(zip(LINKS, (int(own), int(node - own), int(far)), strict=True))

    @checked
    def pieces(self, tensor: str) -> tuple[Move, ...]:
        """Return the moves of one Hugging Face tensor, e.g. ``"model.layers.0.self_attn.q_proj.weight"``.

        Raises:
            OptionError: the model has no such tensor.
        """
        if tensor not in self.spec.tensors():
            like = sorted(self.spec.tensors(), key=lambda name: len(set(name.split(".")) ^ set(tensor.split("."))))[:3]
            raise OptionError(f"{self.spec.name} has no tensor {shown(tensor)}; near it are {', '.join(like)}")
        return tuple(move for move in self.moves if move.tensor == tensor)

    @checked
    def shared(self, rank: int) -> dict[str, str]:
        """Return which of a rank's parameters may be one: rollout name -> training name, with the same boxes at the same places.

        Example, tp2 to tp2: norms, ``down_proj``, ``gate_up_proj``; of a fused qkv only where the rank has one kv head, whose rows
        are in the same order on both sides.
        """
        train, rollout = self.train_at(rank), self.rollout_at(rank)
        if train is None or rollout is None or self.rollout.pp > 1:
            return {}
        held = _by_local(megatron_boxes(self.spec, self.train, train.tp, train.pp))
        needed = _by_local(vllm_boxes(self.spec, self.rollout.tp, rollout.tp))
        there = {boxes: name for name, boxes in held.items()}
        rows, wanted_rows = (padded_vocab(self.spec.vocab_size, tp) // tp for tp in (self.train.tp, self.rollout.tp))
        tables = () if rows == wanted_rows else VOCAB_TABLES  # padded to other lengths
        return {name: there[boxes] for name, boxes in needed.items() if boxes in there and name not in tables}

    # ---- in numbers

    def volumes(self) -> list[Volume]:
        """Return bytes a rank by the closed formulas of HybridFlow's table 2, and what this plan counts.

        M bytes of weights, training in t x p x d, generation in t_g x p_g x d_g x d::

            DS-Chat        receives (tpd - 1) / tpd M             peak M             redundant M / tpd
            HybridFlow-V   receives (tp - 1) / tp M               peak M             redundant M / tp
            HybridFlow     receives (tp - t_g p_g) / (t_g p_g t p) M  peak M / (t_g p_g)  redundant 0

        The formulas take every tensor as cut evenly by t and p. They leave out that norms are on every tp rank, that
        embedding and head lie on the first and last stage only, that tp beyond the kv heads repeats them, and padding.
        HybridFlow's is for t_g dividing t and p_g dividing p.
        """
        size = DTYPE_BYTES[self.dtype]
        m = self.spec.num_parameters() * size
        t, p, d = self.train.tp, self.train.pp, self.train.num_replicas
        small = self.rollout.tp * self.rollout.pp
        ranks = range(self.num_ranks)
        received = [self.bytes_received(rank) for rank in ranks]
        peak, redundant = max(map(self.bytes_peak, ranks)), max(map(self.bytes_redundant, ranks))
        missing = max(map(self.bytes_missing, ranks))
        after = sum(self.bytes_needed(rank) > 0 for rank in ranks)
        rows = []
        if not (self.apart or self.to_train):
            rows += [
                Volume("DS-Chat", (t * p * d - 1) / (t * p * d) * m, m, m / (t * p * d), "formula: gather over all ranks"),
                Volume("HybridFlow-V", (t * p - 1) / (t * p) * m, m, m / (t * p), "formula: gather over tp and pp"),
            ]
        if self.nests:
            moved = (t * p - small) / (small * t * p) * m
            rows.append(Volume("HybridFlow", moved, m / small, 0.0, "formula: gather over micro-dp"))
        return [
            *rows,
            Volume("lower bound", missing, peak, redundant, "counted: what the fullest rank needs and does not hold"),
            Volume("planned", max(received), peak, redundant, f"counted: the fullest rank's, {self.grouping}"),
            Volume("planned, mean", sum(received) / after, peak, redundant, "counted: over the ranks it is for"),
        ]

    @property
    def nests(self) -> bool:
        """Whether HybridFlow's formula applies: t_g divides t, p_g divides p, on the same ranks, towards the rollout."""
        return not (self.apart or self.to_train or self.train.tp % self.rollout.tp or self.train.pp % self.rollout.pp)

    def to_pandas(self) -> DataFrame:
        """Return a table with a row per rank: where it stands in both layouts, and its bytes."""
        import pandas as pd

        def words(at: Coordinates | None) -> str:
            return "" if at is None else f"tp{at.tp} pp{at.pp} dp{at.dp}"

        rows = []
        for rank in range(self.num_ranks):
            near = sum(int(self.matrix[source, rank]) for source in self._neighbours(rank))
            received = self.bytes_received(rank)
            rows.append({
                "rank": rank, "node": self.nodes[rank],
                "training": words(self.train_at(rank)), "rollout": words(self.rollout_at(rank)),
                "held_bytes": self.bytes_held(rank), "needed_bytes": self.bytes_needed(rank),
                "own_bytes": self.bytes_copied(rank), "sent_bytes": self.bytes_sent(rank), "received_bytes": received,
                "received_same_node_bytes": near, "received_network_bytes": received - near,
                "missing_bytes": self.bytes_missing(rank), "redundant_bytes": self.bytes_redundant(rank),
                "peak_bytes": self.bytes_peak(rank),
            })  # fmt: skip
        return pd.DataFrame(rows).set_index("rank")

    def _neighbours(self, rank: int) -> list[int]:
        return [other for other in range(self.num_ranks) if other != rank and self.nodes[other] == self.nodes[rank]]

    # ---- to look at

    def view(self) -> dict[str, Any]:
        """Return what a picture of the plan shows, as plain data."""
        return self._view(None)

    def _view(self, measured: ReshardReport | None) -> dict[str, Any]:
        ranks, apart = [], self.num_ranks > self.train.size  # apart, the trainer goes on with its shard
        for rank in range(self.num_ranks):
            ranks.append({
                "rank": rank, "held": self.bytes_held(rank), "needed": self.bytes_needed(rank), "own": self.bytes_copied(rank),
                "received": self.bytes_received(rank), "aside": 0 if apart else self.bytes_redundant(rank),
                "measured": measured.ranks[rank].bytes_received if measured and not measured.predicted else None,
                "from": [int(s) for s in np.flatnonzero(self.matrix[:, rank]) if s != rank],
            })  # fmt: skip
        ladder = [
            {"name": v.name, "received": v.received, "peak": v.peak, "counts": v.counts, "measured": False} for v in self.volumes()
        ]
        if measured:
            most = max(rank.bytes_received for rank in measured.ranks)
            counts = f"{'predicted' if measured.predicted else 'measured'}: the fullest rank's, in {measured.seconds:.3f} s"
            ladder.append({"name": "wire", "received": most, "peak": None, "counts": counts, "measured": not measured.predicted})
        return {
            "title": repr(measured or self), "summary": self._summary(), "ranks": ranks, "matrix": self.bytes_matrix(),
            "ladder": ladder,
        }  # fmt: skip

    def _summary(self) -> str:
        fullest = max(range(self.num_ranks), key=self.bytes_received)
        return (
            f"{self.num_ranks} ranks; the fullest, rank {fullest}, holds {_size(self.bytes_held(fullest))}, needs "
            f"{_size(self.bytes_needed(fullest))} and receives {_size(self.bytes_received(fullest))}"
        )

    @checked
    def view_of(self, parameter: str) -> dict[str, Any]:
        """Return what a picture of one of the rollout's parameters shows, as plain data: its rows by rank, before and after.

        Args:
            parameter: e.g. ``"model.layers.0.self_attn.qkv_proj.weight"``, which is cut by rows.

        Raises:
            OptionError: the rollout has no such parameter.
        """
        moves = [move for move in self.moves if (move.source_local if self.to_train else move.target_local) == parameter]
        if not moves:
            boxes = vllm_boxes(self.spec, self.rollout.tp, 0)
            names = sorted({box.local for box in boxes if not re.search(r"layers\.[1-9]", box.local)})
            known = ", ".join(names)
            raise OptionError(f"the rollout of {self.spec.name} has no parameter {shown(parameter)}; it has {known}, ...")
        tensors = {move.tensor for move in moves}
        ranks = []
        for rank in range(self.num_ranks):
            at = self.train_at(rank)
            held = megatron_boxes(self.spec, self.train, at.tp, at.pp) if at else []
            before = sorted((box for box in held if box.tensor in tensors), key=lambda box: box.local_start)
            mine = sorted((move for move in moves if move.target == rank), key=lambda move: move.target_start)
            after = [_row(move.tensor, self._first_row(move), move.size[0], move.source, own=move.source == rank) for move in mine]
            ranks.append({
                "rank": rank, "before": [_row(box.tensor, box.start[0], box.size[0], rank, own=True) for box in before],
                "after": after,
            })  # fmt: skip
        return {
            "title": f"{parameter}: '{self.train}' to rollout '{self.rollout}'",
            "summary": f"rows of {', '.join(sorted(tensors))} on {self.num_ranks} ranks, before and after", "ranks": ranks,
        }  # fmt: skip

    def _first_row(self, move: Move) -> int:
        """Return where a moved piece begins in its Hugging Face tensor."""
        at = self.train_at(move.source)
        assert at is not None
        for box in megatron_boxes(self.spec, self.train, at.tp, at.pp):
            inside_it = box.local == move.source_local and box.tensor == move.tensor
            if inside_it and 0 <= move.source_start[0] - box.local_start[0] < box.size[0]:
                return box.start[0] + move.source_start[0] - box.local_start[0]
        raise AssertionError(move)

    def __repr__(self) -> str:
        ways = f"'{self.train}' to rollout '{self.rollout}'"
        if self.to_train:
            ways = f"rollout '{self.rollout}' back to '{self.train}'"
        return f"ReshardPlan {self.spec.name}: {ways}, {_size(self.bytes_moved)} between ranks"


@dataclass(frozen=True, repr=False)
class ReshardReport:
    """What a weight transition did, beside what its plan said."""

    plan: ReshardPlan
    ranks: tuple[TransportReport, ...]
    """Measured, by rank."""
    predicted: bool = False
    """Whether nothing was measured: the session is simulated, the bytes are the plan's and the seconds a performance model's."""

    @property
    def planned_bytes(self) -> int:
        """Bytes that were to cross between ranks."""
        return self.plan.bytes_moved

    @property
    def measured_bytes(self) -> int:
        """Bytes that were received from other ranks."""
        return sum(rank.bytes_received for rank in self.ranks)

    @property
    def ratio(self) -> float:
        """Measured over planned; 1 where nothing was to move and nothing did."""
        return self.measured_bytes / self.planned_bytes if self.planned_bytes else 1.0 + self.measured_bytes

    @property
    def seconds(self) -> float:
        """Of the slowest rank; with the rollout apart, of the slowest that gives and then of the slowest that takes."""
        first = self.plan.train.size if self.plan.apart else 0
        return sum(max(rank.seconds for rank in ranks) for ranks in (self.ranks[:first], self.ranks[first:]) if ranks)

    def bytes_by_link(self) -> dict[str, tuple[int, int]]:
        """Return (planned, measured) bytes of each way a piece goes."""
        planned, measured = self.plan.bytes_by_link(), dict.fromkeys(LINKS, 0)
        for target, rank in enumerate(self.ranks):
            measured[LINKS[0]] += rank.bytes_copied + rank.bytes_shared
            for source, count in enumerate(rank.received_from):
                if source != target:
                    measured[self.plan.link(source, target)] += count
        return {link: (planned[link], measured[link]) for link in LINKS}

    def to_pandas(self) -> DataFrame:
        """Return a table with a row per rank: planned and measured bytes, and seconds."""
        import pandas as pd

        rows = [
            {
                "rank": number, "planned_received_bytes": self.plan.bytes_received(number), "received_bytes": rank.bytes_received,
                "planned_sent_bytes": self.plan.bytes_sent(number), "sent_bytes": rank.bytes_sent,
                "planned_own_bytes": self.plan.bytes_copied(number), "copied_bytes": rank.bytes_copied,
                "shared_bytes": rank.bytes_shared, "seconds": rank.seconds,
            }
            for number, rank in enumerate(self.ranks)
        ]  # fmt: skip
        return pd.DataFrame(rows).set_index("rank")

    def view(self) -> dict[str, Any]:
        """Return what a picture shows, as plain data: the plan's, with what was measured beside it."""
        return self.plan._view(self)

    def __repr__(self) -> str:
        return (
            f"ReshardReport {self.plan.spec.name}: planned {_size(self.planned_bytes)} between ranks, "
            f"{'predicted' if self.predicted else 'measured'} "
            f"{_size(self.measured_bytes)} (ratio {self.ratio:.3f}) in {self.seconds:.3f} s"
        )


def _row(tensor: str, first: int, rows: int, source: int, *, own: bool) -> dict[str, Any]:
    short = tensor.rpartition(".layers.")[2].partition(".")[2] or tensor
    name = short.removeprefix("self_attn.").removeprefix("mlp.").removesuffix(".weight")
    label = f"{name.removesuffix('_proj')} {first}:{first + rows}"
    return {"tensor": name, "first": first, "rows": rows, "source": source, "own": own, "label": label}


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3f} MB" if num_bytes < 10**9 else f"{num_bytes / 1e9:.2f} GB"


# ---- planning


def _nodes(nodes: Sequence[int] | int | None, num_ranks: int) -> tuple[int, ...]:
    if nodes is None:
        return (0,) * num_ranks
    if isinstance(nodes, int) and is_whole(nodes) and nodes >= 1:
        return tuple(rank // nodes for rank in range(num_ranks))
    if not isinstance(nodes, list | tuple) or not all(is_whole(node) and node >= 0 for node in nodes):
        wanted = "how many ranks a node has, at least 1, or a list with every rank's node"
        raise OptionError(f"nodes must be {wanted}; got nodes={shown(nodes)}")
    if len(nodes) != num_ranks:
        raise OptionError(f"the plan has {num_ranks} ranks; nodes names {len(nodes)}")
    return tuple(int(node) for node in nodes)


def _train_at(train: Layout, rollout: Layout, grouping: str, rank: int, apart: bool) -> Coordinates:
    if grouping == "strided":  # no axis is permuted for a rollout on other ranks
        return Mesh(layout=train, rollout_tp=1 if apart else rollout.tp).coordinates(rank)
    return _consecutive(train, rank)


def _rollout_at(train: Layout, rollout: Layout, grouping: str, rank: int, apart: bool) -> Coordinates:
    if grouping == "vanilla" or apart:
        return _consecutive(rollout, rank)
    at = _train_at(train, rollout, grouping, rank, apart)
    rest = rank // rollout.tp
    if train.pp % rollout.pp:
        per_stage = rollout.num_replicas
        return Coordinates(tp=rank % rollout.tp, pp=rest // per_stage, dp=rest % per_stage)
    pp = at.pp // (train.pp // rollout.pp)
    # replicas: the groups of rollout.tp consecutive ranks within one of the rollout's stages, in order
    first = pp * (train.size // rollout.pp) // rollout.tp
    return Coordinates(tp=rank % rollout.tp, pp=pp, dp=rest - first)


def _consecutive(layout: Layout, rank: int) -> Coordinates:
    """Return a position where tp varies fastest, then pp, then dp: the paper's rank order."""
    return Coordinates(tp=rank % layout.tp, pp=rank // layout.tp % layout.pp, dp=rank // (layout.tp * layout.pp))


def _plan(
    spec: ModelSpec, train: Layout, rollout: Layout, grouping: str, nodes: tuple[int, ...], apart: bool, *, to_train: bool = False
) -> tuple[tuple[Section, ...], tuple[_Share, ...]]:
    trained: _Groups = defaultdict(list)
    for rank in range(train.size):
        at = _train_at(train, rollout, grouping, rank, apart)
        trained[at.pp, at.tp].append(rank)
    rolled: _Groups = defaultdict(list)
    for rank in range(rollout.size):
        at = _rollout_at(train, rollout, grouping, rank, apart)
        rolled[at.pp, at.tp].append(rank + train.size * apart)

    def ends(who: _Groups, boxes_of: Callable[[ModelSpec, Layout, int, int], tuple[list[Box], list[Box]]], layout: Layout) -> _Side:
        boxes = {(pp, tp): tuple(box for part in boxes_of(spec, layout, tp, pp) for box in part) for pp, tp in who}
        return tuple((tuple(ranks), boxes[at]) for at, ranks in who.items())

    per_stage, per_rollout_stage = spec.num_layers // train.pp, spec.num_layers // rollout.pp
    parts = [(range(0), ends(trained, megatron_ends, train), ends(rolled, vllm_ends, rollout))]
    for layers in _alike_layers(spec.num_layers, per_stage, per_rollout_stage):
        first = layers[0]
        stage, local = divmod(first, per_stage)
        held: _Side = tuple(
            (tuple(ranks), tuple(megatron_layer(spec, train.tp, tp, first, local)))
            for (pp, tp), ranks in trained.items() if pp == stage
        )  # fmt: skip
        needed: _Side = tuple(
            (tuple(ranks), tuple(vllm_layer(spec, rollout.tp, tp, first)))
            for (pp, tp), ranks in rolled.items() if pp == first // per_rollout_stage
        )  # fmt: skip
        parts.append((layers, held, needed))
    sent = [0] * len(nodes)
    counts = np.zeros((3, len(nodes)), dtype=np.int64)
    sections = []
    for layers, held, needed in parts:
        if to_train:
            held, needed = needed, held
        sections.append(Section(_section_moves(held, needed, nodes, sent, max(1, len(layers)), apart), layers))
        counts += max(1, len(layers)) * _count(held, needed, len(nodes))
    return tuple(sections), tuple(_Share(*map(int, column)) for column in counts.T)


def _alike_layers(num_layers: int, per_stage: int, per_rollout_stage: int) -> list[range]:
    """Cut the layers where a stage of either layout begins."""
    starts = sorted({*range(0, num_layers, per_stage), *range(0, num_layers, per_rollout_stage)})
    return [range(a, b) for a, b in zip(starts, [*starts[1:], num_layers], strict=True)]


def _count(held: _Side, needed: _Side, num_ranks: int) -> npt.NDArray[np.int64]:
    """Return the elements every rank holds, needs, and needs of what it holds; [3, ranks]."""
    found = np.zeros((3, num_ranks), dtype=np.int64)
    of_rank: dict[int, tuple[Box, ...]] = {}
    for ranks, boxes in held:
        for rank in ranks:
            found[0, rank] += sum(box.numel for box in boxes)
            of_rank[rank] = boxes
    seen: dict[tuple[int, int], int] = {}
    for ranks, boxes in needed:
        for rank in ranks:
            found[1, rank] += sum(box.numel for box in boxes)
            key = id(of_rank.get(rank, ())), id(boxes)
            if key not in seen:
                seen[key] = _common(of_rank.get(rank, ()), boxes)
            found[2, rank] += seen[key]
    return found


def _common(held: Sequence[Box], needed: Sequence[Box]) -> int:
    by_tensor: dict[str, list[Box]] = defaultdict(list)
    for box in held:
        by_tensor[box.tensor].append(box)
    parts = (intersect(mine, box) for box in needed for mine in by_tensor[box.tensor])
    return sum(math.prod(part[1]) for part in parts if part)


_Holders = list[tuple[tuple[int, ...], Box]]
"""Ranks that hold a box."""


def moves_between(held: Sequence[Sequence[Box]], needed: Sequence[Sequence[Box]], nodes: Sequence[int]) -> tuple[Move, ...]:
    """Plan how ranks, each with the boxes it needs, get them from other ranks, numbered before them, with the boxes they hold.

    The boxes may be of any engine on either side; a :class:`ReshardPlan` is for those of Megatron and vLLM.
    """
    before: _Side = tuple(((rank,), tuple(boxes)) for rank, boxes in enumerate(held))
    after: _Side = tuple(((rank,), tuple(boxes)) for rank, boxes in enumerate(needed, len(held)))
    return _section_moves(before, after, tuple(nodes), [0] * len(nodes), 1, apart=True)


def _section_moves(
    held: _Side, needed: _Side, nodes: tuple[int, ...], sent: list[int], count: int, apart: bool
) -> tuple[Move, ...]:
    by_tensor: dict[str, _Holders] = defaultdict(list)
    for ranks, boxes in held:
        for box in boxes:
            by_tensor[box.tensor].append((ranks, box))
    moves = []
    given: dict[tuple[str, Offsets, Offsets, int], tuple[int, Box]] = {}
    for targets, boxes in needed:
        for box in boxes:
            pieces = _pieces(box, by_tensor[box.tensor])
            for target in targets:
                for (start, size), who in pieces.items():
                    key = box.tensor, start, size, nodes[target]
                    known = given.get(key) if apart else None
                    source, holder = known or _source(who, target, nodes, sent)
                    if source != target and known is None:
                        sent[source] += count * math.prod(size)
                    if apart:
                        given[key] = source, holder
                    moves.append(Move(
                        box.tensor, source, target, holder.local, inside(holder, start), box.local, inside(box, start), size,
                    ))  # fmt: skip
    return tuple(moves)


def _pieces(needed: Box, holders: _Holders) -> dict[tuple[Offsets, Offsets], _Holders]:
    """Return the distinct pieces of a box, (start, size), and who holds each."""
    found: dict[tuple[Offsets, Offsets], _Holders] = defaultdict(list)
    for ranks, box in holders:
        part = intersect(box, needed)
        if part:
            found[part].append((ranks, box))
    assert sum(math.prod(size) for _, size in found) == needed.numel, f"{needed} is not covered once"
    return found


def _source(who: _Holders, target: int, nodes: tuple[int, ...], sent: list[int]) -> tuple[int, Box]:
    best: tuple[tuple[bool, int, int], Box] | None = None
    for ranks, box in who:
        for rank in ranks:
            if rank == target:
                return rank, box
            key = nodes[rank] != nodes[target], sent[rank], rank
            if best is None or key < best[0]:
                best = key, box
    assert best is not None
    return best[0][2], best[1]


def _by_local(boxes: Sequence[Box]) -> dict[str, frozenset[tuple[str, Offsets, Offsets, Offsets]]]:
    found: dict[str, list[tuple[str, Offsets, Offsets, Offsets]]] = defaultdict(list)
    for box in boxes:
        found[box.local].append((box.tensor, box.start, box.size, box.local_start))
    return {name: frozenset(these) for name, these in found.items()}


def _shifted(name: str, by: int) -> str:
    """Return the name of the same parameter ``by`` layers further on."""
    if not by:
        return name
    model, layers, number, rest = name.split(".", 3)
    return f"{model}.{layers}.{int(number) + by}.{rest}"
