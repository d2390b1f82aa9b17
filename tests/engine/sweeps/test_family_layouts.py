"""Every model of a family on every layout, and those that vLLM has code of its own for in the rollout."""

import numpy as np
import pytest
from family_laws import *  # noqa: F403  (its fixtures and tests, asked of SWEEP)
from family_laws import MODELS, make_folder
from layout_sweep import Sweep
from spawn import run
from test_rollout import other_families

LAYOUTS = {"tp1": 1, "tp2": 2, "pp2": 2, "tp4 for rollout 2": 4}
"""The last shares a kv head between ranks."""
SWEEP = Sweep(LAYOUTS, dict.fromkeys(("inference", "gradients", "saving"), tuple(LAYOUTS)), dict.fromkeys(LAYOUTS, tuple(MODELS)))

ROLLOUTS = {
    "positions": (("yarn", "packed", "tp2", 2), ("yarn with its own attention", "shared", "dp2", 1)),
    "biases": (("biases", "packed", "tp2", 2), ("biases", "shared", "pp2", 1)),
    "windows": (("windowed mistral", "packed", "dp2", 2), ("windowed phi3", "shared", "tp2", 1)),
}
"""(model, mode of the rollout's weights, training layout, tp of the rollout); prompts have 20 tokens and more."""


@pytest.mark.parametrize("what", ROLLOUTS)
def test_vllms_log_probs_are_the_trainers(tmp_path, what):
    """Before and after an update whose weights go the planned way; both ranks draw the same."""
    pytest.importorskip("vllm")
    sizes = {"hidden_size": 256, "num_key_value_heads": 4, "intermediate_size": 256}
    names = {name for name, *_ in ROLLOUTS[what]}
    folders = {name: make_folder(name, tmp_path / name, **sizes) for name in names}
    first, second = run(other_families, 2, folders, ROLLOUTS[what])
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
