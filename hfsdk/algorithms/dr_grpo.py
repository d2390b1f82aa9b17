"""Dr. GRPO (arXiv 2503.20783): GRPO without its two biases.

The step is GRPO's. Dividing by the deviation of a group's scores weighs questions that are nearly always or nearly never solved
too much, and dividing by a response's length rewards long wrong responses: here an advantage is ``score - mean``, and the loss
sums over tokens and divides by a constant, the longest response allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hfsdk.algorithms.choices import Aggregation, Scale
from hfsdk.algorithms.grpo import GRPO
from hfsdk.core.checks import NonNegative


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """GRPO done right (section 3.2). The paper has no KL."""

    scale: Scale = "none"
    """One of `SCALES`."""
    aggregation: Aggregation = "fixed_length"
    """``"fixed_length"`` divides the sum over a response's tokens by ``max_new_tokens``; others as in `PolicyLoss`."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL, as in `GRPO`."""
