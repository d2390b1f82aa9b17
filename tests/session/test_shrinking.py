"""``train(shrink=True)`` over the scripted runtime: a node leaves and comes back; where the run goes on then."""

from __future__ import annotations

import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.runtime import NodeStatus
from hfsdk.session.plans import Plans
from tests.session.scripted import ScriptedRuntime
from tests.session.test_on_death import DIED, Dies
from tests.session.test_training import TEXTS

HERE, THERE, LEFT = NodeStatus("node 0", True, True), NodeStatus("node 1", False, True), NodeStatus("node 1", False, False)
LOST = hf.PlacementError("devices 2, 3 are on node 1, which has left the Ray cluster")


class Nodes(ScriptedRuntime):
    """Nodes of two devices each.

    ``loads`` has where the actor was loaded, in which layout, and whether with what it had learned.
    """

    def __init__(self, *nodes):
        super().__init__(f"{len(nodes)}x2 cpu")
        self.present, self.loads, self.opening = nodes, [], lambda pool: None

    def nodes(self):
        return self.present

    def open_pool(self, pool):
        self.opening(pool)
        super().open_pool(pool)

    def load(self, role, pool, state=None, source=None):
        super().load(role, pool, state, source)
        self.loads.append((pool.devices, str(role.train), state is not None or source is not None))


@pytest.fixture
def runtime():
    return Nodes(HERE, THERE)


@pytest.fixture
def prompts(session, length_reward):
    session.actor("tiny", train="dp4", rollout="dp4", optimizer=hf.AdamW(lr=1e-5))
    session.reward(length_reward)
    return session.prompts(TEXTS, batch_size=2)


class Leaves(Dies):
    """The second node leaves in one step of the algorithm, and is back in another; those that plans are made from count too."""

    def __init__(self, runtime, leaves, back=None, error=DIED):
        super().__init__({leaves}, error)
        self.runtime, self.back = runtime, back

    def maybe(self):
        if self.num + 1 in self.attempts:
            self.runtime.present = (HERE, LEFT)
        if self.num + 1 == self.back:
            self.runtime.present = (HERE, THERE)
        super().maybe()


def train(session, algorithm, prompts, folder, **options):
    options = {"save_every": 2, "on_death": "restore", "shrink": True} | options
    return session.train(algorithm, prompts, steps=6, folder=folder, **options)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("error", [DIED, LOST], ids=["worker", "node"])
def test_a_run_goes_on_over_the_nodes_that_are_left_and_over_all_again(session, prompts, tmp_path, runtime, error):
    run = train(session, Leaves(runtime, 3, back=5, error=error), prompts, tmp_path)
    assert runtime.loads == [
        ((0, 1, 2, 3), "tp1 pp1 dp4", False),
        ((0, 1), "tp1 pp1 dp2", False),  # the save is loaded next
        ((0, 1, 2, 3), "tp1 pp1 dp4", True),
    ]
    assert [row["step"] for row in run.rows] == [*range(6)]
    assert len(run.restores) == 1
    assert [(r.step, r.num_devices, r.why) for r in run.resized] == [
        (1, 2, "node 1 left the cluster"),
        (3, 4, "node 1 came back"),
    ]
    assert "after step 3 the run goes on over all 4 devices" in str(run.resized[1])
    told = [*map(str, run.restores), *map(str, run.resized)]
    assert run.view()["restores"] == told
    drawn = [span.attrs["why"] for step in range(6) for span in session.trace[step] if "why" in span.attrs]
    assert drawn == [str(run.restores[0]), str(run.resized[1])], "each is in the timeline"
    assert str(session.models.actor.role.train) == "tp1 pp1 dp4"


def test_what_is_planned_is_told_before_anything_runs(session, prompts, tmp_path):
    with pytest.warns(UserWarning, match=r"shrink=True: without node 1 it goes on over devices 0, 1 \(actor 'tp1 pp1"):
        train(session, Dies(()), prompts, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tp_stays_where_it_fits_and_gives_way_where_it_does_not(session, length_reward, tmp_path, runtime):
    session.actor("tiny", train="tp2", optimizer=hf.AdamW(lr=1e-5))
    session.reward(length_reward)
    train(session, Leaves(runtime, 3), session.prompts(TEXTS, batch_size=2), tmp_path)
    assert runtime.loads[-1][1] == "tp2 pp1 dp1"
    runtime.present = (HERE, THERE)
    session.actor("tiny", train="tp4", replace=True, optimizer=hf.AdamW(lr=1e-5))
    train(session, Leaves(runtime, 3), session.prompts(TEXTS, batch_size=2), tmp_path / "other")
    assert runtime.loads[-1][0] == (0, 1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_node_that_is_noticed_late_is_one_death(session, prompts, tmp_path, runtime, monkeypatch):
    """Ray may tell of a worker's death many seconds before it takes the node as gone."""
    call = runtime.call

    def late(work):
        if work.call.method == "load_state" and runtime.present == (HERE, THERE):
            runtime.present = (HERE, LEFT)
            raise DIED
        return call(work)

    monkeypatch.setattr(runtime, "call", late)
    run = train(session, Dies({3}), prompts, tmp_path, max_restores=1)
    assert len(run.restores) == 1
    assert [r.num_devices for r in run.resized] == [2]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_without_it_a_node_that_left_ends_the_run(session, prompts, tmp_path, runtime):
    with refuses(hf.PlacementError, "node 1, which has left"):
        train(session, Leaves(runtime, 3, error=LOST), prompts, tmp_path, shrink=False)


def test_one_node_is_told_that_there_is_nothing_to_shrink_to(session, prompts, tmp_path, runtime):
    runtime.present = (HERE,)
    with pytest.warns(UserWarning, match="every device is on this node"):
        train(session, Dies(()), prompts, tmp_path)


def test_shrink_needs_restore(session, prompts, tmp_path, runtime):
    with refuses(hf.OptionError, "shrink=True", 'on_death="restore"'):
        train(session, Dies(()), prompts, tmp_path, on_death="raise")
    assert not runtime.sent()


def nowhere(*given, **named):
    raise hf.DeviceMemoryError("the actor needs 9 GB")


def test_what_fits_nowhere_is_refused_before_anything_runs(session, prompts, tmp_path, runtime, monkeypatch):
    monkeypatch.setattr(Plans, "on", nowhere)
    with refuses(hf.PlacementError, "shrink=True", "without node 1", "the actor needs 9 GB"):
        train(session, Dies(()), prompts, tmp_path)
    assert not runtime.sent()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("leaves_again", [False, True], ids=["it does not start", "it leaves again"])
def test_a_node_over_which_the_run_cannot_go_on_leaves_the_run_as_it_was(session, prompts, tmp_path, runtime, leaves_again):
    failed = []

    def opening(pool):
        if len(runtime.loads) == 2 and pool.size == 4:
            failed.append(pool)
            runtime.present = (HERE, LEFT) if leaves_again else (HERE, THERE)
            raise LOST if leaves_again else hf.PlacementError("the 2 workers of pool 'all' did not start")

    runtime.opening = opening
    run = train(session, Leaves(runtime, 2, back=4), prompts, tmp_path)
    assert run.state == "finished"
    assert len(failed) == 1, "it is not tried at every step"
    assert runtime.loads[:2] == [((0, 1, 2, 3), "tp1 pp1 dp4", False), ((0, 1), "tp1 pp1 dp2", False)]
    assert [(devices, learned) for devices, _, learned in runtime.loads[2:]] == [((0, 1), True)]
    assert [r.num_devices for r in run.resized] == [2]
    assert len(run.restores) == 1
    assert any("the run cannot go on over it" in text for text in session.messages)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_next_run_goes_back_to_all_nodes_too(session, prompts, tmp_path, runtime):
    train(session, Leaves(runtime, 3), prompts, tmp_path)
    assert runtime.loads[-1][0] == (0, 1)
    runtime.present = (HERE, THERE)
    run = train(session, Dies(()), prompts, tmp_path)
    assert [r.num_devices for r in run.resized] == [4]
    assert runtime.loads[-1][0] == (0, 1, 2, 3)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_error_of_the_users_is_no_death_though_a_node_is_away(session, prompts, tmp_path, runtime):
    with refuses(hf.OptionError, "mine"):
        train(session, Leaves(runtime, 3, error=hf.OptionError("mine")), prompts, tmp_path)
    assert session.run.restores == []


@pytest.fixture
def three():
    """The runtime of three nodes."""
    return Nodes(HERE, THERE, NodeStatus("node 2", False, True))


def over(three, reward):
    session = hf.Session(runtime=three)
    session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
    session.reward(reward)
    return session


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nodes_without_which_it_fits_nowhere_are_told_and_are_no_restore(three, length_reward, tmp_path, monkeypatch):
    class BothLeave(Dies):
        def maybe(self):
            if self.num + 1 in self.attempts:
                monkeypatch.setattr(Plans, "on", nowhere)
                three.present = (HERE, LEFT, NodeStatus("node 2", False, False))
            super().maybe()

    with over(three, length_reward) as session:
        with refuses(hf.PlacementError, "without node 1, node 2", "the actor needs 9 GB"):
            train(session, BothLeave({3}), session.prompts(TEXTS, batch_size=2), tmp_path)
        assert session.run.restores == []


def test_alike_nodes_are_planned_for_once(three, length_reward, tmp_path, monkeypatch):
    planned, plan = [], Plans.on
    monkeypatch.setattr(Plans, "on", lambda plans, *given: planned.append(given[0]) or plan(plans, *given))
    with over(three, length_reward) as session, pytest.warns(UserWarning, match="without node 1 .* without node 2"):
        train(session, Dies(()), session.prompts(TEXTS, batch_size=2), tmp_path)
    assert len(planned) == 1
