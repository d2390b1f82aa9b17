"""``train(keep_best=...)``: of all a run went through, the checkpoint with the best held-out score is kept, and found again."""

from __future__ import annotations

import linecache
import signal

import numpy as np
import pytest

import hfsdk as hf
from tests.session.fakes import actor, controller, session  # noqa
from tests.session.fakes import session_over
from tests.session.test_training import TEXTS, OneCall

HELD_OUT = [f"held out {i}" for i in range(4)]
AT_ZERO = 1.5
"""Mean score of four responses of the stand-in for the controller, without a bonus."""


class Learns(OneCall):
    """Each step leaves a policy that is as good as the next number says."""

    def __init__(self, controller, bonuses):
        super().__init__()
        self.controller, self.bonuses = controller, iter(bonuses)

    def step(self, models, prompts):
        step = super().step(models, prompts)
        models.actor.update(step.batch, lambda out, b: out.log_probs)
        step.batch["scores"]
        self.controller.bonus = next(self.bonuses)
        return step


def begun(session, reward):
    """Return (prompts, held-out prompts) of a session with its roles."""
    session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
    session.reward(reward)
    return session.prompts(TEXTS, batch_size=2), session.prompts(HELD_OUT, batch_size=4, shuffle=False)


@pytest.fixture
def streams(session, length_reward):
    return begun(session, length_reward)


def train(session, controller, streams, bonuses, folder, every=1, **options):
    prompts, held_out = streams
    keep = hf.KeepBest(held_out, every=every, num_prompts=4)
    return session.train(Learns(controller, bonuses), prompts, steps=len(bonuses), folder=folder, keep_best=keep, **options)


def test_the_best_of_a_run_is_kept(session, controller, streams, tmp_path, length_reward):
    run = train(session, controller, streams, [1.0, 3.0, 2.0], tmp_path)
    assert (run.best.step, run.best.score, run.best.start) == (1, AT_ZERO + 3.0, AT_ZERO)
    assert run.best.gain == 3.0
    assert run.best.folder == tmp_path / "best"
    assert run.history["held_out_score"].tolist() == [AT_ZERO + b for b in (1.0, 3.0, 2.0)]
    assert "best held-out score 4.500 after step 1" in repr(run)
    other = session_over(type(controller)(), session.cluster)
    begun(other, length_reward)
    other.load(run.best.folder)
    assert len(other.history) == 2, "the history ends with the best step"
    assert other.models.actor.version == 2
    other.close()


def test_a_run_that_only_gets_worse_keeps_its_start(session, controller, streams, tmp_path):
    run = train(session, controller, streams, [-0.1, -0.5], tmp_path)
    assert (run.best.step, run.best.score) == (-1, AT_ZERO)
    assert "before the first step" in repr(run.best)


def test_it_is_measured_every_so_many_steps_and_after_the_last(session, controller, streams, tmp_path):
    run = train(session, controller, streams, [float(i) for i in range(8)], tmp_path, every=3)
    measured = run.history.dropna(subset="held_out_score")["step"].tolist()
    assert measured == [2, 5, 7]


def test_measuring_changes_nothing_of_the_training(session, controller, streams, tmp_path):
    prompts, held_out = streams
    train(session, controller, streams, [1.0, 2.0], tmp_path)
    seeds = [s.arguments.seed for s in controller.messages if getattr(s, "method", None) == "update"]
    assert (prompts.position, held_out.position) == (2, 0)
    plain = type(controller)()
    other = session_over(plain, session.cluster)
    theirs, _ = begun(other, lambda completions: [0.0 for _ in completions])
    other.train(Learns(plain, [1.0, 2.0]), theirs, steps=2)
    assert seeds == [s.arguments.seed for s in plain.messages if getattr(s, "method", None) == "update"]
    other.close()


def test_a_later_run_of_the_session_goes_on_with_the_best(session, controller, streams, tmp_path):
    train(session, controller, streams, [1.0, 3.0], tmp_path)
    run = train(session, controller, streams, [2.0], tmp_path)
    assert (run.best.step, run.best.score, run.best.start) == (1, AT_ZERO + 3.0, AT_ZERO)
    assert train(session, controller, streams, [4.0], tmp_path).best.step == 3


@pytest.mark.parametrize(("then", "step", "score"), [([2.0], 1, 3.0), ([2.0, 5.0], 4, 5.0)])
def test_a_run_that_resumes_in_another_process_goes_on_with_the_best(
    session, controller, streams, tmp_path, length_reward, then, step, score
):
    train(session, controller, streams, [1.0, 3.0, 2.0], tmp_path, save_every=3)
    controller = type(controller)()
    other = session_over(controller, session.cluster)
    run = train(other, controller, begun(other, length_reward), then, tmp_path, resume=tmp_path)
    assert (run.best.step, run.best.score, run.best.start) == (step, AT_ZERO + score, AT_ZERO)
    other.close()


def test_a_checkpoint_from_before_the_best_does_not_hide_it(session, controller, streams, tmp_path, length_reward):
    train(session, controller, streams, [1.0, 0.5, 3.0], tmp_path, save_every=2)
    controller = type(controller)()
    other = session_over(controller, session.cluster)
    run = train(other, controller, begun(other, length_reward), [0.7], tmp_path, resume=tmp_path)
    assert (run.rows[0]["step"], run.best.step, run.best.score) == (2, 2, AT_ZERO + 3.0)
    other.close()


def test_a_new_run_in_the_same_folder_begins_anew(session, controller, streams, tmp_path, length_reward):
    train(session, controller, streams, [9.0], tmp_path)
    controller = type(controller)()
    other = session_over(controller, session.cluster)
    with pytest.warns(UserWarning, match=r"step 0: held-out score 10\.5 .* is of another run; it is replaced"):
        run = train(other, controller, begun(other, length_reward), [1.0], tmp_path)
    assert (run.best.step, run.best.score) == (0, AT_ZERO + 1.0)
    other.close()


@pytest.mark.filterwarnings("ignore:actor is replaced")
def test_another_actor_begins_anew(session, controller, streams, tmp_path):
    train(session, controller, streams, [9.0], tmp_path)
    controller.bonus = 0.0
    session.actor("tiny", optimizer=hf.AdamW(lr=1e-4), replace=True)
    with pytest.warns(UserWarning, match="is of another run"):
        run = train(session, controller, streams, [1.0], tmp_path)
    assert (run.best.score, run.best.start) == (AT_ZERO + 1.0, AT_ZERO)


def test_scores_of_other_prompts_are_not_compared(session, controller, streams, tmp_path):
    train(session, controller, streams, [9.0], tmp_path)
    controller.bonus = 0.0
    others = session.prompts([*HELD_OUT[:3], "another one"], batch_size=4, shuffle=False)
    with pytest.warns(UserWarning, match="measured on other prompts"):
        run = train(session, controller, (streams[0], others), [1.0], tmp_path)
    assert (run.best.score, run.best.start) == (AT_ZERO + 1.0, AT_ZERO)


def test_a_run_from_another_folder_does_not_take_the_best_here(session, controller, streams, tmp_path, length_reward):
    train(session, controller, streams, [9.0], tmp_path / "a")
    controller = type(controller)()
    other = session_over(controller, session.cluster)
    begun(other, length_reward)
    other.save(tmp_path / "b")
    with pytest.warns(UserWarning, match="is of another run"):
        run = train(other, controller, begun(other, length_reward), [1.0], tmp_path / "a", resume=tmp_path / "b")
    assert run.best.score == AT_ZERO + 1.0
    other.close()


def test_the_same_function_of_another_kernel_scores_the_same(session, controller, streams, tmp_path):
    train(session, controller, streams, [9.0], tmp_path)
    elsewhere = {"__name__": "__main__"}
    for kernel in ("one", "two"):  # the same cell, whose file has another name in every kernel
        source = "def scored(completions):\n    return [0.0 for _ in completions]\n"
        name = f"<kernel {kernel}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), elsewhere)
        with pytest.warns(UserWarning, match="goes on with scored"):
            session.reward(elsewhere["scored"])
        if kernel == "one":
            with pytest.warns(UserWarning, match="by another reward"):
                best = train(session, controller, streams, [5.0], tmp_path).best
    assert train(session, controller, streams, [1.0], tmp_path).best == best


def test_a_run_that_stops_itself_is_measured_at_its_end(session, controller, streams, tmp_path):
    run = train(session, controller, streams, [1.0, 3.0, 2.0], tmp_path, every=10, stop=lambda row: row["step"] == 1)
    assert [row.get("held_out_score") for row in run.rows] == [None, AT_ZERO + 3.0]
    assert [row.get("held_out_score") for row in session.history if row["kind"] == "step"] == [None, AT_ZERO + 3.0]
    assert (run.best.step, run.best.score) == (1, AT_ZERO + 3.0)


def test_it_needs_a_reward(session, tmp_path):
    session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
    prompts = session.prompts(TEXTS, batch_size=2)
    with pytest.raises(hf.PlacementError, match="reward"):
        session.train(OneCall(), prompts, steps=1, folder=tmp_path, keep_best=prompts)


def test_a_start_without_a_number_is_told(session, controller, streams, tmp_path):
    controller.bonus = float("nan")
    with pytest.raises(hf.CallError, match="held-out score before the first step is nan"):
        train(session, controller, streams, [1.0], tmp_path)


def test_an_interrupt_of_the_first_measurement_cancels_it(session, controller, streams, tmp_path, monkeypatch):
    controller.held.add("generate")
    send = controller.send

    def interrupted(message):
        if getattr(message, "method", None) in ("compute_scores", "reduce"):
            signal.raise_signal(signal.SIGINT)
        return send(message)

    monkeypatch.setattr(controller, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(session, controller, streams, [1.0], tmp_path)
    monkeypatch.setattr(controller, "send", send)
    generations = [call for call, submit in controller.submits.items() if submit.method == "generate"]
    assert [controller.states[call] for call in generations] == ["cancelled"]
    assert (session.run.rows, session.run.best, [stream.position for stream in streams]) == ([], None, [0, 0])
    controller.held.clear()
    assert train(session, controller, streams, [1.0], tmp_path).best.start == AT_ZERO


def test_what_cannot_be_saved_is_not_the_best(session, controller, streams, tmp_path):
    train(session, controller, streams, [1.0], tmp_path)
    controller.failing["save_state"] = hf.CallError("no", role="actor")
    with pytest.raises(hf.CallError):
        train(session, controller, streams, [2.0], tmp_path)
    assert session.run.best.score == AT_ZERO + 1.0
    assert session.run.rows[-1]["held_out_score"] == AT_ZERO + 2.0
    del controller.failing["save_state"]
    assert train(session, controller, streams, [1.5], tmp_path).best.score == AT_ZERO + 1.5


def test_a_stream_alone_is_enough(session, controller, streams, tmp_path):
    run = session.train(Learns(controller, [1.0]), streams[0], steps=1, folder=tmp_path, keep_best=streams[1])
    assert run.best.score == AT_ZERO + 1.0
    submitted = [s.arguments.sampling for s in controller.messages if getattr(s, "method", None) == "generate"]
    assert {s.temperature for s in submitted} == {1.0}


def test_the_algorithm_says_how_long_and_how_warm(session, controller, streams, tmp_path):
    class Short(Learns):
        max_new_tokens, temperature = 7, 0.5

    session.train(Short(controller, [1.0]), streams[0], steps=1, folder=tmp_path, keep_best=streams[1])
    submitted = [s.arguments.sampling for s in controller.messages if getattr(s, "method", None) == "generate"]
    assert {(s.max_new_tokens, s.temperature) for s in submitted} == {(4, 1.0), (7, 0.5)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"folder": None}, "keep_best needs a folder"),
        ({"keep_best": ["text"]}, "keep_best must be"),
        ({"keep_best": hf.KeepBest}, "keep_best must be"),
    ],
)
def test_bad_options(session, streams, tmp_path, options, words):
    prompts, held_out = streams
    with pytest.raises(hf.OptionError, match=words):
        session.train(OneCall(), prompts, steps=1, **{"folder": tmp_path, "keep_best": held_out, **options})


@pytest.mark.parametrize("wrong", [{"every": 0}, {"num_prompts": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}])
def test_options_out_of_range(streams, wrong):
    with pytest.raises(hf.OptionError, match=next(iter(wrong))):
        hf.KeepBest(streams[1], **wrong)


def test_a_simulated_session_has_no_scores(length_reward, tmp_path):
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.actor("llama-7b", dtype="bf16")
        session.reward(length_reward)
        prompts = session.prompts([[1] * 10] * 8, batch_size=8)
        with pytest.raises(hf.OptionError, match="a simulated session has none"):
            session.train(OneCall(), prompts, steps=1, folder=tmp_path, keep_best=prompts)


def test_scores_are_numbers_of_the_step(session, controller, streams, tmp_path):
    run = train(session, controller, streams, [np.float64(1.0)], tmp_path)
    assert type(run.rows[0]["held_out_score"]) is float
