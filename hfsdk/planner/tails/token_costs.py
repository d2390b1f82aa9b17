"""The costs of one rollout replica's decode steps as numbers: read once from ``PerfModel``, then looked up step by step.

The model's seconds for responses of one token each give the step, and what one more key and value costs::

    decode(prompts 0, responses 1, of n rows)  =  step(n) + read n / 2        (a token reads the half of itself, on average)
    decode(prompts c, ...)                     =  the same + read n c

so nothing of the model is written down here a second time. A step of n rows with C keys and values takes step(n) + read C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hfsdk.core.cluster import LinkSpec
from hfsdk.core.rollout_sizes import CacheUnits
from hfsdk.core.table import Array
from hfsdk.planner.perf.perf_model import PerfModel, Setup


@dataclass(frozen=True, kw_only=True)
class TokenCosts:
    """Seconds of a replica's decode steps, and how many rows it holds."""

    step_s: tuple[float, ...]
    """Seconds of a step by the number of rows; 0 for none."""
    read_s: float
    """Seconds for each key and value that a step reads."""
    prefill_s: float
    """Seconds for each token that is read again or for the first time."""
    cache_tokens: float = math.inf
    """Tokens that the replica's cache holds."""
    move_token_s: float = 0.0
    """Seconds for each token whose keys and values come from another replica."""
    move_s: float = 0.0
    """Seconds for each move of a row from another replica."""

    @property
    def most_rows(self) -> int:
        """Rows decoded at once."""
        return len(self.step_s) - 1

    @classmethod
    def of(cls, perf: PerfModel, setup: Setup, prompts: Array, num_rows: int, between: LinkSpec) -> TokenCosts:
        """Read the costs of one replica from the model.

        Args:
            perf: predicts the seconds.
            setup: the model in its rollout layout.
            prompts: lengths of prompts as they come; a token of prefill takes their mean.
            num_rows: most rows that are ever given to it.
            between: the link to other replicas, one device's part.
        """
        most = min(num_rows, setup.max_num_seqs)
        one_row = np.ones(1)
        none = perf.decode(setup, np.zeros(1), one_row)
        read_s = perf.decode(setup, one_row, one_row) - none
        step_s = [perf.decode(setup, np.zeros(rows), np.ones(rows)) - read_s * rows / 2 for rows in range(1, most + 1)]
        token_bytes = setup.spec.kv_bytes_per_token(setup.dtype) / min(setup.rollout_tp, setup.spec.num_kv_heads)
        cache = math.inf
        if setup.kv_cache_bytes:
            units = CacheUnits.of_tokens(setup.spec, 1, setup.rollout_tp, setup.dtype, setup.rollout_pp)
            cache = float(units.held_by(setup.kv_cache_bytes)) * units.block / token_bytes
        return cls(
            step_s=(0.0, *step_s), read_s=read_s, prefill_s=perf.prefill(setup, prompts) / float(prompts.sum()),
            cache_tokens=cache, move_token_s=perf.move(token_bytes, between, 0),
            move_s=perf.move(0.0, between, setup.spec.num_layers),
        )  # fmt: skip
