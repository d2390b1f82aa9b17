"""What is decided where there are GPUs: each decision alone, and those that go to vLLM against vLLM's own functions."""

import itertools
import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from expect import refuses

from hfsdk.assets import MODELS
from hfsdk.core.cluster import DEVICES
from hfsdk.core.errors import PlacementError
from hfsdk.core.roles import RolloutOptions
from hfsdk.core.rollout_sizes import most_seqs
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.process import gpus

GIB = 2**30
H100 = int(79.6 * GIB)


def test_dynamo_is_left_alone_where_there_is_a_driver(driver):
    from hfsdk.engine.generation import cpu_support_vllm

    assert "TORCHDYNAMO_DISABLE" not in cpu_support_vllm.environment()


def test_without_a_driver_nothing_is_compiled(monkeypatch, tmp_path):
    from hfsdk.engine.generation import cpu_support_vllm

    monkeypatch.setattr(gpus, "DRIVER_FILE", tmp_path / "none")
    assert cpu_support_vllm.environment()["TORCHDYNAMO_DISABLE"] == "1"


def test_torchs_number_of_the_gpu_that_ray_gave():
    rows = [
        (None, 8, "5", 5),  # Ray started without CUDA_VISIBLE_DEVICES, all shown
        (None, 1, "0", 0),
        ("2,3,6,7", 4, "6", 2),  # Ray started under a part of the GPUs
        ("2,3,6,7", 4, "2", 0),
        ("GPU-a, GPU-b", 2, "GPU-b", 1),  # named by UUID
        ("3", 1, "3", 0),  # masked by Ray all the same
    ]  # fmt: skip
    found = [gpus.Seen(visible, count, "2.13.0+cu130").index([given]) for visible, count, given, _ in rows]
    assert found == [index for *_, index in rows]


def test_a_gpu_that_torch_does_not_see_is_told_with_both_numbers():
    rows = [
        (gpus.Seen(None, 0, "2.13.0+cpu"), ["1"], ["GPU 1", "0 GPUs", "2.13.0+cpu", "make setup CUDA=1"]),
        (gpus.Seen("", 0, "2.13.0+cu130"), ["0"], ["0 GPUs", "CUDA_VISIBLE_DEVICES='' hides them"]),
        (gpus.Seen(None, 0, "2.13.0+cu130"), ["0"], ["0 GPUs", "hf.doctor()", "driver"]),
        (gpus.Seen("0,1", 2, "2.13.0+cu130"), ["5"], ["GPU 5", "torch sees 2 (0, 1)"]),
        (gpus.Seen(None, 4, "2.13.0+cu130"), ["7"], ["GPU 7", "torch sees 4"]),
        (gpus.Seen("0,9", 1, "2.13.0+cu130"), ["9"], ["GPU 9", "torch sees 1"]),
        (gpus.Seen(None, 4, "2.13.0+cu130"), ["0", "1"], ["gave this worker 2 GPUs (0, 1)", "takes 1"]),
    ]  # fmt: skip
    for seen, given, says in rows:
        with refuses(PlacementError, *says):
            seen.index(given)


def test_no_more_devices_than_gpus():
    for asked, total in ((None, 0), (2, 2), (1, 8)):
        gpus.check_count(asked, total)
    for asked, total in ((3, 2), (2, 1)):
        with refuses(PlacementError, f"{asked} devices", f"{total} GPU"):
            gpus.check_count(asked, total)


def test_vllm_starts_beside_a_trainer_with_the_share_it_is_given():
    """Its own check, with its own default, refuses once 7 of 79.6 GiB are in use."""
    utils = pytest.importorskip("vllm.v1.worker.utils")
    for used in (0, 7, 30, 60):
        free = H100 - used * GIB
        snapshot = SimpleNamespace(free_memory=free, total_memory=H100, device_="cuda:0", cuda_memory=used * GIB)

        def asks(share, snapshot=snapshot):
            return utils.request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=share))

        share = gpus.memory_share(10 * GIB, free, H100)
        assert 10 * GIB <= asks(share) <= free, used
        if used >= 7:
            with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
                asks(gpus.MAX_SHARE)


def test_no_more_sequences_are_chosen_than_vllm_takes_by_default(monkeypatch):
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    from vllm.usage.usage_lib import UsageContext

    for name, gigabytes in (("H100", 80), ("A100-80GB", 80), ("L4", 24), ("B300", 280)):

        class Platform:
            get_device_total_memory = staticmethod(lambda gigabytes=gigabytes: gigabytes * 10**9)
            get_device_name = staticmethod(lambda name=name: f"NVIDIA {name}")
            is_tpu = is_cpu = staticmethod(lambda: False)

        monkeypatch.setattr(arg_utils, "current_platform", Platform)
        _, sequences = arg_utils.EngineArgs.get_batch_defaults(1)
        device = replace(DEVICES["H100"], name=name, memory_bytes=gigabytes * 10**9)
        assert most_seqs(device) == sequences[UsageContext.LLM_CLASS], name


def test_a_rollout_that_does_not_fit_is_told_before_vllm_is_asked():
    with refuses(PlacementError, "21.5 GB", "10.5 of 85.5 GB", "kv_cache_bytes="):
        gpus.memory_share(20 * GIB, 10 * GIB, H100)


def test_vllm_finds_the_gpu_by_the_local_rank_where_all_are_shown(monkeypatch):
    interface = pytest.importorskip("vllm.platforms.interface")

    class Cuda(interface.Platform):
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

    for local_rank in (0, 3, 7):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert Cuda.logical_device_id_to_visible_device_id(local_rank) == local_rank
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13,14,15")
        index = gpus.Seen(os.environ["CUDA_VISIBLE_DEVICES"], 8, "2.13.0+cu130").index([str(8 + local_rank)])
        assert Cuda.logical_device_id_to_visible_device_id(index) == local_rank


def test_the_dtype_that_models_have_by_default():
    on_processors = [("cpu", False), ("cpu-avx512", False), ("cpu", True), ("H100", True)]
    assert {row: gpus.default_dtype(*row) for row in on_processors} == dict.fromkeys(on_processors, "fp32")
    assert [gpus.default_dtype(device, False) for device in ("H100", "A100-80GB")] == ["bf16", "bf16"]


def test_a_rollout_sleeps_beside_its_trainer_on_a_gpu_once_a_process():
    for device_type, trained, pool_is_free in itertools.product(("cpu", "cuda"), (False, True), (False, True)):
        expected = device_type == "cuda" and trained and pool_is_free
        found = gpus.sleeps(device_type, trained=trained, pool_is_free=pool_is_free)
        assert found == expected, (device_type, trained, pool_is_free)


def test_vllm_is_told_to_sleep_where_there_are_gpus():
    rollout_engine = pytest.importorskip("hfsdk.engine.generation.rollout_engine")
    from vllm.engine.arg_utils import EngineArgs

    def told(share, sleeps):
        spec = ModelSpec.from_folder(MODELS["tiny"].place())
        more = {"tp": 1, "dtype": "bf16", "seed": 1, "load_weights": False, "gpu_share": share, "sleeps": sleeps}
        return rollout_engine.engine_arguments("folder", spec, RolloutOptions(max_model_len=64), **more)

    for sleeps in (False, True):
        assert EngineArgs(**told(0.41, sleeps)).enable_sleep_mode == sleeps
        assert not EngineArgs(**told(None, sleeps)).enable_sleep_mode, "vLLM refuses it on processors"


def test_vllm_has_a_sleep_mode_on_cuda_alone_and_keeps_what_it_is_not_told_to_give_up():
    """What ``hfsdk.engine.generation.vllm_sleep`` takes for granted of vLLM."""
    pytest.importorskip("vllm")
    from vllm.device_allocator import DEFERRABLE_TAGS
    from vllm.platforms.interface import Platform, PlatformEnum
    from vllm.v1.executor.abstract import SLEEP_TAGS

    class Cuda(Platform):
        _enum = PlatformEnum.CUDA

    class Cpu(Platform):
        _enum = PlatformEnum.CPU

    assert Cuda().is_sleep_mode_available()
    assert not Cpu().is_sleep_mode_available()
    assert SLEEP_TAGS == {"weights", "kv_cache"} == set(DEFERRABLE_TAGS)


def test_vllms_ranks_wait_for_each_other_as_long_as_the_session_says():
    rollout_engine = pytest.importorskip("hfsdk.engine.generation.rollout_engine")
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    spec = ModelSpec.from_folder(MODELS["tiny"].place())
    for timeout, limit_s in ((None, None), (timedelta(seconds=90), 90), (timedelta(seconds=0.2), 1)):
        more = {"tp": 1, "dtype": "bf16", "seed": 1, "load_weights": False, "gpu_share": 0.41, "timeout": timeout}
        told = EngineArgs(**rollout_engine.engine_arguments("folder", spec, RolloutOptions(max_model_len=64), **more))
        limits = {name: getattr(told, name) for name in ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds")}
        assert set(limits.values()) == {limit_s}, timeout
        ParallelConfig(**limits)  # takes them


def test_what_vllm_is_told():
    rollout_engine = pytest.importorskip("hfsdk.engine.generation.rollout_engine")
    from vllm.engine.arg_utils import EngineArgs

    spec = ModelSpec.from_folder(MODELS["tiny"].place())
    for tp, share in itertools.product((1, 2, 8), (None, 0.41)):
        told = rollout_engine.engine_arguments(
            "folder", spec, RolloutOptions(max_model_len=64), tp=tp, dtype="bf16", seed=1, load_weights=False, gpu_share=share
        )
        EngineArgs(**told)
        on_cpu = share is None
        assert told["tensor_parallel_size"] == tp
        assert told["distributed_executor_backend"] == "external_launcher"
        assert told["enforce_eager"] == on_cpu, "CUDA graphs"
        assert told["async_scheduling"] is not on_cpu
        assert told.get("gpu_memory_utilization") == share
        assert told["kv_cache_memory_bytes"] > 0
        assert (told["dtype"], told["load_format"], told["trust_remote_code"]) == ("bfloat16", "dummy", False)


def test_vllm_schedules_asynchronously_in_this_process():
    executor = pytest.importorskip("vllm.v1.executor.uniproc_executor")
    assert executor.ExecutorWithExternalLauncher.supports_async_scheduling()


def test_what_torch_is_told_when_a_pool_is_joined(monkeypatch, tmp_path):
    for (gpu, backend), timeout_s in itertools.product(((None, "gloo"), (3, "cpu:gloo,cuda:nccl")), (None, 90.0)):
        check_join(monkeypatch, gpu, backend, f"file://{tmp_path}/store", timeout_s)


def check_join(monkeypatch, gpu, backend, store, timeout_s):
    import torch
    import torch.distributed as dist

    from hfsdk.engine.process import rendezvous

    told, world = {}, SimpleNamespace(bound_device_id="bound")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: told.update(more, backend=backend))
    dist.group.WORLD = world
    try:
        rendezvous.join(store, 1, 4, gpu, timeout_s)
    finally:
        dist.group.WORLD = None
    assert (told["backend"], told["rank"], told["world_size"]) == (backend, 1, 4)
    assert told.get("timeout") == (timeout_s and timedelta(seconds=timeout_s))
    if gpu is None:
        assert "device_id" not in told
    else:
        assert told["device_id"] == torch.device("cuda", gpu), "NCCL connects at once"
        assert world.bound_device_id is None, "else groups that only members make would hang: a split needs all ranks"


def test_a_result_on_a_gpu_arrives_on_the_cpu(monkeypatch):
    torch = pytest.importorskip("torch")
    import pickle

    import cloudpickle

    from hfsdk.engine.process import tasks

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    moved = []

    class Far(torch.Tensor):
        """Says that it is on a GPU."""

        is_cuda = True

        def cpu(self):
            moved.append(self.shape)
            return self.as_subclass(torch.Tensor)

    value = {"weights": [torch.arange(6.0).reshape(2, 3).as_subclass(Far)], "here": torch.ones(2), "text": "kept"}
    back = pickle.loads(tasks._to_host(cloudpickle, value))
    assert moved == [torch.Size([2, 3])]
    assert type(back["weights"][0]) is torch.Tensor
    assert back["weights"][0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert back["text"] == "kept"


def test_it_asks_before_torch_and_ray_are_imported():
    code = "import sys, hfsdk.engine.process.gpus; print([m for m in ('torch', 'ray', 'vllm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_weights_go_straight_from_gpus_to_other_gpus():
    rows = [
        ([0, 1], [2, 3], [], True),  # both pools have GPUs of their own
        ([0, 1], [2, 3], [0, 1, 2, 3], False),  # none has: the object store is shared memory
        ([0, 1], [2, 3], [2, 3], False),
        ([0, 1], [2, 3], [4], True),  # the processors are another pool's
        ([0, 1], [1, 2], [], False),  # a worker of both cannot give and take at once
    ]
    assert [gpus.goes_direct(*row[:3]) for row in rows] == [direct for *_, direct in rows]
    for givers, takers, cpus, _ in rows:
        assert gpus.goes_direct(givers, takers, cpus, on_cpus=True) == set(givers).isdisjoint(takers), (givers, takers)


@pytest.mark.parametrize("name", ["H100", "cpu"])
def test_a_session_asks_for_the_way_between_two_pools_by_their_devices(name):
    ray_runtime = pytest.importorskip("hfsdk.engine.ray.runtime")
    from hfsdk.core.placement import Pool

    made = ray_runtime.RayRuntime.__new__(ray_runtime.RayRuntime)
    made._inside, made._closed, made._num_inside = threading.Condition(), False, 0
    made.cluster, made.direct_on_cpus = SimpleNamespace(devices=[SimpleNamespace(name=name)] * 4), False
    assert made.goes_direct(Pool("a", (0, 1)), Pool("b", (2, 3))) == (name != "cpu")
    assert not made.goes_direct(Pool("a", (0, 1)), Pool("b", (1, 2)))
