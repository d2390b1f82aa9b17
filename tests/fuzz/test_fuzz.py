"""Any values at all, given to any public callable: it succeeds or raises one clear line; see ``benchmarks/fuzzing``."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from expect import each

pytest.importorskip("hypothesis")

from known import KNOWN

import hfsdk as hf
from benchmarks.fuzzing import EXCEPTED, fuzz, targets
from benchmarks.fuzzing.campaign import calls
from benchmarks.fuzzing.inventory import INNER, classes, everything, names
from benchmarks.fuzzing.law import judge
from benchmarks.fuzzing.strategies import Stage, without_strategy
from benchmarks.fuzzing.values import Hostile, shown
from benchmarks.fuzzing.world import MAKERS, World

ROOT = Path(__file__).resolve().parents[2]
CALLS = 600
"""Of each half; the campaign makes more (``python -m benchmarks.fuzzing --num 10000``)."""


def by_name(name):
    return next(target for target in targets() if target.name == name)


# ---- the inventory


def test_every_parameter_has_a_strategy():
    assert {t.name: missing for t in targets() if (missing := without_strategy(t))} == {}


def test_every_class_that_methods_are_called_on_can_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a save is among them
    assert {t.owner.__name__ for t in targets() if t.owner is not None} <= set(MAKERS)
    world = World()
    try:
        for name in {t.owner.__name__ for t in targets() if t.owner is not None}:
            assert isinstance(world.get(name), names()[name]), name
    finally:
        world.close()


def test_what_is_left_out_exists():
    callables = {target.name for target in everything()} | {f"{cls.__name__}()" for cls in classes()}
    bases = {f"{base.__name__}.{name}" for cls in classes() for base in cls.__mro__ for name in dir(base)}
    modules = {name.rpartition(".")[0] for name in callables}
    functions = {name.removesuffix("()") for name in callables}
    assert set(EXCEPTED) <= callables | bases | modules | functions
    assert set(INNER) - {"Host", "CallClient"} <= set(names())


@each("name", ["Session.prompts", "ActorModel.generate", "Batch.map", "Ragged()", "Layout.parse", "Run.wait",
                                  "data.additions", "WhatIf.set", "Traces.__getitem__", "CostModel.multiplier ="])  # fmt: skip
def test_the_inventory_has_what_users_type(name):
    assert name in {target.name for target in targets()}


# ---- the law


@pytest.mark.parametrize("kind", ["session", "pure"])
def test_bad_input_gets_one_clear_line(kind):
    report = fuzz(seed=0, num=CALLS, kinds=[kind], limit_s=60.0)  # it ends what hangs; a refusal has a second of the processor
    assert report.counts["tried"] > CALLS / 2
    assert report.counts["succeeded"] > 0 < report.counts["refused"]
    new = [failure for failure in report.failures if failure.target not in KNOWN]
    assert not new, str(replace(report, failures=new))


def test_the_same_seed_makes_the_same_calls():
    said = [[], []]
    try:
        for words in said:
            calls(by_name("Session.prompts"), 5, 10, 600.0, False, lambda *word, to=words: to.append(word))
    finally:
        Stage.world.close()
    plain = [[(word[0], word[3] if word[0] == "begin" else word[1]) for word in words] for words in said]
    assert plain[0] == plain[1]
    assert len(plain[0]) >= 10


def test_a_value_that_refuses_itself_is_drawn_anew():
    said = []
    try:
        calls(by_name("ModelSpec()"), 414751567, 8, 600.0, False, lambda *word: said.append(word[0]))  # a YarnScaling of factor < 0
    finally:
        Stage.world.close()
    assert said.count("begin") == said.count("end") >= 7


# ---- what breaks the law is noticed


def as_target(function, **hints):
    import inspect

    parameters = tuple(inspect.signature(function).parameters.values())
    return replace(by_name("doctor"), name="made up", call=function, parameters=parameters, hints=hints)


def bare(x):
    return x + 1


def silent(x):
    raise hf.OptionError("")


def dumps(x):
    raise hf.OptionError(f"x is a number; got {x}")


def slow(x):
    threading.Event().wait()


def greedy(x):
    return len(np.ones(int(8e8), np.uint8))


def changes(x):
    Stage.world.session.seed += 1
    raise hf.OptionError("x is a number")


@each(
    "function, value, kind",
    [
        (bare, "a", "bare"), (bare, Hostile("__add__"), "bare"), (silent, 1, "unclear"), (dumps, "a\nb", "unclear"),
        (dumps, "a" * 5000, "unclear"), (dumps, "a", "refused"), (slow, 1, "slow"), (greedy, 1, "memory"), (changes, 1, "changed"),
        (bare, 1, "succeeded"),
    ],
)  # fmt: skip
def test_what_breaks_the_law_is_told(function, value, kind):
    Stage.world = World()
    try:
        assert Stage.world.session
        assert judge(as_target(function, x=int), {"x": value}, limit_s=0.25 if function is slow else 600.0).kind == kind
    finally:
        Stage.world.close()


def test_memory_is_told_though_the_process_once_took_more():
    peak = np.ones(int(16e8), np.uint8)
    del peak
    Stage.world = World()
    try:
        assert judge(as_target(greedy, x=int), {"x": 1}, limit_s=600.0).kind == "memory"
    finally:
        Stage.world.close()


def test_values_are_shown_whatever_they_do():
    for value in (Hostile("__repr__"), "a\n" * 10**6, [Hostile("__repr__")], "\ud800"):
        text = shown(value)
        assert len(text) <= 80
        assert text.isascii()
        assert "\n" not in text


def test_the_command_says_what_it_does():
    command = [sys.executable, "-m", "benchmarks.fuzzing", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert "--num" in done.stdout, done.stderr
