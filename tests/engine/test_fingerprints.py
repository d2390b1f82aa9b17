"""Fingerprints of weights: what they are, that they add up however a tensor is cut, and what they find."""

import itertools

import numpy as np
import pytest
import torch
from rows import every_row

from hfsdk.engine.weights import fingerprints as f

DTYPES = (torch.float32, torch.bfloat16)
SHAPE = (7, 12)


def by_hand(values, start):
    """The definition, number by number in whole numbers without a limit."""
    wide = values.element_size() == 4
    bits = values.view(torch.int32 if wide else torch.int16).numpy().astype(np.int64) & (0xFFFFFFFF if wide else 0xFFFF)
    rows, columns = bits.reshape(1, -1) if bits.ndim == 1 else bits, start[-1]
    first, found = (0 if bits.ndim == 1 else start[0]), 0
    for lane in range(f.LANES):
        r, c = (f._hashed(axis, lane, 256).view(np.uint32).tolist() for axis in ("row", "column"))
        of_column = [c[j] if wide else c[j // 2] << 16 * (j % 2) for j in range(200)]
        total = sum(int(x) * r[first + i] * of_column[columns + j] for i, row in enumerate(rows) for j, x in enumerate(row))
        found |= (total % 2**32) << 32 * lane
    return found


def random(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one(values, start):
    return int(f.fingerprints([(values, start)])[0])


def test_it_is_as_defined():
    with every_row() as row:
        for width, column, dtype in itertools.product([12, 11], [0, 40, 41], DTYPES):
            with row(width, column, dtype):
                check_it_is_as_defined(dtype, column, width)


def check_it_is_as_defined(dtype, column, width):
    values = random((7, 12), dtype)[:, :width]
    assert one(values, (100, column)) == by_hand(values.contiguous(), (100, column))
    vector = random((9,), dtype)
    assert one(vector, (column,)) == by_hand(vector, (column,))


def test_parts_add_up_to_the_whole():
    with every_row() as row:
        for dtype in DTYPES:
            with row(dtype):
                check_parts_add_up_to_the_whole(dtype)


def check_parts_add_up_to_the_whole(dtype):
    values, rng = random((24, 30), dtype), np.random.default_rng(0)
    whole = one(values, (0, 0))
    for _ in range(30):
        row, column = int(rng.integers(1, 23)), int(rng.integers(1, 29))
        parts = [(values[:row, :column], (0, 0)), (values[:row, column:], (0, column)), (values[row:], (row, 0))]
        assert f.added(f.fingerprints(parts).tolist()) == whole


def test_each_bit_of_each_number_counts():
    with every_row() as row:
        for dtype in DTYPES:
            with row(dtype):
                check_each_bit_of_each_number_counts(dtype)


def check_each_bit_of_each_number_counts(dtype):
    values = random((3, 4), dtype)
    before, bits = one(values, (5, 6)), values.view(torch.int32 if dtype == torch.float32 else torch.int16)
    for row in range(3):
        for column in range(4):
            for bit in range(8 * values.element_size()):
                flip = np.array(1 << bit, dtype=np.int64).astype(np.int32 if dtype == torch.float32 else np.int16).item()
                bits[row, column] ^= flip
                assert one(values, (5, 6)) != before
                bits[row, column] ^= flip
    assert one(values, (5, 6)) == before


def test_a_number_at_another_place_counts():
    with every_row() as row:
        for dtype in DTYPES:
            with row(dtype):
                check_a_number_at_another_place_counts(dtype)


def check_a_number_at_another_place_counts(dtype):
    values = random(SHAPE, dtype)
    before = one(values, (0, 0))
    assert one(values, (1, 0)) != before
    assert one(values, (0, 1)) != before
    assert one(values[[1, 0, *range(2, 7)]], (0, 0)) != before
    assert one(values.T.contiguous().view(SHAPE), (0, 0)) != before
    assert one(values.roll(1, 1), (0, 0)) != before


def test_where_there_is_no_product_of_whole_numbers_it_is_the_same():
    """As on a GPU: multiplied and summed some rows at a time."""
    with every_row() as row:
        for dtype in DTYPES:
            with pytest.MonkeyPatch.context() as patch, row(dtype):
                check_where_there_is_no_product_of_whole_numbers_it_is_the_same(dtype, patch)


def check_where_there_is_no_product_of_whole_numbers_it_is_the_same(dtype, monkeypatch):
    values = random((33, 18), dtype)
    before = one(values, (3, 4))
    monkeypatch.setattr(f, "_times", f._times_in_steps)
    monkeypatch.setattr(f, "GPU_NUMBERS", 40)
    assert one(values, (3, 4)) == before


def test_small_tensors_together_have_each_its_own():
    """Matrices and vectors, of one and of two dtypes, more than are put into one, and some too large for it."""
    with every_row() as row:
        for dtypes in [DTYPES[:1], DTYPES[1:], DTYPES]:
            with pytest.MonkeyPatch.context() as patch, row(dtypes):
                check_small_tensors_together_have_each_its_own(dtypes, patch)


def check_small_tensors_together_have_each_its_own(dtypes, monkeypatch):
    monkeypatch.setattr(f, "SMALL", 40)
    monkeypatch.setattr(f, "BATCH", 64)
    given = []
    for number in range(24):
        shape, start = [((3, 6), (number, 4)), ((6,), (4,)), ((7, 6), (2, 4)), ((4, 5), (1, 3))][number % 4]
        given.append((random(shape, dtypes[number % 3 % len(dtypes)], number), start))
    assert f.fingerprints(given).tolist() == [by_hand(values, start) for values, start in given]


def test_nothing_has_no_fingerprints():
    assert f.fingerprints([]).tolist() == []
