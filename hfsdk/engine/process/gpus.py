"""Decisions that differ where there are NVIDIA GPUs, as small pure functions; ``docs/gpu.md`` says which and why.

A worker process has one GPU, and sees all of its node (Ray would mask the others): vLLM's custom all-reduce and symmetric memory
open the memory of the peers' GPUs by their numbers, and cannot where each process calls its own GPU 0::

    Ray gives a worker      "3"                   entries of the CUDA_VISIBLE_DEVICES that Ray was started under, or GPUs' numbers
    torch calls it          cuda:3                its place among the GPUs that the worker's own environment shows
    vLLM is told            LOCAL_RANK=3          as torchrun would tell it

Importing this module imports neither torch nor Ray, so that it can be asked before both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from hfsdk.core.errors import PlacementError
from hfsdk.core.rollout_sizes import MAX_SHARE

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""A file that is there where the NVIDIA kernel driver is loaded."""

SHOW_ALL = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Environment of a worker on a GPU: Ray gives it one, and leaves the others to be seen."""

HEADROOM_BYTES = 256 * 2**20
"""Bytes that are left out of that share of free memory: a process may take them between our look and vLLM's."""


def has_driver() -> bool:
    """Whether this machine has an NVIDIA driver; asked before torch is imported."""
    return DRIVER_FILE.exists()


@dataclass(frozen=True)
class Seen:
    """The GPUs that a process sees.

    Attributes:
        visible: ``CUDA_VISIBLE_DEVICES``; ``None`` where it is not set.
        count: GPUs that torch finds.
        build: torch's version, whose ending names its build.
    """

    visible: str | None
    count: int
    build: str

    def index(self, gpu_ids: Sequence[str]) -> int:
        """Return torch's number of the one GPU that Ray gave this process.

        Args:
            gpu_ids: Ray's ids of its GPUs: numbers, or UUIDs where Ray was started under a ``CUDA_VISIBLE_DEVICES`` of UUIDs.

        Raises:
            PlacementError: torch sees no GPU, or not that one.
        """
        if not self.count:
            raise PlacementError(
                f"Ray gave this worker GPU {', '.join(gpu_ids) or '(none)'}, and torch {self.build} sees 0 GPUs. {self._why_none()}"
            )
        if len(gpu_ids) != 1:
            raise PlacementError(
                f"Ray gave this worker {len(gpu_ids)} GPUs ({', '.join(gpu_ids) or 'none'}); it takes 1. Restart Ray."
            )
        shown = [name.strip() for name in self.visible.split(",")] if self.visible else [str(k) for k in range(self.count)]
        if gpu_ids[0] not in shown or shown.index(gpu_ids[0]) >= self.count:
            raise PlacementError(
                f"Ray gave this worker GPU {gpu_ids[0]}, and torch sees {self.count} ({', '.join(shown)}). Start Ray under the "
                "CUDA_VISIBLE_DEVICES that its workers have."
            )
        return shown.index(gpu_ids[0])

    def _why_none(self) -> str:
        if self.build.endswith("+cpu"):
            return "That is a build for processors: install one for CUDA (make setup CUDA=1)."
        if self.visible == "" or self.visible == "-1":
            return f"CUDA_VISIBLE_DEVICES={self.visible!r} hides them: unset it."
        return "hf.doctor() shows the driver's version, which may be too old for this build."


def check_count(num_devices: int | None, total: int) -> None:
    """Check that Ray has as many GPUs as were asked for.

    Raises:
        PlacementError: it has fewer.
    """
    if num_devices is not None and num_devices > total:
        raise PlacementError(
            f"{num_devices} devices asked for; Ray has {total} GPU{'s' * (total != 1)}. Ask for at most {total}, add nodes to the "
            f"cluster, or simulate them: hf.Session.simulated('1x{num_devices} H100')."
        )


def default_dtype(device_name: str, simulated: bool) -> str:
    """Return the dtype of a model whose user names none: ``"bf16"`` on real GPUs, ``"fp32"`` on processors and in simulation.

    A simulation of GPUs has always taken fp32 unless it is told otherwise, and what it predicted stays what it was.

    Args:
        device_name: the name of the session's devices, as ``ClusterSpec`` has it; processors' begin with "cpu".
        simulated: whether nothing runs on them.
    """
    return "fp32" if simulated or device_name.startswith("cpu") else "bf16"


def sleeps(device_type: str, *, trained: bool, pool_is_free: bool) -> bool:
    """Return whether a rollout gives its memory up while a trainer of its process works.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``; vLLM sleeps on the latter alone.
        trained: whether its weights come from a trainer in this process, so that they are there again whenever it wakes. A rollout
            in its own pool keeps what other ranks have sent it.
        pool_is_free: whether no other engine of this process has the memory that vLLM can give up: one may.
    """
    return device_type == "cuda" and trained and pool_is_free


def goes_direct(givers: Collection[int], takers: Collection[int], cpus: Collection[int], *, on_cpus: bool = False) -> bool:
    """Return whether weights go straight from the workers of one pool to those of another, or by the object store.

    Straight is by NCCL, with both pools at it. A worker of both could not give and take at once; without GPUs the store's shared
    memory is as near as a peer's, and the giver need not wait.

    Args:
        givers: devices of the pool that gives.
        takers: devices of the pool that takes.
        cpus: devices that are no GPUs.
        on_cpus: go straight without GPUs too, by gloo; for tests.
    """
    if not set(givers).isdisjoint(takers):
        return False
    return on_cpus or set(cpus).isdisjoint([*givers, *takers])


def memory_share(needed: int, free: int, total: int) -> float:
    """Return vLLM's ``gpu_memory_utilization``: the free share of a GPU's memory, never more than vLLM's own default.

    vLLM refuses to start where less is free than this share, also where the size of its cache is given
    (``vllm/v1/worker/utils.py``, ``request_memory``). The trainer's weights are there first, so its default never fits.

    Args:
        needed: bytes of the weights and the key/value cache that it will hold.
        free: bytes free on the GPU, torch's cache emptied.
        total: all bytes of the GPU.

    Raises:
        PlacementError: less is free than needed.
    """
    usable = free - HEADROOM_BYTES
    if needed > usable:
        raise PlacementError(
            f"the rollout needs {needed / 1e9:.1f} GB for its weights and key/value cache, and {max(usable, 0) / 1e9:.1f} of "
            f"{total / 1e9:.1f} GB are free on this GPU. Give it less cache (kv_cache_bytes=, max_num_seqs=), more devices "
            "(rollout='tp2'), or a pool of its own (hf.Placement); nvidia-smi shows what other processes hold."
        )
    return min(MAX_SHARE, int(usable / total * 1000) / 1000)
