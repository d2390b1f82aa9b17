"""PPO's losses, advantages and step, on fake micro-batches and fake handles. Names follow docs/checklist.md."""

import json
import math
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from expect import each, refuses

from hfsdk.algorithms import PPO, ppo
from hfsdk.algorithms.invariants import invariants
from hfsdk.algorithms.step import Statistics, Step
from hfsdk.core.batch import Batch
from hfsdk.core.errors import ColumnError, HfsdkError, InvariantWarning, OptionError
from hfsdk.core.table import Ragged, Table
from hfsdk.engine.training.loss import TokenBatch, aggregate

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "peer_ppo.json").read_text())
LENGTHS = (3, 1, 0, 4)


def table(seed=0, lengths=LENGTHS):
    rng = np.random.default_rng(seed)

    def ragged(values):
        return Ragged.from_lengths(values.astype(np.float32), lengths)

    num = sum(lengths)
    old = -rng.exponential(1.0, num)
    reasons = np.array(["stop" if i % 2 == 0 else "length" for i in range(len(lengths))])
    return Table({
        "response": Ragged.from_lengths(rng.integers(0, 9, num), lengths),
        "old_log_probs": ragged(old), "rollout_log_probs": ragged(old + rng.normal(0, 0.01, num)),
        "ref_log_probs": ragged(old + rng.normal(0, 0.3, num)), "values": ragged(rng.normal(0, 1, num)),
        "scores": rng.normal(0, 1, len(lengths)).astype(np.float32), "finish_reason": reasons,
    })  # fmt: skip


def micro_batch(seed=0, num=8, shift=0.0):
    """Return fake ``out`` and ``b``; the policy moved by about ``shift`` since old_log_probs."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(num, generator=g) - 0.1
    log_probs = (old + shift * torch.randn(num, generator=g)).requires_grad_()
    out = SimpleNamespace(log_probs=log_probs, entropy=torch.rand(num, generator=g).requires_grad_())
    b = {"old_log_probs": old, "advantages": torch.randn(num, generator=g), "ref_log_probs": old - 0.3}
    return out, b


class FakeBatch(Batch):
    """Runs map and reduce at once, on a pickled copy of the function, and checks the columns as Batch does."""

    def __init__(self, rows, log=()):
        self.rows, self.log = rows, list(log)

    @property
    def columns(self):
        return tuple(self.rows)

    def __contains__(self, name):
        return name in self.rows

    def _run(self, fn, reads):
        return pickle.loads(pickle.dumps(fn))(Table({name: self.rows[name] for name in reads}))

    def map(self, fn, reads, writes):
        columns = self._run(fn, reads)
        assert set(columns) == set(writes)
        return FakeBatch(self.rows.with_columns(columns), self.log)

    def reduce(self, fn, reads):
        return SimpleNamespace(value=self._run(fn, reads))

    def alias(self, name, source):
        return FakeBatch(self.rows.with_columns({name: self.rows[source]}), [*self.log, f"alias {name} = {source}"])

    def logged(self, what, *columns):
        full = table()
        return FakeBatch(self.rows.with_columns({c: full[c] for c in columns}), [*self.log, what])


class FakeModels:
    """Handles that log their calls; an update runs the loss once on the whole batch at the old policy."""

    def __init__(self):
        self.actor = self.critic = self.reference = self.reward = None
        self.updates = []
        self.actor = SimpleNamespace(
            generate=self.generate,
            compute_log_probs=lambda b: b.logged("actor.compute_log_probs", "old_log_probs"),
            update=self.update("actor"),
        )
        self.critic = SimpleNamespace(
            compute_values=lambda b: b.logged("critic.compute_values", "values"), update=self.update("critic")
        )
        self.reference = SimpleNamespace(compute_log_probs=lambda b: b.logged("reference.compute_log_probs", "ref_log_probs"))
        self.reward = SimpleNamespace(compute_scores=lambda b: b.logged("reward.compute_scores", "scores"))

    def generate(self, prompts, **sampling):
        self.sampling = sampling
        return prompts.logged("actor.generate", "response", "rollout_log_probs", "finish_reason")

    def update(self, role):
        def run(batch, loss, *, epochs, mini_batches):
            rows = {n: c for n, c in batch.rows.items() if n in ("response", *loss.reads)}
            b = TokenBatch(Table(rows), num_tokens=sum(LENGTHS), num_rows=len(LENGTHS))
            out = SimpleNamespace(log_probs=None, entropy=None, values=None)
            if role == "actor":
                out = SimpleNamespace(log_probs=b["old_log_probs"].clone(), entropy=torch.ones(sum(LENGTHS)))
            else:
                out = SimpleNamespace(values=b["values"].clone())
            per_token, metrics = loss(out, b)
            row = {n: float(m.max() if n.endswith("_max") else m.mean()) for n, m in metrics.items()}
            row["loss"] = float(aggregate(per_token, b, loss.aggregation, fixed_length=loss.fixed_length))
            self.updates.append((role, batch, loss, epochs, mini_batches))
            return SimpleNamespace(rows=[row] * (epochs * mini_batches))

        return run


def run_step(algorithm, reference=True):
    models = FakeModels()
    models.reference = models.reference if reference else None
    step = algorithm.step(models, FakeBatch(Table({"prompt": Ragged.of([[1]] * len(LENGTHS))})))
    return step, models


class TestPolicyLoss:
    def test_point_29_first_mini_batch_has_ratio_1_kl_0_and_no_clipping(self):
        out, b = micro_batch()
        loss, metrics = ppo.PolicyLoss(dual_clip=3.0)(out, b)
        assert metrics["ratio"].tolist() == [1.0] * 8
        assert metrics["ratio_max"].max() == 1
        for name in ("approx_kl", "approx_kl_k1", "clip_fraction", "dual_clip_fraction"):
            assert metrics[name].abs().max() == 0
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), out.log_probs)[0], -b["advantages"])

    def test_point_30_a_loss_never_divides(self):
        """A split of the tokens gives the same numbers, for every aggregation: only the engine divides."""
        out, b = micro_batch(shift=0.3)
        for aggregation in ppo.AGGREGATIONS:
            fixed_length = 7 if aggregation == "fixed_length" else 0
            loss_fn = ppo.PolicyLoss(entropy_coef=0.1, kl_coef=0.1, aggregation=aggregation, fixed_length=fixed_length)
            whole, metrics = loss_fn(out, b)
            parts = []
            for part in (slice(0, 5), slice(5, 8)):
                piece = SimpleNamespace(log_probs=out.log_probs[part], entropy=out.entropy[part])
                parts.append(loss_fn(piece, {name: x[part] for name, x in b.items()})[0])
            torch.testing.assert_close(torch.cat(parts), whole)
            assert all(m.shape == whole.shape and not m.requires_grad for m in metrics.values())

    @each("case, aggregation", product(ORACLE["verl"], ppo.AGGREGATIONS))
    def test_point_30_aggregations_are_verls_also_in_micro_batches(self, case, aggregation):
        o, lengths = case["options"], case["lengths"]
        loss_fn = ppo.PolicyLoss(
            clip=o["clip_low"], clip_high=o["clip_high"], dual_clip=o["dual_clip"], aggregation=aggregation,
            fixed_length=o["fixed_length"] if aggregation == "fixed_length" else 0,
        )  # fmt: skip
        columns = {n: Ragged.from_lengths(np.array(case[n]), lengths) for n in ("old_log_probs", "log_probs")}
        columns["advantages"] = Ragged.from_lengths(np.array(case["expected"]["advantages"]), lengths)
        rows, total = Table({**columns, "response": columns["log_probs"]}), 0.0
        for part in (range(1), range(1, len(lengths))):
            b = TokenBatch(rows.take(list(part)), num_tokens=sum(lengths), num_rows=len(lengths))
            out = SimpleNamespace(log_probs=b["log_probs"], entropy=torch.zeros_like(b["log_probs"]))
            total += aggregate(loss_fn(out, b)[0], b, loss_fn.aggregation, fixed_length=loss_fn.fixed_length)
        assert float(total) == pytest.approx(case["expected"]["aggregated"][aggregation], rel=1e-5)

    def test_point_35_entropy_lowers_the_loss(self):
        out, b = micro_batch()
        loss, metrics = ppo.PolicyLoss(entropy_coef=0.1)(out, b)
        torch.testing.assert_close(loss, metrics["policy_loss"] - 0.1 * out.entropy)
        assert (torch.autograd.grad(loss.sum(), out.entropy)[0] < 0).all()  # descent raises the entropy

    def test_point_36_asymmetric_and_dual_clip(self):
        old = torch.zeros(4)
        out = SimpleNamespace(log_probs=torch.tensor([1.25, 1.35, 0.7, 9.0]).log(), entropy=old)
        b = {"old_log_probs": old, "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0])}
        loss, metrics = ppo.PolicyLoss(clip=0.2, clip_high=0.28, dual_clip=3.0)(out, b)
        torch.testing.assert_close(loss, torch.tensor([-1.25, -1.28, 0.8, 3.0]))
        assert metrics["clip_fraction"].tolist() == [0, 1, 1, 0]
        assert metrics["dual_clip_fraction"].tolist() == [0, 0, 0, 1]

    def test_point_17_kl_in_the_loss_has_its_own_gradient_and_column(self):
        out, b = micro_batch(shift=0.1)
        loss_fn = ppo.PolicyLoss(kl_coef=0.5, kl="k2")
        loss, metrics = loss_fn(out, b)
        torch.testing.assert_close(loss, metrics["policy_loss"] + 0.5 * metrics["kl_loss"])
        with_kl = torch.autograd.grad(loss.sum(), out.log_probs)[0]
        without = torch.autograd.grad(ppo.PolicyLoss()(out, b)[0].sum(), out.log_probs)[0]
        torch.testing.assert_close(with_kl - without, 0.5 * (out.log_probs - b["ref_log_probs"]).detach())
        assert loss_fn.reads == ["old_log_probs", "advantages", "ref_log_probs"]
        assert ppo.PolicyLoss().reads == ["old_log_probs", "advantages"]

    def test_point_17_the_kl_in_the_loss_is_of_the_policy_against_the_reference(self):
        """Its gradient over both sides: k3 of the reference against the policy would grow where this one levels off; k1's is 1
        everywhere, whichever of the two is above (so it teaches nothing in expectation)."""
        out, b = micro_batch(shift=0.1)
        sides = torch.where(torch.arange(len(out.log_probs)) % 2 == 0, 0.9, -0.7)
        b["ref_log_probs"] = out.log_probs.detach() - sides
        slopes = {
            "k1": torch.ones_like(sides), "k2": sides, "k3": 1 - (-sides).exp(), "k3+": sides, "abs": sides.sign(),
        }  # fmt: skip
        for kind, slope in slopes.items():
            loss, metrics = ppo.PolicyLoss(kl_coef=0.5, kl=kind)(out, b)
            plain = ppo.PolicyLoss()(out, b)[0]
            added = torch.autograd.grad((loss - plain).sum(), out.log_probs)[0]
            torch.testing.assert_close(added, 0.5 * slope, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(metrics["kl_loss"].sign(), sides.sign() if kind == "k1" else torch.ones_like(sides))

    def test_point_17_k1_is_the_difference_itself_and_has_both_signs(self):
        from hfsdk.algorithms import rlmath

        policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
        assert rlmath.kl_estimate(policy, reference, "k1").tolist() == [0.5, -1.0]

    def test_approx_kl_is_of_old_against_new(self):
        out, b = micro_batch(shift=0.3)
        _, metrics = ppo.PolicyLoss()(out, b)
        ratio = (out.log_probs - b["old_log_probs"]).detach().exp()
        torch.testing.assert_close(metrics["approx_kl"], ratio - 1 - ratio.log(), atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(metrics["approx_kl_k1"], -ratio.log(), atol=1e-6, rtol=1e-4)

    def test_an_empty_micro_batch(self):
        out, b = micro_batch(num=0)
        loss, metrics = ppo.PolicyLoss(entropy_coef=0.1, kl_coef=0.1, dual_clip=2.0)(out, b)
        assert loss.shape == (0,)
        assert loss.requires_grad
        assert all(m.shape == (0,) for m in metrics.values())

    def test_options_are_checked_when_made(self):
        for name, value in (
            ("clip", 0.0), ("clip", 1.1), ("clip_high", -0.1), ("dual_clip", 1.0), ("entropy_coef", -1.0), ("kl_coef", math.nan),
            ("kl", "k4"), ("aggregation", "mean"), ("fixed_length", 5),
        ):  # fmt: skip
            with refuses(OptionError, f"{name}={value!r}"):
                ppo.PolicyLoss(**{name: value})
        with refuses(OptionError, "fixed_length=0"):
            ppo.PolicyLoss(aggregation="fixed_length")


VALUE_BATCH = {"values": torch.tensor([0.0, 0.0]), "returns": torch.tensor([1.9, 1.0])}


class TestValueLoss:
    def test_point_26_new_values_are_clipped_around_the_old_ones(self):
        values = torch.tensor([2.0, 0.1], requires_grad=True)
        loss, metrics = ppo.ValueLoss(clip=0.2)(SimpleNamespace(values=values), VALUE_BATCH)
        torch.testing.assert_close(loss.detach(), torch.tensor([0.5 * 1.7**2, 0.5 * 0.9**2]))
        assert metrics["value_clip_fraction"].tolist() == [1.0, 0.0]
        assert metrics["value_mean"].tolist() == pytest.approx([2.0, 0.1])
        assert torch.autograd.grad(loss.sum(), values)[0][0] == 0

    def test_clip_none(self):
        loss, metrics = ppo.ValueLoss(clip=None)(SimpleNamespace(values=torch.tensor([2.0, 0.1])), VALUE_BATCH)
        torch.testing.assert_close(loss, torch.tensor([0.005, 0.405]))
        assert metrics["value_clip_fraction"].sum() == 0

    def test_options(self):
        assert ppo.ValueLoss().reads == ["values", "returns"]
        assert ppo.ValueLoss().aggregation == "token_mean"
        for options in ({"clip": 0.0}, {"aggregation": "sum"}):
            with pytest.raises(OptionError):
                ppo.ValueLoss(**options)


class TestAdvantages:
    def run(self, **options):
        return ppo.advantages(FakeBatch(table()), **options).rows

    def test_point_17_and_19_rewards(self):
        rows, given = self.run(kl_coef=0.1), table()
        kl = given["old_log_probs"].flat - given["ref_log_probs"].flat
        np.testing.assert_allclose(rows["kl"].flat, kl, atol=1e-6)
        expected = -0.1 * kl
        expected[[2, 3, 7]] += given["scores"][[0, 1, 3]]  # last tokens of rows of 3, 1, 0 and 4
        np.testing.assert_allclose(rows["rewards"].flat, expected, atol=1e-6)
        assert rows["rewards"].lengths.tolist() == list(LENGTHS)
        assert rows["rewards"].dtype == np.float32

    def test_point_22_23_24_25_against_naive_loops(self):
        rows, given = self.run(), table()
        rewards, values = rows["rewards"], given["values"]
        expected = []
        for r, v in zip(rewards, values, strict=True):
            running, row = 0.0, []
            for i in reversed(range(len(r))):
                next_value = v[i + 1] if i + 1 < len(r) else 0.0
                running = r[i] + 1.0 * next_value - v[i] + 1.0 * 0.95 * running  # the defaults
                row.insert(0, running)
            expected += row
        raw = np.array(expected)
        np.testing.assert_allclose(rows["returns"].flat, raw + values.flat, atol=1e-5)  # before whitening
        np.testing.assert_allclose(rows["advantages"].flat, (raw - raw.mean()) / raw.std(ddof=1), atol=1e-4)
        np.testing.assert_allclose(self.run(whiten=False)["advantages"].flat, raw, atol=1e-5)

    def test_point_23_defaults(self):
        assert (PPO().gamma, PPO().lam) == (1.0, 0.95)
        assert ppo.Advantages() == ppo.Advantages(gamma=1.0, lam=0.95)

    def test_point_24_reward_whitening_keeps_the_mean(self):
        plain, whitened = self.run()["rewards"].flat, self.run(whiten_rewards=True)["rewards"].flat
        assert whitened.mean() == pytest.approx(plain.mean(), abs=1e-5)
        assert whitened.std(ddof=1) == pytest.approx(1.0, abs=1e-4)

    def test_point_06_missing_eos_after_clipping(self):
        rows = self.run(kl_coef=0.0, score_clip=0.01, missing_eos_penalty=1.0)
        given, last = table(), [2, 3, 7]
        clipped = np.clip(given["scores"][[0, 1, 3]], -0.01, 0.01)
        np.testing.assert_allclose(rows["rewards"].flat[last], clipped - [0, 1, 1], atol=1e-6)

    def test_without_kl_no_reference_is_needed(self):
        rows = {n: c for n, c in table().items() if n in ("scores", "values")}
        result = ppo.advantages(FakeBatch(Table(rows)), kl_coef=0.0).rows
        assert set(result) == {"scores", "values", "rewards", "advantages", "returns"}
        assert np.isfinite(result["advantages"].flat).all()
        with refuses(ColumnError, "old_log_probs"):
            ppo.advantages(FakeBatch(Table(rows)))

    def test_other_estimators_change_the_reward_but_not_the_kl_column(self):
        k1, k3 = self.run(kl="k1"), self.run(kl="k3")
        assert k1["kl"] == k3["kl"]
        assert k1["rewards"] != k3["rewards"]

    def test_tiny_batches(self):
        for lengths in ((1, 1), (0, 0), (1,), (0, 2)):
            rows = ppo.advantages(FakeBatch(table(lengths=lengths))).rows
            assert rows["advantages"].lengths.tolist() == list(lengths)
            assert np.isfinite(rows["advantages"].flat).all(), lengths

    def test_options_fail_at_the_call(self):
        wrong = {"gamma": 1.1, "lam": -0.1, "kl_coef": -1.0, "kl": "kl", "missing_eos_penalty": -1.0, "score_clip": 0.0}
        for name, value in wrong.items():
            with refuses(OptionError, f"{name}={value!r}"):
                self.run(**{name: value})

    def test_a_score_that_is_not_finite_is_told_by_sample(self):
        rows = table()
        scores = np.array(rows["scores"])
        scores[1] = np.inf
        with refuses(ColumnError, "'scores'", "inf", "sample 1"):
            ppo.advantages(FakeBatch(rows.with_columns({"scores": scores})))

    def test_read_only_columns(self):
        rows = table()
        for column in rows.values():
            (column.flat if isinstance(column, Ragged) else column).flags.writeable = False
        ppo.advantages(FakeBatch(rows))


class TestStep:
    def test_order_of_calls(self):
        step, models = run_step(PPO(max_new_tokens=7, temperature=0.7, n=2))
        assert step.batch.log == [
            "actor.generate", "actor.compute_log_probs", "reference.compute_log_probs", "critic.compute_values",
            "reward.compute_scores",
        ]  # fmt: skip
        assert [update[0] for update in models.updates] == ["critic", "actor"]
        assert models.sampling == {"max_new_tokens": 7, "temperature": 0.7, "n": 2}

    def test_point_12_old_log_probs_recomputed_or_from_the_rollout(self):
        assert "actor.compute_log_probs" in run_step(PPO())[0].batch.log
        step, _ = run_step(PPO(old_log_probs="rollout"))
        assert "actor.compute_log_probs" not in step.batch.log
        assert "alias old_log_probs = rollout_log_probs" in step.batch.log
        assert step.batch.rows["old_log_probs"] == step.batch.rows["rollout_log_probs"]

    def test_point_17_kl_in_reward_or_in_loss(self):
        _, models = run_step(PPO(kl_in="reward", kl_coef=0.1))
        assert models.updates[1][2].kl_coef == 0
        step, models = run_step(PPO(kl_in="loss", kl="k3+", kl_coef=0.1))
        assert models.updates[1][2] == ppo.PolicyLoss(kl_coef=0.1, kl="k3+")
        assert np.count_nonzero(step.batch.rows["rewards"].flat) == 3  # the scores alone
        with refuses(OptionError, "kl='k1'", "k2", "k3+"):
            PPO(kl_in="loss", kl="k1")

    def test_point_25_one_set_of_returns_for_all_epochs(self):
        _, models = run_step(PPO(epochs=4))
        (_, critic_batch, *_), (_, actor_batch, *_) = models.updates
        assert critic_batch is actor_batch
        assert [u[3] for u in models.updates] == [4, 4]

    def test_point_31_epochs_and_mini_batches_reach_both_updates(self):
        step, models = run_step(PPO(epochs=3, mini_batches=4))
        assert [update[3:] for update in models.updates] == [(3, 4), (3, 4)]
        assert len(step.actor.rows) == 12

    def test_without_kl_there_is_no_reference(self):
        algorithm = PPO(kl_coef=0.0)
        assert algorithm.roles == ("actor", "critic", "reward")
        step, _ = run_step(algorithm, reference=False)
        assert "reference.compute_log_probs" not in step.batch.log
        with pytest.warns(InvariantWarning, match="rollout_gap"):
            assert "kl_mean" not in algorithm.metrics(step)
        assert PPO().roles == ("actor", "critic", "reference", "reward")

    def test_fixed_length_is_the_longest_response(self):
        assert PPO(aggregation="fixed_length", max_new_tokens=9).policy_loss.fixed_length == 9

    def test_point_11_and_40_numbers_to_watch(self):
        algorithm = PPO(mini_batches=1)
        step, _ = run_step(algorithm)
        with pytest.warns(InvariantWarning, match="rollout_gap"):  # of the columns made up here
            numbers = algorithm.metrics(step)
        wanted = {
            "score_mean", "score_std", "kl_mean", "response_tokens_mean", "response_tokens_max", "eos_rate", "entropy",
            "clip_fraction", "approx_kl", "explained_variance", "rollout_gap_mean", "rollout_gap_max", "policy_loss",
            "value_loss", "value_clip_fraction", "actor_loss", "critic_loss", "ratio_max",
        }  # fmt: skip
        assert wanted <= set(numbers)
        given = table()
        gap = np.abs(given["old_log_probs"].flat - given["rollout_log_probs"].flat)
        assert numbers["rollout_gap_mean"] == pytest.approx(gap.mean(), rel=1e-4)
        assert numbers["rollout_gap_max"] == pytest.approx(gap.max(), rel=1e-4)
        scores = given["scores"].astype(float)
        assert (numbers["score_mean"], numbers["score_std"]) == pytest.approx((scores.mean(), scores.std()), rel=1e-5)
        kl = given["old_log_probs"].flat - given["ref_log_probs"].flat
        assert numbers["kl_mean"] == pytest.approx(kl.sum() / len(LENGTHS), abs=1e-5)
        assert numbers["eos_rate"] == 0.5
        assert numbers["response_tokens_mean"] == 2.0
        assert numbers["explained_variance"] == pytest.approx(
            1 - np.var(step.batch.rows["returns"].flat - given["values"].flat) / np.var(step.batch.rows["returns"].flat)
        )

    def test_the_parts_of_a_sum_of_rewards_have_their_means(self):
        columns = {**table(), "scores_of_judge": np.arange(len(LENGTHS)), "scores_of_total.brevity": np.full(len(LENGTHS), -2.0)}
        statistics = Statistics(critic=False, parts=("scores_of_judge", "scores_of_total.brevity"))
        numbers = statistics(Table(columns))
        assert set(statistics.reads) <= set(columns)
        assert numbers["score_mean_of_judge"] == pytest.approx((len(LENGTHS) - 1) / 2)
        assert numbers["score_mean_of_total.brevity"] == -2.0

    def test_shared_names_are_told_apart_and_maxima_are_kept(self):
        batch = SimpleNamespace(columns=(), reduce=lambda fn, reads: SimpleNamespace(value={"score_mean": 1.0}))
        step = Step(
            batch,
            SimpleNamespace(rows=[{"loss": 1.0, "epoch": 0}, {"loss": 3.0, "epoch": 1}]),
            SimpleNamespace(rows=[{"loss": 5.0, "ratio_max": 1.0}, {"loss": 7.0, "ratio_max": 4.0}]),
        )
        expected = {"score_mean": 1.0, "critic_loss": 2.0, "actor_loss": 6.0, "ratio_max": 4.0}
        assert step.numbers(Statistics()) == expected
        assert replace(step, critic=None).numbers(Statistics()) == {"score_mean": 1.0, "actor_loss": 6.0, "ratio_max": 4.0}

    def test_options_are_checked_when_made(self):
        for name, value in (
            ("max_new_tokens", 0), ("temperature", 0.0), ("n", 0), ("epochs", 0), ("mini_batches", 0), ("kl_in", "both"),
            ("old_log_probs", "maybe"), ("gamma", 2.0), ("lam", 3.0), ("clip", -0.1), ("value_clip", 0.0), ("kl", "k9"),
        ):  # fmt: skip
            with refuses(OptionError, f"{name}={value!r}") as caught:
                PPO(**{name: value})
            assert isinstance(caught.value, HfsdkError)


GOOD = {"ratio": 1.0, "ratio_max": 1.000001, "approx_kl": 0.0, "clip_fraction": 0.0}


class TestInvariants:
    def test_point_29_holds_for_a_step(self):
        step, _ = run_step(PPO())
        assert invariants(step.actor.rows) == []

    def test_point_29_each_break_is_named(self):
        for name, value in (("ratio", 1.01), ("ratio_max", 3.0), ("approx_kl", 0.1), ("clip_fraction", 0.1), ("ratio", math.nan)):
            (warning,) = invariants([{**GOOD, name: value}, GOOD])
            assert warning.startswith(name)

    def test_only_the_first_mini_batch_counts(self):
        assert invariants([GOOD, {**GOOD, "ratio": 2.0}]) == []
        assert invariants([]) == []


def test_ppo_learns_a_bandit():
    """The pieces together: of two possible responses the second is worth more, and PPO must come to prefer it."""
    torch.manual_seed(0)
    logits, value = torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([logits, value], lr=0.1)
    ref = torch.log_softmax(torch.zeros(2), 0)
    for _ in range(30):
        tokens = torch.multinomial(logits.detach().softmax(0), 32, replacement=True)
        old = torch.log_softmax(logits.detach(), 0)[tokens]
        ones = [1] * 32
        rows = Table({
            "scores": tokens.float().numpy(), "values": Ragged.from_lengths(value.detach().expand(32).numpy(), ones),
            "old_log_probs": Ragged.from_lengths(old.numpy(), ones),
            "ref_log_probs": Ragged.from_lengths(ref[tokens].numpy(), ones),
        })  # fmt: skip
        made = ppo.advantages(FakeBatch(rows), kl_coef=0.01).rows
        b = {name: torch.tensor(column.flat) for name, column in made.items() if isinstance(column, Ragged)}
        for _ in range(2):
            log_probs = torch.log_softmax(logits, 0)
            entropy = -(log_probs.exp() * log_probs).sum().expand(32)
            out = SimpleNamespace(log_probs=log_probs[tokens], entropy=entropy, values=value.expand(32))
            loss = ppo.PolicyLoss()(out, b)[0].mean() + ppo.ValueLoss()(out, b)[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert logits.softmax(0)[1] > 0.9


def test_importing_ppo_loads_no_torch():
    code = "import sys, hfsdk.algorithms; hfsdk.algorithms.PPO(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
