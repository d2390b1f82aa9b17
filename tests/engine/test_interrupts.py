"""A Ctrl-C waits for what must not be left half done."""

import os
import signal

import pytest

from hfsdk.engine.process.interrupts import deliver, held


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_outermost_hold():
    done = []

    @held()
    def start():
        with held():
            press()
            done.append("inner")
        done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_delivered_where_the_code_can_undo():
    done = []

    @held()
    def start():
        press()
        done.append("before")
        deliver()
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["before"]
    with held():
        deliver()  # nothing is pending any more


def test_an_interrupt_passes_at_once_in_code_that_is_named():
    done = []

    def slow():
        press()
        done.append("not reached")

    with pytest.raises(KeyboardInterrupt), held(slow.__code__):
        slow()
    assert done == []
    with pytest.raises(KeyboardInterrupt), held():
        slow()
    assert done == ["not reached"]


def test_a_handler_of_the_users_own_is_asked():
    heard = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with held():
            press()
            assert not heard
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)
