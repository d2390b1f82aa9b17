"""The way of the weights: in one pool into what a CUDA graph was captured over, and by the host to another pool."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hfsdk.core.layout import Layout
from hfsdk.core.roles import RoleSpec
from hfsdk.core.runtime import Weights
from hfsdk.core.spec import ModelSpec
from hfsdk.engine.weights import bridge, transport
from hfsdk.engine.weights.fingerprints import Strips
from hfsdk.resharding.boxes import VOCAB_TABLES, padded_vocab, vllm_boxes
from hfsdk.resharding.reshard_plan import ReshardPlan
from on_gpu.stage import QWEN_1_5B, Setting, role, rows, update, worker


def targets_of(setting: Setting, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return parameters as vLLM lays them out on one GPU, empty."""
    ends: dict[str, tuple[int, ...]] = {}
    for box in vllm_boxes(spec, 1, 0):
        end = tuple(a + n for a, n in zip(box.local_start, box.size, strict=True))
        ends[box.local] = tuple(map(max, end, ends.get(box.local, end)))
    for name in set(ends) & set(VOCAB_TABLES):
        ends[name] = (padded_vocab(spec.vocab_size, 1), spec.hidden_size)
    dtype = transport.TORCH_DTYPES[setting.dtype]
    return {name: torch.zeros(end, dtype=dtype, device=setting.device) for name, end in ends.items()}


def captured(setting: Setting, weight: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return something that multiplies by weights again when called, by what it multiplies, and where its result appears."""
    x = torch.randn(4, weight.shape[1], generator=setting.generator(), device=setting.device).to(weight.dtype)
    out = x @ weight.T
    if not setting.cuda:
        return lambda: torch.matmul(x, weight.T, out=out), x, out
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.matmul(x, weight.T, out=out)
    return graph.replay, x, out


def replay(setting: Setting) -> None:
    """Weights that change under a CUDA graph: what it computes when replayed is what the new ones give."""
    spec = setting.model(QWEN_1_5B)
    here = worker(setting)
    here.load(role(setting, spec))
    hosted = here.roles["actor"]
    targets = targets_of(setting, spec)
    weight = next(tensor for name, tensor in targets.items() if name.endswith("qkv_proj.weight"))
    again, x, out = captured(setting, weight)
    assert hosted.spec.train is not None
    plan = ReshardPlan.between(spec, hosted.spec.train, "tp1", setting.dtype)
    table, seen = rows(spec, [setting.size(100, 20)] * 4), []
    for _ in range(2):
        setting.sync()
        begun = time.perf_counter()
        report = transport.execute(plan, 0, hosted.trainer.local_tensors(), targets, None)
        setting.sync()
        took = time.perf_counter() - begun
        again()
        right = x.double() @ weight.double().T
        error = float((out - right).norm() / right.norm())
        setting.note(error_of_replay=error)  # in 16 bits; which kernel a graph has captured is cuBLAS' choice
        setting.need(error < 0.005, f"the replay does not see the weights that were copied: it is off by {error:.2g}")
        seen.append(out.clone())
        setting.note(copied_gb=report.bytes_copied / 1e9, copied_gb_per_s=report.bytes_copied / took / 1e9)
        update(hosted, table)
    setting.need(not torch.equal(*seen), "an optimizer step did not reach the replay")
    here.leave()


def fingerprints(setting: Setting) -> None:
    """Fingerprints of every box of a 1.5B: their pace against reading the weights once; those of a processor are the same."""
    spec = setting.model(QWEN_1_5B)
    given = {name: value.normal_(generator=setting.generator()) for name, value in targets_of(setting, spec).items()}
    boxes = [(box.local, box.local_start, box.size, box.start) for box in vllm_boxes(spec, 1, 0)]
    strips = Strips(boxes)
    gb = sum(value.numel() * value.element_size() for value in given.values()) / 1e9
    took = setting.seconds(lambda: strips.of(given))
    read = setting.seconds(lambda: [value.sum() for value in given.values()])
    setting.note(gb=gb, seconds=took, gb_per_s=gb / took, of_reading=took / read, boxes=float(len(boxes)))
    few = [box for box in boxes if box[2][0] * (box[2] + (1,))[1] < setting.size(5_000_000, 10**9)]
    here, there = Strips(few).of(given), Strips(few).of({name: value.cpu() for name, value in given.items()})
    setting.need((here == there).all(), f"{int((here != there).sum())} of {len(few)} fingerprints are not the processor's")


def by_the_host(setting: Setting) -> None:
    """To a rollout in another pool, as far as one process can show it: to host memory, and from it into the other's weights."""
    spec = setting.model(QWEN_1_5B)
    here = worker(setting)
    trained: RoleSpec = role(setting, spec)
    here.load(trained)
    hosted = here.roles["actor"]
    shadow = replace(
        trained, name="actor.rollout", optimizer=None, shadow_of="actor", train=None, rollout=Layout.parse("tp1").fill(1)
    )
    targets = targets_of(setting, spec)
    setting.sync()
    begun = time.perf_counter()
    given, report = bridge.give(bridge.Route.between(trained, shadow, source=0), hosted.trainer.local_tensors(), copied)
    setting.note(give_gb_per_s=report.bytes_sent / (time.perf_counter() - begun) / 1e9)
    begun = time.perf_counter()
    received, proof = bridge.take(bridge.Route.between(trained, shadow, target=0), Weights(trained, tuple(given)), lambda: targets)
    setting.sync()
    setting.note(take_gb_per_s=sum(received) / (time.perf_counter() - begun) / 1e9, gb=sum(received) / 1e9)
    setting.need(not proof.wrong, f"{len(proof.wrong)} boxes have another fingerprint than the ones that left: {proof.wrong[:1]}")
    directly = targets_of(setting, spec)
    assert trained.train is not None
    plan = ReshardPlan.between(spec, trained.train, "tp1", setting.dtype)
    transport.execute(plan, 0, hosted.trainer.local_tensors(), directly, None)
    wrong = [name for name, tensor in targets.items() if not torch.equal(tensor, directly[name])]
    setting.need(not wrong, f"{len(wrong)} of {len(targets)} weights differ from those copied on the GPU, e.g. {wrong[:2]}")
    here.leave()


def copied(boxes: Any) -> Any:
    """Return boxes in memory of their own, as an object store has them."""
    return [(key, np.array(bits), *rest) for key, bits, *rest in boxes]
