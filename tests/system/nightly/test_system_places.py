"""A session whose place for temporary files holds what other users put there, where libraries look for files of known names."""

import getpass
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hfsdk.engine.ray import fork_server

NOBODY = 65534
SESSION = """
import json, os
import hfsdk as hf

def where(rank):
    import tempfile
    return tempfile.gettempdir()

def lengths(batch):
    import tempfile
    open(os.path.join(tempfile.gettempdir(), "left"), "w").close()
    return [float(len(response)) for response in batch["response"]]

with hf.Session(devices=2, seed=3, name="places") as session:
    actor = session.actor("tiny", rollout="tp2")
    reward = session.reward(lengths)
    batch = reward.compute_scores(actor.generate(["Once upon a time"] * 2, max_new_tokens=4, ignore_eos=True))
    rows = [len(response) for response in batch["response"]]
    seen = sorted(os.listdir(os.environ["TMPDIR"]))
    print(json.dumps({"rows": rows, "seen": seen, "where": actor.run(where)}), flush=True)
"""
READ_AT_IMPORT = "bisect/bisect_status.txt"
"""What torch reads in its cache when inductor is imported."""


@pytest.fixture
def shared(tmp_path):
    """A place of mode 1777 in which another user knew torch's names: a pipe that nobody writes to, in a folder of that user."""
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.geteuid() and str(folder) not in ("/", "/tmp"):
            folder.chmod(0o755)
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    pipe = place / f"torchinductor_{getpass.getuser()}" / READ_AT_IMPORT
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe, 0o666)
    os.mkdir(place / "cache", 0o777)
    if os.geteuid() == 0:
        for path in (place / "cache", pipe, *pipe.parents[: len(READ_AT_IMPORT.split("/"))]):
            os.chown(path, NOBODY, NOBODY)
            path.chmod(0o777)
    return place


@pytest.mark.timeout(600)
def test_what_others_put_where_libraries_look_is_neither_opened_nor_waited_for(ray_here, shared, tmp_path):
    there = sorted(path.name for path in shared.iterdir())
    env = {name: value for name, value in os.environ.items() if name != fork_server.ENGINES}
    env |= {"TMPDIR": str(shared), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(Path(__file__).parents[3])}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"):
        env.pop(name, None)
    done = subprocess.run([sys.executable, "-c", SESSION], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["rows"] == [4, 4]
    (own,) = set(told["seen"]) - set(there)
    assert own.startswith("hfsdk-"), "a session's folder is all that there is of it, and its name is random"
    assert set(told["where"]) == {str(shared / own)}
    assert sorted(path.name for path in shared.iterdir()) == there, "and it goes with all that was in it"
