"""What hfsdk costs beside the engines: start-up, a call, memory, rollout. All on CPU; quiet machine, two cores.

Targets:

a. a cold kernel (fresh Python): Session(devices=2) on `tiny`: first generated text at most 20 s after the interpreter's
   start, first finished PPO step at most 40 s; a warm step (32 prompts, 32 new tokens) at most 3 s.
b. a call carrying 256 x 512 tokens in six float32 columns: from the call until 4 workers have mapped all six, read each once and
   returned its sum: at most 9 ms (median of 30). Column bytes through the controller: 0.
c. SmolLM2-135M on one device, fp32: 32 prompts of 16 tokens, exactly 64 out, 1 epoch, 2 mini-batches, actor + critic + reference,
   old log-probs from the rollout: at most 12 GB summed PSS over the session's processes during the step; rollout at most 15 %
   slower than bare, unpatched vLLM on the same work, measured in turns.

Uses: a: 2 workers of one thread; b: 4 workers of one thread; c: 1 worker of two threads, and processes with bare vLLM of two
threads, which work in turn with it. Each part runs in a fresh process of its own.

    python benchmarks/overhead.py --check                about 5 minutes; --only a,b,c
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import PeakMemory, Report, Stopwatch, parser, say, short, table

from hfsdk.session.parts import parts_of

TEXT_S, STEP_S, WARM_S = 20.0, 40.0, 3.0
CALL_MS, ROWS, TOKENS, COLUMNS, CALLS = 9.0, 256, 512, 6, 30
PSS_GB, ROLLOUT_RATIO = 12.0, 1.15
MODEL, NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS, KV_BYTES, MODEL_LEN = "smollm2-135m-instruct", 32, 16, 64, 256 * 2**20, 2048


# -- processes of this file, driven by lines of JSON


class Peer:
    """``python overhead.py --part NAME`` in a process of its own: ``ask("command")`` returns its reply."""

    def __init__(self, part: str, **environment: str) -> None:
        self.started = time.time()
        command = [sys.executable, str(Path(__file__)), "--part", part, "--started", repr(self.started)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and wait for its reply."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("reply "):
                reply: dict[str, Any] = json.loads(line.removeprefix("reply "))
                return reply
        raise RuntimeError(f"the process of part {command!r} ended with code {self.process.wait()}; its messages are above")

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def serve(commands: dict[str, Any]) -> None:
    """Answer the commands that come in, until there are no more."""
    for line in sys.stdin:
        print("reply", json.dumps(commands[line.strip()]()), flush=True)


# -- a: a cold kernel


def cold_kernel(started: float) -> None:
    """Child: from the interpreter's start to a warm step."""
    import hfsdk as hf
    from hfsdk.data import movie_reviews

    found: dict[str, Any] = {"import": time.time() - started}
    with hf.Session(devices=2) as session:
        found["session"] = time.time() - started
        actor = session.actor("tiny", rollout="tp1")
        session.critic("tiny")
        session.reference(actor)
        session.reward(length)
        prompts = session.prompts(movie_reviews(), batch_size=32, max_prompt_tokens=32)
        found["declared"] = time.time() - started
        actor.generate(prompts[0], max_new_tokens=32).text()
        found["first text"] = time.time() - started
        algorithm = hf.PPO(max_new_tokens=32)
        found["steps"] = []
        for _ in range(11):
            begun = time.perf_counter()
            algorithm.metrics(algorithm.step(session.models, next(prompts)))
            found["steps"].append(time.perf_counter() - begun)
            found.setdefault("first step", time.time() - started)
        found["calls"] = {name: times[-1] for name, times in step_by_step(session, next(prompts), 32).seconds.items()}
    serve({"report": lambda: found})


def length(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward of no meaning and no cost."""
    return [len(text) / 32 for text in completions]


def step_by_step(session: Any, prompts: Any, new_tokens: int, *, exact: bool = False) -> Stopwatch:
    """Take one PPO step, waiting for every call; ``exact``: every response as long as allowed, old log-probs from the rollout."""
    from hfsdk.algorithms import ppo

    watch, models = Stopwatch(), session.models
    with watch("generate"):
        batch = models.actor.generate(prompts, max_new_tokens=new_tokens, ignore_eos=exact).wait()
    if exact:
        batch = batch.alias("old_log_probs", "rollout_log_probs")
    else:
        with watch("old log-probs"):
            batch = models.actor.compute_log_probs(batch).wait()
    with watch("reference log-probs"):
        batch = models.reference.compute_log_probs(batch).wait()
    with watch("values"):
        batch = models.critic.compute_values(batch).wait()
    with watch("scores"):
        batch = models.reward.compute_scores(batch).wait()
    with watch("advantages"):
        batch = ppo.advantages(batch).wait()
    with watch("update critic"):
        models.critic.update(batch, ppo.ValueLoss(), epochs=1, mini_batches=2).wait()
    with watch("update actor"):
        models.actor.update(batch, ppo.PolicyLoss(), epochs=1, mini_batches=2).wait()
    return watch


def measure_cold(report: Report) -> None:
    peer = Peer("cold")
    found = peer.ask("report")
    peer.close()
    report.details["a"] = found
    warm = statistics.median(found["steps"][1:])
    marks = ", ".join(f"{name} {found[name]:.1f} s" for name in ("import", "session", "declared", "first text", "first step"))
    say(f"a. since the interpreter's start: {marks}")
    say("   steps: " + " ".join(f"{seconds:.2f}" for seconds in found["steps"]) + " s")
    say("   one step call by call: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found["calls"].items()))
    report.add("a. cold kernel to first text", found["first text"], "s", at_most=TEXT_S)
    report.add("a. cold kernel to first PPO step", found["first step"], "s", at_most=STEP_S)
    report.add("a. warm step, median of 10", warm, "s", at_most=WARM_S)


# -- b: a call


def one_call(started: float) -> None:
    """Child: six columns written by the workers are read by a function on all of them.

    What returns its sum does so in the call's own answer, by the message that a handle's ``call`` sends (a primitive that writes
    nothing has no result that ``call`` would give back). Beside it: a primitive that writes a column, which is stored.
    """
    import numpy as np
    import psutil

    import hfsdk as hf
    from hfsdk.core.arguments import OwnPrimitive
    from hfsdk.core.functions import Shipped
    from hfsdk.core.methods import CALL
    from hfsdk.engine.calls import queries as q
    from hfsdk.engine.calls.messages import Submit

    names = [f"column{i}" for i in range(COLUMNS)]

    @hf.primitive(reads=["prompt"], writes=names, protocol=hf.protocols.DP)
    def write(model: Any, rows: Any) -> dict[str, Any]:
        lengths = rows["prompt"].lengths
        flat = np.full(int(lengths.sum()), 0.5, dtype=np.float32)
        return {name: hf.Ragged.from_lengths(flat + i, lengths) for i, name in enumerate(names)}

    def total(model: Any, rows: Any) -> float:
        return sum(float(rows[name].flat.sum()) for name in rows)

    @hf.primitive(reads=names, writes=["total"], protocol=hf.protocols.DP)
    def write_total(model: Any, rows: Any) -> dict[str, Any]:
        return {"total": np.full(rows.num_rows, sum(float(rows[name].flat.sum()) for name in rows))}

    with hf.Session(devices=4) as session:
        client, critic = parts_of(session).client, session.critic("tiny", train="dp4")
        batch = critic.call(write, session.batch(prompt=[[1] * TOKENS] * ROWS)).wait()

        def returned() -> list[float]:
            inputs, shipped = batch.need(names, "total"), Shipped.of(total)
            method = replace(CALL, writes=(), protocol=hf.protocols.DP)
            lease = client.submit(Submit.of("critic", method, OwnPrimitive(function=shipped), inputs, ROWS))
            client.wait([lease.call_id], None)
            return list(client.result(lease.call_id))

        sums = returned()
        session.reward(length)
        session.models.reward.compute_scores(session.batch(prompt=[[1]], response=[[1]])).wait()  # every process is up now
        before, sent = client.send(q.ControllerBytes()), psutil.net_io_counters(pernic=True)["lo"].bytes_sent
        found: dict[str, Any] = {"ms": milliseconds(returned)}
        found["controller_bytes"] = client.send(q.ControllerBytes()) - before
        found["loopback_bytes_per_call"] = (psutil.net_io_counters(pernic=True)["lo"].bytes_sent - sent) / CALLS
        found["ms_writing"] = milliseconds(lambda: critic.call(write_total, batch).wait())
    wanted = sum(0.5 + i for i in range(COLUMNS)) * TOKENS * ROWS
    assert len(sums) == 4, sums
    assert abs(sum(sums) / wanted - 1) < 1e-5, (sums, wanted)
    serve({"report": lambda: found})


def milliseconds(action: Any) -> list[float]:
    """Return the time of each of 30 goes."""
    times = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        action()
        times.append(1000 * (time.perf_counter() - begun))
    return times


def measure_call(report: Report) -> None:
    peer = Peer("call")
    found = peer.ask("report")
    peer.close()
    report.details["b"] = found
    column_bytes = ROWS * TOKENS * COLUMNS * 4
    say("b. calls: " + " ".join(f"{ms:.1f}" for ms in found["ms"]) + " ms")
    say(
        f"   all traffic on the loopback interface, of whatever process: {found['loopback_bytes_per_call'] / 1e3:.0f} kB a call; "
        f"the columns are {column_bytes / 1e3:.0f} kB"
    )
    report.add("b. call with six columns, median of 30", statistics.median(found["ms"]), "ms", at_most=CALL_MS)
    report.add("b.   the same, writing a column instead of returning", statistics.median(found["ms_writing"]), "ms")
    report.add("b. column bytes through the controller", found["controller_bytes"], "bytes", at_most=0)
    report.add("b. loopback traffic a call / column bytes", found["loopback_bytes_per_call"] / column_bytes, "", at_most=0.1)


# -- c: SmolLM2 in one process


def token_prompts() -> list[list[int]]:
    """Return the first 16 tokens of 32 reviews."""
    from transformers import AutoTokenizer

    from hfsdk.assets import model_folder
    from hfsdk.data import movie_reviews

    tokenizer = AutoTokenizer.from_pretrained(model_folder(MODEL))
    found: list[list[int]] = []
    for text in movie_reviews()["text"]:
        ids = tokenizer(text)["input_ids"][:PROMPT_TOKENS]
        if len(ids) == PROMPT_TOKENS:
            found.append(ids)
        if len(found) == NUM_PROMPTS:
            break
    return found


def smol_session(started: float) -> None:
    """Child: a session that generates and steps when asked."""
    import hfsdk as hf

    options = hf.RolloutOptions(max_model_len=MODEL_LEN, kv_cache_bytes=KV_BYTES)
    with hf.Session(devices=1) as session:
        actor = session.actor(MODEL, rollout_options=options)
        session.critic(MODEL)
        session.reference(actor)
        session.reward(length)
        prompts = session.prompts(token_prompts(), batch_size=NUM_PROMPTS, shuffle=False)
        session.place("colocate")

        def generate() -> dict[str, Any]:
            begun = time.perf_counter()
            batch = actor.generate(prompts[0], max_new_tokens=NEW_TOKENS, ignore_eos=True).wait()
            return {"seconds": time.perf_counter() - begun, "tokens": int(batch["response"].lengths.sum())}

        serve({"generate": generate, "step": lambda: step_by_step(session, prompts[0], NEW_TOKENS, exact=True).seconds})


def bare_vllm(started: float, *, eager: bool) -> None:
    """Child: vLLM alone, as its users start it; only what the work itself sets is set."""
    from vllm import LLM, SamplingParams

    from hfsdk.assets import model_folder

    engine = LLM(
        str(model_folder(MODEL)), dtype="float32", max_model_len=MODEL_LEN, kv_cache_memory_bytes=KV_BYTES, enforce_eager=eager
    )
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in token_prompts()]
    count = 0

    def generate() -> dict[str, Any]:
        nonlocal count
        count += 1
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, seed=1000 * count + i)
            for i in range(NUM_PROMPTS)
        ]
        engine.reset_prefix_cache()
        begun = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    serve({"generate": generate})


def measure_smol(report: Report, rounds: int) -> None:
    threads = {"OMP_NUM_THREADS": "2"}
    bare_environment = {**threads, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    ours = Peer("smol")
    ours.ask("generate")  # loads
    memory = PeakMemory(ours.process.pid)
    memory.start()
    steps = [ours.ask("step") for _ in range(2)]
    peak = memory.stop()
    say("c. steps call by call:")
    say(table(("call", "first", "second"), [[name, *(f"{step[name][0]:.2f} s" for step in steps)] for name in steps[0]]))
    say("   memory at the peak: " + ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in sorted(memory.at_peak.items())))
    report.add("c. summed PSS at its peak", peak / 1e9, "GB", at_most=PSS_GB)
    ours.ask("generate")
    bare = {"vLLM's own defaults": Peer("bare", **bare_environment), "enforce_eager": Peer("bare-eager", **bare_environment)}
    times: dict[str, list[float]] = {name: [] for name in ("hfsdk", *bare)}
    for i in range(rounds + 1):
        for name, peer in {"hfsdk": ours, **bare}.items():
            reply = peer.ask("generate")
            assert reply["tokens"] == NUM_PROMPTS * NEW_TOKENS, reply
            if i:  # the first round warms up
                times[name].append(reply["seconds"])
    for peer in (ours, *bare.values()):
        peer.close()
    report.details["c"] = {"steps": steps, "rollout": times, "pss_at_peak": memory.at_peak}
    for name, seconds in times.items():
        say(f"   rollout, {name}: " + " ".join(f"{s:.2f}" for s in seconds) + " s")
        report.add(f"c. rollout, {name}, median", statistics.median(seconds), "s")
    for name in bare:
        ratio = statistics.median(a / b for a, b in zip(times["hfsdk"], times[name], strict=True))
        report.add(f"c. rollout / bare vLLM ({name})", ratio, "", at_most=ROLLOUT_RATIO)


# -- the command


PARTS = {
    "cold": cold_kernel, "call": one_call, "smol": smol_session, "bare": lambda started: bare_vllm(started, eager=False),
    "bare-eager": lambda started: bare_vllm(started, eager=True),
}  # fmt: skip


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", default="a,b,c", help="parts to run, e.g. a,c")
    made.add_argument("--rounds", type=int, default=5, help="rollouts of each system in part c")
    made.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)
    made.add_argument("--started", type=float, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.part:
        PARTS[arguments.part](arguments.started)
        return 0
    report = Report("overhead", "a: 2 workers of one thread, b: 4 of one, c: 1 of two, and bare vLLM of two in turn with it")
    wanted = arguments.only.split(",")
    if "a" in wanted:
        measure_cold(report)
    if "b" in wanted:
        measure_call(report)
    if "c" in wanted:
        measure_smol(report, arguments.rounds)
    say(f"\n(load before the end: {short(os.getloadavg()[0])})")
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
