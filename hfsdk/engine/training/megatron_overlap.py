"""The sum of gradients over dp, begun while the last backward pass before an optimizer step still runs.

Megatron cuts the gradient buffer into buckets, filled from the last layer to the first (Li et al., arXiv 2006.15704)::

    last backward pass     | layer 4 | layer 3 | layer 2 | layer 1 | embedding |
    sums over dp                               [    bucket 0   ]     [   bucket 1   ] | the step waits for what is left

Megatron starts a bucket wherever it is full. That needs every rank to run the same backward passes; here a dp rank's share of the
last micro-batches may be empty, and a rank that failed stops half way, while NCCL wants all ranks to start the same sums in the
same order. So buckets are started in the order of their numbers, each behind those before it, and whoever is done, or fails, starts
the rest before it says so to the others.

From the moment that all ranks have agreed to run the last micro-batches, sums are under way: :meth:`Overlap.settle` (every rank
comes to it, or to ``finalize_model_grads``, whatever happens) ends them before the buffer is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel


class Overlap:
    """Starts the buckets of one role's gradients; made for a model wrapped with ``overlap_grad_reduce``."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._missing: list[set[torch.nn.Parameter]] = []
        """Of each bucket that is not started, in order, the parameters whose gradients are not complete."""
        self._armed = False
        self._under_way = False
        self._hold_megatron()
        trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        for parameter, accumulator in zip(trained, ddp.grad_accs, strict=True):
            accumulator.register_hook(partial(self._filled, parameter))  # behind Megatron's own, which fills the buffer

    def begin(self) -> None:
        """Say that all ranks have agreed to run the last micro-batches: from here on sums may be under way."""
        self._under_way = True
        self._missing = [set(group.params) for group in self._ddp.bucket_groups]

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Start buckets as the backward pass inside fills them: no other follows on this rank."""
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    @contextmanager
    def before_last(self) -> Iterator[None]:
        """Backward passes inside are not the last one, the next is: Megatron's ``no_sync_func``."""
        self._armed = False
        yield
        self._armed = True

    def start_rest(self) -> None:
        """Start the buckets that no backward pass of this rank has filled; what ranks say to each other afterwards comes behind."""
        self._armed = False
        self._start(len(self._missing))

    def settle(self) -> None:
        """End the sums that are under way; with all ranks."""
        if self._under_way:
            self._ddp.finish_grad_sync()
            self.over()

    def over(self) -> None:
        """Say that the sums are ended, and the buffers may be written again."""
        self._under_way, self._missing = False, []
        self._hold_megatron()

    def _hold_megatron(self) -> None:
        for group in self._ddp.bucket_groups:
            group.is_last_microbatch = False  # as inside its no_sync: it counts nothing and starts nothing by itself

    def _filled(self, parameter: torch.nn.Parameter, *_: object) -> None:
        if not self._armed:
            return
        for missing in self._missing:
            missing.discard(parameter)
        self._start(next((i for i, missing in enumerate(self._missing) if missing), len(self._missing)))

    def _start(self, count: int) -> None:
        for group in self._ddp.bucket_groups[len(self._ddp.bucket_groups) - len(self._missing) :][:count]:
            self._missing.pop(0)
            group.start_grad_sync()
