"""The engines of HybridFlow's comparison (arXiv 2409.19256, section 8) as they were: what each does, read from its code of that
time.

Each system names its files and version; what is inferred from them says so. No seconds of an RLHF step are written here; host costs
are other people's profiles of the engines. All of it was written after a comparison with idealised engines had failed;
``docs/perf-model.md`` says which choices between sources could have gone otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hfsdk.core.spec import ModelSpec
from hfsdk.planner.perf.setup import HFSDK, EngineTraits


@dataclass(frozen=True, kw_only=True)
class System:
    """A published system."""

    name: str
    traits: EngineTraits = HFSDK
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Constants of ``PerfModel`` that are others for its generating engine."""
    rows: int | Mapping[int, int] = field(default=256, hash=False)
    """Rows that a replica of the rollout decodes at once at most, others wait; or these by layers of the model."""
    rows_of_device: bool = False
    """Whether ``rows`` are a device's, so that a replica of more devices has as many times more; else a replica's."""
    own_layout: bool = False
    """Whether models are trained with tp8 and as many stages as :data:`LEAST_PP` says; else in the fastest layout."""
    generates_apart: bool = True
    """Whether a generating engine has weights of its own; else the training engine generates, in its layout."""
    waits_on_host: bool = False
    """Whether the rollout's weights that the trainer lacks wait in host memory while it trains."""
    swaps: bool = False
    """Whether the reference comes from host memory and Adam's state leaves the device between optimizer steps."""

    def rows_of(self, spec: ModelSpec, tp: int) -> int:
        """Return how many rows a replica decodes at once."""
        rows = self.rows if isinstance(self.rows, int) else self.rows[spec.num_layers]
        return rows * tp if self.rows_of_device else rows


LEAST_PP = {32: 1, 40: 1, 48: 4, 80: 8}
"""Layers -> pipeline stages beside tp8 with which HybridFlow trained 7B, 13B, 34B and 70B (captions of its figure 14)."""

HOST = {"step_s": 1.5e-3, "row_s": 50e-6}
"""Host seconds of vLLM in spring 2024, of a decode step and of each row in it: straight lines through what Vidur recorded of
scheduling, inputs, sampling and outputs on A100 (``cpu_overheads.csv`` at 6d98aa8, 2024-05-08): 1.42 to 2.45 ms a step with tp2 and
tp4, 46 to 51 microseconds a row, one model 32."""
HOST_RAY = {**HOST, "step_s": 8e-3}
"""The same where tp ranks are Ray workers: 6 to 7 ms a step more (same file)."""
HOST_HYBRID = {"launch_s": 7e-4}
"""DeepSpeed's hybrid engine in the loop of transformers' ``generate``: seconds of a layer's launches, from what PUZZLE's authors
measured of it on A100 with NVLink (``validate_perf.py``, the fitted side)."""

HYBRIDFLOW = System(
    name="HybridFlow", traits=EngineTraits(cuda_graphs=False, overlaps_reduction=False), constants=HOST, own_layout=True,
    waits_on_host=True,
)  # fmt: skip
"""Megatron-LM and vLLM. verl 0.1 (9fa2cfb): ``enforce_eager`` and a cache that is freed, beside which CUDA graphs are refused; a
scheduler in each rank, no Ray in a step; vLLM's own ``max_num_seqs`` (``vllm_rollout.py``); a distributed optimizer, gradients in
fp32, ``overlap_grad_reduce=False`` (``megatron_utils.py``; Megatron-core 0.6.0's default too); generating weights of other stages
in host memory meanwhile (``megatron_vllm.py``; the paper's section 7)."""

DEEPSPEED_CHAT = System(
    name="DeepSpeed-Chat", constants=HOST_HYBRID, rows={32: 4, 40: 2, 48: 4, 80: 4}, rows_of_device=True,
    traits=EngineTraits(gathers_weights=True, overlaps_weights=False, cuda_graphs=False, sequence_parallel=False, fused=False),
)  # fmt: skip
"""DeepSpeed-Chat (arXiv 2308.01320) with DeepSpeed 0.14.0: ZeRO-3, and a hybrid engine that gathers all weights once a
``generate`` (``hybrid_engine.py``), without CUDA graphs, in the loop of transformers' ``generate``.
``stage3_max_live_parameters`` of 3e7 (``ds_utils.py``) is less than a layer of 7B: inferred, that hardly anything is gathered
ahead. Norms and rotations are kernels of their own, as transformers has them. A device generates one
``per_device_generation_batch_size`` of rows a ``generate``: 4 of 7B without offloading and 2 of 13B (OpenRLHF's benchmark branch,
where the hybrid engine was off), 4 in its own example for 66B."""

OPENRLHF = System(
    name="OpenRLHF", traits=EngineTraits(gathers_weights=True, sequence_parallel=False, fused=False), constants=HOST_RAY,
    rows={32: 16, 40: 8, 48: 4, 80: 4},
)  # fmt: skip
"""OpenRLHF 0.2.5 (arXiv 2405.11143; 74a8b73): ZeRO-3 and vLLM on devices of their own. vLLM gets one ``micro_rollout_batch_size``
of rows a call, and calls wait for one another (``experience_maker.py``, ``vllm_engine.py``); 16, 8, 4 and 4 rows of 7B, 13B, 34B
and 70B (its benchmark branch, 8201f88, with the paper's versions of vLLM and PyTorch). CUDA graphs are on, tp ranks are Ray
workers. Weights go one by one: gathered over the actor's devices, then broadcast (``ppo_actor.py``)."""

NEMO_ALIGNER = System(
    name="NeMo-Aligner", traits=EngineTraits(cuda_graphs=False, overlaps_reduction=False), rows=8, own_layout=True,
    generates_apart=False, swaps=True,
)  # fmt: skip
"""NeMo-Aligner 0.2.0 (arXiv 2405.01481; 3b8b70e): the training engine generates ``rollout_micro_batch_size`` rows, by default 8,
to the end of the longest before the next begin (``algorithms/ppo.py``), without CUDA graphs. Keys and values are kept (NeMo 1.22,
``text_generation_strategy.py``), other than HybridFlow's section 8.2 says. ``overlap_grad_sync`` is off, Adam's state and the
reference are swapped with host memory. Layouts are HybridFlow's, whose Megatron-LM it shares; the paper does not give them."""

SYSTEMS = (DEEPSPEED_CHAT, OPENRLHF, NEMO_ALIGNER)
"""The systems HybridFlow was compared with."""
