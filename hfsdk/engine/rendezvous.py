"""How the processes of a pool, or of two, find each other: by a file on one node, by a TCP store where they are on several.

::

    one node      file:///tmp/hfsdk-.../store3           gloo on the loopback interface, nothing listens outside
    several       tcp://10.0.0.4:40123                   served by rank 0's process on its node's address alone; gloo on the
                                                         interface that has the worker's own node's address

Nodes that share an address are on one machine: there the store and gloo keep to the loopback interface too.

Over several machines the store and every gloo and NCCL connection listen on the nodes' addresses, and torch neither encrypts nor
authenticates them: whoever reaches these ports can read and overwrite the store's keys and what ranks send each other. Ray's token
does not cover them. A pool over several machines belongs on a network that only they are on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

LOOPBACK = "127.0.0.1"

LINK_TIMEOUT_S = 600.0
"""How long a rank of two pools waits for the others, unless the session says otherwise; torch's own limit for NCCL."""


class _Joined:
    """What this process's world was made with."""

    timeout: timedelta | None = None


def world_timeout() -> timedelta | None:
    """Return how long ranks of the world wait for each other in a collective; ``None``: torch's own limits."""
    return _Joined.timeout


def interface_of(address: str) -> str:
    """Return the network interface that has an address, ``""`` where none has: gloo then asks for this host's name."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == address for known in addresses):
            return str(name)
    return "lo" if address.startswith("127.") else ""  # all of 127/8 is on it


def set_interface(address: str) -> None:
    """Tell gloo which interface to use for the groups made from now on: that of ``address``, or loopback for ``""``."""
    interface = interface_of(address) if address else "lo"
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    else:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def serve(host: str) -> tuple[Any, int]:
    """Serve a store on one address of this machine; return it (it ends with its last reference) and its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's types leave it out

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family)
    port = int(server.getsockname()[1])
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    return store, port


def join(store: str, rank: int, world_size: int, gpu: int | None = None, timeout_s: float | None = None) -> None:
    """Join a pool's world; collective. On GPUs NCCL connects its ranks now, so that what hinders it is told at the start.

    Args:
        store: ``file://path`` or ``tcp://host:port``.
        rank: this process in the pool.
        world_size: processes in the pool.
        gpu: torch's number of this process's GPU; ``None`` without one.
        timeout_s: how long a rank waits for the others in a collective; ``None``: torch's own (gloo 30 minutes, NCCL 10).
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if store.startswith("tcp://"):
        host, _, port = store.removeprefix("tcp://").rpartition(":")
        found = TCPStore(host, int(port), is_master=False)
        where: dict[str, Any] = {"store": found}
    else:
        where = {"init_method": store}
    _Joined.timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if _Joined.timeout is not None:
        where["timeout"] = _Joined.timeout
    if gpu is None:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, **where)
        return
    device = torch.device("cuda", gpu)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world_size, device_id=device, **where)
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = None  # groups that only their members make cannot be split from a bound communicator


@dataclass(frozen=True)
class Link:
    """What the ranks of two pools are told to find each other; those of the first pool come first."""

    number: int
    """Unique in the session."""
    pools: tuple[str, str]
    store: str
    """``file://path`` or ``tcp://host:port``."""
    num_ranks: int
    addresses: tuple[str, ...] = ()
    """Of every rank's node, where they are on several machines."""
    timeout_s: float | None = None
    """How long a rank waits for the others; ``None``: :data:`LINK_TIMEOUT_S`."""


def meet(link: Link, rank: int, gpu: int | None = None) -> ProcessGroup:
    """Join the world of two pools, beside the world of this process's own; collective.

    It ends with its last reference. The default world is one to a process, so this one is made as vLLM makes its own
    (``stateless_init_torch_distributed_process_group``), with both backends of a pool's world, and torch's point-to-point
    functions are told its ranks.

    Args:
        link: the same on all ranks.
        rank: this process's in the link.
        gpu: torch's number of this process's GPU; ``None`` without one.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import distributed_c10d as c10d

    timeout, name = timedelta(seconds=link.timeout_s or LINK_TIMEOUT_S), c10d.GroupName(f"hfsdk-link{link.number}")
    store = _store_of(link, timeout)
    group = dist.ProcessGroup(store, rank, link.num_ranks)
    kinds = dist.ProcessGroup.BackendType
    with _interface(link.addresses[rank] if link.addresses else ""):
        gloo = dist.ProcessGroupGloo(PrefixStore("cpu/", store), rank, link.num_ranks, timeout=timeout)
    gloo._set_sequence_number_for_group()
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if gpu is not None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout, options.group_name = timeout, name
        options.global_ranks_in_group = list(range(link.num_ranks))
        nccl = dist.ProcessGroupNCCL(PrefixStore("cuda/", store), rank, link.num_ranks, options)
        nccl._set_sequence_number_for_group()
        group._set_default_backend(kinds.NCCL)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        nccl.eager_connect_single_device(torch.device("cuda", gpu))  # a first batch of which some ranks have no part would hang
    group._set_group_name(name)
    c10d._world.pg_group_ranks[group] = {k: k for k in range(link.num_ranks)}
    return group


@contextmanager
def _interface(address: str) -> Iterator[None]:
    """Use another interface for a while; the pool still makes groups on its own."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    set_interface(address)
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before


def part(group: ProcessGroup) -> None:
    """Leave the world of two pools: NCCL's connections are ended now, gloo's with the last reference to the group."""
    from torch.distributed import distributed_c10d as c10d

    c10d._world.pg_group_ranks.pop(group, None)
    group.abort()


def _store_of(link: Link, timeout: timedelta) -> Store:
    from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

    found: Store
    if link.store.startswith("tcp://"):
        host, _, port = link.store.removeprefix("tcp://").rpartition(":")
        found = TCPStore(host, int(port), is_master=False)
    else:
        found = FileStore(link.store.removeprefix("file://"), link.num_ranks)
    found.set_timeout(timeout)
    return PrefixStore(f"link{link.number}/", found)
