"""What a fork of the process that has imported the engines can stand in for, and what forks must not share."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from expect import each

from hfsdk.engine.ray import fork_server, fork_setup_worker

DRAWS = """
import os
from hfsdk.engine.ray import fork_server
fork_server._import_ray({})
from ray._raylet import WorkerID
for _ in range(3):
    if os.fork() == 0:
        print(WorkerID.from_random().hex(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_forks_do_not_draw_the_same_names():
    """Two workers that started at once put objects of one name: the second died, and the driver waited for it for ever."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", DRAWS], env=env, capture_output=True, text=True, check=True)
    assert len(set(done.stdout.split())) == 3


def test_what_imports_the_engines_looks_into_no_place_that_others_share(tmp_path, monkeypatch):
    """torch reads a file in its cache then, which lies in the place for temporary files where nothing else is said."""
    given = {}
    monkeypatch.setattr(fork_server.subprocess, "Popen", lambda command, **options: given.update(options))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    (tmp_path / "none").write_text("where no folder can be made")
    with socket.socket(socket.AF_UNIX) as listener:
        fork_server._started(tmp_path, listener, subprocess.DEVNULL)
    assert given["env"]["TMPDIR"] == str(tmp_path)
    assert given["env"]["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor"), "beside what it listens at, for want of a cache"


@each(
    ("context", "can"),
    [
        ({}, True),
        ({"env_vars": {"RAY_max_direct_call_object_size": "0"}, "py_executable": sys.executable, "command_prefix": []}, True),
        ({"env_vars": {"OMP_NUM_THREADS": "4"}}, False),
        ({"py_executable": "/usr/bin/other"}, False),
        ({"command_prefix": ["nsys"]}, False),
        ({"env_vars": {}, "override_worker_entrypoint": "/other.py"}, False),
    ],
)
def test_which_environments_a_fork_can_have(context, can):
    assert fork_setup_worker.forkable(context) is can
