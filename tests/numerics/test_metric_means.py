"""What a mini-batch's metrics are means of: tokens, or samples that have a response, over all micro-batches and ranks."""

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from hfsdk.core.table import Ragged, Table
from hfsdk.engine.training.loss import Tally, TokenBatch


def batch_of(*responses):
    columns = {"prompt": Ragged.of([[1]] * len(responses), np.int32), "response": Ragged.of(responses, np.int32)}
    return TokenBatch(Table(columns), num_tokens=sum(map(len, responses)), num_rows=len(responses))


def test_a_sample_without_a_response_is_in_no_mean():
    tally = Tally()
    tally.add_metrics(
        {"length": torch.tensor([3.0, 9.0, 1.0]), "length_max": torch.tensor([3.0, 9.0, 1.0])}, batch_of([1, 2, 3], [], [4])
    )
    assert tally.metrics() == {"length": 2.0, "length_max": 3.0}


def test_numbers_per_token_weigh_by_tokens_over_micro_batches_and_ranks():
    one, other = Tally(), Tally()
    one.add_metrics({"kl": torch.tensor([1.0, 2.0, 3.0]), "share": torch.tensor(0.5)}, batch_of([1, 2], [3]))
    other.add_metrics({"kl": torch.tensor([10.0]), "share": torch.tensor(1.0)}, batch_of([1]))
    one.merge(other)
    assert one.metrics() == pytest.approx({"kl": 4.0, "share": (3 * 0.5 + 1.0) / 4})
