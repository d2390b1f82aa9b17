"""A cluster as numbers: ``DeviceSpec``, ``LinkSpec``, ``ClusterSpec``. Pure and frozen; nothing here asks a device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from hfsdk.core.checks import (
    Length,
    Name,
    NonNegative,
    Positive,
    Within,
    check_fields,
    checked,
    shown,
)
from hfsdk.core.errors import OptionError
from hfsdk.core.field_texts import documented
from hfsdk.core.spec import Dtype
from hfsdk.core.text import nearest

MOST_DEVICES = 100_000
"""Devices of the largest cluster that is taken."""


@documented
@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """A connection between two devices, or of a node to the network."""

    name: Name
    """Name for messages and pictures, e.g. ``"NVLink 3"``."""
    bandwidth: Positive
    """Bytes per second, one direction; of a network link: of a whole node, shared by its devices."""
    latency_s: NonNegative
    """Seconds of a message without content."""
    bridge: NonNegative = 0.0
    """Bytes per second, one direction, between the halves of a node of more than four devices whose cards hang on two processors;
    shared by all that crosses. 0 where all devices of a node are joined alike."""

    def __post_init__(self) -> None:
        check_fields(self)


NVLINK_3 = LinkSpec(name="NVLink", bandwidth=300e9, latency_s=5e-6)
NVLINK_4 = LinkSpec(name="NVLink 4", bandwidth=450e9, latency_s=5e-6)
PCIE_4 = LinkSpec(name="PCIe 4 x16", bandwidth=32e9, latency_s=1e-5, bridge=14.3e9)
SHARED_MEMORY = LinkSpec(name="shared memory", bandwidth=4e9, latency_s=1e-4)
NETWORK_200G = LinkSpec(name="200 Gbit/s", bandwidth=25e9, latency_s=2e-5)
NETWORK_8X400G = LinkSpec(name="8 x 400 Gbit/s", bandwidth=400e9, latency_s=2e-5)
NETWORK_10G = LinkSpec(name="10 Gbit/s", bandwidth=1.25e9, latency_s=1e-4)
"""Links by data sheet, one direction. 200 Gbit/s a machine is HybridFlow's testbed (arXiv 2409.19256, section 8.1), 8 x 400 Gbit/s
a DGX H100; shared memory is gloo between processes of one machine, a round figure. Cards in PCIe slots hang on two processors: of
what is between these NCCL expects 10 GB/s on Intel from Skylake to Ice Lake (``SKL_QPI_BW`` in its src/graph/topo.h; 24 of a slot),
which is 14.3 of which collectives reach 0.7."""


@documented
@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator (or, without one, one worker's share of this machine)."""

    name: Name
    """Name for messages and pictures, e.g. ``"A100-80GB"``."""
    peak_flops: Positive
    """Dense FLOP/s in bf16 (on CPU: in fp32)."""
    memory_bytes: Annotated[int, Within(1, 10**15)]
    """Bytes of the device's own memory."""
    memory_bandwidth: Positive
    """Bytes per second of the device's own memory."""
    fp32_flops: NonNegative = 0.0
    """Dense FLOP/s in fp32 without tensor cores, which is PyTorch's default; 0 takes ``peak_flops``."""
    host_bandwidth: Positive = 25e9
    """Bytes per second between host memory and the device, one direction."""
    launches: NonNegative = 1.0
    """Whether kernels are launched from a host (0: the device is the host)."""
    link: LinkSpec = NVLINK_3
    """The link between devices of this kind in one node."""
    network: LinkSpec = NETWORK_200G
    """The network link of a node with such devices."""

    def __post_init__(self) -> None:
        check_fields(self)

    @checked
    def flops(self, dtype: Dtype) -> float:
        """Return the peak FLOP/s in ``"bf16"`` or ``"fp32"``."""
        return self.fp32_flops or self.peak_flops if dtype == "fp32" else self.peak_flops


DEVICES: dict[str, DeviceSpec] = {
    "A100-80GB": DeviceSpec(
        name="A100-80GB", peak_flops=312e12, fp32_flops=19.5e12, memory_bytes=80 * 10**9, memory_bandwidth=2.04e12
    ),
    "A100-80GB-PCIe": DeviceSpec(
        name="A100-80GB-PCIe", peak_flops=312e12, fp32_flops=19.5e12, memory_bytes=80 * 10**9, memory_bandwidth=1.94e12,
        link=PCIE_4,
    ),
    "H100": DeviceSpec(
        name="H100", peak_flops=989e12, fp32_flops=67e12, memory_bytes=80 * 10**9, memory_bandwidth=3.35e12,
        host_bandwidth=55e9, link=NVLINK_4, network=NETWORK_8X400G,
    ),
    "H200": DeviceSpec(
        name="H200", peak_flops=989e12, fp32_flops=67e12, memory_bytes=141 * 10**9, memory_bandwidth=4.8e12,
        host_bandwidth=55e9, link=NVLINK_4, network=NETWORK_8X400G,
    ),
    "cpu": DeviceSpec(
        name="cpu", peak_flops=5e10, memory_bytes=8 * 10**9, memory_bandwidth=2e10, host_bandwidth=1e10, launches=0.0,
        link=SHARED_MEMORY, network=NETWORK_10G,
    ),
}  # fmt: skip
"""Device presets by name (vendors' data sheets, dense; ``cpu`` is a round figure for one core of a server).

The PCIe card of the A100 has the SXM module's peak on paper and less power to reach it; its links are what differs most.
"""

_GROUP = re.compile(r"^\s*(\d+)\s*[xX]\s*(\d+)\s+(\S+)\s*$")


def _group(text: str, part: str) -> tuple[int, int, DeviceSpec]:
    """Read one ``"nodes x devices name"`` of a cluster's text.

    Raises:
        OptionError: it does not parse, names an unknown device, or none.
    """
    match = _GROUP.match(part)
    if not match:
        # People join kinds of devices by commas or "and"; the message then says what hfsdk takes.
        joined = " Join kinds of devices by '+'." if re.search(r"[,;&]|\band\b", text) else ""
        raise OptionError(
            f"cluster {shown(text)} does not parse at {shown(part.strip())}; write nodes x devices and a device name, "
            f"e.g. '16x8 A100-80GB' or '8x8 H100 + 8x8 A100-80GB'; devices: {', '.join(DEVICES)}.{joined}"
        )
    if match[3] not in DEVICES:
        near = nearest(match[3][:100], DEVICES)
        raise OptionError(f"cluster {shown(text)} names the device {shown(match[3])}, which is not known; {near}")
    # int() of a text of thousands of digits takes long or raises; twelve digits are more than any cluster.
    count, size = (int(number[:12]) for number in match.groups()[:2])
    if not count or not size:
        raise OptionError(
            f"cluster {shown(text)} has no devices at {shown(part.strip())}: it says {count} nodes of {size}; "
            "give at least one of each"
        )
    return count, size, DEVICES[match[3]]


def _slowest_links(nodes: Iterable[tuple[DeviceSpec, ...]]) -> tuple[LinkSpec, LinkSpec]:
    kinds = list({node[0].name: node[0] for node in nodes}.values())
    near, far = ([kind.link for kind in kinds], [kind.network for kind in kinds])
    return min(near, key=lambda link: link.bandwidth), min(far, key=lambda link: link.bandwidth)


@documented
@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes x devices with their links. ``ClusterSpec.parse("16x8 A100-80GB")``."""

    node_devices: tuple[tuple[DeviceSpec, ...], ...]
    """The devices of every node."""
    intra_node: LinkSpec = NVLINK_3
    """The link between devices of a node."""
    inter_node: LinkSpec = NETWORK_200G
    """The link from a node to the others, which its devices share."""
    price_per_device_hour: NonNegative = 0.0
    """Price of a device-hour in any currency, for the cost of a step; 0 where it is not known."""
    node_cores: tuple[Annotated[int, Within(1, MOST_DEVICES)], ...] = ()
    """Processor cores of every node, which its CPU workers share, one thread each; empty where each worker has its own."""

    def __post_init__(self) -> None:
        check_fields(self)
        num_devices = sum(map(len, self.node_devices))
        if not self.node_devices or not all(self.node_devices):
            raise OptionError("a cluster has at least one node, and each node at least one device; e.g. '1x8 H100' has both")
        if num_devices > MOST_DEVICES:
            raise OptionError(f"a cluster has at most {MOST_DEVICES:,} devices; this one would have {num_devices:,}")
        if self.node_cores and len(self.node_cores) != len(self.node_devices):
            raise OptionError(
                f"node_cores names a number of at least 1 for each of {len(self.node_devices)} nodes; got {shown(self.node_cores)}"
            )

    @classmethod
    @checked
    def parse(cls, text: Annotated[str, Length(0, 100_000)], price_per_device_hour: NonNegative = 0.0) -> ClusterSpec:
        """Parse ``"nodes x devices name"``, joined by ``+`` for mixed clusters.

        The links are those of the device preset; in a mixed cluster, of the kind whose links are slowest (see `links_of`).

        Raises:
            OptionError: the text does not parse or names an unknown device, or no devices or too many.
        """
        groups = [_group(text, part) for part in text.split("+")]
        num_devices = sum(count * size for count, size, _ in groups)
        if num_devices > MOST_DEVICES:
            raise OptionError(f"a cluster has at most {MOST_DEVICES:,} devices; {shown(text)} would have {num_devices:,}")
        nodes = [(device,) * size for count, size, device in groups for _ in range(count)]
        return cls.of(nodes, price_per_device_hour=price_per_device_hour)

    @classmethod
    @checked
    def of(
        cls, nodes: Sequence[tuple[DeviceSpec, ...]], *, price_per_device_hour: NonNegative = 0.0, node_cores: tuple[int, ...] = ()
    ) -> ClusterSpec:
        """Return the cluster of these nodes with their devices' own links; of several kinds, of the one whose links are slowest."""
        alike = cls(node_devices=tuple(nodes), price_per_device_hour=price_per_device_hour, node_cores=node_cores)
        near, far = _slowest_links(alike.node_devices)
        return replace(alike, intra_node=near, inter_node=far)

    @checked
    def links_of(self, nodes: Sequence[int]) -> tuple[LinkSpec, LinkSpec]:
        """Return the link inside and the link between these nodes.

        Where the cluster's links are those of its devices, nodes of one kind in a mixed cluster have their own.
        """
        nodes = [self._checked_node(node) for node in nodes]
        if not nodes:
            raise OptionError("the links between nodes need at least one node; nodes is empty")
        if (self.intra_node, self.inter_node) != _slowest_links(self.node_devices):
            return self.intra_node, self.inter_node
        return _slowest_links([self.node_devices[node] for node in nodes])

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """All devices, node by node; a device's index here is its number everywhere in hfsdk."""
        return tuple(device for node in self.node_devices for device in node)

    @property
    def num_devices(self) -> int:
        """Number of devices over all nodes."""
        return len(self.devices)

    @checked
    def node_of(self, device: int) -> int:
        """Return the node that holds device number ``device``.

        Raises:
            OptionError: the cluster has no such device.
        """
        number = device
        for node, devices in enumerate(self.node_devices):
            if 0 <= device < len(devices):
                return node
            device -= len(devices)
        raise OptionError(f"the cluster has {self.num_devices} devices; asked for number {number}")

    @checked
    def cores_of(self, node: int) -> int:
        """Return the cores that the workers of a node share; as many as workers where each has its own."""
        return self.node_cores[self._checked_node(node)] if self.node_cores else len(self.node_devices[self._checked_node(node)])

    def _checked_node(self, node: int) -> int:
        if not 0 <= node < len(self.node_devices):
            raise OptionError(f"the cluster has the nodes 0 to {len(self.node_devices) - 1}; asked for node={node}")
        return node

    @property
    def shares_cores(self) -> bool:
        """Whether some node has fewer cores than workers."""
        return any(cores < len(node) for cores, node in zip(self.node_cores, self.node_devices, strict=False))

    @checked
    def with_cores(self, cores: Annotated[int, Within(1, MOST_DEVICES)]) -> ClusterSpec:
        """Return the same cluster whose workers share ``cores`` processor cores on each node (CPU devices).

        Raises:
            OptionError: it is not at least 1.
        """
        return replace(self, node_cores=(cores,) * len(self.node_devices))

    @checked
    def with_memory(self, memory_bytes: Annotated[int, Within(1, 10**15)]) -> ClusterSpec:
        """Return the same cluster with every device's memory set to ``memory_bytes``."""
        nodes = tuple(tuple(replace(d, memory_bytes=memory_bytes) for d in node) for node in self.node_devices)
        return replace(self, node_devices=nodes)

    def __str__(self) -> str:
        parts: list[str] = []
        seen: list[tuple[int, str, int]] = []
        for node in self.node_devices:
            key = (len(node), node[0].name)
            if seen and seen[-1][:2] == key:
                seen[-1] = (*key, seen[-1][2] + 1)
            else:
                seen.append((*key, 1))
        parts = [f"{count}x{size} {name}" for size, name, count in seen]
        return " + ".join(parts)
