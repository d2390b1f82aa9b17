"""Ray with GPUs that are not there, on two nodes: which GPU a worker has, what it sees, what is refused. One run (fake_gpus.py)
tells it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN_S = 300
"""On a quiet machine about a tenth of it."""


@pytest.fixture(scope="module")
def told():
    torch = pytest.importorskip("torch")
    pytest.importorskip("ray")
    if torch.cuda.is_available():
        pytest.skip("there are real GPUs here")
    script = Path(__file__).with_name("fake_gpus.py")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=RUN_S, cwd=script.parent)
    found = dict(json.loads(line) for line in run.stdout.splitlines() if line.startswith('["'))
    assert run.returncode == 0, f"it came as far as {list(found)}\n{run.stderr[-4000:]}"
    return found


def test_every_worker_has_a_gpu_and_sees_all_of_its_node(told):
    first, second = sorted(told["shown"][:2]), sorted(told["shown"][2:])
    assert first == [[["4"], "4,5", 0], [["5"], "4,5", 1]]
    assert second == [[["2"], "2,6", 0], [["6"], "2,6", 1]]


def test_devices_fill_one_node_after_the_other(told):
    assert told["three"][1] == [0, 0, 1]


def test_more_devices_than_gpus_are_refused(told):
    kind, words = told["too many"]
    assert kind == "PlacementError"
    assert "5 devices asked for; Ray has 4 GPUs." in words


def test_gpus_that_torch_does_not_see_are_refused_before_anything_is_loaded(told):
    assert told["cluster"][1] == 2
    kind, words = told["first call"]
    assert kind == "PlacementError", words
    assert "Ray gave this worker GPU" in words
    assert "sees 0 GPUs" in words
