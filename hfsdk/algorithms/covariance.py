"""The covariance of log-probability and advantage over tokens, by which an update lowers the entropy (arXiv 2505.22617, section 3).

A few tokens in ten thousand carry nearly all of it. `hfsdk.algorithms.kl_cov` and `hfsdk.algorithms.clip_cov` hold some of them
(section 4.2). Which they are is said once for the whole batch, by the log-probs of the policy that sampled, so that no mini-batch,
micro-batch or layout changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfsdk.algorithms.choices import TokenShare
from hfsdk.algorithms.losses import PolicyLoss
from hfsdk.algorithms.options import BatchFunction, Options

if TYPE_CHECKING:
    from torch import Tensor

    from hfsdk.core.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class ShareOptions(Options):
    """How many tokens are marked."""

    share: TokenShare = 2e-4
    """Share of all response tokens that are left out; at least one token."""


@dataclass(frozen=True, kw_only=True)
class Marks(ShareOptions, BatchFunction):
    """A function over a batch that marks tokens by their covariance."""

    needs = ("advantages", "old_log_probs")
    gives = ("covariance_mask",)
    like = "advantages"

    def of_scored(self, table: Table) -> dict[str, Column]:
        """Return ``covariance_mask``: 1 on the tokens that are marked, 0 on the others; float32."""
        from hfsdk.algorithms import tensors

        covariances_T = covariances(tensors.flat(table, "old_log_probs"), tensors.flat(table, "advantages"))
        return {"covariance_mask": tensors.on_tokens(table, self.marked(covariances_T), "advantages")}

    def marked(self, covariances_T: Tensor) -> Tensor:
        """Return which tokens are marked, bool, shape [T]."""
        raise NotImplementedError

    def count(self, num_tokens: int) -> int:
        """Return how many of so many tokens are marked."""
        return min(num_tokens, max(1, int(self.share * num_tokens)))


@dataclass(frozen=True, kw_only=True)
class MarkedLoss(PolicyLoss):
    """A policy loss that reads which tokens are marked."""

    @property
    def reads(self) -> list[str]:
        """Columns the loss reads."""
        return [*super().reads, "covariance_mask"]


def covariances(log_probs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Return ``(log pi - mean log pi) (A - mean A)`` of each token, shape [T]; their mean is the covariance (section 4.2)."""
    return (log_probs_T - log_probs_T.mean()) * (advantages_T - advantages_T.mean())


def marks_at(places: Tensor, like_T: Tensor) -> Tensor:
    """Return a mask that is true at these places, of the shape of ``like_T``."""
    import torch

    marked_T = torch.zeros_like(like_T, dtype=torch.bool)
    marked_T[places] = True
    return marked_T
