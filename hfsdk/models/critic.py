"""``CriticModel``: the value function of PPO."""

from __future__ import annotations

from typing import ClassVar

from hfsdk.core.batch import Batch
from hfsdk.core.checks import checked
from hfsdk.core.methods import COMPUTE_VALUES
from hfsdk.models.handle import TrainedHandle


class CriticModel(TrainedHandle):
    """A language model's body with a scalar head, new (zero) unless the folder has one: V(s) of every state."""

    kind: ClassVar[str] = "critic"

    @checked
    def compute_values(self, batch: Batch) -> Batch:
        """Write ``values``: the critic's estimate before each response token, in score units (HybridFlow, table 4).

        Args:
            batch: rows with prompt and response.

        Raises:
            ColumnError: the batch lacks a column.
        """
        return self._forward(batch, COMPUTE_VALUES)
