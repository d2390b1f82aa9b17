"""Wherever a trained role's state is, its workers may end: the loss is told once, and the session goes on from what still holds."""

import re
import threading
import time

import pytest

import hfsdk as hf
from hfsdk.engine import messages as m
from hfsdk.errors import WorkerDiedError
from hfsdk.placement import Pool
from hfsdk.runtime import StateGoneError

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
    return session.client._controller._runtime


def learn(session, times):
    for role in (session.models.actor, session.models.critic):
        for _ in range(times):
            role.update(session.rows, lambda out, b: out.log_probs).wait()


def updates(session):
    return {name: at for name, (_, _, at) in session.client.send(m.Look("roles")).items()}


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
                self.runtime._kept.pop(number, None)
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
    with pytest.raises(WorkerDiedError, match="ended") as told:
        session.place(APART)
    assert session.placement.placement == session.client.send(m.Look("placement")), "handles and controller agree"
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
    with pytest.raises(WorkerDiedError, match=r"actor comes back with what a snapshot kept of it at update 4 \(2 updates lost\)"):
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
    with pytest.raises(WorkerDiedError, match=r"actor comes back with checkpoint .*state-1 \(1 update lost\)"):
        session.place(APART)
    session.models.actor.compute_log_probs(session.rows).wait()
    assert updates(session) == {"actor": 3, "critic": 4}


def test_a_snapshot_that_was_let_go_before_the_role_came_back_is_told_and_the_next_source_taken(session, runtime, monkeypatch):
    session.snapshot("kept")
    Dies(runtime, monkeypatch, "load", GONE, when=lambda role, pool, state=None: role.name == "actor" and state is not None)
    with pytest.raises(WorkerDiedError, match="what a snapshot kept"):
        session.place(APART)
    session.forget("kept")
    with pytest.raises(WorkerDiedError, match=r"was let go.*its initial weights"):
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
    with pytest.raises(WorkerDiedError, match=r"at update 3 \(1 update lost\)"):
        session.place(APART)


class Busy:
    """Slows a method of the runtime down and notes which pools it runs on at the same time."""

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
                time.sleep(0.05)
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
        runtime = session.client._controller._runtime
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
