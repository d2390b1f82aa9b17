"""Of a pair of reviews the one that people rated higher is the chosen one, by at least the gap asked for."""

import hfsdk as hf


def test_the_chosen_review_is_rated_higher_by_the_gap():
    pairs = hf.data.review_pairs("test", 50, gap=3.0)
    margins = [a - b for a, b in zip(pairs["chosen_rating"], pairs["rejected_rating"], strict=True)]
    assert min(margins) >= 3.0
    assert [round(margin, 3) for margin in margins] == list(pairs["margin"])
    assert set(pairs["chosen"]).isdisjoint(pairs["rejected"])
