"""A live picture does not flood the kernel: however many views a second become at most five messages, and the last one wins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from threading import Semaphore, Thread
from typing import Any

import pytest

from hfsdk.viz import frame
from hfsdk.viz.frame import LivePicture
from hfsdk.viz.pictures.timeline import TimelinePicture, timeline_view
from tests.viz import demo

comm = pytest.importorskip("comm")
pytest.importorskip("anywidget")

CEILING_S = 120
"""Only bounds a hang."""


class Clock:
    """Stands for ``time``: who sleeps waits until the test lets the time pass, or until nobody need sleep any more."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self._asleep, self._passed, self._over = Semaphore(0), Semaphore(0), False

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._asleep.release()
        if not self._over:
            assert self._passed.acquire(timeout=CEILING_S)

    def monotonic(self) -> float:
        return self.now_s

    def wait_until_asleep(self) -> None:
        assert self._asleep.acquire(timeout=CEILING_S), "nobody sleeps"

    def pass_on(self) -> None:
        """Let the sleeper go on until it sleeps again."""
        self._passed.release()
        self.wait_until_asleep()

    def end(self) -> None:
        """Wake whoever sleeps; nobody sleeps from here on."""
        self._over = True
        self._passed.release()


class Counting(comm.base_comm.BaseComm):
    """A comm that keeps what would go over the kernel's socket."""

    sent: list[Any] = []  # noqa: RUF012
    on_its_way: Any = None
    """What a view waits for before it is sent."""

    def publish_msg(self, msg_type: str, data: Any = None, **rest: Any) -> None:
        if msg_type == "comm_msg":
            if Counting.on_its_way is not None:
                Counting.on_its_way()
            Counting.sent.append(data["state"]["view"]["title"])


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of the views that were sent."""
    monkeypatch.setattr(comm, "create_comm", Counting)
    monkeypatch.setattr(Counting, "on_its_way", None)
    Counting.sent = []
    return Counting.sent


def when_joined(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Do this when the end of the thread that sends is waited for."""

    class Joined(Thread):
        def join(self, timeout: float | None = None) -> None:
            if self.name == "hfsdk-timeline":
                do()
            super().join(timeout)

    monkeypatch.setattr(threading, "Thread", Joined)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A clock of the test's own; whoever is waited for need not sleep to the end."""
    clock = Clock()

    monkeypatch.setattr(frame, "time", clock)
    when_joined(monkeypatch, clock.end)
    yield clock
    clock.end()


class Handle:
    def __init__(self) -> None:
        self.bundles: list[dict[str, str]] = []

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        self.bundles.append(bundle)


def view_called(title: str) -> dict[str, Any]:
    return {**timeline_view(demo.step_trace()), "title": title}


def shown() -> LivePicture:
    return LivePicture(TimelinePicture(timeline_view(demo.step_trace())))


def test_it_is_not_frozen_with_a_call_that_began_meanwhile(clock: Clock) -> None:
    """Between two calls nothing runs; the view that is taken then may show that the next one does."""
    clock.end()
    runs, published, ended = iter([True, False, True, False, False]), [], []

    class Live:
        def publish(self, view: Any) -> None:
            published.append(view)

    picture = TimelinePicture(timeline_view(demo.step_trace()))
    frame.follow(Live(), lambda: picture, lambda: next(runs), lambda: ended.append(len(published)))
    assert ended == [3]
    assert clock.slept == [frame.PUBLISH_INTERVAL_S] * 2


def test_five_a_second_is_the_most_and_of_large_views_one() -> None:
    assert frame.PUBLISH_INTERVAL_S >= 0.2
    assert frame.LARGE_PUBLISH_INTERVAL_S >= 1.0


def test_what_is_published_within_an_interval_is_one_message_with_the_last_view(messages: list[str], clock: Clock) -> None:
    live, handle = shown(), Handle()
    live.publish(view_called("the first"))
    clock.wait_until_asleep()

    def publish(first: int) -> None:
        for number in range(first, first + 300):
            live.publish({**live.picture.view, "title": f"view {number}"})

    threads = [Thread(target=publish, args=(k * 1000,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live.publish(view_called("the last"))
    assert messages == ["the first"]
    clock.pass_on()
    assert messages == ["the first", "the last"]
    assert clock.slept == [frame.PUBLISH_INTERVAL_S] * 2
    live.freeze(handle)
    live.publish(view_called("too late"))
    assert messages == ["the first", "the last"], "a frozen picture sends nothing more"
    (bundle,) = handle.bundles
    assert "the last" in bundle["text/plain"]


def test_a_large_view_is_sent_once_a_second(messages: list[str], clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "LARGE_MARKS", 10)
    live = shown()
    live.publish(view_called("large"))
    clock.wait_until_asleep()
    assert clock.slept == [frame.LARGE_PUBLISH_INTERVAL_S]
    live.freeze(Handle())


def test_without_threads_a_view_is_sent_when_the_interval_is_over(
    messages: list[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "can_start_threads", lambda: False)
    live, handle = shown(), Handle()
    for share in (0.0, 0.5, 0.9, 1.0, 1.5):
        clock.now_s = 100 + share * frame.PUBLISH_INTERVAL_S
        live.publish(view_called(f"at {share}"))
    assert messages == ["at 0.0", "at 1.0"]
    assert clock.slept == []
    live.freeze(handle)
    assert "at 1.5" in handle.bundles[0]["text/plain"]


def test_what_was_published_last_is_frozen_even_when_it_was_not_sent(messages: list[str], clock: Clock) -> None:
    live, handle = shown(), Handle()
    live.publish(view_called("view 0"))
    clock.wait_until_asleep()
    for number in range(1, 50):
        live.publish(view_called(f"view {number}"))
    live.freeze(handle)
    assert "view 49" in handle.bundles[0]["text/plain"]
    assert messages == ["view 0"]


def test_a_view_that_is_on_its_way_does_not_take_the_place_of_the_last(
    messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who freezes waits for it: only that lets it go on here."""
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def wait() -> None:
        begun.set()
        assert may_end.wait(CEILING_S)
        ended.append("sent")

    class Noting(Handle):
        def update(self, bundle: dict[str, str], raw: bool) -> None:
            ended.append("frozen")
            super().update(bundle, raw)

    when_joined(monkeypatch, may_end.set)
    monkeypatch.setattr(Counting, "on_its_way", wait)
    live, handle = shown(), Noting()
    live.publish(view_called("the first"))
    assert begun.wait(CEILING_S)
    live.publish(view_called("the last"))
    live.freeze(handle)
    may_end.set()
    assert ended == ["sent", "frozen"]
    (bundle,) = handle.bundles
    assert "the last" in bundle["text/plain"]
