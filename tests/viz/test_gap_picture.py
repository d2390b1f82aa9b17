"""The picture of a gap says what its noun says, and its tables agree with it."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.gap import CAUSES, Gap, GapCause, HiddenStates, LayerGap, is_rounding, layer_gaps, size
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.pictures.gap import MOST_LAYERS, GapView
from tests.viz.test_frame import check

NAN = float("nan")
NAMED, ROLLOUT = "#b3403a", "#b06a00"
"""Colours of a cause's bar and of the generating engine."""


def made(num_layers: int = 4) -> Gap:
    recorded = np.array([-1.0, -2.0, -3.0, -1.0, -2.0])
    parts = {"temperature": np.array([0.1, 0.2, 0.3, 0.0, 0.1]), "layer": np.full(5, 0.02), "rest": np.zeros(5)}
    told = {
        "temperature": GapCause("temperature", "a pass at 0.7", 0.14, 0.9, True, "generated at 0.7"),
        "layer": GapCause("layer", "transformers beside both", 0.02, 0.1, True, "layer 2 of the rollout"),
        "top_k": GapCause("top_k", "a pass over 5 tokens"),
    }
    layers = tuple(LayerGap(f"layer {i}", 1e-7, NAN if i == 0 else 1e-2, 1e-3) for i in range(num_layers))
    causes = tuple(told.get(cause, GapCause(cause, "")) for cause in CAUSES)
    trainer = recorded + sum(parts.values())
    return Gap("actor", "fp32", "temperature: generated at 0.7", causes, layers, np.array([3, 2]), trainer, recorded, parts, (0, 2))


def test_a_gap_draws_its_causes_and_its_layers() -> None:
    gap = made()
    picture = picture_of(gap)
    check(picture.view, GapView)
    assert gap.causes == ("temperature", "layer")
    assert (gap.mean, gap.max) == pytest.approx((0.16, 0.32))
    root = ET.fromstring(picture.to_svg())
    marks = [e for e in root.iter() if e.get("data-row") is not None]
    assert [e.get("data-row") for e in marks][:2] == ["temperature", "layer"], "the largest first"
    assert {e.get("data-row") for e in marks} == set(gap.to_pandas().index)
    bars = {e.get("data-row"): [float(b.get("width")) for b in e.iter() if b.get("fill") == NAMED] for e in marks}
    assert bars["temperature"][0] == pytest.approx(7 * bars["layer"][0], rel=0.01)
    drawn = [e for e in root.iter() if e.get("fill") == ROLLOUT]
    assert len(drawn) == 1 + 3, "one in the legend; what was not seen is not drawn"
    text = picture.to_text()
    assert "0.14 nats a token, 90 %: generated at 0.7" in text
    assert "explains nothing" in text
    assert "layer 0: trainer 1.0e-07, generating engine not seen" in text


def test_many_layers_are_left_out_in_the_middle() -> None:
    view = picture_of(made(MOST_LAYERS + 20)).view
    assert view["left_out"] == 20
    assert view["layers"][-1]["place"] == f"layer {MOST_LAYERS + 19}"


def test_its_tables_have_a_row_for_each_cause_token_and_layer() -> None:
    gap = made()
    tokens = gap.to_pandas("tokens")
    assert tokens["sample"].tolist() == [0, 0, 0, 1, 1]
    assert tokens["position"].tolist() == [0, 1, 2, 0, 1]
    assert np.allclose(tokens[list(gap.parts)].sum(axis=1), tokens["gap"])
    assert gap.to_pandas().loc["temperature", "nats"] == 0.14
    assert len(gap.to_pandas("layers")) == 4
    with refuses(hf.OptionError, "'columns'", "'causes'", "'tokens'", "'layers'"):
        gap.to_pandas("columns")


def test_what_is_rounding_depends_on_the_dtype_and_impossible_tokens_are_not() -> None:
    gap = np.array([0.01, -0.02, np.nan])
    assert size(gap) == pytest.approx((0.015, 0.02))
    assert is_rounding(gap, "bf16")
    assert not is_rounding(gap, "fp32")
    assert size(np.array([-np.inf, 0.0])) == (10.0, 20.0)


def test_layers_are_measured_from_transformers_whoever_saw_them() -> None:
    first, second = np.array([3.0, 4.0]), np.array([1.0, 0.0])
    seen = [
        HiddenStates("trainer", {"layer 0": first}), HiddenStates("trainer", {"layer 1": second}),
        HiddenStates("rollout", {"layer 0": first * 1.1}),
        HiddenStates("fp32", {"layer 0": first, "layer 1": second}),
    ]  # fmt: skip
    near, far = layer_gaps(seen, ["layer 0", "layer 1"])
    assert (near.trainer, near.rollout) == pytest.approx((0.0, 0.1))
    assert far.trainer == 0.0
    assert np.isnan([far.rollout, near.bf16]).all()
