"""Failures are not lost: who hears of them, how often, and what they say. And the user's functions on their way."""

import importlib
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from system_helpers import call_id, check_works, lengths_reward, long_generation, pids

import hfsdk as hf
from hfsdk.engine.calls import queries as q
from hfsdk.session.session_parts import parts_of


def broken_loss(out, b):
    raise RuntimeError("broken on purpose")


def small(live, rows=4):
    return live.actor.generate(live.prompts[0][:rows], max_new_tokens=4)


def settle(live):
    parts_of(live.session).client.settle(parts_of(live.session).client.open_calls())


# ---- who hears


def test_failure_nobody_looks_at_is_raised_at_the_next_call_once(live):
    batch = small(live)
    live.actor.update(batch, broken_loss)
    settle(live)
    live.critic.compute_values(batch).wait()  # another role has nothing to do with it
    with pytest.raises(hf.CallError, match="broken on purpose") as caught:
        live.actor.compute_log_probs(batch)
    assert (caught.value.role, caught.value.method) == ("actor", "update")
    assert "test_system_failures.py" in caught.value.line
    live.actor.compute_log_probs(batch).wait()


def test_failure_that_was_seen_is_not_raised_again(live):
    batch = small(live)
    metrics = live.actor.update(batch, broken_loss)
    for _ in range(2):  # every look says it
        with pytest.raises(hf.CallError, match="broken on purpose"):
            metrics.wait()
    assert metrics.state == "failed"
    live.actor.compute_log_probs(batch).wait()


@pytest.mark.filterwarnings("ignore:reward goes on with")
def test_dependents_fail_with_the_cause(live):
    def bad(completions):
        raise ValueError("no score today")

    live.session.reward(bad)
    batch = small(live)
    scored = live.reward.compute_scores(batch)
    doubled = scored.map(lambda t: {"twice": t["scores"] * 2}, ["scores"], ["twice"])
    trained = live.actor.update(doubled, lambda out, b: -out.log_probs * b.expand("twice"))
    with pytest.raises(hf.DependencyError, match="no score today") as caught:
        trained.wait()
    assert caught.value.role == "actor"
    cause = caught.value
    while cause.__cause__ is not None:
        cause = cause.__cause__
    assert isinstance(cause, hf.RewardFunctionError)
    with pytest.raises(hf.RewardFunctionError, match="no score today"):
        live.session.train(hf.PPO(max_new_tokens=4), live.prompts, steps=1, progress=False)
    live.session.reward(lengths_reward)
    live.actor.update(live.reward.compute_scores(batch), lambda out, b: -out.log_probs).wait()
    check_works(live)


def test_timeout_leaves_the_call_running(live):
    batch = long_generation(live)
    with pytest.raises(TimeoutError, match=r"actor.generate not done after 0.05 s; still running"):
        batch.wait(timeout=0.05)
    assert batch.state in ("pending", "running")
    assert set(batch.wait()["response"].lengths) == {450}


def test_events_tell_every_call_from_start_to_end(live):
    events = []
    stop = live.session.subscribe(events.append)
    batch = small(live).wait()
    failed = live.actor.update(batch, broken_loss)
    with pytest.raises(hf.CallError):
        failed.wait()
    stop()
    mine = [(e["type"], e["call"]) for e in events if e["type"] != "call_progress"]
    assert mine == [
        ("call_started", "actor.generate"), ("call_done", "actor.generate"),
        ("call_started", "actor.update"), ("call_failed", "actor.update"),
    ]  # fmt: skip
    assert "broken on purpose" in next(e["error"] for e in events if e["type"] == "call_failed")


def test_listener_that_raises_does_not_stop_the_work(live, capfd):
    heard = []

    def broken(event):
        heard.append(event["type"])
        raise ValueError("cannot draw")

    stop = parts_of(live.session).client._controller.subscribe(broken)
    assert len(small(live)["response"]) == 4
    stop()
    assert heard == ["call_started"], "it is left out from then on"
    assert "cannot draw" in capfd.readouterr().err
    check_works(live)


def test_calls_from_several_threads(live):
    found, threads = {}, []

    def work(k):
        found[k] = live.actor.generate(live.prompts[k], max_new_tokens=4)["response"]

    for k in range(4):
        threads.append(threading.Thread(target=work, args=(k,)))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    for k in range(4):
        assert found[k] == live.actor.generate(live.prompts[k], max_new_tokens=4)["response"]


def test_awaiting(live):
    import asyncio

    async def both():
        one, two = live.actor.generate(live.prompts[0], max_new_tokens=3), live.critic.compute_values(small(live))
        return await asyncio.gather(one._poll(), two._poll())

    batches = asyncio.run(both())
    assert [b.state for b in batches] == ["done", "done"]


def test_columns_nobody_refers_to_are_freed(live):
    batch = small(live).wait()
    first = call_id(batch)
    again = live.actor.generate(live.prompts[0], max_new_tokens=3)  # dropped while it runs
    second = call_id(again)
    del again
    del batch
    settle(live)
    parts_of(live.session).client.send(q.RunningCalls())
    stored = [parts_of(live.session).client.send(q.StoredOf(call)) for call in (first, second)]
    assert stored == [None, None]


def test_inputs_live_until_the_call_has_read_them(live):
    batch = small(live)
    metrics = live.actor.update(batch.map(lambda t: {"one": np.ones(4)}, ["response"], ["one"]), lambda out, b: -out.log_probs)
    del batch
    assert metrics.rows[0]["num_samples"] == 4


# ---- functions over columns


def test_dataset_columns_reach_the_reward_function(live):
    data = [{"text": f"a film {i}", "label": i, "names": [f"n{i}", "x"], "title": f"film {i}"} for i in range(6)]
    prompts = live.session.prompts(data, batch_size=6, seed=3)
    seen = {}

    def by_label(prompts, completions, label, names, title, **others):
        assert all(p.strip() == f"a film {i}" for p, i in zip(prompts, label, strict=True))
        assert title == [f"film {i}" for i in label]
        assert [n[0] for n in names] == [f"n{i}" for i in label]
        assert "advantages" not in others
        return [float(i) for i in label]

    reward = live.session.reward(by_label, name="labels")
    batch = live.actor.generate(prompts[0], max_new_tokens=3, n=2)
    scores = reward.compute_scores(batch)["scores"]
    assert list(scores) == [float(i) for i in batch["label"]]
    assert sorted(scores) == sorted([*range(6), *range(6)])
    assert seen == {}
    reward.release()


@pytest.mark.filterwarnings("ignore:reward goes on with")
def test_new_version_of_a_reward_function(live):
    batch = small(live)
    reward = live.session.reward(lambda completions: [1.0 for _ in completions])
    assert set(reward.compute_scores(batch)["scores"]) == {1.0}
    assert live.session.reward(lambda completions: [2.0 for _ in completions]) is reward
    assert set(reward.compute_scores(batch)["scores"]) == {2.0}
    calls = [c for c in parts_of(live.session).client.send(q.CallsOf()) if str(c) == "reward.compute_scores"][-2:]
    assert len({c.function for c in calls}) == 2
    live.session.reward(lengths_reward)


@pytest.mark.parametrize("kind", ["map", "reduce"])
def test_errors_of_own_functions_show_the_line(live, kind):
    batch = small(live)

    def picky(table):
        lengths = table["response"].lengths
        raise ValueError(f"no good: {len(lengths)}")

    with pytest.raises(hf.CallError, match=r"picky raised ValueError\('no good: 4'\)[\s\S]*raise ValueError\(f\"no good"):
        (batch.map(picky, ["response"], ["x"]) if kind == "map" else batch.reduce(picky, ["response"])).wait()


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"y": [1, 2, 3, 4]}, r"exactly the columns \['x'\]; it returned \['y'\]"),
        ({"x": [1, 2]}, "returned 2 entries for column 'x'; the batch has 4 samples"),
        ([1, 2, 3, 4], "it returned list"),
    ],
)
def test_map_that_returns_other_columns(live, returned, words):
    with pytest.raises(hf.CallError, match=words):
        small(live).map(lambda table: returned, ["response"], ["x"]).wait()


@pytest.mark.parametrize("helper", [False, True])
def test_functions_of_own_modules_travel_by_value(live, tmp_path, monkeypatch, helper):
    """The workers cannot import the module, nor the one it imports."""
    (tmp_path / "own_helpers.py").write_text("SCALE = 3.0\ndef scaled(x):\n    return SCALE * x\n")
    (tmp_path / f"own_rewards_{helper}.py").write_text(
        ("from own_helpers import scaled\n" if helper else "def scaled(x):\n    return 3.0 * x\n")
        + "def plain(completions):\n    return [scaled(1.0) for _ in completions]\n"
        "class Reward:\n    def __init__(self, k):\n        self.k = k\n"
        "    def __call__(self, completions):\n        return [scaled(self.k) for _ in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = importlib.import_module(f"own_rewards_{helper}")
    batch = small(live)
    for function, wanted in ((own.plain, 3.0), (own.Reward(2.0), 6.0)):
        reward = live.session.reward(function, name="own")
        scores = reward.compute_scores(batch)
        reward.release()
        assert set(scores["scores"]) == {wanted}


# ---- primitives and functions on ranks


@pytest.mark.parametrize("name", ["THREE_D", "DP", "MICRO_DP", "ONE_TO_ALL", "PP_ONLY", "ALL_TO_ALL"])
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("rows", [1, 7])
def test_gather_of_scatter_is_the_batch(live, name, role, rows):
    """Rows of uneven lengths, more and fewer than ranks, over dp2 (actor) and tp2 (critic)."""
    rng = np.random.default_rng(rows)
    prompts = [rng.integers(0, 300, rng.integers(1, 60)).tolist() for _ in range(rows)]
    batch = live.session.batch(prompt=prompts, number=np.arange(rows), word=[f"w{i}" for i in range(rows)])

    @hf.primitive(reads=["prompt", "number", "word"], writes=["p", "n", "w"], protocol=getattr(hf.protocols, name))
    def echo(model, rows):
        assert list(rows["number"]) == rows.row_ids.tolist()
        return {"p": rows["prompt"], "n": rows["number"], "w": rows["word"]}

    back = getattr(live, role).call(echo, batch)
    assert back["p"] == batch["prompt"]
    assert list(back["n"]) == list(range(rows))
    assert back["w"] == [f"w{i}" for i in range(rows)]


def test_run_with_collectives(live):
    def add_ranks(rank, extra):
        import torch
        import torch.distributed as dist

        mine = torch.tensor([float(rank.rank + 1)])
        dist.all_reduce(mine, group=rank.groups.world)
        return rank.rank, rank.device, str(rank.layout), float(mine) + extra

    assert live.actor.run(add_ranks, 10) == [(0, 0, "tp1 pp1 dp2", 13.0), (1, 1, "tp1 pp1 dp2", 13.0)]
    assert [r[2] for r in live.critic.run(add_ranks, 0)] == ["tp2 pp1 dp1"] * 2


def test_primitive_with_a_forward_pass(live):
    batch = small(live)

    @hf.primitive(reads=["prompt", "response"], writes=["mine"])
    def mine(model, rows):
        return {"mine": model.log_probs(rows)}

    batch = live.actor.compute_log_probs(live.actor.call(mine, batch))
    assert np.allclose(batch["mine"].flat, batch["old_log_probs"].flat, atol=1e-6)


def test_primitive_that_fails_on_one_rank(live):
    @hf.primitive(reads=["prompt"], writes=["x"])
    def half(model, rows):
        if model.rank == 1:
            raise KeyError("rank one only")
        return {"x": [0.0] * rows.num_rows}

    with pytest.raises(hf.CallError, match=r"half raised KeyError\('rank one only'\)") as caught:
        live.actor.call(half, live.session.batch(prompt=[[1], [2], [3]])).wait()
    assert caught.value.rank == 1
    spans = [s for s in live.session.trace.spans if s.method == "call" and s.name == "fetch"]
    assert {s.rank for s in spans} == {0, 1}, "how far the ranks of a failed call came is in the trace"
    check_works(live)


def test_primitive_that_writes_lists_where_a_rank_has_no_rows(live):
    @hf.primitive(reads=["response"], writes=["twice", "word"])
    def twice(model, rows):
        return {"twice": [[2 * int(t) for t in row] for row in rows["response"]], "word": ["x"] * rows.num_rows}

    batch = live.actor.call(twice, live.session.batch(prompt=[[1, 2]], response=[[3, 4]]))
    assert batch["twice"] == hf.Ragged.of([[6, 8]])
    assert batch["word"] == ["x"]
    assert live.actor.compute_log_probs(batch.alias("response", "twice"))["old_log_probs"].lengths.tolist() == [2]


def test_exit_and_interrupt_in_own_functions_fail_the_call_only(live):
    before = pids(live.session)
    batch = live.session.batch(prompt=[[1, 2], [3]], response=[[3, 4], [4]])

    def leave(*_):
        raise SystemExit(1)

    def stop(*_):
        raise KeyboardInterrupt

    for use in (
        lambda: live.actor.run(leave), lambda: live.actor.run(stop), lambda: live.actor.update(batch, leave).wait(),
        lambda: live.actor.update(batch, stop).wait(), lambda: batch.reduce(leave, ["prompt"]).wait(),
    ):  # fmt: skip
        with pytest.raises(hf.CallError, match=r"raised (SystemExit\(1\)|KeyboardInterrupt)"):
            use()
    assert pids(live.session) == before
    check_works(live)


def test_scripts_without_main_guard():
    """A plain script, as in the README, imports and simulates without starting anything."""
    script = "import hfsdk as hf; print(hf.Session.simulated('1x2 A100-80GB'))"
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=120)
    assert "simulated" in found.stdout
