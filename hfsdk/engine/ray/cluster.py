"""The nodes that Ray has, and which device number is on which of them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
from ray._private import accelerators

from hfsdk.core.cluster import DEVICES, ClusterSpec, DeviceSpec
from hfsdk.core.errors import PlacementError
from hfsdk.engine.process.gpus import check_count
from hfsdk.engine.ray import access

PACKAGE = Path(__file__).parents[2]
"""This package's folder."""

ANSWER_S = 5.0
"""How long a cluster's address may take to answer."""

GIGABYTES = {
    "V100": 16, "P100": 16, "T4": 16, "A10G": 24, "L4": 24, "L40S": 48, "RTX-PRO-6000": 96, "H20": 96, "B200": 180, "B300": 270,
}  # fmt: skip
"""Memory of accelerators that are no presets, by Ray's names of them (``ray/util/accelerators``), from data sheets; the least where
there are several."""
ACCELERATORS = {
    "A100": ("A100-80GB", 0), "A100-80G": ("A100-80GB", 0), "A100-40G": ("A100-80GB", 40),
    **{name: (name, gigabytes) for name, gigabytes in GIGABYTES.items()},
}  # fmt: skip
"""Ray's name of an accelerator -> the device preset, and its gigabytes where they are others. Names that are not here are those of
presets; what is no preset is planned for as an H100, but for its memory where that is known."""

SHIPPED: dict[str, Any] = {"py_modules": [str(PACKAGE)], "excludes": ["**/__pycache__"]}
"""Ray's runtime environment that gives every node of a cluster the user's version of this package."""


Access = Literal["open", "token", "unknown"]
"""Whom a cluster answers."""


@dataclass(frozen=True)
class Node:
    """A machine, or what Ray takes for one, with devices of a session."""

    number: int
    """The node's number in the session's ``ClusterSpec``."""
    ray_id: str
    address: str
    here: bool
    """Whether the user's process is on it."""

    def __str__(self) -> str:
        return f"node {self.number} ({self.address})"


def describe(num_devices: int | None, shares_cpus: bool) -> tuple[ClusterSpec, tuple[Node, ...]]:
    """Return the devices Ray has and, for each, its node: GPUs or, without any, CPU workers spread evenly over the nodes.

    The user's own node comes first. With ``shares_cpus`` (Ray runs on this machine alone, for hfsdk) sessions may take more
    workers together than there are processors.

    Args:
        num_devices: how many; ``None`` for all.
        shares_cpus: see above.

    Raises:
        PlacementError: Ray has fewer.
    """
    own_id = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda n: (n["NodeID"] != own_id, n["NodeManagerAddress"], n["NodeID"]))
    kind = "GPU" if any(n["Resources"].get("GPU", 0) for n in alive) else "CPU"
    room = [int(n["Resources"].get(kind, 0)) for n in alive]
    total = sum(room)
    if kind == "GPU":
        check_count(num_devices, total)
        counts = _packed(room, num_devices or total)
    elif shares_cpus:
        # CPU workers are processes: all of them go to the user's own machine
        counts = [num_devices or max(1, room[0])] + [0] * (len(room) - 1)
    else:
        count = num_devices or total
        if not 0 < count <= total:
            raise PlacementError(
                f"{count} devices asked for; Ray has {total} CPUs and no GPU. "
                "Ask for fewer, or close the session that started Ray and make one with more devices."
            )
        counts = _spread(room, count)
    used = [(node, count) for node, count in zip(alive, counts, strict=True) if count]
    devices = tuple((_device(node, kind, count, node["NodeID"] == own_id),) * count for node, count in used)
    nodes = [
        Node(number, node["NodeID"], node["NodeManagerAddress"], node["NodeID"] == own_id) for number, (node, _) in enumerate(used)
    ]
    cores = tuple(_cores(node, count, node["NodeID"] == own_id) for node, count in used) if kind == "CPU" else ()
    each = tuple(nodes[k] for k, (_, count) in enumerate(used) for _ in range(count))
    return ClusterSpec.of(devices, node_cores=cores), each


def _packed(room: Sequence[int], count: int) -> list[int]:
    """Fill one node after the other: GPUs of one node have the faster links."""
    counts: list[int] = []
    for free in room:
        counts.append(min(free, count - sum(counts)))
    return counts


def _spread(room: Sequence[int], count: int) -> list[int]:
    """Give every node about the same, as far as it has room."""
    counts = [0] * len(room)
    while sum(counts) < count:
        least = min((k for k, free in enumerate(room) if counts[k] < free), key=lambda k: counts[k])
        counts[least] += 1
    return counts


def _device(node: Mapping[str, Any], kind: str, count: int, here: bool) -> DeviceSpec:
    resources = node["Resources"]
    if kind == "GPU":
        name = next((k.split(":", 1)[1] for k in resources if k.startswith("accelerator_type:")), "GPU")
        preset, gigabytes = ACCELERATORS.get(name, (name, 0))
        preset_device = DEVICES.get(preset) or replace(DEVICES["H100"], name=name)
        return replace(preset_device, memory_bytes=gigabytes * 10**9) if gigabytes else preset_device
    free = psutil.virtual_memory().available if here else int(resources.get("memory", 0))
    return replace(DEVICES["cpu"], memory_bytes=free // count)


def _cores(node: Mapping[str, Any], count: int, here: bool) -> int:
    """Return the processors that a node's workers share: all that there are here, and not those Ray hands out."""
    return max(1, os.cpu_count() or 1 if here else int(node["Resources"].get("CPU", count)))


def ask_alive(address: str) -> Access:
    """Ask a cluster whether it is there, without showing it a token; Ray itself would try for minutes.

    Args:
        address: ``host:port``.

    Returns:
        ``"open"`` where it answers anybody, ``"token"`` where it asks for a token, ``"unknown"`` where the package ``grpc``, which
        asks it, is not installed.

    Raises:
        OSError: nothing listens there, or what listens is no cluster or keeps silent.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise OSError(f"{address!r} is no address host:port")
    socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    try:
        import grpc
    except ModuleNotFoundError:
        return "unknown"
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    request: Any = gcs_service_pb2  # generated, without types
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).CheckAlive(request.CheckAliveRequest(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return "token"
            raise OSError(f"it did not answer within {ANSWER_S:g} s as a Ray cluster does ({error.code().name})") from None
    return "open"


def check_same(address: str) -> None:
    """Check that the Ray of this process is the one at an address.

    Raises:
        PlacementError: it is another one.
    """
    own_address = ray.get_runtime_context().gcs_address
    (host, _, port), (my_host, _, my_port) = address.rpartition(":"), own_address.rpartition(":")
    try:
        same = port == my_port and (my_host == host or socket.gethostbyname(host) in (my_host, "127.0.0.1"))
    except OSError:
        same = False
    if not same:
        raise PlacementError(
            f"this process uses the Ray at {own_address}, not {address}: close its session (or call ray.shutdown()) first, "
            "or open the new session in another process"
        )


def num_gpus_here() -> int | None:
    """Return how many GPUs a Ray that is started here reports; ``None`` where Ray's look at the driver fails."""
    manager: Any = accelerators.get_accelerator_manager_for_resource("GPU")
    try:
        visible = manager.get_current_process_visible_accelerator_ids()
        return int(manager.get_current_node_num_accelerators()) if visible is None else len(visible)
    except Exception:  # of the driver's own library, which Ray brings along
        return None


def num_cores(node: Node) -> int:
    """Return a node's processors, as Ray counts them."""
    return next((int(n["Resources"].get("CPU", 1)) for n in ray.nodes() if n["NodeID"] == node.ray_id), 1)


def present(nodes: Sequence[Node], cluster: ClusterSpec) -> tuple[tuple[Node, ...], frozenset[str]]:
    """Return the nodes of all devices, with others in place of those that left, and Ray's names of all that are there.

    A node that starts again is another one to Ray. What takes a node's place has its devices and no device of the session; one at
    the same address comes first.

    Args:
        nodes: the node of every device, as known so far.
        cluster: the devices.
    """
    there = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    current = {node: node for node in nodes}
    for lost in [node for node in current if node.ray_id not in there]:
        used = {node.ray_id for node in current.values()}
        devices = cluster.node_devices[lost.number]
        free = [node for ray_id, node in there.items() if ray_id not in used and _has(node, devices)]
        if free:
            new = min(free, key=lambda node: (node["NodeManagerAddress"] != lost.address, node["NodeID"]))
            current[lost] = replace(lost, ray_id=new["NodeID"], address=new["NodeManagerAddress"])
    return tuple(current[node] for node in nodes), frozenset(there)


def _has(node: Mapping[str, Any], devices: Sequence[DeviceSpec]) -> bool:
    """Return whether a node has devices like these, and as many."""
    kind = "CPU" if devices[0].name == "cpu" else "GPU"
    enough = int(node["Resources"].get(kind, 0)) >= len(devices)
    return enough and (kind == "CPU" or _device(node, kind, len(devices), False).name == devices[0].name)


def check_present(nodes: Sequence[Node], alive: Container[str], devices: Sequence[int]) -> None:
    """Check that the nodes of some devices are still there.

    Args:
        nodes: the node of every device of the session.
        alive: Ray's names of those that are there.
        devices: the numbers of those that are wanted.

    Raises:
        PlacementError: names the node, its devices and those that are left.
    """
    lost = [device for device in devices if nodes[device].ray_id not in alive]
    if not lost:
        return
    node = nodes[lost[0]]
    gone = [d for d, other in enumerate(nodes) if other == node]
    left = [d for d, other in enumerate(nodes) if other.ray_id in alive]
    raise PlacementError(
        f"devices {_listed(gone)} are on {node}, which has left the Ray cluster. Place the roles on devices {_listed(left)} "
        "(an hf.Placement names devices), or start the node again: the session takes it, or another like it, in its place."
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


# -- this user's Ray as ``hf.doctor()`` sees it: its token, its place, the cluster of ``"auto"``, open ports, leftovers


@dataclass(frozen=True)
class StateCheck:
    """One thing that was looked at."""

    name: str
    good: bool
    text: str


def look() -> list[StateCheck]:
    """Look at all of it; changes nothing and asks no network."""
    return [_mode(), _token(), _place(), _auto(), _ports(), _leftovers()]


def _mode() -> StateCheck:
    try:
        access.check_mode()
    except PlacementError as error:
        return StateCheck("Ray's authentication", False, str(error))
    text = "by token, whenever hfsdk starts Ray; a cluster that is joined and has none is told of"
    return StateCheck("Ray's authentication", True, text)


def _token() -> StateCheck:
    path = access.token_file()
    if path is None:
        return StateCheck("Ray's token", True, f"from {access.TOKEN} in the environment")
    try:
        info = path.stat()
    except FileNotFoundError:
        return StateCheck("Ray's token", True, f"{path} is not there yet; the first session makes it, readable by you alone")
    except OSError as error:
        return StateCheck("Ray's token", False, f"{path} cannot be looked at: {error.strerror}")
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid not in (os.geteuid(), 0):
        return StateCheck("Ray's token", False, f"{path} belongs to another user, who knows what is in it: sessions refuse it")
    if mode & 0o077:
        text = f"{path} has mode {mode:04o}: others can read it. The next session makes it 0600; delete it to have a new one made"
        return StateCheck("Ray's token", False, text)
    return StateCheck("Ray's token", True, f"{path}, mode {mode:04o}")


def _place() -> StateCheck:
    try:
        place = access.private_place()
    except PlacementError as error:
        return StateCheck("Ray's folder", False, str(error))
    return StateCheck("Ray's folder", True, f"{place}/{access.PREFIX}ray-..., of mode 0700, for as long as the session is open")


def _auto() -> StateCheck:
    try:
        joined = access.find_cluster()
    except PlacementError as error:
        return StateCheck("hf.Session('auto')", not os.path.lexists(access.address_file()), str(error))
    return StateCheck("hf.Session('auto')", True, f"joins {joined.address}, as {joined.source} says")


def _ports() -> StateCheck:
    listening = set()
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            ports = (c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN)
            listening |= {f"{process.name()} {port.laddr.ip}:{port.laddr.port}" for port in ports}
    return StateCheck("listening now", True, "; ".join(sorted(listening)) or "nothing of this process and those it started")


def _leftovers() -> StateCheck:
    places = {os.path.realpath(tempfile.gettempdir())}
    for tail in ("", access.SOCKET_TAIL):
        with contextlib.suppress(PlacementError):
            places.add(access.private_place(tail))
    left = [path for place in places for path in access.left_in(place)]
    if not left:
        return StateCheck("leftovers", True, "none of killed sessions")
    return StateCheck("leftovers", False, f"{', '.join(map(str, left))} of killed sessions; the next session removes them")
