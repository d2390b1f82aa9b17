"""What is said where roles are placed on GPUs: tensor parallelism over nodes, pools of several kinds."""

import warnings

import pytest

import hfsdk as hf
from hfsdk.planner.notices import costly


def said(cluster, wish="colocate", **layouts):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hf.Session.simulated(cluster) as session:
            session.actor("qwen2.5-3b", dtype="bf16", **layouts)
            session.place(wish)
            session.place(wish)  # once is enough
    return [str(warning.message) for warning in caught]


def test_tp_inside_a_node_is_not_worth_a_word():
    assert said("2x4 H100", train="tp4", rollout="tp2") == []


def test_tp_over_nodes_is_told_with_both_bandwidths():
    (words,) = said("4x2 H100", train="tp4", rollout="tp2")
    assert words.startswith("actor's training has tp4 over nodes 0, 1: ")
    assert "at 200 GB/s a GPU (8 x 400 Gbit/s a node), where a node has 450 GB/s (NVLink 4)" in words
    (words,) = said("2x2 A100-80GB", train="tp2", rollout="tp4")
    assert words.startswith("actor's rollout has tp4 over nodes 0, 1: ")
    assert "12.5 GB/s" in words


def test_a_link_as_fast_as_the_node_is_fine():
    assert said("4x1 H100", train="tp4", rollout="tp1") == []  # a node's 400 GB/s for one GPU


def test_a_pool_of_several_kinds_is_told():
    (words,) = said("1x2 H100 + 1x2 A100-80GB", train="tp2", rollout="tp2")
    assert words.startswith("pool 'all' has 2 H100 and 2 A100-80GB: ")


def test_pools_of_one_kind_each_are_fine():
    cluster = "1x2 H100 + 1x2 A100-80GB"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with hf.Session.simulated(cluster) as session:
            actor = session.actor("qwen2.5-3b", dtype="bf16", train="tp2", rollout="tp2")
            session.reference(actor)
            session.place({"actor": 2, "reference": 2})


@pytest.mark.parametrize("text", ["2x2 cpu", "1x1 cpu + 1x1 cpu"])
def test_on_processors_nothing_is_said(text):
    cluster = hf.ClusterSpec.parse(text)
    assert costly([], hf.Placement.of("colocate", ["a"], cluster.num_devices), cluster) == []
