"""What copies take of each node's host memory is known before they are made, and said or refused."""

from __future__ import annotations

import itertools

import pytest
from rows import every_row

from hfsdk.core.errors import CheckpointError
from hfsdk.core.layout import Layout
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.calls import host_memory
from hfsdk.engine.calls.host_memory import HostRoom, check_room, free_host_bytes, kept_bytes, needed_by_node, rooms

GB = 10**9


def role(model="llama3-70b", train="tp8 pp2 dp4", dtype="bf16"):
    spec = ModelSpec.preset(model)
    optimizer = AdamW(distributed=True)
    return RoleSpec(name="actor", kind="actor", model=spec, train=Layout.parse(train), dtype=dtype, optimizer=optimizer)


def test_a_70b_on_eight_nodes_takes_one_copy_and_no_more():
    big = role()
    numbers = big.model.num_parameters()
    one_copy = 14 * numbers
    needed = needed_by_node([(big, [rank // 8 for rank in range(64)], True)])
    assert list(needed) == list(range(8))
    assert sum(needed.values()) == pytest.approx(one_copy, rel=1e-3), "what is replicated over tp is little"
    assert max(needed.values()) == pytest.approx(one_copy / 8, rel=0.02)
    assert max(needed.values()) == pytest.approx(123.5 * GB, rel=0.001), "said in docs/design-notes.md"
    before = max(sum(kept_bytes(role(train="tp8 pp2 dp1"), rank, True) for rank in range(first, first + 8)) for first in (0, 8))
    assert before == pytest.approx(494 * GB, rel=0.002), "each dp rank all it holds, eight of them on a node"
    assert before == pytest.approx(4 * max(needed.values()), rel=1e-6)


def test_shares_sum_up_to_one_copy():
    """Of each tensor-parallel and pipeline rank's part."""
    with every_row() as row:
        for train, (dtype, trained, each) in itertools.product(
            ["dp1", "dp3", "tp2 dp2", "pp2 dp5"], [("fp32", True, 12), ("bf16", True, 14), ("bf16", False, 6)]
        ):
            with row(train, dtype, trained, each):
                check_shares_sum_up_to_one_copy(train, dtype, trained, each)


def check_shares_sum_up_to_one_copy(train, dtype, trained, each):
    held, alone = role("llama-7b", train, dtype), Layout.parse(train)
    once = role("llama-7b", f"tp{alone.tp} pp{alone.pp} dp1", dtype)
    whole = sum(kept_bytes(once, rank, trained) for rank in range(alone.tp * alone.pp))
    parts = [kept_bytes(held, rank, trained) for rank in range(alone.size)]
    assert sum(parts) == whole >= each * held.model.num_parameters()
    for stage in range(alone.pp):
        mine = [kept_bytes(held, alone.rank(tp=0, pp=stage, dp=dp), trained) for dp in range(alone.num_replicas)]
        assert max(mine) - min(mine) <= 1


def test_roles_on_a_node_are_summed_up():
    small = role("llama-7b", "dp2")
    assert needed_by_node([(small, [0, 1], True), (small, [1, 1], False)]) == {
        0: kept_bytes(small, 0, True),
        1: kept_bytes(small, 1, True) + kept_bytes(small, 0, False) + kept_bytes(small, 1, False),
    }


def test_what_does_not_fit_is_refused_with_both_numbers():
    found = rooms({0: 100 * GB, 1: 120 * GB, 2: 90 * GB}, {0: 90 * GB, 1: 100 * GB})
    assert found[2] == HostRoom(2, 90 * GB, None)
    with pytest.raises(CheckpointError) as caught:
        check_room(found, "the snapshot", "Forget one.")
    assert str(caught.value) == (
        "the snapshot takes 120.0 GB of host memory on node 1, and 100.0 GB are free there; nothing was copied. Forget one."
    )


def test_what_takes_much_is_told_of():
    told = check_room([HostRoom(0, 10 * GB, 100 * GB), HostRoom(3, 60 * GB, 100 * GB)], "the snapshot", "")
    assert told == "the snapshot takes 60.0 GB of the 100.0 GB of host memory that are free on node 3"
    assert check_room([HostRoom(0, 50 * GB, 100 * GB)], "the snapshot", "") == ""
    assert "600.0 MB" in check_room([HostRoom(0, 6 * 10**8, GB)], "the snapshot", "")
    assert check_room([HostRoom(0, 50 * GB, None)], "the snapshot", "") == "", "nobody can say"
    assert check_room([], "the snapshot", "") == ""
    assert check_room([HostRoom(0, 0, 0)], "the snapshot", "") == "", "nothing is copied"


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    import psutil

    free = psutil.virtual_memory().available
    assert free_host_bytes(tmp_path / "no such folder") > 0
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Seen", (), {"available": free})())
    assert free_host_bytes(tmp_path) == free
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 100000\n")
    assert free_host_bytes(tmp_path) == free, "version 2 without a limit"
    (tmp_path / "memory.max").write_text("1000000\n")
    assert free_host_bytes(tmp_path) == 600_000, "pages that only cache files can be given back"
    (tmp_path / "memory.max").write_text("300000\n")
    assert free_host_bytes(tmp_path) == 0
    old = tmp_path / "old" / "memory"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("2000000")
    (old / "memory.usage_in_bytes").write_text("500000")
    (old / "memory.stat").write_text("total_inactive_file 1000")
    assert free_host_bytes(tmp_path / "old") == 1_501_000
    assert host_memory.NOTICE_SHARE == 0.5, "said in docs/reliability.md"
