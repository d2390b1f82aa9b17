"""Lengths of simulated responses: independent over seeds, places, copies and what is drawn, as their distribution says."""

import math

import numpy as np
import pytest

import hfsdk as hf
from hfsdk.core.roles import Sampling
from hfsdk.engine.worker.role_engine import sample_seed
from hfsdk.models.handle import stable_seed

SEEDS, PROMPTS, COPIES, MOST = 300, 64, 4, 1000
SAMPLING = Sampling(max_new_tokens=MOST)
WITHIN = 4 / math.sqrt(2 * SEEDS)
"""Four relative standard errors of a standard deviation over so many seeds."""


def drawn(kind, seeds, first=0):
    """Return the lengths of a batch for each seed, [seeds, rows]."""
    positions, copies = np.repeat(np.arange(first, first + PROMPTS), COPIES), np.tile(np.arange(COPIES), PROMPTS)
    lengths = hf.ResponseLengths(kind=kind)
    return np.array([lengths.draw(SAMPLING, seed, positions, copies) for seed in seeds], dtype=np.float64)


@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
@pytest.mark.parametrize("seeds", [range(SEEDS), range(2**40, 2**40 + SEEDS), [64 * k for k in range(SEEDS)]])
def test_means_over_seeds_vary_as_those_of_independent_draws(kind, seeds):
    """Their standard deviation is sigma / sqrt(rows): none if all seeds deal the same lengths in another order."""
    lengths = drawn(kind, seeds)
    theory = lengths.std() / math.sqrt(lengths.shape[1])
    assert lengths.mean(axis=1).std() == pytest.approx(theory, rel=WITHIN)
    of_copies = lengths.reshape(len(lengths), PROMPTS, COPIES).mean(axis=(0, 1))
    assert of_copies.std() < 4 * lengths.std() / math.sqrt(SEEDS * PROMPTS)


def test_uniform_lengths_are_uniform():
    lengths = drawn("uniform", range(SEEDS))
    assert lengths.mean() == pytest.approx((MOST + 1) / 2, rel=0.01)
    assert lengths.std() == pytest.approx(MOST / math.sqrt(12), rel=0.01)


def test_neighbouring_seeds_and_batches_do_not_follow_each_other():
    lengths = drawn("uniform", range(SEEDS))
    later = drawn("uniform", range(SEEDS), first=PROMPTS)
    for other in (np.roll(lengths, 1, axis=0), np.roll(lengths, COPIES, axis=1), np.roll(lengths, 1, axis=1), later):
        assert abs(np.corrcoef(lengths.ravel(), other.ravel())[0, 1]) < 4 / math.sqrt(lengths.size)


@pytest.mark.parametrize(
    ("hashed", "most"),
    [(sample_seed, 2**62), (lambda seed, position, copy: stable_seed(seed, position, copy), 2**31)],
    ids=["sample_seed", "stable_seed"],
)
def test_hashes_of_several_things_are_independent_over_each(hashed, most):
    """No two of a grid are the same, as they would be if two words met unmixed, and means over each word vary as they should."""
    grid = np.array([[[hashed(s, p, c) for c in range(8)] for p in range(16)] for s in range(16)], dtype=np.float64)
    assert len(np.unique(grid)) == grid.size
    for axis in range(3):
        means = grid.mean(axis=tuple({0, 1, 2} - {axis})) / most
        assert np.abs(means - 0.5).max() < 5 / math.sqrt(12 * grid.size / grid.shape[axis])
