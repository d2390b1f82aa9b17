"""``benchmarks/gpu.py`` rehearsed on the processor, and what it says of a stage that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import gpu
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return gpu


def call(*options):
    return subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=280, check=False)


def test_every_stage_passes_on_the_processor(tmp_path, gpu):
    done = call("--rehearse", "--check", "--json", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert [figure["name"] for figure in told["figures"]] == list(gpu.NAMES)
    assert all(told[name]["figures"] for name in gpu.NAMES)
    assert done.stdout.count("PASS") == len(gpu.NAMES)


def test_a_stage_that_raises_has_failed_and_the_next_one_runs(gpu):
    wrong, right = gpu.run(["no such stage", "spans"], rehearse=True)
    assert wrong["failures"] == ["KeyError: 'no such stage'"]
    assert "Traceback" in wrong["output"]
    assert right["failures"] == []


def test_a_process_that_dies_has_failed(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "__file__", str(SCRIPT.with_name("no_such_script.py")))
    (found,) = gpu.run(["join"], rehearse=True)
    assert found["failures"] == ["it ended with 2"]


def test_without_a_gpu_it_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = call("--check")
    assert done.returncode == 2
    assert "--rehearse runs every stage on the processor" in done.stderr


def test_an_unknown_stage_is_refused():
    done = call("--only", "join,nothing")
    assert done.returncode == 2
    assert "--only takes join, constants" in done.stderr
