"""The plan of a weight transition against whole arrays: numpy cuts them as either engine does, knowing nothing of boxes."""

import functools
from collections import defaultdict

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core.errors import LayoutError, OptionError
from hfsdk.core.layout import Layout
from hfsdk.core.spec import ModelSpec
from hfsdk.resharding.boxes import padded_vocab
from hfsdk.resharding.reshard_plan import ReshardPlan

NUM_TRIPLES = 400
PAD = -1


# ---- the oracle: every element of the model is a number of its own


def whole(spec):
    """Every Hugging Face tensor, with numbers that occur once in the model."""
    found, at = {}, 0
    for name, shape in spec.tensors().items():
        found[name] = at + np.arange(np.prod(shape)).reshape(shape)
        at += int(np.prod(shape))
    return found


def padded(table, tp):
    rows = padded_vocab(len(table), tp)
    return np.concatenate([table, np.full((rows - len(table), table.shape[1]), PAD)])


def part(array, count, rank, axis=0):
    return np.split(array, count, axis=axis)[rank]


def taken_apart(spec, full):
    """The same numbers with queries, keys, values, gate and up-projection as tensors of their own, for models that fuse them."""
    found = dict(full)
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for i in range(spec.num_layers if spec.family == "phi3" else 0):
        p = f"model.layers.{i}."
        qkv = np.split(found.pop(p + "self_attn.qkv_proj.weight"), [query, query + kv])
        found |= {f"{p}self_attn.{x}_proj.weight": rows for x, rows in zip("qkv", qkv, strict=True)}
        halves = np.split(found.pop(p + "mlp.gate_up_proj.weight"), 2)
        found |= {f"{p}mlp.{x}_proj.weight": rows for x, rows in zip(("gate", "up"), halves, strict=True)}
    return found


def megatron_shard(spec, full, layout, at):
    """A rank's parameters as Megatron lays them out."""
    full = taken_apart(spec, full)
    tp, kv, ratio = layout.tp, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    layers = spec.num_layers // layout.pp
    found = {}
    if at.pp == 0:
        found["embedding.word_embeddings.weight"] = part(padded(full["model.embed_tokens.weight"], tp), tp, at.tp)
    for j in range(layers):
        hf_name, local = f"model.layers.{at.pp * layers + j}.", f"decoder.layers.{j}."
        for ending in ("weight", "bias") if spec.qkv_bias else ("weight",):
            q, k, v = (full[f"{hf_name}self_attn.{x}_proj.{ending}"] for x in "qkv")
            rest = q.shape[1:]
            groups = [x.reshape(kv, -1, *rest) for x in (q, k, v)]
            assert groups[0].shape[1] == ratio * spec.head_dim
            fused = np.concatenate(groups, axis=1).reshape(-1, *rest)
            found[f"{local}self_attention.linear_qkv.{ending}"] = part(fused, tp, at.tp)
        for x in "qk" if spec.qk_norm else "":
            found[f"{local}self_attention.{x}_layernorm.weight"] = full[f"{hf_name}self_attn.{x}_norm.weight"]
        if spec.attention_bias:
            found[local + "self_attention.linear_proj.bias"] = full[hf_name + "self_attn.o_proj.bias"]
        if spec.mlp_bias:
            gate, up = full[hf_name + "mlp.gate_proj.bias"], full[hf_name + "mlp.up_proj.bias"]
            found[local + "mlp.linear_fc1.bias"] = np.concatenate([part(gate, tp, at.tp), part(up, tp, at.tp)])
            found[local + "mlp.linear_fc2.bias"] = full[hf_name + "mlp.down_proj.bias"]
        gate, up = full[hf_name + "mlp.gate_proj.weight"], full[hf_name + "mlp.up_proj.weight"]
        found |= {
            local + "input_layernorm.weight": full[hf_name + "input_layernorm.weight"],
            local + "pre_mlp_layernorm.weight": full[hf_name + "post_attention_layernorm.weight"],
            local + "self_attention.linear_proj.weight": part(full[hf_name + "self_attn.o_proj.weight"], tp, at.tp, axis=1),
            local + "mlp.linear_fc1.weight": np.concatenate([part(gate, tp, at.tp), part(up, tp, at.tp)]),
            local + "mlp.linear_fc2.weight": part(full[hf_name + "mlp.down_proj.weight"], tp, at.tp, axis=1),
        }
    if at.pp == layout.pp - 1:
        found["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not (spec.tied_embeddings and layout.pp == 1):
            head = full["model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"]
            found["output_layer.weight"] = part(padded(head, tp), tp, at.tp)
    return found


def vllm_shard(spec, full, layout, at):
    """A rank's parameters as vLLM lays them out; stages hold equally many layers."""
    full = taken_apart(spec, full)
    tp, kv = layout.tp, min(layout.tp, spec.num_kv_heads)
    found, layers = {}, spec.num_layers // layout.pp
    last = at.pp == layout.pp - 1
    if at.pp == 0 or (last and spec.tied_embeddings):
        found["model.embed_tokens.weight"] = part(padded(full["model.embed_tokens.weight"], tp), tp, at.tp)
    for i in range(at.pp * layers, (at.pp + 1) * layers):
        p = f"model.layers.{i}."
        for ending in ("weight", "bias") if spec.qkv_bias else ("weight",):
            cuts = {"q": (tp, at.tp), "k": (kv, at.tp * kv // tp), "v": (kv, at.tp * kv // tp)}
            shards = [part(full[f"{p}self_attn.{x}_proj.{ending}"], *cuts[x]) for x in "qkv"]
            found[f"{p}self_attn.qkv_proj.{ending}"] = np.concatenate(shards)
        for x in "qk" if spec.qk_norm else "":
            found[f"{p}self_attn.{x}_norm.weight"] = full[f"{p}self_attn.{x}_norm.weight"]
        if spec.attention_bias:
            found[p + "self_attn.o_proj.bias"] = full[p + "self_attn.o_proj.bias"]
        if spec.mlp_bias:
            gate_up = [part(full[f"{p}mlp.{x}_proj.bias"], tp, at.tp) for x in ("gate", "up")]
            found[p + "mlp.gate_up_proj.bias"] = np.concatenate(gate_up)
            found[p + "mlp.down_proj.bias"] = full[p + "mlp.down_proj.bias"]
        gate_up = [part(full[f"{p}mlp.{x}_proj.weight"], tp, at.tp) for x in ("gate", "up")]
        found |= {name: full[name] for name in (p + "input_layernorm.weight", p + "post_attention_layernorm.weight")}
        found[p + "mlp.gate_up_proj.weight"] = np.concatenate(gate_up)
        for name in (p + "self_attn.o_proj.weight", p + "mlp.down_proj.weight"):
            found[name] = part(full[name], tp, at.tp, axis=1)
    if last:
        found["model.norm.weight"] = full["model.norm.weight"]
        if not spec.tied_embeddings:
            found["lm_head.weight"] = part(padded(full["lm_head.weight"], tp), tp, at.tp)
    return found


# ---- random models and layouts


def choose(rng, options):
    return options[int(rng.integers(len(options)))]


def random_spec(rng):
    kv, ratio, dim = choose(rng, [1, 2, 3, 4]), choose(rng, [1, 2, 3]), choose(rng, [2, 4])
    family = choose(rng, ["llama", "llama biased", "mistral", "phi3", "qwen2", "qwen3"])
    biased = [bool(x) for x in rng.integers(2, size=2)] if family == "llama biased" else [False, False]
    family = family.removesuffix(" biased")
    return ModelSpec(
        name=f"random {family}", family=family, num_layers=choose(rng, [1, 2, 4, 6]), hidden_size=choose(rng, [3, 8]),
        mlp_hidden_size=choose(rng, [12, 24]), num_heads=kv * ratio, num_kv_heads=kv, head_dim=dim,
        vocab_size=choose(rng, [7, 64, 65, 130, 200]), max_positions=16, tied_embeddings=bool(rng.integers(2)),
        attention_bias=biased[0], mlp_bias=biased[1],
    )  # fmt: skip


def fits(spec, tp, pp):
    try:
        Layout(tp=tp, pp=pp).check_model(spec)
    except LayoutError:
        return False
    return True


def random_case(seed):
    """(model, train, rollout, grouping, apart, nodes)"""
    rng = np.random.default_rng(seed)
    spec = random_spec(rng)
    fitting = [Layout(tp=tp, pp=pp) for tp in (1, 2, 3, 4, 6, 8) for pp in (1, 2, 3, 4) if fits(spec, tp, pp)]
    apart = rng.random() < 0.2
    while True:
        train, rollout = choose(rng, fitting), choose(rng, fitting)
        if rng.random() < 0.7:
            rollout = Layout(tp=rollout.tp)  # what vLLM runs here
        least = np.lcm(train.size, rollout.size)
        size = int(least * choose(rng, [1, 1, 2]))
        if size <= 24:
            break
    train, rollout = train.fill(size), rollout.fill(rollout.size if apart else size)
    return spec, train, rollout, choose(rng, ["strided", "strided", "vanilla"]), bool(apart), choose(rng, [None, 2, 4])


@functools.cache
def planned(seed):
    spec, train, rollout, grouping, apart, nodes = random_case(seed)
    return ReshardPlan.between(spec, train, rollout, grouping=grouping, apart=apart, nodes=nodes)


def shards(plan, full):
    before = {r: megatron_shard(plan.spec, full, plan.train, at) for r in range(plan.num_ranks) if (at := plan.train_at(r))}
    after = {r: vllm_shard(plan.spec, full, plan.rollout, at) for r in range(plan.num_ranks) if (at := plan.rollout_at(r))}
    return before, after


def carried_out(plan, sources, targets):
    """Fill arrays shaped like ``targets`` by the moves; nothing is written twice."""
    found = {rank: {name: np.full_like(array, PAD) for name, array in local.items()} for rank, local in targets.items()}
    received = defaultdict(int)
    for move in plan.moves:
        there = found[move.target][move.target_local][slices(move.target_start, move.size)]
        assert (there == PAD).all(), move
        there[...] = sources[move.source][move.source_local][slices(move.source_start, move.size)]
        received[move.source, move.target] += there.size
    return found, received


def slices(start, size):
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def elements(local):
    """The distinct numbers in a rank's parameters."""
    return set(np.concatenate([array.ravel() for array in local.values()]).tolist()) - {PAD}


# ---- the laws


@each("seed", range(NUM_TRIPLES))
def test_plans_against_whole_arrays(seed):
    """Exact cover; bytes are what a rank lacks and not one more; the inverse restores."""
    plan = planned(seed)
    full = whole(plan.spec)
    before, after = shards(plan, full)
    found, moved = carried_out(plan, before, after)
    for rank, local in after.items():
        for name, array in local.items():
            assert np.array_equal(found[rank][name], array), (seed, plan, rank, name)
    for (source, target), count in moved.items():
        assert plan.matrix[source, target] == 4 * count
    assert plan.matrix.sum() == 4 * sum(moved.values())
    for rank in range(plan.num_ranks):
        held, needed = elements(before.get(rank, {"": np.array([])})), elements(after.get(rank, {"": np.array([])}))
        assert plan.bytes_received(rank) == plan.bytes_missing(rank) == 4 * len(needed - held), (seed, plan, rank)
        assert plan.bytes_redundant(rank) == 4 * len(held - needed)
        assert plan.bytes_peak(rank) == 4 * len(held | needed)
        assert plan.bytes_copied(rank) == 4 * len(held & needed)
    back = plan.inverse()
    assert back.inverse() == plan
    restored, _ = carried_out(back, after, before)
    for rank, local in before.items():
        for name, array in local.items():
            assert np.array_equal(restored[rank][name], array), (seed, back, rank, name)
    for rank in range(plan.num_ranks):
        assert back.bytes_received(rank) == back.bytes_missing(rank) == plan.bytes_redundant(rank) or plan.apart


def test_the_triples_are_of_every_kind():
    plans = [planned(seed) for seed in range(NUM_TRIPLES)]
    assert len({(repr(p.spec), p.train, p.rollout, p.grouping, p.apart) for p in plans}) >= 300
    kinds = {
        "qwen2": sum(p.spec.family == "qwen2" for p in plans), "qwen3": sum(p.spec.qk_norm for p in plans),
        "bias of attention alone": sum(p.spec.attention_bias and not p.spec.mlp_bias for p in plans),
        "bias of the MLP alone": sum(p.spec.mlp_bias and not p.spec.attention_bias for p in plans),
        "fused files": sum(p.spec.family == "phi3" for p in plans),
        "tied, stages": sum(p.spec.tied_embeddings and p.train.pp > 1 for p in plans),
        "kv heads < tp": sum(p.spec.num_kv_heads < max(p.train.tp, p.rollout.tp) for p in plans),
        "rollout wider": sum(p.rollout.tp > p.train.tp for p in plans), "rollout stages": sum(p.rollout.pp > 1 for p in plans),
        "paddings differ": sum(padded_vocab(p.spec.vocab_size, p.train.tp) != padded_vocab(p.spec.vocab_size, p.rollout.tp)
                               for p in plans),
        "vanilla": sum(p.grouping == "vanilla" for p in plans), "apart": sum(p.apart for p in plans),
        "nested": sum(nested(p) for p in plans),
    }  # fmt: skip
    assert min(kinds.values()) >= 8, kinds


def nested(plan):
    """Where a training shard must lie inside the rollout shard (DESIGN section 6)."""
    spec, tp = plan.spec, plan.train.tp
    same_rows = padded_vocab(spec.vocab_size, tp) == padded_vocab(spec.vocab_size, plan.rollout.tp)
    return plan.grouping == "strided" and plan.nests and spec.num_kv_heads % tp == 0 and same_rows


@each("seed", range(NUM_TRIPLES))
def test_nested_shards_leave_nothing_over_and_move_what_the_formula_says(seed):
    """HybridFlow's volume, over what it assumes: matrices that t and p cut evenly, so those of the layers."""
    plan = planned(seed)
    if not nested(plan):
        return
    assert all(plan.bytes_redundant(rank) == 0 for rank in range(plan.num_ranks))
    shapes = {name: shape for name, shape in plan.spec.tensors().items() if len(shape) == 2 and ".layers." in name}
    received = defaultdict(int)
    for move in plan.moves:
        if move.tensor in shapes and move.source != move.target:
            received[move.target] += 4 * move.numel
    m = 4 * sum(np.prod(shape) for shape in shapes.values())
    tp, small = plan.train.tp * plan.train.pp, plan.rollout.tp * plan.rollout.pp
    assert [received[rank] for rank in range(plan.num_ranks)] == [m * (tp - small) / (small * tp)] * plan.num_ranks


@each("seed", range(0, NUM_TRIPLES, 7))
def test_layouts_are_grids_and_vllms_groups_are_consecutive(seed):
    plan = planned(seed)
    for at, layout in ((plan.train_at, plan.train), (plan.rollout_at, plan.rollout)):
        places = [place for rank in range(plan.num_ranks) if (place := at(rank)) is not None]
        wanted = {(t, p, d) for t in range(layout.tp) for p in range(layout.pp) for d in range(layout.dp)}
        assert sorted((c.tp, c.pp, c.dp) for c in places) == sorted(wanted)
    offset = plan.train.size if plan.apart else 0
    for rank in range(offset, plan.num_ranks):
        assert plan.rollout_at(rank).tp == (rank - offset) % plan.rollout.tp


def test_megatrons_own_planner_agrees_on_every_element():
    """megatron.core.resharding plans one parameter of one model to another of its own; these lie alike in vLLM."""
    planner = pytest.importorskip("megatron.core.resharding.planner")
    from megatron.core.resharding.utils import ParameterMetadata

    parameters = {"self_attention.linear_proj.weight": (1, 1), "mlp.linear_fc2.weight": (1, 1), "mlp.linear_fc1.weight": (0, 2)}
    names = {"self_attention.linear_proj.weight": "self_attn.o_proj.weight", "mlp.linear_fc2.weight": "mlp.down_proj.weight",
             "mlp.linear_fc1.weight": "mlp.gate_up_proj.weight"}  # fmt: skip
    compared = 0
    for seed in range(0, NUM_TRIPLES, 4):
        plan = planned(seed)
        if plan.train.pp > 1 or plan.rollout.pp > 1:
            continue
        full = whole(plan.spec)
        held, needed = (cut(plan.spec, full, layout, hf.Layout(tp=layout.tp, dp=1).coordinates(0))
                        for cut, layout in ((megatron_shard, plan.train), (vllm_shard, plan.rollout)))  # fmt: skip
        for local, (dim, stride) in parameters.items():
            source, target = "decoder.layers.0." + local, "model.layers.0." + names[local]

            def described(array, layout, name, dim=dim, stride=stride):
                return ParameterMetadata(
                    name=name, shape=array.shape, dtype=None, element_size=4, is_tp=True, partition_dim=dim,
                    partition_stride=stride, tensor_parallel_group_ranks=list(range(layout.tp)),
                )  # fmt: skip

            ways = described(held[source], plan.train, source), described(needed[target], plan.rollout, target)
            for rank in range(plan.num_ranks):
                at = plan.rollout_at(rank)
                if at is None:
                    continue
                theirs = planner._determine_source_ranks_for_dst_param("", *ways, at.tp)
                expected = by_element((from_rank, s[dim].start, d[dim].start, d[dim].stop - d[dim].start)
                                      for from_rank, s, d in theirs)  # fmt: skip
                mine = [m for m in plan.moves if (m.target, m.target_local, m.source_local) == (rank, target, source)]
                found = by_element(
                    (plan.train_at(m.source).tp, m.source_start[dim], m.target_start[dim], m.size[dim]) for m in mine
                )
                assert found == expected, (seed, plan, local)
                compared += 1
    assert compared > 200


def by_element(pieces):
    return {to + i: (rank, at + i) for rank, at, to, count in pieces for i in range(count)}


# ---- the paper's numbers


def test_the_papers_example_of_eight_ranks():
    """Figure 8: training 1-4-2, generation 1-2-2-2; vanilla groups leave four ranks with nothing of what they need."""
    spec = ModelSpec(
        name="even", num_layers=4, hidden_size=64, mlp_hidden_size=128, num_heads=8, num_kv_heads=8, head_dim=8, vocab_size=256,
        max_positions=16,
    )  # fmt: skip
    vanilla = ReshardPlan.between(spec, "tp4 dp2", "tp2 dp4", grouping="vanilla")
    strided = ReshardPlan.between(spec, "tp4 dp2", "tp2 dp4")
    norms = 4 * (2 * spec.num_layers + 1) * spec.hidden_size
    quarter = (4 * spec.num_parameters() - norms) // 4
    assert [vanilla.bytes_redundant(rank) for rank in range(8)] == [quarter * (rank in (1, 2, 5, 6)) for rank in range(8)]
    assert [strided.bytes_redundant(rank) for rank in range(8)] == [0] * 8
    assert [strided.bytes_received(rank) for rank in range(8)] == [quarter] * 8
    twice = (1, 2, 5, 6)
    assert [vanilla.bytes_received(rank) for rank in range(8)] == [quarter * (1 + (rank in twice)) for rank in range(8)]


@each(
    "model, train, rollout, received, peak",
    [
        ("llama-7b", "tp8 dp2", "tp2 dp8", 0.375, 1 / 2), ("llama-13b", "tp8 dp2", "tp4 dp4", 0.125, 1 / 4),
        ("llama-34b", "tp8 pp4 dp2", "tp8 dp8", 0.09375, 1 / 8), ("llama-70b", "tp8 pp8 dp2", "tp8 dp16", 0.109375, 1 / 8),
    ],
)  # fmt: skip
def test_the_settings_of_figure_14(model, train, rollout, received, peak):
    """Shares of the model by table 2; counted, with norms, embedding and head where they lie, within a percent of the whole."""
    spec = ModelSpec.preset(model)
    plan = ReshardPlan.between(spec, train, rollout, "bf16", nodes=8)
    m = 2 * spec.num_parameters()
    rows = {row.name: row for row in plan.volumes()}
    assert rows["HybridFlow"].received == pytest.approx(received * m)
    assert rows["HybridFlow"].peak == pytest.approx(peak * m)
    assert rows["planned"].received == rows["lower bound"].received == pytest.approx(received * m, abs=0.005 * m)
    assert rows["planned, mean"].received == pytest.approx(received * m, abs=0.005 * m)
    assert rows["planned"].redundant == 0
    assert rows["HybridFlow-V"].received > 2 * rows["planned"].received
    sent = [plan.bytes_sent(rank) for rank in range(plan.num_ranks)]
    assert max(sent) <= 1.1 * np.mean(sent)


def test_seventy_billion_parameters_on_128_ranks_take_no_time():
    """Counted, not timed: layers that lie alike are planned once."""
    plan = ReshardPlan.between(ModelSpec.preset("llama-70b"), "tp8 pp8 dp2", "tp8 dp16", "bf16", nodes=8)
    assert sum(len(section.moves) for section in plan.sections) < 10_000
    assert [section.count for section in plan.sections] == [1] + [10] * 8
    table = plan.to_pandas()
    assert len(table) == 128
    assert (table["received_bytes"] == table["missing_bytes"]).all()
    assert (table["received_same_node_bytes"] + table["received_network_bytes"] == table["received_bytes"]).all()
    assert sum(plan.bytes_by_link().values()) == plan.matrix.sum() == table["needed_bytes"].sum()


def test_the_same_node_is_asked_first():
    spec = ModelSpec.preset("llama-7b")
    near = ReshardPlan.between(spec, "tp4 dp2", "tp1", nodes=4)
    assert near.bytes_by_link()["network"] == 0
    spread = ReshardPlan.between(spec, "tp4 dp2", "tp1", nodes=[0, 1] * 4)
    assert spread.bytes_by_link()["network"] > 0
    assert near.bytes_by_link()["same rank"] == spread.bytes_by_link()["same rank"]


# ---- what may be one


def test_parameters_that_lie_alike_may_be_shared():
    spec = ModelSpec(
        name="shared", num_layers=2, hidden_size=8, mlp_hidden_size=12, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=64,
        max_positions=16,
    )  # fmt: skip
    plan = ReshardPlan.between(spec, "tp2", "tp2")
    everything = set(megatron_shard(spec, whole(spec), plan.train, plan.train_at(0)))
    assert set(plan.shared(0).values()) == everything  # also the fused qkv: one kv head a rank
    wide = ReshardPlan.between(spec, "tp1", "tp1")
    apart = set(megatron_shard(spec, whole(spec), wide.train, wide.train_at(0))) - set(wide.shared(0).values())
    assert apart == {f"decoder.layers.{i}.self_attention.linear_qkv.weight" for i in (0, 1)}  # k0 v0 between the queries
    cut = ReshardPlan.between(spec, "tp2", "tp1")
    assert all("norm" in name for name in cut.shared(0))
    for seed in range(0, NUM_TRIPLES, 3):
        plan = planned(seed)
        if plan.rollout.pp > 1 or plan.apart:
            continue
        before, after = shards(plan, whole(plan.spec))
        for rank in range(plan.num_ranks):
            pairs = plan.shared(rank)
            for target, source in pairs.items():
                assert np.array_equal(after[rank][target], before[rank][source])
            full_of = {t: a for t, a in after[rank].items() if (a != PAD).any()}  # a rank may have nothing but padding
            equal = {t for t, a in full_of.items() for b in before[rank].values() if a.shape == b.shape and (a == b).all()}
            assert equal == set(pairs), (seed, plan)


# ---- bad input


def test_what_cannot_be_planned_is_said():
    spec = ModelSpec.preset("llama-7b")
    with refuses(LayoutError, "'tp4 pp1 dp2'", "8 ranks", "4;", "apart=True"):
        ReshardPlan.between(spec, "tp4 dp2", "tp2 dp2")
    with refuses(LayoutError, "tp=5"):
        ReshardPlan.between(spec, "tp5", "tp1")
    with refuses(OptionError, "4 ranks", "nodes", "3"):
        ReshardPlan.between(spec, "tp4", "tp2", nodes=[0, 0, 1])


@each(
    "given, named",
    [
        ({"spec": "tiny"}, ["spec", "hf.ModelSpec", "'tiny'"]), ({"spec": None}, ["spec", "hf.ModelSpec", "None"]),
        ({"train": 2}, ["train=2"]), ({"train": None}, ["train=None"]), ({"dtype": ["fp32"]}, ["dtype", "fp32"]),
        ({"dtype": "fp8"}, ["'fp8'"]), ({"grouping": "zigzag"}, ["'zigzag'"]),
        *(({"nodes": nodes}, ["nodes must be"]) for nodes in (1.5, True, 0, "ab", [None] * 4, [1.5] * 4, [-1] * 4, {0})),
    ],
)  # fmt: skip
def test_what_is_given_of_another_kind_is_refused_by_its_name(given, named):
    plain = {"spec": ModelSpec.preset("llama-7b"), "train": "tp4", "rollout": "tp2"}
    with refuses(OptionError, *named):
        ReshardPlan.between(**plain | given)


def test_a_plan_is_asked_for_ranks_and_tensors_that_it_has():
    plan = ReshardPlan.between(ModelSpec.preset("llama-7b"), "tp4", "tp2")
    for look in (plan.bytes_held, plan.bytes_sent, plan.train_at, plan.rollout_at, plan.shared, plan.bytes_peak):
        for rank in (-1, 4):
            with refuses(OptionError, "ranks 0 to 3", rank):
                look(rank)
    for tensor in (3, None):
        with refuses(OptionError, f"tensor={tensor}"):
            plan.pieces(tensor)
    with refuses(OptionError, "'layers.0.q'", "near it"):
        plan.pieces("layers.0.q")


@each("rollout", ["tp2 pp2 dp2", "tp1 pp2 dp4", "tp4 pp2", "tp1 pp4 dp2", "tp2 dp4"])
@each("train", ["tp2 pp2 dp2", "tp1 pp4 dp2", "tp4 dp2", "tp2 pp4"])
@each("grouping", ["strided", "vanilla"])
def test_the_ranks_of_a_rollout_fill_its_layout(train, rollout, grouping):
    """Each place of the rollout's mesh is one rank's, pipelined rollouts included."""
    train, rollout = Layout.parse(train).fill(8), Layout.parse(rollout).fill(8)
    plan = ReshardPlan.between(ModelSpec.preset("llama-7b"), train, rollout, grouping=grouping)
    places = [plan.rollout_at(rank) for rank in range(8)]
    every = {(tp, pp, dp) for tp in range(rollout.tp) for pp in range(rollout.pp) for dp in range(rollout.dp)}
    assert {(at.tp, at.pp, at.dp) for at in places} == every
