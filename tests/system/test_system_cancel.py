"""Stopping: cancel and Ctrl-C in every kind of call. What was asked to stop stops at a safe point; everything else goes on."""

import time

import pytest
from system_helpers import (
    at_work,
    call_id,
    check_works,
    fingerprint,
    long_generation,
    ppo_batch,
    running,
    slow_loss,
    until,
)

import hfsdk as hf
from hfsdk.session.session_parts import parts_of

MANY = 12
"""Micro-batches of one sample each: a forward pass that takes a while."""


@pytest.fixture(autouse=True)
def still_works(live):
    yield
    check_works(live)
    assert live.session.status == "idle"


@pytest.fixture
def slow_forward(live):
    """Start log-probs over very many long samples."""
    batch = live.session.batch(prompt=[[1] * 100] * 16, response=[[2] * 400] * 16).take(list(range(16)) * MANY)
    return lambda: live.actor.compute_log_probs(batch)


def stopped(pending):
    with pytest.raises(hf.CallCancelledError):
        pending.wait(timeout=60)
    assert pending.state == "cancelled"


def test_cancel_generate_and_what_depends_on_it(live):
    batch = long_generation(live)
    scored = live.reward.compute_scores(batch)
    trained = live.actor.update(scored.map(lambda t: {}, ["scores"], []), lambda out, b: -out.log_probs)
    until("decoding", lambda: at_work(live.session, call_id(batch), "decode"))
    batch.cancel()
    stopped(batch)
    stopped(scored)
    stopped(trained)


def test_cancel_forward(live, slow_forward):
    batch = slow_forward()
    until("a forward pass", lambda: at_work(live.session, call_id(batch)))
    batch.cancel()
    stopped(batch)


def test_cancel_update_keeps_finished_steps(live):
    """Eight mini-batches of slow micro-batches; the cancel comes inside one of them."""
    batch = ppo_batch(live)
    version = live.actor.version
    progress = []
    stop = live.session.subscribe(lambda event: progress.append(event) if event["type"] == "call_progress" else None)
    metrics = live.actor.update(batch, slow_loss(0.3), mini_batches=8)
    until("two optimizer steps", lambda: any(e["done"] >= 6 for e in progress if e["call_id"] == call_id(metrics)))
    metrics.cancel()
    stop()
    stopped(metrics)
    states = live.actor.run(fingerprint)
    steps = {updates for updates, _ in states}
    assert len(steps) == 1, "all ranks stopped after the same optimizer step"
    assert version < max(steps) < version + 8
    assert len({weights for _, weights in states}) == 1, "data-parallel copies agree"
    assert live.actor.version == max(steps)
    again = live.actor.generate(live.prompts[0], max_new_tokens=4)
    assert set(again["policy_version"]) == steps


def test_cancelled_before_it_starts(live, slow_forward):
    first = slow_forward()
    queued = live.actor.generate(live.prompts[0], max_new_tokens=4)
    until("the call before it", lambda: at_work(live.session, call_id(first)))
    queued.cancel()
    assert queued.state == "cancelled"
    stopped(queued)
    assert first.state == "running"
    first.cancel()
    stopped(first)


def test_cancel_of_what_is_done_does_nothing(live):
    batch = live.actor.generate(live.prompts[0], max_new_tokens=3).wait()
    batch.cancel()
    assert batch.state == "done"
    assert len(batch["response"]) == 16


def test_cancel_cpu_task(live):
    batch = live.actor.generate(live.prompts[0], max_new_tokens=3).wait()
    value = batch.reduce(lambda table: time.sleep(600), reads=["response"])
    after = batch.reduce(lambda table: 5, reads=["response"])
    until("the function", lambda: value.state == "running")
    value.cancel()
    stopped(value)
    assert after.value == 5


# ---- Ctrl-C


def test_interrupt_generate(live, keyboard):
    batch = long_generation(live)
    dependent = live.reward.compute_scores(batch)
    keyboard(lambda: at_work(live.session, call_id(batch), "decode"))
    with pytest.raises(KeyboardInterrupt):
        batch.wait()
    assert batch.state == "cancelled", "settled when the interrupt is raised"
    stopped(dependent)


def test_interrupt_log_probs(live, keyboard, slow_forward):
    keyboard(lambda: running(live.session))
    with pytest.raises(KeyboardInterrupt):
        slow_forward()["old_log_probs"]


def test_interrupt_update(live, keyboard):
    batch = ppo_batch(live).wait()
    version = live.actor.version
    metrics = live.actor.update(batch, slow_loss(0.3), mini_batches=8)
    keyboard(lambda: at_work(live.session, call_id(metrics), "forward"))
    with pytest.raises(KeyboardInterrupt):
        metrics["loss"]
    assert metrics.state == "cancelled"
    assert version <= live.actor.version < version + 8
    assert {updates for updates, _ in live.actor.run(fingerprint)} == {live.actor.version}


def test_interrupt_inside_the_call_of_a_waiting_session(live, keyboard, slow_forward):
    parts_of(live.session).client.wait_each = True
    try:
        keyboard(lambda: running(live.session))
        with pytest.raises(KeyboardInterrupt):
            slow_forward()
    finally:
        parts_of(live.session).client.wait_each = False


def test_second_interrupt_detaches(live, keyboard):
    """A safe point that is seconds away: the first Ctrl-C waits for it, the second does not."""
    batch = ppo_batch(live).wait()
    metrics = live.actor.update(batch, slow_loss(3.0), mini_batches=1)
    keyboard(lambda: at_work(live.session, call_id(metrics), "forward"), times=2, between_s=0.5)
    with pytest.raises(KeyboardInterrupt):
        metrics.wait()
    assert metrics.state == "running", "still on its way to the safe point"
    until("the safe point", lambda: metrics.state == "cancelled")


def test_interrupt_of_training_pauses_after_the_step(live, keyboard):
    keyboard(lambda: running(live.session))
    position = live.prompts.position
    with pytest.warns(UserWarning, match="paused after step"):
        run = live.session.train(hf.PPO(max_new_tokens=8), live.prompts, steps=50, progress=False)
    assert run.paused
    assert 1 <= len(run.rows) < 50
    assert live.prompts.position == position + len(run.rows)


def test_second_interrupt_of_training_cancels_the_step(live, keyboard):
    class Slow(hf.PPO):
        def step(self, models, prompts):
            batch = models.actor.generate(prompts, max_new_tokens=400, ignore_eos=True)
            batch = models.actor.compute_log_probs(batch)
            models.actor.update(batch, slow_loss(1.0), mini_batches=16).wait()

    position = live.prompts.position
    keyboard(lambda: running(live.session), times=2, between_s=0.5)
    with pytest.raises(KeyboardInterrupt):
        live.session.train(Slow(), live.prompts, steps=2, progress=False)
    assert live.prompts.position == position, "the step that was not finished gives its prompts back"
    until("an idle session", lambda: live.session.status == "idle")
