"""The boxes of every weight: every shard of either engine, described as boxes of the Hugging Face tensors.

So any two layouts can be compared. One fused qkv weight of 8 query and 4 kv heads, tp=2 (q0 = the rows of one head)::

    Hugging Face           q_proj: q0 q1 q2 q3 q4 q5 q6 q7      k_proj: k0 k1 k2 k3     v_proj: v0 v1 v2 v3
    Megatron, tp rank 0    linear_qkv:  [q0 q1 k0 v0 | q2 q3 k1 v1]        (per kv group: its queries, its k, its v)
    vLLM, tp rank 0        qkv_proj:    [q0 q1 q2 q3 | k0 k1 | v0 v1]      (all q, then all k, then all v)

The same bytes in another row order: nothing has to travel, but the rows must be copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hfsdk.core.layout import Layout
from hfsdk.core.lora import A, AdapterSpec, B, LoRA, padded_rank
from hfsdk.core.spec import ModelSpec, refuse_experts

Offsets = tuple[int, ...]

VOCAB_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
"""Names of the parameters whose rows are padded, in vLLM as in Hugging Face."""

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


def _with_bias(biased: bool, box: Box) -> list[Box]:
    """Return a box of rows of a weight and, where the layer has a bias, the same rows of it."""
    if not biased:
        return [box]
    tensor, local = (name.removesuffix("weight") + "bias" for name in (box.tensor, box.local))
    return [box, Box(tensor, box.start[:1], box.size[:1], local, box.local_start[:1])]


def _attention_rows(spec: ModelSpec, prefix: str) -> dict[str, tuple[str, int]]:
    """Return where a layer's queries, keys and values begin: letter -> (Hugging Face tensor, its first row)."""
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if spec.fused:
        name = prefix + "self_attn.qkv_proj.weight"
        return {"q": (name, 0), "k": (name, query), "v": (name, query + kv)}
    return {letter: (f"{prefix}self_attn.{letter}_proj.weight", 0) for letter in "qkv"}


def _mlp_rows(spec: ModelSpec, prefix: str, first: int, count: int, local: str) -> list[Box]:
    """Return the boxes of a rank's rows of the gate, and behind them the up-projection's."""
    fused = prefix + "mlp.gate_up_proj.weight"
    names = (fused, fused) if spec.fused else (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
    begins = (0, spec.mlp_hidden_size if spec.fused else 0)
    return [
        box
        for i, (name, begin) in enumerate(zip(names, begins, strict=True))
        for box in _with_bias(spec.mlp_bias, _rows(name, begin + first, count, spec.hidden_size, local, i * count))
    ]


def _whole(tensor: str, shape: Offsets, local: str) -> Box:
    zeros = (0,) * len(shape)
    return Box(tensor, zeros, shape, local, zeros)


def has_boxes(spec: ModelSpec) -> bool:
    """Whether a model's shards are known box by box; of mixtures of experts and latent attention only their sizes are."""
    return spec.experts is None and spec.latent is None


def megatron_boxes(spec: ModelSpec, layout: Layout, tp_rank: int, pp_rank: int = 0) -> list[Box]:
    """Return the boxes a Megatron rank holds (local layer specs; names as ``GPTModel.named_parameters`` gives them).

    The fused qkv is cut by kv groups: global row order is, per kv group, its query heads, its key head, its value head; a
    bias has the same rows.
    A scalar head replaces ``output_layer`` and belongs to no Hugging Face tensor; callers leave it out.
    """
    layers = spec.num_layers // layout.pp
    before, after = megatron_ends(spec, layout, tp_rank, pp_rank)
    inside = [megatron_layer(spec, layout.tp, tp_rank, pp_rank * layers + j, j) for j in range(layers)]
    return [*before, *(box for boxes in inside for box in boxes), *after]


def megatron_ends(spec: ModelSpec, layout: Layout, tp_rank: int, pp_rank: int) -> tuple[list[Box], list[Box]]:
    """Return the boxes that a Megatron rank holds before and after its layers: embedding; last norm and head.

    A tied embedding is on the first and on the last stage, there under the name of the head. Adapters stand in layers only.
    """
    if isinstance(spec, AdapterSpec):
        return [], []
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    before, after = [], []
    if pp_rank == 0:
        before = _vocab_rows(spec, layout.tp, tp_rank, embedding, "embedding.word_embeddings.weight")
    if pp_rank == layout.pp - 1:
        after = [_whole("model.norm.weight", (spec.hidden_size,), "decoder.final_layernorm.weight")]
        if not spec.tied_embeddings:
            after += _vocab_rows(spec, layout.tp, tp_rank, head, "output_layer.weight")
        elif layout.pp > 1:
            after += _vocab_rows(spec, layout.tp, tp_rank, embedding, "output_layer.weight")
    return before, after


def megatron_layer(spec: ModelSpec, tp: int, tp_rank: int, number: int, local_number: int) -> list[Box]:
    """Return the boxes a Megatron rank holds of layer ``number``, the ``local_number``-th of its stage."""
    if isinstance(spec, AdapterSpec):
        return _adapters(spec, megatron_layer(spec.base, tp, tp_rank, number, local_number), stacked=True)
    refuse_experts("a plan of shards, and of adapters,", spec.experts or spec.latent, spec.name)
    hf, local = f"model.layers.{number}.", f"decoder.layers.{local_number}."
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
    there = _attention_rows(spec, hf)
    for group in range(spec.num_kv_heads):
        base = group * (ratio + 2) * d
        for letter, at, count, hf_row in (
            ("q", base, ratio * d, group * ratio * d),
            ("k", base + ratio * d, d, group * d),
            ("v", base + (ratio + 1) * d, d, group * d),
        ):
            # Where tp exceeds the kv heads a rank's rows begin or end inside a group, which then lies on two ranks.
            first, last = max(at, low), min(at + count, low + rows)
            if first < last:
                name, begin = there[letter]
                row = begin + hf_row + first - at
                boxes += _with_bias(spec.qkv_bias, _rows(name, row, last - first, hidden, fused, first - low))
    width = spec.num_heads * d // tp
    mlp = spec.mlp_hidden_size // tp
    boxes += [
        Box(hf + "self_attn.o_proj.weight", (0, tp_rank * width), (hidden, width),
            local + "self_attention.linear_proj.weight", (0, 0)),
        *_mlp_rows(spec, hf, tp_rank * mlp, mlp, local + "mlp.linear_fc1.weight"),
        Box(hf + "mlp.down_proj.weight", (0, tp_rank * mlp), (hidden, mlp), local + "mlp.linear_fc2.weight", (0, 0)),
    ]  # fmt: skip
    if spec.attention_bias:
        boxes.append(_whole(hf + "self_attn.o_proj.bias", (hidden,), local + "self_attention.linear_proj.bias"))
    if spec.mlp_bias:
        boxes.append(_whole(hf + "mlp.down_proj.bias", (hidden,), local + "mlp.linear_fc2.bias"))
    return boxes


def vllm_boxes(spec: ModelSpec, tp: int, tp_rank: int) -> list[Box]:
    """Return the boxes a vLLM rank needs (names as its model's ``named_parameters`` gives them)."""
    before, after = vllm_ends(spec, Layout(tp=tp), tp_rank, 0)
    inside = [vllm_layer(spec, tp, tp_rank, number) for number in range(spec.num_layers)]
    return [*before, *(box for boxes in inside for box in boxes), *after]


def vllm_ends(spec: ModelSpec, layout: Layout, tp_rank: int, pp_rank: int) -> tuple[list[Box], list[Box]]:
    """Return the boxes that a vLLM rank needs before and after its layers; a tied embedding is on the first and last stage."""
    if isinstance(spec, AdapterSpec):
        return [], []
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    first, last = pp_rank == 0, pp_rank == layout.pp - 1
    before, after = [], []
    if first or (last and spec.tied_embeddings):
        before = _vocab_rows(spec, layout.tp, tp_rank, embedding, embedding)
    if last:
        after = [_whole("model.norm.weight", (spec.hidden_size,), "model.norm.weight")]
        if not spec.tied_embeddings:
            after += _vocab_rows(spec, layout.tp, tp_rank, head, head)
    return before, after


def vllm_layer(spec: ModelSpec, tp: int, tp_rank: int, number: int) -> list[Box]:
    """Return the boxes a vLLM rank needs of layer ``number``.

    qkv rows are [q; k; v] of the rank; with fewer kv heads than tp, a kv head is replicated on ``tp / kv_heads`` ranks.
    """
    if isinstance(spec, AdapterSpec):
        return _adapters(spec, vllm_layer(spec.base, tp, tp_rank, number), stacked=False)
    refuse_experts("a plan of shards, and of adapters,", spec.experts or spec.latent, spec.name)
    hidden, d = spec.hidden_size, spec.head_dim
    query = spec.num_heads * d // tp
    kv_shards = min(tp, spec.num_kv_heads)
    kv = spec.num_kv_heads * d // kv_shards
    # Neighbouring ranks share a kv head where there are fewer heads than ranks.
    kv_rank = tp_rank // (tp // kv_shards)
    mlp = spec.mlp_hidden_size // tp
    p = f"model.layers.{number}."
    qkv, there = p + "self_attn.qkv_proj.weight", _attention_rows(spec, p)
    parts = (("q", tp_rank * query, query, 0), ("k", kv_rank * kv, kv, query), ("v", kv_rank * kv, kv, query + kv))
    biases = [p + "self_attn.o_proj.bias"] * spec.attention_bias + [p + "mlp.down_proj.bias"] * spec.mlp_bias
    return [
        _whole(p + "input_layernorm.weight", (hidden,), p + "input_layernorm.weight"),
        _whole(p + "post_attention_layernorm.weight", (hidden,), p + "post_attention_layernorm.weight"),
        *(
            box
            for letter, first, count, at in parts
            for box in _with_bias(spec.qkv_bias, _rows(there[letter][0], there[letter][1] + first, count, hidden, qkv, at))
        ),
        *(_whole(name, (d,), name) for x in "qk" * spec.qk_norm for name in [f"{p}self_attn.{x}_norm.weight"]),
        Box(p + "self_attn.o_proj.weight", (0, tp_rank * query), (hidden, query), p + "self_attn.o_proj.weight", (0, 0)),
        *_mlp_rows(spec, p, tp_rank * mlp, mlp, p + "mlp.gate_up_proj.weight"),
        Box(p + "mlp.down_proj.weight", (0, tp_rank * mlp), (hidden, mlp), p + "mlp.down_proj.weight", (0, 0)),
        *(_whole(name, (hidden,), name) for name in biases),
    ]


PARTS_OF_FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "fc1": ("gate_proj", "up_proj"), "gate_up": ("gate_proj", "up_proj")}
"""The parts of a layer that either engine fuses, in the order of its adapters."""


def adapter_parts(local: str, tensors: Sequence[str]) -> tuple[str, ...]:
    """Return the modules of which one fused layer has an adapter each, e.g. ``model.layers.0.self_attn.q_proj`` and k and v.

    Args:
        local: name of the engine's weight.
        tensors: the Hugging Face tensors that lie in it, perhaps on another rank only in part.
    """
    module = tensors[0].removesuffix(".weight")
    before, last = module.rsplit(".", 1)
    for fused, parts in PARTS_OF_FUSED.items():
        if fused in local.rsplit(".", 2)[-2] and last in parts:
            return tuple(f"{before}.{part}" for part in parts)
    return (module,)


def _adapters(spec: AdapterSpec, boxes: Sequence[Box], *, stacked: bool) -> list[Box]:
    """Return the boxes of the adapters of a layer's weights, of which ``boxes`` are the ones that a rank holds.

    Where tp cuts the weight's rows, A is whole on every rank and B is cut as they are; where it cuts columns, A is cut as they
    are and B is whole. Of a fused layer, tp=2, rank 0, two heads a rank::

        W     [q0 q1 k0 v0]        A   [A of q; A of k; A of v], each [rank, in]       B   [B of q0 q1; B of k0; B of v0]

    Args:
        spec: the adapters.
        boxes: boxes of the weights, in either engine.
        stacked: whether the adapters of a fused layer lie in one A and one B (Megatron), or each in its own (vLLM).
    """
    rank, adapter_boxes = spec.lora.rank, []
    by_local: dict[str, list[Box]] = {}
    for box in boxes:
        if box.local.endswith(".weight") and len(box.size) == 2:
            by_local.setdefault(box.local, []).append(box)
    for local, shard in by_local.items():
        module = local.removesuffix(".weight")
        name = module + ".adapter.{}" if stacked else module + ".lora_{}.{}"
        below = 0
        parts = [part for part in adapter_parts(local, [box.tensor for box in shard]) if spec.lora.takes(part)]
        for number, part in enumerate(parts):
            own_boxes = sorted((box for box in shard if box.tensor == part + ".weight"), key=lambda box: box.local_start)
            width, by_rows = shard[0].size[1], module.endswith(("linear_qkv", "linear_fc1", "qkv_proj", "gate_up_proj"))
            # Cut columns of W are cut columns of A: both multiply the same part of the input.
            column = 0 if by_rows else shard[0].start[1]
            place = name.format("A", slice_of(part, local))
            adapter_boxes.append(Box(part + A, (0, column), (rank, width), place, (number * rank if stacked else 0, 0)))
            at = below if stacked else 0
            for box in own_boxes:
                place = name.format("B", slice_of(part, local))
                adapter_boxes.append(Box(part + B, (box.start[0], 0), (box.size[0], rank), place, (at, 0)))
                at += box.size[0]
            below = at
    return adapter_boxes


def slice_of(module: str, local: str) -> int:
    """Return which of a fused layer's parts a module is: 1 for ``k_proj`` in ``qkv_proj``; 0 where it is alone."""
    parts = adapter_parts(local, [module + ".weight"])
    return parts.index(module)


def held_adapters(spec: ModelSpec, lora: LoRA) -> AdapterSpec:
    """Return the adapters that vLLM has room for in each slot: of its rank, and of all parts of a layer that it fuses."""
    targets = lora.targets
    if isinstance(targets, tuple):
        fused = [parts for parts in PARTS_OF_FUSED.values() if not set(parts).isdisjoint(targets)]
        targets = (*targets, *(part for parts in fused for part in parts))
    return AdapterSpec.of(spec, replace(lora, rank=padded_rank(lora.rank), targets=targets))


def intersect(present: Box, needed: Box) -> tuple[Offsets, Offsets] | None:
    """Return (start, size) of the part of one tensor that two boxes share, or ``None``."""
    starts, sizes = [], []
    for a, m, b, n in zip(present.start, present.size, needed.start, needed.size, strict=True):
        first, last = max(a, b), min(a + m, b + n)
        if first >= last:
            return None
        starts.append(first)
        sizes.append(last - first)
    return tuple(starts), tuple(sizes)


def inside(box: Box, start: Offsets) -> Offsets:
    """Translate a position in the Hugging Face tensor into the local parameter that holds ``box``."""
    return tuple(lo + s - b for lo, s, b in zip(box.local_start, start, box.start, strict=True))


def without(start: Offsets, size: Offsets, holes: Sequence[tuple[Offsets, Offsets]]) -> list[tuple[Offsets, Offsets]]:
    """Return the rest of a box, (start, size), when others are cut out of it, as boxes that do not overlap."""
    left = [(start, size)]
    for hole_start, hole_size in holes:
        left = [rest for piece in left for rest in _around(*piece, hole_start, hole_size)]
    return left


def _around(start: Offsets, size: Offsets, hole_start: Offsets, hole_size: Offsets) -> list[tuple[Offsets, Offsets]]:
    boxes = []
    core_start, core_size = list(start), list(size)
    for dim, (first, count) in enumerate(zip(hole_start, hole_size, strict=True)):
        low, high = max(first, core_start[dim]), min(first + count, core_start[dim] + core_size[dim])
        if low >= high:
            return [(start, size)]
        # What lies before and behind the hole in this dimension is cut off whole; the next dimension cuts the rest.
        for at, n in ((core_start[dim], low - core_start[dim]), (high, core_start[dim] + core_size[dim] - high)):
            if n:
                boxes.append(((*core_start[:dim], at, *core_start[dim + 1 :]), (*core_size[:dim], n, *core_size[dim + 1 :])))
        core_start[dim], core_size[dim] = low, high - low
    return boxes
