"""How the processes of a pool find each other: by a file on one node, by a TCP store where the pool spans several.

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
from datetime import timedelta
from typing import Any

LOOPBACK = "127.0.0.1"


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
    if timeout_s is not None:
        where["timeout"] = timedelta(seconds=timeout_s)
    if gpu is None:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, **where)
        return
    device = torch.device("cuda", gpu)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world_size, device_id=device, **where)
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = None  # groups that only their members make cannot be split from a bound communicator
