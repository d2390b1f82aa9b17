"""Micro-batches through a role's model, with safe points: what inference passes return, and losses with their gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

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
from hfsdk.engine.training.kept_tokens import KeptTokens, keep
from hfsdk.engine.training.loss_io import (
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
from hfsdk.engine.training.megatron_pipeline import Pipeline
from hfsdk.engine.training.vocab_parallel import log_probs_and_entropy


class Passes:
    """See the module's text; every pass is collective over the role's ranks."""

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
        kept: KeptTokens,
    ) -> dict[str, Ragged]:
        """See :meth:`Trainer.log_probs <hfsdk.engine.training.trainer.Trainer.log_probs>`."""

        def read(table: Table, micro: ModelInput, out: torch.Tensor) -> list[torch.Tensor]:
            found = self._output(table, micro, out, entropy=entropy, kept=kept)
            return [x for x in (found.log_probs, found.entropy) if x is not None]

        rows = with_temperature(rows, temperature)
        names = ["log_probs", "entropy"] if entropy else ["log_probs"]
        return dict(zip(names, self.infer(rows, micro_batches, safe, read, len(names)), strict=False))

    def _problem(self, rows: Table, micro_batches: Sequence[Sequence[int]]) -> Exception | None:
        """Return what is wrong with the input on this rank; it is raised at the first agreement."""
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
        self, table: Table, micro: ModelInput, out: torch.Tensor, *, entropy: bool = False, kept: KeptTokens | None = None
    ) -> ModelOutput:
        """Read the model's logits or values, ``[N, columns]``."""
        if self.scores_rows:
            return ModelOutput(scores=out[:, 0])
        if self._role.head == "scalar":
            return ModelOutput(values=out[:, 0])
        temperature_N = token_temperature(table)
        if (temperature_N != 1).any():
            out = out.float() / torch.from_numpy(temperature_N).to(out.device)[:, None]
        if kept:
            out = keep(out, kept, self._spec.vocab_size, self._groups.tp)
        log_probs, found = log_probs_and_entropy(
            out, micro.targets_N, self._spec.vocab_size, self._groups.tp, entropy=entropy, overwrite=True
        )
        return ModelOutput(log_probs=log_probs, entropy=found)

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
            safe: where the call may stop.
            finish: takes (rows, input, output) of a micro-batch on the last pipeline stage.
            failed: what is wrong (the input, before; ``finish`` adds to it): raised at the next agreement.
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
        """Record that ranks tell each other how a pass went: those that are ahead wait here for the others."""
        return self._recorder.span("agree") if self._groups.mesh.layout.size > 1 else nullcontext()

    def losses(
        self, rows: Table, mini: MiniBatchPlan, loss: Loss, temperature: Temperature, safe: SafePoint,
        progress: tuple[int, int], *, train: bool, reduce: bool = False,
    ) -> Tally:  # fmt: skip
        """Run this dp rank's micro-batches and return the tally of all ranks."""
        rows = with_temperature(rows, temperature)
        micro_batches = mini.passes.micro_batches[self._groups.dp_rank]
        mine = Tally()

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
            part = evaluate(loss, output, b, mine)
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
            tallies = self._groups.gather(mine if self._groups.tp_rank == 0 else None, Tally | None)
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
