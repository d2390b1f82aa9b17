"""How a role is trained where there are accelerators: one place for the engine that does it and the planner that counts its bytes.

None of it changes a result, except that sums are taken in another order; on processors all stays off, so that their numbers do not
change::

    sequence parallelism    tp > 1    norms and residuals, which tp ranks hold alike, are cut over them: activations shrink
    fused AdamW             always    one kernel takes the step: no temporary as large as the parameters
    overlap                 dp > 1    a bucket of gradients is summed over dp while the last backward pass still runs

Sources: Korthikanti et al., arXiv 2205.05198 (sequence parallelism); Li et al., arXiv 2006.15704 (buckets and overlap).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingChoices:
    """The choices that make a trainer fast."""

    sequence_parallel: bool = False
    """Norms and residuals are cut over tp along the packed tokens, which are padded to a multiple of tp."""
    fused_adamw: bool = False
    """AdamW steps in one kernel, which keeps its step counts on the device."""
    overlap: bool = False
    """Gradients are summed over dp bucket by bucket, during the last backward pass before an optimizer step."""
    bucket_elements: int | None = None
    """Least gradients of a bucket; ``None`` is Megatron's own choice, 40 million or more."""


def choose_training(*, on_cpu: bool, tp: int, dp: int) -> TrainingChoices:
    """Return the choices of a layout's trainers on processors or on accelerators. Pure.

    Args:
        on_cpu: whether tensors are in the memory of processors.
        tp: tensor-parallel ranks.
        dp: replicas.
    """
    if on_cpu:
        return TrainingChoices()
    return TrainingChoices(sequence_parallel=tp > 1, fused_adamw=True, overlap=dp > 1)
