"""The planner against brute force, against the simulated session, and against what must hold of any planner."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from brute_force import BruteForce
from expect import refuses

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec, LinkSpec
from hfsdk.core.layout import Layout
from hfsdk.core.spec import ModelSpec
from hfsdk.planner.perf.memory import GPU_PROCESS_BYTES, role_bytes, rollout_parameters
from hfsdk.planner.perf.perf_model import Links, PerfModel, Setup
from hfsdk.planner.perf.sizing import with_least
from hfsdk.planner.planning import plan_step
from hfsdk.planner.search.candidates import Tables
from hfsdk.planner.search.pools import pack
from hfsdk.planner.search.search import Search
from hfsdk.planner.search.solution import Best
from hfsdk.session.parts import parts_of
from hfsdk.session.recording import record_step
from hfsdk.viz.drawn import picture_of

SHARDED = hf.AdamW(distributed=True)


def model(layers=4, heads=4, kv=2, width=256, name="small"):
    return ModelSpec(name=name, num_layers=layers, hidden_size=width, mlp_hidden_size=4 * width, num_heads=heads, num_kv_heads=kv,
                     head_dim=width // heads, vocab_size=1024, max_positions=8192)  # fmt: skip


def session_on(cluster, algorithm, *, spec=None, seed=0, cpu_weights="packed", lengths="full", **options):
    """A simulated session with the roles that an algorithm needs, their layouts open."""
    session = hf.Session.simulated(cluster, seed=seed, response_lengths=lengths)
    spec = spec or model()
    options = {"dtype": "bf16", **options}
    actor = session.actor(spec, cpu_weights=cpu_weights, **options)
    if isinstance(algorithm, (hf.PPO, hf.SafeRLHF)):
        session.critic(spec, **options)
    if isinstance(algorithm, hf.SafeRLHF):
        session.critic(spec, name="cost_critic", **options)
        session.cost(spec, dtype="bf16")
    session.reference(actor)
    session.reward(spec, dtype="bf16")
    return session


def declared(session):
    return [(handle, parts_of(session).deployment.book.declared(handle)) for handle in session.roles]


def recorded(session, algorithm, workload):
    return record_step(algorithm, declared(session), workload, session.seed, {})


def roles_of(session):
    return [role for _, role in declared(session)]


def simulate(session, algorithm, workload, plan):
    """Take one step in the simulated session under a plan and return its seconds."""
    session.place(plan)
    prompts = session.batch(prompt=[np.zeros(workload.prompt_tokens, dtype=np.int32)] * workload.prompts)
    options = {"max_new_tokens": workload.response_tokens}
    options |= {name: getattr(workload, name) for name in ("n", "epochs", "mini_batches") if getattr(workload, name)}
    step = replace(algorithm, **options).step(session.models, prompts)
    for metrics in (step.actor, step.critic):
        if metrics is not None:
            metrics.wait()
    return session.trace.snapshot().duration_s


# -- brute force


def random_case(number, lengths="full", shapes=((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1)), experts=None, micro=(256, 2048)):
    """A small cluster, workload and models by a number."""
    rng = np.random.default_rng([7, number])
    nodes, devices = shapes[rng.integers(len(shapes))]
    kind = ["A100-80GB", "H100", "cpu"][rng.integers(3)]
    cluster = ClusterSpec.parse(f"{nodes}x{devices} {kind}")
    cluster = replace(cluster, inter_node=LinkSpec(name="x", bandwidth=float(rng.choice([1e8, 1e10])), latency_s=1e-5))
    spec = model(layers=int(rng.choice([2, 3, 4])), heads=4, kv=int(rng.choice([1, 2, 4])), width=int(rng.choice([128, 512])))
    spec = replace(spec, experts=experts)
    small = nodes * devices <= 2
    algorithm = [hf.PPO(mini_batches=2), hf.GRPO(n=2), hf.ReMax(), hf.RLOO(n=2)][rng.integers(4) if small else rng.integers(1, 4)]
    options = {"dtype": str(rng.choice(["bf16", "fp32"])), "optimizer": SHARDED if rng.integers(2) else hf.AdamW(),
               "recompute": str(rng.choice(["", "full"])), "micro_batch_tokens": int(rng.choice(micro)),
               "cpu_weights": "shared" if number % 2 else "packed"}  # fmt: skip
    session = session_on(cluster, algorithm, spec=spec, **options)
    workload = hf.Workload(
        prompts=int(rng.integers(3, 40)), prompt_tokens=int(rng.integers(8, 300)), response_tokens=int(rng.integers(8, 300)),
        mini_batches=int(rng.integers(1, 3)), response_lengths=lengths,
    )  # fmt: skip
    calls = recorded(session, algorithm, workload)
    roles = roles_of(session)
    if rng.integers(2):  # memory that only some plans fit into
        asked = [_least_bytes(r, cluster) for r in roles]
        cluster = cluster.with_memory(int(sum(asked) * rng.uniform(0.4, 1.3)) + 1_500 * 10**6)
    return cluster, roles, calls, workload


def _least_bytes(role, cluster):
    return role_bytes(replace(role, train=Layout(dp=1), rollout=Layout(dp=1) if role.rollout else None), 1).total


@pytest.mark.parametrize("block", range(10))
def test_brute_force_agrees(block):
    """The best of every way of sharing devices, on 25 x 10 random small clusters: same seconds, in the same order."""
    compared = refused = 0
    for number in range(25 * block, 25 * block + 25):
        cluster, roles, calls, _ = random_case(number)
        best = {}
        for seconds, grouping, _, _ in BruteForce(roles, calls, cluster, PerfModel()).plans():
            best[grouping] = min(best.get(grouping, np.inf), seconds)
        wanted = sorted(best.values())[:5]
        found = Search.over(roles, calls, Tables(cluster, PerfModel()), top=5).run()
        assert [f.seconds for f in found] == pytest.approx(wanted, rel=1e-9), number
        for one in found:
            assert one.seconds == pytest.approx(best[one.grouping], rel=1e-9), number
        compared, refused = compared + bool(wanted), refused + (not wanted)
    assert compared >= 15, f"{refused} of 25 cases had no plan at all"


def test_brute_force_agrees_on_nodes_whose_size_is_no_power_of_two():
    for number in range(2000, 2012):
        cluster, roles, calls, _ = random_case(number, shapes=((1, 3), (2, 3)))
        best = sorted(seconds for seconds, *_ in BruteForce(roles, calls, cluster, PerfModel()).plans())[:1]
        found = Search.over(roles, calls, Tables(cluster, PerfModel()), top=1).run()
        assert [f.seconds for f in found] == pytest.approx(best, rel=1e-9), number


def test_brute_force_agrees_on_mixtures_of_experts():
    """Whose layouts have one axis more, of the trainer and of the rollout."""
    shared = 0
    for number in range(3000, 3024):
        experts = hf.Experts(count=4 + 2 * (number % 3), per_token=2, width=256, shared=number % 2)
        cluster, roles, calls, _ = random_case(number, experts=experts)
        wanted = sorted(seconds for seconds, *_ in BruteForce(roles, calls, cluster, PerfModel()).plans())[:1]
        found = Search.over(roles, calls, Tables(cluster, PerfModel()), top=1).run()
        assert [f.seconds for f in found] == pytest.approx(wanted, rel=1e-9), number
        shared += any(layout.ep > 1 for one in found for layouts in one.layouts for layout in layouts.values())
    assert shared, "no best plan shares experts, so that axis was not tried"


def test_brute_force_agrees_where_ranks_share_long_rows():
    """Rows of several micro-batches: each runs alone, asks for activations of its own, and may be shared (cp)."""
    shared = 0
    for number in range(4000, 4024):
        cluster, roles, calls, _ = random_case(number, shapes=((1, 2), (1, 4), (2, 2)), micro=(32, 128))
        wanted = sorted(seconds for seconds, *_ in BruteForce(roles, calls, cluster, PerfModel()).plans())[:1]
        found = Search.over(roles, calls, Tables(cluster, PerfModel()), top=1).run()
        assert [f.seconds for f in found] == pytest.approx(wanted, rel=1e-9), number
        shared += any(layout.cp > 1 for one in found for layouts in one.layouts for layout in layouts.values())
    assert shared >= 3, "hardly a best plan shares rows, so that axis was not tried"


@pytest.mark.parametrize("block", range(4))
def test_brute_force_agrees_on_the_best_placements(block):
    """With ``by_placement`` plans may share devices alike and differ in sizes."""
    for number in range(1000 + 10 * block, 1010 + 10 * block):
        cluster, roles, calls, _ = random_case(number)
        best = {}
        for seconds, grouping, sizes, _ in BruteForce(roles, calls, cluster, PerfModel()).plans():
            best[grouping, sizes] = min(best.get((grouping, sizes), np.inf), seconds)
        wanted = sorted(best.values())[:7]
        found = Search.over(roles, calls, Tables(cluster, PerfModel()), top=7, by_placement=True).run()
        assert [f.seconds for f in found] == pytest.approx(wanted, rel=1e-9), number


def test_brute_force_agrees_where_the_network_is_faster_than_the_nodes_links():
    """A shadow's weights may come over either; what bounds a plan is the faster one.

    The actor takes one of the two nodes, so that a shadow on a single device of the other has far to go, and fast.
    """
    with_shadows = 0
    for number in range(8):
        rng = np.random.default_rng([11, number])
        slow = LinkSpec(name="slow", bandwidth=float(rng.choice([1e8, 3e8, 1e9])), latency_s=1e-5)
        fast = LinkSpec(name="fast", bandwidth=4e11, latency_s=1e-6)
        cluster = replace(ClusterSpec.parse("2x2 A100-80GB"), intra_node=slow, inter_node=fast)
        algorithm = [hf.GRPO(n=2), hf.ReMax(), hf.RLOO(n=2)][rng.integers(3)]
        spec = model(heads=32, kv=8, width=4096)
        session = session_on(cluster, algorithm, spec=spec, micro_batch_tokens=256, train="tp1 pp2 dp1")
        prompts, read, written = (int(rng.integers(*ends)) for ends in ((20, 60), (300, 1500), (2, 20)))
        workload = hf.Workload(prompts=prompts, prompt_tokens=read, response_tokens=written)
        roles, calls = roles_of(session), recorded(session, algorithm, workload)
        best = {}
        for seconds, grouping, _, _ in BruteForce(roles, calls, cluster, PerfModel()).plans():
            best[grouping] = min(best.get(grouping, np.inf), seconds)
        wanted = sorted(best.values())
        for top in range(1, len(wanted) + 1):
            found = Search.over(roles, calls, Tables(cluster, PerfModel()), top=top).run()
            assert [f.seconds for f in found] == pytest.approx(wanted[:top], rel=1e-9), (number, top)
        with_shadows += any(f.leaf.space.mode.shadows for f in found)
    assert with_shadows == 8


@pytest.mark.parametrize("lengths", ["uniform", "lognormal"])
def test_brute_force_agrees_on_lengths_that_differ(lengths):
    """Of ragged rows the planner looks at the ranks that may be the slowest, brute force at all of them."""
    compared = 0
    for number in range(3000, 3008):
        cluster, roles, calls, _ = random_case(number, lengths)
        assert any(len(set(call.responses.tolist())) > 1 for call in calls.calls)
        best = {}
        for seconds, grouping, _, _ in BruteForce(roles, calls, cluster, PerfModel()).plans():
            best[grouping] = min(best.get(grouping, np.inf), seconds)
        found = Search.over(roles, calls, Tables(cluster, PerfModel()), top=5).run()
        assert [f.seconds for f in found] == pytest.approx(sorted(best.values())[:5], rel=5e-3), number
        for one in found:
            assert one.seconds == pytest.approx(best[one.grouping], rel=5e-3), number
        compared += bool(best)
    assert compared >= 5


def test_a_cheaper_wrong_planner_would_be_noticed():
    """The comparison can fail: without shadows the five best are others in some case."""
    differs = 0
    for number in range(15):
        cluster, roles, calls, _ = random_case(number)
        every, without = (
            Search.over(roles, calls, Tables(cluster, PerfModel()), top=5, shadows=shadows).run() for shadows in (True, False)
        )
        differs += [f.seconds for f in every] != [f.seconds for f in without]
    assert differs


# -- the prediction is what the simulated session takes


@pytest.mark.parametrize("algorithm", [hf.PPO(mini_batches=2), hf.GRPO(n=2), hf.ReMax(), hf.RLOO(n=2), hf.SafeRLHF()])
@pytest.mark.parametrize("cluster", ["1x4 A100-80GB", "2x4 H100"])
def test_the_predicted_step_is_what_the_simulated_session_takes(algorithm, cluster):
    workload = hf.Workload(prompts=30, prompt_tokens=200, response_tokens=100)
    planned = session_on(cluster, algorithm).plan(algorithm, workload, top=3)
    assert planned.trace.duration_s == pytest.approx(planned.seconds, rel=1e-6)
    for other in (planned.best, *planned.runners_up):
        plan = replace(planned, best=other)
        took = simulate(session_on(cluster, algorithm), algorithm, workload, plan)
        assert took == pytest.approx(other.seconds, rel=0.02), other.title


@pytest.mark.parametrize("mode", ["packed", "shared"])
@pytest.mark.parametrize("cluster", ["1x4 cpu", "2x2 cpu", "1x4 A100-80GB"])
@pytest.mark.parametrize("algorithm", [hf.PPO(mini_batches=2), hf.ReMax()])
def test_weights_that_engines_share_move_back(algorithm, cluster, mode):
    """On CPU in mode ``shared`` the trainer's first call after a generation moves the weights back; on a GPU nothing is shared."""
    workload = hf.Workload(prompts=30, prompt_tokens=200, response_tokens=100)
    spec = model(layers=16, width=1024)

    def session():
        return session_on(cluster, algorithm, spec=spec, cpu_weights=mode, dtype="fp32")

    planned = session().plan(algorithm, workload, top=12)
    assert any("rollout" in a.layouts["actor"] for a in (planned.best, *planned.runners_up))
    for other in (planned.best, *planned.runners_up):
        took = simulate(session(), algorithm, workload, replace(planned, best=other))
        assert took == pytest.approx(other.seconds, rel=2e-3), other.title
    moved = {(c.role, c.method) for c in planned.again(placement="colocate").calls for name, _, _ in c.parts if name == "reshard"}
    after = {"compute_log_probs"} if isinstance(algorithm, hf.PPO) else {"update", "compute_log_probs"}
    back = {method for role, method in moved if role == "actor"} - {"generate"}
    assert bool(back & after) == (mode == "shared" and "cpu" in cluster)


@pytest.mark.parametrize("lengths", ["uniform", "lognormal"])
def test_lengths_that_differ(lengths):
    algorithm = hf.PPO(mini_batches=2)
    workload = hf.Workload(prompts=64, prompt_tokens=100, response_tokens=300, response_lengths=lengths)
    plan = session_on("1x4 A100-80GB", algorithm).plan(algorithm, workload)
    session = session_on("1x4 A100-80GB", algorithm, lengths=lengths)
    assert simulate(session, algorithm, workload, plan) == pytest.approx(plan.seconds, rel=0.05)
    assert plan.seconds < session_on("1x4 A100-80GB", algorithm).plan(algorithm, replace(workload, response_lengths="full")).seconds


@pytest.fixture(scope="module")
def any_plan():
    """A plan to ask for others."""
    workload = hf.Workload(prompts=32, prompt_tokens=100, response_tokens=50)
    return session_on("2x4 A100-80GB", hf.PPO()).plan(hf.PPO(), workload)


@pytest.mark.parametrize("preset", ["colocate", "split", "standalone", "interleaving", "separation"])
def test_every_call_of_a_preset_is_predicted_as_simulated(preset, any_plan):
    """Plans that are not the best as well: call by call, on two nodes and with shadows."""
    algorithm, workload = hf.PPO(), any_plan.workload
    session = session_on("2x4 A100-80GB", algorithm)
    plan = any_plan.again(placement=preset)
    one = plan.best
    assert one.preset == preset
    simulate(session, algorithm, workload, plan)
    took = session.trace.snapshot().seconds_by_call()
    assert set(took) == set(one.calls)
    for name, seconds in took.items():
        assert one.calls[name] == pytest.approx(seconds, rel=0.02, abs=1e-4), name


@pytest.mark.parametrize(
    ("device", "experts"), [("H100", None), ("A100-80GB-PCIe", None), ("H100", hf.Experts(count=24, per_token=2, width=96))]
)
def test_setups_and_links_are_those_of_the_perf_model(device, experts):
    """The tables make setups by themselves, because making thousands takes long; they have to be the same."""
    rng = np.random.default_rng(3)
    for _ in range(40 if experts is None and device == "H100" else 15):
        nodes, size = int(rng.integers(1, 7)), int(rng.choice([1, 2, 4, 6, 8]))
        cluster = ClusterSpec.parse(f"{nodes}x{size} {device}")
        session = session_on(cluster, hf.PPO(), spec=replace(model(layers=12, heads=24, kv=24, width=384), experts=experts))
        tables = Tables(cluster, PerfModel())
        (kind,) = tables.kinds
        search = Search.over(roles_of(session), recorded(session, hf.PPO(), hf.Workload(prompts=8)), tables)
        item = search.spaces[0].mode.items[0]
        for _ in range(10):
            pool = int(rng.choice(kind.sizes))
            layouts = list(tables.layouts(item, kind, pool))
            chosen = layouts[rng.integers(len(layouts))]
            devices = pack(kind, [pool])[0]
            assert tables.links(chosen["train"], kind, pool) == Links.of(cluster, devices, chosen["train"]), (cluster, chosen)
            role = replace(item.role, train=chosen["train"], rollout=chosen["rollout"])
            assert tables.setup(item, chosen, kind, pool, rollout=True) == Setup.of(role, cluster, devices), (cluster, chosen)


def test_plans_that_share_devices_alike_are_replayed_as_each_alone():
    session = session_on(ClusterSpec.parse("2x4 A100-80GB"), hf.PPO())
    search = Search.over(
        roles_of(session), recorded(session, hf.PPO(), hf.Workload(prompts=8)), Tables(session.cluster, PerfModel())
    )
    rng = np.random.default_rng(0)
    for space in search.spaces:
        for grouping in range(len(space.groupings)):
            took = rng.random((5, len(space.mode.jobs)))
            many = space.replay.ends(took, np.full(5, grouping))
            assert np.array_equal(space.replay.ends(took, grouping), many)
            assert np.array_equal(space.replay.makespan(took, grouping), many.max(1))


@pytest.mark.parametrize("on", ["3x4 A100-80GB", "1x4 H100 + 1x4 A100-80GB", "1x4 cpu"])
def test_a_plan_does_not_depend_on_those_made_before(on):
    """Many placements are equally fast (reward models beside a long update); which is taken is a matter of the question alone."""
    lengths = ((16, 8), (64, 1024), (512, 16), (128, 128), (16, 8))
    works = [hf.Workload(prompts=32, prompt_tokens=p, response_tokens=r) for p, r in lengths]

    def planned(workload):
        plan = session_on(ClusterSpec.parse(on), hf.PPO()).plan(hf.PPO(), workload, top=5, by_placement=True)
        return plan.best, plan.runners_up, plan.calls, plan.memory, replace(plan.search, seconds=0.0, tables_s=0.0, record_s=0.0)

    forward = [planned(workload) for workload in works]
    backward = [planned(workload) for workload in works[::-1]][::-1]
    assert forward == backward
    assert forward[0] == forward[-1]
    assert len({f"{best.placement} {best.layouts}" for best, *_ in forward}) > 1


def test_more_cores_are_never_slower():
    workload = hf.Workload(prompts=16, prompt_tokens=64, response_tokens=32)
    seconds = [
        session_on(ClusterSpec.parse("1x4 cpu").with_cores(cores), hf.PPO(), dtype="fp32").plan(hf.PPO(), workload).seconds
        for cores in (1, 2, 3, 4)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 2 * seconds[3]


# -- searches that end early


def test_a_search_that_ends_early_says_by_how_much_it_may_be_wrong(monkeypatch):
    """With hardly any boxes allowed the best plan stays at or above the proven one, and that one within the gap that is told."""
    workload = hf.Workload(prompts=64, prompt_tokens=128, response_tokens=128)

    def plan():
        return session_on(ClusterSpec.parse("4x8 A100-80GB"), hf.PPO()).plan(hf.PPO(), workload)

    whole = plan()
    assert "early" not in whole.search.family
    monkeypatch.setattr("hfsdk.planner.search.search.MOST_FOR_ALL", (1, 1))
    best = plan()
    assert best.search.family.endswith("the best plan is proven.")
    assert best.seconds == pytest.approx(whole.seconds, rel=1e-12)
    monkeypatch.setattr("hfsdk.planner.search.search.MOST_FOR_BEST", (1, 1))
    early = plan()
    gap = float(early.search.family.rsplit("at most ", 1)[1].removesuffix("%.")) / 100
    assert early.seconds * (1 - gap - 0.001) <= whole.seconds <= early.seconds


# -- what must hold


def test_more_is_never_worse():
    """Memory, bandwidth and devices (a plan may leave some idle)."""
    for number in range(30):
        cluster, roles, calls, _ = random_case(number)

        def best(on):
            found = Search.over(roles, calls, Tables(on, PerfModel()), top=1).run()  # noqa: B023
            return found[0].seconds if found else np.inf

        base = best(cluster)
        fuller = cluster.with_memory(cluster.devices[0].memory_bytes * 2)
        inter = replace(cluster.inter_node, bandwidth=cluster.inter_node.bandwidth * 3)
        intra = replace(cluster.intra_node, bandwidth=cluster.intra_node.bandwidth * 3)
        more = replace(cluster, node_devices=cluster.node_devices + cluster.node_devices[:1])
        faster = tuple(tuple(replace(d, memory_bandwidth=2 * d.memory_bandwidth) for d in n) for n in cluster.node_devices)
        for better in (fuller, replace(cluster, inter_node=inter), replace(cluster, intra_node=intra), more,
                       replace(cluster, node_devices=faster)):  # fmt: skip
            assert best(better) <= base * (1 + 1e-12), number


def test_a_plan_can_leave_devices_idle():
    session = hf.Session.simulated("7x1 A100-80GB")
    actor = session.actor(model(), train="tp1 dp1", rollout="tp1 dp1", dtype="bf16")
    session.reference(actor)
    session.reward(model(), layout="tp1 dp1", dtype="bf16")
    plan = session.plan(hf.GRPO(n=2), hf.Workload(prompts=2, prompt_tokens=8, response_tokens=8))
    assert plan.num_idle >= 3
    assert f"{plan.num_idle} devices idle" in repr(plan)


def test_mixed_clusters():
    algorithm = hf.PPO()
    workload = hf.Workload(prompts=32, prompt_tokens=100, response_tokens=100)
    spec = ModelSpec.preset("llama-7b")
    plan = session_on("1x8 H100 + 1x8 A100-80GB", algorithm, spec=spec, optimizer=SHARDED).plan(algorithm, workload)
    alone = session_on("1x8 H100", algorithm, spec=spec, optimizer=SHARDED).plan(algorithm, workload)
    assert plan.seconds <= alone.seconds
    kinds = [{plan.cluster.devices[d].name for d in pool.devices} for pool in plan.placement.pools]
    assert all(len(kind) == 1 for kind in kinds) or len(plan.placement.pools) == 1
    took = simulate(session_on("1x8 H100 + 1x8 A100-80GB", algorithm, spec=spec, optimizer=SHARDED), algorithm, workload, plan)
    assert took == pytest.approx(plan.seconds, rel=0.02)


def test_declared_layouts_are_kept_and_open_ones_searched():
    session = hf.Session.simulated("2x4 A100-80GB")
    actor = session.actor(model(), train="tp2 pp2", dtype="bf16")
    session.reference(actor)
    session.reward(model(), dtype="bf16", layout="tp1 dp4")
    plan = session.plan(hf.GRPO(n=2), hf.Workload(prompts=16, prompt_tokens=64, response_tokens=64))
    for one in (plan.best, *plan.runners_up):
        assert (one.layouts["actor"]["train"].tp, one.layouts["actor"]["train"].pp) == (2, 2)
        assert one.layouts["reward"]["train"] == Layout(tp=1, dp=4)
    assert "rollout" in plan.layouts.get("actor.rollout", plan.layouts["actor"])
    session.place(plan)
    assert actor.layouts["train"] == plan.layouts["actor"]["train"]
    assert (reward := session.models.reward).layouts["train"] == Layout(tp=1, dp=4)
    assert plan.placement.pool_of("reward").size == 4
    with refuses(hf.PlacementError, "reward", "all"):
        session.place("colocate")
    assert reward.layouts["train"] == Layout(tp=1, dp=4)


# -- place(plan)


def test_place_applies_a_plan():
    algorithm, workload = hf.PPO(), hf.Workload(prompts=32, prompt_tokens=100, response_tokens=50)
    session = session_on("2x4 A100-80GB", algorithm)
    plan = session.plan(algorithm, workload)
    session.place(plan)
    for handle in session.roles:
        assert handle.layouts["train"] == plan.layouts[handle.name]["train"]
    assert {h.name for h in session.roles} == set(plan.models)
    assert session.actor(model(), dtype="bf16") is session.roles[0], "declared again: the same handle, as planned"


def test_place_refuses_a_plan_of_something_else():
    algorithm, workload = hf.GRPO(n=2), hf.Workload(prompts=8, prompt_tokens=8, response_tokens=8)
    plan = session_on("1x4 A100-80GB", algorithm).plan(algorithm, workload)
    with refuses(hf.PlacementError, "1x4", "1x2"):
        session_on("1x2 A100-80GB", algorithm).place(plan)
    with refuses(hf.PlacementError, "critic"):
        session_on("1x4 A100-80GB", hf.PPO()).place(plan)
    with refuses(hf.PlacementError, "actor"):
        session_on("1x4 A100-80GB", algorithm, spec=model(name="other")).place(plan)
    other = hf.Session.simulated("1x4 A100-80GB")
    assert plan.layouts["actor"]["train"].tp != 4
    other.reference(other.actor(model(), dtype="bf16", train="tp4"))
    other.reward(model(), dtype="bf16")
    with refuses(hf.PlacementError, "actor", "tp4"):
        other.place(plan)


# -- what a plan tells


@pytest.fixture(scope="module")
def big():
    session = session_on("16x8 A100-80GB", hf.PPO(), spec=ModelSpec.preset("llama-70b"), optimizer=SHARDED)
    return session.plan(hf.PPO(), hf.Workload(steps=100), top=5)


def test_a_plan_explains_itself(big):
    text = big.why()
    assert "128 devices" in text
    assert all(" s more" in a.why for a in big.runners_up)
    assert [a.seconds for a in big.runners_up] == sorted(a.seconds for a in big.runners_up)
    assert big.band[0] < big.seconds < big.band[1]
    frame = big.to_pandas()
    assert len(frame) == 5
    assert frame.seconds.tolist() == [big.seconds, *(a.seconds for a in big.runners_up)]
    assert big.search.num_considered > 10**6
    assert big.search.num_pruned > 0.99 * big.search.num_considered


def test_facts_are_what_the_perf_model_sends():
    """A reduction's bytes are those that its seconds are made of; what a backward pass computes again it sends again."""
    perf, workload = PerfModel(), hf.Workload(prompts=64, mini_batches=2)
    for optimizer in (SHARDED, hf.AdamW()):
        sent = {}
        for recompute in ("", "full", "selective"):
            session = session_on(
                "1x8 A100-80GB", hf.GRPO(n=2), spec=model(heads=8, kv=8, width=1024), optimizer=optimizer, train="tp4 dp2",
                recompute=recompute,
            )  # fmt: skip
            best = session.plan(hf.GRPO(n=2), workload).again(placement="colocate").best
            setup = Setup.of(replace(roles_of(session)[0], train=Layout(tp=4, dp=2)), session.cluster, range(8))
            seconds = perf.reduction(setup) * 2
            rate = setup.links.dp.bandwidth * perf.link_efficiency
            assert best.facts["actor"]["dp_bytes"] / rate == pytest.approx(seconds), (optimizer, recompute)
            sent[recompute] = best.facts["actor"]["tp_bytes"]
            again = setup.forwards_again
        tokens = 64 * 2 * (workload.prompt_tokens + workload.response_tokens) / 2
        one_pass = 2 * 4 * tokens * 1024 * 2 * 2 * (4 - 1) / 4
        assert sent["full"] - sent[""] == pytest.approx(one_pass), "one forward pass more"
        assert sent["selective"] - sent[""] == pytest.approx(again * one_pass)


def test_placements_are_counted_once(monkeypatch):
    """What is ruled out is told: a placement that is offered first and met again on the way was looked at once."""
    offered = []
    looked = Best.offer

    def offer(self, leaf):
        offered.append((id(leaf.space), leaf.arrangement, leaf.sizes))
        looked(self, leaf)

    monkeypatch.setattr(Best, "offer", offer)
    for number in range(10):
        offered.clear()
        cluster, roles, calls, _ = random_case(number)
        search = Search.over(roles, calls, Tables(cluster, PerfModel()), top=10**6)
        search.run()
        assert len(offered) == len(set(offered)) == search.num_leaves <= search.num_placements()


def test_presets_that_do_not_fit_say_by_how_much(big):
    assert not big.rejected, "with open layouts all presets fit on 128 devices"
    session = session_on("4x8 A100-80GB", hf.PPO(), spec=ModelSpec.preset("llama-34b"), optimizer=SHARDED)
    small = session.plan(hf.PPO(), hf.Workload(prompts=64))
    told = {r.preset: r for r in small.rejected}
    assert "standalone" in told
    for rejected in told.values():
        assert rejected.over_bytes > 0
        assert "out of memory by" in rejected.why
    standalone = told["standalone"]
    with pytest.raises(hf.DeviceMemoryError):
        session.place("standalone")
    assert "of pool" in standalone.where


@pytest.mark.parametrize("size", ["34b", "70b"])
def test_separation_of_large_models_fits(size):
    """What generates apart holds the weights once, split over the rollout's tp; the session holds what was planned."""
    algorithm, workload = hf.PPO(), hf.Workload(prompts=64)
    session = session_on("16x8 A100-80GB", algorithm, spec=ModelSpec.preset(f"llama-{size}"), optimizer=SHARDED)
    if size == "70b":  # the critic's shadow has the whole model on every device; the actor's alone then
        plan = session.plan(algorithm, workload, top=60)
        plan = replace(plan, best=(one := next(a for a in plan.runners_up if "actor.rollout" in a.layouts)), memory=one.memory)
    else:
        plan = session.plan(algorithm, workload).again(placement="separation")
        assert plan.best.preset == "separation"
    rollout = plan.layouts["actor.rollout"]["rollout"]
    (row,) = [row for row in plan.memory if "actor.rollout" in row.roles]
    held = row.roles["actor.rollout"]
    assert held["weights"] == held["activations"] == held["logits"] == 0
    bare = rollout_parameters(ModelSpec.preset(f"llama-{size}"), rollout.tp)
    assert held["rollout_weights"] == 2 * bare
    took = simulate(session, algorithm, workload, plan)
    assert took == pytest.approx(plan.seconds, rel=0.02)
    planned = {d: row for row in plan.memory for d in row.devices}
    used = session.memory.view()["devices"]
    assert len(used) == len(planned)
    for device in used:
        assert device["planned"]["asked"] == planned[device["device"]].asked
    last = {d["device"]: d["calls"][-1] for d in used}
    device = row.devices[0]
    parts = ("weights", "gradients", "optimizer", "rollout", "kv_cache")
    assert sum(last[device][f"{part}_bytes"] for part in parts) == sum(r["resident"] for r in row.roles.values())


def test_memory_is_what_the_memory_model_says(big):
    for row in big.memory:
        assert row.asked <= row.exists
    assert max(row.asked for row in big.memory) == big.best.peak_bytes
    assert sorted(d for row in big.memory for d in row.devices) == sorted({d for p in big.placement.pools for d in p.devices})


def test_money():
    session = session_on("1x4 A100-80GB", hf.GRPO(n=2))
    parts_of(session).context.cluster = replace(session.cluster, price_per_device_hour=2.5)
    plan = session.plan(hf.GRPO(n=2), hf.Workload(prompts=8, prompt_tokens=64, response_tokens=64, steps=50))
    assert plan.cost_per_step == pytest.approx(plan.seconds * 4 * 2.5 / 3600)
    assert plan.cost == pytest.approx(50 * plan.cost_per_step)


def test_view_is_plain_data(big):
    import json

    view = json.loads(json.dumps(big.view()))
    assert view["seconds"] == big.seconds
    assert len(view["calls"]) == len(big.calls)


def test_plans_pickle(big):
    copy = pickle.loads(pickle.dumps(big))
    assert copy.seconds == big.seconds
    assert copy.sensitivity == ()
    assert copy.trace.duration_s == pytest.approx(big.seconds)


def test_too_close_to_call():
    """With no error nothing is; with a large one plans that differ in a call are."""
    algorithm, workload = hf.PPO(), hf.Workload(prompts=64, prompt_tokens=200, response_tokens=200)
    session = session_on("1x4 A100-80GB", algorithm)
    assert not session.plan(algorithm, workload, error=0.0).too_close
    assert session.plan(algorithm, workload, error=0.9).too_close


def test_bands_of_presets_are_by_kind_of_call():
    """Each kind has its own; what is asked for goes before. Whoever sees a band can read how often it held."""
    from hfsdk.planner.runners_up import PRESET_BANDS, PRESET_KEPT, Bands

    assert Bands(None).of("generate") == PRESET_BANDS["generate"]
    assert Bands(None).of("update") == PRESET_BANDS["update"]
    assert Bands(None).of("compute_values") == PRESET_BANDS["forward"]
    assert Bands(0.1).of("update") == pytest.approx((0.9, 1.1))
    assert Bands({"generate": 0.2}).of("generate") == pytest.approx((0.8, 1.2))
    assert Bands({"generate": 0.2}).of("update") == PRESET_BANDS["update"]
    session = session_on("1x4 A100-80GB", hf.GRPO(n=2))
    plan = session.plan(hf.GRPO(n=2), hf.Workload(prompts=8, prompt_tokens=64, response_tokens=64))
    low, high = (end / plan.seconds for end in plan.band)
    assert 0.68 <= low <= 0.75
    assert 1.5 <= high <= 2.0
    assert PRESET_BANDS.keys() == PRESET_KEPT.keys()
    low, high = PRESET_BANDS["generate"]
    for said in (f"generate x{low:.2f} to x{high:.2f} ({PRESET_KEPT['generate']})", "update x", "not calibrated"):
        assert said in plan.band_words
    assert plan.band_words in plan.why()
    assert plan.band_words in picture_of(plan).to_text()
    assert "update 20%" in session.plan(hf.GRPO(n=2), hf.Workload(prompts=8), error={"update": 0.2}).band_words


def test_calibrated_bands_are_those_of_plans():
    from hfsdk.planner.runners_up import relative_errors

    bands = {"": (0.9, 1.2), "generate.decode": (0.95, 1.02), "generate.prefill": (0.5, 1.1), "update.forward": (0.99, 1.01)}
    assert relative_errors(bands) == pytest.approx({"": 0.2, "generate": 0.5, "update": 0.01})
    session, workload = session_on("1x4 A100-80GB", hf.GRPO(n=2)), hf.Workload(prompts=8, prompt_tokens=64, response_tokens=64)
    wide = session.plan(hf.GRPO(n=2), workload, error=0.3).band
    session.errors = dict.fromkeys(["", "generate", "update"], 0.01)
    narrow = session.plan(hf.GRPO(n=2), workload).band
    assert narrow[1] - narrow[0] == pytest.approx((wide[1] - wide[0]) / 30)
    slower = replace(session.perf, dispatch_s=session.perf.dispatch_s * 10)
    before = session.plan(hf.GRPO(n=2), workload).seconds
    session.perf = slower
    assert session.plan(hf.GRPO(n=2), workload).seconds > before


def test_what_a_decision_hangs_on():
    """At the value that a hinge names both plans take equally long, and the order is the other one beyond it."""
    algorithm, workload = hf.PPO(), hf.Workload(prompts=256, prompt_tokens=512, response_tokens=512)
    spec = ModelSpec.preset("llama-13b")
    session = session_on("4x8 A100-80GB", algorithm, spec=spec, optimizer=SHARDED)
    plan = session.plan(algorithm, workload)
    best, others = plan.find_hinges.args
    perf = best.leaf.space.tables.perf
    assert best.seconds_by(perf) == pytest.approx(plan.seconds)
    found = [(other, hinge) for other, hinge in zip(others, plan.hinges, strict=True) if hinge is not None]
    assert found, "some runner-up can be made the faster one"
    for other, hinge in found:
        now = getattr(perf, hinge.constant)
        assert hinge.now == now
        beyond = replace(perf, **{hinge.constant: hinge.at * (hinge.at / now) ** 0.02})
        before = replace(perf, **{hinge.constant: now * (hinge.at / now) ** 0.9})
        assert other.seconds_by(before) > best.seconds_by(before)
        assert other.seconds_by(beyond) <= best.seconds_by(beyond) * (1 + 1e-6)
        assert str(hinge) in plan.why()
    assert pickle.loads(pickle.dumps(plan)).hinges == ()


def test_sensitivity_and_again():
    spec = replace(ModelSpec.preset("llama-70b"), max_positions=16384)
    session = session_on("16x8 A100-80GB", hf.PPO(), spec=spec, optimizer=SHARDED)
    plan = session.plan(hf.PPO(), hf.Workload(prompts=256))
    longer = plan.again(workload=hf.Workload(prompts=256, response_tokens=4096))
    assert longer.seconds > plan.seconds
    assert longer.workload.response_tokens == 4096
    assert plan.again(cluster="32x8 A100-80GB").seconds <= plan.seconds
    for turn in plan.sensitivity:
        value = replace(plan.workload, **{turn.field: turn.value})
        assert plan.again(workload=value).seconds == pytest.approx(turn.seconds)
        assert turn.title in str(turn)


# -- bad input


def test_workloads_are_checked():
    for options, named in (
        ({"prompts": 0}, ("prompts=0", "1,000,000")), ({"prompt_tokens": -5}, ("prompt_tokens=-5",)),
        ({"response_tokens": 0}, ("response_tokens=0",)), ({"response_tokens": 1.5}, ("response_tokens=1.5",)),
        ({"n": 0}, ("n=0",)), ({"steps": 0}, ("steps=0",)),
        ({"response_lengths": "short"}, ("response_lengths='short'", "'full'", "'uniform'", "'lognormal'")),
        ({"prompts": 4, "mini_batches": 5}, ("mini_batches=5", 4)),
    ):  # fmt: skip
        with refuses(hf.OptionError, *named):
            hf.Workload(**options)


def test_what_cannot_be_planned():
    session = session_on("1x4 A100-80GB", hf.PPO())
    with refuses(hf.OptionError, "DPO", "generates"):
        session.plan(hf.DPO(), hf.Workload(prompts=8))
    with refuses(hf.OptionError, "algorithm", "'ppo'"):
        session.plan("ppo", hf.Workload(prompts=8))
    with refuses(hf.OptionError, "workload=8"):
        session.plan(hf.PPO(), 8)
    with refuses(hf.OptionError, "top=0"):
        session.plan(hf.PPO(), hf.Workload(prompts=8), top=0)
    with refuses(hf.OptionError, "context", "10,000", "8,192"):
        session.plan(hf.PPO(), hf.Workload(prompts=8, prompt_tokens=5000, response_tokens=5000))
    with refuses(hf.PlacementError, "model"):
        hf.Session.simulated("1x4 A100-80GB").plan(hf.PPO(), hf.Workload(prompts=8))
    bare = hf.Session.simulated("1x4 A100-80GB")
    bare.actor(model())
    with refuses(hf.PlacementError, "reference", "reward"):
        bare.plan(hf.GRPO(n=2), hf.Workload(prompts=8))


def test_layouts_that_cover_no_pool():
    session = hf.Session.simulated("3x4 A100-80GB")
    session.reference(session.actor(model(layers=5), train="tp1 pp5", dtype="bf16"))
    session.reward(model(), dtype="bf16")
    with refuses(hf.LayoutError, "actor", "tp1 pp5", "1, 2, 4, 8, 12"):
        session.plan(hf.GRPO(n=2), hf.Workload(prompts=8))


ADVICE = ['layouts left open ("auto"), where they are declared', "optimizer=AdamW(distributed=True)", "offload=True",
          "recompute='full'", "dtype='bf16'", "fewer micro_batch_tokens", "lora=hf.LoRA(rank=16)"]  # fmt: skip


@pytest.mark.parametrize(
    ("has", "left_out"),
    [
        ({"dtype": "fp32"}, (0,)),
        ({"optimizer": SHARDED, "recompute": "full"}, (0, 1, 3, 4)),
        ({"lora": hf.LoRA(rank=8), "train": "tp1", "optimizer": SHARDED}, (1, 4, 6)),
    ],
)  # fmt: skip
def test_where_nothing_fits_only_what_a_role_lacks_is_advised(has, left_out):
    session = session_on("1x1 A100-80GB", hf.GRPO(n=2), spec=ModelSpec.preset("llama-70b"), **has)
    with pytest.raises(hf.DeviceMemoryError) as refused:
        session.plan(hf.GRPO(n=2), hf.Workload(prompts=8))
    advice = str(refused.value).rpartition("What also helps: ")[2]
    assert advice == ", ".join(one for n, one in enumerate(ADVICE) if n not in left_out) + "."


@pytest.mark.parametrize("algorithm", [hf.GRPO(n=2), hf.PPO()])
@pytest.mark.parametrize("cluster", ["1x1 A100-80GB", "1x8 A100-80GB", "2x8 A100-80GB"])
def test_models_that_fit_nowhere(cluster, algorithm):
    """By how many bytes, and the smallest cluster that would do: which then does, and one node fewer does not."""
    workload, options = hf.Workload(prompts=8), {"spec": ModelSpec.preset("llama-70b")}
    if isinstance(algorithm, hf.PPO):  # with shadows it fits on fewer nodes than without
        options["optimizer"] = SHARDED
    with refuses(hf.DeviceMemoryError, "too much by", "GB") as refused:
        session_on(cluster, algorithm, **options).plan(algorithm, workload)
    enough = str(refused.value).split("would do is '")[1].split("'")[0]
    assert session_on(enough, algorithm, **options).plan(algorithm, workload).seconds > 0
    nodes = int(enough.split("x")[0])
    assert nodes > 1
    fewer = f"{nodes - 1}x{enough.split('x', 1)[1]}"
    with pytest.raises(hf.DeviceMemoryError):
        session_on(fewer, algorithm, **options).plan(algorithm, workload)


@pytest.mark.parametrize("size", ["34b", "70b"])
def test_declared_layouts_that_do_not_fit_are_named_with_their_bytes(size):
    """Pools that a declared layout does not cover say nothing of what its role needs."""
    session = session_on("1x8 A100-80GB", hf.PPO(), spec=ModelSpec.preset(f"llama-{size}"), optimizer=SHARDED, train="tp8")
    actor = next(role for role in roles_of(session) if role.name == "actor")
    least = min(
        role_bytes(with_least(replace(actor, train=Layout(tp=8, dp=1), rollout=Layout(tp=tp, dp=8 // tp))), 8).total
        for tp in (1, 2, 4, 8)
    )
    over = least + GPU_PROCESS_BYTES - session.cluster.devices[0].memory_bytes
    assert over > 0
    with refuses(hf.DeviceMemoryError, f"actor (llama-{size})", f"{over / 1e9:.1f} GB"):
        session.plan(hf.PPO(), hf.Workload(prompts=64))


def test_declared_layouts_without_pools_side_by_side():
    """On 8 devices a role on all of them and one on exactly four neither share nor lie side by side, however small they are."""
    session = hf.Session.simulated("1x8 A100-80GB")
    session.reference(session.actor(model(), train="tp4 dp2", dtype="bf16"))
    session.critic(model(), dtype="bf16", train="tp4 dp1")
    session.reward(model(), dtype="bf16")
    with refuses(hf.DeviceMemoryError, "layouts", "pools") as refused:
        session.plan(hf.PPO(), hf.Workload(prompts=8))
    assert "too much" not in str(refused.value)


def test_no_number_of_nodes_would_do():
    session = session_on("1x1 A100-80GB", hf.GRPO(n=2), micro_batch_tokens=10**9)
    with refuses(hf.DeviceMemoryError, "No number", "nodes"):
        session.plan(hf.GRPO(n=2), hf.Workload(prompts=8))


def test_plan_step_is_pure():
    session = session_on("1x4 A100-80GB", hf.PPO())
    workload = hf.Workload(prompts=16, prompt_tokens=64, response_tokens=64)
    calls, roles = recorded(session, hf.PPO(), workload), roles_of(session)
    first, second = (plan_step(calls, roles, session.cluster, workload) for _ in range(2))
    assert first.best == second.best
    assert first.calls == second.calls


# -- lengths that vary: judged by several steps


def tailed(seed, lengths="lognormal", most=16_384):
    session = hf.Session.simulated("16x8 H100", seed=seed)
    trained = {"dtype": "bf16", "optimizer": SHARDED, "recompute": "full"}
    actor = session.actor("qwen2.5-7b", rollout_options=hf.RolloutOptions(max_model_len=most + 512), **trained)
    session.reference(actor)
    session.reward(lambda completions: [0.0] * len(completions))
    workload = hf.Workload(prompts=128, prompt_tokens=512, response_tokens=most, response_lengths=lengths)
    return session.plan(hf.GRPO(n=8), workload, by_placement=True)


def test_no_device_idles_because_one_step_s_lengths_happen_to_suit_fewer():
    """With seed 4 the first step is faster on 120 devices than on 128, by the luck of which long rows meet; most steps are not."""
    plan = tailed(4)
    fewer = next(one for one in plan.runners_up if len({d for pool in one.placement.pools for d in pool.devices}) == 120)
    assert plan.num_idle == 0
    assert fewer.seconds == fewer.steps_s[0] < plan.best.steps_s[0] == plan.seconds
    assert fewer.mean_s > plan.best.mean_s
    assert [one.mean_s for one in (plan.best, *plan.runners_up)] == sorted(one.mean_s for one in (plan.best, *plan.runners_up))
    differences = np.subtract(fewer.steps_s, plan.best.steps_s)
    apart, alone = np.mean(differences) / plan.best.mean_s, np.std(differences, ddof=1) / plan.best.mean_s
    assert fewer.too_close
    assert f"{apart:.1%} apart, and the lengths that a step draws make {alone:.1%} of difference alone" in fewer.why
    assert "8 steps' lengths" in plan.search.family
    assert "in the mean of 8 steps" in repr(plan)
    assert plan.to_pandas().mean_s.is_monotonic_increasing


def test_what_lengths_make_of_difference_decides_what_is_too_close_and_nothing_where_they_are_alike():
    assert not tailed(0, "full").best.steps_s
    plan = tailed(0, most=4096)
    for one in plan.runners_up:
        differences = np.subtract(one.steps_s, plan.best.steps_s)
        within = np.mean(differences) <= np.std(differences, ddof=1)
        assert ("too close to call" in str(one)) == one.too_close
        assert ("apart, and the lengths" in one.why) == bool(within)
        assert one.too_close or not within


@pytest.mark.parametrize("lengths", ["uniform", "lognormal"])
def test_each_step_that_plans_are_judged_by_is_one_that_the_simulated_session_takes(lengths):
    """A colocated plan differs from step to step by its generation alone, as far as it is judged."""
    algorithm = hf.GRPO(n=2)
    workload = hf.Workload(prompts=32, prompt_tokens=100, response_tokens=300, response_lengths=lengths)
    session = session_on("1x4 A100-80GB", algorithm, lengths=lengths)
    plan = session.plan(algorithm, workload).again(placement="colocate")
    session.place(plan)
    stream = session.prompts([[1] * workload.prompt_tokens] * workload.prompts, batch_size=workload.prompts)
    took = []
    for number in range(len(plan.best.steps_s)):
        replace(algorithm, max_new_tokens=300).step(session.models, stream[number]).actor.wait()
        took.append(next(span.duration_s for span in session.trace.snapshot().calls if span.method == "generate"))
    assert len(took) == 8
    assert len(set(took)) == 8
    assert np.subtract(plan.best.steps_s, plan.best.steps_s[0]) == pytest.approx(np.subtract(took, took[0]), abs=0.005 * took[0])
