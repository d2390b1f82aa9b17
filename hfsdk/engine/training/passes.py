"""Micro-batches through a role's model, with safe points: the results of inference passes, and losses with their gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving

from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.errors import CallError, OptionError
from hfsdk.core.microbatch import MiniBatchPlan
from hfsdk.core.roles import RoleSpec
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Array, Ragged, Table
from hfsdk.engine.process.recorder import Recorder
from hfsdk.engine.process.safepoint import SafePoint
from hfsdk.engine.process.tasks import user_traceback
from hfsdk.engine.training import megatron_sequence
from hfsdk.engine.training.loss import (
    Loss,
    ModelInput,
    ModelOutput,
    Tally,
    Temperature,
    TokenBatch,
    evaluate,
    tell_apart,
    token_temperature,
    with_temperature,
)
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.vocab_parallel import KeptTokens, keep, log_probs_and_entropy


class Passes:
    """The passes of one role's model over its micro-batches; every pass is collective over the role's ranks."""

    def __init__(
        self,
        role: RoleSpec,
        spec: ModelSpec,
        groups: RoleGroups,
        recorder: Recorder,
        pipeline: Pipeline,
        sequence_parallel: bool,
    ) -> None:
        self._role, self._spec, self._groups, self._recorder = role, spec, groups, recorder
        self._pipeline, self._sequence_parallel = pipeline, sequence_parallel

    @property
    def scores_rows(self) -> bool:
        """Whether the head is read at each row's last token (a reward or cost model), not before each response token."""
        return self._role.head == "scalar" and self._role.kind in ("reward", "cost")

    def log_probs(
        self,
        rows: Table,
        micro_batches: Sequence[Sequence[int]],
        temperature: Temperature,
        safe: SafePoint,
        *,
        entropy: bool,
        allowed: KeptTokens,
    ) -> dict[str, Ragged]:
        """See :meth:`Trainer.log_probs <hfsdk.engine.training.trainer.Trainer.log_probs>`."""

        def read(table: Table, micro: ModelInput, out: torch.Tensor) -> list[torch.Tensor]:
            output = self._output(table, micro, out, entropy=entropy, allowed=allowed)
            return [x for x in (output.log_probs, output.entropy) if x is not None]

        rows = with_temperature(rows, temperature)
        names = ["log_probs", "entropy"] if entropy else ["log_probs"]
        return dict(zip(names, self.infer(rows, micro_batches, safe, read, len(names)), strict=False))

    def _problem(self, rows: Table, micro_batches: Sequence[Sequence[int]]) -> Exception | None:
        """Return the error in this rank's input, or ``None``; the first agreement raises it."""
        unknown = {i for ids in micro_batches for i in ids} - set(rows.row_ids.tolist())
        if unknown:
            return OptionError(f"the plan names rows {sorted(unknown)[:5]}, which this rank was not given")
        temperature = token_temperature(rows)
        if not (np.isfinite(temperature).all() and (temperature >= 0).all()):
            return OptionError(f"temperature must be finite and at least 0; got {temperature.min()} to {temperature.max()}")
        for name in SEQUENCES:
            tokens = rows.ragged(name)
            wrong = np.flatnonzero((tokens.flat < 0) | (tokens.flat >= self._spec.vocab_size))
            if len(wrong):
                row = int(np.searchsorted(tokens.offsets, wrong[0], side="right")) - 1
                return OptionError(
                    f"row {rows.row_ids[row]} has token id {tokens.flat[wrong[0]]} in {name!r}; {self._spec} has ids 0 to "
                    f"{self._spec.vocab_size - 1}. Tokenize with the model's own tokenizer."
                )
        prompts = rows.ragged("prompt").lengths
        total = prompts + rows.ragged("response").lengths
        for i in np.flatnonzero((prompts < 1) | (total > self._spec.max_positions))[:1]:
            return OptionError(
                f"row {rows.row_ids[i]} has a prompt of {prompts[i]} tokens and {total[i]} in all; {self._spec} takes prompts "
                f"of at least 1 token and {self._spec.max_positions} tokens in all. Shorten or drop it."
            )
        return None

    def _output(
        self, table: Table, micro: ModelInput, out: torch.Tensor, *, entropy: bool = False, allowed: KeptTokens | None = None
    ) -> ModelOutput:
        """Read the model's logits or values, ``[N, columns]``."""
        if self.scores_rows:
            return ModelOutput(scores=out[:, 0])
        if self._role.head == "scalar":
            return ModelOutput(values=out[:, 0])
        temperature_N = token_temperature(table)
        if (temperature_N != 1).any():
            out = out.float() / torch.from_numpy(temperature_N).to(out.device)[:, None]
        if allowed:
            out = keep(out, allowed, self._spec.vocab_size, self._groups.tp)
        log_probs, entropies = log_probs_and_entropy(
            out, micro.targets_N, self._spec.vocab_size, self._groups.tp, entropy=entropy, overwrite=True
        )
        return ModelOutput(log_probs=log_probs, entropy=entropies)

    def infer(
        self,
        rows: Table,
        micro_batches: Sequence[Sequence[int]],
        safe: SafePoint,
        read: Callable[[Table, ModelInput, torch.Tensor], list[torch.Tensor]],
        num_columns: int,
        *,
        per_row: bool = False,
    ) -> list[Ragged]:
        """Run every micro-batch without gradient; returns the columns that ``read`` makes of the output, ordered as ``rows``.

        They are there on the last pipeline stage; elsewhere the list is empty.
        """
        error = self._problem(rows, micro_batches)
        index = {row: i for i, row in enumerate(rows.row_ids.tolist())}
        order = [index[i] for ids in micro_batches for i in ids] if error is None else []
        if error is None and sorted(order) != list(range(rows.num_rows)):
            error = OptionError(f"the micro-batches hold {len(order)} rows and must hold each of the {rows.num_rows} once")
        failed = [error] if error else []
        parts: list[list[Array]] = [[np.zeros(0, np.float32)] for _ in range(num_columns)]

        def finish(table: Table, micro: ModelInput, out: torch.Tensor) -> None:
            for part, column in zip(parts, read(table, micro, out), strict=True):
                part.append(column.float().cpu().numpy())

        self._pass(rows, micro_batches, safe, finish, failed, (0, len(micro_batches)), last=per_row, train=False)
        if not self._groups.is_last_stage:
            return []
        lengths = np.ones(rows.num_rows, np.int64) if per_row else rows.ragged("response").lengths
        # Micro-batches are cut by length, so columns come in another order than the rows.
        back = np.argsort(np.asarray(order, dtype=np.int64))
        return [Ragged.from_lengths(np.concatenate(part), lengths[order]).take(back) for part in parts]

    def _pass(
        self, rows: Table, micro_batches: Sequence[Sequence[int]], safe: SafePoint,
        finish: Callable[[Table, ModelInput, torch.Tensor], torch.Tensor | None], failed: list[Exception],
        progress: tuple[int, int], *, last: bool, train: bool, reduce: bool = False,
    ) -> None:  # fmt: skip
        """Run micro-batches in chunks with a safe point before each and after all.

        Args:
            rows: this dp rank's rows.
            micro_batches: row ids of each micro-batch.
            safe: the points at which the call may stop.
            finish: takes (rows, input, output) of a micro-batch on the last pipeline stage.
            failed: errors so far (of the input, at first; ``finish`` adds to it); the next agreement raises the first.
            progress: micro-batches of the call done before these, and in all.
            last: whether the output is wanted at each row's last token (and not before each response token).
            train: whether ``finish`` returns a loss that is passed backward.
            reduce: whether an optimizer step follows, so that the gradient can be summed over dp meanwhile.
        """
        index = {row: i for i, row in enumerate(rows.row_ids.tolist())}
        multiple = self._groups.tp_size if self._sequence_parallel else 1
        for first in range(0, len(micro_batches), self._pipeline.chunk):
            safe.agree(self._groups.world, next(iter(failed), None))
            chunk = micro_batches[first : first + self._pipeline.chunk]
            tables = [rows.take([index[i] for i in ids]) for ids in chunk if len(ids)]
            # A micro-batch without a response token gives no output to read and no loss; the model is not run for it.
            tables = [table for table in tables if last or len(table.ragged("response").flat)]
            inputs = [ModelInput.of(table, self._groups.device, last=last, multiple=multiple) for table in tables]
            pairs = list(zip(tables, inputs, strict=True))
            try:
                done = progress[0] + first
                self._pipeline.run(
                    inputs, partial(_finish, finish, pairs), train=train, first=done,
                    reduce=reduce and first + len(chunk) == len(micro_batches),
                )  # fmt: skip
            except Exception as caught:  # told to the other ranks at the next agreement
                failed.append(caught)
            self._recorder.progress = {"micro_batches": progress[0] + first + len(chunk), "total": progress[1]}
        megatron_sequence.free_gathered()
        with self._agreeing():
            safe.agree(self._groups.world, next(iter(failed), None))

    def _agreeing(self) -> AbstractContextManager[Any]:
        """Record that ranks tell each other how a pass went: ranks that are ahead wait here for the others."""
        return self._recorder.span("agree") if self._groups.mesh.layout.size > 1 else nullcontext()

    def losses(
        self, rows: Table, mini: MiniBatchPlan, loss: Loss, temperature: Temperature, safe: SafePoint,
        progress: tuple[int, int], *, train: bool, reduce: bool = False,
    ) -> Tally:  # fmt: skip
        """Run this dp rank's micro-batches and return the tally of all ranks."""
        rows = with_temperature(rows, temperature)
        micro_batches = mini.passes.micro_batches[self._groups.dp_rank]
        own_tally = Tally()

        failed: list[Exception] = []

        def finish(table: Table, micro: ModelInput, out: torch.Tensor) -> torch.Tensor:
            output = self._output(table, micro, out, entropy=True)  # collective over tp: on every rank, come what may
            try:
                if not failed:
                    return loss_part(table, output)
            except Exception as caught:  # the user's function may raise anything; told to the other ranks by _pass
                failed.append(caught)
            except (SystemExit, KeyboardInterrupt) as caught:  # would end the process, and with it the pool
                failed.append(CallError(f"the loss raised {caught!r}", details=user_traceback(caught)))
            return out.sum() * 0

        def loss_part(table: Table, output: ModelOutput) -> torch.Tensor:
            apart = table if self.scores_rows else tell_apart(table)
            b = TokenBatch(apart, mini.num_tokens, mini.num_rows, self._groups.device)
            part = evaluate(loss, output, b, own_tally)
            if train and not part.requires_grad:
                raise OptionError(
                    "the loss does not depend on the model: it needs out.log_probs, out.entropy, out.values or out.scores"
                )
            return part

        error = self._problem(rows, micro_batches)
        failed += [error] if error else []
        self._pass(rows, micro_batches, safe, finish, failed, progress, last=self.scores_rows, train=train, reduce=reduce)
        merged = Tally()
        with self._agreeing():
            # All tp ranks of a dp rank count the same numbers.
            tallies = self._groups.gather(own_tally if self._groups.tp_rank == 0 else None, Tally | None)
        for tally in tallies:
            if tally is not None:
                merged.merge(tally)
        return merged


def _finish(
    finish: Callable[[Table, ModelInput, torch.Tensor], torch.Tensor | None],
    pairs: Sequence[tuple[Table, ModelInput]],
    number: int,
    out: torch.Tensor,
) -> torch.Tensor | None:
    return finish(*pairs[number], out)


# -- micro-batches through the model, or through pipeline stages by Megatron's 1F1B schedule

Finish = Callable[[int, torch.Tensor], torch.Tensor | None]
"""``finish(i, out)`` takes micro-batch ``i``'s logits or values and, when training, returns its part of the loss."""

CHUNK = 4
"""Micro-batches per pipeline stage between two safe points: more fill the pipeline better, fewer stop sooner."""


class Pipeline:
    """The way of micro-batches through the model of one rank; collective over its tp and pp ranks.

    With pp=2 every stage runs its layers of every micro-batch, and a stage waits while the other has nothing for it::

        stage 0   F1 F2 B1 F3 B2 .. B3         F forward, B backward, . waiting for the neighbour
        stage 1   .. F1 B1 F2 B2 F3 B3

    A schedule cannot be left half way: neighbours would wait for ever. So ``finish`` must not raise what the user's loss raises: it
    keeps the error and returns a loss of zero, as for all micro-batches after it.

    Stages exchange hidden states and gradients in one group of sends and receives (``batch_isend_irecv``). How many tokens a
    micro-batch has every stage knows, so that it need not be sent first, with the wait for the device that Megatron takes then.
    """

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
            # From here on buckets may be sent, so every way out of the passes, an error too, has to start those that are left.
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
                # Only the last backward pass completes gradients: buckets sent earlier would lack what later micro-batches add.
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
        # 1F1B asks for no token count per pass, so spans of stages carry the mean of these micro-batches.
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
        # Shapes come in the order in which the schedule asks: forward from the stage before, gradients from the one behind.
        previous, following = next(self._forward) if recv_prev else 0, next(self._backward) if recv_next else 0
        return [previous, 1, self.config.hidden_size], [following, 1, self.config.hidden_size]


class _SpanTimers:
    """Timers that take Megatron's timer calls and record them as spans: ``forward``, ``backward``, and ``wait`` for a neighbour."""

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
        # Megatron's timers of passes end in -compute; all others time an exchange, in which this stage waits for a neighbour.
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


# -- the sum of gradients over dp, begun while the last backward pass still runs


class Overlap:
    """Starts the buckets of one role's gradients; made for a model wrapped with ``overlap_grad_reduce``.

    Megatron cuts the gradient buffer into buckets, filled from the last layer to the first (Li et al., arXiv 2006.15704)::

        last backward pass     | layer 4 | layer 3 | layer 2 | layer 1 | embedding |
        sums over dp                               [    bucket 0   ]     [   bucket 1   ] | the step waits for what is left

    Megatron starts a bucket wherever it is full. That needs every rank to run the same backward passes; here a dp rank's share of
    the last micro-batches may be empty, and a rank that failed stops half way, while NCCL wants all ranks to start the same sums in
    the same order. So buckets are started in the order of their numbers, each behind those before it, and a rank that is done, or
    fails, starts the rest before it says so to the others.

    From the moment that all ranks have agreed to run the last micro-batches, sums are under way: :meth:`Overlap.settle` (every rank
    comes to it, or to ``finalize_model_grads``, whatever happens) ends them before the buffer is touched.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._missing: list[set[torch.nn.Parameter]] = []
        """The parameters of each bucket whose gradients are not complete, for the buckets that are not started, in order."""
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
        """Start the buckets that no backward pass of this rank has filled; later messages between ranks come behind."""
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
