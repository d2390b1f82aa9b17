"""The table of suggested learning rates, and how ``AdamW`` takes them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.core.learning_rates import RATES, WARMUP_STEPS, WORDS, suggested_rate, what_is_learned
from hfsdk.core.spec import PRESETS


@each("learns", RATES)
def test_larger_models_take_smaller_steps_and_every_row_has_a_source(learns):
    rows = RATES[learns]
    for smaller, larger in itertools.pairwise(rows):
        assert smaller.most_parameters < larger.most_parameters
        assert smaller.lr > larger.lr
    assert rows[-1].most_parameters == float("inf")
    assert all(row.source for row in rows)
    assert WORDS[learns]


@each("name, lr", [("llama-7b", 1e-6), ("llama-70b", 1e-7)])
def test_presets_train_as_papers_do(name, lr):
    assert suggested_rate(PRESETS[name].num_parameters(), "policy").lr == lr


def test_a_rate_of_ones_own_stands_and_has_no_warm_up():
    own = hf.AdamW(lr=3e-4)
    assert own.for_model(135_000_000, "policy").lr_at(0) == 3e-4
    assert hf.AdamW(lr=3e-4, warmup_steps=2).for_model(10, "policy").lr_at(0) == 1.5e-4


def test_a_suggested_rate_warms_up():
    taken = hf.AdamW().for_model(7_000_000_000, "policy")
    assert (taken.lr, taken.warmup_steps) == (1e-6, WARMUP_STEPS)
    assert taken.lr_at(0) == pytest.approx(1e-6 / WARMUP_STEPS)
    assert hf.AdamW(warmup_steps=0).for_model(7_000_000_000, "policy").lr_at(0) == 1e-6


def test_a_short_schedule_warms_up_for_half_of_it_at_most():
    taken = hf.AdamW(schedule="linear", total_steps=6).for_model(10, "policy")
    assert taken.warmup_steps == 3
    assert taken.lr_at(6) == 0.0


def test_without_a_model_there_is_no_rate():
    with refuses(hf.OptionError, "for_model"):
        hf.AdamW().lr_at(0)


@each(
    "loss, kind, learns",
    [
        (hf.PPO().policy_loss, "actor", "policy"),
        (hf.GRPO().policy_loss, "actor", "policy"),
        (hf.PPO().value_loss, "critic", "values"),
        (hf.DPO().loss, "actor", "preferences"),
        (hf.CrossEntropy(), "actor", "demonstrations"),
        (hf.BradleyTerry(), "reward", "scores"),
        (hf.CostLoss(), "cost", "scores"),
        (len, "actor", "policy"),
        (len, "critic", "values"),
    ],
)
def test_a_loss_says_what_is_learned(loss, kind, learns):
    assert what_is_learned(loss, kind) == learns


def test_the_table_in_the_docs_is_this_one():
    text = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for learns, rows in RATES.items():
        for row in rows:
            size = "larger" if row.most_parameters == float("inf") else f"{row.most_parameters / 1e6:,.0f}M"
            assert f"| {WORDS[learns]} | {size} | {row.lr:.0e} | {row.source} |" in text
