"""How long an exact plan takes, from 8 to 4,096 devices, and a step of the simulated session. One core.

Targets, PPO with four llama-70b models (bf16, distributed optimizer), 1,024 prompts of 1,024 tokens, responses of 1,024, A100-80GB;
the best of five plans after a first one (of two beyond 1,024 devices), the step recorded anew, each with a token more in its
responses than the one before:

a. `session.plan` for 128 devices at most 200 ms, for 1,024 at most 2 s. The caches of rollouts come from the memory of GPUs; with
   128 devices they decide, and the search is made twice. The first plan of a cluster also works out its setups; it is
   printed, without a target.
b. One PPO step of the simulated session on 128 devices, warm, the best of twenty, at most 20 ms.
c. Every plan fits, and none is slower than the best placement of half as many devices.
d. Where responses vary in length (GRPO, Qwen2.5-7B, 128 prompts with 8 log-normal responses each, 16x8 H100) plans are judged by
   the lengths of eight steps; that takes at most 1.15 times as long as by one step's, and no device idles by the luck of one.

HybridFlow's mapping takes up to half an hour (arXiv 2409.19256, section 8.5), ReaL searches 120 s without a proof of optimality
(arXiv 2406.14088, the code's default budget).

Uses: one thread of this process; nothing is started.

    python benchmarks/planner.py --check                 about 1 minute; --only 8 16 128
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

from common import Report, parser, say, table  # noqa: E402

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TARGETS_S = {128: 0.200, 1024: 2.0}
STEP_S, STEP_DEVICES = 0.020, 128
MODEL, TIMES, FEW, STEPS = "llama-70b", 5, 2, 20


def session_of(devices: int, model: str = MODEL) -> Any:
    """Return a simulated session of A100 nodes with the four roles of PPO, their layouts open."""
    import hfsdk as hf

    session = hf.Session.simulated(f"{max(1, devices // 8)}x{min(8, devices)} A100-80GB", price_per_device_hour=2.0)
    sharded = hf.AdamW(distributed=True)
    actor = session.actor(model, dtype="bf16", optimizer=sharded)
    session.critic(model, dtype="bf16", optimizer=sharded)
    session.reference(actor)
    session.reward(model, dtype="bf16")
    return session


def best_of(times: int, function: Any) -> tuple[float, Any]:
    """Return the least seconds of several runs, and what the last one returned."""
    least, found = float("inf"), None
    for _ in range(times):
        began = time.perf_counter()
        found = function()
        least = min(least, time.perf_counter() - began)
    return least, found


def measure_plans(report: Report, sizes: Sequence[int]) -> list[tuple[str, ...]]:
    """Plan for every number of devices; return the rows of the table."""
    import hfsdk as hf

    rows, before, fullest = [], float("inf"), 0.0
    for devices in sizes:
        session = session_of(devices)
        lengths = count(1019 if devices <= 1024 else 1022)
        began = time.perf_counter()
        try:
            session.plan(hf.PPO(), hf.Workload(response_tokens=next(lengths)))
        except hf.DeviceMemoryError as error:
            did = str(error).split("The smallest")[-1].split("'")[1]
            rows.append((str(devices), "", "", "", "", f"does not fit; the smallest cluster is {did}"))
            continue
        first = time.perf_counter() - began
        seconds, plan = best_of(
            TIMES if devices <= 1024 else FEW,
            lambda s=session, n=lengths: s.plan(hf.PPO(), hf.Workload(response_tokens=next(n))),
        )
        report.add(f"first plan for {devices} devices", first, "s")
        report.add(f"plan for {devices} devices", seconds, "s", at_most=TARGETS_S.get(devices))
        if plan.seconds > before * (1 + 1e-9):
            report.add(f"step on {devices} devices against half as many", plan.seconds / before, "times", at_most=1.0)
        before = plan.seconds
        fullest = max(fullest, *(memory.asked / memory.exists for memory in plan.memory))
        found = plan.search
        rows.append((str(devices), f"{seconds * 1e3:.0f} ms", f"{found.num_considered:,}", f"{found.num_layouts:,}",
                     f"{plan.seconds:.1f} s", plan.best.title))  # fmt: skip
        parts = f"tables {found.tables_s * 1e3:.0f}, calls {found.record_s * 1e3:.0f}"
        say(f"{devices} devices: {seconds * 1e3:.0f} ms after {first * 1e3:.0f} ms ({parts})")
    report.add("fullest device of any plan", fullest, "of its memory", at_most=1.0)
    return rows


def measure_step(report: Report) -> None:
    """Take simulated steps under the plan."""
    import numpy as np

    import hfsdk as hf

    session = session_of(STEP_DEVICES)
    workload = hf.Workload()
    plan = session.plan(hf.PPO(), workload)
    session.place(plan)
    tokens = np.zeros(workload.prompt_tokens, dtype=np.int32)
    prompts = session.batch(prompt=[tokens] * workload.prompts, position=np.arange(workload.prompts))
    algorithm = hf.PPO(max_new_tokens=workload.response_tokens)

    def step() -> None:
        made = algorithm.step(session.models, prompts)
        made.critic.wait()
        made.actor.wait()

    step()
    predicted = session.trace.snapshot().duration_s
    report.add("predicted step against the simulated one", plan.seconds / predicted, "times", at_least=0.98, at_most=1.02)
    report.add(f"simulated PPO step on {STEP_DEVICES} devices", best_of(STEPS, step)[0], "s", at_most=STEP_S)


def measure_lengths(report: Report) -> None:
    """Plan for lengths that vary, judged by one step's lengths and by several, by turns."""
    import hfsdk as hf
    from hfsdk.planner.search.recorded import MOST_STEPS
    from hfsdk.session import recording

    most, seed = 16_384, 4  # a seed whose first step suits 120 of 128 devices
    session = hf.Session.simulated("16x8 H100", seed=seed)
    options = hf.RolloutOptions(max_model_len=most + 512)
    sharded = hf.AdamW(distributed=True)
    actor = session.actor("qwen2.5-7b", dtype="bf16", rollout_options=options, optimizer=sharded, recompute="full")
    session.reference(actor)
    session.reward(lambda completions: [0.0] * len(completions))
    tokens, least, found = count(most, -1), {1: float("inf"), MOST_STEPS: float("inf")}, {}
    for _ in range(TIMES + 1):
        for steps in least:
            recording.MOST_STEPS = steps
            workload = hf.Workload(prompts=128, prompt_tokens=512, response_tokens=next(tokens), response_lengths="lognormal")
            began = time.thread_time()
            session.plan(hf.GRPO(n=8), workload, by_placement=True)
            least[steps] = min(least[steps], time.thread_time() - began)
    workload = hf.Workload(prompts=128, prompt_tokens=512, response_tokens=most, response_lengths="lognormal")
    for steps in least:
        recording.MOST_STEPS = steps
        found[steps] = session.plan(hf.GRPO(n=8), workload, by_placement=True)
        for one in (found[steps].best, *found[steps].runners_up[:1]):
            say(f"judged by {steps} steps: {one.title}: {one.seconds:.1f} s the first, {one.mean_s:.1f} s in the mean. {one.why}")
    report.add("judged by one step's lengths: devices idle", found[1].num_idle)
    report.add(f"judged by {MOST_STEPS} steps' lengths: devices idle", found[MOST_STEPS].num_idle, at_most=0)
    report.add(
        f"processor seconds by {MOST_STEPS} steps' lengths against one's", least[MOST_STEPS] / least[1], "times", at_most=1.15
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    given = parser(__doc__)
    given.add_argument("--only", type=int, nargs="+", default=list(SIZES), metavar="DEVICES", help="plan for these numbers alone")
    arguments = given.parse_args(argv)
    report = Report("planner", "one thread")
    rows = measure_plans(report, arguments.only)
    measure_step(report)
    measure_lengths(report)
    report.details["plans"] = rows
    print("\n" + table(("devices", "plan", "placements in the family", "layouts predicted", "a step", "best placement"), rows))
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
