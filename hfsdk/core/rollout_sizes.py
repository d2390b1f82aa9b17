"""How large the generating engine is: sequences at once, and bytes of key/value cache; for the engine, and the planner that counts.

``max_num_seqs`` and ``kv_cache_bytes`` of ``RolloutOptions`` win where they are given. On processors what is left at 0 is small: 64
sequences, 256 MB. On GPUs it comes from the memory that everything else on the device leaves (:mod:`hfsdk.planner.perf.sizing`)::

    |<---------------------------- memory of the device ---------------------------->|
    | process | roles | rollout's weights | vLLM works with | key/value cache  | 8 %  |
                what                        a pass's layers,  as many longest
                stays                       all logits        sequences as fit
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hfsdk.core.cluster import DeviceSpec
from hfsdk.core.errors import OptionError
from hfsdk.core.roles import RolloutOptions
from hfsdk.core.spec import DTYPE_BYTES, ModelSpec
from hfsdk.core.table import Array

MAX_SHARE = 0.92
"""The largest share of a GPU's memory that a rollout is planned for, and that vLLM is told it may use: vLLM's own default."""

LEAST_SEQS = 64
"""Sequences at once on processors, and the fewest on GPUs: where the cache holds fewer of the longest, shorter ones still fit."""

BLOCK_TOKENS = 32
"""Tokens of a block of the key/value cache on CPU: the smallest there, so that short prompts share prefixes too."""

CPU_KV_CACHE_BYTES = 256 * 2**20
"""Most key/value cache taken on CPU unless asked for more: it is touched as a whole at the start."""

KV_CACHE_BYTES = 8 * 2**30
"""Cache that a rollout on a GPU should have at least, where 64 of its longest sequences fill it: no margin may cost it this."""

CONTEXT_TOKENS = 2048
"""Longest prompt plus response where ``RolloutOptions.max_model_len`` is 0 and the model allows more."""

LOGITS_COPIES = 4
"""fp32 arrays of [sequences, vocabulary] alive at once while vLLM samples: logits, log-probs, probabilities, and one to sort in."""


def longest_tokens(spec: ModelSpec, options: RolloutOptions) -> int:
    """Return the longest prompt plus response, in tokens."""
    return options.max_model_len or min(spec.max_positions, CONTEXT_TOKENS)


def context_tokens(spec: ModelSpec, options: RolloutOptions) -> int:
    """Return the same, of options that are checked first.

    Raises:
        OptionError: more was asked than the model has positions.
    """
    if options.max_model_len > spec.max_positions:
        raise OptionError(
            f"max_model_len={options.max_model_len} is more than the {spec.max_positions} positions of {spec}; "
            f"set it to at most {spec.max_positions}"
        )
    return longest_tokens(spec, options)


def most_seqs(device: DeviceSpec) -> int:
    """Return vLLM's own ``max_num_seqs`` for generating offline on a GPU: 1024 from 70 GiB, but 256 on an A100, and 256 below.

    Source: vLLM 0.32, ``vllm/engine/arg_utils.py``, ``EngineArgs.get_batch_defaults``, ``UsageContext.LLM_CLASS``.
    """
    large = device.memory_bytes >= 160 * 2**30 or (device.memory_bytes >= 70 * 2**30 and "a100" not in device.name.lower())
    return 1024 if large else 256


@dataclass(frozen=True, kw_only=True)
class CacheUnits:
    """The units of a rank's cache."""

    block: int
    """Bytes of one block."""
    sequence: int
    """Bytes of one longest sequence, in whole blocks."""

    @classmethod
    def of(cls, spec: ModelSpec, options: RolloutOptions, tp: int, dtype: str) -> CacheUnits:
        """Return those of one rank of ``tp``, whose sequences may be as long as the options allow."""
        return cls.of_tokens(spec, longest_tokens(spec, options), tp, dtype)

    @classmethod
    def of_tokens(cls, spec: ModelSpec, longest: int, tp: int, dtype: str, pp: int = 1) -> CacheUnits:
        """Return those of one rank; key/value heads are replicated where tp exceeds them.

        Args:
            spec: the model.
            longest: tokens of the longest sequence, prompt and response.
            tp: tensor-parallel size of the rollout.
            dtype: ``"fp32"`` or ``"bf16"``.
            pp: its pipeline stages, over which layers are cut (1 in hfsdk).
        """
        block = BLOCK_TOKENS * spec.kv_bytes_per_token(dtype) // (min(tp, spec.num_kv_heads) * pp)
        return cls(block=block, sequence=-(-longest // BLOCK_TOKENS) * block)

    def held_by(self, cache: int, beside: int = 0) -> int:
        """Return how many longest sequences a cache of so many bytes holds, where each takes ``beside`` more bytes."""
        return max(0, (cache - 2 * self.block) // (self.sequence + beside))

    def held_each(self, cache: int, tokens: Array) -> Array:
        """Return how many sequences of these lengths a cache of so many bytes holds, of each length by itself."""
        sequences: Array = np.maximum(0, (cache - 2 * self.block) // (-(-tokens // BLOCK_TOKENS) * self.block).clip(1))
        return sequences

    def holding(self, sequences: int) -> int:
        """Return the bytes that hold so many longest sequences: vLLM keeps one block for itself, and one is to spare."""
        return sequences * self.sequence + 2 * self.block

    def usual(self, options: RolloutOptions, most: int) -> int:
        """Return the bytes for the sequences that were asked for, or 64: at most ``most``, but one longest sequence."""
        wanted = (options.max_num_seqs or LEAST_SEQS) * self.sequence
        return max(self.sequence, min(wanted, most)) + self.holding(0)


def least_cache_bytes(spec: ModelSpec, options: RolloutOptions, tp: int, dtype: str) -> int:
    """Return the bytes of the smallest cache that the engine starts with, of one rank: as asked, or one longest sequence."""
    return options.kv_cache_bytes or CacheUnits.of(spec, options, tp, dtype).holding(1)


def cache_bytes(spec: ModelSpec, options: RolloutOptions, tp: int, dtype: str, *, on_cpu: bool) -> int:
    """Return the bytes of one rank's cache: as asked or chosen, or for ``max_num_seqs`` longest sequences.

    The latter is capped at 256 MB on CPU and 8 GB on an accelerator, but always holds one longest sequence. In a session ``place``
    has chosen it for accelerators.
    """
    usual = CacheUnits.of(spec, options, tp, dtype).usual(options, CPU_KV_CACHE_BYTES if on_cpu else KV_CACHE_BYTES)
    return options.kv_cache_bytes or usual


def is_open(options: RolloutOptions) -> bool:
    """Whether a size is left to be chosen."""
    return not (options.max_num_seqs and options.kv_cache_bytes)


def choose_sizes(
    options: RolloutOptions, spec: ModelSpec, device: DeviceSpec, *, tp: int, dtype: str, free: int, at_most: int
) -> RolloutOptions:
    """Return the options with the sizes that were left at 0, for a rank on this GPU. Pure.

    The cache is what is free but for what vLLM works with, and no more than its sequences fill. Where that is little, it is up to
    8 GB of what is there at most; and always one longest sequence. The sequences are as many longest ones as it holds, from 64 to
    vLLM's own default.

    Args:
        options: the role's options as declared.
        spec: the model.
        device: the GPU.
        tp: tensor-parallel size of the rollout.
        dtype: ``"fp32"`` or ``"bf16"``.
        free: bytes for the cache and what vLLM works with, once everything else is there that is while this rollout generates,
            and 8 % of the GPU are kept free.
        at_most: the same without these 8 %.
    """
    units, most = CacheUnits.of(spec, options, tp, dtype), max(LEAST_SEQS, most_seqs(device))

    def fitting(cache: int, beside: int) -> int:
        return options.max_num_seqs or min(max(units.held_by(cache, beside), LEAST_SEQS), most)

    if options.kv_cache_bytes:
        return replace(options, max_num_seqs=fitting(options.kv_cache_bytes, 0))
    logits = LOGITS_COPIES * 4 * spec.vocab_size
    left = free - _pass_bytes(spec, options, tp, dtype)
    sequences = fitting(left, logits)
    cache = min(left - sequences * logits, units.holding(sequences))
    cache = max(cache, min(units.usual(options, KV_CACHE_BYTES), at_most), units.holding(1))
    return replace(options, max_num_seqs=sequences, kv_cache_bytes=cache)


def _pass_bytes(spec: ModelSpec, options: RolloutOptions, tp: int, dtype: str) -> int:
    """Bytes of activations while vLLM reads as many tokens as it may at once: residual, norm, attention's and the MLP's."""
    tokens = max(options.max_num_batched_tokens, longest_tokens(spec, options))
    return tokens * (4 * spec.hidden_size + 3 * spec.mlp_width_per_token // tp) * DTYPE_BYTES[dtype]
