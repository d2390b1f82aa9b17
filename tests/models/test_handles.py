"""Handles over the scripted runtime: what reaches it, and what they refuse at the call."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.engine.controller.controller import Controller


def last(runtime, method):
    """Return (call, arguments) of the last such call that reached the runtime."""
    work = runtime.sent(method)[-1]
    return work.call, work.orders[0].arguments


NAN = float("nan")


def generated(actor, **options):
    return actor.generate(["The film was", "I think"], max_new_tokens=8, **options)


def my_loss(out, b):
    return -out.log_probs * b["advantages"]


# -- learning rates


def test_a_suggested_learning_rate_is_said_once_for_each_thing_that_is_learned(session):
    actor = session.actor("tiny", optimizer=hf.AdamW())
    batch = actor.compute_log_probs(generated(actor))
    batch = batch.with_columns(advantages=batch["old_log_probs"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        actor.update(batch, ppo.PolicyLoss())
        actor.update(batch, my_loss)
        actor.update(batch, hf.CrossEntropy())
    policy, demonstrations = (str(one.message) for one in told)
    assert "actor, 3.12M parameters, and a policy gradient" in policy
    assert "supervised fine-tuning" in demonstrations
    assert actor.role.optimizer.lr is None, "the workers take it from the same table"


def test_a_learning_rate_of_ones_own_is_not_talked_about(session):
    actor = session.actor("tiny", optimizer=hf.AdamW(lr=3e-4))
    batch = actor.compute_log_probs(generated(actor))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actor.update(batch, hf.CrossEntropy())


# -- generate


def test_generate_is_one_call_and_returns_the_columns(actor, runtime):
    batch = generated(actor, temperature=0.5, stop="\n", stop_token_ids=[10]).wait()
    (call, asked), sent = last(runtime, "generate"), runtime.sent()
    assert len(sent) == 1
    assert (call.role, call.phase, call.protocol, call.num_rows) == ("actor", "generation", "MICRO_DP", 2)
    assert set(call.reads) == {"prompt", "position"}
    assert asked.sampling.stop == ("\n",)
    assert asked.sampling.temperature == 0.5
    assert call.line.startswith("test_handles.py, line ")
    assert {"response", "rollout_log_probs", "finish_reason", "policy_version", "temperature", "group"} <= set(batch.columns)


@each(
    "prompts, count", [("Hello", 1), (["Hello", "there"], 2), ([72, 101], 1), ([[72], [101, 108]], 2), ([np.array([72, 101])], 1)]
)
def test_prompts_may_be_texts_or_tokens(actor, prompts, count):
    batch = actor.generate(prompts, max_new_tokens=4)
    assert len(batch) == count
    assert batch["prompt"].lengths.min() >= 1


def test_n_repeats_each_prompt(actor, runtime):
    batch = generated(actor, n=3).wait()
    assert len(batch) == 6
    assert last(runtime, "generate")[1].copies == 3
    assert batch["position"].tolist() == [0, 0, 0, 1, 1, 1]


def test_new_responses_drop_what_belonged_to_the_old(actor):
    batch = actor.compute_log_probs(generated(actor), entropy=True).with_columns(mine=[1.0, 2.0])
    again = actor.generate(batch, max_new_tokens=8)
    assert "old_log_probs" not in again
    assert "entropy" not in again
    assert "mine" in again


@each(
    "options, named",
    [
        ({"max_new_tokens": 0}, "max_new_tokens"), ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"temperature": -1}, "temperature"), ({"temperature": 0.001}, "at least 0.01"), ({"temperature": NAN}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"top_k": -1}, "top_k"), ({"n": 0}, "n must be"), ({"stop": ""}, "stop"),
        ({"stop_token_ids": [99999]}, "0 to 319"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused_at_the_call(actor, runtime, options, named):
    with refuses(hf.OptionError, named):
        actor.generate("Hello", **options)
    assert not runtime.sent()


def test_an_actor_is_usable_after_a_refusal(actor):
    with refuses(hf.OptionError, "n must be"):
        generated(actor, n=0)
    assert len(generated(actor)) == 2


@each(
    "prompts, named",
    [
        ([], "no prompts"), ("", "prompt 0"), (["x", ""], "prompt 1"), ([[1], []], "prompt 1"), ([[1, 99999]], "token 99999"),
        ([3.5], "prompt 0 of the data is float"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_are_named(actor, prompts, named):
    with refuses(hf.OptionError, named):
        actor.generate(prompts)


def test_a_prompt_beyond_the_context_names_sample_and_numbers(actor):
    with refuses(hf.OptionError, "sample 1", 500, "max_new_tokens=20", 520, 512):
        actor.generate(["x", "x" * 500], max_new_tokens=20)


def test_missing_columns_say_what_writes_them(session, actor, length_reward):
    critic, reference, reward = session.critic("tiny"), session.reference(actor), session.reward(length_reward)
    prompts = session.prompts(["one", "two"], batch_size=2)[0]
    for call in (actor.compute_log_probs, critic.compute_values, reference.compute_log_probs, reward.compute_scores):
        with refuses(hf.ColumnError, "response", "actor.generate"):
            call(prompts)
    batch = actor.generate(prompts)
    with refuses(hf.ColumnError, "old_log_probs", "actor.compute_log_probs"):
        actor.update(batch, ppo.PolicyLoss())


# -- learning


TOKENS = [float(token) for token in range(8)]


def full_batch(actor):
    batch = actor.compute_log_probs(generated(actor)).wait()
    return batch.with_columns(advantages=[TOKENS, TOKENS])


def test_update_carries_the_loss_by_value(actor, runtime):
    metrics = actor.update(full_batch(actor), my_loss, epochs=2, mini_batches=2, seed=7).wait()
    call, asked = last(runtime, "update")
    assert asked.shipped.name == "my_loss"
    assert call.function.startswith("my_loss@")
    assert (asked.epochs, asked.mini_batches, asked.seed) == (2, 2, 7)
    assert {"prompt", "response", "advantages", "old_log_probs"} <= set(call.reads)
    assert metrics["loss"] == [0.5] * 4
    assert metrics.mean("grad_norm") == 1.0
    assert actor.version == 4


def test_each_update_shuffles_anew_but_repeatably(actor, runtime):
    batch = full_batch(actor)
    for _ in range(2):
        actor.update(batch, my_loss).wait()
    first, second = (work.orders[0].arguments.seed for work in runtime.sent("update"))
    assert first != second


def test_halves_of_an_update(actor, runtime):
    batch = full_batch(actor)
    assert actor.forward_backward(batch, my_loss).mean("loss") == 0.5
    assert actor.grad_norm == 1.5
    assert len(actor.step().rows) == 1
    assert float(actor.compute_loss(batch, my_loss).value) == 0.5
    assert last(runtime, "compute_loss")[0].phase == "preparation"


@each(
    "options, named",
    [
        ({"epochs": 0}, ["epochs"]), ({"mini_batches": 0}, ["mini_batches"]), ({"mini_batches": 3}, ["mini_batches", "at most 2"]),
        ({"loss": ppo.PolicyLoss}, ["PolicyLoss"]), ({"loss": None}, ["loss=None"]),
    ],
)  # fmt: skip
def test_bad_updates_are_named(actor, options, named):
    with refuses(hf.OptionError, *named):
        actor.update(full_batch(actor), **{"loss": my_loss, **options})


def test_misaligned_columns_are_named(actor):
    batch = full_batch(actor).with_columns(advantages=[TOKENS, TOKENS[:2]])
    with refuses(hf.ColumnError, "'advantages' has 2 values for sample 1", "8 tokens"):
        actor.update(batch, ppo.PolicyLoss())


def test_a_batch_of_another_session_is_refused(session, actor, runtime, length_reward):
    with hf.Session.simulated("1x2 A100-80GB") as other:
        batch = other.batch(prompt=[[1]], response=[[2]])
        reward = session.reward(length_reward)
        uses = (
            actor.generate, actor.compute_log_probs, reward.compute_scores, lambda b: actor.update(b, my_loss),
            lambda b: actor.call(margins, b),
        )  # fmt: skip
        for use in uses:
            with refuses(hf.ColumnError, "another session", "session.batch"):
                use(batch)
    assert not runtime.sent()


def test_columns_per_token_are_compared_where_no_responses_are_read(actor):
    batch = generated(actor).wait().with_columns(scores=[0.0, 0.0], values=[[1.0], [2.0]])
    with refuses(hf.ColumnError, "'values' has 1 values for sample 0", "8 tokens"):
        ppo.advantages(batch, kl_coef=0.0)
    with refuses(hf.ColumnError, "map(", "'values' has 1"):
        batch.map(lambda table: {"x": [0, 0]}, ["values"], ["x"])


def wrong_types(session, actor, batch, length_reward, tmp_path):
    """Every use, and what its refusal names."""
    (tmp_path / "file").write_text("")
    return [
        (lambda: actor.compute_log_probs(["a"]), ["batch=", "hf.Batch"]),
        (lambda: actor.update(None, my_loss), ["update", "batch=None", "hf.Batch"]),
        (lambda: actor.generate(None), ["actor.generate", "NoneType"]),
        (lambda: actor.generate([True]), ["prompt 0", "bool"]),
        (lambda: actor.generate("x", temperature="a"), ["temperature='a'"]),
        (lambda: actor.generate("x", stop=3), ["stop=3"]),
        (lambda: actor.generate("x", stop=[3]), ["stop"]),
        (lambda: actor.generate("x", stop_token_ids=5), ["stop_token_ids"]),
        (lambda: actor.generate("x", max_new_tokens=1.5), ["max_new_tokens"]),
        (lambda: actor.generate("x", top_k=1.5), ["top_k"]),
        (lambda: actor.generate("x", seed="a"), ["seed"]),
        (lambda: actor.chat(3), ["message"]),
        (lambda: actor.update(batch, my_loss, epochs=True), ["epochs"]),
        (lambda: session.actor("tiny", train=None), ["train=None", "hf.Layout"]),
        (lambda: session.actor("tiny", rollout=None), ["rollout", "hf.Layout"]),
        (lambda: session.actor("tiny", rollout_options=3), ["rollout_options", "hf.RolloutOptions"]),
        (lambda: hf.AdamW(lr="a"), ["lr"]),
        (lambda: hf.AdamW(betas=0.9), ["betas"]),
        (lambda: hf.PPO(max_new_tokens="a"), ["max_new_tokens"]),
        (lambda: hf.PPO(clip_high="a"), ["clip_high"]),
        (lambda: session.reward(length_reward, timeout_s="a"), ["timeout_s"]),
        (lambda: session.reward(length_reward, timeout_s=float("nan")), ["timeout_s"]),
        (lambda: batch.inspect("a"), ["row='a'"]),
        (lambda: batch.map(len, "prompt", ["x"]), ["reads='prompt'"]),
        (lambda: batch.map(len, ["prompt"], "x"), ["writes"]),
        (lambda: session.batch(prompt=[[1.5, 2.0]]), ["'prompt'", "token ids"]),
        (lambda: session.prompts([[1.5]], batch_size=1)[0], ["1.5", "token ids"]),
        (lambda: session.prompts(["a"], batch_size=1, seed="a"), ["seed"]),
        (lambda: session.train("x", session.prompts(["a"], batch_size=1), steps=1), ["algorithm", "'x'"]),
        (lambda: session.train(hf.PPO, session.prompts(["a"], batch_size=1), steps=1), ["algorithm"]),
        (lambda: actor.save_pretrained(tmp_path / "file" / "below"), [tmp_path / "file" / "below"]),
    ]


def test_wrong_types_are_named(session, actor, runtime, length_reward, tmp_path):
    batch = generated(actor).wait()

    @each("use, named", wrong_types(session, actor, batch, length_reward, tmp_path))
    def refused(use, named):
        with refuses(hf.HfsdkError, *named):
            use()

    refused()
    assert len(runtime.sent()) == 1, "none of these became a call"
    assert hf.AdamW(lr=np.float32(1e-3), warmup_steps=np.int64(0)).lr > 0


def test_a_row_that_does_not_exist_is_the_one_named(actor):
    with refuses(hf.ColumnError, "row -3", "2 samples"):
        generated(actor)[[-3, 0]]


# -- the rest


def test_run_waits_and_returns_by_rank(actor, runtime):
    runtime.results["run"] = "of a rank"
    assert actor.run(lambda rank, x: x, 3) == ["of a rank"] * 2
    call, asked = last(runtime, "run")
    assert (call.protocol, asked.values) == ("ONE_TO_ALL", (3,))


@hf.primitive(reads=["prompt", "response"], writes=["margins"], protocol=hf.protocols.DP)
def margins(model, rows, scale=1.0):
    return {"margins": [scale] * rows.num_rows}


def test_a_primitive_is_called_by_its_columns(actor, runtime):
    batch = actor.call(margins, generated(actor), scale=2.0).wait()
    call, asked = last(runtime, "call")
    assert (call.protocol, call.writes, call.function.split("@")[0]) == ("DP", ("margins",), "margins")
    assert "margins" in batch
    rows = hf.Table({"x": np.arange(3)})
    assert asked.shipped.load()(None, rows, **asked.keywords) == {"margins": [2.0] * 3}
    assert asked.writes == ("margins",)
    assert margins(None, rows) == {"margins": [1.0] * 3}


def test_bad_primitives_are_named(actor):
    with refuses(hf.OptionError, "hf.Primitive"):
        actor.call(my_loss, generated(actor))
    with refuses(hf.OptionError, "reads", "a list"):
        hf.primitive(reads="prompt", writes=["x"])
    with refuses(hf.OptionError, "protocol", "hf.TransferProtocol"):
        hf.primitive(reads=["prompt"], writes=["x"], protocol="DP")
    needs = hf.primitive(reads=["nowhere"], writes=["x"])(lambda model, rows: {})
    with refuses(hf.ColumnError, "nowhere"):
        actor.call(needs, generated(actor))


def test_reward_functions_get_the_data_s_columns(session, actor, runtime, length_reward):
    reward = session.reward(length_reward, timeout_s=5)
    data = [{"text": "one", "label": 1, "tags": [1, 2]}, {"text": "two", "label": 0, "tags": []}]
    batch = reward.compute_scores(actor.generate(session.prompts(data, batch_size=2)[0])).wait()
    call, asked = last(runtime, "compute_scores")
    assert {"prompt", "response", "label", "tags", "finish_reason"} <= set(call.reads)
    assert "rollout_log_probs" not in call.reads
    assert (call.protocol, runtime.sent("compute_scores")[-1].timeout_s, asked.column) == ("", 5, "scores")
    assert asked.tokenizer.endswith("tiny")
    assert "scores" in batch
    with refuses(hf.OptionError, "a function, not a model"):
        reward.run(lambda rank: 0)


def test_cost_writes_costs(session, actor, length_reward):
    assert "costs" in session.cost(length_reward).compute_costs(generated(actor))


def test_reprs_ask_nobody(session, actor, length_reward, monkeypatch):
    reward = session.reward(length_reward)
    monkeypatch.setattr(Controller, "send", lambda controller, message: pytest.fail(f"a repr sends {message}"))
    assert repr(actor) == "ActorModel('actor': tiny, train 'tp1 pp1', rollout 'tp1 pp1', fp32)"
    assert repr(reward) == "RewardModel('reward': lengths)"
    assert repr(session).startswith("Session(session: 1x2 cpu, ray, open; roles: actor, reward")
    monkeypatch.undo()


def test_reshard_plan_needs_a_placement(session):
    actor = session.actor("tiny", train="tp2", rollout="tp1")
    with refuses(hf.LayoutError, "until it is placed"):
        _ = actor.reshard_plan
    session.place()
    assert str(actor.reshard_plan.train) == "tp2 pp1 dp1"
    assert {use: str(layout) for use, layout in actor.layouts.items()} == {"train": "tp2 pp1 dp1", "rollout": "tp1 pp1 dp2"}


def test_save_pretrained_protects_what_is_there(actor, tmp_path):
    assert actor.save_pretrained(tmp_path / "out") == tmp_path / "out"
    (tmp_path / "file").write_text("")
    for folder, named in [(tmp_path / "file", "is a file"), (actor.role.folder, "was loaded from")]:
        with refuses(hf.OptionError, named):
            actor.save_pretrained(folder)


def test_a_model_that_cannot_be_written_leaves_no_new_folder(actor, runtime, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    runtime.failing["save_pretrained"] = hf.CheckpointError("No space left on device")
    for where in ("new/model", "there"):
        with refuses(hf.CheckpointError, "No space left"):
            actor.save_pretrained(tmp_path / where)
        assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["there", "there/notes.txt"], where


def test_a_reward_that_lacks_a_column_is_refused_at_the_call(session, actor, runtime):
    def exact_match(completions, answer):
        return [0.0] * len(answer)

    reward, batch = session.reward(exact_match), actor.generate(["1+1="])
    with refuses(hf.ColumnError, "exact_match(completions, answer)", "'answer'", "finish_reason", "session.prompts("):
        reward.compute_scores(batch)
    assert not runtime.sent("compute_scores")
    reward.compute_scores(batch.with_columns(answer=["2"]))
    total = session.reward([reward, lambda completions: [0.0]], weights=[1.0, 1.0], name="total")
    with refuses(hf.ColumnError, "'answer'"):
        total.compute_scores(batch)


def test_chat_keeps_a_conversation(actor, runtime):
    actor.chat("Hello")
    actor.chat("And you?")
    assert [turn["role"] for turn in actor.conversation] == ["user", "assistant"] * 2
    actor.chat("Again", new=True)
    assert len(actor.conversation) == 2
    runtime.failing["generate"] = hf.CallError("no", role="actor")
    with pytest.raises(hf.CallError):
        actor.chat("lost")
    assert len(actor.conversation) == 2
