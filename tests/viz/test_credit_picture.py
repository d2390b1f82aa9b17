"""Credit and clip: the numbers are those of rlmath, whitening is told apart, nothing raises on odd data."""

from __future__ import annotations

import itertools
import json
import math
from xml.etree import ElementTree

import numpy as np
import torch
from expect import each, refuses

import hfsdk as hf
from hfsdk.algorithms import ppo, rlmath
from hfsdk.core.batch import Batch
from hfsdk.core.table import Ragged, Table
from hfsdk.viz.pictures.clip import MOST_EXACT, ClipPicture, clip_numbers, histogram, view_of
from hfsdk.viz.pictures.credit import difference, gae
from hfsdk.viz.tokenmath import unpack
from tests.viz import token_batches as made


def with_advantages(**options):
    """A batch with the columns that ppo.advantages itself writes."""
    columns = made.columns()
    fn = ppo.Advantages(**options)
    columns |= fn(Table({n: columns[n] for n in fn.reads}))
    return Batch.from_columns(made.LocalClient(), columns)


def test_gae_is_rlmaths():
    rng = np.random.default_rng(1)
    for gamma, lam, length in itertools.product((1.0, 0.9, 0.0), (1.0, 0.95, 0.0), (0, 1, 2, 57)):
        rewards, values = rng.normal(size=(2, length)).astype(np.float32)
        wanted, _ = rlmath.gae(torch.tensor(rewards), torch.tensor(values), torch.tensor([length]), gamma, lam)
        deltas, found = gae(rewards, values, gamma, lam)
        assert np.allclose(found, wanted, atol=1e-5), (gamma, lam, length)
        assert np.allclose(found, [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(length)])


@each("gamma, lam, whiten", [(*weights, whiten) for weights in ((1.0, 0.95), (0.97, 0.8)) for whiten in (True, False)])
def test_recomputed_is_the_batchs_own_before_whitening(gamma, lam, whiten):
    batch = with_advantages(gamma=gamma, lam=lam, whiten=whiten)
    for row in (0, 6):
        picture = hf.viz.credit_picture(batch, row, gamma, lam)
        assert difference(picture.view) <= 1e-5
        assert "equal to the batch's own advantages" in picture.view["summary"]
        assert picture.view["whitening"]["state"] == ("whitened" if whiten else "no")
        plain = with_advantages(gamma=gamma, lam=lam, whiten=False)["advantages"][row]
        assert np.allclose(unpack(picture.view["columns"]["own"]), plain, atol=1e-6)
        assert picture.view["first_row"] == (batch.to_pandas("tokens")["sample"] == row).idxmax()
        assert math.isclose(picture.view["kl_coef"], 0.05, rel_tol=1e-4)
    if whiten:
        raw = batch["returns"].flat.astype(np.float64) - batch["values"].flat
        assert math.isclose(picture.view["whitening"]["mean"], raw.mean(), rel_tol=1e-9)
        assert f"/ {raw.std(ddof=1):.4g};" in picture.view["note"]


def test_other_gamma_or_advantages_are_called_so():
    batch = with_advantages(gamma=1.0, lam=0.95)
    assert "NOT those the batch's advantages were made with" in hf.viz.credit_picture(batch, 0, 1.0, 0.5).view["summary"]
    strange = batch.with_columns(advantages=batch["advantages"].map(batch["advantages"].flat ** 2))
    assert "neither returns − values nor that whitened" in hf.viz.credit_picture(strange, 0).view["note"]
    early = hf.viz.credit_picture(batch.drop("advantages", "returns"), 0)
    assert early.view["missing"] == ["advantages", "returns"]
    assert "the batch has no advantages yet" in early.view["note"]
    assert "not measured" in early.to_text()
    clipped = with_advantages(score_clip=0.01)
    assert hf.viz.credit_picture(clipped, 0).view["kl_coef"] is None, "rewards are not score and KL alone"
    only = batch.drop("returns")
    assert "without returns nobody can tell" in hf.viz.credit_picture(only, 0).view["note"]


def test_credit_refuses_what_makes_no_sense():
    for options, error, named in (
        ({"row": 12}, hf.ColumnError, ("12", "0 to 11")),
        ({"row": 1.5}, hf.OptionError, ("row=1.5",)),
        ({"gamma": 1.1}, hf.OptionError, ("gamma=1.1", "0 and 1")),
        ({"lam": "x"}, hf.OptionError, ("lam='x'",)),
    ):
        with refuses(error, *named):
            hf.viz.credit_picture(made.batch(), **options)


def test_credit_without_rewards_says_who_writes_them():
    with refuses(hf.ColumnError, "credit_picture", "'rewards'", "ppo.advantages"):
        hf.viz.credit_picture(made.batch().drop("rewards"))


@each("row", range(5))
def test_credit_draws_every_text_also_none(row):
    picture = hf.viz.credit_picture(made.batch(), row)
    root = ElementTree.fromstring(picture.to_svg())
    json.dumps(picture.view, allow_nan=False)
    assert root.find("{*}title").text == f"credit for sample {row}"
    assert "gamma 1, lambda 0.95" in root.find("{*}desc").text
    rows = {int(e.get("data-row")) for e in root.iter() if e.get("data-row")}
    first = picture.view["first_row"]
    assert rows == set(range(first, first + len(picture.view["tokens"])))
    assert picture.to_html(full=True).count("</script>") == 1
    if row == 4:
        assert "no response tokens" in picture.to_text()


def test_credit_with_nan_and_many_tokens():
    batch = made.of_lengths([300, 3])
    rewards = np.zeros(303, np.float32)
    rewards[[5, 6, 299]] = np.nan, np.inf, 1.0
    batch = batch.with_columns(rewards=Ragged.from_lengths(rewards, [300, 3]), scores=np.array([np.nan, 0.0]))
    picture = hf.viz.credit_picture(batch, 0)
    json.dumps(picture.view, allow_nan=False)
    ElementTree.fromstring(picture.to_svg())
    assert "and 240 more tokens" in picture.to_text()
    assert "score not measured" in picture.view["summary"]


# ---------------------------------------------------------------- clip


def clip_data(count, seed=0):
    rng = np.random.default_rng(seed)
    old, advantages = rng.normal(-1.5, 0.7, count), rng.normal(0, 1, count)
    advantages[:: max(1, count // 7)] = 0.0
    new = old + rng.normal(0, 0.25, count)
    new[: count // 5] = old[: count // 5]
    return new.astype(np.float32), old.astype(np.float32), advantages.astype(np.float32)


@each("count", [1, 500, MOST_EXACT, 5 * MOST_EXACT])
def test_clip_numbers_are_those_of_the_loss_at_every_step_of_the_slider(count):
    new, old, advantages = clip_data(count)
    view = view_of(new, old, advantages, low=0.2, high=0.283, linked=False)
    size = len(unpack(view["groups"]["log_ratio"]))
    assert size == count if count <= MOST_EXACT else size < MOST_EXACT
    assert view["merged"] == (count > MOST_EXACT)
    given = [torch.tensor(x) for x in (new, old, advantages)]
    for low, high in [(0.2, 0.283), *((k * 0.01, k * 0.01) for k in range(1, 100, 7)), (0.01, 1.99)]:
        clipped = rlmath.policy_loss_terms(*given, low, high)[2].numpy()
        numbers = clip_numbers(view, low, high)
        assert numbers["tokens"] == clipped.sum()
        assert numbers["positive"] == (clipped & (advantages > 0)).sum()
        assert math.isclose(numbers["token_share"], clipped.mean())
        mass = np.abs(advantages.astype(np.float64))
        if mass.sum():
            assert math.isclose(numbers["mass_share"], mass[clipped].sum() / mass.sum(), rel_tol=1e-5)
        _, counts = histogram(view, low, high, bins=61)
        assert counts.sum() == count
        assert counts[:, [1, 3]].sum() == clipped.sum()


def test_clip_picture_reads_a_batch():
    batch = made.batch()
    picture = hf.viz.clip_picture(batch)
    new, old, advantages = (torch.tensor(batch[n].flat) for n in ("new_log_probs", "old_log_probs", "advantages"))
    clipped = rlmath.policy_loss_terms(new, old, advantages, 0.2, 0.2)[2]
    share = 100 * clipped.float().mean()
    assert picture.view["summary"].startswith(f"{int(clipped.sum())} of {len(clipped)} tokens ({share:.2f} %)")
    root = ElementTree.fromstring(picture.to_svg())
    assert root.find("{*}desc").text == picture.view["summary"]
    assert picture.view["summary"] in picture.to_text()
    later = batch.drop("old_log_probs").alias("old_log_probs", "new_log_probs")
    assert hf.viz.clip_picture(batch.drop("new_log_probs"), later).view["summary"] == picture.view["summary"]
    assert hf.viz.clip_picture(batch, clip_high=0.3).view["linked"] is False
    with refuses(hf.ColumnError, "clip_picture", "'new_log_probs'", "new=actor.compute_log_probs"):
        hf.viz.clip_picture(batch.drop("new_log_probs"))
    with refuses(hf.OptionError, "clip=0", "0 and 1"):
        hf.viz.clip_picture(batch, clip=0)
    with refuses(hf.ColumnError, "one number per response token"):
        hf.viz.clip_picture(batch, later[:3])


def test_clip_of_nothing_and_of_numbers_that_are_none():
    empty = view_of(np.array([]), np.array([]), np.array([]), low=0.2, high=0.2)
    assert empty["summary"] == "no token has a ratio"
    bad = np.array([np.nan, np.inf, -np.inf, 0.0], np.float32)
    view = view_of(bad, np.zeros(4), np.ones(4), low=0.2, high=0.2)
    json.dumps(view, allow_nan=False)
    assert (view["num_tokens"], view["num_missing"]) == (2, 2), "an infinite log-ratio is cut as the loss cuts it"
    for one in (empty, view):
        ElementTree.fromstring(ClipPicture(one).to_svg())
        assert ClipPicture(one).to_text()
        assert ClipPicture(one).to_html()
