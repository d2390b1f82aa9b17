"""What a step of an algorithm leaves behind: `Step`, its numbers (`Statistics`), what must hold (`invariants`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hfsdk.algorithms.losses import check

if TYPE_CHECKING:
    from hfsdk.batch import Batch
    from hfsdk.pending import Metrics
    from hfsdk.table import Table


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
        that the critic and the actor share (loss, grad_norm, lr) is given as ``critic_loss`` and ``actor_loss``.
        """
        numbers: dict[str, float] = dict(self.batch.reduce(statistics, reads=statistics.reads).value)
        critic = _over_mini_batches(self.critic.rows) if self.critic is not None else {}
        actor = _over_mini_batches(self.actor.rows) if self.actor is not None else {}
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

    @property
    def reads(self) -> list[str]:
        """Columns the function reads."""
        columns = ["scores", "finish_reason", "rollout_log_probs", "old_log_probs"]
        return (
            columns + ["ref_log_probs"] * self.reference + ["values", "returns"] * self.critic + ["group"] * self.groups
        )

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
        return {name: float(number) for name, number in numbers.items()}


def _over_mini_batches(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return {name: max(xs) if name.endswith("_max") else sum(xs) / len(xs) for name, xs in columns.items()}


def check_sampling(algorithm: Any, least_n: int = 1) -> None:
    """Check the options that the algorithms without a critic share.

    Raises:
        OptionError: names the option that is out of its range.
    """
    a = algorithm
    check(a.max_new_tokens >= 1, "max_new_tokens", a.max_new_tokens, "at least 1")
    check(a.temperature > 0, "temperature", a.temperature, "above 0 (greedy has no log-probabilities)")
    check(
        a.n >= least_n,
        "n",
        a.n,
        f"at least {least_n}" + " (responses are compared with others to their prompt)" * (least_n > 1),
    )
    check(a.epochs >= 1, "epochs", a.epochs, "at least 1")
    check(a.mini_batches >= 1, "mini_batches", a.mini_batches, "at least 1")
    check(a.kl_coef >= 0, "kl_coef", a.kl_coef, "at least 0")
    known = a.old_log_probs in ("recompute", "rollout")
    check(known, "old_log_probs", a.old_log_probs, '"recompute" or "rollout"')


def need_roles(models: Any, roles: Sequence[str]) -> None:
    """Look at every handle that a step uses, so that a missing one (PlacementError) is told before anything runs."""
    for role in roles:
        getattr(models, role)


def with_old_log_probs(models: Any, batch: Batch, source: str) -> Batch:
    """Return the batch with ``old_log_probs``: ``"recompute"`` by the trainer, or ``"rollout"``, the generating engine's own."""
    return (
        models.actor.compute_log_probs(batch)
        if source == "recompute"
        else batch.alias("old_log_probs", "rollout_log_probs")
    )


def ended(table: Table) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether each response ended by itself (``finish_reason`` "stop"), not by the token limit; shape [N]."""
    return np.asarray([str(reason) == "stop" for reason in table["finish_reason"]], dtype=bool)


def invariants(actor_rows: Sequence[dict[str, float]], tolerance: float = 1e-4) -> list[str]:
    """Return a warning for each thing that must hold in the first mini-batch and does not; ``[]`` is a clean bill.

    Nothing has been updated then, so with ``old_log_probs`` from the trainer the ratio is 1 on every token, approx_kl
    is 0 and nothing is clipped (the best single check of an implementation, N details). It is exact up to rounding in
    fp32; give bf16 a tolerance of about 0.05. With ``old_log_probs`` from the rollout the difference is the engines'
    own.

    Args:
        actor_rows: ``metrics.rows`` of an actor's update.
        tolerance: largest ``|ratio - 1|``.
    """
    if not actor_rows:
        return []
    first, warnings = actor_rows[0], []
    for name in ("ratio", "ratio_max"):
        if not abs(first[name] - 1.0) <= tolerance:
            warnings.append(
                f"{name} is {first[name]:.6g} in the first mini-batch, where it must be 1 (within {tolerance:g}): "
                "old_log_probs and the update disagree, e.g. in temperature, dropout, masks or weights"
            )
    if not abs(first["approx_kl"]) <= tolerance:
        warnings.append(f"approx_kl is {first['approx_kl']:.3g} in the first mini-batch, where it must be 0")
    if first["clip_fraction"] != 0.0:
        warnings.append(f"clip_fraction is {first['clip_fraction']:.3g} in the first mini-batch, where it must be 0")
    return warnings
