"""Every executable pair of layouts on two and four ranks with both engines."""

import pytest
from test_transition import check_pairs, folders  # noqa: F401

ON_TWO, ON_FOUR = ["tp2", "pp2", "dp2"], ["tp4", "pp4", "dp4", "tp2 pp2", "tp2 dp2", "pp2 dp2"]


@pytest.mark.parametrize(("world_size", "tp"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_every_executable_pair(world_size, tp, folders, tmp_path):  # noqa: F811
    check_pairs(world_size, tp, folders, tmp_path, ON_TWO if world_size == 2 else ON_FOUR)
