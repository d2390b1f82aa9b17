"""Copies in host memory."""

import itertools

import pytest
from rows import every_row

torch = pytest.importorskip("torch")

from hfsdk.engine.weights.on_host import copy_on_host  # noqa: E402


def test_a_copy_has_the_values_and_none_of_the_memory():
    with every_row() as row:
        for shape, dtype in itertools.product(
            [(), (0,), (3, 0), (5, 7)], [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
        ):
            with row(shape, dtype):
                check_a_copy_has_the_values_and_none_of_the_memory(dtype, shape)


def check_a_copy_has_the_values_and_none_of_the_memory(dtype, shape):
    values = torch.randn(shape).mul(9).to(dtype)
    copy = copy_on_host(values)
    assert (copy.shape, copy.dtype, copy.device.type) == (values.shape, dtype, "cpu")
    assert torch.equal(copy, values)
    values.fill_(1)
    assert shape == () or values.numel() == 0 or not torch.equal(copy, values)


def test_a_copy_of_a_view_is_contiguous():
    values = torch.arange(12.0).view(3, 4)
    copy = copy_on_host(values.T[1:])
    assert copy.is_contiguous()
    assert torch.equal(copy, values.T[1:])
    assert copy.untyped_storage().nbytes() == copy.nbytes
