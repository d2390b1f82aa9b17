"""Lets megatron-core 0.16.1 train without CUDA: the one place of the trainer that patches anything.

Megatron asks ``torch.cuda`` for a device, a stream and a random state in about twenty places. :func:`install` answers them
with the CPU; with CUDA it does nothing at all. What is replaced, and who asks:

=  ==============================================  ==========================================================
A  ``torch.cuda.current_device``                   rotary positions, gradient buffers, pipeline messages
B  ``torch.cuda.synchronize``                      pipeline messages, checkpoint writers
C  ``torch.Tensor.cuda``                           tied embeddings over pipeline stages, distributed optimizer
D  ``torch.zeros(..., device="cuda")`` and alike   schedules, optimizers, clipping (through a stand-in for ``torch``)
E  ``param.type() == "torch.cuda.FloatTensor"``    optimizers and clipping (only inside :func:`cuda_type_names`)
F  ``torch.cuda`` random state                     the tracker behind activation recompute
=  ==============================================  ==========================================================

A, B and C hold for the whole process, so that it cannot use a CUDA device afterwards; there is none. Call :func:`install`
before anything else imports megatron: it then also keeps ``torch.compile`` out of megatron's decorators, which load the compiler
(a second or two) for fused functions that run nowhere here, and wandb (half a second), which its inference engine imports.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from hfsdk.engine.process import startup

CPU = torch.device("cpu")

PROXIED_MODULES = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
"""Modules that name ``device="cuda"`` in their source (patch D)."""

MODULES = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    *PROXIED_MODULES,
)
"""Imported by :func:`install`."""

FACTORIES = ("arange", "empty", "full", "ones", "rand", "tensor", "zeros")

_installed = False


class _TorchOnCpu(types.ModuleType):
    """A stand-in for the name ``torch`` inside one module; tensors asked for on cuda are made on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in FACTORIES:
            value = _on_cpu(value)
        setattr(self, name, value)
        return value


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def install() -> None:
    """Make megatron-core run on the CPU; does nothing with CUDA or when it was called before."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    with _decorators_that_do_not_compile(), startup.not_there("wandb"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Apex and Transformer Engine, which need CUDA, are not there
        for name in MODULES:
            importlib.import_module(name)
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    torch.Tensor.cuda = lambda tensor, *_args, **_kwargs: tensor
    for name in PROXIED_MODULES:
        importlib.import_module(name).torch = _TorchOnCpu()
    _use_cpu_random_state()
    _installed = True


@contextlib.contextmanager
def _decorators_that_do_not_compile() -> Iterator[None]:
    original = torch.compile

    def keep(function: Any = None, **_: Any) -> Any:
        return (lambda decorated: decorated) if function is None else function

    torch.compile = keep
    try:
        yield
    finally:
        torch.compile = original


def _use_cpu_random_state() -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    random._get_cuda_rng_state, random._set_cuda_rng_state = get_state, set_state
    proxy = _TorchOnCpu()
    proxy.cuda = types.SimpleNamespace(
        manual_seed=torch.manual_seed,
        get_rng_state=torch.get_rng_state,
        is_available=lambda: False,
        current_device=lambda: CPU,
        CUDAGraph=object,
    )
    random.torch = proxy


def cuda_type_names() -> contextlib.AbstractContextManager[None]:
    """Return a context in which ``tensor.type()`` says ``torch.cuda.*`` (patch E); an empty one with CUDA.

    Not for two threads at once: it replaces a method of ``torch.Tensor``.
    """
    return contextlib.nullcontext() if torch.cuda.is_available() else _renamed_types()


@contextlib.contextmanager
def _renamed_types() -> Iterator[None]:
    original = torch.Tensor.type

    def renamed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            result = result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = renamed
    try:
        yield
    finally:
        torch.Tensor.type = original
