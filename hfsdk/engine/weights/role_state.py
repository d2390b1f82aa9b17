"""A role's state in pieces that no layout is written into, as a checkpoint holds it and as it moves between pools.

A rank's state is made of Megatron's local tensors; each *piece* is a box of one Hugging Face tensor, of the weights or of one
part of the optimizer, so the pieces of any layout fill the state of any other::

    tp2, rank 1: linear_qkv.weight [96, 64]          ("weights", q_proj) rows 64:96   |    tp1: linear_qkv.weight [192, 64]
                 its exp_avg       [96, 64]   ->     ("weights", k_proj) rows 32:48  ...    rows 0:128 of q_proj, 0:64 of k_proj,
                                                     ("exp_avg", q_proj) rows 64:96   |     each from both ranks' pieces

Padding rows of the vocabulary belong to no piece and are zero in every state. A float32 weight is its own master, so there is no
piece ``main`` of it. How a rank's part is cut into pieces, and filled from them: ``shares.py``. No files, no processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hfsdk.core.layout import Coordinates, Layout
from hfsdk.core.spec import SCALAR_HEAD_NAMES, ModelSpec
from hfsdk.resharding.boxes import Box, Offsets, intersect, megatron_boxes

SCALAR_HEAD = "output_layer.weight"
"""Local name of the scalar head: a replicated float32 tensor [1, hidden]."""

KINDS = ("main", "exp_avg", "exp_avg_sq")
"""The optimizer's tensors, each shaped like its parameter: float32 master, first and second moment of AdamW."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a role that one rank has."""

    spec: ModelSpec
    layout: Layout
    at: Coordinates
    scalar: bool = False
    """Whether the model ends in a scalar head in place of the logits."""

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The place of each local parameter in the Hugging Face tensors."""
        boxes = megatron_boxes(self.spec, self.layout, self.at.tp, self.at.pp)
        if not self.scalar:
            return tuple(boxes)
        trained = [box for box in boxes if box.local != SCALAR_HEAD]
        if self.at.pp == self.layout.pp - 1:
            name = SCALAR_HEAD_NAMES[0]
            trained.append(Box(name, (0, 0), self.shapes[name], SCALAR_HEAD, (0, 0)))
        return tuple(trained)

    @cached_property
    def shapes(self) -> dict[str, Offsets]:
        """The shape of every Hugging Face tensor."""
        return {**self.spec.tensors(), SCALAR_HEAD_NAMES[0]: (1, self.spec.hidden_size)}

    def is_first(self, box: Box) -> bool:
        """Whether of all tp and pp ranks that hold the same values this is the one that tells them.

        The same on every tp rank is what tp does not cut; on the first and last stage a tied embedding. (What dp ranks hold alike
        they share out: ``shares.py``.)
        """
        beside = "linear_qkv" in box.local and not box.local.endswith(".A")  # tp may cut beside a lone kv head
        replicated = box.size == self.shapes[box.tensor] and not beside
        tied_copy = box.tensor == "model.embed_tokens.weight" and box.local == "output_layer.weight"
        return not tied_copy and not (replicated and self.at.tp)


@dataclass(frozen=True, eq=False)
class StatePiece:
    """A box of one tensor of a role's state, with its values."""

    kind: str
    """``"weights"`` or one of ``KINDS``."""
    tensor: str
    """Name of the Hugging Face tensor."""
    shape: Offsets
    """Shape of that whole tensor."""
    start: Offsets
    data: torch.Tensor
    """The values, contiguous; perhaps a view of the share it was taken from."""
    first: bool
    """See :meth:`Shard.is_first`: of the pieces of all ranks, those for which this holds cover every tensor exactly once."""

    @property
    def box(self) -> Box:
        """The part of the tensor that it holds."""
        return Box(self.tensor, self.start, tuple(self.data.shape), "", (0,) * self.data.dim())


@dataclass(frozen=True)
class Summary:
    """The numbers that a state needs besides its pieces; the same on every rank."""

    num_updates: int
    kinds: tuple[str, ...] = ()
    """The optimizer's tensors that there are: none for a frozen role, no moments before the first step."""
    step: float | None = None
    """AdamW's step count, one number for all parameters; ``None`` before the first step."""
    fingerprints: Mapping[str, tuple[str, int]] = field(default_factory=dict, compare=False)
    """(dtype, fingerprint) of the weights, by Hugging Face name; empty where they were not taken."""


def copy_shared(target: torch.Tensor, box: Box, offered: Iterable[StatePiece]) -> int:
    """Copy the parts that pieces of ``box``'s tensor share with it into ``target``, the box's values; return how many numbers."""
    covered = 0
    for piece in offered:
        shared = intersect(piece.box, box)
        if shared:
            start, size = shared
            target[slices(start, size, box.start)].copy_(piece.data[slices(start, size, piece.start)])
            covered += math.prod(size)
    return covered


def slices(start: Offsets, size: Offsets, origin: Offsets | None = None) -> tuple[slice, ...]:
    """Return the slices of a box, counted from ``origin``."""
    origin = origin or (0,) * len(start)
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(start, size, origin, strict=True))
