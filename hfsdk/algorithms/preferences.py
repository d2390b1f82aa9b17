"""Losses over pairs of responses to one prompt, and of single demonstrations: what comes before RLHF.

A batch of pairs (``session.pairs``) has two rows per pair, the chosen response first; a loss that says ``together = 2`` gets both
in one micro-batch. `BradleyTerry` and `CostLoss` train a reward or cost model (``out.scores``), `CrossEntropy` and `DPO`'s loss the
actor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from hfsdk.algorithms.options import Options
from hfsdk.core.checks import NonNegative, OneOf, Positive
from hfsdk.core.errors import ColumnError, OptionError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BradleyTerry(Options):
    """Negative log-likelihood that the chosen response wins: ``-log sigmoid(s_chosen - s_rejected - margin)``.

    (Bradley-Terry; Ouyang et al. 2022, arXiv 2203.02155, eq. 1; the margin is Llama 2's, 2307.09288, eq. 2.)
    """

    margin: NonNegative = 0.0
    """How much better the chosen one shall be: so many score units per unit of the column ``margin``; 0 does not read it."""
    center: NonNegative = 0.0
    """Weight of ``(s_chosen + s_rejected)^2``, which keeps scores around 0 (Eisenstein et al. 2023, arXiv 2312.09244; TRL)."""

    together: ClassVar[int] = 2
    learns: ClassVar[str] = "scores"

    @property
    def reads(self) -> list[str]:
        """Columns the loss reads."""
        return ["chosen", "group"] + ["margin"] * (self.margin > 0)

    def __call__(self, out: Any, b: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the pair's loss on both of its rows, shape [N], and metrics per pair."""
        from hfsdk.algorithms import rlmath

        check_pairs(b)
        scores_P2 = scores_of(out, self).reshape(-1, 2)
        margin_P = self.margin * b["margin"].reshape(-1, 2)[:, 0] if self.margin else 0.0
        loss_P = rlmath.bradley_terry(scores_P2[:, 0], scores_P2[:, 1], margin_P)
        if self.center:
            loss_P = loss_P + self.center * scores_P2.sum(1).square()
        return loss_P.repeat_interleave(2), pair_metrics(scores_P2)


@dataclass(frozen=True, kw_only=True)
class CostLoss(Options):
    """Safe-RLHF's cost model (arXiv 2310.12773, eq. 6): which of two responses costs more, and whether each costs at all.

    ``-log sigmoid(c_rejected - c_chosen) - log sigmoid(sign_r c_rejected) - log sigmoid(sign_c c_chosen)``: the chosen response is
    the less costly one, ``sign`` is +1 for a response that shall cost and -1 for one that shall not, so that 0 parts the two.
    """

    sign_coef: NonNegative = 1.0
    """Weight of the two sign terms; the paper's is 1."""

    together: ClassVar[int] = 2
    learns: ClassVar[str] = "scores"
    reads: ClassVar[tuple[str, ...]] = ("chosen", "group", "sign")

    def __call__(self, out: Any, b: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the pair's loss on both of its rows, shape [N], and metrics per pair."""
        from hfsdk.algorithms import rlmath

        check_pairs(b)
        costs_P2 = scores_of(out, self).reshape(-1, 2)
        sign_N = b["sign"].to(out.scores.dtype)
        signs_P = rlmath.log_sigmoid(sign_N * out.scores).reshape(-1, 2).sum(1)
        loss_P = rlmath.bradley_terry(costs_P2[:, 1], costs_P2[:, 0]) - self.sign_coef * signs_P
        metrics = pair_metrics(-costs_P2)
        metrics["sign_accuracy"] = (out.scores.detach() * sign_N > 0).to(out.scores.dtype)
        return loss_P.repeat_interleave(2), metrics


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Options):
    """Token cross-entropy: supervised fine-tuning, and the pre-training loss of InstructGPT (its ptx)."""

    weight: Positive = 1.0
    """The loss is multiplied by it."""
    aggregation: Annotated[str, OneOf("token_mean", "sequence_mean", "sequence_sum")] = "token_mean"
    """How the loss is averaged, as in `PolicyLoss`."""

    learns: ClassVar[str] = "demonstrations"

    def __call__(self, out: Any, b: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss per token, shape [T], and metrics per token."""
        nll_T = -log_probs_of(out, self)
        return self.weight * nll_T, {"nll": nll_T.detach(), "entropy": out.entropy.detach()}


@dataclass(frozen=True, kw_only=True)
class PretrainingMix(CrossEntropy):
    """InstructGPT's ptx: the same in addition to a policy's own loss, whose learning rate it takes."""

    learns: ClassVar[str] = "policy"


def scores_of(out: Any, loss: Any) -> Tensor:
    """Return the scores of a reward or cost model; OptionError in any other role."""
    if out.scores is None:
        name = type(loss).__name__
        raise OptionError(f"{name} trains a reward or cost model: reward.update(pairs, hf.{name}()); this role has no scores")
    scores: Tensor = out.scores
    return scores


def log_probs_of(out: Any, loss: Any) -> Tensor:
    """Return the actor's log-probabilities; OptionError in a role with a scalar head."""
    if out.log_probs is None:
        name = type(loss).__name__
        raise OptionError(f"{name} trains the actor: actor.update(batch, {name}()); this role has a scalar head, no log_probs")
    log_probs: Tensor = out.log_probs
    return log_probs


def check_pairs(b: Any, whole: int | None = None) -> None:
    """Refuse rows that are not pairs of one prompt, the chosen response first.

    Raises:
        ColumnError: names the rows, as they are numbered in the batch.
    """
    chosen_N, group_N = b["chosen"][:whole], b["group"][:whole]
    wrong_P = (group_N[0::2] != group_N[1::2]) | (chosen_N[0::2] <= chosen_N[1::2])
    if wrong_P.any():
        first = int(wrong_P.nonzero()[0, 0]) * 2
        # A micro-batch has some of the rows: ``row_ids`` are their numbers in the user's batch.
        rows = [int(row) for row in b.row_ids[first : first + 2]]
        groups = [int(group) for group in group_N[first : first + 2]]
        raise ColumnError(
            f"rows {rows[0]} and {rows[1]} are no pair: they answer the prompts {groups[0]} and {groups[1]} and are chosen "
            f"{[float(x) for x in chosen_N[first : first + 2]]}. Two rows of one group that stand one after the other make a "
            "pair, the chosen one first; take them from session.pairs(...), and take whole pairs only."
        )


def pair_metrics(scores_P2: Tensor) -> dict[str, Tensor]:
    """Return accuracy (the chosen one scores higher; a tie is half right), margin and scores, per pair."""
    chosen_P, rejected_P = scores_P2.detach().unbind(1)
    margin_P = chosen_P - rejected_P
    accuracy_P = (margin_P > 0).to(margin_P.dtype) + 0.5 * (margin_P == 0).to(margin_P.dtype)
    return {"accuracy": accuracy_P, "margin": margin_P, "chosen_score": chosen_P, "rejected_score": rejected_P}
