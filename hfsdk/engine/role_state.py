"""A role's state in pieces that no layout is written into: what a checkpoint holds, and what moves between pools.

A rank's state is made of Megatron's local tensors; each *piece* is a box of one Hugging Face tensor, of the weights or of one
part of the optimizer, so the pieces of any layout fill the state of any other::

    tp2, rank 1: linear_qkv.weight [96, 64]          ("weights", q_proj) rows 64:96   |    tp1: linear_qkv.weight [192, 64]
                 its exp_avg       [96, 64]   ->     ("weights", k_proj) rows 32:48  ...    rows 0:128 of q_proj, 0:64 of k_proj,
                                                     ("exp_avg", q_proj) rows 64:96   |     each from both ranks' pieces

Padding rows of the vocabulary belong to no piece and are zero in every state. A float32 weight is its own master, so there is no
piece ``main`` of it. Pure functions over tensors: no files, no processes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hfsdk.boxes import SCALAR_HEAD_NAMES, Box, Offsets, intersect, megatron_boxes
from hfsdk.errors import CheckpointError
from hfsdk.layout import Coordinates, Layout
from hfsdk.spec import ModelSpec

SCALAR_HEAD = "output_layer.weight"
"""Local name of the scalar head: a replicated float32 tensor [1, hidden]."""

KINDS = ("main", "exp_avg", "exp_avg_sq")
"""The optimizer's tensors, each shaped like its parameter: float32 master, first and second moment of AdamW."""

State = dict[str, Any]
"""``{"num_updates", "weights": {local name: tensor}, "optimizer": {local name: {kind: tensor, "step": a number}}}``, all on
the CPU."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which part of a role one rank holds."""

    spec: ModelSpec
    layout: Layout
    at: Coordinates
    scalar: bool = False
    """Whether the model ends in a scalar head in place of the logits."""

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Where each local parameter lies in the Hugging Face tensors."""
        boxes = megatron_boxes(self.spec, self.layout, self.at.tp, self.at.pp)
        if not self.scalar:
            return tuple(boxes)
        kept = [box for box in boxes if box.local != SCALAR_HEAD]
        if self.at.pp == self.layout.pp - 1:
            name = SCALAR_HEAD_NAMES[0]
            kept.append(Box(name, (0, 0), self.shapes[name], SCALAR_HEAD, (0, 0)))
        return tuple(kept)

    @cached_property
    def shapes(self) -> dict[str, Offsets]:
        """The shape of every Hugging Face tensor."""
        return {**self.spec.tensors(), SCALAR_HEAD_NAMES[0]: (1, self.spec.hidden_size)}

    def is_first(self, box: Box) -> bool:
        """Whether of all ranks that hold the same values this is the one that tells them.

        The same on every dp rank; what tp does not cut on every tp rank; a tied embedding on the first and last stage.
        """
        replicated = box.size == self.shapes[box.tensor] and "linear_qkv" not in box.local  # where tp cuts beside a lone kv head
        tied_copy = box.tensor == "model.embed_tokens.weight" and box.local == "output_layer.weight"
        return self.at.dp == 0 and not tied_copy and not (replicated and self.at.tp)


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of one tensor of a role's state, with its values."""

    kind: str
    """``"weights"`` or one of ``KINDS``."""
    tensor: str
    """Name of the Hugging Face tensor."""
    shape: Offsets
    """Shape of that whole tensor."""
    start: Offsets
    data: torch.Tensor
    """The values, contiguous; perhaps a view of the state it was taken from."""
    first: bool
    """See :meth:`Shard.is_first`: the pieces for which this holds cover every tensor exactly once."""

    @property
    def box(self) -> Box:
        """The part of the tensor that it holds."""
        return Box(self.tensor, self.start, tuple(self.data.shape), "", (0,) * self.data.dim())


@dataclass(frozen=True)
class Summary:
    """What a state needs besides its pieces; the same on every rank."""

    num_updates: int
    kinds: tuple[str, ...] = ()
    """The optimizer's tensors that there are: none for a frozen role, no moments before the first step."""
    step: float | None = None
    """AdamW's step count, one number for all parameters; ``None`` before the first step."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Summary:
        """Summarise a rank's state."""
        held: Mapping[str, torch.Tensor] = next(iter(state["optimizer"].values()), {})
        step = float(held["step"]) if "step" in held else None
        return cls(int(state["num_updates"]), tuple(kind for kind in KINDS if kind in held), step)


def pieces(state: Mapping[str, Any], shard: Shard) -> list[Piece]:
    """Cut a rank's state into pieces; rows of it stay views, columns are copied."""
    return [
        Piece(kind, box.tensor, shard.shapes[box.tensor], box.start, part.contiguous(), shard.is_first(box))
        for kind, box, part in _parts(state, shard)
    ]


def blank(local: Mapping[str, torch.Tensor], known: Summary) -> State:
    """Return a state, all zero, for a rank with these parameters; a float32 weight and its master are one tensor."""
    weights = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in local.items()}
    optimizer: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in weights.items() if known.kinds else ():
        own_master = weight.dtype == torch.float32
        optimizer[name] = {
            kind: weight if kind == "main" and own_master else torch.zeros(weight.shape) for kind in known.kinds
        }
        if known.step is not None:
            optimizer[name]["step"] = torch.tensor(known.step)
    return {"num_updates": known.num_updates, "weights": weights, "optimizer": optimizer}


@torch.no_grad()
def fill(state: Mapping[str, Any], shard: Shard, found: Iterable[Piece]) -> None:
    """Write pieces of any layout into a rank's state (see :func:`blank`); what it does not need of them is left.

    Raises:
        CheckpointError: the pieces do not cover the state.
    """
    offered: dict[tuple[str, str], dict[Box, Piece]] = defaultdict(dict)
    for piece in found:
        offered[piece.kind, piece.tensor].setdefault(piece.box, piece)  # replicas are one
    for kind, box, target in _parts(state, shard):
        covered = copy_shared(target, box, offered[kind, box.tensor].values())
        if covered != box.numel:
            raise CheckpointError(
                f"the state has {covered} of the {box.numel} numbers of {kind} {box.tensor} that this rank needs; "
                "it is incomplete or of another model"
            )


def copy_shared(target: torch.Tensor, box: Box, offered: Iterable[Piece]) -> int:
    """Copy what pieces of ``box``'s tensor share with it into ``target``, the box's values; return how many numbers that were."""
    covered = 0
    for piece in offered:
        shared = intersect(piece.box, box)
        if shared:
            start, size = shared
            target[slices(start, size, box.start)].copy_(piece.data[slices(start, size, piece.start)])
            covered += math.prod(size)
    return covered


def _parts(state: Mapping[str, Any], shard: Shard) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Yield (kind, box, view of the local tensor there) of everything in a state that is a piece."""
    weights, optimizer = state["weights"], state["optimizer"]
    for box in shard.boxes:
        where = slices(box.local_start, box.size)
        weight = weights[box.local]
        yield "weights", box, weight[where]
        for kind in KINDS:
            if kind in optimizer.get(box.local, ()) and not (kind == "main" and weight.dtype == torch.float32):
                yield kind, box, optimizer[box.local][kind][where]


def slices(start: Offsets, size: Offsets, origin: Offsets | None = None) -> tuple[slice, ...]:
    """Return the slices of a box, counted from ``origin``."""
    origin = origin or (0,) * len(start)
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(start, size, origin, strict=True))
