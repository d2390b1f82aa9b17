"""Texts that are turned into tokens elsewhere: one message for all of a batch, and the same answers as near the folder."""

from __future__ import annotations

import pytest

from hfsdk.assets.folder_tokenizer import FolderTokenizer
from hfsdk.kept.near_cluster import RemoteTokenizer, text_of
from hfsdk.session.parts import parts_of

TEXTS = [f"review number {i}" for i in range(12)]


@pytest.fixture
def asked(session, actor):
    """What went over the line; the session's texts are turned into tokens at its other end."""
    client = parts_of(session).client
    near, found = FolderTokenizer(client.tokenizer_folder), []

    def ask(*question):
        found.append(question[1:])
        return text_of(*question, lambda folder: near)

    client.use_tokenizer(RemoteTokenizer(near.folder, ask))
    return found


def test_a_batch_of_prompts_is_one_message(session, asked):
    prompts = session.prompts(TEXTS, batch_size=6)
    batch = prompts[0]
    assert [what for what, _ in asked] == ["several"]
    assert batch.text("prompt") == prompts[0].text("prompt")
    assert sorted(prompts[0].text("prompt") + prompts[1].text("prompt")) == sorted(TEXTS)
    assert [what for what, _ in asked] == ["several"] * 4, "two of prompts, two of texts"


def test_texts_that_are_long_are_looked_at_with_one_message(session, asked):
    session.prompts(["a film"] + [f"{i}" * 510 for i in range(4)] * 2, batch_size=2)
    assert [(what, len(value)) for what, value in asked] == [("several", 4)], "each once"


def test_examples_are_one_message(session, asked):
    columns = {"prompt": TEXTS, "completion": [f" is good {i}" for i in range(12)]}
    batch = session.demonstrations(columns, batch_size=6)[0]
    assert [what for what, _ in asked] == ["turn_ends", "several"]
    assert batch.text("prompt")[0] in TEXTS
    del asked[:]
    session.pairs({"chosen": [f"{i}: good" for i in range(4)], "rejected": [f"{i}: bad" for i in range(4)]}, batch_size=4)[0]
    assert [what for what, _ in asked] == ["several"]


def test_texts_given_to_generate_are_one_message(session, actor, asked):
    batch = actor.generate(TEXTS, max_new_tokens=4)
    assert [what for what, _ in asked] == ["several"]
    frame = batch.to_pandas()
    assert len(frame) == 12
    assert len(asked) <= 3
    batch.to_pandas("tokens")
    assert len(asked) <= 4


def test_a_single_text_is_asked_as_itself(asked, session):
    tokenizer = parts_of(session).client.need_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a film")) == "a film"
    tokenizer.foresee([("encode", "a film")])
    assert [what for what, _ in asked] == ["encode", "decode"]
