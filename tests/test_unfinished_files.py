"""A file that could not be written to its end leaves what was there before, and nothing beside it."""

import pytest

from hfsdk.core.files import beside


def write_half(path):
    with beside(path) as partial:
        partial.write_text("ne")
        raise OSError("the disk is full")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(OSError, match="full"):
        write_half(path)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("report.html", "old")]
    with beside(path) as partial:
        partial.write_text("new")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("report.html", "new")]
