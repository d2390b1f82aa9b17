"""A state that goes straight from the ranks of one pool to those of another: bit for bit, counted, in real processes over gloo."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from checkpoint_laws import KINDS, make_folders
from share_laws import Here
from spawn import run
from trainer_harness import equal
from whole_state import state_of

PAIRS = [("tp2", "dp2"), ("dp2", "tp2"), ("pp2", "dp2"), ("tp2", "pp2")]
"""Layouts of the old place, on ranks 0 and 1, and of the new one, on 2 and 3."""
CASES = [
    (*PAIRS[0], "tied", True, 2), (*PAIRS[1], "half", True, 2), (*PAIRS[2], "critic", True, 2), (*PAIRS[3], "half", False, 2),
    (*PAIRS[1], "critic", False, 0), (*PAIRS[2], "tied", False, 0), (*PAIRS[0], "half", True, 0),
]  # fmt: skip
"""(old, new, model, whether its optimizer is distributed, steps before); every one is in ``sweeps/test_move_layouts.py``."""


class Part(Here):
    """A role's layout on a part of the processes."""

    def __init__(self, layout, root, first):
        from hfsdk.engine.training import megatron_groups

        before = megatron_groups.RoleGroups
        megatron_groups.RoleGroups = partial(before, first=first)
        try:
            super().__init__(layout, root, 2)
        finally:
            megatron_groups.RoleGroups = before


def move(h, trainer, rank, links, link):
    """Give or take one state as the worker does; return what was counted."""
    import torch.distributed as dist

    from hfsdk.engine.process.plain_objects import written_by
    from hfsdk.engine.process.safepoint import SafePoint
    from hfsdk.engine.weights.direct import NOTHING
    from hfsdk.engine.weights.moves import inventory, way_of_state

    gives, said = rank < 2, [None] * 4
    if gives:
        with trainer.giving_share() as share:
            mine = inventory(share, trainer.shard, gives=True)[0]
    with written_by(pickle.dumps, pickle.loads):
        dist.all_gather_object(said, mine if gives else None)
    summary = said[0].summary
    if not gives:
        mine = inventory(trainer.blank_share(summary, "meta"), trainer.shard, gives=False)[0]
    with written_by(pickle.dumps, pickle.loads):
        dist.all_gather_object(said, mine)
    way, never = way_of_state("role", rank, said[:2], said[2:]), SafePoint(lambda: False)
    whole = trainer.giving_share() if gives else trainer.taking_share(summary)
    with whole as share, links.using(link, rank, 1) as group:
        tensors = inventory(share, trainer.shard, gives=gives)[1]
        sources, targets = (tensors, NOTHING) if gives else (NOTHING, tensors)
        never.agree(group, way.problem(sources, targets))
        return way.move(sources, targets, group)


def moves(rank, world_size, root, folder, cases):
    from hfsdk.engine.process.rendezvous import Link
    from hfsdk.engine.weights.direct import DirectLinks

    links, link, found = DirectLinks(), Link(0, ("old", "new"), f"file://{folder}/link", world_size, timeout_s=60.0), {}
    for old, new, name, distributed, steps in cases:
        h = Part(old if rank < 2 else new, root, 0 if rank < 2 else 2)
        trainer = h.trainer(name, distributed=distributed, seed=0 if rank < 2 else 7)
        if rank < 2 and steps:
            h.learn(trainer, name, mini_batches=steps)
        before = state_of(trainer) if rank < 2 else None
        report = move(h, trainer, rank, links, link)
        same = rank >= 2 or equal(state_of(trainer), before)
        agree = h.replicas_agree(trainer) if steps else True
        found[old, new, name, distributed, steps] = h.whole(trainer), same, agree, report.bytes_sent, report.bytes_received
        if rank >= 2 and steps:
            h.learn(trainer, name)  # it goes on
    links.leave_all()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make_folders(root)
    return root


def test_the_state_is_the_same_bit_for_bit_in_another_layout_elsewhere(folders, tmp_path, request):
    first, second, third, fourth = run(moves, 4, folders, str(tmp_path), request.module.CASES)
    assert set(first) == set(request.module.CASES)
    for case, (old, unchanged, _, _, taken) in first.items():
        new = third[case][0]
        assert unchanged, (case, "whoever gives keeps what it has")
        assert second[case][1], case
        assert third[case][2], (case, "replicas agree")
        assert taken == 0
        assert (new["num_updates"], new["steps"]) == (old["num_updates"], old["steps"]), case
        for kind in ("weights", *KINDS):
            assert old[kind].keys() == new[kind].keys(), (case, kind)
            for name, tensor in old[kind].items():
                assert torch.equal(tensor, new[kind][name]), (case, kind, name)
        sent = first[case][3] + second[case][3]
        assert sent == third[case][4] + fourth[case][4], (case, "as much is taken as is given")
        assert sent >= sum(tensor.nbytes for tensor in old["weights"].values()), case
