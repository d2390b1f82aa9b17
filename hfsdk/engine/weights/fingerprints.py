"""Fingerprints of weights: sums that do not depend on the layout, so that both sides of a move can be compared.

Of a box of a Hugging Face tensor x, with the bits of a number read as a whole number, two sums modulo 2^32::

    F_l(box) = sum over i, j in the box of  bits(x[i, j]) * r_l[i] * c_l[j]      l = 0, 1; i, j count in the whole tensor

r and c are odd numbers, hashed from i and j. The sums of boxes that do not overlap add up to that of the whole, on any ranks
and in any order; what two ranks hold alike has the same sum. One number that changes is always found, as its change, below
2^32, is multiplied by odd numbers; rows that changed places, a stride, a box of an older version are missed about once in 2^64, and
once in 2^32 where numbers have 16 bits, as the lower half of a sum says nothing then. (Additive hashes of sets: Bellare and
Micciancio, EUROCRYPT 1997.)

Rows are multiplied by both c and summed in one product of whole numbers, so a fingerprint costs what reading the weights once
costs. bf16 is read two numbers at a time: c_l[2k + 1] = 2^16 c_l[2k].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfsdk.core.errors import WeightMismatchError
from hfsdk.resharding.boxes import Offsets
from hfsdk.resharding.proof import Proof, Taken, Witness, WrongBox

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LANES = 2
LANE_MASK = 2**32 - 1
GPU_NUMBERS = 2**24
"""Numbers that are multiplied at a time where there is no product of whole numbers (CUDA)."""

SMALL, BATCH = 2**17, 2**20
"""Numbers of a tensor that is put together with others, and of those together (4 MiB of fp32)."""

Sums = npt.NDArray[np.uint64]
"""Fingerprints; the first lane in the lower 32 bits."""

DtypeOf = Mapping[str, torch.dtype] | torch.dtype

Given = Mapping[int, Sums | Mapping[int, int]]

_multipliers: dict[tuple[str, str], Tensor] = {}


LocalBox = tuple[str, Offsets, Offsets, Offsets]
"""(local tensor, where the box begins in it, its size, where it begins in the whole tensor); one or two dimensions."""


Columns = tuple[str, int, int, int, int]
"""(local tensor, its dimensions, first column in it, how many, first column in the whole tensor)."""

Rows = tuple[int, int, int, int]
"""(number of the box, first row in the local tensor, how many, first row in the whole tensor)."""

Strip = tuple[str, int, int, int, int, int, int]
"""``Columns``, and which rows of the local tensor."""


class Strips:
    """Boxes of local tensors whose fingerprints are taken together: those that have the same columns of one tensor in one product.

    Small tensors with the same columns, such as a model's norms or its adapters, are put into one first. A box by itself would be
    a dozen operations, each of which takes longer to start than to run, on a GPU above all.
    """

    def __init__(self, boxes: Sequence[LocalBox]) -> None:
        self.num_boxes = len(boxes)
        together: dict[Columns, list[Rows]] = defaultdict(list)
        for number, (local, at, size, start) in enumerate(boxes):
            first, count, row = (at[0], size[0], start[0]) if len(size) == 2 else (0, 1, 0)
            together[local, len(size), at[-1], size[-1], start[-1]].append((number, first, count, row))
        self._batches: list[list[Strip]] = []
        self._first, self._last = np.zeros(len(boxes), np.int64), np.zeros(len(boxes), np.int64)
        rows: list[npt.NDArray[np.int64]] = []
        offset = 0
        for batch in _batches(together):
            self._batches.append([])
            for key in batch:
                members = together[key]
                low, high = _rows_of(members)
                # Boxes of one strip may lie apart: rows between them get 0 and are in no box's sum.
                of_strip = np.zeros(high - low, np.int64)
                for number, first, count, row in members:
                    of_strip[first - low : first - low + count] = np.arange(row, row + count)
                    self._first[number], self._last[number] = offset + first - low, offset + first - low + count
                self._batches[-1].append((*key, low, high))
                rows.append(of_strip)
                offset += high - low
        self._rows = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        self._there: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    @torch.no_grad()
    def of(self, tensors: Mapping[str, Tensor], dtype_of: DtypeOf | None = None) -> Sums:
        """Return the fingerprint of each box.

        Args:
            tensors: this rank's local tensors.
            dtype_of: the dtype they are cast to first: one for all, or by local name; by default they stay as they are.
        """
        if not self._batches:
            return np.zeros(0, dtype=np.uint64)
        sums: list[Tensor] = []
        for batch in self._batches:
            values = [_values(tensors, strip, dtype_of) for strip in batch]
            # torch.cat would cast tensors of two dtypes to one, and so change what is summed.
            alike = len(values) > 1 and len({value.dtype for value in values}) == 1
            sums += [_row_sums(value, batch[0][4]) for value in ([torch.cat(values)] if alike else values)]
        multipliers, first, last = self._on(sums[0].device)
        # int64 wraps modulo 2^64, a multiple of 2^32: a difference of running sums is exact however often they wrapped.
        ends = torch.cumsum(torch.cat(sums, 1) * multipliers, 1, dtype=torch.int64)
        lanes = ends[:, last - 1] - torch.where(first > 0, ends[:, (first - 1).clamp(min=0)], 0)
        low_high = lanes.cpu().numpy().astype(np.uint64) & np.uint64(LANE_MASK)
        joined: Sums = (low_high[1] << np.uint64(32)) | low_high[0]
        return joined

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return, on a device, the factors of rows (lanes, rows), and where each box's rows begin and end."""
        if str(device) not in self._there:
            most = int(self._rows.max()) + 1
            of_rows = _odd("row", 0, most, device)[:, torch.from_numpy(self._rows).to(device)]
            first, last = torch.from_numpy(self._first).to(device), torch.from_numpy(self._last).to(device)
            self._there[str(device)] = of_rows, first, last
        return self._there[str(device)]


def _rows_of(members: Iterable[Rows]) -> tuple[int, int]:
    ends = [(first, first + count) for _, first, count, _ in members]
    return min(low for low, _ in ends), max(high for _, high in ends)


def _batches(together: Mapping[Columns, Sequence[Rows]]) -> Iterable[list[Columns]]:
    """Return which strips are put into one: small ones, of the same columns."""
    alike: dict[tuple[int, int], list[Columns]] = defaultdict(list)
    numbers: dict[tuple[int, int], int] = defaultdict(int)
    for key, members in together.items():
        low, high = _rows_of(members)
        size, columns = (high - low) * key[3], key[3:]
        # Copying a large strip next to others would cost more than the launches that it saves.
        if size > SMALL:
            yield [key]
            continue
        if numbers[columns] + size > BATCH:
            yield alike.pop(columns)
            numbers[columns] = 0
        alike[columns].append(key)
        numbers[columns] += size
    yield from alike.values()


def _values(tensors: Mapping[str, Tensor], strip: Strip, dtype_of: DtypeOf | None) -> Tensor:
    """Return a strip's values, as they travel."""
    local, dims, column, width, _, low, high = strip
    tensor = tensors[local].detach()
    if dims == 1:
        values = tensor[column : column + width].view(1, -1)
    else:
        values = tensor if tensor.shape == (high - low, width) else tensor[low:high, column : column + width]
    return values if dtype_of is None else values.to(dtype_of if isinstance(dtype_of, torch.dtype) else dtype_of[local])


def fingerprints(boxes: Iterable[tuple[Tensor, Offsets]]) -> Sums:
    """Return the fingerprint of each box, given as (its values, where it begins in the whole tensor); one or two dimensions."""
    content = list(boxes)
    local = [(str(i), (0,) * values.dim(), tuple(values.shape), start) for i, (values, start) in enumerate(content)]
    return Strips(local).of({str(i): values for i, (values, _) in enumerate(content)})


def added(sums: Iterable[int]) -> int:
    """Return the fingerprint of boxes together that do not overlap."""
    low = high = 0
    for number in sums:
        low, high = low + (number & LANE_MASK), high + (number >> 32)
    return (high & LANE_MASK) << 32 | low & LANE_MASK


def _row_sums(matrix: Tensor, column: int) -> Tensor:
    """Return the sums over each row of a matrix whose first column is ``column`` of the whole tensor: (lanes, rows)."""
    words, count, device = _whole_words(matrix, column), matrix.shape[1], matrix.device
    if words is None:
        return _times(_as_words(matrix), _of_halves(column, count, device))
    step = count // words.shape[1]
    return _times(words, _odd("column", column // step, words.shape[1], device))


def _whole_words(matrix: Tensor, column: int) -> Tensor | None:
    """Return a matrix as words of 32 bits, without a copy; ``None`` where a row begins or ends inside one."""
    if matrix.element_size() == 4:
        return matrix.view(torch.int32)
    even = not (column % 2 or matrix.shape[1] % 2 or matrix.storage_offset() % 2 or (len(matrix) > 1 and matrix.stride(0) % 2))
    return matrix.view(torch.int32) if even and matrix.stride(1) == 1 else None


def _as_words(matrix: Tensor) -> Tensor:
    return matrix.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF


def _of_halves(column: int, count: int, device: torch.device) -> Tensor:
    """Return the multipliers of numbers of 16 bits, one each: (lanes, count)."""
    first, last = column // 2, (column + count + 1) // 2
    pairs = _odd("column", first, last - first, device)
    return torch.stack([pairs, pairs << 16], 2).flatten(1)[:, column - 2 * first :][:, :count]


def _times(words: Tensor, multipliers: Tensor) -> Tensor:
    """Return the product of multipliers (lanes, count) and the rows of a matrix (rows, count), modulo 2^32: (lanes, rows)."""
    return multipliers @ words.t() if words.device.type == "cpu" else _times_in_steps(words, multipliers)


def _times_in_steps(words: Tensor, multipliers: Tensor) -> Tensor:
    """Do so where torch has no such product."""
    step = max(1, GPU_NUMBERS // max(words.shape[1], 1))
    of_lanes = [
        [(words[i : i + step] * of_lane).sum(1, dtype=torch.int32) for i in range(0, len(words), step)] for of_lane in multipliers
    ]
    return torch.stack([torch.cat(sums) for sums in of_lanes])


def _odd(axis: str, first: int, count: int, device: torch.device) -> Tensor:
    """Return odd numbers of 32 bits for some rows or columns: (lanes, count)."""
    multipliers = _multipliers.get((axis, str(device)))
    if multipliers is None or multipliers.shape[1] < first + count:
        size = 1 << max(10, (first + count - 1).bit_length())
        multipliers = torch.from_numpy(np.stack([_hashed(axis, lane, size) for lane in range(LANES)])).to(device)
        _multipliers[axis, str(device)] = multipliers
    return multipliers[:, first : first + count]


def _hashed(axis: str, lane: int, count: int) -> npt.NDArray[np.int32]:
    """Return numbers of 32 bits by splitmix64 (Steele, Lea and Flood, OOPSLA 2014), made odd."""
    at = np.arange(1, count + 1, dtype=np.uint64) + (np.uint64(lane + LANES * (axis == "row")) << np.uint64(48))
    mixed = at * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    odd: npt.NDArray[np.int32] = (mixed.astype(np.uint32) | np.uint32(1)).view(np.int32)
    return odd


# ---- of a plan


_of_witness: WeakKeyDictionary[Witness, tuple[Strips, Strips]] = WeakKeyDictionary()


def _strips(witness: Witness) -> tuple[Strips, Strips]:
    """Return the boxes that a rank gives, and those it takes."""
    if witness not in _of_witness:
        gives = [(box.local, box.local_start, box.size, box.start) for box in witness.gives.values()]
        _of_witness[witness] = Strips(gives), Strips(_boxes_of(witness.takes))
    return _of_witness[witness]


def _boxes_of(takes: Iterable[Taken]) -> list[LocalBox]:
    return [(box.move.target_local, box.move.target_start, box.move.size, box.start) for box in takes]


def of_given(witness: Witness, sources: Mapping[str, Tensor], dtype_of: DtypeOf) -> Sums:
    """Return the fingerprints of the boxes that this rank gives, by their numbers; of those that stay where they are, 0.

    Args:
        witness: the witness, which says which strips.
        sources: this rank's local tensors.
        dtype_of: the dtype they travel in: one for all, or by local name.
    """
    sums = np.zeros(witness.num_given(witness.rank), dtype=np.uint64)
    sums[list(witness.gives)] = _strips(witness)[0].of(sources, dtype_of)
    return sums


def compared(
    witness: Witness, targets: Mapping[str, Tensor], given_sums: Given, num_ranks: int, hidden: Container[str] = ()
) -> Proof:
    """Compare the boxes that this rank has taken with those that left.

    Args:
        witness: the fingerprints that it takes.
        targets: its local tensors, as they are now.
        given_sums: the fingerprints of the ranks that give, by rank and by number (:func:`of_given`).
        num_ranks: the plan's number of ranks.
        hidden: targets that nobody can read any more, as kernels have packed them; they are left out.
    """
    takes = [box for box in witness.takes if box.move.target_local not in hidden]
    there = (_strips(witness)[1] if not hidden else Strips(_boxes_of(takes))).of(targets)
    proven, wrong = [0] * num_ranks, []
    for box, arrived in zip(takes, there.tolist(), strict=True):
        move, left = box.move, int(given_sums[box.move.source][box.number])
        if left == arrived:
            proven[move.source] += 1
        else:
            wrong.append(WrongBox(move.tensor, box.start, move.size, move.source, move.target, left, arrived))
    return Proof(tuple(proven), witness.num_shared, tuple(wrong))


def gathered(sums: Sums, counts: Sequence[int], group: ProcessGroup) -> dict[int, Sums]:
    """Return the fingerprints of every rank of a group, by rank; collective. The group may be one that torch has not made.

    Args:
        sums: this rank's fingerprints.
        counts: how many every rank has, by rank.
        group: gloo for tensors on the host.
    """
    if len(counts) == 1:
        return {0: sums}
    own_sums = torch.zeros(max(counts), dtype=torch.int64)
    own_sums[: len(sums)] = torch.from_numpy(sums.view(np.int64))
    sums_by_rank = [torch.empty_like(own_sums) for _ in counts]
    group.allgather([sums_by_rank], [own_sums]).wait()
    return {rank: row.numpy().view(np.uint64)[:count] for rank, (row, count) in enumerate(zip(sums_by_rank, counts, strict=True))}


MOVE_AGAIN = "Run the call again: they are moved anew. If it comes back, look at the memory and the links of these ranks."
"""Advice for the case in which the weights that left are still there."""


def mismatch(role: str, proof: Proof | None, advice: str) -> WeightMismatchError | None:
    """Return the error where weights arrived that are not those that left; ``None`` where all are.

    Args:
        role: the role's name.
        proof: this rank's proof; ``None`` where it has taken nothing.
        advice: a sentence that says what to do.
    """
    if proof is None or not proof.wrong:
        return None
    more = f" (and {len(proof.wrong) - 1} more of its boxes)" if len(proof.wrong) > 1 else ""
    return WeightMismatchError(f"the weights of {role} that arrived are not those that left: {proof.wrong[0]}{more}. {advice}")
