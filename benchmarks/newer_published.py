"""The newer published timings of ``benchmarks/data/newer_points.csv`` as cases: training and generation outside RL systems.

They came to this package after the constants of ``PerfModel`` had their values. Which engine ran is in the notes; what is not
in 16 bits, or does not say its layout and lengths, is left out. Mixtures of experts are read where they generate without expert
and context parallelism (48 rows), and where they train with expert parallelism on H100, their experts cut like their other
weights (5 rows). Of their other rows most are in FP8, of a card or a model that is not known here, or do not state how many GPUs
they had. Also left out, in 16 bits:

    rows  of                                        because
    9     verl, calls and steps                     mean lengths and the layout are not stated
    9     verl, slime, SGLang, weight syncs         the layout of one side is not stated, or a side has expert parallelism
    7     vLLM on A100 (6) and H100 (1)             card and type of numbers are not stated; served 10 at once, mean lengths
    3     Megatron-LM, a DeepSeek of 16B            heads and vocabulary are not stated, mean lengths
    5     Megatron-Bridge's cards                   the layout is not stated (4); LoRA, which the model refuses for mixtures (1)
    2     NeMo-Automodel, gpt-oss                   DeepEP is named beside EP1; recompute not stated; attention within windows
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from common import ROOT
from published import Case, generation_of, gpt, llama, on_test_side, step_of

from hfsdk.core.cluster import DEVICES, ClusterSpec, DeviceSpec, LinkSpec
from hfsdk.core.layout import Layout
from hfsdk.core.spec import Experts, ModelSpec
from hfsdk.planner.perf.perf_model import Links, Setup
from hfsdk.planner.perf.setup import EngineTraits

NEWER = ROOT / "benchmarks" / "data" / "newer_points.csv"

A100_40 = replace(DEVICES["A100-80GB"], name="A100-40GB", memory_bytes=40 * 10**9, memory_bandwidth=1.555e12)
H100_HBM2 = replace(DEVICES["H100"], name="H100-96GB", memory_bytes=96 * 10**9, memory_bandwidth=2.4e12)
"""As torchtitan's pages state it; it is limited to 500 W of 700, which no data sheet gives a peak for."""
H20 = replace(DEVICES["H100"], name="H20-96GB", peak_flops=148e12, fp32_flops=44e12, memory_bytes=96 * 10**9, memory_bandwidth=4e12)
"""Data sheet; its NVLink is H100's."""
GPUS = {"A100-40GB": A100_40, "A100-80GB": DEVICES["A100-80GB"], "A100-SXM-80GB": DEVICES["A100-80GB"],
        "H100-80GB": DEVICES["H100"], "H100-SXM-80GB": DEVICES["H100"], "H100-96GB-HBM2e-500W": H100_HBM2,
        "H20-96GB": H20}  # fmt: skip
NETWORK_8X200G = LinkSpec(name="8 x 200 Gbit/s", bandwidth=200e9, latency_s=DEVICES["H100"].network.latency_s)
"""1,600 Gbit/s a node (llm-foundry's page, of its A100s)."""

_LLAMA, _QWEN = 128256, 151936
_SIZES = {
    "llama3.1-8b": (32, 4096, 14336, 32, 8, _LLAMA), "llama3.1-70b": (80, 8192, 28672, 64, 8, _LLAMA),
    "mistral-7b": (32, 4096, 14336, 32, 8, 32000), "qwen2.5-0.5b": (24, 896, 4864, 14, 2, _QWEN),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, _QWEN), "qwen2.5-3b": (36, 2048, 11008, 16, 2, _QWEN),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 152064), "qwen2.5-14b": (48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": (64, 5120, 27648, 40, 8, 152064), "qwen2.5-72b": (80, 8192, 29568, 64, 8, 152064),
}  # fmt: skip
MODELS = {name: llama(name, *sizes) for name, sizes in _SIZES.items()}
"""Their ``config.json``."""
MIXTURES = {name: ModelSpec.preset(name) for name in ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")}
MIXTURES["mixtral-8x22b"] = replace(
    llama("mixtral-8x22b", 56, 6144, 16384, 48, 8, 32768), experts=Experts(count=8, per_token=2, width=16384)
)
"""The same of mixtures of experts."""
TIED = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")

_TRAINED = re.compile(r"^(\S+).*? TP(\d+) PP(\d+) DP(\d+) CP(\d+) EP(\d+)(?: ETP\d+)? VPP(\d+) micro (\d+); (\w+)")
_GENERATED = re.compile(r"^(\S+) gen TP(\d+) PP(\d+) DP(\d+)(?: EP(\d+))?; (\w+)")


@lru_cache
def newer_rows() -> tuple[dict[str, str], ...]:
    """Return the rows of the file."""
    with NEWER.open() as file:
        return tuple(csv.DictReader(file))


def _links(device: DeviceSpec, gpus: int, layout: Layout) -> Links:
    network = NETWORK_8X200G if device.name.startswith("A100") else device.network
    nodes = -(-gpus // 8)
    cluster = ClusterSpec(
        node_devices=((device,) * min(8, gpus),) * nodes, intra_node=device.link, inter_node=network,
    )  # fmt: skip
    return Links.of(cluster, range(gpus), layout)


def pretraining() -> Iterator[Case]:
    """Training steps with FSDP in bf16: MPT by llm-foundry, Llama 3.1 by torchtitan (also with tp), with cp by NeMo-Automodel.

    Left out: tp that runs beside its products ("async TP"), and Megatron-LM's GPT of 7B, measured in its deterministic mode.
    """
    for row in newer_rows():
        found, device = _TRAINED.search(row["notes"]), GPUS.get(row["gpu_type"])
        system = row["system"].split()[0]
        if row["metric"] != "train_step_time" or row["algorithm"] != "pretrain" or not found or not device:
            continue
        tp, pp, dp, cp, _, _, micro = map(int, found.groups()[1:8])
        shape = re.search(r"\((\d+)L d(\d+) (\d+) heads\)", row["notes"])
        spec = gpt(found[1], *map(int, shape.groups()), 50368) if shape else MODELS.get(found[1])
        if found[9] != "BF16" or spec is None or pp > 1 or "PURE" in row["notes"] or "async TP" in row["notes"]:
            continue
        if system not in ("llm-foundry", "torchtitan", "NeMo-Automodel"):
            continue
        length, gpus = int(row["response_len"]), int(row["gpus"])
        layout = Layout(tp=tp, dp=dp, cp=cp)
        full = re.search("full recompute on|full checkpointing", row["notes"]) or "activation_checkpointing true" in row["notes"]
        flash_2 = device.name.startswith("H100") and system == "llm-foundry"  # its tables are of October 2023
        traits = EngineTraits(gathers_weights=True, sequence_parallel=tp > 1, attention=0.6 if flash_2 else 1.0,
                              fused=system != "llm-foundry" and "no compile" not in row["notes"])  # fmt: skip
        made = Setup(
            spec=replace(spec, max_positions=max(length, spec.max_positions)), layout=layout, device=device,
            links=_links(device, gpus, layout), micro_batch_tokens=micro * length // cp,
            recompute="full" if full else "selective" if "selective" in row["notes"] else "", distributed=True, traits=traits,
        )  # fmt: skip
        yield Case(
            f"{system}, {row['gpu_type'][:4]}", "train", float(row["value"]), on_test_side(row),
            f"{row['system']} {spec.name} {gpus} {row['gpu_type']} {length} tokens x {row['global_batch']}, micro {micro}",
            f"{spec.name} {row['gpu_type']}", str(layout), step_of(made, int(row["global_batch"]) // dp, length),
        )  # fmt: skip


def mixtures() -> Iterator[Case]:
    """Training steps of mixtures of experts in bf16 with expert parallelism: Megatron-Bridge's cards, NeMo-Automodel.

    What runs beside an all-to-all is not modelled. DeepEP and HybridEP, which notes name, send a token once to a rank or node.
    """
    for row in newer_rows():
        found, device, system = _TRAINED.search(row["notes"]), GPUS.get(row["gpu_type"]), row["system"].split()[0]
        if row["metric"] != "train_step_time" or row["algorithm"] != "pretrain" or not found or not device:
            continue
        tp, pp, dp, cp, ep, parts, micro = map(int, found.groups()[1:8])
        spec, recompute = MIXTURES.get(found[1]), re.search(r"recompute (none)|activation_checkpointing (true)", row["notes"])
        if system not in ("Megatron-Bridge", "NeMo-Automodel") or found[9] != "BF16" or spec is None or not recompute:
            continue
        if tp > 1 or cp > 1 or ep == 1:
            continue
        length, gpus, layout = int(row["response_len"]), int(row["gpus"]), Layout(pp=pp, dp=dp, ep=ep)
        made = Setup(
            spec=replace(spec, max_positions=200_000), layout=layout, device=device, links=_links(device, gpus, layout),
            micro_batch_tokens=micro * length, recompute="full" if recompute[2] else "", distributed=True,
            traits=EngineTraits(
                gathers_weights="FSDP 0" not in row["notes"] and "FSDP" in row["notes"], interleave=parts,
                sends_once="DeepEP" in row["notes"] or "HybridEP" in row["notes"],
            ),
        )  # fmt: skip
        yield Case(
            f"{system} MoE, H100", "train", float(row["value"]), on_test_side(row),
            f"{row['system']} {spec.name} {gpus} {row['gpu_type']} pp{pp} ep{ep} {length} tokens x {row['global_batch']}",
            f"{spec.name} {gpus}", str(layout), step_of(made, int(row["global_batch"]) // dp, length),
        )  # fmt: skip


def generating() -> Iterator[Case]:
    """Requests that all wait at the start, generated in 16 bits: TensorRT-LLM 0.17, vLLM 0.6.3 one request at a time.

    Mixtures of experts by the same rules, in groups of their own: TensorRT-LLM 0.17, and SGLang 0.4.6 one request at a time.
    """
    for row in newer_rows():
        found, device = _GENERATED.search(row["notes"]), GPUS.get(row["gpu_type"])
        if row["metric"] != "generation_time" or not found or not device or found[6] not in ("FP16", "BF16"):
            continue
        mixture = MIXTURES.get(found[1])
        spec = mixture or MODELS.get(found[1].removesuffix("-instruct"))
        single = row["system"].startswith("SGLang 0.4.6" if mixture else "vLLM 0.6.3")
        if spec is None or found[4] not in (None, "1") or not (single or row["system"] == "TensorRT-LLM 0.17"):
            continue
        tp, gpus = int(found[2]), int(row["gpus"])
        rollout, prompt, response = Layout(tp=tp, dp=1), int(row["prompt_len"]), int(row["response_len"])
        spec = replace(spec, tied_embeddings=found[1].removesuffix("-instruct") in TIED, max_positions=200_000)
        cache = int(0.9 * (device.memory_bytes - 2 * spec.num_parameters() / tp) - 2e9)
        if cache < 2 * (prompt + response) * spec.kv_bytes_per_token() / min(tp, spec.num_kv_heads):
            continue
        made = Setup(
            spec=spec, layout=Layout(tp=tp, dp=1), device=device, links=_links(device, gpus, Layout(tp=tp, dp=1)), rollout=rollout,
            max_num_seqs=256 if single else 2048, kv_cache_bytes=cache, batch_tokens=8192,
        )  # fmt: skip
        group = f"{row['system'].split()[0]}{' MoE' if mixture else ''}, {row['gpu_type'].split('-')[0]}"
        yield Case(
            group, "generation", float(row["value"]), on_test_side(row),
            f"{row['system']} {spec.name} tp{tp} {row['global_batch']} x ({prompt} + {response})",
            f"{spec.name} {prompt} {response}", f"tp{tp}", generation_of(made, int(row["global_batch"]), prompt, response),
        )  # fmt: skip


@lru_cache
def newer_cases() -> tuple[Case, ...]:
    """Return all cases."""
    return tuple(case for make in (pretraining, mixtures, generating) for case in make())
