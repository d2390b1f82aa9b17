"""Weights that go straight from pool to pool, in the controller: both lanes are held for it, in no order that could block."""

import threading

import pytest
from expect import CEILING_S, refuses, until
from turns import let_others_run

import hfsdk as hf
from hfsdk.core.errors import CallError, DependencyError, PlacementError, SessionClosedError, WorkerDiedError
from hfsdk.core.runtime import CallOutcome, TransferBrokenError
from hfsdk.engine.calls import queries as q
from hfsdk.engine.controller import weight_syncs
from hfsdk.engine.controller.records import LaneReservation
from hfsdk.session.parts import parts_of

APART = {"actor critic": 1, "actor.rollout critic.inference": 1}
PROMPTS = ["one", "two"]


class Watched:
    """The simulated runtime with direct transfers: what it is asked to do, in order, and what happens to it."""

    def __init__(self, runtime, monkeypatch):
        self.asked, self.faults, self.gates = [], {}, {}
        self._call, self._load = runtime.call, runtime.load
        self.running, self.takers = [], []
        self.together = []
        """What ran on the taker's pool when weights were given to it."""
        self.meetings = []
        monkeypatch.setattr(runtime, "goes_direct", lambda giver, taker: not set(giver.devices) & set(taker.devices))
        monkeypatch.setattr(runtime, "call", self.call)
        monkeypatch.setattr(runtime, "load", self.load)
        monkeypatch.setattr(weight_syncs, "LaneReservation", self.meet)

    def meet(self):
        self.meetings.append(LaneReservation(arrived=Counted()))
        return self.meetings[-1]

    def gate(self, method):
        """Have calls of a method stay inside until the gate is set."""
        self.gates[method] = threading.Event()
        return self.gates[method]

    def load(self, role, pool, state=None):
        if role.name in self.faults:
            raise self.faults.pop(role.name)
        self._load(role, pool, state)

    def call(self, work):
        self.asked.append((work.call.role, work.call.method, work.taker and work.taker.shadow.name, work.version))
        if work.taker is not None:
            self.together += [pool for pool, _ in self.running if pool == work.taker.pool.name]
            self.takers.append(work.taker.pool.name)
        self.together += [pool for pool in self.takers if pool == work.pool.name]
        here = (work.pool.name, work.call.id)
        self.running.append(here)
        if work.call.method in self.gates:
            assert self.gates[work.call.method].wait(CEILING_S)
        let_others_run()
        try:
            if work.call.method in self.faults:
                fault = self.faults.pop(work.call.method)
                if isinstance(fault, CallError):
                    return CallOutcome(None, (), (), fault)
                raise fault
            assert work.weights is None, "nothing stands in between"
            return self._call(work)
        finally:
            self.running.remove(here)
            if work.taker is not None:
                self.takers.remove(work.taker.pool.name)

    def methods(self):
        return [(role, method) for role, method, _, _ in self.asked]

    def until_asked(self, role, method):
        until(f"{role}.{method}", lambda: (role, method) in self.methods())

    def until_giver_waits(self):
        """Until the last transfer's call has looked in vain for the taker's pool to be free, or did not look at all."""
        number = self.methods().count(GIVE)
        until("a look", lambda: self.meetings[-1].arrived.looks > 1 or self.methods().count(GIVE) > number)


class Counted(threading.Event):
    """An event that counts how often it was waited for."""

    looks = 0

    def wait(self, timeout=None):
        self.looks += 1
        return super().wait(timeout)


GIVE = ("actor", "export_weights")


@pytest.fixture
def session():
    with hf.Session.simulated("1x2 A100-80GB") as made:
        made.actor("tiny")
        made.critic("tiny")
        made.place(APART)
        yield made


@pytest.fixture
def runtime(session):
    return parts_of(session).client._controller._runtime


@pytest.fixture
def watched(runtime, monkeypatch):
    return Watched(runtime, monkeypatch)


def likelihood(out, b):
    return -out.log_probs


def generate(session):
    return session.models.actor.generate(PROMPTS, max_new_tokens=4)


def shadow(session, name="actor.rollout"):
    return parts_of(session).client._controller._roles[name]


def test_a_shadow_has_the_weights_when_they_were_given(session, watched):
    batch = generate(session).wait(CEILING_S)
    assert watched.asked == [("actor", "export_weights", "actor.rollout", 0), ("actor.rollout", "generate", None, 0)]
    session.models.actor.update(batch, likelihood).wait(CEILING_S)
    generate(session).wait(CEILING_S)
    generate(session).wait(CEILING_S)
    given = [(shadow, version) for _, _, shadow, version in watched.asked if shadow]
    assert given == [("actor.rollout", 0)] * 2, "once for what changed, however many calls use it"
    assert shadow(session).num_updates == session.models.actor.version == 1
    edges = {(edge.source, edge.target) for edge in session.dataflow.edges if "weights" in edge.columns}
    names = {node.id: f"{node.role}.{node.method}" for node in session.dataflow.calls}
    assert {(names[a], names[b]) for a, b in edges} <= {("actor.export_weights", "actor.rollout.generate")}


def test_it_waits_for_what_the_other_pool_does(session, watched):
    gate = watched.gate("generate")
    batch = generate(session)
    watched.until_asked("actor.rollout", "generate")
    session.models.actor.update(session.batch(prompt=[[1], [2]], response=[[1], [2]]), likelihood).wait(CEILING_S)
    later = generate(session)
    watched.until_giver_waits()
    gate.set()
    later.wait(CEILING_S)
    assert batch.wait(CEILING_S)
    assert watched.together == [], "nothing else runs on either pool meanwhile"
    assert watched.methods() == [
        ("actor", "export_weights"), ("actor.rollout", "generate"), ("actor", "update"), ("actor", "export_weights"),
        ("actor.rollout", "generate"),
    ]  # fmt: skip


def test_the_other_pool_does_nothing_else_meanwhile(session, watched):
    """Also where the generation that asked for the weights is cancelled, and does not wait for them itself."""
    rows = session.batch(prompt=[[1], [2]], response=[[1], [2]])
    session.models.critic.compute_values(rows).wait(CEILING_S)
    gate = watched.gate("export_weights")
    batch = generate(session)
    watched.until_asked(*GIVE)
    batch.cancel()
    values = session.models.critic.compute_values(rows)
    let_others_run(100)
    gate.set()
    assert values.wait(CEILING_S)
    assert watched.together == []
    assert watched.methods()[-2:] == [GIVE, ("critic.inference", "compute_values")]


def test_two_pairs_of_pools_that_cross_do_not_wait_for_each_other(session, watched):
    """Actor and critic share both pools; transfers and calls in quick succession, asked for from several threads."""
    models, failures = session.models, []
    rows = session.batch(prompt=[[1], [2]], response=[[1], [2]])

    def work(first):
        try:
            for k in range(6):
                if (k + first) % 2:
                    models.actor.update(rows, likelihood)
                    generate(session)
                else:
                    models.critic.update(rows, lambda out, b: out.values**2)
                    models.critic.compute_values(rows)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CEILING_S)
    assert not failures
    models.critic.compute_values(rows).wait(CEILING_S)
    generate(session).wait(CEILING_S)
    assert watched.together == []
    for name in ("actor.rollout", "critic.inference"):
        assert shadow(session, name).synced == shadow(session, name.split(".")[0]).changes


def test_a_generation_that_is_cancelled_leaves_the_transfer_to_the_next(session, watched):
    gate = watched.gate("export_weights")
    first, second = generate(session), generate(session)
    watched.until_asked(*GIVE)
    first.cancel()
    gate.set()
    assert second.wait(CEILING_S)
    assert watched.methods().count(("actor", "export_weights")) == 1


def test_a_transfer_that_fails_is_told_once_and_asked_for_again(session, watched):
    generate(session).wait(CEILING_S)
    session.models.actor.update(session.batch(prompt=[[1], [2]], response=[[1], [2]]), likelihood).wait(CEILING_S)
    watched.faults["export_weights"] = CallError("Connection closed by peer")
    with refuses(DependencyError, "actor.rollout", "Connection closed"):
        generate(session).wait(CEILING_S)
    assert shadow(session).synced == -1, "perhaps half of them are new"
    generate(session).wait(CEILING_S)
    assert shadow(session).synced == shadow(session, "actor").changes


@pytest.mark.parametrize("lost", ["taker", "giver", "both"])
def test_workers_that_end_meanwhile_cost_their_pool(session, watched, lost):
    placement = session.placement.placement
    pools = {"giver": placement.pool_of("actor"), "taker": placement.pool_of("actor.rollout")}
    ends = [(pool, ended(name)) for name, pool in pools.items() if lost in (name, "both")]
    session.models.actor.update(session.batch(prompt=[[1], [2]], response=[[1], [2]]), likelihood).wait(CEILING_S)
    watched.faults["export_weights"] = TransferBrokenError(ends)
    with refuses(DependencyError, "ended", "The pool is started again") as told:
        generate(session).wait(CEILING_S)
    assert ("actor comes back with its initial weights (1 update lost)" in str(told.value)) == (lost != "taker")
    generate(session).wait(CEILING_S)
    assert session.models.actor.version == (1 if lost == "taker" else 0)
    assert shadow(session).num_updates == session.models.actor.version


def ended(name):
    return WorkerDiedError(f"the worker of the {name} ended.", role="actor", rank=0)


def test_a_shadow_that_cannot_be_loaded_lets_its_role_go(session, watched):
    watched.faults["actor.rollout"] = PlacementError("no memory for the rollout")
    shadow(session).loaded = False  # as where its pool was lost
    with refuses(DependencyError, "no memory for the rollout"):
        generate(session).wait(CEILING_S)
    session.models.actor.compute_log_probs(session.batch(prompt=[[1]], response=[[1]])).wait(CEILING_S)
    generate(session).wait(CEILING_S)


def test_a_session_that_is_closed_meanwhile_ends(monkeypatch):
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.actor("tiny")
        session.place({"actor": 1, "actor.rollout": 1})
        watched = Watched(parts_of(session).client._controller._runtime, monkeypatch)
        gate = watched.gate("generate")
        generate(session)
        watched.until_asked("actor.rollout", "generate")
        session.models.actor.update(session.batch(prompt=[[1], [2]], response=[[1], [2]]), likelihood)
        waiting = generate(session)
        watched.until_giver_waits()
        closing = threading.Thread(target=session.close)
        closing.start()
        controller = parts_of(session).client._controller
        until("the end of the session", lambda: controller._closing.begun)
        gate.set()
        closing.join(CEILING_S)
        assert not closing.is_alive()
    with pytest.raises((SessionClosedError, CallError)):
        waiting.wait(CEILING_S)


def test_placing_anew_drains_what_waits(session, watched):
    gate = watched.gate("generate")
    generate(session)
    session.models.actor.update(session.batch(prompt=[[1], [2]], response=[[1], [2]]), likelihood)
    late = generate(session)
    placing = threading.Thread(target=session.place, args=("colocate",))
    placing.start()
    let_others_run()
    gate.set()
    placing.join(CEILING_S)
    assert not placing.is_alive()
    assert late.wait(CEILING_S)
    generate(session).wait(CEILING_S)
    assert parts_of(session).client.send(q.Roles())["actor"][2] == 1
