"""Bands hold what they say of values that they were not made of: many draws of known distributions, against binomial theory."""

import math

import numpy as np
import pytest

from hfsdk.planner.perf.bands import SHARE, bands_of, gap, grouped_band, kept_by, order_band, spread_band, student_quantile

DRAWS = 3000


def normal(rng, count):
    return rng.normal(0.2, 0.3, count)


def skewed(rng, count):
    return rng.exponential(0.4, count) - 0.1


def heavy(rng, count):
    return rng.standard_t(2, count) * 0.2


def within(share, draws=DRAWS, sigmas=4.5):
    """What a share may differ by from its expectation, of so many draws."""
    return sigmas * math.sqrt(share * (1 - share) / draws)


@pytest.mark.parametrize("draw", [normal, skewed, heavy])
@pytest.mark.parametrize("count", [9, 14, 19, 60])
def test_a_band_of_some_values_holds_the_next_one_as_often_as_it_says_whatever_the_distribution(draw, count):
    rng, held = np.random.default_rng([9, count]), 0
    for _ in range(DRAWS):
        *known, following = draw(rng, count + 1)
        low, high = order_band(known)
        held += low <= following <= high
    exact = (count + 1 - 2 * gap(count)) / (count + 1)
    assert SHARE <= exact < SHARE + 0.1
    assert held / DRAWS == pytest.approx(exact, abs=within(exact))


def test_quantiles_of_the_values_themselves_hold_fewer():
    """Why the ends are further out: the tenth and the ninetieth percentile of nine values are inside of them."""
    rng, held = np.random.default_rng(1), 0
    for _ in range(DRAWS):
        *known, following = normal(rng, 10)
        low, high = np.quantile(known, (0.1, 0.9))
        held += low <= following <= high
    assert held / DRAWS < SHARE - 0.05


def test_too_few_values_have_no_band_by_their_order():
    assert order_band(range(8)) is None
    assert order_band(range(9)) == (0, 8)
    assert order_band(range(19)) == (1, 17)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 8])
def test_a_kind_with_few_values_is_held_as_often_where_kinds_are_as_all_kinds_suggest(count):
    """Kinds have a middle and a spread of their own, drawn as the band assumes: then its probability is exact."""
    rng, held = np.random.default_rng([5, count]), 0
    for _ in range(DRAWS):
        sigma = 0.25 * math.sqrt(2 / rng.chisquare(2))
        middle = rng.normal(0.0, sigma)
        *known, following = rng.normal(middle, sigma, count + 1)
        low, high = spread_band(known, 0.25)
        held += low <= following <= high
    assert held / DRAWS == pytest.approx(SHARE, abs=within(SHARE))


def test_student_quantiles_are_those_of_the_tables():
    for freedom, wanted in ((2, 1.886), (3, 1.638), (4, 1.533), (6, 1.440), (10, 1.372), (30, 1.310), (120, 1.289)):
        assert student_quantile(0.9, freedom) == pytest.approx(wanted, abs=1.5e-3)
        assert student_quantile(0.1, freedom) == pytest.approx(-wanted, abs=1.5e-3)


def test_a_band_of_groups_holds_a_group_that_was_not_there():
    """Values of a group are alike; taken one by one they would say too little of the next group."""
    rng, apart, together = np.random.default_rng(3), 0, 0
    for _ in range(DRAWS):
        middles = rng.normal(0.0, 0.3, 7)
        *known, following = (rng.normal(middle, 0.05, 12) for middle in middles)
        low, high = grouped_band(dict(enumerate(known)))
        apart += low <= following[0] <= high
        low, high = order_band(np.concatenate(known).tolist())
        together += low <= following[0] <= high
    assert apart / DRAWS >= SHARE - within(SHARE)
    assert together / DRAWS < SHARE - within(SHARE)


def test_groups_count_the_same_however_many_values_they_have():
    many = {number: [float(number)] * (100 if number == 8 else 1) for number in range(9)}
    assert grouped_band(many) == grouped_band({number: [float(number)] for number in range(9)})
    assert sum(grouped_band(many)) == pytest.approx(8.0), "around the middle of the groups"
    assert grouped_band({number: [0.0] for number in range(2)}) is None


def test_what_was_left_out_in_turn_is_counted():
    values = {"a": list(np.linspace(-1, 1, 11)), "b": [0.0, 9.0]}
    kept = kept_by(values)
    assert (kept["a"].held, kept["a"].num_rows) == (9, 11), "all but the ends, which lie beyond the others"
    assert kept["b"].num_rows == 2
    assert (kept[""].held, kept[""].num_rows) == (11, 13), "of all together the highest and the lowest are not"
    assert str(kept["a"]) == "9 of 11"


def test_kinds_without_values_have_the_band_of_what_others_show():
    bands = bands_of({"a": [0.1, -0.1, 0.2], "b": []})
    low, high = bands["b"]
    assert low == pytest.approx(-high)
    assert high > 0.1
    low, high = bands_of({"a": []})["a"]
    assert low < -0.2 < 0.2 < high, "nothing known is not taken for perfection"
