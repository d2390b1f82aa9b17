"""DPO (arXiv 2305.18290): preferences without a reward model and without generating.

Against `PPO.step` nothing is generated and nothing scored: the batch is of pairs (``session.pairs``), the reference gives its
log-probabilities of both responses, and the actor learns to prefer the chosen one more than the reference does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from hfsdk.algorithms.choices import DPO_KINDS, Epochs, MiniBatches
from hfsdk.algorithms.handles import StepModels, need_roles
from hfsdk.algorithms.losses import check
from hfsdk.algorithms.options import Options
from hfsdk.algorithms.preferences import check_pairs, log_probs_of, pair_metrics
from hfsdk.algorithms.step import Step, update_numbers
from hfsdk.core.checks import NonNegative, OneOf, Positive, Within, checked
from hfsdk.core.errors import ColumnError, OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class LossOptions(Options):
    """Options of `DPOLoss`, and with them of `DPO`."""

    beta: Positive = 0.1
    """How strongly the policy is held to the reference, in score units per nat."""
    kind: Annotated[str, OneOf(*DPO_KINDS)] = "sigmoid"
    """One of `DPO_KINDS`."""
    label_smoothing: Annotated[float, Within(0, below=0.5)] = 0.0
    """Probability that a pair's label is wrong (conservative DPO); below 0.5, with ``kind="sigmoid"``."""
    sft_coef: NonNegative = 0.0
    """Weight of the chosen response's cross-entropy per token (arXiv 2404.19733)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        smooth = self.kind == "sigmoid" or not self.label_smoothing
        check(smooth, "label_smoothing", self.label_smoothing, '0 unless kind="sigmoid"')


@dataclass(frozen=True, kw_only=True)
class DPO(LossOptions):
    """Direct preference optimisation. ``beta`` is the paper's."""

    @checked
    def step(self, models: StepModels, pairs: Batch) -> Step:
        """Run one step over a batch of ``session.pairs(...)``; returns at once."""
        need_roles(models, self.roles)
        lacking = [name for name in ("chosen", "group", "response") if name not in pairs]
        if lacking:
            raise ColumnError(f"pairs must be a batch of session.pairs(...); it lacks {', '.join(lacking)}")
        batch = models.reference.compute_log_probs(pairs)
        actor = models.actor.update(batch, self.loss, epochs=self.epochs, mini_batches=self.mini_batches)
        return Step(batch, None, actor)

    epochs: Epochs = 1
    """Passes over the batch."""
    mini_batches: MiniBatches = 1
    """Optimizer steps per epoch."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses."""
        return ("actor", "reference")

    @property
    def loss(self) -> DPOLoss:
        """The actor's loss."""
        return DPOLoss.of(self)

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the loss's own numbers, one each for the whole step; waits.

        ``accuracy`` (pairs in which the chosen response's implicit reward, beta times its log-ratio, is the higher),
        ``margin``, ``chosen_score`` and ``rejected_score`` of these rewards, actor_loss, actor_grad_norm, actor_lr.
        """
        return update_numbers("actor", step.actor)


@dataclass(frozen=True, kw_only=True)
class DPOLoss(LossOptions):
    """Direct preference optimisation (arXiv 2305.18290, eq. 7) over the log-ratios of whole responses to the reference."""

    together: ClassVar[int] = 2
    learns: ClassVar[str] = "preferences"
    reads: ClassVar[tuple[str, ...]] = ("chosen", "group", "ref_log_probs")

    def __call__(self, out: Any, b: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the pair's loss on both of its rows, shape [N], and metrics per pair."""
        log_probs_of(out, self)
        whole = b.num_samples // 2 * 2  # the engine may put a sample without response behind the last
        check_pairs(b, whole)
        ratio_N = b.segment_sum(out.log_probs - b["ref_log_probs"])[:whole]
        ratio_P2 = ratio_N.reshape(-1, 2)
        tokens_P2 = b.lengths[:whole].reshape(-1, 2).clamp(min=1)
        if self.kind == "ipo":
            ratio_P2 = ratio_P2 / tokens_P2
        loss_P = dpo_loss(ratio_P2[:, 0], ratio_P2[:, 1], self.beta, self.kind, self.label_smoothing)
        if self.sft_coef:
            chosen_N = b.segment_sum(out.log_probs)[:whole].reshape(-1, 2)[:, 0] / tokens_P2[:, 0]
            loss_P = loss_P - self.sft_coef * chosen_N
        loss_N = ratio_N.new_zeros(b.num_samples)
        loss_N[:whole] = loss_P.repeat_interleave(2)
        return loss_N, pair_metrics(self.beta * ratio_N.reshape(-1, 2))


def dpo_loss(chosen_P: Tensor, rejected_P: Tensor, beta: float, kind: str = "sigmoid", label_smoothing: float = 0.0) -> Tensor:
    """Return DPO's loss per pair from the log-ratios ``log pi(y|x) - log pi_ref(y|x)`` of both responses.

    ========  ====================================================================  =======================
    kind      loss of ``m = chosen - rejected``                                     source
    ========  ====================================================================  =======================
    sigmoid   ``-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)``             arXiv 2305.18290, eq. 7
    ipo       ``(m - 1 / (2 beta))^2``, log-ratios averaged over tokens             2310.12036, eq. 17
    hinge     ``max(0, 1 - beta m)``                                                2305.10425
    ========  ====================================================================  =======================

    Args:
        chosen_P: log-ratio of the chosen response, shape [P].
        rejected_P: the same of the rejected response, shape [P].
        beta: beta of the paper, above 0.
        kind: a row of the table.
        label_smoothing: e, only with sigmoid.

    Raises:
        OptionError: another kind.
    """
    from hfsdk.algorithms import rlmath

    margin_P = chosen_P - rejected_P
    if kind == "sigmoid":
        right_P, wrong_P = rlmath.log_sigmoid(beta * margin_P), rlmath.log_sigmoid(-beta * margin_P)
        return -(1 - label_smoothing) * right_P - label_smoothing * wrong_P
    if kind == "ipo":
        return (margin_P - 1 / (2 * beta)).square()
    if kind != "hinge":
        raise OptionError(f"the DPO losses are sigmoid, ipo and hinge; got {kind!r}")
    return (1 - beta * margin_P).relu()
