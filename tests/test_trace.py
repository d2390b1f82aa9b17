"""Traces: what decided the time, comparisons and guesses, how generations run dry."""

from __future__ import annotations

import json

import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core.trace import Span, Trace
from hfsdk.viz.pictures.timeline import timelines_view

S = 10**9


def call(call_id, role, method, start_s, seconds, after="", devices=(0,), predicted=False, **attrs):
    shared = {"role": role, "method": method, "call_id": call_id, "predicted": predicted}
    shared |= {"start_ns": int(start_s * S), "duration_s": seconds}
    spans = [Span(name=method, attrs={"after": after} if after else {}, **shared)]
    return spans + [Span(name=method, device=d, rank=d, attrs=attrs, **shared) for d in devices]


def step(update_s=2.0, title="step 0", predicted=False):
    return Trace.of(
        call(0, "actor", "generate", 0, 1.0, predicted=predicted)
        + call(1, "reward", "compute_scores", 1.0, 0.1, after="0", devices=(), predicted=predicted)
        + call(2, "critic", "compute_values", 1.0, 0.5, after="0", devices=(1,), predicted=predicted)
        + call(3, "actor", "update", 1.5, update_s, after="1 2", predicted=predicted),
        title,
    )


def test_the_critical_path_goes_back_through_what_each_call_waited_for():
    path = step().critical_path()
    assert [f"{s.role}.{s.method}" for s in path] == ["actor.generate", "critic.compute_values", "actor.update"]


def test_the_program_waits_where_no_input_and_no_device_did():
    trace = Trace.of(call(0, "a", "x", 0, 1.0) + call(1, "b", "y", 1.2, 1.0, devices=(1,)) + call(2, "a", "z", 2.3, 1.0, after="0"))
    assert [s.method for s in trace.critical_path()] == ["x", "y", "z"]
    assert len(Trace(()).critical_path()) == 0


def test_a_comparison_gives_signed_errors_and_names_what_only_one_has():
    other = Trace.of([s for s in step(update_s=3.0, title="plan", predicted=True) if s.method != "compute_scores"], "plan")
    found = step().compare(other)
    assert (found.this_source, found.other_source) == ("measured", "predicted")
    by_call = {r.call: r for r in found}
    assert by_call["actor.update"].error_s == pytest.approx(1.0)
    assert by_call["actor.update"].error == pytest.approx(0.5)
    assert by_call["reward.compute_scores"].other_s is None
    assert by_call["reward.compute_scores"].error is None
    assert found.total.error_s == pytest.approx(1.0)
    assert found.to_pandas()["call"].tolist() == [*by_call, "the whole"]
    assert "+50 %" in repr(found)


def test_a_guess_is_scored_by_call_or_method():
    found = step().compare({"generate": 2.0, "actor.update": 2.0})
    assert found.points == pytest.approx((50 + 100) / 2)
    assert found.total.this_s == pytest.approx(3.0)
    assert found.other_source == "guess"


@each("guess", [{}, {"genrate": 1.0}, {"generate": -1.0}, {"generate": float("nan")}, {"generate": "1"}, 3.0, None])
def test_bad_guesses_say_what_ran(guess):
    with refuses(hf.HfsdkError, *(["genrate", "actor.generate"] if guess == {"genrate": 1.0} else [])):
        step().compare(guess)


def test_a_drain_is_laid_at_its_spans_end():
    points = [[0.0, 4, 2, 0.0], [0.5, 6, 0, 0.2], [1.0, 1, 0, 0.1]]
    attrs = {"drain": json.dumps(points)}
    span = Span(name="decode", role="actor", call_id=7, device=3, start_ns=5 * S, duration_s=0.8, attrs=attrs)
    first = Span(name="x", role="a", call_id=1, start_ns=3 * S, duration_s=0.1)
    frame = Trace.of([first, span]).drain()
    assert frame["seconds"].tolist() == pytest.approx([1.8, 2.3, 2.8])
    assert frame["running"].tolist() == [4, 6, 1]
    assert set(frame["device"]) == {3}
    assert Trace(()).drain().empty


def test_idle_device_seconds():
    trace = Trace.of(call(0, "a", "x", 0, 1.0, devices=(0, 1)) + call(1, "a", "y", 1.0, 1.0, devices=(1,)))
    assert trace.device_seconds() == pytest.approx((4.0, 1.0))


def test_something_else_is_refused_whatever_it_raises_when_it_is_asked():
    class RaisesAtEveryQuestion:
        def __getattr__(self, name):
            raise RuntimeError(name)

    for nothing in (RaisesAtEveryQuestion(), Trace, 3):
        with refuses(hf.OptionError, "compare", "a trace or a guess"):
            step().compare(nothing)
        with refuses(hf.OptionError, "a trace"):
            timelines_view({"a": nothing})
