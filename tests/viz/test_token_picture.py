"""The token picture's view, text and static drawing: right numbers, right rows, nothing invisible, no bad input that raises."""

from __future__ import annotations

import base64
import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from expect import each, refuses

import hfsdk as hf
from hfsdk.algorithms import rlmath
from hfsdk.assets.folder_tokenizer import byte_alphabet
from hfsdk.core.batch import Batch
from hfsdk.core.table import Ragged
from hfsdk.core.tokens import MOST_TOKENS, SHOWN_TOKENS
from hfsdk.session.tokenizer import StandInTokenizer
from hfsdk.viz import hooks, tokenmath
from hfsdk.viz.pictures.tokens import TokensPicture, clipped_tokens, field_values, sample_text, tokens_view, visible
from tests.viz import token_batches as made

SVG = "{http://www.w3.org/2000/svg}"


def values_of(picture, name):
    return field_values(picture.view, next(f for f in picture.view["fields"] if f["name"] == name))


def tensors(batch, *names):
    return [torch.tensor(batch[name].flat) for name in names]


def test_packed_numbers_come_back_exact():
    given = np.array([1.1, -0.0, np.nan, np.inf, -np.inf, 3e-42, 3.4e38], np.float32)
    assert np.array_equal(tokenmath.unpack(tokenmath.pack(given)).view(np.uint32), given.view(np.uint32))


def test_every_number_is_the_engines_and_every_row_is_that_of_to_pandas():
    batch = made.batch()
    picture = hf.viz.tokens_picture(batch, [7, 2, 4, 11], new="new_log_probs")
    frame = batch.to_pandas("tokens")
    rows = [s["first_row"] + k for s in picture.view["samples"] for k in range(len(s["response"]))]
    shown = frame.loc[rows]
    assert shown["sample"].tolist() == [s["row"] for s in picture.view["samples"] for _ in s["response"]]
    ids = [picture.view["vocabulary"][i][0] for s in picture.view["samples"] for i in s["response"]]
    assert ids == shown["token_id"].tolist()
    for name in ("advantages", "rewards", "values", "returns", "kl", "old_log_probs", "ref_log_probs", "rollout_log_probs"):
        assert np.array_equal(values_of(picture, name), shown[name].to_numpy()), name
    old, ref, rollout, new = (torch.tensor(shown[n].to_numpy()) for n in
                              ("old_log_probs", "ref_log_probs", "rollout_log_probs", "new_log_probs"))  # fmt: skip
    assert np.allclose(values_of(picture, "kl_k3"), rlmath.kl_estimate(old, ref, "k3"), rtol=1e-5, atol=1e-9)
    assert np.array_equal(values_of(picture, "difference"), (old - rollout).numpy())
    assert np.allclose(values_of(picture, "ratio"), (new - old).exp(), rtol=1e-6)
    assert picture.view["note"] == "4 of 12 samples shown; batch.tokens(rows=...) chooses others"


def test_kl_is_computed_where_the_batch_has_none():
    batch = made.batch()
    with_column, without = hf.viz.tokens_picture(batch), hf.viz.tokens_picture(batch.drop("kl"))
    assert np.array_equal(values_of(with_column, "kl"), values_of(without, "kl"))
    assert "kl" not in with_column.view["columns"], "it follows from two others, so it is not sent"
    own = hf.viz.tokens_picture(batch.with_columns(kl=batch["kl"].map(batch["kl"].flat * 2)))
    assert np.array_equal(values_of(own, "kl"), 2 * values_of(without, "kl"))


@each("clip, clip_high", [(0.2, None), (0.1, 0.28), (0.5, 0.05)])
def test_clipped_tokens_are_those_of_the_loss(clip, clip_high):
    batch = made.batch(24)
    picture = hf.viz.tokens_picture(batch, new="new_log_probs", clip=clip, clip_high=clip_high)
    new, old, advantages = tensors(batch, "new_log_probs", "old_log_probs", "advantages")
    clipped = rlmath.policy_loss_terms(new, old, advantages, clip, clip if clip_high is None else clip_high)[2]
    assert 0 < clipped.sum() < len(clipped)
    assert np.array_equal(clipped_tokens(picture.view), clipped.numpy())
    picture = hf.viz.tokens_picture(batch.drop("advantages"), new="new_log_probs", clip=clip)
    assert not clipped_tokens(picture.view).any()
    assert "clipping not known without advantages" in picture.to_text()


def test_new_log_probs_come_by_name_or_as_a_batch():
    batch = made.batch()
    after = batch.drop("old_log_probs").alias("old_log_probs", "new_log_probs")  # what actor.compute_log_probs gives later
    by_batch = hf.viz.tokens_picture(batch.drop("new_log_probs"), [3, 0], new=after)
    by_name = hf.viz.tokens_picture(batch, [3, 0], new="new_log_probs")
    assert np.array_equal(values_of(by_batch, "ratio"), values_of(by_name, "ratio"))
    renamed = batch.alias("sampled", "old_log_probs").alias("old_log_probs", "new_log_probs")
    swapped = hf.viz.tokens_picture(renamed, [3, 0], new="old_log_probs", old="sampled")
    for name in ("ratio", "kl_k3", "difference"):
        assert np.array_equal(values_of(swapped, name), values_of(by_name, name)), name
    labels = {f["name"]: f["label"] for f in swapped.view["fields"]}
    assert (labels["sampled"], labels["old_log_probs"]) == ("log-prob (old, trainer)", "log-prob (new)")
    with refuses(hf.OptionError, "clip=1.5", "0 and 1"):
        batch.tokens(new="new_log_probs", clip=1.5)
    with refuses(hf.ColumnError, "'newer'", "batch.with_columns"):
        batch.tokens(new="newer")
    with refuses(hf.ColumnError, "new has 3", "12"):
        batch.tokens(new=renamed[:3])
    other = after.with_columns(old_log_probs=Ragged.of([[0.0]] * 12, dtype=np.float32))
    with refuses(hf.ColumnError, "'new_log_probs'", "1 values", "sample 0", 32):
        batch.tokens(new=other)


def test_only_what_is_shown_is_brought_and_the_picture_says_so():
    client = made.LocalClient()
    batch = made.of_lengths([3] * 100, client)
    tokens = batch.tokens()
    assert client.most_rows == 64
    assert repr(tokens) == "Tokens(64 of 100 samples, 192 response tokens)"
    assert tokens_view(batch.tokens(range(98, 100)))["samples"][1]["first_row"] == 297
    mask = np.zeros(100, bool)
    mask[[5, 9]] = True
    assert batch.tokens(mask).rows.tolist() == [5, 9]
    assert batch.tokens(slice(-2, None)).rows.tolist() == [98, 99]
    assert batch.tokens([-1]).rows.tolist() == [99]
    assert len(made.of_lengths([SHOWN_TOKENS // 3] * 9).tokens().rows) == 3, "long responses: fewer samples"
    assert len(made.of_lengths([SHOWN_TOKENS + 1] * 2).tokens().rows) == 1, "at least one"


def test_rows_that_make_no_sense():
    for rows, error, named in (
        (8, hf.OptionError, ("rows=8", "slice", "list")),
        ("all", hf.OptionError, ("rows='all'",)),
        ([1.5], hf.OptionError, ("rows[0]=1.5",)),
        ([], hf.ColumnError, ("no rows", "0 to 11")),
        ([12], hf.ColumnError, ("row 12",)),
        ([True], hf.ColumnError, ("mask", "1 entries")),
    ):
        with refuses(error, *named):
            made.batch().tokens(rows)


def test_what_is_missing_is_said_and_wrong_columns_are_refused():
    batch = made.of_lengths([2, 3])
    view = hf.viz.tokens_picture(batch).view
    missing = {m["label"]: m["hint"] for m in view["missing"]}
    assert missing["reward"] == "ppo.advantages"
    assert "new=actor.compute_log_probs(batch)" in missing["ratio"]
    assert "KL" in missing
    assert "value" not in missing
    with refuses(hf.OptionError, "color='kl'", "values"):
        hf.viz.tokens_picture(batch, color="kl")
    with refuses(hf.ColumnError, "'response'", "actor.generate"):
        batch.drop("response").tokens()
    with refuses(hf.OptionError, f"{MOST_TOKENS:,}"):
        made.of_lengths([MOST_TOKENS, 1]).tokens(range(2))
    odd = batch.with_columns(pieces=Ragged.of([[1.0], [2.0]]))
    assert hf.viz.tokens_picture(odd).view["ignored"] == ["pieces: not one number per response token"]
    own = hf.viz.tokens_picture(batch.with_columns(margin=Ragged.of([[1, -1], [2, 2, 2]])), color="margin")
    assert own.view["color"] == "margin"


def test_bytes_of_a_character_and_invisible_characters_are_seen():
    batch = made.batch()
    view = hf.viz.tokens_picture(batch).view
    shown = {word[0]: word for word in view["vocabulary"]}
    assert shown[0xC3] == [0xC3, "\\xc3", "", "c3"]
    assert shown[ord("\n")][1:3] == ["⏎", "\n"]
    assert [shown[ord(c)][1] for c in " \t\x00"] == ["␣", "⇥", "␀"]
    assert shown[made.EOS][1] == "<eos>"
    assert visible("a\u202e\u200b\x7f\u0301") == "a‹U+202E›‹U+200B›␡◌\u0301"
    for i in range(5):
        assert sample_text(view, view["samples"][i]["response"]) == made.TEXTS[i] + "<eos>" * bool(made.TEXTS[i])
    assert made.TOKENIZER.token_bytes([0xF0, 97, made.EOS]) == [b"\xf0", b"a", b"<eos>"]
    assert StandInTokenizer(100).token_bytes([5]) == [b"<5>"]
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_hostile_text_stays_text_everywhere():
    class Broken(type(made.TOKENIZER)):
        def token_bytes(self, token_ids):
            return [b"\xed\xa0\x80\xff</script>" if t == 97 else b"" for t in token_ids]

    client = made.LocalClient(Broken(made.TOKENIZER.folder))
    columns = made.columns() | {"note</script>": ["\ud800 ]]> <b>" * 40] * 12}
    picture = hf.viz.tokens_picture(Batch.from_columns(client, columns))
    html = picture.to_html(full=True)
    assert html.count("</script>") == 1
    ElementTree.fromstring(picture.to_svg())
    html.encode()
    picture.to_text().encode()
    assert "\\xed\\xa0\\x80\\xff</script>" in picture.to_text()


def test_numbers_that_are_none_are_drawn():
    columns = made.columns()
    bad = columns["advantages"].flat.copy()
    bad[:3] = np.nan, np.inf, -np.inf
    columns |= {"advantages": columns["advantages"].map(bad), "scores": np.array([np.nan, np.inf] + [0.5] * 10)}
    picture = hf.viz.tokens_picture(Batch.from_columns(made.LocalClient(), columns), new="new_log_probs", color="advantages")
    json.dumps(picture.view, allow_nan=False)
    boxes = {g.get("data-row"): g for g in ElementTree.fromstring(picture.to_svg()).iter(f"{SVG}g") if g.get("data-row")}
    paints = [[(r.get("fill"), r.get("fill-opacity")) for r in boxes[row].iter(f"{SVG}rect")] for row in "012"]
    assert paints[0] == [("none", None)], "NaN: dashed, without a colour"
    assert paints[1][0] == ("#2f7fd0", "0.64"), "infinity: as strong as it gets"
    assert paints[2][0] == ("#e0761b", "0.64")
    assert [s["numbers"]["scores"] for s in picture.view["samples"][:3]] == ["NaN", "∞", 0.5]
    assert "score NaN" in picture.to_text()
    everything = columns["advantages"].map(np.full(len(bad), np.nan, np.float32))
    only = Batch.from_columns(made.LocalClient(), {"response": columns["response"], "values": everything})
    ElementTree.fromstring(hf.viz.tokens_picture(only).to_svg())


def test_empty_responses_and_one_sample():
    nothing = hf.viz.tokens_picture(made.of_lengths([0]))
    assert "0 response tokens" in nothing.to_text()
    ElementTree.fromstring(nothing.to_svg())
    assert nothing.to_html()
    bare = Batch.from_columns(made.LocalClient(), {"response": Ragged.of([[97, 98]], dtype=np.int32)})
    picture = hf.viz.tokens_picture(bare)
    assert picture.view["color"] == ""
    assert "no numbers per token yet" in picture.to_svg()
    assert "numbers per token: none" in picture.to_text()


def test_static_drawing_has_rows_marks_and_legend():
    picture = hf.viz.tokens_picture(made.batch(), new="new_log_probs", color="advantages")
    svg = picture.to_svg()
    root = ElementTree.fromstring(svg)
    rows = [int(e.get("data-row")) for e in root.iter() if e.get("data-row")]
    assert rows == list(range(rows[-1] + 1))
    ends = svg.count("url(#hf-crossed)")
    assert ends == 1 + clipped_tokens(picture.view)[: rows[-1] + 1].sum(), "one mark per clipped token, one in the legend"
    assert "line above: positive; line below: negative" in svg
    assert root.find("{*}title").text == "tokens of 12 samples"
    assert "advantage" in root.find("{*}desc").text


def test_a_step_stays_small():
    columns = made.columns(32)
    response = Ragged.from_lengths(np.resize(columns["response"].flat, 32 * 32), [32] * 32)
    same = {n: response.map(np.resize(c.flat, 32 * 32)) for n, c in columns.items() if isinstance(c, Ragged) and n != "prompt"}
    facts = {n: c for n, c in columns.items() if not isinstance(c, Ragged)}
    batch = Batch.from_columns(made.LocalClient(), {"prompt": columns["prompt"], **same, **facts})
    assert len(hf.viz.tokens_picture(batch, new="new_log_probs").to_html()) < 200_000


def test_notebooks_draw_it_and_the_noun_knows_nothing_of_pictures():
    formatters = pytest.importorskip("IPython.core.formatters")
    shell = SimpleNamespace(display_formatter=formatters.DisplayFormatter())
    hooks.register(shell)
    batch = made.batch()
    data, _ = shell.display_formatter.format(batch.tokens(range(3), new="new_log_probs"))
    assert 'data-picture="tokens"' in data["text/html"]
    assert data["text/plain"].startswith("Tokens(3 of 12 samples, ")
    svg = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', data["text/html"])[1]
    assert "sample 0" in base64.b64decode(svg).decode()
    assert isinstance(hf.viz.tokens_picture(batch), TokensPicture)
