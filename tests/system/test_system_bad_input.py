"""Bad input on real engines: a clear error, and the session goes on."""

import json
import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from system_helpers import call_id, check_works, fingerprint, lengths_reward, ppo_batch

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.assets import model_folder
from hfsdk.engine.calls import queries as q
from hfsdk.session.session_parts import parts_of


@pytest.fixture(autouse=True)
def still_works(live):
    yield
    check_works(live)


@pytest.fixture
def folder(tmp_path):
    """``folder(**changes)``: a copy of tiny whose config is changed; its weights are not."""

    def make(weights=True, **changes):
        source = Path(model_folder("tiny"))
        target = tmp_path / "model"
        target.mkdir()
        for file in source.iterdir():
            if file.is_file() and (weights or file.suffix != ".safetensors"):
                shutil.copyfile(file, target / file.name)
        config = json.loads((source / "config.json").read_text()) | changes
        (target / "config.json").write_text(json.dumps(config))
        return str(target)

    return make


# ---- models and layouts: refused where they are declared


def test_tp_that_does_not_divide_the_heads(live):
    with pytest.raises(hf.LayoutError, match=r"8 attention heads, 4 kv heads.*got tp=3"):
        live.session.actor("tiny", train="tp3", name="other")


@pytest.mark.parametrize("layout", ["tp4", "tp2 dp2", "dp3"])
def test_layout_larger_than_the_session(live, layout):
    with pytest.raises(hf.LayoutError, match=r"needs [34] devices; the session has 2"):
        live.session.actor("tiny", train=layout, name="other")


def test_layout_that_does_not_parse(live):
    with pytest.raises(hf.LayoutError, match="does not parse"):
        live.session.actor("tiny", train="tp2 xp2", name="other")


def test_layout_smaller_than_the_pool(live):
    other = live.session.critic("tiny", train="tp1 dp1", name="other")
    with pytest.raises(hf.PlacementError, match=r"other does not fit pool 'all'.*2"):
        other.compute_values(live.session.batch(prompt=[[1]], response=[[2]]))
    other.release()


def test_placement_larger_than_the_session(live):
    with pytest.raises(hf.PlacementError, match=r"device 2; the session has 2 devices"):
        live.session.place({"actor reference": 2, "critic": 1})


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_weights_whose_header_is_absurd_are_told_where_the_role_is_declared(live, folder, kind):
    path = Path(folder()) / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])
    before = live.session.view()
    with pytest.raises(hf.ModelNotFoundError, match=r"model\.safetensors is no safetensors file, or is damaged: its header would"):
        getattr(live.session, kind)(str(path.parent))
    assert live.session.view()["roles"] == before["roles"]


def test_head_size_without_kernel(live, folder):
    small = folder(head_dim=16, num_attention_heads=16, num_key_value_heads=8)
    with pytest.raises(hf.UnsupportedModelError, match=r"head_dim 16.*32, 64"):
        live.session.actor(small, name="other")


def test_model_that_does_not_fit_in_memory(live, folder):
    huge = folder(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, head_dim=128)
    other = live.session.critic(huge, name="other")
    began = time.monotonic()
    with pytest.raises(hf.DeviceMemoryError, match=r"GB[\s\S]*other"):
        other.compute_values(live.session.batch(prompt=[[1]], response=[[2]]))
    assert time.monotonic() - began < 10, "refused before anything is loaded"
    other.release()


def test_weights_that_are_not_there(live, folder, tmp_path):
    with pytest.raises(hf.ModelNotFoundError, match=r"weights|safetensors"):
        live.session.actor(folder(weights=False), name="other")
    with pytest.raises(hf.ModelNotFoundError, match="nothing-here"):
        live.session.actor(str(tmp_path / "nothing-here"), name="other")


def test_unknown_architecture(live, folder):
    odd = folder(architectures=["MambaForCausalLM"], model_type="mamba")
    with pytest.raises(hf.UnsupportedModelError, match=r"[Mm]amba"):
        live.session.actor(odd, name="other")


def test_weights_of_another_shape_than_the_config(live, folder):
    """The load fails on the workers; the role does not come into being and the others live on."""
    other = live.session.critic(folder(intermediate_size=1408), name="other")
    with pytest.raises(hf.HfsdkError, match=r"mlp|shape|size"):
        other.compute_values(live.session.batch(prompt=[[1]], response=[[2]]))
    other.release()


# ---- columns


def test_missing_column(live):
    batch = live.session.batch(prompt=[[1, 2]], response=[[3]])
    with pytest.raises(hf.ColumnError, match=r"critic.update reads 'values'.*compute_values"):
        live.critic.update(batch, ppo.ValueLoss())
    with pytest.raises(hf.ColumnError, match="response"):
        live.actor.compute_log_probs(batch.drop("response"))


def test_extra_columns_are_kept(live):
    batch = live.session.batch(prompt=[[1, 2], [3]], response=[[3], [4, 5]], note=["a", "b"], weight=[1.0, 2.0])
    batch = live.actor.compute_log_probs(batch)
    live.actor.forward_backward(batch, lambda out, b: -out.log_probs * b.expand("weight")).wait()
    live.actor.step().wait()
    assert list(batch["note"]) == ["a", "b"]


@pytest.mark.parametrize("pending", [False, True])
def test_misaligned_columns(live, pending):
    batch = live.session.batch(prompt=[[1, 2], [3]], response=[[3], [4, 5]], advantages=[[0.5], [0.1, 0.2, 0.3]])
    batch = batch.alias("old_log_probs", "advantages")
    if pending:  # the lengths are known only when the call is about to run
        names = ["advantages", "old_log_probs"]
        batch = batch.map(lambda table: dict.fromkeys(names, table["prompt"]), ["prompt"], names)
    with pytest.raises(hf.ColumnError, match=r"(advantages|old_log_probs).*sample [01].*value"):
        live.actor.update(batch, ppo.PolicyLoss()).wait()


def test_own_column_that_is_misaligned(live):
    batch = live.session.batch(prompt=[[1, 2], [3]], response=[[3], [4, 5]], mine=[[0.5, 0.5], [0.1]])
    with pytest.raises(hf.HfsdkError, match="mine"):
        live.actor.update(batch, lambda out, b: out.log_probs * b["mine"]).wait()


def test_column_of_another_length(live):
    batch = live.session.batch(prompt=[[1, 2], [3]])
    with pytest.raises(hf.ColumnError, match="3 entries; the batch has 2 samples"):
        batch.with_columns(extra=[1, 2, 3])


def test_empty_prompts(live):
    with pytest.raises(hf.OptionError, match=r"prompt 1 .*empty"):
        live.session.prompts(["fine", ""], batch_size=2)
    with pytest.raises(hf.OptionError, match="prompt 1 is empty"):
        live.actor.generate([[1, 2], []])
    with pytest.raises(hf.OptionError, match="no prompts"):
        live.actor.generate([])


def test_empty_prompt_found_out_late(live):
    """Where lengths are not known at the call, the workers say so."""
    batch = live.session.batch(start=[[1, 2], [3]]).map(
        lambda t: {"prompt": hf.Ragged.of([[1, 2], []], np.int32)}, ["start"], ["prompt"]
    )
    with pytest.raises(hf.HfsdkError, match=r"(row|sample|prompt) 1"):
        live.actor.generate(batch, max_new_tokens=3).wait()


def test_prompt_beyond_the_context(live):
    with pytest.raises(hf.OptionError, match=r"sample 1 has 510 prompt tokens.*context.*512"):
        live.actor.generate([[1, 2], [5] * 510], max_new_tokens=8)
    with pytest.raises(hf.OptionError, match=r"prompt 1 .*600 tokens.*512"):
        live.session.prompts(["fine", "x" * 600], batch_size=1)[0]
    with pytest.raises(hf.OptionError, match=r"512"):
        live.actor.compute_log_probs(live.session.batch(prompt=[[1] * 400], response=[[2] * 200]))


def test_tokens_outside_the_vocabulary(live):
    with pytest.raises(hf.OptionError, match=r"token 9999.*0 to 319"):
        live.actor.generate([[1, 9999]])


def test_tokens_outside_the_vocabulary_in_a_pass(live):
    batch = live.session.batch(prompt=[[1, 2]], response=[[9999]])
    with pytest.raises(hf.HfsdkError, match=r"9999|vocab"):
        live.actor.compute_log_probs(batch).wait()


# ---- reward functions


def raises(completions):
    return [1 / 0 for _ in completions]


def hangs(completions):
    while True:
        time.sleep(0.05)


def one_short(completions):
    return [0.0] * (len(completions) - 1)


def one_nan(completions):
    return [0.0] * (len(completions) - 1) + [math.nan]


def strings(completions):
    return ["good" for _ in completions]


def exits(completions):
    raise SystemExit(3)


def interrupts(completions):
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:reward goes on with")
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises, r"raises raised ZeroDivisionError[\s\S]*return \[1 / 0"),
        (one_short, r"one_short returned 3 scores for 4 completions"),
        (one_nan, r"one_nan returned nan for sample 3"),
        (strings, r"strings returned 'good' \(str\) for sample 0"),
        (exits, r"exits raised SystemExit\(3\)"),
        (interrupts, r"interrupts raised KeyboardInterrupt"),
        (hangs, r"hangs took longer than 2 s"),
    ],
)
def test_reward_function(live, function, words):
    batch = live.actor.generate(live.prompts[0][:4], max_new_tokens=4)
    earlier = live.reward.compute_scores(batch)
    earlier = earlier.map(lambda table: {"twice": 2 * table["scores"]}, ["scores"], ["twice"]).wait()
    reward = live.session.reward(function, timeout_s=2)
    try:
        assert reward is live.reward
        with pytest.raises(hf.RewardFunctionError, match=words) as caught:
            reward.compute_scores(batch)["scores"]
        assert caught.value.role == "reward"
        assert "test_system_bad_input.py" in caught.value.line
    finally:
        reward = live.session.reward(lengths_reward)
    assert len(reward.compute_scores(batch)["scores"]) == 4
    assert np.array_equal(earlier["twice"], 2 * earlier["scores"]), "the results of other calls are still there"


def test_results_of_tasks_do_not_come_through_the_controller(live):
    import ray

    batch = live.session.batch(number=[1.0, 2.0]).map(lambda t: {"small": t["number"]}, ["number"], ["small"]).wait()
    part = parts_of(live.session).client.send(q.StoredOf(call_id(batch))).parts[0]
    assert ray.experimental.get_object_locations(part.handle)[part.handle[0]]["node_ids"], "it is in the object store"


def test_function_that_ends_its_process(live):
    batch = live.actor.generate(live.prompts[0][:2], max_new_tokens=4)
    with pytest.raises(hf.CallError, match=r"ended"):
        batch.reduce(lambda table: __import__("os")._exit(3), reads=["response"]).wait()


def fork_and_exit(table):
    if os.fork() == 0:
        time.sleep(45)
    os._exit(3)


def test_function_that_ends_its_process_is_told_of_though_what_it_forked_goes_on(live):
    """A fork keeps the process's sockets open, by which Ray sees its end."""
    batch = live.session.batch(number=[1.0])
    begun = time.monotonic()
    with pytest.raises(hf.CallError, match="ended"):
        batch.reduce(fork_and_exit, reads=["number"]).wait()
    assert time.monotonic() - begun < 40, "before what it forked has ended"


# ---- losses


def nan_for(sample):
    def loss(out, b):
        each = -out.log_probs * 1.0
        rows = b.row_ids[b.segment]
        return each.masked_fill(rows == sample, float("nan"))

    return loss


def test_nan_that_one_rank_sees(live):
    batch = ppo_batch(live)
    before = live.actor.run(fingerprint)
    version = live.actor.version
    with pytest.raises(hf.NonFiniteLossError, match=r"samples \[11\].*refused on every rank"):
        live.actor.update(batch, nan_for(11)).wait()
    assert live.actor.run(fingerprint) == before
    assert live.actor.version == version
    assert live.actor.update(batch, ppo.PolicyLoss()).rows[0]["grad_norm"] > 0


def test_nan_under_a_learning_rate_that_was_suggested(live):
    batch = ppo_batch(live)
    assert live.critic.version > 0
    with pytest.raises(hf.NonFiniteLossError, match=r"samples \[.*refused on every rank.*with a learning rate of 0\.00\d+: try a"):
        live.critic.update(batch, lambda out, b: out.values * float("nan")).wait()


def test_nan_in_a_later_mini_batch(live):
    """Earlier optimizer steps stand, and the version says how many."""
    batch = ppo_batch(live)
    version = live.actor.version
    metrics = live.actor.update(batch, nan_for(11), mini_batches=4, epochs=2, seed=3)
    with pytest.raises(hf.NonFiniteLossError, match=r"samples \[11\]"):
        metrics.wait()
    steps = {updates for updates, _ in live.actor.run(fingerprint)}
    assert len(steps) == 1
    assert live.actor.version == steps.pop()
    assert version <= live.actor.version <= version + 3
    assert set(live.actor.generate(live.prompts[0], max_new_tokens=2)["policy_version"]) == {live.actor.version}


def test_loss_that_raises(live):
    batch = ppo_batch(live)
    before = live.actor.run(fingerprint)

    def broken(out, b):
        return out.log_probs * b["no_such_column"]

    with pytest.raises(hf.HfsdkError, match="no_such_column"):
        live.actor.update(batch, broken).wait()

    def on_one_rank(out, b):
        if 11 in b.row_ids.tolist():
            raise ValueError("not sample 11")
        return -out.log_probs

    with pytest.raises(hf.CallError, match=r"ValueError: not sample 11[\s\S]*raise ValueError") as caught:
        live.actor.update(batch, on_one_rank).wait()
    assert caught.value.rank in (0, 1)
    assert live.actor.run(fingerprint) == before


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out, b: out.log_probs.mean(), "one number per response token"),
        (lambda out, b: 0.0, "one number per response token"),
        (lambda out, b: out.log_probs.detach(), "does not depend on the model"),
    ],
)
def test_loss_of_the_wrong_kind(live, loss, words):
    with pytest.raises(hf.OptionError, match=words):
        live.actor.update(live.session.batch(prompt=[[1, 2], [3]], response=[[3, 4], [4, 5, 6]]), loss).wait()
    with pytest.raises(hf.OptionError, match="takes a loss"):
        live.actor.update(live.session.batch(prompt=[[1, 2]], response=[[3]]), ppo.PolicyLoss)


@pytest.mark.parametrize("change", [{"epochs": 0}, {"mini_batches": 17}, {"mini_batches": 1.5}])
def test_update_options(live, change):
    batch = live.actor.generate(live.prompts[0], max_new_tokens=2)
    with pytest.raises(hf.OptionError, match=next(iter(change))):
        live.actor.update(batch, lambda out, b: -out.log_probs, **change)


# ---- results that cannot travel


def test_result_that_cannot_be_pickled(live):
    with pytest.raises(hf.CallError, match=r"pickle|travel|return"):
        live.actor.run(lambda rank: (x for x in [1]))


# ---- a closed session


def test_closed_session(live):
    session = hf.Session(devices=1)
    prompts = session.prompts([[1, 2]], batch_size=1)
    batch = prompts[0]
    actor = session.actor("tiny")
    session.close()
    session.close()
    for use in (
        lambda: actor.generate(batch), lambda: session.actor("tiny"), lambda: session.place("colocate"),
        lambda: prompts[0], lambda: session.save("/tmp/never"), lambda: session.prompts(["a"], batch_size=1),
    ):  # fmt: skip
        with pytest.raises(hf.SessionClosedError, match=r"closed; make a new one"):
            use()
    assert "closed" in repr(session)
    assert batch["prompt"][0].tolist() == [1, 2], "the user's own"
