"""Numbers as pictures say them: bytes by powers of 1000, and waiting for another pipeline stage as not busy."""

import pytest

from hfsdk.core.trace import Span, Trace
from hfsdk.viz.frame import bytes_text
from hfsdk.viz.pictures.timeline import timeline_view


def test_bytes_are_in_the_unit_that_leaves_three_digits():
    wanted = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 12_300: "12.3 kB", 4.5e6: "4.50 MB", 7e8: "700 MB", 1.25e9: "1.25 GB"}
    wanted |= {80e9: "80.0 GB", 3.2e12: "3.20 TB", -2e6: "-2.00 MB", None: "not measured", float("nan"): "not measured"}
    assert {number: bytes_text(number) for number in wanted} == wanted


def test_a_stage_that_waits_is_not_busy():
    def span(name, start_s, seconds):
        start_ns = round(start_s * 1e9)
        return Span(name=name, role="actor", call_id=1, method="update", device=0, rank=0, start_ns=start_ns, duration_s=seconds)

    view = timeline_view(Trace.of([span("forward", 0, 1), span("wait", 1, 2), span("backward", 3, 1)]))
    (lane,) = [lane for lane in view["lanes"] if lane["kind"] == "device"]
    assert lane["busy_share"] == pytest.approx(0.5)
    assert lane["idle"] == []
