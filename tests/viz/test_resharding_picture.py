"""Pictures of a weight transition: well-formed, with the plan's numbers; predicted hatched, measured solid."""

import dataclasses
import json
from collections import Counter
from dataclasses import replace
from html import escape
from xml.etree import ElementTree

import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.resharding.boxes import vllm_boxes
from hfsdk.resharding.proof import Proof, Witness, WrongBox
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.resharding.reshard_report import ReshardReport, TransportReport
from hfsdk.viz.frame import bytes_text
from hfsdk.viz.pictures.resharding import (
    BOX_RANKS,
    COPIED,
    IN_PLACE,
    MOST_RANKS,
    NETWORK,
    SAME_NODE,
    ParameterPicture,
    ReshardView,
    reshard_view,
)
from tests.viz.test_frame import check

SVG = "{http://www.w3.org/2000/svg}"
SPEC = hf.ModelSpec(
    name="drawn", num_layers=2, hidden_size=64, mlp_hidden_size=96, num_heads=8, num_kv_heads=4, head_dim=32, vocab_size=260,
    max_positions=128,
)  # fmt: skip
QKV = "model.layers.0.self_attn.qkv_proj.weight"


def report(plan, wrong=()):
    """What a transition reports of which all boxes are proven, but for some moves that are wrong."""
    ranks = []
    for rank in range(plan.num_ranks):
        came = tuple(0 if s == rank else int(plan.matrix[s, rank]) for s in range(plan.num_ranks))
        mine = [move for move in plan.moves if move.target == rank]
        harmed = [WrongBox(m.tensor, start_of(plan, m), m.size, m.source, rank, 1, 2) for m in mine if m in wrong]
        proven = Counter(move.source for move in mine if move not in wrong)
        proof = Proof(tuple(proven[source] for source in range(plan.num_ranks)), 0, tuple(harmed))
        ranks.append(TransportReport(plan.bytes_sent(rank), sum(came), plan.bytes_copied(rank), 0, came, 0.25, proof))
    return ReshardReport(plan, tuple(ranks))


def start_of(plan, move):
    at = plan.rollout_at(move.target)
    return Witness([], move.target, (), vllm_boxes(plan.spec, plan.rollout.tp, at.tp)).start_of(move)


@pytest.mark.parametrize(("train", "rollout"), [("tp4", "tp2"), ("tp2 pp2", "tp2"), ("dp4", "tp4"), ("tp4 pp2 dp4", "tp4 dp8")])
def test_pictures_are_well_formed_and_carry_the_numbers(train, rollout):
    plan = ReshardPlan.between(SPEC, train, rollout)
    picture = hf.viz.reshard_picture(plan)
    svg = picture.to_svg()
    ElementTree.fromstring(svg)
    check(picture.view, ReshardView)
    assert json.loads(json.dumps(picture.view, allow_nan=False)) == picture.view
    assert len(picture.to_html()) < 200_000
    assert escape(picture.view["title"]) in picture.to_html(full=True)
    if plan.num_ranks <= 16:
        for rank in range(plan.num_ranks):
            assert f"rank {rank}: holds {bytes_text(plan.bytes_held(rank))}" in picture.to_text()
            sources = [s for s in range(plan.num_ranks) if s != rank and plan.matrix[s, rank]]
            words = f"{bytes_text(plan.bytes_received(rank))} received from {', '.join(map(str, sources))}"
            kept = f"{bytes_text(plan.bytes_redundant(rank))} redundant" if plan.bytes_redundant(rank) else "nothing to receive"
            assert (words if sources else kept) in svg
    else:
        assert f"and {plan.num_ranks - 16} more ranks" in picture.to_text()
    ladder = [row["name"] for row in picture.view["variants"][0]["ladder"]]
    assert ("HybridFlow" in ladder) == plan.nests
    assert all(name in svg for name in ladder)


def test_measured_is_solid_and_planned_is_hatched():
    plan = ReshardPlan.between(SPEC, "tp4", "tp2")
    planned, measured = hf.viz.reshard_picture(plan).to_svg(), hf.viz.reshard_picture(report(plan)).to_svg()
    assert [fills.count(True) for fills in hatched(planned)] == [2] * 4, "a rank's own, and what it received"
    assert [fills.count(True) for fills in hatched(measured)] == [0] * 4
    assert [len(fills) for fills in hatched(measured)] == [2] * 4
    assert "wire" in measured
    assert "wire" not in planned


def hatched(svg):
    """Say of each bar of each rank whether it is hatched."""
    ranks = [g for g in ElementTree.fromstring(svg).iter(f"{SVG}g") if g.get("data-row")]
    return [[e.get("fill").startswith("url(#") for e in g.iter(f"{SVG}rect") if e.get("fill")] for g in ranks]


def test_one_parameter_box_by_box():
    plan = ReshardPlan.between(SPEC, "tp4", "tp2")
    picture = ParameterPicture(plan.view_of(QKV))
    ElementTree.fromstring(picture.to_svg())
    text = picture.to_text().splitlines()
    assert text[1] == "rank 0: q 0:64 k 0:32 v 0:32  ->  q 0:64 q 64:128(from 2) k 0:32 k 32:64(from 2) v 0:32 v 32:64(from 2)"
    for rank in picture.view["ranks"]:
        assert sum(box["rows"] for box in rank["after"]) == 2 * sum(box["rows"] for box in rank["before"])
    with refuses(hf.OptionError, "'qkv'", "lm_head.weight"):
        plan.view_of("qkv")
    assert hf.viz.parameter_picture(plan, QKV).to_text() == picture.to_text()


@pytest.mark.parametrize(("train", "rollout"), [("tp2", "tp4"), ("tp4", "tp2"), ("tp2 pp2", "tp2"), ("tp1", "tp4")])
def test_a_rank_draws_its_share_of_a_parameter(train, rollout):
    """Of rows or of columns, whichever it is cut by: the shares of a replica's ranks are the whole, each as large as the others."""
    plan = ReshardPlan.between(SPEC, train, rollout)
    by_columns = [f"model.layers.0.{name}.weight" for name in ("mlp.down_proj", "self_attn.o_proj")]
    for name in (QKV, "model.layers.0.mlp.gate_up_proj.weight", *by_columns):
        ranks = plan.view_of(name)["ranks"]
        held = [sum(box["rows"] for box in rank["before"]) for rank in ranks]
        wanted = [sum(box["rows"] for box in rank["after"]) for rank in ranks]
        boxes = {(box["tensor"], box["first"], box["rows"]) for rank in ranks for box in rank["after"]}
        whole = sum(rows for _, _, rows in boxes)
        assert wanted == [whole / plan.rollout.tp] * len(ranks), name
        assert set(held) - {0} == {whole / plan.train.tp}, name
        assert all((", " in box["label"]) == (name in by_columns) for rank in ranks for box in rank["after"]), name


def test_reports_tell_links_apart():
    plan = ReshardPlan.between(SPEC, "tp4", "tp2", nodes=2)
    found = report(plan).bytes_by_link()
    assert all(planned == measured for planned, measured in found.values())
    assert found["network"][0] > 0 == found["same node"][0]
    assert report(plan).ratio == 1.0
    assert "ratio 1.000" in repr(report(plan))
    assert report(plan).to_pandas()["received_bytes"].tolist() == [plan.bytes_received(r) for r in range(4)]


def parameter(view, short, variant=0):
    return next(p for p in view["variants"][variant]["parameters"] if short in p["name"])


def piece_bytes(view, piece):
    return piece[3] * piece[4] * view["dtype_bytes"]


def test_the_paper_s_eight_ranks_grouped_both_ways():
    """HybridFlow (arXiv 2409.19256, figure 8): tp4 dp2 trains, tp2 dp4 generates."""
    picture = hf.viz.grouping_picture(SPEC, "tp4 dp2", "tp2 dp4", "bf16")
    strided, vanilla = picture.view["variants"]
    for variant in (strided, vanilla):
        plan = ReshardPlan.between(SPEC, "tp4 dp2", "tp2 dp4", "bf16", grouping=variant["grouping"])
        assert variant["matrix"] == plan.bytes_matrix()
        crossing = sum(n for s, row in enumerate(variant["matrix"]) for t, n in enumerate(row) if s != t)
        assert variant["moved"] == plan.bytes_moved == crossing
        assert variant["redundant"] == sum(plan.bytes_redundant(rank) for rank in range(8))
    assert strided["redundant"] == 0 < vanilla["redundant"]
    assert strided["moved"] < vanilla["moved"]
    assert [r["rank"] for r in vanilla["ranks"] if r["aside"]] == [1, 2, 5, 6], "they hold nothing, or little, of what they need"
    assert "grouped vanilla" in picture.to_svg()
    assert picture.to_text().count("rank 7: holds") == 2


def test_the_pieces_of_a_parameter_add_up_to_its_matrix_and_fill_the_shard():
    for plan in (ReshardPlan.between(SPEC, "tp4", "tp2", nodes=2), ReshardPlan.between(SPEC, "tp2", "tp4", apart=True)):
        view = reshard_view(plan)
        variant = view["variants"][0]
        for p in variant["parameters"]:
            counted = [[0] * plan.num_ranks for _ in range(plan.num_ranks)]
            for rank, pieces in zip(p["ranks"], p["after"], strict=True):
                places = set()
                for piece in pieces:
                    counted[piece[7]][rank] += piece_bytes(view, piece)
                    assert (piece[8] in (IN_PLACE, COPIED)) == (piece[7] == rank)
                    assert piece[8] != SAME_NODE or plan.nodes[piece[7]] == plan.nodes[rank]
                    assert piece[8] != NETWORK or plan.nodes[piece[7]] != plan.nodes[rank]
                    places.add((piece[5], piece[6]))
                assert len(places) == len(pieces), "no two pieces at one place"
            assert counted == p["matrix"], p["name"]
        whole = [p["count"] * n for p in variant["parameters"] for row in p["matrix"] for n in row]
        assert 0 <= sum(map(sum, variant["matrix"])) - sum(whole) < 0.02 * sum(whole), "the rest is norms"


def test_fused_rows_come_in_the_order_of_either_engine():
    qkv = parameter(reshard_view(ReshardPlan.between(SPEC, "dp2", "tp2")), "qkv_proj")
    names = [qkv["tensors"][box[0]] for box in sorted(qkv["before"][0], key=lambda box: box[5])]
    assert names == ["q", "k", "v"] * 4, "Megatron: kv group by kv group"
    after = [qkv["tensors"][piece[0]] for piece in qkv["after"][0]]
    assert after == ["q", "q", "k", "k", "v", "v"], "vLLM: all queries, all keys, all values"
    assert all(piece[8] == COPIED for piece in qkv["after"][0])
    same = reshard_view(ReshardPlan.between(SPEC, "tp2", "tp2"))
    assert {piece[8] for piece in parameter(same, "down_proj")["after"][0]} == {IN_PLACE}
    o = parameter(reshard_view(ReshardPlan.between(SPEC, "tp4", "tp2")), "o_proj")
    assert [(piece[2], piece[4]) for piece in o["after"][0]] == [(0, 64), (64, 64)], "cut by columns"


def test_the_way_back_has_a_picture_too():
    view = reshard_view(ReshardPlan.between(SPEC, "tp4", "tp2").inverse())
    qkv = parameter(view, "qkv_proj")
    assert [qkv["tensors"][box[0]] for box in qkv["before"][0]] == ["q", "k", "v"]
    assert all(piece[7] == rank for rank, pieces in zip(qkv["ranks"], qkv["after"], strict=True) for piece in pieces)


def test_large_plans_stay_light():
    spec = hf.ModelSpec.preset("llama-70b")
    for ranks, layouts, by in ((128, ("tp8 pp8 dp2", "tp8 dp16"), "node"), (1024, ("tp8 pp8 dp16", "tp8 dp128"), "run of ranks")):
        plan = ReshardPlan.between(spec, *layouts, "bf16", nodes=8)
        picture = hf.viz.reshard_picture(plan)
        variant = picture.view["variants"][0]
        assert picture.view["by"] == by
        assert len(variant["matrix"]) <= MOST_RANKS
        assert sum(map(sum, variant["matrix"])) == plan.matrix.sum(), "nothing is left out of the sum"
        assert all(len(p["ranks"]) == BOX_RANKS for p in variant["parameters"])
        assert variant["num_ranks"] == ranks
        assert len(picture.to_html()) < 400_000
        qkv = parameter(picture.view, "qkv_proj")
        assert {bool(boxes) for boxes in qkv["before"]} == {True, False}, "holders and others are shown"


def test_what_was_measured_stands_beside_the_plan():
    plan = ReshardPlan.between(SPEC, "tp4", "tp2")
    variant = reshard_view(report(plan))["variants"][0]
    assert variant["measured"] == variant["matrix"]
    assert [r["measured"] for r in variant["ranks"]] == [plan.bytes_received(rank) for rank in range(4)]
    assert variant["links"] == [[way, count, count] for way, count in plan.bytes_by_link().items()]
    assert variant["ladder"][-1]["name"] == "wire"
    assert reshard_view(plan)["variants"][0]["measured"] is None


def test_one_rank_has_a_picture_and_other_things_have_none():
    ElementTree.fromstring(hf.viz.reshard_picture(ReshardPlan.between(SPEC, "tp1", "tp1")).to_svg())
    with refuses(hf.OptionError, "plans or reports"):
        hf.viz.reshard_picture()
    with refuses(hf.OptionError, "hf.ReshardPlan", "'tp2'"):
        hf.viz.reshard_picture("tp2")
    with refuses(hf.OptionError, "[2, 4]"):
        hf.viz.reshard_picture(ReshardPlan.between(SPEC, "tp4", "tp2"), ReshardPlan.between(SPEC, "tp2", "tp2"))
    nasty = dataclasses.replace(SPEC, name="\ud800</script> \x00")
    picture = hf.viz.reshard_picture(ReshardPlan.between(nasty, "tp2", "dp2"))
    ElementTree.fromstring(picture.to_svg())
    assert picture.to_html().count("</script") == 1


def test_boxes_are_proven_unproven_or_wrong():
    plan = ReshardPlan.between(SPEC, "tp4", "tp2")
    harmed = next(move for move in plan.moves if "layers.1.mlp.down_proj" in move.tensor and move.source != move.target)
    found = report(plan, wrong=[harmed])
    variant = reshard_view(found)["variants"][0]
    assert variant["boxes"] == [len(plan.moves) - 1, 0, 1] == list(found.boxes().values())
    assert not found.verified
    assert [sum(column) for column in zip(*(rank["boxes"] for rank in variant["ranks"]), strict=True)] == variant["boxes"]
    assert variant["wrong"] == [str(found.wrong[0])]
    (down,) = (p for p in variant["parameters"] if p["name"].endswith("0.mlp.down_proj.weight"))
    wrong = [
        (rank, piece[7]) for rank, pieces in zip(down["ranks"], down["after"], strict=True) for piece in pieces if piece[11] == 2
    ]
    assert wrong == [(harmed.target, harmed.source)], "of layers that move alike the worst is drawn"
    assert "boxes: " in hf.viz.reshard_picture(found).to_text()
    assert str(found.wrong[0]) in hf.viz.reshard_picture(found).to_html()
    whole = report(plan)
    assert whole.verified
    assert reshard_view(plan)["variants"][0]["boxes"] is None
    silent = ReshardReport(plan, tuple(replace(rank, proof=None) for rank in whole.ranks))
    assert (silent.verified, silent.boxes()["unproven"]) == (False, len(plan.moves))
