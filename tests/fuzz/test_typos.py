"""What people really typed, and what it should say: one line that names the argument, with nothing changed."""

from __future__ import annotations

import dataclasses
import itertools
import resource

import numpy as np
import pytest
from expect import each, refuses

pytest.importorskip("hypothesis")

import hfsdk as hf
from benchmarks.fuzzing.values import Hostile, cyclic_dict, cyclic_list, deep_list
from benchmarks.fuzzing.world import TEXTS, World, my_loss, num_rows
from hfsdk.core.cluster import DEVICES


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
    (lambda s, b: s.models.actor.generate(TEXTS, n=10**9), ["n=1000000000", "65,536"]),
    (lambda s, b: s.models.actor.generate(TEXTS, n=10**400), ["n=a whole number of 1,329 bits"]),
    (lambda s, b: s.models.actor.generate(TEXTS, max_new_tokens=10**9), ["max_new_tokens"]),
    (lambda s, b: s.models.actor.generate(range(2**40)), ["prompt"]),
    (lambda s, b: s.models.actor.generate(cyclic_list()), ["prompts"]),
    (lambda s, b: s.models.actor.generate(deep_list()), ["prompts"]),
    (lambda s, b: s.models.actor.update(b, my_loss, epochs=10**9), ["epochs=1000000000", "10,000"]),
    (lambda s, b: s.models.actor.update(b, my_loss, mini_batches=10**9), ["mini_batches"]),
    (lambda s, b: s.models.actor.update(b, my_loss, mini_batches=1000), ["mini_batches"]),
    (lambda s, b: s.models.actor.update(b, 3), ["loss=3", "a function"]),
    (lambda s, b: s.subscribe(0), ["listener=0", "a function of 1 argument"]),
    (lambda s, b: b.map(3, ["prompt"], ["x"]), ["fn=3", "a function of 1 argument"]),
    (lambda s, b: b.map(num_rows, "prompt", ["x"]), ["reads='prompt'", "a list"]),
    (lambda s, b: b.reduce(" ", ["prompt"]), ["fn=' '", "a function of 1 argument"]),
    (lambda s, b: b.wait("x"), ["timeout='x'", "a number from 0"]),
    (lambda s, b: b[10**400], ["ambiguous"]),
    (lambda s, b: b.take([[0], [1]]), ["rows"]),
    (lambda s, b: b.take(range(2**40)), ["row"]),
    (lambda s, b: s.batch(prompt=itertools.count()), ["prompt"]),
    (lambda s, b: s.batch(note=[lambda: 1] * 2), ["'note'", "cannot travel"]),
    (lambda s, b: s.batch(note=[{"deep": deep_list()}] * 2), ["'note'", "too deeply"]),
    (lambda s, b: s.save("out", wait="False"), ["wait='False'", "True or False"]),
    (lambda s, b: s.save("a" * 5000), ["folder", "a path"]),
    (lambda s, b: s.load("a\0b"), ["folder", "a path"]),
    (lambda s, b: s.report("out.html", batch=1), ["batch=1", "hf.Batch"]),
    (lambda s, b: s.calibrate(2), ["steps=2", "a list of whole numbers"]),
    (lambda s, b: s.evaluate(TEXTS, num_prompts="2"), ["num_prompts='2'", "a whole number"]),
    (lambda s, b: s.prompts(TEXTS, batch_size=10**9), ["batch_size"]),
    (lambda s, b: s.prompts(range(2**40), batch_size=2), ["rows", "10,000,000"]),
    (lambda s, b: s.prompts(itertools.count(), batch_size=2), ["list of texts"]),
    (lambda s, b: s.critic("tiny", name="a b"), ["name='a b'", "letters, digits"]),
    (lambda s, b: s.critic("tiny", name="../outside"), ["name='../outside'", "letters, digits"]),
    (lambda s, b: s.place(cyclic_dict()), ["what['a']=dict"]),
    (lambda s, b: s.plan(hf.PPO(), hf.Workload(), top=10**9), ["top=1000000000", "1,000"]),
    (lambda s, b: s.models.critic.update(b, Hostile("__repr__")), ["loss=a Hostile", "a function"]),
    (lambda s, b: s.logs("actor\n" * 10**5), ["role"]),
    (lambda s, b: dataclasses.replace(DEVICES["H100"], peak_flops=-1), ["peak_flops=-1", "above 0"]),
    (lambda s, b: hf.ClusterSpec.parse("1x2 H100").with_memory(None), ["memory_bytes=None", "from 1"]),
    (lambda s, b: s.models.actor.role.model.num_bytes("int8"), ["dtype='int8'", "'fp32', 'bf16'"]),
    (lambda s, b: hf.Layout.parse("tp2").mesh(-1), ["rollout_tp=-1", "100,000"]),
    (lambda s, b: s.train(hf.PPO(), s.prompts(TEXTS, batch_size=2), steps=1, folder=lambda: 1), ["folder=", "a path"]),
    (lambda s, b: hf.data.review_pairs(num=float("inf")), ["num=inf", "100,000"]),
    (lambda s, b: hf.Session.simulated(f"1x{2**63} H100"), ["100,000 devices"]),
    (lambda s, b: hf.Session(1, start_timeout_s=0), ["start_timeout_s=0", "0.1"]),
    (lambda s, b: hf.Session(1, start_timeout_s=None), ["start_timeout_s=None", "0.1"]),
    (lambda s, b: hf.Session(1, deterministic="no"), ["deterministic='no'", "True or False"]),
    (lambda s, b: hf.Session(1, collective_timeout_s="60"), ["collective_timeout_s='60'", "0.1"]),
    (lambda s, b: hf.Session(2**63), ["devices", "64 bits"]),
]


@each("call, named", TYPOS)
def test_a_typo_is_told_in_a_line_that_names_it_and_changes_nothing(world, session, batch, call, named, tmp_path, monkeypatch):
    """Nor does it move the seeds of later calls or take memory to speak of."""
    monkeypatch.chdir(tmp_path)
    before, size = world.state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refuses(hf.HfsdkError, *named) as caught:
        call(session, batch)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < 300_000
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert world.state() == before
    assert not [*tmp_path.iterdir()]


def test_numpy_and_torch_scalars_are_taken_wherever_numbers_are(session, batch):
    torch = pytest.importorskip("torch")
    actor = session.models.actor
    made = actor.generate(TEXTS, n=np.int64(2), max_new_tokens=torch.tensor(4), temperature=np.float32(0.5), ignore_eos=np.True_)
    assert len(made.wait()) == 2 * len(TEXTS)
    assert "entropy" in actor.compute_log_probs(made, entropy=np.True_)
    assert "entropy" not in actor.compute_log_probs(made, entropy=np.False_)
    assert actor.update(batch, my_loss, mini_batches=np.int32(1), epochs=torch.tensor(1)).wait()
