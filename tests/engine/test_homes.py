"""Wherever a trained role's state is, its workers may end: the loss is told once, and the session goes on from what still holds."""

import re
import threading
from dataclasses import replace

import pytest
from expect import refuses
from turns import let_others_run

import hfsdk as hf
from hfsdk.core.errors import WorkerDiedError
from hfsdk.core.placement import Pool
from hfsdk.core.runtime import StateGoneError, TransferBrokenError
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.session.parts import parts_of

APART = {"actor": 1, "critic": 1}


@pytest.fixture
def session():
    with hf.Session.simulated("1x2 A100-80GB") as made:
        made.actor("tiny")
        made.critic("tiny")
        made.place("colocate")
        made.rows = made.batch(prompt=[[1], [2]], response=[[1], [2]])
        learn(made, 3)
        yield made


@pytest.fixture
def runtime(session):
    return parts_of(session).client._controller._runtime


def learn(session, times):
    for role in (session.models.actor, session.models.critic):
        for _ in range(times):
            role.update(session.rows, lambda out, b: out.log_probs).wait()


def updates(session):
    return {name: at for name, (_, _, at) in parts_of(session).client.send(q.Roles()).items()}


class Dies:
    """Makes a method of the runtime end the worker once: before it does anything, or as if a state on the way were gone."""

    def __init__(self, runtime, monkeypatch, method, error, *, when=lambda *given: True, wipe=()):
        self.runtime, self.before, self.error, self.when = runtime, getattr(runtime, method), error, when
        self.done, self.wipe = False, wipe
        monkeypatch.setattr(runtime, method, self)

    def __call__(self, *given, **named):
        if not self.done and self.when(*given):
            self.done = True
            for number in self.wipe:  # the snapshots that lay in that worker's memory
                self.runtime._num_updates_of.pop(number, None)
            raise self.error
        return self.before(*given, **named)


DIED = WorkerDiedError("the worker of device 0 ended.")
GONE = StateGoneError("the state of actor is gone: it was on its way when a worker that held it ended.")
MOMENTS = {
    "export of the first": ("export", DIED, lambda role, pool: role == "actor"),
    "export of the second": ("export", DIED, lambda role, pool: role == "critic"),
    "after the export": ("load", GONE, lambda role, pool, state=None: role.name == "actor"),
    "load of the first": ("load", DIED, lambda role, pool, state=None: role.name == "actor"),
    "load of the second": ("load", DIED, lambda role, pool, state=None: role.name == "critic"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_that_ends_while_roles_move_costs_its_updates_and_not_the_session(session, runtime, monkeypatch, moment, tmp_path):
    method, error, when = MOMENTS[moment]
    Dies(runtime, monkeypatch, method, error, when=when)
    with refuses(WorkerDiedError, "ended") as told:
        session.place(APART)
    assert session.placement.placement == parts_of(session).client.send(q.CurrentPlacement()), "handles and controller agree"
    lost = dict(re.findall(r"(\w+) comes back with its initial weights \((\d) updates? lost\)", str(told.value)))
    learn(session, 1)
    assert updates(session) == {name: 1 + (0 if name in lost else 3) for name in ("actor", "critic")}
    assert set(lost.values()) <= {"3"}
    session.save(tmp_path / "saved")
    session.place("colocate")
    session.load(tmp_path / "saved")
    session.rewind(session.snapshot())
    learn(session, 1)


def test_the_newest_of_snapshot_and_checkpoint_comes_back(session, runtime, monkeypatch, tmp_path):
    session.save(tmp_path)
    learn(session, 1)
    kept = session.snapshot("kept")
    learn(session, 2)
    Dies(runtime, monkeypatch, "load", GONE, when=lambda role, pool, state=None: role.name == "actor" and state is not None)
    with refuses(WorkerDiedError, "actor comes back", "snapshot", "at update 4 (2 updates lost)"):
        session.place(APART)
    session.models.actor.compute_log_probs(session.rows).wait()
    assert updates(session) == {"actor": 4, "critic": 6}
    assert [state.num_updates for state in kept.kept] == [4, 4]


def test_where_the_snapshot_is_gone_too_the_checkpoint_comes_back(session, runtime, monkeypatch, tmp_path):
    session.save(tmp_path)
    learn(session, 1)
    kept = session.snapshot("kept")
    gone = [state.number for state in kept.kept]
    moving = lambda role, pool, state=None: role.name == "actor" and state is not None  # noqa: E731
    Dies(runtime, monkeypatch, "load", GONE, when=moving, wipe=gone)
    with refuses(WorkerDiedError, "actor comes back", "checkpoint", "state-1 (1 update lost)"):
        session.place(APART)
    session.models.actor.compute_log_probs(session.rows).wait()
    assert updates(session) == {"actor": 3, "critic": 4}


def test_a_snapshot_that_was_let_go_before_the_role_came_back_is_told_and_the_next_source_taken(session, runtime, monkeypatch):
    session.snapshot("kept")
    Dies(runtime, monkeypatch, "load", GONE, when=lambda role, pool, state=None: role.name == "actor" and state is not None)
    with refuses(WorkerDiedError, "a snapshot kept"):
        session.place(APART)
    session.forget("kept")
    with refuses(WorkerDiedError, "was let go", "its initial weights"):
        session.models.actor.compute_log_probs(session.rows).wait()
    session.models.actor.compute_log_probs(session.rows).wait()
    assert updates(session) == {"actor": 0, "critic": 3}


def test_another_branchs_snapshot_does_not_come_back(session, runtime, monkeypatch):
    start = session.snapshot("start")
    learn(session, 2)
    session.snapshot("left")
    session.rewind(start)
    learn(session, 1)
    Dies(runtime, monkeypatch, "load", GONE, when=lambda role, pool, state=None: role.name == "actor" and state is not None)
    with refuses(WorkerDiedError, "at update 3 (1 update lost)"):
        session.place(APART)


ELSEWHERE = {
    "nobody dies": (None, (), {"actor": 5, "critic": 5}),
    "in a call elsewhere": (("call", lambda work: work.call.role == "actor"), ("actor",), {"actor": 4, "critic": 5}),
    "with both workers": (("call", lambda work: True), ("actor", "critic"), {"actor": 4, "critic": 3}),
    "on the way back": (("restore", lambda role, pool, kept: kept.num_updates == 5), ("actor",), {"actor": 4, "critic": 5}),
}


@pytest.mark.parametrize("at_once", [False, True], ids=["goes on elsewhere", "goes back at once"])
@pytest.mark.parametrize("moment", ELSEWHERE)
def test_nothing_stays_of_what_is_done_elsewhere_for_a_while(session, runtime, monkeypatch, tmp_path, moment, at_once):
    """Deeds that go elsewhere and back (first_bad, compare): a role is where it was, or at what is behind that, and no third.

    Behind the actor is a snapshot, which elsewhere is not behind it; of the critic that is gone, too, and the checkpoint is left.
    """
    dies, gone, expected = ELSEWHERE[moment]
    session.place(APART)
    snapshots, elsewhere = parts_of(session).snapshots, session.snapshot("elsewhere")
    session.save(tmp_path)
    learn(session, 1)
    near = session.snapshot("near")
    learn(session, 1)
    home = snapshots.keep("home")
    session.rewind(elsewhere)
    learn(session, 2)
    if dies is not None:
        method, when = dies
        kept = [kept for snapshot in (home, near, elsewhere) for kept in snapshot.kept if kept.role in gone]
        wipe = [one.number for one in kept if one.role != "actor" or one not in near.kept]
        Dies(runtime, monkeypatch, method, DIED, when=when, wipe=wipe)
        if method == "call":
            with pytest.raises(WorkerDiedError):
                session.models.actor.compute_log_probs(session.rows).wait()
            monkeypatch.undo()
            if not at_once:
                learn(session, 1)
    notices = snapshots.come_home(home)
    assert ["went with a worker" in notice for notice in notices] == [True] * (dies is not None)
    monkeypatch.undo()
    session.models.actor.compute_log_probs(session.rows).wait()
    session.models.critic.compute_values(session.rows).wait()
    assert updates(session) == expected
    assert session.history.branch == "main"


def test_weights_of_then_are_those_that_the_ranks_keep_as_they_have_them(session):
    """Only they can be had for a single pass; of another place or layout a state goes by ``rewind`` alone."""
    session.snapshot("then")
    learn(session, 1)
    then = lambda: parts_of(session).client.send(q.KeptOf("actor", 3))  # noqa: E731
    assert then().num_updates == 3
    session.place(APART)
    assert then() is None


def told_of_death(session, runtime, monkeypatch):
    """The actor's next call ends with its worker: what is said of it."""
    Dies(runtime, monkeypatch, "call", DIED, when=lambda work: work.call.role == "actor")
    with pytest.raises(WorkerDiedError) as told:
        session.models.actor.compute_log_probs(session.rows).wait()
    session.models.actor.compute_log_probs(session.rows).wait()
    return re.search(r"actor comes back with (.*?)(?:; critic|$)", str(told.value).replace("\n", " ")).group(1)


def test_what_was_left_by_loading_does_not_come_back(session, runtime, monkeypatch, tmp_path):
    """A snapshot of what was trained before ``load`` has more updates, and is no state that the weights come from."""
    session.save(tmp_path)
    learn(session, 3)
    session.snapshot("late")
    session.load(tmp_path)
    learn(session, 1)
    assert "state-1 (1 update lost)" in told_of_death(session, runtime, monkeypatch)
    assert updates(session) == {"actor": 3, "critic": 3}
    learn(session, 2)
    session.snapshot("after")
    learn(session, 1)
    monkeypatch.undo()
    assert "at update 5 (1 update lost)" in told_of_death(session, runtime, monkeypatch)


def test_what_was_before_a_load_that_failed_still_comes_back(session, runtime, monkeypatch, tmp_path):
    session.save(tmp_path)
    learn(session, 1)
    session.snapshot("late")
    failing = Dies(runtime, monkeypatch, "call", hf.CallError("no such file"), when=lambda work: work.call.method == "load_state")
    with pytest.warns(UserWarning, match="critic came from"), refuses(hf.CallError, "no such file"):
        session.load(tmp_path)
    assert failing.done
    monkeypatch.undo()
    assert "at update 4 (0 updates lost)" in told_of_death(session, runtime, monkeypatch)


def test_what_was_before_a_fresh_start_does_not_come_back(session, runtime, monkeypatch, tmp_path):
    session.snapshot("late")
    session.save(tmp_path)
    session.place(APART, fresh=True)
    learn(session, 1)
    assert "its initial weights (1 update lost)" in told_of_death(session, runtime, monkeypatch)


def test_a_checkpoint_of_a_branch_that_was_left_comes_back_only_where_nothing_else_does(session, runtime, monkeypatch, tmp_path):
    start = session.snapshot("start")
    learn(session, 3)
    session.save(tmp_path)
    session.rewind(start)
    learn(session, 1)
    assert "a snapshot kept of it at update 3 (1 update lost)" in told_of_death(session, runtime, monkeypatch)
    monkeypatch.undo()
    runtime._num_updates_of.clear()
    assert "state-1 (of another branch, at update 6; what was trained on" in told_of_death(session, runtime, monkeypatch)
    assert updates(session)["actor"] == 6


def test_a_save_that_ends_after_a_rewind_is_of_the_branch_that_was_left(session, runtime, monkeypatch, tmp_path):
    start = session.snapshot("start")
    learn(session, 3)
    session.save(tmp_path)
    session.rewind(start)
    for name in ("actor", "critic"):  # as of save(..., wait=False)
        parts_of(session).client.send(m.Recover(name, str(tmp_path / "state-1"), 6))
    assert "a snapshot kept of it at update 3 (0 updates lost)" in told_of_death(session, runtime, monkeypatch)


def test_a_snapshot_that_dies_after_it_was_chosen_is_told_and_the_next_source_taken(session, runtime, monkeypatch):
    """Two deaths: of the actor's worker, then of one that kept its snapshot."""
    session.snapshot("kept")
    learn(session, 1)
    Dies(runtime, monkeypatch, "call", DIED, when=lambda work: work.call.role == "actor")
    with refuses(WorkerDiedError, "a snapshot kept"):
        session.models.actor.compute_log_probs(session.rows).wait()
    runtime._num_updates_of.clear()
    with refuses(WorkerDiedError, "is gone with a worker", "its initial weights"):
        session.models.actor.compute_log_probs(session.rows).wait()
    session.models.actor.compute_log_probs(session.rows).wait()
    assert updates(session)["actor"] == 0


def test_a_death_while_updates_are_counted_again_is_told_with_what_is_lost(session, runtime, monkeypatch):
    """An update is refused half way; the worker that is asked how many steps stand ends."""
    call = runtime.call

    def refused(work):
        outcome = call(work)
        return replace(outcome, error=hf.CallError("refused half way")) if work.call.method == "update" else outcome

    monkeypatch.setattr(runtime, "call", refused)
    Dies(runtime, monkeypatch, "call", DIED, when=lambda work: work.call.method == "num_updates")
    with refuses(WorkerDiedError, "actor comes back with its initial weights (3 updates lost)"):
        session.models.actor.update(session.rows, lambda out, b: out.log_probs).wait()
    session.models.actor.compute_log_probs(session.rows).wait()


def test_who_meets_lost_columns_first_tells_what_is_lost(session, runtime, monkeypatch):
    """An update dies that nobody waits for; a function reads what that worker had written."""
    batch = session.models.actor.compute_log_probs(session.rows)
    batch.wait()
    Dies(runtime, monkeypatch, "call", DIED, when=lambda work: work.call.method == "update")
    with pytest.raises(WorkerDiedError):
        session.models.actor.update(batch, lambda out, b: out.log_probs).wait()
    with refuses(hf.LostColumnError, "actor.compute_log_probs", "initial weights (3 updates lost)") as told:
        batch.map(lambda table: {"more": table["prompt"]}, reads=["old_log_probs", "prompt"], writes=["more"]).wait()
    assert isinstance(told.value.__cause__, WorkerDiedError)


class Busy:
    """Lets others run inside a method of the runtime and notes which pools it runs on at the same time."""

    def __init__(self, runtime, monkeypatch, *methods):
        self.now, self.together, self.guard = [], set(), threading.Lock()
        for method in methods:
            monkeypatch.setattr(runtime, method, self.slow(getattr(runtime, method)))

    def slow(self, method):
        def slowed(*given, **named):
            pool = next((x for x in given if isinstance(x, Pool)), None) or given[0].pool
            with self.guard:
                self.together |= {frozenset((pool, other)) for other in self.now}
                self.now.append(pool)
            try:
                let_others_run()
                return method(*given, **named)
            finally:
                with self.guard:
                    self.now.remove(pool)

        return slowed


def test_what_is_collective_on_a_part_of_a_pool_and_on_the_whole_takes_turns(monkeypatch):
    """Loads, calls and copies: each worker would get them in another order, and all would wait for each other for ever."""
    with hf.Session.simulated("1x4 A100-80GB") as session:
        actor = session.actor("tiny")
        session.critic("tiny")
        session.reference(actor)
        runtime = parts_of(session).client._controller._runtime
        busy = Busy(runtime, monkeypatch, "load", "call", "keep", "restore")
        rows = session.batch(prompt=[[1], [2]], response=[[1], [2]])
        session.place("interleaving")
        part, whole = (session.placement.placement.pool_of(name) for name in ("reference", "actor"))
        assert part.within == whole.name
        calls = [role.compute_log_probs(rows) for _ in range(3) for role in (session.models.reference, session.models.actor)]
        kept = session.snapshot()
        session.rewind(kept)
        session.place("colocate")
        session.place("interleaving")
        for call in calls:
            call.wait()
        assert not [pools for pools in busy.together if len({part, whole} & pools) == 2]


class Straight:
    """The simulated runtime where states go straight between pools that share no device: what is loaded from where."""

    def __init__(self, runtime, monkeypatch):
        self.loads, self.exports, self.opened, self.fault = [], [], [], None
        self._runtime, self._load, self._export = runtime, runtime.load, runtime.export
        monkeypatch.setattr(runtime, "goes_direct", lambda giver, taker: not set(giver.devices) & set(taker.devices))
        monkeypatch.setattr(runtime, "load", self.load)
        monkeypatch.setattr(runtime, "export", self.export)

    def load(self, role, pool, state=None, source=None):
        self.loads.append((role.name, pool.devices, source and source.devices))
        self.opened.append({pool.devices for pool in self._runtime._pools.values()})
        if source is not None and self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault(source, pool)
        self._load(role, pool, state, source)

    def export(self, role, pool):
        self.exports.append(role)
        return self._export(role, pool)


@pytest.fixture
def apart():
    with hf.Session.simulated("1x4 A100-80GB") as made:
        made.actor("tiny")
        made.critic("tiny")
        made.rows = made.batch(prompt=[[1], [2]], response=[[1], [2]])
        made.place({"actor critic": 2})
        learn(made, 3)
        yield made


@pytest.fixture
def straight(apart, monkeypatch):
    return Straight(parts_of(apart).client._controller._runtime, monkeypatch)


def onto(session, **pools):
    """Place roles on devices."""
    placed = tuple(Pool(name, devices) for name, devices in pools.items())
    session.place(hf.Placement(placed, {name: name for name in pools}))


def test_a_role_goes_straight_where_both_its_places_can_be_open(apart, straight):
    onto(apart, actor=(0, 1), critic=(2, 3))
    assert straight.loads[0] == ("critic", (2, 3), (0, 1)), "while the old pool is there"
    assert {(0, 1), (2, 3)} <= straight.opened[0]
    assert straight.exports == ["actor"], "its workers are those of the new pool"
    assert updates(apart) == {"actor": 3, "critic": 3}
    learn(apart, 1)
    straight.loads.clear()
    straight.exports.clear()
    onto(apart, actor=(0, 1), critic=(2,))
    assert (straight.loads, straight.exports) == ([("critic", (2,), None)], ["critic"]), "the actor stays; the critic's device too"
    onto(apart, actor=(2, 3), critic=(0,))
    assert straight.exports == ["critic", "actor", "critic"], "neither pool can be opened while the other is there"
    onto(apart, actor=(2, 3), critic=(1,))
    assert straight.loads[-1] == ("critic", (1,), (0,)), "a pool of the same name on other devices"
    assert updates(apart) == {"actor": 4, "critic": 4}
    assert set(parts_of(apart).client._controller._runtime._pools) == {"actor", "critic"}, "nothing that was set aside is left"
    learn(apart, 1)


BOTH = {"actor": "3", "critic": "3"}
"""The actor's state was on its way, in objects of the old pool's workers."""
FAULTS = {
    "the way": (lambda old, new: hf.CallError("Connection closed by peer"), {}),
    "the new pool": (lambda old, new: TransferBrokenError([(new, ended("the new pool"))]), {}),
    "the new pool, loading": (lambda old, new: ended("the new pool"), {}),
    "the old pool": (lambda old, new: TransferBrokenError([(old, ended("the old pool"))]), BOTH),
    "both": (lambda old, new: TransferBrokenError([(old, ended("one")), (new, ended("other"))]), BOTH),
}


def ended(name):
    return WorkerDiedError(f"the worker of {name} ended.")


@pytest.mark.parametrize("what", FAULTS)
def test_a_move_that_fails_costs_what_was_on_the_workers_that_ended(apart, straight, what):
    fault, lost = FAULTS[what]
    straight.fault = fault
    told = ""
    try:
        onto(apart, actor=(0, 1), critic=(2, 3))
    except WorkerDiedError as error:
        told = str(error)
    assert bool(told) == (what != "the way"), "the object store takes it then, and nobody need know"
    assert dict(re.findall(r"(\w+) comes back with its initial weights \((\d) updates? lost\)", told)) == lost
    learn(apart, 1)
    assert updates(apart) == dict.fromkeys(BOTH, 1 if lost else 4)
    assert set(parts_of(apart).client._controller._runtime._pools) == {"actor", "critic"}


def test_a_role_that_cannot_be_loaded_is_told_at_its_own_calls_alone(monkeypatch):
    with hf.Session.simulated("1x2 A100-80GB") as session:
        actor, critic = session.actor("tiny"), session.critic("tiny")
        rows = session.batch(prompt=[[1], [2]], response=[[1], [2]])
        runtime = parts_of(session).client._controller._runtime
        load = runtime.load

        def fails(role, *given, **named):
            if role.name == "critic":
                raise hf.ModelNotFoundError("/models/critic/model.safetensors was cut short meanwhile.")
            return load(role, *given, **named)

        monkeypatch.setattr(runtime, "load", fails)
        actor.compute_log_probs(rows).wait()  # the first call loads every role
        for _ in range(2):
            with refuses(
                hf.ModelNotFoundError, "critic.compute_values", "critic cannot be loaded", "/models/critic/model.safetensors"
            ):
                critic.compute_values(rows).wait()
            actor.compute_log_probs(rows).wait()
        session.reference("tiny").compute_log_probs(rows).wait()  # a new role: all are placed again
        with refuses(hf.ModelNotFoundError, "critic cannot be loaded", "/models/critic/model.safetensors"):
            session.place()
        monkeypatch.undo()
        critic.compute_values(rows).wait()


def test_what_is_overlooked_takes_dead_workers_along(session, runtime, monkeypatch):
    """So a run that restores a save does not meet the same death again."""
    monkeypatch.setattr(runtime, "devices", lambda pool: ())
    parts_of(session).client.send(m.AcknowledgeFailures())
    assert {state for _, state, _ in parts_of(session).client.send(q.Roles()).values()} == {"declared"}
    monkeypatch.undo()
    session.models.actor.update(session.rows, lambda out, b: out.log_probs).wait()
    assert updates(session)["actor"] == 1


def test_a_note_is_a_call_of_the_trace(session):
    parts_of(session).client.send(m.TraceNote("restore", session.trace.spans[0].start_ns, 0.25, "a worker died"))
    (span,) = [span for span in session.trace.calls if span.name == "restore"]
    assert (span.role, span.duration_s, span.attrs["why"]) == ("session", 0.25, "a worker died")
