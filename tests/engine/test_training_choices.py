"""What trainers do on accelerators, here on processors: it must not change what is learned, only the order of sums.

All layouts are in ``sweeps/test_choice_layouts.py``.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from choice_laws import *  # noqa: F403  (its fixtures and tests, asked of SWEEP)
from layout_sweep import Sweep

from hfsdk.core.layout import Layout
from hfsdk.core.roles import AdamW
from hfsdk.core.training_choices import TrainingChoices, choose_training

LAYOUTS = {"tp2": 2, "dp2 zero": 2, "tp2 pp2": 4, "pp2 dp2": 4}
SWEEP = Sweep(
    LAYOUTS,
    {
        **dict.fromkeys(("log_probs", "gradients", "updates"), ("dp2 zero", "tp2 pp2")),
        "offload": ("dp2 zero",), "overlap": ("dp2 zero", "pp2 dp2"), "exchange": ("tp2 pp2",), "kept": ("tp2",),
    },
    dict.fromkeys(LAYOUTS, ("untied", "qwen3 critic", "windowed mistral")),
)  # fmt: skip


# ---- the decision


def test_processors_do_nothing_of_it():
    for tp, dp in itertools.product((1, 2, 8), (1, 2, 64)):
        assert choose_training(on_cpu=True, tp=tp, dp=dp) == TrainingChoices()


@pytest.mark.parametrize(
    ("tp", "dp", "sequence", "overlap"), [(1, 1, False, False), (2, 1, True, False), (1, 4, False, True), (8, 2, True, True)]
)
def test_accelerators_do_what_the_layout_has_a_use_for(tp, dp, sequence, overlap):
    wanted = TrainingChoices(sequence_parallel=sequence, fused_adamw=True, overlap=overlap)
    assert choose_training(on_cpu=False, tp=tp, dp=dp) == wanted


# ---- one rank, nothing sent


@pytest.fixture
def alone():
    """A world of eight ranks of which only this one is there."""
    dist = pytest.importorskip("torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hfsdk.engine.training import cpu_support_megatron
    from hfsdk.engine.training.megatron_groups import forget_groups

    cpu_support_megatron.install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    forget_groups()
    dist.destroy_process_group()


def built(name, layout, head="lm", dtype="bf16", **more):
    from hfsdk.core.spec import ModelSpec
    from hfsdk.engine.training.megatron_groups import RoleGroups
    from hfsdk.engine.training.megatron_model import build_model

    groups, spec = RoleGroups(Layout.parse(layout).fill(8).mesh()), replace(ModelSpec.preset(name), num_layers=4)
    groups.device = torch.device("meta")
    with torch.device("meta"):
        return build_model(spec, groups, head, dtype, spec.max_positions, **more)


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("layout", ["tp4 dp2", "tp2 pp2 dp2"])
def test_sequence_parallelism_leaves_names_and_shapes_as_they_are(alone, layout, head):
    plain, cut = (built("qwen3-8b", layout, head, sequence_parallel=on) for on in (False, True))
    shapes = [{name: tuple(p.shape) for name, p in model.named_parameters()} for model in (plain, cut)]
    assert shapes[0] == shapes[1]
    summed = {name for name, p in cut.named_parameters() if getattr(p, "sequence_parallel", False)}
    assert {name.split(".")[-2] for name in summed} <= {"input_layernorm", "pre_mlp_layernorm", "final_layernorm"}
    assert len(summed) == 2 * len(cut.decoder.layers) + (cut.decoder.final_layernorm is not None)
    assert not any(getattr(p, "sequence_parallel", False) for p in plain.parameters())


def test_no_module_is_transformer_engines_wherever_that_is_installed(alone, monkeypatch):
    """Megatron would take its last norm."""
    from megatron.core.transformer import transformer_block

    monkeypatch.setattr(transformer_block, "LayerNormImpl", None)
    named = built("qwen3-8b", "tp8").named_modules()
    norms = [module for name, module in named if name.endswith("layernorm") and "cross" not in name]
    assert len(norms) == 4 * 4 + 1
    assert all(isinstance(norm, torch.nn.RMSNorm) for norm in norms)


@pytest.mark.parametrize("fused", [False, True])
def test_step_counts_are_where_adamw_reads_them(alone, fused):
    """On a device of its own, which ``meta`` is as well."""
    from hfsdk.engine.training import megatron_optimizer
    from hfsdk.engine.training.megatron_groups import RoleGroups

    model, groups = built("qwen2.5-7b", "tp4 dp2", dtype="fp32"), RoleGroups(Layout.parse("tp4 dp2").mesh())
    choices = TrainingChoices(fused_adamw=fused)
    with torch.device("meta"):
        ddp = megatron_optimizer.wrap(model, groups, AdamW(), choices)
        optimizer = megatron_optimizer.make_optimizer(ddp, groups, AdamW(), "fp32", choices)
    parameter = next(model.parameters())
    megatron_optimizer.start_afresh(model, optimizer, 3.0)
    state = optimizer.optimizer.state[parameter]
    assert state["exp_avg"].device.type == "meta"
    assert state["step"].device.type == ("meta" if fused else "cpu")


def test_norm_weights_and_biases_do_not_decay(alone):
    from hfsdk.engine.training import megatron_optimizer
    from hfsdk.engine.training.megatron_groups import RoleGroups

    model, groups = built("qwen2.5-7b", "tp4 dp2", dtype="fp32"), RoleGroups(Layout.parse("tp4 dp2").mesh())
    wanted = AdamW(weight_decay=0.3)
    with torch.device("meta"):
        ddp = megatron_optimizer.wrap(model, groups, wanted)
        optimizer = megatron_optimizer.make_optimizer(ddp, groups, wanted, "fp32")
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    assert set(found.values()) == {0.0, 0.3}
    assert found == {name: 0.0 if "norm" in name or name.endswith("bias") else 0.3 for name in found}


def test_padding_makes_a_row_that_nobody_selects():
    from hfsdk.core.table import Ragged, Table
    from hfsdk.engine.training.loss import ModelInput

    rows = Table({"prompt": Ragged.of([[1, 2], [3]]), "response": Ragged.of([[4], [5, 6]])})
    plain, padded, whole = (ModelInput.of(rows, torch.device("cpu"), multiple=n) for n in (1, 4, 3))
    assert (plain.num_tokens, padded.num_tokens, len(padded.tokens_T), len(whole.tokens_T)) == (6, 6, 8, 6)
    assert padded.offsets.tolist() == [0, 3, 6, 8]
    assert padded.tokens_T.tolist() == [*plain.tokens_T.tolist(), 0, 0]
    assert padded.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert padded.selected_N.tolist() == plain.selected_N.tolist() == [1, 3, 4]
