"""The rows of one parameter of the rollout by rank, before and after a transition, as plain data for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hfsdk.resharding.box_moves import Move
from hfsdk.resharding.boxes import Box


def rows_by_rank(moves: Sequence[Move], held: Sequence[Sequence[Box]]) -> list[dict[str, Any]]:
    """Return for every rank which rows it has before, and which after the moves and from whom.

    Args:
        moves: those into the parameter.
        held: for every rank the boxes it starts from.
    """
    tensors = {move.tensor for move in moves}
    ranks = []
    for rank, boxes in enumerate(held):
        before = sorted((box for box in boxes if box.tensor in tensors), key=lambda box: box.local_start)
        mine = sorted((move for move in moves if move.target == rank), key=lambda move: move.target_start)
        ranks.append({
            "rank": rank, "before": [_row(box.tensor, box.start[0], box.size[0], rank, own=True) for box in before],
            "after": [
                _row(move.tensor, _first_row(move, held[move.source]), move.size[0], move.source, own=move.source == rank)
                for move in mine
            ],
        })  # fmt: skip
    return ranks


def _first_row(move: Move, held: Sequence[Box]) -> int:
    """Return where what is moved begins in its Hugging Face tensor, given its source's boxes."""
    for box in held:
        inside_it = box.local == move.source_local and box.tensor == move.tensor
        if inside_it and 0 <= move.source_start[0] - box.local_start[0] < box.size[0]:
            return box.start[0] + move.source_start[0] - box.local_start[0]
    raise AssertionError(move)


def _row(tensor: str, first: int, rows: int, source: int, *, own: bool) -> dict[str, Any]:
    short = tensor.rpartition(".layers.")[2].partition(".")[2] or tensor
    name = short.removeprefix("self_attn.").removeprefix("mlp.").removesuffix(".weight")
    label = f"{name.removesuffix('_proj')} {first}:{first + rows}"
    return {"tensor": name, "first": first, "rows": rows, "source": source, "own": own, "label": label}
