"""Notices about placements on a cluster of GPUs that are allowed and cost more than they look, made before anything loads.

Two things: tensor parallelism over nodes, whose all-reduces (two a layer forwards, two backwards; Megatron-LM, arXiv 1909.08053,
section 3) then go over the network, and a pool on several kinds of GPUs, where the fast ones wait for the slow::

    node 0   0 1 2 3        tp4 on 0-3, 4-7: inside a node      tp8 on 0-7: every layer waits for the network
    node 1   4 5 6 7
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.roles import RoleSpec

SLOW = 0.5
"""A link to other nodes with less than this share of the bandwidth inside a node is worth a word."""


def costly(roles: Sequence[RoleSpec], placement: Placement, cluster: ClusterSpec) -> list[str]:
    """Return a sentence for each role whose tp leaves its node, and for each pool of several kinds of GPUs.

    Args:
        roles: the roles as placed: layouts filled, ``nodes`` of their ranks known.
        placement: the pools.
        cluster: GPUs; on processors nothing is said, where a node is one memory and the rest is for trying.
    """
    if all(device.name.startswith("cpu") for device in cluster.devices):
        return []
    return [*_over_nodes(roles, cluster), *(words for pool in placement.pools for words in _mixed(pool, cluster))]


def _over_nodes(roles: Sequence[RoleSpec], cluster: ClusterSpec) -> Iterator[str]:
    for role in roles:
        for phase, groups in _tp_groups(role):
            far = next((nodes for group in groups if len(nodes := sorted({role.nodes[rank] for rank in group})) > 1), None)
            if far is None:
                continue
            near, between = cluster.links_of(far)
            share = between.bandwidth / max(len(cluster.node_devices[node]) for node in far)
            if share < SLOW * near.bandwidth:
                yield (
                    f"{role.name}'s {phase} has tp{len(groups[0])} over nodes {', '.join(map(str, far))}: every layer waits for "
                    f"two all-reduces a pass at {share / 1e9:g} GB/s a GPU ({between.name} a node), where a node has "
                    f"{near.bandwidth / 1e9:g} GB/s ({near.name}). Keep tp inside a node; pp and dp may cross nodes."
                )


def _tp_groups(role: RoleSpec) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield a role's tensor-parallel groups of ranks, of training and of generation."""
    if not role.nodes:
        return
    rollout = role.rollout.tp if role.rollout is not None else 1
    if role.train is not None and role.train.tp > 1:
        yield ("training" if role.optimizer is not None else "layout"), role.train.mesh(rollout).groups("tp")
    if rollout > 1:
        yield "rollout", [list(range(first, first + rollout)) for first in range(0, len(role.nodes), rollout)]


def _mixed(pool: Pool, cluster: ClusterSpec) -> Iterator[str]:
    names = [cluster.devices[device].name for device in pool.devices]
    if len(set(names)) > 1:
        kinds = " and ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
        yield (
            f"pool {pool.name!r} has {kinds}: its ranks work in step, so all go at the slowest one's pace and with the smallest "
            "one's memory. Give each kind a pool of its own (hf.Placement names devices)."
        )
