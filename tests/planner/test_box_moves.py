"""Who sends what: every part comes from the nearest rank that holds it, and of several from the one that has sent least so far."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product

import numpy as np
import pytest

from hfsdk.core.spec import ModelSpec
from hfsdk.resharding.box_moves import Move, cheapest_moves, ends_of, moves_between
from hfsdk.resharding.boxes import Box
from hfsdk.resharding.reshard_plan import ReshardPlan

LENGTH = 12


def box(tensor, start, stop, local="w", at=0):
    return Box(tensor, (start,), (stop - start,), local, (at,))


def random_sides(rng, ranks):
    """Return who holds and who needs which parts of two tensors, cut at random; several ranks hold or need the same."""
    held, needed = [], []
    for tensor in "ab":
        cuts = [0, *sorted(rng.choice(np.arange(1, LENGTH), rng.integers(0, 3), replace=False).tolist()), LENGTH]
        for start, stop in pairwise(cuts):
            who = rng.choice(ranks, rng.integers(1, ranks + 1), replace=False)
            held.append((tuple(sorted(who.tolist())), (box(tensor, start, stop, f"{tensor}{start}", int(rng.integers(0, 5))),)))
        start, stop = sorted(rng.choice(np.arange(LENGTH + 1), 2, replace=False).tolist())
        who = rng.choice(ranks, rng.integers(1, ranks + 1), replace=False)
        needed.append((tuple(sorted(who.tolist())), (box(tensor, start, stop, f"new {tensor}", int(rng.integers(0, 5))),)))
    return tuple(held), tuple(needed)


def naive(held, needed, nodes, sent, count, once=False):
    """Return (tensor, source, target, element) of every element, one by one, and count what is sent.

    With ``once`` a part comes to a node once: its other ranks take it from the same source, which sends nothing more.
    """
    found, given = [], {}
    for ranks, boxes in needed:
        for wanted in boxes:
            parts = defaultdict(list)
            for holders, theirs in held:
                for mine in theirs:
                    low = max(mine.start[0], wanted.start[0])
                    high = min(mine.start[0] + mine.size[0], wanted.start[0] + wanted.size[0])
                    if mine.tensor == wanted.tensor and low < high:
                        parts[low, high] += holders
            for target in ranks:
                for (low, high), holders in parts.items():
                    source = target if target in holders else None
                    place = wanted.tensor, low, high, nodes[target]
                    if once and place in given:
                        source = given[place]
                    elif source is None:
                        source = min(holders, key=lambda r: (nodes[r] != nodes[target], sent[r], r))
                        sent[source] += count * (high - low)
                    given[place] = source
                    found += [(wanted.tensor, source, target, element) for element in range(low, high)]
    return sorted(found)


def test_each_part_comes_from_the_idlest_of_the_nearest_that_hold_it_over_all_sections():
    """Sections that happen more or less often share what has been sent: one layer counts once, thirty of them thirty times."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        ranks = int(rng.integers(2, 6))
        nodes = sorted(rng.integers(0, 2, ranks).tolist())
        sent, wanted_sent = [0] * ranks, [0] * ranks
        for count in rng.integers(1, 40, 4).tolist():
            held, needed = random_sides(rng, ranks)
            once = bool(seed % 2)
            moves = cheapest_moves(held, needed, nodes, sent, count=count, one_source_per_node=once)
            wanted = naive(held, needed, nodes, wanted_sent, count, once)
            starts = {(b.tensor, b.local): b.start[0] - b.local_start[0] for _, boxes in held for b in boxes}
            found = [
                (m.tensor, m.source, m.target, starts[m.tensor, m.source_local] + m.source_start[0] + i)
                for m in moves for i in range(m.numel)
            ]  # fmt: skip
            assert sorted(found) == wanted, seed
            assert sent == wanted_sent, seed


def test_what_a_repeated_section_sends_counts_as_often_as_it_happens():
    """Ranks 0 and 1 hold everything; 0 sends the 30 layers first, so that 1 sends what comes after until it has caught up."""
    sent, nodes = [0, 0, 0], [0, 0, 0]
    both = (((0, 1), (box("a", 0, 4), box("b", 0, 4), box("c", 0, 4))),)
    (first,) = cheapest_moves(both, (((2,), (box("a", 0, 4),)),), nodes, sent, count=30)
    assert (first.source, sent) == (0, [120, 0, 0])
    later = cheapest_moves(both, (((2,), (box("b", 0, 4), box("c", 0, 4))),), nodes, sent)
    assert [move.source for move in later] == [1, 1]
    assert sent == [120, 8, 0]


@pytest.mark.parametrize(("train", "rollout"), [("tp4 pp2 dp2", "tp2"), ("tp2 pp4 dp2", "tp1"), ("tp1 pp2 dp4", "tp1")])
def test_replicas_send_equally_much_of_a_whole_model(train, rollout):
    """To within one layer of the model and what is in no layer: replicas hold the same, so neither is the busier one."""
    plan = ReshardPlan.between(ModelSpec.preset("llama-7b"), train, rollout, "bf16")
    by_place, largest = defaultdict(list), 0
    for rank in range(plan.num_ranks):
        at = plan.train_at(rank)
        by_place[at.tp, at.pp].append(plan.bytes_sent(rank))
    for section in plan.sections:
        largest = max(largest, 2 * sum(move.numel for move in section.moves if move.source != move.target))
    assert max(map(sum, by_place.values())) > 0
    assert all(max(sent) - min(sent) <= largest for sent in by_place.values()), by_place


def test_two_trainers_send_a_rollout_of_its_own_equally_much():
    """To within one tensor of all layers: the embeddings of one are made up for by the layers that the other sends."""
    plan = ReshardPlan.between(ModelSpec.preset("qwen2.5-0.5b"), "tp1 dp2", "tp1", "bf16", apart=True)
    largest = max(2 * section.count * move.numel for section in plan.sections if section.layers for move in section.moves)
    assert plan.bytes_sent(0) + plan.bytes_sent(1) == plan.bytes_received(2) == plan.bytes_needed(2)
    assert abs(plan.bytes_sent(0) - plan.bytes_sent(1)) <= largest


def test_one_source_for_all_ranks_of_a_node():
    """A part crosses to a node once, whoever holds it; without that each rank takes the idlest."""
    held = [[box("a", 0, 4, "w", 3)], [box("a", 0, 4, "w", 5)]]
    needed = [[box("a", 0, 4)], [box("a", 0, 4)], [box("a", 1, 3)]]
    moves = moves_between(held, needed, (0, 0, 1, 1, 1))
    assert [(m.source, m.target, m.source_start, m.target_start, m.size) for m in moves] == [
        (0, 2, (3,), (0,), (4,)), (0, 3, (3,), (0,), (4,)), (1, 4, (6,), (0,), (2,)),
    ]  # fmt: skip
    apart = cheapest_moves((((0, 1), (box("a", 0, 4),)),), (((2, 3), (box("a", 0, 4),)),), (0, 0, 1, 1), [0] * 4)
    assert [move.source for move in apart] == [0, 1]


def test_the_same_node_comes_before_the_idlest():
    held, needed = (((0, 1), (box("a", 0, 4),)),), (((2,), (box("a", 0, 4),)),)
    (near,) = cheapest_moves(held, needed, (0, 1, 1), [0, 10**9, 0])
    assert near.source == 1
    (level,) = cheapest_moves(held, needed, (0, 0, 1), [5, 5, 0])
    assert level.source == 0, "the first of those that have sent as much"


def test_what_is_not_covered_is_refused():
    with pytest.raises(AssertionError, match="not covered"):
        cheapest_moves((((0,), (box("a", 0, 2),)),), (((1,), (box("a", 0, 4),)),), (0, 0), [0, 0])


def test_local_tensors_are_as_large_as_what_goes_in_and_out():
    moves = [
        Move("a", 0, 1, "x", (2, 0), "y", (0, 4), (3, 5)), Move("b", 0, 1, "x", (0, 1), "y", (6, 0), (1, 9)),
        Move("c", 1, 0, "x", (7, 7), "x", (1, 1), (1, 1)),
    ]  # fmt: skip
    assert ends_of(moves, 0) == {(True, "x"): (5, 10), (False, "x"): (2, 2)}
    assert ends_of(moves, 1) == {(False, "y"): (7, 9), (True, "x"): (8, 8)}


def test_a_move_of_a_later_layer_is_the_same_move():
    move = Move("model.layers.3.mlp.w", 0, 1, "decoder.layers.1.mlp.w", (2,), "model.layers.3.w", (5,), (7,))
    later = move.of_layer(4)
    assert (later.tensor, later.source_local, later.target_local) == (
        "model.layers.7.mlp.w", "decoder.layers.5.mlp.w", "model.layers.7.w",
    )  # fmt: skip
    assert (later.source, later.target, later.source_start, later.target_start, later.size) == (0, 1, (2,), (5,), (7,))
    assert move.of_layer(0) == move


def test_a_plan_covers_every_element_that_is_needed_once():
    """Over layouts: what ranks receive and keep is what their rollout shard has."""
    spec = ModelSpec(name="small", num_layers=4, hidden_size=64, mlp_hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=16,
                     vocab_size=256, max_positions=64)  # fmt: skip
    for train, rollout in product(("tp2 pp2", "tp4", "pp4", "tp1 dp4"), ("tp1", "tp2", "tp4")):
        plan = ReshardPlan.between(spec, train, rollout, "bf16")
        found = defaultdict(int)
        for section in plan.sections:
            for move in section.all_moves():
                found[move.target] += move.numel
        assert [2 * found[rank] for rank in range(4)] == [plan.bytes_needed(rank) for rank in range(4)], (train, rollout)
