"""The deterministic mode: what a process on a GPU is told, against vLLM's own mode, and where it is refused."""

import json
import os
import subprocess
import sys

import pytest
from expect import refuses
from rows import every_row

from hfsdk.core.errors import PlacementError
from hfsdk.engine.process import deterministic, gpus


def run(code, **environment):
    """Run code in a process of its own and return what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_is_set_where_it_was_not_asked_for(driver):
    assert deterministic.environment(False) == {}


def test_nothing_is_set_on_processors(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "DRIVER_FILE", tmp_path / "none")
    assert deterministic.environment(True) == {}


def test_the_process_starts_with_what_vllms_own_mode_sets(driver):
    """NCCL and cuBLAS read their variables once, and the trainer is there before vLLM's first engine."""
    pytest.importorskip("vllm")
    ours = deterministic.environment(True)
    code = """
import json, os
from unittest import mock
from vllm.model_executor.determinism import batch_invariant as mode
before = dict(os.environ)
mode.override_envs_for_invariance()
changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
hopper = mock.Mock(is_rocm=lambda: False, is_device_capability_family=lambda family: family == 90, dispatch_key="CUDA")
with mock.patch.multiple(mode, current_platform=hopper, _resolve_block_sizes=mock.DEFAULT), mock.patch("torch.library.Library"), \\
        mock.patch("torch.backends.cuda.preferred_blas_library"):
    mode.enable_batch_invariant_mode()
then = {name: value for name, value in os.environ.items() if before.get(name) != value}
print(json.dumps([changed, then]))
"""
    bare, hopper = run(code, VLLM_LOGGING_LEVEL="ERROR")
    own = {name: value for name, value in {**bare, **hopper}.items() if name != "NCCL_NO_CACHE"}
    assert own.items() <= ours.items()
    assert set(ours) - set(own) == {"VLLM_BATCH_INVARIANT", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"}
    _, after = run(code, VLLM_LOGGING_LEVEL="ERROR", **ours)
    assert after.keys() <= {"NCCL_NO_CACHE"}, "once an engine is built something else holds than before"


def test_hopper_and_newer_have_it():
    with every_row() as row:
        for capability in [(9, 0), (10, 0), (12, 0)]:
            with row(capability):
                check_hopper_and_newer_have_it(capability)


def check_hopper_and_newer_have_it(capability):
    deterministic.check_gpu("NVIDIA H100 80GB HBM3", capability)


def test_older_gpus_are_refused_with_both_capabilities():
    with every_row() as row:
        for name, capability, words in [("A100", (8, 0), "8.0"), ("L4", (8, 9), "8.9"), ("V100", (7, 0), "7.0")]:
            with row(name, capability, words):
                check_older_gpus_are_refused_with_both_capabilities(name, capability, words)


def check_older_gpus_are_refused_with_both_capabilities(name, capability, words):
    with refuses(PlacementError, "deterministic=True", "9.0", f"{name} has {words}"):
        deterministic.check_gpu(name, capability)


def test_below_9_0_vllm_would_take_the_gradient_of_linear():
    """Why ``LEAST_CAPABILITY`` holds, though vLLM has kernels for A100s: they stand under autograd's composite ``linear``."""
    pytest.importorskip("torch")
    code = """
import json, torch
library = torch.library.Library("aten", "IMPL")
library.impl("aten::linear", lambda input, weight, bias=None: input.detach() @ weight.detach().t(), "CPU")
weight = torch.nn.Parameter(torch.ones(3, 4))
try:
    torch.nn.functional.linear(torch.ones(2, 4), weight).sum().backward()
    print(json.dumps(weight.grad is not None))
except NotImplementedError:
    print(json.dumps(False))
"""
    assert run(code) is False


def test_torch_refuses_what_has_no_order_but_not_inside_vllm():
    pytest.importorskip("torch")
    code = """
import json, torch
from hfsdk.engine.process import deterministic
found = [torch.are_deterministic_algorithms_enabled()]
with deterministic.any_algorithm():
    found.append(torch.are_deterministic_algorithms_enabled())
deterministic.switch_on()
found.append(torch.are_deterministic_algorithms_enabled())
try:
    with deterministic.any_algorithm():
        found.append(torch.are_deterministic_algorithms_enabled())
        raise ValueError
except ValueError:
    found.append(torch.are_deterministic_algorithms_enabled())
print(json.dumps([found, torch.utils.deterministic.fill_uninitialized_memory]))
"""
    assert run(code) == [[False, False, True, False, True], False]


def test_it_asks_before_torch_is_imported():
    code = (
        "import sys, json, hfsdk.engine.process.deterministic; "
        "print(json.dumps([m for m in ('torch', 'vllm') if m in sys.modules]))"
    )
    assert run(code) == []
