"""A function edited in a cell is used at the next call; which one it was is on record; an exception shows the user's own line."""

import linecache
import textwrap

import numpy as np
import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.algorithms import ppo


@pytest.fixture
def cell():
    """``cell(code)`` runs code as a notebook does, in one namespace, under a file name that no file has; returns the namespace."""
    namespace = {"__name__": "__main__", "hf": hf, "np": np}
    names = []

    def run(code):
        code = textwrap.dedent(code)
        names.append(f"/tmp/ipykernel_0/{abs(hash(code))}.py")
        linecache.cache[names[-1]] = (len(code), None, code.splitlines(keepends=True), names[-1])
        exec(compile(code, names[-1], "exec"), namespace)
        return namespace

    yield run
    for name in names:
        linecache.cache.pop(name, None)


@pytest.fixture
def batch(live):
    return live.actor.compute_log_probs(live.actor.generate(live.prompts[0], max_new_tokens=6))


def last_call(session):
    """The span of the last call on the controller's lane."""
    return max((s for s in session.trace[:] if s.device is None), key=lambda s: s.call_id)


def check_on_record(session, function, text):
    attrs = last_call(session).attrs
    assert attrs["function"].startswith(f"{function}@")
    assert text in attrs["source"]
    return attrs["function"]


@pytest.mark.filterwarnings("ignore:reward goes on with")
def test_a_reward(live, give_reward, batch, cell):
    versions = set()
    for value in (1.5, 2.5):
        code = f"""
        def scale(x):
            return x * {value}

        def edited(completions):
            return [scale(1.0) for _ in completions]
        """
        give_reward(cell(code)["edited"])
        assert set(live.reward.compute_scores(batch)["scores"]) == {value}
        versions.add(check_on_record(live.session, "edited", "scale(1.0)"))
    assert len(versions) == 2, "what it calls belongs to its version"
    assert live.session.history.sources.keys() >= versions
    cell("""
        def helper(text):
            return 1 / len(text[:0])  # the line that fails
        """)
    give_reward(
        cell("""
        def broken(completions):
            return [helper(c) for c in completions]  # the line that calls it
        """)["broken"]
    )
    with refuses(hf.RewardFunctionError, "the line that fails", "the line that calls it", "ZeroDivisionError"):
        live.reward.compute_scores(batch).wait()


def test_a_loss(live, batch, cell):
    seen = []
    for factor in (1.0, 3.0):
        loss = cell(f"""
        def my_loss(out, b):
            return {factor} * (out.log_probs * 0 + 1), {{"factor": out.log_probs * 0 + {factor}}}
        """)["my_loss"]
        row = live.actor.update(batch, loss).rows[0]
        assert (row["loss"], row["factor"]) == pytest.approx((factor, factor))
        seen.append(check_on_record(live.session, "my_loss", f"{factor} *"))
        assert list(live.session.history)[-1]["loss_function"] == seen[-1]
    assert seen[0] != seen[1]
    broken = cell("""
        def bad_loss(out, b):
            return out.log_probs * out.no_such_field  # here it breaks
        """)["bad_loss"]
    with refuses(hf.CallError, "here it breaks"):
        live.actor.update(batch, broken).wait()


def test_an_advantage(live, batch, cell):
    for shift in (1.0, 2.0):
        advantage = cell(f"""
        def advantage(table):
            old = table.ragged("old_log_probs")
            return {{"advantages": old.map(old.flat * 0 + {shift})}}
        """)["advantage"]
        found = batch.map(advantage, reads=["old_log_probs"], writes=["advantages"])
        assert set(np.asarray(found["advantages"].flat)) == {shift}
        check_on_record(live.session, "advantage", f"+ {shift}")
    broken = cell("""
        def bad_advantage(table):
            return {"advantages": table["nothing"]}  # not there
        """)["bad_advantage"]
    with refuses(hf.CallError, "# not there"):
        batch.map(broken, reads=["old_log_probs"], writes=["advantages"]).wait()


def test_a_metric(live, cell):
    def train(metric):
        options = {"metrics": [metric], "progress": False}
        return live.session.train(hf.PPO(max_new_tokens=4), live.prompts, steps=1, **options).rows[0]

    versions = set()
    for value in (1.0, 2.0):
        code = f"""
        def mine(batch):
            return {value} + 0 * batch["scores"].mean()
        """
        assert train(cell(code)["mine"])["mine"] == value
        version = list(live.session.history)[-1]["metrics"]
        assert f"return {value}" in live.session.history.sources[version]
        versions.add(version)
    assert len(versions) == 2
    before = live.session.history
    broken = cell("""
        def bad_metric(batch):
            return batch["scores"].mean() / undefined_name  # this one
        """)["bad_metric"]
    with refuses(NameError, "undefined_name") as caught:
        train(broken)
    assert any("this one" in str(entry) for entry in caught.traceback)
    assert [row for row in live.session.history if row["kind"] == "step"] == [row for row in before if row["kind"] == "step"]


def test_a_primitive(live, batch, cell):
    for factor in (2, 5):
        primitive = cell(f"""
        @hf.primitive(reads=["prompt", "response"], writes=["doubled"], protocol=hf.protocols.THREE_D)
        def doubled(model, rows):
            return {{"doubled": np.full(rows.num_rows, {factor}.0)}}
        """)["doubled"]
        assert set(live.actor.call(primitive, batch)["doubled"]) == {float(factor)}
        check_on_record(live.session, "doubled", f"{factor}.0")
    broken = cell("""
        @hf.primitive(reads=["prompt"], writes=["x"], protocol=hf.protocols.THREE_D)
        def failing(model, rows):
            return {"x": rows.missing_thing}  # nobody has this
        """)["failing"]
    with refuses(hf.CallError, "# nobody has this"):
        live.actor.call(broken, batch).wait()


def test_an_algorithm_with_an_edited_loss_is_the_next_step(live, cell):
    """A cell's own algorithm: the next ``train`` uses it, and the history says which."""
    code = """
    from dataclasses import dataclass
    from hfsdk.algorithms import ppo

    @dataclass(frozen=True)
    class Mine(hf.PPO):
        def step(self, models, prompts):
            return hf.PPO(max_new_tokens=4, kl_coef={kl}).step(models, prompts)
    """
    for kl in (0.1, 0.5):
        mine = cell(code.replace("{kl}", str(kl)))["Mine"]()
        row = live.session.train(mine, live.prompts, steps=1, progress=False).rows[0]
        assert np.isfinite(row["score_mean"])
        assert list(live.session.history)[-1]["algorithm"].startswith("Mine(")
    assert ppo.PPO is hf.PPO
