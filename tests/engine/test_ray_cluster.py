"""What Ray says of its nodes, as devices of a cluster."""

import os
import sys
from contextlib import contextmanager

import pytest
from expect import refuses
from rows import every_row

pytest.importorskip("ray")
from hfsdk.core.cluster import DEVICES, SHARED_MEMORY, ClusterSpec
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import PlacementError
from hfsdk.engine.ray import cluster as ray_cluster
from hfsdk.engine.ray.cluster import Node, _cores, _device, check_present, present
from hfsdk.engine.ray.worker_process import said_in, write_begin


def test_accelerators_are_presets_by_rays_names():
    with every_row() as row:
        for label, name, gigabytes in [
            ("A100", "A100-80GB", 80),
            ("A100-40G", "A100-80GB", 40),
            ("H200", "H200", 141),
            ("L4", "L4", 24),
            ("T4", "T4", 16),
            ("nobody's", "nobody's", 80),
        ]:
            with row(label, name, gigabytes):
                check_accelerators_are_presets_by_rays_names(label, name, gigabytes)


def check_accelerators_are_presets_by_rays_names(label, name, gigabytes):
    found = _device({"Resources": {f"accelerator_type:{label}": 1.0, "GPU": 4.0}}, "GPU", 4, here=False)
    assert (found.name, found.memory_bytes) == (name, gigabytes * 10**9)


def test_workers_here_share_all_processors_whatever_ray_hands_out():
    node = {"Resources": {"CPU": 64.0}}
    assert _cores(node, 64, here=True) == os.cpu_count()
    assert _cores(node, 4, here=False) == 64


def test_nodes_have_their_devices_links():
    assert ClusterSpec.of([(DEVICES["cpu"],) * 2], node_cores=(2,)).intra_node == SHARED_MEMORY
    h100, a100 = ((DEVICES[name],) * 8 for name in ("H100", "A100-80GB"))
    assert ClusterSpec.of([h100, h100]).inter_node == DEVICES["H100"].network
    mixed = ClusterSpec.of([h100, a100])
    assert mixed.intra_node == DEVICES["A100-80GB"].link
    assert mixed.links_of([0])[0] == DEVICES["H100"].link


def rays(ray_id, address, alive=True, **resources):
    return {"NodeID": ray_id, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}


HERE, THERE = Node(0, "a", "10.0.0.1", True), Node(1, "b", "10.0.0.2", False)
A100, H100 = {"accelerator_type:A100": 1.0}, {"accelerator_type:H100": 1.0}


def test_a_node_like_it_takes_the_place_of_one_that_left():
    with every_row() as row:
        for kind, others, taken in [
            ("cpu", [], None),
            ("cpu", [rays("c", "10.0.0.3", CPU=2.0), rays("d", "10.0.0.2", CPU=8.0)], "d"),  # at the same address
            ("cpu", [rays("c", "10.0.0.3", CPU=2.0)], "c"),
            ("cpu", [rays("c", "10.0.0.2", CPU=1.0), rays("d", "10.0.0.2", False, CPU=2.0)], None),  # too small; gone as well
            ("A100-80GB", [rays("c", "10.0.0.2", GPU=2.0, **H100), rays("d", "10.0.0.4", GPU=2.0, **A100)], "d"),
            ("A100-80GB", [rays("c", "10.0.0.2", CPU=8.0)], None),
        ]:
            with pytest.MonkeyPatch.context() as patch, row(kind, others, taken):
                check_a_node_like_it_takes_the_place_of_one_that_left(patch, kind, others, taken)


def check_a_node_like_it_takes_the_place_of_one_that_left(monkeypatch, kind, others, taken):
    first = rays("a", "10.0.0.1", CPU=2.0, GPU=2.0, **A100)
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: [first, rays("b", "10.0.0.2", False), *others])
    cluster, known = ClusterSpec.of([(DEVICES[kind],) * 2] * 2), (HERE, HERE, THERE, THERE)
    nodes, alive = present(known, cluster)
    assert nodes[:2] == (HERE, HERE), "a node of the session is taken for no other"
    if taken is None:
        assert nodes == known
        with refuses(PlacementError, "devices 2, 3", "node 1 (10.0.0.2)", "left"):
            check_present(nodes, alive, [1, 2])
    else:
        assert {(node.number, node.ray_id, node.here) for node in nodes[2:]} == {(1, taken, False)}
        check_present(nodes, alive, [0, 1, 2, 3])


def test_what_a_dead_worker_wrote_is_of_the_call():
    earlier = "-- call 7: actor.update\nTraceback of the call before\n"
    assert said_in(f"{earlier}-- call 8: actor.update\nloading\nterminate called", 8) == "loading\nterminate called"
    assert said_in(earlier, 8) == "", "it died before it began"
    assert said_in("the last lines of many", 8) == "the last lines of many"


@contextmanager
def errors_to(path):
    """Have this process's standard error go to a file, as a worker's does."""
    sys.stderr.flush()
    kept, log = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(log)


def test_a_call_is_marked_in_the_log(tmp_path):
    with errors_to(tmp_path / "log"):
        write_begin(Call(id=8, role="actor", method="update"))
        os.write(2, b"loading")
    assert said_in((tmp_path / "log").read_text(), 8) == "loading"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_call_begins_where_the_log_has_no_room(capfd):
    with capfd.disabled(), errors_to("/dev/full"):
        write_begin(Call(id=8, role="actor", method="update"))
        sys.stderr.flush()
