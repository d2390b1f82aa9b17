"""What is printed of a noun is text: a name or a sample gives a terminal no orders."""

from __future__ import annotations

import re

from expect import each

import hfsdk as hf
from hfsdk.core.table import Table
from hfsdk.core.text import printable
from hfsdk.core.trace import Trace

ORDERS = "\x1b[31m\x1b]0;owned\x07 \x9b2J \x7f \r \x00 \x85"
FOUND = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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


@each("name", NOUNS)
def test_what_is_printed_of_a_noun_gives_a_terminal_no_orders(name):
    text = NOUNS[name]()
    assert text
    assert not FOUND.search(text)
