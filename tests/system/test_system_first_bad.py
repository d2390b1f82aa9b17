"""The first bad number on real engines: what is planted is named, its code gets it again, and the session is where it was."""

import math

import pytest
from first_bad_helpers import again, search

from benchmarks.why_parts.planted_runs import NAME


@pytest.mark.filterwarnings("ignore:reward goes on with", "ignore:step .* jumped to")
def test_a_weight_that_is_infinite_on_one_rank_is_named_with_rank_and_layer(planted):
    found = planted("weight", 1)
    bad = search(found, ["critic"])
    assert f"but for {NAME}, of which ranks that differ in dp alone keep one copy together" in bad.left
    assert (bad.kind, bad.role, bad.parameter, bad.ranks, bad.value) == ("weight", "actor", NAME, (1,), math.inf)
    assert bad.layer == NAME.removesuffix(".weight")
    assert (bad.call, bad.column) == ("actor.compute_log_probs", "old_log_probs")
    assert "it was finite before actor.run" in bad.verdict
    of_rank = again(found, bad)
    assert of_rank[0] < 10
    assert of_rank[1] == math.inf
