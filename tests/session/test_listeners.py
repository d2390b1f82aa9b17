"""A listener may ask the session whatever it likes: no lane waits for it, and it is not told of what it does itself."""

import threading

import pytest
from expect import until

import hfsdk as hf
from hfsdk.session import client
from tests.session.scripted import waits

LIMIT_S = 60
"""Ends what hangs."""


@pytest.fixture
def session():
    with hf.Session.simulated("1x2 A100-80GB") as made:
        made.actor("tiny")
        made.critic("tiny")
        made.place("colocate")
        yield made


def calls_of(session):
    batch = session.batch(prompt=[[1], [2]])
    return session.models.actor.generate(batch, max_new_tokens=2)


def listeners():
    """Return the threads of listeners."""
    return [thread for thread in threading.enumerate() if thread.name == "hfsdk-listener"]


def within_limit(act):
    """Run something on a thread, and fail where it does not come back."""
    found = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert found, "it hangs"
    return found[0]


@pytest.mark.parametrize("kind", ["call_started", "call_done"])
def test_a_listener_that_calls_and_waits_is_served_once_per_call(session, kind):
    served, told = [], []

    def answer(event):
        told.append(event["call_id"])
        if event["type"] == kind:
            served.append(session.models.critic.compute_values(session.batch(prompt=[[1]], response=[[2]])).wait())

    stop = session.subscribe(answer)
    batches = within_limit(lambda: [calls_of(session).wait() for _ in range(3)])
    stop()
    assert len(served) == len(set(told)) == len(batches) == 3


def test_the_end_of_a_call_is_heard_before_the_start_of_the_next(session, monkeypatch):
    monkeypatch.setattr(client, "BEHIND_S", LIMIT_S)
    heard, called, gate = [], threading.Event(), threading.Event()

    def behind(event):
        if event["type"] == "call_done":
            assert gate.wait(LIMIT_S)
        heard.append(event["type"])

    def open_gate():
        until("the second call's start to wait for the listener", lambda: waits(client.Aside.__call__) or called.is_set())
        gate.set()

    opener = threading.Thread(target=open_gate)
    opener.start()
    stop = session.subscribe(behind)
    calls_of(session).wait()
    calls_of(session).wait()
    called.set()
    opener.join(LIMIT_S)
    stop()
    assert [kind for kind in heard if kind != "call_progress"] == ["call_started", "call_done"] * 2


def test_a_start_does_not_wait_long_for_a_listener_that_hangs(session):
    gate, heard = threading.Event(), []

    def hangs(event):
        heard.append(event["type"])
        if event["type"] == "call_done":
            gate.wait(LIMIT_S)

    stop = session.subscribe(hangs)
    within_limit(lambda: [calls_of(session).wait() for _ in range(3)])
    assert heard == ["call_started", "call_done", "call_started", "call_started"]
    gate.set()
    stop()


def test_listeners_that_wait_on_several_threads_do_not_lock_each_other(session, monkeypatch):
    monkeypatch.setattr(client, "BEHIND_S", 0.01)  # they are always behind
    done = []
    stops = [session.subscribe(lambda event: done.append(calls_of(session).wait().state)) for _ in range(3)]

    def work():
        threads = [threading.Thread(target=lambda: [calls_of(session).wait() for _ in range(5)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for where in ("split", "colocate"):
            session.place(where)
        for thread in threads:
            thread.join()
        return True

    assert within_limit(work)
    for stop in stops:
        stop()
    assert set(done) == {"done"}


def test_a_listener_may_place_and_close(session):
    closed = threading.Event()

    def end(event):
        if event["type"] == "call_done":
            session.place("split")
            session.close()
            closed.set()

    session.subscribe(end)
    calls_of(session)
    assert closed.wait(LIMIT_S)


def test_unsubscribing_and_closing_end_the_listeners_thread(session):
    heard = []
    stop = session.subscribe(heard.append)
    calls_of(session).wait()
    stop()
    assert {event["type"] for event in heard} >= {"call_started", "call_done"}, "what was queued is heard"
    session.subscribe(heard.append)
    calls_of(session).wait()
    session.close()
    for thread in listeners():
        thread.join(LIMIT_S)
    assert listeners() == []


def test_one_that_raises_on_its_thread_is_dropped_with_a_warning(session):
    seen = []

    def broken(event):
        seen.append(event["type"])
        if event["type"] == "call_done":
            raise RuntimeError("no")

    def heard():
        stop = session.subscribe(broken)
        calls_of(session).wait()
        stop()

    with pytest.warns(UserWarning, match=r"a listener of this session raised and is dropped: RuntimeError\('no'\)"):
        heard()
    calls_of(session).wait()
    assert seen.count("call_done") == 1


def test_a_listener_whose_call_ends_with_the_session_is_no_news(recwarn):
    with hf.Session.simulated("1x2 A100-80GB") as session:
        session.actor("tiny")
        session.place("colocate")
        inside, closed = threading.Event(), threading.Event()
        ended = []

        def wait(event):
            if event["type"] == "call_done":
                inside.set()
                assert closed.wait(LIMIT_S)
                ended.append(event["call_id"])
                raise hf.CallCancelledError("cancelled before it started")

        session.subscribe(wait)
        calls_of(session).wait()
        assert inside.wait(LIMIT_S)
    closed.set()
    for thread in listeners():
        thread.join(LIMIT_S)
    assert ended
    assert [str(w.message) for w in recwarn if "dropped" in str(w.message)] == []
