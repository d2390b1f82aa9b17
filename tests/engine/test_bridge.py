"""Weights on their way to a shadow, without processes: every rank's objects, cut by the plan, fill the shadow bit for bit."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from expect import refuses
from rows import every_row
from test_role_state import MODELS, spec_of

from hfsdk.core.layout import Layout
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.runtime import Weights
from hfsdk.engine.calls.shadow_plan import plan_between, received_by_link
from hfsdk.engine.weights import bridge
from hfsdk.engine.weights.bridge import Route
from hfsdk.engine.weights.role_state import SCALAR_HEAD, Shard
from hfsdk.resharding.boxes import megatron_boxes, padded_vocab, vllm_boxes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

PAIRS = [("tp2", "tp1 dp2"), ("tp2", "tp2 dp2"), ("tp1 dp2", "tp2"), ("tp4", "tp2"), ("tp2 pp2", "tp1 dp3"), ("tp2 dp2", "tp4")]


def roles(model, train, rollout="", dtype="fp32", nodes=()):
    """A trained role and its shadow as ``place`` makes them; ``nodes`` of all of their ranks."""
    spec, scalar = spec_of(model), MODELS[model][1]
    layout = Layout.parse(train)
    layout = layout.fill(layout.size)
    trained = RoleSpec(
        name="actor", kind="critic" if scalar else "actor", model=spec, head="scalar" if scalar else "lm", train=layout,
        dtype=dtype, optimizer=AdamW(), nodes=tuple(nodes[: layout.size]),
    )  # fmt: skip
    shadow = replace(trained, optimizer=None, shadow_of="actor", nodes=tuple(nodes[layout.size :]))
    if not rollout:
        return trained, replace(shadow, name="actor.inference", train=Layout().fill(2))
    other = Layout.parse(rollout)
    return trained, replace(shadow, name="actor.rollout", train=None, rollout=other.fill(other.size))


def full_of(model, dtype):
    """The whole model's tensors; of bf16 numpy has only the bits."""
    rng = np.random.default_rng(0)
    shapes = dict(spec_of(model).tensors())
    if MODELS[model][1]:
        shapes.pop("lm_head.weight", None)
        shapes["score.weight"] = (1, shapes["model.norm.weight"][0])
    float32 = {name: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for name, shape in shapes.items()}
    return {name: tensor if name == "score.weight" else tensor.to(DTYPES[dtype]) for name, tensor in float32.items()}


def bits_of(tensor):
    return (tensor.contiguous().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def blank(boxes, full, spec, tp):
    ends, dtypes = {}, {}
    for box in boxes:
        end = [a + n for a, n in zip(box.local_start, box.size, strict=True)]
        ends[box.local] = [max(pair) for pair in zip(end, ends.get(box.local, end), strict=True)]
        dtypes[box.local] = full[box.tensor].dtype
        if len(end) == 2 and box.tensor in ("model.embed_tokens.weight", "lm_head.weight"):
            ends[box.local][0] = padded_vocab(spec.vocab_size, tp) // tp
    return {name: torch.zeros(end, dtype=dtypes[name]) for name, end in ends.items()}


def at(start, size):
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def cut(boxes, full, spec, tp):
    local = blank(boxes, full, spec, tp)
    for box in boxes:
        local[box.local][at(box.local_start, box.size)] = full[box.tensor][at(box.start, box.size)]
    return local


def boxes_of(role, rank):
    if role.rollout is not None:
        return vllm_boxes(role.model, role.rollout.tp, rank % role.rollout.tp)
    return Shard(spec=role.model, layout=role.train, at=role.train.coordinates(rank), scalar=role.head == "scalar").boxes


def exported(trained, shadow, full):
    """What every rank of the trained role gives, as it lies in an object store: copied and read-only."""

    def keep(boxes):
        found = []
        for key, bits, dtype, fingerprint in boxes:
            copy = bits.copy()
            copy.flags.writeable = False
            found.append((key, copy, dtype, fingerprint))
        return found

    bundles, reports = [], []
    for rank in range(trained.train.size):
        shard = Shard(spec=trained.model, layout=trained.train, at=trained.train.coordinates(rank), scalar=trained.head == "scalar")
        dtype = DTYPES[trained.dtype] if shadow.rollout is not None else None
        mine = cut(shard.boxes, full, trained.model, trained.train.tp)
        found, report = bridge.give(Route.between(trained, shadow, source=rank), mine, keep, dtype)
        bundles += found
        reports.append(report)
    return Weights(trained, tuple(bundles)), reports


def check_taken(shadow, rank, local, full):
    """Bit for bit what numpy cuts out of the whole tensors, and nothing beside it."""
    for box in boxes_of(shadow, rank):
        part = local[box.local][at(box.local_start, box.size)]
        assert np.array_equal(bits_of(part), bits_of(full[box.tensor])[at(box.start, box.size)]), box
        part.zero_()
    assert not any(tensor.any() for tensor in local.values())


def test_a_rollout_gets_what_the_plan_says():
    with every_row() as row:
        for (train, rollout), model, dtype in itertools.product(PAIRS, ["untied", "tied"], DTYPES):
            with row(train, rollout, model, dtype):
                check_a_rollout_gets_what_the_plan_says(model, dtype, train, rollout)


def check_a_rollout_gets_what_the_plan_says(model, dtype, train, rollout):
    trained, shadow = roles(model, train, rollout, dtype)
    full, plan = full_of(model, dtype), plan_between(trained, shadow)
    weights, reports = exported(trained, shadow, full)
    assert [report.bytes_sent for report in reports] == [plan.bytes_sent(rank) for rank in range(trained.train.size)]
    for rank in range(shadow.rollout.size):
        mine, number = weights.of_rank(rank), trained.train.size + rank
        local = blank(boxes_of(shadow, rank), full, trained.model, shadow.rollout.tp)
        received, proof = bridge.take(Route.between(trained, shadow, target=rank), mine, lambda local=local: local)
        assert sum(proof.proven) == proof.num_boxes == sum(len(bundle.content) for bundle in mine.bundles)
        assert list(received) == plan.matrix[:, number].tolist()
        assert sum(received) == sum(bundle.num_bytes for bundle in mine.bundles) == plan.bytes_needed(number)
        check_taken(shadow, rank, local, full)


def test_a_critic_that_infers_gets_a_training_layout():
    with every_row() as row:
        for (model, dtype), train in itertools.product(
            [("untied scalar", "fp32"), ("tied scalar", "bf16")], ["tp2", "tp1 dp2", "tp2 pp2"]
        ):
            with row(model, dtype, train):
                check_a_critic_that_infers_gets_a_training_layout(model, dtype, train)


def check_a_critic_that_infers_gets_a_training_layout(model, dtype, train):
    trained, shadow = roles(model, train, "", dtype)
    full = full_of(model, dtype)
    weights, _ = exported(trained, shadow, full)
    for rank in range(2):
        local = blank(boxes_of(shadow, rank), full, trained.model, 1)
        mine = weights.of_rank(rank)
        received, proof = bridge.take(Route.between(trained, shadow, target=rank), mine, lambda local=local: local)
        assert sum(proof.proven) == proof.num_boxes == sum(len(bundle.content) for bundle in mine.bundles)
        assert sum(received) == sum(tensor.nbytes for tensor in full.values())
        assert local[SCALAR_HEAD].dtype == torch.float32
        check_taken(shadow, rank, local, full)


def test_replicas_of_a_node_share_objects():
    """One copy of the weights on the node, however many replicas; another node's ranks take from their own node where they can."""
    for train in ("tp2", "tp1 dp2", "tp2 dp2"):
        trained, shadow = roles("untied", train, "tp1 dp3")
        size = trained.model.num_bytes("fp32")
        weights, reports = exported(trained, shadow, full_of("untied", "fp32"))
        assert sum(bundle.num_bytes for bundle in weights.bundles) == size
        assert {bundle.targets for bundle in weights.bundles} == {(0, 1, 2)}
        assert len(weights.bundles) == trained.train.size, "every holder gives a share"
        assert sum(report.bytes_sent for report in reports) == 3 * size
    trained, shadow = roles("untied", "tp1 dp2", "tp1 dp4", nodes=(0, 1, 0, 0, 1, 1))
    weights, _ = exported(trained, shadow, full_of("untied", "fp32"))
    assert Counter((b.source, b.targets) for b in weights.bundles) == {(0, (0, 1)): 1, (1, (2, 3)): 1}
    assert [found["network"] for found in received_by_link(trained, shadow)] == [0] * 4


def test_a_rank_of_a_wider_rollout_is_sent_less():
    trained, shadow = roles("untied", "tp2", "tp2")
    size = trained.model.num_bytes("fp32")
    weights, _ = exported(trained, shadow, full_of("untied", "fp32"))
    for rank in range(2):
        assert sum(bundle.num_bytes for bundle in weights.of_rank(rank).bundles) < 0.55 * size


def test_the_trainer_of_a_rollout_apart_is_not_permuted():
    """Its mesh knows no rollout; with the rollout on the same ranks the tp axis of this pair is permuted."""
    trained, shadow = roles("untied", "tp4", "tp2")
    plan = plan_between(trained, shadow)
    assert [plan.train_at(rank) for rank in range(4)] == [trained.train.coordinates(rank) for rank in range(4)]
    for rank in range(4):
        here = {box.local for box in megatron_boxes(trained.model, trained.train, rank)}
        assert {move.source_local for move in plan.moves if move.source == rank} <= here


def test_what_is_not_as_planned_is_said_before_anything_is_written():
    trained, shadow = roles("untied", "tp2", "tp1 dp2")
    full, route = full_of("untied", "fp32"), Route.between(trained, shadow, target=1)
    weights = exported(trained, shadow, full)[0].of_rank(1)
    planned = route.planned

    def never():
        raise AssertionError("the targets were asked for")

    short = replace(weights, bundles=weights.bundles[1:])
    with refuses(RuntimeError, "actor.rollout rank 1", "0 bytes from rank 0", planned[0]):
        bridge.take(route, short, never)
    first = weights.bundles[0]
    less = replace(weights, bundles=(replace(first, content=first.content[1:]), *weights.bundles[1:]))
    with refuses(RuntimeError, "rank 1", "from rank 0", planned[0]):
        bridge.take(route, less, never)
    moved = replace(weights, bundles=(replace(first, source=1), *weights.bundles[1:]))
    with refuses(RuntimeError, "actor.rollout got", "from rank 1"):
        bridge.take(route, moved, never)
    half = Route.between(trained, shadow, source=0)
    local = cut(boxes_of(trained, 0), full, trained.model, 2)
    with refuses(RuntimeError, "actor rank 0 has", "rank 0 of its shadow", half.planned[2]):
        bridge.give(half, local, lambda boxes: boxes, torch.bfloat16)


def one_number(bits):
    bits.reshape(-1)[bits.size // 2] += 1


def two_rows(bits):
    bits[[0, 1]] = bits[[1, 0]]


def stride(bits):
    bits[:] = bits.reshape(-1).reshape(bits.shape, order="F")


def older(bits):
    bits[:] = np.roll(bits, 7)


def test_a_box_that_is_not_what_left_is_found_and_named():
    with every_row() as row:
        for dtype, harm in itertools.product(DTYPES, [one_number, two_rows, stride, older]):
            with row(dtype, harm):
                check_a_box_that_is_not_what_left_is_found_and_named(dtype, harm)


def check_a_box_that_is_not_what_left_is_found_and_named(dtype, harm):
    trained, shadow = roles("untied", "tp2", "tp1 dp2", dtype)
    full, route = full_of("untied", dtype), Route.between(trained, shadow, target=1)
    weights = exported(trained, shadow, full)[0].of_rank(1)
    content = weights.bundles[1].content
    number = next(i for i, (_, bits, *_) in enumerate(content) if bits.ndim == 2 and min(bits.shape) > 1)
    (local, start, size), bits, *rest = content[number]
    bits = bits.copy()
    harm(bits)
    harmed = [*content[:number], ((local, start, size), bits, *rest), *content[number + 1 :]]
    bundles = (weights.bundles[0], replace(weights.bundles[1], content=harmed), *weights.bundles[2:])
    places = blank(boxes_of(shadow, 1), full, trained.model, 1)
    _, proof = bridge.take(route, replace(weights, bundles=bundles), lambda: places)
    (wrong,) = proof.wrong
    assert sum(proof.proven) + 1 == proof.num_boxes
    move = next(m for m in route.moves if (m.source, m.source_local, m.source_start, m.size) == (1, local, start, size))
    assert (wrong.tensor, wrong.size, wrong.source, wrong.target) == (move.tensor, move.size, 1, move.target)
    assert wrong.left != wrong.arrived
    assert re.search(rf"^{re.escape(move.tensor)}\[.*\] from rank 1 to rank 3: 0x[0-9a-f]{{16}} left, 0x", str(wrong))
