"""Micro-batches through a role's model: straight through, or through pipeline stages by Megatron's 1F1B schedule.

With pp=2 every stage runs its layers of every micro-batch, and a stage waits while the other has nothing for it::

    stage 0   F1 F2 B1 F3 B2 .. B3         F forward, B backward, . waiting for the neighbour
    stage 1   .. F1 B1 F2 B2 F3 B3

A schedule cannot be left half way: neighbours would wait for ever. So ``finish`` must not raise what the user's loss raises: it
keeps the error and returns a loss of zero, as for all micro-batches after it.

Stages exchange hidden states and gradients in one group of sends and receives (``batch_isend_irecv``). How many tokens a
micro-batch has every stage knows, so that it need not be sent first, with the wait for the device that Megatron takes then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving

from hfsdk.engine.process.recorder import Recorder
from hfsdk.engine.training.loss_io import ModelInput
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.megatron_overlap import Overlap

Finish = Callable[[int, torch.Tensor], torch.Tensor | None]
"""``finish(i, out)`` takes micro-batch ``i``'s logits or values and, when training, returns its part of the loss."""

CHUNK = 4
"""Micro-batches per pipeline stage between two safe points: more fill the pipeline better, fewer stop sooner."""


class Pipeline:
    """Runs micro-batches through the model of one rank; collective over its tp and pp ranks."""

    def __init__(self, model: GPTModel, groups: RoleGroups, recorder: Recorder, overlap: Overlap | None = None) -> None:
        self._model, self._groups, self._recorder, self._overlap = model, groups, recorder, overlap
        self._config: Any = model.config
        self._communicator = _Exchange(groups, model.config) if groups.pp_size > 1 else None

    @property
    def chunk(self) -> int:
        """Micro-batches to give :meth:`run` at once."""
        return 1 if self._communicator is None else CHUNK * self._groups.pp_size

    def run(self, inputs: Sequence[ModelInput], finish: Finish, *, train: bool, first: int = 0, reduce: bool = False) -> None:
        """Pass micro-batches forward and, with ``train``, their losses backward; ``finish`` runs on the last stage.

        ``first`` is the number of the first of them in the whole pass, for spans. With ``reduce`` the last backward pass is the
        last before an optimizer step, and gradients are summed over dp meanwhile where that is overlapped; ranks say so alike.
        """
        overlap = self._overlap if train and reduce else None
        if overlap is not None:
            overlap.begin()
        with torch.set_grad_enabled(train):
            try:
                if self._communicator is None:
                    self._straight(inputs, finish, train, first, overlap)
                elif inputs:
                    self._staged(inputs, finish, train, first, overlap)
            finally:
                if overlap is not None:
                    overlap.start_rest()

    def _straight(self, inputs: Sequence[ModelInput], finish: Finish, train: bool, first: int, overlap: Overlap | None) -> None:
        for i, micro in enumerate(inputs):
            with self._recorder.span("forward", tokens=micro.num_tokens, micro_batch=first + i):
                part = finish(i, self._model(*micro.arguments))
            if train and part is not None:
                meanwhile = overlap.last_backward() if overlap is not None and micro is inputs[-1] else nullcontext()
                with self._recorder.span("backward", tokens=micro.num_tokens, micro_batch=first + i), meanwhile:
                    part.backward()

    def _staged(self, inputs: Sequence[ModelInput], finish: Finish, train: bool, first: int, overlap: Overlap | None) -> None:
        assert self._communicator is not None
        self._communicator.expect([len(micro.tokens_T) for micro in inputs])

        def forward_step(numbered: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            i, micro = next(numbered)

            def loss(out: torch.Tensor, non_loss_data: bool = False) -> Any:
                part = finish(i, out)
                return None if non_loss_data else (part, torch.zeros((), dtype=torch.int), None)

            return model(*micro.arguments), loss

        tokens = sum(micro.num_tokens for micro in inputs) // len(inputs)
        self._config.timers = _SpanTimers(self._recorder, tokens, first)
        self._config.no_sync_func = overlap.before_last if overlap is not None else None
        try:
            forward_backward_pipelining_without_interleaving(
                forward_step_func=forward_step, data_iterator=enumerate(inputs), model=self._model,
                num_microbatches=len(inputs), seq_length=1, micro_batch_size=1, forward_only=not train,
                collect_non_loss_data=not train, p2p_communicator=self._communicator,
                pg_collection=self._groups.collection(),
            )  # fmt: skip
        finally:
            self._config.timers = self._config.no_sync_func = None


class _Exchange(P2PCommunicator):
    """Megatron's exchange between stages, which is told how many tokens come next."""

    def __init__(self, groups: RoleGroups, config: Any) -> None:
        super().__init__(groups.pp, config)
        self._cut = groups.tp_size if config.sequence_parallel else 1
        self._forward: Iterator[int] = iter(())
        self._backward: Iterator[int] = iter(())

    def expect(self, tokens: Sequence[int]) -> None:
        """Take the tokens of each micro-batch: a schedule receives hidden states in their order, and gradients too."""
        lengths = [count // self._cut for count in tokens]
        self._forward, self._backward = iter(lengths), iter(lengths)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        previous, following = next(self._forward) if recv_prev else 0, next(self._backward) if recv_next else 0
        return [previous, 1, self.config.hidden_size], [following, 1, self.config.hidden_size]


class _SpanTimers:
    """Takes Megatron's timer calls and records them as spans: ``forward``, ``backward``, and ``wait`` for a neighbour."""

    def __init__(self, recorder: Recorder, tokens: int, first: int) -> None:
        self._recorder, self._tokens, self._first = recorder, tokens, first
        self._open: dict[str, AbstractContextManager[Any]] = {}
        self._seen: Counter[str] = Counter()
        """Passes so far of each kind: 1F1B takes the micro-batches in order, forward and backward."""

    def __call__(self, name: str, log_level: int = 0) -> _SpanTimer:
        return _SpanTimer(self, name)

    def start(self, name: str) -> None:
        if name == "forward-backward":
            return
        compute = name.endswith("-compute")
        attrs = {"tokens": self._tokens, "micro_batch": self._first + self._seen[name]} if compute else {}
        self._seen[name] += 1
        span = self._recorder.span(name.removesuffix("-compute") if compute else "wait", **attrs)
        span.__enter__()
        self._open[name] = span

    def stop(self, name: str) -> None:
        span = self._open.pop(name, None)
        if span is not None:
            span.__exit__(None, None, None)


class _SpanTimer:
    def __init__(self, timers: _SpanTimers, name: str) -> None:
        self._timers, self._name = timers, name

    def start(self, barrier: bool = False) -> None:
        self._timers.start(self._name)

    def stop(self, barrier: bool = False) -> None:
        self._timers.stop(self._name)
