"""A suggested learning rate is ten times the model's own where adapters alone are trained; a given one stays."""

import pytest

import hfsdk as hf


@pytest.mark.parametrize("learns", ["policy", "values", "preferences"])
def test_adapters_take_ten_times_the_rate_of_their_model(learns):
    whole, adapters = (hf.AdamW().for_model(135_000_000, learns, adapters=one) for one in (False, True))
    assert adapters.lr == pytest.approx(10 * whole.lr)
    assert adapters.warmup_steps == whole.warmup_steps > 0
    given = hf.AdamW(lr=1e-4).for_model(135_000_000, learns, adapters=True)
    assert (given.lr, given.warmup_steps) == (1e-4, 0)
