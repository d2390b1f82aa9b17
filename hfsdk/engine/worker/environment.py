"""The environment of a session's processes, set before torch, vLLM or megatron is imported: they read much of it once.

What Ray is told beforehand, so that a worker sees all GPUs of its node, is ``gpus.SHOW_ALL``.
"""

from __future__ import annotations

from functools import cache

from hfsdk.engine.generation import cpu_support_vllm
from hfsdk.engine.process import deterministic, gpus, startup


def of_process(num_threads: int) -> dict[str, str]:
    """Return the environment of every process of a session."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    } | ({} if gpus.has_driver() else {"TORCHDYNAMO_DISABLE": "1"})


def of_worker(num_threads: int, asked_deterministic: bool) -> dict[str, str]:
    """Return the environment of the worker process of a device."""
    engines = cpu_support_vllm.environment(num_threads) | deterministic.environment(asked_deterministic)
    return of_process(num_threads) | engines


# -- imports that take ten seconds of a processor, ahead of their first use


def import_engines() -> None:
    """Import what workers compute with: torch, Megatron, vLLM, and hfsdk's parts around them."""
    import_trainer()
    from hfsdk.engine.generation import rollout_engine

    rollout_engine.import_engine()


@cache
def import_trainer() -> None:
    """Import torch, Megatron, and what a worker does with them."""
    with startup.importing():
        from hfsdk.engine.training import cpu_support_megatron

        cpu_support_megatron.install()
        from hfsdk.engine.weights import direct  # noqa: F401
        from hfsdk.engine.worker import role_engine  # noqa: F401
