"""What trainers do on accelerators, on every layout."""

from choice_laws import *  # noqa: F403  (its fixtures and tests, asked of SWEEP)
from layout_sweep import Sweep

LAYOUTS = {
    "tp2": 2, "pp2": 2, "dp2 zero": 2, "tp2 dp2 zero": 4, "tp2 pp2": 4, "pp2 dp2": 4,
    "tp4 for rollout 2": 4,
}  # fmt: skip
SWEEP = Sweep(
    LAYOUTS,
    {
        **dict.fromkeys(("log_probs", "gradients", "updates", "offload"), tuple(LAYOUTS)),
        "overlap": [layout for layout in LAYOUTS if "dp2" in layout],
        "exchange": [layout for layout in LAYOUTS if "pp2" in layout],
        "kept": ("tp2",),
    },
    dict.fromkeys(LAYOUTS, ("untied", "tied", "critic", "qwen3")),
)
