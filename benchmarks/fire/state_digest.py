"""A digest of a trained role's whole state, whatever its layout: weights, moments, step counts."""

from __future__ import annotations

import hashlib
from typing import Any


def parts_of_rank(rank: Any) -> Any:
    """Return a rank's part of the state as plain data and arrays; runs in the worker."""
    summary, packed = rank._hosted.states.export().packed()
    return int(summary.num_updates), [(str(p.kind), str(p.tensor), list(p.shape), list(p.start), bits) for p, bits, _ in packed]


def of_parts(parts: Any) -> str:
    """Return the digest of all ranks' parts."""
    import numpy as np

    found: dict[Any, Any] = {}
    for _, pieces in parts:
        for kind, tensor, shape, start, bits in pieces:
            whole = found.setdefault((kind, tensor), np.full(shape, np.nan, np.float32))
            whole[tuple(slice(a, a + n) for a, n in zip(start, bits.shape, strict=True))] = bits
    digest = hashlib.sha256(str(parts[0][0]).encode())
    for key in sorted(found):
        digest.update(str(key).encode() + found[key].tobytes())
    return digest.hexdigest()
