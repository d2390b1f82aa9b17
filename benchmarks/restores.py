"""A run whose workers are killed again and again: whether it ends where an undisturbed one does, and what a death costs.

PPO of `tiny`, two workers of one thread, a save every few steps. Workers are killed with SIGKILL at random moments while
``session.train(on_death="restore")`` goes on; then the same run without kills.

Targets, of 100 steps and 10 kills: weights of every rank and the numbers of every step equal those of the undisturbed run; every
kill was survived.

    python benchmarks/restores.py --check
    python benchmarks/restores.py --steps 20 --kills 2 --seed 3
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

from common import Report, parser, say, table

SAVE_EVERY = 5


def length(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward of no cost."""
    return [len(text) % 7 - 3.0 for text in completions]


def weights(rank: Any) -> str:
    """Hash a rank's weights, bit for bit."""
    digest = hashlib.sha256()
    for _, tensor in sorted(rank.module.named_parameters()):
        digest.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def kill(session: Any, moments: Sequence[tuple[int, float, int]], over: threading.Event) -> None:
    """Kill a worker at each moment: (steps that have finished, seconds after that, which worker)."""
    for number, (rows, seconds, which) in enumerate(moments):
        while not over.is_set() and (session.run is None or len(session.run.rows) < rows):
            time.sleep(0.02)
        if over.wait(seconds):
            return
        pids = [device["pid"] for device in session.placement.view()["devices"].values() if device["pid"]]
        if pids:
            os.kill(int(pids[which % len(pids)]), signal.SIGKILL)
        while not over.is_set() and len(session.run.restores) <= number:
            time.sleep(0.05)


def trained(steps: int, moments: Sequence[tuple[int, float, int]]) -> dict[str, Any]:
    """Train, with workers killed at these moments; return what came of it."""
    import hfsdk as hf
    from hfsdk.run.run import MEASURED

    over = threading.Event()
    with hf.Session(devices=2) as session, tempfile.TemporaryDirectory() as folder:
        actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-4))
        session.critic("tiny", optimizer=hf.AdamW(lr=1e-3))
        session.reference(actor)
        session.reward(length)
        session.place("colocate")
        prompts = session.prompts([f"review number {i} says that" for i in range(64)], batch_size=4, seed=0)
        thread = threading.Thread(target=kill, args=(session, moments, over), daemon=True)
        thread.start()
        since = time.perf_counter()
        run = session.train(
            hf.PPO(max_new_tokens=8), prompts, steps=steps, save_every=SAVE_EVERY, folder=folder, on_death="restore",
            max_restores=2 * len(moments) + 1, progress=False,
        )  # fmt: skip
        took = time.perf_counter() - since
        over.set()
        thread.join()
        return {
            "weights": actor.run(weights), "seconds": took, "restores": run.restores,
            "rows": [{name: value for name, value in row.items() if name not in MEASURED} for row in run.rows],
        }  # fmt: skip


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=100)
    made.add_argument("--kills", type=int, default=10)
    made.add_argument("--seed", type=int, default=0, help="of the moments")
    given = made.parse_args()
    warnings.simplefilter("ignore")
    dice = random.Random(given.seed)
    share = given.steps / max(1, given.kills)
    moments = [(int(k * share + dice.random() * share * 0.7), dice.random(), dice.randrange(2)) for k in range(given.kills)]
    killed = trained(given.steps, moments)
    restores = killed["restores"]
    rows = [(str(r.step), str(r.back_to), f"{r.seconds:.1f}", r.error[:60]) for r in restores]
    say(table(("died in step", "back to", "seconds", "error"), rows))
    quiet = trained(given.steps, ())
    report = Report("restores", "two worker processes of one thread")
    report.details = {"moments": moments, "seconds": [killed["seconds"], quiet["seconds"]], "seed": given.seed}
    report.add("deaths that the run went on after", len(restores), at_least=given.kills)
    report.add(
        "ranks whose weights differ", sum(a != b for a, b in zip(killed["weights"], quiet["weights"], strict=True)), at_most=0
    )
    report.add("steps whose numbers differ", sum(a != b for a, b in zip(killed["rows"], quiet["rows"], strict=True)), at_most=0)
    report.add("steps", len(killed["rows"]), at_least=given.steps)
    if restores:
        report.add("a restore, median", statistics.median(r.seconds for r in restores), "s")
        report.add("a restore, worst", max(r.seconds for r in restores), "s")
    report.add("the run with deaths", killed["seconds"], "s")
    report.add("the run without", quiet["seconds"], "s")
    return report.finish(given)


if __name__ == "__main__":
    sys.exit(main())
