from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from expect import refuses

import hfsdk as hf
from hfsdk.core.cluster import LinkSpec
from hfsdk.core.errors import OptionError, UnsupportedModelError
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.spec import PRESETS, Experts, ModelSpec
from hfsdk.planner.perf.expert_sizes import distinct, exchanged_rows
from hfsdk.planner.perf.memory import role_bytes, rollout_parameters
from hfsdk.planner.perf.perf_model import Links, PerfModel, Setup, reshard_bytes
from hfsdk.resharding.reshard_plan import ReshardPlan

MODEL = PerfModel()
CLUSTER = hf.ClusterSpec.parse("4x8 H100")
CONFIG_QWEN = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
               "mlp_only_layers": [], "intermediate_size": 6144}  # fmt: skip
CONFIG_DEEPSEEK = {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "moe_intermediate_size": 2048, "topk_method": "noaux_tc", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9), "qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235, 22), "deepseek-v3": (671, 37),
}  # fmt: skip
"""Billions of parameters as the models' papers and cards give them, all and those of one token."""
MIXTURES = sorted(PUBLISHED)


def setup(spec: ModelSpec, layout: str = "tp4 pp1 dp8", rollout_ep: int = 1) -> Setup:
    rollout = hf.Layout(tp=4 if rollout_ep < 16 else 2, ep=rollout_ep)
    role = RoleSpec(
        name="actor", kind="actor", model=spec, dtype="bf16", train=hf.Layout.parse(layout), rollout=rollout,
        optimizer=AdamW(distributed=True),
    )  # fmt: skip
    return Setup.of(role, CLUSTER, range(32))


def seconds(spec: ModelSpec, method: str, rows: int = 64, perf: PerfModel = MODEL) -> float:
    return perf.seconds(method, setup(spec), np.full(rows, 256), np.full(rows, 512))


def test_all_parameters_and_those_of_a_token_are_the_published_ones():
    for name, (every, active) in PUBLISHED.items():
        assert PRESETS[name].num_parameters() / 1e9 == pytest.approx(every, rel=0.002), name
        assert PRESETS[name].num_active_parameters() / 1e9 == pytest.approx(active, rel=0.02), name


def test_one_rank_holds_the_tensors_of_the_files():
    for name in MIXTURES:
        assert rollout_parameters(PRESETS[name], 1) == PRESETS[name].num_parameters(), name


def test_presets_have_the_numbers_of_the_models_own_configs():
    qwen, deepseek = PRESETS["qwen3-30b-a3b"].experts, PRESETS["deepseek-v3"].experts
    for one, config in ((qwen, CONFIG_QWEN), (deepseek, CONFIG_DEEPSEEK)):
        count = config.get("num_experts") or config["n_routed_experts"]
        assert (one.count, one.per_token, one.width) == (count, config["num_experts_per_tok"], config["moe_intermediate_size"])
        assert (one.shared, one.first_dense) == (config.get("n_shared_experts", 0), config.get("first_k_dense_replace", 0))
        assert one.router_bias == (config.get("topk_method") == "noaux_tc")
    latent = PRESETS["deepseek-v3"].latent
    assert (latent.q_rank, latent.kv_rank) == (CONFIG_DEEPSEEK["q_lora_rank"], CONFIG_DEEPSEEK["kv_lora_rank"])
    assert (latent.rope_dim, latent.nope_dim) == (CONFIG_DEEPSEEK["qk_rope_head_dim"], CONFIG_DEEPSEEK["qk_nope_head_dim"])
    assert latent.value_dim == CONFIG_DEEPSEEK["v_head_dim"]


def test_more_experts_for_a_token_than_there_are_is_refused():
    with refuses(OptionError, 9, 8, "experts"):
        Experts(count=8, per_token=9, width=64)


def test_latent_attention_caches_one_vector_a_token():
    assert PRESETS["deepseek-v3"].kv_bytes_per_token() == 61 * (512 + 64) * 2  # arXiv 2412.19437 has 70 KB


def test_few_rows_reach_few_experts_and_many_reach_all():
    experts = PRESETS["qwen3-30b-a3b"].experts
    assert distinct(experts, 1) == pytest.approx(8)
    assert (np.diff(distinct(experts, np.arange(1.0, 100.0))) > 0).all()
    assert distinct(experts, 10_000) == pytest.approx(128)


def test_more_experts_of_the_same_k_cost_memory_and_reads_but_no_arithmetic():
    few = PRESETS["qwen3-30b-a3b"]
    many = replace(few, experts=replace(few.experts, count=256))
    role = RoleSpec(name="actor", kind="actor", model=few, train=hf.Layout(tp=4), optimizer=AdamW(), dtype="bf16")
    assert role_bytes(replace(role, model=many), 32).total > role_bytes(role, 32).total
    assert seconds(many, "generate") > seconds(few, "generate")
    router = 48 * 128 * few.hidden_size
    assert many.num_active_parameters() - few.num_active_parameters() == router


def test_a_mixture_is_between_dense_models_of_its_active_and_of_all_its_parameters():
    mixture = PRESETS["qwen3-30b-a3b"]
    active = replace(mixture, experts=None, mlp_hidden_size=8 * 768)
    whole = replace(mixture, experts=None, mlp_hidden_size=128 * 768)
    for method in ("generate", "update", "compute_log_probs"):
        small, mixed, large = (seconds(spec, method, perf=PerfModel(launch_s=0.0)) for spec in (active, mixture, whole))
        assert small < mixed < large


def test_one_more_row_never_takes_less_time():
    for name, method in product(MIXTURES, ("generate", "update", "compute_log_probs")):
        found = [seconds(PRESETS[name], method, rows) for rows in (1, 2, 3, 8, 64, 65)]
        assert found == sorted(found), (name, method)


def test_tp_cuts_experts_inside():
    spec = PRESETS["mixtral-8x7b"]
    held = [rollout_parameters(spec, tp) for tp in (1, 2, 4, 8)]
    assert all(2 * half > whole > 1.99 * half for whole, half in pairwise(held))
    with refuses(hf.LayoutError, "tp=16", "1, 2, 4, 8"):
        hf.Layout(tp=16).check_model(replace(PRESETS["qwen3-30b-a3b"], experts=Experts(count=8, per_token=2, width=24)))


def test_the_planner_takes_a_mixture_by_its_name():
    session = hf.Session.simulated("4x8 H100")
    actor = session.actor("qwen3-30b-a3b", dtype="bf16", recompute="full", optimizer=AdamW(distributed=True))
    session.reference(actor)
    session.reward(lambda completions: [0.0] * len(completions))
    plan = session.plan(hf.GRPO(), hf.Workload(prompts=256, prompt_tokens=512, response_tokens=512))
    assert "s a step" in str(plan)


# -- expert parallelism


def test_replicas_share_experts_and_nothing_else():
    assert str(hf.Layout.parse("tp2 ep4").fill(16)) == "tp2 pp1 dp8 ep4"
    assert str(hf.Layout(tp=2, dp=4)) == "tp2 pp1 dp4"
    apart, together = hf.Layout.parse("tp2 pp2 dp4"), hf.Layout.parse("tp2 pp2 dp4 ep2")
    assert [together.coordinates(rank) for rank in range(16)] == [apart.coordinates(rank) for rank in range(16)]


def test_experts_that_cannot_be_shared_are_refused():
    for layout, model, named in (
        ("tp2 dp4 ep3", "qwen3-30b-a3b", ("ep=3", "dp=4")), ("dp3 ep3", "qwen3-30b-a3b", ("ep=3", "128 experts")),
        ("dp2 ep2", "llama-7b", ("no experts", "ep=2", "tp1 pp1 dp2 ep2")),
    ):  # fmt: skip
        with refuses(hf.LayoutError, *named):
            hf.Layout.parse(layout).check_model(PRESETS[model])


def test_a_pool_too_small_for_its_experts_is_refused():
    with refuses(hf.LayoutError, 16, 24):
        hf.Layout.parse("tp2 ep8").fill(24)


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_that_share_experts_hold_a_part_of_them(name):
    """Weights and gradients; AdamW's state is sharded over all dp ranks either way."""
    spec = PRESETS[name]
    role = RoleSpec(name="actor", kind="actor", model=spec, dtype="bf16", train=hf.Layout(tp=4), optimizer=AdamW(distributed=True))
    held = {ep: role_bytes(replace(role, train=hf.Layout(tp=4, ep=ep)), 32) for ep in (1, 2, 4, 8)}
    for ep, one in held.items():
        routed = spec.routed_parameters // 4
        assert held[1].weights - one.weights == pytest.approx(2 * routed * (1 - 1 / ep), rel=1e-6)
        assert held[1].gradients - one.gradients == pytest.approx(4 * routed * (1 - 1 / ep), rel=1e-6)
        assert one.optimizer == held[1].optimizer
    assert rollout_parameters(spec, 4, 8) == pytest.approx(
        rollout_parameters(spec, 4) - spec.routed_parameters * 7 / 8 / 4, rel=1e-6
    )
    whole = replace(role, optimizer=AdamW())
    assert role_bytes(replace(whole, train=hf.Layout(tp=4, ep=8)), 32).optimizer < role_bytes(whole, 32).optimizer


def over(made: Setup, link: LinkSpec) -> Setup:
    """Return a setup in which copies of tokens go over one link, wherever they go."""
    links, rollout = (replace(one, ep=one.ep._replace(near=link, far=link)) for one in (made.links, made.rollout_links))
    return replace(made, links=links, rollout_links=rollout)


@pytest.mark.parametrize("name", MIXTURES)
def test_what_ranks_exchange_is_counted(name):
    """On links that cost nothing sharing experts is never slower: fewer weights are read and fewer gradients summed."""
    spec, rows = PRESETS[name], np.full(8, 64)
    for method in ("generate", "update", "compute_log_probs"):
        apart, together = (setup(spec, f"tp4 pp1 dp8 ep{ep}", ep) for ep in (1, 8))
        one, other = (MODEL.seconds(method, made, rows, rows) for made in (apart, together))
        unlinked = MODEL.seconds(method, over(together, LinkSpec(name="free", bandwidth=1e18, latency_s=0.0)), rows, rows)
        assert unlinked < other
        assert unlinked <= one * (1 + 1e-6)  # 1e18 bytes a second are not for nothing


def test_copies_of_tokens_are_counted_by_where_they_go():
    """ep16 over two nodes, Mixtral's 2 of 8 experts are no case: Qwen3's 8 of 128."""
    spec = PRESETS["qwen3-30b-a3b"]
    near, far = exchanged_rows(spec, 16, 8, once=False)
    assert (near, far) == (8 * 7 / 16 * spec.hidden_size, 8 * 8 / 16 * spec.hidden_size)
    near, far = exchanged_rows(spec, 16, 8, once=True)
    assert far == pytest.approx((1 - 0.5**8) * spec.hidden_size), "one copy for the other node, nearly always"
    assert near == pytest.approx(15 * (1 - (15 / 16) ** 8) * spec.hidden_size), "one for each rank with some of its experts"
    assert exchanged_rows(spec, 1, 1, once=False) == (0, 0)
    assert exchanged_rows(PRESETS["llama-7b"], 1, 1, once=True) == (0, 0)


def test_what_is_sent_once_is_never_more():
    for ep, beside in ((2, 1), (2, 2), (8, 1), (8, 8), (32, 1), (32, 8), (32, 32)):
        once, each = (exchanged_rows(PRESETS["deepseek-v3"], ep, beside, once=once) for once in (True, False))
        assert once[1] <= each[1], (ep, beside)
        assert once[0] <= sum(each), (ep, beside)


def test_the_seconds_of_an_all_to_all_are_those_of_its_bytes():
    """k copies of each token but those that stay on their rank, there and back."""
    spec, rows = replace(PRESETS["mixtral-8x7b"], max_positions=10**6), np.full(1, 1000)
    made = over(setup(spec, "tp1 pp1 dp32 ep8", 8), replace(CLUSTER.intra_node, bandwidth=1e6))
    sent = 1000 * 32 * 2 * spec.hidden_size * 2 * 4 / 8  # ep8 within a node of 8, tp1: beside 8; near alone would be 7 / 8
    links = replace(made.links, ep=made.links.ep._replace(beside=4))
    took = MODEL.forward(replace(made, links=links), rows)
    took -= MODEL.forward(replace(made, layout=hf.Layout(dp=32)), rows)
    assert took == pytest.approx(2 * sent / (1e6 * MODEL.link_efficiency), rel=1e-2)


def test_experts_across_nodes_take_the_network():
    links = {ep: Links.of(CLUSTER, range(32), hf.Layout(tp=2, dp=16, ep=ep)) for ep in (1, 2, 4, 8, 16)}
    assert links[1].ep is None
    assert [links[ep].ep.beside for ep in (2, 4, 8, 16)] == [2, 4, 4, 4]
    assert links[16].ep.near == CLUSTER.intra_node
    assert links[16].ep.far.bandwidth == pytest.approx(CLUSTER.inter_node.bandwidth / 8)


def test_gradients_of_shared_experts_are_summed_over_fewer_ranks():
    spec = PRESETS["qwen3-30b-a3b"]
    apart, together, alone = (setup(spec, f"tp4 pp1 dp8 ep{ep}") for ep in (1, 2, 8))
    routed, whole = spec.routed_parameters / 4, spec.num_parameters() / 4
    assert apart.summed_bytes == pytest.approx(4 * 7 / 8 * whole)
    assert together.summed_bytes == pytest.approx(4 * (7 / 8 * (whole - routed) + 3 / 4 * routed / 2))
    assert alone.summed_bytes == pytest.approx(4 * 7 / 8 * (whole - routed))
    assert apart.stepped == together.stepped == alone.stepped == pytest.approx(whole / 8)


def test_experts_move_where_trainer_and_rollout_share_them_differently():
    spec, train = PRESETS["qwen3-30b-a3b"], hf.Layout(tp=4, dp=8, ep=8)
    assert reshard_bytes(spec, train, 4, rollout_ep=8) == pytest.approx(0, abs=1)
    routed = 2 * spec.routed_parameters / 4
    assert reshard_bytes(spec, train, 4, rollout_ep=1) == pytest.approx(routed * 7 / 8)
    assert reshard_bytes(spec, hf.Layout(tp=4, dp=8), 4, rollout_ep=8) == pytest.approx(0, abs=1)
    assert reshard_bytes(spec, train, 4, rollout_ep=3) == pytest.approx(routed / 3)


def test_one_more_row_never_takes_less_time_with_shared_experts():
    made = setup(PRESETS["qwen3-30b-a3b"], "tp4 pp1 dp8 ep8", 8)
    for method in ("generate", "update", "compute_log_probs"):
        found = [MODEL.seconds(method, made, np.full(rows, 256), np.full(rows, 512)) for rows in (1, 2, 3, 8, 64, 65)]
        assert found == sorted(found), method


def test_a_slower_link_never_helps_shared_experts():
    found, rows = [], np.full(8, 64)
    for bandwidth in (1e9, 1e10, 1e11):
        made = setup(PRESETS["qwen3-235b-a22b"], "tp2 pp1 dp16 ep16", 16)
        made = over(made, replace(CLUSTER.inter_node, bandwidth=bandwidth))
        found.append([MODEL.seconds(method, made, rows, rows) for method in ("generate", "update", "compute_log_probs")])
    assert (np.diff(np.array(found), axis=0) < 0).all()


def test_deepseek_v3_fits_where_its_experts_are_shared():
    """Its 61 layers are divided by no useful pp, so what does not fit with tp alone fits with ep."""
    session = hf.Session.simulated("40x8 H100")
    trained = {"dtype": "bf16", "recompute": "full", "optimizer": AdamW(distributed=True)}
    session.reference(session.actor("deepseek-v3", rollout="auto", train="auto", **trained))
    session.reward(lambda completions: [0.0] * len(completions))
    workload = hf.Workload(prompts=512, prompt_tokens=512, response_tokens=1024)
    plan = session.plan(hf.GRPO(n=8), workload)
    rollout = plan.layouts.get("actor.rollout", plan.layouts["actor"])["rollout"]
    assert plan.layouts["actor"]["train"].ep > 1 < rollout.ep
    session.place(plan)
    prompts = session.batch(prompt=[np.zeros(512, dtype=np.int32)] * 512)
    hf.GRPO(n=8, max_new_tokens=1024).step(session.models, prompts).actor.wait()
    assert session.trace.snapshot().duration_s == pytest.approx(plan.seconds, rel=0.02)


def test_layouts_with_shared_experts_are_declared_by_hand():
    session = hf.Session.simulated("4x8 H100")
    actor = session.actor("qwen3-30b-a3b", train="tp2 ep8", rollout="tp1 ep4", dtype="bf16", optimizer=AdamW(distributed=True))
    session.reference(actor, layout="ep32")
    session.reward(lambda completions: [0.0] * len(completions))
    session.place("colocate")
    prompts = session.batch(prompt=[np.zeros(16, dtype=np.int32)] * 64)
    step = hf.GRPO(n=2, max_new_tokens=8).step(session.models, prompts)
    step.actor.wait()
    assert session.trace.snapshot().duration_s > 0
    assert "ep8" in str(session.placement)


def test_a_simulated_mixture_is_kept_as_any_model_is(tmp_path):
    session = hf.Session.simulated("2x8 H100")
    actor = session.actor("qwen3-30b-a3b", train="tp2 ep8", rollout="ep8", dtype="bf16", optimizer=AdamW(distributed=True))
    session.reference(actor, layout="ep16")
    session.reward(lambda completions: [0.0] * len(completions))
    session.place("colocate")
    prompts = session.batch(prompt=[np.zeros(16, dtype=np.int32)] * 16)
    hf.RLOO(n=2, max_new_tokens=8).step(session.models, prompts).actor.wait()
    kept = session.snapshot("before")
    assert kept.num_bytes == pytest.approx(14 * actor.spec.num_parameters(), rel=1e-3)
    session.save(tmp_path / "saved")
    hf.RLOO(n=2, max_new_tokens=8).step(session.models, prompts).actor.wait()
    session.rewind(kept)
    assert actor.version == 1
    assert actor.save_pretrained(tmp_path / "weights")


def test_plans_of_shards_and_adapters_refuse_what_they_do_not_know():
    spec = PRESETS["qwen3-30b-a3b"]
    with refuses(UnsupportedModelError, "qwen3-30b-a3b", "experts"):
        ReshardPlan.between(spec, "tp2 dp2", "tp2 dp2")
    with refuses(UnsupportedModelError, "qwen3-30b-a3b", "experts"):
        hf.LoRA(rank=8).check_model(spec)


def test_what_helps_a_mixture_is_nothing_that_refuses_it():
    """LoRA refuses mixtures, so no message that one does not fit names it; of a dense model it does."""
    trained = {"dtype": "bf16", "recompute": "full", "optimizer": AdamW(distributed=True)}
    for name, helps in (("mixtral-8x7b", False), ("deepseek-v3", False), ("llama-70b", True)):
        session = hf.Session.simulated("1x1 H100")
        session.reference(session.actor(name, **trained))
        session.reward(lambda completions: [0.0] * len(completions))
        for ask in (lambda s=session: s.plan(hf.GRPO(), hf.Workload(prompts=8)), lambda s=session: s.place("colocate")):
            with refuses(hf.DeviceMemoryError, "helps") as refused:
                ask()
            assert ("hf.LoRA" in str(refused.value)) == helps


def test_a_mixture_has_a_layer_with_experts():
    spec = PRESETS["mixtral-8x7b"]
    for first_dense in (32, 99):
        with refuses(OptionError, f"first_dense={first_dense}", "num_layers=32"):
            replace(spec, experts=Experts(count=8, per_token=2, width=64, first_dense=first_dense))
    assert replace(spec, experts=Experts(count=8, per_token=2, width=64, first_dense=31)).routed_parameters > 0


def test_a_dense_model_has_the_numbers_that_it_had_before_experts():
    got = [PerfModel().seconds(m, setup(PRESETS["llama-70b"]), np.full(64, 1024), np.full(64, 700)) for m in
           ("generate", "update", "compute_log_probs")]  # fmt: skip
    assert got == pytest.approx(PINNED, rel=1e-12)


PINNED = [851.7863154793021, 25.346379082544725, 7.163176096748775]
