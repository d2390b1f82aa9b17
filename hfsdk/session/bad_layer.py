"""Which layer's output first is not finite or leaves its range, of what the hooks on every rank saw."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hfsdk.core.column_spread import TIMES

Outputs = Sequence[tuple[int, Sequence[tuple[str, float]]]]
"""By rank: its pipeline stage, and (module, largest absolute number of its output) in the order the modules ended."""

SMALL = 1e-3
"""An output's usual size is at least this."""


def first_bad_layer(now: Outputs, before: Outputs | None = None) -> str:
    """Return the first module, by pipeline stage, whose output is bad on some rank; ``""`` where none is.

    Args:
        now: what the hooks saw.
        before: what they saw of the same sample with the weights of before; with it an output is bad that is `TIMES` larger,
            without it one that is not finite.
    """
    found: list[tuple[int, int, str]] = []
    for rank, (stage, outputs) in enumerate(now):
        for place, (name, size) in enumerate(outputs):
            usual = math.inf if before is None else TIMES * max(SMALL, before[rank][1][place][1])
            if not math.isfinite(size) or size > usual:
                found.append((stage, place, name))
                break
    if not found:
        return ""
    stage, _, name = min(found)
    return f"{name} (pipeline stage {stage})" if max(at for at, _ in now) else name
