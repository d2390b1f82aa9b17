"""The pictures of a calibration, of a census and of a reward's probe say what their nouns say."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

import hfsdk as hf
from hfsdk.planner.perf.calibration import Calibration, Constant, Observation
from hfsdk.resharding.census import Census
from hfsdk.resharding.reshard_report import Resident
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.frame import Picture
from hfsdk.viz.pictures.calibration import CalibrationView
from hfsdk.viz.pictures.census import MOST_RANKS, CensusView
from hfsdk.viz.pictures.probe import MOST_SAMPLES
from tests.viz import demo
from tests.viz.test_frame import check

CALLS = {"actor.generate": (2.0, 3.0, 2.1), "actor.update": (1.0, 0.5, 1.0), "critic.update": (0.5, 0.5, 0.6)}


def calibration() -> Calibration[hf.PerfModel]:
    seen = [
        Observation(call=call, phase=phase, measured_s=m / 2, before_s=b / 2, after_s=a / 2)
        for call, (m, b, a) in CALLS.items() for phase in ("forward", "rest")
    ]  # fmt: skip
    constants = [
        Constant(name="mfu", before=0.4, after=0.3, determined=True),
        Constant(name="link", before=1.0, after=1.0, determined=False),
    ]  # fmt: skip
    bands = {"": (0.9, 1.2), "update.forward": (0.8, 1.1)}
    return Calibration(perf=hf.PerfModel(), constants=tuple(constants), observations=tuple(seen), bands=bands)


def census(ranks: int = 4) -> Census:
    held = [Resident("generating", 10, 600 + rank, 30, 50, 5 * rank) for rank in range(ranks)]
    return Census("actor", tuple(held), tuple(700 + rank for rank in range(ranks)))


def rows(picture: Picture) -> list[ET.Element]:
    """The marks that link to a row of ``to_pandas``."""
    return [e for e in ET.fromstring(picture.to_svg()).iter() if e.get("data-row") is not None]


def test_a_calibration_shows_every_call_as_measured_and_as_predicted_before_and_after() -> None:
    found = calibration()
    picture = picture_of(found)
    view = picture.view
    check(view, CalibrationView)
    for shown in view["calls"]:
        assert [shown["measured_s"], shown["before_s"], shown["after_s"]] == pytest.approx(CALLS[shown["call"]])
    assert view["calls"][0]["error_before"] == pytest.approx(0.5)
    assert f"{100 * found.error_before:.0f} % before, {100 * found.error_after:.0f} % after" in view["title"]
    assert [b["kind"] for b in view["bands"]] == ["all kinds", "update.forward"]
    marks = rows(picture)
    assert [m.get("data-row") for m in marks] == ["0", "1", "2"]
    words = "".join(ET.fromstring(picture.to_svg()).itertext())
    for said in ("+50 % → +5 %", "−50 % → +0 %", "mfu", "The run says too little of link", "× 0.90"):
        assert said in words
    assert "actor.generate" in picture.to_text()
    assert "link: 1 (the run says too little of it)" in picture.to_text()


def test_a_census_draws_what_is_on_each_rank_beside_the_plan() -> None:
    counted = census()
    picture = picture_of(counted)
    check(picture.view, CensusView)
    table = counted.to_pandas()
    assert table["total_bytes"].tolist() == [r["total_bytes"] for r in picture.view["ranks"]] == [690, 691, 692, 693]
    assert (counted.total_bytes, counted.planned_bytes, counted.redundant_bytes) == (2766, 2806, 30)
    assert counted.moment == "generating"
    widths = []
    for mark in rows(picture):
        parts = {e.get("fill"): float(e.get("width", 0)) for e in mark.iter() if e.tag.endswith("rect") and e.get("fill")}
        widths.append(parts["#4f9d55"] / parts["#3b76c4"])
    assert widths == pytest.approx([600 / 10, 601 / 10, 602 / 10, 603 / 10], rel=0.05), "as wide as the bytes"
    words = "".join(ET.fromstring(picture.to_svg()).itertext())
    assert "15 B twice" in words
    assert "30 B are there twice" in words
    assert "rank 3: 693 B, 703 B planned" in picture.to_text()
    assert "30 B of them twice" in picture.view["summary"]


def test_a_census_of_many_ranks_says_how_many_it_leaves_out() -> None:
    picture = picture_of(census(MOST_RANKS + 8))
    assert len(rows(picture)) == MOST_RANKS
    assert "and 8 more ranks" in "".join(ET.fromstring(picture.to_svg()).itertext())


def test_a_probe_draws_each_sample_in_each_panel() -> None:
    probe = demo.reward_probe()
    picture = picture_of(probe)
    view: Any = picture.view
    assert [p["key"] for p in view["panels"]] == [
        "tokens", "place", "place_in_group", "repetition", "group", "other_score", "seconds",
    ]  # fmt: skip
    kinds = [row["kind"] for row in view["rows"]]
    assert [i for i, kind in enumerate(kinds) if kind == "failed"] == list(probe.failed)
    assert [i for i, kind in enumerate(kinds) if kind == "unscored"] == probe.not_scored
    assert [i for i, kind in enumerate(kinds) if kind == "flat"] == [24, 25, 26, 27]
    assert {p["key"] for p in view["panels"] if p["strong"]} == {one.name for one in probe.follows if one.strong}
    svg = picture.to_svg()
    assert svg.count("<circle") == 5 * 30 + 28 + 3  # without two scores there is no mark over the other's; the legend has three
    assert svg.count("<path") == 5 * 2 + 1
    for finding in probe.findings:
        assert finding in picture.to_text()


def test_a_probe_of_many_samples_draws_those_that_strike() -> None:
    probe = demo.reward_probe(5000)
    view: Any = picture_of(probe).view
    drawn = {row["row"] for row in view["rows"]}
    assert {*probe.failed, *probe.not_scored, *probe.slowest(20)} <= drawn
    assert 500 <= len(drawn) <= MOST_SAMPLES
    assert view["left_out"] == 5000 - len(drawn)
