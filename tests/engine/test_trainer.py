"""The parity law of the trainer, pairwise: every family on every layout, and each other check on layouts of each kind.

All checks on all layouts are in ``sweeps/test_trainer_layouts.py``.
"""

import numpy as np
import pytest
import torch
from expect import refuses
from layout_sweep import Sweep
from trainer_laws import *  # noqa: F403  (its fixtures and tests, asked of SWEEP)
from trainer_laws import COMPARED

from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.table import Ragged, Table

LAYOUTS = {"tp1": 1, "tp2": 2, "dp2": 2, "dp2 zero": 2, "pp2": 2, "tp2 pp2": 4, "tp4 for rollout 2": 4}
"""The last one has its tp axis permuted, and more tp ranks than two of the models have kv heads."""
SWEEP = Sweep(
    LAYOUTS,
    {
        **dict.fromkeys(("inference", "gradients", "saving"), tuple(name for name in LAYOUTS if name != "dp2")),
        "aggregations": ("tp1", "dp2", "dp2 zero", "tp2 pp2"), "update": ("tp1", "dp2 zero", "tp2 pp2"),
        "state": ("tp2", "dp2", "dp2 zero"), "refusals": ("dp2 zero", "tp2 pp2"), "bf16": ("dp2 zero", "tp2 pp2"),
        "offload": ("tp2", "dp2 zero"), "errors": ("tp1", "tp2 pp2"), "distributed": ("dp2 zero",), "recompute": ("tp2", "pp2"),
    },
    dict.fromkeys(LAYOUTS, ("untied", "qwen3 critic", "windowed mistral")),
    COMPARED,
)  # fmt: skip


# ---- what a loss sees


def token_batch():
    from hfsdk.engine.training.loss import TokenBatch, with_temperature

    response = Ragged.of([[1, 2, 3], [], [4]])
    columns = {"prompt": Ragged.of([[1], [1, 2], [3]]), "response": response, "text": ["a", "b", "c"]}
    columns |= {"values": response.map(np.arange(4.0)), "scores": np.array([1.0, 2.0, 3.0])}
    columns["short"] = Ragged.of([[1.0], [2.0], [3.0]])
    return TokenBatch(with_temperature(Table(columns, row_ids=[7, 2, 5]), 1.0), num_tokens=8, num_rows=6)


def test_token_batch():
    b = token_batch()
    assert b["values"].dtype == b["scores"].dtype == torch.float32
    assert b["response"].tolist() == [1, 2, 3, 4]
    assert b["prompt"].tolist() == [1, 1, 2, 3]
    assert b["text"] == ["a", "b", "c"]
    assert b["scores"].tolist() == [1, 2, 3]
    assert b.expand("scores").tolist() == [1, 1, 1, 3]
    assert b.lengths.tolist() == [3, 0, 1]
    assert b.row_ids.tolist() == [7, 2, 5]
    assert b.segment_sum(b["values"]).tolist() == [3, 0, 3]
    assert b.segment_mean(b["values"]).tolist() == [1, 0, 3]
    with refuses(ColumnError, "'short'", "1 values", "sample 7", "3 tokens"):
        b["short"]
    with refuses(ColumnError, "'nothing'") as refused:
        b["nothing"]
    assert str(refused.value).endswith("prompt, response, scores, short, text, values"), "the engine's own columns are not named"


def test_aggregations_by_hand():
    from hfsdk.engine.training.loss import aggregate

    b = token_batch()
    expected = {"token_mean": 6 / 8, "sequence_mean": (1 + 0 + 3) / 6, "sequence_sum": 6 / 6, "fixed_length": 6 / 60}
    for mode, value in expected.items():
        assert aggregate(b["values"], b, mode, fixed_length=10).item() == pytest.approx(value)
    with refuses(OptionError, "'mean'"):
        aggregate(b["values"], b, "mean")
    with refuses(OptionError, "fixed_length"):
        aggregate(b["values"], b, "fixed_length")


def test_one_loss_per_sample_is_told_from_one_per_token():
    from hfsdk.engine.training.loss import ModelOutput, Tally, TokenBatch, evaluate, tell_apart

    response = Ragged.of([[1], [2]])
    rows = Table({"prompt": response, "response": response, "scores": np.array([1.0, 3.0])})
    b = TokenBatch(tell_apart(rows), num_tokens=8, num_rows=2)
    out, tally = ModelOutput(log_probs=torch.tensor([1.0, 3.0])), Tally()
    assert evaluate(lambda out, b: out.log_probs, out, b, tally).item() == 4 / 8
    assert evaluate(lambda out, b: b["scores"], out, b, tally).item() == 4 / 2
    assert evaluate(lambda out, b: b.segment_sum(out.log_probs), out, b, tally).item() == 4 / 2
