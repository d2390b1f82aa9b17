"""A live picture does not flood the kernel: a thousand views a second become at most five messages, and the last one wins."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import pytest

from hfsdk.viz import frame
from hfsdk.viz.frame import LivePicture
from hfsdk.viz.timeline.view import TimelinePicture, timeline_view
from tests.viz import demo

comm = pytest.importorskip("comm")
pytest.importorskip("anywidget")

RATE = 1000
SECONDS = 1.5


class Counting(comm.base_comm.BaseComm):
    """A comm that counts what would go over the kernel's socket."""

    sent: list[tuple[float, dict[str, Any]]] = []  # noqa: RUF012

    def publish_msg(self, msg_type: str, data: Any = None, **rest: Any) -> None:
        if msg_type == "comm_msg":
            Counting.sent.append((time.monotonic(), data))


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, dict[str, Any]]]:
    monkeypatch.setattr(comm, "create_comm", Counting)
    Counting.sent = []
    return Counting.sent


class Handle:
    def __init__(self) -> None:
        self.bundles: list[dict[str, str]] = []

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        self.bundles.append(bundle)


def test_it_is_not_frozen_with_a_call_that_began_meanwhile() -> None:
    """Between two calls nothing runs; the view that is taken then may show that the next one does."""
    runs, published, ended = iter([True, False, True, False, False]), [], []

    class Live:
        def publish(self, view: Any) -> None:
            published.append(view)

    picture = TimelinePicture(timeline_view(demo.step_trace()))
    frame.follow(Live(), lambda: picture, lambda: next(runs), lambda: ended.append(len(published)))
    assert ended == [3]


def publish(live: LivePicture, view: dict[str, Any], first: int) -> int:
    """Publish a thousand times a second; return the number of the last one."""
    number, end = first, time.monotonic() + SECONDS
    while time.monotonic() < end:
        number += 1
        live.publish({**view, "title": f"view {number}"})
        time.sleep(1 / RATE)
    return number


def test_a_thousand_publishes_a_second_become_at_most_five(messages: list[tuple[float, dict[str, Any]]]) -> None:
    view: dict[str, Any] = dict(timeline_view(demo.step_trace()))
    live, handle = LivePicture(TimelinePicture(view)), Handle()
    threads = [threading.Thread(target=publish, args=(live, view, k * 10**6)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live.publish({**view, "title": "the last"})
    time.sleep(2.5 * frame.PUBLISH_INTERVAL_S)
    times = [at for at, _ in messages]
    assert 3 <= len(times) <= 1 + (times[-1] - times[0]) / frame.PUBLISH_INTERVAL_S + 0.01
    gaps = [b - a for a, b in pairwise(times)]
    assert min(gaps) >= 0.95 * frame.PUBLISH_INTERVAL_S
    assert messages[-1][1]["state"]["view"]["title"] == "the last"
    live.freeze(handle)
    count = len(messages)
    live.publish(view)
    time.sleep(1.5 * frame.PUBLISH_INTERVAL_S)
    assert len(messages) == count, "a frozen picture sends nothing more"
    (bundle,) = handle.bundles
    assert "the last" in bundle["text/plain"]


def test_a_large_view_is_sent_once_a_second(messages: list[tuple[float, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "LARGE_MARKS", 10)
    monkeypatch.setattr(frame, "LARGE_PUBLISH_INTERVAL_S", 0.6)
    view: dict[str, Any] = dict(timeline_view(demo.step_trace()))
    live = LivePicture(TimelinePicture(view))
    publish(live, view, 0)
    live.freeze(Handle())
    assert 2 <= len(messages) <= 3


def test_what_was_published_last_is_frozen_even_when_it_was_not_sent(messages: list[tuple[float, dict[str, Any]]]) -> None:
    view: dict[str, Any] = dict(timeline_view(demo.step_trace()))
    live, handle = LivePicture(TimelinePicture(view)), Handle()
    for number in range(50):
        live.publish({**view, "title": f"view {number}"})
    live.freeze(handle)
    assert "view 49" in handle.bundles[0]["text/plain"]
    assert len(messages) <= 2


def test_a_view_that_is_on_its_way_does_not_take_the_place_of_the_last(
    messages: list[tuple[float, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    view: dict[str, Any] = dict(timeline_view(demo.step_trace()))
    live, handle = LivePicture(TimelinePicture(view)), Handle()
    begun, may_end, show = threading.Event(), threading.Event(), LivePicture._show

    def slowly(self: LivePicture, view: Any) -> None:
        begun.set()
        assert may_end.wait(10)
        show(self, view)

    monkeypatch.setattr(LivePicture, "_show", slowly)
    live.publish({**view, "title": "the first"})
    assert begun.wait(10)
    live.publish({**view, "title": "the last"})
    freezing = threading.Thread(target=live.freeze, args=(handle,))
    freezing.start()
    time.sleep(0.1)
    assert not handle.bundles, "it waits for the view that is on its way"
    may_end.set()
    freezing.join(10)
    (bundle,) = handle.bundles
    assert "the last" in bundle["text/plain"]
