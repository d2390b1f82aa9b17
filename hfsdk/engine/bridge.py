"""Weights on their way to another pool, whose processes share no process group with those who hold them.

Whoever holds a part puts its pieces (see ``role_state.py``), as one object, into its node's object store; whoever needs a part maps
the objects and copies what falls into its own boxes::

    pool "train", tp2          object store          pool "rollout", tp1 x 2
    rank 0: upper halves  -->  [pieces of 0]  --+->  rank 0: whole tensors
    rank 1: lower halves  -->  [pieces of 1]  --+->  rank 1: whole tensors

Nobody waits for anybody: the holders go on as soon as their object stands, and the others read when they come to it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hfsdk.engine.role_state import Piece
from hfsdk.resharding import Box, Offsets, intersect

_AS_NUMPY = {torch.bfloat16: torch.int16}
"""Dtypes that numpy does not have, and the dtype their bits travel as."""

Packed = Sequence[tuple[Piece, Any, torch.dtype]]
"""Pieces as they travel: (a piece whose values are left out, their bits as a numpy array, their dtype)."""


def pack(pieces: Iterable[Piece]) -> list[tuple[Piece, Any, torch.dtype]]:
    """Copy pieces into a form that is mapped without a copy where it arrives; only those of one replica are kept."""
    nothing = torch.empty(0)
    packed = []
    for piece in pieces:
        if piece.first:
            held = piece.data.detach().cpu()
            bits = held.view(_AS_NUMPY.get(held.dtype, held.dtype)).numpy()
            packed.append((replace(piece, data=nothing), np.array(bits), held.dtype))
    return packed


@contextmanager
def unpacked(holders: Iterable[Packed]) -> Iterator[list[Piece]]:
    """Return the pieces of several holders; they are read-only, of which torch would warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield [
            replace(piece, data=torch.from_numpy(bits).view(dtype)) for packed in holders for piece, bits, dtype in packed
        ]


def num_bytes(packed: Packed) -> int:
    """Return the bytes of the values."""
    return sum(int(bits.nbytes) for _, bits, _ in packed)


@torch.no_grad()
def assemble(boxes: Iterable[Box], targets: Mapping[str, torch.Tensor], pieces: Sequence[Piece]) -> int:
    """Fill boxes of local tensors from pieces of the weights; return the bytes that were copied.

    Raises:
        RuntimeError: the pieces do not cover a box.
    """
    offered: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.kind == "weights":
            offered.setdefault(piece.tensor, []).append(piece)
    copied = 0
    for box in boxes:
        missing = box.numel
        for piece in offered.get(box.tensor, ()):
            shared = intersect(piece.box, box)
            if shared is None:
                continue
            start, size = shared
            at = tuple(lo + s - b for lo, s, b in zip(box.local_start, start, box.start, strict=True))
            target = targets[box.local][_part(at, size)]
            target.copy_(piece.data[_part(tuple(s - p for s, p in zip(start, piece.start, strict=True)), size)])
            missing -= math.prod(size)
            copied += target.numel() * target.element_size()
        if missing:
            raise RuntimeError(f"{missing} of {box.numel} elements of {box.tensor} {box.start} came with no piece")
    return copied


def _part(start: Offsets, size: Offsets) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))
