"""Scores of tokens that are there, by the generating engine: one prefill of prompt and response, the prefix cache not read.

vLLM gives the log-probabilities of a prompt at temperature 1; another one is put in where it turns logits into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hfsdk.core.gap import HiddenStates
from hfsdk.core.table import Array, Ragged
from hfsdk.engine.process.safepoint import SafePoint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences that are to be scored."""

    prompts: Ragged
    """Token ids, int32."""
    responses: Ragged
    temperatures: Array
    """Temperature of each row; 0 (greedy) counts as 1."""
    inside: tuple[int, int] | None = None
    """The (row, response token) before which hidden states are kept."""
    through_cache: Sequence[tuple[int, int]] = ()
    """The (row, response token)s that are scored once more, behind what the prefix cache has."""

    def until(self, row: int, token: int) -> Array:
        """Return a row up to a response token, and with it."""
        return np.concatenate([self.prompts[row], self.responses[row]])[: len(self.prompts[row]) + token + 1]


@dataclass(frozen=True, eq=False)
class Rescored:
    """The result of scoring some sequences."""

    log_probs: Ragged
    """Log-probability of every response token; NaN of a last one that fills the context."""
    inside: HiddenStates | None
    cached: Mapping[tuple[int, int], float]
    """The log-probability of each (row, response token) of ``through_cache``."""


class Scorer:
    """Scores sequences with a rollout's engine; every method is called on all ranks of a replica with the same rows.

    Args:
        engine: vLLM's engine.
        safe: asked after every step.
        group: gloo group of the replica's ranks; ``None`` for tp=1.
        longest: tokens that the engine takes, the one that it must be able to add included.
        loras: vLLM's request for each row's adapter.
    """

    def __init__(self, engine: Any, safe: SafePoint, group: ProcessGroup | None, longest: int, loras: Sequence[Any]) -> None:
        self._engine, self._core, self._safe, self._group, self._longest = engine, engine.engine_core, safe, group, longest
        self._loras = loras
        self._model = engine.model_executor.driver_worker.worker.model_runner.model
        self._number = 0

    def score(self, sequences: Sequences) -> Rescored:
        """Score all that was asked for; behind the prefix cache first, as the others add to it."""
        cached = {
            at: self.through_cache(at[0], sequences.until(*at), float(sequences.temperatures[at[0]]))
            for at in sequences.through_cache
        }
        log_probs, states = self.log_probs(sequences.prompts, sequences.responses, sequences.temperatures), None
        if sequences.inside is not None:
            row, token = sequences.inside
            states = self.inside(row, sequences.until(row, token), len(sequences.prompts[row]) + token - 1)
        return Rescored(log_probs, states, cached)

    def log_probs(self, prompts: Ragged, responses: Ragged, temperatures: Array) -> Ragged:
        """Return the log-probability of every response token, NaN where prompt and response fill the context to its last token.

        Args:
            prompts: the prompts' token ids.
            responses: the responses' token ids.
            temperatures: each row's temperature; 0 (greedy) counts as 1.
        """
        by_row: dict[int, Array] = {}
        for temperature in np.unique(temperatures):
            rows = np.flatnonzero(temperatures == temperature).tolist()
            with self._divided(float(temperature) or 1.0):
                by_row |= self._prefill(rows, [np.concatenate([prompts[i], responses[i]]) for i in rows])
        columns = []
        for row in range(len(prompts)):
            values = np.full(len(responses[row]), np.nan, np.float32)
            scores = by_row[row][len(prompts[row]) - 1 :]
            values[: len(scores)] = scores
            columns.append(values)
        return Ragged.of(columns, np.float32)

    def inside(self, row: int, tokens: Array, position: int) -> HiddenStates | None:
        """Return the hidden states at a position of a row's tokens; ``None`` where compiled graphs run, which have no hooks."""
        inner = self._model.model
        places: dict[str, torch.nn.Module] = {"embedding": inner.embed_tokens, "norm": inner.norm}
        places |= {f"layer {number}": layer for number, layer in enumerate(inner.layers)}
        seen: dict[str, Array] = {}

        def hook(place: str) -> Callable[..., None]:
            def keep(module: Any, inputs: Any, out: Any) -> None:
                hidden, residual = out if isinstance(out, tuple) else (out, None)
                if residual is not None and place != "norm":  # vLLM's layers return what the next one adds to it
                    hidden = hidden + residual
                seen[place] = hidden[position].detach().float().cpu().numpy()

            return keep

        hooks = [module.register_forward_hook(hook(place)) for place, module in places.items()]
        try:
            self._prefill([row], [tokens])
        finally:
            for handle in hooks:
                handle.remove()
        return HiddenStates("rollout", seen) if seen else None

    def through_cache(self, row: int, tokens: Array, temperature: float) -> float:
        """Return the log-probability of the last of a row's tokens behind what the prefix cache has of those before it."""
        last_log_probs: list[float] = []

        def read(logits: torch.Tensor) -> torch.Tensor:
            log_probs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
            last_log_probs.append(float(log_probs[-1, int(tokens[-1])]))
            return logits

        with self._reading(read):
            self._prefill([row], [tokens[:-1]], scored=False)
        return last_log_probs[-1]

    def _prefill(self, rows: Sequence[int], sequences: Sequence[Array], *, scored: bool = True) -> dict[int, Array]:
        """Return, by row, the log-probability of each token but the first."""
        from vllm import SamplingParams

        tasks, by_row = self._engine.get_supported_tasks(), {}
        names = {}
        for row, tokens in zip(rows, sequences, strict=True):
            self._number += 1
            name = f"score.{id(self)}.{self._number}"
            params = SamplingParams(
                max_tokens=1, temperature=0.0, prompt_logprobs=0 if scored else None, logprobs=0, detokenize=False, skip_clone=True
            )
            # One token of the engine's length must stay free: even with max_tokens=1 vLLM generates one.
            prompt = {"type": "token", "prompt_token_ids": tokens[: self._longest - 1].tolist()}
            processed = self._engine.input_processor.process_inputs(name, prompt, params, tasks, lora_request=self._loras[row])
            self._core.add_request(processed)
            names[name] = row
        waiting = set(names)
        try:
            while waiting:
                error: Exception | None = None
                try:
                    for output in self._core.get_output().outputs:
                        if output.new_prompt_logprobs_tensors is not None:
                            by_row[names[output.request_id]] = (
                                output.new_prompt_logprobs_tensors.logprobs[:, 0].float().numpy().copy()
                            )
                        if output.finish_reason is not None:
                            waiting.discard(output.request_id)
                except Exception as problem:
                    error = problem
                # An error on one rank is told to all before any of them waits in a collective of the next step.
                self._safe.agree(self._group, error)
        finally:
            self._core.abort_requests(list(waiting))
        return by_row

    @contextmanager
    def _divided(self, temperature: float) -> Iterator[None]:
        def divided(logits: torch.Tensor) -> torch.Tensor:
            return logits.float() / temperature

        with self._reading(divided):
            yield

    @contextmanager
    def _reading(self, read: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Have ``read`` between the model's logits and their reader, for a while."""
        compute = self._model.compute_logits

        def and_read(*args: Any, **more: Any) -> torch.Tensor | None:
            logits = compute(*args, **more)
            return None if logits is None else read(logits)

        self._model.compute_logits = and_read
        try:
            yield
        finally:
            del self._model.compute_logits
