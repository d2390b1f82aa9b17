"""``train(keep_best=...)``: of all a run went through, the checkpoint with the best held-out score is kept, and found again."""

from __future__ import annotations

import linecache

import pytest
from expect import each, refuses

import hfsdk as hf
from tests.session.scripted import ScriptedRuntime, waits
from tests.session.test_training import TEXTS, OneCall

HELD_OUT = [f"held out {i}" for i in range(4)]
START = ord("h")
"""With this letter a policy answers that has learned nothing yet."""


def place(completions):
    """Score a response by the place of its letter: 0 before the first step."""
    return [float(ord(text[0]) - ord("h")) for text in completions]


class Learns(OneCall):
    """Each step leaves a policy that answers with the next one of these letters, given by their places."""

    def __init__(self, runtime, places):
        super().__init__()
        self.runtime, self.places = runtime, iter(places)

    def step(self, models, prompts):
        step = super().step(models, prompts)
        models.actor.update(step.batch, lambda out, b: out.log_probs).wait()
        step.batch["scores"]
        self.runtime.columns["response"] = START + next(self.places)
        return step


def begun(session, reward=place):
    """Return (prompts, held-out prompts) of a session with its roles."""
    session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
    session.reward(reward)
    return session.prompts(TEXTS, batch_size=2), session.prompts(HELD_OUT, batch_size=4, shuffle=False)


@pytest.fixture
def streams(session):
    return begun(session)


@pytest.fixture
def elsewhere():
    """The runtime of a session in another process."""
    return ScriptedRuntime()


@pytest.fixture
def other(elsewhere):
    with hf.Session(runtime=elsewhere) as other:
        yield other


def train(session, runtime, streams, places, folder, every=1, **options):
    prompts, held_out = streams
    keep = hf.KeepBest(held_out, every=every, num_prompts=4)
    return session.train(Learns(runtime, places), prompts, steps=len(places), folder=folder, keep_best=keep, **options)


def test_the_best_of_a_run_is_kept(session, runtime, streams, tmp_path, other):
    run = train(session, runtime, streams, [1, 3, 2], tmp_path)
    assert (run.best.step, run.best.score, run.best.start) == (1, 3.0, 0.0)
    assert run.best.gain == 3.0
    assert run.best.folder == tmp_path / "best"
    assert run.history["held_out_score"].tolist() == [1.0, 3.0, 2.0]
    assert "best held-out score 3.000 after step 1" in repr(run)
    begun(other)
    other.load(run.best.folder)
    assert len(other.history) == 2, "the history ends with the best step"
    assert other.models.actor.version == 2


def test_a_run_that_only_gets_worse_keeps_its_start(session, runtime, streams, tmp_path):
    run = train(session, runtime, streams, [-1, -5], tmp_path)
    assert (run.best.step, run.best.score) == (-1, 0.0)
    assert "before the first step" in repr(run.best)


def test_it_is_measured_every_so_many_steps_and_after_the_last(session, runtime, streams, tmp_path):
    run = train(session, runtime, streams, range(8), tmp_path, every=3)
    measured = run.history.dropna(subset="held_out_score")["step"].tolist()
    assert measured == [2, 5, 7]
    assert type(run.rows[2]["held_out_score"]) is float, "a number of the step like others"


def seeds(runtime):
    return [work.orders[0].arguments.seed for work in runtime.sent("update")]


def test_measuring_changes_nothing_of_the_training(session, runtime, streams, tmp_path, other, elsewhere):
    prompts, held_out = streams
    train(session, runtime, streams, [1, 2], tmp_path)
    assert (prompts.position, held_out.position) == (2, 0)
    theirs, _ = begun(other)
    other.train(Learns(elsewhere, [1, 2]), theirs, steps=2)
    assert len(seeds(runtime)) == 2
    assert seeds(runtime) == seeds(elsewhere)


def test_a_later_run_of_the_session_goes_on_with_the_best(session, runtime, streams, tmp_path):
    train(session, runtime, streams, [1, 3], tmp_path)
    run = train(session, runtime, streams, [2], tmp_path)
    assert (run.best.step, run.best.score, run.best.start) == (1, 3.0, 0.0)
    assert train(session, runtime, streams, [4], tmp_path).best.step == 3


@pytest.mark.parametrize(("then", "step", "score"), [([2], 1, 3.0), ([2, 5], 4, 5.0)])
def test_a_run_that_resumes_in_another_process_goes_on_with_the_best(
    session, runtime, streams, tmp_path, other, elsewhere, then, step, score
):
    train(session, runtime, streams, [1, 3, 2], tmp_path, save_every=3)
    run = train(other, elsewhere, begun(other), then, tmp_path, resume=tmp_path)
    assert (run.best.step, run.best.score, run.best.start) == (step, score, 0.0)


def test_a_checkpoint_from_before_the_best_does_not_hide_it(session, runtime, streams, tmp_path, other, elsewhere):
    train(session, runtime, streams, [2, 1, 5], tmp_path, save_every=2)
    run = train(other, elsewhere, begun(other), [1], tmp_path, resume=tmp_path)
    assert (run.rows[0]["step"], run.best.step, run.best.score) == (2, 2, 5.0)


def test_a_new_run_in_the_same_folder_begins_anew(session, runtime, streams, tmp_path, other, elsewhere):
    train(session, runtime, streams, [9], tmp_path)
    with pytest.warns(UserWarning, match=r"step 0: held-out score 9 .* is of another run; it is replaced"):
        run = train(other, elsewhere, begun(other), [1], tmp_path)
    assert (run.best.step, run.best.score) == (0, 1.0)


@pytest.mark.filterwarnings("ignore:actor is replaced")
def test_another_actor_begins_anew(session, runtime, streams, tmp_path):
    train(session, runtime, streams, [9], tmp_path)
    runtime.columns["response"] = START
    session.actor("tiny", optimizer=hf.AdamW(lr=1e-4), replace=True)
    with pytest.warns(UserWarning, match="is of another run"):
        run = train(session, runtime, streams, [1], tmp_path)
    assert (run.best.score, run.best.start) == (1.0, 0.0)


def test_scores_of_other_prompts_are_not_compared(session, runtime, streams, tmp_path):
    train(session, runtime, streams, [9], tmp_path)
    runtime.columns["response"] = START
    others = session.prompts([*HELD_OUT[:3], "another one"], batch_size=4, shuffle=False)
    with pytest.warns(UserWarning, match="measured on other prompts"):
        run = train(session, runtime, (streams[0], others), [1], tmp_path)
    assert (run.best.score, run.best.start) == (1.0, 0.0)


def test_a_run_from_another_folder_does_not_take_the_best_here(session, runtime, streams, tmp_path, other, elsewhere):
    train(session, runtime, streams, [9], tmp_path / "a")
    begun(other)
    other.save(tmp_path / "b")
    with pytest.warns(UserWarning, match="is of another run"):
        run = train(other, elsewhere, begun(other), [1], tmp_path / "a", resume=tmp_path / "b")
    assert run.best.score == 1.0


def test_the_same_function_of_another_kernel_scores_the_same(session, runtime, streams, tmp_path):
    train(session, runtime, streams, [9], tmp_path)
    kernel = {"__name__": "__main__"}
    for number in ("one", "two"):  # the same cell, whose file has another name in every kernel
        source = "def scored(completions):\n    return [float(ord(text[0]) - ord('h')) for text in completions]\n"
        name = f"<kernel {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), kernel)
        with pytest.warns(UserWarning, match="goes on with scored"):
            session.reward(kernel["scored"])
        if number == "one":
            with pytest.warns(UserWarning, match="by another reward"):
                best = train(session, runtime, streams, [5], tmp_path).best
    assert train(session, runtime, streams, [1], tmp_path).best == best


def test_a_run_that_stops_itself_is_measured_at_its_end(session, runtime, streams, tmp_path):
    run = train(session, runtime, streams, [1, 3, 2], tmp_path, every=10, stop=lambda row: row["step"] == 1)
    assert [row.get("held_out_score") for row in run.rows] == [None, 3.0]
    assert [row.get("held_out_score") for row in session.history if row["kind"] == "step"] == [None, 3.0]
    assert (run.best.step, run.best.score) == (1, 3.0)


def test_it_needs_a_reward(session, tmp_path):
    session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
    prompts = session.prompts(TEXTS, batch_size=2)
    with refuses(hf.PlacementError, "reward"):
        session.train(OneCall(), prompts, steps=1, folder=tmp_path, keep_best=prompts)


def test_a_start_without_a_number_is_told(session, runtime, tmp_path):
    with pytest.warns(UserWarning, match="no trained scalar head"):
        streams = begun(session, "tiny")
    runtime.columns["scores"] = float("nan")
    with refuses(hf.CallError, "held-out score", "before the first step", "nan"):
        train(session, runtime, streams, [1], tmp_path)


def test_an_interrupt_of_the_first_measurement_cancels_it(session, runtime, streams, tmp_path, keyboard):
    runtime.hold("generate")
    keyboard(lambda: waits() and runtime.sent("generate"))
    keyboard(lambda: waits() and session.run is not None and session.run.view()["asked"] == "pause")
    with pytest.raises(KeyboardInterrupt):
        train(session, runtime, streams, [1], tmp_path)
    (generate,) = runtime.sent()
    assert runtime.asked_to_stop == [generate.call.id]
    assert (session.run.rows, session.run.best, [stream.position for stream in streams]) == ([], None, [0, 0])
    runtime.let_go()
    assert train(session, runtime, streams, [1], tmp_path).best.start == 0.0


def test_what_cannot_be_saved_is_not_the_best(session, runtime, streams, tmp_path):
    train(session, runtime, streams, [1], tmp_path)
    runtime.failing["save_state"] = hf.CallError("no", role="actor")
    with pytest.raises(hf.CallError):
        train(session, runtime, streams, [3], tmp_path)
    assert session.run.best.score == 1.0
    assert session.run.rows[-1]["held_out_score"] == 3.0
    runtime.failing.clear()
    assert train(session, runtime, streams, [2], tmp_path).best.score == 2.0


def samplings(runtime):
    return [work.orders[0].arguments.sampling for work in runtime.sent("generate")]


def test_a_stream_alone_is_enough(session, runtime, streams, tmp_path):
    run = session.train(Learns(runtime, [1]), streams[0], steps=1, folder=tmp_path, keep_best=streams[1])
    assert run.best.score == 1.0
    assert {sampling.temperature for sampling in samplings(runtime)} == {1.0}


def test_the_algorithm_says_how_long_and_how_warm(session, runtime, streams, tmp_path):
    class Short(Learns):
        max_new_tokens, temperature = 7, 0.5

    session.train(Short(runtime, [1]), streams[0], steps=1, folder=tmp_path, keep_best=streams[1])
    assert {(one.max_new_tokens, one.temperature) for one in samplings(runtime)} == {(4, 1.0), (7, 0.5)}


@each("options", [{"folder": None}, {"keep_best": ["text"]}, {"keep_best": hf.KeepBest}])
def test_bad_options_are_named(session, streams, tmp_path, options):
    prompts, held_out = streams
    with refuses(hf.OptionError, "keep_best", *options):
        session.train(OneCall(), prompts, steps=1, **{"folder": tmp_path, "keep_best": held_out, **options})


@each("wrong", [{"every": 0}, {"num_prompts": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}])
def test_options_out_of_range_are_named(streams, wrong):
    with refuses(hf.OptionError, *wrong):
        hf.KeepBest(streams[1], **wrong)


def test_a_simulated_session_has_no_scores(length_reward, tmp_path):
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.actor("llama-7b", dtype="bf16")
        session.reward(length_reward)
        prompts = session.prompts([[1] * 10] * 8, batch_size=8)
        with refuses(hf.OptionError, "keep_best", "simulated"):
            session.train(OneCall(), prompts, steps=1, folder=tmp_path, keep_best=prompts)
