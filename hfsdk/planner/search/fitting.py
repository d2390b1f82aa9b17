"""Layouts of a role that cover a pool: as declared, or every one that fits the model, tp within a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from hfsdk.core.checks import with_checked
from hfsdk.core.errors import LayoutError
from hfsdk.core.layout import Layout
from hfsdk.core.roles import RoleSpec
from hfsdk.core.spec import DTYPE_BYTES, ModelSpec
from hfsdk.planner.perf.setup import parameters
from hfsdk.planner.search.pools import Kind

LayoutsOf = Mapping[str, Layout]
"""``"train"`` and ``"rollout"`` -> filled layouts."""


def with_layouts(role: RoleSpec, layouts: LayoutsOf) -> RoleSpec:
    """Return the role in these layouts."""
    return with_checked(role, train=layouts.get("train"), rollout=layouts.get("rollout"))


def layer_bytes(role: RoleSpec, ep: int = 1) -> float:
    """Bytes of the layers' weights, and of the gradients of those that are trained: tp x pp ranks hold at least these.

    Experts count as those that one of ``ep`` replicas has.
    """
    spec = role.model
    assert spec is not None
    if role.offload:
        return 0.0
    layers = parameters(spec) - 2 * spec.vocab_size * spec.hidden_size
    if ep > 1:
        layers -= spec.routed_parameters * (ep - 1) // ep
    return layers * (DTYPE_BYTES[role.dtype] + 4 * (role.trainable and role.lora is None))


def trains_of(role: RoleSpec, kind: Kind, size: int, long_row: int = 0) -> Sequence[Layout]:
    """Return a role's training (or inference) layouts on a pool: the declared one if it covers it, or all that fit the model.

    Ranks share sequences (cp) only where a row is longer than a micro-batch, and as many of them as have at least half a
    micro-batch of it each.
    """
    assert role.model is not None
    assert role.train is not None
    if "train" not in role.auto:
        return _declared(role.train, size)
    most_cp = max(1, 2 * long_row // role.micro_batch_tokens) if "cp" in role.auto else 1
    return _every_train(role.model, kind.node_size, size, min(most_cp, size))


def rollouts_of(role: RoleSpec, kind: Kind, size: int) -> Sequence[Layout]:
    """Return a role's rollout layouts on a pool, as :func:`trains_of`."""
    assert role.model is not None
    assert role.rollout is not None
    if "rollout" not in role.auto:
        return _declared(role.rollout, size)
    sizes = [(tp, size // tp) for tp in _fitting_tp(role.model, kind.node_size, size)]
    return [Layout(tp=tp, dp=dp, ep=ep) for tp, dp in sizes for ep in _fitting_ep(role.model, dp)]


def _declared(layout: Layout, size: int) -> Sequence[Layout]:
    try:
        return [layout.fill(size)]
    except LayoutError:
        return []


@lru_cache(maxsize=1024)
def _every_train(spec: ModelSpec, node_size: int, size: int, most_cp: int) -> Sequence[Layout]:
    return [
        Layout(tp=tp, pp=pp, cp=cp, dp=copies // cp, ep=ep)
        for tp in _fitting_tp(spec, node_size, size)
        for pp in range(1, min(spec.num_layers, size // tp) + 1)
        if spec.num_layers % pp == 0 and size // tp % pp == 0
        for copies in [size // tp // pp]
        for cp in range(1, min(most_cp, copies) + 1)
        if copies % cp == 0
        for ep in _fitting_ep(spec, copies // cp)
    ]


@lru_cache(maxsize=1024)
def _fitting_ep(spec: ModelSpec, dp: int) -> Sequence[int]:
    """Ep that divides dp and the experts; 1 of a dense model."""
    return [1] if spec.experts is None else [ep for ep in range(1, dp + 1) if dp % ep == 0 and spec.experts.count % ep == 0]


@lru_cache(maxsize=1024)
def _fitting_tp(spec: ModelSpec, node_size: int, size: int) -> Sequence[int]:
    """Tp within a node: a pool inside one lies side by side there, one of several nodes begins anew with each."""
    fitting = [tp for tp in range(1, min(node_size, size) + 1) if size % tp == 0 and (size <= node_size or node_size % tp == 0)]
    return [tp for tp in fitting if _divides(spec, tp)]


def _divides(spec: ModelSpec, tp: int) -> bool:
    try:
        Layout(tp=tp).check_model(spec)
    except LayoutError:
        return False
    return True
