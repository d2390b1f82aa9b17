"""A session that outlives its kernel: the kernel is killed in the middle of a run, and another one finds everything there."""

from __future__ import annotations

from importlib.util import find_spec

import psutil
import pytest
from expect import refuses, until
from kept_kernel import Kernel, KernelError

BEGIN = """
import hfsdk as hf
session = hf.Session(devices=1, name="kept", keep=True, seed=3)
actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-4))
session.reference(actor)

def brevity(prompts, completions):
    return [-float(len(c)) for c in completions]

reward = session.reward(brevity)
session.place("colocate")
TEXTS = [f"review number {i} says" for i in range(24)]
prompts = session.prompts(TEXTS, batch_size=4)
rollout = reward.compute_scores(actor.generate(next(prompts), max_new_tokens=6))
rollout["scores"].tolist()
"""

ATTACH = """
import hfsdk as hf
session = hf.Session.attach("kept")
"""


@pytest.fixture
def state(tmp_path):
    for package in ("ray", "vllm"):
        if find_spec(package) is None:  # which this process has no need to import
            pytest.skip(f"there is no {package} here")
    return tmp_path / "state"


@pytest.fixture
def kernels(state):
    """Make kernels; at the end those that are left are killed and the sessions closed."""
    made = []

    def make():
        made.append(Kernel(state))
        return made[-1]

    yield make
    for kernel in made:
        if kernel.process.poll() is None:
            kernel.kill()
    if (state / "hfsdk" / "head.json").exists():
        last = Kernel(state)
        last.run("import hfsdk as hf\nfor one in hf.sessions(): one.close()")
        last.end()


def of(state):
    """The processes whose sessions are kept there."""

    def is_one(process):
        try:
            return process.environ().get("XDG_STATE_HOME") == str(state)
        except psutil.Error:
            return False

    return [process.pid for process in psutil.process_iter() if is_one(process)]


def test_a_killed_kernel_leaves_everything_to_the_next(kernels, state):
    first = kernels()
    scores = first.run(BEGIN)
    first.run("session.snapshot('before')")
    first.run("run = session.train(hf.GRPO(n=2, max_new_tokens=6), prompts, steps=400, progress=False, wait=False)")
    until("two steps", lambda: first.run("len(run.rows)") >= 2)
    third = kernels()
    with pytest.raises(KernelError) as refused:
        third.run(ATTACH)
    assert third.end() == 0
    assert refused.value.kind == "SessionInUseError"
    assert str(first.process.pid) in str(refused.value)
    first.kill()

    second = kernels()
    second.run(ATTACH)
    assert second.run("session.batches['rollout']['scores'].tolist()") == scores
    assert second.run("[h.name for h in session.roles]") == ["actor", "reference", "reward"]
    assert second.run("list(session.snapshots)") == ["before"]
    assert "brevity" in second.run("str(dict(session.history.sources))"), "the dead kernel's function, with its source"
    at = second.run("run = session.watch(); len(run.rows)")
    until("a step without the kernel that began the run", lambda: second.run("len(run.rows)") > at)
    assert second.run("[run.state, run.background]") == ["running", True]
    second.run("run.stop(); run.wait(120)")
    stopped, rows, position = second.run(
        f"TEXTS = {[f'review number {i} says' for i in range(24)]!r}\n"
        "[run.state, len(run.rows), session.prompts(TEXTS, batch_size=4, seed=3).position]"
    )
    assert stopped == "stopped"
    assert position == 1 + rows, "of finished steps alone"
    assert second.run("len(session.history)") == rows
    second.run("session.rewind('before')")
    assert second.run("session.models.reward.compute_scores(session.batches['rollout'])['scores'].tolist()") == scores

    second.run("session.close()")
    with refuses(KernelError, "close"):
        second.run("session.models.actor.generate(['a'])")
    assert second.run("repr(hf.sessions())") == "no kept sessions"
    assert second.end() == 0
    until("the end of every process of the session", lambda: not of(state))
