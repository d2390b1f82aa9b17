"""The messages between a session and its controller, and the errors that come back, cross processes: all of them pickle."""

from __future__ import annotations

import dataclasses
import pickle
import typing

import numpy as np

import hfsdk as hf
from hfsdk.core import errors
from hfsdk.core.arguments import Learning
from hfsdk.core.pending import ColumnRef
from hfsdk.core.placement import Placement
from hfsdk.core.protocol import PROTOCOLS
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import StateCopy, Stored
from hfsdk.core.table import Table
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls import queries as q


def examples():
    role = RoleSpec(name="actor", kind="actor")
    ref = ColumnRef(3, "prompt", np.arange(2))
    kept = StateCopy(1, "actor", "tp1 pp1 dp2", (0, 1), (10, 10), 4)
    protocol, inputs = PROTOCOLS["MICRO_DP"], {"prompt": ref}
    submit = m.Submit(
        "actor", "generate", "generation", inputs, ("response",), 2, protocol, Learning(epochs=2), "cell 1", "f@1", 2.0, "all"
    )
    return [
        m.Declare(role), m.Remove("actor"), m.PlaceRoles(Placement.of("colocate", ["actor"], 2), (role,)),
        m.Put(Table({"x": np.arange(3)})),
        submit, m.Wait((1, 2), 0.1), m.Fetch({"prompt": ref}),
        m.AskHostRoom(("actor",), unless_kept=True), m.Cancel((1,)), m.Release((1,)),
        m.Logs("actor", 0), m.Recover("actor", "/folder", 3), m.Saved("actor"), m.BeginStep(),
        m.TakeSnapshot(("actor",)), m.Rewind((kept,), "branch 2"), m.Return((kept,), "main"), m.Forget((kept,)),
        m.AcknowledgeFailures(),
        m.AcknowledgeFailures((1, 2)), m.Close(),
        m.TraceNote("restore", 1, 0.5, "a worker died"), q.Devices(), m.MarkRecorded((1, 2)),
        m.AwaitLoads(),
        *(query(1) for query in (q.StateOf, q.ResultOf, q.WriterOf, q.StoredOf, q.CallsOf, q.SpansOf, q.FlowsOf, q.RerunsOf)),
        *(query() for query in (q.CurrentStep, q.FirstStep, q.RunningCalls, q.Changes, q.Roles, q.CurrentPlacement, q.Nodes)),
        q.UpcomingStep(), q.KeptOf("actor", 3),
        q.InfoOf(ref), q.ControllerBytes(), q.HeldBytes(), m.Locate({"prompt": ref}),
        m.PutByReference(Stored("your data", 0, (), {}), [None], 0),
    ]  # fmt: skip


def test_every_message_pickles():
    assert {type(message) for message in examples()} == {*typing.get_args(m.Message), *q.Query.__subclasses__()}
    for message in examples():
        back = pickle.loads(pickle.dumps(message))
        assert type(back) is type(message)
        for field in dataclasses.fields(message):
            one, other = getattr(message, field.name), getattr(back, field.name)
            if isinstance(one, ColumnRef):
                assert (one.call_id, one.name) == (other.call_id, other.name)
            elif field.name not in ("inputs", "columns", "table", "stored"):
                assert one == other, (message, field.name)


def test_every_error_pickles():
    for name in vars(errors):
        cls = getattr(errors, name)
        if isinstance(cls, type) and issubclass(cls, hf.CallError):
            error = cls("words", role="actor", method="update", rank=1, line="cell 3", details="more")
            back = pickle.loads(pickle.dumps(error))
            assert (type(back), str(back), back.fields()) == (cls, str(error), error.fields())
        elif isinstance(cls, type) and issubclass(cls, hf.HfsdkError):
            assert str(pickle.loads(pickle.dumps(cls("words")))) == "words"
