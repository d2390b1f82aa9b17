"""The parity law of the trainer: plain transformers and plain PyTorch are the reference, whatever the layout.

One spawn per world size runs all checks of its layouts; the tests then look at what came back.
"""

import json
from functools import partial

import numpy as np
import pytest
import torch
from spawn import SpawnError, run

from hfsdk.engine.microbatch import plan_pass, plan_update
from hfsdk.errors import ColumnError, OptionError
from hfsdk.table import Ragged, Table

LAYOUTS = {
    "tp1": 1, "tp2": 2, "dp2": 2, "pp2": 2, "tp2 dp2": 4, "tp2 pp2": 4, "pp2 dp2": 4, "tp4 for rollout 2": 4,
    "dp2 zero": 2, "tp2 dp2 zero": 4, "pp2 dp2 zero": 4,
}  # fmt: skip
"""Layout -> world size; "zero" has the distributed optimizer. The one for rollout 2 has its tp axis permuted, and more tp ranks
than the tied model has kv heads."""
LLAMA_MODELS = ("untied", "tied", "critic")
OTHER_MODELS = ("qwen2", "qwen3", "qwen2 critic", "llama3")
"""Other families, on some layouts only: bias and norms of queries and keys, stretched positions; at tp4 a kv head is shared."""
OTHER_LAYOUTS = ("tp1", "tp2", "pp2", "tp4 for rollout 2")
MODELS = LLAMA_MODELS + OTHER_MODELS



LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
"""With 16 positions of before, rows of up to 24 tokens have waves of all three kinds."""


def models_of(layout):
    return MODELS if layout in OTHER_LAYOUTS else LLAMA_MODELS


LEARNING_RATE = 1e-3
NUM_ROWS, EMPTY_ROW = 9, 4
FEW = 60
"""Tokens of a micro-batch where two or three of them do; most checks have many, of 24."""


def rows_table():
    rng = np.random.default_rng(0)
    response_lengths = rng.integers(1, 12, NUM_ROWS)
    response_lengths[EMPTY_ROW] = 0
    prompts = [rng.integers(0, 260, n) for n in rng.integers(1, 14, NUM_ROWS)]
    responses = [rng.integers(0, 260, n) for n in response_lengths]
    response = Ragged.of(responses, np.int64)

    def per_token(scale):
        return response.map((scale * rng.standard_normal(len(response.flat))).astype(np.float32))

    columns = {"prompt": Ragged.of(prompts, np.int64), "response": response, "advantages": per_token(1.0)}
    columns |= {"noise": per_token(0.3), "returns": per_token(1.0), "old_values": per_token(0.5)}
    columns["weight"] = rng.random(NUM_ROWS).astype(np.float32) + 0.5
    columns["temperature"] = np.array([1.0, 0.7, 0.0] * 3, np.float32)
    return Table(columns)


def policy_loss(out, b):
    """PPO's clipped surrogate with an entropy bonus and a k3 penalty, per token."""
    ratio = (out.log_probs - b["old_log_probs"]).exp()
    advantages = b["advantages"] * b.expand("weight")
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = (b["old_log_probs"] - out.log_probs).expm1() - (b["old_log_probs"] - out.log_probs)
    loss = loss - 0.05 * out.entropy + 0.1 * kl
    clipped = ((ratio - 1).abs() > 0.2).float()
    per_sample = b.segment_sum(clipped)
    return loss, {"clip": clipped, "clips": per_sample, "ratio_max": ratio.max(), "tokens": float(len(ratio))}


def value_loss(out, b):
    clipped = b["old_values"] + (out.values - b["old_values"]).clamp(-0.2, 0.2)
    return 0.5 * torch.maximum((out.values - b["returns"]) ** 2, (clipped - b["returns"]) ** 2)


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


def make_folders(root):
    import transformers

    folders = {}
    for name in MODELS:
        family = "Qwen2" if "qwen2" in name else "Qwen3" if "qwen3" in name else "Llama"
        config = getattr(transformers, f"{family}Config")(
            vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=2 if name == "tied" or family != "Llama" else 4, head_dim=32, max_position_embeddings=64,
            tie_word_embeddings=name in ("tied", "qwen3"), rms_norm_eps=1e-5, num_labels=1, pad_token_id=0,
            **({"rope_parameters": LLAMA3_ROPE} if name == "llama3" else {}),
        )  # fmt: skip
        torch.manual_seed(MODELS.index(name))
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


def is_critic(name):
    return name.endswith("critic")


def loss_of(name):
    return value_loss if is_critic(name) else policy_loss


def reference_model(folder):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if is_critic(folder) else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    model.model.embed_tokens.padding_idx = None  # token 0 is a token like any other: its row gets a gradient
    return model


class Reference:
    """Flat outputs over the response tokens of all rows, with the same loss functions as the trainer's."""

    def __init__(self, folder, rows, temperature):
        from hfsdk.engine.loss_io import ModelOutput, TokenBatch

        self.model = reference_model(folder)
        columns = {"log_probs": [], "entropy": [], "values": [], "scores": [], "logits": []}
        for i in range(rows.num_rows):
            prompt, response = (torch.from_numpy(rows.ragged(c)[i].copy()) for c in ("prompt", "response"))
            tokens = torch.cat([prompt, response])[None]
            before = slice(len(prompt) - 1, len(prompt) - 1 + len(response))
            if is_critic(folder):
                states = self.model.score(self.model.model(tokens).last_hidden_state)[0, :, 0]
                columns["values"].append(states[before])
                columns["scores"].append(states[-1:])
                continue
            logits = self.model(tokens).logits[0, before]
            columns["logits"].append(logits)
            log_probs = (logits / (temperature[i] or 1.0)).log_softmax(-1)
            columns["log_probs"].append(log_probs.gather(-1, response[:, None])[:, 0])
            columns["entropy"].append(-(log_probs.exp() * log_probs).sum(-1))
        self.columns = {name: torch.cat(parts) if parts else None for name, parts in columns.items()}
        names = ("log_probs", "entropy", "values")
        self.out = ModelOutput(**{name: self.columns[name] for name in names})
        self.token_batch = partial(TokenBatch, num_tokens=len(rows.ragged("response").flat), num_rows=rows.num_rows)

    def gradient(self, rows, loss):
        from hfsdk.engine.loss_io import aggregate

        b = self.token_batch(rows)
        returned = loss(self.out, b)
        each = returned[0] if isinstance(returned, tuple) else returned
        mode, fixed = getattr(loss, "aggregation", "token_mean"), getattr(loss, "fixed_length", None)
        per_sample = each.shape == (rows.num_rows,)
        total = each.sum() / rows.num_rows if per_sample else aggregate(each, b, mode, fixed_length=fixed)
        self.model.zero_grad()
        total.backward(retain_graph=True)
        named = self.model.named_parameters()
        return total.item(), {n: p.grad.clone() for n, p in named if p.grad is not None}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Folders, rows (old_log_probs close to the untied model's) and reference results."""
    root = tmp_path_factory.mktemp("models")
    folders, rows = make_folders(root), rows_table()
    references, gradients = {}, {}
    for name in MODELS:
        references[name] = Reference(folders[name], rows, rows["temperature"])
    policies = [name for name in MODELS if not is_critic(name)]
    old = {n: references[n].columns["log_probs"].detach().numpy() + rows["noise"].flat for n in policies}
    for name in MODELS:
        mine = rows.with_columns({"old_log_probs": rows.ragged("response").map(old.get(name, old["untied"]))})
        gradients[name] = references[name].gradient(mine, loss_of(name))
        if name == "untied":
            for mode, other in other_losses().items():
                gradients[mode] = references[name].gradient(mine, other)
    logits = references["untied"].columns["logits"]
    assert logits.std() >= 1
    torch.save({"old": old, "gradients": gradients}, root / "reference.pt")
    return {"root": root, "folders": folders, "references": references, "gradients": gradients}


# ---- what runs in the processes


class Harness:
    """The roles of one layout on this rank."""

    def __init__(self, layout, root, world_size):
        from hfsdk.engine.megatron_groups import RoleGroups, poison_parallel_state
        from hfsdk.layout import Layout

        self.models = models_of(layout)
        self.distributed = layout.endswith(" zero")
        layout, _, rollout_tp = layout.removesuffix(" zero").partition(" for rollout ")
        self.mesh = Layout.parse(layout).fill(world_size).mesh(int(rollout_tp or 1))
        self.groups = RoleGroups(self.mesh)
        self.root = root
        saved = torch.load(root / "reference.pt", weights_only=False)
        self.old, self.gradients = saved["old"], saved["gradients"]
        poison_parallel_state()

    def trainer(self, name, choices=None, **options):
        from hfsdk.engine.recorder import Recorder
        from hfsdk.engine.trainer import Trainer
        from hfsdk.roles import RoleSpec
        from hfsdk.spec import ModelSpec

        config = json.loads((self.root / name / "config.json").read_text())
        spec = ModelSpec.from_hf_config(config, name)
        options.setdefault("optimizer", self.adamw())
        options.setdefault("head", "scalar" if is_critic(name) else "lm")
        options.setdefault("kind", "critic" if is_critic(name) else "actor")
        role = RoleSpec(name=name, folder=str(self.root / name), model=spec, train=self.mesh.layout, **options)
        recorder = Recorder(device=self.groups.rank, rank=self.groups.rank)
        return Trainer(role, self.mesh, self.groups, recorder, choices)

    def adamw(self, distributed=None, **more):
        from hfsdk.roles import AdamW

        distributed = self.distributed if distributed is None else distributed
        return AdamW(lr=LEARNING_RATE, max_grad_norm=1.0, warmup_steps=4, distributed=distributed, **more)

    def rows(self, name="untied"):
        rows = rows_table()
        old = rows.ragged("response").map(self.old.get(name, self.old["untied"]))
        return rows.with_columns({"old_log_probs": old})

    def passes(self, max_tokens=24):
        rows = rows_table()
        total = rows.ragged("prompt").lengths + rows.ragged("response").lengths
        plan = plan_pass(total, self.groups.dp_size, max_tokens)
        return plan, plan.micro_batches[self.groups.dp_rank]

    def plan(self, mini_batches=1, max_tokens=24, epochs=1):
        rows = rows_table()
        response = rows.ragged("response").lengths
        total = rows.ragged("prompt").lengths + response
        return plan_update(total, response, self.groups.dp_size, epochs, mini_batches, max_tokens, seed=1)

    def mine(self, rows, plan):
        """This dp rank's rows in an order of their own."""
        return rows.take(sorted(plan.rows_of(self.groups.dp_rank), reverse=True))

    def difference(self, gradients, expected):
        """||g - g_ref|| / ||g_ref|| over the whole model, on rank 0."""
        if gradients is None:
            return None
        assert set(gradients) == set(expected), set(gradients) ^ set(expected)
        off = sum((gradients[n] - expected[n]).double().pow(2).sum() for n in expected)
        return float((off / sum(g.double().pow(2).sum() for g in expected.values())) ** 0.5)


def check_inference(h):
    plan, micro_batches = h.passes()
    rows = h.mine(h.rows(), plan)
    found = {}
    for name in h.models:
        frozen = h.trainer(name, optimizer=None)
        if is_critic(name):
            out = frozen.values(rows, micro_batches)
            out |= {column: scores[:, None] for column, scores in frozen.scores(rows, micro_batches).items()}
        else:
            out = frozen.log_probs(rows, micro_batches, rows["temperature"], entropy=True)
            assert all(column.dtype == np.float32 for column in out.values())
            assert bool(out) == h.groups.is_last_stage
        found[name] = {c: dict(zip(rows.row_ids.tolist(), out[c], strict=True)) for c in out}
        assert frozen.memory_bytes()["gradients"] == frozen.memory_bytes()["optimizer"] == 0
    return found


def check_gradients(h):
    found = {}
    for name in h.models:
        trainer, loss = h.trainer(name), loss_of(name)
        temperature = 1.0 if is_critic(name) else h.rows()["temperature"]
        for max_tokens in (24, 1000) if name in LLAMA_MODELS else (40,):
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
    for name in ("untied", "qwen3", "critic"):
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
    for name in [name for name in h.models if not is_critic(name)]:
        trainer = h.trainer(name)
        for look in (trainer.grad_norm, trainer.gradients, trainer.grad_norm):
            trainer.forward_backward(h.rows(name), h.plan(max_tokens=FEW)[0], policy_loss, h.rows()["temperature"])
            look()
        thrice = {n: 3 * g for n, g in h.gradients[name][1].items()}
        found["thrice", name] = h.difference(trainer.gradients(), thrice)
    return found


def check_update(h):
    """Steps, learning rates, progress, spans, and that halves do what update does."""
    trainer, halves = h.trainer("tied"), h.trainer("tied")
    rows, plan = h.rows("tied"), h.plan(mini_batches=2, epochs=2)
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
    state = pickle.loads(pickle.dumps(trainer.state()))
    first = trainer.update(rows, plan, policy_loss)
    after = trainer.state()
    trainer.load_state(state)
    back = trainer.num_updates
    again = trainer.update(rows, plan, policy_loss)
    other = h.trainer("untied")
    other.load_state(state)
    other.update(rows, plan, policy_loss)
    trainer.load_state(state)
    fresh = h.trainer("untied").state()
    same = [equal(after, other.state()), equal(state, trainer.state()), first == again, not equal(fresh, state)]
    trainer.load_state(fresh)
    return [*same, equal(fresh, trainer.state()), back == 2]


def check_distributed(h):
    """The distributed optimizer does what the plain one does, holds less, and reads what it wrote and the other way round."""
    found = {}
    for name, dtype in (("tied", "fp32"), ("untied", "bf16"), ("critic", "bf16")):
        plain, shared = (h.trainer(name, dtype=dtype, optimizer=h.adamw(distributed=d)) for d in (False, True))
        rows, plan, loss = h.rows(name), h.plan(mini_batches=2, epochs=2, max_tokens=FEW), loss_of(name)
        fresh = [equal(plain.state(), shared.state())]
        norms = [[m["grad_norm"] for m in trainer.update(rows, plan[:2], loss)] for trainer in (plain, shared)]
        states = [trainer.state() for trainer in (plain, shared)]
        memory = [trainer.memory_bytes()["optimizer"] for trainer in (plain, shared)]
        plain.load_state(states[1])
        swapped = [equal(plain.state(), states[1])]
        shared.load_state(states[0])
        swapped.append(equal(shared.state(), states[0]))
        shared.load_state(plain.state())
        for trainer in (plain, shared):
            trainer.update(rows, plan[2:], loss)
        apart = [farthest(*states), farthest(plain.state(), shared.state())]
        found[name, dtype] = {"exact": fresh + swapped, "norms": norms, "memory": memory, "apart": apart}
    return found


def farthest(a, b):
    """Largest difference of masters, and of moments relative to their size."""
    assert a["optimizer"].keys() == b["optimizer"].keys()
    found = {}
    for name, mine in a["optimizer"].items():
        other = b["optimizer"][name]
        assert mine.keys() == other.keys() == {"main", "exp_avg", "exp_avg_sq", "step"}
        for key, tensor in mine.items():
            size = 1 if key in ("main", "step") else max(float(tensor.norm()), 1e-12)
            found[key] = max(found.get(key, 0.0), float((tensor - other[key]).norm()) / size)
    return found


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def check_refusals(h):
    """Losses that are not finite, raise, or are cancelled: every rank stops alike and nothing changes."""
    from hfsdk.engine.safepoint import SafePoint
    from hfsdk.engine.trainer import NonFiniteRows

    trainer, rows, plan = h.trainer("untied"), h.rows(), h.plan(mini_batches=2)
    trainer.update(rows, plan[:1], policy_loss)
    before, found = trainer.state(), {}

    def outcome(loss, safe, minis=plan[1:]):
        try:
            trainer.update(rows, minis, loss, safe=safe)
        except Exception as caught:
            name, text = type(caught).__name__, str(caught)
            rows_hit = caught.row_ids if isinstance(caught, NonFiniteRows) else None
            return name, text, rows_hit, equal(before, trainer.state()), trainer.grad_norm()
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
    from hfsdk.engine.megatron_model import load_folder

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
    state = trainer.state()
    trainer.update(h.rows(), minis, policy_loss)
    after = trainer.state()
    trainer.load_state(state)
    trainer.update(h.rows(), minis, policy_loss)
    critic = h.trainer("critic", dtype="bf16")
    critic_metrics = critic.update(h.rows(), minis, value_loss)
    if h.groups.is_last_stage:
        assert critic.model.output_layer.weight.dtype == torch.float32
    log_probs = dict(zip(rows.row_ids.tolist() if len(out) else (), out, strict=True))
    return log_probs, metrics, equal(after, trainer.state()), critic_metrics, trainer.memory_bytes()


def check_offload(h):
    """The same numbers, bit for bit, and nothing on the device between calls."""
    found, minis = {}, h.plan(max_tokens=FEW)
    for dtype in ("fp32", "bf16"):
        stays = h.trainer("untied", dtype=dtype)
        leaves = h.trainer("untied", dtype=dtype, optimizer=h.adamw(offload=True))
        for trainer in (stays, leaves):
            trainer.update(h.rows(), h.plan(mini_batches=2, max_tokens=FEW), policy_loss)
        middle = leaves.state()
        leaves.update(h.rows(), minis, policy_loss)
        leaves.load_state(middle)  # and once more
        for trainer in (stays, leaves):
            trainer.update(h.rows(), minis, policy_loss)
        found[dtype] = equal(stays.state(), leaves.state()), stays.memory_bytes(), leaves.memory_bytes()
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
        middle = trainer.state()
        call("step")
        call("update", rows, minis, policy_loss)
        trainer.load_state(middle)
        call("update", rows, minis, policy_loss)
        seen[trainer] = said, trainer.state(), held
    (said, state, held), (said_too, state_too, held_too) = seen[stays], seen[leaves]
    return said == said_too and equal(state, state_too), held, held_too


def check_errors(h):
    """Mistakes at construction, frozen roles, reward heads, and groups given back."""
    from hfsdk.engine.megatron_groups import RoleGroups
    from hfsdk.engine.megatron_model import build_model, load_folder
    from hfsdk.layout import Layout

    def said(action):
        try:
            action()
        except Exception as caught:
            return type(caught).__name__, str(caught)

    trainer = h.trainer("untied")
    critic_folder = h.root / "critic"  # has no lm_head
    frozen = h.trainer("untied", optimizer=None)
    world = h.mesh.layout.size
    found = {
        "no weights": said(lambda: load_folder(trainer.model, trainer.spec, h.groups, h.root)),
        "other weights": said(lambda: load_folder(trainer.model, trainer.spec, h.groups, critic_folder)),
        "frozen": said(lambda: frozen.update(h.rows(), h.plan(), policy_loss)),
        "head": said(lambda: frozen.values(h.rows(), [])),
        "head name": said(lambda: build_model(trainer.spec, h.groups, "token", "fp32", 64)),
        "size": said(lambda: RoleGroups(Layout(dp=world + 1).mesh())),
        "state": said(lambda: trainer.load_state(trainer.state() | {"layout": "tp8 pp1 dp1"})),
        "tensors": said(lambda: trainer.load_state(h.trainer("tied").state())),
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
    "bf16": check_bf16, "offload": check_offload, "errors": check_errors,
}  # fmt: skip


ZERO_CHECKS = {name: CHECKS[name] for name in CHECKS if name not in ("inference", "errors")} | {"distributed": check_distributed}


RECOMPUTE_CHECKS = CHECKS | {"recompute": check_recompute}
RECOMPUTE_LAYOUTS = ("tp1", "tp2", "pp2")


def checks_of(layout):
    return ZERO_CHECKS if layout.endswith(" zero") else RECOMPUTE_CHECKS if layout in RECOMPUTE_LAYOUTS else CHECKS


def all_checks(rank, world_size, layouts, root):
    """Run every check of these layouts, one after the other in the same processes."""
    return {
        layout: {name: check(harness) for name, check in checks_of(layout).items()}
        for layout in layouts
        for harness in [Harness(layout, root, world_size)]
    }


@pytest.fixture(scope="module")
def results(case):
    """``results(layout, check)`` -> one entry per rank."""
    done = {}

    def look(layout, check):
        size = LAYOUTS[layout]
        if size not in done:
            layouts = [name for name, n in LAYOUTS.items() if n == size]
            try:
                done[size] = run(all_checks, size, layouts, case["root"])
            except SpawnError as error:
                done[size] = error
        if isinstance(done[size], SpawnError):
            raise done[size]
        return [rank[layout][check] for rank in done[size]]

    return look


ZERO = [layout for layout in LAYOUTS if layout.endswith(" zero")]
PLAIN = [layout for layout in LAYOUTS if layout not in ZERO]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_plain_layout = pytest.mark.parametrize("layout", PLAIN)
every_zero_layout = pytest.mark.parametrize("layout", ZERO)
every_model = pytest.mark.parametrize(("layout", "model"), [(layout, m) for layout in LAYOUTS for m in models_of(layout)])
every_plain_model = pytest.mark.parametrize(("layout", "model"), [(layout, m) for layout in PLAIN for m in models_of(layout)])


# ---- the laws


def by_row(parts, rows, lengths=None):
    """Put the rows of several ranks in order and check that ranks which share a row agree to the bit."""
    found = {}
    for part in parts:
        for row, array in part.items():
            assert row not in found or np.array_equal(found[row], array)
            found[row] = array
    assert sorted(found) == list(range(rows))
    return np.concatenate([found[row] for row in range(rows)])


@every_plain_model
def test_outputs_are_those_of_transformers(case, results, layout, model):
    found = [rank[model] for rank in results(layout, "inference")]
    for column in found[-1]:
        mine = by_row([rank.get(column, {}) for rank in found], NUM_ROWS)
        expected = case["references"][model].columns[column].detach().numpy()
        assert mine.shape == expected.shape
        assert np.abs(mine - expected).max() < 1e-4


@every_layout
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


@every_layout
def test_metrics_do_not_depend_on_the_split(results, layout):
    (small, large, alone) = (
        results(name, "gradients")[0]["metrics", n] for name, n in ((layout, 24), (layout, 1000), ("tp1", 1000))
    )
    for name in ("loss", "clip", "clips", "ratio_max", "num_tokens", "num_samples"):
        assert small[name] == pytest.approx(large[name], rel=1e-5)
        assert small[name] == pytest.approx(alone[name], rel=1e-4)
    assert 0 < alone["clip"] < 1 < alone["ratio_max"]


@pytest.mark.parametrize("layout", RECOMPUTE_LAYOUTS)
def test_recompute_does_not_change_the_gradient(results, layout):
    ranks = results(layout, "recompute")
    for name, (apart, _) in ranks[0].items():
        assert max(apart) <= 1e-6, (name, apart)
    assert all(calls == [2, 2] for rank in ranks for _, calls in rank.values())


@every_layout
def test_aggregations(results, layout):
    for mode, off in results(layout, "aggregations")[0].items():
        assert off < 1e-5, (mode, off)


@every_layout
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


@every_layout
def test_state_round_trip_is_exact(results, layout):
    assert all(all(rank) for rank in results(layout, "state"))


@every_zero_layout
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


@every_layout
def test_non_finite_steps_are_refused_on_every_rank(results, layout):
    for rank in results(layout, "refusals"):
        assert rank["one row"] == ("NonFiniteRows", f"the loss of rows [{rank['bad']}] is not finite", [rank["bad"]], True, 0)
        assert rank["gradient"] == ("NonFiniteRows", "the gradient is not finite", [], True, 0)


@every_layout
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


@every_layout
def test_cancel_keeps_finished_steps(results, layout):
    for rank in results(layout, "refusals"):
        assert rank["cancelled"][0] == "Cancelled"
        assert rank["steps after cancel"] == 1


@every_layout
def test_wrong_rows_are_named_on_their_rank(results, layout):
    ranks = [rank["infer"] for rank in results(layout, "refusals")]
    assert "prompt of 0 tokens" in ranks[-1][0][1]
    for case in zip(*ranks, strict=True):
        names = {name for name, _ in case}
        assert "OptionError" in names
        assert names <= {"OptionError", "PeerFailed"}


@every_model
def test_saved_folder_is_read_by_transformers(case, results, layout, model):
    ranks = [rank[model] for rank in results(layout, "saving")]
    folder, weights, *_ = ranks[0]
    assert all(rank[2] and rank[3] == is_critic(model) for rank in ranks)
    assert all(rank[1] is None for rank in ranks[1:])
    loaded = dict(reference_model_at(folder, model).named_parameters())
    assert set(loaded) == set(weights)
    assert all(torch.equal(loaded[n], weights[n]) for n in weights)
    changed = max((loaded[n] - p).abs().max() for n, p in case["references"][model].model.named_parameters())
    assert changed > 1e-4


def reference_model_at(folder, model):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if is_critic(model) else AutoModelForCausalLM
    return kind.from_pretrained(folder)


@every_layout
def test_updated_weights_agree_over_layouts(results, layout):
    """One AdamW step of lr 2.5e-4: near-zero gradients may flip their sign, the rest agrees."""
    for model in models_of(layout):
        alone, mine = (results(name, "saving")[0][model][1] for name in ("tp1", layout))
        off = torch.cat([(alone[n] - mine[n]).flatten() for n in alone])
        assert off.abs().max() <= 6e-4
        assert (off.abs() > 1e-6).float().mean() < 0.01


@every_layout
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


@every_layout
def test_what_is_offloaded_leaves_the_device_and_changes_nothing(results, layout):
    for found, (frozen_bytes, during_its_call, same) in results(layout, "offload"):
        for exact, stays, leaves in (found[dtype] for dtype in ("fp32", "bf16")):
            assert exact
            assert stays["optimizer"] > 0 == leaves["optimizer"]
            assert (leaves["weights"], leaves["gradients"]) == (stays["weights"], stays["gradients"])
        assert frozen_bytes == 0 < during_its_call
        assert same


@every_layout
def test_a_trained_role_leaves_the_device_between_its_calls_and_changes_nothing(results, layout):
    for found, _ in results(layout, "offload"):
        for exact, stays, leaves in found["between calls"].values():
            assert exact
            assert all(not host for _, host in stays)
            assert all(set(device.values()) == {0} for device, _ in leaves)
            for number, ((full, _), (_, host)) in enumerate(zip(stays, leaves, strict=True)):
                gradients = full["gradients"] if number in (1, 2, 3, 4) else 0  # between forward_backward and step they are kept
                assert host == full["weights"] + gradients + full["optimizer"]


@every_plain_layout
def test_mistakes_are_explained(results, layout):
    ranks = results(layout, "errors")
    for found in ranks:
        assert found["no weights"][0] == found["other weights"][0] == "ModelNotFoundError"
        assert "neither model.safetensors nor" in found["no weights"][1]
        assert "lm_head.weight" in found["other weights"][1]
        assert found["frozen"][0] == found["head"][0] == found["head name"][0] == "OptionError"
        assert found["size"][0] == "LayoutError"
        assert f"the pool has {LAYOUTS[layout]} workers" in found["size"][1]
        assert found["state"][0] == found["tensors"][0] == "CheckpointError"


@every_plain_layout
def test_new_scalar_heads(results, layout):
    ranks = results(layout, "errors")
    for found in (rank for rank in ranks if "reward heads" in rank):
        same_seed, other_seed, head = found["reward heads"]
        assert same_seed
        assert not other_seed
        assert head.std() == pytest.approx(65**-0.5, rel=0.2)
        assert torch.equal(head, ranks[-1]["reward heads"][2])
        assert not found["critic head"]


# ---- what a loss sees


def token_batch():
    from hfsdk.engine.loss_io import TokenBatch, with_temperature

    response = Ragged.of([[1, 2, 3], [], [4]])
    columns = {"prompt": Ragged.of([[1], [1, 2], [3]]), "response": response, "text": ["a", "b", "c"]}
    columns |= {"values": response.map(np.arange(4.0)), "scores": np.array([1.0, 2.0, 3.0])}
    columns["short"] = Ragged.of([[1.0], [2.0], [3.0]])
    return TokenBatch(with_temperature(Table(columns, row_ids=[7, 2, 5]), 1.0), num_tokens=8, num_rows=6)


def test_token_batch():
    b = token_batch()
    assert b["values"].dtype == b["scores"].dtype == torch.float32
    assert b["response"].tolist() == [1, 2, 3, 4]
    assert b["prompt"].tolist() == [1, 1, 2, 3]
    assert b["text"] == ["a", "b", "c"]
    assert b["scores"].tolist() == [1, 2, 3]
    assert b.expand("scores").tolist() == [1, 1, 1, 3]
    assert b.lengths.tolist() == [3, 0, 1]
    assert b.row_ids.tolist() == [7, 2, 5]
    assert b.segment_sum(b["values"]).tolist() == [3, 0, 3]
    assert b.segment_mean(b["values"]).tolist() == [1, 0, 3]
    with pytest.raises(ColumnError, match=r"'short' has 1 values for sample 7.* 3 tokens"):
        b["short"]
    with pytest.raises(ColumnError, match=r"no column 'nothing'; there are prompt, response, scores, short, text, values$"):
        b["nothing"]  # the engine's own columns are no business of the loss


def test_aggregations_by_hand():
    from hfsdk.engine.loss_io import aggregate

    b = token_batch()
    expected = {"token_mean": 6 / 8, "sequence_mean": (1 + 0 + 3) / 6, "sequence_sum": 6 / 6, "fixed_length": 6 / 60}
    for mode, value in expected.items():
        assert aggregate(b["values"], b, mode, fixed_length=10).item() == pytest.approx(value)
    with pytest.raises(OptionError, match="no aggregation 'mean'"):
        aggregate(b["values"], b, "mean")
    with pytest.raises(OptionError, match="fixed_length"):
        aggregate(b["values"], b, "fixed_length")


def test_one_loss_per_sample_is_told_from_one_per_token():
    from hfsdk.engine.loss_io import ModelOutput, Tally, TokenBatch, evaluate, tell_apart

    response = Ragged.of([[1], [2]])
    rows = Table({"prompt": response, "response": response, "scores": np.array([1.0, 3.0])})
    b = TokenBatch(tell_apart(rows), num_tokens=8, num_rows=2)
    out, tally = ModelOutput(log_probs=torch.tensor([1.0, 3.0])), Tally()
    assert evaluate(lambda out, b: out.log_probs, out, b, tally).item() == 4 / 8
    assert evaluate(lambda out, b: b["scores"], out, b, tally).item() == 4 / 2
    assert evaluate(lambda out, b: b.segment_sum(out.log_probs), out, b, tally).item() == 4 / 2
