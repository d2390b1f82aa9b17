"""What tests hold a trainer against plain PyTorch with: rows, losses, transformers' results, a rank's roles."""

import json
from functools import partial

import numpy as np
import torch
from spawn import SpawnError, run

from hfsdk.core.microbatch import plan_pass, plan_update
from hfsdk.core.table import Ragged, Table

LEARNING_RATE = 1e-3
NUM_ROWS, EMPTY_ROW = 9, 4


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

    def __init__(self, folder, rows, temperature, make_model=reference_model):
        from hfsdk.engine.training.loss import ModelOutput, TokenBatch

        self.model = make_model(folder)
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
        from hfsdk.engine.training.loss import aggregate

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


def reference_model_at(folder, model):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if is_critic(model) else AutoModelForCausalLM
    return kind.from_pretrained(folder)


# ---- what runs in the processes


def rows_of(name, old):
    """The rows with a model's own old log-probs, or with those of the first one that has any."""
    rows = rows_table()
    mine = old[name] if name in old else next(iter(old.values()))
    return rows.with_columns({"old_log_probs": rows.ragged("response").map(mine)})


def write_references(folders, root, others=None, make_model=reference_model):
    """Have transformers run each folder's model, and write down what the processes compare with; the first one runs ``others`` too.

    Returns the references and the gradients (loss, gradient by name) by model and by name of the other losses.
    """
    rows = rows_table()
    references = {name: Reference(folder, rows, rows["temperature"], make_model) for name, folder in folders.items()}
    policies = [name for name in folders if not is_critic(name)]
    old = {n: references[n].columns["log_probs"].detach().numpy() + rows["noise"].flat for n in policies}
    gradients = {name: references[name].gradient(rows_of(name, old), loss_of(name)) for name in folders}
    for mode, loss in (others or {}).items():
        gradients[mode] = references[policies[0]].gradient(rows_of(policies[0], old), loss)
    torch.save({"old": old, "gradients": gradients}, root / "reference.pt")
    return references, gradients


def once_for_each_size(all_checks, layouts, root, *more):
    """Return ``look(layout, check)`` -> one entry per rank; the layouts of a world size run together, when first asked.

    ``layouts`` is {layout: world size}; ``all_checks(rank, world_size, layouts, root, *more)`` returns
    {layout: {check: what it found}}.
    """
    done = {}

    def look(layout, check):
        size = layouts[layout]
        if size not in done:
            try:
                done[size] = run(all_checks, size, [name for name, n in layouts.items() if n == size], root, *more)
            except SpawnError as error:
                done[size] = error
        if isinstance(done[size], SpawnError):
            raise done[size]
        return [rank[layout][check] for rank in done[size]]

    return look


def all_checks(rank, world_size, layouts, root, sweep, checks, harness):
    """Make every check of these layouts, one after the other in the same processes."""
    return {
        layout: {name: checks[name](here) for name in sweep.checks_of(layout)}
        for layout in layouts
        for here in [harness(layout, root, world_size, sweep.models[layout])]
    }


class Harness:
    """The roles of one layout on this rank."""

    def __init__(self, layout, root, world_size, models=()):
        """``models`` are those that checks of all models go over."""
        from hfsdk.core.layout import Layout
        from hfsdk.engine.training.megatron_groups import RoleGroups, poison_parallel_state

        self.models = models
        self.distributed = layout.endswith(" zero")
        layout, _, rollout_tp = layout.removesuffix(" zero").partition(" for rollout ")
        self.mesh = Layout.parse(layout).fill(world_size).mesh(int(rollout_tp or 1))
        self.groups = RoleGroups(self.mesh)
        self.root = root
        saved = torch.load(root / "reference.pt", weights_only=False)
        self.old, self.gradients = saved["old"], saved["gradients"]
        poison_parallel_state()

    def trainer(self, name, choices=None, **options):
        from hfsdk.core.roles import RoleSpec
        from hfsdk.core.spec import ModelSpec
        from hfsdk.engine.process.recorder import Recorder
        from hfsdk.engine.training.trainer import Trainer

        config = json.loads((self.root / name / "config.json").read_text())
        spec = ModelSpec.from_hf_config(config, name)
        options.setdefault("optimizer", self.adamw())
        options.setdefault("head", "scalar" if is_critic(name) else "lm")
        options.setdefault("kind", "critic" if is_critic(name) else "actor")
        role = RoleSpec(name=name, folder=str(self.root / name), model=spec, train=self.mesh.layout, **options)
        recorder = Recorder(device=self.groups.rank, rank=self.groups.rank)
        return Trainer(role, self.mesh, self.groups, recorder, choices)

    def adamw(self, distributed=None, **more):
        from hfsdk.core.roles import AdamW

        distributed = self.distributed if distributed is None else distributed
        return AdamW(lr=LEARNING_RATE, max_grad_norm=1.0, warmup_steps=4, distributed=distributed, **more)

    def rows(self, name=None):
        return rows_of(name, self.old)

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


def by_row(parts, rows, lengths=None):
    """Put the rows of several ranks in order and check that ranks which share a row agree to the bit."""
    found = {}
    for part in parts:
        for row, array in part.items():
            assert row not in found or np.array_equal(found[row], array)
            found[row] = array
    assert sorted(found) == list(range(rows))
    return np.concatenate([found[row] for row in range(rows)])
