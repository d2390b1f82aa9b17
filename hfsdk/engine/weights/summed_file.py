"""A file whose checksum is made on its way to the disk or the store, and of which a few places are read back from there."""

from __future__ import annotations

import io
import os
import sys
import zlib
from collections.abc import Iterator
from typing import Any, Self

from hfsdk.core.errors import CheckpointError
from hfsdk.core.files import FileSum
from hfsdk.core.store import AnyPath, StorePath, Upload

SAMPLE_BYTES = 1 << 16
"""Longest stretch that is read back from one place."""

MOST_SAMPLES = 16
"""Places that are read back; as the file grows, every other one is dropped."""

PIECE_BYTES = 1 << 20
"""Shorter writes are put together up to this: torch.save makes twenty for a tensor, and each that reached the disk
would let another thread's Python go first."""


class SummedFile(io.RawIOBase):
    """A file that is written once from its beginning to its end. Leaving the block brings it to the disk and reads samples back.

    A failure to write is kept for :meth:`check`: raised inside ``torch.save``, C++ would end the process over it.

    Attributes:
        sum: the sum that the file must have when it is read again.
    """

    def __init__(self, path: AnyPath) -> None:
        """Open a new file.

        Raises:
            OSError: it exists, or cannot be made.
        """
        self.path = path
        self._file = path.write() if isinstance(path, StorePath) else path.open("xb", buffering=0)
        self._failure: OSError | None = None
        self._samples: list[tuple[int, int, int]] = []
        self._stride, self._writes = 1, 0
        self._piece = bytearray()
        self.sum = FileSum(0, 0)

    def writable(self) -> bool:
        """Say yes."""
        return True

    def write(self, data: Any) -> int:
        """Write all of it."""
        view = memoryview(data).cast("B")
        if len(self._piece) + len(view) > PIECE_BYTES:
            self.flush()
        if len(view) < PIECE_BYTES:
            self._piece += view
        else:
            self._write(view)
        return len(view)

    def flush(self) -> None:
        """Write the buffer to the file."""
        piece, self._piece = self._piece, bytearray()
        if piece:
            self._write(memoryview(piece))

    def _write(self, view: memoryview) -> None:
        if self._failure is None:
            try:
                self._bring(view)
            except OSError as error:
                self._failure = error

    def _bring(self, view: memoryview) -> None:
        assert self.sum.crc32 is not None
        at, crc, rest = self.sum.num_bytes, zlib.crc32(view, self.sum.crc32), view
        while rest:
            rest = rest[self._file.write(rest) :]
        if self._writes % self._stride == 0:
            self._samples.append((at, min(len(view), SAMPLE_BYTES), zlib.crc32(view[:SAMPLE_BYTES])))
            if len(self._samples) > MOST_SAMPLES:
                self._samples, self._stride = self._samples[::2], self._stride * 2
        self._writes += 1
        self.sum = FileSum(at + len(view), crc)

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self.sum.num_bytes + len(self._piece)

    def check(self) -> None:
        """Raise the error that kept bytes from being written.

        Raises:
            OSError: the first failure.
        """
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self.flush()
                self.check()
                if isinstance(self._file, Upload):
                    self._file.close()
                else:
                    os.fsync(self._file.fileno())
                self._read_back()
        finally:
            self._piece.clear()
            if isinstance(self._file, Upload):
                self._file.discard()  # nothing where it is complete
            else:
                self._file.close()

    def _read_back(self) -> None:
        """Compare samples with the written bytes."""
        for (at, _, crc), sample in zip(self._samples, self._samples_there(), strict=True):
            if zlib.crc32(sample) != crc:
                raise CheckpointError(f"{self.path} reads back otherwise than written, at byte {at}; is the disk damaged?")

    def _samples_there(self) -> Iterator[bytes]:
        """Read the samples: from the store, or from the disk where its pages can be let go."""
        if isinstance(self.path, StorePath):
            yield from self.path.parent.ranges([(self.path.name, at, length) for at, length, _ in self._samples])
            return
        with self.path.open("rb", buffering=0) as file:
            for at, length, _ in self._samples:
                if sys.platform == "linux":
                    os.posix_fadvise(file.fileno(), at, length, os.POSIX_FADV_DONTNEED)
                file.seek(at)
                yield file.read(length)
