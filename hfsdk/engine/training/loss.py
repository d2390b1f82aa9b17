"""The input of a model, the batch that a loss function sees, and the way from its result to one number and a row of metrics.

Everything per token is *flat* over the response tokens of the micro-batch: row after row, no padding, no prompt::

    rows            responses        flat
    7               a b c            a b c | d | . (empty)
    2               d                lengths 3 1 0
    5               -

A loss returns one number per response token (or per sample); the engine sums and divides by counts of the *whole*
mini-batch, over all micro-batches and dp ranks, so that any split gives the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.table import Array, Column, Ragged, Table, take

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")
"""Ways to turn per-token losses into one number; see :func:`aggregate`."""


Temperature = float | Array | Ragged
"""Divides the logits: one number, one per row, or one per response token."""

_TEMPERATURE = "_temperature"


def with_temperature(rows: Table, temperature: Temperature) -> Table:
    """Return the rows with a column that :func:`token_temperature` reads."""
    column = np.full(rows.num_rows, temperature) if isinstance(temperature, int | float) else temperature
    return rows.with_columns({_TEMPERATURE: column})


def sampled_at(rows: Table) -> Temperature:
    """Return the temperatures that rows were sampled at; 1 where they do not say."""
    return np.asarray(rows["temperature"]) if "temperature" in rows else 1.0


def token_temperature(rows: Table) -> Array:
    """Return every response token's temperature, flat, float32; 0 (greedy sampling) counts as 1."""
    column = rows[_TEMPERATURE] if _TEMPERATURE in rows else np.ones(rows.num_rows)
    flat = column.flat if isinstance(column, Ragged) else np.repeat(column, rows.ragged("response").lengths)
    return np.where(flat == 0, 1, flat).astype(np.float32)


@dataclass(frozen=True)
class ModelInput:
    """One micro-batch for the model: rows packed one behind the other, and the places in them that matter."""

    tokens_T: torch.Tensor  # noqa: N815
    """Prompt and response of each row, then of the next."""
    positions_T: torch.Tensor  # noqa: N815
    """Position of each token in its row."""
    offsets: torch.Tensor
    """Beginnings of the rows, and the end of the last; [rows + 1], on the CPU."""
    selected_N: torch.Tensor  # noqa: N815
    targets_N: torch.Tensor  # noqa: N815
    """Response tokens, flat: those that the selected places predict."""
    padding: int = 0
    """How many of the tokens are a row of padding, the last one."""

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.tokens_T) - self.padding

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of the model's forward."""
        return self.tokens_T, self.positions_T, self.offsets, self.selected_N

    @classmethod
    def of(cls, rows: Table, device: torch.device, *, last: bool = False, multiple: int = 1) -> ModelInput:
        """Select the places before each response token or, with ``last``, each row's last token.

        A row of padding, none of whose places is selected, makes the tokens a multiple of ``multiple``.
        """
        prompts, responses = rows.ragged("prompt"), rows.ragged("response")
        before, after = prompts.lengths, responses.lengths
        offsets = np.concatenate([[0], np.cumsum(before + after)])
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], before + after)
        of_prompt = positions < np.repeat(before, before + after)
        tokens = np.empty(offsets[-1], dtype=np.int64)
        tokens[of_prompt], tokens[~of_prompt] = prompts.flat, responses.flat
        selected = offsets[1:] - 1 if last else np.flatnonzero(~of_prompt) - 1
        padding = int(-offsets[-1] % multiple)
        if padding:
            tokens, positions = np.append(tokens, np.zeros(padding, np.int64)), np.append(positions, np.arange(padding))
            offsets = np.append(offsets, offsets[-1] + padding)
        arrays = (tokens, positions, selected, responses.flat.astype(np.int64))
        tokens_T, positions_T, selected_N, targets_N = (torch.from_numpy(a).to(device) for a in arrays)
        return cls(tokens_T, positions_T, torch.from_numpy(offsets), selected_N, targets_N, padding)


@dataclass(frozen=True)
class ModelOutput:
    """The model's output for the response tokens of one micro-batch; flat, float32, with gradient."""

    log_probs: torch.Tensor | None = None
    """Log-probability of each response token at the row's temperature; ``None`` with a scalar head."""
    entropy: torch.Tensor | None = None
    """Entropy of the distribution each response token was drawn from, in nats; ``None`` with a scalar head."""
    values: torch.Tensor | None = None
    """Scalar head's value of the state before each response token; ``None`` with an LM head and in a reward or cost model."""
    scores: torch.Tensor | None = None
    """Scalar head at each sample's last token, [num_samples], in a reward or cost model; ``None`` elsewhere."""


class TokenBatch:
    """The columns of one micro-batch as tensors.

    ``b["advantages"]`` is flat over the response tokens for a variable-length column and [num_samples] for one value per
    sample (:meth:`expand` repeats those per token). Floats come as float32, whole numbers as int64, other columns as
    they are.

    Attributes:
        lengths: response tokens of every sample; [num_samples].
        row_ids: the samples' numbers in the batch; [num_samples].
        num_samples: samples in this micro-batch.
        num_tokens: response tokens of the whole mini-batch, over all ranks.
        num_rows: samples of the whole mini-batch, over all ranks.
    """

    def __init__(self, rows: Table, num_tokens: int, num_rows: int, device: torch.device | str = "cpu") -> None:
        self._rows = rows
        self._device = torch.device(device)
        self._tensors: dict[str, Any] = {}
        self._response_lengths = rows.ragged("response").lengths
        self.lengths = self._tensor(self._response_lengths)
        self.row_ids = self._tensor(rows.row_ids)
        self.num_samples = rows.num_rows
        self.num_tokens = num_tokens
        self.num_rows = num_rows
        self._segment: torch.Tensor | None = None

    def __getitem__(self, name: str) -> Any:
        """Return a column.

        Raises:
            ColumnError: no such column, or a variable-length one that is not aligned with the responses.
        """
        if name not in self._tensors:
            self._tensors[name] = self._column(name)
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows and name != _TEMPERATURE

    def _column(self, name: str) -> Any:
        if name not in self._rows or name == _TEMPERATURE:
            has = sorted(set(self._rows) - {_TEMPERATURE})
            raise ColumnError(f"the loss asks for a column the batch does not have: no column {name!r}; there are {', '.join(has)}")
        column = self._rows[name]
        if isinstance(column, Ragged):
            if name != "prompt" and not np.array_equal(column.lengths, self._response_lengths):
                row = int(np.flatnonzero(column.lengths != self._response_lengths)[0])
                raise ColumnError(
                    f"column {name!r} has {column.lengths[row]} values for sample {self._rows.row_ids[row]}, whose "
                    f"response has {self._response_lengths[row]} tokens; a per-token column needs one value per response "
                    "token."
                )
            return self._tensor(column.flat)
        if isinstance(column, list) or column.dtype.kind not in "biuf":
            return column
        return self._tensor(column)

    def _tensor(self, array: Any) -> torch.Tensor:
        array = np.ascontiguousarray(array)
        kind = {"f": np.float32, "i": np.int64, "u": np.int64}.get(array.dtype.kind, array.dtype)
        # a copy: columns may be read-only mappings of shared memory
        return torch.from_numpy(array.astype(kind, copy=True)).to(self._device)

    def expand(self, column: str | torch.Tensor) -> torch.Tensor:
        """Return one value per response token from one value per sample (a column's name or a tensor)."""
        values = self[column] if isinstance(column, str) else column
        return torch.repeat_interleave(values, self.lengths)

    @property
    def segment(self) -> torch.Tensor:
        """Number of the sample (within the micro-batch) each response token belongs to; flat."""
        if self._segment is None:
            self._segment = torch.repeat_interleave(torch.arange(self.num_samples, device=self._device), self.lengths)
        return self._segment

    def segment_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over each sample's tokens; [num_samples], 0 for empty responses."""
        return x.new_zeros(self.num_samples).index_add(0, self.segment, x)

    def segment_mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over each sample's tokens; [num_samples], 0 for empty responses."""
        return self.segment_sum(x) / self.lengths.clamp(min=1)


def tell_apart(rows: Table) -> Table:
    """Append a row with an empty response where a micro-batch has as many response tokens as samples.

    The length of a loss would not tell one number per token from one per sample; with one more sample it does, and an empty
    response adds nothing to either.
    """
    if len(rows.ragged("response").flat) != rows.num_rows:
        return rows
    again = [*range(rows.num_rows), 0]
    columns: dict[str, Column] = {}
    for name, column in rows.items():
        if isinstance(column, Ragged) and name != "prompt":
            columns[name] = Ragged(column.flat, np.append(column.offsets, column.offsets[-1]))
        else:
            columns[name] = take(column, again)
    return Table(columns, rows.row_ids[again])


def aggregate(
    per_token: torch.Tensor,
    b: TokenBatch,
    mode: str = "token_mean",
    global_num_tokens: int | None = None,
    global_num_rows: int | None = None,
    fixed_length: int | None = None,
) -> torch.Tensor:
    """Return this micro-batch's part of the mini-batch's loss; the parts of all micro-batches and dp ranks add up.

    ==============  ======================================================================================
    token_mean      sum over tokens / tokens
    sequence_mean   mean over each sequence's tokens, then sum / sequences (an empty response counts as 0)
    sequence_sum    sum over tokens / sequences
    fixed_length    sum over tokens / (sequences x ``fixed_length``): Dr. GRPO (arXiv 2503.20783)
    ==============  ======================================================================================

    Args:
        per_token: flat over response tokens.
        b: the micro-batch.
        mode: one of :data:`AGGREGATIONS`.
        global_num_tokens: response tokens of the mini-batch over all ranks; ``b.num_tokens`` by default.
        global_num_rows: sequences of the mini-batch over all ranks; ``b.num_rows`` by default.
        fixed_length: the constant of ``fixed_length``.

    Raises:
        OptionError: unknown mode, or ``fixed_length`` without its constant.
    """
    tokens = max(1, b.num_tokens if global_num_tokens is None else global_num_tokens)
    rows = max(1, b.num_rows if global_num_rows is None else global_num_rows)
    if mode == "token_mean":
        return per_token.sum() / tokens
    if mode == "sequence_mean":
        return b.segment_mean(per_token).sum() / rows
    if mode == "sequence_sum":
        return per_token.sum() / rows
    if mode != "fixed_length":
        raise OptionError(f"no aggregation {mode!r}; there are {', '.join(AGGREGATIONS)}")
    if not fixed_length or fixed_length < 1:
        raise OptionError(
            f"aggregation 'fixed_length' divides by the loss's attribute fixed_length; got {fixed_length!r}. "
            "Set it to a positive number, e.g. the longest response allowed."
        )
    return per_token.sum() / (rows * fixed_length)


Loss = Callable[[ModelOutput, TokenBatch], Any]
"""``loss(out, b)`` returns one number per response token or per sample, or (that, a dict of metrics).

It may carry the attributes ``aggregation`` and ``fixed_length`` (see :func:`aggregate`). One number per sample is summed and
divided by the number of samples, whatever the aggregation; empty responses count as 0.
"""


@dataclass
class Tally:
    """The loss, metrics and rows that were not finite of one rank's mini-batch; merged over ranks."""

    loss: float = 0.0
    bad_rows: list[int] = field(default_factory=list)
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Metric -> (weighted sum, weight)."""
    largest: dict[str, float] = field(default_factory=dict)
    """Metrics whose name ends in ``_max``."""

    def add_metrics(self, metrics: Mapping[str, Any], b: TokenBatch) -> None:
        """Add a micro-batch's metrics: per token, per sample (empty responses left out), or one weighed by tokens."""
        num_tokens = len(b.segment)
        for name, value in metrics.items():
            values = torch.as_tensor(value).detach().float()
            if values.dim() and len(values) == b.num_samples != num_tokens:
                values = values[b.lengths > 0]
            if name.endswith("_max"):
                self._add_largest(name, values.max().item())
            elif values.dim():
                self._add_sum(name, values.sum().item(), values.numel())
            else:
                self._add_sum(name, values.item() * num_tokens, num_tokens)

    def add_samples(self, metrics: Mapping[str, Any]) -> None:
        """Add a micro-batch's metrics that are per sample or per pair, or one number."""
        for name, value in metrics.items():
            values = torch.as_tensor(value).detach().float().reshape(-1)
            if name.endswith("_max"):
                self._add_largest(name, values.max().item())
            else:
                self._add_sum(name, values.sum().item(), values.numel())

    def merge(self, other: Tally) -> None:
        """Add another rank's."""
        self.loss += other.loss
        self.bad_rows += other.bad_rows
        for name, (total, weight) in other.sums.items():
            self._add_sum(name, total, weight)
        for name, value in other.largest.items():
            self._add_largest(name, value)

    def metrics(self) -> dict[str, float]:
        """Return means and maxima, sorted by name."""
        means = {name: total / max(weight, 1.0) for name, (total, weight) in self.sums.items()}
        return dict(sorted({**means, **self.largest}.items()))

    def _add_sum(self, name: str, total: float, weight: float) -> None:
        before = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (before[0] + total, before[1] + weight)

    def _add_largest(self, name: str, value: float) -> None:
        self.largest[name] = max(value, self.largest.get(name, -math.inf))


def evaluate(loss: Loss, out: ModelOutput, b: TokenBatch, tally: Tally) -> torch.Tensor:
    """Call the user's loss on a micro-batch, add its numbers to ``tally``, and return its part of the mini-batch's loss.

    A reward or cost model's loss is per sample, those with an empty response included: they have a score too.

    Raises:
        OptionError: the loss is not one number per token or per sample.
    """
    returned = loss(out, b)
    each: torch.Tensor
    each, metrics = returned if isinstance(returned, tuple) else (returned, {})
    num_tokens = len(b.segment)
    shape = tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__
    if out.scores is not None:
        return _evaluate_scores(each, metrics, b, tally)
    if shape not in ((num_tokens,), (b.num_samples,)):
        raise OptionError(
            f"the loss must return one number per response token ({num_tokens} here) or per sample ({b.num_samples}); "
            f"it returned {shape}. Leave means and sums to the engine."
        )
    per_sample = shape == (b.num_samples,)
    bad = (~torch.isfinite(each.detach())).float()
    rows_bad = (bad if per_sample else b.segment_sum(bad)) * (b.lengths > 0)
    tally.bad_rows += b.row_ids[rows_bad > 0].tolist()
    tally.add_metrics(metrics, b)
    if per_sample:
        part = each[b.lengths > 0].sum() / max(1, b.num_rows)
    else:
        mode = getattr(loss, "aggregation", "token_mean")
        part = aggregate(each, b, mode, fixed_length=getattr(loss, "fixed_length", None))
    tally.loss += part.item()
    return part


def _evaluate_scores(each: Any, metrics: Mapping[str, Any], b: TokenBatch, tally: Tally) -> torch.Tensor:
    if not isinstance(each, torch.Tensor) or tuple(each.shape) != (b.num_samples,):
        shape = tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__
        raise OptionError(
            f"the loss of a reward or cost model must return one number per sample ({b.num_samples} here); it returned {shape}"
        )
    tally.bad_rows += b.row_ids[~torch.isfinite(each.detach())].tolist()
    tally.add_samples(metrics)
    part: torch.Tensor = each.sum() / max(1, b.num_rows)
    tally.loss += part.item()
    return part
