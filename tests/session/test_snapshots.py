"""Snapshots, branches, history, comparing: on a virtual clock, where nothing is computed but everything is counted."""

import json
import pickle
import threading

import numpy as np
import pytest
from expect import each, refuses, until

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.experiment import Experiment
from hfsdk.engine.calls import messages as m
from hfsdk.engine.controller.snapshots import SnapshotStore
from hfsdk.engine.simulation.runtime import SimulatedRuntime
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.run.run import MEASURED
from hfsdk.session.parts import parts_of
from hfsdk.viz.tables import snapshot_html
from tests.session.scripted import waits

TEXTS = [f"review number {i}" for i in range(40)]


def score(completions):
    return [0.0 for _ in completions]


class Host(SimulatedRuntime):
    """The simulated runtime; ``kept`` has the numbers of the states that workers hold for snapshots, ``seeds`` those of calls."""

    def __init__(self):
        super().__init__(ClusterSpec.parse("1x2 A100-80GB"), PerfModel())
        self.kept, self.seeds = set(), []

    def call(self, work):
        self.seeds.append((str(work.call), getattr(work.orders[0].arguments, "seed", None)))
        return super().call(work)

    def keep(self, role, pool, number):
        made = super().keep(role, pool, number)
        self.kept.add(number)
        return made

    def holds(self, kept):
        return kept.number in self.kept

    def forget(self, kept):
        self.kept.discard(kept.number)
        super().forget(kept)


@pytest.fixture
def runtime():
    return Host()


@pytest.fixture
def session(runtime):
    with hf.Session(runtime=runtime, seed=4) as session:
        session.actor("tiny")
        session.critic("tiny")
        session.reference(session.models.actor)
        session.reward(score)
        yield session


@pytest.fixture
def prompts(session):
    return session.prompts(TEXTS, batch_size=4)


def train(session, prompts, steps=1):
    return session.train(hf.PPO(max_new_tokens=4, mini_batches=2), prompts, steps=steps, progress=False)


def unmeasured(row):
    return {name: value for name, value in row.items() if name not in MEASURED}


def test_a_snapshot_says_what_it_holds_and_where(session, prompts):
    train(session, prompts, 2)
    before = session.snapshot("before")
    assert (before.name, before.branch, before.steps, before.seed) == ("before", "main", 2, 4)
    rows = before.to_pandas()
    assert rows["role"].tolist() == ["actor", "actor", "critic", "critic"]
    assert rows["updates"].tolist() == [4] * 4
    tiny = session.models.actor.spec.num_parameters()
    assert rows["bytes"][0] == pytest.approx(12 * tiny / 2, rel=0.01), "fp32 weights and two moments, a half on each dp rank"
    assert before.num_bytes == before.new_bytes == rows["bytes"].sum()
    assert "actor at update 4" in repr(before)
    assert "host memory of devices 0, 1" in repr(before)
    assert list(before.functions) == ["reward"]
    assert "Snapshot before" in snapshot_html(before.view())


def test_streams_made_alike_have_a_place_each(session, prompts):
    one, other = (session.demonstrations(["one two three"] * 4, batch_size=1) for _ in range(2))
    next(one), next(one), next(other)
    session.snapshot("before")
    next(one), next(other), next(other), next(prompts)
    later = session.demonstrations(["one two three"] * 4, batch_size=1)
    new = session.demonstrations(["four five"] * 4, batch_size=1)
    next(new)
    session.rewind("before")
    assert (one.position, other.position, prompts.position) == (2, 1, 0)
    assert later.position == 1  # of its data; the latest stream made of them then
    assert new.position == 0


def test_unchanged_roles_are_counted_once(session, prompts):
    train(session, prompts)
    session.snapshot("one")
    batch = session.models.actor.generate(prompts[0], max_new_tokens=4)
    session.models.critic.compute_values(batch)
    two = session.snapshot("two")
    assert two.shared == {"actor": "one", "critic": "one"}
    assert two.new_bytes == 0
    assert "shared with 'one'" in repr(two)
    session.models.actor.update(batch, lambda out, b: out.log_probs)
    three = session.snapshot("three")
    assert three.shared == {"critic": "one"}
    session.models.critic.run(lambda rank: None)
    assert session.snapshot("four").shared == {"actor": "three"}, "a function on the ranks may change a role"


def test_states_are_freed_with_the_last_snapshot_that_has_them(session, prompts, runtime):
    session.snapshot("one")
    session.snapshot("two")
    assert len(runtime.kept) == 2
    session.forget("one")
    session.placement.view()
    assert len(runtime.kept) == 2
    two = session.snapshots["two"]
    session.forget(two)
    assert runtime.kept == set()
    assert list(session.snapshots) == []
    with refuses(hf.CheckpointError, "actor's state", "let go"):
        session.rewind(two)
    train(session, prompts)
    session.snapshot("again")
    train(session, prompts)
    session.snapshot("again")  # the one before goes with its name
    session.placement.view()
    assert len(runtime.kept) == 2


def ended(runtime, snapshot, role):
    """A worker ends that held a part of a role's state."""
    runtime.kept -= {kept.number for kept in snapshot.kept if kept.role == role}


def test_a_state_that_went_with_a_worker_is_not_shared(session, prompts, runtime):
    """The actor has not changed, and its own workers are there; one that kept a part of its state is not."""
    train(session, prompts)
    ended(runtime, session.snapshot("one"), "actor")
    assert session.snapshot("two").shared == {"critic": "one"}
    train(session, prompts)
    session.rewind("two")


def test_what_another_process_took_is_freed_by_name(session, prompts, runtime):
    """As a kernel does that comes back to a kept session: it knows its snapshots by copies."""
    snapshots = parts_of(session).snapshots
    for name, free in (("one", lambda: session.forget("one")), ("two", lambda: session.snapshot("two"))):
        train(session, prompts)
        made = session.snapshot(name)
        before = set(runtime.kept)
        snapshots._forgetters.pop(made).detach()
        copy = pickle.loads(pickle.dumps(made))
        snapshots.take_known({name: copy}, ())
        train(session, prompts)
        free()
        session.placement.view()
        assert not before & runtime.kept
        if name == "one":
            session.forget(copy)  # once more frees nothing of anybody else
    assert len(runtime.kept) == 2


def test_a_snapshot_that_fails_leaves_no_copy(session, prompts, runtime, monkeypatch):
    """The first role's copy fails while the second's is still to come."""
    train(session, prompts)
    keep, told, copied, looks = runtime.keep, threading.Event(), threading.Event(), []

    def kept(role, pool, number):
        if role == "actor":
            runtime.kept.add(number)  # some ranks have their parts
            raise hf.CallError("no memory")
        until("the snapshot has failed, or waits for this copy too", lambda: told.is_set() or waiting())
        made = keep(role, pool, number)
        copied.set()
        return made

    def waiting():
        """Whether it still waits at five looks in a row, long after it has heard of the first failure."""
        looks.append(waits(SnapshotStore.keep))
        return looks[-5:] == [True] * 5

    monkeypatch.setattr(runtime, "keep", kept)
    with refuses(hf.CallError, "no memory"):
        session.snapshot("never")
    told.set()
    assert copied.wait(60)
    assert (runtime.kept, list(session.snapshots)) == (set(), [])


def test_rewind_takes_everything_back(session, prompts, runtime):
    train(session, prompts, 2)
    before = session.snapshot()
    assert before.name == "snapshot 1"
    place, began = prompts.position, len(runtime.seeds)
    first = train(session, prompts, 3).rows
    seeds = runtime.seeds[began:]
    later = session.prompts(TEXTS, batch_size=8)
    next(later)
    session.seed = 99
    assert session.rewind("snapshot 1") == "snapshot 1/1"
    assert (prompts.position, later.position, session.seed) == (place, 0, 4)
    assert session.models.actor.version == 4
    began = len(runtime.seeds)
    again = train(session, prompts, 3).rows
    assert [unmeasured(row) for row in again] == [unmeasured(row) for row in first]
    assert runtime.seeds[began:] == seeds, "it samples and shuffles as it did"
    assert session.rewind(before) == "snapshot 1/2"


def test_history_knows_branches_and_functions(session, prompts):
    train(session, prompts, 2)
    session.snapshot("before")
    train(session, prompts, 1)
    session.fork("before", "no KL")

    def louder(completions):
        return [1.0 for _ in completions]

    with pytest.warns(UserWarning, match="reward goes on with louder@"):
        session.reward(louder)
    session.train(hf.PPO(kl_coef=0.0, max_new_tokens=4), prompts, steps=2, progress=False)
    batch = session.models.actor.generate(prompts[0], max_new_tokens=4)
    session.models.actor.update(batch, lambda out, b: -out.log_probs).wait()
    history = session.history
    assert [(row["branch"], row["kind"], row.get("step")) for row in history] == [
        ("main", "step", 0), ("main", "step", 1), ("main", "step", 2),
        ("no KL", "step", 2), ("no KL", "step", 3), ("no KL", "update", None),
    ]  # fmt: skip
    assert [row.get("snapshot") for row in history] == [None, "before", None, None, None, None]
    assert history["parent"].tolist() == ["", "", "", "main", "main", "main"]
    assert [row["step"] for row in history.path("no KL") if row["kind"] == "step"] == [0, 1, 2, 3]
    assert [row["step"] for row in history.path("main")] == [0, 1, 2]
    assert len(history.to_pandas("main")) == 3
    rows = list(history)
    assert rows[0]["reward_function"].startswith("score@")
    assert rows[4]["reward_function"].startswith("louder@")
    assert "kl_coef=0.0" in rows[3]["algorithm"]
    assert rows[5]["loss_function"].startswith("<lambda>@")
    assert "test_snapshots.py" in rows[5]["line"]
    assert "1.0 for _ in completions" in history.sources[rows[4]["reward_function"]]
    assert "-out.log_probs" in history.sources[rows[5]["loss_function"]]
    words = repr(history)
    assert "*   no KL from 'main' at 'before': 2 steps, 1 update by hand" in words
    with refuses(hf.OptionError, "'other'", "'main', 'no KL'"):
        history.path("other")
    picture = hf.viz.picture(history)
    assert "no KL" in picture.to_svg()
    assert "from 'before', 2 steps, 1 update by hand" in picture.to_text()


def test_stale_batches(session, prompts):
    actor, critic = session.models.actor, session.models.critic

    def loss(out, b):
        return out.log_probs

    def made(k=0):
        return actor.compute_log_probs(actor.generate(prompts[k], max_new_tokens=4))

    old = made()
    session.snapshot("fork here")
    fresh = made()
    actor.update(fresh, loss, mini_batches=2)
    later = made()
    actor.update(fresh, loss)  # off-policy on one branch
    session.fork("fork here", "other")
    for batch in (old, fresh, actor.compute_log_probs(old)):
        actor.update(batch, loss)
    with pytest.raises(hf.StaleBatchError) as caught:
        actor.update(later, loss)
    words = str(caught.value)
    assert "actor.generate (test_snapshots.py, line " in words
    assert "on branch 'main' with actor at update 2; the session is on branch 'other', which left that line at update 0" in words
    assert "batch.adopt()" in words
    for use in (critic.update, actor.forward_backward):
        with pytest.raises(hf.StaleBatchError):
            use(later.map(lambda table: {"doubled": table["position"]}, ["position"], ["doubled"]), loss)
    with pytest.raises(hf.StaleBatchError):
        actor.update(critic.compute_values(later), loss)
    until("all calls are over", lambda: session.status == "idle", session)
    assert actor.version == 3, "nothing was trained on it"
    actor.update(actor.compute_log_probs(actor.generate(later, max_new_tokens=4)), loss)
    critic.step()
    after = made()
    actor.release()
    new = session.actor("tiny")
    new.update(after, loss)  # another actor: nothing is known of its way


@pytest.mark.filterwarnings("ignore:(reward|actor) is replaced")
def test_roles_must_be_those_of_the_snapshot(session, prompts):
    before = session.snapshot("before")
    train(session, prompts)
    session.models.reward.release()
    with refuses(hf.OptionError, "reward", "released", "nothing was changed", "session.reward"):
        session.rewind(before)
    session.reward("tiny")
    with refuses(hf.OptionError, "another reward", "a function then, a model now"):
        session.rewind(before)
    session.reward(score)
    session.actor("tiny", optimizer=hf.AdamW(lr=0.5), replace=True)
    with refuses(hf.OptionError, "another actor", "lr=0.5"):
        session.rewind(before)
    assert session.branch == "main"
    session.actor("tiny", train="tp2")  # only its layout is another
    session.rewind(before)
    with refuses(hf.OptionError, "a new name", "'main'"):
        session.fork(before, "main")
    with refuses(hf.OptionError, "'x'", "'before'"):
        session.rewind("x")
    with refuses(hf.OptionError, "name", 3):
        session.snapshot(3)
    with hf.Session.simulated("1x2 A100-80GB") as empty, refuses(hf.OptionError, "nothing to go back to"):
        empty.snapshot()


def test_a_weighted_sum_comes_back_with_its_weights(session, prompts):
    short = session.reward(lambda completions: [-1.0] * len(completions), name="short")
    both = session.reward([session.models.reward, short], weights=[1.0, 0.5], name="both")
    before = session.snapshot("before")
    with pytest.warns(UserWarning, match="both goes on with WeightedScores@"):
        assert session.reward([session.models.reward, short], weights=[1.0, 2.0], name="both") is both
    assert both.weights == (1.0, 2.0)
    with pytest.warns(UserWarning, match="both goes on with WeightedScores@"):
        session.rewind(before)
    assert both.weights == (1.0, 0.5)
    assert both.parts == (session.models.reward, short)
    with pytest.warns(UserWarning, match="both is replaced"):
        session.reward(score, name="both")
    with refuses(hf.OptionError, "another both", "a weighted sum then, a function now"):
        session.rewind(before)


def test_a_state_on_a_worker_that_ended_is_told_before_anything_changes(session, prompts, runtime):
    before = session.snapshot("before")
    train(session, prompts)
    ended(runtime, before, "critic")
    with refuses(hf.CheckpointError, "critic's state", "a worker that ended", "device 0, 1", "session.load"):
        session.rewind(before)
    assert session.models.actor.version == session.models.critic.version > 0
    assert session.branch == "main"


def test_the_history_is_saved_with_its_branches(session, prompts, tmp_path):
    train(session, prompts, 2)
    session.snapshot("before")
    train(session, prompts)
    session.fork("before", "other")
    train(session, prompts)
    session.models.actor.step()
    session.save(tmp_path)
    saved = [dict(row) for row in session.history]
    path = session.history.path()
    train(session, prompts)
    session.load(tmp_path)
    assert [dict(row) for row in session.history] == saved
    assert session.history.path() == path
    assert session.branch == "other"
    late = train(session, prompts).rows[0]["step"]
    assert session.history.path()[-1]["step"] == late
    assert session.history.path()[-1]["branch"] == "other"


def test_snapshots_travel_as_data(session, prompts):
    before = session.snapshot("before")
    assert pickle.loads(pickle.dumps(before)).kept == before.kept
    for message in (m.TakeSnapshot(("actor",)), m.Rewind(before.kept, "x"), m.Forget(before.kept)):
        assert pickle.loads(pickle.dumps(message)) == message


# -- comparing


def test_compare_runs_each_from_the_same_point_and_comes_back(session, prompts):
    train(session, prompts, 2)
    counts, place = parts_of(session).context.counters.all(), prompts.position
    run = session.run
    algorithms = [hf.PPO(max_new_tokens=4), hf.PPO(max_new_tokens=8), hf.GRPO(max_new_tokens=4, n=2)]
    experiment = session.compare(algorithms, prompts, steps=3, seeds=[0, 7])
    assert list(experiment.algorithms) == ["PPO(max_new_tokens=4)", "PPO(max_new_tokens=8)", "GRPO"]
    frame = experiment.to_pandas()
    assert frame.columns[:8].tolist() == ["algorithm", "seed", "step", "score", "kl", "length", "seconds", "tokens"]
    assert len(frame) == 3 * 2 * 3
    assert frame["step"].tolist() == [2, 3, 4] * 6
    assert frame["tokens"].min() > 0
    assert frame["score"].isna().all()
    assert (parts_of(session).context.counters.all(), prompts.position, session.seed, session.branch, session.run) == (
        counts,
        place,
        4,
        "main",
        run,
    )
    assert session.models.actor.version == 4
    assert list(session.snapshots) == []
    names = [branch.name for branch in session.history.branches]
    assert names[:3] == ["main", "PPO(max_new_tokens=4), seed 0", "PPO(max_new_tokens=4), seed 7"]
    again = session.compare(algorithms, prompts, steps=3, seeds=[0, 7])
    assert [unmeasured(row) for row in again.rows] == [unmeasured(row) for row in experiment.rows]
    assert "GRPO, seed 7 (2)" in [branch.name for branch in session.history.branches]
    picture = hf.viz.picture(experiment)
    assert "not measured" in picture.to_svg()
    assert "no scores (simulated)" in picture.to_text()
    with refuses(hf.OptionError, "no scores"):
        experiment.save_baseline("never.json")


def test_compare_comes_back_after_a_failure(session, prompts):
    class Broken:
        def step(self, models, prompts):
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        session.compare([hf.PPO(max_new_tokens=4), Broken()], prompts, steps=1, seeds=[0])
    assert session.branch == "main"
    assert prompts.position == 0
    train(session, prompts)


@each(
    "arguments, named",
    [
        ({"algorithms": []}, "at least one algorithm"), ({"algorithms": hf.PPO}, "algorithms"), ({"algorithms": [hf.PPO]}, "step"),
        ({"algorithms": [hf.PPO(), hf.PPO()]}, "two of the algorithms"), ({"steps": 0}, "steps"), ({"seeds": []}, "seeds"),
        ({"seeds": [1, 1]}, "seeds"), ({"save_baseline": True}, "file"), ({"baseline": "none.json"}, "none.json"),
        ({"snapshot": "never"}, "'never'"),
    ],
)  # fmt: skip
def test_compare_checks_what_it_is_given(session, prompts, arguments, named):
    given = {"algorithms": [hf.PPO()], "steps": 1, "seeds": [0], **arguments}
    with refuses(hf.OptionError, named):
        session.compare(given.pop("algorithms"), prompts, **given)
    assert session.branch == "main"


def experiment(scores, options="PPO()", steps=4, **more):
    rows = [
        {"algorithm": "PPO", "seed": seed, "step": i, "score": value, "kl": 0.1 * i, "length": 5.0, "seconds": 1.0, "tokens": 9}
        for seed, values in scores.items()
        for i, value in enumerate(values)
    ]
    return Experiment(tuple(rows), {"PPO": options}, tuple(scores), steps, **more)


def test_a_baseline_judges(tmp_path):
    good = experiment({0: [0, 0, 0, 1.0], 1: [0, 0, 0, 1.2], 2: [0, 0, 0, 0.8]})
    assert good.final_scores("PPO") == {0: 1.0, 1: 1.2, 2: 0.8}
    assert good.ok
    path = good.save_baseline(tmp_path / "ppo.json")
    hf.testing.assert_not_below(path, good)
    # both spreads are 0.2: 1.0 - 2 * sqrt(2 * 0.04 / 3) = 0.6734
    for low, verdict in ((0.68, "pass"), (0.66, "fail")):
        shifted = experiment({s: [0, 0, 0, low + 0.2 * (s - 1)] for s in range(3)}, baseline=json.loads(path.read_text()))
        assert shifted.verdict[0].least == pytest.approx(0.67340, abs=1e-5)
        assert shifted.verdict[0].verdict == verdict
        assert shifted.ok == (verdict == "pass")
        assert ("✓ pass" if shifted.ok else "✕ fail") in hf.viz.picture(shifted).to_text()
    with refuses(AssertionError, "PPO", "0.6600", "1.0000", "0.6734"):
        hf.testing.assert_not_below(path, shifted)
    one = experiment({0: [0.0, 0.5]}, steps=2)
    one.save_baseline(tmp_path / "one.json")
    hf.testing.assert_not_below(tmp_path / "one.json", one)
    with pytest.raises(AssertionError, match="below"):
        hf.testing.assert_not_below(tmp_path / "one.json", experiment({0: [0.0, 0.499]}, steps=2))
    with refuses(hf.OptionError, "steps=2", "steps=4"):
        hf.testing.assert_not_below(tmp_path / "one.json", good)
    with refuses(hf.OptionError, "PPO()", "PPO(2)"):
        hf.testing.assert_not_below(path, experiment({0: [1.0]}, options="PPO(2)"))
    entry = '{"format": 1, "steps": 4, "algorithms": {"PPO": %s}}'
    for bad in (
        "{}",
        "[]",
        '{"format": 1, "steps": 4, "algorithms": []}',
        entry % '{"options": "PPO()"}',
        entry % '{"options": "PPO()", "final_scores": {}}',
        entry % '{"options": "PPO()", "final_scores": {"0": "x"}}',
    ):
        (tmp_path / "bad.json").write_text(bad)
        with refuses(hf.OptionError, tmp_path / "bad.json", "no baseline"):
            hf.testing.assert_not_below(tmp_path / "bad.json", good)


class RaisesAtEveryQuestion:
    def __getattr__(self, name):
        raise RuntimeError(name)

    def __iter__(self):
        raise RuntimeError("iter")


def test_helpers_find_what_is_wrong():
    good = experiment({0: [0.0, 1.0]})
    hf.testing.assert_finite(good)
    hf.testing.assert_finite({"loss": 1.0, "name": "x"})
    with refuses(AssertionError, "loss is nan"):
        hf.testing.assert_finite({"loss": np.float32("nan")})
    hf.testing.assert_finite(good.to_pandas())
    with refuses(AssertionError, "score is nan", "row 1"):
        hf.testing.assert_finite(experiment({0: [0.0, float("nan")]}))
    with refuses(AssertionError, "loss is inf", "row 0"):
        hf.testing.assert_finite([{"loss": float("inf")}])
    for nothing in (range(2**40), RaisesAtEveryQuestion(), 3, [1]):
        with refuses(hf.OptionError, "Run, Experiment"):
            hf.testing.assert_finite(nothing)
    first = {"ratio": 1.0, "ratio_max": 1.0, "approx_kl": 0.0, "clip_fraction": 0.0}
    hf.testing.assert_invariants([first, {**first, "ratio": 1.3}])
    with refuses(AssertionError, "ratio_max is 1.5", "first mini-batch"):
        hf.testing.assert_invariants([{**first, "ratio_max": 1.5}])
    with refuses(hf.OptionError, "an actor's update"):
        hf.testing.assert_invariants([{"loss": 1.0}])


def test_a_70b_snapshot_says_what_each_node_keeps():
    """Through the controller that real sessions have: eight nodes together keep one copy."""
    with hf.Session.simulated("8x8 H200") as session:
        session.actor("llama3-70b", train="tp8 pp2 dp4", rollout="tp8", dtype="bf16", optimizer=hf.AdamW(distributed=True))
        session.place("colocate")
        (fresh, *_) = room = parts_of(session).client.send(m.AskHostRoom(("actor",), unless_kept=True))
        numbers = session.models.actor.spec.num_parameters()
        assert [one.node for one in room] == list(range(8))
        assert [one.free_bytes for one in room] == [None] * 8, "no host memory is spent here"
        assert sum(one.needed_bytes for one in room) == pytest.approx(6 * numbers, rel=1e-3), "no moments before the first step"
        kept = session.snapshot("before")
        assert kept.to_pandas().groupby("node")["bytes"].sum()[0] == fresh.needed_bytes
        assert parts_of(session).client.send(m.AskHostRoom(("actor",), unless_kept=True)) == (), "the snapshot has it"
        assert parts_of(session).client.send(m.AskHostRoom(("actor",), unless_kept=False)) == room


def test_a_snapshot_that_hosts_cannot_keep_is_refused_before_anything_is_copied(session, prompts, runtime):
    train(session, prompts)
    needed, held = session.snapshot("first").num_bytes, set(runtime.kept)
    train(session, prompts)
    runtime.free_host_bytes = lambda devices: {0: needed - 1}
    with refuses(hf.CheckpointError, "node 0", f"{needed / 1e6:.1f} MB"):
        session.snapshot("too much")
    assert runtime.kept == held
    assert "too much" not in session.snapshots
    runtime.free_host_bytes = lambda devices: {0: needed}
    with pytest.warns(UserWarning, match=r"the snapshot takes ([\d.]+ MB) of the \1 of host memory that are free on node 0"):
        session.snapshot("just fits")
    assert session.snapshot("shared").new_bytes == 0, "what is kept already takes nothing"
