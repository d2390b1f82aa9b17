"""Who reads what from whom, counted from a call's orders."""

import pickle

import numpy as np
import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.pending import ColumnInfo, ColumnRef
from hfsdk.core.runtime import Bundle, Order, Part, Stored
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.dispatch import picks_for
from hfsdk.engine.controller.execution import MOST_FLOWS
from hfsdk.engine.controller.records import column_bytes, transfers_of, weights_taken
from hfsdk.session.parts import parts_of

LENGTHS = np.array([1, 2, 3, 4, 5, 6])


def stored():
    """Six rows in two parts: rank 0 wrote rows 0, 2, 4, rank 3 rows 1, 3, 5."""
    parts = (Part(np.array([0, 2, 4]), ["a"], 100, 0), Part(np.array([1, 3, 5]), ["b"], 200, 3))
    columns = {
        "response": ColumnInfo("ragged", "int32", 999, LENGTHS), "scores": ColumnInfo("scalar", "float64", 48),
        "text": ColumnInfo("object", "text", 600),
    }  # fmt: skip
    return Stored("actor.generate", 6, parts, columns)


def request(**refs):
    return m.Submit("critic", "compute_values", "preparation", refs, ("values",), 6)


def orders_of(inputs, *rows_of_ranks):
    known = {7: stored()}
    return [Order(rows, picks_for(inputs, rows, known), True) for rows in map(np.int64, rows_of_ranks)], known


def test_rows_and_bytes_by_rank_and_object():
    inputs = {"response": ColumnRef(7, "response"), "scores": ColumnRef(7, "scores")}
    orders, known = orders_of(inputs, [0, 1, 2], [0, 1, 2], [5, 3, 4])
    (moved,) = transfers_of(request(**inputs), orders, known)
    assert moved.source == 7
    assert [(h.rank, h.rows) for h in moved.holders] == [(0, 3), (3, 3)]
    assert dict(zip(moved.columns, moved.column_bytes, strict=True)) == {"response": 4 * LENGTHS.sum(), "scores": 48}
    first, second = moved.shares
    assert first.ranks == (0, 1), "they read the same rows, and are counted together"
    assert [(p.holder, p.rows, p.num_bytes, p.which) for p in first.pieces] == [
        (0, 2, 4 * (1 + 3) + 16, "0, 2"), (1, 1, 4 * 2 + 8, "1"),
    ]  # fmt: skip
    assert second.ranks == (2,)
    assert [(p.holder, p.num_bytes, p.which) for p in second.pieces] == [(0, 4 * 5 + 8, "4"), (1, 4 * (4 + 6) + 16, "3, 5")]


def test_selected_rows_are_counted_once_per_row_and_texts_by_their_mean():
    inputs = {"response": ColumnRef(7, "response", np.array([4, 4, 0])), "text": ColumnRef(7, "text", np.array([1, 1, 1]))}
    orders, known = orders_of(inputs, [0, 1, 2])
    (moved,) = transfers_of(request(**inputs), orders, known, task=True)
    assert dict(zip(moved.columns, moved.column_bytes, strict=True)) == {"response": 4 * (1 + 5), "text": 100}
    (share,) = moved.shares
    assert share.ranks == (None,)
    assert {p.holder: p.num_bytes for p in share.pieces} == {0: 4 * (5 + 5 + 1), 1: 300}


def test_a_rank_without_rows_reads_nothing_and_long_lists_are_cut():
    inputs = {"scores": ColumnRef(7, "scores")}
    orders, known = orders_of(inputs, [], list(range(6)))
    (moved,) = transfers_of(request(**inputs), orders, known)
    assert [(s.ranks, len(s.pieces)) for s in moved.shares] == [((0,), 0), ((1,), 2)]
    rows = np.arange(0, 60, 2)
    wide = Stored("x", 60, (Part(np.arange(60), ["a"], 1, None),), {"scores": ColumnInfo("scalar", "float32", 240)})
    order = Order(rows, picks_for(inputs, rows, {7: wide}), True)
    (moved,) = transfers_of(request(**inputs), [order], {7: wide})
    assert moved.shares[0].pieces[0].which == "0, 2, 4, 6, 8, 10, 12, 14…"
    assert transfers_of(request(), [Order(rows, (), True)], {}) == ()


def test_written_bytes_are_those_of_values():
    assert column_bytes(stored()) == {"response": 84, "scores": 48, "text": 600}


def test_weights_go_from_who_has_them_to_who_needs_them():
    bundles = [Bundle(0, (0, 1), None, 30), Bundle(0, (1,), None, 5), Bundle(2, (0,), None, 40)]
    moved = weights_taken(2, bundles)
    assert (moved.kind, moved.column_bytes) == ("weights", (75,))
    assert [(h.rank, h.num_bytes) for h in moved.holders] == [(0, 35), (2, 40)]
    taken = [(share.ranks, [(piece.holder, piece.num_bytes) for piece in share.pieces]) for share in moved.shares]
    assert taken == [((0,), [(0, 30), (1, 40)]), ((1,), [(0, 35)])]


@pytest.fixture
def session():
    with hf.Session.simulated("1x2 A100-80GB") as opened:
        opened.critic("tiny")
        opened.place()
        yield opened


def test_what_is_known_of_calls_travels_and_is_bounded(session):
    batch = session.batch(prompt=[[1, 2]] * 4, response=[[3]] * 4)
    for _ in range(MOST_FLOWS + 3):
        written = session.models.critic.compute_values(batch)
    written.wait()
    flows = parts_of(session).client.send(q.FlowsOf(0))
    again = pickle.loads(pickle.dumps(flows))
    assert [f.call for f in again] == [f.call for f in flows]
    planned = [bool(f.reads) for f in flows if f.call.method == "compute_values"]
    assert (len(planned), sum(planned)) == (MOST_FLOWS + 3, MOST_FLOWS)
    edges = session.dataflow.edges
    assert (edges[0].num_bytes, edges[-1].num_bytes) == (None, 4 * 3 * 8), "two prompt tokens and one of response, int64"
    assert session.dataflow[-1].calls == session.dataflow.calls
    with refuses(hf.OptionError, "step 5"):
        session.dataflow[5]
