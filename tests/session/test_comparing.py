"""``compare`` that ends early: it gives back what is finished, goes on with the rest, and says how long that takes."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core.errors import WorkerDiedError
from hfsdk.core.experiment import Experiment
from hfsdk.run.compare import Forecast, spoken
from hfsdk.run.run import MEASURED
from hfsdk.session.parts import parts_of


@dataclass(frozen=True, kw_only=True)
class Interrupted(hf.PPO):
    """Sends interrupts in the steps of the session that are listed."""

    at: ClassVar[dict[int, int]] = {}
    """Step of all that were taken -> interrupts."""
    taken: ClassVar[list[int]] = []

    def step(self, models, prompts):
        self.taken.append(1)
        for _ in range(self.at.get(len(self.taken), 0)):
            signal.raise_signal(signal.SIGINT)
        return super().step(models, prompts)


@pytest.fixture
def session():
    Interrupted.at.clear(), Interrupted.taken.clear()
    with hf.Session.simulated("1x2 A100-80GB") as made:
        actor = made.actor("tiny")
        made.critic("tiny"), made.reference(actor), made.reward(lambda completions: [0.0] * len(completions))
        yield made


@pytest.fixture
def prompts(session):
    return session.prompts([f"prompt {i}" for i in range(8)], batch_size=2)


SHORT, LONG = Interrupted(max_new_tokens=4), Interrupted(max_new_tokens=8)


def compare(session, prompts, *algorithms, **options):
    return session.compare(algorithms or (SHORT, LONG), prompts, **{"steps": 3, "seeds": [0, 1], **options})


def numbers(experiment):
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in experiment.rows]


def test_a_snapshot_that_is_not_there_changes_nothing(session, prompts):
    before = session.view()
    with refuses(hf.OptionError, "'before'"):
        compare(session, prompts, snapshot="before")
    assert session.view() == before
    assert session.snapshots == {}
    assert session.train(hf.PPO(max_new_tokens=4), prompts, steps=1, progress=False).rows[0]["step"] == 0


@pytest.mark.parametrize("step", [7, 8, 9], ids=["first of a run", "middle of a run", "last of a run"])
def test_an_interrupt_returns_the_finished_runs_and_resume_runs_the_others(session, prompts, step):
    whole = compare(session, prompts)
    assert not whole.partial
    Interrupted.taken.clear()
    Interrupted.at[step] = 1
    done = 3 if step == 9 else 2
    with pytest.warns(
        UserWarning, match=rf"{done} of 4 runs are finished, and the session is where it was.*resume=True keeps them"
    ):
        part = compare(session, prompts)
    assert (session.branch, session.snapshots, prompts.position) == ("main", {}, 0)
    assert len(Interrupted.taken) == step, "the running step ended, and no other began"
    order = [(name, seed) for name in whole.algorithms for seed in (0, 1)]
    assert part.partial
    assert part.unfinished == tuple(order[done:])
    assert numbers(part) == numbers(whole)[: 3 * done]
    assert list(part.branches) == order[:done]
    Interrupted.taken.clear()
    again = compare(session, prompts, resume=True)
    assert len(Interrupted.taken) == 3 * (4 - done), "finished runs are not run again"
    assert not again.partial
    assert numbers(again) == numbers(whole)
    assert len(set(again.branches.values())) == 4


def test_a_second_interrupt_ends_it_at_once(session, prompts):
    Interrupted.at[4] = 2
    with pytest.warns(UserWarning, match=r"compare ended at .*seed 1: 1 of 4 runs"):
        part = compare(session, prompts)
    assert len(part.rows) == 3
    assert session.train(hf.PPO(max_new_tokens=4), prompts, steps=1).state == "finished"


def test_an_interrupt_before_anything_is_finished_raises(session, prompts):
    Interrupted.at[2] = 1
    with pytest.raises(KeyboardInterrupt, match=r"0 of 4 runs are finished, and the session is where it was"):
        compare(session, prompts)
    assert (session.branch, session.run) == ("main", None)


def test_a_failed_run_keeps_the_finished_ones_for_resume(session, prompts):
    @dataclass(frozen=True, kw_only=True)
    class Broken(Interrupted):
        whole: bool = False

        def step(self, models, prompts):
            if not self.whole:
                raise RuntimeError("halfway")
            return super().step(models, prompts)

    with pytest.raises(RuntimeError, match="halfway") as caught:
        compare(session, prompts, SHORT, Broken())
    assert "2 of 4 runs are finished" in caught.value.__notes__[0]
    assert "resume=True" in caught.value.__notes__[0]
    Interrupted.taken.clear()
    mended = compare(session, prompts, SHORT, Broken(whole=True), resume=True)
    assert len(Interrupted.taken) == 6
    assert len(mended.rows) == 12


def test_resume_keeps_runs_of_equal_options_and_steps_under_any_name(session, prompts):
    compare(session, prompts)
    Interrupted.taken.clear()
    given = {"same": replace(SHORT), "other": replace(SHORT, clip=0.3)}
    more = session.compare(given, prompts, steps=3, seeds=[1, 2], resume=True)
    assert len(Interrupted.taken) == 3 * 3, "of the first algorithm seed 1 was there"
    assert {row["algorithm"] for row in more.rows} == {"same", "other"}
    Interrupted.taken.clear()
    session.compare(given, prompts, steps=2, seeds=[1], resume=True)
    assert len(Interrupted.taken) == 4, "a run of other steps is another one"


def test_a_class_that_was_defined_anew_is_run_again(session, prompts):
    def defined():
        @dataclass(frozen=True, kw_only=True)
        class Mine(Interrupted):
            pass

        return Mine()

    compare(session, prompts, defined())
    Interrupted.taken.clear()
    compare(session, prompts, defined(), resume=True)
    assert len(Interrupted.taken) == 6


@pytest.mark.parametrize("change", ["trained", "by hand", "reward"])
def test_resume_from_another_point_keeps_nothing_and_says_so(session, prompts, change):
    compare(session, prompts, SHORT)
    Interrupted.taken.clear()
    if change == "trained":
        session.train(hf.PPO(max_new_tokens=4), prompts, steps=1)
        prompts.position = 0
    elif change == "by hand":
        batch = session.models.actor.generate(prompts[0], max_new_tokens=4)
        session.models.actor.update(batch, lambda out, b: out.log_probs).wait()
    else:
        with pytest.warns(UserWarning, match="goes on with"):
            session.reward(lambda completions: [1.0] * len(completions))
    with pytest.warns(UserWarning, match="resume=True finds no runs to keep"):
        compare(session, prompts, SHORT, resume=True)
    assert len(Interrupted.taken) == 6


def test_prompts_made_again_are_the_same_prompts(session, prompts):
    compare(session, prompts, SHORT)
    Interrupted.taken.clear()
    same = session.prompts([f"prompt {i}" for i in range(8)], batch_size=2)
    assert len(compare(session, same, SHORT, resume=True).rows) == 6
    assert Interrupted.taken == []


def test_prompts_that_differ_in_one_row_or_another_column_are_others(session, prompts):
    texts = [f"prompt {i}" for i in range(8)]
    compare(session, prompts, SHORT)
    for other in ([*texts[:2], "changed", *texts[3:]], {"prompt": texts, "answer": list(range(8))}):
        Interrupted.taken.clear()
        with pytest.warns(UserWarning, match="resume=True finds no runs to keep"):
            compare(session, session.prompts(other, batch_size=2), SHORT, resume=True)
        assert len(Interrupted.taken) == 6


@pytest.mark.parametrize("changed", [np.array([0.5, 2.0]), {"deep": 2}], ids=["array", "mutable"])
def test_options_that_an_algorithm_does_not_show_count(session, prompts, changed):
    class Quiet(Interrupted):
        def __repr__(self):
            return "Quiet()"

    algorithm = Quiet(max_new_tokens=4)
    held = {"deep": 1}
    object.__setattr__(algorithm, "held", np.array([0.5, 1.0]) if isinstance(changed, np.ndarray) else held)
    compare(session, prompts, algorithm)
    Interrupted.taken.clear()
    compare(session, prompts, algorithm, resume=True)
    assert Interrupted.taken == [], "nothing was changed"
    object.__setattr__(algorithm, "held", changed)
    held["deep"] = 2
    compare(session, prompts, algorithm, resume=True)
    assert len(Interrupted.taken) == 6


def test_a_partial_experiment_is_no_baseline_and_passes_none(tmp_path):
    numbers = {"score": 1.0, "kl": 0.0, "length": 1.0, "seconds": 1.0, "tokens": 1}
    rows = tuple({"algorithm": "PPO", "seed": 0, "step": i, **numbers} for i in range(4))
    whole = Experiment(rows, {"PPO": "PPO()"}, (0,), 4)
    then = {"algorithms": {"PPO": {"final_scores": {"0": 1.0}}}}
    assert replace(whole, baseline=then).ok
    part = Experiment(rows, {"PPO": "PPO()", "GRPO": "GRPO()"}, (0,), 4, baseline=then, unfinished=(("GRPO", 0),))
    assert not part.ok
    few = Experiment(rows, {"PPO": "PPO()"}, (0, 1), 4, unfinished=(("PPO", 1),))
    assert "PPO: final score 1.0000 ± 0.0000 over 1 of 2 seeds" in hf.viz.picture(few).to_text()
    with refuses(hf.OptionError, "1 of 2 runs", "session.compare(..., resume=True)"):
        part.save_baseline(tmp_path / "b.json")
    assert "1 of 2 runs are finished; session.compare(..., resume=True) runs the others: GRPO seed 0" in repr(part)
    picture = hf.viz.picture(part)
    assert "1 of 2 runs are finished" in picture.to_svg()
    assert "GRPO: no scores (no run is finished)" in picture.to_text()
    assert part.to_pandas()["algorithm"].tolist() == ["PPO"] * 4


def test_a_score_below_what_the_baseline_allows_fails():
    def judged(score):
        numbers = {"score": score, "kl": 0.0, "length": 1.0, "seconds": 1.0, "tokens": 1}
        rows = tuple({"algorithm": "PPO", "seed": seed, "step": i, **numbers} for seed in range(2) for i in range(4))
        then = {"algorithms": {"PPO": {"final_scores": {"0": 1.0, "1": 1.0}}}}
        (verdict,) = (experiment := Experiment(rows, {"PPO": "PPO()"}, (0, 1), 4, baseline=then)).verdict
        assert experiment.ok is (verdict.verdict == "pass")
        return verdict

    least = judged(1.0).least
    assert least <= 1.0
    assert [judged(score).verdict for score in (1.5, least, least - 1e-3)] == ["pass", "pass", "fail"]


def test_the_forecast_takes_each_algorithm_s_own_pace():
    forecast = Forecast([("PPO", 0), ("PPO", 1), ("GRPO", 0)], steps=2)
    assert forecast.seconds is None
    forecast.note("PPO", 4.0)
    assert forecast.seconds == 5 * 4.0, "what is not known counts as what is"
    for _ in range(3):
        forecast.note("PPO", 2.0)
    assert forecast.seconds == 2 * 2.5
    forecast.note("GRPO", 10.0)
    assert forecast.seconds == 10.0
    forecast.note("GRPO", 10.0)
    assert forecast.seconds == 0


@each("seconds, words", [(0.2, "1 s"), (89, "89 s"), (150, "2 min"), (5300, "88 min"), (11000, "3 h 3 min")])
def test_times_are_spoken(seconds, words):
    assert spoken(seconds) == words


def test_the_bar_says_which_run_it_is_and_how_long_the_rest_takes(session, prompts, capsys):
    compare(session, prompts, SHORT, progress=True)
    lines = capsys.readouterr().out
    assert "seed 1 (run 2 of 2): 100%" in lines
    assert "about 1 s left" in lines
    assert "done]" in lines


def test_whoever_dies_in_a_compared_run_no_role_is_left_in_it(session, prompts, monkeypatch, tmp_path):
    """The actor's worker dies, with the copy of where the actor was: it has its checkpoint, the critic is where it was."""
    session.train(SHORT, prompts, steps=1, progress=False)
    session.save(tmp_path)
    session.train(SHORT, prompts, steps=1, progress=False)
    before = session.models.actor.version, session.models.critic.version
    runtime = parts_of(session).client._controller._runtime
    call, updates = runtime.call, []

    def dying(work):
        updates.append(work) if work.call.method == "update" and work.call.role == "actor" else None
        if len(updates) == 2 and updates[-1] is work:
            for kept in session.snapshots["compare"].kept:
                if kept.role == "actor":
                    runtime._num_updates_of.pop(kept.number)
            raise WorkerDiedError("the worker of device 0 ended.")
        return call(work)

    monkeypatch.setattr(runtime, "call", dying)
    with pytest.warns(UserWarning, match="actor comes back with checkpoint"), refuses(WorkerDiedError, "device 0 ended"):
        compare(session, prompts)
    assert (session.models.actor.version, session.models.critic.version) == (before[0] // 2, before[1])
    assert session.history.branch == "main"
