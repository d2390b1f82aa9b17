"""What models of one family differ in, against transformers, where a layer is cut: outputs, gradients, folders, vLLM's log-probs.

Other layouts are in ``sweeps/test_family_layouts.py``.
"""

import numpy as np
import pytest
from family_laws import *  # noqa: F403  (its fixtures and tests, asked of SWEEP)
from family_laws import MODELS, make_folder
from layout_sweep import Sweep
from spawn import run
from test_rollout import other_families
from trainer_harness import is_critic

from hfsdk.core.spec import ModelSpec

LAYOUTS = {"tp1": 1, "tp2": 2}
SWEEP = Sweep(
    LAYOUTS,
    dict.fromkeys(("inference", "gradients", "saving"), ("tp2",)),
    dict.fromkeys(LAYOUTS, tuple(MODELS)),
    compared=("saving",),
)


def test_tensors_are_those_of_transformers(case):
    for model, reference in case["references"].items():
        spec = ModelSpec.from_folder(case["folders"][model])
        there = {name: tuple(p.shape) for name, p in reference.model.named_parameters()}
        head = {"score.weight": (1, spec.hidden_size)} if is_critic(model) else {}
        mine = {name: shape for name, shape in spec.tensors().items() if not (head and name == "lm_head.weight")} | head
        assert mine == there, model
        assert spec.class_name("scalar" if head else "lm") == type(reference.model).__name__, model


ROLLOUT_CASES = (("windowed mistral", "packed", "tp2", 2), ("biases", "shared", "pp2", 1))
"""(model, mode of the rollout's weights, training layout, tp of the rollout); prompts have 20 tokens and more."""


def test_vllms_log_probs_are_the_trainers(tmp_path):
    """Before and after an update whose weights go the planned way; both ranks draw the same."""
    pytest.importorskip("vllm")
    sizes = {"hidden_size": 256, "num_key_value_heads": 4, "intermediate_size": 256}
    folders = {name: make_folder(name, tmp_path / name, **sizes) for name, *_ in ROLLOUT_CASES}
    first, second = run(other_families, 2, folders, ROLLOUT_CASES)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
