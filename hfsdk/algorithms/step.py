"""What a step of an algorithm leaves behind: `Step`, its numbers (`Statistics`), what must hold (`invariants`)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hfsdk.core.checks import shown
from hfsdk.core.errors import HfsdkError, InvariantWarning, OptionError
from hfsdk.core.pending import Metrics

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch
    from hfsdk.core.table import Table


@dataclass(frozen=True)
class Step:
    """One step: the batch with every column it gained, and the metrics of the updates; all may still be running."""

    batch: Batch
    critic: Metrics | None
    """``None`` for algorithms without a critic."""
    actor: Metrics | None
    """``None`` where nothing was left to learn from (`hfsdk.algorithms.grpo.GRPO.filter_groups`)."""

    def numbers(self, statistics: Statistics) -> dict[str, float]:
        """Return the batch's statistics and each metric of the updates as one number; waits.

        Metrics are averaged over the mini-batches; of those whose name ends in ``_max`` the largest counts. A name
        that the critic and the actor share (loss, grad_norm, lr) is given as ``critic_loss`` and ``actor_loss``. What must
        hold before anything is updated is there by itself (``first_ratio_error``, ``first_approx_kl``,
        ``first_clip_fraction``, ``rollout_gap_mean``, ``rollout_gap_max``); where it does not, an `InvariantWarning` says so.
        """
        numbers: dict[str, float] = dict(self.batch.reduce(statistics, reads=statistics.reads).value)
        rows = [] if self.actor is None else self.actor.rows
        dtype = self.actor.dtype if isinstance(self.actor, Metrics) else "fp32"
        numbers |= _of_first(rows)
        _warn(_gaps(numbers, dtype) + invariants(rows, RATIO_TOLERANCE[dtype]))
        critic = over_mini_batches(self.critic.rows) if self.critic is not None else {}
        actor = over_mini_batches(self.actor.rows) if self.actor is not None else {}
        numbers |= {f"critic_{name}" if name in actor else name: number for name, number in critic.items()}
        return numbers | {f"actor_{name}" if name in critic else name: number for name, number in actor.items()}


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """A function over a table that returns the numbers of a step; runs where the columns are (``batch.reduce``).

    Example: ``batch.reduce(fn, reads=fn.reads).value`` with ``fn = Statistics()`` gives ``{"score_mean": ..., ...}``.
    """

    reference: bool = True
    """Whether there is a column ``ref_log_probs``."""
    critic: bool = True
    """Whether there are columns ``values`` and ``returns``."""
    groups: bool = False
    """Whether to look at the column ``group``: several responses per prompt."""
    costs: bool = False
    """Whether there is a column ``costs``."""

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        columns = ["scores", "finish_reason", "rollout_log_probs", "old_log_probs"]
        columns += ["ref_log_probs"] * self.reference + ["values", "returns"] * self.critic
        return columns + ["group"] * self.groups + ["costs"] * self.costs

    def __call__(self, table: Table) -> dict[str, float]:
        """Return the numbers of a whole batch.

        ``kl_mean`` is per sequence, in nats, by the k1 estimator, whatever the reward used; ``rollout_gap`` is
        ``|old_log_probs - rollout_log_probs|``, the disagreement of trainer and generating engine, per token;
        ``identical_groups`` is the share of responses whose group has one and the same score: they teach nothing.
        """
        import torch

        from hfsdk.algorithms import rlmath

        def flat(name: str) -> torch.Tensor:
            return torch.tensor(table.ragged(name).flat, dtype=torch.float32)

        old_T = flat("old_log_probs")
        lengths_N = torch.tensor(table.ragged("old_log_probs").lengths)
        scores_N = torch.tensor(np.asarray(table["scores"]), dtype=torch.float32)
        gap_T = (old_T - flat("rollout_log_probs")).abs()
        numbers = {
            "score_mean": scores_N.mean(),
            "score_std": rlmath.masked_var(scores_N, unbiased=False).sqrt(),
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
            numbers["explained_variance"] = rlmath.explained_variance(flat("values"), flat("returns"))
        if self.groups:
            group_N = torch.tensor(np.asarray(table["group"], dtype=np.int64))
            numbers["identical_groups"] = rlmath.identical_in_group(scores_N, group_N).double().mean()
        if self.costs:
            numbers["cost_mean"] = torch.tensor(np.asarray(table["costs"]), dtype=torch.float32).mean()
        return {name: float(number) for name, number in numbers.items()}


def over_mini_batches(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return each metric of an update as one number: the mean over its mini-batches, the largest where it ends in ``_max``."""
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return {name: max(xs) if name.endswith("_max") else sum(xs) / len(xs) for name, xs in columns.items()}


def need_roles(models: Any, roles: Sequence[str]) -> None:
    """Look at every handle that a step uses, so that a missing one (PlacementError) is told before anything runs."""
    for role in roles:
        try:
            handle = getattr(models, role)
        except HfsdkError:
            raise  # a role that the session does not have
        except Exception as error:  # the user's own models
            raise _not_models(models, role, roles) from error
        if isinstance(models, type) or handle is None:
            raise _not_models(models, role, roles)


def _not_models(models: object, role: str, roles: Sequence[str]) -> OptionError:
    return OptionError(f"models must have {role}: a step uses {', '.join(roles)}, as session.models has them; got {shown(models)}")


def with_old_log_probs(models: Any, batch: Batch, source: str) -> Batch:
    """Return the batch with ``old_log_probs``: ``"recompute"`` by the trainer, or ``"rollout"``, the generating engine's own."""
    return models.actor.compute_log_probs(batch) if source == "recompute" else batch.alias("old_log_probs", "rollout_log_probs")


def ended(table: Table) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether each response ended by itself (``finish_reason`` "stop"), not by the token limit; shape [N]."""
    return np.asarray([str(reason) == "stop" for reason in table["finish_reason"]], dtype=bool)


RATIO_TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
"""How far the ratio may be from 1 before anything is updated, by the trainer's dtype."""
GAP_TOLERANCE = {"fp32": {"mean": 1e-4, "max": 1e-3}, "bf16": {"mean": 0.05, "max": 1.0}}
"""``|trainer - rollout|`` of a token's log-probability, in nats: rounding alone stays below."""

ALREADY_TOLD: ContextVar[set[str] | None] = ContextVar("already_told", default=None)
"""What a run of ``session.train`` has warned of, so that it does so once; ``None`` outside one, where every step is told."""


def invariants(actor_rows: Sequence[dict[str, float]], tolerance: float = RATIO_TOLERANCE["fp32"]) -> list[str]:
    """Return a warning for each thing that must hold in the first mini-batch and does not; ``[]`` is a clean bill.

    Nothing has been updated then, so with ``old_log_probs`` from the trainer the ratio is 1 on every token, approx_kl
    is 0 and nothing is clipped (the best single check of an implementation, N details). It is exact up to rounding in
    fp32; give bf16 a tolerance of about 0.05. With ``old_log_probs`` from the rollout the difference is the engines'
    own.

    Args:
        actor_rows: ``metrics.rows`` of an actor's update; of a loss without a ratio there is nothing to say.
        tolerance: largest ``|ratio - 1|``.
    """
    if not actor_rows or "ratio" not in actor_rows[0]:
        return []
    first, broken = actor_rows[0], []
    for name in ("ratio", "ratio_max"):
        if not abs(first[name] - 1.0) <= tolerance:
            broken.append(
                f"{name} is {first[name]:.6g} in the first mini-batch, where it must be 1 (within {tolerance:g}): old_log_probs "
                "and the update disagree. Look at temperature, dropout, masks, and whether the weights were updated in between; "
                'with old_log_probs="rollout", at the two engines (rollout_gap)'
            )
    if not abs(first["approx_kl"]) <= tolerance:
        broken.append(f"approx_kl is {first['approx_kl']:.3g} in the first mini-batch, where it must be 0 (within {tolerance:g})")
    if first["clip_fraction"] != 0.0:
        broken.append(f"clip_fraction is {first['clip_fraction']:.3g} in the first mini-batch, where it must be 0")
    return broken


def _of_first(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the numbers of the first mini-batch that must be 0."""
    if not rows or "ratio" not in rows[0]:
        return {}
    first = rows[0]
    error = max(abs(first["ratio"] - 1.0), abs(first["ratio_max"] - 1.0))
    return {
        "first_ratio_error": error, "first_approx_kl": first["approx_kl"], "first_clip_fraction": first["clip_fraction"],
    }  # fmt: skip


def _gaps(numbers: Mapping[str, float], dtype: str) -> list[str]:
    """Return a warning where trainer and rollout disagree by more than their rounding."""
    most = GAP_TOLERANCE[dtype]
    if "rollout_gap_mean" not in numbers or all(numbers[f"rollout_gap_{kind}"] <= most[kind] for kind in most):
        return []
    mean, largest = numbers["rollout_gap_mean"], numbers["rollout_gap_max"]
    return [
        f"rollout_gap of trainer and generating engine is {mean:.3g} nats per token and {largest:.3g} at most, where rounding "
        f"in {dtype} stays below {most['mean']:g} and {most['max']:g}: the samples are not the trainer's own. Look at the "
        "temperature, at weights that were changed by hand, at top-k or top-p; tis_cap=2.0 corrects what is left"
    ]


def _warn(broken: Sequence[str]) -> None:
    """Warn of what is broken; within a run of ``session.train`` once of each kind, which is a warning's first word."""
    told = ALREADY_TOLD.get()
    for text in broken:
        kind = text.split()[0]
        if told is None or kind not in told:
            warnings.warn(text, InvariantWarning, stacklevel=4)  # whoever asked the algorithm for its metrics
        if told is not None:
            told.add(kind)
