"""The wording of each class of error, once: what was asked, what exists, what to do. Elsewhere tests name classes and values.

Each text comes from a call that a user makes; what only workers raise is worded by the product's own function, or handed to the
controller by a scripted runtime.
"""

from __future__ import annotations

import inspect
import json
import pickle
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import hfsdk as hf
from hfsdk.assets import model_folder
from hfsdk.core import errors
from hfsdk.engine.calls.replies import Reply, errors_of
from hfsdk.engine.worker.role_engine import why_refused
from hfsdk.kept import attach
from hfsdk.kept import requests as k
from tests.session.scripted import ScriptedRuntime


def loss(out, b):
    return -out.log_probs


def one_short(completions):
    return [0.0] * (len(completions) - 1)


def half(table):
    return {"half": table["number"]}


@pytest.fixture
def it(tmp_path, monkeypatch):
    """A simulated session (``s``), and one whose workers do as they are told (``real``), in an empty folder."""
    monkeypatch.chdir(tmp_path)
    runtime = ScriptedRuntime()
    with hf.Session.simulated("1x4 A100-80GB") as session, hf.Session(runtime=runtime) as real:
        yield SimpleNamespace(s=session, actor=session.actor("tiny"), real=real, runtime=runtime, patch=monkeypatch)


# -- before a call


def unsupported(it):
    Path("mamba").mkdir()
    config = json.loads((Path(model_folder("tiny")) / "config.json").read_text())
    Path("mamba", "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    it.s.actor("mamba")


def too_large(it):
    with hf.Session.simulated("1x1 A100-80GB") as session:
        session.actor("qwen2.5-7b").generate([[1]], max_new_tokens=4)


def stale(it):
    before = it.s.snapshot("before")
    batch = it.actor.generate([[1]], max_new_tokens=4)
    it.actor.update(batch, loss)
    later = it.actor.generate([[1]], max_new_tokens=4)
    it.s.rewind(before)
    it.actor.update(later, loss)


def closed(it):
    it.s.close()
    it.actor.generate([[1]])


def in_use(it):
    """The server's answer to a kernel elsewhere."""

    class Keeper:
        name, near = "exp7", False

        def ask(self, request):
            return Reply(k.SessionTaken(k.Kernel(4711, "laptop", 0.0), 2.5, seen=False))

        def leave(self):
            pass

    it.patch.setattr(attach, "RemoteSession", lambda name, token, version: Keeper())
    hf.Session.attach("hfsdk://localhost:8790/exp7", token="secret")


def no_folder(it):
    it.actor.generate([[1]]).wait()
    it.s.trace.to_perfetto("nowhere/trace.json")


# -- while a call ran


def failed(it):
    it.real.batch(number=[1.0]).map(half, ["number"], ["twice"]).wait()


def scored(it):
    it.real.actor("tiny")
    batch = it.real.batch(prompt=[[1], [2], [3]], response=[[3], [4], [5]])
    return it.real.reward(one_short).compute_scores(batch)


def depends(it):
    scored(it).reduce(half, reads=["scores"]).wait()


def not_finite(it):
    it.runtime.results["num_updates"] = 0
    it.runtime.failing["update"] = hf.NonFiniteLossError(why_refused([3], "actor", None, 0), role="actor", method="update", rank=0)
    actor = it.real.actor("tiny")
    actor.update(actor.generate([[1]]), loss).wait()


def mismatched(it):
    pytest.importorskip("torch")
    from hfsdk.engine.weights import fingerprints
    from hfsdk.resharding.proof import Proof, WrongBox

    box = WrongBox("model.norm.weight", (0,), (64,), 0, 1, 1 << 40, 2 << 40)
    raise fingerprints.mismatch("actor's rollout", Proof((1, 0), 0, (box,)), fingerprints.MOVE_AGAIN)


def died(it):
    it.runtime.failing["update"] = hf.WorkerDiedError(
        "the worker of device 1 (pid 4711) ended or hangs: the actor died.", role="actor", method="update", rank=1
    )
    actor = it.real.actor("tiny")
    batch = actor.generate([[1]]).wait()
    actor.update(batch, loss).wait()


def lost(it):
    actor = it.real.actor("tiny")
    batch = actor.generate([[1]]).wait()
    with pytest.raises(hf.WorkerDiedError):
        died(it)
    batch["response"]


def cancelled(it):
    it.runtime.hold("generate")
    actor = it.real.actor("tiny")
    actor.generate([[1]])
    second = actor.generate([[2]])
    second.cancel()
    second.wait()


def foreign(it):
    """An error of a class that this side does not have."""
    raise errors_of(type("OwnError", (Exception,), {})("no more paper"))[0]


def disagree(it):
    it.runtime.columns |= {"old_log_probs": -1.0, "rollout_log_probs": -1.5}
    actor = it.real.actor("tiny")
    it.real.reference(actor), it.real.reward(lambda completions: [0.0] * len(completions))
    prompts = it.real.prompts([[1], [2]], batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf.InvariantWarning)
        it.real.train(hf.GRPO(n=2, max_new_tokens=4), prompts, steps=1, progress=False)


TEXTS = [
    (hf.HfsdkError, foreign, "OwnError: no more paper"),
    (
        hf.InvariantWarning,
        disagree,
        "rollout_gap of trainer and generating engine is 0.5 nats per token and 0.5 at most, where rounding in fp32 stays below "
        "0.0001 and 0.001: the samples are not the trainer's own. Look at the temperature, at weights that were changed by "
        "hand, at top-k or top-p; tis_cap=2.0 corrects what is left",
    ),
    (
        hf.LayoutError,
        lambda it: it.s.actor("tiny", train="tp3"),
        "tiny has 8 attention heads, 4 kv heads and an MLP of 704; tp must divide the heads and the MLP and divide, or be a "
        "multiple of, the kv heads (4): 1, 2, 4, 8; got tp=3.",
    ),
    (
        hf.PlacementError,
        lambda it: it.s.place({"actr": 4}),
        "the placement forgets actor; it places actr. Name every role. There is no role 'actr'; did you mean 'actor'?",
    ),
    (
        hf.DeviceMemoryError,
        too_large,
        """the declared roles do not fit; asked and existing bytes per device, in GB:
device 0 (A100-80GB, pool 'all'): asked #, exists 80.00, too much by #
 role weights gradients optimizer rollout_weights kv_cache activations logits temporaries
 actor # # # # # # # #
 process #
 asked = all that stays, + actor's # while it generates, + process
 actor's rollout sleeps while it does not generate: its # do not stay
What helps, most first: a larger tp or pp, or more devices in this pool; lora=hf.LoRA(rank=16), which trains adapters alone; """
        "optimizer=AdamW(offload=True); dtype='bf16'; micro_batch_tokens below 2048; recompute='full'; offload=True for trained "
        "models.",
    ),
    (
        hf.ModelNotFoundError,
        lambda it: it.s.actor("./nowhere"),
        "asked for the model './nowhere'; there is no such folder. Models that need no hub: tiny, smollm2-135m-instruct; else a "
        "local folder or a hub id like owner/name.",
    ),
    (
        hf.UnsupportedModelError,
        unsupported,
        "HERE/mamba/config.json: mamba has architecture 'MambaForCausalLM'; hfsdk runs LlamaForCausalLM, "
        "LlamaForSequenceClassification, MistralForCausalLM, "
        "MistralForSequenceClassification, Phi3ForCausalLM, Phi3ForSequenceClassification, "
        "Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen3ForCausalLM, Qwen3ForSequenceClassification. Use a model of one "
        "of these architectures.",
    ),
    (
        hf.ColumnError,
        lambda it: it.actor.compute_log_probs(it.s.batch(prompt=[[1]])),
        "actor.compute_log_probs reads 'response' (token ids the actor produced, end-of-sequence token included), which the "
        "batch does not have; it has prompt. Call actor.generate(batch) first.",
    ),
    (hf.OptionError, lambda it: hf.PPO(clip=2), "PPO: clip must be a number above 0 and at most 1; got clip=2"),
    (
        hf.SimulatedValueError,
        lambda it: it.actor.generate([[1]])["response"],
        "column 'response' has no values: actor.generate was simulated and wrote shapes only. Its lengths and "
        "bytes are readable: batch.column_states(). To see values, run the same cells on a real session.",
    ),
    (
        hf.StaleBatchError,
        stale,
        "actor.update was given a batch of another branch: actor.generate (test_error_texts.py, line N) wrote response, "
        "rollout_log_probs, finish_reason, policy_version, temperature, group on branch 'main' with actor at update 1; the "
        "session is on branch 'before/1', which left that line at update 0. Generate anew, e.g. actor.generate(prompts[k]), or "
        "take the batch over as data of your own: batch.adopt().",
    ),
    (
        hf.SessionClosedError,
        closed,
        "the session is closed; make a new one with hf.Session(...). What this one measured stays readable: session.trace, "
        "dataflow, memory, history, placement, report(...), and columns of batches that were brought here before.",
    ),
    (
        hf.SessionInUseError,
        in_use,
        "process 4711 on laptop has the session 'exp7' (it was heard of 2.5 s ago). hf.Session.attach('exp7', take_over=True) "
        "takes it from there, and hf.Session.attach('exp7', read_only=True) only looks.",
    ),
    (
        hf.CheckpointError,
        lambda it: it.s.load("nowhere"),
        "HERE/nowhere holds no checkpoint (there is no session.json); give a folder that session.save(folder) finished",
    ),
    (
        hf.OutputError,
        no_folder,
        "cannot write the trace to nowhere/trace.json: No such file or directory; what was there is unchanged",
    ),
    (
        hf.CallError,
        failed,
        "session.map (started at test_error_texts.py, line N): half must return a dict with exactly the columns ['twice']; it "
        "returned ['half']",
    ),
    (
        hf.RewardFunctionError,
        lambda it: scored(it).wait(),
        "reward.compute_scores (started at test_error_texts.py, line N): one_short returned 2 scores for 3 completions; return "
        "one per completion",
    ),
    (
        hf.NonFiniteLossError,
        not_finite,
        "actor.update on rank 0 (started at test_error_texts.py, line N): the loss of samples [3] is NaN or infinite; this "
        "optimizer step was refused on every rank and the weights are as before it. Look at these samples with batch.inspect(i) "
        "and at the loss function.",
    ),
    (
        hf.WeightMismatchError,
        mismatched,
        "the weights of actor's rollout that arrived are not those that left: model.norm.weight[0:64] from rank 0 to rank 1: "
        "0x0000010000000000 left, 0x0000020000000000 is there. Run the call again: they are moved anew. If it comes back, look "
        "at the memory and the links of these ranks.",
    ),
    (
        hf.WorkerDiedError,
        died,
        "actor.update on rank 1 (started at test_error_texts.py, line N): the worker of device 1 (pid 4711) ended or hangs: the "
        "actor died. The pool is started again at the next call; actor comes back with its initial weights (0 updates lost).",
    ),
    (
        hf.LostColumnError,
        lost,
        "the columns response, rollout_log_probs, finish_reason, policy_version, temperature, group died with the worker that "
        "held them; run actor.generate again (test_error_texts.py, line N). the worker of device 1 (pid 4711) ended or hangs: "
        "the actor died. The pool is started again at the next call; actor comes back with its initial weights (0 updates "
        "lost).",
    ),
    (
        hf.CallCancelledError,
        cancelled,
        "actor.generate (started at test_error_texts.py, line N): cancelled before it started",
    ),
    (
        hf.DependencyError,
        depends,
        "session.reduce (started at test_error_texts.py, line N): its input reward.compute_scores failed: reward.compute_scores "
        "(started at test_error_texts.py, line N): one_short returned 2 scores for 3 completions; return one per completion",
    ),
]


def as_pinned(text):
    """Leave out what differs from run to run and from line to line: this folder, lines of this file, widths and estimates."""
    text = re.sub(r"line \d+", "line N", text.replace(str(Path.cwd()), "HERE"))
    if "bytes per device" not in text:
        return text
    return re.sub(" +", " ", re.sub(r"(?<!exists )\b\d+\.\d\d\b", "#", text))


@pytest.mark.parametrize(("error", "make", "text"), TEXTS, ids=[error.__name__ for error, *_ in TEXTS])
def test_a_message_says_what_was_asked_what_exists_and_what_to_do(it, error, make, text):
    with pytest.raises(error) as caught:
        make(it)
    assert type(caught.value) is error
    assert as_pinned(str(caught.value)) == text
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_every_class_of_error_has_its_text_and_its_place_in_the_tree():
    classes = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__}
    assert {error for error, *_ in TEXTS} == classes
    assert [cls.__name__ for cls in classes if cls.__name__ not in errors.__doc__] == []
    assert [cls.__name__ for cls in classes if getattr(hf, cls.__name__) is not cls] == []
