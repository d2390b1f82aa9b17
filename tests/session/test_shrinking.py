"""``train(shrink=True)`` over a stand-in for the controller: a node leaves and comes back; where the run goes on then."""

from __future__ import annotations

import pytest

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.runtime import NodeStatus
from hfsdk.engine.calls import messages as m
from hfsdk.session.plans import Plans
from tests.session.fakes import FakeController, session_over
from tests.session.test_on_death import DIED, Dies
from tests.session.test_training import TEXTS

HERE, THERE, LEFT = NodeStatus("node 0", True, True), NodeStatus("node 1", False, True), NodeStatus("node 1", False, False)
LOST = hf.PlacementError("devices 2, 3 are on node 1, which has left the Ray cluster")


class TwoNodes(FakeController):
    def __init__(self):
        super().__init__()
        self.nodes = (HERE, THERE)


@pytest.fixture
def controller():
    return TwoNodes()


@pytest.fixture
def session(controller):
    with session_over(controller, ClusterSpec.parse("2x2 cpu")) as session:
        yield session


@pytest.fixture
def prompts(session, length_reward):
    session.actor("tiny", train="dp4", rollout="dp4", optimizer=hf.AdamW(lr=1e-5))
    session.reward(length_reward)
    return session.prompts(TEXTS, batch_size=2)


class Leaves(Dies):
    """The second node leaves in one step of the algorithm, and is back in another; those that plans are made from count too."""

    def __init__(self, controller, leaves, back=None, error=DIED):
        super().__init__({leaves}, error)
        self.controller, self.back = controller, back

    def maybe(self):
        if self.num + 1 in self.attempts:
            self.controller.nodes = (HERE, LEFT)
        if self.num + 1 == self.back:
            self.controller.nodes = (HERE, THERE)
        super().maybe()


def train(session, algorithm, prompts, folder, **options):
    options = {"save_every": 2, "on_death": "restore", "shrink": True} | options
    return session.train(algorithm, prompts, steps=6, folder=folder, **options)


def places(controller):
    sent = controller.sent(m.Place)
    return [([pool.devices for pool in one.placement.pools], str(one.roles[0].train), one.fresh) for one in sent]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("error", [DIED, LOST], ids=["worker", "node"])
def test_a_run_goes_on_over_the_nodes_that_are_left_and_over_all_again(session, prompts, tmp_path, controller, error):
    run = train(session, Leaves(controller, 3, back=5, error=error), prompts, tmp_path)
    assert places(controller) == [
        ([(0, 1, 2, 3)], "tp1 pp1 dp4", False),
        ([(0, 1)], "tp1 pp1 dp2", True),  # the save is loaded next
        ([(0, 1, 2, 3)], "tp1 pp1 dp4", False),
    ]
    assert [row["step"] for row in run.rows] == [*range(6)]
    assert len(run.restores) == 1
    assert [(r.step, r.num_devices, r.why) for r in run.resized] == [
        (1, 2, "node 1 left the cluster"),
        (3, 4, "node 1 came back"),
    ]
    assert "after step 3 the run goes on over all 4 devices" in str(run.resized[1])
    assert len(controller.sent(m.Note)) == 2, "each is drawn in the timeline"
    assert str(session.models.actor.role.train) == "tp1 pp1 dp4"
    assert run.view()["restores"] == [*map(str, run.restores), *map(str, run.resized)]


def test_what_is_planned_is_told_before_anything_runs(session, prompts, tmp_path):
    with pytest.warns(UserWarning, match=r"shrink=True: without node 1 it goes on over devices 0, 1 \(actor 'tp1 pp1"):
        train(session, Dies(()), prompts, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tp_stays_where_it_fits_and_gives_way_where_it_does_not(session, length_reward, tmp_path, controller):
    session.actor("tiny", train="tp2", optimizer=hf.AdamW(lr=1e-5))
    session.reward(length_reward)
    train(session, Leaves(controller, 3), session.prompts(TEXTS, batch_size=2), tmp_path)
    assert places(controller)[-1][1] == "tp2 pp1 dp1"
    controller.nodes = (HERE, THERE)
    session.actor("tiny", train="tp4", replace=True, optimizer=hf.AdamW(lr=1e-5))
    train(session, Leaves(controller, 3), session.prompts(TEXTS, batch_size=2), tmp_path / "other")
    assert places(controller)[-1][0] == [(0, 1)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_node_that_is_noticed_late_is_one_death(session, prompts, tmp_path, controller, monkeypatch):
    """Ray may tell of a worker's death many seconds before it takes the node as gone."""
    placing = controller._awaitloads

    def late(message):
        if controller.nodes == (HERE, THERE) and algorithm.num == 3:
            controller.nodes = (HERE, LEFT)
            raise DIED
        placing(message)

    submit = controller._submit

    def loads(message):
        if message.method == "load_state" and controller.nodes == (HERE, THERE):
            controller.nodes = (HERE, LEFT)
            raise DIED
        return submit(message)

    monkeypatch.setattr(controller, "_awaitloads", late)
    monkeypatch.setattr(controller, "_submit", loads)
    algorithm = Dies({3})
    run = train(session, algorithm, prompts, tmp_path, max_restores=1)
    assert len(run.restores) == 1
    assert [r.num_devices for r in run.resized] == [2]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_without_it_a_node_that_left_ends_the_run(session, prompts, tmp_path, controller):
    with pytest.raises(hf.PlacementError, match="which has left"):
        train(session, Leaves(controller, 3, error=LOST), prompts, tmp_path, shrink=False)


def test_one_node_is_told_that_there_is_nothing_to_shrink_to(prompts, session, tmp_path, controller):
    controller.nodes = (HERE,)
    with pytest.warns(UserWarning, match="every device is on this node"):
        train(session, Dies(()), prompts, tmp_path)


def test_shrink_needs_restore(session, prompts, tmp_path, controller):
    with pytest.raises(hf.OptionError, match=r'shrink=True says where .* it needs on_death="restore"'):
        train(session, Dies(()), prompts, tmp_path, on_death="raise")
    assert not controller.sent(m.Submit)


def test_what_fits_nowhere_is_refused_before_anything_runs(session, prompts, tmp_path, controller, monkeypatch):
    def nowhere(*given, **named):
        raise hf.DeviceMemoryError("the actor needs 9 GB")

    monkeypatch.setattr("hfsdk.session.plans.Plans.on", nowhere)
    with pytest.raises(hf.PlacementError, match="shrink=True, and without node 1 the run cannot go on: the actor needs 9 GB"):
        train(session, Dies(()), prompts, tmp_path)
    assert not controller.sent(m.Submit)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("leaves_again", [False, True], ids=["it does not start", "it leaves again"])
def test_a_node_over_which_the_run_cannot_go_on_leaves_the_run_as_it_was(
    session, prompts, tmp_path, controller, monkeypatch, leaves_again
):
    waits, failed = controller._awaitloads, []

    def fails(message):
        if len(controller.sent(m.Place)) == 3:
            failed.append(len(controller.messages))
            controller.nodes = (HERE, LEFT) if leaves_again else (HERE, THERE)
            raise LOST if leaves_again else hf.PlacementError("the 2 workers of pool 'all' did not start")
        waits(message)

    monkeypatch.setattr(controller, "_awaitloads", fails)
    run = train(session, Leaves(controller, 2, back=4), prompts, tmp_path)
    assert run.state == "finished"
    assert len(failed) == 1, "it is not tried at every step"
    assert [(pools, fresh) for pools, _, fresh in places(controller)] == [
        ([(0, 1, 2, 3)], False), ([(0, 1)], True), ([(0, 1, 2, 3)], False), ([(0, 1)], False),
    ]  # fmt: skip
    assert [r.num_devices for r in run.resized] == [2]
    assert len(run.restores) == 1
    assert any("the run cannot go on over it" in text for text in session.messages)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_next_run_goes_back_to_all_nodes_too(session, prompts, tmp_path, controller):
    train(session, Leaves(controller, 3), prompts, tmp_path)
    assert places(controller)[-1][0] == [(0, 1)]
    controller.nodes = (HERE, THERE)
    run = train(session, Dies(()), prompts, tmp_path)
    assert [r.num_devices for r in run.resized] == [4]
    assert places(controller)[-1][0] == [(0, 1, 2, 3)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_error_of_the_users_is_no_death_though_a_node_is_away(session, prompts, tmp_path, controller):
    with pytest.raises(hf.OptionError, match="mine"):
        train(session, Leaves(controller, 3, error=hf.OptionError("mine")), prompts, tmp_path)
    assert session.run.restores == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nodes_without_which_it_fits_nowhere_are_told_and_are_no_restore(controller, length_reward, tmp_path, monkeypatch):
    controller.nodes = (HERE, THERE, NodeStatus("node 2", False, True))

    class BothLeave(Dies):
        def maybe(self):
            if self.num + 1 in self.attempts:
                monkeypatch.setattr("hfsdk.session.plans.Plans.on", nowhere)
                controller.nodes = (HERE, LEFT, NodeStatus("node 2", False, False))
            super().maybe()

    def nowhere(*given):
        raise hf.DeviceMemoryError("the actor needs 9 GB")

    with session_over(controller, ClusterSpec.parse("3x2 cpu")) as session:
        session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
        session.reward(length_reward)
        with pytest.raises(hf.PlacementError, match="without node 1, node 2 the run cannot go on: the actor needs 9 GB"):
            train(session, BothLeave({3}), session.prompts(TEXTS, batch_size=2), tmp_path)
        assert session.run.restores == []


def test_alike_nodes_are_planned_for_once(controller, length_reward, tmp_path, monkeypatch):
    controller.nodes = (HERE, THERE, NodeStatus("node 2", False, True))
    planned, plan = [], Plans.on
    monkeypatch.setattr(Plans, "on", lambda plans, *given: planned.append(given[0]) or plan(plans, *given))
    with session_over(controller, ClusterSpec.parse("3x2 cpu")) as session:
        session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
        session.reward(length_reward)
        with pytest.warns(UserWarning, match="without node 1 .* without node 2"):
            train(session, Dies(()), session.prompts(TEXTS, batch_size=2), tmp_path)
    assert len(planned) == 1
