"""Losses over pairs: by hand, by what must not change them, and their gradients; what a batch that holds no pairs says."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from expect import each, refuses

import hfsdk as hf
from hfsdk.algorithms import safe_rlhf
from hfsdk.algorithms.dpo import DPOLoss
from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.microbatch import plan_update
from hfsdk.core.table import Ragged, Table
from hfsdk.engine.training.loss import ModelOutput, Tally, TokenBatch, evaluate

LENGTHS = [3, 2, 1, 4, 2, 2]


def pairs(lengths=LENGTHS, **columns):
    count = len(lengths) // 2
    rows = {
        "prompt": Ragged.from_lengths(np.ones(len(lengths), np.int32), [1] * len(lengths)),
        "response": Ragged.from_lengths(np.ones(sum(lengths), np.int32), lengths),
        "chosen": np.tile(np.float32([1, 0]), count), "group": np.repeat(np.arange(count), 2), **columns,
    }  # fmt: skip
    return Table(rows)


def batch(lengths=LENGTHS, **columns):
    table = pairs(lengths, **columns)
    return TokenBatch(table, sum(lengths), len(lengths))


def scores(*values):
    return ModelOutput(scores=torch.tensor(values, dtype=torch.float32, requires_grad=True))


def nll(x):
    return math.log1p(math.exp(-x))


class TestBradleyTerry:
    def test_by_hand(self):
        out = scores(1.0, 0.5, -2.0, 1.0, 0.0, 0.0)
        loss, metrics = hf.BradleyTerry()(out, batch())
        assert loss.tolist() == pytest.approx([nll(0.5)] * 2 + [nll(-3.0)] * 2 + [nll(0.0)] * 2)
        assert metrics["accuracy"].tolist() == [1.0, 0.0, 0.5]
        assert metrics["margin"].tolist() == [0.5, -3.0, 0.0]

    def test_the_engine_makes_the_mean_over_pairs(self):
        out, b, tally = scores(1.0, 0.5, -2.0, 1.0, 0.0, 0.0), batch(), Tally()
        evaluate(hf.BradleyTerry(), out, b, tally)
        assert tally.loss == pytest.approx((nll(0.5) + nll(-3.0) + nll(0.0)) / 3)
        assert tally.metrics()["accuracy"] == pytest.approx(0.5)

    def test_margin_and_center(self):
        out, b = scores(1.0, 0.5, 0.0, 0.0, 2.0, 1.0), batch(margin=np.float32([2, 2, 0, 0, 4, 4]))
        loss, _ = hf.BradleyTerry(margin=0.5, center=0.1)(out, b)
        wanted = [nll(0.5 - 1.0) + 0.1 * 1.5**2, nll(0.0), nll(1.0 - 2.0) + 0.1 * 3.0**2]
        assert loss[::2].tolist() == pytest.approx(wanted)
        assert "margin" not in hf.BradleyTerry().reads

    def test_the_gradient_raises_the_chosen_one(self):
        out = scores(0.0, 0.0)
        hf.BradleyTerry()(out, batch([1, 1]))[0].sum().backward()
        assert out.scores.grad.tolist() == pytest.approx([-1.0, 1.0])  # both rows carry the pair's loss; half of it each, 2 x 0.5

    def test_no_overflow(self):
        loss, _ = hf.BradleyTerry()(scores(-1e4, 1e4), batch([1, 1]))
        assert loss.tolist() == [2e4, 2e4]


class TestCostLoss:
    def test_by_hand(self):
        """The chosen response costs less; a sign of +1 shall cost more than 0."""
        out, b = scores(-1.0, 2.0, 0.5, 1.0), batch([1, 2, 2, 1], sign=np.float32([-1, 1, 1, 1]))
        loss, metrics = hf.CostLoss()(out, b)
        wanted = [nll(3.0) + nll(1.0) + nll(2.0), nll(0.5) + nll(0.5) + nll(1.0)]
        assert loss[::2].tolist() == pytest.approx(wanted)
        assert metrics["accuracy"].tolist() == [1.0, 1.0]
        assert metrics["sign_accuracy"].tolist() == [1.0, 1.0, 1.0, 1.0]

    def test_without_signs_it_is_bradley_terry_of_minus_the_cost(self):
        b = batch([1, 2, 2, 1], sign=np.float32([-1, 1, 1, 1]))
        ours, _ = hf.CostLoss(sign_coef=0.0)(scores(-1.0, 2.0, 0.5, 1.0), b)
        other, _ = hf.BradleyTerry()(scores(1.0, -2.0, -0.5, -1.0), b)
        assert ours.tolist() == other.tolist()


class TestDPO:
    REF = np.float32([-1.0, -2.0, -0.5, -1.0, -1.0, -3.0, -0.1, -0.2, -0.3, -0.4, -1.0, -1.0, -2.0, -2.0])

    def b(self):
        return batch(ref_log_probs=Ragged.from_lengths(self.REF, LENGTHS))

    def out(self, shift):
        log_probs = torch.tensor(self.REF) + torch.repeat_interleave(torch.tensor(shift), torch.tensor(LENGTHS))
        return ModelOutput(log_probs=log_probs.requires_grad_(), entropy=torch.ones(sum(LENGTHS)))

    SHIFT = (0.5, -0.1, 0.2, 0.3, 0.0, 0.0)

    def test_by_hand(self):
        loss, metrics = DPOLoss(beta=0.5)(self.out(self.SHIFT), self.b())
        assert loss[::2].tolist() == pytest.approx([nll(0.85), nll(-0.5), nll(0.0)], rel=1e-5)
        assert metrics["accuracy"].tolist() == [1.0, 0.0, 0.5]
        assert metrics["chosen_score"].tolist() == pytest.approx([0.75, 0.1, 0.0])

    def test_metrics_are_means_over_pairs_however_they_are_cut(self):
        ref, ends = Ragged.from_lengths(self.REF, LENGTHS), np.cumsum([0, *LENGTHS])
        whole, parts = Tally(), Tally()
        evaluate(DPOLoss(beta=0.5), self.out(self.SHIFT), self.b(), whole)
        for rows in ([0, 1], [2, 3, 4, 5]):
            table = pairs(ref_log_probs=ref).take(rows)
            out = ModelOutput(log_probs=self.out(self.SHIFT).log_probs[ends[rows[0]] : ends[rows[-1] + 1]])
            evaluate(DPOLoss(beta=0.5), out, TokenBatch(table, sum(LENGTHS), len(LENGTHS)), parts)
        assert parts.metrics() == pytest.approx(whole.metrics())
        assert whole.metrics()["accuracy"] == pytest.approx(0.5)
        assert whole.metrics()["chosen_score"] == pytest.approx(0.85 / 3)

    def test_other_kinds(self):
        for kind, wanted in (("ipo", [(0.5 + 0.1 - 1) ** 2, (0.2 - 0.3 - 1) ** 2, 1.0]), ("hinge", [1 - 0.85, 1 + 0.5, 1.0])):
            loss, _ = DPOLoss(beta=0.5, kind=kind)(self.out(self.SHIFT), self.b())
            assert loss[::2].tolist() == pytest.approx(wanted, rel=1e-4), kind

    def test_at_the_reference_the_loss_is_log_2_and_the_gradient_beta_over_2(self):
        out = self.out((0.0,) * 6)
        loss, _ = DPOLoss(beta=0.1)(out, self.b())
        assert loss.tolist() == pytest.approx([math.log(2)] * 6)
        loss[0].backward()
        assert out.log_probs.grad.tolist() == pytest.approx([-0.05] * 3 + [0.05] * 2 + [0.0] * 9)

    def test_a_sample_that_the_engine_puts_behind_the_last_is_left_alone(self):
        lengths = [*LENGTHS, 0]
        table = pairs(ref_log_probs=Ragged.from_lengths(self.REF, LENGTHS))
        more = {
            "prompt": Ragged.from_lengths(np.ones(7, np.int32), [1] * 7),
            "response": Ragged.from_lengths(np.ones(14, np.int32), lengths),
            "chosen": np.append(table["chosen"], 1.0), "group": np.append(table["group"], 0),
            "ref_log_probs": Ragged.from_lengths(self.REF, lengths),
        }  # fmt: skip
        found, _ = DPOLoss(beta=0.5)(self.out(self.SHIFT), TokenBatch(Table(more), 14, 6))
        alone, _ = DPOLoss(beta=0.5)(self.out(self.SHIFT), self.b())
        assert found[:6].tolist() == alone.tolist()
        assert found[6] == 0


class TestOfAnotherRole:
    def test_a_pair_loss_on_an_actor_and_an_actors_on_a_reward_model(self):
        log_probs = ModelOutput(log_probs=torch.zeros(14), entropy=torch.zeros(14))
        for loss in (hf.BradleyTerry(), hf.CostLoss()):
            with refuses(OptionError, type(loss).__name__, "reward or cost model"):
                loss(log_probs, batch(sign=np.ones(6)))
        for loss in (hf.CrossEntropy(), DPOLoss()):
            with refuses(OptionError, type(loss).__name__, "actor"):
                loss(scores(*range(6)), batch())


class TestNoPairs:
    def test_rows_that_are_no_pair(self):
        for columns in (
            {"group": np.array([0, 1, 1, 0])},
            {"chosen": np.float32([0, 1, 1, 0])},
            {"chosen": np.float32([1, 1, 1, 0])},
        ):
            with refuses(ColumnError, "rows 0 and 1"):
                hf.BradleyTerry()(scores(0.0, 1.0, 2.0, 3.0), batch([1, 1, 1, 2], **columns))

    def test_options_out_of_range(self):
        for cls, options in (
            (hf.BradleyTerry, {"margin": -1.0}), (hf.DPO, {"beta": 0.0}), (hf.DPO, {"kind": "x"}),
            (hf.DPO, {"label_smoothing": 0.5}), (hf.DPO, {"label_smoothing": 0.1, "kind": "ipo"}),
            (hf.CostLoss, {"sign_coef": -1.0}), (hf.CrossEntropy, {"weight": 0.0}), (hf.CrossEntropy, {"aggregation": "x"}),
            (hf.SafeRLHF, {"multiplier_lr": 0.0}), (hf.SafeRLHF, {"most_multiplier": -1.0}),
            (hf.SafeRLHF, {"ptx": 3}), (hf.SafeRLHF, {"ptx_coef": 0.0}), (hf.SafeRLHF, {"lam": 2.0}),
            (hf.SafeRLHF, {"cost_limit": math.inf}), (hf.PPO, {"kl_coef": math.inf}),
        ):  # fmt: skip
            (name, value), *_ = options.items()
            with refuses(OptionError, f"{name}={value!r}"):
                cls(**options)


class TestTogether:
    """Pairs stay in one micro-batch, whatever the layout, the budget of tokens and the shuffle."""

    @each("dp, max_tokens", product((1, 2, 3), (8, 20, 400)))
    def test_pairs_stay_together(self, dp, max_tokens):
        rng = np.random.default_rng(3)
        total, response = rng.integers(2, 12, 26), rng.integers(1, 8, 26)
        plans = plan_update(total, response, dp, 2, 3, max_tokens, seed=5, together=2)
        for epoch in range(2):
            rows = [row for plan in plans if plan.epoch == epoch for row in plan.rows]
            assert sorted(rows) == list(range(26))
            assert rows != list(range(26))
        for plan in plans:
            micros = [micro for of_rank in plan.passes.micro_batches for micro in of_rank]
            assert sorted(row for micro in micros for row in micro) == sorted(plan.rows)
            assert all(micro[0::2] == tuple(row - 1 for row in micro[1::2]) and len(micro) % 2 == 0 for micro in micros)
            assert plan.num_rows == len(plan.rows)
            assert plan.num_tokens == sum(response[row] for row in plan.rows)

    def test_the_same_rows_for_every_layout(self):
        total = np.arange(2, 22)
        plans = [plan_update(total, total - 1, dp, 1, 3, 16, seed=1, together=2) for dp in (1, 2, 4)]
        assert len({tuple(tuple(sorted(p.rows)) for p in plan) for plan in plans}) == 1

    def test_more_mini_batches_than_pairs(self):
        with refuses(OptionError, "mini_batches=4", "3 sets", "2 rows"):
            plan_update([4] * 6, [2] * 6, 1, 1, 4, 100, seed=0, together=2)

    def test_an_odd_batch(self):
        with refuses(OptionError, "2 rows", 3):
            plan_update([1, 2, 3], [1, 1, 1], 1, 1, 1, 8, seed=0, together=2)


class TestSafeRLHF:
    def table(self, seed=0):
        rng, lengths = np.random.default_rng(seed), [3, 1, 2]
        per_token = ("old_log_probs", "ref_log_probs", "values", "cost_values")
        rows = {name: Ragged.from_lengths(rng.normal(size=6).astype(np.float32), lengths) for name in per_token}
        rows["response"] = Ragged.from_lengths(np.ones(6, np.int32), lengths)
        return Table({**rows, "scores": np.float32([1, -2, 3]), "costs": np.float32([2, 0, -1])}), lengths

    def test_a_small_multiplier_is_ppo_and_a_large_one_only_lowers_costs(self):
        table, _ = self.table()

        def mixed(multiplier):
            return safe_rlhf.Advantages(multiplier=multiplier, kl_coef=0.0, whiten=False)(table)

        columns = mixed(1.0)
        reward = columns["returns"].flat - table["values"].flat
        np.testing.assert_allclose(mixed(1e-9)["advantages"].flat, reward, atol=1e-5)
        np.testing.assert_allclose(mixed(1e9)["advantages"].flat, -columns["cost_advantages"].flat, atol=1e-5)

    def test_an_infinite_cost_is_told_by_sample(self):
        table, _ = self.table()
        bad = table.with_columns({"costs": np.float32([0, np.inf, 0])})
        with refuses(ColumnError, "'costs'", "inf", "sample 1"):
            safe_rlhf.Advantages(multiplier=1.0)(bad)
