"""Every check of the trainer on every layout, with every model."""

from layout_sweep import Sweep
from trainer_laws import *  # noqa: F403  (its fixtures and tests, asked of SWEEP)
from trainer_laws import COMPARED

LAYOUTS = {
    "tp1": 1, "tp2": 2, "dp2": 2, "pp2": 2, "tp2 dp2": 4, "tp2 pp2": 4, "pp2 dp2": 4, "tp4 for rollout 2": 4,
    "dp2 zero": 2, "tp2 dp2 zero": 4, "pp2 dp2 zero": 4,
}  # fmt: skip
ZERO = [layout for layout in LAYOUTS if layout.endswith(" zero")]
LLAMA_MODELS = ("untied", "tied", "critic")
OTHER_MODELS = ("qwen2", "qwen3", "qwen2 critic", "llama3", "qwen3 critic", "windowed mistral")
OTHER_LAYOUTS = ("tp1", "tp2", "pp2", "tp4 for rollout 2")
"""Where the other families are as well."""

EVERYWHERE = ("inference", "gradients", "aggregations", "update", "state", "refusals", "saving", "bf16")
SWEEP = Sweep(
    LAYOUTS,
    {
        **dict.fromkeys(EVERYWHERE, tuple(LAYOUTS)),
        "distributed": ZERO, "errors": ("tp1", "tp2", "tp2 dp2", "tp2 pp2"), "recompute": ("tp1", "tp2", "pp2"),
        "offload": ("tp1", "tp2", "tp2 dp2", "pp2 dp2", "dp2 zero", "pp2 dp2 zero"),
    },
    {layout: LLAMA_MODELS + OTHER_MODELS * (layout in OTHER_LAYOUTS) for layout in LAYOUTS},
    COMPARED,
)  # fmt: skip
"""What a rank does with its own memory, and what it is told of mistakes before anything is sent, hangs on the kind of layout."""
