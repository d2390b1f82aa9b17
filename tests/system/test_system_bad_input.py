"""Bad input that only workers see: functions that raise, hang or end their process, numbers that are none, weights that do not fit.

What is refused at the call, before any worker, is in ``tests/session/test_refusals.py``.
"""

import contextlib
import json
import math
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from expect import each, refuses, until
from system_helpers import call_id, check_works, fingerprint, lengths_reward, ppo_batch

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.assets import model_folder
from hfsdk.engine.calls import queries as q
from hfsdk.session.parts import parts_of


@pytest.fixture(autouse=True, scope="module")
def still_works(live):
    """After all of it calls go through, on every worker."""
    yield
    check_works(live)


def test_weights_of_another_shape_than_the_config(live, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    with refuses(hf.ModelNotFoundError, "model.safetensors", "mlp", config["intermediate_size"]):
        live.session.critic(str(folder), name="other")


@each("change", [Path.unlink, lambda file: file.write_bytes(b""), lambda file: (file.unlink(), os.mkfifo(file))])
def test_weights_that_change_after_the_role_was_declared(live, tmp_path, change):
    """The load fails on the workers, a named pipe too; the role does not come into being and the others live on."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder("tiny"), folder, dirs_exist_ok=True)
    other = live.session.critic(str(folder), name="other")
    change(folder / "model.safetensors")
    with refuses(hf.ModelNotFoundError, str(folder), "model.safetensors"):
        other.compute_values(live.session.batch(prompt=[[1]], response=[[2]])).wait()
    other.release()
    (folder / "model.safetensors").unlink(missing_ok=True)


# ---- columns


def test_extra_columns_are_kept(live):
    batch = live.session.batch(prompt=[[1, 2], [3]], response=[[3], [4, 5]], note=["a", "b"], weight=[1.0, 2.0])
    batch = live.actor.compute_log_probs(batch)
    live.actor.forward_backward(batch, lambda out, b: -out.log_probs * b.expand("weight")).wait()
    live.actor.step().wait()
    assert list(batch["note"]) == ["a", "b"]


def test_own_column_that_is_misaligned(live):
    batch = live.session.batch(prompt=[[1, 2], [3]], response=[[3], [4, 5]], mine=[[0.5, 0.5], [0.1]])
    with refuses(hf.HfsdkError, "mine"):
        live.actor.update(batch, lambda out, b: out.log_probs * b["mine"]).wait()


def test_empty_prompt_found_out_late(live):
    """Where lengths are not known at the call, the workers say so."""
    batch = live.session.batch(start=[[1, 2], [3]]).map(
        lambda t: {"prompt": hf.Ragged.of([[1, 2], []], np.int32)}, ["start"], ["prompt"]
    )
    with pytest.raises(hf.HfsdkError, match=r"(row|sample|prompt) 1"):
        live.actor.generate(batch, max_new_tokens=3).wait()


def test_tokens_outside_the_vocabulary_in_a_pass(live):
    batch = live.session.batch(prompt=[[1, 2]], response=[[9999]])
    with refuses(hf.HfsdkError, 9999):
        live.actor.compute_log_probs(batch).wait()


# ---- functions


def raises(completions):
    return [1 / 0 for _ in completions]


def hangs(completions):
    threading.Event().wait()


def exits(completions):
    raise SystemExit(3)


def interrupts(completions):
    raise KeyboardInterrupt


def one_nan(completions):
    return [0.0] * (len(completions) - 1) + [math.nan]


@pytest.mark.filterwarnings("ignore:reward goes on with")
@each(
    "function, named",
    [
        (raises, ("raises raised ZeroDivisionError", "return [1 / 0")),
        (one_nan, ("one_nan", "nan", "sample 3")),
        (exits, ("exits raised SystemExit(3)",)),
        (interrupts, ("interrupts raised KeyboardInterrupt",)),
        (hangs, ("hangs took longer than 2 s", "timeout_s=...")),
    ],
)
def test_a_reward_function_that_fails_says_where_and_leaves_other_results(live, function, named):
    batch = live.actor.generate(live.prompts[0][:4], max_new_tokens=4)
    earlier = live.reward.compute_scores(batch)
    earlier = earlier.map(lambda table: {"twice": 2 * table["scores"]}, ["scores"], ["twice"]).wait()
    reward = live.session.reward(function, timeout_s=2)
    try:
        assert reward is live.reward
        with refuses(hf.RewardFunctionError, *named) as caught:
            reward.compute_scores(batch)["scores"]
        assert caught.value.role == "reward"
        assert Path(__file__).name in caught.value.line
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
    with refuses(hf.CallError, "ended"):
        batch.reduce(lambda table: __import__("os")._exit(3), reads=["response"]).wait()


def test_function_that_ends_its_process_is_told_of_though_what_it_forked_goes_on(live, tmp_path):
    """A fork keeps the process's sockets open, by which Ray sees its end."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    def fork_and_exit(table):
        if os.fork() == 0:
            open(pipe).close()  # until the test opens its other end
        os._exit(3)

    def other_end():
        with contextlib.suppress(OSError):  # nobody reads
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        return None

    try:
        with refuses(hf.CallError, "ended"):
            live.session.batch(number=[1.0]).reduce(fork_and_exit, reads=["number"]).wait(300)
    finally:
        os.close(until("what was forked, which goes on", other_end))


def test_result_that_cannot_be_pickled(live):
    with pytest.raises(hf.CallError, match=r"pickle|travel|return"):
        live.actor.run(lambda rank: (x for x in [1]))


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
    with refuses(hf.NonFiniteLossError, "samples [11]", "every rank"):
        live.actor.update(batch, nan_for(11)).wait()
    assert live.actor.run(fingerprint) == before
    assert live.actor.version == version
    assert live.actor.update(batch, ppo.PolicyLoss()).rows[0]["grad_norm"] > 0


def test_nan_under_a_learning_rate_that_was_suggested(live):
    batch = ppo_batch(live)
    assert live.critic.version > 0
    with refuses(hf.NonFiniteLossError, "samples [", "every rank", "learning rate of 0.00"):
        live.critic.update(batch, lambda out, b: out.values * float("nan")).wait()


def test_nan_in_a_later_mini_batch(live):
    """Earlier optimizer steps stand, and the version says how many."""
    batch = ppo_batch(live)
    version = live.actor.version
    metrics = live.actor.update(batch, nan_for(11), mini_batches=4, epochs=2, seed=3)
    with refuses(hf.NonFiniteLossError, "samples [11]"):
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

    with refuses(hf.HfsdkError, "no_such_column"):
        live.actor.update(batch, broken).wait()

    def on_one_rank(out, b):
        if 11 in b.row_ids.tolist():
            raise ValueError("not sample 11")
        return -out.log_probs

    with refuses(hf.CallError, "ValueError", "not sample 11", "raise ValueError") as caught:
        live.actor.update(batch, on_one_rank).wait()
    assert caught.value.rank in (0, 1)
    assert live.actor.run(fingerprint) == before


@each(
    "loss, named",
    [
        (lambda out, b: out.log_probs.mean(), "one number per response token"),
        (lambda out, b: 0.0, "one number per response token"),
        (lambda out, b: out.log_probs.detach(), "does not depend on the model"),
    ],
)
def test_a_loss_of_the_wrong_kind_is_told_what_it_must_return(live, loss, named):
    with refuses(hf.OptionError, named):
        live.actor.update(live.session.batch(prompt=[[1, 2], [3]], response=[[3, 4], [4, 5, 6]]), loss).wait()
