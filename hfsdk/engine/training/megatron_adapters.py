"""Adapters of low rank on Megatron's parallel linears, for any layout; megatron-core has none of its own.

One A and one B on each linear, where tp cuts the weight's rows (qkv, fc1) or its columns (proj, fc2)::

    cut by rows      h = A x               A whole on every rank, on the input that tp ranks have alike; the gradient of h is
                     y = W x + s B h       summed over tp (one all-reduce of [tokens, rank] backward). B is cut as W's rows
    cut by columns   h = sum over tp A x   A is cut as W's columns (one all-reduce of [tokens, rank] forward)
                     y = W x + s B h       B whole on every rank, after the sum of W x

So nothing of the size of a weight travels, and tp ranks get the same gradient of what they all hold without a further sum. With
sequence parallelism the sums are gathers and reduce-scatters along the tokens, and what is whole sees a part of the tokens: its
gradient is summed over tp with those of the norms. A fused linear has an adapter for each of its parts, their A stacked, and B
spread out with zeros, so that all are one product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from hfsdk.core.lora import A, AdapterSpec
from hfsdk.resharding.boxes import Box, megatron_boxes

if TYPE_CHECKING:
    from hfsdk.engine.training.megatron_groups import RoleGroups

ADAPTER = ".adapter."
"""The part of a tensor's local name that says it is an adapter's."""


class Adapter(torch.nn.Module):
    """The adapter of one parallel linear: A and B, whole or cut as the module's table says.

    Args:
        linear: Megatron's parallel linear.
        boxes: boxes of A and B of this linear on this rank.
        weights: boxes of the linear's weight on this rank.
        spec: the adapters of the model.
        tp: the tensor-parallel group.
    """

    def __init__(self, linear: Any, boxes: Sequence[Box], weights: Sequence[Box], spec: AdapterSpec, tp: Any) -> None:
        super().__init__()
        like: torch.Tensor = linear.weight
        self.by_rows, self.scale, self._tp = isinstance(linear, ColumnParallelLinear), spec.lora.scale, tp
        self.sequence_parallel = bool(linear.sequence_parallel)
        rank = spec.lora.rank
        of_a, of_b = ([box for box in boxes if (A in box.tensor) is first] for first in (True, False))
        num_parts, num_rows = len(of_a), sum(box.size[0] for box in of_b)
        self.A = torch.nn.Parameter(torch.zeros(num_parts * rank, of_a[0].size[1], dtype=like.dtype, device=like.device))
        self.B = torch.nn.Parameter(torch.zeros(num_rows, rank, dtype=like.dtype, device=like.device))
        if self.by_rows:
            set_tensor_model_parallel_attributes(self.B, True, 0, 1)
        else:
            set_tensor_model_parallel_attributes(self.A, True, 1, 1)
        if self.sequence_parallel:
            sees_a_part: Any = self.A if self.by_rows else self.B
            sees_a_part.sequence_parallel = True
        order, parts = _spread(of_a, of_b, weights)
        # The usual case, one part in the output's own order, needs no gather and no mask.
        plain = num_parts == 1 and order == list(range(len(like)))
        self._order = None if plain else torch.tensor([max(row, 0) for row in order], device=like.device)
        self._there = None if plain else torch.zeros(len(order), num_parts, 1, dtype=like.dtype, device=like.device)
        if self._there is not None:
            for row, part in enumerate(parts):
                if part is not None:
                    self._there[row, part] = 1

    def rows_of_output(self) -> torch.Tensor:
        """Return B as [rows of the output, parts * rank]: each row's numbers below the A of its part, zeros elsewhere."""
        if self._order is None or self._there is None:
            return self.B
        return (self.B[self._order][:, None, :] * self._there).flatten(1)

    def add(self, _: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        """A forward hook of the linear: add s B A x to W x; [tokens, 1, width] both."""
        x, (y, bias) = inputs[0], output
        h = torch.nn.functional.linear(x, self.A)
        if self.by_rows and self.sequence_parallel:
            h = gather_from_sequence_parallel_region(h, tensor_parallel_output_grad=True, group=self._tp)
        elif self.by_rows:
            h = copy_to_tensor_model_parallel_region(h, group=self._tp)
        elif self.sequence_parallel:
            h = reduce_scatter_to_sequence_parallel_region(h, group=self._tp)
        else:
            h = reduce_from_tensor_model_parallel_region(h, group=self._tp)
        h, b = h.flatten(0, -2), self.rows_of_output()
        if not torch.is_grad_enabled():
            y.flatten(0, -2).addmm_(h, b.t(), alpha=self.scale)
            return y, bias
        if y._is_view():  # a region of tp that has nothing to do hands on what it was given, which autograd keeps as it is
            return torch.addmm(y.flatten(0, -2), h, b.t(), alpha=self.scale).view(y.shape), bias
        added: torch.Tensor = _AddProduct.apply(y, h, b, self.scale)
        return added, bias


class _AddProduct(torch.autograd.Function):
    """y += s h b^T in place: nobody else has the output of a linear whose weight is frozen, and a copy is as large as the sum.

    With g = dL/dy: dh = s g b, db = s g^T h, and y's own gradient is g.
    """

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.mark_dirty(y)
        ctx.save_for_backward(h, b)
        ctx.scale = scale
        y.flatten(0, -2).addmm_(h, b.t(), alpha=scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        h, b = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        return grad, (flat @ b).mul_(ctx.scale), (flat.t() @ h).mul_(ctx.scale), None


def _spread(of_a: Sequence[Box], of_b: Sequence[Box], weights: Sequence[Box]) -> tuple[list[int], list[int | None]]:
    """Return, for each row of the linear's output, its row in B and the part whose A it is below; -1 and ``None`` without one."""
    number = {box.tensor.removesuffix(A): i for i, box in enumerate(of_a)}
    module = {box.tensor.rsplit(".lora_B", 1)[0]: box for box in of_b}
    first = {(box.tensor.rsplit(".lora_B", 1)[0], box.start[0]): box.local_start[0] for box in of_b}
    order: list[int] = []
    parts: list[int | None] = []
    # A fused linear's output lists its parts in the order of its own rows, B's may be another.
    for box in sorted(weights, key=lambda box: box.local_start):
        name = box.tensor.removesuffix(".weight")
        rows = range(box.size[0])
        order += [first[name, box.start[0]] + row for row in rows] if name in module else [-1] * len(rows)
        parts += [number.get(name)] * len(rows)
    return order, parts


def attach(model: Any, spec: AdapterSpec, groups: RoleGroups) -> None:
    """Freeze a model and give its linears adapters, drawn by ``spec.lora.seed``; a scalar head goes on being trained.

    A is drawn from N(0, 1 / (3 in)), whatever the layout, and B is zero (section 4.1 of the paper; the variance is that of its
    authors' code).
    """
    at, layout = groups.coordinates, groups.mesh.layout
    model.requires_grad_(False)
    by_local: dict[str, tuple[list[Box], list[Box]]] = {}
    for side, boxes in enumerate((megatron_boxes(spec, layout, at.tp, at.pp), megatron_boxes(spec.base, layout, at.tp, at.pp))):
        for box in boxes:
            if len(box.size) == 2:
                local = box.local.split(ADAPTER)[0].removesuffix(".weight")
                by_local.setdefault(local, ([], []))[side].append(box)
    for local, (boxes, weights) in by_local.items():
        if boxes:
            linear = model.get_submodule(local)
            linear.adapter = Adapter(linear, boxes, weights, spec, groups.tp)
            linear.register_forward_hook(linear.adapter.add)
    model.adapters = spec
    draw(model, spec, groups)


@torch.no_grad()
def draw(model: torch.nn.Module, spec: AdapterSpec, groups: RoleGroups) -> None:
    """Draw every A; the same on every rank that holds it."""
    shapes, at = spec.tensors(), groups.coordinates
    tensors = dict(model.named_parameters())
    for box in megatron_boxes(spec, groups.mesh.layout, at.tp, at.pp):
        if box.tensor.endswith(A):
            digest = hashlib.blake2b(f"{spec.lora.seed}/{box.tensor}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            shape = shapes[box.tensor]
            whole = torch.randn(shape, generator=generator) * (3 * shape[1]) ** -0.5
            rows, columns = (slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
            there, _ = (slice(a, a + n) for a, n in zip(box.local_start, box.size, strict=True))
            tensors[box.local][there].copy_(whole[rows, columns])


def is_adapter(name: str) -> bool:
    """Whether a local parameter is an adapter's."""
    return ADAPTER in name


def trained(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that an optimizer of the model has, by local name: of adapters only they and a scalar head."""
    yield from ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
