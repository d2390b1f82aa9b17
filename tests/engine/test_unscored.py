"""A sample that was not scored: its mark, and that no algorithm's advantages, statistics or plan has a trace of it."""

import copy
import itertools
import pickle

import numpy as np
import torch
from expect import refuses

from hfsdk.algorithms import grpo, ppo, reinforce_pp, remax, rloo, safe_rlhf
from hfsdk.algorithms.filtering import informative_rows
from hfsdk.algorithms.step import Statistics
from hfsdk.core.errors import ColumnError, RewardFunctionError
from hfsdk.core.microbatch import plan_update
from hfsdk.core.table import Ragged, Table
from hfsdk.core.unscored import NOT_SCORED, is_unscored, scored_rows, unscored_rows
from hfsdk.engine.process.tasks import check_scores
from hfsdk.models.reward import WeightedScores

LENGTHS = [3, 1, 4, 2, 5, 2]
ADVANTAGES = [
    ppo.Advantages(kl_coef=0.1), ppo.Advantages(kl_coef=0.1, whiten_rewards=True, score_clip=0.5), grpo.Advantages(),
    grpo.Advantages(scale="batch"), grpo.Advantages(increase_variance=True), rloo.Advantages(kl_coef=0.1),
    remax.Advantages(kl_coef=0.1), reinforce_pp.Advantages(kl_coef=0.1), safe_rlhf.Advantages(kl_coef=0.1, multiplier=1.5),
]  # fmt: skip


def table_of(scores):
    rng = np.random.default_rng(0)
    columns = {
        name: Ragged.from_lengths(rng.normal(size=sum(LENGTHS)).astype(np.float32), LENGTHS)
        for name in ("response", "values", "cost_values", "old_log_probs", "ref_log_probs", "rollout_log_probs", "returns")
    }
    numbers = {name: rng.normal(size=6).astype(np.float32) for name in ("costs", "baseline_scores")}
    group = np.array([0, 0, 0, 1, 1, 1])
    return Table({**columns, **numbers, "group": group, "scores": np.asarray(scores, np.float32), "finish_reason": ["stop"] * 6})


SCORES = [1.0, 2.0, 4.0, -1.0, 0.5, 3.0]


def marked(rows, column="scores"):
    table = table_of(SCORES)
    numbers = np.array(table[column])
    numbers[rows] = NOT_SCORED
    return table.with_columns({column: numbers})


def test_the_mark_is_no_nan_that_arithmetic_makes():
    with np.errstate(invalid="ignore"):
        made = np.array([np.nan, np.inf - np.inf, np.float32(0) / np.float32(0), np.log(np.float32(-1)), 1.0], np.float32)
    assert not is_unscored(made).any()
    assert not is_unscored(made.astype(np.float64)).any()
    assert not is_unscored(np.arange(3)).any()


def test_the_mark_goes_where_its_column_goes():
    column = np.array([1.0, NOT_SCORED, 3.0], np.float32)
    wide = column.astype(np.float64)
    for same in (
        column, -column, wide, wide.astype(np.float32), column * 0.1 + 2, torch.tensor(column).double().numpy(), column[::-1][::-1],
        pickle.loads(pickle.dumps(column)), copy.deepcopy(column), np.asarray([float(x) for x in column]),
        np.asarray(list(column)), np.concatenate([column[:1], column[1:]]),
    ):  # fmt: skip
        assert unscored_rows(same).tolist() == [1]
    assert unscored_rows(Ragged.from_lengths(column, [0, 1, 0, 1, 1])).tolist() == [3]
    assert unscored_rows(["a", None]).tolist() == []


def test_advantages_are_those_of_the_batch_without_it():
    for advantages, out in itertools.product(ADVANTAGES, ([0], [2, 4], [3, 4, 5], [1, 2])):
        kept = [row for row in range(6) if row not in out]
        table = marked(out)
        found, wanted = advantages(table), advantages(table_of(SCORES).take(kept))
        assert set(found) == set(advantages.writes), (advantages, out)
        for name, column in found.items():
            assert column.take(kept) == wanted[name], (advantages, out, name)
            assert is_unscored(column.take(out).flat).all(), (advantages, out, name)


def test_a_cost_or_a_baseline_that_is_missing_leaves_the_sample_out_too():
    for advantages, column in ((ADVANTAGES[-1], "costs"), (ADVANTAGES[6], "baseline_scores")):
        found = advantages(marked([2], column))
        wanted = advantages(table_of(SCORES).take([0, 1, 3, 4, 5]))
        assert found["advantages"].take([0, 1, 3, 4, 5]) == wanted["advantages"]


def test_a_batch_without_any_score_is_refused():
    for advantages in ADVANTAGES:
        with refuses(ColumnError, "none of the 6 samples", "None", "reward.probe"):
            advantages(marked(list(range(6))))


def test_another_nan_stays_refused_beside_it():
    table = marked([0])
    for bad, advantages in itertools.product((np.nan, np.inf), ADVANTAGES):
        scores = np.array(table["scores"])
        scores[3] = bad
        with refuses(ColumnError, "'scores'", bad):
            advantages(table.with_columns({"scores": scores}))


def test_statistics_of_scores_are_those_of_the_scored():
    numbers = Statistics(groups=True, costs=True)(marked([0, 4]))
    judged = Statistics(groups=True, costs=True)(table_of(SCORES).take([1, 2, 3, 5]))
    whole = Statistics(groups=True, costs=True)(table_of(SCORES))
    assert numbers["not_scored"] == 2
    assert "not_scored" not in whole
    for name in ("score_mean", "score_std", "cost_mean", "identical_groups", "explained_variance"):
        assert numbers[name] == judged[name], name
    for name in ("kl_mean", "response_tokens_mean", "rollout_gap_max"):  # of what was generated, whoever scored it
        assert numbers[name] == whole[name], name


def test_filtering_compares_the_scored_alone():
    table = marked([2, 3]).with_columns({"scores": np.array([1, 1, NOT_SCORED, NOT_SCORED, 1, 2], np.float32)})
    assert informative_rows(table) == [4, 5]


def test_a_sum_of_rewards_leaves_out_a_part_that_gave_none_and_a_sample_that_failed():
    """As TRL's nansum over the functions; where all gave none there is no score, and where one failed its part is not known."""
    columns = {"a": np.array([1, NOT_SCORED, 3, 5], np.float32), "b": np.array([NOT_SCORED, NOT_SCORED, 2, NOT_SCORED], np.float32)}
    table = Table({**columns, "why": np.array(["", "", "", "sample 3 took longer than 1 s"])})
    scores = WeightedScores(("a", "b"), (2.0, 0.5))(table)["scores"]
    assert scores[[0, 2, 3]].tolist() == [2.0, 7.0, 10.0]
    assert unscored_rows(scores).tolist() == [1]
    assert unscored_rows(WeightedScores(("a", "b"), (2.0, 0.5), ("why",))(table)["scores"]).tolist() == [1, 3]


def test_a_nan_that_a_part_computed_stays_one_in_a_sum():
    table = Table({"a": np.array([np.nan], np.float32), "b": np.array([1], np.float32)})
    scores = WeightedScores(("a", "b"), (1.0, 1.0))(table)["scores"]
    assert np.isnan(scores).all()
    assert not len(unscored_rows(scores))


def test_the_mean_of_a_part_is_over_the_samples_that_it_scores():
    own = {"scores_of_maths": np.array([1, NOT_SCORED, 3, NOT_SCORED, 5, NOT_SCORED], np.float32)}
    none = {"scores_of_code": np.full(6, NOT_SCORED, np.float32)}
    numbers = Statistics(parts=("scores_of_maths", "scores_of_code"))(table_of(SCORES).with_columns(own | none))
    assert numbers["score_mean_of_maths"] == 3.0
    assert "score_mean_of_code" not in numbers
    assert not any(np.isnan(number) for number in numbers.values())


def test_none_is_not_scored_and_nan_is_refused():
    assert unscored_rows(np.asarray(check_scores([1.0, None, 2], "f", 3), np.float32)).tolist() == [1]
    with refuses(RewardFunctionError, "f returned nan", "sample 1", "or None"):
        check_scores([None, float("nan")], "f", 2)


def test_an_update_is_planned_as_if_the_batch_were_without_it():
    for (together, mini_batches), dp in itertools.product(((1, 1), (1, 2), (2, 1)), (1, 2)):
        check_plan(together, mini_batches, dp)


def check_plan(together, mini_batches, dp):
    total, response = [9, 8, 3, 7, 5, 6], [4, 5, 1, 2, 3, 3]
    kept = [0, 1, 3, 4, 5]
    whole = [0, 1, 4, 5] if together == 2 else kept
    found = plan_update(total, response, dp, 2, mini_batches, 12, 7, together=together, rows=kept)
    wanted = plan_update([total[i] for i in whole], [response[i] for i in whole], dp, 2, mini_batches, 12, 7, together=together)
    for mine, same in zip(found, wanted, strict=True):
        assert (mine.num_tokens, mine.num_rows) == (same.num_tokens, same.num_rows)
        assert mine.rows == tuple(whole[row] for row in same.rows)
        for rank in range(dp):
            assert mine.passes.rows_of(rank) == tuple(whole[row] for row in same.passes.rows_of(rank))


def test_fewer_scored_rows_than_mini_batches_are_one_each():
    assert len(plan_update([5, 5, 5, 5], [2, 2, 2, 2], 1, 1, 3, 12, 0, rows=[1, 2])) == 2


def test_scored_rows():
    assert scored_rows({"x": np.array([1, NOT_SCORED, 2], np.float32), "y": ["a", None, "c"]}, 3).tolist() == [0, 2]
    assert scored_rows({}, 0).tolist() == []
