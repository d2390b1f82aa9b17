"""Files of tensors for the tables: zeros that take no room on the disk, or ones where two tensors have to differ."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import hfsdk as hf
from hfsdk.core.weight_files import BITS, WEIGHTS

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype, shape)."""


def tensors_of(folder: Path, dtype: str = "BF16") -> Tensors:
    """Return what a folder's ``config.json`` asks for."""
    return {name: (dtype, shape) for name, shape in hf.ModelSpec.from_folder(folder).tensors().items()}


def write(path: Path, tensors: Tensors, ones: Iterable[str] = ()) -> None:
    """Write a file of safetensors; all numbers are 0, but those of ``ones`` are about 0.7."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        start = file.tell()
        file.truncate(start + end)
        for name in ones:
            begin, after = header[name]["data_offsets"]
            file.seek(start + begin)
            file.write(b"\x3f" * (after - begin))


def change(folder: Path, more: Tensors, without: Iterable[str] = (), ones: Iterable[str] = ()) -> Path:
    """Write a folder's weights again with other tensors beside its own, or in the place of some; return the folder."""
    tensors = {**tensors_of(folder), **more}
    write(folder / WEIGHTS, {name: tensor for name, tensor in tensors.items() if name not in without}, ones)
    return folder


def shard(folder: Path, moved: Mapping[str, str] | None = None, more: Tensors | None = None) -> Path:
    """Cut a folder's weights into two files with an index; return the folder.

    Args:
        folder: of a model.
        moved: changes what the index says, by name of a tensor.
        more: tensors that the second file has as well, which the index does not list.
    """
    tensors = tensors_of(folder)
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, part in files.items():
        write(folder / file, {name: tensors[name] for name in part} | ((more or {}) if file.startswith("model-00002") else {}))
    weight_map = {name: file for file, part in files.items() for name in part} | dict(moved or {})
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()
    return folder
