"""LoRA on every layout."""

from layout_sweep import Sweep
from lora_laws import *  # noqa: F403  (its fixtures and tests, asked of SWEEP)
from lora_laws import MODELS

LAYOUTS = {"tp1": 1, "tp2": 2, "dp2": 2, "pp2": 2, "dp2 zero": 2, "tp2 pp2": 4, "tp4": 4}
"""At tp4 a kv head of the tied model is shared."""
SWEEP = Sweep(
    LAYOUTS,
    {
        **dict.fromkeys(("inference", "gradients", "recomputed", "training"), tuple(LAYOUTS)),
        "sequence_parallel": ("tp2", "tp2 pp2", "tp4"),
    },
    dict.fromkeys(LAYOUTS, MODELS),
)
