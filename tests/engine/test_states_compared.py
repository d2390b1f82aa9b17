"""A state that a role takes over is compared with what left: one number that is another one is told, and by which tensor."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from expect import refuses
from test_role_state import shards, spec_of

pytest.importorskip("megatron.core")
import torch

import hfsdk as hf
from hfsdk.core.roles import RoleSpec
from hfsdk.engine.weights.role_state import Summary
from hfsdk.engine.weights.shares import StateShare, Strip
from hfsdk.engine.worker.hybrid_engine import HybridEngine
from hfsdk.engine.worker.role_state import RoleStateTransfer

HARMED = "decoder.layers.1.mlp.linear_fc2.weight"


class OneRank:
    """Stands for a trainer of one rank, whose state is its weights; ``harm`` changes a number as it is taken over."""

    def __init__(self, shard):
        self.shard, self.spec, self.harm, shapes = shard, shard.spec, False, {}
        for box in shard.boxes:
            ends = tuple(a + n for a, n in zip(box.local_start, box.size, strict=True))
            shapes[box.local] = tuple(map(max, zip(ends, shapes.get(box.local, (0,) * len(ends)), strict=True)))
        self.tensors = {name: torch.randn(shape) for name, shape in shapes.items()}

    def on_device(self, *parts):
        return nullcontext()

    def local_tensors(self):
        return self.tensors

    def share(self):
        strips = [Strip("weights", name, tuple(t.shape), t.dtype, 0, t.numel()) for name, t in self.tensors.items()]
        return StateShare("tp1", 0, Summary(num_updates=1), tuple((s, self.tensors[s.local].flatten().clone()) for s in strips))

    def take_share(self, share):
        for strip, values in share.content:
            self.tensors[strip.local] = values.view(strip.shape).clone()
        if self.harm:
            self.tensors[HARMED][3, 5] += 1e-6


@pytest.fixture
def trainer():
    torch.manual_seed(0)
    return OneRank(shards(spec_of("untied"), "tp1", scalar=False)[0])


@pytest.fixture
def states(trainer):
    at = SimpleNamespace(dp=0)
    mesh = SimpleNamespace(ranks=[0], coordinates=lambda rank: at)
    groups = SimpleNamespace(dp_size=1, dp_rank=0, mesh=mesh, gather=lambda mine, kind: [mine])
    transition = SimpleNamespace(to_training=lambda: None, replaced=lambda: None)
    spec = RoleSpec(name="actor", kind="actor", model=trainer.spec)
    return RoleStateTransfer(spec, None, groups, trainer, transition)


def test_a_state_that_comes_back_as_it_was_is_taken(states, trainer):
    kept = states.export()
    for tensor in trainer.tensors.values():
        tensor.zero_()
    states.restore(kept)
    assert trainer.tensors[HARMED].any()


def test_one_number_that_is_another_one_is_told_with_its_tensor(states, trainer):
    kept = states.export()
    trainer.harm = True
    with refuses(hf.WeightMismatchError, "model.layers.1.mlp.down_proj.weight", "actor", "[0]", "snapshot"):
        states.restore(kept)


def test_a_state_that_was_taken_over_makes_the_rollouts_weights_old(trainer):
    spec = RoleSpec(name="actor", kind="actor", model=trainer.spec)
    transition = HybridEngine(spec, None, None, None, None)
    transition.stale = False
    transition.replaced()
    assert transition.stale
