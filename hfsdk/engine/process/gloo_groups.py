"""How this process's gloo groups are made: they share a thread that looks for messages, and nobody else gets into one.

*One thread.* Gloo gives each group its own device, and each device a thread that wakes up a hundred times a second. A role has
up to seven groups and vLLM makes more, so that a worker at rest would be kept busy by them. Groups on the same interface share a
device here; what they send and receive is the same.

*Nobody else.* A device listens on a port for the other ranks of its groups. Gloo takes any connection there, asks for no secret and
believes what comes: another user of the machine, or of the network, could take a rank's place. So::

    the port is closed     a filter on the listening socket drops every packet, as if nobody listened
    a group is made        its ranks meet in the store, open their ports, gloo connects every pair, the ports are closed again
    a group is proven      each rank sends each other the keyed hash of who it is; the key is new, and only the store has it

A stranger that came in between cannot say the hash: then every rank drops the group, and all make it again on other ports. The
store is trusted: a file in a folder of ours, or one that asks for a secret itself (:mod:`~hfsdk.engine.process.keyed_store`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hmac
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MOST_TRIES = 5
"""How often a group is made anew where strangers came in between."""

PROOF_LIMIT = timedelta(seconds=10)
"""How long a rank waits for another's proof; all are there by then. Only a stranger who says nothing makes it wait."""

AGAIN_LIMIT = timedelta(seconds=120)
"""How long a rank waits for the others to make a group again; they may meet such strangers, one after the other."""

LOOK_S = 0.001
"""How often a rank looks whether the others have come; torch's file store does so every 10 ms."""

PROOF_TAG = 2**30 + 3
ALL_PROVEN_TAG = 2**30 + 4
"""Tag of the messages that prove a group; nobody else uses it."""

HASH_BYTES = 32

# of <asm-generic/socket.h>, which Python's module leaves out
SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_MEMINFO = 26, 27, 55
DROPS = 8
"""Index in SO_MEMINFO of the packets that a socket's filter has dropped."""


class StrangersError(RuntimeError):
    """A group could not be proven, however often it was made."""


def protect() -> None:
    """Have all gloo groups that are made from now on in this process share devices and be proven."""
    from torch.distributed import distributed_c10d as c10d

    made: Any = c10d  # what new_group, init_process_group and vLLM look it up in
    made.ProcessGroupGloo = _proven(c10d.ProcessGroupGloo)


def knocks() -> int:
    """Return how many packets of strangers have come to this process's closed ports; one connection may have sent several."""
    return sum(device.knocks() for device in _devices.values()) + _Seen.intruders


class _Seen:
    """The events that this process has noticed."""

    intruders = 0
    """Connections that took a rank's place while a group was made, and said something else than its proof."""


class Device:
    """A gloo device and the port that it listens on, which is closed but inside :meth:`opened`."""

    def __init__(self, interface: str) -> None:
        from torch.distributed import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo
        before = _listening()
        self.gloo = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
        new = _listening() - before
        self.listener: int | None = None  # where another thread listens since as well, that must not be closed instead
        if len(new) == 1:
            self.listener = os.dup(new.pop())  # gloo may close its own
        self._opened = 0
        self._close()

    def knocks(self) -> int:
        """Return how many packets the closed port has dropped."""
        with suppress(OSError, struct.error), self._socket() as listener:
            return int(struct.unpack_from("I", listener.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 64), 4 * DROPS)[0])
        return 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let others connect for a while."""
        with suppress(OSError), self._socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        self._opened += 1
        try:
            yield
        finally:
            self._opened -= 1
            if not self._opened:  # not while another thread makes a group
                self._close()

    def _close(self) -> None:
        """Drop whatever packet comes to the listening socket; connections that are there have sockets of their own."""
        program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0: keep no byte of the packet
        with suppress(OSError), self._socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))

    @contextlib.contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        """Give the listening socket for a moment.

        Raises:
            OSError: it is not known.
        """
        if self.listener is None:
            raise OSError("which socket of this process is gloo's is not known")
        with _socket_of(self.listener) as listener:
            yield listener

    def forget(self) -> None:
        """Use it for no more groups."""
        if self.listener is not None:
            os.close(self.listener)
            self.listener = None


_devices: dict[str, Device] = {}
"""Gloo's devices for new groups, by interface."""


def _current(interfaces: str) -> list[Device]:
    """Return the devices that torch would make where ``GLOO_SOCKET_IFNAME`` is this; the same each time."""
    for name in interfaces.split(","):
        if name not in _devices:
            _devices[name] = Device(name)
    return [_devices[name] for name in interfaces.split(",")]


@contextlib.contextmanager
def _socket_of(number: int) -> Iterator[socket.socket]:
    """Give a file descriptor of this process as a socket for a moment; whose it is closes it.

    Raises:
        OSError: it is no socket.
    """
    handle = socket.socket(fileno=number)
    try:
        yield handle
    finally:
        handle.detach()


def _listening() -> set[int]:
    """Return the file descriptors of this process that listen for TCP connections; elsewhere than on Linux none are found."""
    listening: set[int] = set()
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError), _socket_of(int(name)) as handle:  # it may be no socket, or closed meanwhile
            if handle.family in (socket.AF_INET, socket.AF_INET6) and handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(int(name))
    return listening


@functools.cache
def _proven(plain: Any) -> Any:
    """Return gloo's class whose groups are made by :func:`make`; it itself where it is that."""
    if hasattr(plain, "is_proven"):
        return plain

    class IsGloo(type(plain)):  # type: ignore[misc]  # a group is an object of gloo's own class
        def __instancecheck__(cls, group: Any) -> bool:
            return isinstance(group, plain)

    class ProvenGroup(plain, metaclass=IsGloo):
        is_proven = True

        def __new__(cls, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
            return make(store, rank, size, timeout)

    return ProvenGroup


def make(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a proven group of gloo; collective over its ranks.

    Args:
        store: a store that all ranks share and that nobody else can read or write.
        rank: this process in the group.
        size: ranks of the group.
        timeout: how long ranks wait for each other, to come and in a collective.

    Raises:
        StrangersError: it could not be proven at any try.
    """
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import ProcessGroupGloo

    plain: Any = ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for number in range(MOST_TRIES):
        devices = _current(interfaces)
        options = plain._Options()
        # gloo listens on the devices that it is given; torch would make new ones, whose ports stay open.
        options._devices = [device.gloo for device in devices]
        options._threads = 2 * len(devices)  # as torch has it
        options._timeout = timeout
        if size == 1:
            return plain(store, rank, size, options)
        # Keys of an earlier try are still in the store, and gloo would read them as addresses.
        here = PrefixStore(f"try{number}/", store) if number else store
        limit = min(timeout, AGAIN_LIMIT) if number else timeout  # they have all been there once
        with contextlib.ExitStack() as open_ports:
            key = _meet(here, "here", rank, size, limit)
            for device in devices:
                open_ports.enter_context(device.opened())
            _meet(here, "open", rank, size, limit)
            try:
                group = plain(here, rank, size, options)
            except RuntimeError:  # on a machine with many times more work than cores gloo may lose a connection
                if number == MOST_TRIES - 1:
                    raise
                group = None
        if group is not None and _is_proven(group, key, rank, size):
            return group
        group = None  # closes its connections, so that every other rank sees that it failed
        for name in interfaces.split(","):
            if name in _devices:
                _devices.pop(name).forget()  # it may hold more of the strangers' connections, for pairs to come
    raise StrangersError(
        f"this pool's processes connected {MOST_TRIES} times, and each time one of them was not who it should be, or said nothing. "
        "Either another user of this machine or network tries to get in (end that process, or place the pool elsewhere), or the "
        "machine has many times more work than cores."
    )


def _meet(store: Store, name: str, rank: int, size: int, limit: timedelta) -> bytes:
    """Wait until every rank has come this far; return a key that the first rank has made.

    Raises:
        RuntimeError: some did not come.
    """
    store.set(f"{name}{rank}", secrets.token_hex(HASH_BYTES) if rank == 0 else "there")
    missing, end = list(range(size)), time.monotonic() + limit.total_seconds()
    while missing := [other for other in missing if not store.check([f"{name}{other}"])]:
        if time.monotonic() > end:
            raise RuntimeError(f"ranks {missing} of a group of {size} did not come within {limit.total_seconds():g} s")
        time.sleep(LOOK_S)
    return bytes(store.get(f"{name}0"))


def _is_proven(group: Any, key: bytes, rank: int, size: int) -> bool:
    """Tell each other rank who this is, and hear it of each; whether all could, on all ranks alike."""
    import torch

    others = [other for other in range(size) if other != rank]

    def exchange(tag: int, own: dict[int, bytes], wanted: dict[int, bytes]) -> list[int]:
        """Return the ranks that have not sent the wanted bytes."""
        buffers = {other: torch.zeros(HASH_BYTES, dtype=torch.uint8) for other in others}
        receiving = {other: group.recv([buffers[other]], other, tag) for other in others}
        sending = [group.send([torch.tensor(list(own[other]), dtype=torch.uint8)], other, tag) for other in others]
        for other in others:
            receiving[other].wait(PROOF_LIMIT)
        for sent in sending:
            sent.wait(PROOF_LIMIT)
        return [other for other in others if not hmac.compare_digest(bytes(buffers[other].tolist()), wanted[other])]

    def proofs(words: str) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Return the bytes that this rank sends to each other, and each other to this one."""

        def of(sender: int, reader: int) -> bytes:
            return hmac.digest(key, f"{words}: rank {sender} of {size} to {reader}".encode(), "sha256")

        return {other: of(rank, other) for other in others}, {other: of(other, rank) for other in others}

    try:
        if strangers := exchange(PROOF_TAG, *proofs("here")):
            _Seen.intruders += len(strangers)
            return False  # this rank closes all of its connections now, and nobody gets the second message of it
        return not exchange(ALL_PROVEN_TAG, *proofs("all are proven to me"))
    except RuntimeError:  # a connection was closed, by a stranger or by a rank that has met one, or nothing came
        return False
