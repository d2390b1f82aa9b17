"""``ReferenceModel``: the frozen policy that the KL is measured against."""

from __future__ import annotations

from typing import ClassVar

from hfsdk.core.arguments import LogProbs
from hfsdk.core.batch import Batch
from hfsdk.core.checks import checked
from hfsdk.core.methods import COMPUTE_LOG_PROBS
from hfsdk.models.handle import ModelHandle


class ReferenceModel(ModelHandle):
    """A frozen model, usually the actor's initial weights."""

    kind: ClassVar[str] = "reference"

    @checked
    def compute_log_probs(self, batch: Batch) -> Batch:
        """Write ``ref_log_probs``: this model's log-probability of every response token, at the row's temperature.

        (HybridFlow, table 4: compute_ref_log_prob.)

        Args:
            batch: rows with prompt and response.

        Raises:
            ColumnError: the batch lacks a column.
        """
        return self._forward(batch, COMPUTE_LOG_PROBS, LogProbs(column="ref_log_probs"), ["ref_log_probs"])
