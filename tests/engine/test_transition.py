"""Pairs of layouts with both engines: the rollout's weights are those of a model loaded from the exported ones.

Every executable pair is in ``sweeps/test_transition_pairs.py``.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from spawn import JOB, run
from test_rollout import EIGHT, PROMPTS, draw, make

from hfsdk.core.arguments import Generation, Learning
from hfsdk.core.layout import Layout
from hfsdk.core.runtime import Assignment
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Ragged, Table
from hfsdk.resharding.boxes import vllm_boxes

PAIRS = {(2, 1): ["tp2", "pp2"], (4, 2): ["tp4", "tp2 dp2"]}
"""(ranks, rollout tp) -> train layouts. One rollout tp for the life of a process."""
DISTRIBUTED = ("dp2", "tp2 dp2")
KV_CACHE_BYTES = 8 * 2**20
KEPT = []
"""What a process does not close before its end."""


def transitions(rank, world_size, tp, folders, root, layouts):
    from hfsdk.engine.worker.role_host import WorkerSetup
    from hfsdk.engine.worker.worker import Worker

    worker = Worker(rank)
    worker.setup = WorkerSetup(device=rank, rank=rank, world_size=world_size, pool="all", job_id=JOB, store="")
    worker.recorder.rank = rank
    folder = folders[tp == 2]
    loaded = make(folder, "shared", rank, world_size, tp, {"kv_cache_bytes": KV_CACHE_BYTES})
    return {train: transition(worker, train, tp, folder, loaded, root / train) for train in layouts}


def transition(worker, train, tp, folder, loaded, exported):
    """Two rounds of generating and training, the second against exported weights; what is not bit-equal is returned by name."""
    from hfsdk.core.roles import AdamW, RoleSpec, RolloutOptions, Sampling
    from hfsdk.engine.process.safepoint import SafePoint
    from hfsdk.engine.worker.role_engine import RoleEngine

    rank, world_size = worker.setup.rank, worker.setup.world_size
    spec = ModelSpec.from_folder(folder)
    role = RoleSpec(
        name="actor", kind="actor", folder=folder, model=spec, train=Layout.parse(train).fill(world_size),
        rollout=Layout(tp=tp).fill(world_size), optimizer=AdamW(lr=1e-3, distributed=train in DISTRIBUTED),
        rollout_options=RolloutOptions(max_model_len=128, max_num_seqs=16, cpu_weights="shared", kv_cache_bytes=KV_CACHE_BYTES),
    )  # fmt: skip
    hosted, never = RoleEngine(role, worker), SafePoint(lambda: False)
    table = Table({"prompt": PROMPTS, "position": np.arange(len(PROMPTS))})
    greedy = Assignment(arguments=Generation(sampling=Sampling(max_new_tokens=EIGHT.max_new_tokens, temperature=0.0)))
    wrong, censuses, reports, tokens = [], [], [], []
    for update in range(2):
        kept = {name: tensor.clone() for name, tensor in hosted.trainer.local_tensors().items()}
        if update:
            hosted.trainer.save_folder(exported)
            dist.barrier()
        out, _ = hosted.run("generate", table, greedy, never)
        tokens.append(out["response"])
        if update:
            wrong += unlike(loaded, hosted, exported, out, greedy.arguments.sampling)
        again, _ = hosted.run("generate", table, greedy, never)  # nothing moves: it is there
        wrong += ["second time"] * (not np.array_equal(again["response"].flat, out["response"].flat))
        reports.append((hosted.last_transport.bytes_received, hosted.transition.plan.bytes_received(rank)))
        censuses.append(hosted.transition.residency.census())
        hosted.transition.to_training()
        wrong += [n for n, t in hosted.trainer.local_tensors().items() if not torch.equal(t, kept[n])]
        rows = table.with_columns({"response": Ragged.of([np.arange(5)] * len(PROMPTS), np.int64)})
        learn = Assignment(arguments=Learning(function=Loss()), mini_batches=plan_of(hosted, rows))
        hosted.run("update", rows.take(mine_of(hosted, rows)), learn, never)
        wrong += ["no update"] * all(torch.equal(t, kept[n]) for n, t in hosted.trainer.local_tensors().items())
        censuses.append(hosted.transition.residency.census())
    wrong += ["the same tokens"] * np.array_equal(tokens[0].flat, tokens[1].flat)
    KEPT.append(hosted)  # closing an engine takes seconds; the process ends soon
    dist.barrier()
    return wrong, censuses, reports


def unlike(loaded, hosted, folder, out, sampling):
    """vLLM, given the exported weights by its own loader: names of the parameters that differ, and whether tokens do."""
    tp = hosted.rollout.tp
    targets = loaded.weight_targets()
    for tensor in targets.values():
        tensor.fill_(float("nan"))
    loaded._model.load_weights(load_file(folder / "model.safetensors").items())
    loaded.finish_update()
    expected = draw(loaded, sampling=sampling, group=hosted.rollout_group, eos=hosted._ends)
    wrong = ["greedy tokens"] * (not np.array_equal(out["response"].flat, expected["response"].flat))
    mine, theirs = (dict(rollout._model.named_parameters()) for rollout in (hosted.rollout, loaded))
    wrong += ["names"] * (mine.keys() != theirs.keys())
    for box in vllm_boxes(hosted.rollout.spec, tp, hosted.worker.setup.rank % tp):  # all but padding rows
        if not torch.equal(mine[box.local][at(box)], theirs[box.local][at(box)]):
            wrong.append(box.local)
    return wrong


def at(box):
    return tuple(slice(first, first + count) for first, count in zip(box.local_start, box.size, strict=True))


class Loss:
    """Shipped by value in a session; here the function itself."""

    name = "likelihood"

    def load(self):
        return lambda out, b: -out.log_probs


def plan_of(hosted, rows):
    from hfsdk.core.microbatch import plan_update

    lengths = rows.ragged("response").lengths
    return plan_update(rows.ragged("prompt").lengths + lengths, lengths, hosted.groups.dp_size, 1, 1, 256, seed=0)


def mine_of(hosted, rows):
    return sorted(row for mini in plan_of(hosted, rows) for row in mini.passes.rows_of(hosted.groups.dp_rank))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tied and an untied model whose greedy tokens an update changes."""
    import transformers

    found = []
    for tied in (True, False):
        config = transformers.LlamaConfig(
            vocab_size=260, hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, head_dim=32, tie_word_embeddings=tied, max_position_embeddings=512,
        )  # fmt: skip
        torch.manual_seed(tied)
        model = transformers.LlamaForCausalLM(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
        found.append(str(tmp_path_factory.mktemp("models") / f"tied {tied}"))
        model.save_pretrained(found[-1])
    return found


@pytest.mark.parametrize(("world_size", "tp"), PAIRS)
def test_a_rollout_has_what_a_model_loaded_from_the_exported_weights_has(world_size, tp, folders, tmp_path):
    check_pairs(world_size, tp, folders, tmp_path, PAIRS[world_size, tp])


def check_pairs(world_size, tp, folders, tmp_path, layouts):
    ranks = run(transitions, world_size, tp, folders, tmp_path, layouts)
    for rank, found in enumerate(ranks):
        for train, (wrong, censuses, reports) in found.items():
            assert wrong == [], (train, tp, rank)
            assert all(received == planned for received, planned in reports)
            assert [census.redundant for census in censuses] == [0] * 4, (train, tp, rank)
            assert [census.moment for census in censuses] == ["generating", "training"] * 2
