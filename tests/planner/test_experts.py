from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import hfsdk as hf
from hfsdk.core.errors import OptionError, UnsupportedModelError
from hfsdk.core.experts import Experts
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.spec import PRESETS, ModelSpec
from hfsdk.planner.perf.expert_sizes import distinct
from hfsdk.planner.perf.memory import role_bytes, rollout_parameters
from hfsdk.planner.perf.perf_model import PerfModel, Setup
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


def setup(spec: ModelSpec, layout: str = "tp4 pp1 dp8") -> Setup:
    role = RoleSpec(
        name="actor", kind="actor", model=spec, dtype="bf16", train=hf.Layout.parse(layout), rollout=hf.Layout(tp=4),
        optimizer=AdamW(distributed=True),
    )  # fmt: skip
    return Setup.of(role, CLUSTER, range(32))


def seconds(spec: ModelSpec, method: str, rows: int = 64, perf: PerfModel = MODEL) -> float:
    return perf.seconds(method, setup(spec), np.full(rows, 256), np.full(rows, 512))


@pytest.mark.parametrize("name", MIXTURES)
def test_all_parameters_and_those_of_a_token_are_the_published_ones(name):
    every, active = PUBLISHED[name]
    assert PRESETS[name].num_parameters() / 1e9 == pytest.approx(every, rel=0.002)
    assert PRESETS[name].num_active_parameters() / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", MIXTURES)
def test_one_rank_holds_the_tensors_of_the_files(name):
    assert rollout_parameters(PRESETS[name], 1) == PRESETS[name].num_parameters()


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
    with pytest.raises(OptionError, match="sent to 9 of 8 experts"):
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


@pytest.mark.parametrize("name", MIXTURES)
def test_one_more_row_never_takes_less_time(name):
    for method in ("generate", "update", "compute_log_probs"):
        found = [seconds(PRESETS[name], method, rows) for rows in (1, 2, 3, 8, 64, 65)]
        assert found == sorted(found)


def test_tp_cuts_experts_inside():
    spec = PRESETS["mixtral-8x7b"]
    held = [rollout_parameters(spec, tp) for tp in (1, 2, 4, 8)]
    assert all(2 * half > whole > 1.99 * half for whole, half in pairwise(held))
    with pytest.raises(hf.LayoutError, match="tp must divide"):
        hf.Layout(tp=16).check_model(replace(PRESETS["qwen3-30b-a3b"], experts=Experts(count=8, per_token=2, width=24)))


def test_the_planner_takes_a_mixture_by_its_name():
    session = hf.Session.simulated("4x8 H100")
    actor = session.actor("qwen3-30b-a3b", dtype="bf16", recompute="full", optimizer=AdamW(distributed=True))
    session.reference(actor)
    session.reward(lambda completions: [0.0] * len(completions))
    plan = session.plan(hf.GRPO(), hf.Workload(prompts=256, prompt_tokens=512, response_tokens=512))
    assert "s a step" in str(plan)


def test_plans_of_shards_and_adapters_refuse_what_they_do_not_know():
    spec = PRESETS["qwen3-30b-a3b"]
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        ReshardPlan.between(spec, "tp2 dp2", "tp2 dp2")
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        hf.LoRA(rank=8).check_model(spec)


def test_what_helps_a_mixture_is_nothing_that_refuses_it():
    """LoRA refuses mixtures, so no message that one does not fit names it; of a dense model it does."""
    trained = {"dtype": "bf16", "recompute": "full", "optimizer": AdamW(distributed=True)}
    for name, helps in (("mixtral-8x7b", False), ("deepseek-v3", False), ("llama-70b", True)):
        session = hf.Session.simulated("1x1 H100")
        session.reference(session.actor(name, **trained))
        session.reward(lambda completions: [0.0] * len(completions))
        for ask in (lambda s=session: s.plan(hf.GRPO(), hf.Workload(prompts=8)), lambda s=session: s.place("colocate")):
            with pytest.raises(hf.DeviceMemoryError, match="helps") as refused:
                ask()
            assert ("hf.LoRA" in str(refused.value)) == helps


@pytest.mark.parametrize("first_dense", [32, 99])
def test_a_mixture_has_a_layer_with_experts(first_dense):
    spec = PRESETS["mixtral-8x7b"]
    with pytest.raises(OptionError, match=f"first_dense={first_dense} of num_layers=32 leaves no layer with experts; give fewer"):
        replace(spec, experts=Experts(count=8, per_token=2, width=64, first_dense=first_dense))
    assert replace(spec, experts=Experts(count=8, per_token=2, width=64, first_dense=31)).routed_parameters > 0


def test_a_dense_model_has_the_numbers_that_it_had_before_experts():
    got = [PerfModel().seconds(m, setup(PRESETS["llama-70b"]), np.full(64, 1024), np.full(64, 700)) for m in
           ("generate", "update", "compute_log_probs")]  # fmt: skip
    assert got == pytest.approx(PINNED, rel=1e-12)


PINNED = [851.7863154793021, 25.346379082544725, 7.163176096748775]
