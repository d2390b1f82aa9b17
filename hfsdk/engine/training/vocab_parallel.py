"""Log-probabilities and entropy of a vocabulary that is spread over tensor-parallel ranks, in float32.

The full logits never exist on one rank. With z the logits of one position, Z = sum_v exp(z_v) and p_v = exp(z_v) / Z::

    log p(y) = z_y - log Z                 d log p(y) / d z_v = [v = y] - p_v
    H = log Z - sum_v p_v z_v              d H        / d z_v = -p_v (log p_v + H)

Two all-reduces: MAX of the logits, then SUM of Z, sum exp(z) z and z_y together; none with one rank. Columns past the vocabulary
(padding) take no part: probability zero, gradient zero.

Where N x V is large (:data:`CHUNK_ELEMENTS`, :data:`CPU_CHUNK_ELEMENTS`), positions are taken some at a time and their
probabilities made again for the gradient, from log Z: then the peak in addition to the logits and their gradient does not depend on
N (3.25 chunks in float32, of which two are the same room throughout). Logits that nobody reads afterwards become their gradient.

Shapes: N positions, V columns of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def log_probs_and_entropy(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    *,
    entropy: bool = True,
    overwrite: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probability of each target and, if asked, each position's entropy, both [N] and float32.

    Args:
        logits_NV: this rank's columns, in the order of ``group``; already divided by the temperature. Every rank has V columns.
        targets_N: token numbers in the whole vocabulary.
        vocab_size: columns of the whole vocabulary that are real; the rest is padding.
        group: the tensor-parallel group, or ``None`` for one rank.
        entropy: whether to compute it (without, the second result is ``None``).
        overwrite: whether the gradient may take the place of the logits, where positions are taken some at a time: one array of
            [N, V] less. A second backward pass raises then, as torch does for every tensor that was changed in place.
    """
    if group is not None and group.size() == 1:
        group = None
    most = min(CHUNK_ELEMENTS, CPU_CHUNK_ELEMENTS) if logits_NV.device.type == "cpu" else CHUNK_ELEMENTS
    rows = max(1, most // max(1, logits_NV.shape[-1]))
    if len(logits_NV) > rows:
        results = _Chunked.apply(logits_NV, targets_N, vocab_size, group, entropy, rows, overwrite)
        return results[0], results[1] if entropy else None
    log_probs_N, entropy_N = _VocabParallel.apply(logits_NV, targets_N, vocab_size, group, entropy)
    return log_probs_N, entropy_N if entropy else None


CHUNK_ELEMENTS = 2**28
"""Logits that are turned into float32 at a time: 1 GB. Fewer are kept as probabilities for the gradient: one pass less."""

CPU_CHUNK_ELEMENTS = 2**20
"""The same on processors: 4 MB stay in the cache from one operation to the next, which is worth more than the pass."""


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        targets_N: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs_N, entropy_N, exp_NV, total_N, _, here_N, column_N = _forward(logits_NV, targets_N, vocab_size, group, entropy)
        ctx.save_for_backward(exp_NV.div_(total_N[:, None]), here_N, column_N, entropy_N)
        ctx.width, ctx.dtype = logits_NV.shape[-1], logits_NV.dtype
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropy_N)
        return log_probs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        # d log p / d z = [v = y] - p: minus p everywhere, and plus 1 in the target's column, where this rank has it.
        probs_NV, here_N, column_N, entropy_N = ctx.saved_tensors
        real = probs_NV.shape[1]
        if grad_log_probs_N is None and grad_entropy_N is None:
            return None, None, None, None, None
        grad_NV = torch.zeros_like(probs_NV) if grad_log_probs_N is None else probs_NV * -grad_log_probs_N[:, None]
        if grad_log_probs_N is not None and real:
            grad_NV.scatter_add_(-1, column_N[:, None], (grad_log_probs_N * here_N)[:, None])
        if grad_entropy_N is not None:
            slope_NV = torch.xlogy(probs_NV, probs_NV).addcmul_(probs_NV, entropy_N[:, None])
            grad_NV.addcmul_(slope_NV, grad_entropy_N[:, None], value=-1)
        grad_NV = torch.nn.functional.pad(grad_NV, (0, ctx.width - real)) if real < ctx.width else grad_NV
        return grad_NV.to(ctx.dtype), None, None, None, None


class _Chunked(torch.autograd.Function):
    """The same for some positions at a time; keeps the logits, log Z and the entropy, no probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        targets_N: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        entropy: bool,
        rows: int,
        overwrite: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts, scratch = [], _scratch(logits_NV, rows)
        for logits, targets in zip(logits_NV.split(rows), targets_N.split(rows), strict=True):
            log_probs, entropies, _, _, log_total, _, _ = _forward(logits, targets, vocab_size, group, entropy, scratch)
            parts.append((log_probs, entropies, log_total))
        log_probs_N, entropy_N, log_total_N = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        ctx.save_for_backward(logits_NV, targets_N, entropy_N, log_total_N)
        ctx.vocab_size, ctx.group, ctx.rows, ctx.overwrite = vocab_size, group, rows, overwrite
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropy_N)
        return log_probs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None, None, None, None]:
        logits_NV, targets_N, entropy_N, log_total_N = ctx.saved_tensors
        if grad_log_probs_N is None and grad_entropy_N is None:
            return None, None, None, None, None, None, None
        real, here_N, column_N = _columns(logits_NV, targets_N, ctx.vocab_size, ctx.group)
        # Logits are the largest tensor of a pass: where nobody needs them any more the gradient takes their place.
        grad_NV = logits_NV if ctx.overwrite else torch.empty_like(logits_NV)
        grad_NV[:, real:] = 0
        scratch = _scratch(logits_NV, ctx.rows)
        for first in range(0, len(logits_NV) if real else 0, ctx.rows):
            part = slice(first, first + ctx.rows)
            _slope_of_chunk(
                grad_NV[part, :real], scratch, logits_NV[part, :real], column_N[part], here_N[part], log_total_N[part],
                entropy_N[part], *(None if grad is None else grad[part] for grad in (grad_log_probs_N, grad_entropy_N)),
            )  # fmt: skip
        return grad_NV, None, None, None, None, None, None


def _scratch(logits_NV: torch.Tensor, rows: int) -> torch.Tensor:
    """Return room for the steps of a chunk, [2, elements], float32: on processors new memory costs more than its use."""
    return torch.empty(2, min(rows, len(logits_NV)) * logits_NV.shape[-1], dtype=torch.float32, device=logits_NV.device)


def _like(room: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the beginning of some room in a shape."""
    return room[: shape.numel()].view(shape)


def _slope_of_chunk(
    slope: torch.Tensor, scratch: torch.Tensor, logits: torch.Tensor, column: torch.Tensor, here: torch.Tensor,
    log_total: torch.Tensor, entropy: torch.Tensor, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None,
) -> None:  # fmt: skip
    """Write the gradient of some real columns into ``slope``, which may be the logits; at most one array beside scratch is there.

    A function, so that none of it outlives its chunk. Subtracting float32 from logits of 16 bits makes float32 of them.
    """
    gradient = slope if slope.dtype == torch.float32 else torch.empty_like(slope, dtype=torch.float32)
    probs = torch.sub(logits, log_total[:, None], out=_like(scratch[0], logits.shape))
    if grad_entropy is not None:
        log_probs = _like(scratch[1], logits.shape).copy_(probs)
    probs.exp_()
    if grad_log_probs is None:
        gradient.zero_()
    else:
        torch.mul(probs, -grad_log_probs[:, None], out=gradient)
        gradient.scatter_add_(-1, column[:, None], (grad_log_probs * here)[:, None])
    if grad_entropy is not None:
        # A probability of 0 has log -inf; 0 x -inf would be NaN where the gradient is 0.
        probs.mul_(log_probs.masked_fill_(probs == 0, 0.0).add_(entropy[:, None]))
        gradient.addcmul_(probs, grad_entropy[:, None], value=-1)
    if gradient is not slope:
        slope.copy_(gradient)


def _columns(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, vocab_size: int, group: dist.ProcessGroup | None
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return how many columns of this rank are real, which targets are here, and in which column."""
    width = logits_NV.shape[-1]
    first = 0 if group is None else group.rank() * width
    real = max(0, min(width, vocab_size - first))
    return real, (targets_N >= first) & (targets_N < first + real), (targets_N - first).clamp(0, max(real - 1, 0))


def _forward(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, vocab_size: int, group: dist.ProcessGroup | None, entropy: bool,
    scratch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the numbers that both passes need; tensors of the logits' size lie in ``scratch`` where that is given.

    Returns:
        Log-probabilities; entropy (zeros where it is not asked for); exp(z - max z) of the real columns here, [N, columns]; its sum
        over all ranks; log Z; which targets are here; in which column. All but the third are [N].
    """
    real, here_N, column_N = _columns(logits_NV, targets_N, vocab_size, group)
    z_NV = logits_NV[:, :real]
    # exp(z) overflows from 88 on; with the maximum taken off, the largest term is 1.
    max_N = z_NV.amax(-1).float() if real else torch.full(z_NV.shape[:1], -torch.inf, device=z_NV.device)
    if group is not None:
        dist.all_reduce(max_N, op=dist.ReduceOp.MAX, group=group)
    of_z, of_exp = (None, None) if scratch is None else (_like(room, z_NV.shape) for room in scratch)
    z_NV = torch.sub(z_NV, max_N[:, None], out=of_z)  # float32, also where the logits have 16 bits
    exp_NV = torch.exp(z_NV, out=of_exp)
    chosen_N = z_NV.gather(-1, column_N[:, None])[:, 0] if real else torch.zeros_like(max_N)
    sums = [exp_NV.sum(-1), torch.where(here_N, chosen_N, 0.0)]
    if entropy:
        sums.append(torch.bmm(exp_NV[:, None, :], z_NV[:, :, None])[:, 0, 0])
    # One all-reduce of three sums in place of three.
    stacked = torch.stack(sums)
    if group is not None:
        dist.all_reduce(stacked, group=group)
    log_total_N = stacked[0].log()
    entropy_N = log_total_N - stacked[2] / stacked[0] if entropy else torch.zeros_like(log_total_N)
    return stacked[1] - log_total_N, entropy_N, exp_NV, stacked[0], log_total_N + max_N, here_N, column_N


# -- the tokens that top-k, top-p and ``min_new_tokens`` leave

POSITIONS = 64
"""Positions whose whole vocabulary is gathered at a time."""


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that may be drawn."""

    top_k: int = 0
    """The k likeliest; 0: all."""
    top_p: float = 1.0
    without: tuple[int, ...] = ()
    """Token ids that may not."""

    def __bool__(self) -> bool:
        return bool(self.top_k or self.top_p < 1 or self.without)


def keep(logits_NV: torch.Tensor, allowed: KeptTokens, vocab_size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the logits with -inf in place of those of tokens that may not be drawn; collective over ``group``.

    The log-probabilities that a generating engine returns are of the distribution that it drew from, renormalised over these. As
    vLLM does, the k likeliest are kept first, then the likeliest of them that together have probability p.

    Args:
        logits_NV: this rank's columns, divided by the temperature.
        allowed: which tokens may be drawn.
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
        full[:, list(allowed.without)] = -torch.inf
        masked = full.masked_fill(full < _least(full, allowed), -torch.inf)
        parts.append(masked[:, rank * width : (rank + 1) * width])
    return torch.cat(parts) if parts else logits_NV


def _least(full: torch.Tensor, allowed: KeptTokens) -> torch.Tensor:
    """Return the smallest logit that is kept at each position; shape [N, 1]."""
    ordered = full.sort(-1, descending=True).values
    count = min(allowed.top_k or ordered.shape[-1], ordered.shape[-1])
    ordered = ordered[:, :count]
    if allowed.top_p < 1:
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        last = (before < allowed.top_p).sum(-1, keepdim=True).clamp(min=1) - 1
        return ordered.gather(-1, last)
    return ordered[:, -1:]
