"""The client: interrupts, releases, lines, events, closing."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import hfsdk as hf
from hfsdk.engine.calls import messages as m
from hfsdk.session.client import ControllerClient
from hfsdk.session.events import EventRelay
from tests.session.fakes import interrupts_after, session_over


def test_the_first_interrupt_cancels_and_waits_until_the_call_has_stopped(actor, controller):
    controller.held.add("generate")
    controller.cancel_delay_s = 0.3
    batch = actor.generate("Hello")
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupts_after(0.2):
        batch.wait()
    assert time.monotonic() - started > 0.35
    assert batch.state == "cancelled"
    controller.held.clear()
    assert actor.generate("Hello").wait().done  # the session goes on


def test_the_second_interrupt_detaches(actor, controller):
    controller.held.add("generate")
    controller.cancel_delay_s = 3600
    batch = actor.generate("Hello")
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupts_after(0.2, 0.5):
        batch.wait()
    assert time.monotonic() - started < 2
    assert batch.state == "running"
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.cancel()


def test_an_interrupt_while_a_call_is_handed_over_comes_after_it(actor, controller):
    seen = controller.send

    def send(message):
        if isinstance(message, m.Submit):
            signal.raise_signal(signal.SIGINT)
        return seen(message)

    actor.generate("Hello")
    controller.send = send
    with pytest.raises(KeyboardInterrupt):
        actor.generate("Hello")
    assert len(controller.sent(m.Submit)) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_waiting_with_a_timeout_says_what_is_still_running(actor, controller):
    controller.held.add("generate")
    batch = actor.generate("Hello")
    with pytest.raises(TimeoutError, match=r"actor\.generate not done after 0.2 s"):
        batch.wait(timeout=0.2)
    threading.Timer(0.2, controller.let_go, batch.call_ids[-1:]).start()
    assert batch.wait(timeout=10).done


def test_other_threads_may_wait_too(actor, controller):
    controller.held.add("generate")
    batch, done = actor.generate("Hello"), []
    threads = [threading.Thread(target=lambda: done.append(batch.wait().state)) for _ in range(3)]
    for thread in threads:
        thread.start()
    controller.let_go(batch.call_ids[-1])
    for thread in threads:
        thread.join(timeout=10)
    assert done == ["done"] * 3


def test_what_nobody_refers_to_is_released_with_the_next_message(actor, controller):
    batch = actor.generate("Hello")
    ids = set(batch.call_ids)
    del batch
    gc.collect()
    assert not controller.sent(m.Release)
    assert actor.version == 0
    assert set(controller.sent(m.Release)[-1].call_ids) >= ids


def test_a_waiting_session_waits_in_each_call(controller):
    session = session_over(controller, hf.ClusterSpec.parse("1x2 cpu"), wait=True)
    session.actor("tiny").generate("Hello")
    assert isinstance(controller.messages[-1], m.Wait)
    session.close()


def test_a_closed_session_refuses_everything_and_closes_once(session, actor, controller, length_reward):
    prompts = session.prompts(["one"], batch_size=1)
    batch = actor.generate("Hello")
    session.close()
    session.close()
    assert controller.closed == 1
    looks = [
        lambda: actor.generate("x"), lambda: actor.run(print), lambda: session.actor("tiny", train="tp2"),
        lambda: session.place(), lambda: prompts[0], lambda: session.logs("actor"), lambda: actor.memory,
        lambda: session.save("x"), lambda: session.load("x"), lambda: batch["response"],
        lambda: session.reward(length_reward), lambda: session.prompts(["x"], batch_size=1),
    ]  # fmt: skip
    for look in looks:
        with pytest.raises(hf.SessionClosedError, match="make a new one"):
            look()
    assert "closed" in repr(session)
    assert session.view()["state"] == session.status == "closed"
    assert "lost" in repr(batch)


def test_a_forgotten_session_is_closed(controller):
    session = session_over(controller, hf.ClusterSpec.parse("1x2 cpu"))
    session.actor("tiny")
    del session
    gc.collect()
    assert controller.closed == 1


def test_a_failure_comes_out_of_waiting(actor, controller):
    controller.failing["generate"] = hf.CallError("it broke", role="actor", method="generate", line="cell 1, line 1")
    batch = actor.generate("Hello")
    with pytest.raises(hf.CallError, match=r"actor\.generate \(started at cell 1, line 1\): it broke"):
        batch.wait()


def test_events_start_on_the_calling_thread_and_come_in_order(session, actor, controller):
    seen = []
    stop = session.subscribe(lambda event: seen.append((event["type"], event["call"], threading.current_thread())))
    actor.generate("Hello")
    assert seen == [("call_started", "actor.generate", threading.main_thread())]
    stop()
    actor.generate("Hello")
    assert len(seen) == 1
    assert controller.listeners == []


def test_an_end_that_comes_before_the_start_waits_for_it():
    seen = []
    relay = EventRelay(lambda event: seen.append(event["type"]))
    relay.on_event({"type": "call_started", "call_id": 1})
    relay.on_event({"type": "call_done", "call_id": 1})
    assert seen == []
    relay.announce({"type": "call_started", "call_id": 1})
    relay.on_event({"type": "role_loaded", "role": "actor"})
    assert seen == ["call_started", "call_done", "role_loaded"]


def test_cells_are_named_by_their_number():
    code = """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_cell("import hfsdk as hf\\ns = hf.Session.simulated('1x8 H100')", store_history=True)
        shell.run_cell("a = s.actor('llama-7b', train='tp8', rollout='tp8', dtype='bf16')", store_history=True)
        shell.run_cell("def ask():\\n    return a.generate([[1, 2]])", store_history=True)
        shell.run_cell("x = 1\\nb = a.generate([[1, 2]])\\nc = ask()", store_history=True)
        shell.run_cell("print([call.line for call in s.dataflow])", store_history=True)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False)
    assert "['cell 4, line 2', 'cell 3, line 2']" in result.stdout, result.stdout + result.stderr


def test_texts_without_a_tokenizer_say_what_to_do(controller):
    client = ControllerClient(controller)
    with pytest.raises(hf.OptionError, match=r"call session\.actor"):
        client.texts([[1, 2]])
