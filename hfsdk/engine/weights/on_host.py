"""Copies in host memory that are made to stay: of a rank's state for a snapshot, of weights for another pool.

Memory that nothing has touched yet costs a page fault for every 4 KB that a copy reaches; at a GPU's speed that is most of the
time. NumPy asks the kernel for pages of 2 MB where it gives those on demand; torch's allocator does not.
"""

from __future__ import annotations

import numpy as np
import torch


def copy_on_host(values: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor in host memory of its own; the copy is complete."""
    if not values.numel():
        return torch.empty(values.shape, dtype=values.dtype)
    memory = torch.from_numpy(np.empty(values.numel() * values.element_size(), np.uint8))
    return memory.view(values.dtype).view(values.shape).copy_(values)
