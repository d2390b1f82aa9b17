"""Sessions that outlive their kernel: kernels killed again and again, what a message costs, and the keeper itself killed.

Targets:

a. kernels are killed with SIGKILL at random moments (20 of them) while PPO of `tiny` trains; the next one attaches and goes on
   until all steps are done: the numbers of every step and the weights of every rank equal those of a session in one process, bit
   for bit; ``hf.Session.attach`` takes at most 2 s.
b. a call through the keeper costs at most 3 ms more than through the controller in the process itself (medians, in turns); of
   columns of 12 MB that are put, read by a worker and fetched, at most 100 kB pass by the keeper.
c. the keeper is killed: the kernel is told what is lost and what is saved; a new session of the same name that loads the save has
   lost at most the steps since that.

Two worker processes of one thread.

    python benchmarks/kept.py --check
    python benchmarks/kept.py --only a --kills 3 --steps 12
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from common import Report, parser, say, table
from restores import length, weights

ATTACH_S, CALL_MS, BY_KEEPER_BYTES = 2.0, 3.0, 100_000
NAME = "benchmark-kept"
PROMPTS = [f"review number {i} says that" for i in range(64)]
PIECE = 3
"""Steps of a run; a kernel starts one after another."""


def declare(session: Any) -> Any:
    """Declare the roles of PPO; return the actor."""
    import hfsdk as hf

    actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-4))
    session.critic("tiny", optimizer=hf.AdamW(lr=1e-3))
    session.reference(actor)
    session.reward(length)
    session.place("colocate")
    return actor


def numbers(session: Any) -> list[dict[str, Any]]:
    """Return the history's rows but for what is measured."""
    from hfsdk.run.run import MEASURED

    left = {*MEASURED, "reward_function"}
    return [{name: value for name, value in row.items() if name not in left} for row in session.history if row["kind"] == "step"]


def tell(**found: Any) -> None:
    """Give the parent process a line."""
    print("told", json.dumps(found), flush=True)


# -- kernels, each in a process of its own


def kernel(steps: int) -> None:
    """Attach, or begin; train until all steps are done; perhaps be killed anywhere."""
    import hfsdk as hf

    begun = time.perf_counter()
    try:
        session = hf.Session.attach(NAME)
        tell(attach_s=time.perf_counter() - begun, steps=len(session.history))
        actor = session.models.actor
    except hf.OptionError:
        session = hf.Session(devices=2, name=NAME, keep=True)
        actor = declare(session)
        tell(begun=True)
    prompts = session.prompts(PROMPTS, batch_size=4, seed=0)
    while True:
        if session.run is not None and session.run.running:
            session.watch().wait()
        done = len(numbers(session))
        if done >= steps:
            break
        session.train(hf.PPO(max_new_tokens=8), prompts, steps=min(PIECE, steps - done), progress=False)
    tell(rows=numbers(session), weights=actor.run(weights))
    session.close()


def one_process(steps: int) -> None:
    """Train the same steps in a session as any."""
    import hfsdk as hf

    with hf.Session(devices=2) as session:
        actor = declare(session)
        session.train(hf.PPO(max_new_tokens=8), session.prompts(PROMPTS, batch_size=4, seed=0), steps=steps, progress=False)
        tell(rows=numbers(session), weights=actor.run(weights))


def calls(keep: bool, num: int) -> None:
    """Measure a call that does nothing, whenever a line comes in; at the end what passes by the keeper."""
    import cloudpickle
    import numpy as np

    import hfsdk as hf

    with hf.Session(devices=2, name=f"{NAME}-calls", keep=keep) as session:
        actor = session.actor("tiny")
        session.place("colocate")
        actor.run(_nothing)
        tell(ready=True)
        for line in sys.stdin:
            if line.strip() == "bytes":
                break
            took = []
            for _ in range(num):
                begun = time.perf_counter()
                actor.run(_nothing)
                took.append(time.perf_counter() - begun)
            tell(seconds=statistics.median(took))
        if keep:
            link = session._link
            passed = [0]
            ask, tell_it = link._keeper.ask, link._keeper.tell

            class Counting:
                """Counts what passes by the keeper."""

                def ask(self, request: Any, timeout_s: float | None = None) -> Any:
                    reply = ask(request, timeout_s)
                    passed[0] += sum(len(_pickled(one)) for one in (request, reply))
                    return reply

                def tell(self, request: Any) -> None:
                    passed[0] += len(_pickled(request))
                    tell_it(request)

                def __getattr__(self, name: str) -> Any:
                    return getattr(real, name)

            real = link._keeper
            link._keeper = Counting()

            def _pickled(one: Any) -> bytes:
                return bytes(cloudpickle.dumps(one))

            rows = [list(range(256)) for _ in range(256)]
            big = {f"column{i}": [np.arange(2048, dtype=np.float32) for _ in range(256)] for i in range(6)}
            batch = session.batch(prompt=rows, response=rows, **big)
            total = sum(batch[name].nbytes for name in big)
            summed = batch.map(_sum, reads=list(big), writes=["total"])["total"]
            tell(columns=total, passed=passed[0], fine=bool(abs(float(summed[0]) - 6 * 2047 * 1024) < 1))
            link._keeper = real


def _nothing(rank: Any) -> int:
    return 0


def _sum(table: Any) -> dict[str, Any]:
    import numpy as np

    return {"total": np.asarray([sum(float(table[name][i].sum()) for name in table) for i in range(table.num_rows)])}


def keeper_killed() -> None:
    """Train with saves, have the keeper killed, and go on from the save."""
    import hfsdk as hf

    with tempfile.TemporaryDirectory() as folder:
        session = hf.Session(devices=2, name=f"{NAME}-killed", keep=True)
        declare(session)
        prompts = session.prompts(PROMPTS, batch_size=4, seed=0)
        run = session.train(hf.PPO(max_new_tokens=8), prompts, steps=1000, folder=folder, save_every=5, wait=False, progress=False)
        while len(run.rows) < 8:
            time.sleep(0.05)
        os.kill(hf.sessions()[f"{NAME}-killed"].pid, signal.SIGKILL)
        told, begun = "", time.perf_counter()
        while not told and time.perf_counter() - begun < 30:
            try:
                session.place("colocate")
                time.sleep(0.05)
            except hf.SessionClosedError as error:
                told = str(error)
        told_s, done = time.perf_counter() - begun, len(run.rows)
        session.detach()
        with hf.Session(devices=2, name=f"{NAME}-killed", keep=True) as again:
            declare(again)
            again.load(folder)
            tell(told=told, told_s=told_s, done=done, left=len(again.history), names_folder=folder in told)


# -- the parts


def start(what: str, *given: object) -> subprocess.Popen[str]:
    """Start a process of this file."""
    command = [sys.executable, __file__, "--kernel", what, *map(str, given)]
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | path)


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next line that a process tells; nothing where it has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("told "):
            found: dict[str, Any] = json.loads(line.removeprefix("told "))
            return found
    return {}


def kernels(report: Report, steps: int, kills: int, dice: random.Random) -> None:
    """Part a."""
    attached, killed, moments = [], 0, []
    found: dict[str, Any] = {}
    while not found:
        process = start("kernel", steps)
        first = heard(process)
        if "attach_s" in first:
            attached.append(first["attach_s"])
        if killed < kills:
            moments.append(dice.uniform(0.0, 2.5) if "attach_s" in first else dice.uniform(0.5, 4.0))
            try:
                found = json.loads(process.communicate(timeout=moments[-1])[0].partition("told ")[2] or "{}")
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                killed += 1
        else:
            found = heard(process)
        process.wait()
    quiet = start("one_process", steps)
    wanted = heard(quiet)
    quiet.wait()
    report.details["moments"] = moments
    differ = [i for i, (one, other) in enumerate(zip(found["rows"], wanted["rows"], strict=False)) if one != other]
    if differ:
        one, other = found["rows"][differ[0]], wanted["rows"][differ[0]]
        other_numbers = {name: (one.get(name), other.get(name)) for name in {*one, *other} if one.get(name) != other.get(name)}
        say(f"step {differ[0]} differs: {other_numbers}")
    report.add("kernels killed", killed, at_least=kills)
    report.add("steps", len(found["rows"]), at_least=steps, at_most=steps)
    report.add("steps whose numbers differ", len(differ) + abs(len(found["rows"]) - len(wanted["rows"])), at_most=0)
    others = sum(a != b for a, b in zip(found["weights"], wanted["weights"], strict=True))
    report.add("ranks whose weights differ", others, at_most=0)
    report.add("attach, median", statistics.median(attached), "s", at_most=ATTACH_S)
    report.add("attach, worst", max(attached), "s", at_most=ATTACH_S)


def messages(report: Report, turns: int, num: int) -> None:
    """Part b."""
    sides = {"process": start("calls", "", num), "keeper": start("calls", "keep", num)}
    for process in sides.values():
        heard(process)
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, process in sides.items():
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            took[name].append(heard(process)["seconds"] * 1e3)
    for process in sides.values():
        assert process.stdin is not None
        process.stdin.write("bytes\n")
        process.stdin.flush()
    passed = heard(sides["keeper"])
    for process in sides.values():
        process.communicate()
    mine, kept = (statistics.median(took[name]) for name in sides)
    say(table(("a call that does nothing", "ms, each turn"), [(n, ", ".join(f"{t:.2f}" for t in ms)) for n, ms in took.items()]))
    report.add("a call in one process", mine, "ms")
    report.add("a call through the keeper", kept, "ms")
    report.add("more", kept - mine, "ms", at_most=CALL_MS)
    report.add("columns put, read and fetched", passed["columns"], "bytes", at_least=12_000_000)
    report.add("of it by the keeper", passed["passed"], "bytes", at_most=BY_KEEPER_BYTES)
    report.add("the sums were right", int(passed["fine"]), at_least=1)


def lost(report: Report) -> None:
    """Part c."""
    process = start("killed")
    found = heard(process)
    process.wait()
    say(found["told"])
    report.add("the keeper's death was told after", found["told_s"], "s", at_most=5.0)
    report.add("the message names the save", int(found["names_folder"]), at_least=1)
    report.add("steps lost", found["done"] - found["left"], at_most=5)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", default="a,b,c")
    made.add_argument("--steps", type=int, default=100)
    made.add_argument("--kills", type=int, default=20)
    made.add_argument("--seed", type=int, default=0, help="of the moments")
    made.add_argument("--kernel", nargs="+", help="be one of the processes")
    given = made.parse_args()
    warnings.simplefilter("ignore")
    if given.kernel:
        what, *rest = given.kernel
        if what == "kernel":
            kernel(int(rest[0]))
        elif what == "one_process":
            one_process(int(rest[0]))
        elif what == "calls":
            calls(rest[0] == "keep", int(rest[1]))
        else:
            keeper_killed()
        return 0
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        report = Report("kept", "two worker processes of one thread")
        report.details = {"seed": given.seed}
        if "a" in given.only:
            kernels(report, given.steps, given.kills, random.Random(given.seed))
        if "b" in given.only:
            messages(report, 9, 100)
        if "c" in given.only:
            lost(report)
        return report.finish(given)


if __name__ == "__main__":
    sys.exit(main())
