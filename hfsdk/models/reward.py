"""``RewardModel`` and ``CostModel``: one number per response, from a Python function or from a model with a scalar head."""

from __future__ import annotations

from typing import ClassVar

from hfsdk.batch import Batch
from hfsdk.models.handle import ModelHandle
from hfsdk.pending import ColumnRef

NEVER_PASSED = (
    "prompt", "response", "rollout_log_probs", "old_log_probs", "ref_log_probs", "entropy", "values", "scores", "costs", "rewards",
    "advantages", "returns", "kl",
)  # fmt: skip
"""Built-in columns that a reward function does not get as keyword arguments."""


class _Scorer(ModelHandle):
    writes: ClassVar[str] = ""

    def _score(self, batch: Batch, method: str) -> Batch:
        function = self._role.function
        options = {"as": self.writes}
        if function is None:
            return self._forward(batch, method, [self.writes], options)
        inputs = self._need(batch, ["prompt", "response"], method) | self._extra_columns(batch)
        lease = self._submit(
            method, "preparation", inputs=inputs, writes=[self.writes], num_rows=len(batch), protocol=None, shipped=function,
            options={"function": function, "tokenizer": self._host.tokenizer_folder, **options}, timeout_s=self._role.timeout_s,
        )  # fmt: skip
        return batch.with_refs(lease, [self.writes])

    def _extra_columns(self, batch: Batch) -> dict[str, ColumnRef]:
        """Return the columns with one entry per sample: the data's own, and those of the generation."""
        found = {}
        for name in batch:
            info = None if name in NEVER_PASSED else self._client.info(batch.ref(name))
            if name not in NEVER_PASSED and (info is None or info.kind != "ragged"):
                found[name] = batch.ref(name)
        return found


class RewardModel(_Scorer):
    """Scores responses. A function has TRL's form ``f(prompts, completions, **columns) -> list[float]``.

    ``prompts`` and ``completions`` are texts, special tokens left out; the data's other columns come by name. It runs in a CPU
    task of its own, with a timeout.
    """

    kind: ClassVar[str] = "reward"
    writes: ClassVar[str] = "scores"

    def compute_scores(self, batch: Batch) -> Batch:
        """Write ``scores``: one number per response (HybridFlow, table 4: compute_reward).

        Args:
            batch: has prompt and response.

        Raises:
            ColumnError: the batch lacks a column.
            RewardFunctionError: at the first look: the function raised, took too long, or did not return one finite
                number per completion.
        """
        return self._score(batch, "compute_scores")


class CostModel(_Scorer):
    """The cost of Safe-RLHF (arXiv 2310.12773): like a reward, but to be kept below a limit."""

    kind: ClassVar[str] = "cost"
    writes: ClassVar[str] = "costs"

    def compute_costs(self, batch: Batch) -> Batch:
        """Write ``costs``: one number per response (HybridFlow, table 4: compute_cost). As ``RewardModel.compute_scores``."""
        return self._score(batch, "compute_costs")
