"""A refused optimizer step names what is to blame: the samples and the loss, or a learning rate that ruined the weights."""

from rows import every_row

import hfsdk as hf
from hfsdk.engine.worker.role_engine import why_refused


def test_a_learning_rate_that_ruins_weights_is_named():
    with every_row() as row:
        for updates, count in [(1, "1 step "), (3, "3 steps ")]:
            with row(updates, count):
                check_a_learning_rate_that_ruins_weights_is_named(updates, count)


def check_a_learning_rate_that_ruins_weights_is_named(updates, count):
    words = why_refused([], "actor", hf.AdamW(lr=1e3), updates)
    assert words.startswith("the gradient is NaN or infinite")
    assert f"They have had {count}with a learning rate of 1000, which ruins them" in words
    assert "optimizer=hf.AdamW(lr=1e-5), or go back with session.rewind(...)" in words
    assert "Look at these samples" not in words


def test_before_the_first_step_the_samples_and_the_loss_are_to_blame():
    words = why_refused([3, 4], "actor", hf.AdamW(lr=1e3), 0)
    assert words.startswith("the loss of samples [3, 4] is NaN or infinite")
    assert words.endswith("Look at these samples with batch.inspect(i) and at the loss function.")


def test_an_ordinary_learning_rate_is_only_mentioned():
    words = why_refused([3], "actor", hf.AdamW(lr=1e-3), 7)
    assert "Look at these samples" in words
    assert words.endswith("The weights have had 7 steps, the last with a learning rate of 0.001: try a smaller one.")


def test_the_schedule_says_which_rate_it_was():
    assert "a learning rate of 0.5," in why_refused([], "actor", hf.AdamW(lr=1.0, warmup_steps=2), 1)


def test_a_suggested_rate_is_said_as_one_that_was_given():
    taken = hf.AdamW().for_model(3_000_000, "policy")
    assert "the last with a learning rate of 5e-06: try a smaller one" in why_refused([1], "actor", taken, 1)  # of 5e-5, warming up
