"""The tokens that top-k, top-p and ``min_new_tokens`` leave, over a vocabulary that is spread over tensor-parallel ranks.

The log-probabilities that a generating engine returns are of the distribution that it drew from, renormalised over these. As vLLM
does, the k likeliest are kept first, then the likeliest of them that together have probability p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

POSITIONS = 64
"""Positions whose whole vocabulary is gathered at a time."""


@dataclass(frozen=True)
class KeptTokens:
    """Which tokens may be drawn."""

    top_k: int = 0
    """The k likeliest; 0: all."""
    top_p: float = 1.0
    without: tuple[int, ...] = ()
    """Token ids that may not."""

    def __bool__(self) -> bool:
        return bool(self.top_k or self.top_p < 1 or self.without)


def keep(logits_NV: torch.Tensor, kept: KeptTokens, vocab_size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the logits with -inf in place of those of tokens that may not be drawn; collective over ``group``.

    Args:
        logits_NV: this rank's columns, divided by the temperature.
        kept: which tokens may be drawn.
        vocab_size: columns of the whole vocabulary that are real.
        group: tensor parallel, ``None`` for one rank.
    """
    size, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    width = logits_NV.shape[-1]
    parts = []
    for logits in logits_NV.float().split(POSITIONS):
        whole = [torch.empty_like(logits) for _ in range(size)]
        if size > 1:
            dist.all_gather(whole, logits.contiguous(), group=group)
        else:
            whole = [logits]
        full = torch.cat(whole, -1)
        full[:, vocab_size:] = -torch.inf
        full[:, list(kept.without)] = -torch.inf
        masked = full.masked_fill(full < _least(full, kept), -torch.inf)
        parts.append(masked[:, rank * width : (rank + 1) * width])
    return torch.cat(parts) if parts else logits_NV


def _least(full: torch.Tensor, kept: KeptTokens) -> torch.Tensor:
    """Return the smallest logit that is kept at each position; shape [N, 1]."""
    ordered = full.sort(-1, descending=True).values
    count = min(kept.top_k or ordered.shape[-1], ordered.shape[-1])
    ordered = ordered[:, :count]
    if kept.top_p < 1:
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        last = (before < kept.top_p).sum(-1, keepdim=True).clamp(min=1) - 1
        return ordered.gather(-1, last)
    return ordered[:, -1:]
