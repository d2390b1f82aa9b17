"""Stretched rotary positions in Megatron's GPT model, as transformers computes them.

Megatron's own options take a part of the numbers: for llama3 the factor alone, for yarn no attention factor. So the waves are put
into its rotary embedding once it is made, and the attention factor goes where its attention looks for one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_find_correction_range,
    _yarn_linear_ramp_mask,
)

from hfsdk.core.rope import RopeScaling, YarnScaling
from hfsdk.core.spec import ModelSpec


def attention_options(spec: ModelSpec) -> dict[str, float]:
    """Return what Megatron's attention reads of its configuration to multiply cosines and sines with yarn's attention factor.

    It computes 0.1 m ln(s) + 1 of a weight m and a factor s; with ln(s) = 1 any attention factor is one of those.
    """
    if not isinstance(spec.rope_scaling, YarnScaling):
        return {}
    weight = 10.0 * (spec.rope_scaling.attention - 1.0)
    return {"yarn_rotary_scaling_factor": math.e, "yarn_mscale": weight, "yarn_mscale_all_dim": 0.0}


def stretch(rotary: RotaryEmbedding, spec: ModelSpec) -> None:
    """Give a rotary embedding the waves of the model; one of rope type ``default`` keeps its own."""
    scaling = spec.rope_scaling
    if isinstance(scaling, RopeScaling):
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
        )
    elif isinstance(scaling, YarnScaling):
        rotary.inv_freq = yarn_rates(scaling, spec.rope_theta, spec.head_dim, rotary.inv_freq.device)


def yarn_rates(scaling: YarnScaling, theta: float, dim: int, device: Any) -> torch.Tensor:
    """Return the radians that each pair of dimensions turns a token, [dim / 2] (YaRN, arXiv 2309.00071, section 3.2)."""
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    low, high = _yarn_find_correction_range(
        scaling.beta_fast, scaling.beta_slow, dim, theta, scaling.original_max_positions, scaling.truncate
    )
    kept = 1 - _yarn_linear_ramp_mask(low, high, dim // 2, device)
    rates: torch.Tensor = 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
    return rates
