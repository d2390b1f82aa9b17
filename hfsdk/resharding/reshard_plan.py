"""``ReshardPlan``: the moves by which every rank gets the weights of another layout, as pure data.

Shards are boxes of the Hugging Face tensors (:mod:`hfsdk.resharding.boxes`). The part that a rank needs and has stays or is copied
in place; only the rest is sent, by one rank that has it (HybridFlow, arXiv 2409.19256, section 5). One weight of four quarters, tp4
to tp2 dp2::

    rank                     0        1        2        3
    training shard           q0       q2       q1       q3      (the tp axis is permuted, see layout.Mesh)
    rollout shard            q0 q1    q2 q3    q0 q1    q2 q3
    moves                    0 -> 2: q0     2 -> 0: q1     1 -> 3: q2     3 -> 1: q3
    grouped "vanilla"        q0       q1       q2       q3      training shard: ranks 1 and 2 have nothing of what they need

A plan of a large model is small: layers that lie alike on both sides are one section, planned once
(:mod:`hfsdk.resharding.layer_sections`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt

from hfsdk.core.checks import OneOf, checked, shown
from hfsdk.core.errors import LayoutError, OptionError
from hfsdk.core.layout import Coordinates, Layout
from hfsdk.core.spec import DTYPE_BYTES, Dtype, ModelSpec
from hfsdk.resharding.box_moves import Move
from hfsdk.resharding.boxes import VOCAB_TABLES, Box, Offsets, megatron_boxes, padded_vocab, vllm_boxes
from hfsdk.resharding.layer_sections import Section, ShardSizes, plan_sections
from hfsdk.resharding.rank_order import RankOrder, nodes_of_ranks

if TYPE_CHECKING:
    from pandas import DataFrame


GROUPINGS = ("strided", "vanilla")
"""How ranks stand in the two layouts: HybridFlow's, whose training shard lies inside the rollout shard, or consecutive in both."""

LINKS = ("same rank", "same node", "network")
"""Ways a move may go, from the cheapest."""


@dataclass(frozen=True, repr=False)
class ReshardPlan:
    """The copies, sends and receives of every rank by which the rollout gets the trainer's weights (or, inverted, back).

    Made by :meth:`between`; checked byte for byte against what the transport counted.

    Attributes:
        spec: the model.
        train: the filled layout of training.
        rollout: the filled layout of generation; pp above 1 is planned, but no engine runs it.
        dtype: the dtype that weights travel in.
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
    _shares: tuple[ShardSizes, ...] = field(repr=False)

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
            rollout: the rollout's layout, e.g. ``"tp8 dp16"``.
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
                    "same devices both need the same number. Change one, or pass apart=True for a rollout on a pool of its own."
                )
            after = after.fill(before.size)
        before.check_model(spec)
        after.check_model(spec)
        before, after = before.of_weights, after.of_weights
        order = RankOrder(before, after, grouping, apart)
        node_of = nodes_of_ranks(nodes, order.num_ranks)
        return cls(spec, before, after, dtype, grouping, node_of, False, apart, *plan_sections(spec, order, node_of))

    def inverse(self) -> ReshardPlan:
        """Return the plan of the way back: from the rollout's weights to the training shards."""
        sections, shares = plan_sections(self.spec, self._order, self.nodes, to_train=not self.to_train)
        return replace(self, to_train=not self.to_train, sections=sections, _shares=shares)

    # ---- who stands where

    @cached_property
    def _order(self) -> RankOrder:
        return RankOrder(self.train, self.rollout, self.grouping, self.apart)

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
        return self._order.train_at(rank)

    @checked
    def rollout_at(self, rank: int) -> Coordinates | None:
        """Return the position of a rank in the rollout layout (``None`` for one that only trains)."""
        self._check_rank(rank)
        return self._order.rollout_at(rank)

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
        num_bytes = np.zeros((self.num_ranks, self.num_ranks), dtype=np.int64)
        for section in self.sections:
            for move in section.moves:
                num_bytes[move.source, move.target] += section.count * move.numel
        num_bytes *= DTYPE_BYTES[self.dtype]
        # The array is cached: a caller that changed it would change every later answer.
        num_bytes.flags.writeable = False
        return num_bytes

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
        trained = _by_local(megatron_boxes(self.spec, self.train, train.tp, train.pp))
        needed = _by_local(vllm_boxes(self.spec, self.rollout.tp, rollout.tp))
        # Parameters with the same boxes at the same places are the same memory, whatever each engine calls them.
        there = {boxes: name for name, boxes in trained.items()}
        rows, wanted_rows = (padded_vocab(self.spec.vocab_size, tp) // tp for tp in (self.train.tp, self.rollout.tp))
        tables = () if rows == wanted_rows else VOCAB_TABLES  # padded to other lengths
        return {name: there[boxes] for name, boxes in needed.items() if boxes in there and name not in tables}

    # ---- in numbers

    def volumes(self) -> list[Volume]:
        """Return bytes a rank by the closed formulas of HybridFlow's table 2, and as counted in this plan.

        M bytes of weights, training in t x p x d, generation in t_g x p_g x d_g x d::

            DS-Chat        receives (tpd - 1) / tpd M             peak M             redundant M / tpd
            HybridFlow-V   receives (tp - 1) / tp M               peak M             redundant M / tp
            HybridFlow     receives (tp - t_g p_g) / (t_g p_g t p) M  peak M / (t_g p_g)  redundant 0

        The formulas take every tensor as cut evenly by t and p. They leave out that norms are on every tp rank, that
        embedding and head lie on the first and last stage only, that tp beyond the kv heads repeats them, and padding.
        HybridFlow's is for t_g dividing t and p_g dividing p.
        """
        ranks = range(self.num_ranks)
        received = [self.bytes_received(rank) for rank in ranks]
        peak, redundant = max(map(self.bytes_peak, ranks)), max(map(self.bytes_redundant, ranks))
        missing = max(map(self.bytes_missing, ranks))
        after = sum(self.bytes_needed(rank) > 0 for rank in ranks)
        formulas = []
        if not (self.apart or self.to_train):
            weights = self.spec.num_parameters() * DTYPE_BYTES[self.dtype]
            formulas = formula_volumes(weights, self.train, self.rollout, nests=self.nests)
        return [
            *formulas,
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
            return "" if at is None else str(at)

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
        """Return plain data for a picture of the plan."""
        ranks, apart = [], self.num_ranks > self.train.size  # apart, the trainer goes on with its shard
        for rank in range(self.num_ranks):
            ranks.append({
                "rank": rank, "held": self.bytes_held(rank), "needed": self.bytes_needed(rank), "own": self.bytes_copied(rank),
                "received": self.bytes_received(rank), "aside": 0 if apart else self.bytes_redundant(rank), "measured": None,
                "from": [int(s) for s in np.flatnonzero(self.matrix[:, rank]) if s != rank],
            })  # fmt: skip
        ladder = [
            {"name": v.name, "received": v.received, "peak": v.peak, "counts": v.counts, "measured": False} for v in self.volumes()
        ]
        return {
            "title": repr(self), "summary": self._summary(), "ranks": ranks, "matrix": self.bytes_matrix(), "ladder": ladder,
        }  # fmt: skip

    def _summary(self) -> str:
        fullest = max(range(self.num_ranks), key=self.bytes_received)
        return (
            f"{self.num_ranks} ranks; the fullest, rank {fullest}, holds {size_text(self.bytes_held(fullest))}, needs "
            f"{size_text(self.bytes_needed(fullest))} and receives {size_text(self.bytes_received(fullest))}"
        )

    @checked
    def view_of(self, parameter: str) -> dict[str, Any]:
        """Return plain data for a picture of one of the rollout's parameters: its rows or columns by rank.

        Args:
            parameter: e.g. ``"model.layers.0.self_attn.qkv_proj.weight"``, which is cut by rows, or
                ``"model.layers.0.mlp.down_proj.weight"``, which is cut by columns.

        Raises:
            OptionError: the rollout has no such parameter.
        """
        moves = [move for move in self.moves if (move.source_local if self.to_train else move.target_local) == parameter]
        if not moves:
            boxes = vllm_boxes(self.spec, self.rollout.tp, 0)
            names = sorted({box.local for box in boxes if not re.search(r"layers\.[1-9]", box.local)})
            names_text = ", ".join(names)
            raise OptionError(f"the rollout of {self.spec.name} has no parameter {shown(parameter)}; it has {names_text}, ...")
        boxes_of = []
        for rank in range(self.num_ranks):
            at = self.train_at(rank)
            boxes_of.append(megatron_boxes(self.spec, self.train, at.tp, at.pp) if at else [])
        tensors = ", ".join(sorted({move.tensor for move in moves}))
        return {
            "title": f"{parameter}: '{self.train}' to rollout '{self.rollout}'",
            "summary": f"what {self.num_ranks} ranks hold of {tensors}, before and after", "ranks": rows_by_rank(moves, boxes_of),
        }  # fmt: skip

    def __repr__(self) -> str:
        ways = f"'{self.train}' to rollout '{self.rollout}'"
        if self.to_train:
            ways = f"rollout '{self.rollout}' back to '{self.train}'"
        return f"ReshardPlan {self.spec}: {ways}, {size_text(self.bytes_moved)} between ranks"


def size_text(num_bytes: int) -> str:
    """Return bytes in MB, or from a gigabyte on in GB."""
    return f"{num_bytes / 1e6:.3f} MB" if num_bytes < 10**9 else f"{num_bytes / 1e9:.2f} GB"


def _by_local(boxes: Sequence[Box]) -> dict[str, frozenset[tuple[str, Offsets, Offsets, Offsets]]]:
    by_local: dict[str, list[tuple[str, Offsets, Offsets, Offsets]]] = defaultdict(list)
    for box in boxes:
        by_local[box.local].append((box.tensor, box.start, box.size, box.local_start))
    return {name: frozenset(these) for name, these in by_local.items()}


# -- the rows of one parameter by rank, for a picture


def rows_by_rank(moves: Sequence[Move], boxes_by_rank: Sequence[Sequence[Box]]) -> list[dict[str, Any]]:
    """Return for every rank which rows it has before, and which after the moves and from whom; columns where it is cut by these.

    Args:
        moves: the moves into the parameter.
        boxes_by_rank: every rank's boxes before the moves.
    """
    tensors = {move.tensor for move in moves}
    axis = _axis([box for boxes in boxes_by_rank for box in boxes if box.tensor in tensors], moves)
    ranks = []
    for rank, boxes in enumerate(boxes_by_rank):
        before = sorted((box for box in boxes if box.tensor in tensors), key=lambda box: box.local_start)
        incoming = sorted((move for move in moves if move.target == rank), key=lambda move: move.target_start)
        ranks.append({
            "rank": rank, "before": [_row(box.tensor, axis, box.start[axis], box.size[axis], rank, own=True) for box in before],
            "after": [
                _row(move.tensor, axis, _first(move, axis, boxes_by_rank[move.source]), move.size[axis], move.source, own=own)
                for move in incoming
                for own in [move.source == rank]
            ],
        })  # fmt: skip
    return ranks


def _axis(boxes: Sequence[Box], moves: Sequence[Move]) -> int:
    """Return 1 where all that is held or moved has all rows of its tensor, and some of it not all columns, else 0."""
    whole: dict[str, list[int]] = {}
    for box in boxes:
        ends = [start + size for start, size in zip(box.start, box.size, strict=True)]
        whole[box.tensor] = [max(pair) for pair in zip(ends, whole.get(box.tensor, ends), strict=True)]
    pieces = [(box.size, whole[box.tensor]) for box in boxes] + [(move.size, whole[move.tensor]) for move in moves]
    by_rows = any(size[0] < most[0] for size, most in pieces)
    by_columns = any(len(size) > 1 and size[1] < most[1] for size, most in pieces)
    return int(by_columns and not by_rows)


def _first(move: Move, axis: int, boxes: Sequence[Box]) -> int:
    """Return where a move begins along an axis of its Hugging Face tensor, given its source's boxes."""
    for box in boxes:
        if box.local == move.source_local and box.tensor == move.tensor:
            ahead = [there - here for there, here in zip(move.source_start, box.local_start, strict=True)]
            if all(0 <= steps < size for steps, size in zip(ahead, box.size, strict=True)):
                return box.start[axis] + ahead[axis]
    raise AssertionError(move)


def _row(tensor: str, axis: int, first: int, rows: int, source: int, *, own: bool) -> dict[str, Any]:
    short = tensor.rpartition(".layers.")[2].partition(".")[2] or tensor
    name = short.removeprefix("self_attn.").removeprefix("mlp.").removesuffix(".weight")
    place = f"{first}:{first + rows}" if axis == 0 else f":, {first}:{first + rows}"
    label = f"{name.removesuffix('_proj')} {place}"
    return {"tensor": name, "first": first, "rows": rows, "place": place, "source": source, "own": own, "label": label}


# -- volumes by the closed formulas of HybridFlow's table 2


@dataclass(frozen=True)
class Volume:
    """Bytes of one rank in a weight transition, by a formula or by counting."""

    name: str
    received: float
    """Bytes that come from other ranks."""
    peak: float
    """Bytes of weights on the rank at the end of the transition."""
    redundant: float
    """Bytes of the training shard that are kept next to a rollout copy that does not contain them."""
    counts: str
    """The formula or the count that it is made of."""


def formula_volumes(num_bytes: float, train: Layout, rollout: Layout, *, nests: bool) -> list[Volume]:
    """Return the paper's volumes of DS-Chat and HybridFlow-V, and of HybridFlow where the layouts nest (`ReshardPlan.volumes`)."""
    t, p, d = train.tp, train.pp, train.num_replicas
    ranks, shards, rollout_shards = t * p * d, t * p, rollout.tp * rollout.pp
    volumes = [
        Volume("DS-Chat", (ranks - 1) / ranks * num_bytes, num_bytes, num_bytes / ranks, "formula: gather over all ranks"),
        Volume("HybridFlow-V", (shards - 1) / shards * num_bytes, num_bytes, num_bytes / shards, "formula: gather over tp and pp"),
    ]
    if nests:
        received = (shards - rollout_shards) / (rollout_shards * t * p) * num_bytes
        volumes.append(Volume("HybridFlow", received, num_bytes / rollout_shards, 0.0, "formula: gather over micro-dp"))
    return volumes
