"""Adapters of low rank in the generating engine: vLLM's slots, written in place (on CUDA too).

vLLM wraps every linear layer that may have an adapter and keeps room next to it for some, its *slots*::

    qkv_proj.base_layer.weight         [out, in]                     the base's, moved as ever
    qkv_proj.lora_a_stacked[part]      [slots, 1, padded rank, in]   one part each for q, k and v
    qkv_proj.lora_b_stacked[part]      [slots, 1, rows, padded rank]   multiplied by the scale: vLLM's own product has none

    adapter_targets(slot)   ...   the transport writes A and B   ...   finish_adapters(slot): B times its scale

vLLM's own way to change an adapter reads a folder. Here every slot is told to vLLM once, as an adapter that it has loaded
already, and a row of a batch names the slot or none. Ranks are padded to the next that vLLM takes; the padding is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hfsdk.core.errors import OptionError, UnsupportedModelError
from hfsdk.core.lora import AdapterSpec, LoRA, padded_rank
from hfsdk.core.spec import ModelSpec
from hfsdk.resharding.boxes import held_adapters, vllm_boxes

if TYPE_CHECKING:
    from torch import Tensor


BASE = -1
"""The slot of rows that have no adapter."""

Adapter = int | None | Sequence[int | None] | npt.NDArray[np.integer[Any]]
"""Slots of rows: one for all, or one for each; ``None`` or -1 is none, the base alone."""


def slots_of(adapter: Adapter, num_rows: int, num_slots: int) -> list[int]:
    """Return the slot of every row, -1 for none.

    Raises:
        OptionError: there is no such slot, or it is not one per row.
    """
    each = [adapter] * num_rows if adapter is None or isinstance(adapter, int | np.integer) else list(adapter)
    if len(each) != num_rows:
        raise OptionError(f"{len(each)} adapters for {num_rows} rows; give one for all rows, or one for each")
    slots = [BASE if slot is None else int(slot) for slot in each]
    for slot in slots:
        if not BASE <= slot < num_slots:
            raise OptionError(
                f"adapter {slot} does not exist; the rollout has {num_slots}. Use 0 to {num_slots - 1}, or None for the base"
            )
    return slots


def slot_numbers(spec: ModelSpec, lora: LoRA, tp: int, tp_rank: int) -> int:
    """Return the numbers that a slot has room for on one rank."""
    return sum(box.numel for box in vllm_boxes(held_adapters(spec, lora), tp, tp_rank))


def engine_arguments(spec: ModelSpec, lora: LoRA, num_slots: int) -> dict[str, Any]:
    """Return the arguments of vLLM's ``EngineArgs`` for adapters: on these layers alone, the embedding and the head have none."""
    layers = {box.local.rsplit(".", 3)[1] for box in vllm_boxes(AdapterSpec.of(spec, lora), 1, 0)}
    return {
        "enable_lora": True, "max_loras": num_slots, "max_lora_rank": padded_rank(lora.rank),
        "lora_target_modules": sorted(layers),
    }  # fmt: skip


def of_base(name: str) -> str:
    """Return the name that a parameter has in a model whose layers are not wrapped."""
    return name.replace(".base_layer.", ".")


class AdapterSlots:
    """The slots of one engine on this rank.

    Args:
        engine: vLLM's, just built with :func:`engine_arguments`.
        spec: the adapters.
        tp: tensor-parallel size.
        tp_rank: this rank's number in the tensor-parallel group.
        num_slots: how many adapters there are at once.
        on_cpu: whether vLLM's kernel is replaced.

    Raises:
        UnsupportedModelError: vLLM's layers have no room where the adapters are to be written.
    """

    def __init__(self, engine: Any, spec: AdapterSpec, *, tp: int, tp_rank: int, num_slots: int, on_cpu: bool) -> None:
        self._manager = engine.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
        self.num_slots, self._lora = num_slots, spec.lora
        places = _places(spec, tp, tp_rank)
        self._targets = [self._views(places, slot) for slot in range(num_slots)]
        self._requests = self._tell()
        self._open: set[int] = set()
        self._written: set[int] = set()
        self._lost = False
        if on_cpu:
            used: dict[str, set[int]] = {}
            for module, _, part in (name.rsplit(".", 2) for name in places):
                used.setdefault(module, set()).add(int(part))
            replace_kernel(self._manager, used, spec.lora.rank)

    def _views(self, places: Mapping[str, tuple[int, int]], slot: int) -> dict[str, torch.Tensor]:
        views, rank = {}, self._lora.rank
        for name, shape in places.items():
            module, kind, part = name.rsplit(".", 2)
            layer = self._manager.modules.get(module)
            stacks = () if layer is None else layer.lora_a_stacked if kind == "lora_A" else layer.lora_b_stacked
            view = stacks[int(part)][slot, 0] if int(part) < len(stacks) else torch.empty(0, 0)
            view = view[:rank] if kind == "lora_A" else view[:, :rank]
            if tuple(view.shape) != shape:
                raise UnsupportedModelError(
                    f"vLLM has room of shape {tuple(view.shape)} for {name}, which has {shape}; train all parameters instead."
                )
            views[name] = view
        return views

    def _tell(self) -> list[Any]:
        """Have vLLM take every slot for an adapter that it has loaded and put to use."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.request import LoRARequest

        for slot in range(self.num_slots):
            self._manager._registered_adapters[slot + 1] = LoRAModel(slot + 1, self._lora.rank, {})
            self._manager.activate_adapter(slot + 1)
        if self._manager.lora_index_to_id != [slot + 1 for slot in range(self.num_slots)]:
            raise RuntimeError(f"vLLM has other adapters in its slots: {self._manager.lora_index_to_id}")
        return [LoRARequest(f"slot {slot}", slot + 1, "written in place") for slot in range(self.num_slots)]

    def targets(self, slot: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a slot; see :meth:`Rollout.adapter_targets`."""
        if not 0 <= slot < self.num_slots:
            raise OptionError(
                f"adapter slot {slot} does not exist; the rollout has {self.num_slots}. Use 0 to {self.num_slots - 1}"
            )
        if self._lost:
            for stack in self._stacks():
                stack.zero_()
            self._lost = False
        self._written.discard(slot)
        self._open.add(slot)
        return dict(self._targets[slot])

    def finish(self, slot: int) -> None:
        """Multiply a slot's written B by its scale; in bfloat16 that rounds once, and not at all where the scale is a power of two.

        Raises:
            RuntimeError: it was not written since the last time: B would be multiplied twice.
        """
        if slot not in self._open:
            raise RuntimeError(f"finish_adapters({slot}) has to follow adapter_targets({slot}), and all of them written")
        for name, tensor in self._targets[slot].items():
            if ".lora_B." in name:
                tensor.mul_(self._lora.scale)
        self._open.discard(slot)
        self._written.add(slot)

    def readable(self, slot: int) -> dict[str, torch.Tensor]:
        """Return the tensors that the engine multiplies with, B times its scale; none of a slot that is not written."""
        return dict(self._targets[slot]) if slot in self._written else {}

    def forget(self) -> None:
        """Take all slots for lost, with the zeros of their padding, and vLLM's own notes of the last batch: their memory goes."""
        self._open.clear()
        self._written.clear()
        self._lost = True
        self._manager._last_mapping = None

    def requests(self, adapter: Adapter, num_rows: int) -> list[Any]:
        """Return vLLM's request for each row's adapter.

        Raises:
            OptionError: there is no such slot.
            RuntimeError: it has no weights.
        """
        slots = slots_of(adapter, num_rows, self.num_slots)
        for slot in sorted(set(slots) - {BASE} - self._written):
            raise RuntimeError(f"adapter slot {slot} has no weights yet: finish_adapters() has to follow adapter_targets()")
        return [None if slot == BASE else self._requests[slot] for slot in slots]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on this rank, padding included."""
        return sum(stack.nbytes for stack in self._stacks())

    def _stacks(self) -> list[torch.Tensor]:
        return [stack for layer in self._manager.modules.values() for stack in (*layer.lora_a_stacked, *layer.lora_b_stacked)]


def _places(spec: AdapterSpec, tp: int, tp_rank: int) -> dict[str, tuple[int, int]]:
    """Return the shape of each of a rank's tensors by its local name."""
    shapes: dict[str, tuple[int, int]] = {}
    for box in vllm_boxes(spec, tp, tp_rank):
        rows = box.local_start[0] + box.size[0]
        shapes[box.local] = max(shapes.get(box.local, (0, 0))[0], rows), box.size[1]
    return shapes


# -- the product with adapters on a machine without a GPU

Part = tuple["Tensor", "Tensor", int, int]
"""A^T [in, rank] and B^T [rank, rows] of one part of a layer, and the first and last column of its output."""


class SlotKernel:
    """A stand-in for the methods of vLLM's ``PunicaWrapperCPU`` that linear layers use.

    Here the rows that have the same adapter are multiplied together, and rows without one are left alone (vLLM's would give them
    that of the last slot)::

        rows of a batch    0 0 0 0 | - - | 1 1 1     slot of each; - is none
        y[0:4] += (x[0:4] A0^T) B0^T         y[6:9] += (x[6:9] A1^T) B1^T
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._parts: dict[int, list[list[Part]]] = {}
        self._groups: list[tuple[int, slice | Tensor]] = []

    def take(self, layer: Any, used: Collection[int]) -> None:
        """Keep the tensors of a wrapped layer, of the parts that have adapters, slot by slot."""
        ends = np.cumsum([0, *layer.output_slices])
        self._parts[id(layer.lora_a_stacked)] = [
            [
                (a[slot, 0, : self._rank].T, b[slot, 0, :, : self._rank].T, int(ends[part]), int(ends[part + 1]))
                for part, (a, b) in enumerate(zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True))
                if part in used
            ]
            for slot in range(len(layer.lora_a_stacked[0]))
        ]

    def update_metadata(self, mapping: Any, lora_index_to_id: Sequence[int | None], *_: Any, **__: Any) -> None:
        """Note which rows of the next batch have which slot."""
        slots = {number: slot for slot, number in enumerate(lora_index_to_id) if number is not None}
        numbers = np.asarray(mapping.index_mapping)
        self._groups = []
        for number in np.unique(numbers[numbers > 0]).tolist():
            rows = np.flatnonzero(numbers == number)
            first, last = int(rows[0]), int(rows[-1]) + 1
            self._groups.append((slots[number], slice(first, last) if last - first == len(rows) else torch.from_numpy(rows)))

    def add_lora_linear(self, y: Tensor, x: Tensor, lora_a_stacked: tuple[Tensor, ...], *_: Any, **__: Any) -> None:
        """Add the adapters' output to ``y`` [rows, out] in place; ``x`` is [rows, in]."""
        slots = self._parts[id(lora_a_stacked)]
        for slot, rows in self._groups:
            if isinstance(rows, slice):
                inputs, out = x[rows], y[rows]
                for a, b, first, last in slots[slot]:
                    out[:, first:last].addmm_(inputs @ a, b)
            else:
                inputs = x[rows]
                for a, b, first, last in slots[slot]:
                    y[:, first:last].index_add_(0, rows, inputs @ a @ b)


def replace_kernel(manager: Any, used: dict[str, set[int]], rank: int) -> None:
    """Have vLLM's wrapped layers multiply by slot.

    Args:
        manager: vLLM's, of its adapters.
        used: the parts of a layer that have adapters, by the layer's name.
        rank: the adapters' rank, which may be less than the slots'.
    """
    kernel = SlotKernel(rank)
    for name, layer in manager.modules.items():
        kernel.take(layer, used[name])
    for wrapper in manager.punica_wrapper_mapping.values():
        wrapper.update_metadata, wrapper.add_lora_linear = kernel.update_metadata, kernel.add_lora_linear
