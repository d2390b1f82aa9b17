"""The laws of a role that is saved at tp2 pp2: in any other layout it goes on as if it had been there all the time.

A module of tests has ``MOVES``: layout -> models that are loaded there.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from spawn import run
from trainer_harness import Harness, equal, policy_loss, rows_table, value_loss
from whole_state import state_of

CASES = {"untied": "fp32", "tied": "fp32", "critic": "fp32", "half": "bf16"}
"""Model -> dtype; "half" is the untied one."""
MOVED = ("tied", "critic", "half")
"""Those that go to every layout; the other one's state is what these refuse."""
KINDS = ("main", "exp_avg", "exp_avg_sq")


def make_folders(root):
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    for name in CASES:
        config = LlamaConfig(
            vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=2 if name == "tied" else 4, head_dim=32, max_position_embeddings=64,
            tie_word_embeddings=name == "tied", rms_norm_eps=1e-5, num_labels=1, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        model = (LlamaForSequenceClassification if name == "critic" else LlamaForCausalLM)(config)
        model.save_pretrained(root / name)
    old = np.full(len(rows_table().ragged("response").flat), -5.5, np.float32)
    torch.save({"old": {"untied": old}, "gradients": {}}, root / "reference.pt")


class Layout(Harness):
    def trainer(self, name, **options):
        from hfsdk.core.roles import AdamW

        options.setdefault("optimizer", AdamW(lr=1e-4, max_grad_norm=1.0))
        return super().trainer(name, dtype=CASES[name], **options)

    def learn(self, trainer, name, mini_batches=1):
        loss = value_loss if name == "critic" else policy_loss
        return trainer.update(self.rows(), self.plan(mini_batches, max_tokens=80), loss)

    def whole(self, trainer):
        """The role's state under Hugging Face names, on rank 0; put together by other code than what is tested."""
        from hfsdk.engine.training import megatron_folder, megatron_model

        state = state_of(trainer)
        parts = {kind: {n: held[kind] for n, held in state["optimizer"].items() if kind in held} for kind in KINDS}
        scalar = megatron_model.has_scalar_head(trainer.model)
        found = {
            kind: megatron_folder.gather_tensors(local, trainer.spec, self.groups, scalar=scalar)
            for kind, local in {"weights": state["weights"], **parts}.items()
        }
        steps = {float(held["step"]) for held in state["optimizer"].values() if "step" in held}
        return {**found, "steps": steps, "num_updates": state["num_updates"]}

    def replicas_agree(self, trainer):
        """Whether ranks that differ in dp alone hold the same bytes."""
        digest = hashlib.sha256()
        state = state_of(trainer)
        for name, weight in sorted(state["weights"].items()):
            for tensor in (weight, *(state["optimizer"][name][kind] for kind in KINDS)):
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        at = self.groups.coordinates
        told = gathered(self.groups, ((at.tp, at.pp), digest.hexdigest()))
        return len(set(told)) == len({place for place, _ in told})


def gathered(groups, value):
    """Return any object of every rank."""
    from hfsdk.engine.process.plain_objects import written_by

    found = [None] * groups.mesh.layout.size
    with written_by(pickle.dumps, pickle.loads):
        torch.distributed.all_gather_object(found, value, group=groups.world)
    return found


def save(h, trainer, name, folder, meanwhile=lambda: None):
    from hfsdk.engine.training.checkpoint import begin_save, finish_save

    saving = begin_save(name, trainer.share(), trainer.shard, h.groups, folder)
    meanwhile()
    saving.join()
    assert saving.written()
    gathered(h.groups, None)
    if h.groups.rank == 0:
        finish_save(saving)
    gathered(h.groups, None)


def load(trainer, folder):
    from hfsdk.engine.training.checkpoint import load, read_summary

    share = trainer.blank_share(read_summary(folder))
    load(folder, share, trainer.shard)
    trainer.take_share(share)


def save_and_load(rank, world_size, root, moves):
    """Return per model what rank 0 saw: the saved state, that after the next step, and both in every other layout."""
    home = Layout("tp2 pp2", root, world_size)
    found = {}
    for name in CASES:
        trainer = home.trainer(name)
        home.learn(trainer, name, mini_batches=2)
        seen = {"saved": home.whole(trainer)}
        save(home, trainer, name, root / "saved" / name, meanwhile=lambda t=trainer, n=name: home.learn(t, n))
        seen["next"] = home.whole(trainer)
        found[name] = seen
    save(home, home.trainer("tied"), "tied", root / "fresh" / "tied")
    for layout, names in moves.items():
        h = Layout(layout, root, world_size)
        for name in names:
            trainer = h.trainer(name, seed=7)
            load(trainer, root / "saved" / name)
            found[name][layout] = [h.whole(trainer), h.replicas_agree(trainer), *h.learn(trainer, name)]
            found[name][layout].append(h.whole(trainer))
            if h.groups.dp_size > 1:
                found[name][layout, "distributed"] = through_a_distributed_optimizer(h, name, root, layout)
        initial, again = state_of(h.trainer("tied")), h.trainer("tied")
        h.learn(again, "tied")
        load(again, root / "fresh" / "tied")
        found[layout, "fresh"] = equal(initial, state_of(again))
        found[layout, "refused"] = refused(trainer=again, folder=root / "saved" / "untied")
        found[layout, "nothing"] = refused(trainer=again, folder=root / "nothing")
    return found if rank == 0 else {key: value for key, value in found.items() if isinstance(key, tuple)}


def through_a_distributed_optimizer(h, name, root, layout):
    """Return the saved state as it is in a distributed optimizer, and loaded from that one's save into a plain one."""
    from hfsdk.core.roles import AdamW

    shared = h.trainer(name, optimizer=AdamW(lr=1e-4, max_grad_norm=1.0, distributed=True))
    load(shared, root / "saved" / name)
    first = h.whole(shared)
    save(h, shared, name, root / layout / name)
    plain = h.trainer(name)
    load(plain, root / layout / name)
    return first, h.whole(plain)


def refused(trainer, folder):
    from hfsdk.core.errors import CheckpointError

    before = state_of(trainer)
    with pytest.raises(CheckpointError) as caught:
        load(trainer, folder)
    return str(caught.value), equal(before, state_of(trainer))


@pytest.fixture(scope="module")
def moves(request):
    return request.module.MOVES


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, moves):
    root = Path(tmp_path_factory.mktemp("layouts"))
    make_folders(root)
    found = run(save_and_load, 4, root, moves)
    files = sorted(str(p.relative_to(root / "saved")) for p in (root / "saved" / "tied").iterdir())
    return found, files


def every(moves):
    return [(name, layout) for layout, names in moves.items() for name in names]


def test_state_is_the_same_to_the_bit(ranks, moves):
    for name, layout in every(moves):
        seen = ranks[0][0][name]
        loaded, replicas, *_ = seen[layout]
        assert loaded["num_updates"] == 2, (name, layout)
        assert loaded["steps"] == {2.0}, (name, layout)
        assert set(loaded["exp_avg"]) == set(loaded["weights"]), (name, layout)
        assert equal(loaded, seen["saved"]), (name, layout)
        assert replicas, (name, layout)


def test_into_a_distributed_optimizer_and_back(ranks, moves):
    through = {key: ranks[0][0][key[0]] for key in every(moves) if "dp" in key[1]}
    assert through
    for (name, layout), seen in through.items():
        assert all(equal(found, seen["saved"]) for found in seen[layout, "distributed"]), (name, layout)


def test_the_next_step_is_the_same(ranks, moves):
    for name, layout in every(moves):
        seen = ranks[0][0][name]
        *_, after = seen[layout]
        before, here, there = (torch.cat([t.flatten() for t in x["main"].values()]) for x in (seen["saved"], seen["next"], after))
        moved, off = (here - before).abs(), (here - there).abs()
        assert moved.max() > 5e-5, (name, layout)
        if CASES[name] == "fp32":
            assert off.max() <= 6e-8, (name, layout)
        else:  # activations round differently where tp or pp cut them
            assert off.mean() <= 0.02 * moved.mean(), (name, layout)
        assert after["steps"] == {3.0}, (name, layout)


def test_a_fresh_optimizer_comes_back_fresh(ranks, moves):
    assert [layout for layout in moves if not all(rank[layout, "fresh"] for rank in ranks[0])] == []


def test_another_models_state_is_refused_on_every_rank(ranks, moves):
    for number, rank in enumerate(ranks[0]):
        for layout in moves:
            words, untouched = rank[layout, "refused"]
            assert "cannot be loaded" in words, (layout, number)
            assert "untied" in words, (layout, number)
            assert "Global shape mismatch" in words, (layout, number)
            assert untouched, (layout, number)
            words, untouched = rank[layout, "nothing"]
            assert "no common.pt" in words, (layout, number)
            assert "simulated" in words, (layout, number)
            assert untouched, (layout, number)


def test_files_are_those_of_megatron(ranks):
    assert ranks[1] == [f"tied/{n}" for n in (".metadata", *(f"__{r}_0.distcp" for r in range(4)), "common.pt", "metadata.json")]
