"""A run whose second node leaves and comes back, and the same run undisturbed, told as lines of JSON: ``python node_gone.py``."""

import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zlib
from pathlib import Path

from two_nodes import HOLDER, tell

STEPS, WAIT_S = 40, 120.0


def checksum(batch):
    """Of every token of a step's responses."""
    return {"responses": zlib.crc32(batch["response"].flat.tobytes())}


def until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def disturb(holder, session):
    """Take the node away while a call runs, and give it back when the run goes on without it."""

    def say(command):
        holder.stdin.write(f"{command}\n")
        holder.stdin.flush()
        holder.stdout.readline()

    until(lambda: session.run is not None and len(session.run.rows) >= 3)
    say("remove")
    until(lambda: len(session.run.resized) == 1)
    rows = len(session.run.rows)
    until(lambda: len(session.run.rows) > rows)
    say("add")


def trained(hf, address, folder, holder=None, steps=STEPS):
    from system_helpers import OPENINGS, lengths_reward

    session = hf.Session(address, seed=3, name="node gone")
    actor = session.actor("tiny", train="dp2", rollout="dp2", optimizer=hf.AdamW(lr=3e-4))
    session.critic("tiny", train="dp2", optimizer=hf.AdamW(lr=1e-3))
    session.reference(actor)
    session.reward(lengths_reward)
    session.place("colocate")
    prompts = session.prompts(OPENINGS, batch_size=8, seed=1)
    ends = []

    def stop(row):
        """Two steps after the node is back."""
        run = session.run
        if len(run.resized) == 2:
            ends.append(row["step"])
        return len(ends) == 2

    disturber = threading.Thread(target=disturb, args=(holder, session), daemon=True)
    if holder is not None:
        disturber.start()
    run = session.train(
        hf.PPO(max_new_tokens=6), prompts, steps=steps, save_every=2, folder=folder, progress=False, metrics=[checksum], stop=stop,
        on_death="restore", shrink=True,
    )  # fmt: skip
    placed = str(session.models.actor.role.train), [list(pool.devices) for pool in session.placement.placement.pools]
    spans = [span for k in range(max(0, session.trace.step - 30), session.trace.step + 1) for span in session.trace[k].spans]
    marks = [str(span.attrs["why"]) for span in spans if span.name == "restore"]
    told = {
        "rows": list(run.rows), "restores": [str(one) for one in run.restores], "marks": marks, "placed": placed,
        "resized": [(one.step, one.num_devices, one.why) for one in run.resized], "messages": list(session.messages),
    }  # fmt: skip
    session.close()
    return told


def main(holder, address, folder):
    import hfsdk as hf

    warnings.simplefilter("ignore")
    disturbed = trained(hf, address, folder / "disturbed", holder)
    tell("disturbed", disturbed)
    tell("undisturbed", trained(hf, address, folder / "undisturbed", steps=len(disturbed["rows"])))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with tempfile.TemporaryDirectory(prefix="hfsdk-node-gone-") as folder:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
        small = HOLDER.replace("num_cpus=2", "num_cpus=1")
        holder = subprocess.Popen(
            [sys.executable, "-c", small, "{}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            main(holder, holder.stdout.readline().strip(), Path(folder))
        finally:
            holder.stdin.close()
            holder.wait(30)
