"""``benchmarks/gpu.py`` rehearsed on the processor, and what it says of a stage that fails; on a GPU, every stage."""

import ast
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


def call(*options, timeout_s=280):
    return subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=timeout_s, check=False)


def stages(name):
    """Return the names in a constant of the script, which needs no GPU to be read."""
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    (value,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return [*ast.literal_eval(value)]


def test_every_stage_passes_on_the_processor(tmp_path, gpu):
    done = call("--rehearse", "--check", "--json", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert [figure["name"] for figure in told["figures"]] == list(gpu.NAMES)
    assert all(told[name]["figures"] for name in gpu.NAMES)
    assert done.stdout.count("PASS") == len(gpu.NAMES)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", stages("NAMES"))
def test_on_a_gpu_a_part_of_the_engine_passes(stage):
    done = call("--check", "--only", stage)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"PASS {stage}" in done.stdout


@pytest.mark.gpu
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("stage", stages("FULL"))
def test_on_gpus_a_whole_session_passes(stage):
    done = call("--check", "--only", stage, timeout_s=950)
    if done.stdout.startswith("SKIP"):
        pytest.skip(done.stdout.splitlines()[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"PASS {stage}" in done.stdout


def test_a_stage_that_raises_has_failed_and_the_next_one_runs(gpu, tmp_path):
    wrong, right = gpu.run(["no such stage", "spans"], rehearse=True, models=str(tmp_path))
    assert wrong["failures"] == ["KeyError: 'no such stage'"]
    assert "Traceback" in wrong["output"]
    assert right["failures"] == []


def test_stages_read_one_model(gpu, tmp_path):
    found = gpu.run(["replay", "states"], rehearse=True, models=str(tmp_path))
    assert [stage["failures"] for stage in found] == [[], []]
    assert len([*tmp_path.glob("*/model.safetensors")]) == 1


def test_a_process_that_dies_has_failed(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "__file__", str(SCRIPT.with_name("no_such_script.py")))
    (found,) = gpu.run(["join"], rehearse=True, models=str(tmp_path))
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
