"""A real session that is closed leaves no process and no memory behind, and what was measured stays readable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gc, json
import psutil
import hfsdk as hf
from hfsdk.engine.calls import queries as q
from hfsdk.session.parts import parts_of

session = hf.Session(devices=1, name="closed")
actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-4))
session.reference(actor), session.reward(lambda completions: [float(len(c)) for c in completions])
run = session.train(hf.GRPO(max_new_tokens=8), session.prompts(["one", "two"], batch_size=2), steps=2, progress=False)
batch = run.last.batch
text, scores, tokens = batch.text(), list(batch["scores"]), repr(batch[:1].tokens())
look = lambda: [repr(session.trace), session.dataflow.to_text(), session.history.to_pandas().to_csv(), session.trace[0].duration_s]
before, pids = look(), [s.pid for s in parts_of(session).client.send(q.Devices())]
job = parts_of(session).client._controller._runtime._job_id
session.close()
gc.collect()
assert look() == before
assert batch.text() == text and list(batch["scores"]) == scores and repr(batch[:1].tokens()) == tokens
assert session.report("REPORT").stat().st_size > 10_000
try:
    batch["rollout_log_probs"]
    words = "read"
except hf.SessionClosedError as error:
    words = str(error)
import ray
print(json.dumps({"pids": pids, "job": job, "words": words, "ray": ray.is_initialized()}))
"""


@pytest.mark.timeout(300)
def test_a_closed_session_is_readable_and_leaves_nothing(ray_here, tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    script = SCRIPT.replace("REPORT", str(tmp_path / "r.html"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert not [pid for pid in told["pids"] if Path(f"/proc/{pid}").exists()]
    assert not list(Path("/dev/shm").glob(f"hfsdk.{told['job']}*"))
    assert not told["ray"], "looking starts no other Ray"
    assert "went with the workers" in told["words"]
