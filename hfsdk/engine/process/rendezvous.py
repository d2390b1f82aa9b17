"""How the processes of a pool, or of two, find each other: by a file on one node, by a store that asks for a secret on several.

::

    one node      file:///tmp/hfsdk-.../store3           gloo on the loopback interface, nothing listens outside
    several       keyed://SECRET@10.0.0.4:40123          served by rank 0's process on its node's address alone; gloo on the
                                                         interface that has the worker's own node's address

Nodes that share an address are on one machine: there the store and gloo keep to the loopback interface too. The file is in a
folder of ours; the other's URL with its secret goes to the ranks with Ray's calls, which need Ray's token. gloo's groups are proven
by what is in the store (:mod:`~hfsdk.engine.process.gloo_groups`), and what ranks tell each other is never unpickled
(:mod:`~hfsdk.engine.process.plain_objects`). NCCL's groups are not proven, and nothing is encrypted: a pool over several machines
belongs on a network that only they are on.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from hfsdk.engine.process import gloo_groups, plain_objects
from hfsdk.engine.process.safepoint import PeerFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    from hfsdk.engine.process.keyed_store import StoreServer

LOOPBACK = "127.0.0.1"

KEYED = "keyed://"
"""How the URL of a store over several machines begins."""

SECRET_BYTES = 32

LINK_TIMEOUT_S = 600.0
"""How long a rank of two pools waits for the others, unless the session says otherwise; torch's own limit for NCCL."""

LOOK_S = 0.02
"""How often a rank looks whether something has happened that it waits for."""

AT_ONCE = timedelta(milliseconds=1)
"""The shortest limit that gloo has."""

CLOSING_TAG = 2**30 + 2
"""Tag of a message that nobody sends."""


class _Joined:
    """The timeout and stores that this process's world, and those of links, were made with."""

    timeout: timedelta | None = None
    store: Store | None = None
    """The store, which must stay alive: of a store that is written in Python torch refers to the half that is not."""
    of_links: ClassVar[dict[ProcessGroup, Store]] = {}


def world_timeout() -> timedelta | None:
    """Return how long ranks of the world wait for each other in a collective; ``None``: torch's own limits."""
    return _Joined.timeout


def interface_of(address: str) -> str:
    """Return the network interface that has an address, ``""`` where none has: gloo then asks for this host's name."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    return "lo" if address.startswith("127.") else ""  # all of 127/8 is on it


def set_interface(address: str) -> None:
    """Tell gloo which interface to use for the groups made from now on: that of ``address``, or loopback for ``""``."""
    interface = interface_of(address) if address else "lo"
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    else:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def serve(host: str) -> tuple[StoreServer, str]:
    """Serve a store on one address of this machine, until it is closed; return it and its URL, which has its secret."""
    from hfsdk.engine.process.keyed_store import StoreServer

    secret = secrets.token_bytes(SECRET_BYTES)
    server = StoreServer(host, secret)
    return server, f"{KEYED}{secret.hex()}@{host}:{server.port}"


def _opened(url: str, num_ranks: int, limit: timedelta | None) -> Store:
    """Return the store at a URL."""
    from torch._C._distributed_c10d import FileStore

    from hfsdk.engine.process.keyed_store import KeyedStore

    store: Store
    if url.startswith(KEYED):
        secret, _, where = url.removeprefix(KEYED).partition("@")
        host, _, port = where.rpartition(":")
        store = KeyedStore(host, int(port), bytes.fromhex(secret))
    else:
        store = FileStore(url.removeprefix("file://"), num_ranks)
    if limit is not None:
        store.set_timeout(limit)
    return store


def join(store: str, rank: int, world_size: int, gpu: int | None = None, timeout_s: float | None = None) -> None:
    """Join a pool's world; collective. On GPUs NCCL connects its ranks now, so that an obstacle is told at the start.

    Args:
        store: ``file://path``, or an address that :func:`serve` has returned.
        rank: this process in the pool.
        world_size: processes in the pool.
        gpu: torch's number of this process's GPU; ``None`` without one.
        timeout_s: how long a rank waits for the others in a collective; ``None``: torch's own (gloo 30 minutes, NCCL 10).
    """
    import torch
    import torch.distributed as dist

    gloo_groups.protect()
    plain_objects.protect()
    _Joined.timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    _Joined.store = _opened(store, world_size, _Joined.timeout)
    where: dict[str, Any] = {"store": _Joined.store}
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
    """The names by which the ranks of two pools find each other; those of the first pool come first."""

    number: int
    """Number of the link, unique in the session."""
    pools: tuple[str, str]
    store: str = field(repr=False)
    """``file://path``, or an address that :func:`serve` has returned, with its secret."""
    num_ranks: int
    addresses: tuple[str, ...] = ()
    """The address of every rank's node, where they are on several machines."""
    timeout_s: float | None = None
    """How long a rank waits for the others; ``None``: :data:`LINK_TIMEOUT_S`."""

    @property
    def limit_s(self) -> float:
        """How long a rank waits for the others."""
        return self.timeout_s or LINK_TIMEOUT_S


def meet(link: Link, rank: int, gpu: int | None = None, is_cut: Callable[[], bool] = lambda: False) -> ProcessGroup:
    """Join the world of two pools, in addition to this process's own; collective.

    The default world is one to a process, so this one is made as vLLM makes its own
    (``stateless_init_torch_distributed_process_group``), with both backends of a pool's world, and torch's point-to-point
    functions are told its ranks. Errors of NCCL are left to the user of the link: torch's watchdog would end this process, which
    lives on when the other pool is gone.

    Args:
        link: the same on all ranks.
        rank: this process's in the link.
        gpu: torch's number of this process's GPU; ``None`` without one.
        is_cut: asked while this rank waits for the others to come.

    Raises:
        RuntimeError: others did not come.
        PeerFailed: the link was cut meanwhile.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import distributed_c10d as c10d

    timeout, name = timedelta(seconds=link.limit_s), c10d.GroupName(f"hfsdk-link{link.number}")
    base, store = _store_of(link, timeout)
    _await_all(store, link, is_cut)
    group = dist.ProcessGroup(store, rank, link.num_ranks)
    kinds = dist.ProcessGroup.BackendType
    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"), _interface(link.addresses[rank] if link.addresses else ""):
        gloo = gloo_groups.make(PrefixStore("cpu/", store), rank, link.num_ranks, timeout)
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
            nccl.eager_connect_single_device(torch.device("cuda", gpu))  # a first batch of which some have no part would hang
    group._set_group_name(name)
    _Joined.of_links[group] = base
    c10d._world.pg_group_ranks[group] = {k: k for k in range(link.num_ranks)}
    return group


def _await_all(store: Store, link: Link, is_cut: Callable[[], bool]) -> None:
    """Wait until every rank is about to connect: gloo and NCCL would wait for one that is gone, and nothing ends that."""
    here, end = store.add("here", 1), time.monotonic() + link.limit_s
    while here < link.num_ranks:
        if is_cut():
            raise PeerFailed
        if time.monotonic() > end:
            raise RuntimeError(f"{here} of the {link.num_ranks} ranks of {' and '.join(link.pools)} met within {link.limit_s:g} s")
        time.sleep(LOOK_S)
        here = store.add("here", 0)


def part(group: ProcessGroup) -> None:
    """Leave the world of two pools: every rank that waits for this one, and every wait of its own in another thread, ends now."""
    from torch.distributed import distributed_c10d as c10d

    c10d._world.pg_group_ranks.pop(group, None)
    cut(group)
    _Joined.of_links.pop(group, None)


def cut(group: ProcessGroup) -> None:
    """End this process's work in the world of two pools, from any thread; the world is of no use afterwards.

    NCCL has ``ncclCommAbort`` for it. Gloo closes all connections of a group in which a wait has passed its limit, and has no other
    way before its last reference is gone.
    """
    import torch

    group.abort()
    gloo: Any = group._get_backend(torch.device("cpu"))
    with suppress(RuntimeError):
        gloo.recv_anysource([torch.empty(1)], CLOSING_TAG).wait(AT_ONCE)


@contextmanager
def _environment(**names: str) -> Iterator[None]:
    """Set variables that torch reads when a group is made."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _interface(address: str) -> Iterator[None]:
    """Use another interface for a while; the pool still makes groups on its own."""
    with _environment(GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo")):
        set_interface(address)
        yield


def _store_of(link: Link, timeout: timedelta) -> tuple[Store, Store]:
    """Return the store of two pools, and the part of it that is this link's."""
    from torch._C._distributed_c10d import PrefixStore

    base = _opened(link.store, link.num_ranks, timeout)
    return base, PrefixStore(f"link{link.number}/", base)
