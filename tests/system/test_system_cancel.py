"""Stopping real work: cancel and Ctrl-C in every kind of call. What was asked to stop stops at a safe point; all else goes on."""

import threading

import pytest
from expect import until
from system_helpers import (
    at_work,
    call_id,
    check_works,
    endless_generation,
    fingerprint,
    gate,
    gated_loss,
    heard,
    ppo_batch,
    waits,
)

import hfsdk as hf


@pytest.fixture(autouse=True)
def still_works(live):
    yield
    check_works(live)
    assert live.session.status == "idle"


@pytest.fixture
def entrance(tmp_path):
    """A gate at which workers wait for the test; open at the latest when it is over."""
    made = gate(tmp_path)
    yield made
    made.open()


def endless_forward(live):
    """Log-probs over so many long samples that they take a minute."""
    batch = live.session.batch(prompt=[[1] * 100] * 16, response=[[2] * 400] * 16).take(list(range(16)) * 60)
    return live.actor.compute_log_probs(batch)


def stopped(pending):
    with pytest.raises(hf.CallCancelledError):
        pending.wait(timeout=120)
    assert pending.state == "cancelled"


def test_cancel_generate_and_what_depends_on_it(live):
    batch = endless_generation(live)
    scored = live.reward.compute_scores(batch)
    trained = live.actor.update(scored.map(lambda t: {}, ["scores"], []), lambda out, b: -out.log_probs)
    until("decoding", lambda: at_work(live.session, call_id(batch), "decode"), live.session)
    batch.cancel()
    stopped(batch)
    stopped(scored)
    stopped(trained)


def test_cancel_forward_and_what_waits_behind_it(live):
    """The call that waits behind it is cancelled first: the one before goes on."""
    first = endless_forward(live)
    queued = live.actor.generate(live.prompts[0], max_new_tokens=4)
    until("a forward pass", lambda: at_work(live.session, call_id(first)), live.session)
    queued.cancel()
    stopped(queued)
    assert first.state == "running"
    first.cancel()
    stopped(first)
    done = live.actor.generate(live.prompts[0], max_new_tokens=3).wait()
    done.cancel()
    assert done.state == "done", "what is over stays"
    assert len(done["response"]) == 16


def test_cancel_update_keeps_finished_steps(live, entrance):
    """Eight mini-batches, each of one micro-batch on every rank; the cancel comes inside the third."""
    batch = ppo_batch(live).wait()
    version = live.actor.version
    metrics = live.actor.update(batch, gated_loss(entrance, number=3), mini_batches=8)
    until("the third mini-batch", entrance.reached, live.session)
    metrics.cancel()
    until("the workers to hear of it", lambda: heard(live.session), live.session)
    entrance.open()
    stopped(metrics)
    states = live.actor.run(fingerprint)
    steps = {updates for updates, _ in states}
    assert len(steps) == 1, "all ranks stopped after the same optimizer step"
    assert version + 2 <= max(steps) < version + 8
    assert len({weights for _, weights in states}) == 1, "data-parallel copies agree"
    assert live.actor.version == max(steps)
    again = live.actor.generate(live.prompts[0], max_new_tokens=4)
    assert set(again["policy_version"]) == steps


def test_cancel_cpu_task(live, entrance):
    """Its process is ended: nobody opens the gate."""
    batch, stay = live.actor.generate(live.prompts[0], max_new_tokens=3).wait(), entrance.stay
    value = batch.reduce(lambda table: stay(), reads=["response"])
    after = batch.reduce(lambda table: 5, reads=["response"])
    until("the function", entrance.reached, live.session)
    value.cancel()
    stopped(value)
    assert after.value == 5


# ---- Ctrl-C


def test_interrupt_of_a_generation_cancels_it_and_what_depends_on_it(live, keyboard):
    batch = endless_generation(live)
    dependent = live.reward.compute_scores(batch)
    keyboard(lambda: at_work(live.session, call_id(batch), "decode") and waits())
    with pytest.raises(KeyboardInterrupt):
        batch.wait()
    assert batch.state == "cancelled", "settled when the interrupt is raised"
    stopped(dependent)


def test_interrupt_of_an_update_waits_for_its_safe_point(live, keyboard, entrance):
    batch = ppo_batch(live).wait()
    version = live.actor.version
    metrics = live.actor.update(batch, gated_loss(entrance), mini_batches=8)

    def let_on():
        until("the client waits for the update to stop", lambda: waits("settle"))
        until("the workers hear of it", lambda: heard(live.session))
        entrance.open()

    thread = threading.Thread(target=let_on)
    thread.start()
    keyboard(lambda: entrance.reached() and waits())
    with pytest.raises(KeyboardInterrupt):
        metrics["loss"]
    thread.join(60)
    assert metrics.state == "cancelled"
    assert version <= live.actor.version < version + 8
    assert {updates for updates, _ in live.actor.run(fingerprint)} == {live.actor.version}


def test_second_interrupt_detaches(live, keyboard, entrance):
    """The safe point does not come: the first Ctrl-C waits for it, the second does not."""
    batch = ppo_batch(live).wait()
    metrics = live.actor.update(batch, gated_loss(entrance), mini_batches=2)
    keyboard(lambda: entrance.reached() and waits())
    keyboard(lambda: waits("settle"))
    with pytest.raises(KeyboardInterrupt):
        metrics.wait()
    assert metrics.state == "running", "still on its way to the safe point"
    until("the workers to hear of it", lambda: heard(live.session), live.session)
    entrance.open()
    until("the safe point", lambda: metrics.state == "cancelled", live.session)
