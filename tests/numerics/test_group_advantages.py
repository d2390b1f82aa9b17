"""Advantages without a critic: by hand, by what must not change them, and against TRL's and verl's own code."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import each, refuses

from hfsdk.algorithms import filtering, groups, grpo, reinforce_pp, remax, rlmath, rloo
from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.table import Ragged, Table

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "peer_groups.json").read_text())


def t(values):
    return torch.tensor(values, dtype=torch.float64)


def g(*names):
    return torch.tensor(names)


def table(scores, group=None, lengths=None, old=None, ref=None, **more):
    lengths = lengths or [1] * len(scores)
    rows = {
        "scores": np.array(scores), "response": Ragged.from_lengths(np.zeros(sum(lengths), np.int32), lengths),
        "group": np.array(group if group is not None else [0] * len(scores)), **more,
    }  # fmt: skip
    if old is not None:
        rows |= {"old_log_probs": Ragged.from_lengths(np.array(old), lengths)}
        rows |= {"ref_log_probs": Ragged.from_lengths(np.array(ref), lengths)}
    return Table(rows)


def from_peer(case, **more):
    return table(case["scores"], case["group"], case["lengths"], case["old_log_probs"], case["ref_log_probs"], **more)


class TestPeers:
    def test_trl_grpo(self):
        case = ORACLE["trl"]
        for scale in ("group", "batch", "none"):
            ours = grpo.group_advantages(t(case["scores"]), g(*case["group"]), scale, case["options"]["epsilon"])
            torch.testing.assert_close(ours, t(case["expected"][f"grpo_{scale}"]), rtol=1e-7, atol=0)  # TRL counts in float32

    def test_trl_rloo_with_kl(self):
        case = ORACLE["trl"]
        made = rloo.Advantages(kl_coef=case["options"]["kl_coef"])(from_peer(case))["advantages"]
        assert [row.tolist() for row in made] == [[row[0]] * n for row, n in zip(made, case["lengths"], strict=True)]
        np.testing.assert_allclose([row[0] for row in made], case["expected"]["rloo"], rtol=1e-6)

    def test_verl_grpo_uneven_groups_out_of_order(self):
        case = ORACLE["verl"]
        for scale in ("group", "none"):
            made = grpo.Advantages(scale=scale, epsilon=case["options"]["epsilon"])(from_peer(case))["advantages"]
            np.testing.assert_allclose(made.flat, case["expected"][f"grpo_{scale}"], rtol=1e-6, err_msg=scale)

    def test_verl_rloo_remax_and_reinforce_pp(self):
        case, kl_coef = ORACLE["verl"], ORACLE["verl"]["options"]["kl_coef"]
        rows = from_peer(case, baseline_scores=np.array(case["baseline_scores"]))
        plus = reinforce_pp.Advantages(kl_coef=kl_coef, gamma=case["options"]["gamma"])(rows)
        ours = {
            "rloo": rloo.Advantages(kl_coef=kl_coef)(rows)["advantages"],
            "remax": remax.Advantages(kl_coef=kl_coef)(rows)["advantages"],
            "reinforce_pp": plus["advantages"], "reinforce_pp_returns": plus["returns"],
        }  # fmt: skip
        for name, column in ours.items():
            np.testing.assert_allclose(column.flat, case["expected"][name], rtol=2e-6, atol=1e-6, err_msg=name)


class TestGroupAdvantages:
    def test_point_28_by_hand(self):
        """Group 0: 1, 2, 3, mean 2, deviation 1. Group 5: 0 and 4, mean 2, deviation sqrt(8)."""
        scores, group = t([1, 0, 2, 4, 3]), g(0, 5, 0, 5, 0)
        assert grpo.group_advantages(scores, group, "none").tolist() == [-1, -2, 0, 2, 1]
        ours = grpo.group_advantages(scores, group, "group", epsilon=1.0)
        torch.testing.assert_close(ours, t([-0.5, -2 / (math.sqrt(8) + 1), 0, 2 / (math.sqrt(8) + 1), 0.5]))
        everything = math.sqrt(10 / 4)  # all five: mean 2, squares 1 + 4 + 0 + 4 + 1
        ours = grpo.group_advantages(scores, group, "batch", epsilon=0.5)
        torch.testing.assert_close(ours, t([-1, -2, 0, 2, 1]) / (everything + 0.5))

    def test_point_28_leave_one_out_by_hand(self):
        """1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; and a group of two: 10 - 4 and 4 - 10."""
        ours = rloo.leave_one_out(t([1, 10, 2, 4, 6]), g(0, 1, 0, 1, 0))
        torch.testing.assert_close(ours, t([-3, 6, -1.5, -6, 4.5]))

    def test_point_28_identical_scores_and_a_group_of_one_get_exactly_0(self):
        functions, values, dtypes = (
            (grpo.group_advantages, rloo.leave_one_out),
            (0.1, -7.3, 1e8, 0.0),
            (torch.float32, torch.float64),
        )
        for function, value, dtype in product(functions, values, dtypes):
            scores = torch.tensor([value, 1.0, value, 2.0, value, 5.0], dtype=dtype)
            ours = function(scores, g(3, 1, 3, 1, 3, 9))
            assert ours[[0, 2, 4, 5]].tolist() == [0, 0, 0, 0], (function, value, dtype)
            assert ours[1] < 0 < ours[3], (function, value, dtype)

    def test_point_28_which_groups_are_degenerate(self):
        ours = groups.identical_in_group(t([1, 2, 1, 2, 3, 2]), g(0, 1, 0, 1, 7, 1))
        assert ours.tolist() == [True] * 6
        assert groups.identical_in_group(t([1, 2, 1.5]), g(0, 1, 0)).tolist() == [False, True, False]

    @pytest.mark.parametrize("function", [grpo.group_advantages, rloo.leave_one_out])
    def test_what_does_not_change_them(self, function):
        generator = torch.Generator().manual_seed(0)
        scores, group = torch.randn(12, generator=generator, dtype=torch.float64), g(*[0, 1, 2] * 4)
        ours = function(scores, group)
        shift = t([5, -2, 100])[group]
        torch.testing.assert_close(function(scores + shift, group), ours)
        order = torch.randperm(12, generator=generator)
        torch.testing.assert_close(function(scores[order], group[order]), ours[order])
        torch.testing.assert_close(function(scores, -7 * group + 3), ours)
        for name in range(3):
            assert ours[group == name].sum().item() == pytest.approx(0, abs=1e-9)
            torch.testing.assert_close(function(scores[group == name], group[group == name]), ours[group == name])

    def test_scale_invariance_is_of_the_normalised_alone(self):
        scores, group = t([1, 2, 4, 0, 1, 5]), g(0, 0, 0, 1, 1, 1)
        factor = t([10, 0.3])[group]
        plain = grpo.group_advantages(scores, group)
        torch.testing.assert_close(grpo.group_advantages(scores * factor, group), plain, rtol=1e-4, atol=0)
        raw = grpo.group_advantages(scores, group, "none")
        torch.testing.assert_close(grpo.group_advantages(scores * factor, group, "none"), raw * factor)
        torch.testing.assert_close(rloo.leave_one_out(scores * factor, group), rloo.leave_one_out(scores, group) * factor)
        for name in range(2):
            assert plain[group == name].std().item() == pytest.approx(1, rel=1e-5)

    def test_nan_stays_in_its_group(self):
        scores, group = t([1, math.nan, 3, 1, 2, 3]), g(0, 0, 0, 1, 1, 1)
        for ours in (grpo.group_advantages(scores, group), rloo.leave_one_out(scores, group)):
            assert ours[:3].isnan().all()
            assert ours[3:].isfinite().all()
        assert not groups.identical_in_group(t([math.nan, math.nan]), g(0, 0)).any()

    def test_other_scale(self):
        with refuses(OptionError, "scale='sequence'"):
            grpo.group_advantages(t([1.0]), g(0), "sequence")

    def test_gradients_of_no_one(self):
        assert grpo.group_advantages(t([]), torch.zeros(0, dtype=torch.int64)).shape == (0,)


class TestRewardToGo:
    def test_by_hand(self):
        ours = rlmath.reward_to_go(t([1, 2, 3, 10, 20]), torch.tensor([3, 0, 2]), gamma=0.5)
        assert ours.tolist() == [1 + 0.5 * (2 + 0.5 * 3), 2 + 0.5 * 3, 3, 10 + 0.5 * 20, 20]

    def test_reinforce_pp_by_hand(self):
        """Scores 1 and -1, KL 0.5 and -0.5, then 0; beta 0.2. Returns by hand, then mean 0 and variance 1 (over T - 1)."""
        rows = table([1.0, -1.0], lengths=[2, 1], old=[-1.0, -2.0, -1.0], ref=[-1.5, -1.5, -1.0])
        made = reinforce_pp.Advantages(kl_coef=0.2)(rows)
        np.testing.assert_allclose(made["kl"].flat, [0.5, -0.5, 0], atol=1e-7)
        np.testing.assert_allclose(made["rewards"].flat, [-0.1, 1.1, -1.0], rtol=1e-6)
        returns = np.array([1.0, 1.1, -1.0])
        np.testing.assert_allclose(made["returns"].flat, returns, rtol=1e-6)
        np.testing.assert_allclose(made["advantages"].flat, (returns - returns.mean()) / returns.std(ddof=1), rtol=1e-5)

    def test_reinforce_pp_does_not_mind_groups_nor_scale(self):
        scores, lengths = [1.0, 4.0, 2.0, -1.0], [2, 1, 3, 1]
        made = reinforce_pp.Advantages(kl_coef=0.0)(table(scores, [0, 0, 1, 1], lengths))["advantages"]
        other = reinforce_pp.Advantages(kl_coef=0.0)(table([10 * s - 3 for s in scores], [0, 1, 2, 3], lengths))["advantages"]
        np.testing.assert_allclose(made.flat, other.flat, rtol=1e-5)
        same = reinforce_pp.Advantages(kl_coef=0.0)(table([0.1] * 7, lengths=[3] * 7))
        np.testing.assert_allclose(same["advantages"].flat, np.zeros(21), atol=1e-6)

    def test_point_28_remax_by_hand(self):
        """Scores 3 and 1 against greedy 2 and 2; beta 0.1, KL 1 then 2 in the first response, 0 in the second."""
        old, ref, greedy = [-1.0, -1.0, -1.0], [-2.0, -3.0, -1.0], np.array([2.0, 2.0])
        rows = table([3.0, 1.0], lengths=[2, 1], old=old, ref=ref, baseline_scores=greedy)
        made = remax.Advantages(kl_coef=0.1)(rows)
        np.testing.assert_allclose(made["rewards"].flat, [-0.1, 1 - 0.2, -1], rtol=1e-6)
        np.testing.assert_allclose(made["advantages"].flat, [0.7, 0.8, -1], rtol=1e-6)
        clipped = remax.Advantages(kl_coef=0.0, score_clip=0.5)(rows)
        np.testing.assert_allclose(clipped["advantages"].flat, [0.5, 0.5, -0.5])

    def test_remax_baselines_by_rows(self):
        made = remax.Advantages(kl_coef=0.0)(table([5.0, 1.0], lengths=[2, 1], baseline_scores=np.array([2.0, 4.0])))
        assert made["advantages"].flat.tolist() == [3.0, 3.0, -3.0], "each row against its own"
        lone = remax.Advantages(kl_coef=0.0)(table([5.0], baseline_scores=np.array([5.0])))
        assert lone["advantages"].flat.tolist() == [0.0]


MADE = [
    grpo.Advantages(), rloo.Advantages(kl_coef=0.0), remax.Advantages(kl_coef=0.0), reinforce_pp.Advantages(kl_coef=0.0),
]  # fmt: skip


class TestColumns:
    def test_rloo_by_hand_with_kl_and_clip(self):
        """Rewards: 1 (clipped) - 0.5 * 1, and -1 (clipped) - 0.5 * (-2)."""
        rows = table([9.0, -9.0], lengths=[2, 1], old=[-1.0, -1.0, -3.0], ref=[-1.5, -1.5, -1.0])
        made = rloo.Advantages(kl_coef=0.5, score_clip=1.0)(rows)
        np.testing.assert_allclose(made["advantages"].flat, [0.5, 0.5, -0.5], rtol=1e-6)
        np.testing.assert_allclose(made["kl"].flat, [0.5, 0.5, -2.0])

    def test_float32_one_number_per_token_and_empty_responses(self):
        rows = table([1.0, 2.0, 3.0], [0, 0, 0], [2, 0, 1], baseline_scores=np.zeros(3))
        for fn in MADE:
            made = fn(rows)
            assert set(made) == set(fn.writes), fn
            for column in made.values():
                assert column.lengths.tolist() == [2, 0, 1], fn
                assert column.dtype == np.float32, fn
                assert np.isfinite(column.flat).all(), fn

    def test_scores_that_are_not_finite(self):
        for fn, bad in product(MADE, (math.inf, -math.inf, math.nan)):
            with refuses(ColumnError, "'scores'", f"is {bad}", "sample 1", "1 more", "batch.take"):
                fn(table([1.0, bad, bad], baseline_scores=np.zeros(3)))

    def test_baselines_that_are_not_finite(self):
        with refuses(ColumnError, "'baseline_scores'", "inf", "sample 0"):
            remax.Advantages(kl_coef=0.0)(table([1.0], baseline_scores=np.array([math.inf])))

    def test_very_large_scores_stay_finite(self):
        made = grpo.Advantages()(table([3e38, -3e38, 0.0]))["advantages"]
        np.testing.assert_allclose(made.flat, [1, -1, 0], atol=1e-6)

    def test_rows_that_teach(self):
        rows = table([1, 1, 2, 3, 5, 0.1, 0.1, 0.1], [0, 0, 1, 1, 2, 3, 3, 3])
        assert filtering.informative_rows(rows) == [2, 3]


class TestIncreaseVariance:
    """Against every corner of the feasible set, found by brute force: a corner has at most one level that is not an end."""

    @staticmethod
    def corners(levels, counts, low, high):
        total = sum(level * count for level, count in zip(levels, counts, strict=True))
        for top in range(len(levels) + 1):
            for bottom in range(len(levels) - top + 1):
                middle = counts[bottom : len(levels) - top]
                given = total - high * sum(counts[len(levels) - top :]) - low * sum(counts[:bottom])
                if not middle:
                    if abs(given) < 1e-12:
                        yield [low] * bottom + [high] * top
                elif low - 1e-12 <= (value := given / sum(middle)) <= high + 1e-12:
                    yield [low] * bottom + [value] * len(middle) + [high] * top

    @each("seed", range(40))
    def test_no_corner_has_more_variance(self, seed):
        rng = np.random.default_rng(seed)
        scores = rng.choice([-1.0, -0.5, 0.0, 0.25, 0.5, 1.0], size=rng.integers(2, 9))
        low, high = float(scores.min()) - rng.choice([0.0, 0.5]), float(scores.max()) + rng.choice([0.0, 0.5])
        found = groups.increase_variance(torch.tensor(scores), torch.zeros(len(scores)), low, high).numpy()
        levels, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
        levels, counts = levels.tolist(), counts.tolist()
        if len(levels) == 1:
            assert (found == scores).all()
            return
        best = max(sum(c * z**2 for z, c in zip(corner, counts, strict=True)) for corner in self.corners(levels, counts, low, high))
        assert (found**2).sum() == pytest.approx(best)
        assert found.mean() == pytest.approx(scores.mean())
        assert found.min() >= low - 1e-12
        assert found.max() <= high + 1e-12
        order = np.array([found[which == level][0] for level in range(len(levels))])
        assert (np.diff(order) >= -1e-12).all()
        assert all(np.ptp(found[which == level]) == 0 for level in range(len(levels)))

    def test_by_hand(self):
        scores = torch.tensor([0.1, 0.2, 0.4, 0.9, 5.0])
        group = torch.tensor([0, 0, 0, 0, 1])
        assert groups.increase_variance(scores, group, 0.0, 5.0)[:4].tolist() == pytest.approx([0, 0, 0, 1.6])
        assert groups.increase_variance(scores[:4], group[:4], 0.0, 1.0).tolist() == pytest.approx([0, 0, 0.6, 1])
        assert groups.increase_variance(scores, group)[4] == 5.0

    def test_a_score_outside_the_range(self):
        with refuses(OptionError, "0.1 to 0.9", "0 to 0.5"):
            groups.increase_variance(torch.tensor([0.1, 0.9]), torch.zeros(2), 0.0, 0.5)
