"""Descriptions of roles refuse what the engines could not run, and schedules follow their formula."""

import math

import pytest
from expect import each, refuses

from hfsdk.core.errors import OptionError
from hfsdk.core.roles import AdamW, RoleSpec, RolloutOptions, Sampling


@each(
    "options, named",
    [
        ({"temperature": 0.001}, ["0 (greedy)", "0.01", "temperature=0.001"]),
        ({"temperature": math.nan}, ["temperature=nan"]),
        ({"max_new_tokens": 0}, ["max_new_tokens=0", "from 1"]),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, ["min_new_tokens=9", "max_new_tokens (8)"]),
        ({"top_p": 0.0}, ["top_p=0.0"]),
        ({"top_k": -1}, ["top_k=-1"]),
    ],
)
def test_sampling_refuses_what_the_engines_could_not_run(options, named):
    with refuses(OptionError, *named):
        Sampling(**options)


def test_log_probs_of_a_part_of_the_vocabulary_are_known_as_such():
    plain = Sampling(temperature=0.7)
    assert not plain.renormalised
    others = (Sampling(top_k=5), Sampling(top_p=0.9), Sampling(temperature=0), Sampling(min_new_tokens=1))
    assert all(sampling.renormalised for sampling in others)


@each("options", [{"lr": -1.0}, {"eps": 0.0}, {"betas": (1.0, 0.9)}, {"schedule": "step"}, {"schedule": "linear"}])
def test_the_optimizer_refuses_numbers_out_of_range_and_schedules_without_an_end(options):
    (name,) = options
    with refuses(OptionError, name):
        AdamW(**options)


def test_learning_rates_follow_their_schedules_formula():
    linear = AdamW(lr=1.0, schedule="linear", warmup_steps=2, total_steps=6, min_lr=0.2)
    assert [linear.lr_at(k) for k in range(8)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = AdamW(lr=1.0, schedule="cosine", total_steps=4)
    assert [cosine.lr_at(k) for k in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])


def test_a_role_refuses_formats_that_do_not_exist():
    with refuses(OptionError, "dtype", "'fp16'", "'bf16'"):
        RoleSpec(name="actor", kind="actor", dtype="fp16")
    with refuses(OptionError, "cpu_weights", "'plain'"):
        RolloutOptions(cpu_weights="plain")
