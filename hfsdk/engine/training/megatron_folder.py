"""A Megatron model and a folder of Hugging Face's: weights read into the ranks, gathered from them, and written."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hfsdk.core.errors import CheckpointError, ModelNotFoundError
from hfsdk.core.files import existing_parent, why_unwritten
from hfsdk.core.layout import Coordinates
from hfsdk.core.lora import ADAPTER_CONFIG, PEFT, A, AdapterSpec, B, LoRA
from hfsdk.core.roles import RoleSpec
from hfsdk.core.spec import SCALAR_HEAD_NAMES, ModelSpec
from hfsdk.core.tokenizer_files import COMPANIONS, NAMED_TEMPLATES, TOKENIZER_CONFIG, named_templates
from hfsdk.core.untrusted import changed_json, has_file, json_bytes, read_file, read_json, shown_reason, where
from hfsdk.core.weight_files import ADAPTER_WEIGHTS, WEIGHTS, WeightFiles
from hfsdk.core.whole_folders import check_adapter_weights, check_model_weights
from hfsdk.engine.training.megatron_groups import RoleGroups
from hfsdk.engine.training.megatron_model import SelectiveGPTModel, base_tensors, has_scalar_head, local_tensors
from hfsdk.engine.weights.role_state import SCALAR_HEAD
from hfsdk.resharding.boxes import Box, megatron_boxes

PARTIAL = ".hfsdk-export.partial"
"""Name of the folder in which a model's files are written until all are complete."""

SPARE_BYTES = 1 << 20
"""Bytes of a model besides its numbers: config.json, the tokenizer."""

CODE = "auto_map"
"""Key under which files name code that loads them; it is not read here, and a reader that trusts it would fetch it."""


def _boxes(spec: ModelSpec, groups: RoleGroups, scalar: bool, at: Coordinates) -> list[Box]:
    boxes = megatron_boxes(spec, groups.mesh.layout, at.tp, at.pp)
    return [box for box in boxes if not (scalar and box.local == SCALAR_HEAD)]


def _part(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


class _FolderWeights(WeightFiles):
    """The weights of a folder, each file opened once."""

    def __init__(self, folder: str | Path, name: str = WEIGHTS) -> None:
        super().__init__(folder, name)
        self._read: dict[str, Any] = {}

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        file = self.files[name]
        try:
            if file not in self._read:
                self._read[file] = self._stack.enter_context(safe_open(self.path(file), framework="pt"))
            values: torch.Tensor = self._read[file].get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise ModelNotFoundError(
                f"{where(self.folder, file)} cannot be read: {shown_reason(error)}. Take another copy."
            ) from None
        return values


@torch.no_grad()
def load_folder(model: SelectiveGPTModel, spec: ModelSpec, groups: RoleGroups, folder: str | Path) -> bool:
    """Read this rank's boxes from a folder's safetensors; padding rows become zero.

    Returns:
        Whether a scalar head was read (``score.weight`` or ``value_head.weight``); without one it stays as it is.

    Raises:
        ModelNotFoundError: no weights, or tensors missing or of another shape.
    """
    scalar = has_scalar_head(model)
    boxes = _boxes(spec, groups, scalar, groups.coordinates)
    local = base_tensors(model)
    with _FolderWeights(folder) as files:
        check_model_weights(files, spec, scalar=scalar)  # what all stages have
        for name in ("embedding.word_embeddings.weight", SCALAR_HEAD):
            if name in local and not (scalar and name == SCALAR_HEAD):
                local[name].zero_()
        for box in boxes:
            target = local[box.local][_part(box.local_start, box.size)]
            target.copy_(files.read(box.tensor, _part(box.start, box.size)))
        head_name = next((name for name in SCALAR_HEAD_NAMES if name in files.files), None) if scalar else None
        if head_name and SCALAR_HEAD in local:
            local[SCALAR_HEAD].copy_(files.read(head_name, _part((0, 0), (1, spec.hidden_size))))
    return head_name is not None


def gather_tensors(
    local: Mapping[str, torch.Tensor], spec: ModelSpec, groups: RoleGroups, *, scalar: bool
) -> dict[str, torch.Tensor] | None:
    """Put tensors shaped like the parameters (weights, gradients) together under their Hugging Face names.

    Collective over the role. Returns CPU tensors on rank 0 and ``None`` elsewhere.
    """
    own_tensors = {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in local.items()}
    tensors_by_rank = groups.gather(own_tensors, dict[str, tuple[tuple[int, ...], str]])
    # Data-parallel ranks have the same tensors: those of the first one are enough.
    if groups.dp_rank != groups.mesh.coordinates(0).dp:
        return None
    shapes = spec.tensors()
    full: dict[str, torch.Tensor] = {}
    for rank in (world_rank - groups.first for world_rank in dist.get_process_group_ranks(groups.mp)):
        by_local = _by_local(_boxes(spec, groups, scalar, groups.mesh.coordinates(rank)))
        for name, (shape, dtype_name) in tensors_by_rank[rank].items():
            dtype = getattr(torch, dtype_name)
            shard = _from_rank(rank, local.get(name), shape, dtype, groups)
            if shard is None:
                continue
            for box in by_local.get(name, ()):
                if box.tensor not in full:
                    full[box.tensor] = torch.empty(shapes[box.tensor], dtype=dtype)
                full[box.tensor][_part(box.start, box.size)] = shard[_part(box.local_start, box.size)].cpu()
            if scalar and name == SCALAR_HEAD:
                full[SCALAR_HEAD_NAMES[0]] = shard.cpu().clone()
    if groups.rank != 0:
        return None
    return {name: full[name] for name in (*shapes, SCALAR_HEAD_NAMES[0]) if name in full}


def _by_local(boxes: list[Box]) -> dict[str, list[Box]]:
    by_local: dict[str, list[Box]] = {}
    for box in boxes:
        by_local.setdefault(box.local, []).append(box)
    return by_local


def _from_rank(
    rank: int, own: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, groups: RoleGroups
) -> torch.Tensor | None:
    """Bring ``rank``'s tensor to rank 0 of its replica; returns it there and ``None`` elsewhere."""
    if groups.rank == 0:
        if rank == 0:
            assert own is not None
            return own.detach()
        received = torch.empty(shape, dtype=dtype, device=groups.device)
        dist.recv(received, src=groups.first + rank, group=groups.mp)
        return received
    if groups.rank == rank:
        assert own is not None
        dist.send(own.detach().contiguous(), dst=groups.first, group=groups.mp)
    return None


def gather_full(
    model: SelectiveGPTModel, spec: ModelSpec, groups: RoleGroups, *, merge: bool = True
) -> dict[str, torch.Tensor] | None:
    """Return the whole model under Hugging Face names on rank 0 (``None`` elsewhere), in its own dtype; collective.

    Adapters are added to their weights or, where they shall not be merged, returned alone.
    """
    scalar, adapters = has_scalar_head(model), model.adapters
    own = None if adapters is None else gather_tensors(local_tensors(model), adapters, groups, scalar=scalar)
    if adapters is not None and not merge:
        return own
    full = gather_tensors(base_tensors(model), spec, groups, scalar=scalar)
    if full is not None and own is not None and adapters is not None:
        _merge(full, own, adapters.lora)
    return full


def save_folder(
    model: SelectiveGPTModel, spec: ModelSpec, groups: RoleGroups, folder: str | Path, role: RoleSpec, *, merge: bool = True
) -> list[str]:
    """Write the model so that transformers' ``from_pretrained`` (and :func:`load_folder`) reads it; collective.

    A scalar head makes it e.g. a ``LlamaForSequenceClassification`` with one label.

    Args:
        model: the model.
        spec: its architecture.
        groups: its process groups.
        folder: the folder to write to; made if missing, files in it are replaced.
        role: says which folder the model came from, and its adapters: config.json, generation_config.json and the tokenizer's files
            are copied, byte for byte where training changes nothing that they say, but for what a link leads to.
        merge: whether adapters are added to their weights; else they alone are written, as peft does.

    Returns:
        On rank 0 why files of the tokenizer are left out, a sentence each; elsewhere nothing.

    Raises:
        CheckpointError: on every rank, when it cannot be written; the files that were there are unchanged.
    """
    full, adapters = gather_full(model, spec, groups, merge=merge), None if merge else model.adapters
    problem, left_out = None, list[str]()
    if full is not None:
        try:
            if adapters is not None:
                left_out = _write_adapters(full, adapters, Path(folder), role)
            else:
                left_out = _write(full, spec, Path(folder), Path(role.folder), scalar=has_scalar_head(model))
        except Exception as caught:  # whatever it is, the other ranks wait to hear of it
            problem = why_unwritten(Path(folder), caught)
    problems = [text for text in groups.gather(problem, str | None) if text]
    if problems:
        raise CheckpointError(f"cannot write the model to {folder}: {problems[0]}; what was there before is unchanged")
    return left_out


def _merge(full: dict[str, torch.Tensor], adapters: Mapping[str, torch.Tensor], lora: LoRA) -> None:
    """Add scale B A to every weight that has an adapter, in float32; all by Hugging Face name."""
    for name, a in adapters.items():
        if name.endswith(A):
            module = name.removesuffix(A)
            weight = full[module + ".weight"]
            weight.copy_(weight.float() + lora.scale * (adapters[module + B].float() @ a.float()))


def load_adapters(model: SelectiveGPTModel, groups: RoleGroups, folder: str | Path) -> bool:
    """Read this rank's adapters from a folder that peft wrote, and a scalar head where there is one; return whether there is.

    Raises:
        ModelNotFoundError: tensors are missing, or have other shapes.
    """
    spec = model.adapters
    assert spec is not None
    local, scalar = local_tensors(model), has_scalar_head(model)
    with torch.no_grad(), _FolderWeights(folder, ADAPTER_WEIGHTS) as files:
        check_adapter_weights(files, spec, scalar=scalar)
        at = groups.coordinates
        for box in megatron_boxes(spec, groups.mesh.layout, at.tp, at.pp):
            target = local[box.local][_part(box.local_start, box.size)]
            target.copy_(files.read(PEFT + box.tensor, _part(box.start, box.size)))
        head = PEFT + SCALAR_HEAD_NAMES[0]
        has_head = scalar and head in files.files
        if has_head and SCALAR_HEAD in local:
            local[SCALAR_HEAD].copy_(files.read(head, _part((0, 0), (1, spec.hidden_size))))
        return has_head


def _write_adapters(own: dict[str, torch.Tensor], spec: AdapterSpec, folder: Path, role: RoleSpec) -> list[str]:
    """Write adapters as peft's ``save_pretrained`` does."""
    tensors = {PEFT + name: tensor for name, tensor in own.items()}
    there = role.adapters and has_file(role.adapters, ADAPTER_CONFIG)  # perhaps it was removed meanwhile
    before = read_json(role.adapters, ADAPTER_CONFIG) if there else None
    config = spec.lora.peft_config(spec, role.folder, scalar=SCALAR_HEAD_NAMES[0] in own, before=before)
    return write_folder(folder, (ADAPTER_WEIGHTS, tensors), {ADAPTER_CONFIG: json_bytes(config)}, Path(role.folder))


def _write(full: dict[str, torch.Tensor], spec: ModelSpec, folder: Path, source: Path, *, scalar: bool) -> list[str]:
    dtype = str(full["model.norm.weight"].dtype).removeprefix("torch.")

    def of_these_weights(config: dict[str, Any]) -> dict[str, Any]:
        said = {key: dtype if key in ("dtype", "torch_dtype") else value for key, value in config.items() if key != CODE}
        one_label = len(said.get("id2label") or ()) == 1
        if scalar and not (one_label and said["architectures"] == [spec.class_name("scalar")]):
            said.pop("num_labels", None)
            said |= {"architectures": [spec.class_name("scalar")], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if not scalar and said.get("tie_word_embeddings") and not spec.tied_embeddings:  # the files had their own head
            said["tie_word_embeddings"] = False
        return said

    config = changed_json(source, "config.json", of_these_weights)
    left_out = write_folder(folder, (WEIGHTS, full), {"config.json": config}, source)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)  # of a model in several files
    return left_out


def write_folder(
    folder: Path, weights: tuple[str, dict[str, torch.Tensor]], configs: Mapping[str, bytes], source: Path
) -> list[str]:
    """Write weights, JSON files and the tokenizer of ``source`` into a folder next to their places, and then put them there.

    A folder that is new appears with all its files at once; of one that is there each is replaced, JSON files last. Returns why
    files of the tokenizer are left out, a sentence each.
    """
    new = not folder.exists()
    folder.parent.mkdir(parents=True, exist_ok=True)
    name, tensors = weights
    needed, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(existing_parent(folder)).free
    if free < needed + SPARE_BYTES:
        raise OSError(f"the model has {needed / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB free")
    partial = folder.parent / f"{PARTIAL}-{zlib.crc32(folder.name.encode()):08x}" if new else folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        left_out = _copy_companions(source, partial) if source.resolve() != folder.resolve() else []
        save_file(tensors, partial / name, metadata={"format": "pt"})
        for file_name, config in configs.items():
            (partial / file_name).write_bytes(config)
        files = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
        for path in files:
            if (folder / path).is_dir():
                raise OSError(f"{folder / path} is a folder")
            with (partial / path).open("rb+") as file:
                os.fsync(file.fileno())
        if new:
            partial.rename(folder)
            return left_out
        for path in sorted(files, key=lambda path: (path.name in configs, path.name == name)):
            (folder / path).parent.mkdir(exist_ok=True)
            os.replace(partial / path, folder / path)
        return left_out
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy_companions(source: Path, folder: Path) -> list[str]:
    """Copy the files of a tokenizer, byte for byte but for code that they name; return why some are left out."""
    left_out = []
    try:
        for name, content in named_templates(source).items():
            (folder / NAMED_TEMPLATES).mkdir(exist_ok=True)
            (folder / NAMED_TEMPLATES / name).write_bytes(content)
    except ModelNotFoundError as error:
        left_out.append(str(error))
    for name in COMPANIONS:
        if not has_file(source, name):
            continue
        try:
            if name == TOKENIZER_CONFIG:
                content = changed_json(source, name, lambda said: {key: value for key, value in said.items() if key != CODE})
            else:
                content = read_file(source, name)
        except ModelNotFoundError as error:
            left_out.append(str(error))
        else:
            (folder / name).write_bytes(content)
    return left_out
