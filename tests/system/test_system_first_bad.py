"""The first bad number on real engines: what is planted is named, its code gets it again, and the session is where it was."""

import contextlib
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from system_helpers import OPENINGS, fingerprint

import hfsdk as hf
from benchmarks.why_parts.planted_runs import NAME, SAMPLE, TOKEN, Planted, lengths, nan_where_marked, prompts, set_inf

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:reward goes on with", "ignore:step .* jumped to")]


def see_failures(roles):
    """Meet the failures of each role that nobody has looked at: those beside the one that a run has raised."""
    for role in (roles.actor, roles.critic):
        with contextlib.suppress(hf.NonFiniteLossError):
            role.run(fingerprint)


@pytest.fixture
def planted(live):
    """``planted(what, step, reward)``: a run in whose step that is planted, on the shared session, which goes back afterwards."""
    start = live.session.snapshot("before what is planted")

    def run(what, step, reward=lengths):
        live.session.reward(reward)
        before = live.actor.version
        with contextlib.suppress(hf.HfsdkError):
            live.session.train(Planted(what), prompts(live.session, OPENINGS, step), steps=step + 2, progress=False)
        see_failures(live)
        updates = live.actor.version - before
        return SimpleNamespace(session=live.session, run=live.session.run, actor=live.actor, critic=live.critic, updates=updates)

    yield run
    see_failures(live)
    live.session.rewind(start)
    live.session.forget(start)


def where(session, roles):
    """What of a session a search must leave alone."""
    history = [(row["kind"], row.get("step")) for row in session.history]
    return [role.run(fingerprint) for role in roles], session.run.prompts.position, session.branch, history


def search(found, roles=("actor", "critic")):
    """Return the first bad number; the session is where it was."""
    before = where(found.session, [getattr(found, role) for role in roles])
    bad = found.run.first_bad()
    assert where(found.session, [getattr(found, role) for role in roles]) == before
    assert bad.left.startswith("the session is where it was")
    return bad


def again(found, bad):
    """Run the cell that gets the number again; return the value of its last line."""
    *lines, last = bad.code.splitlines()
    names = {"session": found.session, "hf": hf}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec("\n".join(lines), names)
        return eval(last.strip(), names)


def test_a_nan_reward_is_named_with_its_sample(planted):
    found = planted("", 1, nan_where_marked)
    assert any("session.run.first_bad()" in note for note in found.run.error.__notes__)
    bad = search(found)
    assert (bad.kind, bad.call, bad.sample, bad.step) == ("reward", "reward.compute_scores", SAMPLE, found.run.rows[-1]["step"] + 1)
    assert "nan_where_marked returned nan" in bad.verdict
    with pytest.raises(hf.RewardFunctionError, match=f"sample {SAMPLE}"):
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


def test_a_weight_that_is_infinite_on_one_rank_is_named_with_rank_and_layer(planted):
    found = planted("weight", 1)
    bad = search(found, ["critic"])
    assert f"but for {NAME}, of which ranks that differ in dp alone keep one copy together" in bad.left
    assert (bad.kind, bad.role, bad.parameter, bad.ranks, bad.value) == ("weight", "actor", NAME, (1,), math.inf)
    assert bad.layer == NAME.removesuffix(".weight")
    assert (bad.call, bad.column) == ("actor.compute_log_probs", "old_log_probs")
    assert "it was finite before actor.run" in bad.verdict
    of_rank = again(found, bad)
    assert of_rank[0] < 10
    assert of_rank[1] == math.inf


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
    with pytest.raises(hf.NonFiniteLossError, match=rf"samples \[{SAMPLE}\]"):
        again(found, bad)


@pytest.mark.parametrize(("what", "kind", "sample"), [("burst", "loss", SAMPLE), ("scale", "update", None)])
def test_a_loss_that_jumps_is_found_in_its_mini_batch(planted, what, kind, sample):
    found = planted(what, 3)
    bad = search(found)
    assert (bad.kind, bad.call, bad.sample) == (kind, "actor.update", sample)
    assert bad.mini_batch in (0, 1)
    assert bad.step == found.run.rows[3]["step"]


def test_a_healthy_run_has_none_and_a_step_of_it_neither(planted):
    found = planted("", 2)
    assert found.run.warnings == []
    assert len(found.run.rows) == 4
    assert found.run.first_bad() is None
    assert found.run.first_bad(found.run.rows[-1]["step"]) is None
    with pytest.raises(hf.OptionError, match="the run has no step 10000; it has steps"):
        found.run.first_bad(10_000)
    branch = found.session.branch
    assert found.run.first_bad(found.run.rows[-1]["step"], stay=True) is None
    assert found.session.branch != branch
