"""A file that is summed while it is written: pieces and long writes, what a disk refuses, what reads back otherwise."""

import os
import random
import zlib

import pytest
import torch
from expect import refuses

from hfsdk.core.errors import CheckpointError
from hfsdk.core.files import FileSum
from hfsdk.core.store import StorePath
from hfsdk.engine.weights import summed_file
from hfsdk.engine.weights.summed_file import PIECE_BYTES, SummedFile

SIZES = {
    "nothing": [], "empty writes": [0, 0], "short ones": [1, 30, 64] * 50, "up to a piece": [PIECE_BYTES - 1, 1, 1],
    "a piece": [PIECE_BYTES], "mixed": [10, PIECE_BYTES + 1, 7, PIECE_BYTES - 3, 2, 2, 3 * PIECE_BYTES, 5],
    "more places than are kept": [PIECE_BYTES] * 40,
}  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_what_is_written_is_there_and_summed(tmp_path, sizes):
    rng = random.Random(0)
    data = [rng.randbytes(size) for size in sizes]
    with SummedFile(tmp_path / "a") as file:
        at = 0
        for one in data:
            assert file.write(one) == len(one)
            at += len(one)
            assert file.tell() == at
    whole = b"".join(data)
    assert (tmp_path / "a").read_bytes() == whole
    assert file.sum == FileSum(len(whole), zlib.crc32(whole)) == FileSum.of(tmp_path / "a")


def test_a_buffer_may_change_once_it_was_written(tmp_path):
    data = bytearray(b"abc")
    with SummedFile(tmp_path / "a") as file:
        file.write(data)
        data[:] = b"xyz"
    assert (tmp_path / "a").read_bytes() == b"abc"


def test_a_tensor_saved_into_it_loads(tmp_path):
    with SummedFile(tmp_path / "a") as file:
        torch.save({"x": torch.arange(400_000)}, file)
    assert torch.equal(torch.load(tmp_path / "a", weights_only=True)["x"], torch.arange(400_000))
    assert file.sum == FileSum.of(tmp_path / "a")


def test_a_disk_that_refuses_is_told_when_asked_and_at_the_end(tmp_path):
    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            kept.close()

    file = SummedFile(tmp_path / "a")
    kept, file._file = file._file, Full()
    file.write(bytes(10))
    file.check()  # not yet on its way
    file.write(bytes(2 * PIECE_BYTES))
    for ask in (file.check, lambda: file.__exit__(None, None, None)):
        with pytest.raises(OSError, match="No space left"):
            ask()


def test_an_error_in_the_block_leaves_nothing_to_write(tmp_path):
    file = SummedFile(tmp_path / "a")
    file.write(b"short")
    file.__exit__(KeyError, KeyError("x"), None)
    file.close()  # as its finalizer does
    assert (tmp_path / "a").read_bytes() == b""


def test_what_reads_back_otherwise_is_told(tmp_path, monkeypatch):
    def fsync(fd):
        os.pwrite(fd, b"?", 5)

    monkeypatch.setattr(summed_file.os, "fsync", fsync)
    with refuses(CheckpointError, "byte 0"), SummedFile(tmp_path / "a") as file:
        file.write(b"something")


def test_an_object_is_summed_as_it_is_sent(monkeypatch):
    path = StorePath("memory://bucket/file")
    with SummedFile(path) as file:
        for _ in range(5):
            file.write(b"abc" * 500_000)
    assert file.sum == FileSum(7_500_000, zlib.crc32(b"abc" * 2_500_000)) == FileSum.of(path)
    assert path.parent.ranges([("file", 3, 3), ("file", 0, 1)]) == [b"abc", b"a"]
    file = SummedFile(path)
    file.write(b"x" * 10)
    monkeypatch.setattr(StorePath, "ranges", lambda self, places: [b"y" * 10])
    with refuses(CheckpointError, "reads back otherwise"):
        file.__exit__(None, None, None)
