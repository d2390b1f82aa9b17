"""The planner with adapters of low rank: bytes against boxes, seconds against counted products, plans against brute force."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from brute_force import BruteForce
from expect import each, refuses

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec, LinkSpec
from hfsdk.core.errors import DeviceMemoryError
from hfsdk.core.layout import Layout
from hfsdk.core.lora import SLOTS
from hfsdk.core.placement import Placement
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.spec import DTYPE_BYTES, ModelSpec
from hfsdk.planner.perf.adapter_sizes import received_numbers
from hfsdk.planner.perf.memory import check_fits, device_bytes, role_bytes, rollout_parameters
from hfsdk.planner.perf.perf_model import PerfModel, Setup
from hfsdk.planner.search.candidates import Tables
from hfsdk.planner.search.search import Search
from hfsdk.resharding.boxes import held_adapters, megatron_boxes, vllm_boxes
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.session.parts import parts_of
from hfsdk.session.recording import record_step

LORA = hf.LoRA(rank=16)
SMALL = ModelSpec(
    name="small", num_layers=4, hidden_size=256, mlp_hidden_size=1024, num_heads=8, num_kv_heads=4, head_dim=32, vocab_size=1024,
    max_positions=4096,
)  # fmt: skip
LLAMA = ModelSpec.preset("llama-70b")


def score(completions):
    return [0.0] * len(completions)


def role(kind="actor", spec=SMALL, train="tp1", rollout=None, lora=LORA, dtype="bf16", **more):
    more = {"optimizer": AdamW(), "head": "scalar" if kind == "critic" else "lm", **more}
    return RoleSpec(
        name=more.pop("name", kind), kind=kind, model=spec, train=Layout.parse(train), dtype=dtype, lora=lora,
        rollout=Layout.parse(rollout) if rollout else None, **more,
    )  # fmt: skip


def reference(train="tp1", spec=SMALL, **more):
    return role("reference", spec, train, lora=None, optimizer=None, **more)


# -- bytes


@each(
    "layout, lora, role_and_dtype",
    product(
        ("tp1 dp8", "tp2 dp4", "tp8", "tp2 pp2 dp2"), (LORA, hf.LoRA(rank=5, targets=("q_proj", "down_proj"))),
        (("actor", "bf16"), ("critic", "fp32")),
    ),
)  # fmt: skip
def test_planned_bytes_are_those_of_the_boxes(layout, lora, role_and_dtype):
    layout, (kind, dtype) = Layout.parse(layout).fill(8), role_and_dtype
    one = role(kind, train=str(layout), lora=lora, dtype=dtype)
    full, planned = role_bytes(replace(one, lora=None), 8), role_bytes(one, 8)
    head = SMALL.hidden_size if kind == "critic" and layout.pp == 1 else 0
    mine = max(sum(box.numel for box in megatron_boxes(one.learned, layout, tp, 0)) for tp in range(layout.tp)) + head
    size, masters = DTYPE_BYTES[dtype], 4 * (dtype == "bf16")
    assert (planned.gradients, planned.optimizer) == (4 * mine, (8 + masters) * mine)
    assert planned.weights == full.weights + size * (mine - head)
    assert planned.base == full.weights - size * head
    assert planned.logits == full.logits
    kept = 16 * 7 if lora is LORA else 5 * 2
    assert planned.activations - full.activations == pytest.approx(2048 * SMALL.num_layers * kept * size)


@each("tp", (1, 2, 8))
def test_the_rollout_has_a_base_of_its_own_and_slots_of_padded_rank(tp):
    lora = hf.LoRA(rank=5, targets=("q_proj", "down_proj"))
    slot = sum(box.numel for box in vllm_boxes(held_adapters(SMALL, lora), tp, 0))
    assert slot > sum(box.numel for box in vllm_boxes(role(lora=lora).learned, tp, 0))
    one = role(train=f"tp{tp}", rollout=f"tp{tp}", lora=lora)
    assert role_bytes(one, 8).rollout_weights == 2 * (rollout_parameters(SMALL, tp) + SLOTS * slot)
    on_cpu = {mode: replace(one, rollout_options=hf.RolloutOptions(cpu_weights=mode)) for mode in ("packed", "shared")}
    both = {mode: role_bytes(laid, 8, on_cpu=True).rollout_weights for mode, laid in on_cpu.items()}
    assert both["shared"] == 2 * (rollout_parameters(SMALL, tp) + SLOTS * slot), "its base is nobody else's"
    assert both["packed"] == both["shared"] + 2 * rollout_parameters(SMALL, tp)


def asked(roles, cluster="1x8 A100-80GB"):
    cluster = ClusterSpec.parse(cluster)
    names = [one.name for one in roles]
    return device_bytes(roles, Placement.of("colocate", names, cluster.num_devices), cluster)[0]


def test_roles_that_begin_with_the_same_weights_hold_them_once_where_they_are_cut_alike():
    actor, critic, other = role(train="tp4"), role("critic", train="tp4"), reference("tp4")
    alone = [role_bytes(one, 8) for one in (actor, critic, other)]
    device = asked([actor, critic, other])
    assert device.roles["actor"] == alone[0]
    assert [device.roles[name].base_with for name in ("critic", "reference")] == ["actor", "actor"]
    assert device.roles["reference"].resident == 0
    together = sum(one.resident for one in alone) - alone[1].base - alone[2].base
    assert device.asked == device.process + together + max(one.working for one in alone)
    apart = {
        "another layout": reference("tp2"), "another dtype": reference("tp4", dtype="fp32"),
        "other weights": reference("tp4", replace(SMALL, name="other")),
        "in host memory": reference("tp4", offload=True),
        "trained": role("critic", train="tp4", lora=None),
        "somebody trained it": role("reward", train="tp4", lora=None, optimizer=None),
    }  # fmt: skip
    for why, third in apart.items():
        assert not asked([actor, third]).roles[third.name].base_with, why
    permuted = role(train="tp4", rollout="tp2")
    assert not asked([permuted, other]).roles["reference"].base_with, "a rank's shard is another one"
    assert asked([role(train="tp4", rollout="tp4"), other]).roles["reference"].base_with == "actor"
    assert asked([actor, other], "1x8 cpu").roles["reference"].base_with == "actor"
    assert not asked([actor, reference("tp4", offload=True)], "1x8 cpu").roles["reference"].base_with
    away = asked([replace(actor, offload=True), other])
    assert away.roles["reference"].base_with == "actor", "a base that adapters stand beside stays"


def test_a_refusal_says_who_holds_the_weights_and_that_adapters_help():
    cluster = ClusterSpec.parse("1x8 A100-80GB").with_memory(30 * 10**9)
    full = [role(spec=LLAMA, train="tp8", lora=None), reference("tp8", LLAMA)]
    for roles, words in ((full, "lora=hf.LoRA"), ([replace(full[0], lora=LORA), full[1]], "frozen weights from actor")):
        with refuses(DeviceMemoryError, words):
            check_fits(roles, Placement.of("colocate", ["actor", "reference"], 8), cluster.with_memory(19 * 10**9))


# -- seconds


def setup_of(one, cluster="1x8 H100", **cpu):
    return Setup.of(one, ClusterSpec.parse(cluster), range(8))


def test_a_backward_pass_of_a_frozen_base_has_one_product_a_weight_and_three_of_each_adapters():
    """FLOPs alone: no bytes are moved, nothing is launched, a single token sees nobody."""
    free = PerfModel(activation_bytes=0, launch_s=0, link_efficiency=10, weight_efficiency=10)
    lengths = np.ones(200_000, dtype=np.int64)
    for recompute, again in (("", 0), ("full", 1)):
        full, lora = (
            setup_of(role(spec=LLAMA, train="tp1 dp8", lora=adapters, recompute=recompute, micro_batch_tokens=10**6))
            for adapters in (None, LORA)
        )
        (forward, backward), (forward_lora, backward_lora) = (free.train(one, lengths) for one in (full, lora))
        share = lora.adapters.num_parameters() / full.matmul_parameters
        assert forward_lora / forward == pytest.approx(1 + share, rel=1e-3)
        assert (backward - forward * (2 + again)) < 0.02 * backward, "the rest is gradients"
        wanted = (1 + again + (2 + again) * share) * forward
        assert backward_lora == pytest.approx(wanted, rel=5e-3)


def test_adapters_alone_are_reduced_stepped_and_saved():
    perf = PerfModel()
    full, lora = (setup_of(role(spec=LLAMA, train="tp4 dp2", lora=adapters)) for adapters in (None, LORA))
    held = max(sum(box.numel for box in megatron_boxes(lora.adapters, lora.layout, tp)) for tp in range(4))
    assert lora.local_learned == held
    for what in (perf.reduced_bytes, lambda setup: perf.onload(setup, "optimizer")):
        assert what(lora) / what(full) == pytest.approx(held * 4 / full.parameters)
    saved = [perf.costs("save_state", one, *[np.zeros(0, dtype=np.int64)] * 2)["save_state"] for one in (full, lora)]
    assert saved[1] / saved[0] == pytest.approx(lora.adapters.num_parameters() / full.parameters)


@each("train, rollout", [("tp1", "tp1"), ("tp4", "tp2"), ("tp2", "tp4"), ("tp2 pp2", "tp2"), ("tp4 pp2", "tp4")])
def test_what_a_rollout_receives_is_what_its_plan_counts(train, rollout):
    one = role(train=train, rollout=rollout)
    layout = Layout.parse(train).fill(8)
    plan = ReshardPlan.between(one.learned, layout, Layout.parse(rollout).fill(8), "bf16")
    most = max(plan.bytes_received(rank) for rank in range(8))
    tp = Layout.parse(rollout).tp
    assert received_numbers(one.learned, layout.tp, layout.pp, tp) * 2 == pytest.approx(most, rel=0.01)
    setup = setup_of(one)
    perf = PerfModel()
    adapters, whole = perf.reshard(replace(setup, refills=False)), perf.reshard(replace(setup, lora=None, refills=False))
    assert adapters < whole
    assert setup.refills, "beside its trainer it sleeps, and loses its base"
    assert perf.reshard(setup) == pytest.approx(adapters + whole)
    assert perf.reshard(replace(setup, refills=False), base=True) == pytest.approx(adapters + whole)


def test_lora_is_never_more():
    """Of bytes and of seconds of an update, whatever the layout, in every dtype."""
    lengths = np.full(32, 512)
    perf = PerfModel()
    for train, dtype, on_cpu in product(["tp1", "tp2", "tp4 pp2", "tp8"], ["bf16", "fp32"], [False, True]):
        lora = role(spec=LLAMA, train=train, rollout="tp2", dtype=dtype)
        full = replace(lora, lora=None)
        a, b = (role_bytes(one, 8, on_cpu=on_cpu) for one in (lora, full))
        assert a.weights + a.gradients + a.optimizer < 0.5 * (b.weights + b.gradients + b.optimizer)
        cluster = "1x8 cpu" if on_cpu else "1x8 H100"
        seconds = [
            sum(perf.train(setup_of(one, cluster), lengths)) + perf.optimizer(setup_of(one, cluster)) for one in (lora, full)
        ]
        assert 0.5 * seconds[1] < seconds[0] < seconds[1]


# -- plans


def declared(session):
    return [(handle, parts_of(session).deployment.book.declared(handle)) for handle in session.roles]


def random_case(number):
    rng = np.random.default_rng([13, number])
    devices = int(rng.choice([1, 2, 4]))
    cluster = ClusterSpec.parse(f"1x{devices} {['A100-80GB', 'cpu'][number % 2]}")
    cluster = replace(cluster, intra_node=LinkSpec(name="x", bandwidth=float(rng.choice([1e8, 1e10])), latency_s=1e-5))
    algorithm = hf.PPO(mini_batches=2) if devices <= 2 else hf.GRPO(n=2)
    spec = replace(SMALL, num_layers=int(rng.choice([2, 4])), hidden_size=512, vocab_size=32_000)
    options = {"dtype": "bf16", "lora": hf.LoRA(rank=int(rng.choice([4, 32]))), "micro_batch_tokens": 256}
    with hf.Session.simulated(cluster, seed=0) as session:
        cpu_weights = ["packed", "shared"][number // 2 % 2]
        actor = session.actor(spec, cpu_weights=cpu_weights, rollout_options=None, **options)
        if isinstance(algorithm, hf.PPO):
            session.critic(spec, **options)
        session.reference(actor)
        session.reward(score)
        workload = hf.Workload(prompts=int(rng.integers(3, 40)), prompt_tokens=100, response_tokens=int(rng.integers(8, 200)))
        calls = record_step(algorithm, declared(session), workload, session.seed, {})
        roles = [one for _, one in declared(session) if one.model is not None]
    whole = [replace(one, train=Layout(dp=1), rollout=Layout(dp=1) if one.rollout else None) for one in roles]
    total = sum(role_bytes(one, 1, on_cpu=number % 2 == 1).total for one in whole)
    return cluster.with_memory(int(total * rng.uniform(0.35, 1.0)) + (700 if number % 2 else 2500) * 10**6), roles, calls


def test_brute_force_agrees_where_roles_share_a_base():
    compared = shared = 0
    for number in range(16):
        cluster, roles, calls = random_case(number)
        best = {}
        for seconds, grouping, _, _ in BruteForce(roles, calls, cluster, PerfModel()).plans():
            best[grouping] = min(best.get(grouping, np.inf), seconds)
        found = Search.over(roles, calls, Tables(cluster, PerfModel()), top=5).run()
        assert [one.seconds for one in found] == pytest.approx(sorted(best.values())[:5], rel=1e-9), number
        compared += bool(found)
        shared += any(held.base_with for one in found for b in range(len(one.leaf.blocks)) for held in one.held_on(b).values())
    assert compared >= 8
    assert shared >= 5


def on_8_gpus(lora, cluster="1x8 A100-80GB"):
    session = hf.Session.simulated(cluster)
    options = {"dtype": "bf16", "recompute": "full", "optimizer": hf.AdamW(distributed=True), "lora": lora}
    actor = session.actor("llama-70b", **options)
    session.critic("llama-70b", **options)
    session.reference(actor)
    session.reward(score)
    return session


def test_70b_ppo_fits_on_8_gpus_with_lora_and_not_without():
    algorithm, workload = hf.PPO(mini_batches=4), hf.Workload(prompts=64, prompt_tokens=512, response_tokens=512)
    with on_8_gpus(None) as session, refuses(DeviceMemoryError, "hf.LoRA"):
        session.plan(algorithm, workload)
    with on_8_gpus(LORA) as session:
        plan = session.plan(algorithm, workload)
        (held,) = plan.memory
        assert held.asked <= held.exists
        assert held.roles["actor"]["base"] > 0.9 * held.roles["actor"]["weights"]
        assert sum(held.roles[name]["weights"] for name in ("critic", "reference")) < 10**9
        session.place(plan)
        prompts = session.batch(prompt=[np.zeros(512, dtype=np.int32)] * 64)
        step = replace(algorithm, max_new_tokens=512).step(session.models, prompts)
        for metrics in (step.actor, step.critic):
            metrics.wait()
        took = session.trace.snapshot().duration_s
        assert took == pytest.approx(plan.seconds, rel=1e-6)
        assert "actor.rollout" in plan.runners_up[0].placement.roles
        actor = next(handle for handle in session.roles if handle.name == "actor")
        moved = ReshardPlan.between(actor.role.learned, actor.role.train, actor.role.rollout, "bf16").bytes_moved
        assert actor.last_reshard.measured_bytes == moved
        calls = session.memory.view()["devices"][0]
        assert max(call["weights_bytes"] for call in calls["calls"]) == sum(one["weights"] for one in held.roles.values())
        assert calls["planned"]["asked"] == held.asked
        kept = session.snapshot("before")
        assert kept is not None
    sizes = role_bytes(actor.role, 8)
    assert sizes.asleep > 5 * sizes.passes, "what a device needs most is the rollout's"


def test_on_processors_the_base_goes_to_the_rollout_once():
    with hf.Session.simulated("1x2 cpu") as session:
        actor = session.actor("smollm2-135m", train="dp2", rollout="dp2", lora=LORA)
        session.reward(score)
        session.place("colocate")
        prompts = session.batch(prompt=[np.ones(16, dtype=np.int32)] * 4)
        moved = []
        for _ in range(3):
            batch = actor.compute_log_probs(actor.generate(prompts, max_new_tokens=8))
            actor.update(batch, lambda out, b: -out.log_probs).wait()
            here, again = session.trace.snapshot(), session.predict()
            moved += [span.duration_s for span in here if span.name == "reshard" and span.rank == 0]
            assert again.duration_s == pytest.approx(here.duration_s), "told from the step before it"
        perf, setup = PerfModel(), Setup.of(actor.role, session.cluster, range(2))
    assert moved == pytest.approx([perf.reshard(setup, base=True), perf.reshard(setup), perf.reshard(setup)])
    assert moved[0] > 10 * moved[1]
