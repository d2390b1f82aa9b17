"""The process groups of roles: few, whatever the size of the world, and made once."""

import itertools
from datetime import timedelta
from pathlib import Path

import pytest
from rows import every_row

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hfsdk.core.layout import Layout
from hfsdk.engine.process import rendezvous
from hfsdk.engine.training.megatron_groups import RoleGroups, forget_groups, group_of


@pytest.fixture
def world(monkeypatch):
    """Start a world without peers; returns the lists of ranks of which groups were made."""
    made, make = [], dist.new_group

    def new_group(ranks, **options):
        made.append(tuple(ranks))
        return make(ranks, **options)

    monkeypatch.setattr(dist, "new_group", new_group)

    def start(size, rank):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return made

    yield start
    if dist.is_initialized():
        leave()


def leave():
    forget_groups()
    dist.destroy_process_group()


def test_a_rank_of_256_makes_a_handful_of_groups(world):
    with every_row() as row:
        for layout, rank in itertools.product(["tp8 pp4 dp8", "tp8 dp32", "dp256", "tp4 pp8 dp8"], (0, 100, 255)):
            with row(layout, rank):
                made = world(256, rank)
                made.clear()
                groups = RoleGroups(Layout.parse(layout).mesh())
                assert len(made) <= 7
                assert all(rank in ranks for ranks in made)
                sizes = groups.tp.size(), groups.pp.size(), groups.dp.size(), groups.world.size()
                assert sizes == (groups.tp_size, groups.pp_size, groups.dp_size, 256)
                RoleGroups(Layout.parse(layout).mesh())
                assert len(made) <= 7, "the next role of the same layout makes none"
            leave()


@pytest.mark.parametrize("timeout_s", [90.0, None])
def test_ranks_of_a_role_wait_as_long_as_the_session_says(monkeypatch, tmp_path, timeout_s):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rendezvous.join(f"file://{tmp_path / 'store'}", 0, 1, timeout_s=timeout_s)
    try:
        limits = [group._get_backend(torch.device("cpu")).options._timeout for group in (dist.group.WORLD, group_of([0]))]
    finally:
        forget_groups()
        dist.destroy_process_group()
        monkeypatch.setattr(rendezvous._Joined, "timeout", None)
    assert limits == [timedelta(seconds=timeout_s or 1800)] * 2


def gloo_threads():
    return [name.read_text() for name in Path("/proc/self/task").glob("*/comm")].count("gloo_tcp_loop\n")


def test_all_groups_of_a_process_share_one_thread_that_looks_for_messages(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for number in range(2):  # a worker joins one pool after the other
        rendezvous.join(f"file://{tmp_path / f'store{number}'}", 0, 1)
        try:
            groups = [dist.new_group([0], timeout=timedelta(seconds=90 + k)) for k in range(5)]
            for group in groups:
                dist.all_reduce(torch.ones(1), group=group)
            assert gloo_threads() == 1
            assert [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in groups] == [90, 91, 92, 93, 94]
        finally:
            forget_groups()
            dist.destroy_process_group()


def test_ranks_in_another_order_are_another_group(world):
    made = world(4, 1)
    assert group_of([0, 1]) is group_of((0, 1))
    assert dist.get_process_group_ranks(group_of([1, 0])) == [1, 0]
    assert made == [(0, 1), (1, 0)]


def test_the_next_world_has_groups_of_its_own(world):
    made = world(2, 0)
    group_of([0, 1])
    forget_groups()
    dist.destroy_process_group()
    world(2, 0)
    group_of([0, 1])
    assert made == [(0, 1)] * 2


def test_a_groups_name_is_the_same_on_all_its_members(world):
    """torch's own name counts the process's groups; members that differ in them would wait for each other for ever."""
    names = []
    for others in ([], [[0, 1], [0, 2]]):
        world(4, 0)
        for ranks in others:
            group_of(ranks)
        names.append(group_of([0, 1, 2, 3]).group_name)
        forget_groups()
        dist.destroy_process_group()
    world(4, 0)
    assert names[0] == names[1]
