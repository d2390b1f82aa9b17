"""One thread that looks for messages, for all gloo groups of a process.

Gloo gives each group a device of its own, and each device a thread that wakes up a hundred times a second. A role has up to seven
groups and vLLM makes more, so that a worker at rest would be kept busy by them. Groups on the same interface share a device here;
what they send and receive is the same.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any


def share() -> None:
    """Have all gloo groups that are made from now on in this process share one device per interface."""
    from torch.distributed import distributed_c10d as c10d

    made: Any = c10d  # what new_group and init_process_group look it up in
    made.ProcessGroupGloo = _sharing(c10d.ProcessGroupGloo)


@functools.cache
def _devices(interfaces: str) -> list[Any]:
    """Return the devices that torch would make where ``GLOO_SOCKET_IFNAME`` is this; the same each time."""
    from torch.distributed import ProcessGroupGloo

    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]


@functools.cache
def _sharing(plain: Any) -> Any:
    """Return gloo's group with shared devices; it itself where it has them."""
    if hasattr(plain, "shares_devices"):
        return plain

    class SharingGroup(plain):
        shares_devices = True

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = plain._Options()
            options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
            options._threads = 2 * len(options._devices)  # as torch has it
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    return SharingGroup
