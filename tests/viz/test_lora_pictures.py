"""Pictures and texts say which roles train adapters, and with whom they have their base."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import pytest

import hfsdk as hf
from hfsdk.resharding.census import Census
from hfsdk.resharding.reshard_report import Resident
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.frame import Picture
from hfsdk.viz.pictures.census import CensusView
from hfsdk.viz.pictures.memory import MemoryView
from hfsdk.viz.pictures.placement import PlacementView
from tests.viz.test_frame import check


@pytest.fixture(scope="module")
def session() -> Iterator[hf.Session]:
    with hf.Session.simulated("1x2 A100-80GB") as session:
        actor = session.actor("llama-7b", train="tp2", rollout="tp2", lora=hf.LoRA(rank=16))
        session.critic("llama-7b", train="tp2", lora=hf.LoRA(rank=8, targets=("q_proj", "v_proj")))
        session.reference(actor)
        session.reward("llama-7b", layout="tp2")
        session.place("colocate")
        yield session


def words(picture: Picture) -> str:
    return " ".join(text.strip() for text in ET.fromstring(picture.to_svg()).itertext())


def test_a_placement_says_who_trains_adapters_and_with_whom_a_base_is_shared(session: hf.Session) -> None:
    picture = picture_of(session.placement)
    check(picture.view, PlacementView)
    roles = {role["name"]: role for role in picture.view["roles"]}
    assert [roles[name]["lora"] for name in roles] == ["LoRA rank 16", "LoRA rank 8 of q_proj, v_proj", "", ""]
    assert [roles[name]["base"] for name in ("actor", "critic", "reference")] == [
        "base shared with critic, reference", "base shared with actor", "base shared with actor",
    ]  # fmt: skip
    assert roles["reward"]["base"] == "", "only numbers in simulation: a model that somebody else trained"
    for text in (picture.to_text(), repr(session.placement)):
        assert "LoRA rank 16" in text
        assert text.count("base shared with actor") == 2
    drawn = words(picture)
    assert "LoRA 16" in drawn
    assert drawn.count("base: actor") == 4, "on the cards of critic and reference, on two devices"


def test_what_is_planned_has_the_base_once(session: hf.Session) -> None:
    table = session.placement.to_pandas().groupby("role")["planned_bytes"].max()
    assert table["reference"] == 0
    assert table["critic"] < 0.05 * table["reward"]
    memory = picture_of(session.memory)
    check(memory.view, MemoryView)
    assert [device["bases"] for device in memory.view["devices"]] == [["actor, critic, reference"]] * 2
    for text in (memory.to_text(), repr(session.memory)):
        assert text.count("one base for actor, critic, reference") == 2
    assert "weights: one frozen base for actor, critic, reference" in words(memory)


def test_a_handle_and_the_sessions_card_say_lora(session: hf.Session) -> None:
    assert "llama-7b" in repr(session.models.actor)
    assert "LoRA rank 16" in repr(session.models.actor)
    assert "llama-7b, LoRA rank 8 of q_proj, v_proj" in session._repr_html_()
    assert repr(session.models.actor.reshard_plan).startswith("ReshardPlan LoRA rank 16 of llama-7b: 'tp2 pp1 dp1'")


def counted(base_of: tuple[str, ...] = ("actor", "critic", "reference")) -> Census:
    held = [Resident("both", 10, 700, 0, 0, 600, base=600 + rank, base_of=base_of) for rank in range(2)]
    return Census("actor", tuple(held), (1310, 1311))


def test_a_census_counts_the_base_apart_from_the_adapters() -> None:
    picture = picture_of(counted())
    check(picture.view, CensusView)
    view: Any = picture.view
    assert [rank["base_bytes"] for rank in view["ranks"]] == [600, 601]
    assert [rank["total_bytes"] for rank in view["ranks"]] == [1310, 1311]
    assert "base shared with critic, reference" in view["summary"]
    assert "base 600 B" in picture.to_text()
    assert "in the trainer: the frozen base, shared with critic, reference" in words(picture)
    assert "base shared with critic, reference" in repr(counted())
    assert "shared with" not in repr(counted(("actor",)))
