import math
import pickle
from dataclasses import fields, replace
from itertools import pairwise, product

import numpy as np
import pytest

import hfsdk as hf
from hfsdk.core.cluster import DEVICES, ClusterSpec, LinkSpec
from hfsdk.core.layout import Layout
from hfsdk.core.roles import AdamW, RoleSpec, RolloutOptions
from hfsdk.core.rollout_sizes import CacheUnits
from hfsdk.core.spec import ModelSpec
from hfsdk.planner.perf.collectives import AllToAllLinks, all_reduce, all_to_all, ring_pass
from hfsdk.planner.perf.decoding import ReplicaRows, slots, slots_each
from hfsdk.planner.perf.perf_model import Links, PerfModel, Setup, reshard_bytes
from hfsdk.planner.perf.setup import EngineTraits
from hfsdk.resharding.reshard_plan import ReshardPlan

CLUSTER = ClusterSpec.parse("16x8 A100-80GB")
METHODS = ("generate", "compute_log_probs", "compute_values", "compute_scores", "forward_backward", "update", "step",
           "save_state", "grad_norm")  # fmt: skip
SIZES = ("llama-7b", "llama-13b", "llama-34b", "llama-70b")
MODEL = PerfModel()
FREE_LINK = LinkSpec(name="free", bandwidth=1e30, latency_s=0.0)
FREE = Links(tp=FREE_LINK, pp=FREE_LINK, dp=FREE_LINK)


def unreal(perf, share):
    """Return a model with a share so large that what it is of costs nothing, which no user may ask for."""
    copied = replace(perf)
    object.__setattr__(copied, share, 1e12)
    return copied


ARITHMETIC = unreal(
    PerfModel(activation_bytes=0.0, launch_s=0.0, optimizer_bytes=0.0, attention_efficiency=0.7), "weight_efficiency"
)
"""Only arithmetic costs time, attention's in training as any other."""
SLOW_ATTENTION, FAST_ATTENTION = (
    unreal(PerfModel(activation_bytes=0.0, launch_s=0.0, attention_efficiency=share), "weight_efficiency") for share in (0.25, 0.5)
)
A100 = DEVICES["A100-80GB"]


def setup(name="llama-70b", train="tp8 pp4 dp4", rollout="tp8", **more):
    layout = Layout.parse(train)
    links = more.pop("links", None) or Links.of(CLUSTER, range(layout.size), layout)
    return Setup(
        spec=ModelSpec.preset(name), layout=layout, device=more.pop("device", A100), links=links,
        rollout=Layout.parse(rollout), **more,
    )  # fmt: skip


def rows(count=64, prompt=1024, response=1024):
    return np.full(count, prompt), np.full(count, response)


def test_deterministic_positive_and_finite():
    for method in METHODS:
        first, second = (MODEL.seconds(method, setup(), *rows(), stale=True) for _ in range(2))
        assert first == second, method
        assert 0 < first < 1e5, method


def test_monotone_in_tokens():
    falls = []
    for method, train in product(METHODS, ("tp1 dp2", "tp8 dp4", "tp8 pp4 dp4")):
        where = setup(train=train)
        counts = [MODEL.seconds(method, where, *rows(count)) for count in range(1, 140)]
        lengths = [MODEL.seconds(method, where, *rows(7, 100 + n // 2, n)) for n in range(0, 3000, 37)]
        falls += [(method, train, what) for what, found in (("rows", counts), ("lengths", lengths)) if found != sorted(found)]
    assert not falls


def random_setup(rng):
    spec = replace(
        ModelSpec.preset("llama-7b"), num_layers=int(rng.integers(1, 9)) * 8, hidden_size=int(rng.integers(1, 33)) * 256,
        mlp_hidden_size=int(rng.integers(1, 33)) * 512,
    )  # fmt: skip
    tp, pp, dp = (int(2 ** rng.integers(0, 4)) for _ in range(3))
    layout = Layout(tp=tp, pp=pp, dp=dp)
    return Setup(
        spec=spec, layout=layout, device=A100, links=Links.of(CLUSTER, range(layout.size), layout) if layout.size <= 128 else FREE,
        micro_batch_tokens=int(rng.integers(1, 9000)), rollout=Layout(tp=int(2 ** rng.integers(0, 4))),
        max_num_seqs=int(rng.integers(1, 100)), recompute=str(rng.choice(["", "selective", "full"])),
        kv_cache_bytes=int(rng.choice([0, 10**9, 10**10])), distributed=bool(rng.integers(2)),
        traits=EngineTraits(
            fused=bool(rng.integers(4)), cuda_graphs=bool(rng.integers(2)), flash_attention=bool(rng.integers(2)),
            gathers_weights=bool(rng.integers(2)), sequence_parallel=bool(rng.integers(2)),
        ),
    )  # fmt: skip


def test_monotone_in_everything_for_random_models_layouts_and_lengths():
    """One more row, longer rows, a larger model, slower links, memory and arithmetic never take less time."""
    falls = [(seed, *fall) for seed in range(150) for fall in what_takes_less_with_more(np.random.default_rng(seed))]
    assert not falls, "\n".join(map(str, falls[:10]))


def what_takes_less_with_more(rng):
    """Yield (method, seconds, those with more) of a random case, where more is less."""
    where, count = random_setup(rng), int(rng.integers(1, 90))
    prompts, responses = rng.integers(1, 2000, count), rng.integers(1, 2000, count)
    slower = replace(
        where, device=replace(A100, memory_bandwidth=A100.memory_bandwidth / 2, peak_flops=A100.peak_flops / 2, host_bandwidth=1e9),
        links=Links(**{axis: replace(getattr(where.links, axis), bandwidth=1e9) for axis in ("tp", "pp", "dp")}),
    )  # fmt: skip
    spec = where.spec
    larger = replace(where, spec=replace(spec, hidden_size=spec.hidden_size + 256, num_layers=spec.num_layers + 8))
    for method in METHODS:
        now = MODEL.seconds(method, where, prompts, responses, stale=True)
        more = [
            MODEL.seconds(method, where, np.append(prompts, 5), np.append(responses, 7), stale=True),
            MODEL.seconds(method, where, prompts + rng.integers(0, 50, count), responses, stale=True),
            MODEL.seconds(method, where, prompts, responses + rng.integers(0, 50, count), stale=True),
            MODEL.seconds(method, slower, prompts, responses, stale=True),
            MODEL.seconds(method, larger, prompts, responses, stale=True),
        ]
        if now > min(more) * (1 + 1e-12):
            yield method, now, more


def test_monotone_in_model_size():
    for method in METHODS:
        if method == "grad_norm":
            continue
        # llama-34b caches fewer keys and values than 13b (8 kv heads), so generation is compared without it
        names = [n for n in SIZES if method != "generate" or n != "llama-34b"]
        seconds = [MODEL.seconds(method, setup(n, "tp8 dp4"), *rows(), stale=True) for n in names]
        assert seconds == sorted(set(seconds)), method


def test_flops_are_the_specs():
    where, lengths = setup("llama-7b"), np.array([100, 300])
    spec = where.spec
    assert where.forward_flops(lengths) == pytest.approx(spec.forward_flops(100, 50) + spec.forward_flops(300, 150))
    critic = replace(where, head="scalar")
    head = 2 * 400 * spec.vocab_size * spec.hidden_size
    assert where.forward_flops(lengths) - critic.forward_flops(lengths) == pytest.approx(head)


def test_training_is_three_passes_of_two_n_d():
    where = setup("llama-7b", "tp1 dp1")
    forward, backward = ARITHMETIC.train(where, np.full(1000, 10))
    by_hand = where.forward_flops(np.full(1000, 10)) / (312e12 * MODEL.train_efficiency)
    gradients = 12 * math.ceil(10_000 / 2048) * where.parameters / 2.04e12
    assert forward == pytest.approx(by_hand)
    assert backward == pytest.approx(2 * by_hand + gradients)


def test_attention_has_an_efficiency_of_its_own():
    """Half of it, twice the seconds; where scores leave the chip the whole square is multiplied, whatever the efficiency."""
    where, length = setup("llama-7b", "tp1 dp1"), 20_000
    rows = np.full(4, length)
    spec = where.spec
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * 4 * length**2 / 312e12
    seconds = [one.forward(where, rows) for one in (SLOW_ATTENTION, FAST_ATTENTION)]
    assert seconds[0] - seconds[1] == pytest.approx(attention * (4 - 2))
    plain = replace(where, traits=replace(where.traits, flash_attention=False))
    alike = [one.forward(plain, rows) for one in (SLOW_ATTENTION, FAST_ATTENTION)]
    assert alike[0] == alike[1]


def test_gradients_hide_behind_the_last_micro_batch_alone():
    """The rest shows; an engine that does not overlap shows all, and updated weights are gathered in the open."""
    where = setup("llama-7b", "tp1 dp16")
    rows = np.full(64, 1024)
    rate = where.links.dp.bandwidth * MODEL.link_efficiency
    summed = 15 / 16 * where.parameters * 8 / rate
    apart = replace(where, traits=replace(where.traits, overlaps_reduction=False))
    alone = replace(where, links=replace(where.links, dp=replace(where.links.dp, bandwidth=1e30)))
    least = MODEL.train(alone, rows)[1]
    assert MODEL.train(apart, rows)[1] - least == pytest.approx(summed)
    hidden = least / math.ceil(64 * 1024 / where.micro_batch_tokens)
    assert MODEL.train(where, rows)[1] - least == pytest.approx(max(0.3 * summed, summed - hidden))
    gathered = replace(where, distributed=True)
    beside = replace(gathered, traits=replace(where.traits, overlaps_gather=True))
    assert MODEL.optimizer(gathered) - MODEL.optimizer(beside) == pytest.approx(0.7 * 15 / 16 * where.parameters * 2 / rate)


def test_recompute_takes_up_to_another_forward_pass():
    setups = [setup(train="tp1 dp1", rollout="tp1", recompute=how) for how in ("", "selective", "full")]
    costs = [ARITHMETIC.costs("forward_backward", where, *rows()) for where in setups]
    none, selective, full = (found["backward"] for found in costs)
    assert len({found["forward"] for found in costs}) == 1
    assert full - none == pytest.approx(costs[0]["forward"])
    assert none < selective < full


def test_fp32_has_its_own_peak():
    where = setup("llama-7b", "tp1 dp1")
    ratio = ARITHMETIC.forward(replace(where, dtype="fp32"), np.full(64, 512)) / ARITHMETIC.forward(where, np.full(64, 512))
    assert ratio == pytest.approx(312 / 19.5)
    cpu = replace(where, device=DEVICES["cpu"])
    assert ARITHMETIC.forward(replace(cpu, dtype="fp32"), np.full(4, 64)) == ARITHMETIC.forward(cpu, np.full(4, 64))


def test_few_tokens_cost_the_reading_of_weights():
    """A pass over one token reads every matrix once: 6.6e9 x 2 bytes at 0.82 of 2.04 TB/s is 7.9 ms."""
    quiet = PerfModel(launch_s=0.0, activation_bytes=0.0)
    where = setup("llama-7b", "tp1 dp1")
    by_hand = where.matmul_parameters * 2 / (2.04e12 * 0.82)
    assert quiet.forward(where, np.array([1])) == pytest.approx(by_hand, rel=1e-3)
    assert by_hand == pytest.approx(7.9e-3, rel=0.01)


def test_a_pass_is_never_shorter_than_its_launches():
    where = setup("llama-7b", "tp8 dp1", micro_batch_tokens=16, links=FREE)
    launches = 10 * (32 + where.head_layers) * 1e-3
    assert PerfModel(launch_s=1e-3).forward(where, np.full(10, 16)) == pytest.approx(launches)


def test_tp_and_dp_pay_their_links():
    lengths = np.full(16, 2048)
    near, far = (replace(setup("llama-7b", "tp8 dp1"), links=Links(tp=link, pp=link, dp=link))
                 for link in (CLUSTER.intra_node, CLUSTER.inter_node))  # fmt: skip
    assert MODEL.forward(far, lengths) > 1.5 * MODEL.forward(near, lengths)
    alone, shared = setup("llama-7b", "tp8 dp1"), setup("llama-7b", "tp8 dp2")
    assert MODEL.train(shared, lengths)[1] > MODEL.train(alone, lengths)[1]


def test_all_reduce_by_hand():
    """2 (n - 1) / n of the bytes at 0.7 of 300 GB/s, and 2 log2(n) hops of 5 us a message."""
    assert all_reduce(1e9, 8, CLUSTER.intra_node, 3, 0.7) == pytest.approx(1.75e9 / 210e9 + 3 * 6 * 5e-6)
    assert all_reduce(1e9, 1, CLUSTER.intra_node, 3, 0.7) == 0


def test_all_to_all_and_ring_by_hand():
    """What goes to other nodes and what stays inside go at once; hops of the slower link's latency."""
    near, far = CLUSTER.intra_node, LinkSpec(name="far", bandwidth=10e9, latency_s=1e-5)
    links = AllToAllLinks(near, far, beside=4)
    assert all_to_all(1e9, 1e8, 8, links, 2, 0.7) == pytest.approx(1e8 / 7e9 + 2 * 3 * 1e-5)
    assert all_to_all(1e9, 1e6, 8, links, 2, 0.7) == pytest.approx(1e9 / 210e9 + 2 * 3 * 1e-5)
    assert all_to_all(1e9, 0.0, 4, links, 2, 0.7) == pytest.approx(1e9 / 210e9 + 2 * 2 * near.latency_s)
    assert all_to_all(1e9, 1e9, 1, None, 2, 0.7) == 0
    assert ring_pass(1e9, 4, near, 2, 0.7) == pytest.approx(1e9 / 210e9 + 2 * 3 * near.latency_s)
    assert ring_pass(1e9, 1, None, 2, 0.7) == 0


def test_plain_and_distributed_optimizer():
    """8 bytes a parameter in an all-reduce against 4 + 2; all moments against a quarter of them."""
    plain, shared = (setup("llama-7b", "tp1 dp4", distributed=which) for which in (False, True))
    rate = 300e9 * 0.7
    assert MODEL.reduction(plain) == pytest.approx(0.75 * plain.parameters * 8 / rate)
    assert MODEL.reduction(shared) == pytest.approx(0.75 * plain.parameters * 6 / rate)
    clip = plain.links.dp.latency_s
    assert MODEL.optimizer(plain) - clip == pytest.approx(20 * plain.parameters / 2.04e12)
    gathered = 0.75 * plain.parameters * 2 / rate
    assert MODEL.optimizer(shared) - clip - gathered == pytest.approx(20 * plain.parameters / 4 / 2.04e12)
    assert MODEL.optimizer(setup("llama-7b", "tp1 dp1")) == pytest.approx(20 * plain.parameters / 2.04e12)


def test_offload_pays_the_host_link_both_ways():
    reference = setup("llama-7b", "tp2 dp1", offloads=("weights",))
    costs = MODEL.costs("compute_log_probs", reference, *rows())
    assert list(costs) == ["onload", "forward", "agree", "offload"]
    assert costs["onload"] == costs["offload"] == pytest.approx(reference.parameters / 2 * 2 / (25e9 * 0.7))
    actor = setup("llama-7b", "tp2 dp4", offloads=("optimizer",), distributed=True)
    assert list(MODEL.costs("step", actor, *rows())) == ["onload", "optimizer", "offload"]
    assert MODEL.onload(actor, "optimizer") == pytest.approx(actor.parameters / 2 * 12 / 4 / (25e9 * 0.7))
    assert list(MODEL.costs("update", actor, *rows())) == ["forward", "backward", "agree", "onload", "optimizer", "offload"]


def test_pipeline_bubble():
    one, four = (setup("llama-70b", train, links=FREE, head="scalar") for train in ("tp8 dp1", "tp8 pp4 dp1"))
    lengths = np.full(8, 2048)
    whole, staged = (ARITHMETIC.forward(where, lengths) for where in (one, four))
    assert staged == pytest.approx(whole / 4 * (8 + 3) / 8, rel=1e-3)
    interleaved = replace(four, traits=EngineTraits(interleave=3))
    assert ARITHMETIC.forward(interleaved, lengths) == pytest.approx(whole / 4 * (8 + 1) / 8, rel=1e-2)


def test_activations_between_stages_take_their_link():
    """Every tp rank sends its part of each token, and of the filling micro-batches; each micro-batch waits for one message."""
    free = setup("llama-7b", "tp2 pp4 dp1", links=FREE, micro_batch_tokens=1000)
    slow = replace(free, links=replace(FREE, pp=LinkSpec(name="slow", bandwidth=1e6, latency_s=0.5)))
    lengths = np.full(8, 1000)
    sent = (8000 + 3 * 1000) * free.spec.hidden_size * 2 / 2
    took = MODEL.forward(slow, lengths) - MODEL.forward(free, lengths)
    assert took == pytest.approx(sent / (1e6 * MODEL.link_efficiency) + (8 + 3) * 0.5)


def test_prefill_is_forward_passes_over_chunks_that_the_host_schedules():
    where = setup("llama-7b", "tp1 dp1", "tp1", batch_tokens=1000)
    prompts, quiet = np.full(7, 500), replace(MODEL, step_s=0.0)
    assert MODEL.prefill(where, prompts) - quiet.prefill(where, prompts) == pytest.approx(4 * MODEL.step_s)
    whole = ARITHMETIC.prefill(where, prompts) - 4 * ARITHMETIC.step_s
    assert whole == pytest.approx(ARITHMETIC.forward(where, prompts), rel=1e-6)
    assert MODEL.prefill(where, prompts[:0]) == 0


def test_a_replica_writes_its_part_of_a_state():
    alone, shared = (setup("llama-7b", layout, "tp1") for layout in ("tp2 dp1", "tp2 dp4"))
    for method in ("save_state", "load_state"):
        one, four = (MODEL.seconds(method, where, *rows(0)) for where in (alone, shared))
        assert one == pytest.approx(4 * four), method


def test_traffic_beside_matrix_products_is_of_every_tokens_hidden_units():
    """60 bytes in bf16 with fused kernels, three times that without; tp cuts all of it with sequence parallelism, else 24 of 34."""
    lengths, busy, idle = np.full(4, 512), PerfModel(launch_s=0.0), PerfModel(launch_s=0.0, activation_bytes=0.0)
    for tp, traits, share in (
        (1, EngineTraits(), 1.0), (1, EngineTraits(fused=False), 3.0),
        (8, EngineTraits(sequence_parallel=False), (10 + 24 / 8) / 34), (8, EngineTraits(sequence_parallel=True), 1 / 8),
    ):  # fmt: skip
        where = setup("llama-7b", f"tp{tp} dp1", traits=traits, links=FREE)
        traffic = 60 * where.spec.hidden_size * 4 * 512 * where.stage_layers[1] / 2.04e12
        took = busy.forward(where, lengths) - idle.forward(where, lengths)
        assert took == pytest.approx(share * traffic, rel=1e-9), (tp, traits)


def test_columns_and_tasks_of_the_host_by_hand():
    link = LinkSpec(name="some", bandwidth=10e9, latency_s=0.25)
    assert MODEL.move(1e9, link, 3) == pytest.approx(1e9 / 7e9 + 0.75)
    assert MODEL.host_task(5, 1000) == pytest.approx(MODEL.task_s + 5e-6 + 1000 * MODEL.task_token_s)


def test_uneven_stages_wait_for_the_fullest():
    """80 layers over 3 stages: 27, 27, 26 and the output layer (0.3 of a layer)."""
    where = setup("llama-70b", "tp8 pp3 dp1")
    slowest, every, most = where.stage_layers
    assert (slowest, most) == (27, 27)
    assert every == pytest.approx(80 + 0.306, abs=0.01)
    assert setup("llama-7b", "tp1 pp16 dp1").stage_layers[0] == pytest.approx(2 + 0.648, abs=0.01)


def test_decode_reads_weights_once_a_step_and_waits_for_the_longest():
    where = setup(rollout="tp8")
    prompts = np.full(64, 512)
    even, tail = np.full(64, 256), np.array([1024, *[1] * 63])
    weights = where.matmul_parameters * 2 / 8 / (2.04e12 * MODEL.weight_efficiency)
    assert MODEL.decode(where, prompts, even) > 256 * weights
    assert MODEL.decode(where, prompts, tail) > 3 * MODEL.decode(where, prompts, even)
    fewer_slots = replace(where, max_num_seqs=32)
    assert MODEL.decode(fewer_slots, prompts, even) > 1.7 * MODEL.decode(where, prompts, even)
    assert MODEL.decode(where, prompts, np.zeros(64, dtype=int)) == 0


def test_decode_by_hand():
    """One row of 7B on one A100: 100 steps of hypot(read, arithmetic) + layers + host, and the cache read."""
    where = setup("llama-7b", "tp1 dp1", "tp1")
    layer = where.layer_parameters * 2
    read = where.matmul_parameters * 2 * (1 + 32e6 / layer) / (2.04e12 * 0.82)
    step = math.hypot(read, 2 * where.matmul_parameters / (312e12 * 0.75)) + 32 * 15e-6 + 1e-3 + 2e-5
    cache = 100 * (200 + 50) * where.spec.kv_bytes_per_token() / (2.04e12 * 0.75)
    assert MODEL.decode(where, np.array([200]), np.array([100])) == pytest.approx(100 * step + cache)


def test_keys_and_values_are_cut_by_heads_and_repeated_beyond_them():
    """llama-70b has 8 kv heads: on 16 ranks each reads as much as on 8."""
    prompts, responses = np.array([200]), np.array([100])
    read = 100 * (200 + 50) * ModelSpec.preset("llama-70b").kv_bytes_per_token() / (2.04e12 * 0.75)
    for tp, shards in ((1, 1), (4, 4), (8, 8), (16, 8)):
        where = setup("llama-70b", "tp8 dp1", f"tp{tp}")
        cache = MODEL.decode(where, prompts, responses) - unreal(MODEL, "kv_efficiency").decode(where, prompts, responses)
        assert cache == pytest.approx(read / shards, rel=1e-6), tp


def test_a_transition_reads_and_writes_what_the_rollout_needs_once():
    where = setup("llama-7b", "tp1 dp2", "tp2")
    assert MODEL.rewrite(where) == pytest.approx(2 * where.parameters / 2 * 2 / 2.04e12, rel=1e-3)


def test_decode_bandwidth_share_falls_with_tp_as_measured():
    """Kernel profiles of Vidur (arXiv 2405.05465): 7B on A100 and H100, 70B on A100; share of the bandwidth at small batches."""
    for name, device, shares in (("llama-7b", 2.04e12, ((1, 0.75), (2, 0.73), (4, 0.62), (8, 0.48))),
                                 ("llama-7b", 3.35e12, ((1, 0.77), (2, 0.71), (4, 0.60), (8, 0.52))),
                                 ("llama-70b", 2.04e12, ((1, 0.78), (4, 0.74), (8, 0.69)))):  # fmt: skip
        layer = setup(name).layer_parameters * 2
        for tp, share in shares:
            read = layer / tp / device
            predicted = read / (layer / tp * (1 + MODEL.weight_half_bytes * tp / layer) / (device * MODEL.weight_efficiency))
            assert predicted == pytest.approx(share, abs=0.06), (name, tp)


def test_slots_are_limited_by_sequences_and_by_the_cache():
    where = setup("llama-7b", "tp1 dp1", "tp1", max_num_seqs=48)
    prompts, responses = rows(64, 500, 500)
    units = CacheUnits.of_tokens(where.spec, 1000, 1, "bf16")
    twenty = units.holding(20)
    assert units.sequence == 1024 * where.spec.kv_bytes_per_token()  # whole blocks of 32 tokens
    assert slots(where, prompts, responses) == 48
    assert slots(replace(where, kv_cache_bytes=twenty), prompts, responses) == 20
    assert slots(replace(where, kv_cache_bytes=twenty - 1), prompts, responses) == 19
    assert slots(replace(where, kv_cache_bytes=10), prompts, responses) == 1
    assert slots(replace(where, rollout=Layout(tp=2), kv_cache_bytes=twenty), prompts, responses) == 40
    narrow = [MODEL.decode(replace(where, kv_cache_bytes=units.holding(n)), prompts, responses) for n in (64, 32, 16, 8, 4, 2, 1)]
    assert all(after > 0.99 * before for before, after in pairwise(narrow))
    assert narrow[-1] > 15 * narrow[0]


def test_waves_take_as_long_as_they_are_many():
    where = setup("llama-7b", "tp1 dp1", "tp1", max_num_seqs=16)
    free = unreal(MODEL, "kv_efficiency")
    one, three = (free.decode(where, *rows(count, 8, 100)) for count in (16, 48))
    assert three == pytest.approx(3 * one)
    assert free.decode(where, *rows(33, 8, 100)) < three
    assert free.decode(where, *rows(33, 8, 100)) > 2 * one


def test_eager_decode_pays_launches_and_graphs_do_not():
    graphs = setup("llama-7b", "tp8 dp1", "tp8")
    eager = replace(graphs, traits=EngineTraits(cuda_graphs=False))
    difference = MODEL.decode(eager, *rows(4, 8, 50)) - MODEL.decode(graphs, *rows(4, 8, 50))
    assert difference == pytest.approx(50 * 32 * (MODEL.launch_s - MODEL.layer_s))
    cpu = replace(eager, device=DEVICES["cpu"])
    assert MODEL.decode(cpu, *rows(4, 8, 50)) < MODEL.decode(replace(cpu, traits=EngineTraits()), *rows(4, 8, 50))


def test_generation_in_stages_fills_the_pipeline_or_waits_for_it():
    """Four groups in four stages take as long as one group; eight take twice that; blocking sends halve what is in flight."""
    traits = EngineTraits(cuda_graphs=False, generation_rows=4)
    where = setup("llama-7b", "tp1 pp4 dp1", "tp1 pp4", max_num_seqs=1000, traits=traits, links=FREE)
    free = unreal(replace(MODEL, row_s=0.0, step_s=0.0), "kv_efficiency")
    one, four, eight = (free.decode(where, *rows(count, 8, 100)) for count in (4, 16, 32))
    assert one == pytest.approx(four)
    assert eight == pytest.approx(2 * four)
    blocking = replace(where, traits=replace(traits, handover=2.0))
    assert free.decode(blocking, *rows(16, 8, 100)) == pytest.approx(2 * four)


def test_a_token_goes_from_stage_to_stage_over_their_link():
    """One row in four stages: four messages a token."""
    free = setup("llama-7b", "tp1 pp4 dp1", "tp1 pp4", links=FREE)
    slow = replace(free, links=replace(FREE, pp=LinkSpec(name="slow", bandwidth=1e6, latency_s=0.5)))
    one = np.array([8]), np.array([100])
    message = free.spec.hidden_size * 2 / (1e6 * MODEL.link_efficiency) + 0.5
    assert MODEL.decode(slow, *one) - MODEL.decode(free, *one) == pytest.approx(100 * 4 * message, rel=1e-6)


def test_stages_of_a_rollout_get_their_weights_from_their_neighbours():
    """Inside a node, whatever the trainer's stages talk over; each has its part of the layers' messages."""
    near = LinkSpec(name="near", bandwidth=1e9, latency_s=0.1)
    where = setup("llama-7b", "tp1 pp4 dp1", "tp1 pp2", links=replace(FREE, near=near))
    wanted = 7e8 / (1e9 * MODEL.link_efficiency) + 0.1 * 32 / 2 + MODEL.rewrite(where)
    assert MODEL.reshard(where, 7e8) == pytest.approx(wanted)


def test_zero3_gathers_weights_in_every_pass():
    lengths = np.full(2, 256)
    plain = setup("llama-7b", "dp64", rollout="tp1")
    zero = replace(plain, traits=EngineTraits(gathers_weights=True))
    gather = MODEL.gather(zero)
    assert gather == pytest.approx(63 / 64 * zero.parameters * 2 / (25e9 * 0.7))
    assert MODEL.forward(zero, lengths) >= gather > MODEL.forward(plain, lengths)


def test_closed_form_of_resharding_is_near_the_counted_bytes():
    spec = ModelSpec(
        name="small", num_layers=8, hidden_size=256, mlp_hidden_size=1024, num_heads=8, num_kv_heads=4, head_dim=32,
        vocab_size=256, max_positions=512,
    )  # fmt: skip
    for train, rollout in (
        ("tp2 dp2", "tp1"), ("tp4 dp1", "tp2"), ("tp1 dp4", "tp1"), ("tp1 dp4", "tp2"), ("tp2 pp2 dp1", "tp2"), ("tp2 dp2", "tp4"),
    ):  # fmt: skip
        plan = ReshardPlan.between(spec, train, rollout, "bf16")
        counted = max(plan.bytes_received(rank) for rank in range(4))
        closed = reshard_bytes(spec, Layout.parse(train), Layout.parse(rollout).tp)
        assert closed == pytest.approx(counted, rel=0.05, abs=10_000), (train, rollout)
        where = replace(setup(train=train, rollout=rollout), spec=spec)
        assert MODEL.planned_reshard(where, plan) == pytest.approx(MODEL.reshard(where), rel=0.2), (train, rollout)


def test_planned_resharding_asks_the_links_of_the_bytes():
    spec = ModelSpec.preset("qwen2.5-0.5b")
    layout = Layout.parse("tp2 pp2 dp1")
    near, far = (Links.of(ClusterSpec.parse(text), range(4), layout) for text in ("1x4 A100-80GB", "4x1 A100-80GB"))
    where = Setup(spec=spec, layout=layout, device=A100, links=near, rollout=Layout(tp=1))
    together, apart = (ReshardPlan.between(spec, "tp2 pp2", "tp1", "bf16", nodes=nodes) for nodes in (None, (0, 1, 2, 3)))
    received = max(together.bytes_received(rank) for rank in range(4))
    lags = spec.num_layers
    assert MODEL.planned_reshard(where, together) == pytest.approx(
        received / (300e9 * 0.7) + lags * 5e-6 + MODEL.rewrite(where), rel=1e-6)  # fmt: skip
    assert MODEL.planned_reshard(replace(where, links=far), apart) == pytest.approx(
        received / (25e9 * 0.7) + lags * 2e-5 + MODEL.rewrite(where), rel=1e-6)  # fmt: skip


def test_hybridflow_table_2():
    spec, m = ModelSpec.preset("llama-70b"), ModelSpec.preset("llama-70b").num_bytes("bf16")
    assert reshard_bytes(spec, Layout.parse("tp8 pp4 dp4"), 4) == pytest.approx((8 * 4 - 4) / (4 * 8 * 4) * m)
    assert reshard_bytes(spec, Layout.parse("tp8 dp2"), 8) == 0
    assert reshard_bytes(spec, Layout.parse("tp1 pp8 dp1"), 2, rollout_pp=4) == pytest.approx(m / 16)


def test_the_trainer_s_weights_come_back_without_a_link():
    where = setup("llama-7b", "tp1 dp2", "tp1")
    fresh, stale = (MODEL.costs("generate", where, *rows(2), stale=s) for s in (False, True))
    assert "reshard" not in fresh
    assert MODEL.costs("to_training", where, *rows(2)) == {"reshard": MODEL.rewrite(where)}
    assert MODEL.rewrite(where) <= stale["reshard"]


def test_links_of_a_layout():
    crossing = Links.of(CLUSTER, range(128), Layout.parse("tp8 pp4 dp4"))
    assert crossing.tp == CLUSTER.intra_node
    share = CLUSTER.inter_node.bandwidth / 8  # eight rings leave every node
    assert crossing.dp.bandwidth == crossing.pp.bandwidth == crossing.far.bandwidth == share
    assert Links.of(CLUSTER, range(8), Layout.parse("tp2 pp2 dp2")).pp == CLUSTER.intra_node
    assert Links.of(CLUSTER, range(4, 12), Layout.parse("tp8 dp1")).tp == CLUSTER.inter_node
    assert Links.of(CLUSTER, range(128), Layout.parse("dp128")).dp == CLUSTER.inter_node  # one ring through all
    assert Links.of(CLUSTER, range(16), Layout.parse("tp2 dp8")).dp.bandwidth == CLUSTER.inter_node.bandwidth / 2


def test_setup_takes_the_slowest_device():
    mixed = ClusterSpec.parse("1x2 H100 + 1x2 A100-80GB")
    role = RoleSpec(name="actor", kind="actor", model=ModelSpec.preset("llama-7b"), train=Layout.parse("tp2"), dtype="bf16")
    assert Setup.of(role, mixed, range(4)).device.name == "A100-80GB"
    assert Setup.of(role, mixed, range(2)).device.name == "H100"


def test_setup_reads_the_role():
    options = RolloutOptions(max_num_seqs=100, kv_cache_bytes=7 * 10**9, max_num_batched_tokens=8192)
    role = RoleSpec(
        name="actor", kind="actor", model=ModelSpec.preset("llama-7b"), train=Layout.parse("tp8 dp2"), rollout=Layout(tp=2),
        dtype="bf16", rollout_options=options, optimizer=AdamW(distributed=True, offload=True),
    )  # fmt: skip
    where = Setup.of(role, CLUSTER, range(16))
    assert (where.max_num_seqs, where.kv_cache_bytes, where.batch_tokens) == (100, 7 * 10**9, 8192)
    assert (where.distributed, where.offloads) == (True, ("optimizer",))
    assert where.rollout_links.tp == CLUSTER.intra_node
    assert not Setup.of(replace(role, optimizer=AdamW()), CLUSTER, range(16)).distributed


def test_links_come_with_the_device():
    assert ClusterSpec.parse("2x8 A100-80GB").inter_node.bandwidth == 25e9
    assert ClusterSpec.parse("2x8 H100").intra_node.bandwidth == 450e9
    mixed = ClusterSpec.parse("1x8 H100 + 1x8 A100-80GB-PCIe")
    assert (mixed.intra_node.name, mixed.inter_node.bandwidth) == ("PCIe 4 x16", 25e9)


def test_span_names_in_order():
    assert list(MODEL.costs("generate", setup(), *rows(), stale=True)) == ["reshard", "prefill", "decode"]
    assert list(MODEL.costs("generate", setup(), *rows())) == ["prefill", "decode"]
    assert list(MODEL.costs("update", setup(), *rows())) == ["forward", "backward", "agree", "optimizer"]
    assert list(MODEL.costs("compute_values", setup(), *rows())) == ["forward", "agree"]


def test_constants_are_few_and_documented():
    text = (PerfModel.__module__, PerfModel.__doc__)
    assert all(text)
    assert len(fields(PerfModel)) <= 20


def test_a_state_is_the_weights_their_masters_and_the_moments():
    """What a simulated session keeps of a role that was trained is what saving it is priced by."""
    spec = ModelSpec.preset("qwen2.5-0.5b")
    for dtype, each in (("fp32", 12), ("bf16", 14)):
        with hf.Session.simulated("1x1 A100-80GB") as session:
            session.actor(spec, dtype=dtype, train="dp1", rollout="tp1")
            session.reward(lambda completions: [0.0] * len(completions))
            step = hf.RLOO(n=2, max_new_tokens=8, kl_coef=0.0).step(session.models, session.prompts(["a"] * 8, batch_size=8)[0])
            step.actor.wait()
            kept = session.snapshot("after").num_bytes
        role = RoleSpec(name="actor", kind="actor", model=spec, train=Layout(dp=1), dtype=dtype, optimizer=AdamW())
        where = Setup.of(role, ClusterSpec.parse("1x1 A100-80GB"), [0])
        assert kept == each * where.parameters, dtype
        for method in ("save_state", "load_state"):
            (seconds,) = MODEL.costs(method, where, *rows(0)).values()
            assert seconds * MODEL.storage_bandwidth == pytest.approx(kept), (dtype, method)


def test_pickles():
    assert pickle.loads(pickle.dumps(MODEL)) == MODEL


def test_a_pool_of_one_kind_in_a_mixed_cluster_has_the_links_of_its_kind():
    mixed, alone = ClusterSpec.parse("2x8 H100 + 2x8 A100-80GB"), ClusterSpec.parse("2x8 H100")
    layout = Layout(tp=8, dp=2)
    assert Links.of(mixed, range(16), layout) == Links.of(alone, range(16), layout)
    across = Links.of(mixed, range(32), Layout(tp=8, dp=4))
    assert across.tp == ClusterSpec.parse("1x8 A100-80GB").intra_node
    own = replace(mixed, intra_node=replace(mixed.intra_node, bandwidth=1e9))
    assert Links.of(own, range(16), layout).tp.bandwidth == 1e9, "links that were given stand"


def test_ranks_agree_at_the_end_of_a_pass():
    def costs(layout):
        return MODEL.costs("update", setup("llama-7b", layout, links=FREE), *rows())

    assert list(costs("tp1 dp1")) == ["forward", "backward", "optimizer"]
    assert [costs(layout)["agree"] for layout in ("tp2 dp1", "tp2 dp4")] == pytest.approx([MODEL.agree_s, 3 * MODEL.agree_s])


def test_what_crosses_between_the_processors_of_a_node_shares_their_bridge():
    """Parts: of the bridge, what one line of (tp, dp, pp) has; 0 where the axis stays on one processor or has no one to talk to."""
    for cluster, layout, parts in (
        ("1x8 A100-80GB-PCIe", "tp8", (1, 0, 0)), ("1x8 A100-80GB-PCIe", "tp4 dp2", (0, 4, 0)),
        ("1x8 A100-80GB-PCIe", "tp2 pp4", (0, 0, 2)), ("1x8 A100-80GB-PCIe", "dp8", (0, 1, 0)),
        ("1x4 A100-80GB-PCIe", "tp4", (0, 0, 0)), ("1x8 A100-80GB", "tp8", (0, 0, 0)),
        ("2x8 A100-80GB-PCIe", "tp8 dp2", (1, None, 0)),
    ):  # fmt: skip
        spec, given = ClusterSpec.parse(cluster), Layout.parse(layout)
        links = Links.of(spec, range(spec.num_devices), given.fill(spec.num_devices))
        slot = spec.intra_node
        for link, part in zip((links.tp, links.dp, links.pp), parts, strict=True):
            expected = spec.inter_node.bandwidth if part is None else slot.bridge / part if part else slot.bandwidth
            assert link.bandwidth == pytest.approx(expected / (8 if part is None else 1)), (cluster, layout)
        within = slot.bridge if slot.bridge and spec.num_devices >= 8 else slot.bandwidth
        assert links.within.bandwidth == within, (cluster, layout)


@pytest.mark.parametrize("number", range(40))
def test_replicas_together_take_what_each_takes_alone(number):
    """Sorted once for all setups, with and without rows that wait: slots, prefill and decode are those of one replica."""
    rng = np.random.default_rng([11, number])
    stages = int(rng.choice([1, 1, 2]))
    layout = Layout(tp=2, pp=stages, dp=1)
    where = Setup(
        spec=ModelSpec.preset("llama3-1b"), layout=layout, device=A100, links=Links.of(CLUSTER, range(layout.size), layout),
        rollout=layout, max_num_seqs=int(rng.integers(1, 40)), kv_cache_bytes=int(rng.choice([0, 2e8, 2e9])),
    )  # fmt: skip
    each = []
    for _ in range(7):
        count = int(rng.integers(1, 60))
        each.append((rng.integers(1, 300, count), rng.integers(1, 900, count)))
    rows = ReplicaRows(each)
    assert slots_each(where, rows).tolist() == [slots(where, *one) for one in each]
    found = MODEL.generate_each(where, rows)
    for name in ("prefill", "decode"):
        expected = [MODEL.costs("generate", where, *one)[name] for one in each]
        assert found[name] == pytest.approx(expected, rel=1e-9), name
