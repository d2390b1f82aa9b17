"""Two thousand steps of training: what driver, worker and the process of functions hold, and what a step takes.

Real PPO steps of `tiny` on one device, small batches, so that 2,000 of them take about 25 minutes on one core; `--simulated` takes
the same steps on a virtual clock, where the driver is the only process. Memory is what a process has to itself: its proportional
set size without mapped files, whose share depends on who else maps them. It is read after step 20, 200, 1,000 and 2,000; a step's
seconds are the median of the 20 before each of these.

Targets: from step 200 to the last one the memory of each process grows by at most 2 %, and a step takes at most 10 % longer.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Report, parser, say, table

GROWTH = 0.02
"""Of a process's memory, from the second reading to the last."""
SLOWER = 1.10
"""Seconds of a step at the last reading, over those at the second."""
MARKS = (20, 200, 1000, 2000)
WINDOW = 20
"""Steps before a reading whose median its seconds are."""
BATCH, PROMPT_TOKENS, NEW_TOKENS = 2, 16, 8


def memory_of(pid: int) -> dict[str, float]:
    """Return a process's proportional set size and its parts in MB, from the kernel's own sums."""
    found: dict[str, float] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        found[name.rstrip(":")] = int(size) / 1024
    own = found.get("Pss_Anon", 0.0) + found.get("SwapPss", 0.0) + found.get("Pss_Shmem", 0.0)
    return {"own": own, "files": found.get("Pss_File", 0.0), "pss": found["Pss"]}


def length(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward of no meaning and no cost."""
    return [len(text) / 32 for text in completions]


def open_session(simulated: bool) -> Any:
    """Return the session, with every role declared."""
    import hfsdk as hf

    session = hf.Session.simulated("1x1 A100-80GB") if simulated else hf.Session(devices=1)
    actor = session.actor("tiny")
    session.critic("tiny")
    session.reference(actor)
    session.reward(length)
    return session


def processes(session: Any, prompts: Any, simulated: bool) -> dict[str, int]:
    """Return the process ids by what they are; starts them."""
    found = {"driver": os.getpid()}
    if not simulated:
        session.place("colocate")
        found["worker"] = int(session.placement.view()["devices"][0]["pid"])
        found["tasks"] = int(prompts[0].reduce(lambda batch: os.getpid(), reads=["position"]).value)
    return found


def watched(pids: dict[str, int], marks: Sequence[int], readings: dict[int, dict[str, dict[str, float]]]) -> Any:
    """Return a ``stop`` for ``train`` that reads the memory after these steps and never stops."""

    def look(row: dict[str, Any]) -> bool:
        done = row["step"] + 1
        if done in marks:
            gc.collect()
            readings[done] = {name: memory_of(pid) for name, pid in pids.items()}
            words = ", ".join(
                f"{name} {m['own']:.1f} MB of its own, {m['files']:.1f} of files" for name, m in readings[done].items()
            )
            say(f"step {done}: {words}")
        return False

    return look


def run(arguments: Any) -> int:
    """Train, read, and compare."""
    import hfsdk as hf
    from hfsdk.data import movie_reviews

    warnings.simplefilter("ignore")
    marks = [mark for mark in MARKS if mark < arguments.steps] + [arguments.steps]
    if arguments.every:
        marks = sorted({*marks, *range(arguments.every, arguments.steps, arguments.every)})
    readings: dict[int, dict[str, dict[str, float]]] = {}
    walls: list[float] = []
    with open_session(arguments.simulated) as session:
        texts = movie_reviews() if not arguments.simulated else [f"prompt {i}" for i in range(64)]
        prompts = session.prompts(texts, batch_size=BATCH, max_prompt_tokens=None if arguments.simulated else PROMPT_TOKENS)
        pids = processes(session, prompts, arguments.simulated)
        look, last = watched(pids, marks, readings), [time.perf_counter()]

        def stop(row: dict[str, Any]) -> bool:
            now = time.perf_counter()
            walls.append(now - last[0])
            answer = look(row)
            last[0] = time.perf_counter()
            return answer

        algorithm = hf.PPO(max_new_tokens=NEW_TOKENS, mini_batches=1)
        session.train(algorithm, prompts, steps=arguments.steps, stop=stop, progress=False)  # an interrupt ends it, too
    reached = [mark for mark in marks if mark in readings]
    if not reached:
        say(f"ended after {len(walls)} steps, before the first reading; nothing to tell")
        return 1
    return finish(arguments, reached, readings, walls)


def finish(arguments: Any, marks: Sequence[int], readings: dict[int, dict[str, dict[str, float]]], walls: Sequence[float]) -> int:
    """Print the table and judge it."""
    report = Report("long_run", "simulated, 1 process" if arguments.simulated else "1 worker of one thread")
    seconds = {mark: statistics.median(walls[max(0, mark - WINDOW) : mark]) for mark in marks}
    names = list(readings[marks[0]])
    rows = [[str(mark), *(f"{readings[mark][n]['own']:.1f}" for n in names), f"{seconds[mark]:.4f}"] for mark in marks]
    say("\n" + table(("step", *(f"{name}, MB" for name in names), "s a step"), rows))
    report.details |= {"readings": readings, "seconds": seconds, "steps": len(walls)}
    if len(walls) < arguments.steps:
        report.add(f"steps of {arguments.steps:,}", len(walls), at_least=arguments.steps)
    base, end = next((mark for mark in marks if mark >= MARKS[1]), marks[0]), marks[-1]
    for name in names:
        before, after = readings[base][name]["own"], readings[end][name]["own"]
        report.add(f"memory of the {name}, step {end} over step {base}", after / before, at_most=1 + GROWTH)
    report.add(f"seconds of a step, step {end} over step {base}", seconds[end] / seconds[base], at_most=SLOWER)
    return report.finish(arguments)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=MARKS[-1], help="steps of training")
    made.add_argument("--simulated", action="store_true", help="on a virtual clock instead")
    made.add_argument("--every", type=int, default=0, help="read the memory also after every so many steps")
    return run(made.parse_args())


if __name__ == "__main__":
    sys.exit(main())
