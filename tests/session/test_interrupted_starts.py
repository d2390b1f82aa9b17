"""An interrupt at any line of a long call's start-up, or of its end, leaves a session that can be used: nothing is half begun."""

import contextlib
import signal
import sys
import threading
import weakref

import pytest

import hfsdk as hf
from hfsdk.engine.calls import queries as q
from hfsdk.run import compare as comparing
from hfsdk.run import run as running
from hfsdk.run import train as training
from hfsdk.session import client, context, placing, streams
from hfsdk.session.client import EventRelay
from hfsdk.session.parts import parts_of
from hfsdk.state import checkpoint, folder_lock, history, saves, snapshots
from hfsdk.state import checkpoint as saveable

FILES = {module.__file__ for module in (training, running, placing, snapshots, history, streams, comparing)}
OF_SAVES = {module.__file__ for module in (checkpoint, folder_lock, context, saveable, saves)}


class InterruptAt:
    """Sends this process SIGINT at the k-th line that runs in the session's own files, while it is entered."""

    def __init__(self, k, until="", files=FILES):
        self.k, self.until, self.files, self.seen, self.over = k, until, files, 0, False

    def __enter__(self):
        sys.settrace(self._calls)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _calls(self, frame, event, arg):
        if frame.f_code.co_name == self.until:  # the start-up is over; the end is looked at again
            self.over = True
        return self._lines if frame.f_code.co_filename in self.files else None

    def _lines(self, frame, event, arg):
        if self.over and frame.f_code.co_name == "end":
            self.over = False
        if event == "line" and not self.over:
            self.seen += 1
            if self.seen == self.k:
                signal.raise_signal(signal.SIGINT)
        return self._lines


@pytest.fixture
def session():
    with hf.Session.simulated("1x2 A100-80GB") as made:
        actor = made.actor("tiny")
        made.critic("tiny")
        made.reference(actor)
        made.reward(lambda prompts, completions, **columns: [0.0] * len(prompts))
        made.stream = made.prompts([f"prompt {i}" for i in range(8)], batch_size=2)
        made.algorithm = hf.PPO(max_new_tokens=4, mini_batches=1)
        made.train(made.algorithm, made.stream, steps=1, progress=False)
        yield made


def interrupted(what, until="", every=1, files=FILES):
    """Call ``what`` with an interrupt at its first line, then ``every`` lines later, and so on; yield after each."""
    k = 1
    while True:
        with InterruptAt(k, until, files) as watch, contextlib.suppress(KeyboardInterrupt):
            what()
        yield k
        if watch.seen < k:
            break
        k += every
    assert k > 20, "the lines were not seen"


@pytest.fixture
def relays(monkeypatch):
    """Who listens to sessions made after this: what hears events, as long as the session tells it of any."""
    there = weakref.WeakSet()

    class Noted(EventRelay):
        def __init__(self, listener):
            super().__init__(listener)
            there.add(self)

    monkeypatch.setattr(client, "EventRelay", Noted)
    return there


def check_usable(session):
    run = session.run
    run.stop()
    run.wait(60)
    assert not run.running
    assert session.train(session.algorithm, session.stream, steps=1, progress=False).state == "finished"
    assert not [thread for thread in threading.enumerate() if thread.name == "hfsdk-train" and thread.is_alive()]


@pytest.mark.parametrize("wait", [True, False])
def test_an_interrupt_at_any_line_of_a_runs_start_leaves_training_possible(relays, session, wait):
    listening = len(relays)

    def train():
        session.train(session.algorithm, session.stream, steps=1, progress=False, wait=wait)
        if not wait:
            session.run.wait(60)

    for _ in interrupted(train, until="_one_step"):
        check_usable(session)
        assert len(relays) == listening


def test_an_interrupt_at_any_line_of_a_place_leaves_handles_and_controller_together(session):
    wanted = iter([{"actor reference": 1, "critic": 1}, "colocate"] * 500)
    for _ in interrupted(lambda: session.place(next(wanted)), every=3):
        assert parts_of(session).client.send(q.CurrentPlacement()) == session.placement.placement
        session.train(session.algorithm, session.stream, steps=1, progress=False)


def test_an_interrupt_at_any_line_of_a_rewind_goes_back_all_the_way_or_not_at_all(session):
    before, branch = session.snapshot("before"), session.branch
    session.train(session.algorithm, session.stream, steps=1, progress=False)
    for _ in interrupted(lambda: session.rewind(before), every=3):
        done = parts_of(session).context.counters.all().get("steps") == before.counters.get("steps")
        assert done or session.branch == branch, "the weights went back and the counters did not, or the other way round"
        assert (parts_of(session).client.send(q.Roles())["actor"][2] == 1) is done
        branch = session.branch
        session.train(session.algorithm, session.stream, steps=1, progress=False)
        assert session.history.path()[-1]["branch"] == branch


@pytest.mark.filterwarnings("ignore:actor(, critic)? came from .* before loading ended")
def test_an_interrupt_at_any_line_of_a_load_loads_all_or_says_what_it_did(session, tmp_path):
    session.save(tmp_path)
    saved = parts_of(session).context.counters.all()
    session.train(session.algorithm, session.stream, steps=1, progress=False)
    for _ in interrupted(lambda: session.load(tmp_path), files=OF_SAVES):
        done = parts_of(session).context.counters.all() == saved
        roles = {name: state[2] for name, state in parts_of(session).client.send(q.Roles()).items() if name in ("actor", "critic")}
        come = [name for name, num_updates in roles.items() if num_updates == 1]
        assert len(come) == 2 if done else not come or "before loading ended" in session.messages[-1], roles
        assert not done or len(session.history) == 1
        session.load(tmp_path)
        session.train(session.algorithm, session.stream, steps=1, progress=False)


def test_an_interrupt_at_any_line_of_a_save_leaves_a_complete_one(session, tmp_path):
    session.save(tmp_path)
    for _ in interrupted(lambda: session.save(tmp_path), files=OF_SAVES):
        there = sorted(path.name for path in tmp_path.iterdir() if path.name != ".hfsdk-saving")
        assert len(there) == 2, there
        session.load(tmp_path)
        session.train(session.algorithm, session.stream, steps=1, progress=False)
    session.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "session.json"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("every", [31, 7])
def test_an_interrupt_at_any_line_of_a_comparison_leaves_the_session_where_it_was(session, every):
    branch = session.branch
    compare = lambda: session.compare([session.algorithm], session.stream, steps=1, seeds=[0], progress=False)  # noqa: E731
    for _ in interrupted(compare, until="_one_step", every=every):
        assert session.branch == branch
        assert "compare" not in session.snapshots
    session.train(session.algorithm, session.stream, steps=1, progress=False)
