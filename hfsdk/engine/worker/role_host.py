"""The part of a worker that a hosted role needs: its rank, spans, and how objects and links reach other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hfsdk.core.roles import RoleSpec
from hfsdk.engine.process.recorder import Recorder
from hfsdk.engine.process.rendezvous import Link

if TYPE_CHECKING:
    from hfsdk.core.layout import Mesh
    from hfsdk.engine.process.safepoint import SafePoint
    from hfsdk.engine.training.checkpoint import StateWriter
    from hfsdk.engine.training.megatron_groups import RoleGroups
    from hfsdk.engine.training.trainer import Trainer
    from hfsdk.engine.weights.direct import Tensors, Way
    from hfsdk.engine.worker.kept_share import KeptShare
    from hfsdk.resharding.reshard_report import TransportReport


@dataclass(frozen=True)
class WorkerSetup:
    """The settings with which a worker joins a pool."""

    device: int
    rank: int
    world_size: int
    pool: str
    job_id: str
    store: str
    """The address under which the pool's processes meet: ``file://path``, or what :func:`rendezvous.serve` has returned."""
    num_threads: int = 1
    address: str = ""
    """The address of this worker's node, where the pool is on several machines."""
    collective_timeout_s: float | None = None
    """How long a rank waits for the others in a collective; ``None``: torch's own limits."""
    deterministic: bool = False
    """Whether the same calls shall give the same bits; the process has the environment for it (``deterministic.environment``)."""


class ObjectsGoneError(Exception):
    """Objects are gone from the store with the process that put them there, or with its node."""


class ObjectStore(Protocol):
    """The store of objects that are too large to travel with an answer."""

    def put(self, content: Any) -> Any:
        """Put an object where other processes find it; return a reference to it."""
        ...

    def get(self, references: Sequence[Any]) -> list[Any]:
        """Return the objects that references stand for.

        Raises:
            ObjectsGoneError: one of them is gone.
        """
        ...


class OwnStore:
    """The store of a process that is alone: a reference is the object itself."""

    def put(self, content: Any) -> Any:
        """Return the object."""
        return content

    def get(self, references: Sequence[Any]) -> list[Any]:
        """Return the objects."""
        return list(references)


class RoleHost(Protocol):
    """The worker, as its roles see it."""

    setup: WorkerSetup
    recorder: Recorder
    saves: dict[str, StateWriter]
    """The last save of each role."""
    kept: dict[int, KeptShare]
    """States of roles that snapshots refer to."""
    store: ObjectStore

    def rest(self) -> None:
        """Have every rollout here that sleeps give up its memory."""
        ...

    def exchange(
        self, way: Way, link: Link, sources: Tensors, targets: Tensors, safe: SafePoint,
        report_to: Callable[[TransportReport], None] | None = None,
    ) -> TransportReport:  # fmt: skip
        """Give or take weights over a link, once all of its ranks have agreed that they can; collective over both pools."""
        ...

    def memory(self) -> tuple[int, dict[str, int], dict[str, int], dict[str, int]]:
        """Return the bytes of the process and of its roles."""
        ...


class RoleOnRank(Protocol):
    """A hosted role, as the user's functions reach it."""

    spec: RoleSpec
    worker: RoleHost
    mesh: Mesh
    groups: RoleGroups

    @property
    def trainer(self) -> Trainer:
        """The role's Megatron model."""
        ...
