"""Weights on their way to another pool, whose processes share no process group with those who hold them.

Whoever holds a part puts its pieces (see ``role_state.py``), as one object, into its node's object store; whoever needs a part maps
the objects and copies what falls into its own boxes::

    pool "train", tp2          object store          pool "rollout", tp1 x 2
    rank 0: upper halves  -->  [pieces of 0]  --+->  rank 0: whole tensors
    rank 1: lower halves  -->  [pieces of 1]  --+->  rank 1: whole tensors

Nobody waits for anybody: the holders go on as soon as their object stands, and the others read when they come to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hfsdk.boxes import Box
from hfsdk.engine.role_state import Piece, copy_shared, slices

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
        target = targets[box.local][slices(box.local_start, box.size)]
        covered = copy_shared(target, box, offered.get(box.tensor, ()))
        if covered != box.numel:
            raise RuntimeError(f"of {box.numel} elements of {box.tensor} {box.start} only {covered} came")
        copied += covered * target.element_size()
    return copied
