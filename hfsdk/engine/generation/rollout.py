"""The generating engine of a worker: vLLM in this process, driven step by step.

A replica is ``tp`` consecutive ranks. All of them are given the same rows and take the same steps; vLLM's scheduler is
deterministic and every rank draws from the same gathered logits with the row's own seed, so they need no lead::

    rank  0 1 | 2 3        tp=2, two replicas; rows 0-7 go to ranks 0 and 1, rows 8-15 to ranks 2 and 3

    generate:   agree, step, agree, step, ... until every row has ended

*agree* is a :class:`SafePoint`: on cancel, on failure, and that all ranks drew the same tokens. On GPUs vLLM's scheduling is
asynchronous: it launches a step before it returns what the last one drew, so that agreeing costs the GPU nothing::

    GPU     | step 1 | step 2 | step 3 |
    host      launch 2 | take 1, agree | launch 3 | take 2, agree |

Weights come in through ``weight_targets()`` and ``finish_update()``; between the two the engine does not generate. On GPUs a
rollout on its trainer's device sleeps between phases (:mod:`hfsdk.engine.generation.vllm_sleep`)::

    rest()   ... another phase ...   wake_weights()   weight_targets()   the transport writes   finish_update()   wake_cache()
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from hfsdk.assets.pretrained import load_tokenizer
from hfsdk.core.errors import CallError, LayoutError, ModelNotFoundError, OptionError, UnsupportedModelError
from hfsdk.core.lora import AdapterSpec, LoRA
from hfsdk.core.roles import RolloutOptions, Sampling
from hfsdk.core.rollout_sizes import (
    cache_bytes,
    context_tokens,
)
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Column, Ragged
from hfsdk.engine.generation import cpu_support_vllm as cpu
from hfsdk.engine.generation import vllm_sleep
from hfsdk.engine.generation.lora import Adapter, AdapterSlots, of_base
from hfsdk.engine.generation.rollout_engine import _share, build, check_model, engine_arguments, sleeps
from hfsdk.engine.generation.scoring import Rescored, Scorer, Sequences
from hfsdk.engine.process import rendezvous
from hfsdk.engine.process.deterministic import any_algorithm
from hfsdk.engine.process.recorder import Recorder
from hfsdk.engine.process.safepoint import RanksDiffer, SafePoint
from hfsdk.resharding.boxes import VOCAB_TABLES, vllm_boxes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_open_engines: dict[int, bool] = {}
"""The rollouts of this process that are open, and whether each sleeps: they share vLLM's groups, which the last to close ends."""


class Rollout:
    """vLLM on this rank, for one model and one tensor-parallel size.

    All ranks of the world construct it together. ``torch.distributed`` must be initialised (for one rank a group is
    made where there is none). The torch random state, thread count and grad mode are as before afterwards.

    Args:
        folder: model folder (config.json, safetensors; a tokenizer only for stop strings).
        spec: the same model as numbers.
        tp: tensor-parallel size; ranks ``[k * tp, (k + 1) * tp)`` are one replica.
        rank: this process in the world.
        world_size: ranks in the world, a multiple of ``tp``.
        dtype: ``"fp32"`` or ``"bf16"``.
        options: the engine's sizes.
        seed: the seed of vLLM's own random state (sampling uses a seed per row).
        job_id: names shared memory; see :func:`hfsdk.engine.generation.cpu_support_vllm.remove_segments`.
        recorder: takes spans and progress.
        load_weights: read the folder's weights; with ``False`` nothing is read and the first update must come first.
        trained: whether a trainer of this process fills it at every waking, so that it may sleep (:func:`gpus.sleeps`).
        lora: the adapters that rows may have on top of the base.
        adapters: how many of them it holds at once.

    Raises:
        UnsupportedModelError: vLLM cannot run the model here.
        LayoutError: ``tp`` does not divide ``world_size``.
    """

    def __init__(
        self,
        folder: str,
        spec: ModelSpec,
        *,
        tp: int,
        rank: int,
        world_size: int,
        dtype: str,
        options: RolloutOptions,
        seed: int,
        job_id: str,
        recorder: Recorder,
        load_weights: bool = True,
        trained: bool = False,
        lora: LoRA | None = None,
        adapters: int = 1,
    ) -> None:
        self._cpu = cpu.on_cpu()
        device_type = "cpu" if self._cpu else "cuda"
        check_model(spec, device_type)
        if world_size % tp:
            raise LayoutError(f"rollout tp={tp} does not divide the pool of {world_size} devices; choose one that does")
        self.spec, self.tp, self.tp_rank = spec, tp, rank % tp
        self.max_model_len = context_tokens(spec, options)
        self.kv_cache_bytes = cache_bytes(spec, options, tp, dtype, on_cpu=device_type == "cpu")
        self._folder, self._recorder, self._tokenizer = folder, recorder, None
        self._num_calls = 0
        self._soiled = False
        """Whether the key/value cache may hold NaN: masked positions of a block that is used again are multiplied, by zero."""
        self._ready = load_weights
        cpu.prepare()
        share = None if self._cpu else _share(spec, tp, dtype, self.kv_cache_bytes, lora, adapters)
        self.sleeps = sleeps(device_type, trained)
        """Whether :meth:`rest` gives its memory up."""
        arguments = engine_arguments(
            folder, spec, options, tp=tp, dtype=dtype, seed=seed, load_weights=load_weights, gpu_share=share, sleeps=self.sleeps,
            timeout=rendezvous.world_timeout(), lora=lora, adapters=adapters,
        )  # fmt: skip
        with cpu.process_state_kept(), any_algorithm():
            self._engine, plain = build(arguments, spec, rank, world_size, job_id)
        _open_engines[id(self)] = self.sleeps
        self._core = self._engine.engine_core
        self._core._finalizer.detach()  # close() shuts it down; a finalizer would destroy the trainer's process group
        self._model = self._engine.model_executor.driver_worker.worker.model_runner.model
        self._weights = cpu.CpuWeights(self._model, plain, options.cpu_weights) if self._cpu else None
        self._check_parameters()
        self._adapters = None if lora is None else AdapterSlots(
            self._engine, AdapterSpec.of(spec, lora), tp=tp, tp_rank=self.tp_rank, num_slots=adapters, on_cpu=self._cpu
        )  # fmt: skip
        self._sleep = vllm_sleep.Sleep(vllm_sleep.VllmSleep(self._engine), recorder) if self.sleeps else None
        if self.sleeps:
            vllm_sleep.forget_shared_buffers()
        if self._weights and load_weights:
            self._weights.close()

    def _check_parameters(self) -> None:
        """Check that the plan of a weight transition knows exactly vLLM's parameters."""
        planned = {box.local for box in vllm_boxes(self.spec, self.tp, self.tp_rank)}
        existing = set(self._parameters())
        if planned - existing or existing - planned - set(VOCAB_TABLES):  # a rank may hold only padding of the vocabulary
            raise UnsupportedModelError(
                f"vLLM's model of {self.spec.name} differs from what hfsdk moves in {sorted(planned ^ existing)[:6]}; "
                "use a model without adapters or further biases."
            )

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {of_base(name): parameter for name, parameter in self._model.named_parameters()}

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def in_place(self) -> bool:
        """Whether vLLM multiplies with its plain parameters, so that their storage may be shared, emptied and filled (CPU)."""
        return self._weights is not None and not self._weights.packs and not self.sleeps

    @property
    def awake(self) -> bool:
        """Whether its weights and cache have memory."""
        return self._sleep is None or self._sleep.state == "awake"

    @property
    def ready(self) -> bool:
        """Whether it can generate: the weights are written, and nothing sleeps."""
        return self._ready and self.awake

    def rest(self) -> None:
        """Give up the memory of weights and cache until they are woken, where this rollout sleeps; it must be filled again then."""
        if self._sleep is not None:
            self._ready, self._soiled = False, True  # what lies in memory that comes back may read as NaN
            if self._adapters:
                self._adapters.forget()
            self._sleep.to("asleep")

    def wake_weights(self) -> None:
        """Bring the memory of the weights, to be filled; the engine does not generate until :meth:`wake_cache`."""
        if self._sleep is not None:
            self._ready = False
            self._sleep.to("filling")

    def wake_cache(self) -> None:
        """Bring the memory of the key/value cache, after :meth:`finish_update`."""
        if self._sleep is not None:
            self._sleep.to("awake")

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return vLLM's parameters on this rank by name; while their storages are emptied or filled nothing is generated."""
        self._ready = False
        return self._parameters()

    def readable(self) -> dict[str, torch.Tensor]:
        """Return those of vLLM's parameters on this rank that it multiplies with as they are, and no packed copy of them."""
        return {name: p.data for name, p in self._parameters().items() if p.data.untyped_storage().nbytes() and p.numel()}

    def weight_targets(self) -> dict[str, torch.Tensor]:
        """Return this rank's plain destination tensors by vLLM's parameter names (see ``resharding.vllm_boxes``).

        All of them must be written, then :meth:`finish_update` called; until then the engine does not generate.
        Padding rows of the vocabulary are zero and stay so. In mode ``shared``, and on CUDA, these are vLLM's own
        parameters, the same ones every time; in mode ``packed`` the Linear weights are allocated for this update.
        """
        self._ready = False
        if self._weights:
            self._weights.open()
        targets = {name: parameter.data for name, parameter in self._parameters().items()}
        for name in set(VOCAB_TABLES) & set(targets):
            table = targets[name]
            table[max(self.spec.vocab_size - self.tp_rank * len(table), 0) :].zero_()
        return targets

    def finish_update(self) -> None:
        """Put the written weights into use: pack them where that is the mode, and forget cached prefixes."""
        if self._weights:
            self._weights.close()
        self._forget_prefixes()
        self._ready = True

    def _forget_prefixes(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache because requests are running; update between generate calls")

    def adapter_targets(self, slot: int = 0) -> dict[str, torch.Tensor]:
        """Return this rank's destination tensors of a slot's adapters by name (``resharding.vllm_boxes`` of an ``AdapterSpec``).

        All of them must be written, in the rollout's dtype, then :meth:`finish_adapters` called; until then no row can have the
        slot. They are vLLM's own tensors, the same ones every time; where the rank is none of vLLM's, B's are not contiguous.
        """
        return self._slots().targets(slot)

    def finish_adapters(self, slot: int = 0) -> None:
        """Put a slot's written adapters into use: B is multiplied by its scale, in place, and cached prefixes are forgotten.

        Raises:
            RuntimeError: the targets were not asked for, and so not written, since the last time.
        """
        self._slots().finish(slot)
        self._forget_prefixes()

    def readable_adapters(self, slot: int = 0) -> dict[str, torch.Tensor]:
        """Return the tensors that a slot's rows are multiplied with, B times its scale; none of a slot that is not in use."""
        return self._slots().readable(slot)

    def _slots(self) -> AdapterSlots:
        if self._adapters is None:
            raise RuntimeError("this rollout was made without lora, and has no adapters")
        return self._adapters

    def memory_bytes(self) -> int:
        """Return the bytes of weights (plain and packed), of adapters' slots and of the key/value cache on this rank."""
        plain: int = sum(p.nbytes for p in self._model.parameters())
        packed: int = self._weights.packed_bytes if self._weights else 0
        slots = self._adapters.num_bytes if self._adapters else 0
        return plain + packed + slots + self.kv_cache_bytes

    @property
    def probe_s(self) -> float:
        """Seconds that it took so far to try packed layers."""
        return self._weights.probe_s if self._weights else 0.0

    @property
    def away_bytes(self) -> int:
        """Bytes of the device that others have while this rollout sleeps, as measured; torch counts them as allocated all along."""
        return 0 if self._sleep is None else self._sleep.away_bytes

    # --- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Ragged,
        seeds: npt.NDArray[np.int64],
        sampling: Sampling,
        eos_token_ids: tuple[int, ...],
        safe: SafePoint,
        control_group: ProcessGroup | None,
        row_ids: Sequence[int] | npt.NDArray[np.int64],
        adapter: Adapter = 0,
    ) -> dict[str, Column]:
        """Draw one response per row; called on all ranks of a replica with the same rows.

        A row's sample depends on its prompt, its seed and the weights, not on the other rows or the replica. With
        temperature 0 the log-probs are of the softmax at temperature 1. With top-k, top-p or ``min_new_tokens`` they
        are of the renormalised distribution that was drawn from.

        Args:
            prompts: token ids, int32.
            seeds: one per row.
            sampling: temperature and the like.
            eos_token_ids: end a response unless ``sampling.ignore_eos``; the one drawn is kept in the response.
            safe: asked before the first and after every step.
            control_group: gloo group of the replica's ranks; ``None`` for tp=1.
            row_ids: number of each row in the batch, for messages.
            adapter: the slot of all rows, or of each; ``None`` is the base alone, as all rows are of a rollout without ``lora``.

        Returns:
            ``response`` (int32) and ``rollout_log_probs`` (float32), ragged, and ``finish_reason`` ("stop", "length").

        Raises:
            OptionError: a prompt is empty, too long with ``max_new_tokens``, or has ids outside the vocabulary.
            CallError: the replica's ranks drew different tokens.
            Cancelled: at a safe point; the engine stays usable.
        """
        error: Exception | None = None
        try:
            if not self.ready:
                raise RuntimeError("the rollout has no weights yet: finish_update() has to follow weight_targets()")
            check_request(self.spec, self.max_model_len, prompts, seeds, sampling, row_ids)
            loras = self._requests(adapter, len(prompts))
            stop = StopStrings(self._tokenizer_for(sampling), sampling) if sampling.stop else None
        except Exception as problem:
            error = problem
        # A replica's ranks have the same request, but one may lack memory or a tokenizer: all of them raise, or none.
        safe.agree(control_group, error)
        self._clean_cache()
        self._num_calls += 1
        names = [f"{self._num_calls}.{i}" for i in range(len(prompts))]
        rows = [GenerationRow(prompt=prompts[i].tolist()) for i in range(len(prompts))]
        run = GenerationRun(self._core, dict(zip(names, rows, strict=True)), sampling, stop, self._recorder)
        # vLLM may use torch's global generator, which is the user's.
        with torch.random.fork_rng(devices=cpu.random_devices()), any_algorithm():
            try:
                self._add(run.rows, seeds, sampling, eos_token_ids, loras)
                self._drive(run, safe, control_group)
            finally:
                # Cached blocks of an interrupted generation may hold half a step, or NaN that a later row would read.
                self._soiled = bool(run.open) or not run.finite
                self._core.abort_requests([name for name in names if name in run.open])
                if not run.broken:
                    self._settle()
        return run.columns()

    def _requests(self, adapter: Adapter, num_rows: int) -> list[Any]:
        return [None] * num_rows if self._adapters is None else self._adapters.requests(adapter, num_rows)

    def score(self, safe: SafePoint, control_group: ProcessGroup | None, sequences: Sequences, adapter: Adapter = 0) -> Rescored:
        """Score tokens that are there; called on all ranks of a replica with the same rows. Arguments as of :meth:`generate`."""
        loras = self._requests(adapter, len(sequences.prompts))
        safe.agree(control_group)
        self._clean_cache()
        scorer = Scorer(self._engine, safe, control_group, self.max_model_len, loras)
        with torch.random.fork_rng(devices=cpu.random_devices()), any_algorithm(), self._recorder.span("prefill"):
            try:
                return scorer.score(sequences)
            finally:
                self._soiled = True
                self._settle()

    def _settle(self) -> None:
        """Take the step still under way: with asynchronous scheduling a step is launched before it is known that all rows ended."""
        while self._core.engine_core.batch_queue:
            self._core.get_output()

    def _clean_cache(self) -> None:
        """Forget the keys and values of a generation that met NaN, or that ended before anyone could tell."""
        if not self._soiled:
            return
        self._soiled = False
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache because requests are running")
        for blocks in self._engine.model_executor.driver_worker.worker.model_runner.kv_caches:
            blocks.zero_()

    def _drive(self, run: GenerationRun, safe: SafePoint, group: ProcessGroup | None) -> None:
        scheduler, drain = self._core.engine_core.scheduler, Drain()

        def step() -> None:
            run.step(safe, group)
            if not drain:  # all that had room ran in the first step, those that ended in it too
                drain.sample(len(run.rows) - len(scheduler.waiting), len(scheduler.waiting), 0.0, seconds=0.0)
            drain.sample(len(scheduler.running), len(scheduler.waiting), scheduler.kv_cache_manager.usage)

        prompt_tokens = sum(len(row.prompt) for row in run.rows.values())
        with self._recorder.span("prefill", tokens=prompt_tokens, sequences=len(run.rows)) as attrs:
            started = -1
            # Prefill is over when a step starts no new row, or none is left to start; which steps are which vLLM does not say.
            while run.open and (started < run.num_started < len(run.rows) or run.num_started < run.num_admitted):
                started = run.num_started
                step()
            attrs["kv_usage"] = scheduler.kv_cache_manager.usage
        before, peak_running, peak_usage, steps = run.num_tokens, 0, 0.0, 0
        with self._recorder.span("decode", sequences=len(run.rows)) as attrs:
            while run.open:
                step()
                steps += 1
                peak_running = max(peak_running, len(scheduler.running))
                peak_usage = max(peak_usage, scheduler.kv_cache_manager.usage)
            attrs.update(
                tokens=run.num_tokens - before, running=peak_running, kv_usage=peak_usage, steps=steps, drain=str(drain)
            )  # fmt: skip

    def _add(
        self, rows: Mapping[str, GenerationRow], seeds: Any, sampling: Sampling, eos_token_ids: tuple[int, ...], loras: list[Any]
    ) -> None:
        """Tell vLLM of the rows, those of a slot one after another: their adapters' product is then one."""
        from vllm import SamplingParams

        ends = [] if sampling.ignore_eos else list(eos_token_ids)
        tasks = self._engine.get_supported_tasks()
        requests = zip(rows.items(), seeds, loras, strict=True)
        for (name, row), seed, lora in sorted(requests, key=lambda request: 0 if request[2] is None else request[2].adapter_id):
            params = SamplingParams(
                max_tokens=sampling.max_new_tokens, min_tokens=sampling.min_new_tokens,
                temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
                stop_token_ids=[*ends, *sampling.stop_token_ids],
                seed=int(seed) & (2**63 - 1), ignore_eos=True, logprobs=0, detokenize=False, skip_clone=True,
            )  # fmt: skip
            prompt = {"type": "token", "prompt_token_ids": row.prompt}
            self._core.add_request(self._engine.input_processor.process_inputs(name, prompt, params, tasks, lora_request=lora))

    def _tokenizer_for(self, sampling: Sampling) -> Any:
        if self._tokenizer is None:
            try:
                self._tokenizer = load_tokenizer(self._folder)
            except ModelNotFoundError as error:
                raise OptionError(
                    f"stop={sampling.stop} needs a tokenizer: {error} Or use stop_token_ids, which need none."
                ) from error
        return self._tokenizer

    def close(self) -> None:
        """Shut vLLM down; its memory is free once it was collected. The trainer's process group lives on."""
        if self._engine is None:
            return
        _open_engines.pop(id(self), None)
        core, self._model, self._weights = self._core.engine_core, None, None  # before vLLM gives up its pools
        try:
            if self._sleep is not None:
                self._sleep.close()
        finally:
            with (
                cpu.default_group_kept(), cpu.process_state_kept(), cpu.shared_groups_kept(bool(_open_engines)),
                cpu.pools_kept(any(_open_engines.values())),
            ):  # fmt: skip
                core.shutdown()
            self._engine = self._core = self._sleep = None


# -- one call of a rollout: its rows, when each ends, and the columns they become

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
        """Checksum of all tokens so far, and of the rows that ended, in the order in which they came."""
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
        """Return the columns that the call writes."""
        rows = list(self.rows.values())
        return {
            "response": Ragged.of([row.tokens for row in rows], np.int32),
            "rollout_log_probs": Ragged.of([row.log_probs for row in rows], np.float32),
            "finish_reason": np.array([row.finish_reason for row in rows], dtype="<U6"),
        }


def check_request(
    spec: ModelSpec, longest: int, prompts: Ragged, seeds: npt.NDArray[np.int64], sampling: Sampling, row_ids: Sequence[int] | Any
) -> None:
    """Check the request to a rollout.

    Args:
        spec: the spec of its model.
        longest: tokens of prompt and response together that it takes.
        prompts: token ids.
        seeds: one per row.
        sampling: temperature and the like.
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


# -- how a generation runs dry

MOST_POINTS = 128
"""Points kept of one generation; a longer one keeps every second, fourth, ... step."""


class Drain:
    """Samples of one generation, at most ``MOST_POINTS``, evenly spread over its steps.

    ::

        running 32 |#########################
                16 |                         #########
                 1 |                                  ##################   the long tail: one response holds the device
                   +----------------------------------------------------
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._points: list[tuple[float, int, int, float]] = []
        self._every = 1
        self._steps = 0

    def __bool__(self) -> bool:
        return bool(self._points)

    def sample(self, running: int, waiting: int, kv_usage: float, seconds: float | None = None) -> None:
        """Take one step: sequences in the running batch, sequences that wait for room, share of the cache in use.

        ``seconds`` since the generation began are now, where not given.
        """
        if self._steps % self._every == 0:
            at = time.perf_counter() - self._began if seconds is None else seconds
            self._points.append((round(at, 4), running, waiting, round(kv_usage, 4)))
            if len(self._points) > MOST_POINTS:
                self._points = self._points[::2]
                self._every *= 2
        self._steps += 1

    def __str__(self) -> str:
        """Return JSON: ``[[seconds, running, waiting, kv_usage], ...]``; spans carry it as their attribute ``drain``."""
        return json.dumps(self._points, separators=(",", ":"))
