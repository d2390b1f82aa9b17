"""``KeptShare``: one rank's share of a role's state as a snapshot keeps it, in the memory of the worker's process.

It stays when the role moves, is released, or its pool is taken apart, and is gone with the process. Of what ranks that differ in dp
alone hold alike each keeps a part (``shares.py``): a state is kept once, and is there while all its workers live. The same ranks of
the same layout give it back to each other; to any other it goes in pieces (see ``role_state.py``)::

    actor dp2 on devices 0, 1        kept shares              rewind, still dp2: each rank's own, sent to the other one too
    rank 0, rank 1              ->   device 0, device 1       rewind, now tp2:   pieces of both, through the object store
"""

from __future__ import annotations

from dataclasses import dataclass

from hfsdk.engine.weights import bridge
from hfsdk.engine.weights.role_state import Shard, Summary
from hfsdk.engine.weights.shares import StateShare, pieces


@dataclass(frozen=True, eq=False)
class KeptShare:
    """One rank's share of a role's state, as a snapshot keeps it."""

    share: StateShare
    shard: Shard
    """The shard of the role that the rank held."""

    @property
    def layout(self) -> str:
        """The training layout that it was taken in."""
        return self.share.layout

    @property
    def num_updates(self) -> int:
        """Optimizer steps that it has seen."""
        return self.share.summary.num_updates

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return self.share.num_bytes

    def packed(self) -> tuple[Summary, bridge.Packed]:
        """Return it in pieces that any layout reads; those of other ranks that hold the same are left out."""
        return self.share.summary, bridge.pack(pieces(self.share, self.shard))
