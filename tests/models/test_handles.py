"""Handles over a fake controller: what they send, and what they refuse at the call."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import hfsdk as hf
from tests.session.fakes import actor, controller, session  # noqa
from hfsdk.algorithms import ppo
from hfsdk.engine.calls import messages as m


def generated(actor, **options):
    return actor.generate(["The film was", "I think"], max_new_tokens=8, **options)


def my_loss(out, b):
    return -out.log_probs * b["advantages"]


# -- learning rates


def test_a_suggested_learning_rate_is_said_once_for_each_thing_that_is_learned(session, controller):
    actor = session.actor("tiny", optimizer=hf.AdamW())
    batch = actor.compute_log_probs(generated(actor))
    batch = batch.with_columns(advantages=batch["old_log_probs"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        actor.update(batch, ppo.PolicyLoss())
        actor.update(batch, my_loss)
        actor.update(batch, hf.CrossEntropy())
    policy, demonstrations = (str(one.message) for one in told)
    assert (
        "suggested for actor, 3.12M parameters, and a policy gradient (PPO, GRPO, ...); optimizer=hf.AdamW(lr=...) to choose"
        in policy
    )
    assert "supervised fine-tuning" in demonstrations
    assert controller.roles["actor"].optimizer.lr is None, "the workers take it from the same table"


def test_a_learning_rate_of_ones_own_is_not_talked_about(session):
    actor = session.actor("tiny", optimizer=hf.AdamW(lr=3e-4))
    batch = actor.compute_log_probs(generated(actor))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actor.update(batch, hf.CrossEntropy())


# -- generate


def test_generate_sends_one_call_and_returns_the_columns(actor, controller):
    batch = generated(actor, temperature=0.5, stop="\n", stop_token_ids=[10])
    call = controller.last("generate")
    assert (call.role, call.phase, call.protocol.name, call.num_rows) == ("actor", "generation", "MICRO_DP", 2)
    assert set(call.inputs) == {"prompt", "position"}
    assert call.arguments.sampling.stop == ("\n",)
    assert call.arguments.sampling.temperature == 0.5
    assert call.line.startswith("test_handles.py, line ")
    assert {"response", "rollout_log_probs", "finish_reason", "policy_version", "temperature", "group"} <= set(batch.columns)


@pytest.mark.parametrize("prompts", ["Hello", ["Hello", "there"], [72, 101], [[72], [101, 108]], [np.array([72, 101])]], ids=str)
def test_prompts_may_be_texts_or_tokens(actor, prompts):
    batch = actor.generate(prompts, max_new_tokens=4)
    expected = 2 if isinstance(prompts, list) and len(prompts) == 2 and not isinstance(prompts[0], int) else 1
    assert len(batch) == expected
    assert batch["prompt"].lengths.min() >= 1


def test_n_repeats_each_prompt(actor, controller):
    batch = generated(actor, n=3)
    assert len(batch) == 6
    assert controller.last("generate").arguments.copies == 3
    assert batch["position"].tolist() == [0, 0, 0, 1, 1, 1]


def test_new_responses_drop_what_belonged_to_the_old(actor):
    batch = actor.compute_log_probs(generated(actor), entropy=True).with_columns(mine=[1.0, 2.0])
    again = actor.generate(batch, max_new_tokens=8)
    assert "old_log_probs" not in again
    assert "entropy" not in again
    assert "mine" in again


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 0.001}, "at least 0.01"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"n": 0}, "n must be a whole number"),
        ({"stop": ""}, "stop must be texts"),
        ({"stop_token_ids": [99999]}, "0 to 319"),
    ],
)
def test_options_out_of_range_are_refused_at_the_call(actor, controller, options, words):
    with pytest.raises(hf.OptionError, match=words):
        actor.generate("Hello", **options)
    assert not controller.sent(m.Submit)
    assert len(generated(actor)) == 2  # still usable


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "no prompts"),
        ("", "prompt 0 is empty"),
        (["x", ""], "prompt 1 is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, 99999]], "token 99999"),
        ([3.5], r"prompt 0 of the data is float"),
    ],
)
def test_prompts_that_cannot_be(actor, prompts, words):
    with pytest.raises(hf.OptionError, match=words):
        actor.generate(prompts)


def test_a_prompt_beyond_the_context_names_sample_and_numbers(actor):
    with pytest.raises(hf.OptionError, match=r"sample 1 has 500 prompt tokens, with max_new_tokens=20 that is 520.* 512"):
        actor.generate(["x", "x" * 500], max_new_tokens=20)


def test_missing_columns_say_what_writes_them(session, actor, length_reward):
    critic, reference, reward = session.critic("tiny"), session.reference(actor), session.reward(length_reward)
    prompts = session.prompts(["one", "two"], batch_size=2)[0]
    for call in (actor.compute_log_probs, critic.compute_values, reference.compute_log_probs, reward.compute_scores):
        with pytest.raises(hf.ColumnError, match=r"response.*actor\.generate"):
            call(prompts)
    batch = actor.generate(prompts)
    with pytest.raises(hf.ColumnError, match=r"old_log_probs.*actor\.compute_log_probs"):
        actor.update(batch, ppo.PolicyLoss())


# -- learning


def full_batch(session, actor):
    batch = actor.compute_log_probs(generated(actor))
    return batch.with_columns(advantages=[[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])


def test_update_carries_the_loss_by_value(session, actor, controller):
    metrics = actor.update(full_batch(session, actor), my_loss, epochs=2, mini_batches=2, seed=7)
    call = controller.last("update")
    assert call.arguments.shipped.name == "my_loss"
    assert call.function.startswith("my_loss@")
    asked = call.arguments
    assert (asked.epochs, asked.mini_batches, asked.seed) == (2, 2, 7)
    assert {"prompt", "response", "advantages", "old_log_probs"} <= set(call.inputs)
    assert metrics["loss"] == [0.5, 0.5]
    assert metrics.mean("grad_norm") == 1.0


def test_each_update_shuffles_anew_but_repeatably(session, actor, controller):
    batch = full_batch(session, actor)
    actor.update(batch, my_loss)
    first = controller.last("update").arguments.seed
    actor.update(batch, my_loss)
    assert controller.last("update").arguments.seed != first


def test_halves_of_an_update(session, actor, controller):
    batch = full_batch(session, actor)
    assert actor.forward_backward(batch, my_loss).mean("loss") == 0.5
    assert actor.grad_norm == 1.5
    assert len(actor.step().rows) == 1
    assert float(actor.compute_loss(batch, my_loss).value["loss"]) == 0.5
    assert controller.last("compute_loss").phase == "preparation"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs"),
        ({"mini_batches": 0}, "mini_batches"),
        ({"mini_batches": 3}, "at most 2, the batch's samples"),
        ({"loss": ppo.PolicyLoss}, r"PolicyLoss.*Write"),
        ({"loss": None}, "loss must be a function; got loss=None"),
    ],
)
def test_bad_updates(session, actor, options, words):
    batch = full_batch(session, actor)
    with pytest.raises(hf.OptionError, match=words):
        actor.update(batch, **{"loss": my_loss, **options})


def test_misaligned_columns_are_named(session, actor):
    batch = full_batch(session, actor).with_columns(advantages=[[1.0, 2.0, 3.0], [1.0, 2.0]])
    with pytest.raises(hf.ColumnError, match="'advantages' has 2 values for sample 1, whose response has 3 tokens"):
        actor.update(batch, ppo.PolicyLoss())


@pytest.mark.parametrize("method", ["generate", "compute_log_probs", "update", "call", "score"])
def test_a_batch_of_another_session_is_refused(session, actor, controller, length_reward, method):
    with hf.Session.simulated("1x2 A100-80GB") as other:
        batch = other.batch(prompt=[[1]], response=[[2]])
        reward = session.reward(length_reward)
        use = {
            "generate": actor.generate, "compute_log_probs": actor.compute_log_probs, "score": reward.compute_scores,
            "update": lambda b: actor.update(b, my_loss), "call": lambda b: actor.call(margins, b),
        }[method]  # fmt: skip
        with pytest.raises(hf.ColumnError, match=r"belongs to another session.*session\.batch"):
            use(batch)
    assert not controller.sent(m.Submit)


def test_columns_per_token_are_compared_where_no_responses_are_read(actor):
    batch = generated(actor).with_columns(scores=[0.0, 0.0], values=[[1.0], [2.0]])
    with pytest.raises(hf.ColumnError, match="'values' has 1 values for sample 0, whose response has 3 tokens"):
        ppo.advantages(batch, kl_coef=0.0)
    with pytest.raises(hf.ColumnError, match=r"map\(.*'values' has 1"):
        batch.map(lambda table: {"x": [0, 0]}, ["values"], ["x"])


def wrong_types(session, actor, batch, length_reward, tmp_path):
    """Every use with what it should say."""
    (tmp_path / "file").write_text("")
    return [
        (lambda: actor.compute_log_probs(["a"]), r"batch must be an hf\.Batch; got batch=list of 1"),
        (lambda: actor.update(None, my_loss), r"update: batch must be an hf\.Batch; got batch=None"),
        (
            lambda: actor.generate(None),
            r"actor\.generate cannot take these prompts: prompts come from a datasets\.Dataset.*got NoneType",
        ),
        (lambda: actor.generate([True]), "prompt 0 of the data is bool"),
        (lambda: actor.generate("x", temperature="a"), "temperature must be a finite number of at least 0; got temperature='a'"),
        (lambda: actor.generate("x", stop=3), "stop must be a text or a list of texts; got stop=3"),
        (lambda: actor.generate("x", stop=[3]), "stop must be a text or a list of texts"),
        (lambda: actor.generate("x", stop_token_ids=5), "stop_token_ids must be a list of whole numbers"),
        (lambda: actor.generate("x", max_new_tokens=1.5), "max_new_tokens must be a whole number"),
        (lambda: actor.generate("x", top_k=1.5), "top_k must be a whole number"),
        (lambda: actor.generate("x", seed="a"), "seed must be a whole number or None"),
        (lambda: actor.chat(3), "message must be a text"),
        (lambda: actor.update(batch, my_loss, epochs=True), "epochs must be a whole number"),
        (lambda: session.actor("tiny", train=None), r"train must be a text or an hf\.Layout; got train=None"),
        (lambda: session.actor("tiny", rollout=None), r"rollout must be a text or an hf\.Layout"),
        (lambda: session.actor("tiny", rollout_options=3), "rollout_options must be an hf.RolloutOptions"),
        (lambda: hf.AdamW(lr="a"), "lr must be a .*number"),
        (lambda: hf.AdamW(betas=0.9), "betas must be a tuple of 2 numbers of at least 0 and below 1"),
        (lambda: hf.PPO(max_new_tokens="a"), "max_new_tokens must be a whole number"),
        (lambda: hf.PPO(clip_high="a"), "clip_high must be a finite number above 0 or None"),
        (lambda: session.reward(length_reward, timeout_s="a"), "timeout_s must be a finite number above 0"),
        (lambda: session.reward(length_reward, timeout_s=float("nan")), "timeout_s must be a finite number above 0"),
        (lambda: batch.inspect("a"), "row must be a whole number; got row='a'"),
        (lambda: batch.map(len, "prompt", ["x"]), r"reads must be a list of texts; got reads='prompt'"),
        (lambda: batch.map(len, ["prompt"], "x"), r"writes must be a list of texts"),
        (lambda: session.batch(prompt=[[1.5, 2.0]]), "'prompt' holds token ids, which are whole numbers"),
        (lambda: session.prompts([[1.5]], batch_size=1)[0], "has 1.5 among its token ids"),
        (lambda: session.prompts(["a"], batch_size=1, seed="a"), "seed must be a whole number"),
        (lambda: session.train("x", session.prompts(["a"], batch_size=1), steps=1), "takes an algorithm.*got 'x'"),
        (lambda: session.train(hf.PPO, session.prompts(["a"], batch_size=1), steps=1), "takes an algorithm"),
        (lambda: actor.save_pretrained(tmp_path / "file" / "below"), "cannot write to"),
    ]


def test_wrong_types_are_named(session, actor, controller, length_reward, tmp_path):
    batch = generated(actor)
    before = len(controller.sent(m.Submit))
    for use, words in wrong_types(session, actor, batch, length_reward, tmp_path):
        with pytest.raises(hf.HfsdkError, match=words):
            use()
    assert len(controller.sent(m.Submit)) == before
    assert hf.AdamW(lr=np.float32(1e-3), warmup_steps=np.int64(0)).lr > 0


def test_a_row_that_does_not_exist_is_the_one_named(actor):
    with pytest.raises(hf.ColumnError, match=r"row -3 does not exist; the batch has 2 samples"):
        generated(actor)[[-3, 0]]


# -- the rest


def test_run_waits_and_returns_by_rank(actor, controller):
    assert actor.run(lambda rank, x: x, 3) == [0, 1]
    call = controller.last("run")
    assert (call.result, call.protocol.name, call.arguments.values) == ("all", "ONE_TO_ALL", (3,))


@hf.primitive(reads=["prompt", "response"], writes=["margins"], protocol=hf.protocols.DP)
def margins(model, rows, scale=1.0):
    return {"margins": [scale] * rows.num_rows}


def test_a_primitive_is_called_by_its_columns(actor, controller):
    batch = actor.call(margins, generated(actor), scale=2.0)
    call = controller.last("call")
    assert (call.protocol.name, call.writes, call.function.split("@")[0]) == ("DP", ("margins",), "margins")
    assert "margins" in batch
    rows = hf.Table({"x": np.arange(3)})
    assert call.arguments.shipped.load()(None, rows, **call.arguments.keywords) == {"margins": [2.0] * 3}
    assert call.arguments.writes == ("margins",)
    assert margins(None, rows) == {"margins": [1.0] * 3}


def test_bad_primitives(actor):
    with pytest.raises(hf.OptionError, match=r"primitive must be an hf\.Primitive"):
        actor.call(my_loss, generated(actor))
    with pytest.raises(hf.OptionError, match="reads must be a list of texts"):
        hf.primitive(reads="prompt", writes=["x"])
    with pytest.raises(hf.OptionError, match=r"protocol must be an hf\.TransferProtocol"):
        hf.primitive(reads=["prompt"], writes=["x"], protocol="DP")
    needs = hf.primitive(reads=["nowhere"], writes=["x"])(lambda model, rows: {})
    with pytest.raises(hf.ColumnError, match="nowhere"):
        actor.call(needs, generated(actor))


def test_reward_functions_get_the_data_s_columns(session, actor, controller, length_reward):
    reward = session.reward(length_reward, timeout_s=5)
    data = [{"text": "one", "label": 1, "tags": [1, 2]}, {"text": "two", "label": 0, "tags": []}]
    batch = reward.compute_scores(actor.generate(session.prompts(data, batch_size=2)[0]))
    call = controller.last("compute_scores")
    assert {"prompt", "response", "label", "tags", "finish_reason"} <= set(call.inputs)
    assert "rollout_log_probs" not in call.inputs
    assert (call.protocol, call.timeout_s, call.arguments.column) == (None, 5, "scores")
    assert call.arguments.tokenizer.endswith("tiny")
    assert "scores" in batch
    with pytest.raises(hf.OptionError, match="is a function, not a model"):
        reward.run(lambda rank: 0)


def test_cost_writes_costs(session, actor, length_reward):
    assert "costs" in session.cost(length_reward).compute_costs(generated(actor))


def test_reprs_ask_nobody(session, actor, controller, length_reward):
    reward = session.reward(length_reward)
    before = len(controller.messages)
    assert repr(actor) == "ActorModel('actor': tiny, train 'tp1 pp1', rollout 'tp1 pp1', fp32)"
    assert repr(reward) == "RewardModel('reward': lengths)"
    assert repr(session).startswith("Session(session: 1x2 cpu, ray, open; roles: actor, reward")
    assert len(controller.messages) == before


def test_reshard_plan_needs_a_placement(session):
    actor = session.actor("tiny", train="tp2", rollout="tp1")
    with pytest.raises(hf.LayoutError, match="open until it is placed"):
        _ = actor.reshard_plan
    session.place()
    assert str(actor.reshard_plan.train) == "tp2 pp1 dp1"
    assert {use: str(layout) for use, layout in actor.layouts.items()} == {"train": "tp2 pp1 dp1", "rollout": "tp1 pp1 dp2"}


def test_save_pretrained_protects_what_is_there(actor, tmp_path):
    assert actor.save_pretrained(tmp_path / "out") == tmp_path / "out"
    (tmp_path / "file").write_text("")
    for folder, words in [(tmp_path / "file", "is a file"), (actor.role.folder, "was loaded from")]:
        with pytest.raises(hf.OptionError, match=words):
            actor.save_pretrained(folder)


@pytest.mark.parametrize("where", ["new/model", "there"])
def test_a_model_that_cannot_be_written_leaves_no_new_folder(actor, controller, tmp_path, where):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    controller.failing["save_pretrained"] = hf.CheckpointError("No space left on device")
    with pytest.raises(hf.CheckpointError, match="No space left"):
        actor.save_pretrained(tmp_path / where)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["there", "there/notes.txt"]


def test_a_reward_that_lacks_a_column_is_refused_at_the_call(session, actor, controller):
    def exact_match(completions, answer):
        return [0.0] * len(answer)

    reward, batch = session.reward(exact_match), actor.generate(["1+1="])
    words = r"reward: exact_match\(completions, answer\) needs 'answer', .*columns .*finish_reason.*session\.prompts\(\{'prompt': "
    with pytest.raises(hf.ColumnError, match=words):
        reward.compute_scores(batch)
    assert not [call for call in controller.sent(m.Submit) if call.method == "compute_scores"]
    reward.compute_scores(batch.with_columns(answer=["2"]))
    total = session.reward([reward, lambda completions: [0.0]], weights=[1.0, 1.0], name="total")
    with pytest.raises(hf.ColumnError, match="needs 'answer'"):
        total.compute_scores(batch)


def test_chat_keeps_a_conversation(actor, controller):
    actor.chat("Hello")
    actor.chat("And you?")
    assert [turn["role"] for turn in actor.conversation] == ["user", "assistant"] * 2
    actor.chat("Again", new=True)
    assert len(actor.conversation) == 2
    controller.failing["generate"] = hf.CallError("no", role="actor")
    with pytest.raises(hf.CallError):
        actor.chat("lost")
    assert len(actor.conversation) == 2
