"""A worker that dies in the middle of an update: who says so, what is lost, and what comes back. Its pool is started again."""

import os
import signal

import numpy as np
from expect import refuses, until
from system_helpers import at_work, call_id, check_works, fingerprint, gate, gated_loss, pids, ppo_batch, ppo_step

import hfsdk as hf
from hfsdk.algorithms import ppo


def weights(roles):
    return [role.run(fingerprint) for role in (roles.actor, roles.critic)]


def test_a_worker_killed_in_an_update_costs_what_was_learned_since_the_save(twin, tmp_path):
    ppo_step(twin).actor.wait()
    twin.session.save(tmp_path / "saved")
    saved = weights(twin)
    ppo_step(twin, 1).actor.wait()
    assert weights(twin) != saved
    batch = ppo_batch(twin, 2).wait()
    twin.actor.run(lambda rank: print("of an earlier call", flush=True))
    entrance = gate(tmp_path)
    gated = gated_loss(entrance)

    def loud(out, b):
        print("of this call", flush=True)
        return gated(out, b)

    metrics = twin.actor.update(batch, loud, mini_batches=4)
    queued = twin.critic.update(batch, ppo.ValueLoss())
    unaffected = batch.reduce(lambda table: float(table["scores"].sum()), ["scores"])
    forward = lambda: entrance.reached() and at_work(twin.session, call_id(metrics), "forward")  # noqa: E731
    until("the loss of a forward pass", forward, twin.session)
    os.kill(pids(twin.session)[1], signal.SIGKILL)

    words = ("device 1", "its last spans", "actor.update", "of this call", "started again at the next call")
    back = [f"{role} comes back with checkpoint" for role in ("actor", "critic")]
    with refuses(hf.WorkerDiedError, *words, *back, "2 updates lost") as caught:
        metrics.wait(timeout=240)
    entrance.open()
    error, text = caught.value, str(caught.value)
    assert (error.role, error.method, error.rank) == ("actor", "update", 1)
    assert "test_system_death.py" in error.line
    assert "of an earlier call" not in text
    assert "reference comes back" not in text, "a frozen model loses nothing"

    with refuses(hf.LostColumnError, "again"):
        queued.wait(timeout=240)
    with refuses(hf.LostColumnError, "values", "critic.compute_values", ".py, line"):
        batch["values"]
    assert {c["name"]: c["state"] for c in batch.column_states()}["values"] == "lost"
    assert np.isfinite(unaffected.value)
    assert len(batch["advantages"]) == len(batch["prompt"]) == 16, "what CPU tasks and this process hold is still there"

    check_works(twin)
    assert weights(twin) == saved
    assert [twin.actor.version, twin.critic.version] == [state[0][0] for state in saved]
    late = twin.session.reference("tiny", name="late")  # placing once more leaves what came back alone
    late.compute_log_probs(twin.session.batch(prompt=[[1]], response=[[2]])).wait()
    late.release()
    assert weights(twin) == saved
    ppo_step(twin).actor.wait()
    assert twin.actor.version == saved[0][0][0] + 2
