"""Sessions that outlive their kernel: kernels that are killed, attach, take over and look; runs that go on without one.

One session for all, with one worker; each kernel is a process. What a test leaves is what the next one finds.
"""

from __future__ import annotations

import json
import time

import psutil
import pytest
from kept_kernel import Kernel, KernelError

pytestmark = pytest.mark.timeout(300)

BEGIN = """
import hfsdk as hf
from hfsdk.run.run import MEASURED
session = hf.Session(devices=1, name="kept", keep=True, seed=3)
actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-4))
ref = session.reference(actor)

def brevity(prompts, completions):
    return [-float(len(c)) for c in completions]

reward = session.reward(brevity)
session.place("colocate")
TEXTS = [f"review number {i} says" for i in range(24)]
prompts = session.prompts(TEXTS, batch_size=4)
rollout = reward.compute_scores(actor.generate(next(prompts), max_new_tokens=6))
other = actor.generate(prompts[0], max_new_tokens=4)
rollout["scores"].tolist()
"""

ATTACH = """
import hfsdk as hf
from hfsdk.run.run import MEASURED
TEXTS = [f"review number {i} says" for i in range(24)]
session = hf.Session.attach("kept")
"""

ROWS = "[{k: v for k, v in r.items() if k not in MEASURED} for r in session.history]"


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module", autouse=True)
def nothing_left(state):
    """At the end the sessions are closed, and nothing of them is left."""
    before = {p.pid for p in psutil.process_iter()}
    yield
    last = Kernel(state)
    last.run("import hfsdk as hf\nfor one in hf.sessions(): one.close()")
    last.end()
    deadline = time.monotonic() + 90
    while left := [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and _ours(p, state)]:
        assert time.monotonic() < deadline, [p.info["cmdline"] for p in left]
        time.sleep(0.2)


@pytest.fixture
def kernels(state):
    """Make kernels; those that a test leaves are killed."""
    made = []

    def make():
        made.append(Kernel(state))
        return made[-1]

    yield make
    for kernel in made:
        if kernel.process.poll() is None:
            kernel.kill()


def _ours(process, state):
    try:
        return process.environ().get("XDG_STATE_HOME") == str(state)
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def begun(state):
    """The first kernel, whose session the others come back to; (scores, kernel)."""
    kernel = Kernel(state)
    scores = kernel.run(BEGIN)
    yield scores, kernel
    if kernel.process.poll() is None:
        kernel.kill()


def test_a_killed_kernel_leaves_everything(begun, kernels):
    scores, first = begun
    first.run("snap = session.snapshot('before'); session.seed = 11; session.perf = hf.PerfModel(train_efficiency=0.6)")
    before = first.run(f"dict(rows={ROWS}, trace=str(session.trace), place=str(session.placement), next=prompts.position)")
    time.sleep(0.7)  # what changed without a message is told meanwhile
    first.kill()
    second = kernels()
    second.run(ATTACH)
    assert second.run("session.batches['rollout']['scores'].tolist()") == scores
    assert second.run("sorted(session.batches)") == ["other", "rollout"]
    number = second.run("rollout = session.batches['rollout']; from hfsdk.session.views import number_of; number_of(rollout)")
    assert second.run(f"session.batches[{number}] is rollout and len(rollout)") == 4
    assert second.run("[session.seed, session.perf.train_efficiency, list(session.snapshots)]") == [11, 0.6, ["before"]]
    assert second.run("[h.name for h in session.roles]") == ["actor", "reference", "reward"]
    assert second.run("prompts = session.prompts(TEXTS, batch_size=4, seed=3); prompts.position") == before["next"]
    assert second.run(ROWS) == before["rows"]
    assert second.run("str(session.trace)") == before["trace"]
    assert "brevity" in second.run("str(dict(session.history.sources))"), "the dead kernel's function, with its source"
    second.run("session.models.reward.compute_scores(rollout)['scores'].tolist()")
    second.run("session.seed = 3; session.rewind('before'); session.forget('before')")
    second.run("del rollout; session.batches.drop('rollout'); session.batches.drop('other')")
    assert second.run("dict(session.batches)") == {}
    assert second.end() == 0


def test_a_run_goes_on_without_a_kernel_and_is_watched_and_steered(begun, kernels, state):
    first = kernels()
    first.run(ATTACH + "prompts = session.prompts(TEXTS, batch_size=4, seed=3)")
    first.send("session.train(hf.GRPO(n=2, max_new_tokens=6), prompts, steps=400, progress=False)")
    looker = kernels()
    looker.run(ATTACH.replace('"kept")', '"kept", read_only=True)'))
    done = "len(session.run.rows) if session.run else 0"
    deadline = time.monotonic() + 60
    while looker.run(done) < 2:
        assert time.monotonic() < deadline
    with pytest.raises(KernelError, match="read_only"):
        looker.run("session.models.actor.generate(['the film'])")
    with pytest.raises(KernelError) as refused:
        kernels().run(ATTACH)
    assert refused.value.kind == "SessionInUseError"
    assert str(first.process.pid) in str(refused.value)
    first.kill()
    second = kernels()
    took = second.run("import time; since = time.perf_counter()\n" + ATTACH + "time.perf_counter() - since")
    assert took < 20, "seconds; the benchmark has the target"
    at = second.run("run = session.watch(); len(run.rows)")
    deadline = time.monotonic() + 60
    while second.run("len(run.rows)") <= at:
        assert time.monotonic() < deadline, "it goes on"
    assert second.run("[run.state, run.background]") == ["running", True]
    assert second.run("run.last.batch['scores'].shape[0]") == 8
    second.run("run.pause(); run.wait(60)")
    paused = second.run("len(run.rows)")
    assert second.run("run.state") == "paused"
    second.run("run.step(); run.wait(60)")
    assert second.run("[len(run.rows), run.state]") == [paused + 1, "paused"]
    second.run("run.resume()")
    assert second.run("run.state") == "running"
    second.run("run.stop(); run.wait(60)")
    rows = second.run("[run.state, len(run.rows), len(session.history)]")
    assert rows[0] == "stopped"
    assert rows[1] == rows[2] >= paused + 1
    assert second.run("session.prompts(TEXTS, batch_size=4, seed=3).position") == 1 + rows[1], "of finished steps alone"
    deadline = time.monotonic() + 60
    while looker.run("[len(session.run.rows), session.run.state]") != [rows[1], "stopped"]:  # it is told a moment later
        assert time.monotonic() < deadline
    assert looker.end() == 0
    assert second.end() == 0


def test_interrupts_pause_stop_and_leave_a_run(begun, kernels):
    kernel = kernels()
    kernel.run(ATTACH + "prompts = session.prompts(TEXTS, batch_size=4, seed=3)\nalgorithm = hf.GRPO(n=2, max_new_tokens=6)")
    other = kernels()
    other.run("import hfsdk as hf, time")
    under_way = "while 'of {} steps, running' not in hf.sessions()['kept'].run: time.sleep(0.05)"
    kernel.send("run = session.train(algorithm, prompts, steps=500, progress=False)")
    other.run(under_way.format(500))
    kernel.interrupt()
    kernel.answer()
    paused = kernel.run("[run.state, run.paused, len(run.rows)]")
    assert paused[:2] == ["paused", True]
    kernel.run("run = session.train(algorithm, prompts, steps=1, progress=False)")
    kernel.run("slow = hf.GRPO(n=4, max_new_tokens=240)")
    kernel.send("run = session.train(slow, prompts, steps=501, progress=False)")
    other.run(under_way.format(501))
    for _ in range(3):
        kernel.interrupt()
        time.sleep(0.15)
    with pytest.raises(KernelError) as stopped:
        kernel.answer()
    assert stopped.value.kind == "KeyboardInterrupt"
    kernel.run("session.run.stop(); session.run.wait(60)")
    assert kernel.run("session.run.state") in ("stopped", "paused"), "as far as it got before the third"
    assert kernel.run("session.models.actor.generate(['the film'], max_new_tokens=2).wait().state") == "done"
    kernel.end()


def test_taking_over_ends_the_turn_of_the_other_kernel(begun, kernels):
    first, second = kernels(), kernels()
    first.run(ATTACH)
    second.run(ATTACH.replace('"kept")', '"kept", take_over=True)'))
    second.run("session.models.actor.generate(['the film'], max_new_tokens=2).wait()")
    deadline = time.monotonic() + 10
    while first.run("session.status") != "closed":
        assert time.monotonic() < deadline
    with pytest.raises(KernelError, match="taken over") as told:
        first.run("session.models.actor.generate(['the film'], max_new_tokens=2).wait()")
    assert told.value.kind == "SessionClosedError"
    assert first.run("session.status") == "closed"
    assert first.end() == 0
    assert second.run("session.models.actor.generate(['the film'], max_new_tokens=2).wait().state") == "done"
    second.run("session.detach()")
    with pytest.raises(KernelError, match="has left the session"):
        second.run("session.models.actor.generate(['the film'], max_new_tokens=2)")
    with pytest.raises(KernelError, match="has left the session"):
        second.run("session.trace.snapshot()")
    assert second.run("[one.attached for one in hf.sessions()]") == [""]
    second.end()


def test_what_fails_in_a_run_is_raised_as_it_would_be_here(begun, kernels, tmp_path):
    kernel = kernels()
    kernel.run(ATTACH + "prompts = session.prompts(TEXTS, batch_size=4, seed=3)\nalgorithm = hf.GRPO(n=2, max_new_tokens=6)")
    with pytest.raises(KernelError) as missing:
        kernel.run("session.train(hf.PPO(), prompts, steps=1)")
    assert missing.value.kind == "PlacementError"
    with pytest.raises(KernelError) as broken:
        kernel.run("session.reward(lambda prompts, completions: 1 / 0)\nsession.train(algorithm, prompts, steps=1, progress=False)")
    assert broken.value.kind == "RewardFunctionError"
    with pytest.raises(KernelError) as unpackable:
        kernel.run(
            "import threading; lock = threading.Lock()\n"
            "session.train(algorithm, prompts, steps=1, metrics=[lambda batch: lock.locked()])"
        )
    assert "cannot travel" in str(unpackable.value)
    kernel.run("session.reward(lambda prompts, completions: [1.0] * len(completions))")
    kernel.run(
        f"run = session.train(algorithm, prompts, steps=2, save_every=1, folder={str(tmp_path / 'saves')!r}, progress=False)"
    )
    assert kernel.run("[run.state, len(run.rows)]") == ["finished", 2]
    assert json.loads((tmp_path / "saves" / "session.json").read_text()), "where it was asked for"
    kernel.run("seen = []\nrun = session.train(algorithm, prompts, steps=3, stop=lambda row: len(seen) == 0, progress=False)")
    assert kernel.run("[run.state, len(run.rows)]") == ["stopped", 1]
    kernel.run("other = session.compare([algorithm, hf.GRPO(n=2, max_new_tokens=5)], prompts, steps=1)")
    kernel.end()


def test_a_worker_that_dies_is_survived_without_a_kernel(begun, kernels, tmp_path):
    kernel = kernels()
    kernel.run(ATTACH + "prompts = session.prompts(TEXTS, batch_size=4, seed=3)\nalgorithm = hf.GRPO(n=2, max_new_tokens=6)")
    pids = kernel.run("[d['pid'] for d in session.placement.view()['devices'].values()]")
    kernel.run(
        f"run = session.train(algorithm, prompts, steps=8, save_every=2, folder={str(tmp_path)!r}, on_death='restore', wait=False)"
    )
    kernel.run("import time\nwhile len(run.rows) < 3: time.sleep(0.02)")
    kernel.kill()
    psutil.Process(pids[0]).kill()
    second = kernels()
    second.run(ATTACH + "session.run.wait(200)")
    assert second.run("[session.run.state, len(session.run.rows)]") == ["finished", 8]
    assert second.run("len(session.run.restores)") in (1, 2), "the restore may meet the same death once more"
    second.end()


def test_names_and_the_list(begun, kernels):
    kernel = kernels()
    kernel.run("import hfsdk as hf")
    for call, words in (
        ("hf.Session(devices=2, keep=True)", "needs a name"),
        ("hf.Session(devices=2, keep=True, name='a b')", "needs a name"),
        ("hf.Session(devices=2, keep=True, name='kept')", "there is a session 'kept' already"),
        ("hf.Session.attach('nobody')", "there is no session 'nobody'"),
        ("hf.sessions()['nobody']", "there is no session 'nobody'"),
        ("hf.Session.simulated('1x2 A100-80GB').detach()", "ends with its kernel"),
    ):
        with pytest.raises(KernelError, match=words) as refused:
            kernel.run(call)
        assert refused.value.kind == "OptionError"
    listed = kernel.run("repr(hf.sessions())")
    assert listed.startswith("kept: 1x1 cpu; since ")
    assert "roles actor, reference, reward" in listed
    assert kernel.run("list(hf.sessions().to_pandas()['name'])") == ["kept"]
    assert kernel.end() == 0


def test_the_end_comes_from_anywhere(begun, kernels, state):
    """Closed by another process: who has it is told; and a session that nobody looks after ends by itself."""
    kernel, other = kernels(), kernels()
    kernel.run(ATTACH)
    other.run("import hfsdk as hf; hf.sessions()['kept'].close()")
    deadline = time.monotonic() + 20
    while kernel.run("session.status") != "closed":
        assert time.monotonic() < deadline
    assert kernel.run("len(session.history) > 3 and len(session.trace.snapshot()) > 0"), "what was measured stays readable"
    with pytest.raises(KernelError, match="was closed"):
        kernel.run("session.models.actor.generate(['a'])")
    assert other.run("repr(hf.sessions())") == "no kept sessions"
    kernel.run("again = hf.Session(devices=1, name='kept', keep=True, unattended_s=1.0)")
    pid = kernel.run("hf.sessions()['kept'].pid")
    kernel.kill()
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, "it ends by itself"
        time.sleep(0.1)
    other.end()


def test_the_keeper_is_killed(kernels, state, tmp_path):
    """What is lost is said, and what is saved is named."""
    kernel = kernels()
    kernel.run(BEGIN.replace('name="kept"', 'name="lost"'))
    kernel.run(f"run = session.train(hf.GRPO(n=2, max_new_tokens=6), prompts, steps=2, save_every=1, folder={str(tmp_path)!r})")
    pid = kernel.run("hf.sessions()['lost'].pid")
    workers = kernel.run("[d['pid'] for d in session.placement.view()['devices'].values()]")
    psutil.Process(pid).kill()
    with pytest.raises(KernelError) as lost:
        kernel.run("session.models.actor.generate(['a']).wait()")
    assert lost.value.kind == "SessionClosedError"
    assert "saved after step 1" in str(lost.value)
    assert str(tmp_path) in str(lost.value)
    assert kernel.run("[session.status, len(run.rows), len(repr(session)) > 0]") == ["closed", 2, True]
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(worker) for worker in workers):
        assert time.monotonic() < deadline, "its workers end with it"
        time.sleep(0.1)
    kernel.run("session.detach()\n" + BEGIN.replace('name="kept"', 'name="lost"') + f"session.load({str(tmp_path)!r})")
    assert kernel.run("len(session.history)") == 2
    kernel.run("session.close()")
    assert kernel.end() == 0
