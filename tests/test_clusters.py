"""What docs/clusters.md hands out: manifests that KubeRay knows every field of, batch scripts that start what they say."""

import copy
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
FOLDER = ROOT / "docs" / "clusters"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
TWO_NODES = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "4", "SLURMD_NODENAME": "first"}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def manifest(name):
    return pytest.importorskip("yaml").safe_load((FOLDER / name).read_text(encoding="utf-8"))


def faults(document):
    jsonschema = pytest.importorskip("jsonschema")
    fields = json.loads((ROOT / "tests" / "data" / "raycluster_fields.json").read_text(encoding="utf-8"))
    schema = {"$ref": f"#/$defs/{document['kind']}", "$defs": fields["$defs"]}
    return [fault.message for fault in jsonschema.Draft202012Validator(schema).iter_errors(document)]


@pytest.mark.parametrize("name", ["raycluster.yaml", "notebook.yaml"])
def test_a_manifest_has_only_fields_that_exist(name):
    assert faults(manifest(name)) == []


def test_a_field_that_is_misspelt_or_missing_is_seen():
    cluster = manifest("raycluster.yaml")
    misspelt, missing, disabled = (copy.deepcopy(cluster) for _ in range(3))
    misspelt["spec"]["authOption"] = misspelt["spec"].pop("authOptions")
    del missing["spec"]["workerGroupSpecs"][0]["maxReplicas"]
    disabled["spec"]["authOptions"]["mode"] = "none"
    assert all(faults(document) for document in (misspelt, missing, disabled))


def test_the_notebooks_pod_joins_that_cluster_with_its_token():
    cluster, pod = manifest("raycluster.yaml"), manifest("notebook.yaml")
    name, (notebook,) = cluster["metadata"]["name"], pod["spec"]["containers"]
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    env = {one["name"]: one for one in notebook["env"]}
    assert env["RAY_AUTH_MODE"]["value"] == "token"
    assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": name, "key": "auth_token"}
    assert f"ray start --address={name}-head-svc:6379 --num-cpus=0 --num-gpus=0" in notebook["args"][0]
    subprocess.run(["bash", "-n"], input=notebook["args"][0], text=True, check=True)


def test_every_mount_has_its_volume_and_every_pod_the_shared_one():
    cluster, pod = manifest("raycluster.yaml")["spec"], manifest("notebook.yaml")["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for spec in [pod, *(group["template"]["spec"] for group in groups)]:
        (container,) = spec["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
        assert mounts["shared"] == "/shared"


def test_the_cluster_has_the_ray_that_the_locks_pin():
    (pinned,) = re.findall(r"^ray==([\d.]+)", (ROOT / "requirements" / "cuda-py312.lock").read_text(encoding="utf-8"), re.M)
    assert manifest("raycluster.yaml")["spec"]["rayVersion"] == pinned


def run_script(script, folder, status=0):
    """Run a batch script with commands of our own; return its exit code and what was called, with the environment's token mode."""
    commands, calls = folder / "commands", folder / "calls"
    commands.mkdir()
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text("")
    joined = f"until grep -q 'ray start --address' {calls}; do sleep 0.02; done"  # what waits for the nodes, here for the other one
    program = f"case $1 in -) {joined};; train.py) exit {status};; esac"
    said = {"hostname": "echo '10.0.0.4 192.168.0.4 '", "python": program}
    ends = {"ray": "true", "srun": f'case "$*" in *symmetric-run*) exit {status};; esac'}
    for name, body in (said | ends).items():
        stub = commands / name
        stub.write_text(f'#!/bin/bash\necho "{name} $* [$RAY_AUTH_MODE]" >> {calls}\n{body}\n')
        stub.chmod(0o755)
    env = TWO_NODES | {"PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(folder)}
    done = subprocess.run(
        ["bash", script, "train.py", "--steps", "3"],
        cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_batch_script_is_bash_and_never_starts_ray_without_a_token(script, tmp_path):
    subprocess.run(["bash", "-n", script], check=True)
    _, calls = run_script(script, tmp_path)
    starts = [call for call in calls if "ray start" in call or "symmetric-run" in call]
    assert starts
    assert all(call.endswith("[token]") for call in starts)
    (made,) = (number for number, call in enumerate(calls) if "mkdir -m 700 /tmp/hfsdk-77" in call)
    assert made < calls.index(starts[0]), "the private folder is there before Ray is"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
@pytest.mark.parametrize("status", [0, 3])
def test_a_batch_script_ends_as_its_program_did_and_removes_its_folder(script, status, tmp_path):
    code, calls = run_script(script, tmp_path, status)
    assert code == status
    assert "rm -rf /tmp/hfsdk-77" in calls[-1]


def test_symmetric_run_is_called_on_every_node_and_the_program_stands_behind_its_options(tmp_path):
    _, calls = run_script(FOLDER / "hfsdk.sbatch", tmp_path)
    (call,) = (call for call in calls if "symmetric-run" in call)
    options, program = call.split(" -- ")
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in options
    assert "--address 10.0.0.4:6379 --min-nodes 2" in options
    assert program.startswith("python train.py --steps 3")
    assert not re.search(r"--(head|port|block|node-ip-address|include-dashboard)\b", options), "it refuses these, or a worker does"


def test_by_hand_the_head_is_this_node_and_the_workers_are_the_others(tmp_path):
    _, calls = run_script(FOLDER / "by-hand.sbatch", tmp_path)
    head, worker = (next(call for call in calls if part in call) for part in ("ray start --head", "ray start --address"))
    assert "--node-ip-address=10.0.0.4 --port=6379" in head
    assert "--nodes=1 --ntasks=1" in worker
    assert "--exclude=first" in worker
    assert "--address=10.0.0.4:6379" in worker
    order = [call.split()[0] + call.split()[1] for call in calls if call.startswith(("python", "ray "))]
    assert order.index("python-") < order.index("pythontrain.py"), "it waits for all nodes before the program begins"


def test_the_pinned_ray_has_symmetric_run():
    ray = pytest.importorskip("ray")
    assert (Path(ray.__file__).parent / "scripts" / "symmetric_run.py").exists()


def test_the_pages_blocks_are_python_and_bash_and_its_files_exist():
    assert blocks("python")
    assert blocks("bash")
    for block in blocks("python"):
        compile(block, "docs/clusters.md", "exec")
    for block in blocks("bash"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    named = set(re.findall(r"\]\(clusters/([\w.-]+)\)", PAGE))
    assert named == {path.name for path in FOLDER.iterdir()}
