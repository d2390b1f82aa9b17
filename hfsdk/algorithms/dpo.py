"""DPO (arXiv 2305.18290): preferences without a reward model and without generating.

Against `PPO.step` nothing is generated and nothing scored: the batch is of pairs (``session.pairs``), the reference gives its
log-probabilities of both responses, and the actor learns to prefer the chosen one more than the reference does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from hfsdk.algorithms.losses import Epochs, MiniBatches
from hfsdk.algorithms.preferences import DPO_KINDS, DPOLoss
from hfsdk.algorithms.step import Step, need_roles, over_mini_batches
from hfsdk.core.checks import NonNegative, OneOf, Positive, Within, check_fields, checked
from hfsdk.core.errors import ColumnError

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Direct preference optimisation. ``beta`` is the paper's."""

    beta: Positive = 0.1
    """How strongly the policy is held to the reference, in score units per nat."""
    kind: Annotated[str, OneOf(*DPO_KINDS)] = "sigmoid"
    """``"sigmoid"`` (DPO), ``"ipo"`` or ``"hinge"``, as in `DPOLoss`."""
    label_smoothing: Annotated[float, Within(0, below=0.5)] = 0.0
    """Probability that a pair's label is wrong (conservative DPO)."""
    sft_coef: NonNegative = 0.0
    """Weight of the chosen response's cross-entropy per token."""
    epochs: Epochs = 1
    """Passes over the batch."""
    mini_batches: MiniBatches = 1
    """Optimizer steps per epoch."""

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.loss

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the handles that ``step`` uses."""
        return ("actor", "reference")

    @property
    def loss(self) -> DPOLoss:
        """The actor's loss."""
        return DPOLoss(beta=self.beta, kind=self.kind, label_smoothing=self.label_smoothing, sft_coef=self.sft_coef)

    @checked
    def step(self, models: Any, pairs: Batch) -> Step:
        """Run one step; returns at once.

        Args:
            models: has the handles named in `roles` as attributes, as ``session.models`` does.
            pairs: a batch of ``session.pairs(...)``.
        """
        need_roles(models, self.roles)
        lacking = [name for name in ("chosen", "group", "response") if name not in pairs]
        if lacking:
            raise ColumnError(f"pairs must be a batch of session.pairs(...); it lacks {', '.join(lacking)}")
        batch = models.reference.compute_log_probs(pairs)
        actor = models.actor.update(batch, self.loss, epochs=self.epochs, mini_batches=self.mini_batches)
        return Step(batch, None, actor)

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the loss's own numbers, one each for the whole step; waits.

        ``accuracy`` (pairs in which the chosen response's implicit reward, beta times its log-ratio, is the higher),
        ``margin``, ``chosen_score`` and ``rejected_score`` of these rewards, loss, grad_norm, lr.
        """
        return over_mini_batches(step.actor.rows) if step.actor is not None else {}
