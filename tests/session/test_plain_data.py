"""Nouns as plain data and back: equal, and nothing that was sent by somebody else runs."""

from __future__ import annotations

import pickle
import threading

import msgspec
import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core import errors
from hfsdk.core.functions import Shipped
from hfsdk.core.rows import Rows
from hfsdk.core.table import Ragged, Table
from hfsdk.engine.calls import queries as q
from hfsdk.engine.calls.replies import Reply
from hfsdk.kept.codec import from_plain, to_plain
from hfsdk.kept.shared_state import RUN_SECTIONS, SECTIONS, SharedState, history_rows
from hfsdk.kept.wire import answer_bytes, answer_of, request_bytes, request_of
from hfsdk.session.parts import parts_of


@pytest.fixture(scope="module")
def session():
    with hf.Session.simulated("1x4 A100-80GB", price_per_device_hour=1.0) as made:
        actor = made.actor("qwen2.5-0.5b", optimizer=hf.AdamW(lr=1e-5))
        made.critic("qwen2.5-0.5b", optimizer=hf.AdamW(lr=1e-5))
        made.reference(actor)
        made.reward(lambda completions: [0.0] * len(completions))
        made.place("colocate")
        prompts = made.prompts([[1, 2, 3]] * 16, batch_size=4)
        made.train(hf.PPO(max_new_tokens=4), prompts, steps=2, progress=False)
        made.snapshot("one")
        yield made


def there_and_back(value, client=None):
    return from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain(value))), client)


@each("query", [q.SpansOf(), q.FlowsOf(), q.CallsOf(), q.Roles(), q.Changes(), q.CurrentPlacement()])
def test_what_the_controller_answers_comes_back_equal(session, query):
    answer = parts_of(session).client.send(query)
    assert repr(there_and_back(answer)) == repr(answer)


def test_all_that_a_session_is_comes_back_equal(session):
    parts = parts_of(session)
    rows = history_rows(parts)
    state = SharedState(parts, (*SECTIONS, *RUN_SECTIONS), SECTIONS, (rows,), frozenset({rows.name}))
    notes = state.news()
    assert {note.section for note in notes} >= {"roles", "deployment", "run", "run_steps", "snapshots", "history_rows", "places"}
    for note, back in zip(notes, there_and_back(notes, parts.client), strict=True):
        assert back.entries.keys() == note.entries.keys()
        for key, value in note.entries.items():
            assert repr(back.entries[key]) == repr(value) or back.entries[key] == value, (note.section, key)
    assert state.news() == (), "nothing has changed since"


def test_a_step_with_its_batch_belongs_to_the_other_sides_client(session):
    client, step = parts_of(session).client, session.run.last
    held = []
    plain = to_plain(step, held.append)
    back = from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(plain)), client)
    assert back.batch.columns == step.batch.columns
    assert len(back.batch) == len(step.batch)
    assert set(back.batch.call_ids) == set(step.batch.call_ids) <= set(held)
    assert back.actor.call_ids == step.actor.call_ids
    with pytest.raises(ValueError, match="belongs to a session"):
        from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(plain)))


@each(
    "value",
    [
        None, True, 3, 2.5, "text", b"bytes", [1, [2]], (1, ("a",)), {"a": 1}, {1: "a", (2, "x"): 3}, {"": 5}, frozenset({1, 2}),
        float("inf"), 2**40, np.float32(1.5), np.int64(7), hf.Layout(tp=2),
    ],
)  # fmt: skip
def test_containers_and_numbers(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_arrays_tables_and_rows():
    table = Table({"a": Ragged.of([[1, 2], [], [3]], np.int32), "b": np.array([1.0, 2.0, np.nan]), "c": ["x", "y", "z"]})
    back = there_and_back(table)
    assert list(back) == ["a", "b", "c"]
    assert np.array_equal(back["a"].flat, table["a"].flat)
    assert back["a"].flat.dtype == np.int32
    assert np.array_equal(back["b"], table["b"], equal_nan=True)
    back["b"][0] = 5.0  # it is this side's own
    texts = np.array(["a", None], dtype=object)
    assert there_and_back(texts).tolist() == ["a", None]
    rows = Rows([{"step": 0, "kl": 0.5}, {"step": 1}])
    assert there_and_back(rows) == rows


def test_errors_keep_their_class_their_fields_and_their_causes():
    error = errors.WorkerDiedError("it died", role="actor", method="update", rank=1, line="cell 4", details="...")
    back = there_and_back(error)
    assert type(back) is errors.WorkerDiedError
    assert back.fields() == error.fields()
    assert type(there_and_back(KeyError("x"))) is KeyError
    own = type("Own", (Exception,), {})("mine")
    assert str(there_and_back(own)) == "Own: mine"
    number, reply = answer_of(answer_bytes(7, Reply(errors=(errors.DependencyError("second"), error), heard=3)), None)
    assert (number, reply.heard) == (7, 3)
    with pytest.raises(errors.DependencyError) as raised:
        reply.unpack()
    assert isinstance(raised.value.__cause__, errors.WorkerDiedError)


def test_what_is_no_noun_is_refused_by_whoever_says_it():
    for value in (object(), lambda: None, threading.Lock()):
        with refuses(errors.OptionError, "from afar"):
            to_plain(value)
    _, reply = answer_of(answer_bytes(1, Reply(object())), None)
    with refuses(errors.OptionError, "from afar"):
        reply.unpack()


RAN = []


class Evil:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return RAN.append, ("ran",)


@each(
    "sent",
    [
        {"": "object", "of": "os:system", "f": {"command": "true"}},
        {"": "object", "of": "subprocess:Popen", "f": {"args": ["true"]}},
        {"": "object", "of": "hfsdk.core.functions:Shipped.load", "f": {}},
        {"": "object", "of": "hfsdk.core.files:write_file", "f": {}},
        {"": "object", "of": "hfsdk.core.spec:dataclass", "f": {}},
        {"": "object", "of": "hfsdk.session.session:Session", "f": {}},
        {"": "object", "of": "hfsdk.core..os:x", "f": {}},
        {"": "object", "of": "hfsdk.core.layout:Layout", "f": {"nothing": 1}},
        {"": "error", "of": "SystemExit", "v": "1", "f": {}},
        {"": "error", "of": "annotations", "v": "1", "f": {}},
        {"": "array", "dtype": "O", "v": "x", "shape": "y"},
        {"": "array", "dtype": "|O", "v": b"12345678", "shape": [1]},
        {"": "scalar", "dtype": "|O", "v": b"12345678"},
        {"": "nonsense"},
        {"": ["a"]},
        {"": "batch", "columns": {}, "num_rows": 1},
    ],
)
def test_what_may_not_be_named_is_not_made(sent):
    with pytest.raises((ValueError, ImportError)):
        from_plain(sent)


def test_a_pickle_that_a_server_sends_stays_bytes():
    RAN.clear()
    function = Shipped("evil", pickle.dumps(Evil()))
    back = there_and_back(function)
    assert back == function
    assert RAN == []


def test_requests_have_their_number():
    assert request_of(request_bytes(2**40, 7, q.StateOf(3))) == (2**40, 7, q.StateOf(3))
