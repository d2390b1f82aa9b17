"""What the controller remembers does not grow with the steps; what somebody still refers to stays readable."""

import gc

import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.errors import OptionError
from hfsdk.core.trace import KEPT_STEPS
from hfsdk.engine.controller import records
from hfsdk.session.parts import parts_of


@pytest.fixture
def session():
    with hf.Session.simulated("1x2 A100-80GB") as made:
        actor = made.actor("tiny")
        made.critic("tiny")
        made.reference(actor)
        made.reward(lambda prompts, completions, **columns: [0.0] * len(prompts))
        yield made


def trained(session, steps):
    prompts = session.prompts([f"prompt {i}" for i in range(8)], batch_size=2, seed=steps)
    session.train(hf.PPO(max_new_tokens=4, mini_batches=1), prompts, steps=steps, progress=False)


def by_hand(session, steps):
    batch = session.batch(prompt=[[1], [2]])
    for _ in range(steps):
        made = session.models.actor.generate(batch, max_new_tokens=2)
        session.models.actor.update(made, lambda out, b: out.log_probs).wait()


def remembered(session):
    gc.collect()
    session.forget(session.snapshot("flush"))  # whatever is sent takes releases along
    return len(list(parts_of(session).client._controller._calls))


def test_calls_of_old_steps_leave_memory(session):
    trained(session, KEPT_STEPS + 10)
    before = remembered(session)
    trained(session, 40)
    assert remembered(session) <= before + 12, "of one step at most"


@pytest.mark.parametrize("loop", ["only generates", "only learns", "only puts"])
def test_calls_of_a_loop_that_is_one_long_step_leave_memory(session, monkeypatch, loop):
    monkeypatch.setattr(records, "MOST_CALLS", 60)
    parts_of(session).client._controller._calls._look_at = 60
    batch = session.batch(prompt=[[1], [2]])
    held = session.models.actor.generate(batch, max_new_tokens=2)
    for _ in range(150):
        if loop == "only generates":
            session.models.actor.generate(batch, max_new_tokens=2).wait()
        elif loop == "only learns":
            session.models.actor.update(held, lambda out, b: out.log_probs).wait()
        else:
            session.batch(prompt=[[1], [2]])
    assert remembered(session) <= 80
    assert held.wait().state == "done"
    assert len(session.history) == (150 if loop == "only learns" else 0)
    assert len(session.trace[0].calls) <= 80


def test_a_batch_that_somebody_holds_stays_readable(session):
    held = session.models.actor.generate(session.batch(prompt=[[1], [2]]), max_new_tokens=2)
    metrics = session.models.actor.update(held, lambda out, b: out.log_probs)
    trained(session, KEPT_STEPS + 10)
    assert [c["bytes"] for c in held.column_states() if c["name"] == "response"] == [16]
    assert held.state == metrics.state == "done"
    assert metrics["num_samples"] == [2]
    assert session.models.actor.compute_log_probs(held).wait().done


def test_a_step_that_is_no_longer_kept_says_so(session):
    trained(session, KEPT_STEPS + 10)
    last = session.trace.step
    kept = session.trace[last - KEPT_STEPS + 1]
    assert len(kept.calls)
    for look in (lambda: session.trace[3], lambda: session.dataflow[3]):
        with refuses(OptionError, "step 3 is no longer kept", f"last {KEPT_STEPS} steps", "session.history"):
            look()
    trained(session, 5)
    with refuses(OptionError, "no longer kept"):
        kept.snapshot()
    assert len({span.step for span in session.trace[:]}) == KEPT_STEPS, "of all that are kept"
    with refuses(OptionError, "no longer kept"):
        session.trace[0:5]


def test_the_history_keeps_every_step_and_every_update_by_hand(session):
    by_hand(session, KEPT_STEPS + 10)
    trained(session, KEPT_STEPS + 10)
    by_hand(session, 3)
    kinds = [row["kind"] for row in session.history]
    assert kinds == ["update"] * (KEPT_STEPS + 10) + ["step"] * (KEPT_STEPS + 10) + ["update"] * 3
    assert [row["updates"] for row in session.history if row["kind"] == "update"][: KEPT_STEPS + 10] == list(
        range(1, KEPT_STEPS + 11)
    )


def test_calls_that_wait_find_their_inputs_however_many_steps_were_submitted_since(session):
    batch = session.batch(prompt=[[1], [2]])
    done = []
    for _ in range(KEPT_STEPS + 20):  # nobody waits
        made = session.models.actor.generate(batch, max_new_tokens=2)
        done.append(session.models.actor.update(made, lambda out, b: out.log_probs))
        del made
    assert [metrics.wait().state for metrics in done] == ["done"] * len(done)


def test_versions_that_nobody_refers_to_are_gone(session):
    from hfsdk.engine.controller.records import Version

    def count():
        gc.collect()
        return sum(type(thing) is Version for thing in gc.get_objects())  # isinstance would wake what torch has deprecated

    trained(session, KEPT_STEPS + 10)
    before = count()
    trained(session, 40)
    assert count() <= before + 4
