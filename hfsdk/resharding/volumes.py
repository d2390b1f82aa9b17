"""Bytes that a rank receives, holds and keeps twice in a weight transition, by the closed formulas of HybridFlow's table 2."""

from __future__ import annotations

from dataclasses import dataclass

from hfsdk.core.layout import Layout


@dataclass(frozen=True)
class Volume:
    """Bytes of one rank in a weight transition, by a formula or by counting."""

    name: str
    received: float
    """Bytes that come from other ranks."""
    peak: float
    """Bytes of weights on the rank at the end of the transition."""
    redundant: float
    """Bytes of the training shard that are kept beside a rollout copy that does not contain them."""
    counts: str
    """What it is made of."""


def formula_volumes(num_bytes: float, train: Layout, rollout: Layout, *, nests: bool) -> list[Volume]:
    """Return the paper's volumes of DS-Chat and HybridFlow-V, and of HybridFlow where the layouts nest (`ReshardPlan.volumes`)."""
    t, p, d = train.tp, train.pp, train.num_replicas
    ranks, shards, kept = t * p * d, t * p, rollout.tp * rollout.pp
    volumes = [
        Volume("DS-Chat", (ranks - 1) / ranks * num_bytes, num_bytes, num_bytes / ranks, "formula: gather over all ranks"),
        Volume("HybridFlow-V", (shards - 1) / shards * num_bytes, num_bytes, num_bytes / shards, "formula: gather over tp and pp"),
    ]
    if nests:
        received = (shards - kept) / (kept * t * p) * num_bytes
        volumes.append(Volume("HybridFlow", received, num_bytes / kept, 0.0, "formula: gather over micro-dp"))
    return volumes
