"""Every public call in a simulated session works, or says clearly why it cannot."""

import subprocess
import sys
import textwrap
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.errors import ModelNotFoundError, OptionError, SimulatedValueError
from hfsdk.core.spec import PRESETS, ModelSpec
from hfsdk.planner.perf.perf_model import PerfModel
from hfsdk.session.parts import parts_of

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = "2x8 A100-80GB"
BIG = {"train": "tp8", "dtype": "bf16", "recompute": "full"}


def score(completions, **columns):
    return [0.0] * len(completions)


def declared(session, *, cost=False):
    optimizer = hf.AdamW(distributed=True)
    actor = session.actor("llama-7b", rollout="tp2", optimizer=optimizer, **BIG)
    session.critic("llama-7b", optimizer=optimizer, **BIG)
    session.reference(actor)
    session.reward("llama-7b", layout="tp8", dtype="bf16")
    if cost:
        session.cost("llama-7b", layout="tp8", dtype="bf16")
        session.critic("llama-7b", optimizer=optimizer, name="cost_critic", **BIG)
    return actor


def prompts_of(session, count=32, tokens=64, batch_size=16):
    return session.prompts([[1 + (i + k) % 100 for k in range(tokens)] for i in range(count)], batch_size=batch_size)


@pytest.fixture
def session():
    with hf.Session.simulated(CLUSTER, price_per_device_hour=2.0) as made:
        yield made


def finished(session):
    parts_of(session).client.wait(parts_of(session).client.open_calls(), None)


# -- handles


def test_every_method_of_the_handles(session, tmp_path):
    actor = declared(session)
    models = session.models
    session.place("colocate")
    batch = actor.generate(prompts_of(session)[0], max_new_tokens=32, n=2)
    assert len(batch) == 32
    batch.wait()
    assert set(batch.known_lengths("response")) == {32}
    batch = actor.compute_log_probs(batch, entropy=True)
    batch = models.reference.compute_log_probs(batch)
    batch = models.critic.compute_values(batch)
    batch = models.reward.compute_scores(batch)
    rows = actor.update(batch, lambda out, b: out.log_probs).rows
    assert rows[0]["num_samples"] == 32
    with refuses(SimulatedValueError, "loss"):
        rows[0]["loss"]
    assert actor.version == 1
    actor.forward_backward(batch, lambda out, b: out.log_probs).wait()
    with pytest.raises(SimulatedValueError):
        _ = actor.grad_norm
    assert actor.step().rows
    assert actor.version == 2
    with pytest.raises(SimulatedValueError):
        float(actor.compute_loss(batch, lambda out, b: out.log_probs).value)
    values = actor.run(lambda rank: rank.rank)
    assert len(values) == 16
    with refuses(SimulatedValueError, "actor.run"):
        int(values[0])
    with pytest.raises(SimulatedValueError):
        actor.census()
    with refuses(SimulatedValueError, "actor.explain_gap"):
        actor.explain_gap(batch)
    assert actor.memory[0] > 10**9
    assert "simulated" in actor.logs(3)
    assert actor.save_pretrained(tmp_path / "model").is_dir()
    with refuses(SimulatedValueError, "real session"):
        actor.chat("hello", max_new_tokens=8)
    models.reward.release()
    with pytest.raises(hf.HfsdkError):
        models.reward.compute_scores(batch)


def test_an_own_primitive_takes_its_place(session):
    @hf.primitive(reads=["prompt", "response"], writes=["margins"], protocol=hf.protocols.THREE_D)
    def margins(model, rows):
        raise AssertionError("never called")

    actor = declared(session)
    batch = actor.call(margins, actor.generate(prompts_of(session)[0], max_new_tokens=8))
    batch.wait()
    with refuses(SimulatedValueError, "margins"):
        np.asarray(batch["margins"])


def test_the_report_of_a_reshard_is_predicted(session):
    actor = declared(session)
    session.place("colocate")
    with refuses(OptionError, "not moved yet"):
        _ = actor.last_reshard
    actor.generate(prompts_of(session)[0], max_new_tokens=8).wait()
    report = actor.last_reshard
    assert report.predicted
    assert "predicted" in repr(report)
    assert report.measured_bytes == actor.reshard_plan.bytes_moved > 0
    span = next(s for s in session.trace if s.name == "reshard")
    assert report.seconds == pytest.approx(span.duration_s)


def test_the_report_of_a_rollout_apart(session):
    actor = declared(session)
    session.place({"actor critic reference reward": 8, "actor.rollout": 8})
    actor.generate(prompts_of(session)[0], max_new_tokens=8).wait()
    report = actor.last_reshard
    assert len(report.ranks) == 16
    assert sum(r.bytes_received for r in report.ranks[:8]) == 0
    assert report.measured_bytes == report.planned_bytes > 0


# -- algorithms


def algorithms():
    return {
        "ppo": hf.PPO(max_new_tokens=16, mini_batches=2), "grpo": hf.GRPO(max_new_tokens=16), "remax": hf.ReMax(max_new_tokens=16),
        "rloo": hf.RLOO(max_new_tokens=16), "reinforce++": hf.ReinforcePlusPlus(max_new_tokens=16),
    }  # fmt: skip


@each("name, placement", product(algorithms(), ["colocate", "split", "standalone", "interleaving", "separation"]))
def test_every_algorithm_under_every_placement(name, placement):
    with hf.Session.simulated(CLUSTER) as session:
        optimizer = hf.AdamW(distributed=True)
        actor = session.actor("qwen2.5-0.5b", train="tp1", rollout="tp1", dtype="bf16", optimizer=optimizer)
        if name == "ppo":
            session.critic("qwen2.5-0.5b", train="tp1", dtype="bf16", optimizer=optimizer)
        session.reference(actor)
        session.reward("qwen2.5-0.5b", layout="tp1", dtype="bf16")
        session.place(placement)
        run = session.train(algorithms()[name], prompts_of(session), steps=2, progress=False)
        assert run.state == "finished"
        assert actor.version >= 2
        trace = session.trace[1].snapshot()
        assert trace.source == "predicted"
        for device in range(16):
            mine = sorted((s for s in session.trace[:] if s.device == device and not s.parent), key=lambda s: s.start_ns)
            assert all(before.end_ns <= after.start_ns + 2 for before, after in pairwise(mine)), f"device {device} does two at once"
        assert session.predict().duration_s == pytest.approx(trace.duration_s, rel=0.2)


def test_safe_rlhf_and_dpo():
    with hf.Session.simulated(CLUSTER) as session:
        actor = declared(session, cost=True)
        hf.SafeRLHF(max_new_tokens=8, mini_batches=1).step(session.models, prompts_of(session)[0])
        finished(session)
        names = {f"{s.role}.{s.method}" for s in session.trace.calls}
        assert {"cost.compute_costs", "cost_critic.compute_values", "cost_critic.update", "critic.update", "actor.update"} <= names
        pairs = session.pairs([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 16, batch_size=16)
        step = hf.DPO().step(session.models, next(pairs))
        finished(session)
        assert step.batch is not None
        actor.update(next(session.demonstrations(["text"] * 16, batch_size=16)), hf.CrossEntropy()).wait()
        assert actor.version >= 2


# -- the session


STEP = ("seconds", "tokens_per_s", "busy_share", "memory_bytes", "cost")
"""Numbers of a simulated step."""


def test_save_load_rewind_and_fork_lead_to_the_same_step(session, tmp_path):
    actor = declared(session)
    prompts, algorithm = prompts_of(session), hf.PPO(max_new_tokens=8, mini_batches=2)

    def next_step():
        assert actor.version == 2
        assert prompts.position == 1
        (row,) = session.train(algorithm, prompts, steps=1, progress=False).rows
        assert actor.version == 4
        return [row["step"], *(pytest.approx(row[name], rel=1e-6) for name in STEP)]

    session.train(algorithm, prompts, steps=1, progress=False)
    session.save(tmp_path / "saved")
    before = session.snapshot("before")
    first = next_step()
    session.rewind(before)
    assert next_step() == first
    session.load(tmp_path / "saved")
    assert next_step() == first
    assert session.fork(before, "other") == "other"
    assert next_step() == first
    forked = session.history.branches[-1]
    assert (forked.name, forked.parent, forked.snapshot) == ("other", session.history.branches[0].name, "before")
    taken = [(row["branch"], row["step"]) for row in session.history]
    assert taken[-1] == ("other", 1)
    assert taken.count(("other", 1)) == 1, "the fork's own step, and none of the branch it left"
    with pytest.raises(SimulatedValueError):
        session.evaluate(prompts, num_prompts=16, max_new_tokens=8)


def test_compare_predicts_what_each_algorithm_would_take_from_here(session):
    actor = declared(session)
    prompts = prompts_of(session)
    algorithms = {"PPO": hf.PPO(max_new_tokens=8), "ReMax": hf.ReMax(max_new_tokens=8)}
    session.train(algorithms["PPO"], prompts, steps=1, progress=False)
    here = session.snapshot("here")
    experiment = session.compare([*algorithms.values()], prompts, steps=2, seeds=[0, 1], progress=False)
    assert (actor.version, prompts.position) == (2, 1), "the session is where it was"
    runs = {(row["algorithm"], row["seed"]): [] for row in experiment.rows}
    for row in experiment.rows:
        runs[row["algorithm"], row["seed"]].append(row)
    assert [*runs] == [("PPO", 0), ("PPO", 1), ("ReMax", 0), ("ReMax", 1)]
    for (name, _), rows in runs.items():
        session.rewind(here)
        alone = session.train(algorithms[name], prompts, steps=2, progress=False).rows
        for row, other in zip(rows, alone, strict=True):
            assert [row[key] for key in STEP] == [pytest.approx(other[key], rel=1e-6) for key in STEP]
        responses = {"PPO": 1, "ReMax": 2}[name]  # ReMax's greedy one is generated too
        assert [row["tokens"] for row in rows] == [16 * (64 + 8) * responses] * 2


class ReadsNothing(hf.GRPO):
    """Its metrics wait for no call."""

    def metrics(self, step):
        return {"nothing": 0.0}


def test_a_step_whose_metrics_read_nothing_takes_its_seconds():
    rows = []
    for algorithm in (hf.GRPO(max_new_tokens=8, n=2), ReadsNothing(max_new_tokens=8, n=2)):
        with hf.Session.simulated(CLUSTER) as made:
            declared(made)
            rows += made.train(algorithm, prompts_of(made), steps=1, progress=False).rows
    assert rows[1]["seconds"] == rows[0]["seconds"] > 0
    assert rows[1]["tokens_per_s"] == rows[0]["tokens_per_s"]


def test_calls_by_hand_before_the_first_step_are_not_of_it(session):
    declared(session)
    session.models.critic.compute_values(session.models.actor.generate(next(prompts_of(session)), max_new_tokens=8)).wait()
    run = session.train(hf.GRPO(max_new_tokens=8, n=2), prompts_of(session), steps=2, progress=False)
    first, second = run.rows
    calls = [[name for name, *_ in run.view()["calls"][step]] for step in (0, 1)]
    assert calls[0] == calls[1]
    assert "critic.compute_values" not in calls[0]
    assert first["seconds"] == pytest.approx(second["seconds"], rel=0.05)
    assert "critic.compute_values" in {f"{s.role}.{s.method}" for s in session.trace[0].calls}, "session.trace has them"


def test_a_run_says_what_it_costs(session):
    declared(session)
    run = session.train(hf.PPO(max_new_tokens=16, mini_batches=2), prompts_of(session), steps=2, progress=False)
    hours = 16 * sum(row["seconds"] for row in run.rows) / 3600
    assert run.device_hours == pytest.approx(hours)
    assert run.cost == pytest.approx(2.0 * hours)
    assert run.cost == pytest.approx(sum(row["cost"] for row in run.rows))
    assert "predicted device-hours" in repr(run)
    assert run.view()["device_hours"] == run.device_hours
    with hf.Session.simulated(CLUSTER) as free:
        declared(free)
        assert free.train(hf.PPO(max_new_tokens=8), prompts_of(free), steps=1, progress=False).cost is None


def test_memory_over_virtual_time(session):
    actor = declared(session)
    session.place("colocate")
    batch = actor.generate(prompts_of(session)[0], max_new_tokens=8)
    actor.update(batch, lambda out, b: out.log_probs).wait()
    frame = session.memory.to_pandas()
    mine = frame[frame.device == 5]
    assert list(mine.call) == ["actor.generate", "actor.update"]
    first, last = mine.optimizer_bytes
    assert 0 < first < last  # masters, then the moments as well
    planned = next(d for d in session.memory.view()["devices"] if d["device"] == 5)
    peak = max(s[2] for s in planned["samples"])
    assert max(mine.allocated_bytes) <= peak <= planned["planned"]["asked"]
    assert "predicted" in hf.viz.picture(session.memory).to_text()


def test_offload_is_laid_down(session):
    actor = session.actor("llama-7b", rollout="tp2", optimizer=hf.AdamW(distributed=True, offload=True), **BIG)
    reference = session.reference(actor, offload=True)
    batch = reference.compute_log_probs(actor.generate(prompts_of(session)[0], max_new_tokens=8))
    actor.update(batch, lambda out, b: out.log_probs).wait()
    names = {m: [s.name for s in session.trace if s.device == 0 and s.parent == m] for m in ("compute_log_probs", "update")}
    assert names["compute_log_probs"] == ["onload", "forward", "agree", "offload"]
    assert names["update"] == ["forward", "backward", "agree", "onload", "optimizer", "offload"]


@pytest.mark.parametrize("device", ["cpu", "A100-80GB"])
def test_shared_weights_move_again_after_a_pass(device):
    """On a GPU the engines never share: the option says nothing there (``hfsdk.engine.generation.rollout.Rollout.in_place``)."""
    with hf.Session.simulated(f"1x2 {device}") as session:
        found = {}
        for mode in ("packed", "shared"):
            actor = session.actor("smollm2-135m", rollout="tp1", cpu_weights=mode, name="actor")
            batch = actor.generate(prompts_of(session)[0], max_new_tokens=4)
            batch = actor.compute_log_probs(batch)
            actor.generate(batch, max_new_tokens=4).wait()
            finished(session)
            found[mode] = [s.method for s in session.trace if s.name == "reshard" and s.device == 0]
            actor.release()
        assert found["packed"][-1:] == ["generate"]
        if device == "cpu":
            assert found["shared"][-3:] == ["generate", "compute_log_probs", "generate"]
        else:
            assert set(found["shared"]) == {"generate"}


def test_queueing_is_told(session):
    declared(session)
    session.place("colocate")
    models = session.models
    batch = models.actor.generate(prompts_of(session)[0], max_new_tokens=32)
    models.reference.compute_log_probs(batch)
    models.critic.compute_values(batch).wait()
    calls = {(s.role, s.method): s for s in session.trace.calls}
    first, second = calls["reference", "compute_log_probs"], calls["critic", "compute_values"]
    assert "queued_s" not in first.attrs
    assert second.attrs["queued_s"] == pytest.approx(first.duration_s)


# -- clusters and models


@pytest.mark.filterwarnings("ignore:pool 'all' has 4 H100 and 4 A100-80GB")
def test_mixed_clusters_are_as_slow_as_their_slowest_device():
    seconds = {}
    for cluster in ("1x8 A100-80GB", "1x8 H100", "1x4 H100 + 1x4 A100-80GB"):
        with hf.Session.simulated(cluster) as session:
            actor = session.actor("llama-7b", train="tp4", rollout="tp4", dtype="bf16", optimizer=hf.AdamW(distributed=True))
            actor.update(actor.generate(prompts_of(session)[0], max_new_tokens=64), lambda out, b: out.log_probs).wait()
            seconds[cluster] = session.trace.duration_s
    slow, fast, mixed = seconds.values()
    assert fast < slow <= mixed


def test_unknown_names_say_the_nearest(session):
    with refuses(OptionError, "'A100'", "did you mean 'A100-80GB"):
        hf.Session.simulated("16x8 A100")
    with refuses(ModelNotFoundError, "'lama-70b'", "did you mean 'llama-70b'"):
        session.actor("lama-70b")
    with refuses(ModelNotFoundError, "'gpt-5'", "hf.ModelSpec"):
        ModelSpec.preset("gpt-5")


def test_a_model_may_be_its_numbers(session):
    numbers = ModelSpec(
        name="own", num_layers=4, hidden_size=512, mlp_hidden_size=2048, num_heads=8, num_kv_heads=8, head_dim=64, vocab_size=1000,
        max_positions=4096,
    )  # fmt: skip
    assert session.actor(numbers).spec == numbers


PUBLISHED = {
    "llama-7b": 6.74, "llama-13b": 13.02, "llama-33b": 32.5, "llama-34b": 33.7, "llama-65b": 65.2, "llama-70b": 68.98,
    "llama3-1b": 1.24,
    "llama3-3b": 3.21, "llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 405.9, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.8, "qwen2.5-32b": 32.8, "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8, "smollm2-135m": 0.1345,
    "smollm2-360m": 0.362, "smollm2-1.7b": 1.71, "mixtral-8x7b": 46.7, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1,
    "deepseek-v3": 671.0,
}  # fmt: skip
"""Billions of parameters as the models' cards give them."""


def test_every_preset_has_the_published_size():
    assert set(PUBLISHED) == set(PRESETS)
    for name, billions in PUBLISHED.items():
        assert PRESETS[name].num_parameters() / 1e9 == pytest.approx(billions, rel=0.005), name
        assert PRESETS[name].num_heads % PRESETS[name].num_kv_heads == 0


# -- workers that share cores


def cpu_step(devices, cores, placement="colocate"):
    cluster = ClusterSpec.parse(f"1x{devices} cpu").with_cores(cores).with_memory(32 * 10**9)
    with hf.Session.simulated(cluster, perf=PerfModel(dispatch_s=0.0)) as session:
        actor = session.actor("smollm2-135m", rollout="tp1")
        session.critic("smollm2-135m")
        session.place(placement)
        batch = session.batch(prompt=[[1] * 60] * 16, response=[[2] * 60] * 16)
        actor.update(batch, lambda out, b: out.log_probs)
        session.models.critic.update(batch, lambda out, b: out.values)
        finished(session)
        calls = {s.role: s for s in session.trace.calls}
        return session.trace.duration_s, calls


def test_two_workers_a_core_take_twice_as_long():
    own, shared = cpu_step(4, 4)[0], cpu_step(4, 2)[0]
    assert shared == pytest.approx(2 * own, rel=1e-6)


def test_overlapping_pools_share_cores_evenly():
    alone, _ = cpu_step(4, 4, {"actor": 2, "critic": 2})
    shared, calls = cpu_step(4, 2, {"actor": 2, "critic": 2})
    assert alone < shared <= 2 * alone * (1 + 1e-9)
    actor, critic = calls["actor"], calls["critic"]
    first, last = sorted([actor.duration_s, critic.duration_s])
    # until the shorter is through both run at half speed, then the other has the cores to itself
    _, own = cpu_step(4, 4, {"actor": 2, "critic": 2})
    short, long = sorted([own["actor"].duration_s, own["critic"].duration_s])
    assert first == pytest.approx(2 * short, rel=1e-3)
    assert last == pytest.approx(short + long, rel=1e-3)


def test_sharing_does_not_depend_on_when_somebody_looks():
    def run(look):
        with hf.Session.simulated(ClusterSpec.parse("1x4 cpu").with_cores(2)) as session:
            actor = session.actor("smollm2-135m", rollout="tp1")
            session.critic("smollm2-135m")
            session.reference(actor)
            session.reward(score)
            session.place({"actor reference": 2, "critic": 2})
            prompts = prompts_of(session, batch_size=8)
            for k in range(2):
                hf.PPO(max_new_tokens=8, mini_batches=2).step(session.models, prompts[k])
                if look:
                    _ = session.trace.duration_s
            finished(session)
            return [(s.role, s.name, s.start_ns, s.duration_s) for s in session.trace[:]]

    assert run(look=False) == run(look=True) == run(look=True)


# -- the base install


def test_a_step_on_128_devices_with_nothing_but_numpy(tmp_path):
    code = textwrap.dedent("""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"torch", "ray", "megatron", "vllm", "transformers", "scipy", "psutil"}:
                    raise ModuleNotFoundError(f"blocked: {name}", name=name)

        sys.meta_path.insert(0, Blocked())
        import hfsdk as hf

        session = hf.Session.simulated("16x8 A100-80GB", price_per_device_hour=2.0)
        more = dict(train="tp8 pp4 dp4", dtype="bf16", recompute="full", optimizer=hf.AdamW(distributed=True))
        actor = session.actor("llama-70b", rollout="tp8 dp16", **more)
        session.critic("llama-70b", **more)
        session.reference(actor)
        session.reward("llama-70b", layout="tp8 pp4 dp4", dtype="bf16")
        prompts = session.prompts([[1] * 128] * 64, batch_size=64)
        run = session.train(hf.PPO(max_new_tokens=128, mini_batches=2), prompts, steps=1, progress=False)
        nouns = (session.trace.snapshot(), session.placement, session.dataflow.snapshot(), session.memory, run, actor.reshard_plan)
        print(*nouns, actor.last_reshard)
        for noun in nouns:
            assert len(hf.viz.picture(noun).to_svg()) > 500, noun
        session.report(sys.argv[1])
        print(session.trace.compare(session.predict()))
        session.close()
        print("done")
    """)
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "report.html")], capture_output=True, text=True, cwd=ROOT,
        check=False, env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)}, timeout=300,
    )  # fmt: skip
    assert found.stdout.endswith("done\n"), found.stderr[-3000:]
    assert (tmp_path / "report.html").stat().st_size > 10_000
