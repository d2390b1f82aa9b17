"""What a save costs with its checksums, what a load costs with theirs, and a step beside another checkout's. All on CPU; two cores.

Targets, `tiny` as actor and critic after an optimizer step (75 MB of state, fp32), on two devices (dp2):

a. A warm save is at most 10 % slower than without checksums and reading back: medians of pairs that alternate, in one session.
b. With `--against PATH`, another checkout of hfsdk: a warm save at most 10 %, a warm step of PPO (32 prompts, 32 new tokens) at
   most 3 % slower than there; sessions of both alternate, medians of all.
c. Loading (no target) beside it, and how fast a checksum is made here.

Uses: 2 workers of one thread.

    python benchmarks/saving.py --check                         about a minute
    python benchmarks/saving.py --check --against ../before     about ten minutes more
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Report, parser, say

MOST_RATIO, MOST_STEP_RATIO, TIMES, STEPS, ROUNDS = 1.10, 1.03, 15, 15, 5


def without_checksums(rank: Any) -> None:
    """Make this worker write as if nobody looked: torch's checksums as it has them, nothing read back."""
    import contextlib

    from hfsdk.engine.training import checkpoint
    from hfsdk.engine.weights import summed_file

    checkpoint.kept = checkpoint.one_checksum
    checkpoint.one_checksum = contextlib.nullcontext
    summed_file.zlib = type("Off", (), {"crc32": staticmethod(lambda data, value=0: 0)})
    summed_file.MOST_SAMPLES = 0


def with_checksums(rank: Any) -> None:
    """Make this worker write as it does."""
    import zlib

    from hfsdk.engine.training import checkpoint
    from hfsdk.engine.weights import summed_file

    checkpoint.one_checksum = getattr(checkpoint, "kept", checkpoint.one_checksum)
    summed_file.zlib, summed_file.MOST_SAMPLES = zlib, 16


def opened(hf: Any) -> Any:
    """Return a session with an actor and a critic that have learned one step."""
    session = hf.Session(devices=2)
    actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
    session.critic("tiny"), session.reference(actor)
    session.reward(lambda completions: [float(len(text)) for text in completions])
    prompts = session.prompts(["the film is", "it never quite", "one of the", "a warm and"], batch_size=4)
    session.place("colocate")
    step = hf.PPO(max_new_tokens=8).step(session.models, next(prompts))
    step.actor.wait(), step.critic.wait()
    return session


def seconds(session: Any, folder: Path) -> float:
    """Return how long a save took."""
    started = time.perf_counter()
    session.save(folder)
    return time.perf_counter() - started


def in_another(path: str) -> dict[str, list[float]]:
    """Return the seconds of a checkout's warm saves and warm steps, taken in a process of its own."""
    code = f"import sys, hfsdk; sys.path.append({str(Path(__file__).parent)!r}); import saving; saving.print_seconds()"
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900, cwd=path, env=env)
    found: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def print_seconds() -> None:
    """Print the seconds of warm saves and warm steps of the checkout that is imported."""
    import hfsdk as hf
    from hfsdk.data import movie_reviews

    say(hf.__file__)
    found: dict[str, list[float]] = {"saves": [], "steps": []}
    with opened(hf) as session, tempfile.TemporaryDirectory() as folder:
        prompts = session.prompts(movie_reviews(), batch_size=32, max_prompt_tokens=32)
        algorithm = hf.PPO(max_new_tokens=32)
        for _ in range(STEPS + 3):
            begun = time.perf_counter()
            algorithm.metrics(algorithm.step(session.models, next(prompts)))
            found["steps"].append(time.perf_counter() - begun)
        found["saves"] = [seconds(session, Path(folder)) for _ in range(TIMES + 2)]
    print(json.dumps({"saves": found["saves"][2:], "steps": found["steps"][3:]}))


def measure(report: Report) -> None:
    """Save with checksums and without, in turns, then load."""
    import hfsdk as hf

    with opened(hf) as session, tempfile.TemporaryDirectory() as folder:
        actor, took = session.models.actor, {True: [], False: []}
        for i in range(2 * TIMES + 2):
            on = i % 2 == 0
            actor.run(with_checksums if on else without_checksums)
            took[on].append(seconds(session, Path(folder)))
        actor.run(with_checksums)
        session.save(folder)
        on_s, off_s = (statistics.median(took[on][1:]) for on in (True, False))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        started = time.perf_counter()
        session.load(folder)
        report.add("load, checksums compared", time.perf_counter() - started, "s")
    report.add("bytes of a save", size / 1e6, "MB")
    report.add("warm save", on_s, "s")
    report.add("warm save without checksums", off_s, "s")
    report.add("ratio", on_s / off_s, at_most=MOST_RATIO)
    report.details["saves"] = {"with": took[True], "without": took[False]}


def compare(report: Report, path: str) -> None:
    """Save and step in sessions of this checkout and of another, in turns."""
    checkouts = {"here": str(Path(__file__).resolve().parents[1]), "there": str(Path(path).resolve())}
    taken: dict[str, dict[str, list[float]]] = {name: {"saves": [], "steps": []} for name in checkouts}
    for i in range(ROUNDS):
        for name in sorted(checkouts, reverse=i % 2 == 1):
            found = in_another(checkouts[name])
            say(f"round {i + 1} of {ROUNDS}, {name}: " + ", ".join(f"{k} {statistics.median(v):.4f} s" for k, v in found.items()))
            for kind, times in found.items():
                taken[name][kind] += times
    medians = {name: {kind: statistics.median(times) for kind, times in kinds.items()} for name, kinds in taken.items()}
    for kind, most in (("saves", MOST_RATIO), ("steps", MOST_STEP_RATIO)):
        for name in checkouts:
            report.add(f"warm {kind[:-1]}, {name}", medians[name][kind], "s")
        report.add(f"ratio of {kind}", medians["here"][kind] / medians["there"][kind], at_most=most)
    report.details["against"] = taken


def checksum_speed() -> float:
    """Return GB/s of the checksum, the best of five."""
    data, best = bytes(1 << 26), float("inf")
    for _ in range(5):
        started = time.perf_counter()
        zlib.crc32(data)
        best = min(best, time.perf_counter() - started)
    return len(data) / best / 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    made: argparse.ArgumentParser = parser(__doc__)
    made.add_argument("--against", metavar="PATH", help="another checkout of hfsdk to compare with")
    asked = made.parse_args(arguments)
    report = Report("saving", "2 workers of one thread")
    report.add("checksum", checksum_speed(), "GB/s")
    measure(report)
    if asked.against:
        compare(report, asked.against)
    return report.finish(asked)


if __name__ == "__main__":
    sys.exit(main())
