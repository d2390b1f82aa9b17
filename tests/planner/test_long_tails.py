"""Long tails in simulation: replicas against sums by hand and against the model's closed form, schemes against what must hold."""

from dataclasses import replace

import numpy as np
import pytest
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st

import hfsdk as hf
from hfsdk.core.errors import OptionError
from hfsdk.core.response_lengths import MEASURED
from hfsdk.core.roles import Sampling
from hfsdk.planner.perf.setup import Links
from hfsdk.planner.tails.generation import OWN, SHARED, fits, gather, generate
from hfsdk.planner.tails.replica import PendingResponse, Replica
from hfsdk.planner.tails.tail_case import TailCase, part_of
from hfsdk.planner.tails.token_costs import TokenCosts

FLAT = TokenCosts(step_s=(0.0, 1.0, 1.0, 1.0, 1.0), read_s=0.0, prefill_s=0.0)
"""A step takes a second with any number of rows, up to four."""


def rows(*lengths, prompt=0, groups=None):
    return [PendingResponse(k, k if groups is None else groups[k], prompt, length) for k, length in enumerate(lengths)]


def score(completions):
    return [0.0] * len(completions)


# -- by hand


def test_two_replicas_with_three_responses():
    made = generate(FLAT, 2, rows(3, 5, 9))  # a and b on the first, c on the second
    assert [(at, row.number) for at, row in made.ended] == [(3.0, 0), (5.0, 1), (9.0, 2)]
    assert (made.seconds, made.busy_s) == (9.0, 14.0)


def test_steps_read_what_is_there_and_what_was_written():
    costs = TokenCosts(step_s=(0.0, 1.0, 1.5), read_s=0.1, prefill_s=0.01)
    made = generate(costs, 1, rows(2, 4, prompt=10))
    both = 2 * 1.5 + 0.1 * (2 * 20 + 2 * 2**2 / 2)  # two steps of two rows with 20 keys and values at first
    alone = 2 * 1.0 + 0.1 * (2 * 12 + 2**2 / 2)  # two more of the second, which has 12 by then
    assert made.ended[0][0] == pytest.approx(0.2 + both)
    assert made.seconds == pytest.approx(0.2 + both + alone)


def test_rows_wait_for_a_place_and_for_room_in_the_cache():
    two = replace(FLAT, step_s=FLAT.step_s[:3])
    assert generate(two, 1, rows(4, 2, 3)).seconds == 5.0  # the third comes in at 2
    small = replace(FLAT, cache_tokens=7)
    assert generate(small, 1, rows(4, 2, 3)).seconds == 5.0, "4 and 2 fit, 3 comes in once 2 has gone"
    assert generate(small, 1, rows(9)).seconds == 9.0, "one alone always may"


def test_one_queue_gives_the_next_row_to_whoever_has_room():
    one = replace(FLAT, step_s=FLAT.step_s[:2])
    lengths = (8, 8, 1, 1)
    assert generate(one, 2, rows(*lengths), OWN).seconds == 16.0
    assert generate(one, 2, rows(*lengths), SHARED).seconds == 9.0


def test_an_empty_replica_takes_half_of_the_fullest_ones_rows():
    costs = TokenCosts(step_s=(0.0, 1.0, 2.0), read_s=0.0, prefill_s=0.0, move_s=0.5, move_token_s=0.25)
    made = generate(costs, 2, rows(1, 5, 1, 5), SHARED)  # dealt 0 and 2, 1 and 3
    # both of the first end at 2; by then a token of rows 1 and 3 each is there; row 1 moves: 0.5 + 0.25 * 1
    assert [(at, row.number) for at, row in made.ended] == [(2.0, 0), (2.0, 2), (6.0, 3), (6.75, 1)]


def test_moving_rows_does_not_always_pay():
    """A long row alone is slowed by those that come to it: one queue is no theorem, and this is why."""
    costs = TokenCosts(step_s=(0.0, 1.0, 2.0), read_s=0.0, prefill_s=0.0)
    own, shared = (generate(costs, 2, rows(4, 4, 9), rule).seconds for rule in (OWN, SHARED))
    assert (own, shared) == (9.0, 11.0)  # shared: 4 and 9 together for two steps of 2 s, then 9 goes on alone for 7


def test_rows_that_are_stopped_keep_what_they_wrote():
    made = generate(FLAT, 2, rows(3, 5, 9), until_s=4.5)
    assert [row.number for _, row in made.ended] == [0]
    assert [(row.number, row.done) for row in made.left] == [(1, 4), (2, 4)]
    again = generate(FLAT, 2, made.left)
    assert [(at, row.number) for at, row in again.ended] == [(1.0, 1), (5.0, 2)]


def test_the_last_rows_together_on_one_replica():
    costs = replace(FLAT, move_s=0.5, move_token_s=0.25)
    made, moved_s = gather(costs, 2, rows(3, 5, 9), OWN, 5.0, 1)
    assert moved_s == 5.0 + 0.5 + 0.25 * 5
    assert made.seconds == moved_s + 4.0
    assert fits(costs, rows(1, 1, 1, 1), 1)
    assert not fits(costs, rows(1, 1, 1, 1, 1), 1)


# -- what must hold


LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 5), st.sampled_from([OWN, SHARED]), st.floats(0, 500))
def test_no_token_is_lost_and_none_is_written_twice(lengths, replicas, rule, until_s):
    costs = TokenCosts(step_s=(0.0, 1.0, 1.25, 1.5, 2.0), read_s=0.001, prefill_s=0.01, cache_tokens=900, move_s=0.5)
    made = generate(costs, replicas, rows(*lengths, prompt=50), rule, until_s=until_s)
    every = sorted([*(row for _, row in made.ended), *made.left], key=lambda row: row.number)
    assert [row.length for row in every] == lengths
    assert all(row.done == row.length for _, row in made.ended)
    assert all(0 <= row.done < row.length for row in made.left)
    rest = generate(costs, replicas, made.left, rule)
    assert len(rest.ended) == len(made.left)
    assert [at for at, _ in made.ended] == sorted(at for at, _ in made.ended)


@given(LENGTHS, st.integers(1, 5), st.sampled_from([OWN, SHARED]))
def test_nothing_is_faster_than_its_work(lengths, replicas, rule):
    costs = TokenCosts(step_s=(0.0, 1.0, 1.25, 1.5, 2.0), read_s=0.001, prefill_s=0.01)
    made = generate(costs, replicas, rows(*lengths, prompt=50), rule)
    cheapest = 2.0 / 4  # a token's share of the fullest step
    assert made.seconds >= max(lengths) * costs.step_s[1]
    assert made.seconds >= sum(lengths) * cheapest / replicas
    assert made.busy_s <= replicas * made.seconds + 1e-6
    assert made.busy_s >= sum(lengths) * cheapest


@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 4))
def test_equal_lengths_take_equally_long_under_either_rule(length, replicas, each):
    costs = TokenCosts(step_s=(0.0, 1.0, 1.25, 1.5, 2.0), read_s=0.001, prefill_s=0.01)
    own, shared = (generate(costs, replicas, rows(*[length] * (replicas * each), prompt=9), rule) for rule in (OWN, SHARED))
    assert own.seconds == pytest.approx(shared.seconds)


@given(LENGTHS, st.integers(1, 4))
def test_where_rows_cost_nothing_one_queue_is_never_slower(lengths, replicas):
    """All rows fit and a step takes the same with any number of them: then both are as long as the longest row."""
    costs = TokenCosts(step_s=(0.0, *[1.0] * 40), read_s=0.0, prefill_s=0.0)
    own, shared = (generate(costs, replicas, rows(*lengths), rule).seconds for rule in (OWN, SHARED))
    assert own == shared == max(lengths)


def test_a_replica_halts_after_whole_steps():
    replica = Replica(TokenCosts(step_s=(0.0, 1.0, 1.0), read_s=0.1, prefill_s=0.0))
    replica.take(rows(100, 100, prompt=5))
    replica.halt(50.0)
    done = [row.done for row in replica.give()]
    assert done[0] == done[1]
    took = done[0] + 0.1 * (done[0] * 10 + done[0] ** 2)
    assert took <= 50.0 < took + 1.0 + 0.1 * (10 + 2 * done[0] + 1)
    assert replica.clock_s == pytest.approx(took)


# -- against the model


@pytest.fixture(scope="module")
def plan():
    session = hf.Session.simulated("1x8 H100")
    trained = {"dtype": "bf16", "optimizer": hf.AdamW(distributed=True), "recompute": "full"}
    actor = session.actor("qwen2.5-7b", rollout="tp2", rollout_options=hf.RolloutOptions(max_num_seqs=256), **trained)
    session.reference(actor)
    session.reward(score)
    return session.plan(hf.GRPO(n=4), hf.Workload(prompts=32, prompt_tokens=256, response_tokens=1024))


TAIL = hf.ResponseLengths(kind="lognormal", median=0.15, sigma=0.8)


def test_where_no_row_waits_a_replica_takes_what_the_model_says(plan):
    case = TailCase.of(plan, TAIL, hf.PerfModel(), 0, 1)
    made = case.rows(0, 32)
    mine = made[: len(made) // case.num_replicas]
    prompts, lengths = np.array([row.prompt for row in mine]), np.array([row.length for row in mine])
    setup = case.setup
    expected = case.perf.prefill(setup, prompts) + case.perf.decode(setup, prompts, lengths)
    assert len(mine) <= case.costs.most_rows
    assert generate(case.costs, 1, mine).seconds == pytest.approx(expected, rel=1e-6)


def test_a_synchronous_step_is_the_plan_s(plan):
    """All of one length: the plan's own step."""
    tails = hf.long_tails(plan, steps=1)
    whole = plan.again(placement="colocate", top=1, shadows=False)
    assert tails["synchronous"].seconds == pytest.approx(whole.seconds, rel=0.02)
    assert tails["shared queue"].seconds == pytest.approx(tails["synchronous"].seconds, rel=1e-6)
    assert tails["synchronous"].idle_share == pytest.approx(0.0, abs=0.02)


def test_schemes_keep_their_promises(plan):
    tails = hf.long_tails(plan, lengths=TAIL, steps=2)
    table = tails.to_pandas()
    assert list(table.index) == [
        "synchronous", "shared queue", "partial rollouts", "one step off-policy", "one step off, partial", "reallocation"
    ]  # fmt: skip
    assert (table.loc[["synchronous", "shared queue", "reallocation"], "stale_share"] == 0).all()
    assert table.stale_share["one step off-policy"] == table.stale_share["one step off, partial"] == 1.0
    assert 0 < table.stale_share["partial rollouts"] < 1
    assert tails["reallocation"].seconds <= tails["shared queue"].seconds, "none is one of its choices"
    assert table.idle_share.between(0, 1).all()
    assert table.idle_share["partial rollouts"] < table.idle_share["synchronous"]
    assert table.speedup["synchronous"] == 1.0
    assert tails.fastest.seconds <= table.seconds.max()
    assert "partial rollouts" in repr(tails)
    longest, shortest = (generate_s(plan, lengths) for lengths in ("full", TAIL))
    assert shortest < longest


def generate_s(plan, lengths):
    return hf.long_tails(plan, lengths=lengths, steps=1)["synchronous"].generation_s


def test_partial_rollouts_train_as_many_tokens_as_they_write(plan):
    tails = hf.long_tails(plan, lengths=TAIL, steps=20)
    made, trained = tails["synchronous"].response_tokens, tails["partial rollouts"].response_tokens
    assert trained == pytest.approx(made, rel=0.05)


def test_pools_of_their_own_and_partial_rollouts_together_wait_for_the_trainer_and_lose_no_tokens(plan):
    """Rows that are over-sampled are trained all the same; nobody trains faster than its devices do."""
    tails = hf.long_tails(plan, lengths=TAIL, steps=20)
    both, made = tails["one step off, partial"], tails["synchronous"].response_tokens
    assert both.response_tokens == pytest.approx(made, rel=0.05)
    assert both.seconds >= both.rest_s + both.moving_s - 1e-9
    assert both.seconds >= both.generation_s + both.moving_s - 1e-9
    rates = {name: step.response_tokens / step.seconds for name, step in tails.schemes.items()}
    assert rates["one step off, partial"] > rates["one step off-policy"], "nobody waits for the longest row"
    assert "2x prompts under way" in both.how


# -- parts of the cluster


@pytest.fixture(scope="module")
def two_nodes():
    session = hf.Session.simulated("2x8 H100")
    trained = {"dtype": "bf16", "optimizer": hf.AdamW(distributed=True), "recompute": "full", "offload": True}
    actor = session.actor("qwen2.5-7b", rollout="tp2", rollout_options=hf.RolloutOptions(max_num_seqs=256), **trained)
    session.reference(actor)
    session.reward(score)
    plan = session.plan(hf.GRPO(n=4, mini_batches=4), hf.Workload(prompts=64, prompt_tokens=256))
    return TailCase.of(plan, TAIL, hf.PerfModel(), 0, 1)


def test_parts_may_end_inside_a_node_where_a_replica_does_not(two_nodes):
    assert two_nodes.shares() == [2, 4, 6, 8, 10, 12, 14]
    for devices in two_nodes.shares():
        rest = two_nodes.rest(16 - devices)
        assert rest is None or rest.cluster.num_devices == 16 - devices
    assert two_nodes.rest_s(12) is not None
    assert two_nodes.rest_s(16) < two_nodes.rest_s(12) < two_nodes.rest_s(8)


def test_a_part_has_the_nodes_links_and_cores_that_its_devices_have():
    cluster = hf.ClusterSpec.parse("3x8 H100", 2.0).with_cores(4)
    for devices, sizes, cores in ((20, (8, 8, 4), (4, 4, 2)), (3, (3,), (1,)), (16, (8, 8), (4, 4)), (9, (8, 1), (4, 1))):
        part = part_of(cluster, devices)
        assert tuple(map(len, part.node_devices)) == sizes
        assert part.node_cores == cores
        assert (part.intra_node, part.inter_node) == (cluster.intra_node, cluster.inter_node)
        assert part.price_per_device_hour == 2.0
    crossing = Links.of(part_of(cluster, 12), range(12), hf.Layout.parse("tp4 dp3"))
    assert crossing.tp == cluster.intra_node, "groups of four lie in a node each"
    assert crossing.dp.bandwidth == pytest.approx(cluster.inter_node.bandwidth / 4), "whose four rings share its link to the other"


def test_the_rest_of_fewer_prompts_is_planned_with_its_own_mini_batches_and_not_in_proportion(two_nodes):
    whole = two_nodes.rest_s(8)
    plan = two_nodes.rest(8)
    assert whole == pytest.approx(plan.seconds - next(c.seconds for c in plan.calls if c.method == "generate"))
    shares = np.linspace(0.02, 1.5, 60)
    seconds = np.array([two_nodes.rest_s(8, share) for share in shares])
    assert (np.diff(seconds) >= 0).all()
    assert two_nodes.rest_s(8, 1 / 16) > 1.1 * whole / 16, "weights are read, and optimizers step, for few rows as for many"
    assert two_nodes.rest_s(8, 0.5) >= whole / 2
    layouts = {name if use == "train" else f"{name} {use}": x for name, both in plan.layouts.items() for use, x in both.items()}
    half = replace(two_nodes.plan.workload, prompts=32, mini_batches=2)
    again = plan.again(cluster=plan.cluster, workload=half, placement="colocate", layouts=layouts)
    assert {name: dict(x) for name, x in again.layouts.items()} == {name: dict(x) for name, x in plan.layouts.items()}
    expected = again.seconds - next(c.seconds for c in again.calls if c.method == "generate")
    assert two_nodes.rest_s(8, 0.5) == pytest.approx(expected)
    for share in (0.1, 0.5, 0.9):
        assert two_nodes.rest_done(8, two_nodes.rest_s(8, share)) == pytest.approx(share)


def test_without_over_sampling_partial_rollouts_are_synchronous(plan):
    tails = hf.long_tails(plan, lengths=TAIL, steps=1, over_sampling=1.0)
    partial, whole = tails["partial rollouts"], tails["synchronous"]
    assert partial.stale_share == 0
    assert partial.seconds == pytest.approx(whole.seconds, rel=0.2)  # other prompts of the same stream


def test_the_seed_decides_and_nothing_else(plan):
    first, again, other = (hf.long_tails(plan, lengths=TAIL, steps=1, seed=seed).to_pandas() for seed in (1, 1, 2))
    assert first.equals(again)
    assert not first.equals(other)


def test_what_cannot_be_asked_is_refused(plan):
    for name, value, *named in (
        ("lengths", "short", "'full', 'uniform', 'lognormal'", "hf.ResponseLengths", "'short'"),
        ("lengths", "math-4b", "hf.ResponseLengths.measured('math-4b')"), ("lengths", hf.ResponseLengths, "hf.ResponseLengths"),
        ("over_sampling", 0.5, "over_sampling=0.5"), ("steps", 0, "steps=0"), ("plan", 3, "plan=3"), ("perf", 3, "perf=3"),
    ):  # fmt: skip
        with refuses(OptionError, *named) as refused:
            hf.long_tails(**{"plan": plan, name: value})
        assert "\n" not in str(refused.value)


def test_a_plan_that_cannot_be_asked_again_is_refused(plan):
    with refuses(OptionError, "file"):
        hf.long_tails(replace(plan, again=None))
    mixed = plan.again(cluster="1x8 H100 + 1x8 A100-80GB")
    with refuses(OptionError, "nodes", "hf.Session.simulated"):
        hf.long_tails(mixed)
    twice = hf.Session.simulated("1x8 H100")
    twice.reference(twice.actor("qwen2.5-0.5b"))
    twice.reward(score)
    with refuses(OptionError, "ReMax", "2 times"):
        hf.long_tails(twice.plan(hf.ReMax(), hf.Workload(prompts=8)))
    with refuses(OptionError, "'partial'", "partial rollouts"):
        hf.long_tails(plan, steps=1)["partial"]


# -- lengths


class Drawn(hf.ResponseLengths):
    """Lengths of a user's own that are none."""

    def draw(self, sampling, seed, positions, copies):
        return np.full(len(positions), 0.5)


def test_lengths_that_are_none_are_refused_in_one_line(plan):
    with refuses(OptionError, "Drawn.draw", "max_new_tokens=1024") as refused:
        hf.long_tails(plan, lengths=Drawn())
    assert "\n" not in str(refused.value)
    with refuses(OptionError, "{0.5: 9.0, 0.9: 6.0}"):
        hf.ResponseLengths.of_quantiles({0.5: 9, 0.9: 6})


@pytest.mark.filterwarnings("error")
def test_however_wide_lengths_are_cut_without_a_warning():
    drawn = hf.ResponseLengths(kind="lognormal", sigma=1e6).draw(MOST, 0, *MANY)
    assert set(drawn) == {1, MOST.max_new_tokens}


MOST = Sampling(max_new_tokens=32_768)
MANY = np.arange(20_000), np.zeros(20_000, dtype=int)


@pytest.mark.parametrize("name", MEASURED)
def test_measured_lengths_have_what_was_published(name):
    drawn = hf.ResponseLengths.measured(name).draw(MOST, 0, *MANY)
    median, mean = {"math-4b": (6701, 7600), "agent-35b": (1727.5, 2069.7)}[name]
    assert np.median(drawn) == pytest.approx(median, rel=0.02)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert "github.com" in MEASURED[name].source


def test_quantiles_are_kept_and_what_is_longer_is_cut():
    lengths = hf.ResponseLengths.of_quantiles({0.5: 100, 0.9: 300, 0.99: 2000})
    drawn = lengths.draw(MOST, 0, *MANY)
    assert np.quantile(drawn, [0.5, 0.9]) == pytest.approx([100, 300], rel=0.05)
    assert drawn.max() == 2000
    assert lengths.draw(Sampling(max_new_tokens=300), 0, *MANY).max() == 300
    assert (drawn == lengths.draw(MOST, 0, *MANY)).all()


def test_what_is_no_distribution_is_refused():
    for quantiles in ({0.5: 10}, {0.5: 10, 0.4: 20}, {0.5: 10, 1.0: 20}, {0.0: 1, 0.5: 2}, {0.5: 0, 0.9: 2}):
        with refuses(OptionError, "shares", "0 and 1"):
            hf.ResponseLengths.of_quantiles(quantiles)


def test_unknown_lengths_name_those_there_are():
    with refuses(OptionError, "'math'", "math-4b"):
        hf.ResponseLengths.measured("math")
    with refuses(OptionError, "mean", "median", 9, 10):
        hf.ResponseLengths.lognormal(median=10, mean=9)
