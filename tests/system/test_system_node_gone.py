"""A node of two leaves in the middle of a run and comes back: node_gone.py tells what became of the run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hfsdk.session.run_record import MEASURED

pytestmark = pytest.mark.slow

RUN_S = 420
"""On a quiet machine about a fifth of it."""


@pytest.fixture(scope="module")
def told():
    torch = pytest.importorskip("torch")
    for package in ("ray", "vllm", "megatron.core"):
        pytest.importorskip(package)
    if torch.cuda.is_available():
        pytest.skip("the nodes of this test have processors only")
    script = Path(__file__).with_name("node_gone.py")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(script.parents[2])}, cwd=script.parent,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=RUN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nit took longer than {RUN_S} s"
    found = {name: value for name, value, _ in (json.loads(line) for line in out.splitlines() if line.startswith('["'))}
    assert process.returncode == 0, f"it came as far as {list(found)}\n{err[-4000:]}"
    return found


def test_the_run_goes_on_over_one_node_and_over_both_again(told):
    disturbed = told["disturbed"]
    smaller, whole = disturbed["resized"]
    assert smaller[1:] == [1, f"node 1 ({address(disturbed)}) left the cluster"]
    assert whole[1:] == [2, f"node 1 ({address(disturbed)}) came back"]
    assert whole[0] > smaller[0]
    assert disturbed["placed"] == ["tp1 pp1 dp2", [[0, 1]]]


def test_one_node_is_one_death_and_each_change_is_drawn(told):
    (restored,) = told["disturbed"]["restores"]
    assert "a worker died in step" in restored
    died, back = told["disturbed"]["marks"]
    assert died == restored
    assert "came back: after step" in back


def test_what_is_planned_was_told(told):
    assert any("it goes on over device 0 (actor 'tp1 pp1 dp1'" in text for text in told["disturbed"]["messages"])


def test_samples_are_those_of_the_undisturbed_run(told):
    disturbed, undisturbed = told["disturbed"]["rows"], told["undisturbed"]["rows"]
    assert [row["step"] for row in disturbed] == [row["step"] for row in undisturbed] == [*range(len(disturbed))]
    assert [row["responses"] for row in disturbed] == [row["responses"] for row in undisturbed], "every token"
    for row, other in zip(disturbed, undisturbed, strict=True):
        numbers = {name: value for name, value in row.items() if name not in MEASURED}
        assert numbers == pytest.approx({name: other[name] for name in numbers}, rel=1e-3, abs=1e-4)


def address(told):
    return next(text for text in told["messages"] if "shrink=True" in text).partition("(")[2].partition(")")[0]
