"""Which box of which weight lives where, and what must move: the plan of a weight transition, as pure data.

Every shard of either engine is described as *boxes* of the Hugging Face tensors, so that any two layouts can be compared.
One kv group of a fused qkv weight, 8 query and 4 kv heads, tp=2 (h = rows of one head)::

    Hugging Face           q_proj: q0 q1 q2 q3 q4 q5 q6 q7      k_proj: k0 k1 k2 k3     v_proj: v0 v1 v2 v3
    Megatron, tp rank 0    linear_qkv:  [q0 q1 k0 v0 | q2 q3 k1 v1]        (per kv group: its queries, its k, its v)
    vLLM, tp rank 0        qkv_proj:    [q0 q1 q2 q3 | k0 k1 | v0 v1]      (all q, then all k, then all v)

The same bytes in another row order: nothing has to travel, but the rows must be copied. :class:`ReshardPlan` lists, for
every rank, such local copies and the pieces other ranks must send (HybridFlow, section 5: what a rank already holds is never
sent).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from hfsdk.layout import Layout, Mesh
from hfsdk.spec import DTYPE_BYTES, ModelSpec

Offsets = tuple[int, ...]

SCALAR_HEAD_NAMES = ("score.weight", "value_head.weight")
"""Names of a scalar head in a model's folder; the first is transformers' and what is written."""

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this; the trainer does the same, so that shards coincide."""


@dataclass(frozen=True)
class Box:
    """A box of one Hugging Face tensor and where it lies inside a local parameter.

    Example: rows 64:96 of ``...q_proj.weight`` at row 48 of the local ``...linear_qkv.weight``.
    """

    tensor: str
    start: Offsets
    size: Offsets
    local: str
    local_start: Offsets

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)


@dataclass(frozen=True)
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


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Return the rows of the padded vocabulary: a multiple of 64 that tp divides."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return -(-vocab_size // multiple) * multiple


def _vocab_rows(spec: ModelSpec, tp: int, tp_rank: int, tensor: str, local: str) -> list[Box]:
    rows = padded_vocab(spec.vocab_size, tp) // tp
    first, last = tp_rank * rows, min((tp_rank + 1) * rows, spec.vocab_size)
    if last <= first:
        return []
    return [Box(tensor, (first, 0), (last - first, spec.hidden_size), local, (0, 0))]


def _rows(tensor: str, first: int, count: int, width: int, local: str, local_first: int) -> Box:
    return Box(tensor, (first, 0), (count, width), local, (local_first, 0))


def _with_bias(spec: ModelSpec, box: Box) -> list[Box]:
    """Return a box of rows of a q, k or v weight and, where the model has biases, the same rows of its bias."""
    if not spec.qkv_bias:
        return [box]
    tensor, local = (name.removesuffix("weight") + "bias" for name in (box.tensor, box.local))
    return [box, Box(tensor, box.start[:1], box.size[:1], local, box.local_start[:1])]


def _whole(tensor: str, shape: Offsets, local: str) -> Box:
    zeros = (0,) * len(shape)
    return Box(tensor, zeros, shape, local, zeros)


def megatron_boxes(spec: ModelSpec, layout: Layout, tp_rank: int, pp_rank: int = 0) -> list[Box]:
    """Return the boxes a Megatron rank holds (local layer specs; names as ``GPTModel.named_parameters`` gives them).

    The fused qkv is cut by kv groups: global row order is, per kv group, its query heads, its key head, its value head; a
    bias has the same rows.
    A scalar head replaces ``output_layer`` and belongs to no Hugging Face tensor; callers leave it out.
    """
    tp, hidden = layout.tp, spec.hidden_size
    layers = spec.num_layers // layout.pp
    first_stage, last_stage = pp_rank == 0, pp_rank == layout.pp - 1
    boxes: list[Box] = []
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if first_stage:
        boxes += _vocab_rows(spec, tp, tp_rank, embedding, "embedding.word_embeddings.weight")
    for j in range(layers):
        boxes += _megatron_layer(spec, tp, tp_rank, f"model.layers.{pp_rank * layers + j}.", f"decoder.layers.{j}.")
    if last_stage:
        boxes.append(_whole("model.norm.weight", (hidden,), "decoder.final_layernorm.weight"))
        if not spec.tied_embeddings:
            boxes += _vocab_rows(spec, tp, tp_rank, head, "output_layer.weight")
        elif layout.pp > 1:
            boxes += _vocab_rows(spec, tp, tp_rank, embedding, "output_layer.weight")
    return boxes


def _megatron_layer(spec: ModelSpec, tp: int, tp_rank: int, hf: str, local: str) -> list[Box]:
    hidden, d, ratio = spec.hidden_size, spec.head_dim, spec.num_heads // spec.num_kv_heads
    boxes = [
        _whole(hf + "input_layernorm.weight", (hidden,), local + "input_layernorm.weight"),
        _whole(hf + "post_attention_layernorm.weight", (hidden,), local + "pre_mlp_layernorm.weight"),
    ]
    for x in "qk" if spec.qk_norm else "":
        boxes.append(_whole(f"{hf}self_attn.{x}_norm.weight", (d,), f"{local}self_attention.{x}_layernorm.weight"))
    fused = local + "self_attention.linear_qkv.weight"
    rows = spec.num_kv_heads * (ratio + 2) * d // tp
    low = tp_rank * rows
    for group in range(spec.num_kv_heads):
        base = group * (ratio + 2) * d
        for letter, at, count, hf_row in (
            ("q", base, ratio * d, group * ratio * d),
            ("k", base + ratio * d, d, group * d),
            ("v", base + (ratio + 1) * d, d, group * d),
        ):
            first, last = max(at, low), min(at + count, low + rows)
            if first < last:
                name = f"{hf}self_attn.{letter}_proj.weight"
                boxes += _with_bias(spec, _rows(name, hf_row + first - at, last - first, hidden, fused, first - low))
    width = spec.num_heads * d // tp
    mlp = spec.mlp_hidden_size // tp
    fc1 = local + "mlp.linear_fc1.weight"
    boxes += [
        Box(hf + "self_attn.o_proj.weight", (0, tp_rank * width), (hidden, width),
            local + "self_attention.linear_proj.weight", (0, 0)),
        _rows(hf + "mlp.gate_proj.weight", tp_rank * mlp, mlp, hidden, fc1, 0),
        _rows(hf + "mlp.up_proj.weight", tp_rank * mlp, mlp, hidden, fc1, mlp),
        Box(hf + "mlp.down_proj.weight", (0, tp_rank * mlp), (hidden, mlp), local + "mlp.linear_fc2.weight", (0, 0)),
    ]  # fmt: skip
    return boxes


def vllm_boxes(spec: ModelSpec, tp: int, tp_rank: int) -> list[Box]:
    """Return the boxes a vLLM rank needs (names as its model's ``named_parameters`` gives them).

    qkv rows are [q; k; v] of the rank; with fewer kv heads than tp, a kv head is replicated on ``tp / kv_heads`` ranks.
    """
    hidden, d = spec.hidden_size, spec.head_dim
    query = spec.num_heads * d // tp
    kv_shards = min(tp, spec.num_kv_heads)
    kv = spec.num_kv_heads * d // kv_shards
    kv_rank = tp_rank // (tp // kv_shards)
    mlp = spec.mlp_hidden_size // tp
    boxes = _vocab_rows(spec, tp, tp_rank, "model.embed_tokens.weight", "model.embed_tokens.weight")
    for i in range(spec.num_layers):
        p = f"model.layers.{i}."
        qkv, gate_up = p + "self_attn.qkv_proj.weight", p + "mlp.gate_up_proj.weight"
        boxes += [
            _whole(p + "input_layernorm.weight", (hidden,), p + "input_layernorm.weight"),
            _whole(p + "post_attention_layernorm.weight", (hidden,), p + "post_attention_layernorm.weight"),
            *_with_bias(spec, _rows(p + "self_attn.q_proj.weight", tp_rank * query, query, hidden, qkv, 0)),
            *_with_bias(spec, _rows(p + "self_attn.k_proj.weight", kv_rank * kv, kv, hidden, qkv, query)),
            *_with_bias(spec, _rows(p + "self_attn.v_proj.weight", kv_rank * kv, kv, hidden, qkv, query + kv)),
            *(_whole(name, (d,), name) for x in "qk" * spec.qk_norm for name in [f"{p}self_attn.{x}_norm.weight"]),
            Box(p + "self_attn.o_proj.weight", (0, tp_rank * query), (hidden, query),
                p + "self_attn.o_proj.weight", (0, 0)),
            _rows(p + "mlp.gate_proj.weight", tp_rank * mlp, mlp, hidden, gate_up, 0),
            _rows(p + "mlp.up_proj.weight", tp_rank * mlp, mlp, hidden, gate_up, mlp),
            Box(p + "mlp.down_proj.weight", (0, tp_rank * mlp), (hidden, mlp), p + "mlp.down_proj.weight", (0, 0)),
        ]  # fmt: skip
    boxes.append(_whole("model.norm.weight", (hidden,), "model.norm.weight"))
    if not spec.tied_embeddings:
        boxes += _vocab_rows(spec, tp, tp_rank, "lm_head.weight", "lm_head.weight")
    return boxes


def intersect(held: Box, needed: Box) -> tuple[Offsets, Offsets] | None:
    """Return (start, size) of the part of one tensor that two boxes share, or ``None``."""
    starts, sizes = [], []
    for a, m, b, n in zip(held.start, held.size, needed.start, needed.size, strict=True):
        first, last = max(a, b), min(a + m, b + n)
        if first >= last:
            return None
        starts.append(first)
        sizes.append(last - first)
    return tuple(starts), tuple(sizes)


def _inside(box: Box, start: Offsets) -> Offsets:
    """Translate a position in the Hugging Face tensor into the local parameter that holds ``box``."""
    return tuple(lo + s - b for lo, s, b in zip(box.local_start, start, box.start, strict=True))


@dataclass(frozen=True, repr=False)
class ReshardPlan:
    """What every rank copies, sends and receives so that the rollout has the trainer's weights.

    Made by :meth:`between`; checked byte for byte against what the transport counted.
    """

    spec: ModelSpec
    train: Layout
    rollout_tp: int
    dtype: str
    moves: tuple[Move, ...] = field(repr=False)

    @classmethod
    def between(cls, spec: ModelSpec, train: str | Layout, rollout: str | Layout, dtype: str = "fp32") -> ReshardPlan:
        """Plan the transition of ``spec`` from a training layout to a rollout layout on the same ranks.

        A piece is taken from the rank itself where it holds it, else from the holder that has sent least so far.

        Raises:
            LayoutError: a layout does not fit the model, or the two cover different numbers of ranks.
        """
        train_layout = Layout.parse(train)
        rollout_layout = Layout.parse(rollout)
        if train_layout.dp is None:
            train_layout = train_layout.fill(max(train_layout.size, rollout_layout.size))
        rollout_layout = rollout_layout.fill(train_layout.size)
        train_layout.check_model(spec)
        rollout_layout.check_model(spec)
        mesh = train_layout.mesh(rollout_layout.tp)
        moves = _plan_moves(spec, mesh, rollout_layout.tp)
        return cls(spec, train_layout, rollout_layout.tp, dtype, tuple(moves))

    @cached_property
    def by_rank(self) -> dict[int, list[Move]]:
        """Moves in which a rank takes part, as source or target, in plan order."""
        found: dict[int, list[Move]] = defaultdict(list)
        for move in self.moves:
            found[move.target].append(move)
            if move.source != move.target:
                found[move.source].append(move)
        return dict(found)

    def bytes_received(self, rank: int) -> int:
        """Return the bytes ``rank`` receives from other ranks."""
        size = DTYPE_BYTES[self.dtype]
        return size * sum(m.numel for m in self.moves if m.target == rank and m.source != rank)

    def bytes_matrix(self) -> list[list[int]]:
        """Return bytes[source][target] over all rank pairs; the diagonal holds local copies."""
        size, n = DTYPE_BYTES[self.dtype], self.train.size
        matrix = [[0] * n for _ in range(n)]
        for move in self.moves:
            matrix[move.source][move.target] += size * move.numel
        return matrix

    @property
    def bytes_moved(self) -> int:
        """Bytes that cross between ranks, in total."""
        return sum(self.bytes_received(rank) for rank in range(self.train.size))

    def __repr__(self) -> str:
        return (
            f"ReshardPlan {self.spec.name}: '{self.train}' to rollout tp{self.rollout_tp}, "
            f"{self.bytes_moved / 1e6:.3f} MB between ranks"
        )


def _plan_moves(spec: ModelSpec, mesh: Mesh, rollout_tp: int) -> list[Move]:
    held: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    for rank in mesh.ranks:
        at = mesh.coordinates(rank)
        for box in megatron_boxes(spec, mesh.layout, at.tp, at.pp):
            held[box.tensor].append((rank, box))
    sent = [0] * mesh.layout.size
    moves: list[Move] = []
    for target in mesh.ranks:
        for needed in vllm_boxes(spec, rollout_tp, target % rollout_tp):
            moves += _sources(needed, target, held[needed.tensor], sent)
    return moves


def _sources(needed: Box, target: int, holders: list[tuple[int, Box]], sent: list[int]) -> list[Move]:
    """Choose, for every distinct piece of ``needed``, who provides it."""
    options: dict[tuple[Offsets, Offsets], list[tuple[int, Box]]] = defaultdict(list)
    for rank, box in holders:
        shared = intersect(box, needed)
        if shared:
            options[shared].append((rank, box))
    moves = []
    covered: set[tuple[Offsets, Offsets]] = set()
    own = [piece for piece, who in options.items() if any(rank == target for rank, _ in who)]
    for start, size in own + [piece for piece in options if piece not in own]:
        if any(_contains(done, (start, size)) for done in covered):
            continue
        who = options[start, size]
        source, box = next(((r, b) for r, b in who if r == target), None) or min(who, key=lambda o: sent[o[0]])
        if source != target:
            sent[source] += math.prod(size)
        covered.add((start, size))
        moves.append(
            Move(
                needed.tensor,
                source,
                target,
                box.local,
                _inside(box, start),
                needed.local,
                _inside(needed, start),
                size,
            )
        )
    return moves


def _contains(outer: tuple[Offsets, Offsets], inner: tuple[Offsets, Offsets]) -> bool:
    return all(a <= b and b + n <= a + m for a, m, b, n in zip(*outer, *inner, strict=True))
