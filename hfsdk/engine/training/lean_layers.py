"""The norm and the activation of Megatron's layers, keeping for the backward pass what they cannot do without.

Composed of single operations they keep every step between. Of a layer, in numbers per token (h wide, MLP f wide)::

                 composed                                        here
    norm         x in float32, x / rms (where trained)           x
    gated MLP    gate, up, a copy of up, silu(gate), product     gate, up, product

What is not kept is made again from what is: a pass over memory each, and no matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu


class Norm(torch.nn.RMSNorm):
    """The norm that Megatron's local layers have, which refuse sequence parallelism (``torch_norm.py``).

    Given by name everywhere, or else the last norm would be Transformer Engine's wherever that is installed. On GPUs torch has a
    kernel for it.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x / rms(x) * weight, computed in float32, in the dtype of ``x``."""
        if x.device.type != "cpu":
            return super().forward(x)
        normed: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return normed


class _RMSNorm(torch.autograd.Function):
    """With h = x r, r = 1 / sqrt(mean(x^2) + eps): dx = r (g w - h mean(g w h)), dw = sum(g h)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        r = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        normed: torch.Tensor = (x * r).mul_(weight).to(x.dtype)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, r = ctx.saved_tensors
        h = x * r
        of_weight = (grad * h).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        slope = grad.float() * weight
        mean = (slope * h).mean(-1, keepdim=True)
        return slope.sub_(h.mul_(mean)).mul_(r).to(x.dtype), of_weight, None


def swiglu(halves: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up (Shazeer, arXiv 2002.05202) of [..., gate and up]."""
    product: torch.Tensor = _SwiGLU.apply(halves)
    return product


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(halves)
        gate, up = halves.chunk(2, -1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (halves,) = ctx.saved_tensors
        gate, up = halves.chunk(2, -1)
        found = torch.empty_like(halves)
        of_gate, of_up = found.chunk(2, -1)
        torch.mul(grad, silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return found
