import pickle
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from expect import refuses

from hfsdk.core import protocol as protocols
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.dataflow import Call
from hfsdk.core.errors import CallError, CheckpointError, OptionError, SimulatedValueError
from hfsdk.core.layout import Layout
from hfsdk.core.methods import METHODS
from hfsdk.core.microbatch import plan_update
from hfsdk.core.pending import ColumnInfo
from hfsdk.core.placement import Pool
from hfsdk.core.roles import AdamW, RoleSpec, Sampling
from hfsdk.core.runtime import Order, Pick, Runtime, Stored, Work
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Ragged, Table
from hfsdk.core.trace import Trace
from hfsdk.engine.simulation.runtime import ResponseLengths, SimulatedRow, SimulatedRuntime, SimulatedValue
from hfsdk.planner.perf.memory import role_bytes
from hfsdk.planner.perf.perf_model import PerfModel

LLAMA = ModelSpec.preset("llama-70b")
BIG = ClusterSpec.parse("16x8 A100-80GB")
SMALL = ClusterSpec.parse("1x8 A100-80GB")
GENERATED = ("response", "rollout_log_probs", "finish_reason", "policy_version", "temperature", "group")


def role(kind, train, rollout=None, spec=LLAMA, name=None):
    trainable = kind in ("actor", "critic")
    return RoleSpec(
        name=name or kind, kind=kind, model=spec, train=Layout.parse(train), dtype="bf16",
        rollout=Layout.parse(rollout) if rollout else None, optimizer=AdamW() if trainable else None,
        head="scalar" if kind in ("critic", "reward") else "lm",
    )  # fmt: skip


def arguments_of(method, options):
    kind = METHODS[method].arguments
    known = {name: value for name, value in options.items() if name in {field.name for field in fields(kind)}}
    return kind(**known)


class Driver:
    """Does by hand what the controller does: remembers what was stored, and makes one order per rank."""

    def __init__(self, cluster, pools, lengths="full"):
        memory = lambda spec, size: role_bytes(spec, size)  # noqa: E731
        self.runtime = SimulatedRuntime(cluster, PerfModel(), lengths, memory)
        self.pools, self.roles, self.where = {}, {}, {}
        for pool, members in pools.items():
            self.runtime.open_pool(pool)
            for member in members:
                spec = member
                self.roles[spec.name], self.pools[spec.name] = spec, pool
                self.runtime.load(spec, pool)
        self.columns, self.spans, self.calls = {}, [], 0

    def put(self, table):
        part = self.runtime.put(table)
        infos = {
            n: ColumnInfo("scalar", "", 0, c.lengths if isinstance(c, Ragged) else None) for n, c in table.items()
        }  # fmt: skip
        stored = Stored("your data", table.num_rows, (part,), infos)
        self.columns |= dict.fromkeys(table, stored)
        return stored

    def picks(self, names, rows):
        return tuple(Pick.of(self.columns[name], rows, {name: name}) for name in names)

    def lengths(self, name):
        return self.columns[name].columns[name].lengths

    def run(self, who, method, reads=(), writes=(), protocol=protocols.THREE_D, **options):
        num_rows = self.columns[reads[0]].num_rows if reads else 0
        self.calls += 1
        call = Call(id=self.calls, role=who, method=method, phase="p", reads=tuple(reads), writes=writes, num_rows=num_rows)
        if who not in self.pools:
            rows = np.arange(num_rows)
            work = Work(call, None, (Order(rows, self.picks(reads, rows)),))
            return self.finish(work, self.runtime.task)
        spec, pool = self.roles[who], self.pools[who]
        mesh = spec.train.fill(pool.size).mesh(spec.rollout.tp if spec.rollout else 1)
        if method in ("update", "forward_backward"):
            total = self.lengths("prompt") + self.lengths("response")
            plan = plan_update(
                total, self.lengths("response"), mesh.layout.num_replicas, options.pop("epochs", 1),
                options.pop("mini_batches", 1), spec.micro_batch_tokens, 0,
            )  # fmt: skip
            by_dp = [sorted({r for m in plan for r in m.passes.rows_of(d)}) for d in range(mesh.layout.num_replicas)]
            shards = [np.array(by_dp[mesh.coordinates(r).dp], dtype=np.int64) for r in mesh.ranks]
        else:
            plan, shards = (), protocol.scatter(num_rows, mesh)
        arguments = arguments_of(method, options)
        keepers = protocol.collectors(mesh)
        orders = tuple(
            Order(rows, self.picks(reads, rows), rank in keepers, arguments=arguments, mini_batches=plan)
            for rank, rows in enumerate(shards)
        )
        return self.finish(Work(call, pool, orders), self.runtime.call)

    def finish(self, work, do):
        outcome = do(work)
        if outcome.stored is not None:
            self.columns |= dict.fromkeys(outcome.stored.columns, outcome.stored)
        self.spans += outcome.spans
        return outcome


def prompts(count=64, length=512):
    lengths = length - np.arange(count) % 7
    return Table({
        "prompt": Ragged.from_lengths(np.arange(lengths.sum(), dtype=np.int32), lengths), "position": np.arange(count) + 100,
        "text": [f"prompt {i}" for i in range(count)],
    })  # fmt: skip


def colocated(cluster=SMALL, train="tp4 dp2", rollout="tp4", lengths="full"):
    pool = Pool("all", tuple(range(cluster.num_devices)))
    fill = Layout.parse(train).fill(pool.size)
    members = [role("actor", str(fill), rollout), *(role(k, str(fill)) for k in ("critic", "reference"))]
    return Driver(cluster, {pool: members}, lengths)


def split(lengths="full"):
    first, second = Pool("first", tuple(range(4))), Pool("second", tuple(range(4, 8)))
    return Driver(SMALL, {
        first: [role("actor", "tp4 dp1", "tp2"), role("reference", "tp4 dp1")], second: [role("critic", "tp2 dp2")],
    }, lengths)  # fmt: skip


def generate(driver, new_tokens=256, copies=1, **more):
    return driver.run(
        "actor", "generate", ("prompt", "position"), GENERATED, protocols.MICRO_DP,
        sampling=Sampling(max_new_tokens=new_tokens, **more), seed=3, copies=copies,
    )  # fmt: skip


def ppo_step(driver, new_tokens=256, mini_batches=2):
    """Run the nine calls of one PPO step."""
    both = ("prompt", "response")
    generate(driver, new_tokens)
    driver.run("actor", "compute_log_probs", both, ("old_log_probs",), **{"column": "old_log_probs"})
    driver.run("reference", "compute_log_probs", both, ("ref_log_probs",), **{"column": "ref_log_probs"})
    driver.run("critic", "compute_values", both, ("values",))
    driver.run("reward", "compute_scores", (*both, "text"), ("scores",))
    reads = ("old_log_probs", "ref_log_probs", "values", "scores")
    driver.run("session", "map", reads, ("rewards", "advantages", "returns"))
    driver.run("session", "reduce", ("scores",))
    driver.run("critic", "update", (*both, "values", "returns"), mini_batches=mini_batches)
    driver.run("actor", "update", (*both, "old_log_probs", "advantages"), mini_batches=mini_batches)


def call_spans(driver):
    return {(s.role, s.method): s for s in driver.spans if s.device is None}


def start_s(span):
    return span.start_ns / 1e9


def end_s(span):
    return span.end_ns / 1e9


def test_is_a_runtime():
    driver = split()
    runtime: Runtime = driver.runtime
    pool = driver.pools["actor"]
    assert runtime.kind == "simulated"
    assert runtime.progress(pool) == (None, ())
    assert runtime.controller_bytes() == 0
    assert "simulated" in runtime.logs(pool, 0)
    assert "simulated" in runtime.logs(None, 0)
    assert runtime.cancel(1, pool) is None
    runtime.close()


def test_same_calls_give_the_same_spans_and_lengths():
    drivers = [split("lognormal"), split("lognormal")]
    for driver in drivers:
        driver.put(prompts())
        ppo_step(driver)
    first, second = drivers
    assert first.spans == second.spans
    assert np.array_equal(first.lengths("response"), second.lengths("response"))


def test_disjoint_pools_and_tasks_overlap():
    driver = split()
    driver.put(prompts())
    ppo_step(driver)
    spans = call_spans(driver)
    generated = end_s(spans["actor", "generate"])
    for key in (("actor", "compute_log_probs"), ("critic", "compute_values"), ("reward", "compute_scores")):
        assert start_s(spans[key]) == pytest.approx(generated)
    critic, actor = spans["critic", "update"], spans["actor", "update"]
    assert start_s(critic) < end_s(actor)
    assert start_s(actor) < end_s(critic)
    assert start_s(critic) >= end_s(spans["session", "map"]) - 1e-9


def test_calls_of_one_pool_run_one_after_the_other():
    driver = colocated()
    driver.put(prompts())
    ppo_step(driver)
    ppo_step(driver)
    on_pool = [s for s in driver.spans if s.device is None and s.pool]
    assert len(on_pool) == 12
    for before, after in pairwise(on_pool):
        assert start_s(after) >= end_s(before) - 2e-9  # spans are in whole nanoseconds
    for device in range(8):
        mine = sorted((s for s in driver.spans if s.device == device and not s.parent), key=lambda s: s.start_ns)
        for before, after in pairwise(mine):
            assert start_s(after) >= end_s(before) - 1e-6


def test_tasks_run_one_after_the_other():
    driver = colocated()
    driver.put(prompts())
    first = driver.run("reward", "compute_scores", ("prompt",), ("scores",)).spans[0]
    second = driver.run("session", "map", ("prompt",), ("costs",)).spans[0]
    assert start_s(first) == 0
    assert second.start_ns == first.end_ns


def test_spans_of_generation_and_update():
    driver = colocated()
    driver.put(prompts())
    first, second = generate(driver), generate(driver)
    update = driver.run("actor", "update", ("prompt", "response"), mini_batches=2, epochs=2)
    third = generate(driver)
    names = [[s.name for s in o.spans if s.device == 5 and s.parent] for o in (first, second, update, third)]
    assert names == [["reshard", "prefill", "decode"], ["prefill", "decode"],
                     ["forward", "backward", "agree", "optimizer"] * 4, ["reshard", "prefill", "decode"]]  # fmt: skip
    for outcome in (first, update):
        call, *workers = outcome.spans
        assert (call.name, call.device, call.predicted) == (call.method, None, True)
        assert {s.device for s in workers} == set(range(8))
        assert all(s.predicted and s.pool == "all" and s.rank == s.device for s in workers)
        whole = {s.rank: s for s in workers if not s.parent}
        assert {s.name for s in whole.values()} == {call.method}
        assert all(s.parent == call.method for s in workers if s is not whole[s.rank])
        for s in workers:
            assert whole[s.rank].start_ns <= s.start_ns
            assert s.end_ns <= whole[s.rank].end_ns + 2
        assert min(s.start_ns for s in workers) >= call.start_ns
        assert max(s.end_ns for s in workers) == pytest.approx(call.end_ns, abs=2)
    optimizer = [s for s in update.spans if s.name == "optimizer"]
    assert len({(s.start_ns, s.duration_s) for s in optimizer}) == 4  # all ranks wait for the slowest
    trace = Trace.of(driver.spans)
    assert len(trace.calls) == 4
    assert 0 < trace.idle()[3] < 0.5


def test_a_replica_with_longer_responses_decodes_longer():
    driver = colocated(train="tp1 dp8", rollout="tp1", lengths="uniform")
    driver.put(prompts())
    outcome = generate(driver)
    decode = {s.rank: s for s in outcome.spans if s.name == "decode"}
    tokens = {rank: span.attrs["tokens"] for rank, span in decode.items()}
    assert sum(tokens.values()) == driver.lengths("response").sum()
    assert len({s.duration_s for s in decode.values()}) > 1
    assert max(end_s(s) for s in decode.values()) == pytest.approx(end_s(outcome.spans[0]))


def test_lengths_are_readable():
    driver = colocated(lengths="uniform")
    driver.put(prompts())
    ppo_step(driver)
    response = driver.lengths("response")
    assert response.min() >= 1
    assert response.max() <= 256
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "rewards", "advantages", "returns"):
        info = driver.columns[name].columns[name]
        assert info.kind == "ragged"
        assert np.array_equal(info.lengths, response)
        assert info.num_bytes == 4 * response.sum()
    for name in ("scores", "finish_reason", "policy_version", "temperature", "group"):
        info = driver.columns[name].columns[name]
        assert (info.kind, info.lengths) == ("scalar", None)
    assert sum(p.num_bytes for p in driver.columns["response"].parts) == sum(
        i.num_bytes for i in driver.columns["response"].columns.values()
    )


@pytest.mark.parametrize("name", ["response", "advantages", "scores", "finish_reason"])
def test_values_raise(name):
    driver = colocated()
    driver.put(prompts())
    ppo_step(driver)
    with refuses(SimulatedValueError, name, "simulated", "column_states"):
        driver.runtime.fetch(driver.picks([name], np.arange(3)))


def test_the_users_own_columns_are_fetched():
    driver = colocated()
    table = prompts()
    driver.put(table)
    rows = np.array([5, 2, 5])
    found = driver.runtime.fetch(driver.picks(["prompt", "text", "position"], rows))
    assert found.ragged("prompt") == table.ragged("prompt").take(rows)
    assert found["text"] == ["prompt 5", "prompt 2", "prompt 5"]
    assert list(found["position"]) == [105, 102, 105]


def test_metrics_have_counts_and_times_but_no_loss():
    driver = colocated()
    driver.put(prompts())
    generate(driver)
    outcome = driver.run("actor", "update", ("prompt", "response"), epochs=2, mini_batches=4)
    rows = outcome.results[0]
    assert len(outcome.results) == 8
    assert [(r["epoch"], r["mini_batch"]) for r in rows] == [(e, m) for e in range(2) for m in range(4)]
    assert {r["num_samples"] for r in rows} == {16}
    assert sum(r["num_tokens"] for r in rows) == 2 * 64 * 256
    assert sum(r["seconds"] for r in rows) == pytest.approx(outcome.spans[0].duration_s, rel=0.01)
    with refuses(SimulatedValueError, "'loss'", "num_tokens"):
        rows[0]["loss"]
    assert "loss" not in rows[0]
    assert pickle.loads(pickle.dumps(rows)) == rows


def test_small_results_refuse_to_be_numbers():
    driver = colocated()
    driver.put(prompts())
    value = driver.run("session", "reduce", ("prompt",)).results[0]
    assert isinstance(value, SimulatedValue)
    assert "simulated" in repr(value)
    arithmetic = [lambda v: v + 1, lambda v: 2 * v, lambda v: v > 0, lambda v: v["loss"], np.asarray, np.sqrt]
    for use in (float, int, bool, list, *arithmetic):
        with refuses(SimulatedValueError, "session.reduce"):
            use(value)
    assert repr(pickle.loads(pickle.dumps(value))) == repr(value)


def test_halves_snapshots_and_inspection(tmp_path):
    a, b, moved = (str(tmp_path / name) for name in ("a", "b.partial", "b"))
    driver = colocated()
    driver.put(prompts())
    generate(driver)
    halves = driver.run("actor", "forward_backward", ("prompt", "response"))
    assert isinstance(halves.results[0], SimulatedRow)
    assert {s.name for s in halves.spans if s.device == 0 and s.parent} == {"forward", "backward", "agree"}
    assert [s.name for s in generate(driver).spans if s.device == 0 and s.parent] == ["prefill", "decode"]
    step = driver.run("actor", "step", protocol=protocols.ONE_TO_ALL)
    assert {s.name for s in step.spans if s.device == 0 and s.parent} == {"optimizer"}
    assert driver.run("actor", "save_state", protocol=protocols.ONE_TO_ALL, folder=a).results[0] == {"num_updates": 1}
    driver.run("actor", "update", ("prompt", "response"), mini_batches=3)
    assert driver.run("actor", "save_state", protocol=protocols.ONE_TO_ALL, folder=b).results[0] == {"num_updates": 4}
    assert driver.run("actor", "load_state", protocol=protocols.ONE_TO_ALL, folder=a).results[0] == {"num_updates": 1}
    assert "reshard" in [s.name for s in generate(driver).spans]
    (tmp_path / "b.partial").rename(moved)  # as Session.save does
    driver.runtime.load(replace(driver.roles["actor"], restore=moved), driver.pools["actor"])
    assert driver.run("actor", "save_state", protocol=protocols.ONE_TO_ALL, folder=a).results[0] == {"num_updates": 4}
    with refuses(CheckpointError, "simulated"):
        driver.run("actor", "load_state", protocol=protocols.ONE_TO_ALL, folder=str(tmp_path))
    run = driver.run("actor", "run", protocol=protocols.ONE_TO_ALL)
    assert len(run.results) == 8
    assert all(isinstance(r, SimulatedValue) for r in run.results)


@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
def test_a_samples_length_does_not_depend_on_layout_or_neighbours(kind):
    found = []
    for train, rollout in (("tp8 dp1", "tp8"), ("tp1 dp8", "tp1")):
        driver = colocated(train=train, rollout=rollout, lengths=kind)
        driver.put(prompts())
        generate(driver)
        found.append(driver.lengths("response"))
    assert np.array_equal(*found)
    few = colocated(lengths=kind)
    few.put(prompts().take(np.arange(10, 20)))
    generate(few)
    assert np.array_equal(few.lengths("response"), found[0][10:20])


def test_copies_of_a_prompt_differ():
    driver = colocated(lengths="uniform")
    driver.put(prompts(16).take(np.repeat(np.arange(16), 4)))
    generate(driver, copies=4)
    by_prompt = driver.lengths("response").reshape(16, 4)
    assert (by_prompt.min(1) < by_prompt.max(1)).all()


def test_distributions():
    count = 20_000
    numbers, zeros = np.arange(count), np.zeros(count, dtype=np.int64)
    sampling = Sampling(max_new_tokens=1000, min_new_tokens=10)
    uniform = ResponseLengths(kind="uniform").draw(sampling, 0, numbers, zeros)
    assert (uniform.min(), uniform.max()) == (10, 1000)
    assert uniform.mean() == pytest.approx(505, rel=0.02)
    tail = ResponseLengths(kind="lognormal", median=0.3, sigma=0.5).draw(sampling, 0, numbers, zeros)
    assert np.median(tail) == pytest.approx(300, rel=0.02)
    assert np.log(tail[tail < 1000]).std() == pytest.approx(0.5, rel=0.05)
    assert set(ResponseLengths().draw(sampling, 0, numbers, zeros)) == {1000}
    others = ResponseLengths(kind="uniform").draw(sampling, 1, numbers, zeros)
    assert abs(np.corrcoef(uniform, others)[0, 1]) < 0.03
    assert list(uniform[:4]) == [821, 980, 503, 773]  # stable over versions and machines
    with refuses(OptionError, "lognormal"):
        ResponseLengths(kind="normal")


def test_pools_reopened_start_where_the_closed_one_ended():
    driver = colocated()
    driver.put(prompts())
    end = end_s(generate(driver).spans[0])
    driver.runtime.close_pool("all")
    with refuses(CallError, "not loaded"):
        generate(driver)
    pool = driver.pools["actor"]
    driver.runtime.open_pool(pool)
    driver.runtime.load(driver.roles["actor"], pool)
    again = generate(driver)
    assert start_s(again.spans[0]) == pytest.approx(end)
    assert "reshard" in {s.name for s in again.spans}


def test_devices_report_predicted_memory():
    driver = split()
    status = driver.runtime.devices(driver.pools["actor"])
    assert [s.device for s in status] == [0, 1, 2, 3]
    assert set(status[0].roles) == {"actor", "reference"}
    assert status[0].used_bytes == sum(status[0].roles.values()) > 10**9
    assert status[0].pid is None


def test_on_gpus_the_rollout_sleeps_while_others_work():
    """As ``hfsdk.engine.generation.vllm_sleep`` has it: there once it generates, gone in any trainer's call on its devices."""
    driver = colocated()
    driver.put(prompts())
    estimate = role_bytes(driver.roles["actor"], 8)
    both = ("prompt", "response")

    def after(outcome):
        (attrs, *_) = [s.attrs for s in outcome.spans if s.device == 0 and not s.parent]
        status = driver.runtime.devices(driver.pools["actor"])[0]
        assert status.asleep == {"actor": attrs["asleep_bytes"]}
        there = attrs["rollout_bytes"] + attrs["kv_cache_bytes"]
        assert status.roles["actor"] == estimate.resident + there
        return attrs["asleep_bytes"], there

    asleep, awake = (estimate.asleep, 0), (0, estimate.asleep)
    assert after(generate(driver)) == after(generate(driver)) == awake
    assert after(driver.run("reference", "compute_log_probs", both, ("r",), **{"column": "r"})) == asleep
    assert after(generate(driver)) == awake
    assert after(driver.run("actor", "num_updates")) == awake
    assert after(driver.run("critic", "compute_values", both, ("values",))) == asleep
    shadow = split()
    shadow.put(prompts())
    generate(shadow)
    shadow.run("critic", "compute_values", both, ("values",))
    assert shadow.runtime.devices(shadow.pools["actor"])[0].asleep == {"actor": 0}, "on other devices"
