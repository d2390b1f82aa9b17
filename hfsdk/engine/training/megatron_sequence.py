"""Sequence parallelism of Megatron's layers, for rows that are packed: norms and residuals are cut over tp along the tokens.

Between the blocks, where tp ranks would hold the same, each has its part of the tokens (Korthikanti et al., arXiv 2205.05198)::

    tokens           norm [T/2]  gather   attention [T]   reduce-scatter   norm [T/2]  gather   MLP [T]   reduce-scatter
    rank 0           a a a a        ->    all, its heads        ->         a a a a       ->     all, its columns   ->
    rank 1           b b b .        ->    all, its heads        ->         b b b .       ->     all, its columns   ->

An all-reduce is a reduce-scatter and a gather, so as many bytes travel as without. T must be a multiple of tp: rows are followed by
a row of padding (``ModelInput.of``), which sees only itself and is never selected.
"""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

RNG = "model-parallel-rng"
"""The random state that Megatron asks for where it might drop out of its own part of a sequence; nothing is dropped here."""


def prepare(model: GPTModel) -> None:
    """Have norms' gradients, each of a part of the tokens, summed over tp, and give Megatron the objects it asks for."""
    for name, parameter in model.named_parameters():
        if sees_a_part(name):
            parameter.sequence_parallel = True
    if model.post_process and isinstance(model.output_layer, ColumnParallelLinear):  # it runs on places of the whole sequence
        model.output_layer.sequence_parallel, model.output_layer.allreduce_dgrad = False, True
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tracker = get_cuda_rng_tracker()
    if RNG not in tracker.get_states():
        tracker.add(RNG, 0)


def sees_a_part(name: str) -> bool:
    """Whether a parameter of that local name works on a part of the tokens: norms do, but those of queries and keys."""
    return name.endswith("layernorm.weight") and "self_attention" not in name


def free_gathered() -> None:
    """Let go of the buffer into which Megatron gathers the parts of a sequence: it would stay as large as it ever was."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is not None:
        parallel_state.get_global_memory_buffer().buffer.clear()
