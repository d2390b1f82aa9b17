"""The cluster's object store as any of its processes uses it, and what Ray raises where a process is gone. Loads no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from hfsdk.core.runtime import Pick
from hfsdk.core.table import Table
from hfsdk.engine.worker.answer import read
from hfsdk.engine.worker.role_host import ObjectsGoneError

GONE = (
    ray.exceptions.OwnerDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.ReferenceCountingAssertionError,
)
"""Ray's errors for an object whose owner, or every copy of which, is gone."""

WORKER_GONE = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""Ray's errors for a worker that has ended; the second where Ray itself ended it, as its node had no memory left."""


class RayStore:
    """The node's object store; a reference is held in a list, so that Ray does not fetch what it stands for."""

    def put(self, content: Any) -> list[Any]:
        """Put an object there; this process owns it."""
        return [ray.put(content)]

    def get(self, references: Sequence[Any]) -> list[Any]:
        """Map objects, of this node or others."""
        try:
            return list(ray.get([reference[0] for reference in references]))
        except GONE:
            raise ObjectsGoneError from None


def fetch(picks: Sequence[Pick]) -> Table:
    """Bring columns to this process, which is one of Ray's or a driver."""
    first = picks[0]
    return read(picks, np.arange(sum(len(rows) for rows in first.local_rows)), RayStore())


def reason_of(error: Exception) -> str:
    """Return Ray's words for a worker that has ended, in one line."""
    return "its node left the cluster" if "node has died" in str(error) else str(error).splitlines()[0].rstrip(".")
