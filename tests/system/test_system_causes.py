"""Why trainer and generating engine differ: every planted cause is named, and on healthy runs none."""

import numpy as np
import pytest
from expect import refuses

import hfsdk as hf
from benchmarks.why_parts.differ import PLANTED, bend_what_arrives, by_value, generated, likelihood, mend


@pytest.fixture(scope="module")
def session(ray_here):
    with hf.Session(devices=2, seed=3, name="why") as session:
        yield session


@pytest.fixture(scope="module")
def actor(session):
    return session.actor("tiny", train="tp2", rollout="dp2", optimizer=hf.AdamW(lr=1e-3))


def causes(gap, *expected):
    assert gap.causes == expected, (gap, gap.to_pandas().query("named").to_string())
    table, tokens = gap.to_pandas(), gap.to_pandas("tokens")
    assert tuple(table.query("named").sort_values("nats", ascending=False).index) == expected
    parts = tokens[list(gap.parts)].sum(axis=1)
    assert np.allclose(parts, tokens["gap"], atol=1e-5), "every token's gap is the sum of its parts"
    if expected:
        assert table.loc[expected[0], "share"] > 0.9, table.to_string()
        assert len(gap.to_pandas("layers")) == 6
    return gap


# ---- healthy


def test_no_cause_is_named_where_nothing_is_wrong_and_bf16_where_fp32_is_asked_about_it(session, actor):
    rounded = session.actor("tiny", name="rounded", train="tp2", rollout="dp2", dtype="bf16", optimizer=hf.AdamW(lr=1e-3))
    batch = generated(rounded, temperature=0.8)
    gap = causes(rounded.explain_gap(batch))
    assert "they agree" in gap.verdict
    assert not gap.layers
    gap = causes(actor.explain_gap(batch), "dtype")
    assert "rounded generated in bf16, this actor has fp32" in gap.verdict
    causes(actor.explain_gap(by_value(session, batch, temperature=batch["temperature"])), "dtype")
    rounded.update(batch, likelihood).wait()
    causes(rounded.explain_gap(rounded.compute_log_probs(generated(rounded))))
    rounded.release()


def test_with_one_copy_of_the_weights_none_is_named_and_what_the_rollout_did_to_it_is(session):
    shared = session.actor("tiny", name="shared", train="tp2", rollout="dp2", cpu_weights="shared", optimizer=hf.AdamW(lr=1e-3))
    batch = generated(shared, temperature=0.8)
    causes(shared.explain_gap(batch))
    shared.update(batch, likelihood).wait()
    causes(shared.explain_gap(shared.compute_log_probs(generated(shared))))
    shared.run(bend_what_arrives)
    gap = shared.explain_gap(generated(shared))
    assert gap.causes == ("weights",)
    assert "model.layers.1.mlp.down_proj.weight" in gap.verdict
    shared.release()


# ---- what was done to the batch


SAID = {
    "weights one update old": "generated after 0 updates; the trainer has taken 1",
    "weights one update old, a snapshot of then": "the trainer has taken 2; with the weights of then ",
    "other tokens, said to be old": "others were generated from, or scored",
    "weights that did not move": "had those of 3 updates, though the batch says 4: they did not move",
    "a norm changed in the rollout": "changed after they had arrived: model.layers.1.post_attention_layernorm.weight",
    "packed weights changed in the rollout": "packed kernels hide which; first seen in layer 2",
    "a layer that computes otherwise": "layer 2 of the generating engine computes otherwise",
    "temperature forgotten": "generated at 0.7; the batch says 1",
    "temperature forgotten, by value": "generated at 0.7; the batch says 1",
    "top-k forgotten": "top_k=5:",
    "top-p forgotten": "top_p=0.",
    "min_new_tokens forgotten": "min_new_tokens=8:",
    "an edited prompt": "row 1, prompt token 3: ",
    "an edited prompt, the first one gone": "which are gone",
    "an edited prompt, by value": "others were generated from, or scored",
    "text tokenised anew, by value": "tokenised anew: row 0, prompt token 13: '<eos>and' was generated from, the batch has '<eos'",
    "a chat template left out, by value": r"their text in the chat template: row 0, prompt token 13: '\n' was generated from",
    "a chat template left out": r"their text in the chat template: row 0, prompt token 13: '\n' was generated from",
    "a chat template too much, by value": "their text without the chat template: row 0, prompt token 13: its end, after 13",
    "a first token twice, by value": "with their first token once: row 0, prompt token 1: 'the ' was generated from",
    "a prefix cache that outlives an update": "behind the prefix cache",
    "a trainer that computes in bf16": "the trainer is off as bf16 rounds, the generating engine is exact",
    "a rollout with weights in bf16": "the generating engine's weights are rounded to bf16",
}


@pytest.fixture
def mended(actor):
    yield
    mend(actor)


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("what", SAID)
def test_a_planted_cause_is_named_and_no_other(session, actor, what):
    expected, plant = PLANTED[what]
    asked, batch = plant(session, actor)
    version = asked.version
    gap = causes(asked.explain_gap(batch), expected)
    assert SAID[what] in gap.verdict
    assert asked.version == version
    if what == "a norm changed in the rollout":
        off = gap.to_pandas("layers").set_index("place")["rollout"]
        assert off["layer 0"] < 1e-5 < 1e-3 < off["layer 1"]
    if what == "weights one update old":
        causes(actor.explain_gap(batch), "version")  # the weights of then are gone by now


def test_nothing_is_left_of_what_was_planted(actor):
    causes(actor.explain_gap(generated(actor)))


# ---- what is refused


def test_what_cannot_be_explained_is_refused(session, actor):
    batch = generated(actor)
    with refuses(hf.ColumnError, "explain_gap", "'rollout_log_probs'"):
        actor.explain_gap(batch.drop("rollout_log_probs"))
    with refuses(hf.ColumnError, "no response token"):
        actor.explain_gap(
            by_value(session, batch, response=hf.Ragged.of([[]] * 4, np.int32), rollout_log_probs=hf.Ragged.of([[]] * 4))
        )
    with refuses(hf.OptionError, "'causes'", "'tokens'", "'layers'"):
        actor.explain_gap(batch).to_pandas("columns")
