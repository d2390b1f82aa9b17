"""Ranks that share each sequence (cp): who stands where, what they hold, how long they take, who refuses them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.cluster import LinkSpec
from hfsdk.core.microbatch import plan_pass
from hfsdk.core.protocol import DP, PP_ONLY, THREE_D
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.spec import PRESETS
from hfsdk.engine.calls.host_memory import kept_bytes
from hfsdk.planner.perf.memory import role_bytes
from hfsdk.planner.perf.perf_model import Links, PerfModel, Setup
from hfsdk.planner.perf.row_lengths import LengthSums
from hfsdk.resharding.reshard_plan import ReshardPlan
from hfsdk.session.role_specs import Backend, model_role, with_layouts

SPEC = PRESETS["llama3-8b"]
CLUSTER = hf.ClusterSpec.parse("4x8 H100")
MODEL = PerfModel(agree_s=0.0, launch_s=0.0)
FREE = LinkSpec(name="free", bandwidth=1e18, latency_s=0.0)


def role(layout: str, **changes) -> RoleSpec:
    return RoleSpec(
        name="actor", kind="actor", model=SPEC, dtype="bf16", train=hf.Layout.parse(layout), rollout=hf.Layout(tp=4),
        **{"optimizer": AdamW(distributed=True), "micro_batch_tokens": 8192, **changes},
    )  # fmt: skip


def setup(layout: str, **changes) -> Setup:
    return Setup.of(role(layout, **changes), CLUSTER, range(hf.Layout.parse(layout).size))


def unlinked(made: Setup) -> Setup:
    return replace(made, links=replace(made.links, cp=FREE))


# -- who stands where


def test_ranks_of_a_sequence_stand_between_tp_and_dp():
    layout = hf.Layout.parse("tp2 pp2 cp2").fill(16)
    assert str(layout) == "tp2 pp2 dp2 cp2"
    assert hf.Layout.parse(str(layout)) == layout
    places = [layout.coordinates(rank) for rank in range(16)]
    assert [(at.tp, at.cp, at.dp, at.pp) for at in places[:8]] == [
        (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0), (0, 0, 1, 0), (1, 0, 1, 0), (0, 1, 1, 0), (1, 1, 1, 0)
    ]  # fmt: skip
    assert [layout.rank(tp=at.tp, pp=at.pp, dp=at.dp, cp=at.cp) for at in places] == list(range(16))
    mesh = layout.mesh()
    assert mesh.groups("tp")[1] == [2, 3]
    assert mesh.groups("dp")[0] == [0, 2, 4, 6], "gradients are summed over all that have the same weights"
    assert mesh.groups("pp")[0] == [0, 8]


def test_samples_are_split_over_dp_and_come_back_once():
    mesh = hf.Layout.parse("tp2 pp1 dp2 cp2").mesh()
    rows = THREE_D.scatter(12, mesh)
    assert [list(one) for one in rows[:4]] == [list(rows[0])] * 4
    assert sorted(row for rank in THREE_D.collectors(mesh) for row in rows[rank]) == list(range(12))
    assert PP_ONLY.collectors(mesh) == (0,)
    assert len(DP.collectors(mesh)) == 8


def test_weights_go_to_the_rollout_as_from_copies():
    """Ranks that share a sequence have the same weights, so the plan is that of so many replicas."""
    shared = ReshardPlan.between(PRESETS["llama3-1b"], "tp2 dp2 cp2", "tp4 dp2")
    assert shared.volumes() == ReshardPlan.between(PRESETS["llama3-1b"], "tp2 dp4", "tp4 dp2").volumes()


# -- what they hold


def test_state_is_sharded_over_all_copies():
    shared, apart = (role_bytes(role(layout), 16) for layout in ("tp2 dp2 cp4", "tp2 dp8"))
    assert shared == apart
    made, other = setup("tp2 dp2 cp4"), setup("tp2 dp8")
    assert (made.summed_bytes, made.gathered_bytes, made.stepped) == (other.summed_bytes, other.gathered_bytes, other.stepped)
    kept = sum(kept_bytes(role("tp2 dp2 cp4"), rank, trained=True) for rank in range(16))
    assert kept == sum(kept_bytes(role("tp2 dp8"), rank, trained=True) for rank in range(16))


# -- how long they take


def test_a_rank_computes_its_part_of_each_row():
    """Over links that cost nothing: as replicas with as many rows, each of them whole."""
    made = unlinked(setup("tp2 dp2 cp4", micro_batch_tokens=32_000))
    long = np.full(4, 32_000)
    for method in ("update", "compute_log_probs"):
        shared = MODEL.seconds(method, made, long, long * 0)
        apart = MODEL.seconds(method, setup("tp2 dp8", micro_batch_tokens=32_000), long[:1], long[:1] * 0)
        assert shared == pytest.approx(apart, rel=1e-9), method


def test_few_long_rows_are_faster_where_they_are_shared():
    """Four rows of 32,000 on 32 devices: 12 of 16 replicas would have none."""
    found = []
    for cp in (1, 4):
        rows = np.full(max(1, 4 * cp // 16), 32_000)  # of the fullest of 16 / cp replicas
        found.append(MODEL.seconds("update", setup(f"tp2 dp{16 // cp} cp{cp}"), rows, rows * 0))
    assert found[1] < 0.4 * found[0]


def test_keys_and_values_that_pass_by_are_counted():
    """2 kv heads' width of each token, forward once, backward twice; attention hides none of it on a slow link."""
    made = setup("tp2 dp1 cp4")
    slow = replace(made, links=replace(made.links, cp=replace(FREE, bandwidth=1e6)))
    tokens, width = 4000, 2 * SPEC.num_kv_heads * SPEC.head_dim / 2
    passed = tokens / 4 * 3 * width * 2 * SPEC.num_layers / (1e6 * MODEL.link_efficiency)
    rows = np.full(1, tokens)
    assert MODEL.forward(slow, rows) == pytest.approx(passed, rel=0.01)
    forward, backward = MODEL.train(slow, rows)
    assert backward == pytest.approx(2 * forward, rel=0.01)


def test_attention_hides_what_passes_by_of_long_rows_and_not_of_short_ones():
    made = setup("tp1 dp1 cp8")
    link = replace(FREE, bandwidth=50e9)
    shown = []
    for length in (1_000, 200_000):
        free, real = (MODEL.forward(replace(made, links=replace(made.links, cp=one)), np.full(8, length)) for one in (FREE, link))
        shown.append((real - free) / free)
    assert shown[0] > 0.05
    assert shown[1] == 0


def test_a_slower_link_never_helps_and_more_rows_never_take_less():
    made, rows, by_link = setup("tp2 dp1 cp4"), np.full(8, 900), []
    for bandwidth in (1e12, 1e10, 1e8):
        slower = replace(made, links=replace(made.links, cp=replace(FREE, bandwidth=bandwidth)))
        by_link.append(MODEL.seconds("update", slower, rows, rows))
    assert by_link == sorted(by_link)
    by_rows = [MODEL.seconds("update", made, np.full(n, 900), np.full(n, 99)) for n in (1, 2, 3, 8, 64)]
    assert by_rows == sorted(by_rows)


def test_sequences_across_nodes_take_the_network():
    found = {cp: Links.of(CLUSTER, range(32), hf.Layout(tp=4, dp=8 // cp, cp=cp)).cp for cp in (1, 2, 4)}
    assert found[1] is None
    assert found[2] == CLUSTER.intra_node
    assert found[4].bandwidth == pytest.approx(CLUSTER.inter_node.bandwidth / 4), "four tp ranks, each with a ring of its own"


# -- rows longer than a micro-batch


def test_micro_batches_are_counted_as_they_are_cut():
    """Never more than the trainer has, and as many where all rows are long: what several rows leave free is not counted."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        most, long = int(rng.integers(64, 512)), rng.integers(1, 2_000, size=int(rng.integers(1, 40)))
        (cut,) = plan_pass(long, 1, most).micro_batches
        count, largest = LengthSums.of(long).micro_batches(most)
        assert largest == min(long.sum(), max(most, long.max())) >= max(sum(long[row] for row in part) for part in cut), seed
        alone = sum(len(part) == 1 and long[part[0]] >= most for part in cut)
        assert alone <= count <= len(cut) <= alone + 2 * (count - alone) + 1, seed
        every, _ = LengthSums.of(long + most).micro_batches(most)
        assert every == len(plan_pass(long + most, 1, most).micro_batches[0]) == len(long), seed


def test_ranks_that_share_a_row_have_parts_of_it():
    assert LengthSums.of(np.full(3, 8_000), 4).micro_batches(2048, 4) == (3, 2048.0)
    assert LengthSums.of(np.full(3, 8_000), 2).micro_batches(2048, 2) == (3, 4000.0)


def test_a_long_row_fills_and_drains_a_pipeline_by_itself():
    """Two stages, one row: as long as one after the other, however small a micro-batch could be."""
    row = np.full(1, 16_000)
    pipeline, alone = (MODEL.forward(setup(layout, micro_batch_tokens=1024), row) for layout in ("tp4 pp2 dp1", "tp4 pp1 dp1"))
    assert pipeline > 0.95 * alone


def test_a_long_row_asks_for_its_activations():
    """A micro-batch of one row, or the part of it that a rank has."""
    short, long, shared = (
        role_bytes(role(layout, micro_batch_tokens=2048), 8, longest=n)
        for layout, n in (("tp2 dp4", 2000), ("tp2 dp4", 16_000), ("tp2 dp2 cp2", 16_000))
    )
    assert short == role_bytes(role("tp2 dp4", micro_batch_tokens=2048), 8)
    assert long.activations == pytest.approx(short.activations * 16_000 / 2048)
    assert shared.activations == pytest.approx(long.activations / 2)
    assert shared.weights == long.weights


LONG = hf.Workload(prompts=4, prompt_tokens=2_000, response_tokens=30_000)


def planning(cluster: str, **options):
    session = hf.Session.simulated(cluster)
    trained = {"dtype": "bf16", "optimizer": AdamW(distributed=True), "recompute": "full"} | options
    session.reference(session.actor("qwen2.5-7b", rollout_options=hf.RolloutOptions(max_model_len=32_000), **trained))
    session.reward(lambda completions: [0.0] * len(completions))
    return session


def test_the_search_shares_long_rows_and_not_short_ones():
    plan = planning("4x8 H100").plan(hf.GRPO(n=2), LONG)
    assert plan.layouts["actor"]["train"].cp > 1
    (memory,) = plan.memory
    cp = plan.layouts["actor"]["train"].cp
    declared = replace(plan.roles["actor"], train=plan.layouts["actor"]["train"], rollout=None)
    assert memory.roles["actor"]["activations"] == role_bytes(declared, 32, longest=32_000).activations
    assert memory.roles["actor"]["activations"] == pytest.approx(
        role_bytes(replace(declared, micro_batch_tokens=32_000 // cp), 32).activations
    )
    short = hf.Workload(prompts=64, prompt_tokens=512, response_tokens=1_024)
    for one in planning("4x8 H100").plan(hf.GRPO(n=2), short).runners_up:
        assert all(layout.cp == 1 for uses in one.layouts.values() for layout in uses.values())


def test_long_rows_fit_where_ranks_share_them():
    """One row of 32,000 with all its activations is more than a device has; what the plan says fits does, by the same count."""
    few = "1x8 A100-80GB"
    declared = {"train": "tp1", "recompute": ""}
    with refuses(hf.DeviceMemoryError, "32,000 tokens", "micro_batch_tokens"):
        planning(few, **declared).plan(hf.GRPO(n=2), LONG)
    plan = planning(few, recompute="").plan(hf.GRPO(n=2), LONG)
    assert max(layout.tp * layout.pp * layout.cp for layout in plan.layouts["actor"].values()) > 1
    assert all(one.process + max(r["resident"] + r["working"] for r in one.roles.values()) <= one.exists for one in plan.memory)


# -- sessions


def test_a_simulated_session_takes_a_step_as_it_was_planned():
    session = hf.Session.simulated("2x8 H100")
    trained = {"dtype": "bf16", "optimizer": AdamW(distributed=True), "recompute": "full", "micro_batch_tokens": 16384}
    actor = session.actor(
        "llama3-8b", train="tp2 cp4", rollout="tp2", rollout_options=hf.RolloutOptions(max_model_len=8192), **trained
    )
    session.reference(actor, layout="tp4 cp2")
    session.reward(lambda completions: [0.0] * len(completions))
    workload = hf.Workload(prompts=4, prompt_tokens=1024, response_tokens=7_000)
    plan = session.plan(hf.GRPO(n=2), workload)
    assert plan.layouts["actor"]["train"] == hf.Layout.parse("tp2 pp1 dp2 cp4")
    session.place(plan)
    prompts = session.batch(prompt=[np.zeros(1024, dtype=np.int32)] * 4)
    hf.GRPO(n=2, max_new_tokens=7_000).step(session.models, prompts).actor.wait()
    assert session.trace.snapshot().duration_s == pytest.approx(plan.seconds, rel=0.02)
    assert "cp4" in str(session.placement)


def test_engines_refuse_what_they_do_not_do():
    with refuses(hf.LayoutError, "cp=2", "trainer"):
        model_role(RoleSpec(name="actor", kind="actor"), "tiny", "cp2", None, Backend(hf.ClusterSpec.parse("1x2 cpu"), False))
    planned = {"actor": {"train": hf.Layout.parse("tp1 dp4 cp2"), "rollout": hf.Layout(tp=1, dp=8)}}
    runs = replace(role("tp1 dp8"), auto=("train", "rollout"))
    with refuses(hf.PlacementError, "'tp1 pp1 dp4 cp2'"):
        with_layouts(planned, [runs])
    (simulated,) = with_layouts(planned, [replace(runs, auto=("train", "rollout", "cp"))])
    assert simulated.train == planned["actor"]["train"]
    session = hf.Session.simulated("1x8 H100")
    with refuses(hf.LayoutError, "cp=2", "tp and dp"):
        session.actor("llama3-8b", rollout="tp2 cp2")
