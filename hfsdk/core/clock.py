"""The virtual clock of simulation and planner: when a call starts, and how fast workers are that share cores.

A call starts when its devices are free and all that it reads is there. With n workers of a node at work on C cores each runs at
min(1, C / n) of its speed::

    pool "actor"     | generate ............ | log_probs .. |            4 workers on 2 cores: all at half speed,
    pool "critic"    .                       | values ... |              once a pool waits the other one is faster
                     ^ inputs ready          ^ the later of both

A call before its work (dispatch), and a rank that waits, leave their cores to the others; a CPU task counts as one more worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TypeVar

import numpy as np

from hfsdk.core.table import Array

TASK_NODE = 0
"""CPU tasks run on the first node."""
DONE_S = 1e-12
"""Work of fewer seconds is over."""

Moment = TypeVar("Moment", float, Array)
"""Seconds, of one call or of a call in many plans."""


def start_s(ends: Iterable[Moment]) -> Moment | float:
    """Return when a call starts: at the last of the moments at which its devices are free and its inputs there; else at 0."""
    moments = list(ends)
    return reduce(np.maximum, moments) if moments else 0.0


def core_speeds(at_work: Array, cores: Array) -> Array:
    """Return the share of its speed at which each worker of a node runs: ``at_work`` of them, [..., node], on ``cores``, [node]."""
    speeds: Array = np.minimum(1.0, cores / np.maximum(at_work, 1.0))
    return speeds


def stretch(workers: int, cores: int) -> float:
    """Return how many times as long work takes while so many workers of a node are at it on so many cores."""
    return max(1.0, workers / cores)
