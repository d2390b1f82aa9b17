"""Invariants: what must hold in every step before anything is updated, and the warnings where it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar

from hfsdk.core.errors import InvariantWarning
from hfsdk.core.gap import GAP_TOLERANCE
from hfsdk.core.user_line import warn_user

RATIO_TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
"""How far the ratio may be from 1 before anything is updated, by the trainer's dtype."""

CHECK: ContextVar[str | None] = ContextVar("check", default="light")
"""The checks of a run of ``session.train``; ``None`` is none."""

WARNED: ContextVar[set[str] | None] = ContextVar("warned", default=None)
"""Warnings that a run of ``session.train`` has given, so that it gives each once; ``None`` outside a run, where every step
warns."""


def invariants(actor_rows: Sequence[dict[str, float]], tolerance: float = RATIO_TOLERANCE["fp32"]) -> list[str]:
    """Return a warning for each thing that must hold in the first mini-batch and does not; ``[]`` is a clean bill.

    Nothing has been updated then, so with ``old_log_probs`` from the trainer the ratio is 1 on every token, approx_kl
    is 0 and nothing is clipped (the best single check of an implementation, N details). It is exact up to rounding in
    fp32; give bf16 a tolerance of about 0.05. With ``old_log_probs`` from the rollout the difference is the engines'
    own.

    Args:
        actor_rows: ``metrics.rows`` of an actor's update; of a loss without a ratio there is nothing to say.
        tolerance: largest ``|ratio - 1|``.
    """
    if not actor_rows or "ratio" not in actor_rows[0]:
        return []
    first, broken = actor_rows[0], []
    for name in ("ratio", "ratio_max"):
        # ``not <=`` instead of ``>``: a NaN is broken, too.
        if not abs(first[name] - 1.0) <= tolerance:
            broken.append(
                f"{name} is {first[name]:.6g} in the first mini-batch, where it must be 1 (within {tolerance:g}): old_log_probs "
                "and the update disagree. Look at temperature, dropout, masks, and whether the weights were updated in between; "
                'with old_log_probs="rollout", at the two engines (rollout_gap)'
            )
    if not abs(first["approx_kl"]) <= tolerance:
        broken.append(f"approx_kl is {first['approx_kl']:.3g} in the first mini-batch, where it must be 0 (within {tolerance:g})")
    if first["clip_fraction"] != 0.0:
        broken.append(f"clip_fraction is {first['clip_fraction']:.3g} in the first mini-batch, where it must be 0")
    return broken


def first_numbers(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the numbers of the first mini-batch that must be 0."""
    if not rows or "ratio" not in rows[0]:
        return {}
    first = rows[0]
    error = max(abs(first["ratio"] - 1.0), abs(first["ratio_max"] - 1.0))
    return {
        "first_ratio_error": error, "first_approx_kl": first["approx_kl"], "first_clip_fraction": first["clip_fraction"],
    }  # fmt: skip


def gaps(numbers: Mapping[str, float], dtype: str) -> list[str]:
    """Return a warning where trainer and rollout disagree by more than their rounding."""
    most = GAP_TOLERANCE[dtype]
    if "rollout_gap_mean" not in numbers or all(numbers[f"rollout_gap_{kind}"] <= most[kind] for kind in most):
        return []
    mean, largest = numbers["rollout_gap_mean"], numbers["rollout_gap_max"]
    return [
        f"rollout_gap of trainer and generating engine is {mean:.3g} nats per token and {largest:.3g} at most, where rounding "
        f"in {dtype} stays below {most['mean']:g} and {most['max']:g}: the samples are not the trainer's own. Look at the "
        "temperature, at weights that were changed by hand, at top-k or top-p; tis_cap=2.0 corrects what is left"
    ]


def warn(broken: Sequence[str]) -> None:
    """Warn of broken invariants; a run gives each kind, which is a warning's first word, only once."""
    if CHECK.get() is None:
        return
    warned = WARNED.get()
    for text in broken:
        kind = text.split()[0]
        if warned is None or kind not in warned:
            warn_user(text, InvariantWarning)
        if warned is not None:
            warned.add(kind)
