"""Placements as pure data: presets, shares, parts, and what is refused."""

import pytest

from hfsdk import PlacementError
from hfsdk.core.placement import Placement, Pool, _even_sizes

PPO = ("actor", "critic", "reference", "reward")


def pools(what, roles=PPO, devices=4):
    placement = Placement.of(what, roles, devices)
    return {role: placement.pool_of(role).devices for role in placement.roles}


def test_presets():
    everywhere = dict.fromkeys(PPO, (0, 1, 2, 3))
    assert pools("colocate") == pools("flattening") == everywhere
    assert pools("split") == {"actor": (0, 1), "reference": (0, 1), "critic": (2, 3), "reward": (2, 3)}
    assert pools("standalone") == {role: (i,) for i, role in enumerate(PPO)}
    assert pools("interleaving") == everywhere | {"reference": (0, 1), "reward": (2, 3)}
    assert pools("interleaving", PPO[:3])["reference"] == (0, 1)
    apart = pools("separation")
    assert apart == pools("disaggregated")
    assert apart["actor"] == (0,)
    assert apart["critic"] == (1,)
    assert apart["actor.rollout"] == (2,)
    assert apart["critic.inference"] == apart["reference"] == apart["reward"] == (3,)
    assert pools("separation", devices=2)["actor"] == pools("separation", devices=2)["critic"] == (0,)
    assert len(set(pools("separation", devices=16).values())) == 6


@pytest.mark.parametrize(
    ("groups", "devices", "sizes"),
    [(2, 4, [2, 2]), (3, 4, [2, 1, 1]), (5, 16, [4, 4, 4, 2, 2]), (3, 7, [3, 2, 2]), (2, 5, [3, 2]), (3, 8, [4, 2, 2])],
)
def test_even_sizes(groups, devices, sizes):
    assert _even_sizes(groups, devices) == sizes


def test_shares():
    assert pools({"actor critic": 1.0, "reference": 0.25, "reward": 0.75})["reward"] == (1, 2, 3)
    assert pools({"actor reference": 0.5, "critic reward": 0.5})["critic"] == (2, 3)
    assert Placement.of({"actor critic": 1.0, "reference": 0.5, "reward": 0.5}, PPO, 4).pool_of("reward").within == "all"
    for shares in ({"actor": 0.5, "critic": 0.75}, {"actor": 1.5, "critic": 0.5}, {"actor": 0.1, "critic": 0.5}):
        with pytest.raises(PlacementError, match="the share"):
            Placement.of(shares, ("actor", "critic"), 4)


def test_which_pools_exclude_each_other():
    placement = Placement.of("interleaving", PPO, 4)
    whole, first = placement.pool_of("actor"), placement.pool_of("reference")
    assert {p.name for p in placement.overlapping(whole)} == {"reference", "reward"}
    assert placement.overlapping(first) == [whole]
    split = Placement.of("split", PPO, 4)
    assert split.overlapping(split.pools[0]) == []


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ((Pool("a", (0, 1)), Pool("b", (1, 2))), r"device 1 is in pools 'a' and 'b'; pools may not overlap"),
        ((Pool("a", (0, 1)), Pool("b", (2, 7))), r"pool 'b' asks for device 7; the session has 4 devices"),
        ((Pool("a", (0, 1)), Pool("a", (2, 3))), r"two pools are called 'a'"),
        ((Pool("a", (0, 1)), Pool("b", ())), r"pool 'b' has no device"),
        ((Pool("a", (0, 1)), Pool("b", (2,), "a")), r"'b' on devices \(2,\) is said to be within 'a', which is \(0, 1\)"),
        ((Pool("a", (0, 1, 2, 3)), Pool("b", (0, 2), "a")), r"a part is a run of another pool's devices"),
    ],
)
def test_pools_that_cannot_be(placement, words):
    with pytest.raises(PlacementError, match=words):
        Placement.of(Placement(placement, {"actor": "a", "critic": "b"}), ("actor", "critic"), 4)


def test_roles_that_cannot_be():
    with pytest.raises(PlacementError, match="forgets critic"):
        Placement.of({"actor": 2}, ("actor", "critic"), 4)
    with pytest.raises(PlacementError, match="names judge, which the session does not have"):
        Placement.of({"actor judge": 2}, ("actor",), 4)
    with pytest.raises(PlacementError, match=r"^the placement forgets 'a\\nb', c; it places actor. Name every role.$"):
        Placement.of(Placement((Pool("a", (0,)),), {"actor": "a"}), ("a\nb", "c"), 4)
    with pytest.raises(PlacementError, match="asks for 8 devices; the session has 4 devices"):
        Placement.of({"actor": 8}, ("actor",), 4)
    with pytest.raises(PlacementError, match="no placement 'together'; there are colocate, flattening"):
        Placement.of("together", ("actor",), 4)


@pytest.mark.parametrize("what", [{"actor": [0, 1]}, {"actor": "x"}, {"actor": float("nan")}, {1: 2}, {"actor": True}, {"": 1}])
def test_sizes_that_are_none_are_refused(what):
    with pytest.raises(PlacementError, match=r"what must be a text or a mapping|a placement names roles and how many"):
        Placement.of(what, ["actor"], 4)
