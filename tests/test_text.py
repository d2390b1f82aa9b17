"""What is printed of a noun is text: a name or a sample gives a terminal no orders."""

from __future__ import annotations

import ast
import re

import pytest
from expect import each

import hfsdk as hf
from hfsdk.core import errors
from hfsdk.core.table import Table
from hfsdk.core.text import printable
from hfsdk.core.trace import Trace
from hfsdk.core.user_line import warn_user

ORDERS = "\x1b[31m\x1b]0;owned\x07 \x9b2J \x7f \r \x00 \x85 \u202eback \u2066"
FOUND = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_printable_keeps_text_and_lines():
    assert printable("naïve 日本 🙂\n\tשלום \xa0") == "naïve 日本 🙂\n\tשלום \xa0"
    assert not FOUND.search(printable("".join(map(chr, range(0x300)))))
    assert printable("a\x1bb\ud800") == "a�b�"


def session():
    return hf.Session.simulated("1x1 A100-80GB", name=ORDERS)


def with_name(make):
    with session() as opened:
        return make(opened)


def prompts_batch(opened):
    opened.actor("tiny")
    opened.reward(lambda completions, **columns: [0.0] * len(completions))
    return opened.prompts(["a film " + ORDERS] * 4, batch_size=2)


NOUNS = {
    "Session": lambda: with_name(lambda opened: repr(opened)),
    "Session's history": lambda: with_name(lambda opened: repr(opened.history)),
    "Session's traces": lambda: with_name(lambda opened: repr(opened.trace)),
    "prompts": lambda: with_name(lambda opened: repr(prompts_batch(opened))),
    "a batch": lambda: with_name(lambda opened: repr(next(prompts_batch(opened)))),
    "Trace": lambda: repr(Trace((), ORDERS)),
    "Table": lambda: repr(Table({ORDERS: [1, 2]})),
}


def explained(system, estimator=ORDERS, **keys):
    words = {"data.train_batch_size": 64, "actor_rollout_ref.rollout.n": 4, "algorithm.adv_estimator": estimator}
    return hf.explain((words if system == "verl" else {}) | keys, system=system, model="qwen2.5-7b")


@each("system", ["verl", "trl", "openrlhf", "nemo-rl"])
def test_what_is_printed_of_a_configuration_gives_a_terminal_no_orders(system):
    for found in (explained(system), explained(system, **{ORDERS: ORDERS})):
        told = [repr(found), found.code, *(found.to_pandas(table).to_string() for table in ("arithmetic", "findings", "unread"))]
        assert not [text for text in told if FOUND.search(text)]


def test_what_a_configuration_says_is_no_line_of_the_code_that_is_pasted():
    code = explained("verl", "grpo\rimport os\nimport os\x0c\u2028import os").code
    imported = [node.names[0].name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import)]
    assert imported == ["hfsdk"]


@each("kind", [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, hf.HfsdkError)])
def test_an_error_gives_a_terminal_no_orders(kind):
    assert not FOUND.search(str(kind(f"no such folder: {ORDERS}")))
    if issubclass(kind, hf.CallError):
        assert not FOUND.search(str(kind("it failed", role="actor", details=f"Traceback: {ORDERS}")))


def test_a_notice_gives_a_terminal_no_orders():
    with pytest.warns(UserWarning, match="back") as told:
        warn_user(f"replaced the model in {ORDERS}")
    assert not FOUND.search(str(told[0].message))


@each("name", NOUNS)
def test_what_is_printed_of_a_noun_gives_a_terminal_no_orders(name):
    text = NOUNS[name]()
    assert text
    assert not FOUND.search(text)
