"""Where adapters lie on both engines: every number of every tensor is on some rank, once, beside the weight that it belongs to."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
from expect import refuses
from rows import every_row

import hfsdk as hf
from hfsdk.core.lora import AdapterSpec, LoRA
from hfsdk.resharding.boxes import Box, megatron_boxes, vllm_boxes
from hfsdk.resharding.reshard_plan import ReshardPlan

SPEC = hf.ModelSpec.preset("smollm2-135m")
SMALL = {"hidden_size": 32, "mlp_hidden_size": 64, "num_heads": 4, "head_dim": 8, "vocab_size": 64, "max_positions": 64}
NARROW = hf.ModelSpec(name="narrow", num_layers=2, num_kv_heads=1, **SMALL)
FUSED = hf.ModelSpec(name="fused", num_layers=1, num_kv_heads=2, family="phi3", **SMALL)


def counted(boxes: list[Box], shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return how many boxes hold each number of each tensor."""
    held = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for box in boxes:
        held[box.tensor][tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))] += 1
    return held


def test_smollm2_at_rank_16_has_the_bytes_that_peft_saves():
    assert AdapterSpec.of(SPEC, LoRA(rank=16)).num_parameters() == 4_884_480
    assert AdapterSpec.of(SPEC, LoRA()).base == SPEC


def test_every_number_is_held_and_what_tp_does_not_cut_is_on_every_rank():
    with every_row() as row:
        for layout, targets in itertools.product(
            ["tp1", "tp3", "tp1 pp2", "tp3 pp2"], ["linear", ("q_proj", "v_proj"), ("k_proj", "up_proj", "down_proj")]
        ):
            with row(layout, targets):
                check_every_number_is_held_and_what_tp_does_not_cut_is_on_every_rank(targets, layout)


def check_every_number_is_held_and_what_tp_does_not_cut_is_on_every_rank(targets, layout):
    spec, layout = AdapterSpec.of(SPEC, LoRA(rank=4, targets=targets)), hf.Layout.parse(layout)
    boxes = [
        box for tp, pp in itertools.product(range(layout.tp), range(layout.pp)) for box in megatron_boxes(spec, layout, tp, pp)
    ]
    for name, times in counted(boxes, spec.tensors()).items():
        whole = name.endswith("lora_B.weight") == (".o_proj." in name or ".down_proj." in name)
        assert np.all(times == (layout.tp if whole else 1)), name


def test_places_inside_a_local_tensor_do_not_overlap_and_leave_no_gap():
    with every_row() as row:
        for spec, tp in [(SPEC, 1), (SPEC, 3), (NARROW, 2), (NARROW, 4), (FUSED, 1), (FUSED, 2)]:
            with row(spec, tp):
                check_places_inside_a_local_tensor_do_not_overlap_and_leave_no_gap(spec, tp)


def check_places_inside_a_local_tensor_do_not_overlap_and_leave_no_gap(spec, tp):
    adapters = AdapterSpec.of(spec, LoRA(rank=4))
    for engine, rank in itertools.product(("megatron", "vllm"), range(tp)):
        boxes = megatron_boxes(adapters, hf.Layout(tp=tp), rank) if engine == "megatron" else vllm_boxes(adapters, tp, rank)
        taken: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for box in boxes:
            taken[box.local].append((box.local_start[0], box.size[0], box.size[1]))
        for local, rows in taken.items():
            rows.sort()
            ends = itertools.accumulate((count for _, count, _ in rows), initial=0)
            assert [start for start, *_ in rows] == list(ends)[:-1], local
            assert len({width for *_, width in rows}) == 1


def test_a_plan_of_adapters_moves_what_a_rank_lacks():
    spec = AdapterSpec.of(SPEC, LoRA(rank=16))
    plan = ReshardPlan.between(spec, "tp3", "dp3")
    assert plan.bytes_needed(0) == spec.num_parameters() * 4
    assert plan.bytes_missing(0) == sum(
        2 * rows * columns // 3 * 4
        for name, (rows, columns) in spec.tensors().items()
        if name.endswith(("o_proj.lora_A.weight", "down_proj.lora_A.weight"))
        or (name.endswith("lora_B.weight") and "o_proj" not in name and "down_proj" not in name)
    )


def test_targets_that_are_no_linear_layers_are_refused():
    with every_row() as row:
        for wrong in ["everything", ("q_proj", "lm_head"), ()]:
            with row(wrong):
                check_targets_that_are_no_linear_layers_are_refused(wrong)


def check_targets_that_are_no_linear_layers_are_refused(wrong):
    with refuses(hf.OptionError, "target"):
        LoRA(targets=wrong)


def test_a_model_without_a_layer_that_is_asked_for_is_refused():
    with refuses(hf.OptionError, "qkv_proj, o_proj, gate_up_proj, down_proj"):
        LoRA(targets=("q_proj",)).check_model(FUSED)
