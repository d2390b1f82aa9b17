"""The algorithms of 2025 and 2026: their steps on a toy policy and in a simulated session, what they refuse, how DAPO draws."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from expect import refuses
from toy import GOOD, ToyModels, prompts

import hfsdk as hf
from hfsdk.algorithms.invariants import invariants
from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.unscored import NOT_SCORED

SHORT = {"max_new_tokens": 3, "n": 4}
SCORED = [
    hf.GSPO(**SHORT), hf.CISPO(**SHORT), hf.DAPO(**SHORT), hf.DrGRPO(**SHORT), hf.OPO(**SHORT),
    hf.ReinforcePlusPlusBaseline(**SHORT, mini_batches=1), hf.KLCov(**SHORT), hf.ClipCov(**SHORT),
    hf.SAPO(**SHORT, mini_batches=2), hf.GMPO(**SHORT, mini_batches=2), hf.GPG(**SHORT), hf.DPPO(**SHORT, mini_batches=2),
    hf.DPPO(**SHORT, divergence="kl", clip=0.05, mini_batches=2, ratio_cap=5.0), hf.GDPO(**SHORT),
    hf.PassAtKTraining(**SHORT, k=2, pass_score=2.5), hf.GRPO(**SHORT, kl_by_ratio=True, kl_coef=0.001, mini_batches=2),
    hf.ProcessGRPO(**SHORT, step_ends=[0, 1], kl_coef=0.0),
    hf.GRPO(**SHORT, tis_cap=2.0, tis_floor=0.5, tis_level="sequence", tis_bounds="mask"),
    hf.GRPO(**SHORT, tis_cap=2.0, tis_level="geometric", tis_normalise=True),
]  # fmt: skip
ALL = [*SCORED, hf.Distillation(max_new_tokens=3)]


def named(algorithm):
    return type(algorithm).__name__


every = pytest.mark.parametrize("algorithm", ALL, ids=named)
scored = pytest.mark.parametrize("algorithm", SCORED, ids=named)


def toy(**options):
    return ToyModels(per_token=True, **options)


@scored
def test_learns(algorithm):
    """Responses of three good tokens score 3; at first the mean is about 1."""
    models = toy(lr=0.15)
    first = algorithm.metrics(algorithm.step(models, prompts()))["score_mean"]
    for _ in range(20):
        last = algorithm.step(models, prompts())
        if last.actor is None:
            break  # DAPO: all responses are the best there are
    assert first < 1.6
    assert algorithm.metrics(last)["score_mean"] > 2.5
    assert models.logits.detach().softmax(0)[GOOD] > 0.8


@every
def test_what_must_hold_before_anything_is_updated(algorithm):
    step = replace(algorithm, epochs=2).step(toy(), prompts())
    assert invariants(step.actor.rows) == []
    numbers = algorithm.metrics(step)
    assert all(np.isfinite(list(numbers.values())))
    assert {"policy_loss", "entropy", "approx_kl", "clip_fraction", "response_tokens_mean"} <= set(numbers)


def test_the_student_becomes_the_teacher():
    """No reward: the KL to the teacher falls, and the student's distribution is the teacher's."""
    models, algorithm = toy(lr=0.1), hf.Distillation(max_new_tokens=3, n=4, temperature=1.0)
    models.reference_logits = torch.tensor([0.0, 2.0, 1.0])
    del models.reward
    first = algorithm.metrics(algorithm.step(models, prompts()))
    for _ in range(30):
        last = algorithm.step(models, prompts())
    assert "score_mean" not in first
    assert first["kl_mean"] > 0.5
    assert abs(algorithm.metrics(last)["kl_mean"]) < 0.1
    torch.testing.assert_close(models.logits.detach().softmax(0), models.reference_logits.softmax(0), atol=0.05, rtol=0)
    assert [call for call in models.calls if "score" in call] == []


def test_a_teacher_has_the_students_tokens():
    models = toy()
    models.actor.spec, models.reference.spec = SimpleNamespace(vocab_size=512), SimpleNamespace(vocab_size=49152)
    with refuses(OptionError, "teacher", 49152, 512, "session.reference"):
        hf.Distillation(max_new_tokens=3).step(models, prompts())
    assert models.calls == []


class TestDAPO:
    def models(self, informative):
        """A group has something to teach where its prompt's number is among those given."""
        models = toy()

        def scores(batch):
            models.calls.append(f"scores {len(batch)}")
            wins = [float(number in informative and row % 2) for row, number in enumerate(batch.rows["number"])]
            return batch.plus(scores=np.array(wins, np.float32))

        models.reward = SimpleNamespace(compute_scores=scores)
        return models

    def numbered(self, num):
        return prompts(num).plus(number=np.arange(num))

    def test_others_are_drawn_until_there_are_enough(self):
        """12 prompts, 4 groups wanted: 4 are drawn (1 teaches), then 3 (2 teach), then 1 (none), then 1; 3 are left."""
        models = self.models({1, 4, 6, 8, 10})
        step = hf.DAPO(max_new_tokens=3, n=2, oversample=3.0).step(models, self.numbered(12))
        assert [call for call in models.calls if call.startswith("scores")] == ["scores 8", "scores 6", "scores 2", "scores 2"]
        assert step.batch["number"].tolist() == [k for k in range(9) for _ in range(2)]
        assert step.batch["group"].tolist() == [k for k in range(9) for _ in range(2)]
        (trained, _, _, _) = models.updates[0]
        assert trained["number"].tolist() == [1, 1, 4, 4, 6, 6, 8, 8]
        assert (trained["advantages"].flat != 0).all()
        numbers = hf.DAPO(n=2).metrics(step)
        assert numbers["identical_groups"] == pytest.approx(5 / 9)

    def test_a_draw_that_is_not_scored_at_all_is_only_drawn_in_vain(self):
        """As above, where the third draw, of prompt 7, has no score; of a step without any score nothing can be learned."""
        models = self.models({1, 4, 6, 8, 10})
        scores = models.reward.compute_scores

        def some(batch):
            found = scores(batch)
            lost = np.isin(batch.rows["number"], unscored)
            return found.plus(scores=np.where(lost, NOT_SCORED, found.rows["scores"]))

        models.reward, unscored = SimpleNamespace(compute_scores=some), [7]
        hf.DAPO(max_new_tokens=3, n=2, oversample=3.0).step(models, self.numbered(12))
        assert models.updates[0][0]["number"].tolist() == [1, 1, 4, 4, 6, 6, 8, 8]
        unscored = range(12)
        with refuses(ColumnError, 24, "scored"):
            hf.DAPO(max_new_tokens=3, n=2, oversample=3.0).step(models, self.numbered(12))

    def test_the_batch_ends_before_there_are_enough(self):
        models = self.models({1, 5})
        step = hf.DAPO(max_new_tokens=3, n=2, mini_batches=9).step(models, self.numbered(6))
        assert len(step.batch) == 12
        assert models.updates[0][0]["number"].tolist() == [1, 1, 5, 5]
        assert models.updates[0][3] == 4, "an optimizer step for each response at most"

    def test_nothing_teaches_anything(self):
        models = self.models(())
        step = hf.DAPO(max_new_tokens=3, n=2).step(models, self.numbered(6))
        assert step.actor is None
        assert len(step.batch) == 12
        assert hf.DAPO(n=2).metrics(step)["identical_groups"] == 1

    def test_no_others_without_oversampling(self):
        models = self.models({0})
        hf.DAPO(max_new_tokens=3, n=2, oversample=1.0).step(models, self.numbered(6))
        assert [call for call in models.calls if call.startswith("scores")] == ["scores 12"]


def test_out_of_range():
    for make, *named in (
        (lambda: hf.GSPO(clip=1.5), "clip=1.5"), (lambda: hf.CISPO(dual_clip=3.0), "dual_clip=3.0", "None"),
        (lambda: hf.KLCov(clip_high=0.3), "clip_high=0.3", "KL-Cov"), (lambda: hf.KLCov(share=1.5), "share=1.5"),
        (lambda: hf.ClipCov(share=0.0), "share=0.0"), (lambda: hf.DAPO(filter_groups=False), "filter_groups=False", "hf.GRPO"),
        (lambda: hf.DAPO(oversample=0.5), "oversample=0.5"), (lambda: hf.OPO(n=1), "n=1", 2),
        (lambda: hf.ReinforcePlusPlusBaseline(kl="k1"), "kl='k1'", "k2"),
        (lambda: hf.ProcessGRPO(step_ends=["x"]), "step_ends", "'x'"),
        (lambda: hf.SAPO(clip_high=0.3), "clip_high=0.3", "gate"), (lambda: hf.SAPO(tau_neg=0.0), "tau_neg=0.0"),
        (lambda: hf.GMPO(dual_clip=3.0), "dual_clip=3.0", "None"), (lambda: hf.GPG(clip_high=0.3), "clip_high=0.3", "GPG"),
        (lambda: hf.GPG(filter_groups=True), "filter_groups=True", "alpha"), (lambda: hf.DPPO(divergence="js"), "divergence='js'"),
        (lambda: hf.DPPO(dual_clip=3.0), "dual_clip=3.0", "ratio_cap"), (lambda: hf.GDPO(weights=[1.0]), "weights", "parts", "1.0"),
        (lambda: hf.GDPO(parts=["a", "b"], weights=[1.0]), "weights", "parts", 2),
        (lambda: hf.PassAtKTraining(k=9), "k=9", "n", 8), (lambda: hf.PassAtKTraining(scale="batch"), "scale='batch'", "subsets"),
        (lambda: hf.PassAtKTraining(increase_variance=True), "increase_variance=True"),
        (lambda: hf.GRPO(tis_normalise=True), "tis_normalise=True", "tis_cap"), (lambda: hf.PassAtK(k=[0]), "k", 0),
        (lambda: hf.Distillation(kl_coef=0.0), "kl_coef=0.0"), (lambda: hf.GRPO(tis_level="row"), "tis_level='row'", "sequence"),
    ):  # fmt: skip
        with refuses(OptionError, *named):
            make()


def test_gdpo_takes_the_parts_and_weights_of_the_sessions_reward():
    with hf.Session.simulated("1x4 H200") as session:
        session.reference(session.actor("tiny", train="dp4", rollout="tp1"))

        def exact(completions):
            return [0.0] * len(completions)

        def brief(completions):
            return [0.0] * len(completions)

        session.reward([exact, brief], weights=[1.0, 0.2])
        found = hf.GDPO(**SHORT).of_reward(session.models)
        assert (found.parts, found.weights) == (("reward.exact", "reward.brief"), (1.0, 0.2))
        own = hf.GDPO(**SHORT, parts=["reward.brief"])
        assert own.of_reward(session.models) == own
        step = hf.GDPO(**SHORT).step(session.models, session.prompts(["one", "two"], batch_size=2)[0])
        step.actor.wait()
        assert {"scores_of_reward.exact", "scores_of_reward.brief", "advantages"} <= set(step.batch.columns)
        with refuses(ColumnError, "scores_of_long"):
            hf.GDPO(**SHORT, parts=["long"]).with_advantages(step.batch)


def test_in_a_simulated_session():
    """All in one: calls, lengths and times are there, and DAPO draws what it wants."""
    with hf.Session.simulated("1x4 H200") as session:
        actor = session.actor("tiny", train="dp4", rollout="tp1")
        session.reference(actor)
        session.reward(lambda completions, completion_ids: [[0.0] * len(ids) for ids in completion_ids], per_token=True)
        stream = session.prompts(["one", "two", "three", "four"], batch_size=4)
        for algorithm in ALL:
            step = algorithm.step(session.models, stream[0])
            step.actor.wait()
            wanted = 2 if isinstance(algorithm, hf.DAPO) else 4
            assert len(step.batch) == wanted * algorithm.n
            assert step.batch.known_lengths("advantages").tolist() == step.batch.known_lengths("response").tolist()
        run = session.train(hf.DAPO(**SHORT), stream, steps=2)
        assert (run.history["seconds"] > 0).all()
