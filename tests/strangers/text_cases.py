"""Texts, templates, conversations and ends of turns: which tokens a row becomes, or why it is refused."""

from __future__ import annotations

import hfsdk as hf
from tests.strangers.frame import Bench, Case, Refused


def prompts(it: Bench, *rows, folder="tiny", **options):
    """Return the token ids of prompts."""
    batch = it.session_of(folder).prompts(list(rows), batch_size=len(rows), shuffle=False, **options)[0]
    return [row.tolist() for row in batch["prompt"]]


CASES = [
    Case(
        "a text as it is", "kept from the first release",
        lambda it: prompts(it, "abc"), [[97, 98, 99]], "the bytes of the text, in ASCII",
    ),
    Case(
        "a prompt that is no text", "kin of trl#4923",
        lambda it: prompts(it, "a", None), Refused(hf.OptionError, "prompt 1 of the data", "NoneType"), "it has no tokens",
    ),
]  # fmt: skip
