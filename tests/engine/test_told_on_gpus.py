"""What the engines are told on GPUs, rank by rank, for one GPU, for two, for eight, and for two nodes.

Each cluster below is a row of a table, written by hand: who is where, and what each rank must be told. Ray, torch, Megatron and
vLLM are asked by hfsdk's own code, from ``RayRuntime`` and ``Worker.join`` to ``Trainer`` and ``Rollout``; what is replaced is what
needs a GPU. vLLM itself turns its arguments into its configuration, on its CUDA platform, in a process of its own
(vllm_on_gpus.py).
"""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from rows import every_row

from hfsdk.assets import MODELS
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Pool
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.worker import environment

RUN_S = 300
"""Of the process that asks vLLM; on a quiet machine about a tenth of it."""

FOUR_PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers of one pool, in rank order, a role's layouts on them, and what follows."""

    nodes: tuple[int, ...]
    """The node of each rank."""
    given: tuple[str, ...]
    """Ray's id of each rank's GPU: of its node."""
    visible: str | None = None
    """``CUDA_VISIBLE_DEVICES`` under which Ray was started on every node."""
    num_gpus: int
    """GPUs that a process sees."""
    train: str
    rollout: str

    index: tuple[int, ...]
    """torch's number of each rank's GPU, which is its ``LOCAL_RANK`` too."""
    tp: list[list[int]]
    """The trainer's tensor-parallel groups, each in the order of its shards."""
    pp: list[list[int]]
    """Its pipelines, from the first stage to the last."""
    dp: list[list[int]]
    """Its ranks with the same shard."""
    replicas: list[list[int]]
    """The rollout's tensor-parallel groups."""
    custom_all_reduce: bool
    """Whether a replica's ranks reach each other's memory."""
    kv_heads: int
    """Of the model's four, those that a rank of the rollout holds."""


CLUSTERS = {
    "1 GPU": Cluster(
        nodes=(0,), given=("0",), num_gpus=1, train="tp1", rollout="tp1", index=(0,),
        tp=[[0]], pp=[[0]], dp=[[0]], replicas=[[0]], custom_all_reduce=False, kv_heads=4,
    ),
    "2 GPUs": Cluster(
        nodes=(0, 0), given=("1", "0"), num_gpus=2, train="tp2", rollout="tp2", index=(1, 0),
        tp=[[0, 1]], pp=[[0], [1]], dp=[[0], [1]], replicas=[[0, 1]], custom_all_reduce=True, kv_heads=2,
    ),
    "2 GPUs of 8, two replicas": Cluster(
        nodes=(0, 0), given=("6", "3"), visible="3,6", num_gpus=2, train="tp2", rollout="dp2", index=(1, 0),
        tp=[[0, 1]], pp=[[0], [1]], dp=[[0], [1]], replicas=[[0], [1]], custom_all_reduce=False, kv_heads=4,
    ),
    "8 GPUs": Cluster(
        nodes=(0,) * 8, given=("7", "0", "1", "2", "3", "4", "5", "6"), num_gpus=8, train="tp4 dp2", rollout="tp4 dp2",
        index=(7, 0, 1, 2, 3, 4, 5, 6),
        tp=[[0, 1, 2, 3], [4, 5, 6, 7]], pp=[[rank] for rank in range(8)], dp=[[0, 4], [1, 5], [2, 6], [3, 7]],
        replicas=[[0, 1, 2, 3], [4, 5, 6, 7]], custom_all_reduce=True, kv_heads=1,
    ),
    "8 GPUs, stages": Cluster(
        nodes=(0,) * 8, given=tuple("01234567"), num_gpus=8, train="tp2 pp2 dp2", rollout="tp4 dp2", index=tuple(range(8)),
        tp=FOUR_PAIRS, pp=[[0, 4], [1, 5], [2, 6], [3, 7]], dp=[[0, 2], [1, 3], [4, 6], [5, 7]],
        replicas=[[0, 1, 2, 3], [4, 5, 6, 7]], custom_all_reduce=True, kv_heads=1,
    ),
    "2 nodes": Cluster(
        nodes=(0,) * 8 + (1,) * 8, given=tuple("01234567") * 2, num_gpus=8, train="tp8 dp2", rollout="tp4 dp4",
        index=(*range(8), *range(8)),
        # the shards of a rollout's rank are two neighbours of training: 0 has the first and the second eighth's first
        tp=[[0, 4, 1, 5, 2, 6, 3, 7], [8, 12, 9, 13, 10, 14, 11, 15]], pp=[[rank] for rank in range(16)],
        dp=[[rank, rank + 8] for rank in range(8)],
        replicas=[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]], custom_all_reduce=True, kv_heads=1,
    ),
    "2 nodes, a stage each": Cluster(
        nodes=(0,) * 8 + (1,) * 8, given=tuple("01234567") * 2, num_gpus=8, train="tp4 pp2 dp2", rollout="tp8 dp2",
        index=(*range(8), *range(8)),
        tp=[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]], pp=[[rank, rank + 8] for rank in range(8)],
        dp=[[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
        replicas=[list(range(8)), list(range(8, 16))], custom_all_reduce=True, kv_heads=1,
    ),
    "a replica over 2 nodes": Cluster(
        nodes=(0,) * 4 + (1,) * 4, given=tuple("4567") * 2, visible="4,5,6,7", num_gpus=4, train="tp4 dp2", rollout="tp8",
        index=(0, 1, 2, 3) * 2,
        tp=[[0, 1, 2, 3], [4, 5, 6, 7]], pp=[[rank] for rank in range(8)], dp=[[0, 4], [1, 5], [2, 6], [3, 7]],
        replicas=[list(range(8))], custom_all_reduce=False, kv_heads=1,
    ),
}  # fmt: skip

EVERY_RANK = [(name, rank) for name, cluster in CLUSTERS.items() for rank in range(len(cluster.nodes))]

FREE_GIB = {True: 60, False: 30}
"""GiB of 80 that are free when a rollout starts, beside a trainer and in a pool of its own: not the same, to tell them apart."""

MODEL = "tiny"
"""8 heads, 4 kv heads, 4 layers."""


def role_of(cluster, **options):
    folder = MODELS[MODEL].place()
    layouts = {"train": Layout.parse(cluster.train).fill(len(cluster.nodes))}
    layouts["rollout"] = Layout.parse(cluster.rollout).fill(len(cluster.nodes))
    role = RoleSpec(
        name="actor", kind="actor", folder=str(folder), model=ModelSpec.from_folder(folder), dtype="bf16", optimizer=AdamW(),
        nodes=cluster.nodes, **layouts,
    )  # fmt: skip
    return replace(role, **options)


def group_with(groups, rank):
    (mine,) = (group for group in groups if rank in group)
    return mine


# ---- the table itself


def test_rows_are_whole():
    """Every group is a partition of the ranks, and the layouts' sizes are those of the groups."""
    for name, cluster in CLUSTERS.items():
        ranks = list(range(len(cluster.nodes)))
        for groups in (cluster.tp, cluster.pp, cluster.dp, cluster.replicas):
            assert sorted(itertools.chain(*groups)) == ranks, name
        train, rollout = (Layout.parse(text).fill(len(ranks)) for text in (cluster.train, cluster.rollout))
        groups = cluster.tp, cluster.pp, cluster.dp, cluster.replicas
        assert [{len(group) for group in each} for each in groups] == [{train.tp}, {train.pp}, {train.dp}, {rollout.tp}], name


# ---- Ray


def ray_id(node):
    return f"{node + 1:056x}"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Start a pool's workers; return, for each, Ray's options, the worker's arguments and its set-up."""
    pytest.importorskip("ray")
    from hfsdk.engine.ray import cluster as ray_cluster
    from hfsdk.engine.ray import pools as ray_pools
    from hfsdk.engine.ray.pools import PoolState

    class Recorded:
        def options(self, **options):
            return SimpleNamespace(remote=lambda *arguments: Handle(options, arguments))

    class Handle:
        def __init__(self, options, arguments):
            self.options, self.arguments = options, arguments
            self.serve_store = SimpleNamespace(remote=lambda host, link: f"keyed://5ec1e7@{host}:29500")

    def start(cluster, **settings):
        room, nodes = {node: cluster.nodes.count(node) for node in cluster.nodes}, []
        for node, count in room.items():
            resources = {"GPU": float(count), "CPU": 64.0, "accelerator_type:H100": 1.0}
            where = {"NodeID": ray_id(node), "NodeManagerAddress": f"10.0.0.{node + 1}"}
            nodes.append(where | {"Alive": True, "Resources": resources})
        monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: nodes[::-1])
        monkeypatch.setattr(ray_cluster.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: ray_id(0)))
        monkeypatch.setattr(ray_pools, "RayWorker", Recorded())
        monkeypatch.setattr(ray_pools.ray, "get", lambda answer, timeout=None: answer)
        described, nodes = ray_cluster.describe(len(cluster.nodes), shares_cpus=False)
        options = ray_pools.WorkerOptions(
            "job", tmp_path, 4, False, 300.0, settings.get("timeout_s"), settings.get("deterministic", False)
        )
        pools = ray_pools.RayPools(described, nodes, options)
        pool = Pool("all", tuple(range(len(cluster.nodes))))
        state = PoolState(pool, [pools.worker_of(device) for device in pool.devices])
        return described, [worker.options for worker in state.workers], [w.arguments for w in state.workers], pools.setups(state)

    return start


def test_ray_starts_one_worker_on_each_gpu_of_its_node_and_leaves_the_others_to_be_seen(started):
    with every_row() as row:
        for name, cluster in CLUSTERS.items():
            with row(name):
                check_options(started, cluster)


def check_options(started, cluster):
    from ray._private.accelerators import nvidia_gpu

    described, options, arguments, _ = started(cluster)
    assert [described.node_of(rank) for rank in range(len(cluster.nodes))] == list(cluster.nodes)
    assert {device.name for device in described.devices} == {"H100"}
    for rank, told in enumerate(options):
        assert (told["num_gpus"], told["num_cpus"]) == (1, 1)
        assert told["runtime_env"] == {"env_vars": {nvidia_gpu.NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR: "1"}}
        where = told["scheduling_strategy"]
        assert (where.node_id, where.soft) == (ray_id(cluster.nodes[rank]), False)
    assert [told[0] for told in arguments] == list(range(len(cluster.nodes)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_worker_is_told_whether_it_is_deterministic_before_it_starts_and_when_it_joins(started, deterministic):
    _, _, arguments, setups = started(CLUSTERS["2 nodes"], deterministic=deterministic)
    assert {told[-1] for told in arguments} == {setup.deterministic for setup in setups} == {deterministic}


def test_a_pool_meets_by_a_file_on_one_node_and_at_rank_0s_address_over_two(started):
    with every_row() as row:
        for name, cluster in CLUSTERS.items():
            with row(name):
                check_meeting(started, cluster)


def check_meeting(started, cluster):
    _, _, _, setups = started(cluster)
    size = len(cluster.nodes)
    assert [(setup.rank, setup.world_size) for setup in setups] == [(rank, size) for rank in range(size)]
    (store,) = {setup.store for setup in setups}
    if len(set(cluster.nodes)) == 1:
        assert store.startswith("file://")
        assert {setup.address for setup in setups} == {""}
    else:
        assert store == "keyed://5ec1e7@10.0.0.1:29500"
        assert [setup.address for setup in setups] == [f"10.0.0.{node + 1}" for node in cluster.nodes]


# ---- the worker's environment


ALWAYS = {
    "OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4", "TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip

IN_ONE_ORDER = {"VLLM_BATCH_INVARIANT": "1", "NCCL_ALGO": "ring,tree;allreduce:tree", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}


def test_a_worker_on_a_gpu_compiles(driver):
    """And nothing says which GPU: that is Ray's, and ``LOCAL_RANK`` is there only while vLLM is built."""
    assert environment.of_worker(4, asked_deterministic=False) == ALWAYS


def test_a_deterministic_worker_has_its_order_from_the_start(driver):
    found = environment.of_worker(4, asked_deterministic=True)
    assert {**ALWAYS, **IN_ONE_ORDER}.items() <= found.items()
    assert "TORCHDYNAMO_DISABLE" not in found
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_the_users_functions_run_in_a_process_that_knows_no_engine(driver):
    assert not [name for name in environment.of_process(1) if name.startswith(("VLLM_", "NCCL_"))]


# ---- torch


def test_a_worker_takes_its_gpu_and_has_nccl_connect_it(started):
    with every_row() as row:
        for name, rank in EVERY_RANK:
            with pytest.MonkeyPatch.context() as patch, row(name, rank):
                check_join(started, patch, CLUSTERS[name], rank)


def check_join(started, monkeypatch, cluster, rank):
    import psutil
    import torch
    import torch.distributed as dist

    from hfsdk.engine.process import rendezvous
    from hfsdk.engine.worker import worker

    timeout_s = 90.0 if rank % 2 else None
    _, _, _, setups = started(cluster, timeout_s=timeout_s)
    told, chosen, world = {}, [], SimpleNamespace(bound_device_id="bound")
    monkeypatch.setattr(worker.environment, "import_trainer", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cluster.num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: told.update(more, backend=backend))
    monkeypatch.setattr(rendezvous, "_opened", lambda url, num_ranks, limit: (url, num_ranks))
    addresses = {"lo": ["127.0.0.1"], "eth0": [setups[rank].address]}
    known = {at: [SimpleNamespace(address=address) for address in found] for at, found in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    if cluster.visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cluster.visible)
    made = worker.Worker(rank)
    made.gpus = (cluster.given[rank],)
    dist.group.WORLD = world
    try:
        made.join(setups[rank])
    finally:
        dist.group.WORLD = None

    gpu = cluster.index[rank]
    assert chosen == [gpu]
    assert (told["backend"], told["device_id"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda", gpu))
    assert world.bound_device_id is None
    assert (told["rank"], told["world_size"]) == (rank, len(cluster.nodes))
    assert told["store"] == (setups[rank].store, len(cluster.nodes))
    assert told.get("timeout") == (timeout_s and timedelta(seconds=timeout_s))
    assert made.recorder.clock.of_gpu
    if len(set(cluster.nodes)) == 1:
        assert setups[rank].store.startswith("file:///")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    else:
        assert setups[rank].store == "keyed://5ec1e7@10.0.0.1:29500"
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


# ---- Megatron


@pytest.fixture
def trainer_of():
    """Make a rank's trainer in a world of which only that rank is there; its tensors are on ``meta``, the GPU of this test."""
    pytest.importorskip("megatron.core")
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hfsdk.engine.calls.dispatch import mesh_of
    from hfsdk.engine.process.recorder import Recorder
    from hfsdk.engine.training import cpu_support_megatron, megatron_folder, trainer
    from hfsdk.engine.training.megatron_groups import RoleGroups, forget_groups

    cpu_support_megatron.install()
    names = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}

    def make(cluster, rank, **options):
        role = role_of(cluster, **options)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(cluster.nodes))
        groups = RoleGroups(mesh_of(role))
        groups.device = torch.device("meta")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(megatron_folder, "load_folder", lambda *_: False)
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "current_device", lambda: groups.device)
            patch.setattr(torch.Tensor, "type", lambda tensor, *_: names[tensor.dtype])
            return trainer.Trainer(role, mesh_of(role), groups, Recorder(device=rank, rank=rank))

    def leave():
        if dist.is_initialized():
            forget_groups()
            dist.destroy_process_group()

    make.leave = leave
    yield make
    leave()


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_megatron_is_told(trainer_of, name):
    with every_row() as row:
        for rank in range(len(CLUSTERS[name].nodes)):
            with row(name, rank):
                check_trainer(trainer_of, CLUSTERS[name], rank)
            trainer_of.leave()


def check_trainer(trainer_of, cluster, rank):
    import torch
    import torch.distributed as dist

    from hfsdk.engine.training import megatron_optimizer

    tp, pp, dp = (group_with(groups, rank) for groups in (cluster.tp, cluster.pp, cluster.dp))
    made = trainer_of(cluster, rank)
    config, wrapped, optimizer = made.model.config, made._ddp, made._optimizer

    def ranks(group):
        return dist.get_process_group_ranks(group)

    groups = made.model.pg_collection
    assert (ranks(groups.tp), ranks(groups.pp), ranks(groups.dp)) == (tp, pp, dp)
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (len(tp), len(pp))
    assert (made.model.pre_process, made.model.post_process) == (rank == pp[0], rank == pp[-1])
    assert len(made.model.decoder.layers) == 4 // len(pp)

    assert config.params_dtype is config.pipeline_dtype is config.autocast_dtype is torch.bfloat16
    assert config.bf16
    assert not config.use_cpu_initialization
    assert config.sequence_parallel == (len(tp) > 1)
    assert config.variable_seq_lengths == (len(pp) > 1)
    assert (config.batch_p2p_comm, config.batch_p2p_sync, config.deterministic_mode) == (True, False, False)
    assert config.calculate_per_token_loss
    if len(pp) > 1:
        neighbours = made.pipeline._communicator
        assert neighbours.next_rank == neighbours.prev_rank == next(other for other in pp if other != rank)
    else:
        assert made.pipeline._communicator is None

    assert wrapped.ddp_config.overlap_grad_reduce == (len(dp) > 1) == (made._overlap is not None)
    assert wrapped.ddp_config.grad_reduce_in_fp32
    assert wrapped.ddp_config.bucket_size == (max(40_000_000, 1_000_000 * len(dp)) if len(dp) > 1 else None)
    assert {buffer.grad_dtype for buffer in wrapped.buffers} == {torch.float32}
    assert {tuple(ranks(buffer.data_parallel_group)) for buffer in wrapped.buffers} == {tuple(dp)}

    assert optimizer.optimizer.defaults["fused"] is True
    assert {main.dtype for _, _, main, _, _ in megatron_optimizer.optimized(made.model, optimizer)} == {torch.float32}
    assert {parameter.dtype for parameter in made.model.parameters()} == {torch.bfloat16}
    assert (optimizer.config.bf16, optimizer.config.params_dtype) == (True, torch.bfloat16)
    replica = sorted(set(itertools.chain(*(group_with(cluster.tp, other) for other in pp))))
    assert sorted(ranks(optimizer.grad_stats_parallel_group)) == replica, "the norm of one copy of the gradient"
    assert ranks(optimizer.tp_group) == tp


@pytest.mark.parametrize("name", [name for name, cluster in CLUSTERS.items() if "dp2" in cluster.train])
def test_masters_are_shared_out_over_replicas_where_that_is_asked_for(trainer_of, name):
    import torch
    import torch.distributed as dist

    from hfsdk.engine.training import megatron_optimizer

    cluster, rank = CLUSTERS[name], 1
    made = trainer_of(cluster, rank, optimizer=AdamW(distributed=True))
    assert made._ddp.ddp_config.use_distributed_optimizer
    assert dist.get_process_group_ranks(made._optimizer.data_parallel_group) == group_with(cluster.dp, rank)
    everyone = dist.get_process_group_ranks(made._optimizer.grad_stats_parallel_group)
    assert everyone == list(range(len(cluster.nodes))), "each rank has the norm of its shard alone"
    mains = [main for _, _, main, _, _ in megatron_optimizer.optimized(made.model, made._optimizer)]
    assert {main.dtype for main in mains} == {torch.float32}
    whole = sum(parameter.numel() for parameter in made.model.parameters())
    assert 0.4 * whole < sum(main.numel() for main in mains) < 0.6 * whole


@pytest.mark.parametrize("name", ["2 GPUs", "2 nodes, a stage each"])
def test_a_frozen_model_has_no_gradients_and_no_optimizer(trainer_of, name):
    made = trainer_of(CLUSTERS[name], 1, optimizer=None, rollout=None)
    assert made._ddp is made._optimizer is made._overlap is None
    assert made.model.config.sequence_parallel
    assert not any(parameter.requires_grad for parameter in made.model.parameters())


def test_a_deterministic_worker_tells_megatron_too(trainer_of):
    """It asks torch, which the worker told."""
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        assert trainer_of(CLUSTERS["2 GPUs"], 0).model.config.deterministic_mode
    finally:
        torch.use_deterministic_algorithms(False)


# ---- vLLM


def question(name, rank, *, trained=True, deterministic=False, lora=None):
    cluster = CLUSTERS[name]
    return {
        "name": f"{name} {trained} {deterministic}", "rank": rank, "world_size": len(cluster.nodes), "nodes": cluster.nodes,
        "tp": Layout.parse(cluster.rollout).tp, "index": cluster.index[rank], "visible": cluster.visible,
        "num_gpus": cluster.num_gpus, "free_gib": FREE_GIB[trained], "dtype": "bf16", "trained": trained,
        "deterministic": deterministic, "folder": str(MODELS[MODEL].place()), "lora": lora,
    }  # fmt: skip


ALONE, IN_ORDER = ("8 GPUs", 0), ("8 GPUs", 0)
"""Ranks of a rollout in a pool of its own, and of a deterministic session."""


@pytest.fixture(scope="module")
def vllm_says():
    """Ask vLLM, for every rank of every cluster, in one process; return what it says by (cluster, rank, trained, deterministic)."""
    pytest.importorskip("vllm")
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there are real GPUs here")
    asked = {(name, rank, True, False): question(name, rank) for name, rank in EVERY_RANK}
    asked[(*ALONE, False, False)] = question(*ALONE, trained=False)
    asked["adapters"] = question("8 GPUs", 0, lora={"rank": 4, "targets": ("v_proj", "down_proj")})
    asked[(*IN_ORDER, True, True)] = question(*IN_ORDER, deterministic=True)  # the last: vLLM does not go back
    script = Path(__file__).with_name("vllm_on_gpus.py")
    run = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(list(asked.values())), capture_output=True, text=True, timeout=RUN_S
    )
    answers = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert run.returncode == 0, f"it came as far as {len(answers)} of {len(asked)} ranks\n{run.stderr[-4000:]}"
    return {key: answer for key, (_, _, answer) in zip(asked, answers, strict=True)}


def test_vllm_finds_its_gpu_and_its_peers(vllm_says):
    with every_row() as row:
        for name, rank in EVERY_RANK:
            with row(name, rank):
                check_peers(vllm_says[name, rank, True, False], CLUSTERS[name], rank)


def check_peers(said, cluster, rank):
    assert said["platform"] == "NonNvmlCudaPlatform"
    assert (said["executor"], said["init method"]) == ("ExecutorWithExternalLauncher", "env://")
    assert (said["rank"], said["device"]) == (rank, cluster.index[rank])
    assert said["gpu"] == int(cluster.given[rank]), "by the number that the driver has for it"
    assert said["in bounds"]
    assert said["world"] == [list(range(len(cluster.nodes))), cluster.index[rank]]
    assert said["tp groups"] == cluster.replicas
    assert said["queues"] == [], "one would listen on an address of its own choosing"
    assert said["custom all-reduce"] == cluster.custom_all_reduce
    assert said["kv heads"] == cluster.kv_heads
    assert said["left behind"] == {"RANK": None, "LOCAL_RANK": None}


def test_vllm_generates_as_fast_as_it_can_and_sleeps_beside_the_trainer(vllm_says):
    with every_row() as row:
        for name, rank in EVERY_RANK:
            with row(name, rank):
                check_speed(vllm_says[name, rank, True, False])


def check_speed(said):
    assert said["worker"] == "vllm.v1.worker.gpu_worker.Worker"
    assert said["second runner lacks"] == []
    assert said["dtype"] == "torch.bfloat16"
    assert said["sleep"] == [True, True]
    assert not said["eager"]
    assert said["graphs"] == "FULL_AND_PIECEWISE"
    assert said["largest graph"] >= said["sequences"] == 64, "every step of decoding is a graph"
    assert said["asynchronous"]
    assert said["chunked prefill"]
    assert said["prefix caching"]
    assert said["log-probs"] == "processed_logprobs"
    assert said["load format"] == "dummy"
    assert 0.74 <= said["share"] <= 60 / 80, "what is free, and a little less"
    assert not said["invariant"]


def test_a_rollout_in_a_pool_of_its_own_stays_awake(vllm_says):
    said, beside = vllm_says[(*ALONE, False, False)], vllm_says[(*ALONE, True, False)]
    assert said["sleep"] == [False, False]
    assert 0.36 <= said["share"] <= 30 / 80
    assert {name for name in said if said[name] != beside[name]} == {"sleep", "share"}


def test_a_rollout_with_adapters_has_slots_on_the_layers_that_are_asked_for_and_is_as_fast(vllm_says):
    said, plain = vllm_says["adapters"], vllm_says["8 GPUs", 0, True, False]
    assert said["adapters"] == [2, 8, ["down_proj", "qkv_proj"]]
    assert {name for name in said if said[name] != plain[name]} <= {"adapters", "share"}


def test_a_deterministic_rollout_is_told_by_its_environment_alone(vllm_says):
    said, plain = vllm_says[(*IN_ORDER, True, True)], vllm_says[(*IN_ORDER, True, False)]
    assert said["invariant"]
    assert said["sleep"] == [True, True]
    assert said["tp groups"] == plain["tp groups"]


def test_the_runner_that_cuda_takes_has_what_the_rollout_reads_of_it():
    """``model`` to be filled and ``kv_caches`` to be cleaned; on processors the other runner works, so that no test would tell."""
    pytest.importorskip("vllm")
    import ast
    import importlib.util

    spec = importlib.util.find_spec("vllm.v1.worker.gpu.model_runner")
    tree = ast.parse(Path(spec.origin).read_text())
    (runner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GPUModelRunner")
    kept = {
        node.attr for node in ast.walk(runner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"
    }  # fmt: skip
    assert {"model", "kv_caches"} <= kept
