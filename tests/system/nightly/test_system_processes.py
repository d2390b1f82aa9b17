"""Nothing is left behind: sessions in processes of their own, closed and killed. And the messages that cross processes."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from expect import until
from other_processes import own_processes

from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q

TWO_SESSIONS = """
import json, hfsdk as hf
import psutil
from hfsdk.engine.calls import queries as q

def used(session, role):
    return len(role.compute_values(session.batch(prompt=[[1, 2]], response=[[3]]))["values"])

one, two = hf.Session(devices=1, name="one"), hf.Session(devices=2, name="two")
actor = one.actor("tiny")
critic = two.critic("tiny", train="dp2")
assert used(two, critic) == 1
assert len(actor.generate([[1, 2, 3]], max_new_tokens=4)["response"]) == 1
children = [p.pid for p in psutil.Process().children(recursive=True)]
from hfsdk.session.parts import parts_of
folders = [str(parts_of(s).client._controller._runtime._own_folder.path) for s in (one, two)]
mine = [s.pid for s in parts_of(one).client.send(q.Devices())]
jobs = [parts_of(s).client._controller._runtime._job_id for s in (one, two)]
print(json.dumps({"pids": children, "folders": folders, "jobs": jobs}), flush=True)

batch = actor.generate([[1, 2, 3]] * 8, max_new_tokens=480, ignore_eos=True)
while batch.state != "running":
    pass
one.close()
print(json.dumps({"left": [pid for pid in mine if psutil.pid_exists(pid)]}), flush=True)
assert used(two, critic) == 1, "the other session goes on"
running = critic.compute_values(two.batch(prompt=[[1] * 100] * 400, response=[[2] * 300] * 400))
while running.state != "running":
    pass
print(json.dumps({"end": True}), flush=True)
"""

KILLED = """
import json, signal, sys, threading, time, hfsdk as hf
import psutil
from hfsdk.session.parts import parts_of

signal.signal(signal.SIGINT, signal.default_int_handler)
session = hf.Session(devices=2, name="killed")
actor = session.actor("tiny", train="tp2", rollout="tp2")
actor.generate([[1, 2, 3]], max_new_tokens=2).wait()
batch = actor.generate([[1, 2, 3]] * 8, max_new_tokens=480, ignore_eos=True)
while batch.state != "running":
    time.sleep(0.01)
children = psutil.Process().children(recursive=True)

def waits():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame and not (frame.f_code.co_name == "wait" and frame.f_code.co_filename.endswith("core/pending.py")):
        frame = frame.f_back
    return frame

def tell():
    while not waits():
        time.sleep(0.01)
    jobs = [parts_of(session).client._controller._runtime._job_id]
    print(json.dumps({"pids": [p.pid for p in children], "jobs": jobs}), flush=True)  # the interrupt may come from here on

threading.Thread(target=tell).start()
try:
    batch.wait()
    print("finished", flush=True)
except KeyboardInterrupt:
    print(json.dumps({"state": batch.state, "again": len(actor.generate([[1, 2]], max_new_tokens=2)["response"])}), flush=True)
while True:
    actor.generate([[1, 2, 3]] * 8, max_new_tokens=400, ignore_eos=True).wait()
"""


def segments(jobs):
    """Shared memory of these sessions; others may run on the machine."""
    return [p.name for job in jobs for p in Path("/dev/shm").glob(f"hfsdk.{job}*")]


def start(script):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )


def next_line(process):
    line = process.stdout.readline()
    if not line:
        raise AssertionError(f"the script ended: {process.stderr.read()[-3000:]}")
    return json.loads(line)


@pytest.mark.timeout(300)
def test_two_sessions_in_one_process(ray_here):
    process = start(TWO_SESSIONS)
    try:
        first = next_line(process)
        assert next_line(process) == {"left": []}, "closing ends the workers before it returns, also in the middle of a call"
        assert not Path(first["folders"][0]).exists()
        assert next_line(process) == {"end": True}
        assert process.wait(60) == 0, process.stderr.read()
        until("the end of every process", lambda: own_processes(first["pids"]) == [])
        assert not Path(first["folders"][1]).exists(), "a session that nobody closed ends with the interpreter"
        assert segments(first["jobs"]) == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(300)
def test_interrupted_and_killed_driver(ray_here):
    """Ctrl-C as a terminal sends it (to every process of the group), then SIGKILL in the middle of a generation."""
    process = start(KILLED)
    try:
        first = next_line(process)
        os.killpg(process.pid, signal.SIGINT)
        assert next_line(process) == {"state": "cancelled", "again": 1}, "the workers do not hear the terminal's interrupt"
        time.sleep(0.3)
        process.kill()
        until("the end of every process", lambda: own_processes(first["pids"]) == [])
        assert segments(first["jobs"]) == []
    finally:
        process.kill()
        process.communicate()


# ---- the narrow waist


def test_messages_of_a_real_step_pickle(live, monkeypatch):
    """Everything handles send in practice: losses, sampling, own functions, leases."""
    from system_helpers import ppo_batch

    from hfsdk.algorithms import ppo
    from hfsdk.session.parts import parts_of

    sent, controller = [], parts_of(live.session).client._controller
    send = controller.send

    def over_the_wire(message):
        sent.append(type(message))
        return send(pickle.loads(pickle.dumps(message)))

    monkeypatch.setattr(controller, "send", over_the_wire)
    batch = ppo_batch(live)
    rows = live.actor.update(batch, ppo.PolicyLoss()).rows
    assert rows[0]["num_samples"] == 16
    assert live.actor.run(lambda rank: rank.rank) == [0, 1]
    assert len(live.session.trace.spans) > 10
    assert len(batch["values"]) == 16
    assert {m.Submit, m.Wait, m.Fetch, q.InfoOf} <= set(sent)
