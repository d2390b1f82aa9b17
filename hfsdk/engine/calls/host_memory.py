"""Host memory that copies of trained roles take on each node: known before it is spent.

A snapshot, and a save until it is written, copy every trained role once; its ranks copy a share each (``shares.py``). So a node
needs what its ranks' shares are. A 70B actor in bf16 after its first step, tp8 pp2 dp4 on eight nodes of eight GPUs (14 bytes a
parameter: weight, fp32 master, two moments; of a role with LoRA the parameters are its adapters')::

    every dp rank copying all it holds      8 x 61.7 GB = 494 GB a node
    shares                                  8 x 15.4 GB = 123 GB a node

Numbers in, numbers out, but for :func:`free_host_bytes`, which asks this machine. The tensors of a distributed optimizer are cut at
Megatron's own borders, whose padding is left out here: less than one part in a thousand of a model that needs several nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hfsdk.core.errors import CheckpointError
from hfsdk.core.roles import RoleSpec, state_bytes
from hfsdk.engine.calls.dispatch import mesh_of
from hfsdk.resharding.boxes import has_boxes, megatron_boxes

NOTICE_SHARE = 0.5
"""The share of a node's free memory above which a copy gives a notice."""

_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Files of Linux with a container's limit, its use, and what of that could be given back: version 2 and 1."""


@dataclass(frozen=True)
class HostRoom:
    """The room of a node's host memory: the bytes that it is to take, and those that are free."""

    node: int
    """The node's number in the session's ``ClusterSpec``."""
    needed_bytes: int
    free_bytes: int | None
    """The free bytes; ``None`` where nobody can say: on a virtual clock, or where the node does not answer."""


def kept_bytes(role: RoleSpec, rank: int, trained: bool) -> int:
    """Return the bytes of a rank's share: of weights, their fp32 masters where they are not fp32, and the moments after a step.

    Over the ranks that differ in dp alone they sum up to one copy; a mixture of experts is said to lie even over all ranks.
    """
    assert role.learned is not None
    mesh = mesh_of(role)
    at, num_ranks = mesh.coordinates(rank), mesh.layout.num_copies
    if has_boxes(role.learned):
        numbers = sum(box.numel for box in megatron_boxes(role.learned, mesh.layout, at.tp, at.pp))
    else:
        numbers = role.learned.num_parameters() // (mesh.layout.tp * mesh.layout.pp)
    whole = numbers * state_bytes(role.dtype, trained)
    number = at.dp * mesh.layout.cp + at.cp
    return whole * (number + 1) // num_ranks - whole * number // num_ranks


def needed_by_node(copies: Iterable[tuple[RoleSpec, Sequence[int], bool]]) -> dict[int, int]:
    """Return the bytes that copies of roles take on each node.

    Args:
        copies: the copies of each role (its declaration, the node of each of its ranks, whether it has taken an optimizer step).
    """
    needed: dict[int, int] = {}
    for role, nodes, trained in copies:
        for rank, node in enumerate(nodes):
            needed[node] = needed.get(node, 0) + kept_bytes(role, rank, trained)
    return dict(sorted(needed.items()))


def rooms(needed: Mapping[int, int], free: Mapping[int, int]) -> tuple[HostRoom, ...]:
    """Return, for every node, the bytes that copies need there and those that are free."""
    return tuple(HostRoom(node, num_bytes, free.get(node)) for node, num_bytes in needed.items())


def check_room(rooms: Iterable[HostRoom], what: str, advice: str) -> str:
    """Return a notice where a copy takes much of a node's free memory, else ``""``.

    Args:
        rooms: the nodes.
        what: the maker of the copy, e.g. ``"the snapshot"``.
        advice: the advice where it does not fit.

    Raises:
        CheckpointError: it takes more than there is; names the node that lacks most, and both numbers.
    """
    measured = [(room, room.free_bytes) for room in rooms if room.free_bytes is not None and room.needed_bytes]
    if not measured:
        return ""
    room, free = max(measured, key=lambda each: each[0].needed_bytes - each[1])
    words = f"{what} takes {_amount(room.needed_bytes)} of host memory on node {room.node}"
    if room.needed_bytes > free:
        raise CheckpointError(f"{words}, and {_amount(free)} are free there; nothing was copied. {advice}")
    room, free = max(measured, key=lambda each: each[0].needed_bytes / max(each[1], 1))
    if room.needed_bytes > NOTICE_SHARE * free:
        return f"{what} takes {_amount(room.needed_bytes)} of the {_amount(free)} of host memory that are free on node {room.node}"
    return ""


def too_large(rooms: Iterable[HostRoom], share: float) -> str:
    """Return in words of which node a copy would take more than this share of the free memory; ``""`` where it fits all."""
    for room in rooms:
        if room.free_bytes is not None and room.needed_bytes > share * room.free_bytes:
            return (
                f"{_amount(room.needed_bytes)} of the {_amount(room.free_bytes)} of host memory that are free on node {room.node}"
            )
    return ""


def free_host_bytes(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how much memory this machine, or the container that this process is in, can still give."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used, stat, reclaimable in _CGROUPS:
        with suppress(OSError, ValueError, IndexError):  # no such version, or no limit ("max")
            stats = dict(line.split()[:2] for line in (cgroups / stat).read_text(encoding="utf-8").splitlines())
            most, now = (int((cgroups / name).read_text(encoding="utf-8")) for name in (limit, used))
            free = min(free, most - now + int(stats.get(reclaimable, 0)))
    return max(0, free)


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:,.1f} MB"
