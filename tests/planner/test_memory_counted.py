"""Planned bytes against the counted tensors of an 8B, built on ``meta``: nothing is allocated, nobody else is needed.

Weights, gradients, masters and moments are those of Megatron's own buffers and optimizers, AdamW's temporaries what its step
allocates at once.
"""

import itertools
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hfsdk.core.layout import Layout
from hfsdk.core.lora import LoRA
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.training import cpu_support_megatron, megatron_adapters, megatron_model, megatron_optimizer
from hfsdk.engine.training.megatron_groups import RoleGroups, forget_groups
from hfsdk.planner.perf.memory import adamw_temporary_bytes, role_bytes, rollout_parameters
from hfsdk.resharding.boxes import vllm_boxes

RANKS = 8


@pytest.fixture(scope="module", autouse=True)
def world():
    cpu_support_megatron.install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    forget_groups()
    dist.destroy_process_group()


def built(spec, layout, head, dtype, lora=None):
    groups = RoleGroups(layout.mesh())
    groups.device = torch.device("meta")
    with torch.device("meta"):
        model = megatron_model.build_model(spec, groups, head, dtype, spec.max_positions, "", lora=lora)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    return model, groups


def counted(spec, layout, head, dtype):
    return sum(parameter.nbytes for parameter in built(spec, layout, head, dtype)[0].parameters())


LAYOUTS = ["tp1 dp8", "tp2 dp4", "tp4 dp2", "pp2 dp4", "tp2 pp2 dp2"]


@pytest.mark.parametrize(("head", "kind"), [("lm", "actor"), ("scalar", "critic")])
def test_planned_weights_are_those_that_megatron_builds(head, kind):
    for name, layout in (("qwen3-8b", "tp8"), *itertools.product(["qwen3-8b", "qwen2.5-7b"], LAYOUTS)):
        check_weights(ModelSpec.preset(name), Layout.parse(layout).fill(RANKS), head, kind)


def check_weights(spec, layout, head, kind):
    role = RoleSpec(name=kind, kind=kind, model=spec, train=layout, head=head, dtype="bf16", optimizer=AdamW())
    there = counted(spec, layout, head, "bf16")
    planned = role_bytes(role, RANKS)
    case = spec.name, str(layout)
    assert planned.weights >= there * 0.97, case
    assert planned.weights == pytest.approx(there, rel=0.03) or layout.pp > 1, (*case, "with pp the fullest stage is planned")
    assert planned.gradients == 2 * planned.weights, case


def test_every_bias_is_planned():
    """Narrow layers, of which biases are a good part: to the byte."""
    sizes = {"num_layers": 2, "hidden_size": 32, "mlp_hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
    for more, given in (
        ({"attention_bias": True}, "tp2 dp4"), ({"mlp_bias": True}, "tp4 dp2"), ({"family": "phi3"}, "tp2 dp4"),
        ({"attention_bias": True, "mlp_bias": True}, "tp1 dp8"), ({"family": "mistral", "sliding_window": 64}, "tp2 dp4"),
        ({"family": "qwen2"}, "tp2 dp4"),
    ):  # fmt: skip
        spec = ModelSpec(name="narrow", **sizes, vocab_size=64, max_positions=128, tied_embeddings=True, **more)
        layout = Layout.parse(given).fill(RANKS)
        role = RoleSpec(name="actor", kind="actor", model=spec, train=layout, dtype="bf16", optimizer=AdamW())
        assert role_bytes(role, RANKS).weights == counted(spec, layout, "lm", "bf16"), (more, given)
        assert rollout_parameters(spec, layout.tp) == sum(box.numel for box in vllm_boxes(spec, layout.tp, 0)), (more, given)


def test_planned_weights_of_the_rollout_are_the_boxes_that_are_moved():
    for name, tp in (("qwen3-8b", 8), *itertools.product(["qwen3-8b", "qwen2.5-7b"], [1, 2, 4])):
        spec = ModelSpec.preset(name)
        there = sum(box.numel for box in vllm_boxes(spec, tp, 0))
        assert rollout_parameters(spec, tp) == pytest.approx(there, rel=0.03), (name, tp)


@pytest.mark.parametrize(("layout", "head", "targets"), [
    ("tp2 dp4", "lm", "linear"), ("tp2 pp2 dp2", "lm", "linear"), ("tp1 dp8", "scalar", ("q_proj", "down_proj")),
    ("tp8", "lm", ("v_proj", "up_proj", "o_proj")),
])  # fmt: skip
def test_planned_adapters_are_those_that_the_trainer_attaches(layout, head, targets):
    """To the number; q, k and v, gate and up have one each though Megatron fuses them."""
    spec, layout = replace(ModelSpec.preset("qwen3-8b"), num_layers=2), Layout.parse(layout).fill(RANKS)
    lora = LoRA(rank=5, targets=targets)
    model, _ = built(spec, layout, head, "bf16", lora)
    trained = [parameter for _, parameter in megatron_adapters.trained(model)]
    numbers = sum(parameter.numel() for parameter in trained)
    role = RoleSpec(
        name="actor", kind="actor", model=spec, train=layout, head=head, dtype="bf16", optimizer=AdamW(), lora=lora
    )  # fmt: skip
    planned = role_bytes(role, RANKS)
    assert (planned.gradients, planned.optimizer) == (4 * numbers, 12 * numbers)
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    assert planned.base == pytest.approx(frozen, rel=0.03) or layout.pp > 1


class MostMade(TorchDispatchMode):
    """The most bytes that one operation makes: several kernels' AdamW has them all at once."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (list, tuple)) else [out]
        given = {id(tensor) for arg in args for tensor in (arg if isinstance(arg, (list, tuple)) else [arg])}
        fresh = [t for t in made if isinstance(t, torch.Tensor) and t.device.type == "meta" and id(t) not in given]
        if func._schema.name.startswith("aten::_foreach") and not func._schema.name.endswith("_"):
            self.most = max(self.most, sum(tensor.nbytes for tensor in fresh))
        return out


@pytest.fixture
def on_meta(monkeypatch):
    """Megatron's buffers and optimizers on ``meta``, whose tensors pass for a GPU's."""
    kind = torch.Tensor.type

    def named(tensor, *args, **kwargs):
        result = kind(tensor, *args, **kwargs)
        return result.replace("torch.meta.", "torch.") if isinstance(result, str) else result

    monkeypatch.setattr(torch.Tensor, "type", named)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))


@pytest.mark.parametrize("layout", ["tp1 dp8", "tp2 dp4", "tp4 dp2", "tp8"])
@pytest.mark.parametrize(("dtype", "distributed"), [("bf16", False), ("bf16", True), ("fp32", False)])
def test_planned_state_of_training_is_what_megatron_and_adamw_hold(on_meta, layout, dtype, distributed):
    spec, layout = ModelSpec.preset("qwen3-8b"), Layout.parse(layout).fill(RANKS)
    wanted = AdamW(distributed=distributed)
    role = RoleSpec(name="actor", kind="actor", model=spec, train=layout, dtype=dtype, optimizer=wanted)
    planned = role_bytes(role, RANKS)
    model, groups = built(spec, layout, "lm", dtype)
    with torch.device("meta"):
        ddp = megatron_optimizer.wrap(model, groups, wanted)
        optimizer = megatron_optimizer.make_optimizer(ddp, groups, wanted, dtype)
    with torch.no_grad(), torch.device("meta"), cpu_support_megatron.cuda_type_names():
        for group in optimizer.optimizer.param_groups:
            group["foreach"] = True  # as on GPUs: on meta AdamW would step one tensor after the other
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        with MostMade() as made:
            optimizer.optimizer.step()
    found = megatron_model.memory_bytes(model, ddp, optimizer)
    assert found["weights"] == pytest.approx(planned.weights, rel=0.03)
    assert found["gradients"] == pytest.approx(planned.gradients, rel=0.03)
    assert found["optimizer"] == pytest.approx(planned.optimizer, rel=0.03)
    stepped = planned.optimizer // (12 if dtype == "bf16" else 8)
    assert made.most == pytest.approx(adamw_temporary_bytes(stepped, on_cpu=False), rel=0.03)
    assert planned.temporaries == 0, "what foreach makes: on GPUs the fused kernel steps"
