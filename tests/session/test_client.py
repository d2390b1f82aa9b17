"""The client: interrupts, releases, lines, events, closing."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.engine.calls import messages as m
from hfsdk.engine.controller.controller import Controller
from hfsdk.session.client import EventRelay
from tests.session.scripted import let_go_when, waits


def at_work(runtime, method="generate"):
    """Whether the main thread waits, and a call of this method is with the runtime."""
    return waits() and runtime.sent(method)


def held_batch(actor, runtime):
    runtime.hold("generate")
    return actor.generate("Hello", max_new_tokens=3)


def test_the_first_interrupt_cancels_and_waits_until_the_call_has_stopped(actor, runtime, keyboard):
    runtime.deaf = True
    batch = held_batch(actor, runtime)
    keyboard(lambda: at_work(runtime))
    with let_go_when(runtime, lambda: runtime.asked_to_stop and waits()):
        with pytest.raises(KeyboardInterrupt):
            batch.wait()
        state = batch.state
    assert state == "cancelled"
    assert actor.generate("Hello").wait().done  # the session goes on


def test_the_second_interrupt_detaches(actor, runtime, keyboard):
    runtime.deaf = True
    batch = held_batch(actor, runtime)
    keyboard(lambda: at_work(runtime))
    keyboard(lambda: runtime.asked_to_stop and waits())
    with pytest.raises(KeyboardInterrupt):
        batch.wait()
    assert batch.state == "running"


def test_an_interrupt_while_a_call_is_handed_over_comes_after_it(session, actor, monkeypatch):
    send = Controller.send

    def pressed(controller, message):
        if isinstance(message, m.Submit):
            signal.raise_signal(signal.SIGINT)
        return send(controller, message)

    actor.generate("Hello").wait()
    monkeypatch.setattr(Controller, "send", pressed)
    with pytest.raises(KeyboardInterrupt):
        actor.generate("Hello")
    assert [call.method for call in session.dataflow] == ["generate", "generate"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_waiting_with_a_timeout_says_what_is_still_running(actor, runtime):
    batch = held_batch(actor, runtime)
    with refuses(TimeoutError, "actor.generate not done after 0.05 s"):
        batch.wait(timeout=0.05)
    runtime.let_go()
    assert batch.wait(timeout=60).done


def test_other_threads_may_wait_too(actor, runtime):
    batch, done = held_batch(actor, runtime), []
    threads = [threading.Thread(target=lambda: done.append(batch.wait().state)) for _ in range(3)]
    for thread in threads:
        thread.start()
    runtime.let_go()
    for thread in threads:
        thread.join(60)
    assert done == ["done"] * 3


def test_what_nobody_refers_to_is_released_with_the_next_message(actor, runtime, monkeypatch):
    objects, call = weakref.WeakSet(), runtime.call

    def stored(work):
        outcome = call(work)
        objects.update(part.handle for part in outcome.stored.parts)
        return outcome

    monkeypatch.setattr(runtime, "call", stored)
    batch = actor.generate("Hello").wait()
    del batch
    gc.collect()
    assert objects, "a finalizer sends nothing: it may run inside a message"
    assert actor.version == 0
    gc.collect()
    assert not objects


def test_a_waiting_session_waits_in_each_call(runtime):
    with hf.Session(runtime=runtime, wait=True) as session:
        runtime.hold("generate")
        with let_go_when(runtime, lambda: at_work(runtime)):
            state = session.actor("tiny").generate("Hello").state
        assert state == "done"


def test_a_closed_session_refuses_everything_and_closes_once(session, actor, runtime, length_reward):
    prompts = session.prompts(["one"], batch_size=1)
    batch = actor.generate("Hello").wait()
    session.close()
    session.close()
    assert runtime.closed == 1
    looks = {
        "generate": lambda: actor.generate("x"), "run": lambda: actor.run(print),
        "declare": lambda: session.actor("tiny", train="tp2"),
        "place": lambda: session.place(), "a prompt": lambda: prompts[0], "logs": lambda: session.logs("actor"),
        "memory": lambda: actor.memory, "save": lambda: session.save("x"), "load": lambda: session.load("x"),
        "a column": lambda: batch["response"], "a reward": lambda: session.reward(length_reward),
        "prompts": lambda: session.prompts(["x"], batch_size=1),
    }  # fmt: skip
    for name, look in looks.items():
        with refuses(hf.SessionClosedError, "hf.Session("):
            look()
            pytest.fail(f"{name} is not refused")
    assert "closed" in repr(session)
    assert session.view()["state"] == session.status == "closed"
    assert "lost" in repr(batch)


def test_a_forgotten_session_is_closed(runtime):
    session = hf.Session(runtime=runtime)
    session.actor("tiny")
    del session
    gc.collect()
    assert runtime.closed == 1


def test_a_failure_comes_out_of_waiting_and_names_the_users_line(actor, runtime):
    runtime.failing["generate"] = hf.CallError("it broke")
    batch = actor.generate("Hello")
    with refuses(hf.CallError, "actor.generate", "test_client.py, line ", "it broke"):
        batch.wait()


def test_a_start_is_told_on_the_calling_thread_and_to_nobody_who_unsubscribed(session, actor):
    seen = []
    stop = session.subscribe(lambda event: seen.append((event["type"], event.get("call"), threading.current_thread())))
    actor.generate("Hello")
    assert [one for one in list(seen) if one[0] == "call_started"] == [("call_started", "actor.generate", threading.main_thread())]
    stop()
    del seen[:]
    actor.generate("Hello").wait()
    assert seen == []


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


def test_texts_without_a_tokenizer_say_what_to_do(session):
    batch = session.batch(prompt=[[1, 2]])
    with refuses(hf.OptionError, "session.actor"):
        batch.text("prompt")
