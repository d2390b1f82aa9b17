"""Bad numbers of every kind on real engines: a reward, an advantage, a loss, a weight; and runs that have none."""

import math

import numpy as np
import pytest
from expect import refuses
from first_bad_helpers import again, search

import hfsdk as hf
from benchmarks.why_parts.planted_runs import NAME, SAMPLE, TOKEN, nan_where_marked, set_inf

pytestmark = [pytest.mark.filterwarnings("ignore:reward goes on with", "ignore:step .* jumped to")]


def test_a_nan_reward_is_named_with_its_sample(planted):
    found = planted("", 1, nan_where_marked)
    assert any("session.run.first_bad()" in note for note in found.run.error.__notes__)
    bad = search(found)
    assert (bad.kind, bad.call, bad.sample, bad.step) == ("reward", "reward.compute_scores", SAMPLE, found.run.rows[-1]["step"] + 1)
    assert "nan_where_marked returned nan" in bad.verdict
    with refuses(hf.RewardFunctionError, f"sample {SAMPLE}"):
        again(found, bad)


def test_an_exploding_advantage_is_named_with_its_token(planted):
    found = planted("advantage", 3)
    assert any("session.run.first_bad()" in warning for warning in found.run.warnings)
    bad = search(found)
    assert (bad.kind, bad.column, bad.sample, bad.token) == ("advantage", "advantages", SAMPLE, TOKEN)
    assert bad.step == found.run.rows[3]["step"]
    assert abs(bad.value) > 1e3 * bad.usual
    assert "⟦" in bad.text
    assert bad.around.set_index("position")["advantages"][TOKEN] == pytest.approx(bad.value)
    assert again(found, bad) == pytest.approx(bad.value), "bit-equal, but for the digits printed"


def test_a_weight_that_no_step_makes_infinite_is_named_too(planted, live):
    live.actor.run(set_inf, NAME)  # the run's snapshot has rank 0's
    found = planted("", 1)
    bad = search(found, ["critic"])
    assert (bad.kind, bad.call, bad.parameter, bad.ranks, bad.value) == ("weight", "", NAME, (1,), math.inf)
    assert "Done again from 'before step" in bad.verdict


def test_a_loss_that_divides_by_zero_is_named_with_mini_batch_and_sample(planted):
    found = planted("loss", 1)
    bad = search(found)
    assert (bad.kind, bad.call, bad.sample, bad.token, bad.column) == ("loss", "actor.update", SAMPLE, None, "token_loss")
    assert bad.mini_batch == found.updates % 2, "the optimizer steps that were taken before it was refused"
    assert math.isnan(bad.value)
    assert np.isnan(bad.around["token_loss"]).all()
    with refuses(hf.NonFiniteLossError, f"samples [{SAMPLE}]"):
        again(found, bad)


@pytest.mark.parametrize(("what", "kind", "sample"), [("burst", "loss", SAMPLE), ("scale", "update", None)])
def test_a_loss_that_jumps_is_found_in_its_mini_batch(planted, what, kind, sample):
    found = planted(what, 3)
    bad = search(found)
    assert (bad.kind, bad.call, bad.sample) == (kind, "actor.update", sample)
    assert bad.mini_batch in (0, 1)
    assert bad.step == found.run.rows[3]["step"]


def test_a_jump_in_the_second_mini_batch_is_looked_for_by_steps_that_no_history_tells(planted):
    found = planted("late", 3)
    rows = len(found.session.history)
    bad = search(found)
    assert (bad.kind, bad.call, bad.mini_batch) == ("update", "actor.update", 1)
    assert len(found.session.history) == rows
    assert found.run.first_bad(stay=True).mini_batch == 1
    assert len(found.session.history) == rows


def test_a_healthy_run_has_none_and_a_step_of_it_neither(planted):
    found = planted("", 2)
    assert found.run.warnings == []
    assert len(found.run.rows) == 4
    assert found.run.first_bad() is None
    assert found.run.first_bad(found.run.rows[-1]["step"]) is None
    with refuses(hf.OptionError, 10000):
        found.run.first_bad(10_000)
    branch = found.session.branch
    assert found.run.first_bad(found.run.rows[-1]["step"], stay=True) is None
    assert found.session.branch != branch
