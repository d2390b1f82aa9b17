"""Roles that begin with the same frozen weights, a *base*, and so hold them once on a device; for planner and simulation.

A base is frozen where nothing trains it: of a role with adapters (LoRA), of a reference, of a reward model. Roles on a device share
one that begins with the same folder, in the same dtype, where their ranks there have the same shard of it, as the engine has it
(:mod:`hfsdk.engine.training.shared_base`)::

    device 3     actor        adapters   gradients   moments      train tp8, rank 3 of tp
                 critic       adapters   gradients   moments      train tp8, rank 3 of tp     one base of tp rank 3
                 reference    -                                   tp8, rank 3 of tp
                 reward       weights of its own                  tp4 dp2
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from hfsdk.core.layout import Layout
from hfsdk.core.roles import RoleSpec


@dataclass(frozen=True)
class HeldBase:
    """Frozen weights of one role on a device."""

    key: Hashable
    """Equal where the same numbers lie there; ``None``: never shared."""
    num_bytes: int


def base_of(role: RoleSpec) -> Hashable | None:
    """Return the key of a role's frozen weights, the same in every layout; ``None`` where it has none.

    A frozen model in host memory has its own. A frozen scorer that is only numbers, in simulation, stands for a model that a user
    trained: it shares with nobody.
    """
    if role.model is None or role.train is None or "weights" in role.offloads:
        return None
    if role.lora is None and (role.trainable or role.shadow_of or (role.kind in ("reward", "cost") and not role.folder)):
        return None
    return role.folder or role.model, role.dtype


def base_shape(train: Layout, rollout: Layout | None) -> tuple[int, int, int, int]:
    """Return the numbers that decide a rank's shard of a base, among layouts of one pool: tp, pp, ep, and how tp is permuted.

    The training mesh is permuted for the rollout (:class:`hfsdk.core.layout.Mesh`); the fourth number is 1 where it is not.
    """
    tp = rollout.tp if rollout is not None else 1
    return train.tp, train.pp, train.ep, tp if train.tp % tp == 0 and tp < train.tp else 1


def base_key(role: RoleSpec) -> Hashable | None:
    """Return the key of a role's frozen weights on a device; its training layout is filled."""
    base = base_of(role)
    return None if base is None or role.train is None else (base, role.train.of_weights, base_shape(role.train, role.rollout))


def held_by_others(bases: Mapping[str, HeldBase]) -> dict[str, str]:
    """Return role -> the role that holds its base, for roles on a device whose base another holds: the one that holds most."""
    holders: dict[Hashable, str] = {}
    there = {name: base for name, base in bases.items() if base.key is not None and base.num_bytes}
    for name, base in there.items():
        before = holders.get(base.key)
        if before is None or base.num_bytes > there[before].num_bytes:
            holders[base.key] = name
    return {name: holders[base.key] for name, base in there.items() if holders[base.key] != name}
