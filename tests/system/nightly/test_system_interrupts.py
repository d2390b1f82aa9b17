"""Ctrl-C in a run and in a session that waits in each call: pressed when a worker is at work, wherever that is."""

import time

import pytest
from expect import until
from system_helpers import check_works, working

import hfsdk as hf


@pytest.fixture(autouse=True)
def still_works(live):
    yield
    check_works(live)
    assert live.session.status == "idle"


def slow_loss(seconds):
    """A loss that takes its time in every micro-batch."""

    def slow(out, b):
        time.sleep(seconds)
        return -out.log_probs * 1e-3

    return slow


def test_interrupt_of_training_pauses_after_the_step(live, keyboard):
    keyboard(lambda: working(live.session))
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
    keyboard(lambda: working(live.session), times=2, between_s=0.5)
    with pytest.raises(KeyboardInterrupt):
        live.session.train(Slow(), live.prompts, steps=2, progress=False)
    assert live.prompts.position == position, "the step that was not finished gives its prompts back"
    until("an idle session", lambda: live.session.status == "idle", live.session)
