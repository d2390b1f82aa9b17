"""The rows of one parameter of the rollout by rank, before and after a transition, as plain data for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hfsdk.resharding.box_moves import Move
from hfsdk.resharding.boxes import Box


def rows_by_rank(moves: Sequence[Move], held: Sequence[Sequence[Box]]) -> list[dict[str, Any]]:
    """Return for every rank which rows it has before, and which after the moves and from whom; columns where it is cut by these.

    Args:
        moves: those into the parameter.
        held: for every rank the boxes it starts from.
    """
    tensors = {move.tensor for move in moves}
    axis = _axis([box for boxes in held for box in boxes if box.tensor in tensors], moves)
    ranks = []
    for rank, boxes in enumerate(held):
        before = sorted((box for box in boxes if box.tensor in tensors), key=lambda box: box.local_start)
        mine = sorted((move for move in moves if move.target == rank), key=lambda move: move.target_start)
        ranks.append({
            "rank": rank, "before": [_row(box.tensor, axis, box.start[axis], box.size[axis], rank, own=True) for box in before],
            "after": [
                _row(move.tensor, axis, _first(move, axis, held[move.source]), move.size[axis], move.source, own=own)
                for move in mine
                for own in [move.source == rank]
            ],
        })  # fmt: skip
    return ranks


def _axis(boxes: Sequence[Box], moves: Sequence[Move]) -> int:
    """Return 1 where all that is held or moved has all rows of its tensor, and some of it not all columns, else 0."""
    whole: dict[str, list[int]] = {}
    for box in boxes:
        ends = [start + size for start, size in zip(box.start, box.size, strict=True)]
        whole[box.tensor] = [max(pair) for pair in zip(ends, whole.get(box.tensor, ends), strict=True)]
    pieces = [(box.size, whole[box.tensor]) for box in boxes] + [(move.size, whole[move.tensor]) for move in moves]
    by_rows = any(size[0] < most[0] for size, most in pieces)
    by_columns = any(len(size) > 1 and size[1] < most[1] for size, most in pieces)
    return int(by_columns and not by_rows)


def _first(move: Move, axis: int, held: Sequence[Box]) -> int:
    """Return where what is moved begins along an axis of its Hugging Face tensor, given its source's boxes."""
    for box in held:
        if box.local == move.source_local and box.tensor == move.tensor:
            ahead = [there - here for there, here in zip(move.source_start, box.local_start, strict=True)]
            if all(0 <= steps < size for steps, size in zip(ahead, box.size, strict=True)):
                return box.start[axis] + ahead[axis]
    raise AssertionError(move)


def _row(tensor: str, axis: int, first: int, rows: int, source: int, *, own: bool) -> dict[str, Any]:
    short = tensor.rpartition(".layers.")[2].partition(".")[2] or tensor
    name = short.removeprefix("self_attn.").removeprefix("mlp.").removesuffix(".weight")
    place = f"{first}:{first + rows}" if axis == 0 else f":, {first}:{first + rows}"
    label = f"{name.removesuffix('_proj')} {place}"
    return {"tensor": name, "first": first, "rows": rows, "place": place, "source": source, "own": own, "label": label}
