"""Descriptions of roles refuse what the engines could not run, and schedules follow their formula."""

import math

import pytest

from hfsdk.core.errors import OptionError
from hfsdk.core.roles import AdamW, RoleSpec, RolloutOptions, Sampling


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.001}, r"0 \(greedy\) or at least 0.01; got temperature=0.001"),
        ({"temperature": math.nan}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, r"between 0 and max_new_tokens \(8\)"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_sampling_refuses(options, words):
    with pytest.raises(OptionError, match=words):
        Sampling(**options)


def test_log_probs_of_a_part_of_the_vocabulary_are_known_as_such():
    plain = Sampling(temperature=0.7)
    assert not plain.renormalised
    others = (Sampling(top_k=5), Sampling(top_p=0.9), Sampling(temperature=0), Sampling(min_new_tokens=1))
    assert all(sampling.renormalised for sampling in others)


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"eps": 0.0}, {"betas": (1.0, 0.9)}, {"schedule": "step"}, {"schedule": "linear"}]
)
def test_optimizer_refuses(options):
    with pytest.raises(OptionError):
        AdamW(**options)


def test_schedules():
    linear = AdamW(lr=1.0, schedule="linear", warmup_steps=2, total_steps=6, min_lr=0.2)
    assert [linear.lr_at(k) for k in range(8)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = AdamW(lr=1.0, schedule="cosine", total_steps=4)
    assert [cosine.lr_at(k) for k in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])


def test_roles_refuse():
    with pytest.raises(OptionError, match="dtype"):
        RoleSpec(name="actor", kind="actor", dtype="fp16")
    with pytest.raises(OptionError, match="cpu_weights"):
        RolloutOptions(cpu_weights="plain")
