"""Sums of rewards weigh their parts and leave out those that give None; a seed of 0 is a seed; pairs stay whole."""

import numpy as np
import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.table import Table
from hfsdk.core.unscored import NOT_SCORED
from hfsdk.models.reward import WeightedScores
from tests.session.scripted import ScriptedRuntime


def test_a_sum_weighs_its_parts_and_leaves_out_those_that_gave_none():
    table = Table({"a": np.array([1.0, NOT_SCORED, 3.0], np.float32), "b": np.array([10.0, 20.0, 30.0], np.float32)})
    scores = WeightedScores(("a", "b"), (2.0, -0.5))(table)["scores"]
    assert scores.tolist() == [2.0 - 5.0, -10.0, 6.0 - 15.0]


@pytest.mark.parametrize(("asked", "taken"), [(None, 7), (0, 0), (3, 3)])
def test_a_generation_has_the_seed_it_was_given_else_the_sessions(asked, taken):
    runtime = ScriptedRuntime()
    with hf.Session(runtime=runtime, seed=7) as session:
        session.actor("tiny").generate(["a"], seed=asked).wait()
        (work,) = runtime.sent("generate")
        assert {order.arguments.seed for order in work.orders} == {taken}


def test_rows_that_belong_together_come_in_whole_sets(actor):
    def loss(out, b):
        return out.log_probs

    loss.together = 2
    batch = actor.generate(["a", "b", "c"])
    with refuses(hf.OptionError, "2 rows", "3 rows"):
        actor.update(batch, loss)
    actor.update(batch[:2], loss).wait()
