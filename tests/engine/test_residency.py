"""Which weights are on a rank while it trains and while it generates, over real processes; the census proves it from storages."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from spawn import run
from test_transport import QWEN2, SPEC, TIED, at, local_tensors, train_shard, weights

from hfsdk.core.layout import Layout
from hfsdk.engine.weights import transport
from hfsdk.engine.weights.residency import Residency
from hfsdk.resharding.boxes import padded_vocab, vllm_boxes, without
from hfsdk.resharding.reshard_plan import ReshardPlan

PAIRS = [(train, f"tp{tp}") for train in ("tp4", "pp4", "dp4", "tp2 pp2", "tp2 dp2", "pp2 dp2") for tp in (1, 2, 4)]
"""Every executable pair on four ranks."""


def own_storages(tensors):
    """Padding rows are zero, as both engines have them."""
    return {name: tensor.nan_to_num(0).clone() for name, tensor in tensors.items()}


def on_one_storage(tensors):
    """As the distributed optimizer lays out parameters: views of one buffer."""
    flat = torch.zeros(sum(t.numel() for t in tensors.values()))
    views, first = {}, 0
    for name, tensor in tensors.items():
        views[name] = flat[first : first + tensor.numel()].view(tensor.shape)
        views[name].copy_(tensor.nan_to_num(0))
        first += tensor.numel()
    return views


def way(rank, spec, train, rollout, lay_out):
    layout, tp = Layout.parse(train).fill(4), Layout.parse(rollout).tp
    plan = ReshardPlan.between(spec, layout, rollout)
    trainer = lay_out(train_shard(spec, layout, tp, rank, weights(spec)))
    kept = {name: tensor.clone() for name, tensor in trainer.items()}
    wanted = local_tensors(vllm_boxes(spec, tp, rank % tp), spec, tp)
    parameters = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in wanted.items()}
    residency = Residency(plan, rank, trainer, parameters)
    table = [residency.census()]
    full = weights(spec)
    for _ in range(2):
        for tensor in (*trainer.values(), *kept.values(), *full.values()):  # an update, in place
            tensor.mul_(2)
        report = residency.to_rollout(dist.group.WORLD)
        table.append(residency.census())
        assert report.bytes_received == plan.bytes_received(rank)
        assert report.bytes_copied + report.bytes_shared == plan.bytes_copied(rank)
        for box in vllm_boxes(spec, tp, rank % tp):
            part = parameters[box.local].data[at(box.local_start, box.size)]
            assert torch.equal(part, full[box.tensor][at(box.start, box.size)]), box
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in parameters:
                rows = max(0, spec.vocab_size - rank % tp * len(parameters[name]))
                assert not parameters[name].data[rows:].any(), "padding"
        residency.to_training()
        table.append(residency.census())
        for name, tensor in kept.items():
            assert torch.equal(trainer[name], tensor), name
    planned = plan.bytes_held(rank), plan.bytes_needed(rank), plan.bytes_peak(rank)
    return table, planned, sum(t.nbytes for t in kept.values()), sum(t.nbytes for t in wanted.values())


def four_ranks(rank, world_size):
    found = {}
    for spec in (SPEC, TIED, QWEN2):
        for train, rollout in PAIRS if spec is TIED else PAIRS[::2]:
            for lay_out in (own_storages, on_one_storage):
                if lay_out is own_storages or "dp" in train:
                    found[spec.name, train, rollout, lay_out.__name__] = way(rank, spec, train, rollout, lay_out)
    return found


@pytest.fixture(scope="module")
def found():
    return run(four_ranks, 4)


def test_nothing_is_there_twice_and_nothing_is_missing(found):
    """While training the shard and nothing else; while generating the rollout's, and what it leaves over of the shard."""
    for rank in found:
        for key, (table, (held, needed, peak), trainer_bytes, rollout_bytes) in rank.items():
            padding_held, padding_needed = trainer_bytes - held, rollout_bytes - needed
            for moment in table:
                assert moment.redundant == 0, key
                if moment.moment == "training":
                    assert moment.total == held + padding_held, key
                    assert moment.rollout == moment.aside == 0
                else:
                    assert moment.total == peak + padding_needed, key
                    assert moment.trainer == 0, key
                    assert moment.aside == peak - needed
            assert [moment.moment for moment in table] == ["training", *["generating", "training"] * 2]


def test_what_lies_alike_is_shared(found):
    for rank in found:
        table, *_ = rank["tied", "tp2 dp2", "tp2", "own_storages"]
        assert table[1].shared > table[1].rollout, "all but the fused qkv"
        table, *_ = rank["tied", "tp2 dp2", "tp2", "on_one_storage"]
        assert table[1].shared == 0, "a buffer is emptied as a whole"
        table, *_ = rank["tied", "pp4", "tp4", "own_storages"]
        assert table[1].aside > 0, "a stage has more of its layers than a quarter"


def test_the_census_finds_what_is_there_twice():
    plan = ReshardPlan.between(SPEC, "tp1", "tp1")
    trainer = own_storages(train_shard(SPEC, plan.train, 1, 0, weights(SPEC)))
    wanted = local_tensors(vllm_boxes(SPEC, 1, 0), SPEC, 1)
    parameters = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in wanted.items()}
    residency = Residency(plan, 0, trainer, parameters)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    residency._rollout[name].untyped_storage().resize_(wanted[name].nbytes)
    assert residency.census().redundant == residency.census().rollout == parameters[name].nbytes
    kept = trainer["decoder.layers.1.self_attention.linear_qkv.weight"]
    residency._trainer["decoder.layers.1.self_attention.linear_qkv.weight"] = hollow = torch.empty_like(kept)
    hollow.untyped_storage().resize_(0)
    assert residency.census().redundant == 0
    residency._aside.append(("decoder.layers.1.self_attention.linear_qkv.weight", at((32, 0), (96, 64)), kept[32:128].clone()))
    assert residency.census().redundant == 4 * 96 * 64, "kept aside and in the rollout"
    residency._aside.clear()
    residency._trainer["decoder.layers.1.self_attention.linear_qkv.weight"] = kept
    other = replace(plan, dtype="bf16")
    residency._rollout[name] = residency._rollout[name].to(torch.bfloat16)
    assert residency.census().redundant == 0, "another dtype is another number"
    assert other.bytes_needed(0) * 2 == plan.bytes_needed(0)


def test_boxes_with_holes():
    left = without((0, 0), (4, 4), [((1, 1), (2, 2))])
    grid = torch.zeros(4, 4)
    for start, size in left:
        grid[at(start, size)] += 1
    assert grid.tolist() == [[1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]]
    assert without((2, 0), (2, 3), [((0, 0), (2, 3))]) == [((2, 0), (2, 3))]
    assert without((2,), (4,), [((2,), (1,)), ((3,), (3,))]) == []


def test_memory_that_numpy_saw_is_given_up_too():
    """torch does not free what numpy may still read; the weights then move to another storage."""
    plan = ReshardPlan.between(SPEC, "tp1", "tp1")
    trainer = own_storages(train_shard(SPEC, plan.train, 1, 0, weights(SPEC)))
    kept = {name: tensor.clone() for name, tensor in trainer.items()}
    seen = {name: tensor.numpy() for name, tensor in trainer.items()}
    wanted = local_tensors(vllm_boxes(SPEC, 1, 0), SPEC, 1)
    residency = Residency(plan, 0, trainer, {name: torch.nn.Parameter(t, requires_grad=False) for name, t in wanted.items()})
    for _ in range(2):
        residency.to_rollout(None)
        assert (residency.census().trainer, residency.census().redundant) == (0, 0)
        residency.to_training()
        assert residency.census().rollout == 0
        for name, tensor in kept.items():
            assert torch.equal(trainer[name], tensor)
            assert np.array_equal(seen[name], tensor.numpy()), "what the user took is as it was"


def test_a_transition_that_fails_half_way_is_taken_back(monkeypatch):
    plan = ReshardPlan.between(SPEC, "tp1", "tp1")
    trainer = own_storages(train_shard(SPEC, plan.train, 1, 0, weights(SPEC)))
    kept = {name: tensor.clone() for name, tensor in trainer.items()}
    wanted = local_tensors(vllm_boxes(SPEC, 1, 0), SPEC, 1)
    residency = Residency(plan, 0, trainer, {name: torch.nn.Parameter(t, requires_grad=False) for name, t in wanted.items()})
    monkeypatch.setitem(transport.BUCKET_BYTES, "cpu", 20_000)
    for after in (1, 2, 4):
        given_up = []
        give_up = residency._give_up

        def fails(names, given_up=given_up, give_up=give_up, after=after):
            give_up(names)
            given_up.append(names)
            if len(given_up) == after:
                raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(residency, "_give_up", fails)
            with pytest.raises(MemoryError):
                residency.to_rollout(None)
        assert not residency.generating
        assert residency.census().moment == "training"
        assert (residency.census().rollout, residency.census().aside) == (0, 0)
        for name, tensor in kept.items():
            assert torch.equal(trainer[name], tensor), name
    residency.to_rollout(None)
    assert residency.census().redundant == 0


def few_tokens(rank, world_size):
    """A vocabulary so small that the last rank has nothing but padding of it."""
    spec = replace(SPEC, name="few", vocab_size=20)
    for rollout in ("tp4", "tp2"):
        table, *_ = way(rank, spec, "tp4", rollout, own_storages)
        assert all(moment.redundant == 0 for moment in table)
    layout = Layout.parse("tp4").fill(4)
    plan = ReshardPlan.between(spec, layout, "tp4")
    trainer = own_storages(train_shard(spec, layout, 4, rank, weights(spec)))
    trainer = {name: trainer.get(name, torch.zeros(16, 64)) for name in (*trainer, "embedding.word_embeddings.weight")}
    rows = padded_vocab(20, 4) // 4
    wanted = local_tensors(vllm_boxes(spec, 4, rank), spec, 4)
    wanted |= {name: torch.ones(rows, 64) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    parameters = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in wanted.items()}
    residency = Residency(plan, rank, trainer, parameters)
    residency.to_rollout(dist.group.WORLD)
    full = {name: parameter.untyped_storage().nbytes() > 0 for name, parameter in parameters.items()}
    zero = rank < 2 or not parameters["lm_head.weight"].any()
    residency.to_training()
    return all(full.values()), bool(zero)


def test_tables_of_padding_alone_are_there_too():
    assert run(few_tokens, 4) == [(True, True)] * 4
