"""The training loop: over the scripted runtime for what can go wrong, over the simulated one for a whole PPO step."""

from __future__ import annotations

import dataclasses
import inspect
import math
import signal
from dataclasses import dataclass

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.run.train_config import TrainConfig
from hfsdk.viz.drawn import picture_of
from tests.session.scripted import ScriptedRuntime, waits

TEXTS = [f"review number {i}" for i in range(10)]


@dataclass
class Step:
    batch: hf.Batch


SIMULATED = hf.GRPO(n=2, max_new_tokens=4, kl_coef=0.0)


class OneCall:
    """The smallest algorithm: generate and score."""

    def __init__(self):
        self.hook = lambda: None

    def step(self, models, prompts):
        self.hook()
        return Step(models.reward.compute_scores(models.actor.generate(prompts, max_new_tokens=4)))

    def metrics(self, step):
        return {"score_mean": float(step.batch["scores"].mean())}


@pytest.fixture
def ready(session, actor, length_reward):
    session.reward(length_reward)
    return session.prompts(TEXTS, batch_size=2)


def test_a_metric_does_not_take_another_numbers_place(session, ready):
    def score_mean(batch):
        return 5.0

    for metrics, name in (([score_mean], "score_mean"), ([lambda batch: 1.0, lambda batch: 2.0], "<lambda>")):
        with refuses(hf.OptionError, repr(name), "the algorithm or another metric"):
            session.train(OneCall(), ready, steps=1, metrics=metrics)


def test_a_resumed_run_tells_that_its_prompts_are_not_those_of_the_checkpoint(tmp_path):
    """One row more, another batch size; the same ones, made before or after, go on where they were."""

    def going_on(texts, size):
        with hf.Session.simulated("1x1 A100-80GB") as session:
            session.actor("tiny")
            session.reward(lambda completions: [0.0 for _ in completions])
            prompts = session.prompts(texts, batch_size=size)
            session.train(SIMULATED, prompts, steps=1, resume=tmp_path, progress=False)
            return prompts.position

    with hf.Session.simulated("1x1 A100-80GB") as session:
        session.actor("tiny")
        session.reward(lambda completions: [0.0 for _ in completions])
        session.train(SIMULATED, session.prompts(TEXTS, batch_size=2), steps=4, progress=False)
        session.save(tmp_path)
    assert going_on(TEXTS, 2) == 5
    for texts, size in (([*TEXTS, "one more"], 2), (TEXTS, 3)):
        with pytest.warns(UserWarning, match=r"was at batch 4 of other data.*gone through from batch 0"):
            assert going_on(texts, size) == 1


def test_a_simulated_session_evaluates_nothing_and_says_so():
    with hf.Session.simulated("1x1 A100-80GB") as session:
        session.actor("tiny")
        session.reward(lambda completions: [0.0 for _ in completions])
        with refuses(hf.SimulatedValueError, "session.evaluate", "scores"):
            session.evaluate(TEXTS, num_prompts=2, max_new_tokens=4)


def test_a_run_has_one_row_per_step(session, ready):
    run = session.train(OneCall(), ready, steps=3, metrics=[own, several])
    assert run.history["score_mean"].tolist() == [4.0] * 3
    assert run.history["own"].tolist() == [2.0] * 3
    assert run.history["a"].tolist() == [1.0] * 3
    assert run.history["step"].tolist() == [0, 1, 2]
    assert session.history["reward_function"].str.startswith("lengths@").all()
    assert ready.position == 3
    assert repr(run).startswith("Run(3 steps, finished, score 4.000, ")
    assert repr(run).endswith(" device-hours)")
    assert session.train(OneCall(), ready, steps=1).history["step"].tolist() == [3]


def test_a_step_that_is_cancelled_spends_no_seeds(session, runtime, ready):
    """Gone on with, the updates shuffle as they would have without the interruption."""

    class Trained(OneCall):
        def step(self, models, prompts):
            step = super().step(models, prompts)
            models.actor.update(step.batch, lambda out, b: out.log_probs).wait()
            self.hook()
            return step

    session.train(Trained(), ready, steps=2)
    algorithm = Trained()
    first = len(runtime.sent())
    calls = iter(range(10))

    def fail():
        if next(calls) == 1:  # after the update of the step
            raise KeyboardInterrupt

    algorithm.hook = fail
    with pytest.raises(KeyboardInterrupt):
        session.train(algorithm, ready, steps=1)
    session.train(Trained(), ready, steps=1)
    seeds = [work.orders[0].arguments.seed for work in runtime.sent()[first:] if work.call.method == "update"]
    assert len(seeds) == 2
    assert seeds[0] == seeds[1]


def own(batch):
    return len(batch)


def several(batch):
    return {"a": 1, "b": 2}


def test_early_stop(session, ready):
    run = session.train(OneCall(), ready, steps=9, stop=lambda row: row["step"] == 1)
    assert (len(run.rows), run.stopped, run.paused) == (2, True, False)


def test_the_first_interrupt_pauses_after_the_step(session, ready):
    algorithm = OneCall()
    algorithm.hook = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.warns(UserWarning, match="paused after step 0"):
        run = session.train(algorithm, ready, steps=5)
    assert run.paused
    assert len(run.rows) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_cancels_and_the_prompts_come_back(session, ready, runtime, keyboard):
    runtime.hold("generate")
    keyboard(lambda: waits() and runtime.sent("generate"))
    keyboard(lambda: waits() and session.run is not None and session.run.view()["asked"] == "pause")
    with pytest.raises(KeyboardInterrupt):
        session.train(OneCall(), ready, steps=5, metrics=[lambda batch: len(batch.wait())])
    (generate,) = runtime.sent()
    assert runtime.asked_to_stop == [generate.call.id]
    assert ready.position == 0
    assert session.run.rows == []
    runtime.let_go()
    assert len(session.train(OneCall(), ready, steps=1).rows) == 1


def test_a_failed_step_gives_back_what_its_algorithm_took_too(session, actor, ready, runtime):
    class Imitates(OneCall):
        def __init__(self, ptx):
            super().__init__()
            self.ptx = ptx

        def step(self, models, prompts):
            models.actor.update(next(self.ptx), hf.CrossEntropy())
            return super().step(models, prompts)

    algorithm = Imitates(session.demonstrations(TEXTS, batch_size=1))
    session.train(algorithm, ready, steps=1)
    runtime.failing["compute_scores"] = hf.RewardFunctionError("no", role="reward")
    with pytest.raises(hf.RewardFunctionError):
        session.train(algorithm, ready, steps=1)
    assert (ready.position, algorithm.ptx.position) == (1, 1)


class Mapped(OneCall):
    """Its scores pass through a function of one's own."""

    def step(self, models, prompts):
        step = super().step(models, prompts)
        return Step(step.batch.map(lambda table: {"scores": table["scores"]}, ["scores"], ["scores"]))


def test_what_failed_first_is_raised_and_not_what_waited_for_it(session, ready, runtime):
    for method in ("generate", "compute_scores"):
        runtime.failing = {method: hf.CallError("out of order today")}
        with refuses(hf.CallError, method, "out of order today") as caught:
            session.train(Mapped(), ready, steps=1)
        assert not isinstance(caught.value, hf.DependencyError)


def test_a_failed_step_gives_its_prompts_back(session, ready, runtime):
    session.train(OneCall(), ready, steps=1)
    runtime.failing["compute_scores"] = hf.RewardFunctionError("no", role="reward")
    with pytest.raises(hf.RewardFunctionError):
        session.train(OneCall(), ready, steps=2)
    assert ready.position == 1


def test_a_run_goes_on_in_another_session_from_what_it_saved(session, ready, tmp_path, length_reward):
    session.train(OneCall(), ready, steps=4, save_every=2, folder=tmp_path)
    assert (tmp_path / "state-2").is_dir()
    with hf.Session(runtime=ScriptedRuntime()) as other:
        other.actor("tiny")
        other.reward(length_reward)
        prompts = other.prompts(TEXTS, batch_size=2)
        run = other.train(OneCall(), prompts, steps=1, resume=tmp_path)
        assert run.history["step"].tolist() == [4]
        assert prompts.position == 5
        assert len(other.history) == 5


@each(
    "options, named",
    [
        ({"steps": 0}, ["steps", 0]), ({"save_every": 1}, ["folder"]), ({"save_every": -1, "folder": "x"}, ["save_every", -1]),
        ({"metrics": [3]}, ["metrics[0]=3"]), ({"prompts": [3]}, ["prompt 0", "int"]),
        ({"metrics": [lambda batch: "high"]}, ["a number"]),
    ],
)  # fmt: skip
def test_bad_options_are_named(session, ready, options, named):
    with refuses(hf.OptionError, *named):
        session.train(**{"algorithm": OneCall(), "prompts": ready, "steps": 1, **options})


class Falls(OneCall):
    """Its score falls from 0.6 to 0.2."""

    def metrics(self, step):
        number = int(self.numbers.pop(0))
        return {"score_mean": max(0.2, 0.6 - 0.05 * number), "score_std": 0.4, "actor_lr": 3e-4}

    def __init__(self):
        super().__init__()
        self.numbers = list(range(100))


def test_a_run_that_gets_worse_is_told_once_with_what_to_do(session, ready):
    with pytest.warns(UserWarning, match=r"step 11: the score fell from 0\.525 .* lower learning rate than 0\.0003") as told:
        run = session.train(Falls(), ready, steps=20)
    assert len(told) == 1
    assert len(run.warnings) == 1
    assert run.warnings == session.messages
    assert ", 1 warning, " in repr(run)
    assert run.warnings[0] in hf.viz.picture(run).to_text()
    with pytest.warns(UserWarning, match="the score fell"):
        assert len(session.train(Falls(), ready, steps=20).warnings) == 1, "another run is told again"


def test_the_bar_is_off_unless_someone_looks(session, ready, capsys):
    session.train(OneCall(), ready, steps=1)
    assert capsys.readouterr().out == ""
    session.train(OneCall(), ready, steps=1, progress=True)
    assert "1/1" in capsys.readouterr().out


def test_evaluate_measures_so_many_prompts_and_moves_no_stream(session, ready, actor):
    session.reference(actor)
    frame = session.evaluate(ready, num_prompts=4, max_new_tokens=7)
    assert frame.loc[0, "score_mean"] == 7.0
    assert frame.loc[0, "kl_mean"] == 0.0
    assert frame.loc[0, "num_prompts"] == 4
    assert len(frame.attrs["samples"]) == 3
    assert ready.position == 0
    assert session.evaluate(["one", "two"], num_samples=0).loc[0, "num_prompts"] == 2
    with refuses(hf.OptionError, "num_prompts", 0):
        session.evaluate(ready, num_prompts=0)


def test_evaluate_tells_pass_at_k_and_its_error_is_that_of_prompts(session, actor):
    """Of four responses to the first prompt one passes, of the second two, of the third none."""
    passed = [1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    session.reward(lambda completions: [float(p) for p in passed[: len(completions)]])
    ready = session.prompts(TEXTS, batch_size=2)
    row = session.evaluate(ready, num_prompts=3, n=4, pass_at=(1, 2, 4)).loc[0]
    found = [row["num_prompts"], row["pass_at_1"], row["pass_at_2"], row["pass_at_4"], row["score_mean"]]
    assert found == pytest.approx([3, 1 / 4, (1 / 2 + 5 / 6 + 0) / 3, 2 / 3, 1 / 4])
    assert row["score_stderr"] == pytest.approx(np.std([1 / 4, 1 / 2, 0]) / math.sqrt(3))
    with refuses(hf.OptionError, "pass_at", "n=4"):
        session.evaluate(ready, n=4, pass_at=(5,))


def test_pass_at_k_is_a_metric_of_the_loop(session, ready):
    class Several(OneCall):
        def step(self, models, prompts):
            return Step(models.reward.compute_scores(models.actor.generate(prompts, max_new_tokens=4, n=2)))

    run = session.train(Several(), ready, steps=1, metrics=[hf.PassAtK(k=(1, 2), pass_score=4.0)])
    assert run.history[["pass_at_1", "pass_at_2"]].loc[0].tolist() == [1.0, 1.0]
    with refuses(hf.OptionError, "pass@3", "n=3", 2):
        session.train(Several(), ready, steps=1, metrics=[hf.PassAtK(k=(3,))])


# -- simulated


@pytest.fixture
def simulated():
    with hf.Session.simulated("2x8 A100-80GB", price_per_device_hour=2.0) as session:
        yield session


def declare(session, reward):
    actor = session.actor("llama-7b", train="tp8", rollout="tp2", dtype="bf16")
    critic = session.critic("llama-7b", train="tp8", dtype="bf16")
    return actor, critic, session.reference(actor, layout="tp8"), session.reward(reward)


def test_a_whole_ppo_step_on_a_virtual_clock(simulated, length_reward):
    actor, critic, ref, reward = declare(simulated, length_reward)
    simulated.place("colocate")
    prompts = simulated.prompts([[1] * 100] * 64, batch_size=64)
    batch = actor.generate(prompts[0], max_new_tokens=200)
    batch = actor.compute_log_probs(batch)
    batch = ref.compute_log_probs(batch)
    batch = critic.compute_values(batch)
    batch = reward.compute_scores(batch)
    batch = ppo.advantages(batch, gamma=1.0, lam=0.95, kl_coef=0.05)
    value = critic.update(batch, ppo.ValueLoss(clip=0.2), mini_batches=2)
    policy = actor.update(batch, ppo.PolicyLoss(clip=0.2), mini_batches=2)
    value.wait(), policy.wait()
    assert simulated.trace.duration_s > 0.1
    methods = [f"{call.role}.{call.method}" for call in simulated.dataflow]
    assert methods[0] == "actor.generate"
    assert methods[-1] == "actor.update"
    assert {span.device for span in simulated.trace if span.device is not None} == set(range(16))
    with pytest.raises(hf.SimulatedValueError):
        batch["scores"]
    assert [c["mean_length"] for c in batch.column_states() if c["name"] == "response"] == [200.0]


def test_training_on_a_virtual_clock(simulated, length_reward):
    declare(simulated, length_reward)
    prompts = simulated.prompts(["some text of a prompt"] * 8, batch_size=8)
    run = simulated.train(hf.PPO(), prompts, steps=2)
    first, second = run.history["seconds"]
    assert 0 < first < 60
    assert second == pytest.approx(first, rel=0.5)
    assert simulated.trace.step == 1
    assert len(simulated.trace[0]) >= len(simulated.trace[1]) > 8


def test_a_simulated_session_knows_presets_devices_and_their_memory(simulated):
    with refuses(hf.ModelNotFoundError, "'nothing'", "presets"):
        simulated.actor("nothing")
    with refuses(hf.LayoutError, "32 devices", 16):
        simulated.actor("llama-70b", train="tp8 pp4")
    assert simulated.actor(hf.ModelSpec.preset("llama-13b")).spec.name == "llama-13b"
    with refuses(hf.DeviceMemoryError, "80.00"):
        simulated.place()


def test_a_list_trains_as_a_stream_does_and_goes_on_where_it_was(session, actor, length_reward):
    session.reward(length_reward)
    texts = [f"review {i}" for i in range(40)]
    alike, seen = session.prompts(texts, batch_size=32), []
    for _ in range(2):
        run = session.train(OneCall(), texts, steps=1, progress=False)
        seen.append(run.last.batch.text("prompt"))
    assert seen == [alike[0].text("prompt"), alike[1].text("prompt")]


def train_ppo(session, prompts, steps, **options):
    return session.train(hf.PPO(max_new_tokens=4), prompts, steps=steps, progress=False, **options)


def ppo_session():
    session = hf.Session.simulated("1x2 A100-80GB")
    actor = session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
    session.critic("tiny", optimizer=hf.AdamW(lr=1e-5))
    session.reference(actor)
    session.reward(lambda prompts, completions: [0.0] * len(prompts))
    return session


def step_numbers(session, run):
    """Of every step of a run its number in the history, in the dashboard, and in the trace that has its calls."""
    view = picture_of(run).view["steps"]
    for shown in view:
        assert [c["call"] for c in shown["calls"]] == [
            f"{s.role}.{s.method}".lstrip(".") for s in session.trace[shown["step"]].calls
        ]
    return run.history["step"].tolist(), [s["step"] for s in view], [s["trace_step"] for s in view]


def test_a_step_has_one_number_in_history_dashboard_and_trace_also_after_steps_by_hand(tmp_path):
    with ppo_session() as session:
        prompts = session.prompts(TEXTS, batch_size=2)
        hf.PPO(max_new_tokens=4).step(session.models, next(prompts))
        run = train_ppo(session, prompts, 3)
        assert step_numbers(session, run) == ([1, 2, 3], [1, 2, 3], [1, 2, 3])
        session.save(tmp_path)
    with ppo_session() as other:
        run = train_ppo(other, other.prompts(TEXTS, batch_size=2), 2, resume=tmp_path)
        assert step_numbers(other, run) == ([4, 5], [4, 5], [4, 5])


def test_a_branch_goes_on_from_its_snapshots_step_and_the_dashboard_names_the_trace():
    with ppo_session() as session:
        prompts = session.prompts(TEXTS, batch_size=2)
        before = session.snapshot("before")
        train_ppo(session, prompts, 2)
        session.rewind(before)
        view = picture_of(train_ppo(session, prompts, 2)).view["steps"]
    assert [(s["step"], s["trace_step"]) for s in view] == [(0, 2), (1, 3)]


def test_the_options_of_train_are_those_of_its_configuration():
    """They stand in two places, the signature that a user reads and what travels to the loop: with the same names and defaults."""
    signature = inspect.signature(hf.Session.train).parameters
    options = {name: p.default for name, p in signature.items() if name not in ("self", "progress")}
    fields = {
        f.name: inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(TrainConfig)
    }
    assert list(fields) == list(options)
    assert fields == options


def test_every_option_of_train_reaches_its_configuration(session, ready, monkeypatch):
    seen = []
    monkeypatch.setattr("hfsdk.session.session.train", lambda parts, config, progress: seen.append(config))
    given = {
        "steps": 3, "metrics": [len], "stop": all, "save_every": 2, "folder": "a", "keep": 4, "resume": "b", "track": "wandb",
        "keep_best": ready, "on_death": "restore", "max_restores": 5, "shrink": True, "check": None, "look_back": 6, "wait": False,
    }  # fmt: skip
    session.train(OneCall(), ready, **given)
    assert {name: getattr(seen[0], name) for name in given} == given
    assert seen[0].prompts is ready
    assert set(given) | {"algorithm", "prompts"} == {field.name for field in dataclasses.fields(TrainConfig)}
