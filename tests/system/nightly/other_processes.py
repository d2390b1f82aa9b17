"""Processes beside the tests' own: scripts that tell what they saw, and what is left of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT_S = 900
"""How long a script on nodes of its own may take; on a quiet machine it takes about a fifth."""


def own_processes(pids_then):
    """Those of some process ids that still run; Ray's own agents, which end themselves a minute later, left out."""
    import psutil

    alive = []
    for pid in pids_then:
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and "Agent" not in command:
                alive.append((pid, command))
        except psutil.NoSuchProcess:
            continue
    return alive


def told_by(script):
    """Run a script of this folder on nodes of its own; return what it told as lines of JSON ``[name, value, seconds]``, by name."""
    torch = pytest.importorskip("torch")
    for package in ("ray", "vllm", "megatron.core"):
        pytest.importorskip(package)
    if torch.cuda.is_available():
        pytest.skip("the nodes of this test have processors only")
    path = Path(__file__).with_name(script)
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (path.parents[3], path.parents[1])))},
        cwd=path.parent,  # Ray puts the working directory on workers' path
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=SCRIPT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it tells where each of its threads is
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nit took longer than {SCRIPT_S} s"
    lines = [line for line in out.splitlines() if line.startswith('["')]  # raylets say there that a worker was killed
    told = [json.loads(line) for line in lines]
    assert process.returncode == 0, f"it came as far as {[(name, seconds) for name, _, seconds in told]}\n{err[-6000:]}"
    return {name: value for name, value, _ in told}
