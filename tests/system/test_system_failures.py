"""Failures are not lost: who hears of them, how often, and what they say. And the user's functions on their way to the workers."""

import asyncio
import importlib
import threading

import numpy as np
import pytest
from expect import refuses, until
from system_helpers import call_id, check_works, likelihood, pids, stored_of

import hfsdk as hf


def broken_loss(out, b):
    raise RuntimeError("broken on purpose")


def small(live, rows=4):
    return live.actor.generate(live.prompts[0][:rows], max_new_tokens=4)


def idle(live):
    until("an idle session", lambda: live.session.status == "idle", live.session)


# ---- who hears


def test_a_failure_is_raised_by_every_look_or_once_at_the_next_call_of_its_role(live):
    batch = small(live)
    live.actor.update(batch, broken_loss)
    idle(live)
    live.critic.compute_values(batch).wait()  # another role has nothing to do with it
    with refuses(hf.CallError, "broken on purpose") as caught:
        live.actor.compute_log_probs(batch)
    assert (caught.value.role, caught.value.method) == ("actor", "update")
    assert "test_system_failures.py" in caught.value.line
    live.actor.compute_log_probs(batch).wait()
    metrics = live.actor.update(batch, broken_loss)
    for _ in range(2):
        with refuses(hf.CallError, "broken on purpose"):
            metrics.wait()
    assert metrics.state == "failed"
    live.actor.compute_log_probs(batch).wait()


@pytest.mark.filterwarnings("ignore:reward goes on with")
def test_dependents_fail_with_the_cause(live, give_reward):
    def bad(completions):
        raise ValueError("no score today")

    give_reward(bad)
    batch = small(live)
    scored = live.reward.compute_scores(batch)
    doubled = scored.map(lambda t: {"twice": t["scores"] * 2}, ["scores"], ["twice"])
    trained = live.actor.update(doubled, lambda out, b: -out.log_probs * b.expand("twice"))
    with refuses(hf.DependencyError, "no score today") as caught:
        trained.wait()
    assert caught.value.role == "actor"
    cause = caught.value
    while cause.__cause__ is not None:
        cause = cause.__cause__
    assert isinstance(cause, hf.RewardFunctionError)
    with refuses(hf.RewardFunctionError, "no score today"):
        live.session.train(hf.PPO(max_new_tokens=4), live.prompts, steps=1, progress=False)
    check_works_again(live, batch, give_reward)


def check_works_again(live, batch, give_reward):
    """With a function that scores, the same batch is trained on."""
    give_reward(lambda completions: [1.0] * len(completions))
    live.actor.update(live.reward.compute_scores(batch), likelihood).wait()
    check_works(live)


def test_events_tell_every_call_from_start_to_end(live):
    events = []
    stop = live.session.subscribe(events.append)
    batch = small(live).wait()
    failed = live.actor.update(batch, broken_loss)
    with pytest.raises(hf.CallError):
        failed.wait()
    until("the news of the failure", lambda: any(e["type"] == "call_failed" for e in events), live.session)
    stop()
    mine = [(e["type"], e["call"]) for e in events if e["type"] != "call_progress"]
    assert mine == [
        ("call_started", "actor.generate"), ("call_done", "actor.generate"),
        ("call_started", "actor.update"), ("call_failed", "actor.update"),
    ]  # fmt: skip
    assert "broken on purpose" in next(e["error"] for e in events if e["type"] == "call_failed")


def test_calls_from_several_threads_and_from_coroutines(live):
    found, threads = {}, []

    def work(k):
        found[k] = live.actor.generate(live.prompts[k], max_new_tokens=4)["response"]

    for k in range(4):
        threads.append(threading.Thread(target=work, args=(k,)))
        threads[-1].start()
    for thread in threads:
        thread.join(120)
    for k in range(4):
        assert found[k] == live.actor.generate(live.prompts[k], max_new_tokens=4)["response"]

    async def awaited(pending):
        return await pending

    async def both():
        one, two = live.actor.generate(live.prompts[0], max_new_tokens=3), live.critic.compute_values(small(live))
        return await asyncio.gather(awaited(one), awaited(two))

    assert [batch.state for batch in asyncio.run(both())] == ["done", "done"]


def test_columns_live_until_they_are_read_and_not_longer(live):
    batch = small(live).wait()
    first = call_id(batch)
    again = live.actor.generate(live.prompts[0], max_new_tokens=3)  # dropped while it runs
    second = call_id(again)
    metrics = live.actor.update(batch.map(lambda t: {"one": np.ones(4)}, ["response"], ["one"]), lambda out, b: -out.log_probs)
    del again
    del batch
    assert metrics.rows[0]["num_samples"] == 4
    idle(live)
    stored = lambda: [stored_of(live.session, call) for call in (first, second)]  # noqa: E731
    until("both to be freed", lambda: stored() == [None, None], live.session)


# ---- functions over columns


@pytest.mark.filterwarnings("ignore:reward goes on with")
def test_dataset_columns_reach_the_reward_function_and_what_it_prints_its_logs(live):
    data = [{"text": f"a film {i}", "label": i, "names": [f"n{i}", "x"], "title": f"film {i}"} for i in range(6)]
    prompts = live.session.prompts(data, batch_size=6, seed=3)

    def by_label(prompts, completions, label, names, title, **others):
        assert all(p.strip() == f"a film {i}" for p, i in zip(prompts, label, strict=True))
        assert title == [f"film {i}" for i in label]
        assert [n[0] for n in names] == [f"n{i}" for i in label]
        assert "advantages" not in others
        print(f"scoring {len(completions)} completions")
        return [float(i) for i in label]

    reward = live.session.reward(by_label, name="labels")
    batch = live.actor.generate(prompts[0], max_new_tokens=3, n=2)
    scores = reward.compute_scores(batch)["scores"]
    assert list(scores) == [float(i) for i in batch["label"]]
    assert sorted(scores) == sorted([*range(6), *range(6)])
    assert live.session.logs("labels").splitlines()[-1] == "scoring 12 completions"
    reward.release()


def test_errors_of_own_functions_show_the_line_and_other_columns_are_refused(live):
    batch = small(live)

    def picky(table):
        raise ValueError(f"no good: {len(table['response'].lengths)}")

    for look in (lambda: batch.map(picky, ["response"], ["x"]), lambda: batch.reduce(picky, ["response"])):
        with refuses(hf.CallError, "picky", "ValueError('no good: 4')", 'raise ValueError(f"no good'):
            look().wait()
    for returned, named in (
        ({"y": [1, 2, 3, 4]}, ("['x']", "['y']")),
        ({"x": [1, 2]}, ("2 entries", "'x'", "4 samples")),
        ([1, 2, 3, 4], ("list",)),
    ):
        with refuses(hf.CallError, *named):
            batch.map(lambda table, returned=returned: returned, ["response"], ["x"]).wait()


def test_functions_of_own_modules_travel_by_value(live, tmp_path, monkeypatch):
    """The workers cannot import the module, nor the one it imports."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_helpers.py").write_text("SCALE = 3.0\ndef scaled(x):\n    return SCALE * x\n")
    batch = small(live)
    for number, beginning in enumerate(("from own_helpers import scaled\n", "def scaled(x):\n    return 3.0 * x\n")):
        (tmp_path / f"own_rewards_{number}.py").write_text(
            beginning + "def plain(completions):\n    return [scaled(1.0) for _ in completions]\n"
            "class Reward:\n    def __init__(self, k):\n        self.k = k\n"
            "    def __call__(self, completions):\n        return [scaled(self.k) for _ in completions]\n"
        )
        own = importlib.import_module(f"own_rewards_{number}")
        for function, wanted in ((own.plain, 3.0), (own.Reward(2.0), 6.0)):
            reward = live.session.reward(function, name="own")
            scores = reward.compute_scores(batch)
            reward.release()
            assert set(scores["scores"]) == {wanted}


# ---- primitives and functions on ranks


def test_gather_of_scatter_is_the_batch(live):
    """Under each protocol: rows of uneven lengths, more and fewer than ranks, over dp2 (actor) and tp2 (critic)."""
    wrong = []
    for rows in (1, 7):
        rng = np.random.default_rng(rows)
        prompts = [rng.integers(0, 300, rng.integers(1, 60)).tolist() for _ in range(rows)]
        batch = live.session.batch(prompt=prompts, number=np.arange(rows), word=[f"w{i}" for i in range(rows)])
        for name in ("THREE_D", "DP", "MICRO_DP", "ONE_TO_ALL", "PP_ONLY", "ALL_TO_ALL"):

            @hf.primitive(reads=["prompt", "number", "word"], writes=["p", "n", "w"], protocol=getattr(hf.protocols, name))
            def echo(model, rows):
                assert list(rows["number"]) == rows.row_ids.tolist()
                return {"p": rows["prompt"], "n": rows["number"], "w": rows["word"]}

            for role in (live.actor, live.critic):
                back = role.call(echo, batch)
                if (back["p"], list(back["n"]), back["w"]) != (batch["prompt"], [*range(rows)], [f"w{i}" for i in range(rows)]):
                    wrong.append((name, role.name, rows))
    assert not wrong


def test_functions_on_ranks_use_collectives_and_passes(live):
    def add_ranks(rank, extra):
        import torch
        import torch.distributed as dist

        mine = torch.tensor([float(rank.rank + 1)])
        dist.all_reduce(mine, group=rank.groups.world)
        return rank.rank, rank.device, str(rank.layout), float(mine) + extra

    assert live.actor.run(add_ranks, 10) == [(0, 0, "tp1 pp1 dp2", 13.0), (1, 1, "tp1 pp1 dp2", 13.0)]
    assert [r[2] for r in live.critic.run(add_ranks, 0)] == ["tp2 pp1 dp1"] * 2

    @hf.primitive(reads=["prompt", "response"], writes=["mine"])
    def mine(model, rows):
        return {"mine": model.log_probs(rows)}

    batch = live.actor.compute_log_probs(live.actor.call(mine, small(live)))
    assert np.allclose(batch["mine"].flat, batch["old_log_probs"].flat, atol=1e-6)

    @hf.primitive(reads=["response"], writes=["twice", "word"])
    def twice(model, rows):
        return {"twice": [[2 * int(t) for t in row] for row in rows["response"]], "word": ["x"] * rows.num_rows}

    batch = live.actor.call(twice, live.session.batch(prompt=[[1, 2]], response=[[3, 4]]))  # and a rank without rows
    assert batch["twice"] == hf.Ragged.of([[6, 8]])
    assert batch["word"] == ["x"]
    assert live.actor.compute_log_probs(batch.alias("response", "twice"))["old_log_probs"].lengths.tolist() == [2]


def test_a_primitive_that_fails_on_one_rank(live):
    @hf.primitive(reads=["prompt"], writes=["x"])
    def half(model, rows):
        if model.rank == 1:
            raise KeyError("rank one only")
        return {"x": [0.0] * rows.num_rows}

    failed = live.actor.call(half, live.session.batch(prompt=[[1], [2], [3]]))
    with refuses(hf.CallError, "half", "KeyError('rank one only')") as caught:
        failed.wait()
    assert caught.value.rank == 1
    spans = [s for s in live.session.trace[:].spans if s.call_id == call_id(failed) and s.name == "fetch"]
    assert {s.rank for s in spans} == {0, 1}, "how far the ranks of a failed call came is in the trace"
    check_works(live)


def test_exit_and_interrupt_in_own_functions_fail_the_call_only(live):
    before = pids(live.session)
    batch = live.session.batch(prompt=[[1, 2], [3]], response=[[3, 4], [4]])

    def leave(*_):
        raise SystemExit(1)

    def stop(*_):
        raise KeyboardInterrupt

    for use, raised in (
        (lambda: live.actor.run(leave), "SystemExit(1)"), (lambda: live.actor.run(stop), "KeyboardInterrupt"),
        (lambda: live.actor.update(batch, leave).wait(), "SystemExit(1)"),
        (lambda: live.actor.update(batch, stop).wait(), "KeyboardInterrupt"),
        (lambda: batch.reduce(leave, ["prompt"]).wait(), "SystemExit(1)"),
    ):  # fmt: skip
        with refuses(hf.CallError, raised):
            use()
    assert pids(live.session) == before
    check_works(live)
