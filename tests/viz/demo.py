"""Made-up data of the shapes the session gives, for the tests of the pictures."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from hfsdk.core.first_bad import FirstBad
from hfsdk.core.reward_probe import RewardProbe
from hfsdk.core.sample_outcome import SampleOutcome
from hfsdk.core.trace import Span, Trace

GB = 10**9
START_NS = 1_790_000_000_000_000_000

STEP = (
    ("actor", "generate", "generation", 1.2, (("reshard", 0.10), ("prefill", 0.16), ("decode", 0.90))),
    ("actor", "compute_log_probs", "preparation", 0.30, (("fetch", 0.03), ("forward", 0.26))),
    ("reference", "compute_log_probs", "preparation", 0.26, (("forward", 0.25),)),
    ("critic", "compute_values", "preparation", 0.24, (("forward", 0.22),)),
    ("reward", "compute_scores", "preparation", 0.08, (("reward", 0.07),)),
    ("critic", "update", "learning", 0.62, (("forward", 0.18), ("backward", 0.33), ("optimizer", 0.09))),
    ("actor", "update", "learning", 0.74, (("forward", 0.20), ("backward", 0.40), ("optimizer", 0.11))),
)


def reward_probe(count: int = 32, words: str = "") -> RewardProbe:
    """A reward that follows length, with a sample that hangs, one that raises, two that are not scored and a flat group."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(2, 40, size=count)
    outcomes = [SampleOutcome(score=float(0.1 * n + rng.normal() * 0.5), seconds=float(rng.gamma(3.0, 0.01))) for n in tokens]
    late = {
        "failure": "took too long",
        "message": f"judge took longer than 2 s and was ended{words}",
        "line": "rewards.py:14 in judge",
    }
    for row, one in {
        5: SampleOutcome(seconds=2.0, **late), 12: SampleOutcome(seconds=0.02), 13: SampleOutcome(seconds=0.03),
        21: SampleOutcome(seconds=0.01, failure="raised", message="judge raised ValueError()", line="rewards.py:9 in judge"),
        **{row: SampleOutcome(score=1.0, seconds=0.02) for row in range(24, 28)},
    }.items():  # fmt: skip
        if row < count:
            outcomes[row] = one
    return RewardProbe(
        words or "judge", ["why is the sky blue?"] * count,
        [f"because {words}" + " of the light" * int(n // 4) for n in tokens], outcomes,
        tokens, groups=np.arange(count) // 4, other="older",
        other_outcomes=[SampleOutcome(score=None if one.score is None else one.score + float(rng.normal())) for one in outcomes],
    )  # fmt: skip


def step_trace(
    devices: int = 2, steps: int = 1, running: bool = False, predicted: bool = False, nested: bool = True, seed: int = 0
) -> Trace:
    """PPO steps; with ``running`` the last call has not ended."""
    rng = random.Random(seed)
    spans: list[Span] = []
    now, call_id = 0.0, 0
    calls = [(step, call) for step in range(steps) for call in STEP]
    for k, (step, (role, method, phase, seconds, parts)) in enumerate(calls):
        last = running and k == len(calls) - 1
        shared: dict[str, Any] = {"role": role, "method": method, "phase": phase, "call_id": call_id, "step": step}
        shared |= {"predicted": predicted, "pool": "all"}
        on_cpu_task = role == "reward"
        lengths = [seconds * (0.86 + 0.13 * rng.random()) for _ in range(devices)]
        attrs = {"tokens": 2048, "cpu_s": 1.6 * seconds} if method != "compute_scores" else {}
        start = START_NS + round(now * 1e9)
        spans.append(Span(name=method, start_ns=start, duration_s=None if last else seconds, attrs=attrs, **shared))
        for device in range(devices):
            if on_cpu_task and device:
                continue
            begin = start + round(0.012e9 * rng.random())
            length = lengths[device]
            if nested:
                spans.append(
                    Span(
                        name=method,
                        start_ns=begin,
                        duration_s=None if last else length,
                        device=device,
                        rank=device,
                        **shared,
                    )
                )
            for i, (name, part) in enumerate(parts):
                part_s = part / seconds * length
                open_end = last and i == len(parts) - 1
                numbers = {"bytes": 135_000_000} if name == "reshard" else {"tokens": 1024, "cpu_s": part_s * 1.5}
                parent = method if nested else ""
                spans.append(
                    Span(
                        name=name,
                        start_ns=begin,
                        duration_s=None if open_end else part_s,
                        device=device,
                        rank=device,
                        parent=parent,
                        attrs=numbers,
                        **shared,
                    )
                )
                begin += round(part_s * 1e9)
        now += seconds + 0.02
        call_id += 1
    return Trace.of(spans, "PPO, step 0" if steps == 1 else f"PPO, {steps} steps")


def pools_trace() -> Trace:
    """Two pools: a shadow takes over weights and generates, then pipeline stages wait for each other."""
    spans: list[Span] = []

    def call(call_id: int, role: str, method: str, devices: list[int], pool: str, start_s: float, **parts: float) -> None:
        shared: dict[str, Any] = {"role": role, "method": method, "call_id": call_id, "pool": pool, "phase": "generation"}
        seconds = sum(parts.values())
        begin = START_NS + round(start_s * 1e9)
        spans.append(Span(name=method, start_ns=begin, duration_s=seconds, **shared))
        for device in devices:
            at = begin
            spans.append(Span(name=method, start_ns=at, duration_s=seconds, device=device, rank=device, **shared))
            for name, part in parts.items():
                spans.append(Span(name=name, start_ns=at, duration_s=part, device=device, rank=device, parent=method, **shared))
                at += round(part * 1e9)

    call(0, "actor", "export_weights", [0, 1], "actor", 0.0, fetch=0.2)
    call(1, "actor.rollout", "generate", [2], "actor.rollout", 0.2, sync=0.2, prefill=0.2, decode=0.6)
    call(2, "actor", "update", [0, 1], "actor", 0.7, forward=0.3, wait=0.2, backward=0.5)
    return Trace.of(spans, "two pools")


def shadow_data(behind: int | None = 2) -> dict[str, Any]:
    """An actor whose rollout is on a device of its own; ``None``: its shadow has taken over no weights yet."""
    data = placement_data(1, 4)
    data["title"] = "placement: separation"
    words = "no weights yet" if behind is None else "fresh (3 updates)" if behind == 0 else f"{behind} updates behind"
    actor, critic, reference = data["roles"][:3]
    actor |= {"rollout": None, "elsewhere": {"generate": "actor.rollout"}, "weights": "3 updates"}
    actor["shards"] = [dict(s, device=s["device"], rollout_replica=None) for s in actor["shards"][:2]]
    critic["shards"] = [dict(critic["shards"][0], device=3)]
    shard = dict(actor["shards"][0], device=2, rank=0, tp=0, rollout_replica=0)
    shadow = dict(actor, name="actor.rollout", kind="shadow of actor", train=None, rollout="tp1 pp1 dp1", weights=words)
    shadow |= {"elsewhere": {}, "shadow_of": "actor", "shards": [shard]}
    reference["shards"] = []
    data["roles"] = [actor, critic, reference, shadow]
    pools = {0: "actor+reference", 1: "actor+reference", 2: "actor.rollout", 3: "a pool of a name much too long to be written here"}
    for number, pool in pools.items():
        data["devices"][number]["pool"] = pool
    return data


def placement_data(nodes: int = 1, per_node: int = 2, measured: bool = True) -> dict[str, Any]:
    """Four roles; on more than two devices the critic has the second half."""
    n = nodes * per_node
    tp = min(2, n)
    half = list(range(n // 2, n)) if n > 2 else list(range(n))

    def shards(on: list[int], planned: int, share: float, rollout: bool = False, known: bool = True) -> list[dict[str, Any]]:
        return [
            {
                "device": d, "rank": i, "tp": i % tp, "pp": 0, "dp": i // tp, "rollout_replica": i if rollout else None,
                "planned_bytes": planned, "measured_bytes": round(planned * share) if measured and known else None,
            }
            for i, d in enumerate(on)
        ]  # fmt: skip

    all_devices = list(range(n))
    dp = n // tp
    layout, rollout = f"tp{tp} pp1 dp{dp}", f"tp1 pp1 dp{n}"
    critic_layout = f"tp{tp} pp1 dp{len(half) // tp}"
    return {
        "title": f"placement: {'colocate' if n <= 2 else 'split'}",
        "nodes": [{"name": f"node {i}", "devices": all_devices[i * per_node : (i + 1) * per_node]} for i in range(nodes)],
        "devices": {
            d: {
                "name": "cpu" if n <= 4 else "A100-80GB", "memory_bytes": 8 * GB if n <= 4 else 80 * GB,
                "used_bytes": round(3.1 * GB) if measured else None, "pool": "all" if n <= 2 else ("left", "right")[d in half],
                "pid": 4100 + d if n <= 4 else None,
            }
            for d in all_devices
        },
        "pools": {"all": all_devices},
        "roles": [
            {"name": "actor", "kind": "actor", "model": "SmolLM2-135M", "pool": "all", "train": layout, "rollout": rollout,
             "dtype": "fp32", "state": "loaded", "shards": shards(all_devices, round(1.6 * GB), 0.93, rollout=True)},
            {"name": "critic", "kind": "critic", "model": "SmolLM2-135M", "pool": "all", "train": critic_layout, "rollout": None,
             "dtype": "fp32", "state": "loaded", "shards": shards(half, round(1.1 * GB), 0.97)},
            {"name": "reference", "kind": "reference", "model": "SmolLM2-135M", "pool": "all", "train": layout, "rollout": None,
             "dtype": "fp32", "state": "declared", "shards": shards(all_devices, round(0.27 * GB), 1.0, known=False)},
            {"name": "reward", "kind": "reward", "model": "", "pool": "all", "train": None, "rollout": None,
             "dtype": "", "state": "loaded", "shards": []},
        ],
        "predicted": not measured,
    }  # fmt: skip


def _column(
    name: str, kind: str, dtype: str, state: str, num_bytes: int | None, length: float | None, writer: str
) -> dict[str, Any]:
    fields = {"name": name, "kind": kind, "dtype": dtype, "state": state, "bytes": num_bytes}
    return {**fields, "mean_length": length, "writer": writer}


BATCH: dict[str, Any] = {
    "num_rows": 512,
    "columns": [
        _column("prompt", "ragged", "int32", "ready", 65_536, 24.25, "prompts"),
        _column("response", "ragged", "int32", "ready", 65_000, 31.9, "actor.generate"),
        _column("rollout_log_probs", "ragged", "float32", "ready", 65_000, 31.9, "actor.generate"),
        _column("values", "ragged", "float32", "running", None, None, "critic.compute_values"),
        _column("scores", "value", "float32", "pending", None, None, "reward.compute_scores"),
        _column("costs", "value", "float32", "failed", None, None, "cost.compute_costs"),
        _column("ref_log_probs", "ragged", "float32", "lost", None, None, "reference.compute_log_probs"),
    ],
    "samples": [
        {
            "prompt": "a gripping, if uneven, thriller that",
            "response": " keeps you on the edge of <b>your</b> seat & never lets go",
            "score": 0.8132,
        },
        {"prompt": "the film is", "response": " too long,\nand it knows it", "score": -0.42},
        {"prompt": "with a cast like this", "response": " it could hardly fail ]]> </script><!--", "score": None},
    ],
}


def _role(name: str, model: str | None, train: str | None, rollout: str | None, version: int, state: str) -> dict[str, Any]:
    dtype = "fp32" if model else None
    return {
        "name": name,
        "model": model,
        "train": train,
        "rollout": rollout,
        "dtype": dtype,
        "version": version,
        "state": state,
    }


SESSIONS: list[dict[str, Any]] = [
    {
        "name": "exp7", "devices": "1x2 cpu", "since": "26 Nov 12:44", "roles": ["actor", "reference"], "left": "",
        "run": "Run(17 of 40 steps, running, score 0.021, 1 warning, 0.00299 device-hours)", "attached": "process 77 on node",
        "column_bytes": 6_720,
    },
    {
        "name": "exp8", "devices": "2x8 A100-80GB", "since": "25 Nov 09:00", "roles": [], "run": "", "attached": "",
        "left": "3.2 h unattended of 1 d", "column_bytes": 0,
    },
]  # fmt: skip
SESSION: dict[str, Any] = {
    "name": "session-1",
    "runtime": "ray",
    "devices": 2,
    "state": "open",
    "roles": [
        _role("actor", "tiny", "tp2 pp1 dp1", "tp1 pp1 dp2", 3, "loaded"),
        _role("critic", "tiny", "tp2 pp1 dp1", None, 3, "loaded"),
        _role("reference", "tiny", "tp2 pp1 dp1", None, 0, "declared"),
        _role("reward", None, None, None, 2, "loaded"),
    ],
    "memory": [
        {"device": 0, "used_bytes": 3_100_000_000, "memory_bytes": 8_000_000_000},
        {"device": 1, "used_bytes": None, "memory_bytes": 8_000_000_000},
    ],
    "messages": ["reward: function version 2 replaces version 1"],
}

METRICS = [
    {"loss": 0.1234567, "value_loss": 0.27, "kl": 0.00123, "clip_fraction": 0.031, "grad_norm": 1.87, "tokens": 2048},
    {
        "loss": 0.1134567,
        "value_loss": 0.25,
        "kl": 0.00223,
        "clip_fraction": 0.042,
        "grad_norm": float("nan"),
        "tokens": 2048,
    },
    {"loss": 0.1034567, "kl": 0.00323, "clip_fraction": 0.051, "grad_norm": 1.66, "tokens": 1984},
]


def _call(
    call: str, line: int, state: str, done: int | None, total: int | None, unit: str | None, seconds: float | None
) -> dict[str, Any]:
    fields = {"call": call, "line": f"cell 4, line {line}", "state": state, "done": done, "total": total}
    return {**fields, "unit": unit, "seconds": seconds, "error": None}


PROGRESS = [
    _call("actor.generate", 1, "done", 16384, 16384, "tokens", 3.41),
    _call("reference.compute_log_probs", 2, "done", 16384, 16384, "tokens", 0.12),
    _call("critic.compute_values", 3, "running", 120, 512, "samples", 1.3),
    {
        **_call("cost.compute_costs", 4, "failed", None, None, None, 0.4),
        "error": "RewardFunctionError: returned 3 numbers for 512 samples",
    },
    _call("actor.update", 5, "pending", None, None, None, None),
]


FIRST_BAD = FirstBad(
    kind="advantage", symptom="actor_loss of step 7 jumped to 8.76e+03; it was 1 at most before", step=7, call="session.map",
    role="session", column="advantages", value=-560797.9, usual=3.24, sample=5, token=3,
    text="too long and too su⟦r⟧prising to be missed", snapshot="before step 6", left="the session is where it was", seconds=2.9,
    verdict=(
        "Step 7, session.map: advantages of sample 5, token 3 is -5.61e+05, 3.24 at most otherwise. It is the first bad number: "
        "all that was written before it is finite and of its usual size."
    ),
    code=(
        "run = session.run\nsession.rewind(run.last_good)  # before step 6\nalgorithm, prompts = run.algorithm, run.prompts\n"
        "algorithm.metrics(algorithm.step(session.models, next(prompts)))  # step 6, bit for bit\n"
        "step = algorithm.step(session.models, next(prompts))  # step 7\nstep.batch.take([5])['advantages'][0][3]  # -560798"
    ),
    rows=[
        {"position": i, "token_id": ord(token), "token": token, "old_log_probs": log_prob, "values": value, "advantages": advantage}
        for i, (token, log_prob, value, advantage) in enumerate([
            (" ", -0.09, -0.39, -0.11), ("s", -0.17, -0.4, -0.56), ("u", -1.54, -0.39, -0.42), ("r", -1.02, -0.38, -560797.9),
            ("p", -0.74, -0.38, -0.78), ("r", -0.06, -0.39, float("nan")),
        ])
    ],
).view()  # fmt: skip
"""What is looked for, where it is found."""
