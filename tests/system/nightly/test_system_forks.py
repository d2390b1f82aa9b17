"""Workers on processors are forks of one process that has imported the engines (``hfsdk/engine/ray/fork_server.py``)."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from expect import until

import hfsdk as hf
from hfsdk.engine.ray import fork_server


def look(rank):
    """What shows that a worker began as a new process of Ray would, and that nothing was imported which it does not need."""
    import ctypes

    import torch

    own = psutil.Process()
    return {
        "alone": os.getpgrp() == os.getpid(),
        "parent": " ".join(own.parent().cmdline()),
        "server": own.ppid(),
        "title": own.cmdline()[0],
        "raylet": int(os.environ["RAY_RAYLET_PID"]),
        "nice": own.nice(),
        "oom": int(Path("/proc/self/oom_score_adj").read_text(encoding="utf-8")),
        "folder": os.getcwd(),
        "threads": (os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), ctypes.CDLL(None).omp_get_max_threads()),
        "needless": sorted(name for name in sys.modules if name.startswith(("vllm.entrypoints.openai.", "cv2"))),
        "child": subprocess.run(["/bin/sh", "-c", "exit 3"], check=False).returncode,
    }


def test_workers_are_forks_and_as_new_processes_would_be(live):
    seen = live.actor.run(look)
    raylet = psutil.Process(seen[0]["raylet"])
    for worker in seen:
        assert "worker_forks" in worker["parent"]
        assert worker["title"].startswith("ray::"), "as Ray names what it starts"
        assert worker["alone"], "Ray ends a worker's whole group with it"
        assert (worker["nice"], worker["oom"]) == (min(19, raylet.nice() + 15), 1000), "as Ray has its workers"
        assert (worker["folder"], worker["threads"], worker["child"]) == (raylet.cwd(), ("1", 1, 1), 3)
        assert worker["needless"] == []
    assert raylet.name() == "raylet"


def test_another_number_of_threads_is_that_of_forks_too(ray_here):
    several = os.cpu_count() or 1
    if several == 1:
        pytest.skip("this machine has one processor: each worker has one thread")
    with hf.Session(devices=1, name="threads") as session:
        (worker,) = session.critic("tiny").run(look)
    assert worker["threads"] == (str(several), several, several), "those of the server would be one"
    assert "worker_forks" in worker["parent"]


ROOT = Path(__file__).parents[3]
HERE = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}

ON_ITS_OWN = """
import json, sys, psutil
sys.path.insert(0, sys.argv[1])
from test_system_forks import look
import hfsdk as hf
with hf.Session(devices=1, name="forks") as session:
    before = session.critic("tiny").run(look)[0]["parent"]
    (server,) = [p for p in psutil.Process().children() if "worker_forks" in " ".join(p.cmdline())]
    server.kill()
    server.wait()
    with hf.Session(devices=1, name="without") as other:
        without = other.critic("tiny").run(look)[0]["parent"]
    after = session.models.critic.run(look)[0]["parent"]
print(json.dumps(["worker_forks" in parent for parent in (before, without, after)] + ["raylet" in without]))
"""


@pytest.mark.timeout(300)
def test_where_the_server_has_ended_ray_starts_workers(ray_here):
    env = {name: value for name, value in HERE.items() if name != fork_server.ENGINES}
    ended = subprocess.run([sys.executable, "-c", ON_ITS_OWN, str(Path(__file__).parent)], capture_output=True, text=True, env=env)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == [True, False, False, True], "and a worker outlives what it was forked from"


KILLED = """
import os, psutil, signal, sys
sys.path.insert(0, sys.argv[1])
from test_system_forks import look
import hfsdk as hf
with hf.Session(devices=1, name="forks") as session:
    session.critic("tiny").run(look)
with hf.Session(devices=1, name="again") as session:
    server = session.critic("tiny").run(look)[0]["server"]
    assert server not in [child.pid for child in psutil.Process().children()], "it is a child of what imported"
    assert "torch" not in sys.modules, "a controller computes nothing"
    print(server, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(300)
def test_one_process_imports_for_every_ray_and_its_forks_end_with_their_starters(ray_here):
    there = contextlib.nullcontext() if fork_server.ENGINES in os.environ else fork_server.engines_imported()
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent)]
    with there:
        env = HERE | {fork_server.ENGINES: os.environ[fork_server.ENGINES]}
        for _ in range(2):
            ended = subprocess.run(command, capture_output=True, text=True, env=env)
            assert ended.returncode == -9, ended.stderr[-3000:]
            server = int(ended.stdout)
            until("the server to end with its starter", lambda server=server: not psutil.pid_exists(server))
            with socket.socket(socket.AF_UNIX) as asker:
                asker.connect(env[fork_server.ENGINES])  # what imported is there for the next
