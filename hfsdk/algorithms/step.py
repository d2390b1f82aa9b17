"""`Step` and `SafeStep`, the results of an algorithm's step, and their numbers (`Statistics`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hfsdk.algorithms.invariants import RATIO_TOLERANCE, first_numbers, gaps, invariants, warn
from hfsdk.core.field_texts import documented
from hfsdk.core.pending import Metrics, Value
from hfsdk.core.unscored import PART, SCORES, is_unscored, scored_rows
from hfsdk.models.reward import FAILURES

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Table


EACH_UPDATE = ("loss", "grad_norm", "lr", "num_tokens", "num_samples")
"""Numbers of every update, whatever its loss: among a step's numbers with the role before it (``actor_grad_norm``)."""
PLACES = ("epoch", "mini_batch")
"""Columns that say which mini-batch a row is of, and have no mean."""
UNPREFIXED = ("GRPO(", "RLOO(", "ReMax(", "ReinforcePlusPlus(", "DPO(")
"""Algorithms whose rows in older saves have `EACH_UPDATE` without a role."""


@documented
@dataclass(frozen=True)
class Step:
    """One step: the batch with every column it gained, and the metrics of the updates; all may still be running."""

    batch: Batch
    """The batch with every column that the step's calls wrote."""
    critic: Metrics | None
    """``None`` for algorithms without a critic."""
    actor: Metrics | None
    """``None`` where nothing was left to learn from (`hfsdk.algorithms.grpo.GRPO.filter_groups`)."""

    def numbers(self, statistics: Statistics) -> dict[str, float]:
        """Return the batch's statistics and each metric of the updates as one number; waits.

        Metrics are averaged over the mini-batches; of those whose name ends in ``_max`` the largest counts. A number that every
        update has (`EACH_UPDATE`), or that both losses call by one name, is ``actor_loss`` and ``critic_loss``. The invariants
        before anything is updated are there as well (``first_ratio_error``, ``first_approx_kl``, ``first_clip_fraction``,
        ``rollout_gap_mean``, ``rollout_gap_max``); where it does not, an `InvariantWarning` says so.
        """
        parts, failures = (tuple(n for n in self.batch.columns if n.startswith(start)) for start in (PART, FAILURES))
        # Which parts and failures there are is only known from the batch, not from the algorithm.
        statistics = replace(statistics, parts=parts, failures=failures, baselines="baseline_scores" in self.batch.columns)
        numbers: dict[str, float] = dict(self.batch.reduce(statistics, reads=statistics.reads).value)
        rows = [] if self.actor is None else self.actor.rows
        dtype = self.actor.dtype if isinstance(self.actor, Metrics) else "fp32"
        numbers |= first_numbers(rows)
        warn(gaps(numbers, dtype) + invariants(rows, RATIO_TOLERANCE[dtype]))
        critic = update_numbers("critic", self.critic)
        actor = update_numbers("actor", self.actor)
        numbers |= {f"critic_{name}" if name in actor else name: number for name, number in critic.items()}
        return numbers | {f"actor_{name}" if name in critic else name: number for name, number in actor.items()}


@documented
@dataclass(frozen=True)
class SafeStep(Step):
    """A step with the numbers that Safe-RLHF has besides."""

    cost_critic: Metrics
    """Metrics of the cost critic's update."""
    multiplier: float
    """lambda, as the advantages were mixed with it."""
    next_multiplier: float
    """lambda, as it has moved by this step's costs."""
    ptx: Metrics | None = None
    """Metrics of the update on demonstrations; ``None`` without one."""
    ptx_loss: Value | None = None
    """The loss on these before that update."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """A function over a table that returns the numbers of a step; runs where the columns are (``batch.reduce``).

    Example: ``batch.reduce(fn, reads=fn.reads).value`` with ``fn = Statistics()`` gives ``{"score_mean": ..., ...}``.
    """

    scores: bool = True
    """Whether there is a column ``scores``; without it the step learns from something else (distillation)."""
    reference: bool = True
    """Whether there is a column ``ref_log_probs``."""
    critic: bool = True
    """Whether there are columns ``values`` and ``returns``."""
    groups: bool = False
    """Whether to look at the column ``group``: several responses per prompt."""
    costs: bool = False
    """Whether there is a column ``costs``."""
    baselines: bool = False
    """Whether there is a column ``baseline_scores``: a sample whose baseline was not scored is not either."""
    parts: tuple[str, ...] = ()
    """Columns with the scores of a reward's parts."""
    failures: tuple[str, ...] = ()
    """Columns that say why samples were skipped."""

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        columns = ["scores"] * self.scores + ["finish_reason", "rollout_log_probs", "old_log_probs"]
        columns += ["ref_log_probs"] * self.reference + ["values", "returns"] * self.critic
        columns += ["baseline_scores"] * self.baselines
        return columns + ["group"] * self.groups + ["costs"] * self.costs + [*self.parts, *self.failures]

    def __call__(self, table: Table) -> dict[str, float]:
        """Return the numbers of a whole batch.

        ``kl_mean`` is per sequence, in nats, by the k1 estimator, whatever the reward used; ``rollout_gap`` is
        ``|old_log_probs - rollout_log_probs|``, the disagreement of trainer and generating engine, per token;
        ``identical_groups`` is the share of responses whose group has one and the same score: they teach nothing.

        Numbers of scores, costs and values are of the samples that were scored; ``not_scored`` is how many were not, and is there
        where some were not. ``reward_failures`` are those on which a reward with ``failures="skip"`` failed; the column
        ``score_failures`` says how.
        """
        import torch

        from hfsdk.algorithms import groups, rlmath

        def flat(name: str, table: Table = table) -> torch.Tensor:
            return torch.tensor(table.ragged(name).flat, dtype=torch.float32)

        old_T = flat("old_log_probs")
        lengths_N = torch.tensor(table.ragged("old_log_probs").lengths)
        scored = scored_rows({name: table[name] for name in SCORES if name in table}, table.num_rows)
        # Means of scores, costs and values must leave out unscored samples, whose score is NaN; lengths and gaps count for all.
        judged = table if len(scored) == table.num_rows else table.take(scored)
        gap_T = (old_T - flat("rollout_log_probs")).abs()
        numbers = {}
        if self.scores:
            scores_N = torch.tensor(np.asarray(judged["scores"]), dtype=torch.float32)
            numbers = {"score_mean": scores_N.mean(), "score_std": rlmath.masked_var(scores_N, unbiased=False).sqrt()}
        numbers |= {
            "response_tokens_mean": lengths_N.double().mean(),
            "response_tokens_max": lengths_N.max(),
            "eos_rate": torch.tensor(ended(table)).double().mean(),
            "rollout_gap_mean": gap_T.mean(),
            "rollout_gap_max": gap_T.max() if gap_T.numel() else gap_T.mean(),
        }
        if self.reference:
            kl_T = rlmath.kl_estimate(old_T, flat("ref_log_probs"), "k1")
            numbers["kl_mean"] = rlmath.sequence_sum(kl_T, lengths_N).mean()
        if self.critic:
            numbers["explained_variance"] = rlmath.explained_variance(flat("values", judged), flat("returns", judged))
        if self.groups:
            group_N = torch.tensor(np.asarray(judged["group"], dtype=np.int64))
            numbers["identical_groups"] = groups.identical_in_group(scores_N, group_N).double().mean()
        if self.costs:
            numbers["cost_mean"] = torch.tensor(np.asarray(judged["costs"]), dtype=torch.float32).mean()
        for name in self.parts:  # of the samples that a part scores; where it scores none there is no mean
            scores = np.asarray(judged[name], dtype=np.float32)
            if (own := ~is_unscored(scores)).any():
                numbers[f"score_mean_of_{name.removeprefix(PART)}"] = torch.tensor(scores[own]).mean()
        if self.failures:
            failed = [any(words) for words in zip(*(table[name] for name in self.failures), strict=True)]
            numbers["reward_failures"] = torch.tensor(sum(failed))
        if judged is not table:
            numbers["not_scored"] = torch.tensor(table.num_rows - len(scored))
        return {name: float(number) for name, number in numbers.items()}


def update_numbers(role: str, metrics: Metrics | None) -> dict[str, float]:
    """Return each metric of an update as one number: the mean over its mini-batches, the largest where it ends in ``_max``; waits.

    Args:
        role: put before the names of `EACH_UPDATE`.
        metrics: the update's metrics; ``None`` gives no numbers.
    """
    rows = [] if metrics is None else metrics.rows
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ()) if name not in PLACES}
    numbers = {name: max(xs) if name.endswith("_max") else sum(xs) / len(xs) for name, xs in columns.items()}
    return {f"{role}_{name}" if name in EACH_UPDATE else name: number for name, number in numbers.items()}


def as_named_now(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's row of an older save with the names of `Step.numbers`."""
    older = str(row.get("algorithm", "")).startswith(UNPREFIXED) and "actor_loss" not in row
    return {f"actor_{name}" if older and name in EACH_UPDATE else name: value for name, value in row.items()}


def ended(table: Table) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether each response ended by itself (``finish_reason`` "stop"), not by the token limit; shape [N]."""
    return np.asarray([str(reason) == "stop" for reason in table["finish_reason"]], dtype=bool)
