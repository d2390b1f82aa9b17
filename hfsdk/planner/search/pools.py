"""How large pools may be and where they lie: sub-node sizes 1, 2, 4, ..., then whole nodes, of one kind of node each.

A *kind* is what nodes of a cluster have in common: the device and how many a node has. A pool lies on nodes of one kind, or on
every device of the cluster. Pools of equal size and kind take equally long, wherever they lie; nodes are handed out largest pool
first, and sub-node pools fill nodes one after the other (first fit, which wastes nothing since each size divides the next)::

    2 nodes x 8, pools of 8, 4, 2, 1       node 0: 8            node 1: 4 2 1 and one idle
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hfsdk.core.cluster import ClusterSpec, DeviceSpec
from hfsdk.core.layout import Layout
from hfsdk.core.table import Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Kind:
    """The nodes that are alike, or (``whole``) the cluster as one pool."""

    device: DeviceSpec
    node_size: int
    nodes: tuple[tuple[int, ...], ...]
    """Device numbers of every node."""
    sizes: Array
    """Pool sizes, ascending."""
    whole: bool = False

    @property
    def num_devices(self) -> int:
        """Devices on all its nodes."""
        return sum(map(len, self.nodes))

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices' numbers, node by node."""
        return tuple(d for node in self.nodes for d in node)

    @property
    def on_cpu(self) -> bool:
        """Whether its devices are processors."""
        return self.device.name.startswith("cpu")


def kinds_of(cluster: ClusterSpec) -> tuple[Kind, ...]:
    """Return the kinds of a cluster's nodes; where there are several, the whole cluster comes last."""
    by_kind: dict[tuple[DeviceSpec, int], list[tuple[int, ...]]] = {}
    first = 0
    for node in cluster.node_devices:
        numbers = tuple(range(first, first + len(node)))
        first += len(node)
        worst = min(node, key=lambda d: (d.peak_flops, d.name))
        by_kind.setdefault((worst, len(node)), []).append(numbers)
    kinds = [
        Kind(device=device, node_size=size, nodes=tuple(nodes), sizes=_sizes(size, len(nodes)))
        for (device, size), nodes in by_kind.items()
    ]
    if len(kinds) > 1:
        worst = min((k.device for k in kinds), key=lambda d: (d.peak_flops, d.name))
        fullest = min(k.device.memory_bytes for k in kinds)
        nodes = tuple(node for k in sorted(kinds, key=lambda k: k.nodes[0]) for node in k.nodes)
        every = tuple(sorted(nodes))
        size = min(k.node_size for k in kinds)
        kinds.append(Kind(
            device=replace(worst, memory_bytes=fullest), node_size=size, nodes=every, whole=True,
            sizes=np.array([sum(map(len, every))]),
        ))  # fmt: skip
    return tuple(kinds)


def _sizes(node_size: int, num_nodes: int) -> Array:
    below = [2**i for i in range(node_size.bit_length()) if 2**i < node_size]
    if num_nodes == 1 and node_size & (node_size - 1):
        below = list(range(1, node_size))
    return np.array(below + [node_size * count for count in range(1, num_nodes + 1)], dtype=np.int64)


def pack(kind: Kind, sizes: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return the devices of each pool, in the order given; ``None`` where they do not fit together."""
    free = [list(node) for node in kind.nodes]
    placed: list[tuple[int, ...]] = [()] * len(sizes)
    if kind.whole:
        return [kind.devices] if len(sizes) == 1 else None
    # Largest first: whole nodes have to be taken while they are empty, and small pools fill what is left.
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if sizes[i] >= kind.node_size:
            empty = [node for node in free if len(node) == kind.node_size][: sizes[i] // kind.node_size]
            if len(empty) * kind.node_size < sizes[i]:
                return None
            placed[i] = tuple(d for node in empty for d in node)
            for node in empty:
                node.clear()
        else:
            home = next((node for node in free if len(node) >= sizes[i]), None)
            if home is None:
                return None
            placed[i] = tuple(home[: sizes[i]])
            del home[: sizes[i]]
    return placed


def pack_parts(kind: Kind, host: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return the devices of each part of a pool, in the order given: runs of the pool's own, packed as pools are."""
    inside = set(host)
    nodes = tuple(tuple(d for d in node if d in inside) for node in kind.nodes)
    nodes = tuple(node for node in nodes if node)
    if len(nodes) == 1 and len(nodes[0]) < kind.node_size:  # a part of a node: sizes divide each other
        return pack(replace(kind, node_size=len(nodes[0]), nodes=nodes, whole=False), sizes)
    return pack(replace(kind, nodes=nodes, whole=False), sizes)


def crossings(layout: Layout, node_size: int, size: int) -> tuple[object, ...]:
    """Return which axes of a layout on whole nodes cross nodes, and how many ranks of a line along each share a node."""
    if size <= node_size:
        return (size,)
    block = layout.tp * layout.num_replicas
    crossings: list[object] = [node_size]
    for stride, length in ((1, layout.tp), (layout.tp, layout.num_replicas), (block, layout.pp)):
        span = stride * length
        crosses = length > 1 and (node_size % span != 0)
        nodes = (span - stride) // node_size + 1 if stride <= node_size else length
        crossings.append(length // nodes if crosses else 0)
        crossings.append(crosses)
    return tuple(crossings)
