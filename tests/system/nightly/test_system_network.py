"""What leaves the machine: nothing. A network of its own, where every name and every address that is asked for is written down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hfsdk.assets import home

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

SESSION = """
import hfsdk as hf

if __name__ == "__main__":
    with hf.Session(devices=1, wait=True) as session:
        session.actor("tiny"), session.reference("tiny"), session.critic("tiny")
        session.reward(lambda prompts, completions, **columns: [float(len(text)) for text in completions])
        prompts = session.prompts(["a film", "one more"], batch_size=2)
        run = session.train(hf.PPO(), prompts, steps=1, track=["tensorboard", "wandb", "mlflow"])
        session.report("report.html")
        assert len(run.rows) == 1
"""

CALLS_HOME = """
import socket

try:
    socket.getaddrinfo("example.com", 443)
except OSError:
    pass
socket.socket().connect_ex(("192.0.2.7", 443))
"""


@pytest.fixture
def watched(tmp_path):
    """``watch(code, **environment)``: run a script in such a network, and return what it asked for."""
    alone = ["unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]  # nothing inside outlives it
    tools = all(map(shutil.which, ("unshare", "ip")))
    if not tools or subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespace may be made here: that takes root, unshare and ip")

    def watch(code, **environment):
        (tmp_path / "script.py").write_text(code)
        known = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}  # nothing that says it is a test
        own = {"HOME": str(tmp_path), "HFSDK_HOME": str(home()), "PYTHONPATH": str(ROOT), **environment}
        command = [*alone, sys.executable, HERE / "network_watch.py", "seen.json", sys.executable, "script.py"]
        result = subprocess.run(command, cwd=tmp_path, env=known | own, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads((tmp_path / "seen.json").read_text())

    return watch


def test_the_watch_sees_a_name_and_an_address(watched):
    seen = watched(CALLS_HOME)
    assert (seen["asked"], seen["sent"]) == (["example.com"], ["192.0.2.7"])


@pytest.mark.timeout(900)
def test_a_session_with_every_tracker_asks_for_nothing_beyond_the_machine(watched, tmp_path):
    for package in ("tensorboard", "wandb", "mlflow", "ray", "vllm"):
        pytest.importorskip(package)
    seen = watched(SESSION, RAY_USAGE_STATS_REPORT_INTERVAL_S="1")  # else Ray's first report would come after a minute
    assert (seen["asked"], seen["sent"]) == ([], [])
    assert {path.name for path in tmp_path.iterdir()} >= {"runs", "wandb", "mlflow.db", "report.html"}
