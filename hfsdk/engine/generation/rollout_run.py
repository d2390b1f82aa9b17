"""One call of a rollout: its rows, when each ends, and the columns they become."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from hfsdk.core.errors import CallError, OptionError
from hfsdk.core.roles import Sampling
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Column, Ragged
from hfsdk.engine.process.recorder import Recorder
from hfsdk.engine.process.safepoint import RanksDiffer, SafePoint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


MIN_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this one silently; hfsdk refuses them."""


@dataclass
class GenerationRow:
    """One response as it grows."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class StopStrings:
    """Looks for stop strings in the text of the last tokens."""

    def __init__(self, tokenizer: Any, sampling: Sampling) -> None:
        self._tokenizer, self._strings, self._min_tokens = tokenizer, sampling.stop, sampling.min_new_tokens
        longest = max(len(text.encode()) for text in sampling.stop)
        self._window = longest + 8  # a token has at least one byte; a few more so that cut characters do not matter

    def ends(self, row: GenerationRow) -> bool:
        """Whether the response contains a stop string by now (it is looked for at every token)."""
        if len(row.tokens) < max(self._min_tokens, 1):
            return False
        tail = row.tokens[-self._window :]
        context = (row.prompt + row.tokens[: -len(tail)])[-1:]  # some tokenizers drop the space before a first token
        decode = self._tokenizer.decode
        text = decode(context + tail)[len(decode(context)) :]
        return any(string in text for string in self._strings)


class GenerationRun:
    """The rows of one generate call on their way through the engine."""

    def __init__(
        self, core: Any, rows: Mapping[str, GenerationRow], sampling: Sampling, stop: StopStrings | None, recorder: Recorder
    ) -> None:
        self._core, self._stop, self._recorder = core, stop, recorder
        self._max_new_tokens = sampling.max_new_tokens
        self.rows = dict(rows)
        self.open = dict(rows)
        """Rows that have not ended."""
        self.num_tokens = 0
        self.finite = True
        """Whether all log-probs are: those of weights with NaN are not."""
        self.broken = False
        """Whether the engine itself raised, and may not come out of its next step."""
        self.drawn = 0
        """Checksum of all tokens so far, and of what ended, in the order in which they came."""
        self.num_started = 0
        """Rows with at least one token."""
        self._bound = len(self.rows) * sampling.max_new_tokens
        self._report()

    @property
    def num_admitted(self) -> int:
        """Rows that ended or that the engine works on; the others wait for room in its cache."""
        return len(self.rows) - len(self.open) + len(self._core.engine_core.scheduler.running)

    def step(self, safe: SafePoint, group: ProcessGroup | None) -> None:
        """One step of the engine on every rank of the replica, then a safe point."""
        error: Exception | None = None
        before, self.broken = self.num_tokens, True
        try:
            outputs = self._core.get_output().outputs
            self.broken = False
            for output in outputs:
                self._take(output)
            if group is not None:
                self._add_up(outputs)
        except Exception as problem:
            error = problem
        try:
            safe.agree(group, error, self.drawn)
        except RanksDiffer:
            raise CallError(
                f"the ranks of this replica drew different tokens, after {before} that were the same: their logits or "
                "their schedules differ, and what they would go on to write is of no use. The call wrote nothing; run it again. "
                "If it comes back, generate with rollout='tp1', or in hf.Session(deterministic=True)."
            ) from None
        self._report()

    def _add_up(self, outputs: Sequence[Any]) -> None:
        drawn = ([*output.new_token_ids, -1 if output.finish_reason is None else -2] for output in outputs)
        self.drawn = crc32(np.array(list(itertools.chain(*drawn)), np.int64).data, self.drawn)

    def _take(self, output: Any) -> None:
        row = self.open[output.request_id]
        if output.new_token_ids:
            self.num_started += not row.tokens
            row.tokens += output.new_token_ids
            row.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
            self.finite = self.finite and math.isfinite(row.log_probs[-1])
            self.num_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            row.finish_reason = str(output.finish_reason)
            if row.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a response with {row.finish_reason!r} after {len(row.tokens)} tokens")
        elif self._stop and self._stop.ends(row):
            row.finish_reason = "stop"
            self._core.abort_requests([output.request_id])
        if row.finish_reason:
            del self.open[output.request_id]
            self._bound -= self._max_new_tokens - len(row.tokens)

    def _report(self) -> None:
        finished = len(self.rows) - len(self.open)
        self._recorder.progress = {
            "tokens": self.num_tokens, "total": self._bound, "finished": finished, "samples": len(self.rows)
        }  # fmt: skip

    def columns(self) -> dict[str, Column]:
        """Return what the call writes."""
        rows = list(self.rows.values())
        return {
            "response": Ragged.of([row.tokens for row in rows], np.int32),
            "rollout_log_probs": Ragged.of([row.log_probs for row in rows], np.float32),
            "finish_reason": np.array([row.finish_reason for row in rows], dtype="<U6"),
        }


def check_request(
    spec: ModelSpec, longest: int, prompts: Ragged, seeds: npt.NDArray[np.int64], sampling: Sampling, row_ids: Sequence[int] | Any
) -> None:
    """Check what a rollout is asked to generate.

    Args:
        spec: of its model.
        longest: tokens of prompt and response together that it takes.
        prompts: token ids.
        seeds: one per row.
        sampling: how to draw.
        row_ids: number of each row in the batch, for messages.

    Raises:
        OptionError: not one of each per row, a prompt that is empty, too long or of other tokens, or a temperature that is none.
    """
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise OptionError(
            f"temperature={sampling.temperature} is below {MIN_TEMPERATURE}, where vLLM would raise it silently; "
            f"use 0 (greedy) or at least {MIN_TEMPERATURE}."
        )
    if len(seeds) != len(prompts) or len(row_ids) != len(prompts):
        raise OptionError(f"{len(prompts)} prompts, {len(seeds)} seeds and {len(row_ids)} row ids; give one of each per row")
    lengths = prompts.lengths
    limit = longest - sampling.max_new_tokens
    for i in np.flatnonzero((lengths < 1) | (lengths > limit))[:1]:
        raise OptionError(
            f"row {row_ids[i]} has a prompt of {lengths[i]} tokens; with max_new_tokens={sampling.max_new_tokens} "
            f"and max_model_len={longest} it must have 1 to {limit}. Shorten it, or raise max_model_len."
        )
    outside = np.flatnonzero((prompts.flat < 0) | (prompts.flat >= spec.vocab_size))
    if len(outside):
        row = int(np.searchsorted(prompts.offsets, outside[0], side="right")) - 1
        raise OptionError(
            f"row {row_ids[row]} has token id {prompts.flat[outside[0]]}; {spec.name} has ids 0 to "
            f"{spec.vocab_size - 1}. Was it tokenized for another model?"
        )
