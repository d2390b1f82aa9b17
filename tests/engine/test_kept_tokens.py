"""The distribution over what top-k, top-p and ``min_new_tokens`` leave, against a naive one token by token."""

import numpy as np
import pytest
from rows import every_row

torch = pytest.importorskip("torch")

from hfsdk.engine.training.vocab_parallel import POSITIONS, KeptTokens, keep  # noqa: E402


def naive(logits, kept):
    """As vLLM draws: no ends, then the k likeliest, then the likeliest of them that have probability p."""
    found = np.full(len(logits), -np.inf)
    allowed = [v for v in np.argsort(-logits, kind="stable") if v not in kept.without][: kept.top_k or None]
    weights = np.exp(logits[allowed] - logits[allowed].max())
    before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    chosen = [v for v, sum_before in zip(allowed, before, strict=True) if sum_before < kept.top_p]
    found[chosen] = logits[chosen] - np.log(np.exp(logits[chosen]).sum())
    return found


def test_what_is_kept_is_what_a_naive_sampler_draws_from():
    with every_row() as row:
        for kept in [
            KeptTokens(top_k=5),
            KeptTokens(top_p=0.7),
            KeptTokens(top_k=8, top_p=0.5),
            KeptTokens(without=(3, 7)),
            KeptTokens(top_k=100),
        ]:
            with row(kept):
                check_what_is_kept_is_what_a_naive_sampler_draws_from(kept)


def check_what_is_kept_is_what_a_naive_sampler_draws_from(kept):
    logits = torch.randn(POSITIONS + 5, 32, generator=torch.Generator().manual_seed(0)) * 2
    real = 30  # the last two columns are padding
    found = keep(logits, kept, real, None).log_softmax(-1).numpy()
    wanted = np.stack([naive(row[:real], kept) for row in logits.double().numpy()])
    assert np.array_equal(np.isinf(found[:, :real]), np.isinf(wanted))
    assert np.allclose(np.exp(found[:, :real]), np.exp(wanted), atol=1e-5)
    assert np.isneginf(found[:, real:]).all()


def test_nothing_kept_back_is_no_change():
    assert not KeptTokens()
    assert KeptTokens(top_k=1)
