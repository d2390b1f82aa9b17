"""Where TRL and verl do otherwise than hfsdk by default, and the options for what they do (tests/data/make_choice_oracles.py)."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from expect import refuses
from numerics_helpers import FP32, forget_gradient
from system_helpers import ppo_batch

import hfsdk as hf
from hfsdk.algorithms import grpo, ppo, rlmath, rloo
from hfsdk.algorithms.rollout_correction import CorrectionOptions, rollout_weights
from hfsdk.core.errors import OptionError
from hfsdk.core.table import Ragged, Table
from hfsdk.engine.training.loss import TokenBatch, aggregate

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "peer_choices.json").read_text())
ALGORITHMS = [hf.PPO(), hf.GRPO(), hf.RLOO(), hf.ReMax(), hf.ReinforcePlusPlus()]


def t(values):
    return torch.tensor(values, dtype=torch.float64)


class TestTruncatedImportanceSampling:
    case = ORACLE["tis"]

    def batch(self, **more):
        old, rollout = t(self.case["old_log_probs"]), t(self.case["rollout_log_probs"])
        log_probs = (old + 0.1).requires_grad_()
        out = SimpleNamespace(log_probs=log_probs, entropy=torch.ones_like(old))
        b = {"old_log_probs": old, "rollout_log_probs": rollout, "advantages": torch.linspace(-1, 1, len(old)).double()}
        return out, b | {"ref_log_probs": old - 0.2} | more

    @pytest.mark.parametrize("peer", ["trl", "verl"])
    def test_point_11_truncated_importance_sampling_is_trls_and_verls(self, peer):
        _, b = self.batch()
        weights, cut = rollout_weights(b["old_log_probs"], b["rollout_log_probs"], CorrectionOptions(tis_cap=self.case["cap"]))
        torch.testing.assert_close(weights, t(self.case["expected"][peer]))
        assert cut.tolist() == [w == 2.0 for w in self.case["expected"][peer]]
        assert 0 < cut.sum() < len(cut), "the case must exercise the cap"

    def test_point_11_the_weights_are_on_the_policy_loss_alone_and_carry_no_gradient(self):
        """As TRL and verl: the surrogate of each token times its weight; entropy bonus and KL are added after that."""
        plain_fn = ppo.PolicyLoss(entropy_coef=0.1, kl_coef=0.3)
        fn = replace(plain_fn, tis_cap=2.0)
        (out, b), (old_out, _) = self.batch(), self.batch()
        b["old_log_probs"].requires_grad_()
        loss, metrics = fn(out, b)
        plain, told = plain_fn(old_out, {n: x for n, x in b.items() if n != "rollout_log_probs"})
        weights = t(self.case["expected"]["verl"])
        extra = plain - told["policy_loss"]
        torch.testing.assert_close(loss, told["policy_loss"] * weights + extra)
        torch.testing.assert_close(metrics["policy_loss"], told["policy_loss"] * weights)
        assert metrics["tis_mean"].mean().item() == pytest.approx(weights.mean().item())
        assert metrics["tis_clip_fraction"].mean().item() == pytest.approx(1 / 14)
        assert "tis_mean" not in told
        assert not metrics["tis_mean"].requires_grad

    def test_point_11_off_it_reads_no_column_more(self):
        assert ppo.PolicyLoss().reads == ["old_log_probs", "advantages"]
        assert ppo.PolicyLoss(tis_cap=2.0).reads == ["old_log_probs", "advantages", "rollout_log_probs"]
        for algorithm in ALGORITHMS:
            assert algorithm.policy_loss.tis_cap is None
            assert replace(algorithm, tis_cap=1.5).policy_loss.tis_cap == 1.5
            with refuses(OptionError, "tis_cap=2.0", "rollout"):
                replace(algorithm, tis_cap=2.0, old_log_probs="rollout")
        with refuses(OptionError, "tis_cap=0.0"):
            ppo.PolicyLoss(tis_cap=0.0)

    def test_point_11_on_the_real_trainer(self, live):
        """Trainer and rollout agree: weights of 1. Rollout log-probs moved by hand: the weight of every token follows."""
        batch = ppo_batch(live)
        row = live.actor.forward_backward(batch, ppo.PolicyLoss(tis_cap=2.0)).rows[0]
        assert row["tis_mean"] == pytest.approx(1, abs=FP32)
        assert row["tis_clip_fraction"] == 0
        moved = batch["rollout_log_probs"].map(batch["rollout_log_probs"].flat - np.float32(np.log(1.5)))
        other = live.actor.forward_backward(batch.with_columns(rollout_log_probs=list(moved)), ppo.PolicyLoss(tis_cap=2.0)).rows[0]
        live.actor.run(forget_gradient)
        assert other["tis_mean"] == pytest.approx(1.5, abs=FP32)
        assert other["policy_loss"] == pytest.approx(1.5 * row["policy_loss"], abs=1e-5)


class TestLogRatios:
    case = ORACLE["far"]

    def far(self, clamp, sign):
        old = torch.full((7,), -50.0, dtype=torch.float64)
        log_probs = (old + t(self.case["log_ratio"])).requires_grad_()
        loss, *_ = rlmath.policy_loss_terms(log_probs, old, sign * torch.ones(7).double(), 0.2, 0.2, None, clamp)
        return loss.detach(), torch.autograd.grad(loss.sum(), log_probs)[0]

    @pytest.mark.parametrize("sign", [1, -1])
    def test_cut_at_both_ends_is_verls(self, sign):
        loss, gradient = self.far("both", sign)
        torch.testing.assert_close(loss, t(self.case["policy"][str(sign)]["loss"]))
        torch.testing.assert_close(gradient, t(self.case["policy"][str(sign)]["gradient"]))

    def test_the_default_keeps_the_gradient_below_and_none_is_plain_exp(self):
        """Policies far below the old one still learn; far above, TRL's plain exp overflows where ours stops at e^20."""
        loss, gradient = self.far("above", 1)
        torch.testing.assert_close(loss[:2], -t(self.case["log_ratio"][:2]).exp())
        assert (gradient[:2] < 0).all()
        far = torch.tensor([100.0]).requires_grad_()
        for clamp, wanted in (("above", np.exp(20.0)), ("both", np.exp(20.0)), ("none", np.inf)):
            loss, *_ = rlmath.policy_loss_terms(far, torch.zeros(1), -torch.ones(1), 0.2, 0.2, None, clamp)
            assert loss.item() == pytest.approx(wanted, rel=1e-5)

    def test_k3_cut_at_both_ends_is_verls(self):
        old = torch.full((7,), -50.0, dtype=torch.float64)
        log_probs = (old + t(self.case["log_ratio"])).requires_grad_()
        estimate = rlmath.kl_estimate(log_probs, old, "k3", "both")
        torch.testing.assert_close(estimate.detach(), t(self.case["k3"]["value"]))
        torch.testing.assert_close(torch.autograd.grad(estimate.sum(), log_probs)[0], t(self.case["k3"]["gradient"]))
        ours = rlmath.kl_estimate(t([0.0]), t([-12.0]), "k3")
        assert ours.item() == pytest.approx(11.0, abs=1e-4), "not cut: the estimate stays unbiased"

    def test_options_reach_the_loss(self):
        for algorithm in ALGORITHMS:
            assert replace(algorithm, log_ratio_clamp="both").policy_loss.log_ratio_clamp == "both"
            assert replace(algorithm, dual_clip=3.0).policy_loss.dual_clip == 3.0
            with refuses(OptionError, "log_ratio_clamp='below'"):
                replace(algorithm, log_ratio_clamp="below")
        old = torch.zeros(1)
        out = SimpleNamespace(log_probs=torch.tensor([-30.0]), entropy=old)
        b = {"old_log_probs": old, "advantages": torch.ones(1), "ref_log_probs": torch.tensor([-42.0])}
        _, metrics = ppo.PolicyLoss(log_ratio_clamp="both", kl_coef=0.1)(out, b)
        assert metrics["ratio"].item() == pytest.approx(np.exp(-20.0))
        assert metrics["kl_loss"].item() == 10.0
        with refuses(OptionError, "'below'", "above, both or none"):
            rlmath.kl_estimate(old, old, "k3", "below")


class TestGroupsOfOne:
    case = ORACLE["alone"]

    def test_point_28_a_group_of_one_as_verl_has_it(self):
        scores, group = t(self.case["scores"]), torch.tensor(self.case["group"])
        ours = grpo.group_advantages(scores, group, epsilon=1e-6, alone="score")
        torch.testing.assert_close(ours, t(self.case["expected"]["grpo"]), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(rloo.leave_one_out(scores, group, "score"), t(self.case["expected"]["rloo"]))
        for function in (grpo.group_advantages, rloo.leave_one_out):
            assert function(scores, group)[1] == 0
            with refuses(OptionError, "alone='mean'"):
                function(scores, group, alone="mean")

    @pytest.mark.parametrize(
        ("name", "fn"), [("grpo", grpo.Advantages(alone="score")), ("rloo", rloo.Advantages(alone="score", kl_coef=0.0))]
    )
    def test_point_28_over_columns(self, name, fn):
        lengths = self.case["lengths"]
        response = Ragged.from_lengths(np.zeros(sum(lengths), np.int32), lengths)
        rows = Table({"scores": np.array(self.case["scores"]), "group": np.array(self.case["group"]), "response": response})
        made = fn(rows)["advantages"]
        np.testing.assert_allclose([row[0] for row in made], self.case["expected"][name], rtol=1e-6)
        for wrong in (grpo.Advantages, rloo.Advantages):
            with refuses(OptionError, "alone='one'"):
                wrong(alone="one")


class TestEmptyResponses:
    case = ORACLE["empty"]

    @pytest.mark.parametrize("mode", ["sequence_mean", "sequence_sum"])
    def test_point_30_left_out_they_are_not_counted_as_in_verl(self, mode):
        """hfsdk counts an empty response as a sequence with loss 0; ``batch.take`` without it is verl's mean."""
        lengths = self.case["lengths"]
        losses = Ragged.from_lengths(np.array(self.case["loss"]), lengths)
        rows = Table({"response": losses, "losses": losses})

        def mean(table):
            b = TokenBatch(table, num_tokens=5, num_rows=table.num_rows)
            return float(aggregate(b["losses"], b, mode))

        kept = [i for i, length in enumerate(lengths) if length]
        assert mean(rows.take(kept)) == pytest.approx(self.case["expected"][mode], rel=1e-6)
        assert mean(rows) == pytest.approx(self.case["expected"][mode] * 2 / 3, rel=1e-6)


def test_point_28_grpos_epsilon_is_an_option():
    """verl's 1e-6 by default, TRL's 1e-4 where it is asked for (the peers' own numbers: test_group_advantages.py)."""
    assert hf.GRPO().epsilon == 1e-6
    assert grpo.Advantages.of(hf.GRPO(epsilon=1e-4)).epsilon == 1e-4
    scores, group = t([0.0, 1e-3]), torch.zeros(2, dtype=torch.int64)
    loud, quiet = (grpo.group_advantages(scores, group, epsilon=e)[1].item() for e in (1e-6, 1e-4))
    assert loud == pytest.approx(5e-4 / (1e-3 / 2**0.5 + 1e-6))
    assert quiet == pytest.approx(5e-4 / (1e-3 / 2**0.5 + 1e-4))
