import math
from dataclasses import replace

import numpy as np
import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import OptionError
from hfsdk.core.trace import Trace
from hfsdk.planner.perf.calibration import FITTED, HUBER, MOST_FITTED, Measured, fit, leverages, solve
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.session.parts import parts_of

HIDDEN = PerfModel(
    train_efficiency=0.31, forward_efficiency=0.5, weight_efficiency=0.4, launch_s=1e-4, step_s=4e-3, link_efficiency=0.2,
    dispatch_s=3e-2, task_s=9e-2,
)  # fmt: skip
"""A machine's constants that calibration does not know."""


def score(completions, **columns):
    return [0.0] * len(completions)


def step(perf, cluster="1x8 A100-80GB", placement="colocate", prompts=64, new_tokens=64, mini_batches=2, train="tp2"):
    """Return a step of a simulated session as if it had been measured."""
    with hf.Session.simulated(cluster, perf=perf, response_lengths="uniform") as session:
        more = {"train": train, "dtype": "bf16", "optimizer": hf.AdamW(distributed=True), "recompute": "full"}
        actor = session.actor("llama3-1b", rollout="tp1", **more)
        session.critic("llama3-1b", **more)
        session.reference(actor)
        session.reward(score)
        session.place(placement)
        stream = session.prompts([[1 + i % 50] * (600 + 3 * i) for i in range(prompts)], batch_size=prompts)
        hf.PPO(max_new_tokens=new_tokens, mini_batches=mini_batches).step(session.models, stream[0])
        parts_of(session).client.wait(parts_of(session).client.open_calls(), None)
        found = session.measured()
        return replace(found, trace=as_measured(found.trace)), session.predict(perf=PerfModel())


def as_measured(trace, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    factors = {}

    def real(span):
        key = span.call_id, span.name
        factor = factors.setdefault(key, float(np.exp(noise * rng.normal()))) if span.parent else 1.0
        return replace(span, predicted=False, duration_s=span.duration_s * factor)

    return Trace(tuple(map(real, trace)), trace.title)


@pytest.fixture(scope="module")
def hidden():
    return step(HIDDEN)[0]


def test_one_step_gives_the_constants_back(hidden):
    found = PerfModel.fit(hidden)
    assert found.error_after < 0.02 < 0.2 < found.error_before
    after = {c.name: c for c in found.constants}
    for name in ("train_efficiency", "forward_efficiency", "dispatch_s", "task_s"):
        assert after[name].determined, name
        assert after[name].after == pytest.approx(getattr(HIDDEN, name), rel=0.1), name
    assert sum(c.determined for c in found.constants) <= MOST_FITTED < len(found.constants)
    low, high = found.band()
    assert 0.9 < low <= 1 <= high < 1.1


def test_what_a_step_says_nothing_of_stays(hidden):
    found = PerfModel.fit(replace(hidden, trace=Trace(tuple(s for s in hidden.trace if s.method not in ("generate", "map")))))
    assert "train_efficiency" not in found.undetermined
    assert "step_s" in found.undetermined
    assert found.perf.step_s == PerfModel().step_s
    assert "says too little of it" in repr(found)


def test_a_fitted_model_predicts_another_layout_and_placement(hidden):
    found = PerfModel.fit(hidden).perf
    for where in ({"placement": "split", "train": "tp1"}, {"train": "tp4"}, {"prompts": 32, "new_tokens": 128}):
        _, guessed = step(PerfModel(), **where)
        real, _ = step(HIDDEN, **where)
        with_fit, _ = step(found, **where)
        wanted = real.trace.duration_s
        assert abs(with_fit.trace.duration_s / wanted - 1) < 0.1, where
        assert abs(with_fit.trace.duration_s / wanted - 1) < abs(guessed.duration_s / wanted - 1)


def test_noise_and_one_odd_measurement(hidden):
    noisy = replace(hidden, trace=as_measured(hidden.trace, noise=0.1))
    found = PerfModel.fit(noisy)
    assert found.error_after < 0.12
    odd = replace(noisy, trace=Trace(tuple(
        replace(s, duration_s=s.duration_s * 8) if (s.method, s.name) == ("compute_values", "forward") else s for s in noisy.trace
    )))  # fmt: skip
    hurt = PerfModel.fit(odd)
    assert hurt.perf.forward_efficiency == pytest.approx(found.perf.forward_efficiency, rel=0.4)
    low, high = found.band()
    assert low < 1 < high
    assert found.band("generate.decode")[0] < found.band("generate.decode")[1]
    assert found.band("never.seen") == found.band()


def test_no_constant_runs_away(hidden):
    tiny = replace(hidden, trace=Trace(tuple(
        replace(s, duration_s=s.duration_s * 1e-4) if s.device is not None else s for s in hidden.trace
    )))  # fmt: skip
    found = PerfModel.fit(tiny)
    for constant in found.constants:
        assert 0.009 < constant.after / constant.before < 101


def test_several_steps_are_fitted_together(hidden):
    other, _ = step(HIDDEN, prompts=16, new_tokens=16, train="tp4")
    found = PerfModel.fit([hidden, other])
    assert len(found.observations) > len(PerfModel.fit(hidden).observations)
    assert found.error_after < 0.02


def test_view_and_table(hidden):
    found = PerfModel.fit(hidden)
    frame = found.to_pandas()
    assert len(frame) == len(found.observations)
    assert {"generate.prefill", "generate.decode", "update.backward", "map.task"} <= {o.kind for o in found.observations}
    view = found.view()
    assert view["error_after"] == found.error_after
    assert {c["name"] for c in view["constants"]} == set(FITTED)
    assert HUBER > 0


def test_bad_input(hidden):
    predicted = replace(hidden, trace=Trace(tuple(replace(s, predicted=True) for s in hidden.trace)))
    with refuses(OptionError, "predicted"):
        PerfModel.fit(predicted)
    with refuses(OptionError, "calibrate"):
        PerfModel.fit(Measured(trace=Trace(()), cluster=ClusterSpec.parse("1x1 cpu"), questions={}, tasks={}))
    with refuses(OptionError, "['speed']"):
        fit(hidden, PerfModel(), ["speed"])
    with refuses(OptionError, 1, 8, "constants"):
        fit(hidden, PerfModel(), [*FITTED, "kv_efficiency"])
    with hf.Session.simulated("1x2 A100-80GB") as session:
        actor = session.actor("tiny")
        with refuses(OptionError, "predict"):
            session.predict()
        actor.generate(["hello"], max_new_tokens=4).wait()
        with refuses(OptionError, "predicted"):
            session.calibrate()
        with refuses(OptionError, "step 7"):
            session.predict(7)


def test_a_session_predicts_with_what_it_was_calibrated(hidden):
    with hf.Session.simulated("1x8 A100-80GB") as session:
        session.actor("llama3-1b", train="tp2", rollout="tp1", dtype="bf16").generate([[1] * 30] * 8, max_new_tokens=16).wait()
        before = session.predict()
        session.perf = PerfModel.fit(hidden).perf
        after = session.predict()
        assert after.duration_s > before.duration_s
        assert after.source == "predicted"
        assert "step 0, predicted" in repr(session.trace.compare(after))


def test_what_is_said_of_an_observation_that_was_left_out_is_what_a_fit_without_it_says():
    """To first order, of a model whose logarithms are straight: exactly, but for Huber's weights."""
    rng = np.random.default_rng(2)
    slopes, weights = rng.normal(size=(14, 3)), rng.uniform(0.5, 1.0, 14)
    measured = slopes @ [0.3, -0.2, 0.1] + 0.02 * rng.normal(size=14)

    def residuals(at):
        return slopes @ at - measured

    theta = solve(residuals, np.zeros(3), weights)
    own = leverages(residuals, theta, weights)
    assert own.sum() == pytest.approx(3, rel=0.02), "as many as there are constants"
    for i in range(14):
        others = np.arange(14) != i
        without = solve(lambda at, k=others: (slopes @ at - measured)[k], np.zeros(3), weights[others])
        assert residuals(theta)[i] / (1 - own[i]) == pytest.approx(residuals(without)[i], rel=1e-3, abs=1e-6)


def test_bands_are_of_phases_that_were_left_out(hidden):
    """With a constant for nearly every phase the fit follows the noise: what it leaves over says too little of the next step."""
    noisy = replace(hidden, trace=as_measured(hidden.trace, noise=0.15, seed=3))
    found = PerfModel.fit(noisy)
    told = [o for o in found.observations if o.left_out_s is not None]
    assert len(told) < len(found.observations), "whoever alone decides a constant tells nothing"
    over = {name: np.array([abs(math.log(getattr(o, name) / o.measured_s)) for o in told]) for name in ("after_s", "left_out_s")}
    assert (over["left_out_s"] >= over["after_s"] - 1e-12).all()
    assert over["left_out_s"].mean() > 1.1 * over["after_s"].mean()
    assert found.kept[""].num_rows == len(told)
    assert found.kept[""].held >= 0.6 * len(told)
    assert f"and so were {found.kept['']} that were left out in turn" in repr(found)
