"""``train(on_death="restore")`` over the scripted runtime: what is taken again, what is said, and when it ends."""

from __future__ import annotations

import threading

import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.run.recovery import is_death
from hfsdk.state.saves import Saves
from hfsdk.viz.drawn import picture_of
from tests.session.scripted import learn
from tests.session.test_training import TEXTS, OneCall

DIED = hf.WorkerDiedError("the worker of device 1 was killed", role="actor", method="generate", rank=1)


class Dies(OneCall):
    """An algorithm in whose steps of these numbers, counted over all attempts, an error is raised."""

    def __init__(self, attempts, error=DIED):
        super().__init__()
        self.attempts, self.error, self.seen, self.hook, self.num = attempts, error, [], self.maybe, -1

    def step(self, models, prompts):
        self.seen.append([[*tokens] for tokens in prompts["prompt"]])
        return super().step(models, prompts)

    def maybe(self):
        self.num += 1
        if self.num in self.attempts:
            raise self.error


@pytest.fixture
def prompts(session, length_reward):
    session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
    session.reward(length_reward)
    return session.prompts(TEXTS, batch_size=2)


def train(session, algorithm, prompts, folder, steps=6, **options):
    options = {"save_every": 2, "on_death": "restore"} | options
    return session.train(algorithm, prompts, steps=steps, folder=folder, **options)


def test_the_steps_since_the_save_are_taken_again(session, prompts, tmp_path):
    undisturbed = Dies(())
    train(session, undisturbed, prompts, tmp_path / "a")
    prompts.position = 0
    dies = Dies({3})
    with pytest.warns(
        UserWarning, match=r"a worker died in step 9, and the run goes on from its save after step 7, .* s later: .*killed"
    ):
        run = train(session, dies, prompts, tmp_path / "b")
    assert [row["step"] for row in run.rows] == [6, 7, 8, 9, 10, 11], "each once, in order"
    assert dies.seen[:3] == undisturbed.seen[:3]
    assert dies.seen[4:] == undisturbed.seen[2:], "steps 8 and 9 are taken again, of the same prompts"
    (restored,) = run.restores
    assert (restored.step, restored.back_to) == (9, 7)
    assert run.state == "finished"
    assert "went on after 1 death" in repr(run)
    assert session.history["step"].tolist() == [*range(12)]
    assert any("a worker died in step 9" in line for line in picture_of(run).to_text().splitlines())
    assert picture_of(run).view["restores"] == [str(restored)]


def test_a_death_before_the_first_save_begins_anew(session, prompts, tmp_path):
    dies = Dies({1})
    with pytest.warns(UserWarning, match="goes on from its save after step -1"):
        run = train(session, dies, prompts, tmp_path, save_every=5)
    assert dies.seen[0] == dies.seen[2]
    assert len(run.rows) == 6


def test_one_death_more_than_allowed_ends_the_run_with_its_error(session, prompts, tmp_path):
    with pytest.warns(UserWarning, match="goes on|went on"), refuses(hf.WorkerDiedError, "device 1 was killed"):
        train(session, Dies({1, 3, 5}), prompts, tmp_path, max_restores=2)
    assert session.run.state == "failed"
    assert len(session.run.restores) == 2
    assert session.messages[-1] == "the run went on after 2 deaths of workers, and may after no more (max_restores)"


def test_what_is_no_death_is_raised_as_ever(session, prompts, tmp_path):
    with pytest.raises(hf.NonFiniteLossError):
        train(session, Dies({1}, hf.NonFiniteLossError("a NaN")), prompts, tmp_path)
    with pytest.raises(hf.WorkerDiedError):
        train(session, Dies({1}), prompts, tmp_path, on_death="raise")
    assert session.run.restores == []


def test_a_failure_that_nobody_saw_is_not_raised_after_the_death(session, prompts, tmp_path, runtime):
    """A call of the critic that the user makes beside the run fails in the step in which the actor's worker dies."""

    class Beside(Dies):
        def maybe(self):
            runtime.failing.clear()
            if self.num + 1 in self.attempts:
                runtime.failing["step"] = hf.CallError("seen by nobody")
                user = threading.Thread(target=critic.step)
                user.start()
                user.join(60)
            super().maybe()

    critic = session.critic("tiny", optimizer=hf.AdamW(lr=1e-5))
    with pytest.warns(UserWarning, match="goes on"):
        run = train(session, Beside({1}), prompts, tmp_path)
    assert len(run.restores) == 1


def test_a_worker_that_dies_in_a_call_is_replaced_and_the_run_goes_on(session, prompts, tmp_path, runtime):
    class Killed(OneCall):
        def step(self, models, prompts):
            if session.run.restores:  # it died once: whether the step's own update comes to run after that is a matter of threads
                runtime.failing = {}
            step = super().step(models, prompts)
            learn(models.actor, 1)
            runtime.failing = {"generate": DIED} if len(runtime.sent("step")) == 3 and not session.run.restores else {}
            return step

    with pytest.warns(UserWarning, match=r"a worker died in step 3, and the run goes on from its save after step 1"):
        run = train(session, Killed(), prompts, tmp_path)
    assert [row["step"] for row in run.rows] == [*range(6)]
    assert session.models.actor.version == 6, "what was learned since the save is learned again"


def test_trackers_have_each_step_once(session, prompts, tmp_path):
    class Remembers:
        def __init__(self):
            self.steps = []

        def start(self, title, config):
            return self

        def step(self, step, values, samples):
            self.steps.append(step)

        def end(self, state):
            pass

    kept = Remembers()
    with pytest.warns(UserWarning, match="goes on"):
        train(session, Dies({3}), prompts, tmp_path, save_every=2, track=kept)
    assert kept.steps == [0, 1, 2, 3, 4, 5], "step 2 was taken twice"


@each(
    "options, named",
    [
        ({"on_death": "restart"}, ["'restart'", '"raise" or "restore"']), ({"on_death": "restore", "save_every": 0}, ["folder"]),
        ({"max_restores": 0}, ["max_restores"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_runs(session, prompts, tmp_path, runtime, options, named):
    with refuses(hf.OptionError, *named):
        train(session, Dies(()), prompts, tmp_path, **options)
    assert not runtime.sent()


def test_a_column_that_died_tells_of_a_death_too():
    lost, other = hf.LostColumnError("scores died with the worker"), hf.CheckpointError("the disk is full")
    by_way_of = hf.CheckpointError("a worker ended while it wrote the actor's state")
    by_way_of.__cause__ = DIED
    assert [is_death(error) for error in (DIED, lost, by_way_of, other)] == [True, True, True, False]


def test_a_death_right_after_a_save_is_complete_goes_on_from_that_one(session, prompts, tmp_path, monkeypatch):
    save, count = Saves.save, iter(range(9))

    def dies(saves, folder, **options):
        save(saves, folder, **options)
        if next(count) == 2:  # that after step 3
            raise DIED

    monkeypatch.setattr(Saves, "save", dies)
    with pytest.warns(UserWarning, match="a worker died in step 4, and the run goes on from its save after step 3"):
        run = train(session, Dies(()), prompts, tmp_path)
    assert [row["step"] for row in run.rows] == [*range(6)]
