import itertools

import numpy as np
from expect import refuses
from rows import every_row

from hfsdk.core.errors import OptionError
from hfsdk.core.microbatch import plan_pass, plan_update
from hfsdk.core.protocol import balanced_split


def lengths(n, seed=0, low=1, high=40):
    return np.random.default_rng(seed).integers(low, high, n)


def test_pass_covers_every_row_once_with_equal_counts():
    with every_row() as row:
        for n, dp in itertools.product([1, 5, 32], [1, 2, 3, 7]):
            with row(n, dp):
                check_pass_covers_every_row_once_with_equal_counts(n, dp)


def check_pass_covers_every_row_once_with_equal_counts(n, dp):
    total = lengths(n)
    plan = plan_pass(total, dp, max_tokens=64)
    rows = [row for micro in plan.micro_batches for part in micro for row in part]
    assert sorted(rows) == list(range(n))
    assert {len(micro) for micro in plan.micro_batches} == {plan.num_micro_batches}
    for micro in plan.micro_batches:
        for part in filter(None, micro):
            assert len(part) == 1 or sum(total[list(part)]) <= 64


def test_pass_balances_tokens():
    total = lengths(64)
    plan = plan_pass(total, 4, max_tokens=200)
    loads = [sum(total[list(plan.rows_of(d))]) for d in range(4)]
    assert max(loads) - min(loads) <= total.max()
    assert max(loads) / np.mean(loads) < 1.05


def test_long_row_runs_alone_and_empty_batch_is_fine():
    plan = plan_pass([100, 3, 3], 1, max_tokens=10)
    assert plan.micro_batches == (((0,), (1, 2)),)
    assert plan_pass([], 2, 10).micro_batches == ((), ())


def test_drawing_in_the_module():
    assert plan_pass([9, 8, 3, 3, 2], 2, 10).micro_batches == (((0,), (3,)), ((1,), (2, 4)))


def test_mini_batches_do_not_depend_on_dp():
    total, response = lengths(21, low=10), lengths(21, seed=1, low=0, high=10)
    plans = [plan_update(total, response, dp, 2, 4, 64, seed=3) for dp in (1, 2, 5)]
    for one, *others in zip(*plans, strict=True):
        assert all(o.rows == one.rows and o.num_tokens == one.num_tokens for o in others)
    for epoch in (0, 1):
        mine = [p for p in plans[0] if p.epoch == epoch]
        assert sorted(row for p in mine for row in p.rows) == list(range(21))
        assert sum(p.num_tokens for p in mine) == response.sum()
        assert {p.num_rows for p in mine} == {5, 6}
    assert plans[0][0].rows != plans[0][4].rows
    again = plan_update(total, response, 1, 2, 4, 64, seed=3)
    other = plan_update(total, response, 1, 2, 4, 64, seed=4)
    assert again == plans[0] != other
    assert plan_update(total, response, 1, 1, 1, 64, 0, shuffle=False)[0].rows == tuple(range(21))


def test_too_many_mini_batches_names_both_numbers():
    with refuses(OptionError, "mini_batches=5", "4 rows"):
        plan_update([3] * 4, [1] * 4, 1, 1, 5, 64, 0)
    with refuses(OptionError, "epochs=0"):
        plan_update([3] * 4, [1] * 4, 1, 0, 1, 64, 0)


def test_micro_batches_are_as_few_as_the_spread_allows():
    def one_by_one(lengths, most):
        """Try every number of micro-batches from the least that the tokens fill."""
        count = -(-int(lengths.sum()) // most)
        while any(lengths[part].sum() > most for part in balanced_split(lengths, count)):
            count += 1
        return count

    rng = np.random.default_rng(0)
    for _ in range(200):
        most = int(rng.integers(2, 500))
        lengths = rng.integers(1, most, rng.integers(1, 60))
        plan = plan_pass(lengths, 1, most)
        assert plan.num_micro_batches == one_by_one(np.sort(lengths)[::-1], most)
        assert max(lengths[list(rows)].sum() for rows in plan.micro_batches[0]) <= most
