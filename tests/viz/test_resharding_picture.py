"""Pictures of a weight transition: well-formed, with the plan's numbers; predicted hatched, measured solid."""

import re
from html import escape
from xml.etree import ElementTree

import pytest

import hfsdk as hf
from hfsdk.resharding import ReshardPlan, ReshardReport, TransportReport
from hfsdk.viz.frame import bytes_text
from hfsdk.viz.resharding import ParameterPicture, ReshardPicture

SPEC = hf.ModelSpec(
    name="drawn", num_layers=2, hidden_size=64, mlp_hidden_size=96, num_heads=8, num_kv_heads=4, head_dim=32, vocab_size=260,
    max_positions=128,
)  # fmt: skip
QKV = "model.layers.0.self_attn.qkv_proj.weight"


def report(plan):
    ranks = []
    for rank in range(plan.num_ranks):
        came = tuple(0 if s == rank else int(plan.matrix[s, rank]) for s in range(plan.num_ranks))
        ranks.append(TransportReport(plan.bytes_sent(rank), sum(came), plan.bytes_copied(rank), 0, came, 0.25))
    return ReshardReport(plan, tuple(ranks))


@pytest.mark.parametrize(("train", "rollout"), [("tp4", "tp2"), ("tp2 pp2", "tp2"), ("dp4", "tp4"), ("tp4 pp2 dp4", "tp4 dp8")])
def test_pictures_are_well_formed_and_carry_the_numbers(train, rollout):
    plan = ReshardPlan.between(SPEC, train, rollout)
    picture = ReshardPicture(plan.view())
    svg = picture.to_svg()
    ElementTree.fromstring(svg)
    assert "<script" not in picture.to_html()
    assert escape(picture.view["title"]) in picture.to_html(full=True)
    if plan.num_ranks <= 16:
        for rank in range(plan.num_ranks):
            assert f"rank {rank}: holds {bytes_text(plan.bytes_held(rank))}" in picture.to_text()
            sources = [s for s in range(plan.num_ranks) if s != rank and plan.matrix[s, rank]]
            words = f"{bytes_text(plan.bytes_received(rank))} from {', '.join(map(str, sources))}"
            assert (words if sources else "nothing to receive") in svg
    else:
        assert f"and {plan.num_ranks - 16} more ranks" in picture.to_text()
    ladder = [row["name"] for row in picture.view["ladder"]]
    assert ("HybridFlow" in ladder) == plan.nests
    assert all(name in svg for name in ladder)


def test_measured_is_solid_and_planned_is_hatched():
    plan = ReshardPlan.between(SPEC, "tp4", "tp2")
    planned, measured = ReshardPicture(plan.view()).to_svg(), ReshardPicture(report(plan).view()).to_svg()
    received = re.compile(r'<rect [^>]*fill="([^"]+)"[^>]*data-row="\d"[^>]*><title>rank \d: received')
    assert len(received.findall(planned)) == 4
    assert all(fill.startswith("url(#") for fill in received.findall(planned))
    assert not any(fill.startswith("url(#") for fill in received.findall(measured))
    assert "wire" in measured
    assert "wire" not in planned


def test_one_parameter_box_by_box():
    plan = ReshardPlan.between(SPEC, "tp4", "tp2")
    picture = ParameterPicture(plan.view_of(QKV))
    ElementTree.fromstring(picture.to_svg())
    text = picture.to_text().splitlines()
    assert text[1] == "rank 0: q 0:64 k 0:32 v 0:32  ->  q 0:64 q 64:128(from 2) k 0:32 k 32:64(from 2) v 0:32 v 32:64(from 2)"
    for rank in picture.view["ranks"]:
        assert sum(box["rows"] for box in rank["after"]) == 2 * sum(box["rows"] for box in rank["before"])
    with pytest.raises(hf.OptionError, match=r"no parameter 'qkv'; it has lm_head\.weight"):
        plan.view_of("qkv")
    assert hf.viz.parameter_picture(plan, QKV).to_text() == picture.to_text()


def test_reports_tell_links_apart():
    plan = ReshardPlan.between(SPEC, "tp4", "tp2", nodes=2)
    found = report(plan).bytes_by_link()
    assert all(planned == measured for planned, measured in found.values())
    assert found["network"][0] > 0 == found["same node"][0]
    assert report(plan).ratio == 1.0
    assert "ratio 1.000" in repr(report(plan))
    assert report(plan).to_pandas()["received_bytes"].tolist() == [plan.bytes_received(r) for r in range(4)]
