"""Workers that die at other moments: with nothing saved, while idle, while loading, in a collective, while roles move."""

import os
import re
import shutil
import signal
import time

import numpy as np
import pytest
from expect import until
from system_helpers import (
    at_work,
    call_id,
    check_works,
    endless_generation,
    fingerprint,
    pids,
    ppo_batch,
    ppo_step,
)

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.session.parts import parts_of


def kill(session, rank):
    os.kill(pids(session)[rank], signal.SIGKILL)


def test_killed_in_an_update(twin):
    """Nothing was saved: the initial weights come back, and the error says how much is lost."""
    initial = twin.reference.run(fingerprint)[0][1]
    version = twin.actor.version
    assert version > 0
    batch = ppo_batch(twin).wait()
    twin.actor.run(lambda rank: print("of an earlier call", flush=True))

    def loud(out, b):
        print("of this call", flush=True)
        time.sleep(0.3)
        return -out.log_probs * 1e-3

    metrics = twin.actor.update(batch, loud, mini_batches=4)
    queued = twin.critic.update(batch, ppo.ValueLoss())
    unaffected = batch.reduce(lambda table: float(table["scores"].sum()), ["scores"])
    until("a forward pass", lambda: at_work(twin.session, call_id(metrics), "forward"))
    kill(twin.session, 1)

    with pytest.raises(hf.WorkerDiedError) as caught:
        metrics.wait(timeout=120)
    error, text = caught.value, str(caught.value)
    assert (error.role, error.method, error.rank) == ("actor", "update", 1)
    assert "test_system_deaths.py" in error.line
    for words in (
        "device 1",
        "its last spans",
        "actor.update",
        "of this call",
        "started again at the next call",
        "initial weights",
    ):
        assert words in text, words
    assert "of an earlier call" not in text
    assert f"actor comes back with its initial weights ({version} updates lost)" in text
    assert "critic comes back with its initial weights" in text
    assert "reference comes back" not in text, "a frozen model loses nothing"

    with pytest.raises(hf.LostColumnError, match=r"(response|values|old_log_probs).* again"):
        queued.wait(timeout=120)
    with pytest.raises(hf.LostColumnError, match=r"values died with the worker.*run critic.compute_values again.*\.py, line"):
        batch["values"]
    assert {c["name"]: c["state"] for c in batch.column_states()}["values"] == "lost"
    assert np.isfinite(unaffected.value)
    assert len(batch["advantages"]) == len(batch["prompt"]) == 16, "what CPU tasks and this process hold is still there"

    check_works(twin)
    assert set(twin.actor.run(fingerprint)) == {(0, initial)}
    assert twin.actor.version == twin.critic.version == 0
    ppo_step(twin).actor.wait()
    assert twin.actor.version == 2


def test_killed_in_a_generation_after_a_save(twin, tmp_path):
    """The weights of the checkpoint come back bit for bit, for the actor and the critic."""
    ppo_step(twin).actor.wait()
    twin.session.save(tmp_path)
    saved = [role.run(fingerprint) for role in (twin.actor, twin.critic)]
    ppo_step(twin, 1).actor.wait()
    assert twin.actor.run(fingerprint) != saved[0]

    batch = endless_generation(twin)
    until("decoding", lambda: at_work(twin.session, call_id(batch), "decode", rank=0))
    kill(twin.session, 0)
    with pytest.raises(hf.WorkerDiedError, match=r"actor comes back with checkpoint .* \(2 updates lost\)") as caught:
        batch.wait(timeout=120)
    assert (caught.value.role, caught.value.method, caught.value.rank) == ("actor", "generate", 0)
    assert "decode" in caught.value.details

    assert [role.run(fingerprint) for role in (twin.actor, twin.critic)] == saved
    assert twin.actor.version == saved[0][0][0]
    check_works(twin)
    assert set(twin.actor.generate(twin.prompts[0], max_new_tokens=2)["policy_version"]) == {saved[0][0][0]}

    late = twin.session.reference("tiny", name="late")  # placing once more leaves what came back alone
    late.compute_log_probs(twin.session.batch(prompt=[[1]], response=[[2]])).wait()
    late.release()
    assert [role.run(fingerprint) for role in (twin.actor, twin.critic)] == saved


@pytest.fixture
def single(ray_here):
    """One device and a critic on it: quick to start again."""
    with hf.Session(devices=1, name="single") as session:
        critic = session.critic("tiny")
        critic.compute_values(session.batch(prompt=[[1]], response=[[2]])).wait()
        yield session, critic


def test_killed_while_idle_and_while_loading(single):
    session, critic = single
    batch = session.batch(prompt=[[1, 2]], response=[[3, 4]])

    kill(session, 0)
    until("the news", lambda: session.placement.view()["devices"][0]["pid"] is None)  # looking does not fail
    assert critic.memory == {}
    with pytest.raises(hf.WorkerDiedError, match="started again at the next call"):
        critic.compute_values(batch).wait(timeout=120)
    early = critic.compute_values(batch)
    early.cancel()  # while the pool is started again for it
    assert len(critic.compute_values(batch)["values"]) == 1
    assert early.state == "cancelled"

    def on_event(event):
        if event["type"] == "role_loading" and event["role"] == "late":
            os.kill(pid, signal.SIGKILL)

    until("the new worker", lambda: pids(session))  # what is asked while it loads may not be answered in time
    pid = pids(session)[0]
    stop = session.subscribe(on_event)
    late = session.critic("tiny", name="late")
    with pytest.raises(hf.WorkerDiedError, match="started again at the next call"):
        late.compute_values(batch)
    stop()
    assert len(late.compute_values(batch)["values"]) == 1
    assert len(critic.compute_values(batch)["values"]) == 1
    late.release()

    with pytest.raises(hf.WorkerDiedError):  # the user's own doing
        critic.run(lambda rank: os._exit(1))
    critic.release()


def test_killed_after_its_checkpoint_was_removed(single, tmp_path):
    """Said once, with the path; then the initial weights come back."""
    session, critic = single
    batch = session.batch(prompt=[[1, 2]], response=[[3, 4]])
    initial = critic.run(fingerprint)
    critic.update(batch, lambda out, b: out.values).wait()
    session.save(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved")
    kill(session, 0)
    with pytest.raises(hf.WorkerDiedError, match="critic comes back with checkpoint"):
        critic.compute_values(batch).wait(timeout=120)
    with pytest.raises(hf.CheckpointError, match=r"there is no .*saved/state-1/critic\. .*initial weights"):
        critic.compute_values(batch).wait(timeout=120)
    assert critic.run(fingerprint) == initial
    critic.release()


def test_hang_after_another_rank_failed(ray_here, monkeypatch):
    """A rank waits in a collective for one that has raised: its pool is ended after a while, not waited for."""
    from hfsdk.engine.ray import runtime as ray_calls

    monkeypatch.setattr(ray_calls, "USER_GRACE_S", 2.0)

    def uneven(rank):
        import torch
        import torch.distributed as dist

        if rank.rank == 0:
            raise ValueError("rank 0 does not come")
        dist.all_reduce(torch.ones(1), group=rank.groups.world)

    with hf.Session(devices=2, name="hang") as session:
        critic = session.critic("tiny", train="dp2")
        with pytest.raises(hf.WorkerDiedError, match=r"hangs in a collective.*rank 0 does not come") as caught:
            critic.run(uneven)
        assert caught.value.rank == 1
        assert len(critic.compute_values(session.batch(prompt=[[1]], response=[[2]]))["values"]) == 1


def size_of(rank):
    """The sum of all weights' sizes, which every update changes."""
    return float(sum(parameter.detach().double().abs().sum() for parameter in rank.module.parameters()))


def test_killed_while_place_moves_trained_roles(ray_here, monkeypatch):
    """Before the old pool is left, and once the first role is to be loaded: what is lost is told once, and nothing else is."""
    with hf.Session(devices=2, name="moved") as session:
        actor, critic = session.actor("tiny", optimizer=hf.AdamW(lr=1e-3)), session.critic("tiny", optimizer=hf.AdamW(lr=1e-3))
        rows = session.batch(prompt=[[1], [2]], response=[[3, 4], [5, 6]])
        runtime = parts_of(session).client._controller._runtime
        loss = lambda out, b: out.values if out.log_probs is None else out.log_probs  # noqa: E731
        initial = {role.name: role.run(size_of)[0] for role in (actor, critic)}
        for moment, where in (("close_pool", {"actor": 1, "critic": 1}), ("load", "colocate")):
            for role in (actor, critic):
                role.update(rows, loss).wait(timeout=240)
            trained = {role.name: role.run(size_of)[0] for role in (actor, critic)}
            before, victims = getattr(runtime, moment), [pids(session)[0]]

            def dying(*given, before=before, victims=victims, **named):
                if victims:
                    os.kill(victims.pop(), signal.SIGKILL)
                return before(*given, **named)

            monkeypatch.setattr(runtime, moment, dying)
            said = ""
            try:
                session.place(where)
            except hf.WorkerDiedError as told:
                said = str(told)
            monkeypatch.setattr(runtime, moment, before)
            lost = re.findall(r"(\w+) comes back with its initial weights \(\d updates? lost\)", said)
            assert bool(lost) == bool(said)
            assert moment == "close_pool" or lost, "a worker that is to load ends; one that gave may have been read in time"
            assert {role.name: role.run(size_of)[0] for role in (actor, critic)} == trained | {name: initial[name] for name in lost}
        session.rewind(session.snapshot())
        assert actor.generate([[1], [2]], max_new_tokens=2).wait(timeout=240).done
