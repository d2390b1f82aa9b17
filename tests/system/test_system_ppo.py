"""One PPO step by hand on real engines: what the columns hold, when weights move, what was recorded."""

import numpy as np
import pytest
from system_helpers import check_works, gap, ppo_batch, ppo_step

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.core.batch import PER_TOKEN

EOS = 258
RAGGED = {
    "prompt": "int32", "response": "int32", "rollout_log_probs": "float32", "old_log_probs": "float32",
    "ref_log_probs": "float32", "values": "float32", "rewards": "float32", "advantages": "float32", "returns": "float32",
}  # fmt: skip


def spans_of(roles, pending, name):
    """The spans of this name that workers recorded in a call."""
    ids = set(pending.call_ids)
    return [s for s in roles.session.trace[:].spans if s.call_id in ids and s.name == name and s.device is not None]


def test_columns_of_a_step(live):
    batch = ppo_batch(live)
    table = batch.table()
    for name, dtype in RAGGED.items():
        assert str(table[name].dtype) == dtype, name
        assert np.isfinite(table[name].flat).all(), name
        if name != "prompt":
            assert np.array_equal(table[name].lengths, table["response"].lengths), name
    assert str(table["scores"].dtype) == "float32"
    assert [len(c) for c in table.values()] == [16] * len(table)
    lengths = table["response"].lengths
    assert lengths.min() >= 1
    assert lengths.max() <= 12
    for row, reason, tokens in zip(range(16), table["finish_reason"], table["response"], strict=True):
        assert reason in ("stop", "length")
        assert (reason == "stop") == (tokens[-1] == EOS), row
        assert EOS not in tokens[:-1]
        assert reason == "stop" or len(tokens) == 12
    assert set(table["policy_version"]) == {live.actor.version}
    assert set(table["temperature"]) == {1.0}
    assert list(table["group"]) == list(range(16))
    assert list(table["position"]) == list(range(16))
    decoded = live.reward.compute_scores(batch)["scores"]
    assert len({row.sum() for row in table["response"]}) > 8, "responses should differ"
    assert np.array_equal(decoded, table["scores"])


def test_first_mini_batch_has_ratio_one(live):
    step = ppo_step(live)
    first = step.actor.rows[0]
    assert first["ratio"] == pytest.approx(1, abs=1e-5)
    assert first["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert first["clip_fraction"] == 0
    assert abs(first["approx_kl"]) < 1e-6
    assert [row["mini_batch"] for row in step.actor.rows] == [0, 1]
    assert sum(row["num_samples"] for row in step.actor.rows) == 16
    assert sum(row["num_tokens"] for row in step.actor.rows) == step.batch["response"].lengths.sum()
    assert step.actor.rows[1]["ratio_max"] != first["ratio_max"], "the second mini-batch sees new weights"


def test_rollout_takes_each_update_once(live):
    def generate(k):
        return live.actor.compute_log_probs(live.actor.generate(live.prompts[k], max_new_tokens=6)).wait()

    before = live.actor.version
    first, second = generate(0), generate(1)
    assert spans_of(live, second, "reshard") == []
    ppo_step(live, 2).actor.wait()
    assert live.actor.version == before + 2
    third, fourth = generate(0), generate(1)
    assert sorted(s.rank for s in spans_of(live, third, "reshard")) == [0, 1]
    assert spans_of(live, fourth, "reshard") == []
    assert [set(b["policy_version"]) for b in (first, second, third, fourth)] == [{before}] * 2 + [{before + 2}] * 2
    assert max(gap(b) for b in (first, second, third, fourth)) <= 1e-4
    assert not np.array_equal(first["rollout_log_probs"].flat[:20], third["rollout_log_probs"].flat[:20])


def test_halves_of_an_update(live):
    batch = ppo_batch(live)
    before = live.actor.version
    half = live.actor.forward_backward(batch, ppo.PolicyLoss())
    assert half.rows[0]["ratio"] == half.mean("ratio") == pytest.approx(1, abs=1e-4)
    norm = live.actor.grad_norm
    assert norm > 0
    live.actor.forward_backward(batch, ppo.PolicyLoss()).wait()
    assert live.actor.grad_norm == pytest.approx(2 * norm, rel=1e-4)
    row = live.actor.step().rows[0]
    assert row["grad_norm"] == pytest.approx(2 * norm, rel=1e-4)
    assert live.actor.version == before + 1
    check_works(live)


def test_trace_and_dataflow_of_a_step(live):
    passed = live.session.dataflow.snapshot().controller_bytes  # what tests brought here from ranks
    live.session.train(hf.PPO(max_new_tokens=8, mini_batches=2), live.prompts, steps=1, progress=False)
    spans, flow = list(live.session.trace), live.session.dataflow
    assert all(s.duration_s is not None for s in spans)
    for device in (0, 1):
        mine = [s for s in spans if s.device == device]
        assert {"prefill", "decode", "forward", "backward", "optimizer", "fetch"} <= {s.name for s in mine}
        assert {s.role for s in mine} == {"actor", "critic", "reference"}
        for child in (s for s in mine if s.parent):
            outer = [s for s in mine if s.name == child.parent and s.call_id == child.call_id]
            assert any(o.start_ns <= child.start_ns for o in outer), child
    calls = [(s.role, s.name) for s in spans if s.device is None]
    assert ("reward", "compute_scores") in calls
    assert ("actor", "update") in calls
    by_name = {str(call): call for call in flow}
    assert next(iter(flow)).phase == "generation"
    assert by_name["actor.update"].phase == by_name["critic.update"].phase == "learning"
    edges = {(e.source, e.target): set(e.columns) for e in flow.edges}
    generate, update = by_name["actor.generate"].id, by_name["actor.update"].id
    assert edges[generate, by_name["actor.compute_log_probs"].id] == {"response", "temperature"}
    assert edges[by_name["actor.compute_log_probs"].id, update] == {"old_log_probs"}
    assert edges[by_name["session.map"].id, update] >= {"advantages", "returns"}
    assert "test_system_ppo.py, line" in by_name["actor.generate"].line
    check_bytes_are_those_that_were_mapped(flow.snapshot())
    assert flow.snapshot().controller_bytes == passed, "no column passes through the controller"


def check_bytes_are_those_that_were_mapped(flow):
    """What the edges say a rank reads is what it measured: beside values it maps an offset of 8 bytes per row and one more."""
    checked = 0
    for call in flow.calls:
        for rank, measured in flow.runs[call.id].fetched.items():
            mine = [(e, share) for e in flow.edges if e.target == call.id for share in e.transfer.shares if rank in share.ranks]
            counted = sum(piece.num_bytes for _, share in mine for piece in share.pieces)
            rows = max(sum(piece.rows for piece in share.pieces) for _, share in mine)
            ragged = sum(name in ("prompt", "response", *PER_TOKEN) for e, _ in mine for name in e.columns)
            assert measured == counted + 8 * (rows + 1) * ragged, (call, rank)
            checked += 1
    assert checked >= 10


def test_few_rows_and_rows_in_any_order(live):
    """One sample on two data-parallel ranks leaves one of them without work; rows taken twice and mixed arrive as they say."""
    batch = live.actor.generate(live.prompts[0][:1], max_new_tokens=5)
    batch = live.actor.compute_log_probs(batch)
    batch = live.critic.compute_values(live.reference.compute_log_probs(live.reward.compute_scores(batch)))
    batch = ppo.advantages(batch, whiten=False)
    rows = live.actor.update(batch, ppo.PolicyLoss()).rows
    assert rows[0]["num_samples"] == 1
    assert gap(batch) <= 1e-4
    assert isinstance(live.actor.generate("hello ", max_new_tokens=3).text()[0], str)

    batch, rows = live.actor.generate(live.prompts[0], max_new_tokens=6), [5, 5, 0, 15, 3]
    mixed, whole = live.actor.compute_log_probs(batch.take(rows)), live.actor.compute_log_probs(batch)
    assert gap(mixed) <= 1e-4
    for at, row in enumerate(rows):
        assert np.allclose(mixed["old_log_probs"][at], whole["old_log_probs"][row], atol=1e-5)


def test_sampling_options_and_what_a_seed_decides(live):
    texts = ["the film is a", "dull"]
    greedy = [live.actor.generate(texts, max_new_tokens=8, temperature=0).text() for _ in range(2)]
    assert greedy[0] == greedy[1]
    stopped = live.actor.generate(live.prompts[0], max_new_tokens=12, stop=" ").wait()
    for text, reason, tokens in zip(stopped.text(), stopped["finish_reason"], stopped["response"], strict=True):
        assert reason == "length" or text.endswith(" ") or tokens[-1] == EOS
    exact = live.actor.generate(texts, max_new_tokens=9, ignore_eos=True)
    assert list(exact["response"].lengths) == [9, 9]

    def sample(prompts=live.prompts[0], **options):
        return [tuple(row) for row in live.actor.generate(prompts, max_new_tokens=8, **options)["response"]]

    one = sample(seed=1)
    assert sample(seed=1) == one
    assert sample(seed=2) != one
    three = sample(seed=1, n=3)
    assert three[::3] == one, "copy 0 of three is the only copy of one"
    assert sum(len(set(three[i : i + 3])) for i in range(0, 48, 3)) > 40, "copies differ"
    rows = [11, 2, 7]
    assert sample(live.prompts[0].take(rows), seed=1) == [one[row] for row in rows], "not the place in the batch, nor the rank"


def test_two_steps_by_the_algorithm(live):
    seen = []
    run = live.session.train(
        hf.PPO(max_new_tokens=8), live.prompts, steps=2, metrics=[lambda b: len(b)], stop=seen.append, progress=False
    )
    assert [row["step"] for row in run.rows] == list(range(run.rows[0]["step"], run.rows[0]["step"] + 2))
    assert len(seen) == 2
    assert {"score_mean", "seconds"} <= set(run.history.columns)
    assert len(live.session.history) >= 2
