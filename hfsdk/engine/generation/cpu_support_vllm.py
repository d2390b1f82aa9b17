"""The settings that vLLM needs on a machine without a GPU. On CUDA every function here does nothing.

===================================  ==========================================================================
vLLM's CPU backend                   here
===================================  ==========================================================================
compiles the sampler                 ``environment()`` and :func:`prepare` turn dynamo off
binds memory to a NUMA node,         :func:`construction` keeps both from happening while the engine is built
makes torch.set_num_threads a no-op
names its shared memory ``//-tp:0``  :func:`construction` gives a name per job; unlinked as soon as all ranks joined
makes a message queue per replica    :func:`construction` leaves it out: the ranks need no lead, and it outlives them
looks for its kernels per engine     :func:`construction` lets it do so once per process
hides weights in packed kernels      :class:`CpuWeights`: plain ones (``shared``), or packed again after each update
===================================  ==========================================================================

Packed kernels are private copies in oneDNN's own order: writes to the weight are not seen, and vLLM's own reload leaves
a tied output layer stale. So an update goes through plain tensors::

    weight_targets()   every Linear gets an empty plain weight; the old packed copy is freed
    ... the transport writes into them ...
    finish_update()    layer by layer: pack, free the plain weights by blocks   (peak: one copy of the weights and one block)

Importing this module imports neither torch nor vLLM, so that :func:`environment` can be asked before both.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfsdk.core.errors import WeightMismatchError
from hfsdk.engine.process import gpus, malloc_settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Linear = tuple[nn.Module, torch.Size, torch.dtype]
    """A layer whose weight is packed, with the shape and the dtype of the plain one."""

SEGMENTS = Path("/dev/shm")
"""The folder in which POSIX shared memory appears as files."""

BLOCK_BYTES = 64 * 2**20
"""Bytes of plain weights that are allocated together: one hole in the heap when they are packed or, with glibc's own settings,
none."""

GIVE_BACK_EVERY = 16
"""Updates of packed weights after which the heap's free pages are returned to the system; that takes about 4 ms."""

PACKED_ROUNDING = {4: 1e-4, 2: 0.03}
"""Largest distance of a packed layer's product from the plain one's, relative to its largest number, by the bytes of a number."""

_SEGMENT_PREFIX = "hfsdk."


def on_cpu() -> bool:
    """Whether this process has no CUDA device, so that vLLM runs its CPU backend."""
    import torch

    return not torch.cuda.is_available()


def environment(num_threads: int = 1) -> dict[str, str]:
    """Return the variables a worker process must have before it imports torch, vLLM or megatron.

    ``HF_HUB_OFFLINE`` is left to the user: models are local folders, for which no hub is asked.
    ``OMP_NUM_THREADS`` matters because vLLM's kernels ask OpenMP, not torch, on threads that never set a number; it is
    read when torch is imported. Dynamo is left alone where there is an NVIDIA driver. FlashInfer's sampler is never used for rows
    with seeds, nor where log-probs are of what was drawn from; vLLM would import and probe it all the same, and end without it.
    """
    return ({} if gpus.has_driver() else {"TORCHDYNAMO_DISABLE": "1"}) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(num_threads),
    }


def prepare() -> None:
    """Set the variables of :func:`environment` that are still missing, before vLLM is imported for the first time.

    Raises:
        RuntimeError: vLLM was imported with its engine in another process, which cannot share this one's groups.
    """
    needed = "VLLM_ENABLE_V1_MULTIPROCESSING"
    if "vllm" in sys.modules and os.environ.get(needed) != "0":
        raise RuntimeError(
            f"vLLM was imported with {needed}={os.environ.get(needed)!r}; the rollout needs '0'. Put "
            "cpu_support_vllm.environment() into the worker's environment before it starts."
        )
    os.environ[needed] = "0"
    if not on_cpu():
        return
    for name, value in environment().items():
        if name != "OMP_NUM_THREADS":
            os.environ.setdefault(name, value)
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)  # says that there is no Triton for CPU
    import torch._dynamo.config

    torch._dynamo.config.disable = True  # the variable comes too late where dynamo was imported already


def make_ready() -> None:
    """Do the imports and preparations of a process's first engine once: forks of this process have them, then."""
    import vllm.model_executor.layers.quantization.online.base
    import vllm.renderers.hf
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform

    configure_logging_if_needed(LoggingConfig())
    current_platform.import_kernels()
    _once(current_platform.register_triton_kernel_overrides)


# --- shared memory of tensor-parallel ranks ---------------------------------------------------------------------------


def segment_name(job_id: str, token: str) -> str:
    """Return the first part of the names of a job's shared-memory segments."""
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in job_id)
    return f"{_SEGMENT_PREFIX}{safe}.{token}"


def remove_segments(job_id: str, token: str = "*") -> list[str]:
    """Unlink this user's shared-memory segments of a job, wherever killed ranks left some; return their names.

    ``token`` picks those of one engine. Not to be called for a whole job while another of its engines is being built.
    """
    removed = []
    for path in SEGMENTS.glob(segment_name(job_id, token) + "-*") if SEGMENTS.is_dir() else ():
        with suppress(OSError):  # another rank was first
            if path.lstat().st_uid == os.geteuid():
                path.unlink()
                removed.append(path.name)
    return removed


# --- building the engine ----------------------------------------------------------------------------------------------


@contextmanager
def construction(name: str, rank: int) -> Iterator[list[nn.Module]]:
    """Patch vLLM while an engine is built; the yielded list collects the layers whose weights stay plain (CPU).

    ``name`` becomes the first part of the shared-memory names; it must be equal on the ranks of a replica.
    """
    with _without_queues():
        if not on_cpu():
            yield []
            return
        with _construction_on_cpu(name, rank) as plain:
            yield plain


@contextmanager
def _without_queues() -> Iterator[None]:
    """Have no group of vLLM's make a queue for Python objects, which ranks in lockstep do not send (on CUDA too).

    For ranks on several nodes it would listen on an address of its own choosing.
    """
    import vllm.distributed.parallel_state as parallel_state

    make_group = parallel_state.init_model_parallel_group

    def without_queue(*args: Any, **options: Any) -> Any:
        return make_group(*args, **options | {"use_message_queue_broadcaster": False})

    with _replaced(parallel_state, "init_model_parallel_group", without_queue):
        yield


@contextmanager
def _construction_on_cpu(name: str, rank: int) -> Iterator[list[nn.Module]]:
    import torch
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    plain: list[nn.Module] = []

    def keep_plain(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear
        plain.append(layer)

    def distributed_args(_: Any) -> tuple[str, int, int]:
        return f"env://:{name}", rank, rank  # vLLM takes what follows the last colon as its identity

    current_platform.import_kernels()  # registers torch.ops._C: the build of it that this processor has instructions for
    replace_kernels = current_platform.register_triton_kernel_overrides
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    with (
        _replaced(layer_utils, "dispatch_cpu_unquantized_gemm", keep_plain),
        _replaced(ExecutorWithExternalLauncher, "_distributed_args", distributed_args),
        _replaced(torch.ops._C, "init_cpu_memory_env", lambda nodes: None),
        _replaced(current_platform, "register_triton_kernel_overrides", partial(_once, replace_kernels)),
    ):
        try:
            yield plain
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(num_threads)


@functools.cache
def _once(replace_kernels: Callable[[], None]) -> None:
    """Replace vLLM's Triton kernels, unless it was done in this process: it looks for them in all modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # vLLM walks over torch's deprecated names
        replace_kernels()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def shared_groups_kept(others_open: bool) -> Iterator[None]:
    """Let one engine shut down without ending the groups that vLLM's other engines of this process use (on CUDA too)."""
    if not others_open:
        yield
        return
    import vllm.v1.engine.core as core

    with _replaced(core, "cleanup_dist_env_and_memory", lambda: None):
        yield


@contextmanager
def pools_kept(others_asleep: bool) -> Iterator[None]:
    """Let one engine shut down without ending the memory pools of another of this process that sleeps (CUDA alone)."""
    if not others_asleep:
        yield
        return
    from vllm.device_allocator import cumem

    with _replaced(cumem.CuMemAllocator, "release_pools", lambda allocator: None):
        yield


@contextmanager
def default_group_kept() -> Iterator[None]:
    """Let vLLM destroy its own process groups, but not the default one, which is the trainer's (on CUDA too)."""
    import torch

    destroy = torch.distributed.destroy_process_group

    def only_given(group: Any = None) -> None:
        if group is not None and torch.distributed.is_initialized():
            destroy(group)

    with _replaced(torch.distributed, "destroy_process_group", only_given):
        yield


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Give back the trainer's random state, grad mode, default dtype and environment as they were (on CUDA too)."""
    import torch

    grad, dtype, before = torch.is_grad_enabled(), torch.get_default_dtype(), dict(os.environ)
    with torch.random.fork_rng(devices=random_devices()):
        try:
            yield
        finally:
            torch.set_grad_enabled(grad)
            torch.set_default_dtype(dtype)
            for name in set(os.environ) - set(before):
                if not name.startswith(("VLLM_", "TORCHINDUCTOR_")):
                    del os.environ[name]
            os.environ.update(before)


def random_devices() -> list[int]:
    """Return the CUDA devices with a random state of this process."""
    import torch

    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


# --- weights ----------------------------------------------------------------------------------------------------------


class CpuWeights:
    """The weights of a vLLM model on CPU: plain (``"shared"``) or packed into oneDNN kernels (``"packed"``).

    Args:
        model: vLLM's model, just built under :func:`construction`.
        plain: the layers that :func:`construction` collected.
        mode: ``"packed"`` or ``"shared"``.
    """

    def __init__(self, model: nn.Module, plain: list[nn.Module], mode: str) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        self._model = model
        tables = [m for m in plain if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
        in_tables = {id(m.weight) for m in tables}
        multiplied = [m for m in plain if m not in tables] if mode == "packed" else []
        self._tied = [m for m in multiplied if id(m.weight) in in_tables]
        """Output layers that multiply with an embedding table, which must stay plain for look-ups."""
        self._linears = [(m, m.weight.shape, m.weight.dtype) for m in multiplied if id(m.weight) not in in_tables]
        self.packs = mode == "packed"
        self.packed_bytes = 0
        """Bytes of weights held in packed kernels (besides the plain parameters)."""
        self.probe_s = 0.0
        """Seconds that it took so far to try packed layers."""
        self._num_packed = 0

    def open(self) -> None:
        """Give every packed layer an empty plain weight again and free its packed copy.

        Several are one block, which is free as a whole once they are packed: weights of their own would be freed between packed
        ones, and leave many small holes, as large together as all of them, into which little else fits.
        """
        import torch

        for layer in self._tied:
            layer.cpu_linear = _not_packed
        for layer, *_ in self._linears:
            layer.cpu_linear = _not_packed
        gone = [(layer, shape, dtype) for layer, shape, dtype in self._linears if layer.weight.shape != shape]
        for block in _blocks(gone):
            sizes = [shape.numel() for _, shape, _ in block]
            parts = torch.empty(sum(sizes), dtype=block[0][2]).split(sizes)
            for (layer, shape, _), part in zip(block, parts, strict=True):
                layer.weight = torch.nn.Parameter(part.view(shape), requires_grad=False)
        self.packed_bytes = 0

    def close(self) -> None:
        """Pack every layer's plain weight and free it, except where a table needs it; each is tried on a row of signs.

        Raises:
            WeightMismatchError: a packed layer does not multiply as its plain weight did.
        """
        import torch

        self.packed_bytes = 0
        dispatch, wrong = _dispatch(), set()
        for layer, freed in [*((layer, False) for layer in self._tied), *((layer, True) for layer, *_ in self._linears)]:
            self.packed_bytes += layer.weight.nbytes
            begun = time.perf_counter()
            probe = _signs(layer.weight.shape[1], layer.weight.dtype)
            plain = torch.nn.functional.linear(probe, layer.weight)
            self.probe_s += time.perf_counter() - begun
            dispatch(layer, freed)
            begun = time.perf_counter()
            if not _alike(layer.cpu_linear(probe, layer.weight, None), plain):
                wrong.add(id(layer))
            self.probe_s += time.perf_counter() - begun
        self._num_packed += 1
        if self._num_packed % GIVE_BACK_EVERY == 1:  # the first time those that vLLM was built with, piece by piece
            malloc_settings.give_back()
        if wrong:
            names = [name.removesuffix(".base_layer") for name, module in self._model.named_modules() if id(module) in wrong]
            raise WeightMismatchError(
                f"{', '.join(names[:3])}{' and more' * (len(names) > 3)}: the packed weight does not multiply as the plain one. "
                'Run the call again; if it comes back, leave the weights plain with RolloutOptions(cpu_weights="shared").'
            )


def _blocks(linears: Sequence[Linear]) -> Iterator[list[Linear]]:
    """Yield runs of layers of one dtype whose weights together have at least ``BLOCK_BYTES``, but for the last of each dtype."""
    for dtype in {dtype for *_, dtype in linears}:
        block: list[Linear] = []
        size = 0
        for linear in (linear for linear in linears if linear[2] == dtype):
            block.append(linear)
            size += linear[1].numel() * dtype.itemsize
            if size >= BLOCK_BYTES:
                yield block
                block, size = [], 0
        if block:
            yield block


@functools.cache
def _signs(count: int, dtype: torch.dtype) -> Tensor:
    """Return a row of random signs, exact in every dtype."""
    import torch

    return (torch.randint(0, 2, (1, count), generator=torch.Generator().manual_seed(0)) * 2 - 1).to(dtype)


def _alike(packed: Tensor, plain: Tensor) -> bool:
    """Whether two products are the same but for the order of their sums; of a weight that is not finite nothing can be said."""
    most = plain.abs().max().float()
    rounding = PACKED_ROUNDING[packed.element_size()]
    return not bool(most.isfinite()) or bool((packed.float() - plain.float()).abs().max() <= rounding * most)


def _dispatch() -> Callable[[nn.Module, bool], None]:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    return dispatch_cpu_unquantized_gemm


def _not_packed(*_: Any) -> Tensor:
    raise RuntimeError("the rollout's weights are being updated; call finish_update() before generating")
