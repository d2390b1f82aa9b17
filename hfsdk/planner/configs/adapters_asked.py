"""Adapters of low rank as other systems' configurations ask for them: names of layers, ranks, and what hfsdk has of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hfsdk.core.checks import shown
from hfsdk.core.lora import LINEARS, LoRA
from hfsdk.planner.configs.step_config import NOTE

MOST_RANK = 512
"""The largest rank of ``hf.LoRA``."""

OF_MEGATRON = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",), "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}  # fmt: skip
"""Megatron's names of the linears, which systems that train with it take."""

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

PEFT_DEFAULT = ("q_proj", "v_proj")
"""Where nothing is said, of Llama, Mistral, Qwen2 and Qwen3: peft 0.21, ``peft/utils/constants.py``,
``TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING``."""


def lora_asked(
    rank: int | None, alpha: float, targets: Any, rule: Callable[..., None], key: str, *, stabilised: bool = False
) -> LoRA | None:
    """Return the adapters that a configuration asks for, ``None`` where it asks for none.

    Args:
        rank: 0 and ``None`` are none.
        alpha: what their output is multiplied with, times 1 / rank.
        targets: names of layers, ``"all-linear"``, or nothing for all of them.
        rule: adds a finding where something does not hold.
        key: of the rank, for findings.
        stabilised: whether it is 1 / the root of the rank (rsLoRA).
    """
    if not rank:
        return None
    rule(rank <= MOST_RANK, f"hfsdk's adapters have a rank of at most {MOST_RANK}", f"{key}={rank}",
         f"Read memory as of rank {MOST_RANK}.", "", NOTE)  # fmt: skip
    if targets is not None and not isinstance(targets, (str, list, tuple)):
        targets = [targets]
    asked = [part.strip(" '\"") for part in targets.strip("[]() ").split(",")] if isinstance(targets, str) else list(targets or ())
    known: list[str] = []
    odd = [one for one in asked if one != "all-linear" and str(one).rsplit(".", 1)[-1] not in {*LINEARS, *OF_MEGATRON}]
    rule(not odd, "layers are named that have no adapters in hfsdk; here all linear layers of attention and MLP have one",
         ", ".join(shown(str(one)) for one in odd[:4]), "Read memory as an estimate.", "", NOTE)  # fmt: skip
    for one in asked:
        last = str(one).rsplit(".", 1)[-1]
        known += OF_MEGATRON.get(last, (last,))
    every = not asked or bool(odd) or "all-linear" in asked or set(EVERY) <= set(known)
    return LoRA(
        rank=min(rank, MOST_RANK), alpha=alpha if alpha > 0 else float(rank), targets="linear" if every else tuple(known),
        rank_stabilised=stabilised,
    )  # fmt: skip
