"""When spans were: by the host's clock, and by events of a stream whose kernels outlast their launching."""

import itertools
import time

import pytest

from hfsdk.core.trace import Span
from hfsdk.engine.process.clocks import EventClock, aligned
from hfsdk.engine.process.recorder import Recorder

CALL = Span(name="update", role="actor", call_id=7, method="update", step=3, start_ns=0, phase="learning")


class Machine:
    """A host and a stream on one clock, in milliseconds: what is launched is done after all that was launched before."""

    def __init__(self, monkeypatch):
        self.now_ms = self.done_ms = 0.0
        self.made = 0
        self.broken = False
        monkeypatch.setattr("time.time_ns", lambda: 10**18 + round(self.now_ms * 1e6))
        monkeypatch.setattr("time.perf_counter_ns", lambda: round(self.now_ms * 1e6))

    def host(self, ms):
        self.now_ms += ms

    def launch(self, kernel_ms):
        self.done_ms = max(self.done_ms, self.now_ms) + kernel_ms

    def wait(self):
        self.now_ms = max(self.now_ms, self.done_ms)

    def event(self):
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, machine):
        self.machine = machine

    def record(self):
        self.ms = max(self.machine.done_ms, self.machine.now_ms)

    def synchronize(self):
        if self.machine.broken:
            raise RuntimeError("an illegal memory access was encountered")
        self.machine.now_ms = max(self.machine.now_ms, self.ms)

    def elapsed_time(self, other):
        assert max(self.ms, other.ms) <= self.machine.now_ms, "asked before the GPU had passed it"
        return other.ms - self.ms


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def training(machine, recorder):
    """Launch a forward pass of 100 ms, agree for 5 ms, and a backward pass of 200 ms, whose norm is read; then 30 ms of Python."""
    with recorder.call(CALL), recorder.span("update"):
        machine.host(4)
        with recorder.span("forward", tokens=8):
            machine.launch(100)
            machine.host(1)
        with recorder.span("agree"):
            machine.host(5)
        with recorder.span("backward") as attrs:
            machine.launch(200)
            machine.host(2)
            with recorder.span("norm"):
                machine.wait()
            attrs["bytes"] = 9
        with recorder.span("python"):
            machine.host(30)
    return {span.name: span for span in recorder.take()[0]}


def milliseconds(span):
    return (span.start_ns - 10**18) / 1e6, round(1e3 * span.duration_s, 6)


def test_by_events_a_span_is_the_time_of_its_kernels(machine):
    machine.host(50)
    spans = training(machine, Recorder(0, 0, clock=EventClock(machine.event)))
    assert {name: milliseconds(span) for name, span in spans.items()} == {
        "forward": (54, 100), "agree": (154, 0), "backward": (154, 200), "norm": (354, 0), "python": (354, 30), "update": (50, 334),
    }  # fmt: skip
    parts = sum(span.duration_s for span in spans.values() if span.parent == "update")
    assert spans["update"].duration_s == pytest.approx(parts + 0.004)  # and the 4 ms before the first of them
    assert {name: round(1e3 * span.attrs["host_s"]) for name, span in spans.items()} == {
        "forward": 1, "agree": 5, "backward": 294, "norm": 292, "python": 30, "update": 334,
    }  # fmt: skip
    assert (spans["forward"].attrs["tokens"], spans["backward"].attrs["bytes"], spans["norm"].parent) == (8, 9, "backward")


def test_a_thread_that_is_off_its_core_between_two_reads_of_a_clock_keeps_spans_inside_each_other(monkeypatch):
    """Every look at a clock takes another while: 8 ms where another process had the core, else next to nothing."""
    machine = Machine(monkeypatch)
    rests = itertools.cycle([0.001, 8.0, 0.001, 0.001, 3.0, 0.001, 0.001, 0.001, 5.0])

    def late(clock):
        def read():
            machine.host(next(rests))
            return clock()

        return read

    for name in ("time_ns", "perf_counter_ns"):
        monkeypatch.setattr(f"time.{name}", late(getattr(time, name)))
    recorder = Recorder(0, 0)
    for _ in range(9):
        with recorder.call(CALL), recorder.span("outer"):
            machine.host(1)
            with recorder.span("inner"):
                machine.host(1)
    spans, _ = recorder.take()
    for inner, outer in zip(spans[::2], spans[1::2], strict=True):
        assert (inner.name, outer.name) == ("inner", "outer")
        assert outer.start_ns < inner.start_ns < inner.end_ns < outer.end_ns


def test_by_the_hosts_clock_whoever_waits_pays(machine):
    spans = training(machine, Recorder(0, 0))
    assert milliseconds(spans["forward"]) == (4, 1)
    assert milliseconds(spans["norm"]) == (12, 292)
    assert "host_s" not in spans["forward"].attrs


def test_a_call_waits_for_its_kernels_at_its_end_and_begins_with_an_idle_gpu(machine):
    recorder = Recorder(0, 0, clock=EventClock(machine.event))
    machine.launch(1000)  # of what was loaded before
    with recorder.call(CALL):
        assert machine.now_ms == 1000
        with recorder.span("forward"):
            machine.launch(10)
        assert machine.now_ms == 1000
    assert machine.now_ms == 1010


def test_spans_outside_a_call_are_told_of_too(machine):
    recorder = Recorder(0, 0, clock=EventClock(machine.event))
    with recorder.span("offload"):
        machine.launch(10)
    with recorder.call(CALL), recorder.span("forward"):
        machine.launch(20)
    assert [(span.name, span.call_id, *milliseconds(span)) for span in recorder.take()[0]] == [
        ("offload", -1, 0, 10), ("forward", 7, 10, 20)
    ]  # fmt: skip


def test_events_are_used_again(machine):
    recorder = Recorder(0, 0, clock=EventClock(machine.event))
    training(machine, recorder)
    made = machine.made
    for _ in range(5):
        training(machine, recorder)
    assert machine.made <= made + 1


def test_a_kernel_that_fails_is_told_at_the_end_of_its_call_and_spans_keep_the_hosts_times(machine):
    recorder = Recorder(0, 0, clock=EventClock(machine.event))

    def fail():
        with recorder.call(CALL), recorder.span("forward"):
            machine.launch(10)
            machine.host(1)
            machine.broken = True

    with pytest.raises(RuntimeError, match="illegal memory access"):
        fail()
    done, running = recorder.take()
    assert not running
    assert [(span.name, *milliseconds(span)) for span in done] == [("forward", 0, 1)]


def test_offsets_of_events_from_the_anchor():
    start_ns = 1_700_000_000_000_000_000
    assert aligned(start_ns, [(0.0, 2.5), (1.25, 0.0)]) == [(start_ns, 0.0025), (start_ns + 1_250_000, 0.0)]


def test_the_processor_of_this_thread_is_counted():
    recorder = Recorder(0, 0, gauge=lambda: {"rss_bytes": 5})
    with recorder.span("outer"), recorder.span("inner"):
        sum(itertools.islice(itertools.count(), 200_000))
    inner, outer = recorder.take()[0]
    assert 0 < inner.attrs["cpu_s"] <= outer.attrs["cpu_s"]
    assert inner.start_ns >= outer.start_ns
    assert inner.duration_s <= outer.duration_s
    assert inner.attrs["rss_bytes"] == 5
