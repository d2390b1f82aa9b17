"""The product with adapters on a machine without a GPU: row by row of a batch vLLM's own gathers A and B once per token.

Here the rows that have the same adapter are multiplied together, and rows without one are left alone (vLLM's would give them that
of the last slot)::

    rows of a batch    0 0 0 0 | - - | 1 1 1     slot of each; - is none
    y[0:4] += (x[0:4] A0^T) B0^T         y[6:9] += (x[6:9] A1^T) B1^T
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

Part = tuple["Tensor", "Tensor", int, int]
"""A^T [in, rank] and B^T [rank, rows] of one part of a layer, and the first and last column of its output."""


class SlotKernel:
    """Stands in for the methods of vLLM's ``PunicaWrapperCPU`` that linear layers use."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._parts: dict[int, list[list[Part]]] = {}
        self._groups: list[tuple[int, slice | Tensor]] = []

    def take(self, layer: Any, used: Collection[int]) -> None:
        """Keep the tensors of a wrapped layer, of the parts that have adapters, slot by slot."""
        ends = np.cumsum([0, *layer.output_slices])
        self._parts[id(layer.lora_a_stacked)] = [
            [
                (a[slot, 0, : self._rank].T, b[slot, 0, :, : self._rank].T, int(ends[part]), int(ends[part + 1]))
                for part, (a, b) in enumerate(zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True))
                if part in used
            ]
            for slot in range(len(layer.lora_a_stacked[0]))
        ]

    def update_metadata(self, mapping: Any, lora_index_to_id: Sequence[int | None], *_: Any, **__: Any) -> None:
        """Note which rows of the next batch have which slot."""
        slots = {number: slot for slot, number in enumerate(lora_index_to_id) if number is not None}
        numbers = np.asarray(mapping.index_mapping)
        self._groups = []
        for number in np.unique(numbers[numbers > 0]).tolist():
            rows = np.flatnonzero(numbers == number)
            first, last = int(rows[0]), int(rows[-1]) + 1
            self._groups.append((slots[number], slice(first, last) if last - first == len(rows) else torch.from_numpy(rows)))

    def add_lora_linear(self, y: Tensor, x: Tensor, lora_a_stacked: tuple[Tensor, ...], *_: Any, **__: Any) -> None:
        """Add the adapters' output to ``y`` [rows, out] in place; ``x`` is [rows, in]."""
        slots = self._parts[id(lora_a_stacked)]
        for slot, rows in self._groups:
            if isinstance(rows, slice):
                mine, out = x[rows], y[rows]
                for a, b, first, last in slots[slot]:
                    out[:, first:last].addmm_(mine @ a, b)
            else:
                mine = x[rows]
                for a, b, first, last in slots[slot]:
                    y[:, first:last].index_add_(0, rows, mine @ a @ b)


def replace_kernel(manager: Any, used: dict[str, set[int]], rank: int) -> None:
    """Have vLLM's wrapped layers multiply by slot.

    Args:
        manager: vLLM's, of its adapters.
        used: by a layer's name, which of its parts have adapters.
        rank: of the adapters, which may be less than the slots'.
    """
    kernel = SlotKernel(rank)
    for name, layer in manager.modules.items():
        kernel.take(layer, used[name])
    for wrapper in manager.punica_wrapper_mapping.values():
        wrapper.update_metadata, wrapper.add_lora_linear = kernel.update_metadata, kernel.add_lora_linear
