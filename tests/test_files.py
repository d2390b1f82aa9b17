"""Why a file could not be written, as the user is told."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from expect import each

from hfsdk.core.files import existing_parent, why_unwritten

TORCH = "[enforce fail at inline_container.cc:672] . unexpected pos 1290304 vs 1290198"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch):
    def set_to(num_bytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, num_bytes))

    return set_to


def wrapped(error):
    try:
        try:
            raise error
        except OSError as inner:
            raise RuntimeError("inside torch") from inner
    except RuntimeError as outer:
        return outer


@each(
    "error",
    [
        RuntimeError(TORCH), TORCH, f"RuntimeError: {TORCH}", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("PytorchStreamWriter failed writing file data/0"), wrapped(OSError(errno.ENOSPC, "No space left on device")),
    ],
)  # fmt: skip
def test_a_full_disk_is_called_so_and_says_what_to_do(tmp_path, free, error):
    free(20_000)
    words = why_unwritten(tmp_path / "not" / "there", error)
    assert words.startswith("No space left on device")
    assert "(0.0 MB are free). Free some space, or give a folder on another disk" in words
    assert "inline_container" not in words
    assert "enforce fail" not in words


@each("error", [RuntimeError(TORCH), TORCH])
def test_with_room_on_the_disk_a_file_that_ended_early_is_called_so(tmp_path, free, error):
    free(10**9)
    assert why_unwritten(tmp_path, error) == "a file could not be written to its end"


@each("error", [OSError(errno.EFBIG, "File too large"), wrapped(OSError(errno.EFBIG, "File too large"))])
def test_other_refusals_keep_their_words(tmp_path, free, error):
    free(10**9)
    assert why_unwritten(tmp_path, error) == "File too large"


@each("number", [errno.EDQUOT, errno.ENOSPC])
def test_where_the_system_says_that_there_is_no_room_there_is_none_whatever_is_free(tmp_path, free, number):
    """A quota is full, or the disk has no more names for files."""
    free(10**9)
    words = why_unwritten(tmp_path, OSError(number, os.strerror(number)))
    assert words.startswith(f"{os.strerror(number)} (1,000.0 MB are free). Free some space")


def test_the_innermost_folder_that_exists_is_asked(tmp_path):
    assert existing_parent(tmp_path / "a" / "b") == tmp_path
    assert existing_parent(tmp_path) == tmp_path
    assert existing_parent(Path("/no/such/path")) == Path("/")
