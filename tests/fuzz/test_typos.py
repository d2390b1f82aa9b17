"""What people really typed, and what it should say: one line that names the argument, at once, with nothing changed."""

from __future__ import annotations

import dataclasses
import itertools
import resource
import time

import numpy as np
import pytest

pytest.importorskip("hypothesis")

import hfsdk as hf
from benchmarks.fuzzing.values import Hostile, cyclic_dict, cyclic_list, deep_list
from benchmarks.fuzzing.world import TEXTS, World, my_loss, num_rows
from hfsdk.core.cluster import DEVICES
from hfsdk.session.session_parts import parts_of


@pytest.fixture(scope="module")
def world():
    made = World()
    made.warm_up()
    assert made.get("Batch")
    yield made
    made.close()


@pytest.fixture
def session(world):
    return world.session


@pytest.fixture
def batch(world):
    return world.get("Batch")


TYPOS = [
    (lambda s, b: s.models.actor.generate(TEXTS, n=10**9), r"n must be a whole number from 1 to 65,536; got n=1000000000"),
    (lambda s, b: s.models.actor.generate(TEXTS, n=10**400), r"n must be .*; got n=a whole number of 1,329 bits"),
    (lambda s, b: s.models.actor.generate(TEXTS, max_new_tokens=10**9), "max_new_tokens"),
    (lambda s, b: s.models.actor.generate(range(2**40)), "prompt"),
    (lambda s, b: s.models.actor.generate(cyclic_list()), "prompts"),
    (lambda s, b: s.models.actor.generate(deep_list()), "prompts"),
    (lambda s, b: s.models.actor.update(b, my_loss, epochs=10**9), "epochs must be a whole number from 1 to 10,000"),
    (lambda s, b: s.models.actor.update(b, my_loss, mini_batches=10**9), "mini_batches"),
    (lambda s, b: s.subscribe(0), "listener must be a function of 1 argument; got listener=0"),
    (lambda s, b: b.map(3, ["prompt"], ["x"]), "fn must be a function of 1 argument; got fn=3"),
    (lambda s, b: b.map(num_rows, "prompt", ["x"]), "reads must be a list of texts"),
    (lambda s, b: b.reduce(" ", ["prompt"]), "fn must be a function of 1 argument; got fn=' '"),
    (lambda s, b: b.wait("x"), "timeout must be a number from 0"),
    (lambda s, b: b[10**400], "ambiguous"),
    (lambda s, b: b.take([[0], [1]]), "rows"),
    (lambda s, b: b.take(range(2**40)), "row"),
    (lambda s, b: s.batch(prompt=itertools.count()), "prompt"),
    (lambda s, b: s.batch(note=[lambda: 1] * 2), "column 'note' holds objects that cannot travel to the workers"),
    (lambda s, b: s.batch(note=[{"deep": deep_list()}] * 2), r"column 'note' holds objects .*nested too deeply"),
    (lambda s, b: s.save("out", wait="False"), "wait must be True or False; got wait='False'"),
    (lambda s, b: s.save("a" * 5000), "folder must be a path"),
    (lambda s, b: s.load("a\0b"), "folder must be a path"),
    (lambda s, b: s.report("out.html", batch=1), r"batch must be an hf\.Batch or None; got batch=1"),
    (lambda s, b: s.calibrate(2), "steps must be a list of whole numbers"),
    (lambda s, b: s.evaluate(TEXTS, num_prompts="2"), "num_prompts must be a whole number"),
    (lambda s, b: s.prompts(TEXTS, batch_size=10**9), "batch_size"),
    (lambda s, b: s.prompts(range(2**40), batch_size=2), "rows; at most 10,000,000"),
    (lambda s, b: s.prompts(itertools.count(), batch_size=2), "list of texts"),
    (lambda s, b: s.critic("tiny", name="a b"), "name has letters, digits.*got name='a b'"),
    (lambda s, b: s.critic("tiny", name="../outside"), "name has letters, digits"),
    (lambda s, b: s.place(cyclic_dict()), "what must be"),
    (lambda s, b: s.plan(hf.PPO(), hf.Workload(), top=10**9), "top must be a whole number from 1 to 1,000"),
    (lambda s, b: s.models.critic.update(b, Hostile("__repr__")), "loss must be a function; got loss=a Hostile"),
    (lambda s, b: s.logs("actor\n" * 10**5), "role"),
    (lambda s, b: dataclasses.replace(DEVICES["H100"], peak_flops=-1), "peak_flops must be a finite number above 0"),
    (lambda s, b: hf.ClusterSpec.parse("1x2 H100").with_memory(None), "memory_bytes must be a whole number from 1"),
    (lambda s, b: s.models.actor.role.model.num_bytes("int8"), "dtype must be one of 'fp32', 'bf16'; got dtype='int8'"),
    (lambda s, b: hf.Layout.parse("tp2").mesh(-1), "rollout_tp must be a whole number from 1 to 100,000; got rollout_tp=-1"),
    (lambda s, b: s.train(hf.PPO(), TEXTS, steps=1, folder=lambda: 1), "folder must be a path or None|prompts"),
    (lambda s, b: hf.data.review_pairs(num=float("inf")), "num must be a whole number from 0 to 100,000; got num=inf"),
    (lambda s, b: hf.Session.simulated(f"1x{2**63} H100"), "a cluster has at most 100,000 devices"),
    (lambda s, b: hf.Session(1, start_timeout_s=0), "start_timeout_s must be a number from 0.1"),
    (lambda s, b: hf.Session(1, start_timeout_s=None), "start_timeout_s must be a number from 0.1"),
    (lambda s, b: hf.Session(1, deterministic="no"), "deterministic must be True or False"),
    (lambda s, b: hf.Session(1, collective_timeout_s="60"), "collective_timeout_s must be a number from 0.1"),
    (lambda s, b: hf.Session(2**63), "devices must be a whole number of at most 64 bits"),
]


@pytest.mark.parametrize(("call", "said"), TYPOS)
def test_a_typo_is_told_at_once_in_a_line_and_changes_nothing(world, session, batch, call, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, size, began = world.state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(hf.HfsdkError, match=said) as caught:
        call(session, batch)
    assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < 300_000
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert world.state() == before


def test_numpy_and_torch_scalars_are_taken_wherever_numbers_are(session, batch):
    torch = pytest.importorskip("torch")
    actor = session.models.actor
    made = actor.generate(TEXTS, n=np.int64(2), max_new_tokens=torch.tensor(4), temperature=np.float32(0.5), ignore_eos=np.True_)
    assert len(made.wait()) == 2 * len(TEXTS)
    assert "entropy" in actor.compute_log_probs(made, entropy=np.True_)
    assert "entropy" not in actor.compute_log_probs(made, entropy=np.False_)
    assert actor.update(batch, my_loss, mini_batches=np.int32(1), epochs=torch.tensor(1)).wait()


def test_a_refused_update_does_not_move_the_seeds_of_later_ones(session, batch):
    actor = session.models.actor
    before = parts_of(session).context.counters.all()
    with pytest.raises(hf.OptionError):
        actor.update(batch, 3)
    with pytest.raises(hf.OptionError):
        actor.update(batch, my_loss, mini_batches=1000)
    assert parts_of(session).context.counters.all() == before
