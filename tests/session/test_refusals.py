"""Mistakes of a first hour with a session: each is refused at the call, names what was asked and the cure, and harms nothing.

On a simulated session, where a mistake costs milliseconds; what a real session refuses of a model's files, and of columns once they
are there, on one over a scripted runtime.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.assets import model_folder
from tests.session.scripted import ScriptedRuntime

SHORT = hf.PPO(max_new_tokens=4)


def loss(out, b):
    return -out.log_probs


def nothing(table):
    return {}


def length(completions):
    return [float(len(text)) for text in completions]


def made():
    """A session with every role (``s``), its prompts (``p``), a batch with responses (``b``), and the handles."""
    session = hf.Session.simulated("1x4 A100-80GB")
    actor = session.actor("tiny")
    critic, reference, reward = session.critic("tiny"), session.reference(actor), session.reward(length)
    prompts = session.prompts(["one", "two", "three", "four"], batch_size=2)
    batch = actor.generate(prompts[0], max_new_tokens=4).wait()
    return SimpleNamespace(s=session, p=prompts, b=batch, actor=actor, critic=critic, reference=reference, reward=reward)


def check_works(session, prompts):
    """Every role is there, a call goes through, and a run trains on."""
    assert sorted(handle.name for handle in session.roles) == ["actor", "critic", "reference", "reward"]
    assert session.models.actor.generate(prompts[1], max_new_tokens=4).wait().done
    assert session.train(SHORT, prompts, steps=1, progress=False).state == "finished"
    assert session.status == "idle"


@pytest.fixture
def it(tmp_path, monkeypatch):
    """What :func:`made` returns, and a session without roles (``empty``); it still works after all that was done to it."""
    monkeypatch.chdir(tmp_path)
    world = made()
    with world.s, hf.Session.simulated("1x4 A100-80GB") as world.empty:
        yield world
        check_works(world.s, world.p)


def check_refused(mistake, it, error, named):
    with refuses(error, *named) as caught:
        mistake(it)
    text = str(caught.value)
    assert len(text) < 1500
    assert " object at 0x" not in text


# -- other libraries' words

OTHER_WORDS = [
    (lambda it: hf.PPOTrainer, AttributeError, ("'PPOTrainer'", "session.train(hf.PPO(), prompts, steps=50)")),
    (
        lambda it: exec("from hfsdk import GRPOTrainer"),
        ImportError,
        ("'GRPOTrainer'", "session.train(hf.PPO(), prompts, steps=50)"),
    ),
    (lambda it: hf.GRPOConfig, AttributeError, ("'GRPOConfig'", "hf.PPO(clip=0.2)", "session.actor(model, optimizer=")),
    (lambda it: hf.AutoModelForCausalLMWithValueHead, AttributeError, ("session.critic(model)",)),
    (lambda it: hf.SFTTrainer, AttributeError, ("actor.update(batch, hf.CrossEntropy())",)),
    (lambda it: hf.LoraConfig, AttributeError, ("hf.LoRA(rank=16, alpha=32)", "session.actor(")),
    (lambda it: hf.PPO(learning_rate=1e-5), hf.OptionError, ("'learning_rate'", "session.actor(model, optimizer=hf.AdamW")),
    (lambda it: hf.PPO(beta=0.1), hf.OptionError, ("'beta'", "PPO(kl_coef=...)")),
    (lambda it: hf.PPO(cliprange=0.2), hf.OptionError, ("'cliprange'", "PPO(clip=...)")),
    (lambda it: hf.PPO(ppo_epochs=4), hf.OptionError, ("'ppo_epochs'", "PPO(epochs=...)")),
    (lambda it: hf.PPO(max_tokens=32), hf.OptionError, ("'max_tokens'", "PPO(max_new_tokens=...)")),
    (lambda it: hf.PPO(batch_size=32), hf.OptionError, ("'batch_size'", "session.prompts(data, batch_size=32)")),
    (lambda it: hf.PPO(seed=1), hf.OptionError, ("'seed'", "hf.Session(seed=0)")),
    (lambda it: hf.GRPO(num_generations=8), hf.OptionError, ("'num_generations'", "GRPO(n=...)")),
    (lambda it: hf.GRPO(num_train_epochs=1), hf.OptionError, ("'num_train_epochs'", "len(prompts) steps")),
    (lambda it: hf.GRPO(report_to="wandb"), hf.OptionError, ("'report_to'", "session.train(..., track='wandb')")),
    (lambda it: hf.GRPO(output_dir="runs"), hf.OptionError, ("'output_dir'", "folder='runs/a', save_every=10")),
    (lambda it: hf.GRPO(ref_model=None), hf.OptionError, ("'ref_model'", "session.reference(actor)")),
    (lambda it: hf.GRPO(gradient_accumulation_steps=4), hf.OptionError, ("hf.GRPO(mini_batches=2)", "micro_batch_tokens=4096")),
    (lambda it: hf.GRPO(epsilon=0.2), hf.OptionError, ("epsilon=0.2", "clip=0.2", 0.05)),
    (lambda it: hf.GRPO(aggregation="dr_grpo"), hf.OptionError, ("aggregation='dr_grpo'", "aggregation='fixed_length'")),
    (lambda it: hf.GRPO(scale=False), hf.OptionError, ("scale=False", "scale='none'")),
    (lambda it: hf.GRPO(bf16=True), hf.OptionError, ("'bf16'", "session.actor(model, dtype='bf16')")),
    (lambda it: hf.GRPO(gradient_checkpointing=True), hf.OptionError, ("session.actor(model, recompute='full')",)),
    (lambda it: hf.GRPO(reward_weights=[1.0]), hf.OptionError, ("'reward_weights'", "session.reward([f, g], weights=")),
    (lambda it: hf.GRPO(lr_scheduler_type="cosine"), hf.OptionError, ("hf.AdamW(lr=1e-5, schedule='cosine')",)),
    (lambda it: hf.GRPO(max_prompt_length=64), hf.OptionError, ("session.prompts(data, max_prompt_tokens=64)",)),
    (lambda it: hf.DPO(max_length=512), hf.OptionError, ("'max_length'", "session.pairs(data, max_tokens=512)")),
    (lambda it: hf.DPO(loss_type="sigmoid"), hf.OptionError, ("'loss_type'", "DPO(kind=...)")),
    (lambda it: hf.AdamW(learning_rate=1e-4), hf.OptionError, ("'learning_rate'", "AdamW(lr=...)")),
    (lambda it: hf.AdamW(warmup_ratio=0.1), hf.OptionError, ("'warmup_ratio'", "warmup_steps=10")),
    (lambda it: hf.Workload(batch_size=32), hf.OptionError, ("'batch_size'", "hf.Workload(prompts=32)")),
    (lambda it: hf.Layout(tensor_parallel=2), hf.OptionError, ("'tensor_parallel'", "Layout(tp=...)")),
    (lambda it: ppo.advantages(it.b, gae_lambda=0.9), hf.OptionError, ("'gae_lambda'", "advantages(lam=...)")),
    (lambda it: ppo.PolicyLoss(epsilon=0.2), hf.OptionError, ("'epsilon'", "PolicyLoss(clip=...)")),
    (lambda it: hf.Session(num_gpus=2), hf.OptionError, ("'num_gpus'", "Session(devices=...)")),
    (lambda it: it.s.actor("tiny", use_vllm=True), hf.OptionError, ("'use_vllm'", "rollout_options=hf.RolloutOptions")),
    (lambda it: it.s.actor("tiny", lr=1e-5), hf.OptionError, ("'lr'", "optimizer=hf.AdamW(lr=1e-5)")),
    (lambda it: it.s.actor("tiny", tensor_parallel_size=2), hf.OptionError, ("train='tp2 dp2'", "rollout='tp2'")),
    (lambda it: it.s.actor("tiny", device_map="auto"), hf.OptionError, ("'device_map'", "hf.Session(devices=2)")),
    (lambda it: it.actor.generate(it.p[0], max_length=8), hf.OptionError, ("'max_length'", "max_new_tokens")),
    (lambda it: it.actor.generate(it.p[0], do_sample=False), hf.OptionError, ("'do_sample'", "temperature=0")),
    (lambda it: it.actor.generate(it.p[0], num_return_sequences=4), hf.OptionError, ("'num_return_sequences'", "generate(n=...)")),
    (lambda it: it.s.train(SHORT, it.p, steps=1, num_generations=8), hf.OptionError, ("'num_generations'", "hf.GRPO(n=8)")),
    (lambda it: it.s.train(SHORT, it.p, steps=1, logging_steps=1), hf.OptionError, ("'logging_steps'", "run.history")),
    (lambda it: it.s.train(SHORT, it.p, max_steps=3), hf.OptionError, ("'max_steps'", "Session.train(steps=...)")),
    (lambda it: it.s.train(SHORT, it.p, num_train_epochs=3), hf.OptionError, ("'num_train_epochs'", "len(prompts) steps")),
    (lambda it: it.s.train(SHORT, it.p, steps=1, callbacks=[]), hf.OptionError, ("'callbacks'", "stop=f")),
    (lambda it: it.s.train(SHORT, it.p, steps=1, reward_funcs=length), hf.OptionError, ("session.reward(my_function)",)),
    (lambda it: it.s.train(SHORT, it.p, steps=1, args=None), hf.OptionError, ("'args'", "hf.PPO(clip=0.2)")),
    (lambda it: it.s.train(SHORT, it.p, steps=1, save_steps=10), hf.OptionError, ("'save_steps'", "save_every=...")),
    (lambda it: it.s.train(SHORT, it.p, steps=1, report_to="wandb"), hf.OptionError, ("'report_to'", "track=...")),
    (
        lambda it: it.s.train(SHORT, it.p, steps=1, compute_metrics=length),
        hf.OptionError,
        ("metrics=[f]", "session.evaluate("),
    ),
    (lambda it: it.s.train(SHORT, it.p, steps=1, run_name="a"), hf.OptionError, ("'run_name'", "track=hf.WandB(name='a run')")),
    (
        lambda it: it.s.evaluate(it.s.pairs({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]})),
        hf.OptionError,
        ("session.prompts(held_out)", "Pairs(1 rows"),
    ),
]


@each("mistake, error, named", OTHER_WORDS)
def test_a_word_of_another_library_is_answered_with_hfsdk_s(it, mistake, error, named):
    check_refused(mistake, it, error, named)


# -- values

VALUES = [
    (lambda it: hf.Session.simulated("8xH100"), hf.OptionError, ("'8xH100'", "nodes x devices", "'16x8 A100-80GB'")),
    (lambda it: hf.Session.simulated("1x8 H1000"), hf.OptionError, ("'H1000'", "did you mean 'H100'")),
    (lambda it: hf.Session.simulated(8), hf.OptionError, ("hf.ClusterSpec", "cluster=8")),
    (lambda it: hf.Session.simulated("0x8 H100"), hf.OptionError, ("0 nodes of 8", "at least one of each")),
    (lambda it: hf.Session.simulated("1x1 H100", wait="yes"), hf.OptionError, ("True or False", "wait='yes'")),
    (lambda it: hf.Session(devices=0), hf.OptionError, ("at least 1", "'auto'", "got 0")),
    (lambda it: hf.Session(devices=[0, 1]), hf.OptionError, ("devices=list of 2: 0, 1", "a whole number or a text")),
    (lambda it: it.s.actor("tinny"), hf.ModelNotFoundError, ("'tinny'", "did you mean 'tiny'?")),
    (lambda it: it.s.actor("/no/such/folder"), hf.ModelNotFoundError, ("'/no/such/folder'", "no such folder", "tiny")),
    (lambda it: it.s.actor("tiny", name="my actor"), hf.OptionError, ("name='my actor'", "letters, digits")),
    (lambda it: it.s.actor("tiny", optimizer="adam"), hf.OptionError, ("optimizer='adam'", "hf.AdamW")),
    (lambda it: it.s.actor("tiny", dtype="float16"), hf.OptionError, ("dtype='float16'", "'fp32', 'bf16'")),
    (lambda it: hf.AdamW(lr="1e-5"), hf.OptionError, ("lr='1e-5'", "at least 0")),
    (lambda it: hf.AdamW(1e-5), hf.OptionError, ("AdamW", "by name: lr=...")),
    (lambda it: hf.AdamW(betas=0.9), hf.OptionError, ("betas=0.9", "tuple of 2 numbers")),
    (lambda it: hf.AdamW(schedule="cosin"), hf.OptionError, ("schedule='cosin'", "'constant', 'linear', 'cosine'")),
    (lambda it: hf.PPO(max_new_token=8), hf.OptionError, ("'max_new_token'", "did you mean 'max_new_tokens'?")),
    (lambda it: hf.PPO(gamma=1.5), hf.OptionError, ("gamma=1.5", "from 0 to 1")),
    (lambda it: hf.PPO(mini_batches=1.5), hf.OptionError, ("mini_batches=1.5", "a whole number")),
    (lambda it: hf.PPO(temperature=-1), hf.OptionError, ("temperature=-1", "above 0 and at most 2")),
    (lambda it: hf.GRPO(temperature=3.0), hf.OptionError, ("temperature=3", "above 0 and at most 2")),
    (lambda it: hf.GRPO(n=1), hf.OptionError, ("n=1", "at least 2")),
    (lambda it: it.actor.generate(it.p[0], max_new_tokens=0), hf.OptionError, ("max_new_tokens=0", "a whole number from 1")),
    (
        lambda it: it.actor.generate(it.p[0], max_new_tokens=4000),
        hf.OptionError,
        ("max_new_tokens=4000", "4005", "the context of tiny is 512", "Shorten the prompt", "lower max_new_tokens"),
    ),
    (lambda it: it.actor.generate(it.p[0], temperature=2.5), hf.OptionError, ("temperature", 2.5, "at most 2", "vLLM")),
    (lambda it: it.actor.generate(it.p[0], temperature="hot"), hf.OptionError, ("temperature='hot'", "at least 0")),
    (lambda it: it.actor.generate(it.p[0], top_p=2), hf.OptionError, ("top_p=2", "from 0 to 1")),
    (lambda it: it.s.train(SHORT, it.p, steps="10"), hf.OptionError, ("steps='10'", "a whole number from 1")),
    (lambda it: it.s.train(SHORT, it.p, 10), hf.OptionError, ("Session.train", "got 3", "by name: steps=...")),
    (lambda it: it.s.train(SHORT, it.p, steps=1, metrics=[3]), hf.OptionError, ("metrics[0]=3", "functions of 1 argument")),
    (lambda it: it.s.train(SHORT, it.p, steps=1, stop=5), hf.OptionError, ("stop=5", "a function of 1 argument")),
    (lambda it: it.s.train(SHORT, it.p, steps=1, track="wandbb"), hf.OptionError, ("'wandbb'", "'tensorboard', 'wandb', 'mlflow'")),
    (lambda it: it.s.train(hf.PPO(mini_batches=64), it.p, steps=1), hf.OptionError, ("mini_batches=64", "at most 2")),
    (lambda it: it.s.compare([SHORT], it.p, steps=1, seeds=3), hf.OptionError, ("seeds=3", "a list of whole numbers")),
    (lambda it: it.s.compare(SHORT, it.p, steps=1), hf.OptionError, ("algorithms=PPO(", "a list or a mapping")),
    (lambda it: it.s.compare([SHORT, SHORT], it.p, steps=1), hf.OptionError, ("two of the algorithms", "{'one': ...,")),
    (lambda it: it.s.report("report.pdf"), hf.OptionError, ("'report.pdf'", ".html")),
    (lambda it: it.s.evaluate(it.p, num_prompts=0), hf.OptionError, ("num_prompts=0", "a whole number from 1")),
    (lambda it: setattr(it.s, "seed", -1), hf.OptionError, ("seed=-1", "a whole number from 0")),
    (lambda it: setattr(it.s, "name", 3), hf.OptionError, ("name=3", "a text")),
    (lambda it: it.actor.generate(["\ud800"]), hf.OptionError, ("lone surrogates", "'replace'")),
    (lambda it: it.s.prompts(["a\ud800"], batch_size=1), hf.OptionError, ("prompt 0", "lone surrogates", "'replace'")),
    (lambda it: it.actor.generate([]), hf.OptionError, ("actor.generate", "no prompts")),
    (lambda it: it.actor.generate([[1, 2], []]), hf.OptionError, ("actor.generate", "prompt 1 is empty")),
    (
        lambda it: it.actor.generate([[1, 2], [5] * 510], max_new_tokens=8),
        hf.OptionError,
        ("sample 1", "510 prompt tokens", 518, "the context of tiny is 512"),
    ),
    (
        lambda it: it.actor.compute_log_probs(it.s.batch(prompt=[[1] * 400], response=[[2] * 200])),
        hf.OptionError,
        ("sample 0", "400 prompt + 200 response tokens", "512 positions"),
    ),
    (lambda it: it.actor.generate([[1, 9999]]), hf.OptionError, ("prompt 0", "token 9999", "tokens 0 to 319")),
]


@each("mistake, error, named", VALUES)
def test_a_value_that_cannot_be_is_named_with_what_can(it, mistake, error, named):
    check_refused(mistake, it, error, named)


# -- layouts and places


def in_a_larger_pool(it):
    other = it.s.critic("tiny", train="tp1 dp1", name="other")
    try:
        other.compute_values(it.b)
    finally:
        other.release()


def too_large(it):
    other = it.s.critic("llama-70b", name="other")
    try:
        other.compute_values(it.b)
    finally:
        other.release()


PLACES = [
    (lambda it: it.s.actor("tiny", train="tp3"), hf.LayoutError, ("8 attention heads", "4 kv heads", "1, 2, 4, 8", "tp=3")),
    (lambda it: it.s.actor("tiny", rollout="pp2"), hf.LayoutError, ("rollout", "pp=2", "tp and dp only")),
    (lambda it: it.s.actor("tiny", train="tp2 xx2"), hf.LayoutError, ("'tp2 xx2'", "at 'xx2'", "'tp2 pp1 dp2'")),
    (lambda it: it.s.actor("tiny", train=2), hf.OptionError, ("train=2", "hf.Layout")),
    (lambda it: it.s.actor("tiny", train="tp8"), hf.LayoutError, ("'tp8 pp1'", "needs 8 devices", "the session has 4")),
    (lambda it: it.s.actor("tiny", train="dp5"), hf.LayoutError, ("dp5", "needs 5 devices", "the session has 4")),
    (lambda it: it.empty.actor("tiny", train="tp4 dp4"), hf.LayoutError, ("'tp4 pp1 dp4'", "needs 16 devices", "smaller layout")),
    (in_a_larger_pool, hf.PlacementError, ("other", "pool 'all'", "needs 1 devices", "the pool has 4")),
    (too_large, hf.DeviceMemoryError, ("GB", "pool 'all'", "exists 80.00", "too much by", "actor", "other")),
    (lambda it: hf.Layout(tp=0), hf.LayoutError, ("tp=0", "a whole number from 1")),
    (lambda it: it.s.place("collocate"), hf.PlacementError, ("'collocate'", "did you mean 'colocate'?")),
    (lambda it: it.s.place({"actor reference": 3, "critic": 3}), hf.PlacementError, ("pool 'critic'", "device 4", "has 4 devices")),
    (lambda it: it.s.place({"actor": 4}), hf.PlacementError, ("forgets critic, reference", "places actor", "Name every role")),
    (lambda it: it.s.place({"actr": 1, "critic reference": 1}), hf.PlacementError, ("'actr'", "did you mean 'actor'")),
    (lambda it: it.s.place(4), hf.OptionError, ("what=4", "a text or a mapping")),
    (lambda it: it.s.logs("actr"), hf.PlacementError, ("'actr'", "actor, critic, reference, reward")),
    (lambda it: it.empty.place(), hf.PlacementError, ("no model to place", "session.actor('tiny')")),
    (
        lambda it: it.s.plan(hf.PPO(), hf.Workload()),
        hf.OptionError,
        (
            "1,024 prompt and 1,024 response",
            "the context of tiny itself is 512",
            "hf.Workload(prompt_tokens=256, response_tokens=256",
        ),
    ),
    (lambda it: it.s.what_if(hf.PPO(), hf.Workload()), hf.OptionError, (512, "hf.Workload(prompt_tokens=256")),
    (lambda it: it.s.plan(hf.PPO, hf.Workload()), hf.OptionError, ("<class", "hf.PPO()")),
    (lambda it: it.s.plan(hf.PPO(), 1024), hf.OptionError, ("workload=1024", "hf.Workload")),
]


@each("mistake, error, named", PLACES)
def test_a_layout_or_place_that_does_not_fit_names_both_sides(it, mistake, error, named):
    check_refused(mistake, it, error, named)


# -- the order of calls


def values_of_a_released_critic(it):
    it.critic.release()
    try:
        it.critic.compute_values(it.b)
    finally:
        it.critic = it.s.critic("tiny")


def misaligned(it):
    batch = it.s.batch(prompt=[[1], [3]], response=[[3], [4, 5]], advantages=[[0.5], [0.1, 0.2, 0.3]])
    it.actor.update(batch.alias("old_log_probs", "advantages"), ppo.PolicyLoss())


CALLS = [
    (lambda it: it.actor.update(it.p[0], loss), hf.ColumnError, ("actor.update", "'response'", "actor.generate(batch) first")),
    (lambda it: it.critic.compute_values(it.p[0]), hf.ColumnError, ("critic.compute_values", "actor.generate(batch) first")),
    (lambda it: it.actor.compute_log_probs(it.b.drop("response")), hf.ColumnError, ("actor.compute_log_probs", "'response'")),
    (
        lambda it: ppo.advantages(it.reward.compute_scores(it.b)),
        hf.ColumnError,
        ("'values'", "'old_log_probs'", "critic.compute_values(batch) first", "reference.compute_log_probs(batch) first"),
    ),
    (
        lambda it: it.actor.update(it.b, ppo.PolicyLoss()),
        hf.ColumnError,
        ("'old_log_probs'", "'advantages'", "actor.compute_log_probs(batch) first", "ppo.advantages(batch) first"),
    ),
    (
        lambda it: it.critic.update(it.b, ppo.ValueLoss()),
        hf.ColumnError,
        ("critic.update", "'values'", "'returns'", "critic.compute_values(batch) first"),
    ),
    (lambda it: it.actor.update(it.b, ppo.PolicyLoss), hf.OptionError, ("(out, b)", "PolicyLoss", "ppo.PolicyLoss(clip=0.2)")),
    (lambda it: it.actor.update(it.b, hf.PPO()), hf.OptionError, ("loss=PPO(", "a function")),
    (lambda it: it.actor.update(it.b, lambda out: out.log_probs), hf.OptionError, ("(out, b)", "<lambda>")),
    (lambda it: it.actor.update(it.b, ppo.ValueLoss()), hf.OptionError, ("ValueLoss", "out.values", "log_probs", "a critic")),
    (lambda it: it.critic.update(it.b, ppo.PolicyLoss()), hf.OptionError, ("PolicyLoss", "out.log_probs", "values", "an actor")),
    (
        lambda it: it.reward.compute_scores(it.b.with_columns(completions=["a", "b"])),
        hf.ColumnError,
        ("'completions'", "batch.alias('own_completions', 'completions')"),
    ),
    (lambda it: it.actor.update(it.p, loss), hf.OptionError, ("batch=PromptStream", "hf.Batch")),
    (lambda it: it.actor.update(it.b, loss, mini_batches=99), hf.OptionError, ("mini_batches=99", "at most 2")),
    (lambda it: it.actor.update(it.b, loss, mini_batches=1.5), hf.OptionError, ("mini_batches=1.5", "a whole number")),
    (lambda it: it.actor.update(it.b, loss, epochs=0), hf.OptionError, ("epochs=0", "a whole number from 1")),
    (
        misaligned,
        hf.ColumnError,
        ("actor.update", "'old_log_probs'", "3 values for sample 1", "2 tokens", "one value per response token"),
    ),
    (lambda it: it.actor.update(made().b, loss), hf.ColumnError, ("another session", "session.batch(prompt=other['prompt']")),
    (lambda it: it.b.join(made().b, x="response"), hf.ColumnError, ("another session", "with_columns(name=other['name'])")),
    (lambda it: it.reward.update(it.b, loss), hf.OptionError, ("reward is a function", "cannot be trained")),
    (lambda it: it.reward.run(print), hf.OptionError, ("reward is a function", "run a function on its ranks")),
    (lambda it: it.s.train(hf.PPO, it.p, steps=1), hf.OptionError, ("<class", "hf.PPO(clip=0.2)", "Write PPO()")),
    (lambda it: it.s.train(hf.CrossEntropy(), it.p, steps=1), hf.OptionError, ("CrossEntropy(", "actor.update(batch, loss)")),
    (lambda it: it.s.train(hf.DPO(), it.p, steps=1), hf.ColumnError, ("session.pairs", "chosen, group, response")),
    (lambda it: it.s.train(SHORT, it.p, steps=1, save_every=1), hf.OptionError, ("save_every=1", "folder=...")),
    (lambda it: it.s.train(SHORT, it.p, steps=1, resume="nowhere"), hf.CheckpointError, ("nowhere", "session.save(folder)")),
    (lambda it: it.s.load("/no/such"), hf.CheckpointError, ("/no/such", "session.json", "session.save(folder)")),
    (lambda it: it.s.rewind("before"), hf.OptionError, ("'before'", "has none", "session.snapshot('before')")),
    (lambda it: it.empty.snapshot(), hf.OptionError, ("no role is trained", "session.actor('tiny')")),
    (lambda it: it.empty.watch(), hf.OptionError, ("no run", "session.train(hf.PPO(), prompts, steps=50, wait=False)")),
    (lambda it: it.empty.predict(), hf.OptionError, ("Run a step first", "session.plan(algorithm, workload)")),
    (lambda it: it.s.train(SHORT, it.p, steps=1).resume(), hf.OptionError, ("resume()", "session.train(..., wait=False)")),
    (
        lambda it: it.s.compare([SHORT], it.p, steps=1, baseline="b.json"),
        hf.OptionError,
        ("b.json", "save_baseline=True"),
    ),
    (values_of_a_released_critic, hf.OptionError, ("'critic'", "released", "session.critic('tiny')")),
]


@each("mistake, error, named", CALLS)
def test_a_call_out_of_order_says_which_comes_first(it, mistake, error, named):
    check_refused(mistake, it, error, named)


# -- functions

FUNCTIONS = [
    (lambda it: it.s.reward(lambda: 0.0), hf.OptionError, ("<lambda>()", "def score(prompts, completions, **columns)")),
    (lambda it: it.s.reward(lambda text, label: 0.0), hf.OptionError, ("(text, label)", "def score(completions)")),
    (lambda it: it.s.reward(0.5), hf.OptionError, ("source=0.5", "a path or a function")),
    (lambda it: it.s.reward(length(["a"])), hf.OptionError, ("source[0]=1.0", "a path or a function")),
    (lambda it: it.s.reward([length, length], weights=[1.0]), hf.OptionError, ("2 rewards", "weights=list of 1: 1.0")),
    (lambda it: it.s.reward(length, timeout_s=-1), hf.OptionError, ("timeout_s=-1", "above 0")),
    (lambda it: it.actor.run("print"), hf.OptionError, ("fn='print'", "a function")),
    (lambda it: it.actor.call(lambda model, rows: {}, it.b), hf.OptionError, ("primitive=<function", "hf.Primitive")),
    (lambda it: hf.primitive(loss), hf.OptionError, ("primitive", "got 1", "by name: reads=..., writes=..., protocol=...")),
    (lambda it: it.b.map(nothing, reads="prompt", writes=["x"]), hf.OptionError, ("reads='prompt'", "a list of texts")),
    (lambda it: it.b.map(nothing, reads=["reward"], writes=["x"]), hf.ColumnError, ("'reward'", "batch.with_columns(...)")),
    (lambda it: it.s.subscribe(None), hf.OptionError, ("listener=None", "a function of 1 argument")),
]


@each("mistake, error, named", FUNCTIONS)
def test_what_is_not_the_function_that_is_called_is_named(it, mistake, error, named):
    check_refused(mistake, it, error, named)


# -- looking

LOOKING = [
    (lambda it: it.b["respones"], hf.ColumnError, ("'respones'", "prompt, position, response")),
    (lambda it: it.b[0], hf.ColumnError, ("batch[0:0 + 1]", "batch.inspect(0)")),
    (lambda it: it.b["prompt", "response"], hf.ColumnError, ("batch.table('prompt', 'response')",)),
    (lambda it: it.b.take([99]), hf.ColumnError, ("row 99", "2 samples (0 to 1)")),
    (lambda it: it.b.inspect(99), hf.ColumnError, ("sample 99", "2 samples (0 to 1)")),
    (lambda it: it.b[5:5], hf.ColumnError, ("no rows", "at least one sample")),
    (lambda it: it.b.with_columns(mine=[1.0]), hf.ColumnError, ("'mine'", "1 entries", "2 samples")),
    (lambda it: it.s.batch(prompt=[[1.5]]), hf.ColumnError, ("'prompt'", 1.5, "whole numbers")),
    (lambda it: it.s.batch(prompt=[[1]], response=[[1], [2]]), hf.ColumnError, ("'prompt': 1", "'response': 2")),
    (lambda it: it.b["response"], hf.SimulatedValueError, ("'response'", "actor.generate", "batch.column_states()")),
    (lambda it: it.b.wait("soon"), hf.OptionError, ("timeout='soon'", "from 0")),
    (lambda it: it.s.trace[99], hf.OptionError, ("step 99", "the session has step 0")),
    (lambda it: it.s.trace[2:5], hf.OptionError, ("[2:5]", "the session has step 0")),
    (lambda it: it.s.trace["generate"], hf.OptionError, ("step='generate'", "a whole number or a slice")),
    (lambda it: it.s.dataflow[99], hf.OptionError, ("step 99", "the session has step 0")),
    (lambda it: it.s.dataflow[0:2], hf.OptionError, ("dataflow[-1]", "slice(0, 2", "session.trace[2:5]")),
    (lambda it: it.s.dataflow.edge(1, 99), hf.OptionError, ("call 1 to call 99", "1 -> 2")),
    (lambda it: it.s.trace.compare({"generat": 4.0}), hf.OptionError, ("'generat'", "actor.generate")),
    (lambda it: it.s.trace.to_perfetto("no/dir/x.json"), hf.OutputError, ("no/dir/x.json", "No such file", "unchanged")),
    (lambda it: hf.viz.picture(3), hf.OptionError, ("int", "Comparison, Dataflow, ")),
]


@each("mistake, error, named", LOOKING)
def test_what_is_not_there_is_told_with_what_is(it, mistake, error, named):
    check_refused(mistake, it, error, named)


# -- a closed session

CLOSED = [
    (lambda it: it.s.train(SHORT, it.p, steps=1), hf.SessionClosedError, ("hf.Session(...)", "stays readable")),
    (lambda it: it.s.actor("tiny"), hf.SessionClosedError, ("hf.Session(...)",)),
    (lambda it: it.s.actor("tiny", train="tp2"), hf.SessionClosedError, ("hf.Session(...)",)),
    (lambda it: it.actor.generate(it.b), hf.SessionClosedError, ("hf.Session(...)",)),
    (lambda it: it.s.place("split"), hf.SessionClosedError, ("hf.Session(...)",)),
    (lambda it: it.s.save("x"), hf.SessionClosedError, ("hf.Session(...)",)),
    (lambda it: it.s.snapshot(), hf.SessionClosedError, ("hf.Session(...)",)),
    (lambda it: it.s.prompts(["a"], batch_size=1), hf.SessionClosedError, ("hf.Session(...)",)),
    (lambda it: it.p[0], hf.SessionClosedError, ("hf.Session(...)",)),
    (lambda it: it.b.map(nothing, reads=["position"], writes=["x"]), hf.SessionClosedError, ("hf.Session(...)",)),
    (lambda it: it.b["response"], hf.SimulatedValueError, ("'response'", "actor.generate", "never had values")),
]


@pytest.fixture
def closed():
    world = made()
    world.s.close()
    world.s.close()  # once more does nothing
    yield world
    assert world.s.trace.calls
    assert world.b.column_states()[0]["writer"]
    assert "closed" in repr(world.s)


@each("mistake, error, named", CLOSED)
def test_a_closed_session_says_so_and_what_can_still_be_read(closed, mistake, error, named):
    check_refused(mistake, closed, error, named)


# -- what a real session refuses: a model's files where it is declared, and columns once they are there


@pytest.fixture
def real():
    """A session that takes its values for measured ones; ``real.runtime`` has what reached the workers."""
    runtime = ScriptedRuntime()
    with hf.Session(runtime=runtime) as session:
        actor, critic = session.actor("tiny"), session.critic("tiny")
        session.reference(actor), session.reward(length)
        yield SimpleNamespace(s=session, actor=actor, critic=critic, runtime=runtime)
        check_works(session, session.prompts(["one", "two", "three", "four"], batch_size=2))


def as_it_is(file):
    pass


@pytest.fixture
def folder(tmp_path):
    """``folder(weights, **changes)``: a copy of tiny whose config is changed and whose file of weights is."""
    found = []

    def make(weights=as_it_is, **changes):
        source = Path(model_folder("tiny"))
        target = tmp_path / f"model {len(found)}"
        found.append(shutil.copytree(source, target))
        (target / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | changes))
        weights(target / "model.safetensors")
        return str(target)

    return make


def with_an_absurd_header(file):
    file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:])


def of_shape(file, spec):
    """Make a file of weights of any size; it takes no room on the disk."""
    header, end = {}, 0
    for name, shape in spec.tensors().items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    file.write_bytes(len(content).to_bytes(8, "little") + content)
    os.truncate(file, 8 + len(content) + end)


SMALL_HEADS = {"head_dim": 16, "num_attention_heads": 16, "num_key_value_heads": 8}
MAMBA = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}


@each(
    "kinds, weights, changes, error, named",
    [
        ("actor critic", with_an_absurd_header, {}, hf.ModelNotFoundError, ("model.safetensors", f"{2**62:,}", "100,000,000")),
        ("actor critic", Path.unlink, {}, hf.ModelNotFoundError, ("no *.safetensors", "tokenizer.json", "save_pretrained(folder)")),
        ("actor critic", as_it_is, MAMBA, hf.UnsupportedModelError, ("'MambaForCausalLM'", "LlamaForCausalLM")),
        ("actor", as_it_is, SMALL_HEADS, hf.UnsupportedModelError, ("head_dim 16", "32, 64", "a GPU")),
    ],
)
def test_a_folder_that_is_no_model_is_told_where_the_role_is_declared(real, folder, kinds, weights, changes, error, named):
    path, roles = folder(weights, **changes), real.s.view()["roles"]
    for kind in kinds.split():
        for name in (kind, "other"):  # in the place of a role, and as one more
            with refuses(error, *named):
                getattr(real.s, kind)(path, name=name)
    assert real.s.view()["roles"] == roles


def test_a_model_that_does_not_fit_into_memory_is_refused_before_anything_is_loaded(real, folder):
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128}
    path = folder(**sizes)
    of_shape(Path(path, "model.safetensors"), hf.ModelSpec.from_folder(path))
    other = real.s.critic(path, name="other")
    with refuses(hf.DeviceMemoryError, "GB", "other", "exists"):
        other.compute_values(real.s.batch(prompt=[[1]], response=[[2]]))
    assert real.runtime.sent() == []
    other.release()


def test_columns_whose_lengths_come_late_are_compared_when_the_call_is_about_to_run(real):
    names = ["advantages", "old_log_probs"]
    batch = real.s.batch(prompt=[[1, 2], [3]], response=[[3], [4, 5]])
    batch = batch.map(lambda table: dict.fromkeys(names, table["prompt"]), ["prompt"], names)
    with refuses(hf.ColumnError, "sample 0", "2 values", "one value per response token") as caught:
        real.actor.update(batch, ppo.PolicyLoss()).wait()
    assert any(name in str(caught.value) for name in names)


@pytest.mark.filterwarnings("ignore:reward goes on with")
@each(
    "function, named",
    [
        (lambda completions: [0.0] * (len(completions) - 1), ("<lambda>", "3 scores", "4 completions")),
        (lambda completions: [0.0] * 3 + [float("nan")], ("<lambda>", "nan", "sample 3", "finite")),
        (lambda completions: ["good"] * 4, ("<lambda>", "'good' (str)", "sample 0", "a number")),
        (lambda completions: 0.5, ("<lambda>", "4 numbers", "float")),
    ],
)
def test_scores_that_are_none_are_named_with_their_sample(real, function, named):
    reward = real.s.reward(function)
    with refuses(hf.RewardFunctionError, "reward.compute_scores", *named):
        reward.compute_scores(real.s.batch(prompt=[[1]] * 4, response=[[2]] * 4)).wait()
    real.s.reward(length)


def test_a_reward_function_without_a_model_says_whose_tokenizer_is_missing(monkeypatch):
    monkeypatch.chdir(model_folder("tiny"))  # the tokenizer of the folder that one happens to be in is nobody's
    with hf.Session(runtime=ScriptedRuntime()) as session:
        batch = session.batch(prompt=[[1]], response=[[2]])
        with refuses(hf.ColumnError, "reward function", "tokenizer", "session.actor('tiny')"):
            session.reward(length).compute_scores(batch).wait()
