"""Tensors of a hundred numbers: threads that wait for a processor would take most of the time."""

import pytest


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
