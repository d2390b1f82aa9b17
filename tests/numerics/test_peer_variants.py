"""The algorithms of 2025 and 2026 against TRL's and verl's own numbers (tests/data/make_variant_oracles.py), and by hand."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import refuses

import hfsdk as hf
from hfsdk.algorithms import covariance, distillation, gdpo, gpg, opo, pass_at_k, process, reinforce_pp_baseline, rlmath
from hfsdk.algorithms.cispo import CISPOLoss
from hfsdk.algorithms.clip_cov import ClipCovLoss, DrawnTokens
from hfsdk.algorithms.dppo import DPPOLoss
from hfsdk.algorithms.filtering import OTHER, Concatenation
from hfsdk.algorithms.gmpo import GMPOLoss
from hfsdk.algorithms.gpg import GPGLoss
from hfsdk.algorithms.gspo import GSPOLoss
from hfsdk.algorithms.kl_cov import KLCovLoss, Largest
from hfsdk.algorithms.losses import PolicyLoss
from hfsdk.algorithms.pass_rate import pass_at_k as rate
from hfsdk.algorithms.rollout_correction import CorrectionOptions, NormalisedWeights, rollout_weights
from hfsdk.algorithms.sapo import SAPOLoss
from hfsdk.core.errors import OptionError
from hfsdk.core.table import Ragged, Table
from hfsdk.core.unscored import NOT_SCORED
from hfsdk.engine.training.loss import ModelOutput, Tally, TokenBatch, evaluate

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "peer_variants.json").read_text())
LENGTHS, COLUMNS = ORACLE["lengths"], ORACLE["columns"]
OF_RESPONSES = np.repeat(ORACLE["response_advantages"], LENGTHS)


def t(values):
    return torch.tensor(values, dtype=torch.float64)


def token_batch(advantages, **more):
    columns = {name: COLUMNS[name] for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")}
    columns |= {"advantages": advantages, **more}
    rows = {name: Ragged.from_lengths(np.array(column, np.float32), LENGTHS) for name, column in columns.items()}
    response = Ragged.from_lengths(np.zeros(sum(LENGTHS), np.int32), LENGTHS)
    return TokenBatch(Table(rows | {"response": response}), num_tokens=sum(LENGTHS), num_rows=len(LENGTHS))


def run(loss, advantages, **more):
    """Return the mini-batch's loss and its gradient, as the engine takes them."""
    log_probs = t(COLUMNS["log_probs"]).requires_grad_()
    part = evaluate(
        loss, ModelOutput(log_probs=log_probs, entropy=torch.ones(len(log_probs))), token_batch(advantages, **more), Tally()
    )
    return part.item(), torch.autograd.grad(part, log_probs)[0]


def check(found, wanted, values=True):
    loss, gradient = found
    torch.testing.assert_close(gradient, t(wanted["gradient"]), rtol=2e-5, atol=1e-7)
    assert any(wanted["gradient"])
    if values:
        assert loss == pytest.approx(wanted["loss"], rel=2e-5)


TAKEN = ("clip", "clip_high", "old_kl_coef", "tau_pos", "tau_neg", "ratio_cap", "kl_coef")


def made(loss, peer, name, **options):
    return loss(**{k: v for k, v in ORACLE["options"][peer][name].items() if k in TAKEN}, **options)


class TestLosses:
    def test_gspo_is_trls_and_verls(self):
        check(run(made(GSPOLoss, "trl", "gspo", aggregation="sequence_mean"), OF_RESPONSES), ORACLE["trl"]["gspo"])
        check(run(made(GSPOLoss, "verl", "gspo", aggregation="sequence_mean"), OF_RESPONSES), ORACLE["verl"]["gspo"])

    def test_gspo_with_an_advantage_per_token_is_verls(self):
        loss = made(GSPOLoss, "verl", "gspo_token", aggregation="sequence_mean")
        check(run(loss, COLUMNS["token_advantages"]), ORACLE["verl"]["gspo_token"])

    def test_cispo_is_trls_and_verls(self):
        """TRL bounds the weight by epsilon_high itself, hfsdk and verl by 1 + clip_high."""
        check(
            run(CISPOLoss(clip=1.0, clip_high=ORACLE["options"]["trl"]["cispo"]["clip_high"] - 1), OF_RESPONSES),
            ORACLE["trl"]["cispo"],
        )
        check(run(made(CISPOLoss, "verl", "cispo"), COLUMNS["token_advantages"]), ORACLE["verl"]["cispo"])

    @pytest.mark.parametrize(("name", "aggregation"), [("dapo", "token_mean"), ("dr_grpo", "fixed_length")])
    def test_dapo_and_dr_grpo_are_trls(self, name, aggregation):
        more = {"fixed_length": 7} if aggregation == "fixed_length" else {}
        check(run(made(PolicyLoss, "trl", name, aggregation=aggregation, **more), OF_RESPONSES), ORACLE["trl"][name])
        ours = {"dapo": hf.DAPO(), "dr_grpo": hf.DrGRPO(max_new_tokens=7)}[name]
        assert ours.policy_loss.aggregation == aggregation
        assert (ours.policy_loss.fixed_length, ours.policy_loss.kl_coef) == (more.get("fixed_length", 0), 0)

    def test_sapo_is_trls_and_verls(self):
        check(run(made(SAPOLoss, "trl", "sapo", aggregation="sequence_mean"), OF_RESPONSES), ORACLE["trl"]["sapo"])
        check(run(made(SAPOLoss, "verl", "sapo", aggregation="sequence_mean"), COLUMNS["token_advantages"]), ORACLE["verl"]["sapo"])

    def test_gmpo_is_verls_whose_loss_is_of_the_response(self):
        """The mean over responses of -A times the geometric mean of clipped ratios; here it stands on every token."""
        loss = made(GMPOLoss, "verl", "geo_mean", aggregation="sequence_mean")
        check(run(loss, OF_RESPONSES), ORACLE["verl"]["geo_mean"])
        _, ratio, clipped, _ = loss.surrogate(ModelOutput(log_probs=t(COLUMNS["log_probs"])), token_batch(OF_RESPONSES))
        assert bool(clipped.any())
        assert not clipped.all()
        assert all(np.ptp(ratio[a : a + n].numpy()) < 1e-6 for a, n in zip(np.cumsum([0, *LENGTHS]), LENGTHS, strict=False))

    def test_gpg_is_verls(self):
        check(run(made(GPGLoss, "verl", "gpg"), COLUMNS["token_advantages"]), ORACLE["verl"]["gpg"])

    @pytest.mark.parametrize("kind", ["tv", "kl"])
    def test_dppo_is_verls(self, kind):
        loss = made(DPPOLoss, "verl", f"dppo_{kind}", divergence=kind)
        check(run(loss, COLUMNS["token_advantages"]), ORACLE["verl"][f"dppo_{kind}"])
        gated = loss.surrogate(ModelOutput(log_probs=t(COLUMNS["log_probs"])), token_batch(COLUMNS["token_advantages"]))[2]
        assert 0 < gated.sum() < len(gated)

    def test_the_kl_by_the_ratio_is_trls(self):
        found = run(made(PolicyLoss, "trl", "kl_by_ratio", aggregation="sequence_mean", kl_by_ratio=True), OF_RESPONSES)
        check(found, ORACLE["trl"]["kl_by_ratio"])

    def test_kl_cov_is_verls(self):
        mask = self.marks(Largest(share=ORACLE["options"]["verl"]["kl_cov"]["share"]))
        assert mask.sum() == 3
        found = run(made(KLCovLoss, "verl", "kl_cov"), COLUMNS["token_advantages"], covariance_mask=mask)
        check(found, ORACLE["verl"]["kl_cov"])

    def test_clip_cov_is_verls(self):
        """By the gradient: of a token that the clip has cut anyway, verl keeps the loss, which has none."""
        options = ORACLE["options"]["verl"]["clip_cov"]
        mask = self.marks(DrawnTokens(share=options["share"], low=options["low"], high=options["high"]))
        assert 0 < mask.sum() < len(mask)
        found = run(made(ClipCovLoss, "verl", "clip_cov"), COLUMNS["token_advantages"], covariance_mask=mask)
        check(found, ORACLE["verl"]["clip_cov"], values=False)

    def test_distillation_is_verls(self):
        rows = {name: Ragged.from_lengths(np.array(COLUMNS[name]), LENGTHS) for name in ("old_log_probs", "ref_log_probs")}
        rows["response"] = Ragged.from_lengths(np.zeros(sum(LENGTHS), np.int32), LENGTHS)
        advantages = distillation.Advantages()(Table(rows))["advantages"].flat
        np.testing.assert_allclose(advantages, ORACLE["verl_teacher_advantages"], rtol=1e-6)
        check(run(made(PolicyLoss, "verl", "distillation"), advantages), ORACLE["verl"]["distillation"])

    @staticmethod
    def marks(function):
        """What is marked of verl's own log-probs: those of the policy as it is now, in one mini-batch."""
        return function.marked(covariance.covariances(t(COLUMNS["log_probs"]), t(COLUMNS["token_advantages"]))).numpy()


class TestAdvantages:
    case = ORACLE["advantages"]

    @pytest.mark.parametrize(("module", "name"), [(opo, "opo"), (reinforce_pp_baseline, "reinforce_pp_baseline")])
    def test_opo_and_reinforce_pp_baseline_are_verls(self, module, name):
        lengths = self.case["lengths"]
        rows = {"response": Ragged.from_lengths(np.zeros(sum(lengths), np.int32), lengths)}
        rows |= {"scores": np.array(self.case["scores"]), "group": np.array(self.case["group"])}
        found = module.Advantages(kl_coef=0.0, alone="score")(Table(rows))["advantages"]
        np.testing.assert_allclose(found.flat, self.case["expected"][name], rtol=1e-5)

    def test_gdpo_is_trls_and_verls(self):
        """TRL adds 1e-4 to deviations and verl normalises over tokens; a part that gives nothing is left out of a sample's sum."""
        case = ORACLE["several_rewards"]
        response = Ragged.from_lengths(np.zeros(sum(case["lengths"]), np.int32), case["lengths"])
        of_part = zip(*case["rewards"], strict=True)
        columns = [np.float32([NOT_SCORED if x is None else x for x in column]) for column in of_part]
        parts = {f"scores_of_of_{k}": column for k, column in enumerate(columns)}
        table = Table({"response": response, "group": np.array(case["group"]), "scores": np.zeros(8, np.float32), **parts})
        names, weights = [f"of_{k}" for k in range(3)], case["weights"]
        found = gdpo.Advantages(parts=names, weights=weights, epsilon=1e-4)(table)["advantages"]
        np.testing.assert_allclose([row[0] for row in found], case["trl"], rtol=2e-6)
        two = gdpo.Advantages(parts=names[:2], weights=weights[:2], epsilon=1e-6)(table)["advantages"]
        ours, theirs = two.flat, np.array(case["verl"])
        differ = np.ptp(theirs) / np.ptp(ours)  # by the deviation over tokens and their mean alone
        np.testing.assert_allclose(theirs - theirs.mean(), differ * (ours - ours.mean()), atol=1e-5)

    def test_of_one_reward_gdpo_is_grpo_of_variance_1(self):
        scores, group = np.float32([1, 0, 0, 5, 5, 5, 2, 3]), np.array([0, 0, 0, 1, 1, 1, 2, 2])
        table = Table({"response": Ragged.of([[1]] * 8, np.int32), "group": group, "scores": scores})
        found = gdpo.Advantages()(table)["advantages"].flat
        plain = hf.algorithms.grpo.group_advantages(t(scores), torch.tensor(group))
        np.testing.assert_allclose(found, plain / plain.std(), rtol=1e-5)
        assert (found[3:6] == 0).all(), "exactly: a group of one score teaches nothing"

    def test_gpg_makes_up_for_groups_that_teach_nothing(self):
        """Of eight responses three are in a group of one score, one is alone: alpha is 8 / 4."""
        found = gpg.Advantages()(Table({
            "response": Ragged.of([[1]] * 8, np.int32), "group": np.array([0, 0, 1, 1, 1, 2, 2, 3]),
            "scores": np.float32([1, 0, 5, 5, 5, 2, 4, 9]),
        }))["advantages"].flat  # fmt: skip
        np.testing.assert_allclose(found, [1, -1, 0, 0, 0, -2, 2, 0])
        nothing = gpg.accurate(torch.zeros(3), torch.tensor([0, 0, 0]))
        assert nothing.tolist() == [0, 0, 0]

    @pytest.mark.parametrize(("size", "wrong", "k"), [(8, 3, 4), (8, 8, 4), (8, 0, 4), (8, 7, 8), (5, 2, 1), (16, 12, 3)])
    def test_advantages_of_pass_at_k_sum_to_0_and_have_the_deviation_of_the_subsets(self, size, wrong, k):
        """Section 3.4's closed form; with k of 1 it is the score in deviations of a group of right and wrong."""
        right, other = pass_at_k.Advantages(k=k, scale="none").of_group(size, wrong)
        assert (size - wrong) * right + wrong * other == pytest.approx(0, abs=1e-12)
        share = rate(size, size - wrong, k)
        scaled = pass_at_k.Advantages(k=k, epsilon=1e-12).of_group(size, wrong)[0]
        assert scaled == pytest.approx(right / math.sqrt(share * (1 - share)) if 0 < share < 1 else 0)
        if k == 1:
            assert (right, other) == pytest.approx((wrong / size, wrong / size - 1))

    def test_pass_at_k_of_many(self):
        assert rate(1000, 1, 1000) == 1
        assert rate(200, 3, 50) == pytest.approx(1 - math.comb(197, 50) / math.comb(200, 50))
        assert [rate(4, c, 2) for c in range(5)] == pytest.approx([0, 1 / 2, 5 / 6, 1, 1])
        for n, c, k in ((4, 5, 1), (4, 1, 5), (4, 1, 0)):
            with refuses(OptionError, f"n={n}, c={c}, k={k}"):
                rate(n, c, k)

    def test_the_optimal_baseline_by_hand(self):
        """Lengths 1 and 3 with scores 4 and 0: (1 * 4 + 3 * 0) / 4 = 1. Equal scores and a group of one get exactly 0."""
        scores, group, lengths = t([4, 0, 0.1, 0.1, 5]), torch.tensor([0, 0, 1, 1, 2]), torch.tensor([1, 3, 7, 2, 4])
        assert opo.over_optimal_baseline(scores, group, lengths).tolist() == [3, -1, 0, 0, 0]
        empty = opo.over_optimal_baseline(t([1, 3]), torch.tensor([0, 0]), torch.tensor([0, 0]))
        assert empty.tolist() == [-1, 1], "without tokens the plain mean"


class TestWeights:
    case = ORACLE["weights"]

    @pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
    def test_point_11_truncated_and_masked_weights_are_trls_and_verls(self, mode):
        level, _, bounds = mode.partition("_")
        old, rollout = t(COLUMNS["old_log_probs"]), t(COLUMNS["rollout_log_probs"])
        for peer in ("trl", "verl"):
            floor = self.case["floor"] if (peer, bounds) != ("verl", "truncate") else None
            options = CorrectionOptions(tis_cap=self.case["cap"], tis_floor=floor, tis_level=level, tis_bounds=bounds)
            weights, outside = rollout_weights(old, rollout, options, torch.tensor(LENGTHS))
            torch.testing.assert_close(weights, t(self.case[peer][mode]))
            assert bool(outside.any())
            assert not outside.all()

    @pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
    def test_point_11_weights_of_mean_1_are_verls(self, mode):
        level, _, bounds = mode.partition("_")
        floor = self.case["floor"] if bounds == "mask" else None
        function = NormalisedWeights(tis_cap=self.case["cap"], tis_floor=floor, tis_level=level, tis_bounds=bounds)
        columns = {name: COLUMNS[name] for name in ("old_log_probs", "rollout_log_probs")} | {"advantages": OF_RESPONSES}
        rows = {name: Ragged.from_lengths(np.array(column, np.float32), LENGTHS) for name, column in columns.items()}
        found = function(Table(rows))["tis_weights"].flat
        np.testing.assert_allclose(found, self.case["verl"][f"{mode}_normalised"], rtol=1e-5)

    def test_point_11_a_geometric_mean_is_of_the_tokens_ratios(self):
        old, rollout = t(COLUMNS["old_log_probs"]), t(COLUMNS["rollout_log_probs"])
        weights, _ = rollout_weights(old, rollout, CorrectionOptions(tis_cap=9.0, tis_level="geometric"), torch.tensor(LENGTHS))
        starts = np.cumsum([0, *LENGTHS])
        for start, length in zip(starts, LENGTHS, strict=False):
            mine = slice(start, start + length)
            torch.testing.assert_close(weights[mine], (old - rollout)[mine].exp().prod().pow(1 / length).expand(length))

    def test_point_11_a_masked_response_has_no_gradient(self):
        plain = PolicyLoss(clip=1.0, clip_high=9.0)
        masked = PolicyLoss(
            clip=1.0, clip_high=9.0, tis_cap=self.case["cap"], tis_floor=0.6, tis_level="sequence", tis_bounds="mask"
        )
        before, after = run(plain, OF_RESPONSES)[1], run(masked, OF_RESPONSES)[1]
        torch.testing.assert_close(after, before * t(self.case["trl"]["sequence_mask"]), rtol=1e-5, atol=1e-8)

    def test_a_floor_needs_a_cap_above_it(self):
        for options in ({"tis_floor": 0.5}, {"tis_floor": 3.0, "tis_cap": 2.0}):
            with refuses(OptionError, f"tis_floor={options['tis_floor']}", "tis_cap"):
                hf.GRPO(**options)


class TestCovariance:
    def test_the_draw_is_of_the_numbers_and_within_the_bounds(self):
        numbers = torch.linspace(-3, 9, 4001, dtype=torch.float64)
        function = DrawnTokens(share=0.01)
        marked = function.marked(numbers)
        assert marked.sum() == 40
        assert torch.equal(marked, function.marked(numbers)), "the same batch, the same tokens"
        assert ((numbers[marked] > 1) & (numbers[marked] < 5)).all()
        assert not torch.equal(marked, function.marked(numbers + 1e-9)), "another batch, others"
        assert numbers[marked].std() > 0.5, "spread over the bounds, not the first ones"
        assert not function.marked(torch.zeros(9, dtype=torch.float64)).any()

    def test_at_least_one_and_at_most_all_are_held(self):
        numbers = t([0.1, 3.0, -1.0])
        assert Largest(share=1e-6).marked(numbers).tolist() == [False, True, False]
        assert Largest(share=1.0).marked(numbers).all()


class TestWhatIsLeftOut:
    """A token that a mask leaves out adds nothing, also where its own number is infinite."""

    advantages = np.array([1.0, -1.0, 0.5])

    def loss(self, loss, log_probs, **columns):
        out = ModelOutput(log_probs=torch.tensor(log_probs, requires_grad=True), entropy=torch.ones(3))
        columns |= {"advantages": self.advantages, "old_log_probs": np.full(3, -1.0), "response": np.zeros(3)}
        rows = {name: Ragged.from_lengths(np.asarray(column, np.float32), [3]) for name, column in columns.items()}
        per_token, _ = loss(out, TokenBatch(Table(rows), num_tokens=3, num_rows=1))
        return per_token, torch.autograd.grad(per_token[:2].sum(), out.log_probs)[0]

    @pytest.mark.parametrize("loss", [KLCovLoss(), ClipCovLoss()])
    def test_of_the_covariance_losses(self, loss):
        mask = {"covariance_mask": np.array([1.0, 0.0, float(isinstance(loss, ClipCovLoss))])}
        per_token, grad = self.loss(loss, [-0.5, -1.5, -math.inf], **mask)
        assert per_token.isfinite().all()
        assert grad.isfinite().all()
        assert per_token[2] == 0

    def test_of_the_divergences_gate(self):
        """A token that went to probability 0 against its advantage, and one whose ratio is infinite, are both gated."""
        for kind, bound in (("tv", 0.15), ("kl", 0.05)):
            loss = DPPOLoss(divergence=kind, clip=bound, log_ratio_clamp="none")
            out = ModelOutput(log_probs=torch.tensor([-math.inf, -1e-3, -1.0], requires_grad=True), entropy=torch.ones(3))
            columns = {"advantages": [-1.0, 1.0, 1.0], "old_log_probs": [-1.0, -200.0, -1.0], "response": [0.0] * 3}
            rows = {name: Ragged.from_lengths(np.asarray(column, np.float32), [3]) for name, column in columns.items()}
            per_token, ratio, gated, _ = loss.surrogate(out, TokenBatch(Table(rows), num_tokens=3, num_rows=1))
            assert gated.tolist() == [True, True, False]
            assert ratio[1] == math.inf
            assert per_token.tolist() == [0, 0, 1]
            assert torch.autograd.grad(per_token.sum(), out.log_probs)[0].tolist() == [0, 0, -1]

    def test_of_masked_rollout_weights(self):
        loss = PolicyLoss(tis_cap=2.0, tis_bounds="mask", log_ratio_clamp="none", clip=1.0, clip_high=1e30)
        per_token, _ = self.loss(loss, [-0.5, -1.5, 200.0], rollout_log_probs=np.array([-1.0, -1.0, -9.0]))
        assert per_token[:2].isfinite().all()
        assert per_token[2] == 0, "a ratio of e^201 is infinite in float32, and its weight is 0"


class TestSteps:
    """Process supervision by hand: no peer has it."""

    def table(self, token_scores, responses, group):
        lengths = [len(row) for row in responses]
        return Table({
            "token_scores": Ragged.from_lengths(np.concatenate(token_scores), lengths), "group": np.array(group),
            "response": Ragged.of(responses, np.int32),
        })  # fmt: skip

    def test_by_hand(self):
        """Steps end behind token 9. Step rewards 1, 3 | 0, 4: mean 2; a token has the sum of its own step's and of those after."""
        table = self.table([[0, 1, 3], [0, 0, 0, 2, 2]], [[5, 9, 6], [7, 9, 8, 8, 9]], [4, 4])
        found = process.Advantages(step_ends=[9], scale="none")(table)["advantages"]
        assert [row.tolist() for row in found] == [[0, 0, 1], [0, 0, 2, 2, 2]]
        deviation = np.std([1, 3, 0, 4], ddof=1)
        scaled = process.Advantages(step_ends=(9,), epsilon=1e-6)(table)["advantages"]
        np.testing.assert_allclose(scaled.flat, np.array([0, 0, 1, 0, 0, 2, 2, 2]) / (deviation + 1e-6), rtol=1e-6)

    def test_one_step_each_is_grpo(self):
        rng = np.random.default_rng(0)
        lengths, group = [3, 1, 0, 4, 2, 2], [0, 0, 0, 1, 1, 1]
        responses = [[1] * n for n in lengths]
        scores = [rng.normal(size=n) for n in lengths]
        found = process.Advantages()(self.table(scores, responses, group))["advantages"]
        wanted = hf.algorithms.grpo.group_advantages(t([s.sum() for s, n in zip(scores, lengths, strict=True) if n]),
                                                     torch.tensor([0, 0, 1, 1, 1]))  # fmt: skip
        np.testing.assert_allclose([row[0] for row in found if len(row)], wanted, rtol=1e-6)


def test_overlong_penalty_is_trls():
    case = ORACLE["overlong"]
    penalty = hf.OverlongPenalty(max_new_tokens=case["max_new_tokens"], buffer=case["buffer"])
    assert penalty(completion_ids=[[0] * n for n in case["lengths"]], prompts=[""]) == case["expected"]
    assert hf.OverlongPenalty(max_new_tokens=20, buffer=8, penalty=0.5)(completion_ids=[[0] * 15, [0] * 50]) == [-0.1875, -0.5]
    with refuses(OptionError, "buffer=21", "max_new_tokens", 20):
        hf.OverlongPenalty(max_new_tokens=20, buffer=21)


def test_batches_are_put_one_after_the_other():
    first = {"group": np.array([0, 0, 9]), "prompt": Ragged.of([[1], [2, 3], [0]], np.int32), "text": np.array(["a", "b", "x"])}
    second = {"group": np.array([9, 9, 0]), "prompt": Ragged.of([[7], [7], [4, 5]], np.int32), "text": np.array(["x", "x", "c"])}
    both = Concatenation(2, 5)(Table(first | {OTHER + name: column for name, column in second.items()}))
    assert both["group"].tolist() == [0, 0, 5]
    assert [row.tolist() for row in both["prompt"]] == [[1], [2, 3], [4, 5]]
    assert list(both["text"]) == ["a", "b", "c"]


def test_every_loss_is_the_plain_policy_gradient_before_anything_is_updated():
    """Where the ratio is 1 everywhere, all losses have the gradient of ``-A log pi``, whatever their clips."""
    b, old = token_batch(OF_RESPONSES, covariance_mask=np.ones(sum(LENGTHS))), t(COLUMNS["old_log_probs"]).float()
    losses = [PolicyLoss(), GSPOLoss(clip=3e-4, clip_high=4e-4), CISPOLoss(clip=1.0, clip_high=4.0), KLCovLoss(), SAPOLoss()]
    for loss in (*losses, GPGLoss(), GMPOLoss(clip=0.4), DPPOLoss(clip=0.15), DPPOLoss(clip=0.05, divergence="kl")):
        log_probs = old.clone().requires_grad_()
        per_token, ratio, clipped, _ = loss.surrogate(ModelOutput(log_probs=log_probs), b)
        torch.testing.assert_close(torch.autograd.grad(per_token.sum(), log_probs)[0], -b["advantages"])
        assert torch.equal(ratio.detach(), torch.ones(len(old)))
        assert not clipped.any()
    assert rlmath.MAX_LOG_RATIO == 20
