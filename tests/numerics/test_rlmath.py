"""rlmath against naive loops, hand-computed numbers, and what TRL and verl compute (tests/data/make_oracles.py)."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import refuses

from hfsdk.algorithms import ppo, rlmath
from hfsdk.algorithms.choices import KL_KINDS_BY_RATIO
from hfsdk.algorithms.ppo import KL_KINDS
from hfsdk.core.errors import OptionError
from hfsdk.core.table import Ragged, Table

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "peer_ppo.json").read_text())


def t(values):
    return torch.tensor(values, dtype=torch.float64)


def lens(*lengths):
    return torch.tensor(lengths, dtype=torch.int64)


def random_batch(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    num = sum(lengths)
    return [torch.randn(num, generator=g, dtype=torch.float64) for _ in range(2)] + [lens(*lengths)]


def naive_gae(rewards, values, lengths, gamma, lam, bootstrap=None):
    """Sum of discounted TD errors, written as the definition has it (quadratic, forwards)."""
    out, start = [], 0
    for row, length in enumerate(lengths):
        r, v = rewards[start : start + length], values[start : start + length]
        v = [*v, 0.0 if bootstrap is None else bootstrap[row]]
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(length)]
        out += [sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, length)) for i in range(length)]
        start += length
    return out


class TestPeers:
    @pytest.mark.parametrize("case", ORACLE["trl"], ids=["plain", "whitened rewards, k3"])
    def test_trl_rewards_advantages_and_losses(self, case):
        o, expected, lengths = case["options"], case["expected"], lens(*case["lengths"])
        kl = rlmath.kl_estimate(t(case["old_log_probs"]), t(case["ref_log_probs"]), o["kl_estimator"])
        rewards = rlmath.token_rewards(t(case["scores"]), kl, lengths, o["kl_coef"])
        if o["whiten_rewards"]:
            rewards = rlmath.whiten(rewards, shift_mean=False)
        advantages, returns = rlmath.gae(rewards, t(case["values"]), lengths, o["gamma"], o["lam"])
        advantages = rlmath.whiten(advantages)
        loss, ratio, clipped, _ = rlmath.policy_loss_terms(
            t(case["log_probs"]), t(case["old_log_probs"]), advantages, o["cliprange"], o["cliprange"]
        )
        value_loss, value_clipped = rlmath.value_loss_terms(t(case["new_values"]), t(case["values"]), returns, o["cliprange_value"])
        ours = {"kl": kl, "rewards": rewards, "advantages": advantages, "returns": returns, "ratio": ratio}
        ours |= {"policy_loss": loss, "value_loss": value_loss, "pg_loss": loss.mean(), "vf_loss": value_loss.mean()}
        ours |= {"pg_clipfrac": clipped.double().mean(), "vf_clipfrac": value_clipped.double().mean()}
        for name, value in ours.items():
            torch.testing.assert_close(value, t(expected[name]), rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
        assert 0 < expected["pg_clipfrac"] < 1, "the case must exercise clipping"

    @pytest.mark.parametrize("case", ORACLE["verl"], ids=["four rows", "two rows"])
    def test_verl_on_ragged_rows(self, case):
        o, expected, lengths = case["options"], case["expected"], lens(*case["lengths"])
        log_probs, old, ref = (t(case[n]) for n in ("log_probs", "old_log_probs", "ref_log_probs"))
        log_probs.requires_grad_()
        rewards = rlmath.token_rewards(t(case["scores"]), rlmath.kl_estimate(old, ref, "k1"), lengths, o["kl_coef"])
        advantages, returns = rlmath.gae(rewards, t(case["values"]), lengths, o["gamma"], o["lam"])
        advantages = rlmath.whiten(advantages)
        loss, _, clipped, dual = rlmath.policy_loss_terms(log_probs, old, advantages, o["clip_low"], o["clip_high"], o["dual_clip"])
        gradient = torch.autograd.grad(loss.sum(), log_probs)[0]
        value_loss, value_clipped = rlmath.value_loss_terms(t(case["new_values"]), t(case["values"]), returns, o["value_clip"])
        ours = {"rewards": rewards, "advantages": advantages, "returns": returns, "policy_loss": loss.detach()}
        ours |= {"policy_gradient": gradient, "clip_fraction": clipped.double().mean()}
        ours |= {"dual_clip_fraction": dual.double().mean()}
        ours |= {"value_loss": value_loss, "value_clip_fraction": value_clipped.double().mean()}
        for name, value in ours.items():  # verl divides by count + 1e-8
            torch.testing.assert_close(value, t(expected[name]), rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")

    def test_verl_kl_values_and_gradients(self):
        for kind, case in product(KL_KINDS, ORACLE["verl"]):
            log_probs = t(case["log_probs"]).requires_grad_()
            estimate = rlmath.kl_estimate(log_probs, t(case["ref_log_probs"]), kind)
            torch.testing.assert_close(estimate.detach(), t(case["expected"]["kl"][kind]))
            gradient = torch.autograd.grad(estimate.sum(), log_probs)[0]
            torch.testing.assert_close(gradient, t(case["expected"]["kl_gradient"][kind]))


class TestKl:
    """Exact expectations over a small vocabulary take the place of sampling."""

    policy_logits = t([0.3, -1.2, 0.7, 0.0, 2.0])
    ref_log_probs = torch.log_softmax(t([-0.4, 0.5, 0.1, 1.0, 0.9]), 0)

    def expectation(self, kind):
        """Return E over the policy of the estimate, and of its gradient with respect to the logits."""
        logits = self.policy_logits.clone().requires_grad_()
        log_probs = torch.log_softmax(logits, 0)
        estimate = rlmath.kl_estimate(log_probs, self.ref_log_probs, kind)
        weights = log_probs.detach().exp()
        return (weights * estimate).sum().detach(), torch.autograd.grad((weights * estimate).sum(), logits)[0]

    def true_kl(self, reverse=False):
        logits = self.policy_logits.clone().requires_grad_()
        log_probs = torch.log_softmax(logits, 0)
        p, q = (self.ref_log_probs, log_probs) if reverse else (log_probs, self.ref_log_probs)
        kl = (p.exp() * (p - q)).sum()
        return kl.detach(), torch.autograd.grad(kl, logits)[0]

    def test_point_18_k1_and_k3_are_unbiased_and_k2_is_not(self):
        value, _ = self.true_kl()
        for kind in ("k1", "k1+", "k3", "k3+"):
            torch.testing.assert_close(self.expectation(kind)[0], value)
        for kind in ("k2", "abs"):
            assert abs(self.expectation(kind)[0] - value) > 1e-3

    def test_point_18_signs(self):
        log_probs = torch.log_softmax(self.policy_logits, 0)
        for kind in ("k2", "k3", "k3+", "abs"):
            assert (rlmath.kl_estimate(log_probs, self.ref_log_probs, kind) >= 0).all()
        assert rlmath.kl_estimate(t([-2.0]), t([-1.0]), "k1").item() == -1.0

    def test_point_18_weighed_by_the_ratio_k1_and_k3_have_value_and_gradient_of_the_kl_after_updates_too(self):
        """Tokens are drawn by an older policy; of the other estimators the value or the gradient is another."""
        old, wanted = torch.log_softmax(t([1.0, 0.2, -0.5, 0.4, 0.0]), 0), self.true_kl()
        for kind in KL_KINDS:
            logits = self.policy_logits.clone().requires_grad_()
            log_probs = torch.log_softmax(logits, 0)
            estimate = rlmath.kl_estimate(log_probs, self.ref_log_probs, kind) * rlmath.importance_ratio(log_probs, old)
            mean = (old.exp() * estimate).sum()
            right = [torch.allclose(mean, wanted[0]), torch.allclose(torch.autograd.grad(mean, logits)[0], wanted[1])]
            assert all(right) == (kind in KL_KINDS_BY_RATIO), kind

    def test_point_18_as_a_loss_only_k2_has_the_gradient_of_the_kl(self):
        _, gradient = self.true_kl()
        torch.testing.assert_close(self.expectation("k2")[1], gradient)
        for kind in ("k1+", "k3+"):
            torch.testing.assert_close(self.expectation(kind)[1], gradient)
        torch.testing.assert_close(self.expectation("k1")[1], torch.zeros_like(gradient))
        torch.testing.assert_close(self.expectation("k3")[1], self.true_kl(reverse=True)[1])
        assert not torch.allclose(self.expectation("k3")[1], gradient, atol=1e-3)

    def test_point_18_reward_is_lowered_by_the_kl(self):
        log_probs, ref = t([-1.0, -1.0]), t([-3.0, -3.0])  # the policy likes these tokens more than the reference does
        rewards = rlmath.token_rewards(t([0.0]), rlmath.kl_estimate(log_probs, ref), lens(2), kl_coef=0.5)
        assert rewards.tolist() == [-1.0, -1.0]

    def test_hand_computed(self):
        log_probs, ref = t([math.log(0.5)]), t([math.log(0.25)])  # r = 1/2
        expected = {"k1": math.log(2), "k2": 0.5 * math.log(2) ** 2, "k3": 0.5 - 1 + math.log(2), "abs": math.log(2)}
        for kind, value in expected.items():
            assert rlmath.kl_estimate(log_probs, ref, kind).item() == pytest.approx(value)

    def test_k3_stays_finite_and_flat_where_exp_would_overflow(self):
        log_probs = torch.tensor([-200.0, 0.0], requires_grad=True)
        estimate = rlmath.kl_estimate(log_probs, torch.tensor([0.0, -200.0]), "k3")
        assert torch.isfinite(estimate).all()
        assert estimate[1].item() == pytest.approx(199.0)  # the lower side is exact, unlike verl's
        assert torch.autograd.grad(estimate.sum(), log_probs)[0].tolist() == [0.0, 1.0]

    def test_k3_is_accurate_for_close_policies(self):
        log_probs = torch.tensor([-1.0])  # float32: exp(x) - 1 - x would lose all digits
        assert rlmath.kl_estimate(log_probs, log_probs - 2**-12, "k3").item() == pytest.approx(2**-25, rel=1e-2)

    def test_equal_policies_and_unknown_kinds(self):
        log_probs = torch.randn(5)
        for kind in KL_KINDS:
            assert rlmath.kl_estimate(log_probs, log_probs, kind).abs().max() == 0
        with refuses(OptionError, "'k4'", "k3+"):
            rlmath.kl_estimate(log_probs, log_probs, "k4")

    def test_point_20_adaptive_controller(self):
        def step(kl):
            return rlmath.adaptive_kl_coef(0.2, kl, target=6.0, num_samples=64, horizon=10_000)

        assert step(6.0) == pytest.approx(0.2)
        assert step(600.0) == pytest.approx(0.2 * (1 + 0.2 * 64 / 10_000))  # clipped at +0.2
        assert step(0.0) == pytest.approx(0.2 * (1 - 0.2 * 64 / 10_000))  # clipped at -0.2
        assert step(6.6) == pytest.approx(0.2 * (1 + 0.1 * 64 / 10_000))
        with refuses(OptionError, "target=0.0"):
            rlmath.adaptive_kl_coef(0.2, 1.0, target=0.0, num_samples=1)


class TestRewards:
    def test_point_19_score_added_at_last_response_token(self):
        rewards = rlmath.token_rewards(t([10.0, 20.0]), t([0.1, 0.2, 0.3, 0.4, 0.5]), lens(3, 2), kl_coef=1.0)
        torch.testing.assert_close(rewards, t([-0.1, -0.2, 9.7, -0.4, 19.5]))

    def test_point_19_empty_response_keeps_its_score_to_itself(self):
        rewards = rlmath.token_rewards(t([7.0, 10.0, 8.0, 20.0]), torch.zeros(3).double(), lens(0, 2, 0, 1), kl_coef=0.5)
        assert rewards.tolist() == [0.0, 10.0, 20.0]
        assert rlmath.token_rewards(t([7.0]), t([]), lens(0), kl_coef=1.0).tolist() == []

    def test_scores_are_clipped_before_they_are_added(self):
        assert rlmath.token_rewards(t([10.0, -10.0]), t([0.0, 0.0]), lens(1, 1), 0.0, clip=5.0).tolist() == [5.0, -5.0]

    def test_point_06_missing_eos_penalty(self):
        ended = torch.tensor([True, False, False])
        rewards = rlmath.missing_eos_penalty(t([0.0, 1.0, 0.0, 2.0]), ended, lens(2, 2, 0), penalty=1.5)
        assert rewards.tolist() == [0.0, 1.0, 0.0, 0.5]

    def test_inputs_are_not_changed(self):
        kl, scores = t([0.1, 0.2]), t([1.0])
        rlmath.missing_eos_penalty(rlmath.token_rewards(scores, kl, lens(2), 1.0), torch.tensor([False]), lens(2), 1.0)
        assert kl.tolist() == [0.1, 0.2]
        assert scores.tolist() == [1.0]


class TestGae:
    def test_point_22_backwards_over_response_tokens_only(self):
        discounts = ((1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0))
        for lengths, (gamma, lam) in product(((3, 1, 5), (1, 1, 1), (0, 4, 0), (7,), (0,), (), (2, 0)), discounts):
            rewards, values, lengths_N = random_batch(lengths)
            advantages, returns = rlmath.gae(rewards, values, lengths_N, gamma, lam)
            expected = naive_gae(rewards.tolist(), values.tolist(), lengths, gamma, lam)
            torch.testing.assert_close(advantages, t(expected))
            torch.testing.assert_close(returns, advantages + values)

    def test_point_22_value_after_the_last_token_is_zero(self):
        advantages, returns = rlmath.gae(t([0.0, 1.0]), t([0.25, 0.5]), lens(2), gamma=1.0, lam=0.5)
        # by hand: delta = [0.5 - 0.25, 1 - 0.5]; A = [0.25 + 0.5 * 0.5, 0.5]
        assert advantages.tolist() == [0.5, 0.5]
        assert returns.tolist() == [0.75, 1.0]

    def test_point_22_truncated_rows_bootstrap(self):
        rewards, values, lengths = random_batch((2, 0, 3))
        bootstrap = t([0.0, 9.0, 0.7])
        advantages, _ = rlmath.gae(rewards, values, lengths, 0.9, 0.8, bootstrap)
        torch.testing.assert_close(
            advantages, t(naive_gae(rewards.tolist(), values.tolist(), (2, 0, 3), 0.9, 0.8, bootstrap.tolist()))
        )

    def test_lam_1_gamma_1_is_reward_to_go_minus_value(self):
        rewards, values, lengths = random_batch((4, 2))
        advantages, returns = rlmath.gae(rewards, values, lengths, 1.0, 1.0)
        to_go = torch.cat([part.flip(0).cumsum(0).flip(0) for part in rewards.split([4, 2])])
        torch.testing.assert_close(advantages, to_go - values)
        torch.testing.assert_close(returns, to_go)

    def test_lam_0_is_the_td_error(self):
        rewards, values, lengths = random_batch((3,))
        advantages, _ = rlmath.gae(rewards, values, lengths, 0.9, 0.0)
        torch.testing.assert_close(advantages, rewards + 0.9 * torch.cat([values[1:], t([0.0])]) - values)

    def test_a_perfect_critic_has_no_advantages(self):
        rewards = t([0.0, 0.0, 3.0, 1.0])
        advantages, returns = rlmath.gae(rewards, t([3.0, 3.0, 3.0, 1.0]), lens(3, 1), 1.0, 0.95)
        assert advantages.abs().max() == 0
        assert returns.tolist() == [3.0, 3.0, 3.0, 1.0]

    def test_rows_do_not_touch_each_other(self):
        rewards, values, _ = random_batch((5,))
        together, _ = rlmath.gae(rewards, values, lens(2, 3), 1.0, 0.9)
        first, _ = rlmath.gae(rewards[:2], values[:2], lens(2), 1.0, 0.9)
        second, _ = rlmath.gae(rewards[2:], values[2:], lens(3), 1.0, 0.9)
        torch.testing.assert_close(together, torch.cat([first, second]))


class TestWhitening:
    x = t([1.0, 2.0, 4.0, 9.0])  # mean 4; squared deviations 9 + 4 + 0 + 25 = 38

    def test_point_24_advantages_lose_their_mean_and_rewards_keep_it(self):
        advantages = rlmath.whiten(self.x)
        assert advantages.mean().item() == pytest.approx(0, abs=1e-12)
        assert advantages.var().item() == pytest.approx(1)
        rewards = rlmath.whiten(self.x, shift_mean=False)
        assert rewards.mean().item() == pytest.approx(4)
        assert rewards.var().item() == pytest.approx(1)

    def test_point_24_biased_and_unbiased_variance_differ(self):
        assert rlmath.masked_var(self.x).item() == pytest.approx(38 / 3)
        assert rlmath.masked_var(self.x, unbiased=False).item() == pytest.approx(38 / 4)
        assert rlmath.whiten(self.x, unbiased=False).var(correction=0).item() == pytest.approx(1)

    def test_point_24_statistics_are_masked(self):
        mask = torch.tensor([True, False, True, False])
        x = t([1.0, math.nan, 3.0, 1e9])
        assert rlmath.masked_mean(x, mask).item() == 2.0
        assert rlmath.masked_var(x, mask).item() == 2.0

    def test_one_token_and_none(self):
        assert rlmath.whiten(t([5.0])).tolist() == [0.0]
        assert rlmath.whiten(t([5.0]), shift_mean=False).tolist() == [5.0]
        assert rlmath.whiten(t([])).tolist() == []
        assert rlmath.whiten(t([2.0, 2.0, 2.0])).tolist() == [0.0, 0.0, 0.0]
        assert math.isnan(rlmath.masked_mean(t([])).item())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("number", [1000.1, -0.1, 3.3e-5, 7.0, -12345.678])
    @pytest.mark.parametrize("count", [2, 3, 999, 1000, 4097])
    def test_equal_numbers_are_exactly_their_mean_in_any_precision(self, number, count, dtype):
        """PPO computes in float32, and Adam makes a full step of the least rest."""
        x = torch.full((count,), number, dtype=dtype)
        assert rlmath.masked_mean(x) == x[0]
        assert rlmath.masked_var(x) == rlmath.masked_var(x, unbiased=False) == 0
        assert rlmath.whiten(x).abs().max() == 0
        assert (rlmath.whiten(x, shift_mean=False) == x).all()
        assert rlmath.explained_variance(x, x).isnan()

    def test_equal_scores_of_a_whole_batch_teach_nothing(self):
        lengths = np.arange(1, 60)
        values = Ragged.from_lengths(np.zeros(lengths.sum(), np.float32), lengths)
        table = Table({"scores": np.full(59, 1000.1), "values": values, "response": values})
        advantages = ppo.Advantages(lam=1.0, kl_coef=0.0)(table)["advantages"].flat
        assert np.abs(advantages).max() == 0

    def test_a_mean_passes_gradients_to_all(self):
        for x in (t([1.0, 2.0, 4.0]), torch.full((3,), 1000.1)):
            x.requires_grad_()
            torch.testing.assert_close(torch.autograd.grad(rlmath.masked_mean(x), x)[0], torch.full_like(x, 1 / 3))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_estimates_that_are_never_negative_are_not_in_float32_either(self, dtype):
        normal = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).to(dtype)
        log_r = torch.cat([normal * 10.0**k for k in range(-8, 2)])
        for kind in ("k2", "k3", "k3+", "abs"):
            assert rlmath.kl_estimate(-log_r, torch.zeros_like(log_r), kind).min() >= 0, kind


class TestBinaryDivergence:
    """Of "this token or another", against the same over a whole distribution, of which it is a lower bound."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_of_equal_policies_it_is_exactly_0_and_never_negative(self, dtype):
        old = torch.cat([-torch.logspace(-30, 5, 2001), torch.tensor([0.0, -math.inf])]).to(dtype)
        near = old + torch.randn(len(old), generator=torch.Generator().manual_seed(0)).to(dtype) * 1e-4
        for kind in ("tv", "kl"):
            assert (rlmath.binary_divergence(old, old, kind) == 0).all()
            found = rlmath.binary_divergence(near, old, kind)
            assert found.min() >= 0
            assert not found.isnan().any()

    def test_by_hand_and_at_the_ends(self):
        """From 0.5 to 0.25 and back; a token that became impossible or certain."""
        new, old = t([0.25, 0.5, 0.0, 1.0, 0.5]).log(), t([0.5, 0.25, 0.5, 0.5, 0.0]).log()
        torch.testing.assert_close(rlmath.binary_divergence(new, old), t([0.25, 0.25, 0.5, 0.5, 0.5]))
        there, back = 0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
        torch.testing.assert_close(rlmath.binary_divergence(new, old, "kl"), t([there, back, math.inf, math.inf, math.log(2)]))

    def test_it_is_at_most_that_of_the_whole_distributions(self):
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            p, q = (torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
            whole = {"tv": (p.exp() - q.exp()).abs().sum() / 2, "kl": (q.exp() * (q - p)).sum()}
            for kind, most in whole.items():
                assert rlmath.binary_divergence(p, q, kind).max() <= most + 1e-12
        with refuses(OptionError, "'js'", "tv", "kl"):
            rlmath.binary_divergence(p, q, "js")


class TestPolicyLoss:
    old = t([-1.0, -1.0, -1.0, -1.0])
    advantages = t([1.0, 1.0, -1.0, -1.0])

    def terms(self, ratios, **options):
        log_probs = (self.old + t(ratios).log()).requires_grad_()
        loss, ratio, clipped, dual = rlmath.policy_loss_terms(
            log_probs, self.old, self.advantages, options.pop("low", 0.2), options.pop("high", 0.2), **options
        )
        return loss.detach(), ratio, clipped, dual, torch.autograd.grad(loss.sum(), log_probs)[0]

    def test_gradient_at_ratio_1_is_the_policy_gradient(self):
        loss, ratio, clipped, _, gradient = self.terms([1.0] * 4)
        assert ratio.tolist() == [1.0] * 4
        assert not clipped.any()
        torch.testing.assert_close(loss, -self.advantages)
        torch.testing.assert_close(gradient, -self.advantages)  # of -A log pi; a tie in max must not halve it

    def test_clipped_tokens_have_no_gradient_and_those_on_the_way_back_do(self):
        loss, _, clipped, _, gradient = self.terms([1.5, 0.5, 1.5, 0.5])
        torch.testing.assert_close(loss, t([-1.2, -0.5, 1.5, 0.8]))
        assert clipped.tolist() == [True, False, False, True]
        torch.testing.assert_close(gradient, t([0.0, -0.5, 1.5, 0.0]))

    def test_point_36_asymmetric_clip(self):
        loss, _, clipped, _, _ = self.terms([1.25, 1.35, 0.75, 0.9], low=0.2, high=0.28)
        torch.testing.assert_close(loss, t([-1.25, -1.28, 0.8, 0.9]))
        assert clipped.tolist() == [False, True, True, False]

    def test_point_36_dual_clip_bounds_negative_advantages_only(self):
        loss, _, _, dual, gradient = self.terms([9.0, 1.0, 9.0, 2.0], dual_clip=3.0)
        torch.testing.assert_close(loss, t([-1.2, -1.0, 3.0, 2.0]))
        assert dual.tolist() == [False, False, True, False]
        assert gradient[2] == 0

    def test_a_far_ratio_stays_finite(self):
        loss, ratio, _, _ = rlmath.policy_loss_terms(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([-1.0]), 0.2, 0.2)
        assert torch.isfinite(loss).all()
        assert ratio.item() == pytest.approx(math.exp(20), rel=1e-5)

    def test_no_tokens(self):
        loss, *_ = rlmath.policy_loss_terms(t([]), t([]), t([]), 0.2, 0.2, 3.0)
        assert loss.shape == (0,)


class TestValueLoss:
    def test_point_26_half_the_larger_of_plain_and_clipped_error(self):
        values = t([2.0, 0.1, -1.0]).requires_grad_()
        loss, clipped = rlmath.value_loss_terms(values, t([0.0, 0.0, 0.0]), t([1.9, 1.0, 1.0]), clip=0.2)
        # by hand: errors 0.1, 0.9, 2; clipped values 0.2, 0.1, -0.2 with errors 1.7, 0.9, 1.2
        torch.testing.assert_close(loss.detach(), t([0.5 * 1.7**2, 0.5 * 0.9**2, 0.5 * 4.0]))
        assert clipped.tolist() == [True, False, False]
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), values)[0], t([0.0, -0.9, -2.0]))

    def test_point_26_without_clip(self):
        loss, clipped = rlmath.value_loss_terms(t([3.0]), t([0.0]), t([1.0]), clip=None)
        assert loss.item() == 2.0
        assert not clipped.any()


class TestStatistics:
    def test_explained_variance(self):
        returns = t([1.0, 2.0, 3.0])
        assert rlmath.explained_variance(returns, returns).item() == 1.0
        assert rlmath.explained_variance(t([5.0] * 3), returns).item() == 0.0
        assert rlmath.explained_variance(-returns, returns).item() == pytest.approx(-3.0)
        assert math.isnan(rlmath.explained_variance(returns, t([1.0] * 3)).item())
        assert math.isnan(rlmath.explained_variance(t([]), t([])).item())

    def test_sequence_sum(self):
        assert rlmath.sequence_sum(t([1.0, 2.0, 4.0]), lens(2, 0, 1)).tolist() == [3.0, 0.0, 4.0]
        assert rlmath.sequence_sum(t([]), lens(0, 0)).tolist() == [0.0, 0.0]
