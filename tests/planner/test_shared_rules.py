"""The clock, shared cores and staleness: one rule for the simulated runtime and the planner."""

import numpy as np
import pytest

import hfsdk as hf
from hfsdk.core.clock import core_speeds, start_s, stretch
from hfsdk.core.layout import Layout
from hfsdk.core.roles import RoleSpec
from hfsdk.core.rollout_weights import RolloutWeights
from hfsdk.planner.search.items import modes_of
from hfsdk.planner.search.recorded import Recorded, RecordedCall


def test_a_call_starts_when_the_last_of_its_devices_and_inputs_is_there():
    assert start_s([]) == 0.0
    assert start_s([1.0, 3.0, 2.0]) == 3.0
    assert start_s([np.array([1.0, 5.0]), np.array([2.0, 4.0])]).tolist() == [2.0, 5.0]


def test_n_workers_on_c_cores_run_at_c_over_n():
    for workers, cores, speed in ((1, 2, 1.0), (2, 2, 1.0), (3, 2, 2 / 3), (4, 1, 0.25), (0, 2, 1.0)):
        assert core_speeds(np.array([workers]), np.array([cores])).tolist() == [speed], (workers, cores)
        assert stretch(workers, cores) == pytest.approx(1 / speed), (workers, cores)


def seen(weights, methods):
    """What is said before each of some calls: s(tale), else a(way), else -."""
    said = []
    for method in methods:
        said.append(
            "a" if weights.away_for(method) and not weights.stale_for(method) else "s" if weights.stale_for(method) else "-"
        )
        weights.note(method)
    return "".join(said)


def test_weights_are_stale_after_what_changes_or_may_change_them():
    calls = [
        "generate",
        "generate",
        "update",
        "generate",
        "compute_log_probs",
        "num_updates",
        "run",
        "generate",
        "load_state",
        "generate",
    ]
    assert seen(RolloutWeights(), calls) == "s--s---s-s"
    assert seen(RolloutWeights(), ["generate", "forward_backward", "generate", "step", "generate", "call", "generate"]) == "s---s-s"


def test_shared_weights_go_to_and_fro():
    calls = ["generate", "compute_log_probs", "num_updates", "generate", "census", "generate", "update", "generate"]
    assert seen(RolloutWeights(shared=True), calls) == "sa-a--as"


@hf.primitive(reads=["response"], writes=["margins"])
def margins(model, rows):
    """The user's own, which may change the weights."""
    return {"margins": np.zeros(len(rows))}


def test_a_primitive_makes_the_rollout_stale_in_simulation_and_plan_alike():
    session = hf.Session.simulated("1x2 A100-80GB")
    actor = session.actor("llama3-1b", dtype="bf16")
    session.place("colocate")
    prompts = session.prompts([[1] * 16] * 8, batch_size=8)[0]
    moved = []
    for _ in range(2):
        batch = actor.generate(prompts, max_new_tokens=32).wait()
        moved.append(any(span.name == "reshard" for span in session.trace))
        actor.call(margins, batch).wait()

    rows = np.full(8, 16)
    methods = ("generate", "call") * 2
    calls = [RecordedCall(id=k, role="actor", method=m, phase="", prompts=rows, responses=rows) for k, m in enumerate(methods)]
    role = RoleSpec(name="actor", kind="actor", model=hf.ModelSpec.preset("llama3-1b"), rollout=Layout(dp=2))
    planned = modes_of([role], Recorded(algorithm="", calls=tuple(calls)), shadows=False)[0].jobs
    assert [job.stale for job in planned] == [True, False, True, False]
    assert moved == [True, True]
