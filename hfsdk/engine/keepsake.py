"""``Keepsake``: one rank's part of a role's state as a snapshot keeps it, in the memory of the worker's process.

It stays when the role moves, is released, or its pool is taken apart, and is gone with the process. The same rank of the same
layout takes it back as it is; to any other it goes in pieces (see ``role_state.py``)::

    actor dp2 on devices 0, 1        keepsakes                rewind, still dp2: each rank copies its own back
    rank 0, rank 1              ->   device 0, device 1       rewind, now tp2:   pieces of device 0, through the object store
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hfsdk.engine import bridge, role_state
from hfsdk.engine.worker import Parcel


@dataclass(frozen=True, eq=False)
class Keepsake:
    """See the module's text."""

    state: Mapping[str, Any]
    """What ``Trainer.state`` returned, without float32 masters, which the weights are themselves."""
    shard: role_state.Shard

    @classmethod
    def of(cls, state: Mapping[str, Any], shard: role_state.Shard) -> Keepsake:
        """Keep a rank's state, which nobody else uses."""
        weights = state["weights"]
        optimizer = {
            name: {k: t for k, t in held.items() if k != "main" or weights[name].dtype != torch.float32}
            for name, held in state["optimizer"].items()
        }
        return cls({**state, "optimizer": optimizer}, shard)

    @property
    def layout(self) -> str:
        """The training layout that it was taken in."""
        return str(self.state["layout"])

    @property
    def num_updates(self) -> int:
        """Optimizer steps that it has seen."""
        return int(self.state["num_updates"])

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        parts = [self.state["weights"], *self.state["optimizer"].values()]
        return sum(int(tensor.nbytes) for part in parts for tensor in part.values())

    def parcel(self) -> Parcel:
        """Return it in pieces that any layout reads; those of other ranks that hold the same are left out."""
        packed = bridge.pack(role_state.pieces(self.state, self.shard))
        return Parcel((role_state.Summary.of(self.state), packed), bridge.num_bytes_of(packed))
