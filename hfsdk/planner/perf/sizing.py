"""``sized``: how many sequences and how much key/value cache every rollout gets, chosen once when roles are placed.

Sizes that are left open come from the memory that is there while a rollout generates, by the phases of
:mod:`hfsdk.planner.perf.memory`. A rollout that sleeps while its trainer works has all that does not stay; one that never sleeps
leaves room for the greediest call of any role on its device. Rollouts that are awake at the same time get equal parts::

    80 GB        colocated, sleeps                            a pool of its own
    8 %          kept free                                    kept free
    generating   cache, rollout's weights                     cache
    stays        weights, gradients, AdamW of all roles       rollout's weights
    process      context, NCCL, graphs                        context, NCCL, graphs

A rollout that fits with one longest sequence is never refused. Up to 8 GB (or 64 longest sequences) are taken at the price of the 8
%.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from hfsdk.core.checks import with_checked
from hfsdk.core.cluster import ClusterSpec, DeviceSpec
from hfsdk.core.placement import Placement
from hfsdk.core.roles import RoleSpec, RolloutOptions
from hfsdk.core.rollout_sizes import LEAST_SEQS, MAX_SHARE, choose_sizes, is_open, least_cache_bytes
from hfsdk.planner.perf.memory import GPU_PROCESS_BYTES, DeviceMemory, MemoryEstimate, alike_devices

Free = tuple[int, int]
"""Bytes for a cache and vLLM's working memory: with a margin kept free, and without."""


def sized(roles: Iterable[RoleSpec], placement: Placement, cluster: ClusterSpec) -> list[RoleSpec]:
    """Return placed roles with the sizes of their rollouts; declared ones stay as they are. Pure."""
    every = list(roles)
    if not any(map(waits, every)):
        return every
    waiting = [role.name for role in every if waits(role) and not role.rollout_options.kv_cache_bytes]
    free: dict[str, Free] = {}
    for device, _ in alike_devices(map(with_least, every), placement, cluster) if waiting else ():
        for name, there in free_bytes(device, waiting).items():
            free[name] = _least([there, free.get(name, there)])
    devices = cluster.devices

    def with_sizes(role: RoleSpec) -> RoleSpec:
        there = [devices[d] for d in placement.pool_of(role.name).devices]
        return with_checked(role, rollout_options=_chosen(role, there, free.get(role.name, (0, 0))))

    return [with_sizes(role) if waits(role) else role for role in every]


def sizes_alone(role: RoleSpec, estimate: MemoryEstimate, devices: Collection[DeviceSpec]) -> RolloutOptions:
    """Return the sizes of a role's rollout where no other role is on its devices.

    Args:
        role: the role in its layouts.
        estimate: the bytes it asks of each device, as ``role_bytes`` has it of :func:`with_least`.
        devices: kinds of its devices.
    """
    if not waits(role):
        return role.rollout_options
    free = [
        free_bytes(DeviceMemory(
            device=0, device_name=device.name, pool="", exists=device.memory_bytes, process=GPU_PROCESS_BYTES,
            roles={role.name: estimate},
        ), [role.name])[role.name]
        for device in devices
    ]  # fmt: skip
    return _chosen(role, devices, _least(free))


def _least(free: Collection[Free]) -> Free:
    return min(with_margin for with_margin, _ in free), min(at_most for _, at_most in free)


def waits(role: RoleSpec) -> bool:
    """Whether a role has a generating engine, and a size of it is left to be chosen."""
    return role.kind == "actor" and role.rollout is not None and role.model is not None and is_open(role.rollout_options)


def with_least(role: RoleSpec) -> RoleSpec:
    """Return a role with the smallest cache that its rollout starts with on a GPU, where it is left to be chosen."""
    if not waits(role):
        return role
    assert role.model is not None
    assert role.rollout is not None
    least = least_cache_bytes(role.model, role.rollout_options, role.rollout.tp, role.dtype)
    return with_checked(role, rollout_options=with_checked(role.rollout_options, kv_cache_bytes=least))


def _chosen(role: RoleSpec, devices: Iterable[DeviceSpec], free: Free) -> RolloutOptions:
    """Return the sizes of a role's rollout on these devices with so many bytes free; processors keep their small cache."""
    assert role.model is not None
    assert role.rollout is not None
    options, sizes, (with_margin, at_most) = role.rollout_options, [], free
    for device in dict.fromkeys(devices):
        if device.name.startswith("cpu"):
            sizes.append(replace(options, max_num_seqs=options.max_num_seqs or LEAST_SEQS))
        else:
            sizes.append(choose_sizes(
                options, role.model, device, tp=role.rollout.tp, dtype=role.dtype, free=with_margin, at_most=at_most
            ))  # fmt: skip
    return min(sizes, key=lambda o: (o.max_num_seqs, o.kv_cache_bytes))


def free_bytes(device: DeviceMemory, waiting: Iterable[str]) -> Mapping[str, Free]:
    """Return, for each rollout of a device that waits for its cache, the bytes for it and for vLLM's working memory.

    ``device`` counts the least cache for each of them (:func:`with_least`). No rollout gets less than that, however little is free.
    """
    waiting_roles = {name: device.roles[name] for name in waiting if name in device.roles}
    asleep = [name for name, estimate in waiting_roles.items() if estimate.asleep]
    awake = [name for name in waiting_roles if name not in asleep]
    greediest = max((e.working for e in device.roles.values()), default=0)
    taken_bytes = device.process + sum(e.resident for e in device.roles.values())

    def part(name: str, exists: int) -> int:
        room = exists - taken_bytes
        parts = [(room - waiting_roles[name].asleep, len(awake) + 1)] if name in asleep else [(room - greediest, len(awake))]
        if name in awake:  # at the same time as the one that sleeps, while that one generates
            parts += [(room - waiting_roles[other].asleep, len(awake) + 1) for other in asleep]
        return waiting_roles[name].kv_cache + max(0, min(left // shared_by for left, shared_by in parts))

    return {name: (part(name, int(MAX_SHARE * device.exists)), part(name, device.exists)) for name in waiting_roles}
