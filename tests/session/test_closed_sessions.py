"""What stays readable once a session is closed: measurements, placement, history, and columns that were brought here."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.batch import refs_of
from hfsdk.core.pending import ColumnRef
from hfsdk.core.table import Ragged, Table
from hfsdk.engine.calls import queries as q
from hfsdk.session import client
from hfsdk.session.client import Fetched
from hfsdk.session.parts import parts_of
from tests.session.scripted import ScriptedRuntime


@pytest.fixture
def trained():
    with hf.Session.simulated("1x2 A100-80GB") as session:
        actor = session.actor("tiny")
        session.critic("tiny"), session.reference(actor), session.reward(lambda completions: [0.0] * len(completions))
        run = session.train(hf.PPO(max_new_tokens=4), session.prompts(["a", "b", "c"], batch_size=2), steps=3, progress=False)
        yield session, run


def test_what_was_measured_reads_the_same_after_closing(trained):
    session, run = trained
    actor = session.models.actor
    actor.update(run.last.batch, hf.algorithms.ppo.PolicyLoss()).wait()  # by hand, too: a row of the history

    def look():
        return {
            "trace": repr(session.trace), "steps": repr(session.trace[1:3]), "dataflow": session.dataflow.to_text(),
            "edges": session.dataflow[1].edges_to_pandas().to_csv(), "memory": session.memory.to_pandas().to_csv(),
            "history": session.history.to_pandas().to_csv(), "run": repr(run), "last": repr(run.last.actor),
            "version": actor.version, "seconds": session.trace[2].duration_s,
        }  # fmt: skip

    before = look()
    session.close()
    assert look() == before


def test_training_on_a_closed_session_leaves_its_run(trained):
    session, run = trained
    prompts = session.prompts(["a", "b"], batch_size=2)
    session.close()
    with pytest.raises(hf.SessionClosedError):
        session.train(hf.PPO(max_new_tokens=4), prompts, steps=1, progress=False)
    assert session.run is run


def test_placement_shows_who_lived_where_and_that_it_is_closed(trained):
    session, _ = trained
    before = session.placement.view()
    session.close()
    after = session.placement.view()
    assert {role["state"] for role in after["roles"]} == {"closed"}
    assert after["pools"] == before["pools"]
    assert [role["updates"] for role in after["roles"]] == [role["updates"] for role in before["roles"]]
    assert "closed" in repr(session.placement)


def test_only_what_needs_no_worker_is_answered(session, actor):
    actor.generate("Hello")
    client = parts_of(session).client
    session.close()
    assert client.send(q.CurrentStep()) == 0
    for query in q.OF_WORKERS:
        with pytest.raises(hf.SessionClosedError):
            client.send(query())


def test_columns_that_were_looked_at_stay_and_others_say_what_to_do(session, actor):
    batch = actor.generate(["Hello", "you"])
    before = batch["response"]
    few = batch[:1].table("prompt")["prompt"]
    session.close()
    assert batch["response"] == before
    assert batch[[1, 0]]["response"][1].tolist() == before[0].tolist(), "rows of what was brought whole"
    assert batch.text() == parts_of(session).client.texts(before)
    assert batch[:1]["prompt"] == few
    assert batch["prompt"] == batch["prompt"], "the user's own prompts"
    states = {state["name"]: state["state"] for state in batch.column_states()}
    assert states["response"] == states["prompt"] == "ready"
    assert states["rollout_log_probs"] == "lost"
    assert batch.view()["samples"][0]["response"] == batch.text()[0]
    with refuses(hf.SessionClosedError, "'rollout_log_probs' (actor.generate)", "('response')", "before session.close()"):
        batch.to_pandas()


def test_metrics_and_their_numbers_stay(session, actor):
    done = actor.update(actor.generate(["Hello"]), lambda out, b: out.log_probs).wait()
    rows = done.rows
    session.close()
    assert done.wait().rows == rows
    assert "loss=0.5" in repr(done)


def test_nothing_is_kept_of_batches_that_are_gone(monkeypatch):
    kept = Fetched()
    monkeypatch.setattr(client, "Fetched", lambda: kept)
    with hf.Session(runtime=ScriptedRuntime()) as session:
        actor = session.actor("tiny")
        batch = actor.generate(["Hello"])
        batch.table()
        names = {name for call_id in batch.call_ids for name in kept.names(call_id)}
        assert names >= {"prompt", "response"}
        gone = weakref.ref(batch)
        del batch
        gc.collect()
        assert gone() is None
        actor.generate(["you"])  # with the next message
        held = {name for call_id in range(10) for name in kept.names(call_id)}
        assert held <= {"prompt", "position"}


def test_the_oldest_columns_go_first_and_a_copy_is_the_user_s_own():
    kept = Fetched(most_bytes=1000)
    columns = {f"c{i}": np.full(50, i, dtype=np.float64) for i in range(3)}  # 400 bytes each
    for i, (name, values) in enumerate(columns.items()):
        kept.keep({name: ColumnRef(i, name)}, Table({name: values}))
    assert kept.num_bytes == 800
    assert [kept.has(ColumnRef(i, f"c{i}")) for i in range(3)] == [False, True, True]
    columns["c2"][:] = -1
    found = kept.find(ColumnRef(2, "c2"))
    assert found.tolist() == [2.0] * 50
    found[:] = -2
    assert kept.find(ColumnRef(2, "c2")).tolist() == [2.0] * 50
    kept.keep({"big": ColumnRef(9, "big")}, Table({"big": np.zeros(500)}))
    assert kept.num_bytes == 800, "what is larger than the bound is not kept, and drives nothing out"
    kept.let_go(1)
    assert kept.num_bytes == 400


def test_rows_are_found_in_pieces_that_hold_all_of_them():
    kept = Fetched()
    whole = Ragged.of([[i] * i for i in range(6)])
    some = np.array([4, 1, 3])
    kept.keep({"r": ColumnRef(1, "r", some)}, Table({"r": whole.take(some)}))
    assert kept.find(ColumnRef(1, "r", np.array([3, 4]))) == whole.take([3, 4])
    assert kept.find(ColumnRef(1, "r", np.array([3, 5]))) is None
    assert kept.find(ColumnRef(1, "r")) is None
    kept.keep({"r": ColumnRef(1, "r")}, Table({"r": whole}))
    assert kept.num_bytes == whole.nbytes, "the whole column takes the place of its rows"
    assert kept.find(ColumnRef(1, "r")) == whole


def test_an_aliased_column_is_found_under_its_source(session, actor):
    batch = actor.generate(["Hello"]).alias("old_log_probs", "rollout_log_probs")
    batch["old_log_probs"]
    session.close()
    assert refs_of(batch)["old_log_probs"].name == "rollout_log_probs"
    assert len(batch["rollout_log_probs"]) == 1
