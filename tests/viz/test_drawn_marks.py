"""What the pictures' own scripts draw into a file: marks where their numbers are, sums that are the view's, predicted hatched."""

import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("quickjs")

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.core.batch import Batch
from hfsdk.core.table import Table
from hfsdk.core.trace import Span, Trace
from hfsdk.viz.pictures.clip import ClipPicture, view_of
from hfsdk.viz.pictures.memory import MemoryPicture, memory_view
from hfsdk.viz.pictures.timeline import TimelinePicture, timeline_view
from tests.viz import token_batches as made


def drawn(picture):
    """The elements of a picture's file: (name without namespace, attributes, text)."""
    tree = ElementTree.fromstring(picture.to_svg())
    return [(one.tag.rpartition("}")[2], one.attrib, "".join(one.itertext())) for one in tree.iter()]


def span(name, start_s, seconds):
    start_ns = round(start_s * 1e9)
    return Span(name=name, role="actor", call_id=1, method="update", device=0, rank=0, start_ns=start_ns, duration_s=seconds)


def test_a_span_is_drawn_from_its_start_to_its_end():
    elements = drawn(TimelinePicture(timeline_view(Trace.of([span("forward", 0, 1), span("backward", 3, 1)]))))
    marks = [(float(a["x"]), float(a["width"])) for name, a, _ in elements if name == "rect" and "data-row" in a]
    (first, width), (second, other) = sorted(marks)
    assert width == pytest.approx(other)
    assert second - first == pytest.approx(3 * width)


def test_clipped_tokens_are_counted_as_the_view_counts_them():
    new = np.array([0.5, -0.5, 0.0, -0.6, 0.7], np.float32)
    view = view_of(new, np.zeros(5, np.float32), np.array([1, -1, 1, -1, -1], np.float32), low=0.2, high=0.2)
    said = [text for name, _, text in drawn(ClipPicture(view)) if name == "text" and "zero gradient:" in text]
    assert said == [view["summary"]]
    assert said[0].startswith("3 of 5 tokens")


def test_advantages_are_computed_with_the_gamma_and_lambda_asked_for():
    columns, fn = made.columns(), ppo.Advantages(gamma=0.9, lam=0.5, whiten=False)
    columns |= fn(Table({name: columns[name] for name in fn.reads}))
    batch = Batch.from_columns(made.LocalClient(), columns)
    (said,) = [t for n, _, t in drawn(hf.viz.credit_picture(batch, 0, 0.9, 0.5)) if n == "text" and t.startswith("A[0]")]
    assert float(re.search(r"= (\S+);", said)[1].replace("−", "-")) == pytest.approx(float(batch["advantages"][0][0]), rel=1e-3)


def test_what_a_device_is_predicted_to_hold_is_stacked_and_hatched():
    with hf.Session.simulated("1x1 A100-80GB") as session:
        session.actor("tiny").generate(["a"], max_new_tokens=4).wait()
        picture = MemoryPicture(memory_view(session.memory.view()))
    elements, boxes, colors = drawn(picture), {}, {part["color"] for part in picture.view["parts"]}
    assert [a for name, a, _ in elements if name == "rect" and a.get("fill") in colors and float(a["width"]) > 14] == []
    for name, a, _ in elements:
        if name == "rect" and a.get("fill", "").startswith("url(") and float(a.get("width", 0)) > 14:
            boxes.setdefault(a["x"], []).append((float(a["y"]), float(a["height"])))
    stacks = [sorted(stack, reverse=True) for stack in boxes.values() if len(stack) > 2]
    assert stacks
    for stack in stacks:
        for (below, _), (y, height) in itertools.pairwise(stack):
            assert y + height == pytest.approx(below, abs=0.05)
