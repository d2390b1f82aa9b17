"""LoRA beside training all weights: memory of a session, what moves to the rollout, and what adapters cost while it generates.

Targets, for SmolLM2-135M-instruct and adapters of rank 16 on all linear layers, on one device:

a. PPO's actor, critic and reference, in fp32: model state (weights, gradients, optimizer and the rollout's copy, by the census of
   storages, at its most in a step) at most 0.35 of what training all weights holds; the worker's peak memory (PSS) at most 0.7 of
   it with equal settings, and at most 0.45 where LoRA computes activations again (``recompute="full"``). bf16 beside it, without
   a target.
b. mode ``packed``, fp32: what an update moves to the rollout, at most 0.05 of the bytes and 0.1 of the seconds of all weights.
c. generating 32 x (16 + 16) tokens with an adapter in use: at most 1.25 of the seconds without LoRA.

What is compared stands in the same run, in sessions one after the other (a) or in turns (b, c).

Uses one worker, which has a thread for each core, besides this process.

    python benchmarks/lora.py --check          8 minutes, far more without bf16 instructions; --only memory,sync,rollout
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from common import PeakMemory, Report, Stopwatch, parser, say, short, table

import hfsdk as hf

MODEL, RANK = "smollm2-135m-instruct", 16
STATE, PEAK, PEAK_RECOMPUTED, BYTES, SECONDS, ROLLOUT = 0.35, 0.7, 0.45, 0.05, 0.1, 1.25
STATE_PARTS = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "rollout_bytes")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 16, 16
STEP_PROMPTS, STEP_TOKENS = 8, 64
"""Of the step in which memory is looked at: 8 x (16 + 64) tokens, one micro-batch."""
ROUNDS = 5
UPDATES = 15
"""That take milliseconds each, so that one that the system disturbs says nothing."""


def pid(rank: Any) -> int:
    """Runs on a worker: its process."""
    return os.getpid()


def length(completions: Sequence[str], **columns: Any) -> list[float]:
    """Score a response by its length."""
    return [float(len(text) % 7) for text in completions]


def token_ids(count: int) -> list[list[int]]:
    """Return prompts of as many tokens each."""
    return [[1 + (7 * i + j) % 1000 for j in range(PROMPT_TOKENS)] for i in range(count)]


def declared(session: Any, lora: hf.LoRA | None, dtype: str, recompute: str) -> SimpleNamespace:
    """Declare and place PPO's roles."""
    options: dict[str, Any] = {"dtype": dtype, "lora": lora, "optimizer": hf.AdamW(lr=1e-5), "recompute": recompute}
    actor = session.actor(MODEL, **options)
    critic = session.critic(MODEL, **options)
    reference, reward = session.reference(actor), session.reward(length)
    prompts = session.prompts(token_ids(STEP_PROMPTS), batch_size=STEP_PROMPTS)
    session.place("colocate")
    return SimpleNamespace(actor=actor, critic=critic, reference=reference, reward=reward, prompts=prompts)


def step(roles: SimpleNamespace) -> None:
    """Take a step of PPO whose responses all have the same length."""
    from hfsdk.algorithms import ppo

    batch = roles.actor.generate(roles.prompts[0], max_new_tokens=STEP_TOKENS, ignore_eos=True)
    batch = roles.reference.compute_log_probs(roles.actor.compute_log_probs(roles.reward.compute_scores(batch)))
    batch = ppo.advantages(roles.critic.compute_values(batch))
    roles.critic.update(batch, ppo.ValueLoss(), mini_batches=2).wait()
    roles.actor.update(batch, ppo.PolicyLoss(), mini_batches=2).wait()


def memory_of(lora: hf.LoRA | None, dtype: str, recompute: str) -> dict[str, float]:
    """Return the most bytes of model state, and the worker's peak memory, over two steps of PPO."""
    with hf.Session(devices=1, wait=True) as session:
        roles = declared(session, lora, dtype, recompute)
        watch = PeakMemory(roles.actor.run(pid)[0], 0.05, most_busy=0.7)  # no seconds are measured here
        watch.start()
        for _ in range(2):
            step(roles)
        peak, calls = watch.stop(), session.memory.to_pandas()
        return {"state": float(calls[list(STATE_PARTS)].sum(axis=1).max()), "peak": float(peak)}


def measure_memory(report: Report) -> None:
    """Part a."""
    lora = hf.LoRA(rank=RANK)
    kinds = {"all weights": (None, ""), "LoRA": (lora, ""), "LoRA, recomputed": (lora, "full"), "all, recomputed": (None, "full")}
    rows = []
    for dtype in ("fp32", "bf16"):
        found = {}
        for name, (adapters, recompute) in kinds.items():
            found[name] = memory_of(adapters, dtype, recompute)
            say(f"a. {dtype} {name}: state {found[name]['state'] / 1e9:.2f} GB, peak {found[name]['peak'] / 1e9:.2f} GB")
        full, mine, recomputed = (found[name] for name in ("all weights", "LoRA", "LoRA, recomputed"))
        target = dtype == "fp32"
        rows += [(dtype, name, f"{f['state'] / 1e9:.2f} GB", f"{f['peak'] / 1e9:.2f} GB") for name, f in found.items()]
        report.add(f"a. {dtype}: model state / all weights", mine["state"] / full["state"], at_most=STATE if target else None)
        report.add(f"a. {dtype}: peak / all weights", mine["peak"] / full["peak"], at_most=PEAK if target else None)
        report.add(
            f"a. {dtype}: peak, recomputed / all weights",
            recomputed["peak"] / full["peak"],
            at_most=PEAK_RECOMPUTED if target else None,
        )
        report.details[f"memory {dtype}"] = found
    say(table(("dtype", "trained", "model state", "peak of the worker"), rows))


def learn(actor: Any, batch: Any) -> None:
    """Take an optimizer step, so that the rollout's weights are old."""
    from hfsdk.algorithms import CrossEntropy

    actor.update(batch, CrossEntropy()).wait()


def measure_sync(report: Report) -> None:
    """Part b."""
    figures: dict[str, dict[str, list[float]]] = {}
    for name, lora in (("all weights", None), ("LoRA", hf.LoRA(rank=RANK))):
        with hf.Session(devices=1, wait=True) as session:
            actor = session.actor(MODEL, lora=lora, optimizer=hf.AdamW(lr=1e-6), dtype="fp32")
            session.place("colocate")
            prompts = session.prompts(token_ids(1), batch_size=1)
            batch = actor.generate(prompts[0], max_new_tokens=4, ignore_eos=True)
            seconds, moved = [], []
            for _ in range(UPDATES):
                learn(actor, batch)
                batch = actor.generate(prompts[0], max_new_tokens=4, ignore_eos=True)
                batch.table()
                spans = session.trace.to_pandas()
                last = (
                    spans[spans["name"].eq("reshard")].iloc[-1] if "name" in spans else spans[spans["span"].eq("reshard")].iloc[-1]
                )
                seconds.append(float(last["duration_s"]))
                moved.append(float(sum(rank.bytes_received + rank.bytes_copied for rank in actor.last_reshard.ranks)))
            figures[name] = {"seconds": seconds, "bytes": moved}
            say(f"b. {name}: {moved[-1] / 1e6:.2f} MB in {short(statistics.median(seconds))} s")
    full, mine = figures["all weights"], figures["LoRA"]
    report.add("b. bytes of an update / all weights", mine["bytes"][-1] / full["bytes"][-1], at_most=BYTES)
    ratio = statistics.median(mine["seconds"]) / statistics.median(full["seconds"])
    report.add("b. seconds of an update / all weights", ratio, at_most=SECONDS)
    report.details["sync"] = figures


def measure_rollout(report: Report) -> None:
    """Part c."""
    times: dict[str, list[float]] = {"no LoRA": [], "LoRA": []}
    with hf.Session(devices=1, wait=True) as session:
        plain = session.actor(MODEL, name="plain", dtype="fp32")
        adapted = session.actor(MODEL, name="adapted", lora=hf.LoRA(rank=RANK), dtype="fp32")
        session.place("colocate")
        prompts = session.prompts(token_ids(PROMPTS), batch_size=PROMPTS)
        for number in range(ROUNDS + 1):
            for name, actor in (("no LoRA", plain), ("LoRA", adapted)):
                watch = Stopwatch()
                with watch("generate"):
                    actor.generate(prompts[0], max_new_tokens=NEW_TOKENS, ignore_eos=True).table()
                if number:  # the first round loads and moves
                    times[name].append(watch.seconds["generate"][-1])
    for name, seconds in times.items():
        say(f"c. {name}: " + " ".join(f"{s:.2f}" for s in seconds) + " s")
    ratio = statistics.median(a / b for a, b in zip(times["LoRA"], times["no LoRA"], strict=True))
    report.add("c. generating with an adapter / without", ratio, at_most=ROLLOUT)
    report.details["rollout"] = times


PARTS = {"memory": measure_memory, "sync": measure_sync, "rollout": measure_rollout}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    made = parser(__doc__)
    made.add_argument("--only", default=",".join(PARTS), help="memory, sync, rollout, or some with commas between")
    asked = made.parse_args(arguments)
    report = Report("lora", "one worker with a thread for each core")
    for part in asked.only.split(","):
        PARTS[part](report)
    return report.finish(asked)


if __name__ == "__main__":
    sys.exit(main())
