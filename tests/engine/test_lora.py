"""LoRA on a layout that cuts layers and on one that cuts optimizers; all layouts are in ``sweeps/test_lora_layouts.py``."""

from layout_sweep import Sweep
from lora_laws import *  # noqa: F403  (its fixtures and tests, asked of SWEEP)
from lora_laws import MODELS, adapters_of

LAYOUTS = {"tp1": 1, "dp2 zero": 2, "tp2 pp2": 4}
TWO = ("dp2 zero", "tp2 pp2")
SWEEP = Sweep(
    LAYOUTS,
    {
        "inference": TWO, "gradients": TWO, "recomputed": ("tp2 pp2",), "sequence_parallel": ("tp2 pp2",),
        "training": ("tp1", *TWO),
    },
    dict.fromkeys(LAYOUTS, MODELS),
)  # fmt: skip


def test_a_folder_of_peft_says_what_its_adapters_are(case):
    from hfsdk.core.lora import LoRA

    found = LoRA.from_folder(adapters_of(case["folders"]["tied"]))
    assert found == LoRA(rank=4, alpha=12)
    assert found.scale == 3
