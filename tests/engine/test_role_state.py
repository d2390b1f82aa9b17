"""Pieces of one layout's shares fill those of any other, and cover every tensor once."""

from __future__ import annotations

import math

import torch
from expect import refuses
from rows import every_row

from hfsdk.core.errors import CheckpointError
from hfsdk.core.layout import Layout
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.weights.role_state import KINDS, SCALAR_HEAD, Shard, Summary
from hfsdk.engine.weights.shares import StateShare, Strip, divided, fill, pieces, rectangles
from hfsdk.resharding.boxes import padded_vocab

LAYOUTS = ["tp1", "tp2 pp2", "pp4", "tp4", "tp2 dp2", "tp4 pp2", "dp3", "pp2 dp5"]
MODELS = {
    "untied": (False, False), "tied": (True, False), "untied scalar": (False, True), "tied scalar": (True, True),
    "biased": (False, False), "fused": (False, False), "one kv head": (False, False),
}  # fmt: skip
MORE = {
    "biased": {"attention_bias": True, "mlp_bias": True}, "fused": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "one kv head": {"num_key_value_heads": 1, "attention_bias": True},
}  # fmt: skip
"""What a model's config has beside the others'."""


def spec_of(model):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "tie_word_embeddings": MODELS[model][0], "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return ModelSpec.from_hf_config(config | MORE.get(model, {}), model)


def whole(spec, scalar, dtype):
    """Random values of every tensor of a role under its Hugging Face name, by kind."""
    torch.manual_seed(0)
    shapes = {n: s for n, s in spec.tensors().items() if not (scalar and n == "lm_head.weight")}
    shapes |= {"score.weight": (1, spec.hidden_size)} if scalar else {}
    found = {kind: {name: torch.randn(shape) for name, shape in shapes.items()} for kind in ("weights", *KINDS)}
    for name, tensor in found["weights"].items():
        if dtype == torch.float32 or name == "score.weight":
            found["main"][name] = tensor
        else:
            found["weights"][name] = found["main"][name].to(dtype)
    return found


def shards(spec, layout, scalar):
    layout = Layout.parse(layout)
    layout = layout.fill(layout.size)
    return [Shard(spec=spec, layout=layout, at=layout.coordinates(r), scalar=scalar) for r in range(layout.size)]


def local_state(shard, full, known):
    """A rank's whole local tensors by kind, cut out of the whole role's."""
    sizes = {}
    for box in shard.boxes:
        ends = [a + n for a, n in zip(box.local_start, box.size, strict=True)]
        sizes[box.local] = [max(pair) for pair in zip(ends, sizes.get(box.local, ends), strict=True)]
    rows = padded_vocab(shard.spec.vocab_size, shard.layout.tp) // shard.layout.tp
    for name in ("embedding.word_embeddings.weight", SCALAR_HEAD):
        if name in sizes and not (shard.scalar and name == SCALAR_HEAD):
            sizes[name][0] = rows
    by_local = {box.local: box.tensor for box in shard.boxes}
    state = {}
    for kind in ("weights", *known.kinds):
        dtypes = {name: full["weights"][by_local[name]].dtype if kind == "weights" else torch.float32 for name in sizes}
        state[kind] = {name: torch.zeros(size, dtype=dtypes[name]) for name, size in sizes.items()}
        for box in shard.boxes:
            there = tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
            here = tuple(slice(a, a + n) for a, n in zip(box.local_start, box.size, strict=True))
            state[kind][box.local][here] = full[kind][box.tensor][there]
    if "main" in state:
        own = [name for name, weight in state["weights"].items() if weight.dtype == torch.float32]
        state["main"] = {name: tensor for name, tensor in state["main"].items() if name not in own}
    return state


def share_of(shard, full, known):
    """A rank's share, as divided evenly."""
    found = []
    for kind, tensors in local_state(shard, full, known).items():
        known_of = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        for strip in divided(kind, known_of, shard.layout.num_replicas)[shard.at.dp]:
            found.append((strip, tensors[strip.local].view(-1)[strip.start : strip.stop].clone()))
    return StateShare(str(shard.layout), shard.layout.rank(tp=shard.at.tp, pp=shard.at.pp, dp=shard.at.dp), known, tuple(found))


def blank_of(share, known):
    return StateShare.blank(share.layout, share.rank, known, [strip for strip, _ in share.content])


def equal(a, b):
    (mine, ours), (theirs, other) = (zip(*share.content, strict=True) for share in (a, b))
    return mine == theirs and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(ours, other, strict=True))


def test_equal_parts_that_cover_every_number_once():
    with every_row() as row:
        for num_ranks in [1, 2, 3, 7, 64]:
            with row(num_ranks):
                check_equal_parts_that_cover_every_number_once(num_ranks)


def check_equal_parts_that_cover_every_number_once(num_ranks):
    bf16, fp32 = torch.bfloat16, torch.float32
    tensors = {"a": ((7, 5), bf16), "norm": ((3,), bf16), "head": ((1, 5), fp32), "b": ((11, 4), bf16)}
    parts = divided("weights", tensors, num_ranks)
    for name, (shape, dtype) in tensors.items():
        covered = [i for part in parts for strip in part if strip.local == name for i in range(strip.start, strip.stop)]
        assert covered == list(range(math.prod(shape)))
        assert {(strip.shape, strip.dtype) for part in parts for strip in part if strip.local == name} == {(shape, dtype)}
    sizes = [sum(strip.num_bytes for strip in part) for part in parts]
    assert sum(sizes) == sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
    assert max(sizes) <= sum(sizes) / num_ranks + 4
    assert min(sizes) >= sum(sizes) / num_ranks - 4


def test_a_strip_is_at_most_three_boxes():
    numbers = torch.arange(40).view(5, 8)
    for start in range(40):
        for stop in range(start + 1, 41):
            found = rectangles(start, stop, (5, 8))
            values = [numbers[r : r + h, c : c + w].flatten() for (r, c), (h, w) in found]
            assert torch.equal(torch.cat(values), numbers.flatten()[start:stop])
            assert len(found) <= 3
    assert rectangles(11, 37, (5, 8)) == [((1, 3), (1, 5)), ((2, 0), (2, 8)), ((4, 0), (1, 5))]
    assert rectangles(2, 7, (9,)) == [((2,), (5,))]


SOME = ["tp1", "tp2 pp2", "dp3"]


def test_any_layout_from_any_other():
    """Of each model, and of what differs in them; every layout from every other is in ``sweeps/test_state_pieces.py``."""
    fp32, bf16 = torch.float32, torch.bfloat16
    rows = [("untied", fp32, LAYOUTS), ("tied scalar", bf16, SOME), ("tied", bf16, SOME), ("untied scalar", fp32, SOME)]
    rows += [(model, dtype, SOME) for model, dtype in (("biased", bf16), ("fused", fp32), ("one kv head", bf16))]
    with every_row() as row:
        for model, dtype, layouts in rows:
            with row(model, dtype, layouts):
                check_any_layout_from_any_other(model, dtype, layouts)


def check_any_layout_from_any_other(model, dtype, layouts):
    spec, scalar = spec_of(model), MODELS[model][1]
    full, known = whole(spec, scalar, dtype), Summary(3, KINDS, 3.0)
    for source in layouts:
        held = [(shard, share_of(shard, full, known)) for shard in shards(spec, source, scalar)]
        offered = [piece for shard, share in held for piece in pieces(share, shard)]
        assert all(piece.data.is_contiguous() for piece in offered)
        first = [piece for piece in offered if piece.first]
        numbers = {}
        for piece in first:
            key = piece.kind, piece.tensor
            numbers[key] = numbers.get(key, 0) + piece.data.numel()
            assert piece.shape == tuple(full[piece.kind][piece.tensor].shape)
            there = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.data.shape, strict=True))
            assert torch.equal(piece.data, full[piece.kind][piece.tensor][there])
        for kind, tensors in full.items():
            for name, tensor in tensors.items():
                own_master = kind == "main" and full["weights"][name].dtype == torch.float32
                assert numbers.get((kind, name), 0) == (0 if own_master else math.prod(tensor.shape))
        for target in layouts:
            for shard in shards(spec, target, scalar):
                expected = share_of(shard, full, known)
                share = blank_of(expected, known)
                fill(share, shard, first)
                assert equal(share, expected), (source, target, shard.at)


def test_both_copies_of_a_tied_embedding():
    spec = spec_of("tied")
    full, known = whole(spec, False, torch.float32), Summary(1, KINDS, 1.0)
    first, *_, last = shards(spec, "pp4", False)
    alone = shards(spec, "tp1", False)[0]
    offered = pieces(share_of(alone, full, known), alone)
    share = blank_of(share_of(last, full, known), known)
    fill(share, last, offered)
    (copy,) = (x.view(s.shape) for s, x in share.content if (s.kind, s.local) == ("exp_avg", "output_layer.weight"))
    assert torch.equal(copy[:260], full["exp_avg"]["model.embed_tokens.weight"])
    assert copy.shape[0] == 320
    assert not copy[260:].any(), "padding"
    told = {(p.kind, p.tensor) for p in pieces(share, last) if p.first}
    assert ("weights", "model.embed_tokens.weight") not in told, "the first stage tells it"
    assert ("weights", "model.embed_tokens.weight") in {
        (p.kind, p.tensor) for p in pieces(share_of(first, full, known), first) if p.first
    }


def test_frozen_roles_and_fresh_optimizers():
    with every_row() as row:
        for known in [Summary(0), Summary(0, ("main",))]:
            with row(known):
                check_frozen_roles_and_fresh_optimizers(known)


def check_frozen_roles_and_fresh_optimizers(known):
    spec = spec_of("untied")
    full = whole(spec, False, torch.bfloat16)
    source, target = shards(spec, "tp2", False), shards(spec, "pp2 dp2", False)
    offered = [p for shard in source for p in pieces(share_of(shard, full, known), shard)]
    for shard in target:
        expected = share_of(shard, full, known)
        share = blank_of(expected, known)
        fill(share, shard, offered)
        assert equal(share, expected)
        assert {strip.kind for strip, _ in share.content} == {"weights", *known.kinds}


def test_what_is_missing_is_said():
    """Without one rank's share no layout is filled."""
    with every_row() as row:
        for layout in ["tp2", "dp2", "dp3"]:
            with row(layout):
                check_what_is_missing_is_said(layout)


def check_what_is_missing_is_said(layout):
    spec = spec_of("untied")
    known = Summary(1, KINDS, 1.0)
    full = whole(spec, False, torch.float32)
    alone = shards(spec, "tp1", False)[0]
    share = share_of(alone, full, known)
    everybody = shards(spec, layout, False)
    for missing in range(len(everybody)):
        there = [shard for rank, shard in enumerate(everybody) if rank != missing]
        with refuses(CheckpointError, "numbers of", "this rank needs"):
            fill(share, alone, [piece for shard in there for piece in pieces(share_of(shard, full, known), shard)])


def test_a_share_is_as_large_as_its_strips_say():
    strip = Strip("exp_avg", "proj.weight", (4, 8), torch.float32, 5, 21)
    share = StateShare.blank("tp1 pp1 dp2", 1, Summary(0, KINDS, 1.0), [strip])
    assert (strip.numel, strip.num_bytes, share.num_bytes) == (16, 64, 64)
    assert not share.content[0][1].any()
