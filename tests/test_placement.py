"""Placements as pure data: presets, shares, parts, and what is refused."""

from expect import each, refuses

from hfsdk import PlacementError
from hfsdk.core.placement import Placement, Pool

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


@each(
    "groups, devices, sizes",
    [(2, 4, [2, 2]), (3, 4, [2, 1, 1]), (5, 16, [4, 4, 4, 2, 2]), (3, 7, [3, 2, 2]), (2, 5, [3, 2]), (3, 8, [4, 2, 2])],
)
def test_devices_are_divided_about_evenly_in_powers_of_two_where_none_is_left_over(groups, devices, sizes):
    roles = [f"role_{i}" for i in range(groups)]
    assert [len(pool) for pool in pools("standalone", roles, devices).values()] == sizes


def test_shares():
    assert pools({"actor critic": 1.0, "reference": 0.25, "reward": 0.75})["reward"] == (1, 2, 3)
    assert pools({"actor reference": 0.5, "critic reward": 0.5})["critic"] == (2, 3)
    assert Placement.of({"actor critic": 1.0, "reference": 0.5, "reward": 0.5}, PPO, 4).pool_of("reward").within == "all"
    for shares in ({"actor": 0.5, "critic": 0.75}, {"actor": 1.5, "critic": 0.5}, {"actor": 0.1, "critic": 0.5}):
        with refuses(PlacementError, "the share"):
            Placement.of(shares, ("actor", "critic"), 4)


def test_which_pools_exclude_each_other():
    placement = Placement.of("interleaving", PPO, 4)
    whole, first = placement.pool_of("actor"), placement.pool_of("reference")
    assert {p.name for p in placement.overlapping(whole)} == {"reference", "reward"}
    assert placement.overlapping(first) == [whole]
    split = Placement.of("split", PPO, 4)
    assert split.overlapping(split.pools[0]) == []


@each(
    "placement, named",
    [
        ((Pool("a", (0, 1)), Pool("b", (1, 2))), ["device 1", "'a'", "'b'", "overlap"]),
        ((Pool("a", (0, 1)), Pool("b", (2, 7))), ["'b'", "device 7", "4 devices"]),
        ((Pool("a", (0, 1)), Pool("a", (2, 3))), ["two pools", "'a'"]),
        ((Pool("a", (0, 1)), Pool("b", ())), ["'b'", "no device"]),
        ((Pool("a", (0, 1)), Pool("b", (2,), "a")), ["'b'", "(2,)", "'a'", "(0, 1)"]),
        ((Pool("a", (0, 1, 2, 3)), Pool("b", (0, 2), "a")), ["must be a run of", "(0, 2)"]),
    ],
)
def test_pools_that_cannot_be_are_refused_with_their_devices(placement, named):
    with refuses(PlacementError, *named):
        Placement.of(Placement(placement, {"actor": "a", "critic": "b"}), ("actor", "critic"), 4)


@each(
    "what, roles, named",
    [
        ({"actor": 2}, ("actor", "critic"), ["forgets critic", "actor"]),
        ({"actor judge": 2}, ("actor",), ["judge", "does not have"]),
        (Placement((Pool("a", (0,)),), {"actor": "a"}), ("a\nb", "c"), ["forgets 'a\\nb', c", "places actor"]),
        ({"actor": 8}, ("actor",), ["8 devices", "4 devices"]),
        ("together", ("actor",), ["'together'", "colocate, flattening"]),
    ],
)
def test_a_placement_names_every_role_and_no_other(what, roles, named):
    with refuses(PlacementError, *named):
        Placement.of(what, roles, 4)


@each("what", [{"actor": [0, 1]}, {"actor": "x"}, {"actor": float("nan")}, {1: 2}, {"actor": True}, {"": 1}])
def test_sizes_that_are_none_are_refused(what):
    with refuses(PlacementError) as caught:
        Placement.of(what, ["actor"], 4)
    assert any(words in str(caught.value) for words in ("a text or a mapping", "names roles and how many"))
