"""Real vLLM against transformers, on a random model of two layers. One spawn per world size; each runs many checks."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from expect import refuses
from spawn import JOB, run

import hfsdk.assets
from hfsdk.core.errors import CallError, OptionError, UnsupportedModelError
from hfsdk.core.layout import Layout
from hfsdk.core.roles import RolloutOptions, Sampling
from hfsdk.core.rollout_sizes import BLOCK_TOKENS, cache_bytes, context_tokens, least_cache_bytes
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Ragged
from hfsdk.engine.generation import cpu_support_vllm
from hfsdk.engine.generation.rollout import Rollout
from hfsdk.engine.generation.rollout_engine import check_model
from hfsdk.engine.process.recorder import Recorder
from hfsdk.engine.process.safepoint import Cancelled, PeerFailed, SafePoint
from hfsdk.engine.weights import transport
from hfsdk.resharding.boxes import megatron_boxes, padded_vocab, vllm_boxes
from hfsdk.resharding.reshard_plan import ReshardPlan

EOS = (258,)
EIGHT = Sampling(max_new_tokens=8, ignore_eos=True)
PROMPTS = Ragged.of([[(7 * i + j) % 250 for j in range(20 + i % 5)] for i in range(6)], np.int32)
SEEDS = np.arange(6, dtype=np.int64) * 2**60 - 1  # -1 and large ones are seeds like others
NEVER = SafePoint(lambda: False)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{tied: folder} of models whose logits are far from flat, with the byte tokenizer of ``tiny``.

    Each names code of its own for everything that may be code, and none of it runs in any of the tests.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    made = {}
    for tied in (False, True):
        folder = tmp_path_factory.mktemp("tied" if tied else "untied")
        config = LlamaConfig(
            vocab_size=260, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, head_dim=32, tie_word_embeddings=tied, max_position_embeddings=512,
        )  # fmt: skip
        torch.manual_seed(3)
        model = LlamaForCausalLM(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8.0 if parameter.dim() == 2 else 1.0)
        model.save_pretrained(folder)
        for path in (Path(hfsdk.assets.__file__).parent / "tiny").glob("tokenizer*"):
            shutil.copy(path, folder)
        (folder / "own_code.py").write_text(f"open({str(folder / 'canary')!r}, 'w').close()\n")
        name_code(folder / "config.json", AutoConfig="own_code.Config", AutoModelForCausalLM="own_code.Model")
        name_code(folder / "tokenizer_config.json", AutoTokenizer=[None, "own_code.Tokenizer"])
        made[tied] = str(folder)
    yield made
    assert not [folder for folder in made.values() if (Path(folder) / "canary").exists()]


def name_code(path, **auto_map):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": auto_map}))


# --- helpers of the ranks ---------------------------------------------------------------------------------------------


def at(start, size):
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def reference(folder):
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        assert model(torch.arange(40)[None]).logits.std() >= 1.0
    return model


def change(model, factor=1.2):
    """Other weights, whose logits are still far from flat."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((factor - 1) * parameter.std(correction=0).clamp(min=0.1) * torch.randn(parameter.shape, generator=g))
        assert model(torch.arange(40)[None]).logits.std() >= 1.0


def make(folder, mode, rank=0, world_size=1, tp=1, sizes=None, **options):
    spec = ModelSpec.from_folder(folder)
    recorder = Recorder(device=rank, rank=rank)
    options = {"load_weights": True, "dtype": "fp32"} | options
    sizes = RolloutOptions(max_model_len=128, max_num_seqs=16, cpu_weights=mode, **(sizes or {}))
    return Rollout(
        folder, spec, tp=tp, rank=rank, world_size=world_size, options=sizes, seed=0, job_id=JOB, recorder=recorder,
        **options,
    )  # fmt: skip


def draw(rollout, sampling=EIGHT, prompts=PROMPTS, seeds=SEEDS, safe=NEVER, group=None, eos=EOS, **more):
    return rollout.generate(prompts, seeds, sampling, eos, safe, group, np.arange(len(prompts)), **more)


def push(rollout, model):
    """Write a transformers model into the rollout, box by box."""
    weights = dict(model.named_parameters())
    targets = rollout.weight_targets()
    for box in vllm_boxes(rollout.spec, rollout.tp, rollout.tp_rank):
        part = weights[box.tensor].data[at(box.start, box.size)]
        targets[box.local][at(box.local_start, box.size)].copy_(part)
    rollout.finish_update()


def log_probs(model, prompt, response, temperature=1.0):
    ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
    with torch.no_grad():
        every = (model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)
    return every.gather(-1, torch.from_numpy(response).long()[:, None])[:, 0].numpy()


def check_parity(model, out, temperature=1.0, prompts=PROMPTS, tolerance=TOLERANCE):
    for i, prompt in enumerate(prompts):
        assert len(out["response"][i]) == len(out["rollout_log_probs"][i]) > 0
        expected = log_probs(model, prompt, out["response"][i], temperature)
        np.testing.assert_allclose(out["rollout_log_probs"][i], expected, atol=tolerance, rtol=0)


def segments():
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"hfsdk.{JOB}")]


# --- one rank ---------------------------------------------------------------------------------------------------------


def one_rank(rank, world_size, folders):
    for tied, mode in ((False, "shared"), (True, "shared"), (True, "packed"), (False, "packed")):
        model = reference(folders[tied])
        before = torch.get_rng_state(), torch.set_num_threads, os.environ.get("LD_PRELOAD")
        rollout = make(folders[tied], mode)
        check_kept(before)
        check_parity(model, draw(rollout))
        for _ in range(2):
            change(model)
            push(rollout, model)
            check_parity(model, draw(rollout))
        check_kept(before)
        check_memory(rollout, mode)
        if (tied, mode) != (False, "packed"):
            rollout.close()
            rollout.close()
            dist.barrier()
    check_refusals(rollout)
    check_temperatures(rollout, model)
    check_seeds(rollout)
    check_ends(rollout)
    check_cancel(rollout, model, None)
    check_spans(rollout)
    check_between_updates(rollout, model)
    check_nan_leaves_no_trace(rollout, model)
    check_prefixes_of_older_weights_are_forgotten(rollout, model)
    rollout.close()
    check_first_update(folders[True])
    check_crowded(folders[True])
    dist.barrier()  # the trainer's group outlives every rollout


def check_kept(before):
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.set_num_threads is before[1]
    assert os.environ.get("LD_PRELOAD") == before[2]
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    assert torch.get_default_dtype() == torch.float32


def check_memory(rollout, mode):
    spec = rollout.spec
    weights = spec.num_bytes("fp32") + (60 * 128 * 4) * (1 if spec.tied_embeddings else 2)  # 260 rows padded to 320
    table = 320 * 128 * 4
    extra = table if mode == "packed" and spec.tied_embeddings else 0  # looked up and multiplied with
    assert rollout.memory_bytes() == weights + extra + rollout.kv_cache_bytes


def check_refusals(rollout):
    def refuse(*named, **arguments):
        with refuses(OptionError, *named):
            draw(rollout, **arguments)

    one = np.zeros(1, np.int64)
    refuse("row 0", "0 tokens", "1 to 120", prompts=Ragged.of([[]], np.int32), seeds=one)
    refuse("121 tokens", prompts=Ragged.of([[1] * 121], np.int32), seeds=one)
    refuse("row 1", "260", "0 to 259", prompts=Ragged.of([[1], [2, 260]], np.int32), seeds=np.zeros(2, np.int64))
    refuse("6 prompts", "2 seeds", seeds=np.zeros(2, np.int64))


def check_temperatures(rollout, model):
    check_parity(model, draw(rollout, Sampling(max_new_tokens=8, ignore_eos=True, temperature=0.7)), 0.7)
    greedy = draw(rollout, Sampling(max_new_tokens=8, ignore_eos=True, temperature=0.0))
    check_parity(model, greedy)  # the log-softmax at temperature 1
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([[*prompt.tolist(), *greedy["response"][i].tolist()]])
        with torch.no_grad():
            best = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert best.tolist() == greedy["response"][i].tolist()
    narrow = draw(rollout, Sampling(max_new_tokens=8, ignore_eos=True, top_k=3))
    assert np.exp(narrow["rollout_log_probs"].flat).min() > 1e-3
    full = np.concatenate([log_probs(model, p, narrow["response"][i]) for i, p in enumerate(PROMPTS)])
    assert (narrow["rollout_log_probs"].flat >= full - TOLERANCE).all()  # renormalised over three tokens


def check_seeds(rollout):
    whole = draw(rollout)
    again = draw(rollout)
    assert whole["response"] == again["response"]
    assert np.array_equal(whole["rollout_log_probs"].flat, again["rollout_log_probs"].flat)
    order = [5, 2]
    some = draw(rollout, prompts=PROMPTS.take(order), seeds=SEEDS[order])
    assert some["response"] == whole["response"].take(order)
    twice = draw(rollout, prompts=PROMPTS.take([0] * 24), seeds=np.arange(24))  # more rows than max_num_seqs
    assert len({tuple(row) for row in twice["response"]}) == 24
    assert draw(rollout, seeds=SEEDS + 1)["response"] != whole["response"]
    nothing = draw(rollout, prompts=PROMPTS.take([]), seeds=SEEDS[:0])
    assert [len(column) for column in nothing.values()] == [0, 0, 0]


def check_ends(rollout):
    free = draw(rollout, Sampling(max_new_tokens=32, ignore_eos=True))
    assert set(free["finish_reason"]) == {"length"}
    assert set(free["response"].lengths) == {32}
    token = int(free["response"][0][3])
    first = [row.tolist().index(token) + 1 if token in row else 32 for row in free["response"]]
    for ended in (
        draw(rollout, Sampling(max_new_tokens=32), eos=(token,)),
        draw(rollout, Sampling(max_new_tokens=32, stop_token_ids=(token,), ignore_eos=True), eos=EOS),
    ):
        assert ended["response"].lengths.tolist() == first
        assert ended["response"][0][-1] == token  # the ending token is part of the response
        expected = ["stop" if token in row else "length" for row in ended["response"]]
        assert ended["finish_reason"].tolist() == expected
        assert all(np.array_equal(free["response"][i][:n], ended["response"][i]) for i, n in enumerate(first))
    ignored = draw(rollout, Sampling(max_new_tokens=32, ignore_eos=True), eos=(token,))
    assert ignored["response"] == free["response"]
    longer = draw(rollout, Sampling(max_new_tokens=32, min_new_tokens=10), eos=(token,))
    assert longer["response"].lengths.min() >= 10
    assert all(token not in row[:10] for row in longer["response"])
    check_stop_strings(rollout, free)


def check_stop_strings(rollout, free):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(rollout._folder)
    text = next(t for row in free["response"] for t in [tokenizer.decode(row[4:6])] if len(t) == 2 and t.isprintable())
    ended = draw(rollout, Sampling(max_new_tokens=32, ignore_eos=True, stop=(text, "never to be seen")))
    assert "stop" in ended["finish_reason"]
    for i, row in enumerate(ended["response"]):
        assert np.array_equal(free["response"][i][: len(row)], row)
        assert (text in tokenizer.decode(row)) == (ended["finish_reason"][i] == "stop")
        assert text not in tokenizer.decode(row[:-1])
    later = draw(rollout, Sampling(max_new_tokens=32, min_new_tokens=20, ignore_eos=True, stop=(text,)))
    assert later["response"].lengths.min() >= 20


def check_cancel(rollout, model, group, ask=True):
    """Cancelled in the middle: nothing stays behind, the next call is right, and so is the one after an update."""
    counter = iter(range(10**6))
    with pytest.raises(Cancelled):
        draw(
            rollout,
            Sampling(max_new_tokens=64, ignore_eos=True),
            safe=SafePoint(lambda: ask and next(counter) > 5),
            group=group,
        )
    assert 0 < rollout._recorder.progress["tokens"] < 64 * 6
    with pytest.raises(Cancelled):
        draw(rollout, safe=SafePoint(lambda: ask), group=group)
    check_parity(model, draw(rollout, group=group))
    push(rollout, model)
    check_parity(model, draw(rollout, group=group))
    assert not rollout._core.engine_core.scheduler.running


def check_spans(rollout):
    rollout._recorder.take()
    draw(rollout, Sampling(max_new_tokens=5, ignore_eos=True))
    spans = {span.name: span for span in rollout._recorder.take()[0]}
    assert list(spans) == ["prefill", "decode"]
    assert spans["prefill"].attrs["tokens"] == PROMPTS.offsets[-1]
    assert (spans["decode"].attrs["tokens"], spans["decode"].attrs["steps"]) == (24, 4)
    assert 0 < spans["decode"].attrs["kv_usage"] < 1
    assert spans["decode"].attrs["running"] == 6
    assert rollout._recorder.progress == {"tokens": 30, "total": 30, "finished": 6, "samples": 6}


def check_between_updates(rollout, model):
    rollout.weight_targets()
    with refuses(RuntimeError, "finish_update"):
        draw(rollout)
    push(rollout, model)  # as after a transition that was cancelled
    check_parity(model, draw(rollout))


def check_prefixes_of_older_weights_are_forgotten(rollout, model):
    """Prompts of whole blocks, whose keys and values the cache keeps for the next row that begins alike."""
    long = Ragged.of([[(3 * i + j) % 250 for j in range(3 * BLOCK_TOKENS)] for i in range(2)], np.int32)

    def drawn():
        return draw(rollout, prompts=long, seeds=SEEDS[:2])

    check_parity(model, drawn(), prompts=long)
    first = next(iter(model.parameters()))
    first.data.neg_()
    push(rollout, model)
    check_parity(model, drawn(), prompts=long)
    first.data.neg_()
    push(rollout, model)


def check_nan_leaves_no_trace(rollout, model):
    """Weights with NaN fill the key/value cache with it; right ones after them compute what they did before."""
    before = draw(rollout)
    first = next(iter(model.parameters()))
    kept = first.data.clone()
    first.data[:] = float("nan")
    push(rollout, model)
    assert np.isnan(draw(rollout)["rollout_log_probs"].flat).all()
    first.data.copy_(kept)
    push(rollout, model)
    after = draw(rollout)
    for name in ("response", "rollout_log_probs"):
        np.testing.assert_array_equal(after[name].flat, before[name].flat)


def check_first_update(folder):
    """Without the folder's weights the first update has to come first; bfloat16 agrees within its own precision."""
    model = reference(folder)
    rollout = make(folder, "packed", load_weights=False, dtype="bf16")
    with refuses(RuntimeError, "no weights yet"):
        draw(rollout)
    push(rollout, model)
    check_parity(model, draw(rollout), tolerance=1.5)
    targets = rollout.weight_targets()
    assert {t.dtype for t in targets.values()} == {torch.bfloat16}
    assert all((t[260:] == 0).all() for name, t in targets.items() if len(t) == 320)
    rollout.close()


def check_crowded(folder):
    """More prompt tokens than one step takes, and a cache too small for all rows: each row is as it is alone."""
    few_blocks = 12 * 32 * ModelSpec.from_folder(folder).kv_bytes_per_token("fp32")
    rollout = make(folder, "packed", sizes={"max_num_batched_tokens": 16, "kv_cache_bytes": few_blocks})
    prompts, seeds = PROMPTS.take([*range(6), *range(6)]), np.arange(12)
    prompts = Ragged.of([[i, *row] for i, row in enumerate(prompts)], np.int32)  # no prefix in common
    assert len(prompts.flat) > 2 * 128
    long = Sampling(max_new_tokens=70, ignore_eos=True)
    preempted = []
    scheduler = rollout._core.engine_core.scheduler
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **more: (preempted.append(args), preempt(*args, **more))[1]
    together = draw(rollout, long, prompts, seeds)
    assert preempted
    for i in (0, 5, 11):
        alone = draw(rollout, long, prompts.take([i]), seeds[[i]])
        assert alone["response"] == together["response"].take([i])
    rollout.close()


# --- two ranks --------------------------------------------------------------------------------------------------------


def two_ranks(rank, world_size, folders):
    group = dist.new_group([0, 1])
    responses = []
    for tied, mode, tp in ((True, "packed", 2), (True, "shared", 1), (False, "shared", 2)):
        model = reference(folders[tied])
        rollout = make(folders[tied], mode, rank, world_size, tp)
        assert segments() == []  # unlinked as soon as both ranks have joined them
        control = group if tp == 2 else None
        check_parity(model, draw(rollout, group=control))
        change(model)
        for train in ("tp2", "dp2"):
            reshard(rollout, model, train, rank)
            out = draw(rollout, group=control)
            check_parity(model, out)
        responses.append(out["response"])
        if mode == "shared" and tp == 2:
            check_cancel(rollout, model, group, ask=rank == 1)
            check_failure(rollout, model, group, rank)
            check_different_tokens(rollout, model, group, rank)
        rollout.close()
        assert dist.get_world_size() == 2
        dist.barrier()
    return [response.flat for response in responses]


def reshard(rollout, model, train, rank):
    """The whole way: the trainer's shards, the plan, the transport, the engine's tensors."""
    spec, layout = rollout.spec, Layout.parse(train).fill(2)
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    shapes = {
        "linear_qkv.weight": (16 * 32 // layout.tp, 128), "linear_proj.weight": (128, 256 // layout.tp),
        "linear_fc1.weight": (512 // layout.tp, 128), "linear_fc2.weight": (128, 256 // layout.tp),
        "word_embeddings.weight": (padded_vocab(260, layout.tp) // layout.tp, 128),
        "output_layer.weight": (padded_vocab(260, layout.tp) // layout.tp, 128),
    }  # fmt: skip
    sources = {}
    for box in megatron_boxes(spec, layout, layout.coordinates(rank).tp):
        shape = next((shapes[end] for end in shapes if box.local.endswith(end)), (128,))
        local = sources.setdefault(box.local, torch.zeros(shape))
        local[at(box.local_start, box.size)] = weights[box.tensor][at(box.start, box.size)]
    plan = ReshardPlan.between(spec, layout, f"tp{rollout.tp}")
    report = transport.execute(plan, rank, sources, rollout.weight_targets(), dist.group.WORLD)
    rollout.finish_update()
    assert report.bytes_received == plan.bytes_received(rank)


def check_failure(rollout, model, group, rank):
    """An engine that raises on one rank stops the other at the same step, and both go on."""
    step = rollout._core.get_output
    counter = iter(range(100))

    def fails():
        outputs = step()
        if next(counter) == 3:
            raise ZeroDivisionError
        return outputs

    if rank == 1:
        rollout._core.get_output = fails
    with pytest.raises(ZeroDivisionError if rank == 1 else PeerFailed):
        draw(rollout, group=group)
    rollout._core.get_output = step
    check_parity(model, draw(rollout, group=group))


def check_different_tokens(rollout, model, group, rank):
    """A token that one rank alone drew stops both at that step, and both go on."""
    step = rollout._core.get_output
    counter = iter(range(100))

    def draws_another():
        outputs = step()
        if next(counter) == 3:
            outputs.outputs[-1].new_token_ids[-1] ^= 1
        return outputs

    if rank == 1:
        rollout._core.get_output = draws_another
    with refuses(CallError, "different tokens", 18):
        draw(rollout, Sampling(max_new_tokens=8, ignore_eos=True), group=group)
    rollout._core.get_output = step
    check_parity(model, draw(rollout, group=group))


# --- a step ahead -----------------------------------------------------------------------------------------------------


def a_step_ahead(rank, world_size, folder):
    """vLLM's queue of steps, as asynchronous scheduling on GPUs has it: the same samples, and nothing under way afterwards."""
    from transformers import AutoTokenizer

    plain = make(folder, "shared")
    long = Sampling(max_new_tokens=32, ignore_eos=True)
    free = draw(plain, long)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    letter = next(t for row in free["response"] for t in map(tokenizer.decode, row[2:20]) if t.isascii() and t.isalnum())
    ways = [long, replace(long, stop=(letter,)), replace(long, stop_token_ids=(int(free["response"][1][9]),))]
    expected = [draw(plain, way) for way in ways]
    assert all("stop" in out["finish_reason"] for out in expected[1:])
    plain.close()
    from vllm.config import VllmConfig

    VllmConfig.max_concurrent_batches = property(lambda config: 2)
    rollout, model = make(folder, "shared"), reference(folder)
    core = rollout._core.engine_core
    assert core.batch_queue is not None
    took, step = [], core.step_fn
    core.step_fn = lambda: took.append(step()) or took[-1]
    found = [draw(rollout, way) for way in ways]
    assert any(outputs is None for outputs, _ in took), "no step was ahead"
    for these, those in zip(found, expected, strict=True):
        assert these["response"] == those["response"]
        np.testing.assert_allclose(these["rollout_log_probs"].flat, those["rollout_log_probs"].flat, atol=TOLERANCE)
        assert these["finish_reason"].tolist() == those["finish_reason"].tolist()
    assert not core.batch_queue
    check_cancel(rollout, model, None)
    assert not core.batch_queue
    change(model)
    push(rollout, model)
    check_parity(model, draw(rollout))
    rollout.close()


# --- other families, with the trainer ----------------------------------------------------------------------------------


def other_families(rank, world_size, folders, cases):
    """The trainer's weights by the plan, before and after an update: vLLM's log-probs are the trainer's.

    ``cases`` are (folder, mode of the rollout's weights, training layout, tp of the rollout).
    """
    from hfsdk.core.microbatch import plan_pass, plan_update
    from hfsdk.core.roles import AdamW, RoleSpec
    from hfsdk.core.table import Table
    from hfsdk.engine.training.megatron_groups import RoleGroups
    from hfsdk.engine.training.trainer import Trainer

    group, responses = dist.new_group([0, 1]), []
    for family, mode, train, tp in cases:
        folder = folders[family]
        mesh = Layout.parse(train).fill(2).mesh(tp)
        role = RoleSpec(name="actor", kind="actor", folder=folder, train=mesh.layout, optimizer=AdamW(lr=1e-3))
        trainer = Trainer(role, mesh, RoleGroups(mesh), Recorder(device=rank, rank=rank))
        rollout = make(folder, mode, rank, world_size, tp, load_weights=False)
        plan = ReshardPlan.between(rollout.spec, mesh.layout, f"tp{tp}")
        earlier = None
        for _ in range(2):
            transport.execute(plan, rank, trainer.local_tensors(), rollout.weight_targets(), dist.group.WORLD)
            rollout.finish_update()
            out = draw(rollout, group=group if tp == 2 else None)
            assert out["rollout_log_probs"].flat.min() < -0.3
            assert not np.array_equal(out["rollout_log_probs"].flat, earlier), "the update came through"
            earlier = out["rollout_log_probs"].flat
            responses.append(out["response"].flat)
            rows = Table({"prompt": PROMPTS, "response": out["response"]})
            total = PROMPTS.lengths + out["response"].lengths
            passes = plan_pass(total, trainer.groups.dp_size, 64)
            mine = rows.take(sorted(passes.rows_of(trainer.groups.dp_rank)))
            found = trainer.log_probs(mine, passes.micro_batches[trainer.groups.dp_rank])
            for i, values in zip(mine.row_ids.tolist(), found.get("log_probs", ()), strict=bool(found)):
                np.testing.assert_allclose(out["rollout_log_probs"][i], values, atol=TOLERANCE, rtol=0)
            minis = plan_update(total, out["response"].lengths, trainer.groups.dp_size, 1, 1, 64, seed=1)
            trainer.update(rows, minis, lambda o, b: -o.log_probs)
        rollout.close()
        dist.barrier()
    return responses


# --- tests ------------------------------------------------------------------------------------------------------------


def test_one_rank(folders):
    run(one_rank, 1, folders)
    assert segments() == []


def test_a_step_ahead(folders):
    run(a_step_ahead, 1, folders[True])


def test_two_ranks(folders):
    first, second = run(two_ranks, 2, folders)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(first[0], first[1])  # the same samples from tp2 packed and from two replicas, shared
    assert segments() == []


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip


def make_later_families(root, families):
    import transformers

    folders = {}
    for family in families:
        kind = "Llama" if family == "llama3" else family.title()
        stretched = {"rope_parameters": LLAMA3_ROPE} if family == "llama3" else {}
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=260, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, head_dim=32 if family == "qwen2" else 64, tie_word_embeddings=family == "qwen2",
            max_position_embeddings=512, **stretched,
        )  # fmt: skip
        torch.manual_seed(4)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0).add_(0.3 * torch.randn_like(parameter) * (parameter.dim() == 1))
        folders[family] = str(root / family)
        model.save_pretrained(folders[family])
    return folders


def check_families(root, cases):
    first, second = run(other_families, 2, make_later_families(root, [family for family, *_ in cases]), cases)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(np.array_equal(first[i], first[i + 1]) for i in range(0, len(first), 2)), "an update changes what is drawn"


def test_the_trainers_weights_give_its_own_log_probs_in_vllm(tmp_path):
    """Of a model whose queries and keys have norms; others are in ``sweeps/test_rollout_families.py``."""
    check_families(tmp_path, (("qwen3", "shared", "tp2", 1),))


def test_head_sizes_without_a_kernel_are_refused_early():
    sizes = {"num_layers": 1, "hidden_size": 64, "mlp_hidden_size": 64, "num_heads": 4, "num_kv_heads": 4}
    spec = ModelSpec(name="thin", head_dim=16, vocab_size=260, max_positions=64, **sizes)
    with refuses(UnsupportedModelError, "thin", "head_dim 16", "32, 64"):
        check_model(spec, "cpu")
    check_model(spec, "cuda")
    wide = ModelSpec(name="wide", family="qwen2", head_dim=32, vocab_size=260, max_positions=64, **sizes)
    with refuses(UnsupportedModelError, "wide", "4 heads of 32", 64):
        check_model(wide, "cuda")
    with refuses(OptionError, "max_model_len=65", 64):
        context_tokens(spec, RolloutOptions(max_model_len=65))
    assert context_tokens(spec, RolloutOptions()) == 64


def test_kv_cache_holds_the_sequences_within_its_cap():
    spec = ModelSpec.preset("llama-7b")
    token = spec.kv_bytes_per_token("bf16")
    options = RolloutOptions(max_num_seqs=4, max_model_len=64)
    assert cache_bytes(spec, options, 1, "bf16", on_cpu=True) == (4 * 64 + 64) * token
    assert cache_bytes(spec, options, 2, "bf16", on_cpu=True) == (4 * 64 + 64) * token // 2
    many = RolloutOptions(max_num_seqs=400, max_model_len=64)
    assert cache_bytes(spec, many, 1, "bf16", on_cpu=True) == 256 * 2**20 + 64 * token
    assert cache_bytes(spec, many, 1, "bf16", on_cpu=False) == 8 * 2**30 + 64 * token
    assert cache_bytes(spec, RolloutOptions(max_model_len=2048), 1, "bf16", on_cpu=True) == (2048 + 64) * token
    assert cache_bytes(spec, RolloutOptions(kv_cache_bytes=12345), 1, "bf16", on_cpu=True) == 12345
    one = replace(options, max_num_seqs=1)
    assert cache_bytes(spec, one, 2, "bf16", on_cpu=False) == least_cache_bytes(spec, one, 2, "bf16"), "as planned at least"


def test_segments_of_a_job_are_removed_and_only_those(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_support_vllm, "SEGMENTS", tmp_path)
    for job in ("a", "a.b", "ab"):
        (tmp_path / (cpu_support_vllm.segment_name(job, "token") + "-tp:0-[0-1]-cpushm_0")).touch()
    assert len(cpu_support_vllm.remove_segments("a")) == 1
    assert len(list(tmp_path.iterdir())) == 2
    assert cpu_support_vllm.remove_segments("none") == []
    if os.geteuid() == 0:
        anothers = next(path for path in tmp_path.iterdir() if path.name.startswith(cpu_support_vllm.segment_name("ab", "")))
        os.chown(anothers, 65534, 65534)
        assert cpu_support_vllm.remove_segments("ab") == [], "another user's"
        assert anothers.exists()


def test_environment_is_known_before_torch_is_imported():
    import subprocess
    import sys

    code = (
        "import sys; from hfsdk.engine.generation import cpu_support_vllm as cpu; "
        "print(cpu.environment(3)['OMP_NUM_THREADS'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "False"]
