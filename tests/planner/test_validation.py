"""What the published timings are read as, and that a fit on one side of the split predicts the other."""

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.baselines import (
    HYBRIDFLOW,
    NEMO_ALIGNER,
    SYSTEMS,
    best_plan,
    compare_placements,
    decode_without_cache,
    describe,
    fits,
    ppo_step,
)
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.spec import ModelSpec
from hfsdk.planner.perf.perf_model import PerfModel

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SHARED = ("baselines", "common", "published", "validate_perf")


@pytest.fixture(scope="module")
def validate():
    sys.path.insert(0, str(FOLDER))
    import validate_perf

    yield validate_perf
    sys.path.remove(str(FOLDER))
    for name in SHARED:
        sys.modules.pop(name, None)


def median_error(validate, perf, group, quantity, test=True):
    found = [c for c in validate.cases() if c.group == group and c.quantity == quantity and c.test is test]
    assert len(found) >= 5
    return float(np.median([abs(validate.error(c, perf)) for c in found]))


def test_the_file_is_whole_and_the_split_is_by_configuration(validate):
    rows = validate.rows()
    assert len(rows) == 530
    sides = {}
    for case in validate.cases():
        sides.setdefault((case.group, case.config, case.workload), set()).add(case.test)
    assert all(len(found) == 1 for found in sides.values())
    published = sys.modules["published"]
    by_configuration = {}
    for row in rows:
        key = tuple(row[f] for f in published.FIELDS)
        by_configuration.setdefault(key, set()).add(published.on_test_side(row))
    assert all(len(found) == 1 for found in by_configuration.values())
    share = np.mean([found.pop() for found in by_configuration.values()])
    assert 0.25 < share < 0.42


def test_a_fit_predicts_configurations_it_did_not_see(validate):
    group = "PUZZLE, NVLink"
    seen = [c for c in validate.cases() if c.group == group and not c.test and c.quantity in validate.TARGETS]
    fitted = validate.fit(seen, ("train_efficiency", "forward_efficiency", "launch_s", "link_efficiency"), PerfModel())
    assert median_error(validate, fitted, group, "generation") < 0.15
    assert median_error(validate, fitted, group, "forward") < 0.15
    assert median_error(validate, fitted, group, "train") < 0.20
    assert median_error(validate, fitted, group, "step") < 0.10
    assert median_error(validate, fitted, group, "train") < median_error(validate, PerfModel(), group, "train") / 1.5
    assert max(getattr(fitted, name) for name in vars(fitted) if name.endswith("efficiency")) <= 1


def test_presets_alone_are_within_a_third(validate):
    for group, quantity in (("PUZZLE, PCIe", "generation"), ("PUZZLE, PCIe", "forward"), ("PUZZLE, PCIe", "train"),
                            ("PUZZLE, NVLink", "step"), ("ReaL-Heuristic, A100", "step")):  # fmt: skip
        assert median_error(validate, PerfModel(), group, quantity) < 0.33, (group, quantity)


def test_a_fit_finds_constants_back(validate):
    """Measured by a model with other constants, the fit returns those that the data shows."""
    from dataclasses import replace

    truth = PerfModel(train_efficiency=0.4, launch_s=8e-4)
    cases = [c for c in validate.cases() if c.group == "PUZZLE, NVLink" and c.quantity in ("train", "generation")][:10]
    made = [replace(c, measured=c.seconds(truth)) for c in cases]
    found = validate.fit(made, ("train_efficiency", "launch_s"), PerfModel())
    assert found.train_efficiency == pytest.approx(0.4, rel=0.03)
    assert found.launch_s == pytest.approx(8e-4, rel=0.05)


def test_order_of_plans(validate):
    found = validate.orders({group: PerfModel() for group in {c.group for c in validate.cases()}})
    assert len(found) == 4
    assert all(count >= 3 for count, _ in found.values())
    assert validate.pooled(found) > 0.7


@pytest.fixture(scope="module")
def plans():
    spec, cluster = ModelSpec.preset("llama-13b"), ClusterSpec.parse("4x8 A100-80GB")
    return spec, cluster, {s.name: best_plan(s, PerfModel(), spec, cluster) for s in (HYBRIDFLOW, *SYSTEMS)}


def test_baselines_take_longer_than_hybridflow(plans):
    spec, cluster, found = plans
    steps = {name: ppo_step(PerfModel(), plan, spec, cluster) for name, plan in found.items()}
    own = steps.pop("HybridFlow")
    assert all(step.total > 1.2 * own.total for step in steps.values())
    assert own.total == pytest.approx(own.transition + own.generation + sum(list(own.calls.values())[1:]))


def test_plans_use_every_device_and_fit(plans):
    spec, cluster, found = plans
    for plan in found.values():
        assert sum(plan.pools.values()) == cluster.num_devices
        assert fits(plan, spec, cluster)
        assert str(plan).startswith(plan.system.name)


def test_no_kv_cache_computes_the_context_again_and_again(plans):
    spec, cluster, found = plans
    where = describe(found[NEMO_ALIGNER.name], "actor", spec, cluster)
    prompts = responses = np.full(8, 512)
    assert decode_without_cache(PerfModel(), where, prompts, responses) > 5 * PerfModel().decode(where, prompts, responses)


def test_models_that_do_not_fit_have_no_plan():
    spec, cluster = ModelSpec.preset("llama-70b"), ClusterSpec.parse("1x8 A100-80GB")
    assert all(best_plan(system, PerfModel(), spec, cluster) is None for system in (HYBRIDFLOW, *SYSTEMS))


def test_separate_pools_overlap():
    """With everything apart, the reference, the critic and the reward model work at the same time."""
    spec, cluster = ModelSpec.preset("llama-7b"), ClusterSpec.parse("4x8 A100-80GB")
    plan = best_plan(SYSTEMS[1], PerfModel(), spec, cluster)
    step = ppo_step(PerfModel(), plan, spec, cluster)
    assert step.total < sum(step.calls.values())
    assert step.total >= step.calls["generate"] + step.calls["actor update"]


def test_placements_are_compared_by_their_seconds():
    assert compare_placements({"colocate": 10.0, "split": 12.0, "standalone": 30.0}) == ("colocate", 1.2)
    assert compare_placements({"split": 3.0}) == ("split", 1.0)
