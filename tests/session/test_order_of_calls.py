"""What a call sees of those before it: a cancelled input, the newest state after a death, weights of before or after an update."""

import pytest
from expect import refuses, until

import hfsdk as hf
from tests.session.scripted import learn


def loss(out, b):
    return out.log_probs


def test_a_call_on_columns_of_a_cancelled_one_is_cancelled_and_has_not_failed(session, runtime, actor):
    runtime.hold("generate")
    batch = actor.generate(["a", "b"])
    until("generate to run", lambda: runtime.sent("generate"), session)
    batch.cancel()
    with pytest.raises(hf.CallCancelledError):
        batch.wait()
    with refuses(hf.CallCancelledError, "generate"):
        actor.compute_log_probs(batch).wait()


def test_a_shadow_gets_the_weights_anew_after_each_update_and_only_then():
    with hf.Session.simulated("1x2 A100-80GB") as session:
        actor = session.actor("tiny")
        session.place({"actor": 1, "actor.rollout": 1})
        for _ in range(2):
            batch = actor.generate(["a", "b"], max_new_tokens=4)
            actor.generate(["c"], max_new_tokens=4).wait()
            trace = session.trace.snapshot()
            first, _ = [span.call_id for span in trace.calls if span.method == "generate"]
            assert {span.call_id for span in trace if span.name == "sync"} == {first}
            actor.update(batch, loss).wait()


def test_a_death_brings_back_the_newest_state_that_still_holds(session, runtime, actor):
    for number in (1, 2):
        learn(actor, number)
        session.snapshot(f"after {number}")
    learn(actor, 1)
    runtime.failing["compute_log_probs"] = hf.WorkerDiedError("the worker of device 0 ended.")
    batch = actor.generate(["a"])
    with refuses(hf.WorkerDiedError, "device 0", "update 3", "1 update lost"):
        actor.compute_log_probs(batch).wait()
    runtime.failing.clear()
    actor.generate(["a"]).wait()
    assert actor.version == 3


def test_actors_of_one_pool_generate_with_one_tp():
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.actor("tiny", rollout="tp1")
        session.actor("tiny", name="other", rollout="tp2")
        with refuses(hf.LayoutError, "actor", "tp=1", "other", "tp=2", "'all'"):
            session.place("colocate")
