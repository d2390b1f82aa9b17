"""One function a stage: it measures into a setting, and says there what does not hold."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hfsdk.core.arguments import Folder
from hfsdk.core.cluster import DEVICES, LinkSpec
from hfsdk.core.layout import Layout
from hfsdk.core.runtime import Assignment
from hfsdk.core.trace import Span
from hfsdk.engine.process import deterministic, tasks
from hfsdk.engine.process.clocks import EventClock, WallClock
from hfsdk.engine.process.recorder import Recorder
from hfsdk.engine.process.rendezvous import join as join_world
from hfsdk.engine.training import megatron_model, vocab_parallel
from hfsdk.engine.training.megatron_groups import RoleGroups, forget_groups
from hfsdk.engine.weights.on_host import copy_on_host
from hfsdk.engine.worker.requests import Keep, Request, Restore, carry_out
from hfsdk.engine.worker.worker import Worker
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.planner.perf.setup import Links, Setup
from on_gpu import adapters, recorded, weights
from on_gpu.stage import LAYERS_OF_7B, NEVER, QWEN_1_5B, Setting, log_probs, role, rows, update, worker

TIMES = 3
"""Measured passes and steps."""


def join(setting: Setting) -> None:
    """Join a world, make a role's groups, add up over them, leave; and once more in the same process."""
    for attempt in range(2):
        begun = time.perf_counter()
        if setting.cuda:
            torch.cuda.set_device(0)
        join_world(f"file://{setting.folder / f'world{attempt}'}", 0, 1, 0 if setting.cuda else None)
        groups = RoleGroups(Layout(tp=1).fill(1).mesh())
        total = torch.ones(4, device=setting.device)
        for group in (groups.tp, groups.dp, groups.pp, groups.world):
            dist.all_reduce(total, group=group)
        setting.need(total.tolist() == [1.0] * 4, f"adding up over a world of one gave {total.tolist()}")
        setting.need(groups.gather("here", str) == ["here"], "objects did not come by gloo")
        forget_groups()
        dist.destroy_process_group()
        setting.note(**{f"join_and_leave_{attempt + 1}_s": time.perf_counter() - begun})
    back = tasks.as_it_travels({"x": torch.ones(2, device=setting.device)}, "f")["x"]
    setting.need(back.device.type == "cpu", f"what a user's function returned arrived on {back.device}")


def attention(setting: Setting) -> None:
    """Packed attention against attention row by row: results, gradients, seconds; rows of very different lengths."""
    torch.manual_seed(0)
    lengths = [1, 7, *np.random.default_rng(0).integers(16, setting.size(2048, 64), setting.size(14, 3)).tolist()]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    kind = torch.bfloat16 if setting.cuda else torch.float32
    shapes = [(int(offsets[-1]), heads, 128) for heads in (28, 4, 4)]
    made = [torch.randn(shape, device=setting.device, dtype=kind, requires_grad=True) for shape in shapes]
    attend = megatron_model.choose(setting.device.type, kind, 128)
    setting.note(kernel=attend.__name__, tokens=int(offsets[-1]))
    exact = [x.detach().float().requires_grad_() for x in made]
    expected = megatron_model.attend_row_by_row(*exact, offsets, 0.088)
    direction = torch.randn(expected.shape, generator=setting.generator(), device=setting.device)
    right = [expected, *torch.autograd.grad(expected, exact, direction)]
    for way in (attend, megatron_model.attend_in_one):
        out = way(*made, offsets, 0.088)
        found = [out, *torch.autograd.grad(out, made, direction.to(kind))]
        for name, mine, theirs in zip(("results", "dq", "dk", "dv"), found, right, strict=True):
            error = float((mine.float() - theirs).norm() / theirs.norm())
            setting.need(error < (0.02 if setting.cuda else 1e-5), f"{way.__name__}: {name} are off by {error:.2g}")
            setting.note(**{f"{way.__name__}_error_{name}": error})
        setting.note(**{f"{way.__name__}_ms": 1e3 * setting.seconds(lambda way=way: way(*made, offsets, 0.088))})


def log_probs_of_a_large_vocabulary(setting: Setting) -> None:
    """Log-probs and entropy of 152k columns against float64, and the peak for many positions."""
    width, few, many = setting.size(152_064, 2_000), setting.size(256, 32), setting.size(16_384, 512)
    if setting.small:
        vocab_parallel.CHUNK_ELEMENTS = 100 * width
    logits = torch.randn(few, width, generator=setting.generator(), device=setting.device).mul_(4).requires_grad_()
    targets = torch.randint(0, width, (many,), generator=setting.generator(), device=setting.device)
    found, entropy = vocab_parallel.log_probs_and_entropy(logits, targets[:few], width)
    assert entropy is not None
    (found + entropy).sum().backward()
    exact = logits.detach().double().requires_grad_()
    all_log_probs = exact.log_softmax(-1)
    right = all_log_probs.gather(-1, targets[:few, None])[:, 0]
    (right - (all_log_probs.exp() * all_log_probs).sum(-1)).sum().backward()
    assert logits.grad is not None
    assert exact.grad is not None
    worst, slope = float((found - right).abs().max()), float((logits.grad - exact.grad).norm() / exact.grad.norm())
    setting.note(worst_log_prob=worst, error_gradient=slope)
    setting.need(worst < 2e-4, f"log-probs are off by {worst:.2g}")
    setting.need(slope < 1e-5, f"their gradient is off by {slope:.2g}")
    del logits, exact, all_log_probs, right, found, entropy
    peaks = {}
    for count in (many // 4, many):
        batch = torch.randn(count, width, device=setting.device, dtype=torch.bfloat16, requires_grad=True)

        def work(batch: torch.Tensor = batch, count: int = count) -> None:
            vocab_parallel.log_probs_and_entropy(batch, targets[:count], width)[0].sum().backward()

        peaks[count] = setting.peak_bytes(work) - batch.nbytes  # beside the logits and their gradient
        setting.note(**{f"peak_gb_{count}": peaks[count] / 1e9})
        del batch
    if setting.cuda:
        limit = 3.5 * 4 * vocab_parallel.CHUNK_ELEMENTS
        setting.need(peaks[many] < limit, f"{many} positions took {peaks[many] / 1e9:.1f} GB beside logits and gradient")


def passes(setting: Setting) -> None:
    """Passes and steps of layers as wide as a 7B's, against the device's peak."""
    spec = setting.model(LAYERS_OF_7B)
    here = worker(setting)
    here.load(role(setting, spec))
    hosted = here.roles["actor"]
    table = rows(spec, [setting.size(1000, 20)] * 16)
    tokens = int((table.ragged("prompt").lengths + table.ragged("response").lengths).sum())
    forward = setting.seconds(lambda: log_probs(hosted, table), TIMES)
    step = setting.seconds(lambda: update(hosted, table), TIMES)
    matrices = spec.num_parameters() - spec.vocab_size * spec.hidden_size  # the embedding is looked up
    setting.note(tokens=tokens, forward_s=forward, step_s=step, tokens_per_s=tokens / step)
    name = torch.cuda.get_device_name() if setting.cuda else "cpu"
    known = next((device for key, device in DEVICES.items() if key.split("-")[0] in name and setting.cuda), None)
    if known is not None:
        flops = 2 * matrices * tokens / known.peak_flops
        setting.note(mfu_forward=flops / forward, mfu_step=3 * flops / step)
        alone = LinkSpec(name="none", bandwidth=1e12, latency_s=0.0)
        setup = Setup(
            spec=spec, layout=Layout(tp=1).fill(1), device=known, links=Links(tp=alone, pp=alone, dp=alone),
            micro_batch_tokens=hosted.spec.micro_batch_tokens,
        )  # fmt: skip
        lengths = [table.ragged(name).lengths for name in ("prompt", "response")]
        for name, method in (("forward", "compute_log_probs"), ("step", "update")):
            setting.note(**{f"predicted_{name}_s": PerfModel().seconds(method, setup, *lengths)})
    here.leave()


def learns(setting: Setting) -> None:
    """A random 1.5B makes the same rows likelier step by step; what a worker counts for it is what torch has allocated."""
    spec = setting.model(QWEN_1_5B)
    here = worker(setting)
    before = setting.used_bytes()
    here.load(role(setting, spec))
    hosted = here.roles["actor"]
    table = rows(spec, [setting.size(200, 20)] * 8)
    losses = [update(hosted, table)[0]["loss"] for _ in range(4)]
    setting.note(**{f"loss_{k}": loss for k, loss in enumerate(losses)})
    setting.need(np.isfinite(losses).all() and losses[-1] < losses[0], f"the loss did not fall: {losses}")
    counted, allocated = hosted.memory_bytes(), setting.used_bytes() - before
    setting.note(counted_gb=counted / 1e9, allocated_gb=allocated / 1e9)
    if setting.cuda:
        setting.need(abs(counted / allocated - 1) < 0.03, f"counted {counted / 1e9:.2f} GB, torch has {allocated / 1e9:.2f}")
    here.leave()
    setting.need(setting.used_bytes() - before < 0.02 * max(allocated, 1) + 2**20, "leaving freed not all of it")


def offload(setting: Setting) -> None:
    """AdamW's state in host memory between steps, and all of a role between calls: bytes that leave, seconds, the same steps."""
    spec = setting.model(QWEN_1_5B)
    found = {}
    for offloads in ("", "steps", "calls"):
        here = worker(setting)
        made = role(setting, spec)
        assert made.optimizer is not None
        optimizer = type(made.optimizer)(lr=1e-4, offload=offloads == "steps")
        here.load(role(setting, spec, optimizer=optimizer, offload=offloads == "calls"))
        hosted = here.roles["actor"]
        table = rows(spec, [setting.size(200, 20)] * 8)
        losses = [update(hosted, table)[0]["loss"] for _ in range(2)]
        seconds = setting.seconds(lambda hosted=hosted, table=table: update(hosted, table), TIMES)
        found[offloads] = losses, setting.used_bytes(), hosted.offloaded_bytes(), seconds
        here.leave()
        (setting.folder / "store").unlink(missing_ok=True)
    plain, full, _, quick = found.pop("")
    setting.note(step_s=quick)
    for between, (same, less, away, slow) in found.items():
        freed = full - less
        setting.note(**{f"away_between_{between}_gb": away / 1e9, f"freed_gb_{between}": freed / 1e9, f"step_s_{between}": slow})
        setting.need(plain == same, f"losses differ with offload between {between}: {plain}, {same}")
        setting.need(away > 0, "nothing is in host memory")
        if setting.cuda:
            setting.need(freed > 0.95 * away, f"{away / 1e9:.2f} GB went to the host, {freed / 1e9:.2f} GB were freed")


def states(setting: Setting) -> None:
    """A snapshot and a checkpoint give the weights and moments back bit for bit."""
    spec = setting.model(QWEN_1_5B)
    here = worker(setting)
    here.load(role(setting, spec))
    hosted = here.roles["actor"]
    table = rows(spec, [setting.size(100, 20)] * 4)
    update(hosted, table)
    before = {name: tensor.clone() for name, tensor in hosted.trainer.local_tensors().items()}

    def same(what: str) -> None:
        now = hosted.trainer.local_tensors()
        wrong = [name for name, tensor in before.items() if not torch.equal(tensor, now[name])]
        setting.need(not wrong, f"after {what} {len(wrong)} of {len(before)} weights differ, e.g. {wrong[:2]}")

    begun = time.perf_counter()
    _, _, num_bytes = carried_out(here, Keep("actor", 0))
    setting.note(snapshot_s=time.perf_counter() - begun, state_gb=num_bytes / 1e9)
    folder = setting.folder / "state"
    folder.mkdir()
    begun = time.perf_counter()
    hosted.run("save_state", table, Assignment(arguments=Folder(folder=str(folder))), NEVER)
    while not here.saved("actor"):
        time.sleep(0.01)
    here.finish_save("actor")
    setting.note(save_s=time.perf_counter() - begun)
    next_loss = update(hosted, table)
    begun = time.perf_counter()
    carried_out(here, Restore("actor", 0))
    setting.sync()
    setting.note(rewind_s=time.perf_counter() - begun)
    same("going back")
    again = update(hosted, table)
    setting.note(next_step_bit_equal=str(again == next_loss))  # said, not asked for: kernels on a GPU may add in another order
    hosted.run("load_state", table, Assignment(arguments=Folder(folder=str(folder), checked=True)), NEVER)
    same("loading")
    here.leave()


def carried_out(here: Worker, request: Request) -> Any:
    answer = carry_out(here, request)
    if answer.error is not None:
        raise answer.error
    return answer.result


def repeats(setting: Setting) -> None:
    """In the deterministic mode the same three steps give the same bits, whatever ran on the GPU meanwhile."""
    os.environ.update(deterministic.environment(True))
    if setting.cuda:
        deterministic.check_gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    deterministic.switch_on()
    spec = setting.model(QWEN_1_5B)
    here = worker(setting)
    here.load(role(setting, spec))
    hosted = here.roles["actor"]
    carried_out(here, Keep("actor", 0))
    table = rows(spec, [setting.size(length, length // 10) for length in (200, 700, 90, 410)] * 4)
    found = []
    for _ in range(2):
        begun = time.perf_counter()
        metrics = [update(hosted, table) for _ in range(3)]
        setting.note(steps_s=time.perf_counter() - begun)
        found.append((metrics, {name: tensor.clone() for name, tensor in hosted.trainer.local_tensors().items()}))
        log_probs(hosted, rows(spec, [setting.size(300, 30)] * 3))
        carried_out(here, Restore("actor", 0))
    (first, weights), (again, others) = found
    wrong = [name for name, tensor in weights.items() if not torch.equal(tensor, others[name])]
    setting.note(loss=first[-1][0]["loss"], grad_norm=first[-1][0]["grad_norm"])
    setting.need(first == again, f"metrics differ: {first}, {again}")
    setting.need(not wrong, f"{len(wrong)} of {len(weights)} weights differ, e.g. {wrong[:2]}")
    here.leave()


def spans(setting: Setting) -> None:
    """Whether the recorder's spans are the time of their kernels, where the host does not wait for the GPU inside them."""
    size = setting.size(8192, 256)
    a = torch.randn(size, size, device=setting.device, dtype=torch.bfloat16 if setting.cuda else torch.float32)
    work = lambda: [a @ a for _ in range(20)]  # noqa: E731
    recorder = Recorder(0, 0, clock=EventClock() if setting.cuda else WallClock())
    work()
    setting.sync()
    with recorder.call(Span(name="call", role="", call_id=0, start_ns=0)):
        begun_ns, begun = time.time_ns(), time.perf_counter()
        with recorder.span("products"):
            work()
        launched = time.perf_counter() - begun
        with recorder.span("wait"):
            setting.sync()
        done = time.perf_counter() - begun
    found = {span.name: span for span in recorder.take()[0]}
    took, waited = (found[name].duration_s or 0.0 for name in ("products", "wait"))
    setting.note(launched_ms=1e3 * launched, done_ms=1e3 * done, span_ms=1e3 * took, wait_ms=1e3 * waited)
    setting.note(start_off_ms=(found["products"].start_ns - begun_ns) / 1e6)
    if setting.cuda:
        setting.need(abs(took / done - 1) < 0.1, f"the span has {1e3 * took:.1f} ms, the clock {1e3 * done:.1f} ms")
        setting.need(waited < 0.1 * done, f"waiting for the GPU costs {1e3 * waited:.1f} ms once more")
        setting.need(abs(found["products"].start_ns - begun_ns) < 2e6, "the span begins over 2 ms from when it was entered")


def constants(setting: Setting) -> None:
    """What ``PerfModel`` assumes of a device: matrix products, memory, the way to the host and back."""
    size, num_bytes = setting.size(8192, 512), setting.size(2**30, 2**22)
    kind = torch.bfloat16 if setting.cuda else torch.float32
    a, b = (torch.randn(size, size, device=setting.device, dtype=kind) for _ in range(2))
    setting.note(tflops=2 * size**3 / setting.seconds(lambda: a @ b, 10) / 1e12)
    x, y = (torch.empty(num_bytes, dtype=torch.uint8, device=setting.device) for _ in range(2))
    setting.note(memory_gb_per_s=2 * num_bytes / setting.seconds(lambda: y.copy_(x), 10) / 1e9)
    for name, pinned in (("pageable", False), ("pinned", True)):
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned and setting.cuda)
        setting.note(**{f"to_host_{name}_gb_per_s": num_bytes / setting.seconds(lambda host=host: host.copy_(x)) / 1e9})
        setting.note(**{f"from_host_{name}_gb_per_s": num_bytes / setting.seconds(lambda host=host: x.copy_(host)) / 1e9})
    for name, copy in (("fresh", lambda: x.to("cpu", copy=True)), ("huge_pages", lambda: copy_on_host(x))):
        setting.note(**{f"to_host_{name}_gb_per_s": num_bytes / setting.seconds(copy) / 1e9})


STAGES = {
    "join": join, "constants": constants, "attention": attention, "log_probs": log_probs_of_a_large_vocabulary, "spans": spans,
    "passes": passes, "learns": learns, "recorded": recorded.compare, "replay": weights.replay, "bridge": weights.by_the_host,
    "offload": offload, "states": states, "repeats": repeats, "fingerprints": weights.fingerprints, "lora": adapters.lora,
}  # fmt: skip
