"""The published timings of ``benchmarks/data/published_points.csv`` as cases that ``PerfModel`` can predict.

A case is one measured quantity of one configuration: what was run is read from the columns and from the notes, and a function gives
``PerfModel``'s seconds for it. Configurations that do not say what is needed (layout, lengths, batch) are left out and counted.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from common import ROOT
from engines_of_2024 import DEEPSPEED_CHAT

from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.layout import Layout
from hfsdk.core.spec import ModelSpec
from hfsdk.planner.perf.perf_model import Links, PerfModel, Setup
from hfsdk.planner.perf.setup import EngineTraits

POINTS = ROOT / "benchmarks" / "data" / "published_points.csv"
FIELDS = ("system", "source", "algorithm", "actor_params_b", "critic_params_b", "gpus")
"""What makes a configuration, for the split."""


def llama(name: str, layers: int, hidden: int, mlp: int, heads: int, kv_heads: int = 0, vocab: int = 32000) -> ModelSpec:
    """A model of Llama's architecture."""
    return ModelSpec(
        name=name, num_layers=layers, hidden_size=hidden, mlp_hidden_size=mlp, num_heads=heads, num_kv_heads=kv_heads or heads,
        head_dim=hidden // heads, vocab_size=vocab, max_positions=4096,
    )  # fmt: skip


def gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200) -> ModelSpec:
    """A GPT with an MLP of two matrices of 4 h, which has the weights of a gated one of 8 / 3 h."""
    return replace(llama(name, layers, hidden, round(8 * hidden / 3), heads, vocab=vocab), tied_embeddings=True)


LLAMA = {"7": ModelSpec.preset("llama-7b"), "13": ModelSpec.preset("llama-13b"), "34": ModelSpec.preset("llama-34b"),
         "70": ModelSpec.preset("llama-70b"), "33": llama("llama-33b", 60, 6656, 17920, 52)}  # fmt: skip
"""LLaMA (arXiv 2302.13971), Llama 2 and Code Llama by billions of parameters."""
OPT_350M = gpt("opt-350m", 24, 1024, 16, 50272)
"""OPT (arXiv 2205.01068)."""
MEGATRON = {"22": gpt("megatron-22b", 48, 6144, 64), "175": gpt("gpt3-175b", 96, 12288, 96),
            "530": gpt("turing-530b", 105, 20480, 128), "1000": gpt("megatron-1t", 128, 25600, 160)}  # fmt: skip
"""Table 3 of Korthikanti et al. (arXiv 2205.05198)."""


@dataclass(frozen=True)
class Case:
    """One measured quantity."""

    group: str
    """Machines and system: what one calibration is for."""
    quantity: str
    """``"generation"``, ``"forward"``, ``"train"``, ``"reshard"`` or ``"step"``."""
    measured: float
    """Seconds."""
    test: bool
    """On which side of the split the configuration is."""
    config: str
    workload: str
    """Cases of one workload and quantity differ in their layout."""
    plan: str
    """The layout, which tells it from others of its workload."""
    seconds: Callable[[PerfModel], float]
    switching: str = ""
    """What else PUZZLE could change: whether models are switched in bulk."""


def on_test_side(row: dict[str, str]) -> bool:
    """Return whether a row's configuration is predicted rather than fitted."""
    return int(hashlib.sha256("|".join(row[f] for f in FIELDS).encode()).hexdigest(), 16) % 3 == 0


@lru_cache
def rows() -> tuple[dict[str, str], ...]:
    """Return the rows of the file."""
    with POINTS.open() as file:
        return tuple(csv.DictReader(file))


@lru_cache
def _cluster(gpus: int, device: str) -> ClusterSpec:
    return ClusterSpec.parse(f"{max(1, gpus // 8)}x{min(8, gpus)} {device}")


@lru_cache(maxsize=4096)
def setup(spec: ModelSpec, layout: str, device: str, traits: EngineTraits, **more: object) -> Setup:
    """Describe a model on the first devices of a cluster of eights."""
    filled = Layout.parse(layout)
    cluster = _cluster(-(-filled.size // 8) * 8 if filled.size > 8 else filled.size, device)
    links = Links.of(cluster, range(filled.size), filled)
    return Setup(spec=spec, layout=filled, device=cluster.devices[0], links=links, traits=traits, **more)


def same(count: int, length: int) -> np.ndarray:
    """Return ``count`` equal lengths."""
    return np.full(count, length)


# -- Megatron-LM (arXiv 2205.05198, table 5): training anchors


def megatron() -> Iterator[Case]:
    """Training steps of GPTs on A100s, with full and with selective recompute; selective is attention's scores alone."""
    for row in rows():
        found = re.search(r"TP(\d+) PP(\d+) micro (\d+); (full|seq-par)", row["notes"])
        if row["system"] != "Megatron-LM" or not found:
            continue
        tp, pp, micro = map(int, found.groups()[:3])
        full = found[4] == "full"
        length, batch = int(row["response_len"]), int(row["global_batch"])
        interleave = 3 if row["actor_params_b"] in ("175", "530") else 1  # table 3 of the paper
        traits = EngineTraits(flash_attention=False, sequence_parallel=not full, interleave=interleave)
        made = setup(MEGATRON[row["actor_params_b"]], f"tp{tp} pp{pp} dp1", "A100-80GB", traits, micro_batch_tokens=micro * length,
                     recompute="full" if full else "", distributed=False)  # fmt: skip
        yield Case("Megatron-LM, A100", "train", float(row["value"]), on_test_side(row),
                   f"{row['system']} {row['actor_params_b']}B {row['gpus']} GPUs tp{tp} pp{pp} {'full' if full else 'selective'}",
                   f"{row['actor_params_b']}B", found[4],
                   step_of(made, batch, length))  # fmt: skip


def step_of(made: Setup, num_rows: int, length: int) -> Callable[[PerfModel], float]:
    """An optimizer step over equal rows."""
    return lambda perf: sum(perf.train(made, same(num_rows, length))) + perf.optimizer(made)


# -- PUZZLE (ATC 2024): logs of its artifact

_PUZZLE = re.compile(r"train TP(\d+) PP(\d+) DP(\d+), micro_batch (\d+), generation micro-batch (\d+); bulk_switch=(\w+)")
_SHADOW = re.compile(r"generation layout TP(\d+) PP(\d+) when shadow on")
PUZZLE = EngineTraits(cuda_graphs=False, flash_attention=False, sequence_parallel=False, handover=2.0)
"""Megatron-LM for training and for generation; fp16, no recompute, no flash attention (notes). That sending waits is inferred: with
as many micro-batches as stages generation takes twice as long as with half as many."""
QUANTITIES = {"generation_time": "generation", "inference_time": "forward", "train_time": "train", "reshard_time": "reshard",
              "iteration_time": "step"}  # fmt: skip


def puzzle() -> Iterator[Case]:
    """Generation, forward passes, training and switching of PUZZLE's own runs, on NVLink ("phoenix") and PCIe ("orion")."""
    for row in rows():
        found = _PUZZLE.search(row["notes"])
        if not row["system"].startswith("PUZZLE") or not found:
            continue
        tp, pp, dp, micro, generation_rows = map(int, found.groups()[:5])
        device = "A100-80GB" if row["gpu_type"] == "A100 NVLink" else "A100-80GB-PCIe"
        shadow = _SHADOW.search(row["notes"])
        apart = shadow is not None and shadow.groups() != ("1", "1")
        rollout = Layout(tp=int(shadow[1]), pp=int(shadow[2])) if apart and shadow else Layout(tp=tp, pp=pp)
        traits = replace(PUZZLE, generation_rows=generation_rows)
        actor = LLAMA[row["actor_params_b"]]
        critic = OPT_350M if row["critic_params_b"] == "0.35" else LLAMA[row["critic_params_b"]]
        layout, tokens = f"tp{tp} pp{pp} dp{dp}", int(row["prompt_len"]) + int(row["response_len"])
        made = [
            setup(spec, layout, device, traits, head=head, rollout=rollout, micro_batch_tokens=micro * tokens, max_num_seqs=4096,
                  batch_tokens=int(row["prompt_len"]))
            for spec, head in ((actor, "lm"), (critic, "scalar"))
        ]  # fmt: skip
        sizes = f"{row['actor_params_b']}B/{row['critic_params_b']}B"
        yield Case(
            f"PUZZLE, {'NVLink' if device == 'A100-80GB' else 'PCIe'}", QUANTITIES[row["metric"]], float(row["value"]),
            on_test_side(row),
            f"{row['system']} {sizes} {row['gpus']} GPUs {layout} B{row['global_batch']}",
            f"{sizes}, {row['gpus']} {device}, batch {row['global_batch']}",
            f"{layout}, {micro} rows, generating tp{rollout.tp} pp{rollout.pp}, {generation_rows} rows",
            _puzzle_seconds(QUANTITIES[row["metric"]], made, int(row["global_batch"]) // dp, row,
                            drains=found[6] == "False"), found[6],
        )  # fmt: skip


def _puzzle_seconds(
    quantity: str, made: list[Setup], num_rows: int, row: dict[str, str], *, drains: bool
) -> Callable[[PerfModel], float]:
    """``drains``: whether the pipeline runs empty between one model's pass and the next one's."""
    prompts, responses = same(num_rows, int(row["prompt_len"])), same(num_rows, int(row["response_len"]))
    actor = made[0]

    def train(perf: PerfModel) -> float:
        parts = [sum(perf.train(s, prompts + responses)) + perf.optimizer(s) for s in made]
        return sum(parts) - (0.0 if drains else overlap(perf, made, prompts + responses))

    def generate(perf: PerfModel) -> float:
        return perf.prefill(actor, prompts) + perf.decode(actor, prompts, responses)

    def forward(perf: PerfModel) -> float:
        return 2 * sum(perf.forward(s, prompts + responses) for s in made)

    def step(perf: PerfModel) -> float:
        return generate(perf) + forward(perf) + train(perf)

    parts = {"train": train, "generation": generate, "forward": forward, "step": step}
    return parts.get(quantity, lambda perf: perf.reshard(actor))


def overlap(perf: PerfModel, made: list[Setup], lengths: np.ndarray) -> float:
    """Seconds saved where the second model's micro-batches fill the first one's bubble: the smaller of the two bubbles."""
    bubbles = []
    for one in made:
        micro = one.micro_batch_tokens
        a, b = (sum(perf.train(one, same(n, micro))) for n in (1, 2))
        bubbles.append(a - (b - a))  # a = pp stages, b - a = one stage
    return max(0.0, min(bubbles))


# -- DeepSpeed-Chat as PUZZLE ran it


def deepspeed_chat() -> Iterator[Case]:
    """Generation with the weights already gathered, from the same clusters' logs; of training the micro-batch is not stated."""
    for row in rows():
        if not row["system"].startswith("DeepSpeed-Chat (HE") or row["metric"] != "generation_time":
            continue
        device = "A100-80GB" if row["gpu_type"] == "A100 NVLink" else "A100-80GB-PCIe"
        gpus = int(row["gpus"])
        traits = replace(DEEPSPEED_CHAT.traits, flash_attention=False, fused=False)
        num_rows = int(row["global_batch"]) // gpus
        made = setup(LLAMA[row["actor_params_b"]], f"dp{gpus}", device, traits, rollout=Layout(tp=1), max_num_seqs=4096)
        yield Case(
            f"DeepSpeed-Chat, {'NVLink' if device == 'A100-80GB' else 'PCIe'}", "generation",
            float(row["value"]), on_test_side(row),
            f"DeepSpeed-Chat {row['actor_params_b']}B/{row['critic_params_b']}B {gpus} GPUs",
            f"{row['actor_params_b']}B {device}", "ZeRO-3", generation_of(made, num_rows, 256, 256),
        )  # fmt: skip


def deepspeed_gathers() -> Iterator[Case]:
    """The same runs' gathering of all weights before they generate."""
    for row in rows():
        if not row["system"].startswith("DeepSpeed-Chat (HE") or row["metric"] != "gather_time":
            continue
        device, gpus = "A100-80GB" if row["gpu_type"] == "A100 NVLink" else "A100-80GB-PCIe", int(row["gpus"])
        made = setup(LLAMA[row["actor_params_b"]], f"dp{gpus}", device, DEEPSPEED_CHAT.traits, rollout=Layout(tp=1))
        yield Case(
            f"DeepSpeed-Chat, {'NVLink' if device == 'A100-80GB' else 'PCIe'}", "reshard", float(row["value"]), on_test_side(row),
            f"DeepSpeed-Chat {row['actor_params_b']}B/{row['critic_params_b']}B {gpus} GPUs, gathering",
            f"{row['actor_params_b']}B {device}", "ZeRO-3", _gathered(made),
        )  # fmt: skip


def _gathered(actor: Setup) -> Callable[[PerfModel], float]:
    return lambda perf: perf.gather(actor) + perf.rewrite(actor)


def generation_of(made: Setup, num_rows: int, prompt: int, response: int) -> Callable[[PerfModel], float]:
    """Equal prompts read, and as many equal responses generated."""
    prompts, responses = same(num_rows, prompt), same(num_rows, response)
    return lambda perf: perf.prefill(made, prompts) + perf.decode(made, prompts, responses)


# -- ReaL's heuristic plan: every call tp8 pp=N/8


REAL = EngineTraits(cuda_graphs=False, sequence_parallel=False, fused=False)
"""Norms and the MLP's gate are kernels of PyTorch (``realhf/impl/model/modules/mlp.py`` at 084f975)."""
MINI_BATCHES = 4
"""PPO mini-batches of ReaL's published configurations (the notes leave the number open; its examples use 4)."""


def real_heuristic() -> Iterator[Case]:
    """Iteration times of six calls in a row, all on all devices; recompute on."""
    for row in rows():
        if row["system"] != "ReaL-Heuristic":
            continue
        gpus, num_rows = int(row["gpus"]), int(row["global_batch"])
        pp = gpus // 8
        traits = replace(REAL, generation_rows=max(1, num_rows // pp))
        length = int(row["prompt_len"]) + int(row["response_len"])
        made = [setup(LLAMA[row[f"{who}_params_b"]], f"tp8 pp{pp} dp1", "A100-80GB", traits, head=head, recompute="full",
                      rollout=Layout(tp=8, pp=pp), max_num_seqs=4096, batch_tokens=int(row["prompt_len"]),
                      micro_batch_tokens=num_rows * length // pp)
                for who, head in (("actor", "lm"), ("critic", "scalar"))]  # fmt: skip
        yield Case("ReaL-Heuristic, A100", "step", float(row["value"]), on_test_side(row),
                   f"ReaL-Heuristic {row['actor_params_b']}B/{row['critic_params_b']}B {gpus} GPUs, {row['response_len']} tokens",
                   f"{row['actor_params_b']}B/{row['critic_params_b']}B {row['response_len']}", "heuristic",
                   _six_calls(made, num_rows, int(row["prompt_len"]), int(row["response_len"]), pp))  # fmt: skip


def _six_calls(made: list[Setup], num_rows: int, prompt: int, response: int, pp: int) -> Callable[[PerfModel], float]:
    """A PPO step, one call after the other; the reference is of the actor's size, the reward model of the critic's."""
    length, part = prompt + response, num_rows // MINI_BATCHES
    training = [replace(one, micro_batch_tokens=max(1, part * length // (2 * pp))) for one in made]

    def seconds(perf: PerfModel) -> float:
        actor, critic = made
        prompts, responses = same(num_rows, prompt), same(num_rows, response)
        generation = perf.prefill(actor, prompts) + perf.decode(actor, prompts, responses)
        forwards = perf.forward(actor, same(num_rows, length)) + 2 * perf.forward(critic, same(num_rows, length))
        updates = sum(sum(perf.train(one, same(part, length))) + perf.optimizer(one) for one in training)
        return generation + forwards + MINI_BATCHES * updates

    return seconds


# -- NeMo-RL on H100: GRPO of dense models

_NEMO = re.compile(r"avg total seq len ([\d,]+).*gen GBS ([\d,]+), train GBS ([\d,]+); gen \[TP,PP\]=\[(\d+),(\d+)\]; "
                   r"train \[TP,CP,EP,PP,VPP\]=\[([^\]]+)\]; (\w+)")  # fmt: skip
DENSE = {"8": replace(llama("llama3.1-8b", 32, 4096, 14336, 32, 8, 128256), max_positions=131072),
         "32.8": replace(llama("qwen3-32b", 64, 5120, 25600, 64, 8, 151936), head_dim=128, family="qwen3")}  # fmt: skip


def nemo_rl() -> Iterator[Case]:
    """Iteration times on policy and in BF16: generation, old and reference log-probs, update; rewards are rules.

    Only the mean length is known; lengths are drawn log-normal with sigma 0.6 and cut at the most allowed.
    """
    for row in rows():
        found = _NEMO.search(row["notes"])
        dense = DENSE.get(row["actor_params_b"])
        usable = found and "On policy" in row["notes"] and found[7] == "BF16" and "H100" in row["gpu_type"]
        if not row["system"].startswith("NeMo-RL") or row["metric"] != "iteration_time" or not usable or not dense or not found:
            continue
        axes = [int(x) if x.strip().isdigit() else 0 for x in found[6].split(",")]
        tp, pp = axes[0], axes[-2]
        gpus = int(row["gpus"])
        if not tp or not pp or gpus % (tp * pp) or (len(axes) == 5 and axes[1] != 1):
            continue
        mean, batch = (int(found[i].replace(",", "")) for i in (1, 2))
        yield Case("NeMo-RL, H100", "step", float(row["value"]), on_test_side(row),
                   f"{row['system']} {dense.name} {gpus} GPUs tp{tp} pp{pp}, rollout tp{found[4]}",
                   f"{dense.name} {gpus}", found[6],
                   _grpo(dense, gpus, tp, pp, int(found[4]), mean, batch))  # fmt: skip


def _grpo(spec: ModelSpec, gpus: int, tp: int, pp: int, rollout_tp: int, mean: int, batch: int) -> Callable[[PerfModel], float]:
    made = setup(spec, f"tp{tp} pp{pp} dp{gpus // (tp * pp)}", "H100", EngineTraits(), distributed=True,
                 rollout=Layout(tp=rollout_tp), max_num_seqs=1024, kv_cache_bytes=40 * 10**9, micro_batch_tokens=4096)  # fmt: skip
    draw = np.random.default_rng(0).lognormal(0.0, 0.6, batch)
    lengths = np.maximum(2, draw / draw.mean() * mean).astype(np.int64)

    def seconds(perf: PerfModel) -> float:
        mine = lengths[:: gpus // rollout_tp]
        prompts = np.minimum(100, mine // 2)
        shard = lengths[:: gpus // (tp * pp)]
        generation = perf.reshard(made) + perf.prefill(made, prompts) + perf.decode(made, prompts, mine - prompts)
        steps = [shard[k::4] for k in range(4)]
        train = sum(sum(perf.train(made, part)) + perf.optimizer(made) for part in steps)
        return generation + 2 * perf.forward(made, shard) + train

    return seconds


CASES = (puzzle, deepspeed_chat, deepspeed_gathers, real_heuristic, megatron, nemo_rl)


@lru_cache
def cases() -> tuple[Case, ...]:
    """Return all cases."""
    return tuple(case for make in CASES for case in make())
