"""Demonstrations and pairs: the formats they take, the rows they make, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.table import Table
from hfsdk.core.turn_ends import TurnEnds
from hfsdk.session.parts import parts_of
from tests.session.scripted import ScriptedRuntime

PAIRS = {
    "prompt": ["one ", "two ", "three "], "chosen": ["good", "fine", "great"], "rejected": ["bad", "poor", "awful stuff"],
    "margin": [2.0, 3.0, 4.5], "chosen_sign": [-1, -1, 1], "rejected_sign": [1, 1, 1],
}  # fmt: skip


def zeros(completions, completion_ids):
    return [[0.0] * len(ids) for ids in completion_ids]


def texts(session, batch, name="response"):
    decode = parts_of(session).client.need_tokenizer().decode
    return [decode(list(row)).removesuffix("<eos>") for row in batch[name]]


class Normalises(ScriptedRuntime):
    """Workers that score a row by its number, and normalise scores as they are told."""

    def call(self, work):
        outcome = super().call(work)
        if work.call.method != "compute_scores":
            return outcome
        mean, std = work.orders[0].arguments.normalisation
        parts = [replace(part, handle=replace(part.handle, table=Table({"scores": ((part.rows - mean) / std).astype(np.float32)})))
                 for part in outcome.stored.parts]  # fmt: skip
        return replace(outcome, stored=replace(outcome.stored, parts=tuple(parts)))


class TestPairs:
    def test_two_rows_per_pair_the_chosen_one_first(self, session, actor):
        batch = session.pairs(PAIRS, batch_size=3, shuffle=False)[0]
        assert len(batch) == 6
        assert texts(session, batch, "prompt") == ["one ", "one ", "two ", "two ", "three ", "three "]
        assert texts(session, batch) == ["good", "bad", "fine", "poor", "great", "awful stuff"]
        assert batch["chosen"].tolist() == [1, 0] * 3
        assert batch["group"].tolist() == [0, 0, 1, 1, 2, 2]
        assert batch["margin"].tolist() == [2, 2, 3, 3, 4.5, 4.5]
        assert batch["sign"].tolist() == [-1, 1, -1, 1, 1, 1]

    def test_responses_end_with_the_models_own_token_once(self, session, actor):
        (eos,) = TurnEnds.of(parts_of(session).client.tokenizer_folder).ids
        ids = {"prompt": [[1, 2]], "chosen": [[3, 4, eos]], "rejected": [[5]]}
        batch = session.pairs(ids, batch_size=1)[0]
        assert [list(row) for row in batch["response"]] == [[3, 4, eos], [5, eos]]

    def test_the_prompt_is_what_both_begin_with(self, session, actor):
        data = {"chosen": ["a film is good"], "rejected": ["a film is gone"]}
        batch = session.pairs(data, batch_size=1)[0]
        assert texts(session, batch, "prompt") == ["a film is ", "a film is "]
        assert texts(session, batch) == ["good", "gone"]

    def test_repeats_advances_and_keeps_its_place(self, session, actor):
        pairs = session.pairs(PAIRS, batch_size=2, seed=4)
        assert texts(session, pairs[0]) == texts(session, next(pairs))
        next(pairs)
        saved = parts_of(session).saved.to_save()
        again = session.pairs(PAIRS, batch_size=2, seed=4)
        assert again.position == 0
        parts_of(session).saved.take(saved)
        assert again.position == 2
        assert len(pairs) == 2

    def test_columns_that_hfsdk_writes_are_left_out(self, session, actor):
        more = {
            "group": [7, 7, 7], "response": ["x"] * 3, "temperature": [0.5] * 3, "chosen_response": ["y"] * 3,
            "rejected_response": ["y"] * 3,
        }  # fmt: skip
        with pytest.warns(UserWarning, match="columns named group, response, temperature, chosen_response"):
            stream = session.pairs({**PAIRS, **more}, batch_size=3, shuffle=False)
        assert texts(session, stream[0])[:2] == ["good", "bad"]
        assert stream[0]["group"].tolist() == [0, 0, 1, 1, 2, 2]
        assert set(stream[0]) == {"prompt", "response", "chosen", "group", "margin", "sign"}
        assert stream.left_out == tuple(more)
        with pytest.warns(UserWarning, match="columns named prompt, response itself"):
            told = session.demonstrations({"text": ["one two"], "prompt": ["x"], "response": ["y"], "rating": [3]}, batch_size=1)
        assert set(told[0]) == {"prompt", "response", "rating"}
        assert texts(session, told[0]) == ["ne two"]

    @each("missing", [None, float("nan"), 3])
    def test_a_side_that_is_missing(self, session, actor, missing):
        with refuses(OptionError, "the rejected response of pair 1", "texts or token ids"):
            session.pairs({"chosen": ["a b", "a c"], "rejected": ["a d", missing]}, batch_size=1)

    def test_different_prompts(self, session, actor):
        data = {"chosen_prompt": ["a ", "b "], "rejected_prompt": ["a ", "c "], "chosen": ["x", "y"], "rejected": ["u", "v"]}
        with refuses(OptionError, "pair 1", "'b ' and 'c '"):
            session.pairs(data, batch_size=1)
        with refuses(OptionError, "pair 0 has no prompt", "'good film' and 'bad film'"):
            session.pairs({"chosen": ["good film"], "rejected": ["bad film"]}, batch_size=1)

    @each(
        "data, error, named",
        [
            ({"prompt": ["a"], "chosen": ["b"]}, ColumnError, ["chosen and rejected"]),
            ({**PAIRS, "chosen_note": ["x", "y", "z"]}, ColumnError, ["chosen_note", "rejected_note"]),
            ({"prompt": [""], "chosen": ["b"], "rejected": ["c"]}, OptionError, ["pair 0", "empty prompt"]),
            ({"prompt": [3], "chosen": ["b"], "rejected": ["c"]}, OptionError, ["the prompt of pair 0 is 3"]),
            ({"prompt": [], "chosen": [], "rejected": []}, OptionError, ["no rows"]),
            ({"prompt": ["a"], "chosen": ["b" * 600], "rejected": ["c"]}, OptionError, ["1 + 601 tokens", 512]),
        ],
    )
    def test_pairs_that_cannot_be_name_their_row_or_column(self, session, actor, data, error, named):
        with refuses(error, *named):
            next(session.pairs(data, batch_size=1))

    def test_max_tokens_cuts_responses(self, session, actor):
        data = {"prompt": ["abc"], "chosen": ["x" * 50], "rejected": ["y"]}
        batch = session.pairs(data, batch_size=1, max_tokens=10)[0]
        assert batch["response"].lengths.tolist() == [7, 2]

    def test_a_loss_over_pairs_needs_whole_pairs(self, session):
        session.actor("tiny")
        model = session.reward("tiny", optimizer=hf.AdamW(lr=1e-4))
        batch = session.pairs(PAIRS, batch_size=3)[0]
        with refuses(OptionError, "sets of 2 rows", "5 rows"):
            model.update(batch.take([0, 1, 2, 3, 4]), hf.BradleyTerry())


class TestDemonstrations:
    def test_prompt_and_completion(self, session, actor):
        data = {"prompt": ["ab", "cd"], "completion": ["xyz", "u"], "source": ["p", "q"]}
        batch = session.demonstrations(data, batch_size=2, shuffle=False)[0]
        assert texts(session, batch, "prompt") == ["ab", "cd"]
        assert texts(session, batch) == ["xyz", "u"]
        assert list(batch["source"]) == ["p", "q"]

    def test_of_a_text_the_first_token_is_the_prompt(self, session, actor):
        batch = session.demonstrations(["abc", "de"], batch_size=2, shuffle=False)[0]
        assert texts(session, batch, "prompt") == ["a", "d"]
        assert texts(session, batch) == ["bc", "e"]

    def test_neither(self, session, actor):
        with refuses(ColumnError, "text, messages, or prompt and completion", "has answer"):
            session.demonstrations({"answer": ["x"]}, batch_size=1)


class TestScorers:
    def test_a_frozen_one_is_not_trained(self, session):
        session.actor("tiny")
        with pytest.warns(UserWarning, match="no trained scalar head"):
            model = session.reward("tiny")
        batch = session.pairs(PAIRS, batch_size=3)[0]
        with refuses(OptionError, "reward is frozen", "session.reward(model, optimizer=hf.AdamW"):
            model.update(batch, hf.BradleyTerry())

    def test_a_function_is_not_trained(self, session, length_reward):
        with refuses(OptionError, "reward function", "trained"):
            session.reward(length_reward, optimizer=hf.AdamW(lr=1e-4))
        with refuses(OptionError, "a function, not a model", "normalised"):
            session.reward(length_reward).normalise(mean=0.0, std=1.0)

    def test_normalisation_belongs_to_the_session(self, session):
        model = session.reward("tiny", optimizer=hf.AdamW(lr=1e-4))
        assert model.normalisation == (0.0, 1.0)
        model.normalise(mean=2.0, std=4.0)
        saved = parts_of(session).saved.to_save()
        model.normalise(mean=0.0, std=1.0)
        parts_of(session).saved.take(saved)
        assert model.normalisation == (2.0, 4.0)
        for std in (0.0, float("nan"), -1.0):
            with refuses(OptionError, f"std={std}", "above 0"):
                model.normalise(mean=0.0, std=std)
        with refuses(OptionError, "a batch", "mean"):
            model.normalise()
        with pytest.warns(UserWarning, match="reward is replaced: optimizer"):
            other = session.reward("tiny", optimizer=hf.AdamW(lr=1e-3))
        assert other.normalisation == (0.0, 1.0)

    @each("given", [None, (3.0, 0.5)])
    def test_normalising_again_changes_nothing(self, given):
        """Scores that are normalised already are taken back to raw ones, whatever they were normalised by."""
        with hf.Session(runtime=Normalises()) as session:
            session.actor("tiny")
            model = session.reward("tiny", optimizer=hf.AdamW(lr=1e-4))
            samples = session.batch(prompt=[[1]] * 5, response=[[2]] * 5)
            raw = model.compute_scores(samples)["scores"]
            if given is not None:
                model.normalise(mean=given[0], std=given[1])
            for _ in range(3):
                assert model.normalise(samples) == pytest.approx((raw.mean(), raw.std(ddof=1)), rel=1e-6)
                scores = model.compute_scores(samples)["scores"]
                assert (scores.mean(), scores.std(ddof=1)) == pytest.approx((0.0, 1.0), abs=1e-6)

    def test_the_multiplier_belongs_to_the_session(self, session, length_reward):
        cost = session.cost(length_reward)
        assert cost.multiplier == 1.0
        cost.multiplier = 2.5
        saved = parts_of(session).saved.to_save()
        cost.multiplier = 3.5
        parts_of(session).saved.take(saved)
        assert cost.multiplier == 2.5
        for value in (0.0, -1.0, float("inf"), True, "x"):
            with refuses(OptionError, "multiplier", "above 0"):
                cost.multiplier = value

    def test_weights_of_a_sum(self, session, length_reward):
        for weights, named in (([1.0], "2 rewards"), ([1.0, float("nan")], "weights[1]=nan"), ([1.0, "x"], "weights[1]='x'")):
            with refuses(OptionError, named):
                session.reward([length_reward, length_reward], weights=weights)
        with refuses(OptionError, "weights", "a list"):
            session.reward(length_reward, weights=[1.0])
        total = session.reward([length_reward, length_reward], weights=[1.0, 0.5])
        assert session.models.reward is total
        assert [part.name for part in total.parts] == ["reward.lengths", "reward.lengths.1"]
        assert repr(total) == "RewardModel('reward': 1 reward.lengths + 0.5 reward.lengths.1)"
        assert session.reward([length_reward, length_reward], weights=[1.0, 0.5]) is total
        session.actor("tiny")
        batch = session.batch(prompt=[[1], [1]], response=[[104], [104, 104, 104]])
        assert total.compute_scores(batch)["scores"].tolist() == [1.5, 4.5]

    def test_a_sum_never_takes_the_place_of_its_parts(self, session, actor, length_reward):
        judge = session.reward("tiny", optimizer=hf.AdamW(lr=1e-3))
        with refuses(OptionError, "named 'reward'"):
            session.reward([judge, length_reward])
        assert session.models.reward is judge
        total = session.reward([judge, length_reward], name="total")
        with refuses(OptionError, "named 'reward'"):
            session.reward([total], name="reward")
        with refuses(OptionError, "named 'total'"):
            session.reward([total, judge], name="total")

    def test_what_a_sum_does_not_take(self, session, actor, length_reward):
        for wrong in (actor, session.cost(length_reward)):
            with refuses(OptionError, "functions"):
                session.reward([wrong, length_reward])
        with refuses(OptionError, "weights=1.0", "a list"):
            session.reward([length_reward], weights=1.0)
        for option in ({"per_token": True}, {"optimizer": hf.AdamW(lr=1e-3)}):
            with refuses(OptionError, "trained", "per token"):
                session.reward([length_reward], **option)

    def test_token_scores_do_not_outlive_their_reward(self, session, actor, length_reward):
        """Advantages that found them would reward by another function than the one that scored."""
        steps = session.reward(zeros, per_token=True, name="steps")
        batch = steps.compute_scores(actor.generate(["one", "two"], max_new_tokens=3))
        assert "token_scores" in batch
        plain = session.reward(length_reward, name="plain")
        total = session.reward([plain, steps], name="total")
        for reward in (plain, total):
            assert "token_scores" not in reward.compute_scores(batch)
            assert "scores" in reward.compute_scores(batch)

    def test_token_scores_on_a_virtual_clock(self, length_reward):
        with hf.Session.simulated("1x2 A100-80GB") as simulated:
            actor = simulated.actor("tiny")
            steps = simulated.reward(zeros, per_token=True)
            batch = steps.compute_scores(actor.generate([[1, 2]] * 4, max_new_tokens=3))
            batch = simulated.critic("tiny").compute_values(batch)
            hf.algorithms.ppo.advantages(batch, kl_coef=0.0).wait()

    def test_numbers_of_a_scorer_are_numbers(self, session, actor, length_reward):
        model, cost = session.reward("tiny", optimizer=hf.AdamW(lr=1e-3)), session.cost(length_reward)
        batch = session.batch(prompt=[[1], [2]], response=[[3], [4]], costs=[1.0, 2.0])
        with refuses(OptionError, "mean='0'", "a finite number"):
            model.normalise(mean="0", std=1.0)
        for given in ({"mean": 0.0}, {"std": 1.0}):
            with refuses(OptionError, "not both"):
                model.normalise(batch, **given)
        for name, value in (("lr", "x"), ("limit", "x"), ("limit", float("nan")), ("most", "x")):
            with refuses(OptionError, f"{name}={value!r}", "number"):
                cost.adapt_multiplier(batch, **{"limit": 0.0, "lr": 0.1, name: value})

    def test_per_token_goes_with_a_function(self, session):
        with refuses(OptionError, "per_token", "a function"):
            session.reward("tiny", per_token=True)


def test_review_pairs_differ_by_the_gap_and_stay_in_their_split():
    train, test = (hf.data.review_pairs(split, 300) for split in ("train", "test"))
    for table, split in ((train, "train"), (test, "test")):
        texts_of = set(hf.data.movie_reviews(split)["text"])
        assert set(table["chosen"]) | set(table["rejected"]) <= texts_of
        assert min(table["margin"]) >= 2.0
        assert np.allclose(np.subtract(table["chosen_rating"], table["rejected_rating"]), table["margin"], atol=1e-3)
    assert list(hf.data.review_pairs("train", 300)["chosen"]) == list(train["chosen"])
    assert list(hf.data.review_pairs("train", 300, seed=1)["chosen"]) != list(train["chosen"])
    with refuses(OptionError, "gap=9.0"):
        hf.data.review_pairs("train", 3, gap=9.0)


ASKED, TOLD, WORSE = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "assistant", "content": "Hello"}],
    [{"role": "assistant", "content": "No"}],
)


@each(
    "source",
    [{"prompt": [ASKED], "completion": [TOLD]}, {"messages": [ASKED + TOLD]}, [{"messages": np.array(ASKED + TOLD)}]],
)
def test_a_conversation_is_learned_from_its_last_message(session, actor, source):
    batch = session.demonstrations(source, batch_size=1)[0]
    asked = session.prompts([ASKED], batch_size=1)[0]
    assert batch["prompt"] == asked["prompt"]
    assert texts(session, batch) == ["Hello"]


@each(
    "source",
    [{"prompt": [ASKED], "chosen": [TOLD], "rejected": [WORSE]}, {"chosen": [ASKED + TOLD], "rejected": [ASKED + WORSE]}],
)
def test_pairs_of_conversations(session, actor, source):
    batch = session.pairs(source, batch_size=1)[0]
    asked = session.prompts([ASKED], batch_size=1)[0]
    assert [list(row) for row in batch["prompt"]] == [list(asked["prompt"][0])] * 2
    assert texts(session, batch) == ["Hello", "No"]


@each(
    "source, named",
    [
        ({"messages": [ASKED]}, ["messages of row 0", "the last the assistant's"]),
        ({"prompt": [ASKED + TOLD], "completion": [TOLD]}, ["the prompt of row 0", "ends with the assistant's message"]),
    ],
)
def test_conversations_that_cannot_be_learned_from(session, actor, source, named):
    with refuses(OptionError, *named):
        _ = session.demonstrations(source, batch_size=1)[0]


def test_a_column_of_each_side_and_one_of_both_would_be_one(session, actor):
    with refuses(ColumnError, "chosen_sign and sign"):
        session.pairs({**PAIRS, "sign": [1, 2, 3]}, batch_size=1)


def test_pairs_of_token_ids_in_arrays_answer_the_same_prompt(session, actor):
    ids = [np.array([1, 2, 3]), np.array([4, 5])]
    source = {"chosen_prompt": ids, "rejected_prompt": [i.copy() for i in ids], "chosen": ["a", "b"], "rejected": ["c", "d"]}
    assert [list(row) for row in session.pairs(source, batch_size=2, shuffle=False)[0]["prompt"]] == [[1, 2, 3]] * 2 + [[4, 5]] * 2
    with refuses(OptionError, "pair 1", "different prompts"):
        session.pairs({**source, "rejected_prompt": [ids[0], np.array([4, 6])]}, batch_size=2)
