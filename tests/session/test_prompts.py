"""Prompt streams: the same everywhere and every time, and clear about what cannot be a prompt."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from expect import each, refuses

import hfsdk as hf
from hfsdk.session.parts import parts_of
from hfsdk.session.streams import Pairs

TEXTS = [f"review number {i}" for i in range(10)]


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def positions(batch):
    return batch["position"].tolist()


def test_a_batch_repeats_and_next_advances(session, actor):
    prompts = session.prompts(TEXTS, batch_size=4)
    first = prompts[0].text("prompt")
    assert prompts[0].text("prompt") == first == next(prompts).text("prompt")
    assert prompts.position == 1
    assert positions(next(prompts)) == [4, 5, 6, 7]
    assert len(prompts) == 3


def test_a_loop_is_one_pass_from_where_the_stream_stands(session, actor):
    prompts = session.prompts(TEXTS, batch_size=4)
    next(prompts)
    found = [positions(batch) for batch in prompts]
    assert len(found) == len(prompts) == 3
    assert found[0] == [4, 5, 6, 7]
    assert prompts.position == 4
    assert positions(list(prompts)[-1]) == [24, 25, 26, 27]


def test_every_pass_has_all_prompts_in_an_order_of_its_own(session, actor):
    prompts = session.prompts(TEXTS, batch_size=5)
    passes = [prompts[2 * k].text("prompt") + prompts[2 * k + 1].text("prompt") for k in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == TEXTS
    assert passes[0] != passes[1]
    assert passes[0] != TEXTS
    ordered = session.prompts(TEXTS, batch_size=5, shuffle=False)
    assert ordered[0].text("prompt") + ordered[1].text("prompt") == TEXTS


def test_the_order_depends_on_the_seed_alone(session, actor):
    one = [session.prompts(TEXTS, batch_size=4, seed=s).row_at(3) for s in range(8)]
    code = (
        "from hfsdk.session.streams import *\n"
        f"print([PromptStream(None, None, {TEXTS!r}, PromptOptions(batch_size=4, seed=s), 512).row_at(3) for s in range(8)])"
    )
    env = {"PYTHONHASHSEED": "77", "PATH": "/usr/bin"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=False)
    assert result.stdout.strip() == str(one), result.stderr
    assert len(set(one)) > 1


def test_tokens_are_the_tokenizer_s(session, actor):
    batch = session.prompts(["abc"], batch_size=1)[0]
    assert batch["prompt"].flat.tolist() == [97, 98, 99]
    assert batch["prompt"].dtype == np.int32


@each(
    "source",
    [
        pd.DataFrame({"text": TEXTS, "rating": range(10)}),
        [{"text": t, "rating": i} for i, t in enumerate(TEXTS)],
        {"text": TEXTS, "rating": list(range(10))},
    ],
)
def test_the_data_s_columns_travel(session, actor, source):
    batch = session.prompts(source, batch_size=4, shuffle=False)[0]
    assert batch.columns == ("prompt", "position", "rating")
    assert batch["rating"].tolist() == [0, 1, 2, 3]


@each(
    "source",
    [
        TEXTS, pd.Series(TEXTS, index=range(5, 15), name="question"), np.array(TEXTS), pd.DataFrame({"prompt": TEXTS}),
        {"prompt": TEXTS, "text": ["other"] * 10}, [{"prompt": text, "completion": "yes"} for text in TEXTS],
    ],
)  # fmt: skip
def test_prompts_are_the_same_wherever_they_go(session, actor, source):
    prompts = session.prompts(source, shuffle=False)
    assert prompts.batch_size == 32
    assert prompts.rows(0, 10).text("prompt") == TEXTS == actor.generate(source).text("prompt")


def test_a_conversation_is_the_model_s_template_wherever_it_goes(session, actor):
    of_parquet = pd.DataFrame({"prompt": [np.array(CHAT)]})
    for source in ([CHAT], {"prompt": [CHAT]}, pd.DataFrame({"messages": [CHAT]}), CHAT, of_parquet):
        assert session.prompts(source, batch_size=1)[0].text("prompt")[0].split() == ["Be", "brief.", "Hello"]
        assert actor.generate(source).text("prompt")[0].split() == ["Be", "brief.", "Hello"]
    own = session.prompts([CHAT, CHAT[1:]], batch_size=2, shuffle=False, chat=True, system="Think.")[0].text("prompt")
    assert [text.split()[0] for text in own] == ["Be", "Think."]


@each(
    "turns, named",
    [
        ([*CHAT, {"role": "assistant", "content": "Hi"}], "the assistant's message"),
        ([{"role": "user", "content": None}], "without a text"),
    ],
)
def test_a_conversation_that_cannot_be_answered_names_its_row(session, actor, turns, named):
    for prompts in (session.prompts, actor.generate):
        with refuses(hf.OptionError, "prompt 1 of the data", named):
            prompts([CHAT, turns])


def test_the_data_s_columns_travel_through_generate_as_they_are(session, actor):
    batch = actor.generate([{"prompt": "a", "answer": "1", "tags": [1, 2]}, {"prompt": "b", "answer": "2", "tags": [3]}])
    assert batch["tags"] == [[1, 2], [3]]
    assert batch["answer"] == ["1", "2"]


def test_a_frame_without_prompts_names_its_columns(session, actor):
    for prompts in (session.prompts, actor.generate):
        with refuses(hf.ColumnError, "'prompt'", "question, answer", "session.prompts(data, column='question')"):
            prompts(pd.DataFrame({"question": TEXTS, "answer": TEXTS}))


def test_one_column_of_a_dataset(session, actor):
    datasets = pytest.importorskip("datasets")
    source = datasets.Dataset.from_dict({"question": TEXTS})
    batches = [session.prompts(texts, batch_size=4)[0] for texts in (source["question"], TEXTS)]
    assert batches[0].text("prompt") == batches[1].text("prompt")
    with refuses(hf.ColumnError, "streamed", "list(data.take(1000))"):
        session.prompts(source.to_iterable_dataset(), column="question", batch_size=4)


def test_two_columns_of_one_name(session, actor):
    with refuses(hf.ColumnError, "two columns", "'prompt'"):
        session.prompts(pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"]), batch_size=1)


def test_a_dataset(session, actor):
    datasets = pytest.importorskip("datasets")
    source = datasets.Dataset.from_dict({"question": TEXTS, "tags": [[i] for i in range(10)]})
    batch = session.prompts(source, column="question", batch_size=2, shuffle=False)[0]
    assert batch.text("prompt") == TEXTS[:2]
    assert batch["tags"] == [[0], [1]]  # the data's own values, not a per-token column


def test_token_ids_need_no_tokenizer(session):
    batch = session.prompts([[1, 2], [3]], batch_size=2, shuffle=False)[0]
    assert batch["prompt"].flat.tolist() == [1, 2, 3]


def test_columns_that_hfsdk_writes_are_left_out_with_a_notice(session, actor):
    with pytest.warns(UserWarning, match="response"):
        prompts = session.prompts([{"text": "a", "response": "b"}], batch_size=1)
    assert prompts[0].columns == ("prompt", "position")
    assert "response" in session.messages[-1]


def test_a_chat_is_the_model_s_template(session, actor):
    prompts = session.prompts(["Hello"], batch_size=1, chat=True, system="Be brief.")
    assert prompts[0].text("prompt")[0].split() == ["Be", "brief.", "Hello"]


def test_truncation_keeps_the_end(session, actor):
    batch = session.prompts(["x" * 600 + "end"], batch_size=1, max_prompt_tokens=5)[0]
    assert batch.text("prompt") == ["xxend"]


@each(
    "source, options, error, named",
    [
        ([], {}, hf.OptionError, ["no prompts"]),
        (["a", " "], {}, hf.OptionError, ["prompt 1 of the data", "empty"]),
        (["a", []], {}, hf.OptionError, ["prompt 1 of the data", "empty"]),
        (["a", None], {}, hf.OptionError, ["prompt 1 of the data", "NoneType"]),
        (["a", "b" * 600], {}, hf.OptionError, ["prompt 1 of the data", "600 tokens", 512, "max_prompt_tokens"]),
        ("text", {}, hf.ColumnError, ["got str"]),
        (3, {}, hf.ColumnError, ["got int"]),
        ([{"a": 1}], {}, hf.ColumnError, ["no column 'prompt'", "it has a"]),
        ([{"text": "x", "a": 1}, {"text": "x"}], {}, hf.ColumnError, ["item 1 of the data", "'a'"]),
        ({"text": ["x"], "a": []}, {}, hf.ColumnError, ["length"]),
        (["a"], {"batch_size": 0}, hf.OptionError, ["batch_size=0"]),
        (["a"], {"max_prompt_tokens": 0}, hf.OptionError, ["max_prompt_tokens=0"]),
        (["a"], {"max_prompt_tokens": 512}, hf.OptionError, ["max_prompt_tokens", "no room"]),
        (["a"], {"system": "x"}, hf.OptionError, ["chat=True"]),
    ],
)
def test_bad_data_fails_at_the_call(session, actor, source, options, error, named):
    with refuses(error, *named):
        session.prompts(source, **{"batch_size": 2, **options})


def test_bad_batch_numbers(session, actor):
    prompts = session.prompts(TEXTS, batch_size=4)
    for k in (-1, 1.5, "0"):
        with refuses(hf.OptionError, f"k={k!r}", "a whole number from 0"):
            prompts[k]


def test_data_without_a_stream_are_looked_at_in_their_order_and_keep_no_place(session, actor):
    sources = parts_of(session).sources
    before = parts_of(session).places.positions()
    assert sources.in_order(pd.DataFrame({"prompt": TEXTS})).rows(0, 10).text("prompt") == TEXTS
    assert parts_of(session).places.positions() == before


def test_data_without_a_stream_become_pairs_for_dpo_alone(session, actor):
    sources, data = parts_of(session).sources, {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}
    assert isinstance(sources.stream_of(data, pairs=True), Pairs)
    assert isinstance(sources.stream_of(data), hf.PromptStream)


def test_data_given_again_go_on_and_changed_data_begin(session, actor):
    sources, texts = parts_of(session).sources, list(TEXTS)
    next(sources.stream_of(texts))
    assert sources.stream_of(list(texts)).position == 1
    texts.append("one more")
    assert sources.stream_of(texts).position == 0
    assert sources.stream_of(texts).num_rows == 11


def test_one_row_that_is_no_list_says_so(session, actor):
    for prompts in (session.prompts, actor.generate):
        with refuses(hf.ColumnError, "'prompt'", "'What is 2+2?'", "a list of it"):
            prompts({"prompt": "What is 2+2?", "answer": "4"})


def test_columns_that_hfsdk_writes_are_left_out_wherever_data_go(session, actor):
    for prompts in (session.prompts, actor.generate):
        with pytest.warns(UserWarning, match="hfsdk writes columns named scores itself"):
            prompts({"prompt": TEXTS, "scores": [0.0] * 10})
