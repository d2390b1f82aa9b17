"""How an RLHF system does its work, as far as it costs time: ``SystemTraits``, and those of published systems.

The formulas of ``PerfModel`` are the same for all systems. What differs is a handful of properties of the engines, taken from the
systems' papers and code; no seconds are written here::

    hfsdk             Megatron training, vLLM rollout with CUDA graphs, weights written in place
    DeepSpeed-Chat    ZeRO-3 training, weights gathered for a rollout without graphs, everything on all devices
    OpenRLHF          ZeRO-3 training, vLLM on devices of its own, weights gathered and broadcast after every step
    NeMo-Aligner      Megatron training, rollout by the training engine in its layout, each token a whole forward pass
    HybridFlow        Megatron training, vLLM rollout in a layout of its own, weights gathered inside micro-DP groups
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SystemTraits:
    """What an engine does that costs time."""

    name: str = "hfsdk"
    kv_cache: bool = True
    """Whether keys and values of earlier tokens are kept; without, each token is a forward pass over the whole context."""
    cuda_graphs: bool = True
    """Whether a decode step is replayed as one graph; without, every layer's kernels are launched by the host."""
    flash_attention: bool = True
    """Whether attention keeps its scores on the chip (arXiv 2205.14135); without, they are written and read."""
    fused: bool = True
    """Whether norms, activations and residuals run as fused kernels; else each step of them is written and read."""
    sequence_parallel: bool = True
    """Whether norms and residuals are split over tp (Korthikanti et al., arXiv 2205.05198)."""
    zero3: bool = False
    """Whether weights are sharded over dp and gathered for every pass (ZeRO stage 3, arXiv 1910.02054)."""
    generation_rows: int = 0
    """Rows of one generation micro-batch; 0 decodes all rows that have a slot together."""
    handover: float = 1.0
    """Stage times that a micro-batch occupies a pipeline stage in generation; 2 where sending waits for the receiver."""

    interleave: int = 1
    """Parts of the model that each pipeline stage holds; the bubble is as many times shorter (arXiv 2104.04473)."""
    drains: bool = True
    """Whether the pipeline runs empty between one model's pass and the next one's."""


HFSDK = SystemTraits()
"""The engines of this package."""
HYBRIDFLOW = SystemTraits(name="HybridFlow")
"""HybridFlow (arXiv 2409.19256, section 7): Megatron-LM and vLLM."""
DEEPSPEED_CHAT = SystemTraits(name="DeepSpeed-Chat", zero3=True, cuda_graphs=False, sequence_parallel=False)
"""DeepSpeed-Chat (arXiv 2308.01320): ZeRO-3, and a hybrid engine that gathers the weights before it generates."""
OPENRLHF = SystemTraits(name="OpenRLHF", zero3=True, sequence_parallel=False)
"""OpenRLHF (arXiv 2405.11143): ZeRO-3 and vLLM on separate devices."""
NEMO_ALIGNER = SystemTraits(name="NeMo-Aligner", kv_cache=False, cuda_graphs=False)
"""NeMo-Aligner v0.2 (arXiv 2405.01481): generation by the training engine; HybridFlow (section 8.2) found no KV cache in it."""
