"""What a snapshot costs, and what going back costs. All on CPU; quiet machine, two cores.

Targets, for actor and critic after an optimizer step (weights and two moments each, fp32), median of five:

a. `tiny` on two devices (dp2): a snapshot at most 0.3 s; one in which nothing has changed at most 0.05 s and 0 new bytes.
b. SmolLM2-135M on one device: a snapshot at most 6 s; going back (no target) beside it.

Both check that a step after going back is the same as the first time, bit for bit.

Uses: a: 2 workers of one thread; b: 1 worker of two threads.

    python benchmarks/snapshot.py --check                about 3 minutes; --only tiny
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from common import Report, parser, say

TINY_S, SHARED_S, SMOLLM2_S, TIMES = 0.3, 0.05, 6.0, 5
MODELS = {"tiny": ("tiny", 2, TINY_S), "smollm2": ("smollm2-135m-instruct", 1, SMOLLM2_S)}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a function took, and what it returned."""
    started = time.perf_counter()
    found = function()
    return time.perf_counter() - started, found


def measure(report: Report, key: str) -> None:
    """Take snapshots of one model, go back, and check that the step comes out the same."""
    import hfsdk as hf

    model, devices, most_s = MODELS[key]
    with hf.Session(devices=devices) as session:
        actor = session.actor(model, optimizer=hf.AdamW(lr=1e-5))
        session.critic(model)
        session.reference(actor)
        session.reward(lambda completions: [float(len(text)) for text in completions])
        prompts = session.prompts(["the film is", "it never quite", "one of the", "a warm and"], batch_size=4)
        session.place("colocate")

        def step() -> list[dict[str, float]]:
            made = hf.PPO(max_new_tokens=8).step(session.models, next(prompts))
            return [*made.critic.rows, *made.actor.rows]

        step()
        seconds, back, shared, same = [], [], [], True
        for i in range(TIMES):
            took, snapshot = timed(lambda: session.snapshot("before"))
            took_again, again = timed(lambda: session.snapshot("again"))
            first = step()
            back.append(timed(lambda s=snapshot: session.rewind(s))[0])
            same = same and step() == first
            seconds.append(took)
            shared.append(took_again)
            say(f"{key} {i + 1} of {TIMES}: {snapshot.num_bytes / 1e6:.0f} MB in {took:.2f} s, back in {back[-1]:.2f} s")
        report.add(f"{key}: snapshot", statistics.median(seconds), "s", at_most=most_s)
        report.add(f"{key}: snapshot of what has not changed", statistics.median(shared), "s", at_most=SHARED_S)
        report.add(f"{key}: its new bytes", again.new_bytes, "bytes", at_most=0)
        report.add(f"{key}: rewind", statistics.median(back), "s")
        report.add(f"{key}: bytes of actor and critic", snapshot.num_bytes / 1e6, "MB")
        report.add(f"{key}: the step after a rewind is the same", float(same), at_least=1)
        report.details[key] = {"snapshot_s": seconds, "rewind_s": back, "shared_s": shared}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    made = parser(__doc__)
    made.add_argument("--only", default=",".join(MODELS), help="tiny, smollm2, or both with a comma between")
    asked = made.parse_args(arguments)
    report = Report("snapshot", "a: 2 workers of one thread; b: 1 worker of two threads")
    for key in asked.only.split(","):
        measure(report, key)
    return report.finish(asked)


if __name__ == "__main__":
    sys.exit(main())
