"""Functions, listeners and columns beyond what a step needs: timeouts, listeners that raise, what passes through the controller."""

import pickle
import subprocess
import sys
import textwrap

import pytest
from expect import refuses
from system_helpers import check_works, endless_generation, lengths_reward

from hfsdk.engine.calls import queries as q
from hfsdk.session.parts import parts_of


def small(live, rows=4):
    return live.actor.generate(live.prompts[0][:rows], max_new_tokens=4)


def test_timeout_leaves_the_call_running(live):
    batch = endless_generation(live)
    with refuses(TimeoutError, "actor.generate", 0.05, "still running"):
        batch.wait(timeout=0.05)
    assert batch.state in ("pending", "running")
    batch.cancel()
    check_works(live)


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


def test_scripts_without_main_guard():
    """A plain script, as in the README, imports and simulates without starting anything."""
    script = "import hfsdk as hf; print(hf.Session.simulated('1x2 A100-80GB'))"
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=120)
    assert "simulated" in found.stdout


def test_columns_do_not_pass_through_the_controller(live, monkeypatch):
    """Counted by the runtime, and weighed here: what came back from Ray during a step is metadata."""
    from hfsdk.engine.ray import runtime
    from hfsdk.engine.worker.answer import Answer

    batch = live.session.batch(prompt=[[1] * 200] * 64, response=[[2] * 200] * 64).wait()
    weights, get = [], runtime.ray.get

    def weighed(refs, **more):
        value = get(refs, **more)
        weights.extend([len(pickle.dumps(value))] * isinstance(value, Answer))
        return value

    before = parts_of(live.session).client.send(q.ControllerBytes())
    with monkeypatch.context() as patch:
        patch.setattr(runtime.ray, "get", weighed)
        batch = live.critic.compute_values(live.actor.compute_log_probs(live.reference.compute_log_probs(batch))).wait()
    column_bytes = 3 * 64 * 200 * 4
    assert len(weights) == 6
    assert sum(weights) < column_bytes / 8, weights
    assert parts_of(live.session).client.send(q.ControllerBytes()) == before == 0
    assert batch["values"].flat.shape == (64 * 200,)
