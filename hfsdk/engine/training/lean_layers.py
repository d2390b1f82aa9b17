"""The norm and the activation of Megatron's layers, keeping for the backward pass what they cannot do without.

Composed of single operations they keep every step between. Of a layer, in numbers per token (h wide, MLP f wide)::

                 composed                                        here
    norm         x in float32, x / rms (where trained), normed   x
    gated MLP    gate, up, a copy of up, silu(gate), product     gate, up

What is not kept is made again from what is: a pass over memory each, and no matrix product. The normed x and the product are what
the next linear would keep as its input (:func:`make_inputs_again`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
        return _RMSNorm.made_of(x, weight, r)

    @staticmethod
    def made_of(x: torch.Tensor, weight: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        """Return the output, of what is kept."""
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
        return _SwiGLU.made_of(halves)

    @staticmethod
    def made_of(halves: torch.Tensor) -> torch.Tensor:
        """Return the output, of what is kept."""
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


def make_inputs_again(linears: Iterable[torch.nn.Module]) -> None:
    """Have linears keep no output of :class:`Norm` or :func:`swiglu` for their backward pass: it is made again, bit for bit.

    Whatever else is multiplied with the input in a linear's forward hooks that are there by now, as adapters are, is kept so too.
    """
    for linear in linears:
        keeps = _Keeps()
        linear.register_forward_pre_hook(keeps.begin)
        linear.register_forward_hook(keeps.end, always_call=True)


class _Keeps:
    """What is kept meanwhile is kept as what makes it, where that is possible."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def begin(self, *_: Any) -> None:
        """Before the linear."""
        hooks = torch.autograd.graph.saved_tensors_hooks(_instead, _again)
        hooks.__enter__()
        self._open.append(hooks)

    def end(self, *_: Any) -> None:
        """After it, whether it failed or not."""
        if self._open:
            self._open.pop().__exit__(None, None, None)


@dataclass(frozen=True)
class _Made:
    """In place of an output: the step that made it, which has what it needs to do so again, and the shape that is wanted."""

    by: Any
    shape: torch.Size


def _instead(kept: torch.Tensor) -> torch.Tensor | _Made:
    """Return what is kept for a tensor."""
    whole = kept._base if kept._is_view() and kept._base is not None else kept
    by = whole.grad_fn
    if getattr(by, "_forward_cls", None) not in (_RMSNorm, _SwiGLU) or whole.numel() != kept.numel() or not kept.is_contiguous():
        return kept
    return _Made(by, kept.shape)


def _again(kept: torch.Tensor | _Made) -> torch.Tensor:
    """Return the tensor, of what was kept."""
    if isinstance(kept, torch.Tensor):
        return kept
    made: torch.Tensor = kept.by._forward_cls.made_of(*kept.by.saved_tensors)
    return made.view(kept.shape)
