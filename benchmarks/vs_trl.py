"""The same work by hfsdk and by TRL, in turns: PPO and GRPO of SmolLM2-135M, 32 x (16 + 64) tokens, two threads, on CPU.

Targets, each for PPO and GRPO, seconds of a step (medians of both systems' steps):

a. full fine-tuning, fp32: hfsdk at most 0.9 of TRL.
b. bf16, full and LoRA: hfsdk at most 0.5 of TRL's fp32.
c. LoRA of rank 16 on all linears: hfsdk at most 0.8 of TRL + peft, in the same dtype.
d. Memory in every case: hfsdk at most TRL's (summed PSS of all processes at its peak during a step).

The work: one model folder, the same prompts of exactly 16 tokens, exactly 64 new ones at temperature 1, old log-probs, a frozen
reference, one epoch of two mini-batches (GRPO: 4 prompts, 8 responses each), AdamW at one learning rate, the same reward; PPO's
critic is the model's body with a scalar head, of LoRA with adapters. PPO's old log-probs are those of generation in both, GRPO's
are computed by another pass in both (TRL does so where there are two mini-batches). No activations are recomputed, as asked for in
both; `--recompute` asks both for it (TRL's `gradient_checkpointing`, its default, and hfsdk's `recompute="full"`). TRL generates by
transformers and with bf16 computes in mixed precision, which are its defaults on processors.

PPO is TRL 1.12's (`trl.experimental.ppo`; later versions have none), GRPO TRL 1.16's. Each lives in an environment of its own
(trl_environment.py) with the torch and transformers of this one; `--trl-python` gives another for both. Counts of response
tokens and of optimizer steps are compared at every step.

Each system runs in processes of its own, hfsdk's session on one device of two threads and TRL as one process of two threads, one
after the other, in turned order every round. A process takes one step that is not counted, `--steps` that are, and one more whose
memory is watched. Seconds mean something on a quiet machine alone: the load is printed beside them, and hfsdk's workers have
the low priority that Ray gives its workers, so that whatever else runs slows them alone. Processor seconds, reported without a
target, say more elsewhere.

    python benchmarks/vs_trl.py --check                  about three hours; one with --rounds 1 --steps 1
    python benchmarks/vs_trl.py --only ppo-lora grpo-fp32-full
    python benchmarks/vs_trl.py --smoke                  `tiny`, a few tokens: whether it runs; nothing is judged
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common import PeakMemory, Report, parser, say, table
from trl_environment import child_environment, trl_python

FULL_RATIO, BF16_RATIO, LORA_RATIO, MEMORY_RATIO = 0.9, 0.5, 0.8, 1.0
TRL = {"ppo": "trl==1.12.0", "grpo": "trl==1.16.0"}
THREADS = 2
STAGES = ("generate", "passes", "update")
"""Generation (of hfsdk: with the weights' way to the engine); passes without a gradient; the update and all else."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    algorithm: str
    dtype: str
    method: str
    """``"full"`` or ``"lora"``."""

    @property
    def name(self) -> str:
        """E.g. ``ppo-fp32-full``."""
        return f"{self.algorithm}-{self.dtype}-{self.method}"


CASES = tuple(
    Case(algorithm=algorithm, dtype=dtype, method=method)
    for algorithm in TRL for method in ("full", "lora") for dtype in ("fp32", "bf16")
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """What both systems do in a step."""

    model: str = "smollm2-135m-instruct"
    rows: int = 32
    """Responses of a step."""
    copies: int = 8
    """Of them to each prompt, in GRPO."""
    prompt_tokens: int = 16
    new_tokens: int = 64
    mini_batches: int = 2
    lr: float = 1e-5
    rank: int = 16
    recompute: bool = False


SMOKE = Work(model="tiny", rows=4, copies=2, prompt_tokens=8, new_tokens=4)


@dataclass
class Side:
    """What one system measured of a case."""

    steps: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each counted step, of its stages, and of processors (``cpu``)."""
    peak_bytes: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)

    def seconds(self, stage: str = "seconds") -> float:
        """Return the median over steps."""
        return statistics.median(step[stage] for step in self.steps)


# -- hfsdk's side


def length(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward of no meaning and no cost: the same as trl_work.py's."""
    return [len(text) / 100 for text in completions]


def run_hfsdk(config: Mapping[str, Any]) -> None:
    """Child: take steps and print each."""
    import hfsdk as hf
    from hfsdk.engine.ray.runtime import RayRuntime

    rank, ppo = config["rank"], config["algorithm"] == "ppo"
    options: dict[str, Any] = {
        "dtype": config["dtype"], "recompute": "full" if config["recompute"] else "", "optimizer": hf.AdamW(lr=config["lr"]),
        "lora": hf.LoRA(rank=rank, alpha=2 * rank) if rank else None,
    }  # fmt: skip
    with hf.Session(runtime=RayRuntime(1, num_threads=config["threads"])) as session:
        actor = session.actor(config["model"], **options)
        if ppo:
            session.critic(config["model"], **options)
        session.reference(actor)
        session.reward(length)
        copies = 1 if ppo else config["copies"]
        prompts = session.prompts(config["prompts"], batch_size=config["rows"] // copies, shuffle=False)
        session.place("colocate")
        for _ in range(config["steps"]):
            took = one_step(session, next(prompts), config, copies)
            print("reply", json.dumps(took), flush=True)


def one_step(session: Any, prompts: Any, config: Mapping[str, Any], copies: int) -> dict[str, float]:
    """Take a step call by call, waiting for each."""
    from hfsdk.algorithms import grpo, ppo

    models, cpu_started, started = session.models, cpu_seconds(), time.perf_counter()
    batch = models.actor.generate(prompts, max_new_tokens=config["new_tokens"], ignore_eos=True, n=copies).wait()
    generated = time.perf_counter()
    if config["algorithm"] == "ppo":
        batch = models.reference.compute_log_probs(batch.alias("old_log_probs", "rollout_log_probs"))
        batch = models.critic.compute_values(batch).wait()
    else:
        batch = models.reference.compute_log_probs(models.actor.compute_log_probs(batch)).wait()
    passed = time.perf_counter()
    batch = models.reward.compute_scores(batch)
    mini_batches = config["mini_batches"]
    if config["algorithm"] == "ppo":
        batch = ppo.advantages(batch, kl_coef=0.05)
        models.critic.update(batch, ppo.ValueLoss(), epochs=1, mini_batches=mini_batches).wait()
        loss = ppo.PolicyLoss()
    else:
        batch, loss = grpo.advantages(batch), ppo.PolicyLoss(kl_coef=0.04, kl="k3", aggregation="sequence_mean")
    rows = models.actor.update(batch, loss, epochs=1, mini_batches=mini_batches).wait()
    ended = time.perf_counter()
    return {
        "seconds": ended - started, "generate": generated - started, "passes": passed - generated, "update": ended - passed,
        "cpu": cpu_seconds() - cpu_started, "tokens": int(batch["response"].lengths.sum()), "updates": len(rows),
    }  # fmt: skip


def cpu_seconds() -> float:
    """Return what this process and all it started have used of processors."""
    import psutil

    here, used = psutil.Process(), 0.0
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


# -- both in turns


def prompts_of(work: Work, count: int) -> list[str]:
    """Return beginnings of reviews that are exactly so many tokens, and the same ones when they are read again."""
    from transformers import AutoTokenizer

    from hfsdk.data import movie_reviews

    tokenizer, found = AutoTokenizer.from_pretrained(work.model), []
    for review in movie_reviews()["text"]:
        ids = tokenizer(review)["input_ids"][: work.prompt_tokens]
        text = tokenizer.decode(ids)
        if len(ids) == work.prompt_tokens and tokenizer(text)["input_ids"] == ids:
            found.append(text)
        if len(found) == count:
            break
    return found


def config_of(case: Case, work: Work, prompts: Sequence[str], steps: int) -> dict[str, Any]:
    """Return what a process of either system is told."""
    rank = work.rank if case.method == "lora" else 0
    return {**asdict(work), **asdict(case), "rank": rank, "prompts": list(prompts), "steps": steps, "threads": THREADS}


def measure(command: Sequence[str | Path], environment: Mapping[str, str], steps: int, side: Side, work: Work) -> None:
    """Run a process that takes a warm-up step, ``steps`` that count, and one more whose memory is watched.

    Raises:
        RuntimeError: the process failed, or did other work.
    """
    with tempfile.TemporaryFile("w+") as log:
        told = {"stdout": subprocess.PIPE, "stderr": log, "text": True, "env": dict(environment)}
        with subprocess.Popen([*map(str, command)], **told) as process:
            memory, replies = PeakMemory(process.pid, every_s=0.1), []
            for line in process.stdout or ():
                if line.startswith("reply "):
                    replies.append(json.loads(line.removeprefix("reply ")))
                    if len(replies) == steps + 1:
                        memory.start()
        if process.returncode or len(replies) != steps + 2:
            log.seek(0)
            raise RuntimeError(f"{command[1]} failed:\n{log.read()[-3000:]}")
    peak = memory.stop()
    for reply in replies:
        done = reply["tokens"], reply["updates"]
        if done != (work.rows * work.new_tokens, work.mini_batches):
            raise RuntimeError(f"{command[1]} did other work: {done[0]} response tokens, {done[1]} optimizer steps in a step")
    side.steps += replies[1:-1]
    if peak > side.peak_bytes:
        side.peak_bytes, side.at_peak = peak, memory.at_peak


def run_case(case: Case, work: Work, arguments: argparse.Namespace) -> dict[str, Side]:
    """Run both systems in turns."""
    sides = {"hfsdk": Side(), "TRL": Side()}
    python = Path(arguments.trl_python) if arguments.trl_python else trl_python(TRL[case.algorithm])
    steps = arguments.steps + 2
    with tempfile.TemporaryDirectory(prefix="hfsdk-vs-trl-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(config_of(case, work, prompts_of(work, work.rows * steps), steps)))
        here = Path(__file__)
        commands = {
            "hfsdk": ([sys.executable, here, "--part", config], dict(os.environ)),
            "TRL": ([python, here.with_name("trl_work.py"), "--config", config], child_environment(THREADS)),
        }
        for number in range(arguments.rounds):
            for name in sorted(sides, reverse=number % 2 == 1):
                measure(*commands[name], arguments.steps, sides[name], work)
                last = sides[name].steps[-1]
                stages = ", ".join(f"{stage} {last[stage]:.2f}" for stage in (*STAGES, "cpu"))
                say(f"{case.name}, {number + 1}, {name}: {last['seconds']:.2f} s ({stages}), load {load():.1f}")
    return sides


def load() -> float:
    """Return how many processes want a processor, a mean over the last minute; a measurement wants less than there are."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def judge(report: Report, runs: Mapping[Case, Mapping[str, Side]]) -> None:
    """Add every case's figures; bf16 is judged against TRL's fp32 where that was measured too."""
    for case, sides in runs.items():
        ours, theirs = sides["hfsdk"], sides["TRL"]
        for name, side in sides.items():
            report.add(f"{case.name}, {name}", side.seconds(), "s")
        same = {"fp32-full": FULL_RATIO, "bf16-full": None}.get(f"{case.dtype}-{case.method}", LORA_RATIO)
        report.add(f"{case.name}, hfsdk / TRL", ours.seconds() / theirs.seconds(), at_most=same)
        report.add(f"{case.name}, hfsdk / TRL, processor seconds", ours.seconds("cpu") / theirs.seconds("cpu"))
        plain = runs.get(replace(case, dtype="fp32"))
        if case.dtype == "bf16" and plain:
            report.add(f"{case.name}, hfsdk / TRL's fp32", ours.seconds() / plain["TRL"].seconds(), at_most=BF16_RATIO)
        for name, side in sides.items():
            report.add(f"{case.name}, {name}, memory", side.peak_bytes / 1e9, "GB")
        report.add(f"{case.name}, memory, hfsdk / TRL", ours.peak_bytes / theirs.peak_bytes, at_most=MEMORY_RATIO)


def by_stage(runs: Mapping[Case, Mapping[str, Side]]) -> str:
    """Return the medians by stage as text."""
    rows = [
        [case.name, name, *(f"{side.seconds(stage):.2f}" for stage in (*STAGES, "seconds", "cpu")), f"{side.peak_bytes / 1e9:.2f}"]
        for case, sides in runs.items() for name, side in sides.items()
    ]  # fmt: skip
    return table(("case", "system", *(f"{stage} (s)" for stage in STAGES), "step (s)", "processors (s)", "memory (GB)"), rows)


def chosen(words: Sequence[str]) -> list[Case]:
    """Return the cases whose names have all parts of one of some words, e.g. ``ppo-lora``; all without a word."""
    return [case for case in CASES if not words or any(set(word.split("-")) <= set(case.name.split("-")) for word in words)]


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    names = ", ".join(case.name for case in CASES)
    made.add_argument("--only", nargs="+", default=[], metavar="CASE", help=f"of {names}, or parts of these")
    made.add_argument("--rounds", type=int, default=2, help="processes of each system and case")
    made.add_argument("--steps", type=int, default=2, help="steps of each process that count")
    made.add_argument("--recompute", action="store_true", help="ask both to compute activations again in the backward pass")
    made.add_argument("--smoke", action="store_true", help="tiny sizes; nothing is judged")
    made.add_argument("--trl-python", metavar="FILE", help="the Python of an environment that has TRL")
    made.add_argument("--part", metavar="FILE", help=argparse.SUPPRESS)
    found = made.parse_args(given)
    words = {part for case in CASES for part in case.name.split("-")}
    for word in found.only:
        if not set(word.split("-")) <= words:
            made.error(f"--only takes cases or parts of them ({', '.join(sorted(words))}); got {word}")
    return found


def main() -> int:
    arguments = parse()
    if arguments.part:
        run_hfsdk(json.loads(Path(arguments.part).read_text()))
        return 0
    from hfsdk.assets import model_folder

    work = replace(SMOKE if arguments.smoke else Work(), recompute=arguments.recompute)
    if arguments.smoke:
        arguments.rounds = arguments.steps = 1
    work = replace(work, model=str(model_folder(work.model)))
    report = Report("vs_trl", f"hfsdk: one worker of {THREADS} threads; TRL: one process of {THREADS}; one after the other")
    runs = {case: run_case(case, work, arguments) for case in chosen(arguments.only)}
    say("\n" + by_stage(runs))
    report.details["runs"] = {case.name: {name: asdict(side) for name, side in sides.items()} for case, sides in runs.items()}
    report.details |= {"trl": TRL, "work": asdict(replace(work, model=Path(work.model).name))}
    if not arguments.smoke:
        judge(report, runs)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
