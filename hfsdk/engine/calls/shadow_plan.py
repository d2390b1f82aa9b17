"""The plan by which a shadow gets its role's weights, and the links that it goes over; planned without an engine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from hfsdk.core.layout import Layout
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Bundle
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.calls.dispatch import mesh_of
from hfsdk.resharding.boxes import has_boxes
from hfsdk.resharding.reshard_plan import LINKS, ReshardPlan


def plan_between(trained: RoleSpec, shadow: RoleSpec) -> ReshardPlan:
    """Return the plan by which a shadow that generates gets its weights; its ranks are numbered after the trained role's."""
    model, train, rollout = trained.learned, trained.train, shadow.rollout
    assert model is not None
    assert train is not None
    assert rollout is not None
    return _plan(model, train, rollout, trained.dtype, (*trained.nodes, *shadow.nodes))


@lru_cache(maxsize=8)
def _plan(model: ModelSpec, train: Layout, rollout: Layout, dtype: str, nodes: tuple[int, ...]) -> ReshardPlan:
    return ReshardPlan.between(model, train, rollout, dtype, nodes=nodes or None, apart=True)


def received_by_link(trained: RoleSpec, shadow: RoleSpec) -> list[dict[str, int]]:
    """Return the bytes that every rank of a shadow receives from ranks on its node and from others.

    One that infers has the whole model on every rank; it comes over the slowest link that the rank may need, and so does the part
    of a mixture of experts that a rank generates with, which no plan counts.
    """
    _, near, far = LINKS
    assert trained.learned is not None
    if shadow.rollout is None or not has_boxes(trained.learned):
        size, ranks = _needed_bytes(trained.learned, trained.dtype, shadow.rollout), mesh_of(shadow).ranks
        # any trained rank may be the one to send, so one on another node makes the link a slow one
        crosses = [any(node != shadow.nodes[rank] for node in trained.nodes) if shadow.nodes else False for rank in ranks]
        return [{near: 0 if crosses[rank] else size, far: size if crosses[rank] else 0} for rank in ranks]
    plan = plan_between(trained, shadow)
    nodes, first = np.asarray(plan.nodes), plan.train.size
    by_rank = []
    for rank in range(first, plan.num_ranks):
        received = int(plan.matrix[nodes == nodes[rank], rank].sum())
        by_rank.append({near: received, far: plan.bytes_received(rank) - received})
    return by_rank


def exported(trained: RoleSpec, shadow: RoleSpec, content: Any) -> tuple[list[Bundle], ...]:
    """Return, for every rank of a trained role, references to what it gives a shadow by the plan; they refer to ``content``.

    One that infers is said to get the whole model from the first rank, and one that generates with a mixture of experts its part
    from one rank each.
    """
    assert trained.learned is not None
    sent: list[list[Bundle]] = [[] for _ in mesh_of(trained).ranks]
    if shadow.rollout is None:
        everyone = tuple(mesh_of(shadow).ranks)
        sent[0].append(Bundle(0, everyone, content, trained.learned.num_bytes(trained.dtype)))
        return tuple(sent)
    if not has_boxes(trained.learned):
        size = _needed_bytes(trained.learned, trained.dtype, shadow.rollout)
        for rank in mesh_of(shadow).ranks:
            sent[rank % len(sent)].append(Bundle(rank % len(sent), (rank,), content, size))
        return tuple(sent)
    plan = plan_between(trained, shadow)
    first = plan.train.size
    for source, target in np.argwhere(plan.matrix[:first, first:]).tolist():
        sent[source].append(Bundle(source, (target,), content, int(plan.matrix[source, first + target])))
    return tuple(sent)


@lru_cache(maxsize=64)
def _needed_bytes(model: ModelSpec, dtype: str, rollout: Layout | None) -> int:
    """Bytes of a model that a rank needs: all, or as much as tp (and of experts ep) leaves it."""
    num_bytes = model.num_bytes(dtype)
    if rollout is None:
        return num_bytes
    elsewhere = model.routed_parameters * (1 - 1 / rollout.ep) * num_bytes / model.num_parameters()
    return round((num_bytes - elsewhere) / rollout.tp)
