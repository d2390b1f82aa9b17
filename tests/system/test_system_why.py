"""Why trainer and generating engine differ: a planted cause is named, on a healthy run none, and the rest is refused."""

import numpy as np
import pytest
from expect import refuses

import hfsdk as hf
from benchmarks.why_parts.differ import PLANTED, by_value, generated, likelihood, mend


@pytest.fixture
def actor(sharded):
    actor = sharded.actor("tiny", name="asked", train="tp2", rollout="dp2", optimizer=hf.AdamW(lr=1e-3))
    yield actor
    actor.release()


def causes(gap, *expected):
    """Check that these causes are named and no other, and that what each part has adds up to every token's gap."""
    assert gap.causes == expected, (gap, gap.to_pandas().query("named").to_string())
    table, tokens = gap.to_pandas(), gap.to_pandas("tokens")
    assert tuple(table.query("named").sort_values("nats", ascending=False).index) == expected
    parts = tokens[list(gap.parts)].sum(axis=1)
    assert np.allclose(parts, tokens["gap"], atol=1e-5), "every token's gap is the sum of its parts"
    if expected:
        assert table.loc[expected[0], "share"] > 0.9, table.to_string()
        assert len(gap.to_pandas("layers")) == 6
    return gap


def test_a_planted_cause_is_named_and_on_healthy_runs_none(sharded, actor):
    healthy = generated(actor, temperature=0.8)
    gap = causes(actor.explain_gap(healthy))
    assert "they agree" in gap.verdict
    assert not gap.layers
    for what in ("weights one update old", "temperature forgotten", "a norm changed in the rollout"):
        expected, plant = PLANTED[what]
        asked, batch = plant(sharded, actor)
        version = asked.version
        causes(asked.explain_gap(batch), expected)
        assert asked.version == version
        mend(actor)
    actor.update(generated(actor), likelihood).wait()
    batch = generated(actor)
    causes(actor.explain_gap(actor.compute_log_probs(batch)))

    with refuses(hf.ColumnError, "explain_gap", "'rollout_log_probs'"):
        actor.explain_gap(batch.drop("rollout_log_probs"))
    empty = by_value(sharded, batch, response=hf.Ragged.of([[]] * 4, np.int32), rollout_log_probs=hf.Ragged.of([[]] * 4))
    with refuses(hf.ColumnError, "no response token"):
        actor.explain_gap(empty)
    with refuses(hf.OptionError, "'causes'", "'tokens'", "'layers'"):
        actor.explain_gap(batch).to_pandas("columns")
