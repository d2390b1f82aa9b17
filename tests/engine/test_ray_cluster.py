"""What Ray says of its nodes, as devices of a cluster."""

import os
import sys
from contextlib import contextmanager

import pytest

pytest.importorskip("ray")
from hfsdk.core.call_flow import Call
from hfsdk.core.cluster import DEVICES, SHARED_MEMORY, ClusterSpec
from hfsdk.engine.ray.ray_cluster import _cores, _device
from hfsdk.engine.ray.ray_worker import said_in, write_begin


@pytest.mark.parametrize(
    ("label", "name", "gigabytes"),
    [("A100", "A100-80GB", 80), ("A100-40G", "A100-80GB", 40), ("H200", "H200", 141), ("L4", "L4", 24), ("T4", "T4", 16),
     ("nobody's", "nobody's", 80)],
)  # fmt: skip
def test_accelerators_are_presets_by_rays_names(label, name, gigabytes):
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
