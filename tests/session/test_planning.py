"""Questions to the planner that cannot be answered, or no longer hold: told at the call, with what to write instead."""

from dataclasses import replace

import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core.plan import Plan
from hfsdk.core.spec import ModelSpec

TRAINED = {"dtype": "bf16", "optimizer": hf.AdamW(lr=1e-6, distributed=True)}
WORK = hf.Workload(prompts=64, prompt_tokens=128, response_tokens=128)
LONG = hf.Workload(prompts=64, prompt_tokens=1024, response_tokens=2048)
NAN, INF = float("nan"), float("inf")


def four(cluster="2x8 A100-80GB", model="qwen2.5-1.5b", **options):
    session = hf.Session.simulated(cluster, **options)
    actor = session.actor(model, **TRAINED)
    session.critic(model, **TRAINED)
    session.reference(actor)
    session.reward(model, dtype="bf16")
    return session


@pytest.fixture(scope="module")
def session():
    return four()


@pytest.fixture(scope="module")
def plan(session) -> Plan:
    return session.plan(hf.PPO(), WORK)


# -- sizes


@each("cluster", ["99999999x8 H100", "1x100001 H100", "9" * 4000 + "x8 H100"])
def test_clusters_have_a_bound(cluster):
    with refuses(hf.OptionError, "at most 100,000 devices"):
        hf.Session.simulated(cluster)


@each(
    "text, named",
    [("0x8 H100", "no devices"), ("16X8 h100", "did you mean 'H100'"), ("2x8 H100, 1x8 H200", "'+'"), ("", "nodes x devices")],
)
def test_a_text_that_is_no_cluster_is_told_how_one_is_written(text, named):
    with refuses(hf.OptionError, named):
        hf.ClusterSpec.parse(text)


@each(
    "options", [{"prompts": 10**9}, {"prompts": 10**15}, {"prompt_tokens": 10**15}, {"prompts": 10**6, "n": 2}, {"epochs": 10**9}]
)
def test_workloads_have_bounds(options):
    with pytest.raises(hf.OptionError, match=r"(at most|from 1 to) [\d,]+"):
        hf.Workload(**options)


def test_nothing_is_allocated_before_lengths_are_checked(session):
    with refuses(hf.OptionError, "the context of"):
        session.plan(hf.PPO(), replace(WORK, prompts=10**6, prompt_tokens=10**9))
    with refuses(hf.OptionError, "at most 100,000"):
        session.what_if(hf.PPO(), WORK).set(devices=10**7)


@each(
    "changes",
    [{"hidden_size": -64}, {"vocab_size": 0}, {"num_kv_heads": 5}, {"num_layers": 0}, {"num_layers": 2.5}, {"head_dim": NAN},
     {"num_layers": 10**9}, {"family": "gpt"}, {"norm_eps": 0.0}],
)  # fmt: skip
def test_models_that_cannot_be(changes):
    with refuses(hf.OptionError, *changes):
        replace(ModelSpec.preset("llama-7b"), **changes)


@each(
    "constants",
    [{"train_efficiency": 0}, {"link_efficiency": 70}, {"kv_efficiency": NAN}, {"layer_s": -1e-6}, {"task_s": INF},
     {"step_s": "1"}, {"row_s": True}, {"exposed_reduction": 1.5}, {"storage_bandwidth": 0.0}],
)  # fmt: skip
def test_performance_models_that_cannot_be(constants):
    with refuses(hf.OptionError, *constants):
        hf.PerfModel(**constants)


# -- lengths


def test_the_plan_says_whose_context_is_too_short_and_what_to_write():
    session = four(model="llama-7b")
    cure = "rollout_options=hf.RolloutOptions(max_model_len=3072)"
    with refuses(hf.OptionError, "1,024 prompt and 2,048", "max_model_len is 2,048", "4,096", cure):
        session.plan(hf.PPO(), LONG)
    with refuses(hf.OptionError, "4,096") as told:
        session.plan(hf.PPO(), replace(LONG, prompt_tokens=4000))
    assert "RolloutOptions" not in str(told.value), "no option makes the model's context longer"


def test_a_what_if_that_assumes_a_longer_context_says_so_and_is_placed_where_it_is_declared():
    session = four(model="llama-7b")
    plan = session.what_if(hf.PPO(), LONG).plan
    assert "assumes that actor has max_model_len=3072" in repr(plan)
    assert plan.view()["notices"] == list(plan.notices)
    with refuses(hf.PlacementError, "max_model_len=3072"):
        session.place(plan)
    with pytest.warns(UserWarning, match="actor"):
        session.actor("llama-7b", **TRAINED, rollout_options=hf.RolloutOptions(max_model_len=3072))
    session.place(plan)
    assert session.plan(hf.PPO(), LONG).notices == ()


def test_again_grows_twice_and_keeps_the_price():
    session = four(price_per_device_hour=2.0)
    plan = session.plan(hf.PPO(), WORK)
    longer = replace(WORK, response_tokens=8192)
    twice = plan.again(workload=replace(WORK, response_tokens=4096)).again(workload=longer)
    assert twice.seconds == plan.again(workload=longer).seconds
    what_if = session.what_if(hf.PPO(), WORK)
    for price in (2.0, 4.0):
        one = what_if.set(price_per_device_hour=price).plan
        assert one.again().cost_per_step == one.cost_per_step > 0
        assert one.again(cluster="1x8 H100").cluster.price_per_device_hour == price


# -- plans for something else


@each(
    "options, named",
    [
        ({"dtype": "fp32"}, "dtype='bf16', and it is declared with dtype='fp32'"),
        ({"optimizer": hf.AdamW(lr=1e-6)}, "AdamW.distributed=True"),
        ({"optimizer": hf.AdamW(lr=1e-6, distributed=True, offload=True)}, "AdamW.offload=False"),
        ({"recompute": "full"}, "recompute=''"), ({"micro_batch_tokens": 512}, "micro_batch_tokens=2048"),
        ({"rollout_options": hf.RolloutOptions(max_num_seqs=8)}, "max_num_seqs=0, and it is declared with max_num_seqs=8"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:actor is replaced")
def test_a_plan_for_other_roles_is_not_placed(plan, options, named):
    session = four()
    session.actor("qwen2.5-1.5b", **{**TRAINED, **options})
    with refuses(hf.PlacementError, named):
        session.place(plan)


@pytest.mark.filterwarnings("ignore:actor is replaced")
def test_a_learning_rate_is_none_of_a_plan_s_business(plan):
    session = four()
    session.actor("qwen2.5-1.5b", **{**TRAINED, "optimizer": hf.AdamW(lr=1.0, distributed=True)})
    session.place(plan)


def test_a_runner_up_is_placed(plan):
    session, other = four(), plan.runners_up[0]
    session.place(other)
    assert session.placement.placement == other.placement
    assert session.models.actor.role.train == other.layouts["actor"]["train"]
    assert "\n" not in repr(other)
    assert len(repr(other)) < 400


# -- arguments


@each(
    "options",
    [{"error": "x"}, {"error": -1}, {"error": NAN}, {"error": 2}, {"error": {"genrate": 0.1}}, {"error": {"": "x"}},
     {"error": [0.1]}, {"top": "3"}, {"top": 1.5}, {"top": 0}, {"perf": "x"}, {"perf": hf.PerfModel}, {"perf": 0},
     {"shadows": "no"}],
)  # fmt: skip
def test_options_of_a_plan(session, options):
    with refuses(hf.OptionError, *options):
        session.plan(hf.PPO(), WORK, **options)


@each("options", [{"foo": 1}, {"cluster": 3}, {"workload": 0}, {"placement": "splitt"}, {"error": 3}, {"top": 0}])
def test_options_of_again(plan, options):
    with refuses(hf.OptionError, *options):
        plan.again(**options)


def test_a_band_may_be_all_of_a_plan_and_not_more(session):
    low, high = session.plan(hf.PPO(), WORK, error=1).band
    assert 0 <= low < high


@each("cluster", [None, 3, True, ["1x8 H100"], b"1x8 H100"])
def test_what_is_no_cluster(cluster):
    with refuses(hf.OptionError, "Session.simulated", "hf.ClusterSpec", "cluster="):
        hf.Session.simulated(cluster)


@each(
    "options",
    [{"perf": 5}, {"perf": hf.PerfModel}, {"response_lengths": 5}, {"response_lengths": lambda *a: 3}, {"seed": "a"},
     {"seed": None}, {"seed": 1.5}, {"seed": -1}, {"wait": "yes"}, {"name": 5}, {"price_per_device_hour": INF},
     {"price_per_device_hour": "3"}],
)  # fmt: skip
def test_arguments_of_a_simulated_session(options):
    with refuses(hf.OptionError, *options):
        hf.Session.simulated("1x1 H100", **options)


def test_the_price_goes_with_any_cluster():
    spec = hf.ClusterSpec.parse("1x2 H100", 1.0)
    assert hf.Session.simulated(spec).cluster.price_per_device_hour == 1.0
    assert hf.Session.simulated(spec, price_per_device_hour=3.0).cluster.price_per_device_hour == 3.0


def test_lengths_that_are_none(session):
    class Nonsense:
        def draw(self, sampling, seed, positions, copies):
            return [10**9] * len(positions)

    with refuses(hf.OptionError, "from 1 to max_new_tokens=128"):
        session.plan(hf.PPO(), replace(WORK, response_lengths=Nonsense()))
    with four(response_lengths=Nonsense()) as other, refuses(hf.HfsdkError, "from 1 to max_new_tokens=4"):
        other.models.actor.generate([[1, 2]], max_new_tokens=4)["response"]


@each(
    "ask, error, named",
    [
        (lambda w: w.set(layouts="tp2"), hf.OptionError, ["layouts='tp2'", "a mapping"]),
        (lambda w: w.sweep("response_tokens", 5), hf.OptionError, ["list of finite numbers"]),
        (lambda w: w.sweep("placement", [1]), hf.OptionError, ["'placement'"]),
        (lambda w: w.set(layouts={"actor": "tp3"}), hf.LayoutError, ["12 attention heads", "tp=3"]),
        (lambda w: w.set(layouts={"actor": "tp4 pp28"}), hf.LayoutError, ["needs 112 devices"]),
        (lambda w: w.set(layouts={"actor rollout": "tp2 pp2"}), hf.LayoutError, ["tp and dp only"]),
    ],
)
def test_a_what_if_that_cannot_be_is_told_why(session, ask, error, named):
    with refuses(error, *named):
        ask(session.what_if(hf.PPO(), WORK))


def test_what_ifs_over_clusters_of_one_s_own():
    shared = hf.ClusterSpec.parse("2x4 cpu").with_cores(2)
    asked = four(shared, "smollm2-135m").what_if(hf.PPO(), WORK).set(devices=4)
    assert (asked.plan.cluster.num_devices, asked.plan.cluster.node_cores) == (4, (2,))
    spec = hf.ClusterSpec.parse("1x8 H100")
    own = replace(spec, node_devices=((replace(spec.devices[0], name="NVIDIA H100 80GB HBM3"),) * 8,))
    assert four(own).what_if(hf.PPO(), WORK).set(devices=16).plan.cluster.num_devices == 16
    mixed = four("1x8 H100 + 1x8 A100-80GB").what_if(hf.PPO(), WORK)
    assert list(mixed.sweep("devices").index) == [16]
    assert len(mixed.draw("devices").curve.points) == 1


def test_more_mini_batches_than_samples(session):
    with refuses(hf.OptionError, "mini_batches is 2", "1 prompt"):
        session.plan(hf.PPO(), hf.Workload(prompts=1, prompt_tokens=8, response_tokens=8))


@each("what", ["x", 3, hf.PerfModel])
def test_what_cannot_be_fitted_to(session, what):
    for one in (what, [what], session.trace):
        with refuses(hf.OptionError, "PerfModel.fit"):
            hf.PerfModel.fit(one)


def test_what_is_no_trace_placement_or_model(session):
    with refuses(hf.OptionError, "Session", ".trace"):
        session.trace.compare(session)
    with refuses(hf.PlacementError, "empty"):
        session.place({})
    with refuses(hf.OptionError, "Session.actor", "model=<class"):
        session.actor(hf.ModelSpec)


def test_words(session):
    plan = four(price_per_device_hour=0.01).plan(hf.PPO(), WORK)
    assert f"costs {plan.cost_per_step:.3g} a step" in repr(plan)
    assert all("0.0 s" not in other.why for other in plan.runners_up)
    one = hf.Workload(prompts=1, prompt_tokens=1, response_tokens=1)
    assert str(one) == "1 prompt of 1 token, responses of 1"
