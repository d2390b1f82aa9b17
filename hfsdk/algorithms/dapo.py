"""DAPO (arXiv 2503.14476): GRPO with four things that a long run needs, and without a KL.

Clip-higher: the ratio may rise by ``clip_high`` = 0.28 and fall by ``clip`` = 0.2. Dynamic sampling: groups whose scores are all
the same teach nothing, so others are drawn in their place until the step has as many as it wants. Token-level loss: a mean over
all tokens. Overlong shaping is a separate reward: ``session.reward([score, hf.OverlongPenalty(max_new_tokens=2048,
buffer=512)])``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from hfsdk.algorithms.choices import Aggregation, NewTokens
from hfsdk.algorithms.filtering import drawn_until
from hfsdk.algorithms.grpo import GRPO
from hfsdk.algorithms.handles import StepModels, need_roles, reference_of
from hfsdk.algorithms.losses import check
from hfsdk.algorithms.options import Options
from hfsdk.algorithms.step import Step
from hfsdk.core.checks import NonNegative, Positive, Within, checked

if TYPE_CHECKING:
    from hfsdk.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """Clip and dynamic sampling policy optimisation, decoupled. Clips are the paper's."""

    @checked
    def step(self, models: StepModels, prompts: Batch) -> Step:
        """Run one step (the paper's algorithm 1); waits for the scores of each draw."""
        need_roles(models, self.roles)

        def scored(some: Batch) -> Batch:
            batch = models.actor.generate(some, max_new_tokens=self.max_new_tokens, temperature=self.temperature, n=self.n)
            return models.reward.compute_scores(batch)

        batch, rows = drawn_until(math.ceil(len(prompts) / self.oversample), prompts, self.n, scored)
        if self.old_log_probs == "recompute":
            batch = models.actor.compute_log_probs(batch)
        else:
            batch = batch.alias("old_log_probs", "rollout_log_probs")
        if reference := reference_of(models):
            batch = reference.compute_log_probs(batch)
        batch = self.with_advantages(batch)
        if not rows:
            return Step(batch, None, None)
        trained, mini_batches = batch.take(rows), min(self.mini_batches, len(rows))
        actor = models.actor.update(self.weighed(trained), self.policy_loss, epochs=self.epochs, mini_batches=mini_batches)
        return Step(batch, None, actor)

    oversample: Annotated[float, Within(1)] = 2.0
    """Prompts in a step's batch for each group that is trained on; verl's recipe has 3. From 64 prompts 32 are drawn first, then as
    many more as groups are lacking, until 32 groups have scores that differ or the batch is used up; 1 draws no others."""
    filter_groups: bool = True
    """Whether groups whose scores are all the same are left out; DAPO does."""
    clip_high: Positive | None = 0.28
    """How far the ratio may rise above 1 (clip-higher)."""
    aggregation: Aggregation = "token_mean"
    """How the loss is averaged, as in `PolicyLoss`; the paper's loss is a mean over tokens."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL, as in `GRPO`; the paper has no KL."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = "True: without dynamic sampling it is hf.GRPO(clip_high=0.28)"
        check(self.filter_groups, "filter_groups", self.filter_groups, wanted)


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty(Options):
    """A reward that punishes long responses (eq. 13): 0 before the buffer, linear in it, -``penalty`` at its end."""

    max_new_tokens: NewTokens
    """L_max: the longest response, in tokens; as the algorithm's."""
    buffer: NewTokens
    """L_cache: the last tokens of it, in which the penalty grows."""
    penalty: NonNegative = 1.0
    """Penalty of the longest response, in score units."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.buffer <= self.max_new_tokens, "buffer", self.buffer, f"at most max_new_tokens, {self.max_new_tokens}")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """Return one number from -``penalty`` to 0 per completion, given its token ids."""
        over = [len(ids) - (self.max_new_tokens - self.buffer) for ids in completion_ids]
        return [-self.penalty * min(max(tokens / self.buffer, 0.0), 1.0) for tokens in over]
