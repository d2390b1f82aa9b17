"""What a hosted role needs of its worker: which rank it is, where spans go, how objects and links reach other processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hfsdk.engine.process.recorder import Recorder
from hfsdk.engine.process.rendezvous import Link

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hfsdk.engine.training.megatron_checkpoint import Saving


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker is told when it joins a pool."""

    device: int
    rank: int
    world_size: int
    pool: str
    job_id: str
    store: str
    """Where the pool's processes find each other: ``file://path`` or ``tcp://host:port``."""
    num_threads: int = 1
    address: str = ""
    """Of this worker's node, where the pool is on several machines."""
    collective_timeout_s: float | None = None
    """How long a rank waits for the others in a collective; ``None``: torch's own limits."""
    deterministic: bool = False
    """Whether the same calls shall give the same bits; the process has the environment for it (``deterministic.environment``)."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """A role's state, which is too large to travel with an answer."""

    content: Any
    num_bytes: int


@dataclass(frozen=True)
class Sent:
    """A parcel on its way: where it lies."""

    handle: Any
    num_bytes: int


class RoleHost(Protocol):
    """The worker, as its roles see it."""

    setup: WorkerSetup
    recorder: Recorder
    saves: dict[str, Saving]
    """The last save of each role."""
    keep: Callable[[Any], Any]
    """Puts an object where other processes find it and returns a reference to it."""

    def rest(self) -> None:
        """Have every rollout here that sleeps give up its memory."""
        ...

    def link(self, link: Link, rank: int) -> AbstractContextManager[ProcessGroup]:
        """Use a link for the running call."""
        ...

    def memory(self) -> tuple[int, dict[str, int], dict[str, int], dict[str, int]]:
        """Return the bytes of the process and of its roles."""
        ...
