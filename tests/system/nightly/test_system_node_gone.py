"""A node of two leaves in the middle of a run and comes back: node_gone.py tells what became of the run."""

import pytest
from other_processes import told_by

from hfsdk.run.run import MEASURED


@pytest.fixture(scope="module")
def told():
    return told_by("node_gone.py")


def test_the_run_goes_on_over_one_node_and_over_both_again(told):
    disturbed = told["disturbed"]
    smaller, whole = disturbed["resized"]
    assert smaller[1:] == [1, f"node 1 ({address(disturbed)}) left the cluster"]
    assert whole[1:] == [2, f"node 1 ({address(disturbed)}) came back"]
    assert whole[0] > smaller[0]
    assert disturbed["placed"] == ["tp1 pp1 dp2", [[0, 1]]]


def test_one_node_is_one_death_and_each_change_is_drawn(told):
    (restored,) = told["disturbed"]["restores"]
    assert "a worker died in step" in restored
    died, back = told["disturbed"]["marks"]
    assert died == restored
    assert "came back: after step" in back


def test_what_is_planned_was_told(told):
    assert any("it goes on over device 0 (actor 'tp1 pp1 dp1'" in text for text in told["disturbed"]["messages"])


def test_samples_are_those_of_the_undisturbed_run(told):
    disturbed, undisturbed = told["disturbed"]["rows"], told["undisturbed"]["rows"]
    assert [row["step"] for row in disturbed] == [row["step"] for row in undisturbed] == [*range(len(disturbed))]
    assert [row["responses"] for row in disturbed] == [row["responses"] for row in undisturbed], "every token"
    for row, other in zip(disturbed, undisturbed, strict=True):
        numbers = {name: value for name, value in row.items() if name not in MEASURED}
        assert numbers == pytest.approx({name: other[name] for name in numbers}, rel=1e-3, abs=1e-4)


def address(told):
    return next(text for text in told["messages"] if "shrink=True" in text).partition("(")[2].partition(")")[0]
