"""GRPO, RLOO, ReMax and REINFORCE++: their steps on a toy policy, in a simulated session, and given what they cannot do."""

import ast
import inspect
import re
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from expect import refuses
from toy import GOOD, ToyBatch, ToyModels, prompts

import hfsdk as hf
from hfsdk.algorithms import (
    distillation,
    filtering,
    grpo,
    opo,
    ppo,
    process,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rlmath,
    rloo,
    safe_rlhf,
)
from hfsdk.algorithms.invariants import invariants
from hfsdk.core.batch import refs_of
from hfsdk.core.errors import ColumnError, OptionError, PlacementError, SimulatedValueError
from hfsdk.core.table import Ragged, Table
from hfsdk.core.unscored import NOT_SCORED

ALL = [
    hf.GRPO(max_new_tokens=3, n=4), hf.RLOO(max_new_tokens=3, n=4), hf.ReMax(max_new_tokens=3, n=2),
    hf.ReinforcePlusPlus(max_new_tokens=3, n=2),
]  # fmt: skip
FILES = ("ppo", "grpo", "rloo", "remax", "reinforce_pp")
every = pytest.mark.parametrize("algorithm", ALL, ids=lambda a: type(a).__name__)


class TestStep:
    def test_without_kl_no_reference_and_with_rollout_no_second_pass(self):
        for algorithm in ALL:
            lean = replace(algorithm, kl_coef=0.0, old_log_probs="rollout")
            models = ToyModels()
            models.reference = None
            step = lean.step(models, prompts())
            assert lean.roles == ("actor", "reward"), algorithm
            assert not [call for call in models.calls if call.endswith("log_probs")], algorithm
            assert "kl_mean" not in lean.metrics(step), algorithm

    @every
    def test_where_a_reference_is_the_kl_is_measured_and_changes_nothing_that_is_learned(self, algorithm):
        """Bit for bit, at a weight of 0; ``kl_mean`` is the only number more."""
        lean, found = replace(algorithm, kl_coef=0.0, epochs=2), []
        for reference in (True, False):
            models = ToyModels()
            models.reference = models.reference if reference else None
            for _ in range(5):
                step = lean.step(models, prompts())
            numbers = lean.metrics(step)
            assert (numbers.pop("kl_mean", 0.0) > 0) == reference
            found.append((numbers, step.actor.rows, models.logits.detach().numpy().tobytes()))
        assert found[0] == found[1]

    @every
    def test_point_29_and_numbers_to_watch(self, algorithm):
        step = algorithm.step(ToyModels(), prompts())
        assert step.critic is None
        assert invariants(step.actor.rows) == []
        numbers = algorithm.metrics(step)
        wanted = {
            "score_mean", "score_std", "kl_mean", "response_tokens_mean", "response_tokens_max", "eos_rate", "entropy",
            "clip_fraction", "approx_kl", "rollout_gap_mean", "rollout_gap_max", "policy_loss", "actor_loss", "ratio", "ratio_max",
        }  # fmt: skip
        assert wanted <= set(numbers)
        assert not any("value" in name or "critic" in name for name in numbers)
        assert ("identical_groups" in numbers) == isinstance(algorithm, hf.GRPO | hf.RLOO)
        assert numbers["score_mean"] == pytest.approx(step.batch["scores"].mean())

    def test_every_number_is_explained_in_the_documentation(self):
        text = (Path(hf.__file__).parents[1] / "docs" / "algorithms.md").read_text()
        rows = text.split("## The numbers of a step")[1].split("| `first_ratio_error`")[0].splitlines()
        known = {name for row in rows if row.startswith("|") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
        for algorithm, more in product(ALL, ({}, {"dual_clip": 3.0, "tis_cap": 2.0})):
            chosen = replace(algorithm, **more)
            numbers = {
                name for name in chosen.metrics(chosen.step(ToyModels(), prompts())) if not name.startswith(("first_", "rollout_"))
            }
            assert numbers - known == set(), chosen
            assert "actor_loss" in numbers, chosen

    @every
    def test_learns(self, algorithm):
        """Responses of three good tokens score 3; at first the mean is about 1. Every algorithm must find them."""
        models = ToyModels(lr=0.05)
        lean = replace(algorithm, kl_coef=0.001)
        first = lean.metrics(lean.step(models, prompts()))["score_mean"]
        for _ in range(80):
            last = lean.step(models, prompts())
        assert first < 1.5
        assert lean.metrics(last)["score_mean"] > 2.5
        assert models.logits.detach().softmax(0)[GOOD] > 0.85

    @pytest.mark.parametrize(
        "recipe",
        [
            hf.GRPO(max_new_tokens=3, n=4, scale="none", aggregation="fixed_length", kl_coef=0.0),
            hf.GRPO(max_new_tokens=3, n=4, clip_high=0.28, filter_groups=True, aggregation="token_mean", kl_coef=0.0),
            hf.GRPO(max_new_tokens=3, n=4, scale="batch", epochs=2, mini_batches=2),
        ],
        ids=["Dr. GRPO", "DAPO", "batch"],
    )
    def test_variants_learn(self, recipe):
        models = ToyModels(lr=0.05)
        for _ in range(80):
            step = recipe.step(models, prompts())
        assert recipe.metrics(step)["score_mean"] > 2.5

    @every
    def test_a_strong_kl_holds_the_policy(self, algorithm):
        """Under a large kl_coef the reference (all tokens equally likely) wins over the score."""
        models = ToyModels(lr=0.02)
        for _ in range(60):
            replace(algorithm, kl_coef=20.0).step(models, prompts(32))
        assert models.logits.detach().softmax(0).max() < 0.6

    def test_identical_scores_leave_the_policy_alone(self):
        for algorithm in ALL:
            models = ToyModels(score=lambda tokens: 0.1)
            step = replace(algorithm, kl_coef=0.0).step(models, prompts())
            np.testing.assert_allclose(step.batch["advantages"].flat, 0, atol=1e-6, err_msg=str(algorithm))
            assert step.actor.rows[0]["loss"] == pytest.approx(0, abs=1e-6), algorithm

    def test_what_the_losses_are(self):
        loss = hf.GRPO().policy_loss
        assert (loss.aggregation, loss.kl_coef, loss.kl, loss.clip) == ("sequence_mean", 0.04, "k3", 0.2)
        dr = hf.GRPO(scale="none", aggregation="fixed_length", kl_coef=0.0, max_new_tokens=9)
        assert (dr.policy_loss.fixed_length, dr.policy_loss.kl_coef) == (9, 0)
        assert hf.GRPO(clip_high=0.28).policy_loss.clip_high == 0.28
        assert [a.policy_loss.aggregation for a in ALL] == ["sequence_mean", "sequence_sum", "sequence_sum", "token_mean"]
        assert [a.policy_loss.kl_coef for a in ALL] == [0.04, 0, 0, 0], "only GRPO has its KL in the loss"

    def test_point_17_rloo_kl_is_in_the_reward(self):
        models = ToyModels()
        models.logits.data = rlmath.torch.tensor([0.0, 1.0, 2.0])
        with_kl = hf.RLOO(max_new_tokens=3, kl_coef=1.0).step(models, prompts()).batch
        scores, kl = with_kl["scores"], np.array([row.sum() for row in with_kl["kl"]])
        rewards = (scores - kl).reshape(16, 4)
        wanted = rewards - (rewards.sum(1, keepdims=True) - rewards) / 3
        np.testing.assert_allclose([row[0] for row in with_kl["advantages"]], wanted.ravel(), atol=1e-5)


class TestFilter:
    def test_only_groups_that_differ_are_trained_on(self):
        models, algorithm = ToyModels(), hf.GRPO(max_new_tokens=1, n=2, filter_groups=True, mini_batches=3)
        step = algorithm.step(models, prompts())
        (trained, _, _, mini_batches), scores = models.updates[0], step.batch["scores"].reshape(16, 2)
        differ = scores[:, 0] != scores[:, 1]
        assert 0 < differ.sum() < 16
        assert trained["group"].tolist() == [group for group in np.flatnonzero(differ) for _ in range(2)]
        assert (trained["advantages"].flat != 0).all()
        assert mini_batches == 3
        assert len(step.batch) == 32, "the step keeps every response"
        assert algorithm.metrics(step)["identical_groups"] == pytest.approx(1 - differ.mean())

    def test_groups_whose_steps_differ_are_trained_on_whatever_their_sums(self):
        """Rewards of steps (1, 0) and (0, 1) have one sum and teach; (1, 1) twice do not, nor does what was not scored."""
        rows = {"group": np.array([0, 0, 1, 1, 2, 2]), "response": Ragged.of([[1, 2]] * 6)}
        each = [[1, 0], [0, 1], [1, 1], [1, 1], [1, 1], [NOT_SCORED, NOT_SCORED]]
        table = Table({**rows, "token_scores": Ragged.of(each, np.float32), "scores": np.ones(6, np.float32)})
        algorithm = hf.ProcessGRPO(step_ends=(1,), filter_groups=True)
        batch = algorithm.with_advantages(ToyBatch(table))
        assert np.abs(batch["advantages"].flat[:4]).max() > 0.8
        assert filtering.informative(batch)["group"].tolist() == [0, 0]

    def test_fewer_responses_than_mini_batches(self):
        models = ToyModels()
        hf.GRPO(max_new_tokens=1, n=2, filter_groups=True, mini_batches=30).step(models, prompts())
        trained, _, _, mini_batches = models.updates[0]
        assert mini_batches == len(trained) < 30

    def test_all_groups_identical(self):
        models = ToyModels(score=lambda tokens: 1.0)
        algorithm = hf.GRPO(max_new_tokens=3, n=2, filter_groups=True)
        step = algorithm.step(models, prompts())
        assert step.actor is None
        assert models.updates == []
        numbers = algorithm.metrics(step)
        assert numbers["identical_groups"] == 1
        assert "loss" not in numbers


class TestReMax:
    def test_point_28_the_greedy_response_is_the_baseline(self):
        models = ToyModels()
        models.logits.data = rlmath.torch.tensor([0.0, 0.0, 1.0])  # greedy: three good tokens, score 3
        batch = hf.ReMax(max_new_tokens=3, n=3, kl_coef=0.0).step(models, prompts(4)).batch
        assert batch["baseline_scores"].tolist() == [3.0] * 12
        np.testing.assert_allclose([row[0] for row in batch["advantages"]], batch["scores"] - 3)

    def test_each_prompt_has_its_own_baseline(self):
        sampled = prompts(6).plus(scores=np.zeros(6))
        made = remax.with_baselines(sampled, prompts(2).plus(scores=np.array([1.0, 2.0])))
        assert made["baseline_scores"].tolist() == [1, 1, 1, 2, 2, 2]

    def test_rows_that_do_not_fit(self):
        with refuses(ColumnError, 5, 2, "greedy"):
            remax.with_baselines(prompts(5), prompts(2).plus(scores=np.zeros(2)))


class TestOptions:
    def test_out_of_range(self):
        for algorithm in ALL:
            for name, value in (
                ("max_new_tokens", 0), ("temperature", 0.0), ("n", 0), ("n", 2.5), ("epochs", 0), ("mini_batches", 0),
                ("kl_coef", -0.1), ("kl_coef", float("nan")), ("old_log_probs", "maybe"), ("clip", 1.5), ("kl", "k9"),
                ("aggregation", "mean"),
            ):  # fmt: skip
                with refuses(OptionError, f"{name}={value!r}"):
                    replace(algorithm, **{name: value})

    def test_out_of_range_of_one(self):
        for make, *named in (
            (lambda: hf.GRPO(n=1), "n=1", 2), (lambda: hf.RLOO(n=1), "n=1", 2),
            (lambda: hf.GRPO(scale="std"), "scale='std'", "'group', 'batch', 'none'"),
            (lambda: hf.GRPO(kl="k1"), "kl='k1'", "k2", "k3+"), (lambda: hf.GRPO(clip_high=0.0), "clip_high=0.0"),
            (lambda: hf.GRPO(kl="k1+", kl_by_ratio=True), "kl='k1+'", "k1 or k3", "kl_by_ratio"),
            (lambda: hf.PPO(kl_by_ratio=True), "kl_by_ratio=True", "kl_in"),
            (lambda: hf.PPO(kl="k2", kl_in="loss", kl_by_ratio=True), "kl='k2'", "k1 or k3"),
            (lambda: ppo.PolicyLoss(kl="abs", kl_by_ratio=True), "kl='abs'", "k1 or k3"),
            (lambda: hf.GRPO(filter_groups=1), "filter_groups=1", "True", "False"),
            (lambda: hf.ReinforcePlusPlus(gamma=1.1), "gamma=1.1"), (lambda: hf.RLOO(score_clip=0.0), "score_clip=0.0"),
            (lambda: hf.ReMax(score_clip=-1.0), "score_clip=-1.0"),
            (lambda: hf.ReinforcePlusPlus(score_clip=0.0), "score_clip=0.0"), (lambda: grpo.Advantages(epsilon=0.0), "epsilon=0.0"),
        ):  # fmt: skip
            with refuses(OptionError, *named):
                make()

    def test_frozen_keyword_only_and_described(self):
        for algorithm in ALL:
            cls = type(algorithm)
            assert is_dataclass(cls)
            with pytest.raises(TypeError, match="positional"):
                cls(3)
            with pytest.raises(AttributeError, match="cannot assign"):
                algorithm.n = 3
            described = {name for base in cls.__mro__ if is_dataclass(base) for name in self.described(base)}
            assert described == {f.name for f in fields(cls)}, cls

    @staticmethod
    def described(cls):
        """Return the fields in a class's own body that a docstring follows."""
        source = Path(__file__).parents[2] / "hfsdk" / "algorithms" / f"{cls.__module__.rpartition('.')[2]}.py"
        (body,) = (n.body for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
        mine = [(a, b) for a, b in pairwise(body) if isinstance(a, ast.AnnAssign) and "ClassVar" not in ast.unparse(a.annotation)]
        assert all(isinstance(b, ast.Expr) for _, b in mine)
        return [a.target.id for a, _ in mine]

    def test_the_function_takes_the_options_of_its_advantages(self):
        modules = (ppo, grpo, rloo, remax, reinforce_pp, safe_rlhf, opo, reinforce_pp_baseline, distillation, process)
        for module in modules:
            options = inspect.signature(module.advantages).parameters
            assert next(iter(options)) == "batch"
            for field in fields(module.Advantages):
                default = options[field.name].default
                assert default == (options[field.name].empty if field.name == "multiplier" else field.default), (module, field.name)
                assert f"        {field.name}: " in module.advantages.__doc__, (module, field.name)


def test_the_page_has_every_option_and_its_default():
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    header = next(row for row in rows if row[0] == "option")
    told = {row[0].strip("`"): row[1:] for row in rows[rows.index(header) + 2 :] if row[0].startswith("`") and len(row) == 6}
    for column, name in enumerate(header[1:]):
        algorithm = getattr(hf, name)()
        for option, cells in told.items():
            said = cells[column]
            assert said == ("-" if not hasattr(algorithm, option) else repr(getattr(algorithm, option)).replace("'", '"')), option
        if name != "PPO":
            assert {f.name for f in fields(algorithm)} <= set(told)


def test_algorithms_do_not_import_each_other():
    folder = Path(__file__).parents[2] / "hfsdk" / "algorithms"
    for file in FILES:
        text = (folder / f"{file}.py").read_text()
        others = {f"hfsdk.algorithms.{name}" for name in FILES}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in others, f"{file}.py line {node.lineno}"
                assert node.module != "hfsdk.algorithms" or not {a.name for a in node.names} & {*FILES, "PPO", "GRPO"}


class TestSimulated:
    @pytest.fixture
    def session(self):
        with hf.Session.simulated("1x4 H200") as opened:
            actor = opened.actor("tiny", train="dp4", rollout="tp1")
            opened.reference(actor)
            opened.reward(lambda completions: [0.0] * len(completions))
            yield opened

    @every
    def test_a_step_has_calls_and_times(self, session, algorithm):
        stream = session.prompts(["one", "two", "three", "four"], batch_size=4)
        step = algorithm.step(session.models, next(stream))
        step.actor.wait()
        calls = [f"{c.role}.{c.method}" for c in session.dataflow.calls]
        assert calls.count("actor.generate") == (2 if isinstance(algorithm, hf.ReMax) else 1)
        assert calls.count("actor.update") == 1
        assert len(step.batch) == 4 * algorithm.n
        assert step.batch.known_lengths("advantages").tolist() == step.batch.known_lengths("response").tolist()
        with pytest.raises(SimulatedValueError):
            algorithm.metrics(step)
        run = session.train(algorithm, stream, steps=2)
        assert (run.history["seconds"] > 0).all()

    def test_filter_keeps_all_groups_where_there_are_no_scores(self, session):
        step = hf.GRPO(n=2, max_new_tokens=3, filter_groups=True).step(session.models, session.prompts(["a"], batch_size=1)[0])
        step.actor.wait()
        assert step.actor is not None

    def test_a_missing_reference_is_told_before_anything_runs(self):
        with hf.Session.simulated("1x4 H200") as session:
            session.actor("tiny", train="dp4", rollout="tp1")
            session.reward(lambda completions: [0.0] * len(completions))
            stream = session.prompts(["a", "b", "c", "d"], batch_size=4)
            for algorithm in ALL:
                with refuses(PlacementError, "reference", "session.reference"):
                    algorithm.step(session.models, stream[0])
            assert not [c for c in session.dataflow.calls if c.method == "generate"]
            for algorithm in ALL:
                replace(algorithm, kl_coef=0.0).step(session.models, stream[0]).actor.wait()

    def test_missing_columns_name_their_writer(self, session):
        stream = session.prompts(["a", "b"], batch_size=2)
        batch = session.models.actor.generate(stream[0], max_new_tokens=3, n=2)
        with refuses(ColumnError, "scores", "reward.compute_scores"):
            grpo.advantages(batch)
        scored = session.models.reward.compute_scores(batch)
        with refuses(ColumnError, "old_log_probs", "compute_log_probs"):
            rloo.advantages(scored)
        with refuses(ColumnError, "baseline_scores", "with_baselines"):
            remax.advantages(scored, kl_coef=0.0)

    def test_join(self, session):
        stream = session.prompts(["a", "b"], batch_size=2)
        one, two = (session.models.actor.generate(stream[0], max_new_tokens=3, n=n) for n in (1, 2))
        joined = two.join(one.take([0, 0, 1, 1]), other="group")
        assert refs_of(joined)["other"].call_id == refs_of(one)["group"].call_id
        assert "other" not in two
        with refuses(ColumnError, "2 samples", 4):
            two.join(one, other="group")
        with refuses(ColumnError, "'scores'"):
            one.join(one, other="scores")
        with hf.Session.simulated("1x2 A100-80GB") as elsewhere:
            foreign = elsewhere.actor("tiny").generate(elsewhere.prompts(["a", "b"], batch_size=2)[0], max_new_tokens=3)
            with refuses(ColumnError, "session"):
                one.join(foreign, other="group")
        again = session.models.actor.generate(joined.alias("baseline_scores", "group"), max_new_tokens=3)
        assert "baseline_scores" not in again, "it belonged to the older responses"
