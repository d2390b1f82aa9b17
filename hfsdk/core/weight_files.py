"""A folder's files of weights, as their index and headers say: checked before a number of them is read.

::

    model.safetensors.index.json     {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors", ...}}
    model-00002-of-00002.safetensors
        8 bytes                      length of the header
        header                       {"model.norm.weight": {"dtype": "BF16", "shape": [256], "data_offsets": [0, 512]}, ...}
        the numbers                  one tensor behind the other, to the end of the file

The format is that of https://github.com/huggingface/safetensors; what its library refuses is refused here in a sentence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from hfsdk.core.errors import ModelNotFoundError
from hfsdk.core.rules import is_whole, shown
from hfsdk.core.untrusted import descriptor_path, has_file, open_file, parse_json, read_json, shown_reason, where

WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"
"""Names of a file of weights and, as peft writes it, of adapters; of several files their index has it before its own ending."""

MOST_HEADER_BYTES = 100_000_000
"""Longest header that is read, the limit of the format's own library."""

METADATA = "__metadata__"

MOST_NUMBER = 2**63
"""Most bits in a tensor, and most of anything that a header counts."""

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "F16": 16, "BF16": 16,
    "F32": 32, "F64": 64, "C64": 64, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of a number, by dtype."""

PIECE_BYTES = 1 << 22
"""Bytes of two tensors that are compared at a time."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Names of the two that a model may tie."""

READ = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that models here are loaded from; others are quantised and mean something together with their scales."""


@dataclass(frozen=True)
class TensorPlace:
    """A tensor as a header has it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte of its numbers, behind the header."""
    end: int
    """The byte behind the last of its numbers."""


class WeightFiles:
    """The files of weights in a folder, opened as they are needed; a context manager that closes them.

    Attributes:
        folder: the folder that has them.
        files: name of a tensor -> name of its file.
        source: path of the index, or of the single file.
    """

    def __init__(self, folder: str | Path, name: str = WEIGHTS) -> None:
        """Read the index or, of a single file, its header.

        Args:
            folder: the folder that has them.
            name: name of the single file; an index has ``.index.json`` behind it.

        Raises:
            ModelNotFoundError: there are none, or one of the two is damaged.
        """
        self.folder = str(folder)
        self._open: dict[str, BinaryIO] = {}
        self._headers: dict[str, Mapping[str, TensorPlace]] = {}
        self._stack = ExitStack()
        index = f"{name}.index.json"
        self.source = where(self.folder, index if has_file(folder, index) else name)
        if has_file(folder, index):
            self.files = _files_of(self.folder, index)
            if has_file(folder, name) and {*self.files.values()} != {name}:
                raise ModelNotFoundError(
                    f"{folder} has {name} and {index}, which names other files: one of the two is left over from another model. "
                    "transformers would read the first alone. Remove one of them."
                )
        elif has_file(folder, name):
            self.files = dict.fromkeys(self.header(name), name)
        else:
            raise ModelNotFoundError(
                f"{folder} has no weights: neither {name} nor {index}. A model folder is what transformers' save_pretrained "
                "writes, one of adapters what peft's does."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def path(self, file: str) -> str:
        """Return a path of a file, open from now on, for a library that opens it itself; its header has been checked.

        Raises:
            ModelNotFoundError: it cannot be read, or its header is damaged.
        """
        if file not in self._open:
            opened = self._stack.enter_context(open_file(self.folder, file))
            self._headers[file] = _header(self.folder, file, opened)
            self._open[file] = opened
        return descriptor_path(self._open[file])

    def header(self, file: str) -> Mapping[str, TensorPlace]:
        """Return the tensors of a file.

        Raises: as :meth:`path`.
        """
        if file not in self._headers:
            with open_file(self.folder, file) as opened:
                self._headers[file] = _header(self.folder, file, opened)
        return self._headers[file]

    def place(self, name: str) -> TensorPlace:
        """Return a tensor that :attr:`files` has.

        Raises:
            ModelNotFoundError: as :meth:`path`, or the file that the index names for it lacks it.
        """
        file = self.files[name]
        place = self.header(file).get(name)
        if place is None:
            raise ModelNotFoundError(
                f"{where(self.folder, file)} lacks {shown(name)}, which the index says it has. Take another copy."
            )
        return place

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raises as :meth:`place`."""
        return self.place(name).shape

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors have the same numbers in the same form, bit for bit.

        Raises: as :meth:`place`.
        """
        first, second = self.place(name), self.place(other)
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        pieces = zip(self._bytes(name, first), self._bytes(other, second), strict=True)
        return all(own_bytes == theirs for own_bytes, theirs in pieces)

    def _bytes(self, name: str, place: TensorPlace) -> Iterator[bytes]:
        with open_file(self.folder, self.files[name]) as file:
            at, left = 8 + int.from_bytes(file.read(8), "little") + place.begin, place.end - place.begin
            file.seek(at)
            while left > 0:
                piece = file.read(min(left, PIECE_BYTES))
                if not piece:
                    raise ModelNotFoundError(f"{where(self.folder, self.files[name])} was cut short meanwhile. Take another copy.")
                left -= len(piece)
                yield piece

    def check_listed(self) -> None:
        """Check that the files have the tensors that the index says, each in its file, and no others.

        Raises:
            ModelNotFoundError: names one that is not listed, or lies in two files.
        """
        for file in sorted(set(self.files.values())):
            for tensor in self.header(file):
                there = self.files.get(tensor)
                if there != file:
                    said = "does not list" if there is None else f"says is in {shown(there)}"
                    raise ModelNotFoundError(
                        f"{where(self.folder, file)} has {shown(tensor)}, which {self.source} {said}: one of the two is of another "
                        "model. Take another copy."
                    )


def own_head(folder: str | Path) -> bool:
    """Whether a folder's files have a head, besides the embeddings, that differs from them; without weights it has none.

    transformers and vLLM keep such a head even where config.json ties it.

    Raises:
        ModelNotFoundError: a file is damaged.
    """
    if not has_file(folder, WEIGHTS) and not has_file(folder, f"{WEIGHTS}.index.json"):
        return False
    with WeightFiles(folder) as files:
        return HEAD in files.files and EMBEDDING in files.files and not files.same(HEAD, EMBEDDING)


def weight_names(folder: str | Path, name: str = WEIGHTS) -> set[str]:
    """Return the names of the weights in a folder, or of adapters; reads only the index and the files' headers.

    Raises:
        ModelNotFoundError: there are none, or a file is damaged.
    """
    with WeightFiles(folder, name) as files:
        for tensor in files.files:
            files.place(tensor)
        return set(files.files)


def _files_of(folder: str, index: str) -> dict[str, str]:
    files = read_json(folder, index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelNotFoundError(
            f"{folder}/{index} is damaged: it has no weight_map of tensors and their files. Take another copy."
        )
    for file in dict.fromkeys(file_name if isinstance(file_name, str) else repr(file_name)[:100] for file_name in files.values()):
        if not file.endswith(".safetensors") or Path(file).name != file or "\\" in file or "\0" in file:
            raise ModelNotFoundError(
                f"{folder}/{index} is damaged: it names {shown(file)}, which is no *.safetensors of the folder. Take another copy."
            )
        if not has_file(folder, file):
            raise ModelNotFoundError(f"{folder}/{index} names {shown(file)}, but the file is missing. Take another copy.")
    return files


def _header(folder: str, name: str, file: BinaryIO) -> Mapping[str, TensorPlace]:
    """Return the checked header of an open file."""
    try:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MOST_HEADER_BYTES, size - 8):
            claim = f"its header would have {length:,} bytes; the file has {size:,}"
            raise ValueError(f"{claim}, and a header at most {MOST_HEADER_BYTES:,}")
        return _tensors(parse_json(file.read(length)), size - 8 - length)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise ModelNotFoundError(
            f"{where(folder, name)} is no safetensors file, or is damaged: {shown_reason(error)}. Take another copy."
        ) from None


def _tensors(header: Any, num_bytes: int) -> dict[str, TensorPlace]:
    """Return the tensors of a header, which follow each other and fill the file's ``num_bytes``."""
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"{METADATA} is no object of texts")
    places = {name: _place(name, tensor, num_bytes) for name, tensor in header.items()}
    reached = 0
    # Without gaps and overlaps, as the format wants: bytes between tensors could hold anything, and shared ones would be loaded
    # twice.
    for begin, end, name in sorted((place.begin, place.end, name) for name, place in places.items()):
        if begin != reached:
            raise ValueError(f"{shown(name)} begins at byte {begin:,}, and what is before it ends at {reached:,}")
        reached = end
    if reached != num_bytes:
        raise ValueError(f"its tensors have {reached:,} bytes; behind the header are {num_bytes:,}")
    return places


def _place(name: str, tensor: Any, num_bytes: int) -> TensorPlace:
    if not isinstance(tensor, dict) or tensor.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown(name)} has no dtype, shape and data_offsets")
    dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{shown(name)} has dtype {shown(dtype)}; known are {', '.join(BITS)}")
    bits, lengths = BITS[dtype], shape if isinstance(shape, list) else [-1]
    for length in lengths:
        # A product of absurd lengths is not made: Python would compute a number of any size.
        bits = bits * length if is_whole(length) and 0 <= length < MOST_NUMBER else MOST_NUMBER
        if bits >= MOST_NUMBER:
            raise ValueError(f"{shown(name)} has shape {shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_whole, offsets)):
        raise ValueError(f"{shown(name)} has data_offsets {shown(offsets)}")
    begin, end = offsets
    if not 0 <= begin <= end <= num_bytes or bits != 8 * (end - begin):
        at = f"at bytes {shown(begin)} to {shown(end)} of {num_bytes:,}"
        raise ValueError(f"{shown(name)} is {dtype} of shape {shown(shape)} {at}, which does not fit")
    return TensorPlace(dtype, tuple(shape), begin, end)
