"""What vLLM is told on GPUs that are not there, and what its own code makes of it: a script, see test_told_on_gpus.py.

Reads a list of ranks as JSON, writes one line of JSON for each. vLLM takes its CUDA platform here, its compiled kernels are empty
modules, and torch says what the rank would see. hfsdk's ``Rollout`` is made as a worker makes it, up to the engine itself.
"""

import json
import os
import sys
import traceback
import types
from pathlib import Path
from unittest import mock

GIB = 2**30
VARIABLES = dict(os.environ)


class Made(Exception):  # noqa: N818 - not an error: as far as it goes here
    """vLLM was given its arguments."""


def look_like_gpus(rank):
    """Have torch say what this rank sees of its node."""
    import torch

    free, total = rank["free_gib"] * GIB, 80 * GIB
    seen = types.SimpleNamespace(
        total_memory=total, multi_processor_count=132, is_integrated=False, major=9, minor=0, name="NVIDIA H100 80GB HBM3"
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = torch.accelerator.device_count = lambda: rank["num_gpus"]
    torch.cuda.current_device = lambda: rank["index"]
    torch.cuda.mem_get_info = lambda device=None: (free, total)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: seen.name
    torch.cuda.get_device_properties = lambda device=None: seen
    torch.cuda.empty_cache = lambda: None


def take_cuda():
    """Have vLLM import with its CUDA platform."""
    for name in ("_C_stable_libtorch", "cumem_allocator"):
        sys.modules[f"vllm.{name}"] = mock.MagicMock(__spec__=None)
    import vllm.platforms as platforms

    platforms.resolve_current_platform_cls_qualname = lambda: "vllm.platforms.cuda.CudaPlatform"
    cuda = platforms.current_platform
    type(cuda).is_fully_connected = classmethod(lambda cls, devices: True)
    import vllm.distributed.device_communicators.cuda_wrapper as cuda_wrapper

    cuda_wrapper.CudaRTLibrary = mock.MagicMock()  # which the memory that can sleep is mapped with


def environment_of(rank):
    """Start with the environment that the worker's process has."""
    from hfsdk.engine.process import gpus
    from hfsdk.engine.worker import environment

    os.environ.clear()
    os.environ.update(VARIABLES)
    if rank["visible"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = rank["visible"]
    gpus.DRIVER_FILE = Path(__file__)  # there is a driver
    os.environ.update(environment.of_worker(4, rank["deterministic"]))


def told(rank):
    """Return what vLLM is told by this rank."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hfsdk.core.lora import LoRA
    from hfsdk.core.roles import RolloutOptions
    from hfsdk.core.spec import ModelSpec
    from hfsdk.engine.generation.rollout import Rollout
    from hfsdk.engine.process.recorder import Recorder

    dist.init_process_group("fake", store=FakeStore(), rank=rank["rank"], world_size=rank["world_size"])
    found = {}

    def engine(config, **_options):
        found.update(made(config, rank))
        raise Made

    with (
        mock.patch("vllm.v1.engine.llm_engine.LLMEngine.from_vllm_config", engine),
    ):
        try:
            Rollout(
                rank["folder"], ModelSpec.from_folder(rank["folder"]), tp=rank["tp"], rank=rank["rank"], seed=1, job_id="told",
                world_size=rank["world_size"], dtype=rank["dtype"], options=RolloutOptions(max_model_len=256), load_weights=False,
                recorder=Recorder(device=0, rank=0), trained=rank["trained"], lora=LoRA(**rank["lora"]) if rank["lora"] else None,
                adapters=2,
            )  # fmt: skip
        except Made:
            pass
        finally:
            dist.destroy_process_group()
    left = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK")}
    return found | {"left behind": left}


def made(config, rank):
    """Return what vLLM's own code makes of its arguments, as ``config``, and of this process's environment."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.executor.abstract import Executor

    executor = Executor.get_class(config)
    where, global_rank, local_rank = object.__new__(executor)._distributed_args()
    groups, world, queues = parallel_groups(config)
    mine = next(group for group in groups["tp"] if rank["rank"] in group)
    device = current_platform.logical_device_id_to_visible_device_id(local_rank)
    return {
        "platform": type(current_platform).__name__,
        "executor": executor.__name__,
        "init method": where,
        "rank": global_rank,
        "device": device,
        "gpu": current_platform.visible_device_id_to_physical_device_id(device),
        "in bounds": local_rank < torch.accelerator.device_count(),
        "tp groups": groups["tp"],
        "world": world,
        "queues": queues,
        "custom all-reduce": custom_all_reduce(config, mine, rank, device),
        "worker": config.parallel_config.worker_cls,
        "second runner lacks": config._get_v2_model_runner_unsupported_features(),
        "dtype": str(config.model_config.dtype),
        "sleep": [config.model_config.enable_sleep_mode, config.model_config.enable_cumem_allocator],
        "eager": config.model_config.enforce_eager,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "largest graph": max(config.compilation_config.cudagraph_capture_sizes or [0]),
        "sequences": config.scheduler_config.max_num_seqs,
        "asynchronous": config.scheduler_config.async_scheduling,
        "chunked prefill": config.scheduler_config.enable_chunked_prefill,
        "block size": config.cache_config.block_size,
        "share": config.cache_config.gpu_memory_utilization,
        "cache bytes": config.cache_config.kv_cache_memory_bytes,
        "prefix caching": config.cache_config.enable_prefix_caching,
        "kv heads": config.model_config.get_num_kv_heads(config.parallel_config),
        "log-probs": config.model_config.logprobs_mode,
        "load format": str(getattr(config.load_config.load_format, "value", config.load_config.load_format)),
        "adapters": config.lora_config
        and [config.lora_config.max_loras, config.lora_config.max_lora_rank, config.lora_config.target_modules],
        "invariant": __import__("vllm.envs").envs.VLLM_BATCH_INVARIANT,
    }


def parallel_groups(config):
    """Return the ranks of vLLM's groups, as it cuts the trainer's world, and which of them send Python objects by a queue."""
    import torch.distributed as dist
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config

    groups, world, queues = {}, [], []

    def group(*, group_ranks, group_name, use_message_queue_broadcaster, **more):
        groups[group_name] = [list(each) for each in group_ranks]
        queues.extend([group_name] * use_message_queue_broadcaster)
        return mock.MagicMock()

    def whole(ranks, local_rank, backend):
        world.append([ranks, local_rank])
        return mock.MagicMock(world_size=len(ranks), local_rank=local_rank, device_group=dist.group.WORLD)

    names = [name for name, value in vars(state).items() if name.startswith("_") and name[1:].isupper() and value is None]
    with (
        set_current_vllm_config(config),
        mock.patch.object(state, "GroupCoordinator", group),
        mock.patch.object(state, "init_world_group", whole),
        mock.patch.object(state, "_node_count", return_value=1),
    ):
        parallel = config.parallel_config
        state.init_distributed_environment(parallel.world_size, int(os.environ["RANK"]), "env://", int(os.environ["LOCAL_RANK"]))
        state.initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    for name in names:
        setattr(state, name, None)
    return groups, world[0], queues


def custom_all_reduce(config, mine, rank, device):
    """Return whether vLLM's own all-reduce comes up on this rank's group; NVLink and peers' memory are taken for granted."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators import custom_all_reduce as module

    if config.parallel_config.disable_custom_all_reduce:
        return False
    nodes, come_up = rank["nodes"], mock.Mock(side_effect=Made)
    with (
        mock.patch.object(module, "custom_ar", True),
        mock.patch.object(module, "ops", types.SimpleNamespace(meta_size=lambda: 0)),
        mock.patch.object(module, "in_the_same_node_as", return_value=[nodes[k] == nodes[mine[0]] for k in mine]),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda one, other: max(one, other) < rank["num_gpus"]),
        mock.patch.object(module.CustomAllreduce, "create_shared_buffer", come_up),
        mock.patch.object(module.CustomAllreduce, "__del__", return_value=None),
    ):
        try:
            return not module.CustomAllreduce(dist.new_group(mine), torch.device("cuda", device)).disabled
        except Made:
            return True


def main():
    ranks = json.load(sys.stdin)
    environment_of(ranks[0])
    look_like_gpus(ranks[0])
    take_cuda()
    for rank in ranks:
        environment_of(rank)
        look_like_gpus(rank)
        print(json.dumps([rank["name"], rank["rank"], told(rank)]), flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # what is not taken apart is not reported as a leak
