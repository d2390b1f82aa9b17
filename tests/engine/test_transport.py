import functools
import itertools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from expect import refuses
from rows import every_row
from spawn import run

from hfsdk.core.layout import Layout
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.weights import transport, transport_rounds
from hfsdk.resharding.boxes import megatron_boxes, padded_vocab, vllm_boxes
from hfsdk.resharding.reshard_plan import ReshardPlan

SPEC = ModelSpec(
    name="four-layers", num_layers=4, hidden_size=64, mlp_hidden_size=96, num_heads=8, num_kv_heads=4, head_dim=32,
    vocab_size=260, max_positions=128,
)  # fmt: skip
TIED = replace(SPEC, name="tied", tied_embeddings=True)
QWEN2 = replace(SPEC, name="qwen2", family="qwen2", num_kv_heads=2)
QWEN3 = replace(TIED, name="qwen3", family="qwen3", num_kv_heads=2)
SMALL = replace(SPEC, name="small", num_layers=1, mlp_hidden_size=8, vocab_size=10)

LAYOUTS = [
    ("tp1 dp4", "tp1"), ("tp1 dp4", "tp2"), ("tp2 dp2", "tp1"), ("tp2 dp2", "tp2"), ("tp2 dp2", "tp4"), ("tp4", "tp1"),
    ("tp4", "tp2"), ("tp4", "tp4"), ("tp2 pp2", "tp2"), ("pp2 dp2", "tp4"), ("pp4", "tp1"), ("tp1 dp4", "tp4"),
]  # fmt: skip


def weights(spec):
    g = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=g) for name, shape in spec.tensors().items()}


def at(start, size):
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def local_tensors(boxes, spec, tp, fill=float("nan")):
    """Empty local tensors in the shapes that the boxes need; tables with their padding rows."""
    ends = {}
    for box in boxes:
        end = tuple(a + n for a, n in zip(box.local_start, box.size, strict=True))
        ends[box.local] = tuple(map(max, end, ends.get(box.local, end)))
    for name in ends:
        if "embed" in name or name in ("output_layer.weight", "lm_head.weight"):
            ends[name] = (padded_vocab(spec.vocab_size, tp) // tp, spec.hidden_size)
    return {name: torch.full(end, fill) for name, end in ends.items()}


def train_shard(spec, layout, rollout_tp, rank, full):
    where = layout.mesh(rollout_tp).coordinates(rank)
    boxes = megatron_boxes(spec, layout, where.tp, where.pp)
    tensors = local_tensors(boxes, spec, layout.tp)
    for box in boxes:
        tensors[box.local][at(box.local_start, box.size)] = full[box.tensor][at(box.start, box.size)]
    return tensors


def check_targets(spec, tp, tp_rank, targets, full):
    """Every planned element has arrived, and nothing was written elsewhere."""
    for box in vllm_boxes(spec, tp, tp_rank):
        part = targets[box.local][at(box.local_start, box.size)]
        assert torch.equal(part, full[box.tensor][at(box.start, box.size)].to(part.dtype)), box
        part.fill_(float("nan"))
    assert all(tensor.isnan().all() for tensor in targets.values())


def exchange(rank, spec, train, rollout, dtype="fp32", **options):
    layout, tp = Layout.parse(train).fill(4), Layout.parse(rollout).tp
    plan = ReshardPlan.between(spec, layout, rollout, dtype)
    full = weights(spec)
    sources = train_shard(spec, layout, tp, rank, full)
    cast = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    targets = local_tensors(vllm_boxes(spec, tp, rank % tp), spec, tp)
    targets = {name: tensor.to(cast) for name, tensor in targets.items()}
    report = transport.execute(plan, rank, sources, targets, dist.group.WORLD, **options)
    check_targets(spec, tp, rank % tp, targets, full)
    matrix = plan.bytes_matrix()
    assert report.bytes_received == plan.bytes_received(rank) == sum(row[rank] for row in matrix) - matrix[rank][rank]
    assert report.bytes_sent == sum(matrix[rank]) - matrix[rank][rank]
    assert report.bytes_copied == matrix[rank][rank]
    return report


def four_ranks(rank, world_size):
    reports = {}
    for spec in (SPEC, TIED):
        for train, rollout in LAYOUTS:
            reports[spec.name, train, rollout] = exchange(rank, spec, train, rollout)
    for spec in (QWEN2, QWEN3):
        for train, rollout in (("tp2 dp2", "tp4"), ("tp4", "tp1"), ("tp4", "tp2"), ("tp2 pp2", "tp2")):
            reports[spec.name, train, rollout] = exchange(rank, spec, train, rollout)
    for train, rollout in (("tp2 dp2", "tp1"), ("tp4", "tp2"), ("tp2 pp2", "tp2"), ("tp1 dp4", "tp4")):
        there_and_back(rank, TIED, train, rollout)
    exchange(rank, SPEC, "tp2 dp2", "tp1", bucket_bytes=10_000)  # rows are 256 or 192 bytes
    exchange(rank, SMALL, "tp2 dp2", "tp1", bucket_bytes=1)  # smaller than one row
    half = exchange(rank, SPEC, "tp4", "tp1", dtype="bf16")
    assert half.bytes_received * 2 == reports[SPEC.name, "tp4", "tp1"].bytes_received
    repeated(rank)
    misfits(rank)
    return {key: (r.bytes_sent, r.bytes_received, r.bytes_copied) for key, r in reports.items()}


def there_and_back(rank, spec, train, rollout):
    """The inverse plan restores the training shard, bit for bit; what lies alike is shared and not copied."""
    layout, tp = Layout.parse(train).fill(4), Layout.parse(rollout).tp
    plan = ReshardPlan.between(spec, layout, rollout)
    sources = train_shard(spec, layout, tp, rank, weights(spec))
    targets = local_tensors(vllm_boxes(spec, tp, rank % tp), spec, tp)
    shared = plan.shared(rank)
    targets |= {target: sources[source] for target, source in shared.items()}
    report = transport.execute(plan, rank, sources, targets, None, shared=shared)
    assert report.bytes_copied + report.bytes_shared == plan.bytes_copied(rank)
    assert report.bytes_shared > 0
    assert report.received_from == tuple(plan.matrix[:, rank] * (np.arange(4) != rank))
    restored = {name: torch.full_like(tensor, float("nan")) for name, tensor in sources.items()}
    back = transport.execute(plan.inverse(), rank, targets, restored, None)
    assert back.bytes_received == plan.bytes_redundant(rank)
    for name, tensor in sources.items():
        same = torch.where(tensor.isnan(), restored[name].isnan(), restored[name] == tensor)  # padding holds nothing
        assert same.all(), name


def repeated(rank):
    """The second transition through one plan uses the schedule of the first; a plan takes its schedules with it."""
    plan = ReshardPlan.between(SPEC, "tp2 dp2", "tp1")
    full = weights(SPEC)
    sources = train_shard(SPEC, plan.train, 1, rank, full)
    targets = local_tensors(vllm_boxes(SPEC, 1, 0), SPEC, 1)
    for factor in (1.0, 2.0):
        for tensor in sources.values():
            tensor.mul_(factor)
        before = len(transport_rounds._schedules)
        transport.execute(plan, rank, sources, targets, None)
        assert len(transport_rounds._schedules) - before == (factor == 1.0)
    check_targets(SPEC, 1, 0, targets, {name: 2 * tensor for name, tensor in full.items()})
    del plan
    assert len(transport_rounds._schedules) == before - 1


def misfits(rank):
    plan = ReshardPlan.between(SPEC, "tp4", "tp4", "bf16")
    sources = train_shard(SPEC, plan.train, 4, rank, weights(SPEC))
    targets = local_tensors(vllm_boxes(SPEC, 4, rank), SPEC, 4)
    with refuses(RuntimeError, "torch.float32", "torch.bfloat16"):
        transport.execute(plan, rank, sources, targets, None)
    wider = ReshardPlan.between(replace(SPEC, hidden_size=128), "tp4", "tp4")
    deeper = ReshardPlan.between(replace(SPEC, num_layers=5), "tp4", "tp4")
    fitting = {name: tensor.float() for name, tensor in targets.items()}
    for plan, words in ((wider, r"it needs \("), (deeper, r"there is no source decoder\.layers\.4")):
        with pytest.raises(RuntimeError, match=rf"the plan is of another model .*{words}"):
            transport.execute(plan, rank, sources, fitting, None)
    short = ReshardPlan.between(SPEC, "tp4", "tp1")
    wide = local_tensors(vllm_boxes(SPEC, 1, 0), SPEC, 1)
    wrong = functools.partial(transport.execute, short, rank, sources, wide, None)
    short.__dict__["bytes_received"] = lambda rank: 12
    with refuses(RuntimeError, "the plan says 12"):
        wrong()


def test_every_layout_moves_the_planned_bytes_and_nothing_else():
    results = run(four_ranks, 4)
    for key in results[0]:
        sent, received, _ = zip(*(result[key] for result in results), strict=True)
        assert sum(sent) == sum(received), key
    assert all(result["four-layers", "tp2 dp2", "tp2"][1] == 0 for result in results)  # same shards: nothing travels


def test_rounds_stay_within_their_bucket():
    plan = ReshardPlan.between(SPEC, "tp2 dp2", "tp1")
    for rank in range(4):
        schedule = transport_rounds._make_schedule(plan, rank, 32_768)
        sizes = [sum(4 * m.numel for m in [*step.sends, *step.receives]) for step in schedule.rounds]
        assert max(a + b for a, b in pairwise(sizes)) <= 32_768, "two rounds are under way"
        received = sum(4 * message.numel for step in schedule.rounds for message in step.receives)
        assert received == schedule.bytes_received > 32_768


def test_large_pieces_are_messages_of_their_own():
    wide = replace(SPEC, hidden_size=256, mlp_hidden_size=512)
    schedule = transport_rounds._make_schedule(ReshardPlan.between(wide, "tp4", "tp1"), 0, 2**20)
    messages = [message for step in schedule.rounds for message in step.sends]
    for message in messages:
        large = [piece for piece in message.pieces if 4 * (piece.last - piece.first) >= transport_rounds.OWN_MESSAGE_BYTES]
        assert not large or len(message.pieces) == 1
    assert any(len(message.pieces) > 1 for message in messages)
    assert any(4 * message.numel >= transport_rounds.OWN_MESSAGE_BYTES for message in messages)
    for peer in (1, 2, 3):
        tags = [message.tag for message in messages if message.peer == peer]
        assert tags == list(range(len(tags)))


def test_targets_begin_and_sources_end_as_late_and_early_as_can_be():
    """Every target begins before anything is written to it, every source is done with after its last reading, once."""
    with every_row() as row:
        for inverse, train in itertools.product([False, True], ["tp2 dp2", "tp4", "tp2 pp2", "pp2 dp2"]):
            with row(inverse, train):
                check_targets_begin_and_sources_end_as_late_and_early_as_can_be(train, inverse)


def check_targets_begin_and_sources_end_as_late_and_early_as_can_be(train, inverse):
    plan = ReshardPlan.between(TIED, train, "tp2")
    plan = plan.inverse() if inverse else plan
    for rank in range(4):
        rounds = transport_rounds._make_schedule(plan, rank, 65_536).rounds
        begun, done = [], []
        for step in rounds:
            begun += step.begun
            reads = {p.local for m in step.sends for p in m.pieces} | {c.source for c in step.copies}
            writes = {p.local for m in step.receives for p in m.pieces} | {c.target for c in step.copies}
            assert writes <= set(begun)
            assert not reads & set(done)
            done += step.done
        assert sorted(begun) == sorted(set(begun)) == sorted({m.target_local for m in plan.moves if m.target == rank})
        assert sorted(done) == sorted(set(done)) == sorted({m.source_local for m in plan.moves if m.source == rank})
        assert len({i for i, step in enumerate(rounds) if step.done}) > 1, "not all at the end"
