"""What a generation leaves behind of its running dry."""

from __future__ import annotations

import json
from itertools import pairwise

from hfsdk.engine.generation.rollout import MOST_POINTS, Drain


def test_a_long_generation_keeps_evenly_spread_points():
    drain = Drain()
    assert not drain
    for step in range(10_000):
        drain.sample(10_000 - step, 0, 0.5, seconds=float(step))
    points = json.loads(str(drain))
    assert MOST_POINTS / 2 <= len(points) <= MOST_POINTS
    steps = {round(b[0] - a[0]) for a, b in pairwise(points)}
    assert len(steps) == 1, "every k-th step"
    assert points[0] == [0.0, 10_000, 0, 0.5]
    assert all(p[1] == 10_000 - p[0] for p in points)
