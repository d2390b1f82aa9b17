"""Runs of train that are watched and steered: pause, step, resume, stop and wait, in the background and not."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
from expect import refuses, until

import hfsdk as hf
from tests.session.scripted import waits
from tests.session.test_training import TEXTS, OneCall, Step

LIMIT_S = 60


@pytest.fixture
def ready(session, actor, length_reward):
    session.reward(length_reward)
    return session.prompts(TEXTS, batch_size=2)


class Gate(OneCall):
    """A step begins only when it is let in, and says when it has begun."""

    def __init__(self):
        self.begun, self.let_in = threading.Semaphore(0), threading.Semaphore(0)

    def step(self, models, prompts):
        self.begun.release()
        assert self.let_in.acquire(timeout=LIMIT_S)
        return super().step(models, prompts)

    def hook(self):
        pass

    def one_begun(self):
        assert self.begun.acquire(timeout=LIMIT_S)


@pytest.fixture
def gate():
    return Gate()


def test_a_background_run_pauses_steps_resumes_and_finishes(session, ready, gate):
    run = session.train(gate, ready, steps=4, wait=False)
    assert session.watch() is run
    gate.one_begun()
    assert (run.running, run.state, run.background) == (True, "running", True)
    run.pause()
    assert run.view()["asked"] == "pause"
    gate.let_in.release()
    run.wait(LIMIT_S)
    assert (run.state, len(run.rows), run.paused, run.running) == ("paused", 1, True, True)
    assert repr(run).startswith("Run(1 of 4 steps, paused, score 4.000, ")
    run.step()
    gate.let_in.release()
    run.wait(LIMIT_S)
    assert (run.state, len(run.rows)) == ("paused", 2)
    run.step()
    run.step()
    gate.let_in.release(), gate.let_in.release()
    run.wait(LIMIT_S)
    assert len(run.rows) == 4
    until("its thread ends", lambda: not run.running)
    assert run.state == "finished"
    assert ready.position == 4
    assert run.history["step"].tolist() == [0, 1, 2, 3]


def test_pictures_of_now_stay_live_between_two_calls_of_a_run(session, ready, gate):
    live = session.trace, session.placement, session.dataflow
    session.train(OneCall(), ready, steps=1)
    assert not any(one.running for one in live)
    run = session.train(gate, ready, steps=2, wait=False)
    gate.one_begun()
    assert session.status == "idle", "no call is under way"
    assert all(one.running for one in live)
    run.pause()
    gate.let_in.release()
    run.wait(LIMIT_S)
    assert not any(one.running for one in live)
    assert run.view()["now"] == {}
    run.stop()


def test_an_update_of_the_step_under_way_is_none_by_hand():
    seen = []

    class Watched(hf.GRPO):
        def step(self, models, prompts):
            step = super().step(models, prompts)
            seen.append([row["kind"] for row in session.history])
            return step

    session = hf.Session.simulated("1x2 A100-80GB")
    session.reference(session.actor("tiny"))
    session.reward(lambda completions: [0.0] * len(completions))
    prompts = session.prompts(TEXTS, batch_size=2)
    session.train(Watched(n=2), prompts, steps=2)
    assert seen == [[], ["step"]]
    session.close()


def test_wait_after_resume_waits_for_what_comes(session, ready):
    """Not for the pause that resume has just ended, though the thread may not have woken up yet."""
    for _ in range(20):
        run = session.train(OneCall(), ready, steps=3, wait=False)
        run.pause()
        run.wait(LIMIT_S)
        if run.running:
            run.resume()
        run.wait(LIMIT_S)
        assert (run.state, len(run.rows)) == ("finished", 3)


def test_stop_during_a_step_gives_its_prompts_back(session, ready, runtime):
    session.train(OneCall(), ready, steps=1)
    runtime.hold("compute_scores")
    run = session.train(OneCall(), ready, steps=5, wait=False)
    until("the second step scores", lambda: len(runtime.sent("compute_scores")) == 2)
    assert run.view()["now"]["call"] == "reward.compute_scores"
    run.stop()
    assert run.wait(LIMIT_S) is run
    assert (run.state, run.stopped, run.error, run.rows, run.running) == ("stopped", True, None, [], False)
    assert runtime.asked_to_stop == [runtime.sent("compute_scores")[-1].call.id]
    assert ready.position == 1
    assert run.view()["now"] == {}
    runtime.let_go()
    assert session.train(OneCall(), ready, steps=1).history["step"].tolist() == [1]


def test_stop_between_two_calls_cancels_the_next_one(session, ready, runtime, gate):
    run = session.train(gate, ready, steps=2, wait=False)
    gate.one_begun()
    runtime.hold("generate")
    run.stop()  # nothing runs at this moment
    gate.let_in.release()
    run.wait(LIMIT_S)
    assert (run.state, run.rows, ready.position) == ("stopped", [], 0)
    assert not runtime.sent("compute_scores")


def test_stop_ends_a_paused_run(session, ready, gate):
    run = session.train(gate, ready, steps=3, wait=False)
    run.pause()
    gate.let_in.release()
    run.wait(LIMIT_S)
    run.stop()
    run.wait(LIMIT_S)
    assert (run.state, len(run.rows) <= 1, run.running, run.paused) == ("stopped", True, False, False)


def test_a_failure_in_the_background_is_kept_and_raised_by_wait(session, ready, runtime):
    runtime.failing["compute_scores"] = hf.RewardFunctionError("no", role="reward")
    run = session.train(OneCall(), ready, steps=3, wait=False)
    with pytest.raises(hf.RewardFunctionError):
        run.wait(LIMIT_S)
    assert (run.state, run.stopped) == ("failed", False)
    assert isinstance(run.error, hf.RewardFunctionError)
    assert run.view()["error"].startswith("RewardFunctionError: reward.compute_scores")
    assert ready.position == 0
    runtime.failing.clear()
    assert session.train(OneCall(), ready, steps=1).state == "finished"


@pytest.mark.parametrize("where", ["step", "metrics", "stop"])
def test_any_error_of_the_users_code_ends_the_run(session, ready, where):
    def fail(*args):
        raise ZeroDivisionError(where)

    algorithm = OneCall()
    if where != "stop":
        setattr(algorithm, where, fail)
    run = session.train(algorithm, ready, steps=3, wait=False, stop=fail if where == "stop" else None)
    with pytest.raises(ZeroDivisionError, match=where):
        run.wait(LIMIT_S)
    assert (run.state, run.running) == ("failed", False)
    assert ready.position == (1 if where == "stop" else 0)


def test_stop_hides_no_failure(session, ready):
    """An error that is not the cancelled call stays one, even when stop was asked meanwhile."""

    class Fails(Gate):
        def step(self, models, prompts):
            self.begun.release()
            self.let_in.acquire(timeout=LIMIT_S)
            raise ValueError("mine")

    algorithm = Fails()
    run = session.train(algorithm, ready, steps=2, wait=False)
    algorithm.one_begun()
    run.stop()
    algorithm.let_in.release()
    with pytest.raises(ValueError, match="mine"):
        run.wait(LIMIT_S)
    assert run.state == "failed"


def test_training_twice_at_once_is_refused(session, ready, gate):
    run = session.train(gate, ready, steps=2, wait=False)
    gate.one_begun()
    for wait in (True, False):
        with refuses(hf.OptionError, "still under way", "session.run.stop()"):
            session.train(OneCall(), ready, steps=1, wait=wait)
    assert session.run is run
    run.stop()
    gate.let_in.release()
    run.wait(LIMIT_S)
    session.train(OneCall(), ready, steps=1)


def test_wait_has_a_limit(session, ready, gate):
    run = session.train(gate, ready, steps=2, wait=False)
    with refuses(TimeoutError, "step 0 of 2", "0.05 s", "stop()"):
        run.wait(0.05)
    gate.let_in.release(2)
    run.wait(LIMIT_S)


def test_steering_what_does_not_run_says_what_to_do(session, ready):
    with refuses(hf.OptionError, "no run"):
        session.watch()
    run = session.train(OneCall(), ready, steps=1)
    for what in (run.resume, run.step):
        with refuses(hf.OptionError, "session.train"):
            what()
    run.pause(), run.stop()
    assert run.wait() is run
    assert (run.state, run.view()["asked"]) == ("finished", "")
    ended = session.train(OneCall(), ready, steps=1, wait=False).wait(LIMIT_S)
    with refuses(hf.OptionError, "finished"):
        ended.resume()


def test_stop_from_another_thread_ends_a_run_that_blocks(session, ready, runtime):
    runtime.hold("compute_scores")

    def press():
        until("the run scores", lambda: runtime.sent("compute_scores"))
        session.run.stop()

    threading.Thread(target=press).start()
    run = session.train(OneCall(), ready, steps=3)
    assert (run.state, run.rows, ready.position) == ("stopped", [], 0)


def test_pause_from_another_thread_ends_a_blocking_run_after_its_step(session, ready, gate):
    def press():
        gate.one_begun()
        session.run.pause()
        gate.let_in.release()

    threading.Thread(target=press).start()
    run = session.train(gate, ready, steps=3)
    assert (run.state, len(run.rows), run.running) == ("paused", 1, False)


def test_an_interrupt_shows_that_a_pause_was_asked(session, ready):
    asked = []
    algorithm = OneCall()

    def interrupt():
        signal.raise_signal(signal.SIGINT)
        asked.append(session.run.view()["asked"])

    algorithm.hook = interrupt
    with pytest.warns(UserWarning, match=r"paused after step 0, with \d+ of \d+ steps left: .* goes on"):
        run = session.train(algorithm, ready, steps=2)
    assert asked == ["pause"]
    assert run.state == "paused"


def test_an_interrupt_during_the_last_step_finishes(session, ready):
    algorithm = OneCall()
    algorithm.hook = lambda: signal.raise_signal(signal.SIGINT)
    assert session.train(algorithm, ready, steps=1).state == "finished"


def test_a_run_that_a_second_interrupt_ended_is_not_finished(session, ready, runtime, keyboard):
    runtime.hold("compute_scores")
    keyboard(lambda: waits() and runtime.sent("compute_scores"))
    keyboard(lambda: waits() and session.run is not None and session.run.view()["asked"] == "pause")
    with pytest.raises(KeyboardInterrupt):
        session.train(OneCall(), ready, steps=2)
    assert (session.run.state, session.run.running) == ("stopped", False)


def test_closing_the_session_stops_its_run(session, ready, runtime, gate):
    run = session.train(gate, ready, steps=3, wait=False)
    gate.one_begun()

    def let_in():
        until("the session asks its run to stop", lambda: run.view()["asked"] == "stop")
        gate.let_in.release()

    thread = threading.Thread(target=let_in)
    thread.start()
    session.close()
    assert not run.running
    assert (run.state, run.error) == ("stopped", None)
    assert runtime.closed == 1
    thread.join(LIMIT_S)


def test_watchers_hear_of_the_end_however_it_comes(session, ready, runtime, monkeypatch):
    ended = []

    class Watcher:
        def __init__(self, run):
            self.run = run

        def ended(self):
            ended.append(self.run.state)

    monkeypatch.setattr("hfsdk.run.train.watcher_of", Watcher)
    session.train(OneCall(), ready, steps=1, progress=True)
    session.train(OneCall(), ready, steps=1, progress=False)
    runtime.failing["compute_scores"] = hf.CallError("no")
    with pytest.raises(hf.CallError):
        session.train(OneCall(), ready, steps=1, progress=True)
    run = session.train(OneCall(), ready, steps=1, progress=True, wait=False)
    with pytest.raises(hf.CallError):
        run.wait(LIMIT_S)
    until("all three ended", lambda: len(ended) == 3)
    assert ended == ["finished", "failed", "failed"]


def test_a_run_keeps_the_newest_steps_for_its_picture(session, ready):
    run = session.train(OneCall(), ready, steps=60)
    view = run.view()
    assert len(view["rows"]) == 60
    assert sorted(view["samples"]) == sorted(view["calls"]) == sorted(view["trace_steps"]) == list(range(10, 60))
    assert view["samples"][59][0]["response"] == "hhhh"


def test_a_step_without_a_batch_has_no_samples(session, ready):
    class Bare(OneCall):
        def step(self, models, prompts):
            super().step(models, prompts)
            return Step(None)

        def metrics(self, step):
            return {"own": 1.0}

    run = session.train(Bare(), ready, steps=1)
    assert run.view()["samples"] == {0: []}


EXIT = """
import threading
import hfsdk as hf

class Tracker:
    def start(self, title, config):
        return self

    def step(self, step, values, samples):
        pass

    def end(self, state):
        print("tracker", state, flush=True)

session = hf.Session.simulated("1x2 cpu")
session.actor("tiny"), session.critic("tiny"), session.reward(lambda prompts, completions, **c: [0.0] * len(prompts))
session.reference(session.models.actor)
begun = threading.Event()
prompts = session.prompts(["a", "b"], batch_size=2)
run = session.train(hf.PPO(), prompts, steps=10**6, wait=False, stop=lambda row: begun.set(), track=Tracker())
begun.wait()
print("left", flush=True)
"""


def test_the_interpreter_ends_though_a_run_goes_on_and_ends_its_trackers():
    command = [sys.executable, "-X", "faulthandler", "-c", EXIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["left", "tracker stopped"]), done.stderr
    assert done.stderr == ""


def test_a_simulated_run_in_the_background(length_reward):
    with hf.Session.simulated("1x4 H200") as session:
        actor = session.actor("tiny")
        session.critic("tiny"), session.reference(actor), session.reward(length_reward)
        prompts = session.prompts(TEXTS, batch_size=4)
        run = session.train(hf.PPO(), prompts, steps=200, wait=False)
        until("two steps", lambda: len(run.rows) >= 2)
        run.pause()
        run.wait(LIMIT_S)
        at = len(run.rows)
        assert run.state == "paused"
        assert 2 <= at < 200
        run.step()
        run.wait(LIMIT_S)
        assert len(run.rows) == at + 1 == prompts.position
        run.stop()
        run.wait(LIMIT_S)
        assert run.state == "stopped"
        assert len(session.history) == len(run.rows)
    assert {"seconds", "tokens_per_s", "busy_share"} <= set(run.history)


@pytest.fixture
def background(length_reward):
    """A simulated session whose run goes on in the background."""
    with hf.Session.simulated("1x4 H200") as session:
        actor = session.actor("tiny")
        session.critic("tiny"), session.reference(actor), session.reward(length_reward)
        session.place("colocate")
        prompts = session.prompts(TEXTS, batch_size=4)
        run = session.train(hf.PPO(), prompts, steps=10**6, wait=False)
        until("a step", lambda: len(run.rows) >= 1)
        yield session, run
    assert not run.running, "closing the session waits for its run"
    assert run.state == "stopped"


def test_a_pause_right_after_a_resume_pauses(background):
    _, run = background
    run.pause()
    run.wait(LIMIT_S)
    for _ in range(20):
        run.resume()
        run.pause()
        assert run.wait(LIMIT_S).state == "paused"


def test_who_looks_from_a_listener_does_not_block_a_place(background):
    session, _ = background
    session.subscribe(lambda event: session.trace.snapshot())
    for where in ("split", "colocate") * 4:
        session.place(where)


def test_calls_of_a_background_run_name_the_line_of_train(background):
    session, run = background
    run.pause()  # between two steps the dataflow is the last one's, which is whole
    run.wait(LIMIT_S)
    assert {call.line.partition(",")[0] for call in session.dataflow.snapshot() if call.line} == {"test_running.py"}


def test_stop_leaves_the_users_own_calls_alone(background):
    session, run = background
    mine = session.models.actor.generate(["a", "b"], max_new_tokens=4)
    run.stop()
    run.wait(LIMIT_S)
    assert mine.wait().state == "done"


def test_saving_and_loading_wait_for_the_end_of_a_step(background, tmp_path):
    session, run = background
    for act in (session.save, session.load):
        with refuses(hf.OptionError, "run.pause()"):
            act(tmp_path)
    run.pause()
    run.wait(LIMIT_S)
    session.save(tmp_path)


def test_a_listener_that_raises_is_dropped_and_the_call_goes_on(background):
    session, run = background
    run.pause()
    run.wait(LIMIT_S)
    session.subscribe(lambda event: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        batch = session.models.actor.generate(["a"], max_new_tokens=2)
    assert batch.wait().state == "done"


def test_busy_counts_devices_that_ran_nothing(length_reward):
    with hf.Session.simulated("1x4 H200") as session:
        session.actor("tiny"), session.critic("tiny"), session.reward(length_reward)
        session.place({"actor": 2, "critic": 2})
        run = session.train(hf.GRPO(n=2, kl_coef=0.0), session.prompts(TEXTS, batch_size=4), steps=1)
        assert run.rows[0]["busy_share"] <= 0.5
