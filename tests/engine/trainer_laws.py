"""The laws of the trainer, for the layouts and models of a module's ``SWEEP``: plain transformers and PyTorch are the reference."""

from functools import partial

import numpy as np
import pytest
import torch
from layout_sweep import of
from trainer_harness import (
    EMPTY_ROW,
    LEARNING_RATE,
    NUM_ROWS,
    Harness,
    by_row,
    check_inference,
    equal,
    farthest,
    is_critic,
    loss_of,
    policy_loss,
    reference_model_at,
    value_loss,
    write_references,
)
from whole_state import set_state, state_of

from hfsdk.core.table import Ragged, Table

COMPARED = ("gradients", "saving")
"""Checks whose findings on one rank are what other layouts must find."""
MODELS = {
    "untied": "Llama", "tied": "Llama", "critic": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen2 critic": "Qwen2",
    "llama3": "Llama", "qwen3 critic": "Qwen3", "windowed mistral": "Mistral",
}  # fmt: skip
"""Name -> family: bias and norms of queries and keys, stretched positions, a window; at tp4 two kv heads are shared."""
TIED = ("tied", "qwen3", "windowed mistral")
TWO_SPLITS = ("untied", "tied", "critic", "qwen3 critic")
"""Models whose gradient is taken in many micro-batches and in one."""
FEW = 60
"""Tokens of a micro-batch where two or three of them do; most checks have many, of 24."""

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
"""With 16 positions of before, rows of up to 24 tokens have waves of all three kinds."""


def sequence_loss(out, b):
    return -b.segment_sum(out.log_probs) * b["weight"]


def with_mode(loss, mode, fixed_length=None):
    loss = partial(loss)
    loss.aggregation, loss.fixed_length = mode, fixed_length
    return loss


def other_losses():
    modes = {"sequence_mean": None, "sequence_sum": None, "fixed_length": 16}
    return {mode: with_mode(policy_loss, mode, n) for mode, n in modes.items()} | {"per_sample": sequence_loss}


# ---- the reference: transformers, one row at a time, no padding


def make_folders(root, models):
    import transformers

    folders = {}
    for name in models:
        family, few_kv_heads = MODELS[name], name == "tied" or MODELS[name] != "Llama"
        more = {"rope_parameters": LLAMA3_ROPE} if name == "llama3" else {"sliding_window": 6} if "windowed" in name else {}
        config = getattr(transformers, f"{family}Config")(
            vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=2 if few_kv_heads else 4, head_dim=32, max_position_embeddings=64,
            tie_word_embeddings=name in TIED, rms_norm_eps=1e-5, num_labels=1, pad_token_id=0, **more,
        )  # fmt: skip
        torch.manual_seed(list(MODELS).index(name))
        model = getattr(transformers, family + ("ForSequenceClassification" if is_critic(name) else "ForCausalLM"))(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                else:
                    parameter.mul_(8)
        folders[name] = str(root / name)
        model.save_pretrained(folders[name])
    return folders


def make_case(root, models):
    """Make folders, rows (old_log_probs close to the untied model's) and reference results."""
    folders = make_folders(root, models)
    references, gradients = write_references(folders, root, other_losses())
    assert references["untied"].columns["logits"].std() >= 1
    return {"root": root, "folders": folders, "references": references, "gradients": gradients}


@pytest.fixture(scope="module")
def case(tmp_path_factory, request):
    models = set().union(*request.module.SWEEP.models.values())
    return make_case(tmp_path_factory.mktemp("models"), [name for name in MODELS if name in models])


# ---- what runs in the processes


def tied_of(h):
    return next(name for name in h.models if name in TIED)


def critic_of(h):
    return next(name for name in h.models if is_critic(name))


def check_gradients(h):
    found = {}
    for name in h.models:
        trainer, loss = h.trainer(name), loss_of(name)
        temperature = 1.0 if is_critic(name) else h.rows()["temperature"]
        for max_tokens in (24, 1000) if name in TWO_SPLITS else (40,):
            trainer.zero_grad()
            metrics = trainer.forward_backward(h.rows(name), h.plan(max_tokens=max_tokens)[0], loss, temperature)
            norm = sum(g.double().pow(2).sum() for g in h.gradients[name][1].values()) ** 0.5
            norm_off = trainer.grad_norm() / float(norm) - 1
            off = h.difference(trainer.gradients(), h.gradients[name][1])
            found[name, max_tokens] = (off, metrics["loss"] - h.gradients[name][0], norm_off)
            forward_only = trainer.compute_loss(h.rows(name), h.plan(max_tokens=max_tokens)[0], loss, temperature)
            assert abs(forward_only - metrics["loss"]) < 1e-6
            if name == "untied":
                found["metrics", max_tokens] = metrics
    return found


def check_recompute(h):
    """Gradients with activations computed again, against those kept; and that something is indeed computed again."""
    found = {}
    for name in [name for name in ("untied", "qwen3", "critic", "qwen3 critic", "windowed mistral") if name in h.models]:
        gradients, calls = {}, {}
        for how in ("", "selective", "full"):
            trainer = h.trainer(name, recompute=how)
            counter = calls[how] = []
            mlp = trainer.model.decoder.layers[0].mlp
            mlp.register_forward_hook(lambda *_, counter=counter: counter.append(1))
            temperature = 1.0 if is_critic(name) else h.rows()["temperature"]
            trainer.forward_backward(h.rows(name), h.plan()[0], loss_of(name), temperature)
            gradients[how] = trainer.gradients()
        off = [h.difference(gradients[how], gradients[""]) for how in ("selective", "full")]
        found[name] = off, [len(calls[how]) / len(calls[""]) for how in ("selective", "full")]
    return found


def check_aggregations(h):
    trainer, found = h.trainer("untied"), {}
    for mode, loss in other_losses().items():
        trainer.zero_grad()
        rows = h.rows()
        trainer.forward_backward(rows, h.plan(max_tokens=30)[0], loss, rows["temperature"])
        found[mode] = h.difference(trainer.gradients(), h.gradients[mode][1])
    # three times the same gradient, looked at in between: what was summed over ranks must not be summed again
    for name in h.models:
        trainer, temperature = h.trainer(name), 1.0 if is_critic(name) else h.rows()["temperature"]
        for look in (trainer.grad_norm, trainer.gradients, trainer.grad_norm):
            trainer.forward_backward(h.rows(name), h.plan(max_tokens=FEW)[0], loss_of(name), temperature)
            look()
        thrice = {n: 3 * g for n, g in h.gradients[name][1].items()}
        found["thrice", name] = h.difference(trainer.gradients(), thrice)
    return found


def check_update(h):
    """Steps, learning rates, progress, spans, and that halves do what update does."""
    tied = tied_of(h)
    trainer, halves = h.trainer(tied), h.trainer(tied)
    rows, plan = h.rows(tied), h.plan(mini_batches=2, epochs=2)
    metrics = trainer.update(rows, plan, policy_loss, rows["temperature"])
    for mini in plan:
        halves.forward_backward(rows, mini, policy_loss, rows["temperature"])
        halves.step()
    same = all(torch.equal(a, halves.local_tensors()[n]) for n, a in trainer.local_tensors().items())
    names = {span.name for span in trainer.recorder.take()[0]}
    return metrics, trainer.num_updates, trainer.recorder.progress, same, sorted(names)


def check_state(h):
    import pickle

    trainer, rows, plan = h.trainer("untied"), h.rows(), h.plan(mini_batches=2, max_tokens=FEW)
    trainer.update(rows, plan, policy_loss)
    state = pickle.loads(pickle.dumps(state_of(trainer)))
    first = trainer.update(rows, plan, policy_loss)
    after = state_of(trainer)
    set_state(trainer, state)
    back = trainer.num_updates
    again = trainer.update(rows, plan, policy_loss)
    other = h.trainer("untied")
    set_state(other, state)
    other.update(rows, plan, policy_loss)
    set_state(trainer, state)
    fresh = state_of(h.trainer("untied"))
    same = [equal(after, state_of(other)), equal(state, state_of(trainer)), first == again, not equal(fresh, state)]
    set_state(trainer, fresh)
    return [*same, equal(fresh, state_of(trainer)), back == 2]


def check_distributed(h):
    """The distributed optimizer does what the plain one does, holds less, and reads what it wrote and the other way round."""
    found = {}
    for name, dtype in ((tied_of(h), "fp32"), ("untied", "bf16"), (critic_of(h), "bf16")):
        plain, shared = (h.trainer(name, dtype=dtype, optimizer=h.adamw(distributed=d)) for d in (False, True))
        rows, plan, loss = h.rows(name), h.plan(mini_batches=2, epochs=2, max_tokens=FEW), loss_of(name)
        fresh = [equal(state_of(plain), state_of(shared))]
        norms = [[m["grad_norm"] for m in trainer.update(rows, plan[:2], loss)] for trainer in (plain, shared)]
        states = [state_of(trainer) for trainer in (plain, shared)]
        memory = [trainer.memory_bytes()["optimizer"] for trainer in (plain, shared)]
        set_state(plain, states[1])
        swapped = [equal(state_of(plain), states[1])]
        set_state(shared, states[0])
        swapped.append(equal(state_of(shared), states[0]))
        set_state(shared, state_of(plain))
        for trainer in (plain, shared):
            trainer.update(rows, plan[2:], loss)
        apart = [farthest(*states), farthest(state_of(plain), state_of(shared))]
        found[name, dtype] = {"exact": fresh + swapped, "norms": norms, "memory": memory, "apart": apart}
    return found


def check_refusals(h):
    """Losses that are not finite, raise, or are cancelled: every rank stops alike and nothing changes."""
    from hfsdk.engine.process.safepoint import SafePoint
    from hfsdk.engine.training.trainer import NonFiniteRows

    trainer, rows, plan = h.trainer("untied"), h.rows(), h.plan(mini_batches=2)
    trainer.update(rows, plan[:1], policy_loss)
    before, found = state_of(trainer), {}

    def outcome(loss, safe, minis=plan[1:]):
        try:
            trainer.update(rows, minis, loss, safe=safe)
        except Exception as caught:
            name, text = type(caught).__name__, str(caught)
            rows_hit = caught.row_ids if isinstance(caught, NonFiniteRows) else None
            return name, text, rows_hit, equal(before, state_of(trainer)), trainer.grad_norm()
        return ("finished",)

    never = SafePoint(lambda: False)
    bad = next(row for row in plan[1].rows if row != EMPTY_ROW)

    def one_row(out, b):
        factor = torch.where(b.row_ids == bad, torch.tensor(float("nan")), torch.tensor(1.0))
        return out.log_probs * b.expand(factor)

    def infinite_gradient(out, b):
        return (out.log_probs - out.log_probs.detach()).abs().sqrt() + out.log_probs

    def raising(out, b):
        if h.groups.rank == h.mesh.layout.size - 1:
            raise KeyError("the user's own mistake")
        return out.log_probs

    def wrong_shape(out, b):
        return out.log_probs.mean()

    def without_model(out, b):
        return b["advantages"]

    found["one row"], found["bad"] = outcome(one_row, never), bad
    found["gradient"] = outcome(infinite_gradient, never)
    found["raising"] = outcome(raising, never)
    found["shape"] = outcome(wrong_shape, never)
    found["no gradient"] = outcome(without_model, never)
    found["column"] = outcome(lambda out, b: out.log_probs * b["nothing"], never)
    calls = []

    def asked():  # only the last rank is asked, in the second mini-batch
        calls.append(1)
        first = -(-plan[0].passes.num_micro_batches // trainer.pipeline.chunk) + 1
        return h.groups.rank == h.mesh.layout.size - 1 and len(calls) > first

    steps = trainer.num_updates
    found["cancelled"] = outcome(policy_loss, SafePoint(asked), plan)[:3]
    found["steps after cancel"] = trainer.num_updates - steps
    found["infer"] = infer_outcome(h, trainer)
    return found


def infer_outcome(h, trainer):
    plan, micro_batches = h.passes()
    rows = h.mine(h.rows(), plan)
    found = []
    columns = {n: rows[n] for n in rows}
    if h.groups.dp_rank == h.groups.dp_size - 1:
        columns["prompt"] = Ragged.from_lengths(np.zeros(0, np.int64), [0] * rows.num_rows)
    for table, parts in ((Table(columns, rows.row_ids), micro_batches), (rows, micro_batches[:-1])):
        try:
            trainer.log_probs(table, parts)
        except Exception as caught:
            found.append((type(caught).__name__, str(caught)))
    return found


def check_saving(h):
    from hfsdk.engine.training.megatron_folder import load_folder

    found = {}
    for name in h.models:
        trainer = h.trainer(name)
        trainer.update(h.rows(name), h.plan(), loss_of(name))
        folder = h.root / f"saved {name} {h.mesh.layout}{' zero' * h.distributed}"
        trainer.save_folder(folder)
        before = {n: t.clone() for n, t in trainer.local_tensors().items()}
        for tensor in trainer.local_tensors().values():
            tensor.fill_(7)
        read = load_folder(trainer.model, trainer.spec, h.groups, folder)
        padding_aside = all(torch.equal(a, before[n]) for n, a in trainer.local_tensors().items())
        found[name] = (str(folder), trainer.weights(), padding_aside, read)
    return found


def check_bf16(h):
    plan, micro_batches = h.passes()
    rows, minis = h.mine(h.rows(), plan), h.plan(max_tokens=FEW)
    trainer = h.trainer("untied", dtype="bf16")
    out = trainer.log_probs(rows, micro_batches, rows["temperature"]).get("log_probs", ())
    metrics = trainer.update(h.rows(), h.plan(mini_batches=2), policy_loss)
    state = state_of(trainer)
    trainer.update(h.rows(), minis, policy_loss)
    after = state_of(trainer)
    set_state(trainer, state)
    trainer.update(h.rows(), minis, policy_loss)
    critic = h.trainer(critic_of(h), dtype="bf16")
    critic_metrics = critic.update(h.rows(), minis, value_loss)
    if h.groups.is_last_stage:
        assert critic.model.output_layer.weight.dtype == torch.float32
    log_probs = dict(zip(rows.row_ids.tolist() if len(out) else (), out, strict=True))
    return log_probs, metrics, equal(after, state_of(trainer)), critic_metrics, trainer.memory_bytes()


def check_offload(h):
    """The same numbers, bit for bit, and nothing on the device between calls."""
    found, minis = {}, h.plan(max_tokens=FEW)
    for dtype in ("fp32", "bf16"):
        stays = h.trainer("untied", dtype=dtype)
        leaves = h.trainer("untied", dtype=dtype, optimizer=h.adamw(offload=True))
        for trainer in (stays, leaves):
            trainer.update(h.rows(), h.plan(mini_batches=2, max_tokens=FEW), policy_loss)
        middle = state_of(leaves)
        leaves.update(h.rows(), minis, policy_loss)
        set_state(leaves, middle)  # and once more
        for trainer in (stays, leaves):
            trainer.update(h.rows(), minis, policy_loss)
        found[dtype] = equal(state_of(stays), state_of(leaves)), stays.memory_bytes(), leaves.memory_bytes()
    found["between calls"] = {(dtype, alone): in_halves(h, dtype, alone) for dtype, alone in (("fp32", True), ("bf16", False))}
    plan, micro_batches = h.passes()
    rows = h.mine(h.rows(), plan)
    frozen = h.trainer("untied", optimizer=None, offload=True)
    size = frozen.memory_bytes()["weights"]
    with frozen.on_device("weights"):
        out = frozen.log_probs(rows, micro_batches)
        there = frozen.memory_bytes()["weights"]
    expected = h.trainer("untied", optimizer=None).log_probs(rows, micro_batches)
    same = all(np.array_equal(out[name].flat, expected[name].flat) for name in expected) and out.keys() == expected.keys()
    return found, (size, there, same)


def in_halves(h, dtype, alone):
    """Updates whole and in halves with everything in host memory between the calls: AdamW's state for the step ``alone`` or not."""
    stays = h.trainer("untied", dtype=dtype)
    leaves = h.trainer("untied", dtype=dtype, offload=True, optimizer=h.adamw(offload=alone))
    rows, minis, seen = h.rows(), h.plan(mini_batches=2, max_tokens=FEW), {}
    for trainer in (stays, leaves):
        said, held = [], []

        def call(method, *args, trainer=trainer, said=said, held=held):
            with trainer.during(method):
                said.append(getattr(trainer, method)(*args))
            held.append((trainer.memory_bytes(), trainer.offloaded_bytes()))

        call("update", rows, minis, policy_loss)
        call("forward_backward", rows, minis[0], policy_loss)
        call("grad_norm")
        call("forward_backward", rows, minis[1], policy_loss)
        call("compute_loss", rows, minis[0], policy_loss)
        middle = state_of(trainer)
        call("step")
        call("update", rows, minis, policy_loss)
        set_state(trainer, middle)
        call("update", rows, minis, policy_loss)
        seen[trainer] = said, state_of(trainer), held
    (said, state, held), (said_too, state_too, held_too) = seen[stays], seen[leaves]
    return said == said_too and equal(state, state_too), held, held_too


def check_errors(h):
    """Mistakes at construction, frozen roles, reward heads, and groups given back."""
    from hfsdk.core.layout import Layout
    from hfsdk.engine.training.megatron_folder import load_folder
    from hfsdk.engine.training.megatron_groups import RoleGroups
    from hfsdk.engine.training.megatron_model import build_model

    def said(action):
        try:
            action()
        except Exception as caught:
            return type(caught).__name__, str(caught)

    trainer = h.trainer("untied")
    critic_folder = h.root / critic_of(h)  # has no lm_head
    frozen = h.trainer("untied", optimizer=None)
    world = h.mesh.layout.size
    found = {
        "no weights": said(lambda: load_folder(trainer.model, trainer.spec, h.groups, h.root)),
        "other weights": said(lambda: load_folder(trainer.model, trainer.spec, h.groups, critic_folder)),
        "frozen": said(lambda: frozen.update(h.rows(), h.plan(), policy_loss)),
        "head": said(lambda: frozen.values(h.rows(), [])),
        "head name": said(lambda: build_model(trainer.spec, h.groups, "token", "fp32", 64)),
        "size": said(lambda: RoleGroups(Layout(dp=world + 1).mesh())),
    }
    reward = [h.trainer("untied", head="scalar", kind="reward", optimizer=None, seed=n) for n in (1, 1, 2)]
    critic = h.trainer("untied", head="scalar", kind="critic")
    if h.groups.is_last_stage:
        heads = [r.local_tensors()["output_layer.weight"].clone() for r in reward]
        found["reward heads"] = (torch.equal(heads[0], heads[1]), torch.equal(heads[0], heads[2]), heads[0])
        found["critic head"] = bool(critic.local_tensors()["output_layer.weight"].any())
    assert RoleGroups(h.mesh).tp is h.groups.tp, "the next role of the same layout has the same groups"
    return found


CHECKS = {
    "inference": check_inference, "gradients": check_gradients, "aggregations": check_aggregations,
    "update": check_update, "state": check_state, "refusals": check_refusals, "saving": check_saving,
    "bf16": check_bf16, "offload": check_offload, "errors": check_errors, "distributed": check_distributed,
    "recompute": check_recompute,
}  # fmt: skip
HARNESS = Harness


# ---- the laws


@of("inference")
def test_outputs_are_those_of_transformers(case, results, layout):
    ranks, off = results(layout, "inference"), {}
    for model in ranks[0]:
        found = [rank[model] for rank in ranks]
        assert found[-1].keys() == ({"values", "scores"} if is_critic(model) else {"log_probs", "entropy"}), model
        for column in found[-1]:
            mine = by_row([rank.get(column, {}) for rank in found], NUM_ROWS)
            expected = case["references"][model].columns[column].detach().numpy()
            assert mine.shape == expected.shape, (model, column)
            off[model, column] = np.abs(mine - expected).max()
    assert {key: apart for key, apart in off.items() if not apart < 1e-4} == {}


@of("gradients")
def test_gradient_is_that_of_plain_pytorch(results, layout):
    first, *others = results(layout, "gradients")
    for key, found in first.items():
        if key[0] != "metrics":
            off, loss_off, norm_off = found
            assert off < 1e-5, (key, off)
            assert abs(loss_off) < 1e-5
            assert abs(norm_off) < 1e-5
    for other in others:
        assert other["metrics", 24] == first["metrics", 24]


@of("gradients")
def test_metrics_do_not_depend_on_the_split(results, layout):
    (small, large, alone) = (
        results(name, "gradients")[0]["metrics", n] for name, n in ((layout, 24), (layout, 1000), ("tp1", 1000))
    )
    for name in ("loss", "clip", "clips", "ratio_max", "num_tokens", "num_samples"):
        assert small[name] == pytest.approx(large[name], rel=1e-5)
        assert small[name] == pytest.approx(alone[name], rel=1e-4)
    assert 0 < alone["clip"] < 1 < alone["ratio_max"]


@of("recompute")
def test_recompute_does_not_change_the_gradient(results, layout):
    ranks = results(layout, "recompute")
    for name, (apart, _) in ranks[0].items():
        assert max(apart) <= 1e-6, (name, apart)
    assert all(calls == [2, 2] for rank in ranks for _, calls in rank.values())


@of("aggregations")
def test_aggregations(results, layout):
    for mode, off in results(layout, "aggregations")[0].items():
        assert off < 1e-5, (mode, off)


@of("update")
def test_update(results, layout):
    ranks = results(layout, "update")
    metrics, num_updates, progress, same, spans = ranks[0]
    assert all(rank[0] == metrics for rank in ranks)
    assert num_updates == 4
    assert [m["lr"] for m in metrics] == pytest.approx([LEARNING_RATE * n / 4 for n in (1, 2, 3, 4)])
    assert [(m["epoch"], m["mini_batch"]) for m in metrics] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert progress["micro_batches"] == progress["total"] > 4
    assert same
    assert spans == ["agree"] * (layout != "tp1") + ["backward", "forward", "optimizer"] + ["wait"] * ("pp2" in layout)


@of("state")
def test_state_round_trip_is_exact(results, layout):
    assert all(all(rank) for rank in results(layout, "state"))


@of("distributed")
def test_distributed_optimizer_is_the_plain_one_with_less_memory(results, layout):
    ranks = results(layout, "distributed")
    for key in ranks[0]:
        found = [rank[key] for rank in ranks]
        assert all(all(one["exact"]) for one in found)
        plain, shared = found[0]["norms"]
        assert shared == pytest.approx(plain, rel=1e-5)
        assert sum(one["memory"][1] for one in found) == pytest.approx(sum(one["memory"][0] for one in found) / 2, rel=1e-3)
        for one in found:
            for apart in one["apart"]:
                assert apart["step"] == 0, key
                assert apart["main"] <= 1e-4, (key, apart)
                assert apart["exp_avg"] <= 1e-3, (key, apart)
                assert apart["exp_avg_sq"] <= 1e-3, (key, apart)


@of("refusals")
def test_non_finite_steps_are_refused_on_every_rank(results, layout):
    for rank in results(layout, "refusals"):
        assert rank["one row"] == ("NonFiniteRows", f"the loss of rows [{rank['bad']}] is not finite", [rank["bad"]], True, 0)
        assert rank["gradient"] == ("NonFiniteRows", "the gradient is not finite", [], True, 0)


@of("refusals")
def test_a_raising_loss_stops_every_rank(results, layout):
    *others, last = [rank["raising"] for rank in results(layout, "refusals")]
    assert last[0] == "KeyError"
    assert all(other[0] == "PeerFailed" for other in others)
    assert all(one[3:] == (True, 0) for one in (*others, last))
    for case, kind in {"shape": "OptionError", "no gradient": "OptionError", "column": "ColumnError"}.items():
        names = [rank[case][0] for rank in results(layout, "refusals")]
        assert names[-1] == kind  # the last pipeline stage calls the loss; the stages before it stop with it
        assert set(names[:-1]) <= {kind, "PeerFailed"} if "pp2" in layout else {kind}
    assert "one number per response token" in results(layout, "refusals")[-1]["shape"][1]


@of("refusals")
def test_cancel_keeps_finished_steps(results, layout):
    for rank in results(layout, "refusals"):
        assert rank["cancelled"][0] == "Cancelled"
        assert rank["steps after cancel"] == 1


@of("refusals")
def test_wrong_rows_are_named_on_their_rank(results, layout):
    ranks = [rank["infer"] for rank in results(layout, "refusals")]
    assert "prompt of 0 tokens" in ranks[-1][0][1]
    for case in zip(*ranks, strict=True):
        names = {name for name, _ in case}
        assert "OptionError" in names
        assert names <= {"OptionError", "PeerFailed"}


@of("saving")
def test_saved_folder_is_read_by_transformers(case, results, layout):
    found = results(layout, "saving")
    for model in found[0]:
        ranks = [rank[model] for rank in found]
        folder, weights, *_ = ranks[0]
        assert all(rank[2] and rank[3] == is_critic(model) for rank in ranks), model
        assert all(rank[1] is None for rank in ranks[1:]), model
        loaded = dict(reference_model_at(folder, model).named_parameters())
        assert set(loaded) == set(weights), model
        assert [n for n in weights if not torch.equal(loaded[n], weights[n])] == [], model
        changed = max((loaded[n] - p).abs().max() for n, p in case["references"][model].model.named_parameters())
        assert changed > 1e-4, model


@of("saving")
def test_updated_weights_agree_over_layouts(results, layout):
    """One AdamW step of lr 2.5e-4: near-zero gradients may flip their sign, the rest agrees."""
    for model in results(layout, "saving")[0]:
        alone, mine = (results(name, "saving")[0][model][1] for name in ("tp1", layout))
        off = torch.cat([(alone[n] - mine[n]).flatten() for n in alone])
        assert off.abs().max() <= 6e-4, model
        assert (off.abs() > 1e-6).float().mean() < 0.01, model


@of("bf16")
def test_bf16_trains_with_fp32_masters(case, results, layout):
    ranks = results(layout, "bf16")
    mine = by_row([rank[0] for rank in ranks], NUM_ROWS)
    expected = case["references"]["untied"].columns["log_probs"].detach().numpy()
    assert np.abs(mine - expected).mean() < 0.2
    for _, metrics, round_trip, critic, memory in ranks:
        assert all(np.isfinite([m["loss"], m["grad_norm"]]).all() for m in (*metrics, *critic))
        assert round_trip
        sharers = 2 if layout.endswith(" zero") else 1
        # master, exp_avg, exp_avg_sq: 12 bytes to 2; shards have padding
        assert memory["optimizer"] == pytest.approx(6 * memory["weights"] / sharers, rel=0.02)
        assert memory["gradients"] == pytest.approx(2 * memory["weights"], rel=0.0 if sharers == 1 else 0.02)


@of("offload")
def test_what_is_offloaded_leaves_the_device_and_changes_nothing(results, layout):
    for found, (frozen_bytes, during_its_call, same) in results(layout, "offload"):
        for exact, stays, leaves in (found[dtype] for dtype in ("fp32", "bf16")):
            assert exact
            assert stays["optimizer"] > 0 == leaves["optimizer"]
            assert (leaves["weights"], leaves["gradients"]) == (stays["weights"], stays["gradients"])
        assert frozen_bytes == 0 < during_its_call
        assert same


@of("offload")
def test_a_trained_role_leaves_the_device_between_its_calls_and_changes_nothing(results, layout):
    for found, _ in results(layout, "offload"):
        for exact, stays, leaves in found["between calls"].values():
            assert exact
            assert all(not host for _, host in stays)
            assert all(set(device.values()) == {0} for device, _ in leaves)
            for number, ((full, _), (_, host)) in enumerate(zip(stays, leaves, strict=True)):
                gradients = full["gradients"] if number in (1, 2, 3, 4) else 0  # between forward_backward and step they are kept
                assert host == full["weights"] + gradients + full["optimizer"]


@of("errors")
def test_mistakes_are_explained(results, layout, request):
    ranks = results(layout, "errors")
    for found in ranks:
        assert found["no weights"][0] == found["other weights"][0] == "ModelNotFoundError"
        assert "neither model.safetensors nor" in found["no weights"][1]
        assert "lm_head.weight" in found["other weights"][1]
        assert found["frozen"][0] == found["head"][0] == found["head name"][0] == "OptionError"
        assert found["size"][0] == "LayoutError"
        assert f"the pool has {request.module.SWEEP.layouts[layout]} workers" in found["size"][1]


@of("errors")
def test_new_scalar_heads(results, layout):
    ranks = results(layout, "errors")
    for found in (rank for rank in ranks if "reward heads" in rank):
        same_seed, other_seed, head = found["reward heads"]
        assert same_seed
        assert not other_seed
        assert head.std() == pytest.approx(65**-0.5, rel=0.2)
        assert torch.equal(head, ranks[-1]["reward heads"][2])
        assert not found["critic head"]
