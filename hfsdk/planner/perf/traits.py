"""How an engine does its work, as far as it costs time: ``EngineTraits``.

The formulas of ``PerfModel`` are the same for all engines; what differs is a handful of properties, and no seconds are written
here. The defaults are this package's engines: Megatron training, vLLM rollout with CUDA graphs, weights written in place. Those of
other systems, with which the formulas are validated, are in ``benchmarks/``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """What an engine does that costs time."""

    cuda_graphs: bool = True
    """Whether a decode step is replayed as one graph; without, every layer's kernels are launched by the host."""
    flash_attention: bool = True
    """Whether attention keeps its scores on the chip (arXiv 2205.14135); without, they are written and read."""
    attention: float = 1.0
    """Share of ``PerfModel.attention_efficiency`` that its attention reaches; about 0.6 where FlashAttention-2 runs on H100."""
    fused: bool = True
    """Whether norms, activations and residuals run as fused kernels; else each step of them is written and read."""
    sequence_parallel: bool = True
    """Whether norms and residuals are split over tp (Korthikanti et al., arXiv 2205.05198)."""
    overlaps_reduction: bool = True
    """Whether gradients are summed over dp while the last backward pass before a step still runs (Li et al., arXiv 2006.15704)."""
    overlaps_gather: bool = False
    """Whether the updated weights of a distributed optimizer are gathered over dp while the next forward pass runs."""
    gathers_weights: bool = False
    """Whether weights are sharded over dp and gathered for every pass (ZeRO stage 3, arXiv 1910.02054)."""
    overlaps_weights: bool = True
    """Whether the next layer's weights are gathered while this one computes, where they are."""
    sends_once: bool = False
    """Whether a token that several experts of a rank, or of another node, want is sent there once (DeepEP), not once for each."""
    generation_rows: int = 0
    """Rows of one generation micro-batch; 0 decodes all rows that have a slot together."""
    handover: float = 1.0
    """Stage times that a micro-batch occupies a pipeline stage in generation; 2 where sending waits for the receiver."""
    interleave: int = 1
    """Parts of the model that each pipeline stage holds; the bubble is as many times shorter (arXiv 2104.04473)."""


HFSDK = EngineTraits()
"""The engines of this package."""
