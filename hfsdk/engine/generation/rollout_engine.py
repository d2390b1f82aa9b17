"""vLLM's engine for one rank: the models it can generate with, its arguments, and how it is built."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hfsdk.assets.pretrained import not_taken
from hfsdk.core.errors import HfsdkError, ModelNotFoundError, UnsupportedModelError
from hfsdk.core.lora import LoRA
from hfsdk.core.roles import RolloutOptions
from hfsdk.core.rollout_sizes import (
    BLOCK_TOKENS,
    LEAST_SEQS,
    cache_bytes,
    context_tokens,
)
from hfsdk.core.spec import ModelSpec, only_read
from hfsdk.core.turn_ends import TurnEnds
from hfsdk.core.untrusted import private_copy
from hfsdk.core.weight_files import WEIGHTS, WeightFiles
from hfsdk.core.whole_folders import check_model_weights
from hfsdk.engine.generation import cpu_support_vllm as cpu
from hfsdk.engine.generation import lora as adapter_slots
from hfsdk.engine.generation import vllm_sleep
from hfsdk.engine.process import gpus, plain_objects, startup
from hfsdk.resharding.boxes import vllm_boxes

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM 0.32's attention on CPU; with others it starts and then fails at the first token."""

UNUSED = ("vllm.parser.engine.adapters", "vllm.entrypoints.mcp.tool_server")
"""Modules that vLLM's engine imports for the types of its chat server, with all of OpenAI's protocol: nothing here uses them."""


def check_model(spec: ModelSpec, device_type: str) -> None:
    """Check that vLLM can run the model. Pure; does not import vllm.

    Raises:
        UnsupportedModelError: its head size has no attention kernel on CPU, or its family has another there.
    """
    if spec.family == "qwen2" and spec.num_heads * spec.head_dim != spec.hidden_size:
        raise UnsupportedModelError(
            f"{spec.name} has {spec.num_heads} heads of {spec.head_dim}; vLLM takes the heads of a qwen2 model to be as wide as "
            f"its hidden size, {spec.hidden_size}. Use a model with such heads."
        )
    if device_type == "cpu" and spec.head_dim not in CPU_HEAD_DIMS:
        raise UnsupportedModelError(
            f"{spec.name} has head_dim {spec.head_dim}; vLLM's attention on CPU has kernels for "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}. Use a model with one of these head sizes, or a GPU."
        )


FREEZES = ("vllm.utils.gc_utils", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker", "vllm.distributed.parallel_state")
"""Modules of vLLM that freeze and melt all objects of the process."""


def import_engine() -> None:
    """Import vLLM ahead of the first engine; takes seconds the first time."""
    cpu.prepare()
    _import_engine()


@cache
def _import_engine() -> None:
    with startup.importing(), ExitStack() as unused:
        if cpu.on_cpu():  # a second, to tell it of kernels; on CPU nothing is compiled
            unused.enter_context(startup.not_there("torch._inductor.lowering"))
        unused.enter_context(startup.not_there("cv2"))
        for module in UNUSED:
            unused.enter_context(startup.stood_in(module))
        import vllm.v1.engine.llm_engine  # noqa: F401

        startup.keep_frozen(*FREEZES)
    _send_no_pickles()
    if cpu.on_cpu():
        with startup.importing(), startup.not_there("cv2"):
            cpu.make_ready()


def _send_no_pickles() -> None:
    """Have vLLM make no queues between ranks, which carry pickles, and send none over its groups: each rank has a scheduler."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.distributed.parallel_state import GroupCoordinator

    def refuse(*_args: Any, **_options: Any) -> NoReturn:
        raise plain_objects.NotPlainError("vLLM was to send a pickle to another rank; hfsdk lets none through a group")

    queue: Any = MessageQueue
    queue.create_from_process_group = staticmethod(lambda *_args, **_options: None)
    queue.enqueue = queue.dequeue = refuse
    coordinator: Any = GroupCoordinator
    coordinator.send_object = coordinator.recv_object = coordinator.isend_object = refuse


def use_batch_invariant_kernels() -> None:
    """Put vLLM's batch-invariant kernels in the place of torch's in this process, where its environment asks for them.

    The first engine would do it too: numbers of models that compute before would then change.
    """
    cpu.prepare()
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    init_batch_invariance()


def engine_arguments(
    folder: str,
    spec: ModelSpec,
    options: RolloutOptions,
    *,
    tp: int,
    dtype: str,
    seed: int,
    load_weights: bool,
    gpu_share: float | None,
    sleeps: bool = False,
    timeout: timedelta | None = None,
    lora: LoRA | None = None,
    adapters: int = 1,
) -> dict[str, Any]:
    """Return the arguments of vLLM's ``EngineArgs``: see :class:`Rollout`.

    ``gpu_share`` is :func:`gpus.memory_share`, ``None`` on CPU; ``sleeps`` is :func:`gpus.sleeps`; ``timeout`` is how long ranks
    wait for each other, :func:`rendezvous.world_timeout`.
    """
    limit_s = None if timeout is None else math.ceil(timeout.total_seconds())
    on_cpu = gpu_share is None
    longest, sequences = context_tokens(spec, options), options.max_num_seqs or LEAST_SEQS
    return {
        "model": folder, "skip_tokenizer_init": True, "dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch."),
        "config_format": "hf",  # not params.json, which Mistral's folders have too
        "tensor_parallel_size": tp, "distributed_executor_backend": "external_launcher",
        "load_format": "auto" if load_weights else "dummy", "enforce_eager": on_cpu, "seed": seed,
        "max_model_len": longest, "max_num_seqs": sequences,
        "kv_cache_memory_bytes": cache_bytes(spec, options, tp, dtype, on_cpu=on_cpu),
        "enable_chunked_prefill": not on_cpu,  # a rewind no CPU generator has
        "max_num_batched_tokens": max(options.max_num_batched_tokens, sequences, longest),
        "block_size": BLOCK_TOKENS if on_cpu else None, "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "async_scheduling": not on_cpu,
        "disable_log_stats": True, "use_tqdm_on_load": False, "trust_remote_code": False,
        "distributed_timeout_seconds": limit_s, "cpu_distributed_timeout_seconds": limit_s,
        **({} if gpu_share is None else {"gpu_memory_utilization": gpu_share, "enable_sleep_mode": sleeps}),
        **({} if lora is None else adapter_slots.engine_arguments(spec, lora, adapters)),
    }  # fmt: skip


def _share(spec: ModelSpec, tp: int, dtype: str, cache: int, lora: LoRA | None, adapters: int) -> float:
    """Return the share of this GPU that vLLM is given: the part that the trainer leaves free, torch's cache emptied."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    numbers = sum(box.numel for box in vllm_boxes(spec, tp, 0))
    numbers += 0 if lora is None else adapters * adapter_slots.slot_numbers(spec, lora, tp, 0)
    return gpus.memory_share(numbers * TORCH_DTYPES[dtype].itemsize + cache, free, total)


def sleeps(device_type: str, trained: bool) -> bool:
    """Return whether the engine sleeps between generations, so that others have its memory."""
    if device_type == "cpu" or not trained:
        return gpus.sleeps(device_type, trained=trained, pool_is_free=True)
    import_engine()
    return gpus.sleeps(device_type, trained=trained, pool_is_free=vllm_sleep.pool_is_free())


@contextmanager
def checked_copy(folder: str, spec: ModelSpec, *, with_weights: bool) -> Iterator[str]:
    """Give a folder for vLLM, which opens everything that a folder has: the checked config.json and, where asked for, the weights.

    Raises:
        ModelNotFoundError: a file cannot be read, or config.json is of another model than was declared.
    """

    def of_the_role(config: dict[str, Any]) -> dict[str, Any]:
        try:
            now = dataclasses.replace(ModelSpec.from_hf_config(config), name=spec.name)
            own_head = now.tied_embeddings and not spec.tied_embeddings  # which the files have whatever this says
            same = (dataclasses.replace(now, tied_embeddings=False) if own_head else now) == spec
        except HfsdkError:
            same = False
        if not same:
            raise ModelNotFoundError(f"{folder}/config.json is not what it was when the role was declared. Declare the role again.")
        read = {**only_read(config), "tie_word_embeddings": spec.tied_embeddings}
        return {**read, **({"eos_token_id": list(ends)} if ends else {})}

    ends = TurnEnds.of(folder).ids
    with private_copy(folder, ["config.json"], change={"config.json": of_the_role}) as copy, ExitStack() as opened:
        if with_weights:
            files = opened.enter_context(WeightFiles(folder))
            check_model_weights(files, spec)  # vLLM reads all that a file has
            for file in sorted(set(files.files.values())):
                os.symlink(files.path(file), os.path.join(copy, file))
            Path(copy, f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": files.files}), encoding="utf-8")
        yield copy


def build(arguments: dict[str, Any], spec: ModelSpec, rank: int, world_size: int, job_id: str) -> tuple[Any, list[torch.nn.Module]]:
    """Build vLLM's engine on all ranks; returns it and the layers whose weights stayed plain (CPU).

    Raises:
        ModelNotFoundError: the folder cannot be read.
        UnsupportedModelError: vLLM does not take its config.json.
    """
    if not dist.is_initialized() and world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise RuntimeError(f"the rollout needs torch.distributed initialised as rank {rank} of {world_size}")
    drawn = torch.frombuffer(bytearray(uuid.uuid4().bytes[:6]), dtype=torch.uint8)
    dist.broadcast(drawn, src=0)
    token = bytes(drawn.tolist()).hex()
    local_rank = rank if cpu.on_cpu() else torch.cuda.current_device()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank))  # vLLM reads them; restored after
    import_engine()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    loads, folder = arguments["load_format"] != "dummy", arguments["model"]
    with (
        startup.without_collector(),
        cpu.construction(cpu.segment_name(job_id, token), rank) as plain,
        checked_copy(folder, spec, with_weights=loads) as checked,
    ):
        try:
            config = EngineArgs(**{**arguments, "model": checked}).create_engine_config()
        except Exception as error:  # whatever is in config.json, vLLM does not look at it first
            raise not_taken(folder, "vLLM", error) from error
        if not loads:  # what vLLM has compiled of this model it finds again by this name; it reads at the other
            config.model_config.model, config.model_config.hf_config_path = folder, checked
        engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    startup.keep_frozen(*FREEZES)  # its worker is imported with the first
    dist.barrier()
    cpu.remove_segments(job_id, token)  # every rank has mapped them: the names are needed no more, whoever dies
    return engine, plain
