"""A worker without Ray: what a role leaves behind when it goes."""

import gc
import os
import weakref
from pathlib import Path

import spawn
from expect import refuses

import hfsdk
from hfsdk.core.errors import CheckpointError
from hfsdk.core.layout import Layout
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.spec import ModelSpec

TINY = str(Path(hfsdk.__file__).parent / "assets" / "tiny")


def held():
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def come_and_go(rank, world_size):
    import torch.distributed as dist
    from vllm.distributed.parallel_state import gc as collector_of_vllm
    from vllm.utils.gc_utils import freeze_gc_heap

    from hfsdk.engine.training import cpu_support_megatron
    from hfsdk.engine.worker.role_host import WorkerSetup
    from hfsdk.engine.worker.worker import Worker

    imported = gc.get_freeze_count()
    assert imported > 100_000
    cpu_support_megatron.install()
    worker = Worker(rank)
    worker.setup = WorkerSetup(rank, rank, world_size, "all", "test", "")
    role = {"kind": "critic", "head": "scalar", "folder": TINY, "model": ModelSpec.from_folder(TINY), "optimizer": AdamW()}
    found = []
    for _ in range(3):
        for layout in ("dp2", "tp2"):
            worker.load(RoleSpec(name=layout, train=Layout.parse(layout).fill(world_size), **role))
        models = [weakref.ref(hosted.trainer.model) for hosted in worker.roles.values()]
        freeze_gc_heap()  # vLLM does when it has built an engine
        dist.barrier()
        for layout in ("dp2", "tp2"):
            worker.release(layout)
        assert [model() for model in models] == [None, None]
        collector_of_vllm.unfreeze()  # it does when an engine ends
        assert gc.get_freeze_count() > 0.9 * imported, "a release does not search what was imported"
        dist.barrier()
        found.append(held())
    with refuses(CheckpointError, "late's checkpoint is gone", "/gone/late"):
        worker.load(RoleSpec(name="late", train=Layout.parse("dp2").fill(world_size), restore="/gone", **role))
    dist.barrier()
    assert not worker.roles
    return [*found, held()]


def test_roles_that_go_leave_no_threads_and_no_sockets():
    for found in spawn.run(come_and_go, 2):
        assert len(set(found[1:])) == 1, found  # the first time some libraries keep something for good
