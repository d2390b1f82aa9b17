"""``Snapshot``: a moment of a session that it can be rewound to, and what of it lies where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfsdk.core.field_texts import documented
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import StateCopy

if TYPE_CHECKING:
    import pandas as pd


@documented
@dataclass(frozen=True, eq=False)
class Snapshot:
    """Made by ``session.snapshot(name)``; ``session.rewind(snapshot)`` goes back to it.

    Weights, optimizer state and step counts lie in the host memory of the workers, each rank's share in its own process:
    data-parallel ranks keep one copy together. They stay when roles are placed elsewhere, are gone when one of these workers ends,
    and are freed when nothing refers to the snapshot any more (``session.forget``). A role that no update (and no function of
    ``run`` or ``call``) has touched since an earlier snapshot shares its state with it.
    """

    name: str
    """Under which ``rewind`` and ``fork`` find it."""
    branch: str
    """On which it was taken."""
    steps: int
    """Steps done by then; the next one has this number."""
    seed: int
    """The session's, of sampling and shuffling."""
    kept: tuple[StateCopy, ...]
    """State of each trained role: where, and how many bytes."""
    shared: Mapping[str, str]
    """Role -> the earlier snapshot that its state is shared with."""
    roles: tuple[RoleSpec, ...] = field(repr=False)
    """Every role as it was declared, functions with their versions."""
    positions: Mapping[str, int] = field(repr=False)
    """Place in each prompt stream, by its fingerprint."""
    counters: Mapping[str, float] = field(repr=False)
    """The session's: they seed the shuffles of updates; the normalisation and multiplier of scorers are among them."""
    nodes: Mapping[int, int] = field(repr=False)
    """Device -> its node."""
    order: int = field(repr=False)
    """Number of the last call before it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of everything it refers to."""
        return sum(kept.num_bytes for kept in self.kept)

    @property
    def new_bytes(self) -> int:
        """Bytes that it has added: without what it shares with earlier snapshots."""
        return sum(kept.num_bytes for kept in self.kept if kept.role not in self.shared)

    @property
    def functions(self) -> dict[str, str]:
        """Role -> the function it scored with, as ``name@version``."""
        return {r.name: f"{r.function.name}@{r.function.version}" for r in self.roles if r.function is not None}

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per trained role and device: role, updates, layout, node, device, bytes, shared_with."""
        import pandas as pd

        return pd.DataFrame(self._parts())

    def view(self) -> dict[str, Any]:
        """Return plain data for display."""
        return {
            "name": self.name, "branch": self.branch, "steps": self.steps, "num_bytes": self.num_bytes,
            "new_bytes": self.new_bytes, "functions": self.functions, "parts": self._parts(),
        }  # fmt: skip

    def _parts(self) -> list[dict[str, Any]]:
        return [
            {
                "role": kept.role, "updates": kept.num_updates, "layout": kept.layout, "node": self.nodes.get(device, 0),
                "device": device, "bytes": size, "shared_with": self.shared.get(kept.role, ""),
            }
            for kept in self.kept
            for device, size in zip(kept.devices, kept.part_bytes, strict=True)
        ]  # fmt: skip

    def __repr__(self) -> str:
        roles = []
        for kept in self.kept:
            shared = f", shared with {self.shared[kept.role]!r}" if kept.role in self.shared else ""
            roles.append(f"{kept.role} at update {kept.num_updates} ({kept.num_bytes / 1e6:.1f} MB{shared})")
        devices = sorted({device for kept in self.kept for device in kept.devices})
        where = f"host memory of device{'s' * (len(devices) != 1)} {', '.join(map(str, devices))}"
        at = f"branch {self.branch!r}, after {self.steps} step{'s' * (self.steps != 1)}"
        return f"Snapshot({self.name!r}, {at}: {', '.join(roles)}; {self.new_bytes / 1e6:.1f} MB new, in {where})"
