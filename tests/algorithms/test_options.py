"""Options: each declared once, shown by `?`, and refused where they do not exist, by the name that hfsdk has for them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
from itertools import pairwise
from pathlib import Path

from expect import each, refuses

import hfsdk as hf
from hfsdk.algorithms import grpo, ppo
from hfsdk.algorithms.aliases import OTHER_NAMES, unknown_option
from hfsdk.algorithms.handles import StepModels
from hfsdk.algorithms.options import Options
from hfsdk.core.experiment import FORMAT, read_baseline

EVERY = [
    "DPO", "GRPO", "PPO", "RLOO", "ReMax", "ReinforcePlusPlus", "SafeRLHF", "GSPO", "CISPO", "DAPO", "DrGRPO", "OPO",
    "ReinforcePlusPlusBaseline", "KLCov", "ClipCov", "ProcessGRPO", "Distillation", "SAPO", "GMPO", "GPG", "DPPO", "GDPO",
    "PassAtKTraining",
]  # fmt: skip


@each("make, named", [
    (lambda: hf.PPO(beta=0.1), ("'beta'", "PPO(kl_coef=...)")),
    (lambda: hf.PPO(gae_lambda=0.9), ("'gae_lambda'", "PPO(lam=...)")),
    (lambda: hf.PPO(cliprange=0.2), ("'cliprange'", "PPO(clip=...)")),
    (lambda: hf.PPO(epsilon=0.2), ("'epsilon'", "PPO(clip=...)")),
    (lambda: hf.PPO(clip_range=0.2), ("'clip_range'", "PPO(clip=...)")),
    (lambda: hf.PPO(cliprange_value=0.2), ("'cliprange_value'", "PPO(value_clip=...)")),
    (lambda: hf.PPO(num_ppo_epochs=4), ("'num_ppo_epochs'", "PPO(epochs=...)")),
    (lambda: hf.PPO(num_mini_batches=4), ("'num_mini_batches'", "PPO(mini_batches=...)")),
    (lambda: hf.PPO(ent_coef=0.1), ("'ent_coef'", "PPO(entropy_coef=...)")),
    (lambda: hf.PPO(vf_coef=0.1), ("'vf_coef'", "session.critic")),
    (lambda: hf.GRPO(num_generations=4), ("'num_generations'", "GRPO(n=...)")),
    (lambda: hf.GRPO(max_completion_length=4), ("'max_completion_length'", "GRPO(max_new_tokens=...)")),
    (lambda: hf.GRPO(gae_lambda=1.0), ("'gae_lambda'", "lam", "GRPO", "max_new_tokens")),
    (lambda: hf.RLOO(learning_rate=1e-5), ("'learning_rate'", "session.actor(model, optimizer=hf.AdamW(lr=1e-5))")),
    (lambda: hf.SafeRLHF(steps=4), ("'steps'", "session.train")),
    (lambda: hf.DPO(kl_coef=0.1), ("'kl_coef'", "DPO(beta=...)")),
    (lambda: hf.DAPO(batch_multiplier=3.0), ("'batch_multiplier'", "DAPO(oversample=...)")),
    (lambda: hf.KLCov(kl_cov_ratio=2e-3), ("'kl_cov_ratio'", "KLCov(share=...)")),
    (lambda: hf.GRPO(use_bias_correction_kl=True), ("'use_bias_correction_kl'", "GRPO(kl_by_ratio=...)")),
    (lambda: hf.SAPO(sapo_temperature_neg=1.05), ("'sapo_temperature_neg'", "SAPO(tau_neg=...)")),
    (lambda: hf.GRPO(sapo_temperature_neg=1.05), ("'sapo_temperature_neg'", "hf.SAPO()")),
    (lambda: hf.GRPO(multi_objective_aggregation=1), ("'multi_objective_aggregation'", "hf.GDPO()")),
    (lambda: hf.GDPO(gdpo_reward_keys=["a"]), ("'gdpo_reward_keys'", "GDPO(parts=...)")),
    (lambda: hf.GRPO(rollout_is_batch_normalize=True), ("'rollout_is_batch_normalize'", "GRPO(tis_normalise=...)")),
    (lambda: hf.GRPO(loss_mode="geo_mean"), ("'loss_mode'", "hf.GMPO()", "hf.GPG()")),
    (lambda: hf.GRPO(kl="low_var_kl+"), ("verl's kl='low_var_kl+'", "kl='k3+'")),
    (lambda: hf.GRPO(aggregation="sapo"), ("aggregation='sapo'", "hf.SAPO()")),
    (lambda: hf.GRPO(importance_sampling_level=1), ("'importance_sampling_level'", "hf.GSPO()")),
    (lambda: hf.PPO(whiten_reward=True), ("'whiten_reward'", "'whiten_rewards'")),
    (lambda: hf.GRPO(stop=["\n"]), ("'stop'", "models.actor.generate(prompts, stop=", "eos_token_id")),
    (lambda: hf.GRPO(stop_token_ids=[1]), ("'stop_token_ids'", "stop_token_ids=[13]", "generation_config.json")),
    (lambda: hf.GRPO(ignore_eos=True), ("'ignore_eos'", "models.actor.generate(")),
    (lambda: hf.PPO(top_k=50), ("'top_k'", "models.actor.generate(prompts, top_p=0.9, top_k=50")),
    (lambda: hf.GRPO(min_p=0.1), ("'min_p'", "there is none", "temperature, top_k, top_p", "log-prob pass")),
    (lambda: hf.PPO(repetition_penalty=1.1), ("'repetition_penalty'", "there is none")),
    (lambda: hf.PPO(num_beams=4), ("'num_beams'", "no beam search")),
    (lambda: hf.PPO(nothing_like_it=1), ("'nothing_like_it'", "max_new_tokens, temperature")),
    (lambda: dataclasses.replace(hf.PPO(), beta=1), ("'beta'", "PPO(kl_coef=...)")),
    (lambda: ppo.PolicyLoss(cliprange=0.1), ("'cliprange'", "PolicyLoss(clip=...)")),
    (lambda: ppo.advantages(None, gae_lambda=0.9), ("'gae_lambda'", "advantages(lam=...)")),
    (lambda: grpo.Advantages(eps=1e-4), ("'eps'", "clip", "Advantages")),
])  # fmt: skip
def test_an_option_that_does_not_exist_is_refused_by_the_name_it_has_here(make, named):
    with refuses(hf.OptionError, *named) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_every_other_name_leads_to_the_option():
    for name in EVERY:
        mine = [field.name for field in dataclasses.fields(getattr(hf, name))]
        for option, others in OTHER_NAMES.items():
            for other in set(others.split()) - set(mine):
                known = [one for one, names in OTHER_NAMES.items() if other in names.split() and one in mine]
                said = unknown_option(name, other, mine)
                of_an_algorithm = not known and "hf." in said  # the option of another one, which is named
                assert f"calls it {(known or [''])[0]}" in said or other == option or of_an_algorithm, (name, other, said)
    options = {field.name for name in [*EVERY, "OverlongPenalty"] for field in dataclasses.fields(getattr(hf, name))}
    assert set(OTHER_NAMES) <= options


def test_the_help_has_every_option():
    for cls in (getattr(hf, name) for name in EVERY):
        for field in dataclasses.fields(cls):
            assert f"        {field.name}: " in cls.__doc__, (cls, field.name)
            assert field.name in inspect.signature(cls).parameters, (cls, field.name)


def test_options_survive_pickle_and_replace():
    for name in EVERY:
        algorithm = getattr(hf, name)(mini_batches=3)
        assert pickle.loads(pickle.dumps(algorithm)) == algorithm == dataclasses.replace(algorithm), name


def test_a_subclass_may_take_what_is_no_field():
    class Mine(hf.PPO):
        def __init__(self, scale):
            super().__init__(kl_coef=scale / 10)

    class Wider(hf.PPO):
        def __init__(self, **options):
            super().__init__(clip=options.pop("mine"), **options)

    assert Mine(scale=2).kl_coef == 0.2
    assert (Wider(mine=0.3, n=2).clip, Wider(mine=0.3, n=2).n) == (0.3, 2)
    with refuses(hf.OptionError, "Mine", "'scales'", "'scale'"):
        Mine(scales=2)


def test_an_option_is_declared_in_one_class_of_those_it_is_inherited_from():
    """But for its default: a class may say it again with another one than the class that it takes it from."""
    for name in EVERY:
        twice = {}
        for base in getattr(hf, name).__mro__[:-1]:
            for field in inspect.get_annotations(base) if issubclass(base, Options) else ():
                twice.setdefault(field, []).append(vars(base).get(field, getattr(base, field, None)))
        for field, defaults in twice.items():
            assert all(mine != theirs for mine, theirs in pairwise(map(repr, defaults))), (name, field)


def test_a_step_stands_near_the_top_of_a_short_file():
    for cls in (getattr(hf, name) for name in EVERY):
        own = next(base for base in cls.__mro__ if "step" in vars(base))
        assert len(Path(inspect.getfile(cls)).read_text(encoding="utf-8").splitlines()) <= 150, cls
        source = Path(inspect.getfile(own)).read_text(encoding="utf-8").splitlines()
        assert next(i for i, line in enumerate(source, 1) if "def step(" in line) <= 72, cls


def test_the_models_of_a_step_are_those_of_a_session():
    with hf.Session.simulated("1x4 H200") as session:
        for name, member in inspect.getmembers(StepModels, lambda m: isinstance(m, property)):
            ours = inspect.getattr_static(type(session.models), name)
            assert ours.fget.__annotations__["return"] == member.fget.__annotations__["return"]


def test_a_baseline_is_read_whose_options_stand_in_another_order(tmp_path):
    scores = {str(seed): 1.0 for seed in range(2)}

    def read(text):
        known = {"format": FORMAT, "steps": 3, "seeds": [0, 1], "algorithms": {"PPO": {"options": text, "final_scores": scores}}}
        path = tmp_path / "ppo.json"
        path.write_text(json.dumps(known))
        return read_baseline(path, 3, {"PPO": "PPO(n=1, clip=0.2, clip_high=None, entropy_coef=0.0)"})

    assert read("PPO(clip=0.2, n=1)")["steps"] == 3, "what came since is off"
    assert read("PPO(clip=0.2, n=1, entropy_coef=0.0)")["steps"] == 3
    with refuses(hf.OptionError, "PPO", "another name"):
        read("PPO(clip=0.2, n=1, entropy_coef=0.1)")
    for other in ("PPO(clip=0.3, n=1)", "GRPO(clip=0.2, n=1)"):
        with refuses(hf.OptionError, "PPO", "another name"):
            read(other)
