"""Pieces of one layout fill the state of any other, and cover every tensor once."""

from __future__ import annotations

import math

import pytest
import torch

from hfsdk.boxes import padded_vocab
from hfsdk.engine.role_state import KINDS, SCALAR_HEAD, Shard, Summary, blank, fill, pieces
from hfsdk.errors import CheckpointError
from hfsdk.layout import Layout
from hfsdk.spec import ModelSpec

LAYOUTS = ["tp1", "tp2 pp2", "pp4", "tp4", "tp2 dp2", "tp4 pp2"]
MODELS = {
    "untied": (False, False), "tied": (True, False), "untied scalar": (False, True), "tied scalar": (True, True),
    "biased": (False, False), "fused": (False, False), "one kv head": (False, False),
}  # fmt: skip
MORE = {
    "biased": {"attention_bias": True, "mlp_bias": True}, "fused": {"architectures": ["Phi3ForCausalLM"]},
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


def state_of(shard, full, known):
    """A rank's state, cut out of the whole role's."""
    sizes = {}
    for box in shard.boxes:
        ends = [a + n for a, n in zip(box.local_start, box.size, strict=True)]
        sizes[box.local] = [max(pair) for pair in zip(ends, sizes.get(box.local, ends), strict=True)]
    rows = padded_vocab(shard.spec.vocab_size, shard.layout.tp) // shard.layout.tp
    for name in ("embedding.word_embeddings.weight", SCALAR_HEAD):
        if name in sizes and not (shard.scalar and name == SCALAR_HEAD):
            sizes[name][0] = rows
    by_local = {box.local: box.tensor for box in shard.boxes}
    local = {name: torch.empty(size, dtype=full["weights"][by_local[name]].dtype) for name, size in sizes.items()}
    state = blank(local, known)
    for kind in ("weights", *known.kinds):
        for box in shard.boxes:
            target = state["weights"] if kind == "weights" else {n: s[kind] for n, s in state["optimizer"].items()}
            there = tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
            here = tuple(slice(a, a + n) for a, n in zip(box.local_start, box.size, strict=True))
            target[box.local][here] = full[kind][box.tensor][there]
    return state


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS)
def test_any_layout_from_any_other(model, dtype):
    spec, scalar = spec_of(model), MODELS[model][1]
    full, known = whole(spec, scalar, dtype), Summary(3, KINDS, 3.0)
    for source in LAYOUTS:
        held = [(shard, state_of(shard, full, known)) for shard in shards(spec, source, scalar)]
        offered = [piece for shard, state in held for piece in pieces(state, shard)]
        assert all(piece.data.is_contiguous() for piece in offered)
        first = [piece for piece in offered if piece.first]
        numbers = {}
        for piece in first:
            key = piece.kind, piece.tensor
            numbers[key] = numbers.get(key, 0) + piece.data.numel()
            assert piece.shape == tuple(full[piece.kind][piece.tensor].shape)
        for kind, tensors in full.items():
            for name, tensor in tensors.items():
                own_master = kind == "main" and full["weights"][name].dtype == torch.float32
                assert numbers.get((kind, name), 0) == (0 if own_master else math.prod(tensor.shape))
        for target in LAYOUTS:
            for shard in shards(spec, target, scalar):
                expected = state_of(shard, full, known)
                state = blank(expected["weights"], Summary.of(held[-1][1]))
                fill(state, shard, offered if target == "tp4" else first)  # with all replicas, and with one of each
                assert equal(state, expected), (source, target, shard.at)


def test_both_copies_of_a_tied_embedding():
    spec = spec_of("tied")
    full, known = whole(spec, False, torch.float32), Summary(1, KINDS, 1.0)
    first, *_, last = shards(spec, "pp4", False)
    alone = shards(spec, "tp1", False)[0]
    offered = pieces(state_of(alone, full, known), alone)
    state = blank(state_of(last, full, known)["weights"], known)
    fill(state, last, offered)
    copy = state["optimizer"]["output_layer.weight"]["exp_avg"]
    assert torch.equal(copy[:260], full["exp_avg"]["model.embed_tokens.weight"])
    assert copy.shape[0] == 320
    assert not copy[260:].any(), "padding"
    told = {(p.kind, p.tensor) for p in pieces(state, last) if p.first}
    assert ("weights", "model.embed_tokens.weight") not in told, "the first stage tells it"
    assert ("weights", "model.embed_tokens.weight") in {
        (p.kind, p.tensor) for p in pieces(state_of(first, full, known), first) if p.first
    }


@pytest.mark.parametrize("known", [Summary(0), Summary(0, ("main",))])
def test_frozen_roles_and_fresh_optimizers(known):
    spec = spec_of("untied")
    full = whole(spec, False, torch.bfloat16)
    source, target = shards(spec, "tp2", False), shards(spec, "pp2", False)
    offered = [p for shard in source for p in pieces(state_of(shard, full, known), shard)]
    for shard in target:
        expected = state_of(shard, full, known)
        state = blank(expected["weights"], Summary.of(expected))
        fill(state, shard, offered)
        assert equal(state, expected)
        assert Summary.of(state) == known


def test_what_is_missing_is_said():
    spec = spec_of("untied")
    known = Summary(1, KINDS, 1.0)
    full = whole(spec, False, torch.float32)
    half, _ = shards(spec, "tp2", False)
    alone = shards(spec, "tp1", False)[0]
    state = state_of(alone, full, known)
    with pytest.raises(CheckpointError, match=r"has \d+ of the \d+ numbers of weights model.embed_tokens.weight"):
        fill(state, alone, pieces(state_of(half, full, known), half))
