"""Expert parallelism as other systems' configurations ask for it, in the words of a layout.

Megatron spreads experts over tp x dp ranks anew: EP parts of the experts, each cut by ETP inside. A ``Layout`` cuts each expert by
tp as all other weights, and shares them over ``ep`` replicas; a rank has as many weights where both products are the same::

    tp4 dp8, EP 8, ETP 4     ep8     E / 8 experts, each cut in 4
    tp4 dp8, EP 8, ETP 1     ep2     E / 8 whole experts: as many weights as E / 2, each cut in 4
"""

from __future__ import annotations

from collections.abc import Callable

from hfsdk.core.layout import Layout
from hfsdk.planner.configs.step_config import NOTE

COUNTED_WHOLE = "experts are counted as if each rank had all of them, cut by tp"
"""A rule of models that have experts."""


def shared_experts(experts: int, expert_tp: int | None, tp: int, dp: int) -> int:
    """Return the ``ep`` of a layout for Megatron's EP and ETP; 1 where no layout has as many weights on a rank.

    Args:
        experts: EP.
        expert_tp: ETP; ``None`` is tp, as in Megatron.
        tp: of the other weights.
        dp: replicas.
    """
    parts = max(1, experts) * max(1, expert_tp or tp)
    ep = parts // max(1, tp)
    return ep if parts % max(1, tp) == 0 and ep >= 1 and dp % max(1, ep) == 0 else 1


def expert_rule(rule: Callable[..., None], num_gpus: int, layout: Layout, experts: int, expert_tp: int | None) -> None:
    """Add a finding where Megatron could not spread experts so, or a layout says it otherwise."""
    parts = max(1, experts) * max(1, expert_tp or layout.tp)
    if parts == layout.tp and experts <= 1:
        return
    rule(num_gpus % (parts * layout.pp) == 0, "the GPUs must be a multiple of expert tp x ep x pp",
         f"{num_gpus}, {parts * layout.pp}", "Take an expert_model_parallel_size that divides them.",
         "megatron/core/parallel_state.py, initialize_model_parallel")  # fmt: skip
    rule(layout.ep * layout.tp == parts or parts == layout.tp, COUNTED_WHOLE,
         f"tp {layout.tp}, expert tp {expert_tp or layout.tp}, ep {experts}, dp {layout.dp}", "Read memory as an upper bound.", "",
         NOTE)  # fmt: skip
