"""How many devices of each node a session gets: the user's own first, GPUs packed, processors spread, never more than asked for."""

import pytest

pytest.importorskip("ray")
from expect import refuses

from hfsdk.core.errors import PlacementError
from hfsdk.engine.ray import cluster as ray_cluster


@pytest.fixture
def nodes(monkeypatch):
    """``nodes(here, there, resource)``: two nodes with so many of it; this process is on the second that Ray names."""

    class Context:
        def get_node_id(self):
            return "z"

    def have(here, there, resource):
        def node(ray_id, address, count):
            resources = {resource: float(count), "memory": 8e9} | ({"accelerator_type:H100": 1.0} if resource == "GPU" else {})
            return {"NodeID": ray_id, "NodeManagerAddress": address, "Alive": True, "Resources": resources}

        monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: [node("a", "10.0.0.1", there), node("z", "10.0.0.2", here)])

    monkeypatch.setattr(ray_cluster.ray, "get_runtime_context", Context)
    return have


def test_gpus_fill_the_users_node_first_and_are_as_many_as_asked_for(nodes):
    nodes(8, 8, "GPU")
    cluster, each = ray_cluster.describe(10, shares_cpus=False)
    assert str(cluster) == "1x8 H100 + 1x2 H100"
    assert [node.ray_id for node in each] == ["z"] * 8 + ["a"] * 2
    assert ray_cluster.describe(4, shares_cpus=False)[0].num_devices == 4
    assert ray_cluster.describe(None, shares_cpus=False)[0].num_devices == 16
    with refuses(PlacementError, 17, 16):
        ray_cluster.describe(17, shares_cpus=False)


def test_processors_are_spread_evenly_as_far_as_nodes_have_room(nodes):
    nodes(8, 2, "CPU")
    cluster, each = ray_cluster.describe(6, shares_cpus=False)
    assert [node.ray_id for node in each] == ["z"] * 4 + ["a"] * 2
    assert cluster.node_cores[1] == 2
    with refuses(PlacementError, 11, 10):
        ray_cluster.describe(11, shares_cpus=False)


def test_a_ray_of_ones_own_has_as_many_workers_as_asked_for_whatever_it_counts(nodes):
    nodes(2, 0, "CPU")
    assert ray_cluster.describe(12, shares_cpus=True)[0].num_devices == 12
