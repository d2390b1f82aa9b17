"""Two nodes: a session on the Ray cluster of another process. One run (two_nodes.py) tells everything these tests look at."""

import pytest
from expect import until
from other_processes import own_processes, told_by


@pytest.fixture(scope="module")
def told():
    return told_by("two_nodes.py")


def test_devices_are_those_of_the_cluster(told):
    assert told["cluster"] == ["2x2 cpu", [0, 0, 1, 1]]


def test_addresses_where_no_cluster_is(told):
    kind, words = told["no_cluster"]
    assert kind == "PlacementError"
    assert "no Ray cluster at '127.0.0.1:1'" in words
    assert "this process uses the Ray at" in told["other_address"][1]


def test_placement_says_the_nodes(told):
    assert "on devices 1-2 of nodes 0-1" in told["picture"]
    assert "on device 3 of node 1" in told["picture"]


@pytest.mark.parametrize("name", ["across", "within"])
def test_step_of_ppo(told, name):
    """``across``: the actor's tp2, trained and generating, over both nodes; ``within``: every pool on one node."""
    step = told[name]
    assert step["gap"] < 1e-4, "rollout and trainer have the same weights"
    assert step["finite"]
    assert step["rows"] == 4


def test_processes_meet_by_a_keyed_store_across_nodes_and_by_file_within_one(told):
    actor, critic = told["code"]
    assert [store for _, _, store in actor] == ["keyed", "keyed"]
    assert [store for _, _, store in critic] == ["file"]
    assert told["moved"]["store"] == "file"


def test_workers_run_the_users_code(told):
    """The cluster was started without this package on its path."""
    for path, _, _ in told["code"][0] + told["code"][1]:
        assert "py_modules_files" in path


def test_folder_is_fetched_once_where_a_node_lacks_it(told):
    (here, there), cache = told["folders"]
    assert len(there) == 1, "three roles in two pools, one copy"
    assert there[0].startswith(cache)
    assert not any(path.startswith(cache) for path in here)


def test_logs_come_from_the_workers_node(told):
    first, second, critic = told["logs"]
    assert "here is actor on device 1" in first
    assert "here is actor on device 2" in second
    assert "here is critic on device 3" in critic


def test_roles_move_between_nodes_bit_for_bit(told):
    (actor, critic), (actor_after, critic_after) = told["moved"]["before"], told["moved"]["after"]
    assert actor == actor_after
    assert critic_after == critic * 2
    assert told["moved"]["same_text"]


def test_shadow_on_the_other_node_gets_what_the_plan_says(told):
    """Half of the weights for each rank of its tp2, norms for both, all from the other node; the whole for neither."""
    shadow = told["shadow"]
    assert shadow["gap"] < 1e-4
    assert shadow["nodes"] == [0, 0, 1, 1]
    measured, planned = shadow["received"]
    assert measured == planned
    assert all(0.5 * shadow["all"] <= received < 0.51 * shadow["all"] for received in measured[2:])
    assert shadow["links"]["network"] == [sum(planned)] * 2
    assert shadow["links"]["same node"] == [0, 0]


def test_killed_workers_leave_the_other_node_alone(told):
    assert told["other_node"] == 4
    kind, words = told["killed"]
    assert kind == "WorkerDiedError"
    assert "on node 1 (" in words
    assert told["back"] == 4, "the pool is started again on its node"


def test_removed_node_is_named_and_the_other_goes_on(told):
    kind, words = told["removed"]
    assert kind == "WorkerDiedError"
    assert "on node 1 (" in words
    assert "its node left the cluster" in words
    kind, words = told["lost"]
    assert kind == "PlacementError"
    assert "devices 2, 3 are on node 1" in words
    assert "on devices 0, 1" in words
    assert told["one_node"] == 4


def test_nothing_is_left(told):
    pids = [told["start"][0], *told["end"], *(pid for _, pid, _ in told["code"][0] + told["code"][1])]
    until("the end of every process", lambda: own_processes(pids) == [])
