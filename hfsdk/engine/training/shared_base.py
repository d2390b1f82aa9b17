"""One base for all: frozen weights that several roles of a process begin with are there once.

An actor with adapters, its critic with others, the reference, a frozen reward model of the same folder: on a rank where their
layouts agree each of them holds the same numbers, which nothing trains::

    actor         base + adapters                     one set of storages for the base, counted with the role that came first
    critic        base + adapters, scalar head
    reference     base

A role whose weights are written (a state of other weights is loaded) takes its own copy first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hfsdk.engine.training import megatron_adapters
from hfsdk.engine.weights.role_state import SCALAR_HEAD

if TYPE_CHECKING:
    from hfsdk.core.roles import RoleSpec
    from hfsdk.engine.training.megatron_groups import RoleGroups

_bases: weakref.WeakValueDictionary[tuple[Any, ...], Base] = weakref.WeakValueDictionary()
"""The bases that a role of this process has."""


class Base:
    """Tensors by local name, and the models that have them, the first one first."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._models: list[tuple[str, weakref.ref[torch.nn.Module]]] = []

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models that have the tensors now."""
        return [model for _, model in self._living()]

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose models have the tensors now."""
        return tuple(role for role, _ in self._living())

    def _living(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for role, reference in self._models:
            model = reference()
            if model is not None:
                yield role, model

    def join(self, model: torch.nn.Module, role: str) -> bool:
        """Have a model's frozen parameters lie where the same ones are already; return whether they are the same, bit for bit."""
        for name, parameter in _frozen(model):
            there = self.tensors.get(name)
            if parameter.is_meta or (there is not None and not torch.equal(there, parameter.data)):
                return False
        for name, parameter in _frozen(model):
            parameter.data = self.tensors.setdefault(name, parameter.data)
        self._models.append((role, weakref.ref(model)))
        return True

    def leave(self, model: torch.nn.Module) -> None:
        """Give a model its own copy, unless it is alone."""
        self._models = [(role, reference) for role, reference in self._models if reference() is not model]
        if not self.models:
            self.tensors.clear()
            return
        for _, parameter in _frozen(model):
            parameter.data = parameter.data.clone()


def _frozen(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that may be shared; a scalar head, which has the name of the logits' layer, is a role's own."""
    own_head = SCALAR_HEAD if getattr(model, "scalar", False) else None
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not megatron_adapters.is_adapter(name) and name != own_head:
            yield name, parameter


class SharedWeights:
    """The frozen weights of one role's model, shared from now on where others here have the same ones.

    A role whose weights are trained has its own, and so has one that keeps them in host memory or has loaded others.
    """

    def __init__(self, model: torch.nn.Module, role: RoleSpec, groups: RoleGroups) -> None:
        self._model, self._role = model, role.name
        self._base: Base | None = None
        self._key: tuple[Any, ...] | None = None
        if (role.lora is not None or not role.trainable) and "weights" not in role.offloads:
            files = sorted(Path(role.folder).glob("*.safetensors"))
            stats = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files]
            at, layout = groups.coordinates, groups.mesh.layout
            self._key = (role.folder, *stats, role.dtype, layout.tp, layout.pp, at.tp, at.pp, str(groups.device))
        self._written = role.lora is None
        self.share()

    def share(self) -> None:
        """Have them once, where other roles here have the same."""
        if self._base is None and self._key is not None:
            base = _bases.get(self._key) or Base()
            if base.join(self._model, self._role):
                self._base = _bases[self._key] = base

    def own(self) -> None:
        """Have a copy, before others are written into them; a state of adapters has none."""
        if self._base is not None and self._written:
            self._base.leave(self._model)
            self._base = None

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors, also where other roles have them."""
        return [parameter.data for _, parameter in _frozen(self._model)]

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of this rank that have the same ones, the one that they are counted with first."""
        return (self._role,) if self._base is None else self._base.roles

    def counted_elsewhere(self) -> list[torch.Tensor]:
        """Return the tensors of another role that came before this one."""
        if self._base is None:
            return []
        models = self._base.models
        before = {name for other in models[: models.index(self._model)] for name, _ in _frozen(other)}
        return [parameter.data for name, parameter in _frozen(self._model) if name in before]
