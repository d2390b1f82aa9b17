"""Pass@k (arXiv 2107.03374): the chance that one of k responses to a prompt is right, of a batch with several responses each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import comb, nan
from typing import TYPE_CHECKING

import numpy as np

from hfsdk.algorithms.choices import Copies
from hfsdk.algorithms.options import Options
from hfsdk.core.checks import Index, checked
from hfsdk.core.errors import OptionError
from hfsdk.core.unscored import is_unscored

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Table


@dataclass(frozen=True, kw_only=True)
class PassAtK(Options):
    """A metric of batches with several responses per prompt: ``session.train(..., metrics=[hf.PassAtK(k=(1, 8))])``.

    ``session.evaluate(prompts, n=8, pass_at=(1, 8))`` has the same of held-out prompts.
    """

    k: tuple[Copies, ...] = (1,)
    """Numbers of responses of which one has to pass, each at most the responses to a prompt."""
    pass_score: float = 0.5
    """The score from which on a response passes."""

    @checked
    def __call__(self, batch: Batch) -> dict[str, float]:
        """Return ``pass_at_<k>`` of each k, the mean over the prompts; waits for the scores.

        Raises:
            OptionError: no prompt has k responses.
            ColumnError: the batch has no scores or groups.
            SimulatedValueError: the session is simulated and has no scores.
        """
        return pass_rates(batch, self.k, self.pass_score)


def pass_rates(batch: Batch, k: Sequence[int], pass_score: float) -> dict[str, float]:
    """Return ``pass_at_<k>`` over the prompts that have k scored responses, NaN where none has; waits.

    Raises:
        OptionError: no prompt has k responses, scored or not.
    """
    counts_and_rates: tuple[int, dict[str, float]]
    counts_and_rates = batch.reduce(partial(_rates, k=tuple(k), pass_score=pass_score), reads=["scores", "group"]).value
    most, rates = counts_and_rates
    if max(k, default=0) > most:
        largest = max(k)
        raise OptionError(
            f"pass@{largest} needs {largest} responses to a prompt; no prompt has more than {most}: generate with n={largest}"
        )
    return rates


def _rates(table: Table, k: tuple[int, ...], pass_score: float) -> tuple[int, dict[str, float]]:
    """Return how many responses a prompt has at most, and the rates of those k that some have."""
    scores, group = np.asarray(table["scores"], dtype=np.float64), np.asarray(table["group"])
    scored, (names, sizes) = ~is_unscored(scores), np.unique(group, return_counts=True)
    of_prompt = [scores[scored & (group == name)] for name in names]
    counts = [(len(own), int((own >= pass_score).sum())) for own in of_prompt]
    rates = {size: [pass_at_k(n, c, size) for n, c in counts if n >= size] for size in k}
    means = {f"pass_at_{size}": sum(each) / len(each) if each else nan for size, each in rates.items()}
    return int(sizes.max(initial=0)), means


@checked
def pass_at_k(n: Index, c: Index, k: Index) -> float:
    """Return ``1 - C(n - c, k) / C(n, k)``: the unbiased estimate of pass@k from c right responses of n (arXiv 2107.03374, eq. 1).

    Raises:
        OptionError: not ``0 <= c <= n`` and ``1 <= k <= n``.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise OptionError(f"pass@k needs c right responses among n, with c from 0 to n and k from 1 to n; got n={n}, c={c}, k={k}")
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)
