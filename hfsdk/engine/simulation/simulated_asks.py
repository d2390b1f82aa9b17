"""What the simulated runtime asks, and of whom: ``Costs`` for seconds, ``Estimate`` for bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.roles import RoleSpec
from hfsdk.core.table import RowLengths
from hfsdk.engine.simulation.simulated_spans import Phases


class Costs(Protocol):
    """Who predicts seconds. Every answer must be a pure function of its arguments."""

    @property
    def dispatch_s(self) -> float:
        """Seconds between a call's start and its work on the devices."""
        ...

    def method_costs(
        self,
        method: str,
        role: RoleSpec,
        cluster: ClusterSpec,
        devices: Sequence[int],
        rows: Sequence[RowLengths],
        stale: bool = False,
        first: bool = False,
    ) -> Sequence[Phases]:
        """Return, for each (prompt lengths, response lengths) of ranks that share rows, seconds by span name, in order."""
        ...

    def host_task(self, num_rows: int, num_tokens: int) -> float:
        """Return the seconds of a CPU task."""
        ...


@dataclass(frozen=True, eq=False)
class CostQuestion:
    """What was asked of a performance model for a call: the seconds of a method for groups of ranks that share rows."""

    method: str
    role: RoleSpec
    devices: tuple[int, ...]
    rows: tuple[RowLengths, ...]
    """By group: prompt lengths and response lengths."""
    weights: tuple[int, ...]
    """By group: its number of ranks."""
    stale: bool = False
    first: bool = False
    """Whether the rollout has had no weights before."""


class Estimate(Protocol):
    """Bytes of a role on one device, as a memory model predicts them (``hfsdk.planner.perf.memory.MemoryEstimate`` is one)."""

    @property
    def weights(self) -> int:
        """The trainer's weights."""
        ...

    @property
    def gradients(self) -> int:
        """Their gradients."""
        ...

    @property
    def optimizer(self) -> int:
        """Masters and moments."""
        ...

    @property
    def rollout_weights(self) -> int:
        """The generating engine's copy."""
        ...

    @property
    def kv_cache(self) -> int:
        """Its key/value cache."""
        ...

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Which of these are in host memory while they are not used."""
        ...

    @property
    def base(self) -> int:
        """Of ``weights``, those that are not trained here, which roles on a device may have together."""
        ...

    @property
    def asleep(self) -> int:
        """Of the rollout's weights and cache, what is there only while it generates."""
        ...

    @property
    def resident(self) -> int:
        """Bytes held all the time."""
        ...

    @property
    def passes(self) -> int:
        """Further bytes while the trainer works."""
        ...
