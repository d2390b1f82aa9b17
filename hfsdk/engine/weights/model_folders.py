"""A model's folder on nodes that lack it: the files that belong to it, whether a node has the same, and taking in sent files.

::

    user's machine                          a node
    Manifest.of(folder)      -- asks -->    find(manifest): the same path with the same files, or the cache, or nothing
    read_pieces(manifest)    -- sends -->   Receiver.write(...), finish() -> $HFSDK_HOME/models/fetched/<digest>

A folder is sent a piece at a time, so that neither side ever holds a file, and appears in the cache whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hfsdk.assets.cache import home
from hfsdk.core.untrusted import open_file, regular_names

SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of the files in a model's folder that the engines and the tokenizer read."""

PIECE_BYTES = 32 * 2**20

NUM_SAMPLES, SAMPLE_BYTES = 64, 64 * 2**10
"""A larger file is told from others of its size by so many samples, evenly spread from its beginning to its end."""


@dataclass(frozen=True)
class FileMark:
    """A file's name, size and digest."""

    name: str
    size: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> FileMark:
        """Read a file, or samples of a large one."""
        digest = hashlib.blake2b(digest_size=16)
        with open_file(path.parent, path.name) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= NUM_SAMPLES * SAMPLE_BYTES:
                digest.update(file.read())
            else:
                for k in range(NUM_SAMPLES):
                    file.seek((size - SAMPLE_BYTES) * k // (NUM_SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
        return cls(path.name, size, digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """A model's folder by its files, in the order of their names."""

    folder: str
    files: tuple[FileMark, ...]

    @classmethod
    def of(cls, folder: str | Path) -> Manifest:
        """Read a folder; files that :mod:`hfsdk.core.untrusted` does not open are not of it."""
        names = [name for name in regular_names(folder) if Path(name).suffix in SUFFIXES]
        return cls(str(folder), tuple(FileMark.of(Path(folder, name)) for name in names))

    @property
    def digest(self) -> str:
        """Digest over all files, which names the folder in a cache."""
        return hashlib.blake2b(repr(self.files).encode(), digest_size=16).hexdigest()

    @property
    def cached(self) -> Path:
        """The place of the folder in this machine's cache."""
        return home() / "models" / "fetched" / self.digest


def find(manifest: Manifest, *, own_path: bool = True) -> str:
    """Return this machine's folder with the same files, ``""`` where it has none.

    Args:
        manifest: the manifest of the folder on the user's machine.
        own_path: whether the folder of the same path may be it.
    """
    for path in (Path(manifest.folder), manifest.cached) if own_path else (manifest.cached,):
        if path.is_dir() and Manifest.of(path).files == manifest.files:
            return str(path)
    return ""


def read_pieces(manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """Return (file name, bytes) of everything in the folder, in pieces of at most ``PIECE_BYTES``; an empty file has one."""
    for mark in manifest.files:
        with open_file(manifest.folder, mark.name) as file:
            piece = file.read(PIECE_BYTES)
            while True:
                yield mark.name, piece
                piece = file.read(PIECE_BYTES)
                if not piece:
                    break


class Receiver:
    """A receiver that takes a folder in, piece by piece, into a temporary folder next to its place."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        target = manifest.cached
        target.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))

    def write(self, name: str, piece: bytes) -> None:
        """Append to a file."""
        with (self._folder / Path(name).name).open("ab") as file:
            file.write(piece)

    def finish(self) -> None:
        """Put the folder into its place; where another process was faster, its folder stays.

        Raises:
            OSError: what came differs from what was announced.
        """
        try:
            if Manifest.of(self._folder).files != self._manifest.files:
                raise OSError(f"the files of {self._manifest.folder} changed while they were sent")
            self._folder.chmod(0o755)
            try:
                self._folder.rename(self._manifest.cached)
            except OSError:
                if not find(self._manifest, own_path=False):
                    raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
