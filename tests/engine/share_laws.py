"""The laws of a real model's shares: together one copy of its state, given back bit for bit, here and in any other layout.

A module of tests has ``KEYS``, of (layout, model, whether its optimizer is distributed), and ``FILES``, layouts that write.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoint_laws import KINDS, Layout, gathered, load, make_folders, refused, save
from spawn import run
from trainer_harness import Harness, equal
from whole_state import state_of

DTYPES = {"tied": "fp32", "half": "bf16", "critic": "bf16"}
"""Model -> dtype; the critic's head is fp32 all the same."""
OTHERS = {"dp4": "tp2 pp2", "tp2 dp2": "dp4", "pp2 dp2": "tp4"}
"""Where each one's shares go as well."""


def adamw(distributed):
    from hfsdk.core.roles import AdamW

    return AdamW(lr=1e-4, max_grad_norm=1.0, distributed=distributed)


class Here(Layout):
    def trainer(self, name, distributed=False, **options):
        return Harness.trainer(self, name, dtype=DTYPES[name], optimizer=adamw(distributed), **options)


def held_once(h, trainer, share):
    """Return (whether the shares of this rank's dp group cover its part of the state once, their bytes, the part's bytes)."""
    told = gathered(h.groups, ((h.groups.tp_rank, h.groups.pp_rank), [strip for strip, _ in share.content]))
    mine = [strips for place, strips in told if place == (h.groups.tp_rank, h.groups.pp_rank)]
    whole = state_of(trainer)
    masters = {name for name, weight in whole["weights"].items() if weight.dtype == torch.float32}
    expected = {("weights", name): weight for name, weight in whole["weights"].items()}
    for name, held in whole["optimizer"].items():
        expected |= {(k, name): held[k] for k in KINDS if k in held and not (k == "main" and name in masters)}
    covered = dict.fromkeys(expected, 0)
    for strip in sorted((strip for strips in mine for strip in strips), key=lambda strip: strip.start):
        once = strip.start == covered[strip.kind, strip.local]
        covered[strip.kind, strip.local] = strip.stop if once else -1
    exact = covered == {key: tensor.numel() for key, tensor in expected.items()} and all(
        strip.shape == tuple(expected[strip.kind, strip.local].shape)
        and torch.equal(values, expected[strip.kind, strip.local].reshape(-1)[strip.start : strip.stop])
        for strip, values in share.content
    )
    sizes = [sum(strip.num_bytes for strip in strips) for strips in mine]
    return exact, sizes, sum(tensor.nbytes for tensor in expected.values())


def torn(trainer, share):
    """Return what a share is refused with that is of another rank, another model, or lacks a strip on one rank alone."""
    from dataclasses import replace

    from hfsdk.core.errors import CheckpointError

    lacking = replace(share, content=share.content[1:]) if share.rank == 0 else share
    found = []
    for wrong in (replace(share, rank=share.rank + 1), lacking):
        before = state_of(trainer)
        with pytest.raises(CheckpointError) as caught:
            trainer.take_share(wrong)
        found.append((str(caught.value), equal(before, state_of(trainer))))
    return found


def borrowed(trainer, share):
    """Return the weights while those of a share are borrowed, and whether all is as before once what is done with them raises."""
    before = state_of(trainer)
    within = []

    def fail():
        with trainer.shares.borrowed(share):
            within.append(state_of(trainer)["weights"])
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    return within[0], equal(state_of(trainer), before) and trainer.num_updates == 3


def through_pieces(h, parcels, name, distributed):
    """Return what a role of another layout has, that took the pieces of all shares."""
    from hfsdk.engine.weights import bridge
    from hfsdk.engine.weights.shares import fill

    trainer = h.trainer(name, seed=7, distributed=distributed)
    share = trainer.blank_share(parcels[0][0])
    with bridge.unpacked(packed for _, packed in parcels) as pieces:
        fill(share, trainer.shard, pieces)
    trainer.take_share(share)
    return h.whole(trainer), h.replicas_agree(trainer)


def check(rank, world_size, root, keys, files):
    from hfsdk.engine.worker.kept_share import KeptShare

    found = {}
    here = {layout: Here(layout, root, world_size) for layout in OTHERS}
    others = {layout: Here(OTHERS[layout], root, world_size) for layout in OTHERS}
    for layout, name, distributed in keys:
        h, other = here[layout], others[layout]
        trainer = h.trainer(name, distributed=distributed)
        fresh = KeptShare(trainer.share(), trainer.shard), state_of(trainer)
        h.learn(trainer, name, mini_batches=2)
        kept, saved = KeptShare(trainer.share(), trainer.shard), state_of(trainer)
        seen = {"once": held_once(h, trainer, kept.share), "bytes": kept.num_bytes}
        seen["fresh once"] = held_once(h, h.trainer(name, distributed=distributed), fresh[0].share)
        h.learn(trainer, name)
        after = state_of(trainer)
        within, seen["untouched"] = borrowed(trainer, kept.share)
        seen["borrowed"] = equal(within, saved["weights"]) and not equal(within, after["weights"])
        trainer.take_share(kept.share)
        seen["back"] = equal(state_of(trainer), saved) and trainer.num_updates == 2
        h.learn(trainer, name)
        seen["next"] = equal(state_of(trainer), after)
        seen["torn"] = torn(trainer, kept.share)
        parcels = gathered(h.groups, kept.packed())
        trainer.take_share(kept.share)
        seen["whole"] = h.whole(trainer)
        seen["elsewhere"] = through_pieces(other, parcels, name, distributed=distributed == (name == "tied"))
        trainer.take_share(fresh[0].share)
        seen["fresh"] = equal(state_of(trainer), fresh[1])
        found[layout, name, distributed] = seen
    for layout in files:
        found[layout] = of_files(here[layout], root, layout)
    return found


def of_files(h, root, layout):
    """Return the sizes of what each rank writes, and what loading says when one rank's file is gone, or is another's."""
    trainer = h.trainer("half", distributed=True)
    h.learn(trainer, "half")
    folder = root / "files" / layout
    save(h, trainer, "half", folder)
    written = sorted((p.name, p.stat().st_size) for p in folder.glob("*.distcp"))
    gathered(h.groups, None)
    last = folder / f"__{h.mesh.layout.size - 1}_0.distcp"
    spoilt = {}
    for how in ("gone", "cut short"):
        if h.groups.rank == 0:
            content = last.read_bytes()
            last.unlink()
            if how == "cut short":
                last.write_bytes(content[: len(content) // 2])
        gathered(h.groups, None)
        spoilt[how] = refused(trainer, folder)
        gathered(h.groups, None)
        if h.groups.rank == 0:
            last.write_bytes(content)
        gathered(h.groups, None)
    again = h.trainer("half", seed=7, distributed=True)
    load(again, folder)
    mended, earlier = equal(state_of(again), state_of(trainer)), h.trainer("half", seed=7, distributed=True)
    save_as_before(h, trainer, root / "earlier" / layout)
    load(earlier, root / "earlier" / layout)
    return {"written": written, "spoilt": spoilt, "mended": mended, "earlier": equal(state_of(earlier), state_of(trainer))}


def save_as_before(h, trainer, folder):
    """Write what was written before there were shares: dp rank 0 whole tensors, the other dp ranks files of nothing."""
    from dataclasses import replace

    from hfsdk.engine.training.checkpoint import begin_save, finish_save
    from hfsdk.engine.weights.shares import Strip

    state, share = state_of(trainer), trainer.share()
    tensors = [("weights", name, tensor) for name, tensor in state["weights"].items()]
    tensors += [(kind, name, held[kind]) for name, held in state["optimizer"].items() for kind in KINDS]
    whole = [(Strip(kind, name, tuple(t.shape), t.dtype, 0, t.numel()), t.reshape(-1)) for kind, name, t in tensors]
    saving = begin_save("half", replace(share, content=() if h.groups.dp_rank else tuple(whole)), trainer.shard, h.groups, folder)
    saving.join()
    gathered(h.groups, saving.written())
    if h.groups.rank == 0:
        finish_save(saving)
    gathered(h.groups, None)


@pytest.fixture(scope="module")
def keys(request):
    return request.module.KEYS


@pytest.fixture(scope="module")
def files(request):
    return request.module.FILES


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, keys, files):
    root = Path(tmp_path_factory.mktemp("shares"))
    make_folders(root)
    return run(check, 4, root, keys, files)


def test_the_ranks_of_a_dp_group_keep_one_copy_together(ranks, keys):
    for key in keys:
        for rank in ranks:
            for when in ("once", "fresh once"):
                exact, sizes, whole = rank[key][when]
                assert exact, (key, when)
                assert sum(sizes) == whole, (key, when)
                if not key[2]:
                    assert max(sizes) <= whole / len(sizes) + 4 * 4, (key, "a number of each kind more at most")
                else:
                    assert max(sizes) <= 1.05 * whole / len(sizes), (key, "Megatron cuts its buckets, padding included")
            assert rank[key]["bytes"] in rank[key]["once"][1], key


def test_weights_that_were_borrowed_are_gone_again_whatever_ends_it(ranks, keys):
    """The optimizer never has them, and the role's own are the same bits afterwards."""
    what = ("borrowed", "untouched")
    assert [(key, name) for key in keys for rank in ranks for name in what if not rank[key][name]] == []


def test_what_was_kept_comes_back_to_the_bit(ranks, keys):
    """And so does the step after it; also what was kept before the first step."""
    what = ("back", "next", "fresh")
    assert [(key, name) for key in keys for rank in ranks for name in what if not rank[key][name]] == []


def test_the_pieces_of_all_shares_make_the_state_of_another_layout(ranks, keys):
    for key in keys:
        seen = ranks[0][key]
        found, replicas = seen["elsewhere"]
        assert equal(found, seen["whole"]), key
        assert replicas, key
        assert seen["whole"]["steps"] == {2.0}, key


def test_a_share_that_is_not_whole_is_refused_on_every_rank(ranks, keys):
    for key in keys:
        for rank in ranks:
            (other, untouched), (lacking, as_well) = rank[key]["torn"]
            assert (untouched, as_well) == (True, True), key
            assert "the state is of layout" in other, key
            assert "does not fit the model" in lacking, key


def test_every_rank_writes_its_share(ranks, files):
    for layout in files:
        written = ranks[0][layout]["written"]
        assert [name for name, _ in written] == [f"__{rank}_0.distcp" for rank in range(4)], layout
        sizes = [size for _, size in written]
        if layout != "pp2 dp2":  # stages differ: the first has the embedding, the last the head and a norm
            assert max(sizes) <= 1.25 * sum(sizes) / 4, layout
        assert min(sizes) >= 0.5 * math.fsum(sizes) / 4, layout


def test_without_one_ranks_file_nothing_is_loaded(ranks, files):
    for layout in files:
        for rank in ranks:
            for how, (words, untouched) in rank[layout]["spoilt"].items():
                assert "cannot be loaded" in words, (layout, how)
                assert untouched, (layout, how)
            assert rank[layout]["mended"], layout


def test_a_save_of_before_there_were_shares_is_loaded(ranks, files):
    assert [layout for layout in files if not all(rank[layout]["earlier"] for rank in ranks)] == []
