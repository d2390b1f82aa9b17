"""Points 1 to 8 of docs/checklist.md, tokens and masks, on the real engines; transformers, one row at a time, is the reference."""

import numpy as np
import pytest
from expect import refuses
from numerics_helpers import EOS, FP32, each_row, flat, forget_gradient

import hfsdk as hf
from hfsdk.algorithms import ppo


def eos_alone(out, b):
    """The loss of end tokens alone: what it does to the weights is what they are taught by."""
    ends = (b["response"] == EOS).float()
    return -out.log_probs * ends, {"eos_log_prob": out.log_probs[b["response"] == EOS]}


def test_point_01_no_token_is_padding_and_the_model_learns_to_stop(live, plain, rows):
    """Ids 256 (pad), 257 and 258 (end) in a response are tokens like all others; the gradient of the end token is not masked."""
    batch = live.reference.compute_log_probs(live.session.batch(**rows))
    special = plain.log_probs(rows["prompt"][-1], rows["response"][-1])
    np.testing.assert_allclose(batch["ref_log_probs"][-1], special, atol=FP32)
    assert (special < -1).any(), "a constant in their place would be told apart"
    texts = ["the film is a", "dull"] * 8
    # an actor of its own: others' tests may have taught the shared one never to end
    actor = live.session.actor("tiny", name="ending", train="dp2", rollout="tp1", optimizer=hf.AdamW(lr=1e-3))
    drawn = actor.generate(texts, max_new_tokens=200, min_new_tokens=2)
    ended = [i for i, reason in enumerate(drawn["finish_reason"]) if reason == "stop"]
    assert ended, "some responses must end by themselves"
    assert all(drawn["response"][i][-1] == EOS for i in ended)
    drawn = drawn.take(ended)
    before = actor.compute_log_probs(drawn)["old_log_probs"]
    assert actor.update(drawn, eos_alone).rows[0]["grad_norm"] > 1e-3
    after = actor.compute_log_probs(drawn)["old_log_probs"]
    gain = [new[-1] - old[-1] for new, old in zip(after, before, strict=True)]
    assert np.mean(gain) > 0, "one step on the end tokens must make them likelier"
    actor.release()


def test_point_02_rows_of_any_length_do_not_move_each_others_positions(live, rows):
    """A row alone and among shorter and longer ones: the same log-probs in the trainer, the same samples from the rollout."""
    together = live.reference.compute_log_probs(live.session.batch(**rows))["ref_log_probs"]
    for i in (0, 2, 3):
        alone = live.session.batch(prompt=[rows["prompt"][i]], response=[rows["response"][i]])
        np.testing.assert_allclose(live.reference.compute_log_probs(alone)["ref_log_probs"][0], together[i], atol=1e-5)
    drawn = live.actor.generate(rows["prompt"], max_new_tokens=12, temperature=0)
    recomputed = live.actor.compute_log_probs(drawn)
    assert np.abs(flat(recomputed, "old_log_probs") - flat(drawn, "rollout_log_probs")).max() < FP32
    for i in (0, 1):
        alone = live.actor.generate([rows["prompt"][i]], max_new_tokens=12, temperature=0)
        assert alone["response"][0].tolist() == drawn["response"][i].tolist()


def test_point_03_reward_model_and_critic_see_the_prompt_and_the_response(live, judge, rows):
    batch = live.session.batch(**rows)
    scores, values = judge.reward.compute_scores(batch)["scores"], judge.critic.compute_values(batch)["values"]
    elsewhere = live.session.batch(prompt=[[p[0] ^ 1, *p[1:]] for p in rows["prompt"]], response=rows["response"])
    assert (np.abs(judge.reward.compute_scores(elsewhere)["scores"] - scores) > 1e-3).all()
    assert (np.abs(flat(judge.critic.compute_values(elsewhere), "values") - values.flat) > 1e-4).all()
    answers = [[*r[:-1], r[-1] ^ 1] for r in rows["response"]]
    answered = live.session.batch(prompt=rows["prompt"], response=answers)
    assert (np.abs(judge.reward.compute_scores(answered)["scores"] - scores) > 1e-3).all()


def test_point_04_log_probs_are_of_the_next_token_and_values_of_the_state_before_it(live, plain, judge, rows):
    batch = live.session.batch(**rows)
    found = live.reference.compute_log_probs(batch)
    np.testing.assert_allclose(flat(found, "ref_log_probs"), each_row(rows, plain.log_probs), atol=FP32)

    np.testing.assert_allclose(flat(judge.critic.compute_values(batch), "values"), each_row(rows, judge.values), atol=FP32)


def test_point_05_only_response_tokens_are_averaged(live, judge, rows):
    """The token mean of every metric and of the loss over rows of 1 to 30 tokens, in micro-batches on two ranks: over 48 tokens."""

    def both(out, b):
        return out.values, {"mean": out.values, "ones": out.values.new_ones(len(out.values))}

    row = judge.critic.forward_backward(live.session.batch(**rows), both).rows[0]
    judge.critic.run(forget_gradient)
    expected = each_row(rows, judge.values)
    assert row["num_tokens"] == len(expected) == 48
    assert row["ones"] == 1
    assert row["mean"] == pytest.approx(expected.mean(), abs=1e-5)
    assert row["loss"] == pytest.approx(expected.mean(), abs=1e-5)


def test_point_06_cut_off_responses_are_marked_and_penalised(live):
    batch = live.actor.generate(["the film is a", "dull", "one of"] * 8, max_new_tokens=60)
    reasons = np.array(list(batch["finish_reason"]))
    ends = np.array([row[-1] == EOS for row in batch["response"]])
    assert np.array_equal(reasons == "stop", ends)
    assert (reasons == "length").any()
    scored = live.critic.compute_values(live.reward.compute_scores(batch))
    plain_rewards, penalised = (ppo.advantages(scored, kl_coef=0.0, missing_eos_penalty=p)["rewards"] for p in (0.0, 1.5))
    taken = np.array([a[-1] - b[-1] for a, b in zip(plain_rewards, penalised, strict=True)])
    np.testing.assert_allclose(taken, np.where(ends, 0.0, 1.5), atol=1e-6)


def test_point_07_responses_end_at_the_stop_token_and_the_score_is_read_at_the_last_token(live, judge, rows):
    batch = live.actor.generate(["the film is a", "dull", "one of"] * 4, max_new_tokens=40, stop_token_ids=[ord("e")])
    for tokens, reason in zip(batch["response"], batch["finish_reason"], strict=True):
        assert not {EOS, ord("e")} & set(tokens[:-1].tolist())
        assert (tokens[-1] in (EOS, ord("e"))) == (reason == "stop")
    assert "stop" in list(batch["finish_reason"])

    long = live.actor.generate(["the film is a", "dull", "one of"] * 8, max_new_tokens=120)
    ended = [row.tolist() for row in long["response"] if EOS in row]
    assert ended, "some must end by themselves, else nothing is seen of it"
    assert all(row.index(EOS) == len(row) - 1 for row in ended), "the end token is kept, and nothing stands behind it"

    scores = judge.reward.compute_scores(live.session.batch(**rows))["scores"]
    np.testing.assert_allclose(scores, each_row(rows, judge.score), atol=FP32)
    closed = rows | {"response": [[*row, EOS] for row in rows["response"]]}
    at_the_end = judge.reward.compute_scores(live.session.batch(**closed))["scores"]
    np.testing.assert_allclose(at_the_end, each_row(closed, judge.score), atol=FP32)
    assert np.abs(np.asarray(at_the_end) - np.asarray(scores)).max() > 1e-4, "of the end token, not of the one before it"


def test_point_08_long_prompts_are_refused_not_cut(live):
    """At the call, naming the row; a stream cuts only where it is told to, keeping the end."""
    with refuses(hf.OptionError, "sample 1", 505, 513, "tiny", 512):
        live.actor.generate([[65] * 20, [65] * 505], max_new_tokens=8)
    words = " ".join(f"w{i}" for i in range(200))
    with refuses(hf.OptionError, "prompt 0", 889):
        live.session.prompts([words], batch_size=1)
    cut = live.session.prompts([words], batch_size=1, max_prompt_tokens=50)[0]
    assert bytes(cut["prompt"][0].tolist()).decode() == words[-50:]
