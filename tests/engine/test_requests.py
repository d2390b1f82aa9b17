"""Whatever a worker is asked, how it ended is in the answer: an error with what was asked, or that a state is gone."""

import gc
import pickle
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from rows import every_row

pytest.importorskip("torch")

from hfsdk.core.arguments import Scoring
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import CallError, CheckpointError
from hfsdk.core.runtime import Assignment, Order, Pick, StateGoneError
from hfsdk.engine.process.rendezvous import Link
from hfsdk.engine.worker.answer import NO_ROWS
from hfsdk.engine.worker.requests import Execute, Export, Keep, Load, MoveState, Need, Offer, Restore, SendKept, carry_out
from hfsdk.engine.worker.role_host import ObjectsGoneError, OwnStore
from hfsdk.engine.worker.worker import Worker

CALL = Call(id=1, role="actor", method="give_state")


class EmptyStore(OwnStore):
    def get(self, references):
        raise ObjectsGoneError


class States:
    def restore_parts(self, parts):
        raise CheckpointError(f"{parts} do not fit")


def test_what_goes_wrong_is_told_with_what_was_asked():
    with every_row() as row:
        for request_, words in [
            (Export("actor"), "taking out the state of actor failed: KeyError"),
            (Keep("actor", 0), "keeping the state of actor failed: KeyError"),
            (SendKept("actor", 3), "sending the kept state of actor failed: KeyError(3)"),
            (Restore("actor", 3), "restoring the state of actor failed: KeyError"),
            (Offer("actor"), "offering the state of actor failed: KeyError"),
            (Load("actor", None), "loading actor failed: AttributeError"),
        ]:
            with row(request_, words):
                check_what_goes_wrong_is_told_with_what_was_asked(request_, words)


def check_what_goes_wrong_is_told_with_what_was_asked(request_, words):
    answer = carry_out(Worker(0), request_)
    assert answer.status == "error"
    assert isinstance(answer.error, CallError)
    assert answer.error.message.startswith(words)
    assert "Traceback" in answer.error.fields()["details"]


def test_a_state_that_is_gone_is_told_as_such():
    with every_row() as row:
        for request_ in [Restore("actor", 0, ["gone"]), Need("actor", ["gone"])]:
            with row(request_):
                check_a_state_that_is_gone_is_told_as_such(request_)


def check_a_state_that_is_gone_is_told_as_such(request_):
    worker = Worker(0, store=EmptyStore())
    worker.roles["actor"] = type("Role", (), {"states": States()})()
    answer = carry_out(worker, request_)
    assert answer.status == "error"
    assert isinstance(answer.error, StateGoneError)
    assert str(answer.error) == "the state of actor is gone: it was on its way when a worker that held it ended."


def test_a_move_whose_parts_are_gone_is_an_error_of_its_call():
    link = Link(0, ("a", "b"), "file:///nowhere", 2)
    answer = carry_out(Worker(0, store=EmptyStore()), MoveState("actor", CALL, link, 0, ["gone"], [], (0, 0)))
    assert isinstance(answer.error, CallError)
    assert (answer.error.role, answer.error.method) == ("actor", "give_state")


def test_errors_of_our_own_keep_their_type():
    worker = Worker(0)
    worker.roles["actor"] = type("Role", (), {"states": States()})()
    answer = carry_out(worker, Restore("actor", 0, ["these"]))
    assert isinstance(answer.error, CheckpointError)
    assert str(answer.error).startswith("['these'] do not fit")


class Doubles:
    rollout = None
    shadow = SimpleNamespace(check_version=lambda version: None)

    def run(self, method, table, order, safe):
        return {"values": 2 * table["scores"]}, None

    def memory_parts(self):
        return {}


def test_a_worker_keeps_nothing_of_what_a_call_read_and_wrote():
    """The store alone does, for as long as somebody refers to it."""
    worker, rows = Worker(0), np.arange(3)
    worker.roles["critic"] = Doubles()
    columns = {"scores": np.array([1.0, 2.0, 3.0])}
    call = Call(id=1, role="critic", method="compute_values")
    order = Order(rows, (Pick((columns,), (rows,), None, {"scores": "scores"}),), keep=True)
    answer = carry_out(worker, Execute("critic", call, order))
    assert answer.part["values"].tolist() == [2.0, 4.0, 6.0]
    kept = [weakref.ref(columns["scores"]), weakref.ref(answer.part["values"])]
    del columns, order, answer
    gc.collect()
    assert [column() for column in kept] == [None, None]


def test_a_models_scores_are_normalised_once():
    pytest.importorskip("megatron.core")
    from hfsdk.engine.worker.role_engine import HANDLERS

    given = Assignment(arguments=Scoring(column="scores", normalisation=(3.0, 2.0)))
    trainer = SimpleNamespace(scores=lambda table, micro_batches, safe: {"scores": np.array([1.0, 3.0, 9.0])})
    columns, _ = HANDLERS["compute_scores"](SimpleNamespace(trainer=trainer), None, given, None)
    assert columns["scores"].tolist() == [-1.0, 0.0, 3.0]


def test_a_call_of_a_role_that_is_not_there_is_answered_with_its_spans():
    answer = carry_out(Worker(0), Execute("actor", CALL, Order(NO_ROWS, (), False)))
    assert answer.status == "error"
    assert [span.name for span in answer.spans] == ["fetch", "give_state"]
    assert pickle.loads(pickle.dumps(answer)).error.message == answer.error.message
