"""README's programs run as they stand: in order, in one process that begins in an empty folder; that for a cluster in its own.

For time the others than the first train for two steps, and not for as many as would show something.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from expect import each

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
PRINTED = re.findall(r"^```text\n(.*?)^```$", README, re.M | re.S)
ON_CLUSTER = 'hf.Session("auto"'

RUN = """
import json, sys
namespace = {"__name__": "__main__"}
for number, block in enumerate(json.loads(sys.argv[1])):
    print("block", number, flush=True)
    exec(compile(block, f"block {number} of the README", "exec"), namespace)
"""

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20))
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def cluster():
    """The address of a Ray cluster of two devices on this machine."""
    holder = subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield holder.stdout.readline().strip()
    holder.stdin.close()
    holder.wait(60)
    holder.stdout.close()


def run(command, folder, **environment):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def shape(printed):
    """The first word of every line, numbers aside: what is the same on every machine."""
    return [re.sub(r"[\d.]+", "#", line.split()[0]) for line in printed.splitlines() if line.strip()]


def test_the_first_program_prints_what_is_shown_below_it(tmp_path):
    printed = run([ROOT / "scripts" / "readme_transcript.py"], tmp_path)
    assert shape(printed) == shape(PRINTED[0])


@pytest.mark.timeout(1500)
def test_every_program_runs_in_order(tmp_path):
    """But for the first, of which the others need the import alone, and which has its own test."""
    here = [re.sub(r"\bsteps=(?:20|5)\b", "steps=2", block) for block in BLOCKS[1:] if ON_CLUSTER not in block]
    printed = run(["-c", RUN, json.dumps(["import hfsdk as hf", *here])], tmp_path)
    assert printed.count("block ") - 1 == len(here) == 3
    assert {path.name for path in tmp_path.iterdir()} >= {"my-model", "my-model-trained", "runs", "plan.html"}


def test_the_program_for_a_cluster_runs(cluster, tmp_path):
    """It finds the cluster by its address in the environment, as on one of its nodes."""
    (block,) = [block for block in BLOCKS if ON_CLUSTER in block]
    printed = run(["-c", RUN, json.dumps([block])], tmp_path, RAY_ADDRESS=cluster)
    assert "critic.update" in printed
    assert (tmp_path / "checkpoint").is_dir()


@each("block", BLOCKS[1:])
def test_each_way_is_about_ten_lines(block):
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
