"""``RankView``: what the user's functions see of a role on one rank."""

from __future__ import annotations

from typing import Any

from hfsdk.core.table import Table
from hfsdk.engine.training import megatron_model
from hfsdk.engine.worker.probe import Probe
from hfsdk.engine.worker.role_host import RoleOnRank


class RankView:
    """What ``handle.run(fn)`` and primitives see: one rank of one role.

    Attributes:
        role: the role's name.
        rank, device: this rank in the role, and its device number.
        coordinates: its (tp, pp, dp) position.
        layout: the role's training layout.
        module: the Megatron model (a ``torch.nn.Module``) of this rank.
        groups: process groups (tp, dp, pp, world) for collectives.
    """

    def __init__(self, hosted: RoleOnRank) -> None:
        self._hosted = hosted
        self.role = hosted.spec.name
        self.rank = hosted.groups.rank
        self.device = hosted.worker.setup.device
        self.layout = hosted.mesh.layout
        self.coordinates = hosted.mesh.coordinates(self.rank)
        self.module = hosted.trainer.model
        self.groups = hosted.groups

    @property
    def num_updates(self) -> int:
        """Optimizer steps done."""
        return self._hosted.trainer.num_updates

    @property
    def probe(self) -> Probe:
        """What ``run.first_bad()`` asks of it."""
        return Probe(self._hosted)

    def memory(self) -> dict[str, int]:
        """Return the bytes of this process and of each role in it."""
        used, roles, _, _ = self._hosted.worker.memory()
        return {"process": used, **roles}

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every local parameter."""
        return {name: tuple(t.shape) for name, t in megatron_model.local_tensors(self.module).items()}

    def log_probs(self, rows: Table, temperature: float = 1.0) -> Any:
        """Return the log-probs of the response tokens of ``rows`` (ragged, as given); collective over the role.

        With pipeline stages the last one returns them, and the others ``None``.
        """
        micro_batches = [tuple(int(r) for r in rows.row_ids)]
        return self._hosted.trainer.log_probs(rows, micro_batches, temperature).get("log_probs")

    def __repr__(self) -> str:
        at = self.coordinates
        return f"<{self.role} rank {self.rank}: device {self.device}, tp {at.tp}, pp {at.pp}, dp {at.dp}>"
