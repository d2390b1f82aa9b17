"""The deterministic mode of a worker on a GPU: the same calls on the same GPUs give the same bits.

Kernels add floats in their own order, and floats do not add up to the same in another order. What is done about each::

    who adds                        why its order changes                    what is told
    torch's kernels                 atomics                                  use_deterministic_algorithms; raises where it has none
    attention's gradient            atomics                                  the same: FlashAttention's kernel has both
    the embedding's gradient        atomics                                  Megatron's deterministic_mode
    cuBLAS                          workspaces by stream, split sums         CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE
    NCCL                            algorithm and chunks by message size     NCCL_ALGO, NCCL_PROTO, one channel
    vLLM                            kernels by how many rows run together    VLLM_BATCH_INVARIANT

The settings of NCCL and cuBLAS are those that vLLM's mode sets itself when an engine is built; it is set when the process starts,
because they read it once and the trainer is there first. On processors all of this is so anyway, and nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hfsdk.core.errors import PlacementError
from hfsdk.engine.process.gpus import has_driver

LEAST_CAPABILITY = (9, 0)
"""Least compute capability of a GPU. vLLM asks for it (``vllm/envs.py``); below, it would replace torch's ``linear`` by one that
has no gradient."""


def environment(deterministic: bool) -> dict[str, str]:
    """Return the variables that a worker process must have before it uses its GPU; none where there is no GPU."""
    if not deterministic or not has_driver():
        return {}
    return {
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_CUSTOM_ALLREDUCE_ALGO": "1stage",
        "VLLM_USE_AOT_COMPILE": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CUBLASLT_WORKSPACE_SIZE": "1",
        "NCCL_LAUNCH_MODE": "GROUP",
        "NCCL_COLLNET_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_P2P_NET_DISABLE": "1",
        "NCCL_MIN_NCHANNELS": "1",
        "NCCL_MAX_NCHANNELS": "1",
        "NCCL_PROTO": "Simple",
        "NCCL_ALGO": "ring,tree;allreduce:tree",
        "NCCL_NTHREADS": "1",
        "NCCL_SOCKET_NTHREADS": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }


def check_gpu(name: str, capability: tuple[int, int]) -> None:
    """Check that the engines have a deterministic mode on a GPU.

    Args:
        name: the GPU's name, e.g. ``"NVIDIA A100-SXM4-80GB"``.
        capability: its compute capability.

    Raises:
        PlacementError: they have none.
    """
    if capability < LEAST_CAPABILITY:
        raise PlacementError(
            f"deterministic=True needs GPUs of compute capability {'.'.join(map(str, LEAST_CAPABILITY))} or more (H100, B200), for "
            f"vLLM's batch-invariant kernels; {name} has {'.'.join(map(str, capability))}. Leave it out: the same seed then gives "
            "numbers that are close, not equal."
        )


def switch_on() -> None:
    """Have torch take deterministic algorithms in this process, and raise where there is none."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only costs: it is for mistakes
    torch.backends.cudnn.benchmark = False


@contextmanager
def any_algorithm() -> Iterator[None]:
    """Let torch take any algorithm for a while.

    vLLM keeps its order by its own kernels, and calls some (sums over sorted probabilities, for top-p) that torch would refuse.
    """
    import torch

    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
