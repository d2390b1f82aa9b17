"""Tokens, credit and clip in a real browser: the numbers on the page are the engine's; mouse, keyboard, search, dark theme."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hfsdk as hf
from hfsdk.algorithms import rlmath
from hfsdk.viz.frame import html_page
from tests.viz import harness
from tests.viz import token_batches as made

pytest.importorskip("playwright", reason="playwright is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
]


@pytest.fixture
def show(chromium: Any, tmp_path: Path) -> Iterator[Any]:
    """Open pictures on a page of their own; at the end nothing complained and nothing was asked for outside."""
    console: list[str] = []
    outside: list[str] = []
    pages = []

    def opened(*pictures: Any, scheme: str = "light", width: int = 1240) -> Any:
        file = tmp_path / f"page{len(pages)}.html"
        file.write_text(html_page("pictures", "".join(p.to_html() for p in pictures)), encoding="utf-8")
        page = chromium.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
        pages.append(page)
        harness.watch(page, console, outside)
        page.goto(f"file://{file}")
        page.wait_for_function(f"() => document.querySelectorAll('[data-ready]').length === {len(pictures)}")
        return page

    yield opened
    for page in pages:
        page.close()
    assert console == []
    assert outside == []


def tip(page: Any, picture: str) -> dict[str, str]:
    """The tooltip as label -> text."""
    found = page.locator(f".hf-{picture} .hf-tip")
    return dict(zip(found.locator("dt").all_inner_texts(), found.locator("dd").all_inner_texts(), strict=True))


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("∞", "inf"))


def listed(page: Any) -> list[int]:
    return [int(e) for e in page.eval_on_selector_all(".hf-list tbody tr", "es => es.map((e) => e.dataset.sample)")]


def test_a_tokens_numbers_are_those_of_to_pandas(show: Any) -> None:
    batch = made.batch(20)
    page = show(hf.viz.tokens_picture(batch, range(12), new="new_log_probs"))
    assert "12 of 20 samples shown; batch.tokens(rows=...) chooses others" in page.locator(".hf-info").inner_text()
    frame = batch.to_pandas("tokens")
    page.locator('tr[data-sample="6"]').click()
    rows = page.eval_on_selector_all(".hf-tok[data-row]", "es => es.map((e) => Number(e.dataset.row))")
    assert rows == frame.index[frame["sample"] == 6].tolist()
    for row in rows[:4] + rows[-2:]:
        page.locator(f'.hf-tok[data-row="{row}"]').hover()
        shown, wanted = tip(page, "tokens"), frame.loc[row]
        assert shown["row in to_pandas"] == str(row)
        assert shown["token id"] == str(wanted["token_id"])
        assert shown["entropy"] == "not measured"
        old, ref = torch.tensor([wanted["old_log_probs"]]), torch.tensor([wanted["ref_log_probs"]])
        for label, value in {
            "advantage": wanted["advantages"], "reward": wanted["rewards"], "value": wanted["values"], "return": wanted["returns"],
            "KL k1 (old - reference)": wanted["kl"], "KL k3": rlmath.kl_estimate(old, ref, "k3").item(),
            "log-prob (rollout)": wanted["rollout_log_probs"],
            "trainer - rollout log-prob": wanted["old_log_probs"] - wanted["rollout_log_probs"],
            "ratio exp(new_log_probs - old_log_probs)": np.exp(wanted["new_log_probs"] - wanted["old_log_probs"]),
        }.items():  # fmt: skip
            assert number(shown[label]) == pytest.approx(value, rel=6e-3, abs=1e-12), label


def test_clipped_tokens_are_marked_and_filtered(show: Any) -> None:
    batch = made.batch()
    page = show(hf.viz.tokens_picture(batch, new="new_log_probs", clip=0.35))
    given = (torch.tensor(batch[n].flat) for n in ("new_log_probs", "old_log_probs", "advantages"))
    clipped = np.flatnonzero(rlmath.policy_loss_terms(*given, 0.35, 0.35)[2].numpy())
    owners = batch.to_pandas("tokens")["sample"].to_numpy()
    page.locator(".hf-onlyclipped").click()
    assert listed(page) == sorted(set(owners[clipped].tolist()))
    found = []
    for sample in listed(page):
        page.locator(f'tr[data-sample="{sample}"]').click()
        found += page.eval_on_selector_all(".hf-tok.hf-clipped[data-row]", "es => es.map((e) => Number(e.dataset.row))")
    assert found == clipped.tolist()
    mark = page.locator(".hf-tok.hf-clipped[data-row]").first
    style = mark.evaluate("e => [getComputedStyle(e).backgroundImage, getComputedStyle(e).outlineStyle]")
    assert "repeating-linear-gradient" in style[0], "a pattern, not colour alone"
    assert style[1] == "dashed"


def test_samples_are_sorted_searched_filtered_and_grouped(show: Any) -> None:
    batch = made.batch()
    page = show(hf.viz.tokens_picture(batch))
    scores, owners = batch["scores"], batch.to_pandas("tokens")
    page.locator(".hf-sort").select_option("scores")
    assert listed(page) == np.argsort(-scores, kind="stable").tolist()
    page.locator('th[title="sort by scores"]').click()
    assert listed(page) == np.argsort(scores, kind="stable").tolist()
    page.locator(".hf-order").click()
    assert listed(page) == np.argsort(-scores, kind="stable").tolist()
    page.locator(".hf-sort").select_option("mean kl")
    kl = owners.groupby("sample")["kl"].mean()
    empty = [i for i in range(12) if i not in kl.index]
    assert listed(page) == kl.sort_values(ascending=False).index.tolist() + empty, "without a number: last"
    page.locator("select[aria-label='finish reason']").select_option("length")
    assert sorted(listed(page)) == [0, 3, 6, 9]
    page.locator("select[aria-label='finish reason']").select_option("")
    page.locator("select[aria-label='only']").select_option("scores")
    page.locator("input[aria-label='from']").fill("0")
    assert sorted(listed(page)) == np.flatnonzero(scores >= 0).tolist()
    page.locator("input[aria-label='from']").fill("")
    page.locator(".hf-host").focus()
    page.keyboard.press("/")
    page.keyboard.type("NAÏVE 🙂")
    assert sorted(listed(page)) == [1, 6, 11], "bytes are read as characters"
    assert page.locator(".hf-tok.hf-hit").count() == len("naïve 🙂".encode())
    page.keyboard.press("Escape")
    assert len(listed(page)) == 12
    page.locator('tr[data-sample="5"]').click()
    page.keyboard.press("g")
    assert page.eval_on_selector_all(".hf-pane", "es => es.map((e) => e.dataset.sample)") == ["4", "5"]
    assert page.locator(".hf-group").get_attribute("aria-pressed") == "true"


def test_keyboard_walks_over_tokens_and_samples(show: Any) -> None:
    batch = made.batch()
    page = show(hf.viz.tokens_picture(batch))
    page.locator(".hf-host").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".hf-tok.hf-current").get_attribute("data-row") == "1"
    assert "advantage" in page.locator(".hf-say").inner_text()
    assert tip(page, "tokens")["position"] == "1"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".hf-tok.hf-current").get_attribute("data-row") is None, "before the response comes the prompt"
    assert tip(page, "tokens")["position"] == "10 of the prompt"
    page.keyboard.press("ArrowDown")
    assert page.locator("tr.hf-chosen").get_attribute("data-sample") == "1"
    assert page.locator(".hf-say").inner_text().startswith("sample 1, score")
    page.keyboard.press("n")
    shown = number(page.locator(".hf-tok[data-row] small").first.inner_text())
    assert shown == pytest.approx(float(batch["advantages"][1][0]), rel=6e-3)
    page.keyboard.press("Escape")
    assert page.locator(".hf-tip").is_hidden()


def test_bytes_hostile_text_and_missing_numbers(show: Any) -> None:
    columns = made.columns()
    bad = columns["advantages"].flat.copy()
    bad[:2] = np.nan, np.inf
    columns["advantages"] = columns["advantages"].map(bad)
    batch = hf.Batch.from_columns(made.LocalClient(), columns)
    page = show(hf.viz.tokens_picture(batch, color="advantages"), scheme="dark")
    first = page.locator('.hf-tok[data-row="0"]')
    assert "hf-nan" in first.get_attribute("class")
    first.hover()
    assert tip(page, "tokens")["advantage"] == "NaN"
    assert page.evaluate("() => getComputedStyle(document.querySelector('.hf-tokens')).color") == "rgb(230, 233, 237)"
    page.locator('tr[data-sample="1"]').click()
    byte = page.locator(".hf-tok.hf-bytes").first
    assert byte.inner_text() == "\\xc3"
    byte.hover()
    assert tip(page, "tokens")["part of"] == "byte token 1 of 2 of “ï”"
    page.locator('tr[data-sample="2"]').click()
    assert "".join(page.locator(".hf-tok[data-row]").all_inner_texts()[:9]) == "</script>"
    assert page.evaluate("() => window.hacked") is None
    page.locator('tr[data-sample="4"]').click()
    assert "(empty response)" in page.locator(".hf-pane").inner_text()


CONTRAST = """e => {
  const paint = (color) => {
    const c = document.createElement("canvas").getContext("2d");
    c.fillStyle = color;
    c.fillRect(0, 0, 1, 1);
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return [...c.getImageData(0, 0, 1, 1).data.slice(0, 3)].map((v) => linear(v / 255));
  };
  const light = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05, style = getComputedStyle(e);
  const [a, b] = [light(paint(style.color)), light(paint(style.backgroundColor))];
  return Math.max(a, b) / Math.min(a, b);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_the_strongest_colours(show: Any, scheme: str) -> None:
    columns = made.columns()
    numbers = columns["advantages"].flat.copy()
    numbers[:2] = np.inf, -np.inf
    entropy = columns["advantages"].map(np.abs(numbers))
    columns |= {"advantages": columns["advantages"].map(numbers), "entropy": entropy}
    batch = hf.Batch.from_columns(made.LocalClient(), columns)
    page = show(hf.viz.tokens_picture(batch, [0], color="advantages"), scheme=scheme)
    above, below = page.locator('.hf-tok[data-row="0"]'), page.locator('.hf-tok[data-row="1"]')
    assert above.evaluate("e => e.style.borderTopColor") != "", "a line above says positive without colour"
    assert below.evaluate("e => e.style.borderBottomColor") != ""
    assert [t.evaluate("e => e.style.backgroundColor").split("%")[0][-2:] for t in (above, below)] == ["64", "64"]
    for token in (above, below):
        assert token.evaluate(CONTRAST) >= 4.5
    page.locator(".hf-color").select_option("entropy")
    assert page.locator('.hf-tok[data-row="0"]').evaluate(CONTRAST) >= 4.5


def test_long_responses_come_page_by_page(show: Any) -> None:
    batch = made.of_lengths([7000])
    page = show(hf.viz.tokens_picture(batch, [0]))
    rows = "es => es.map((e) => Number(e.dataset.row))"
    assert page.eval_on_selector_all(".hf-tok[data-row]", rows) == list(range(3000))
    page.locator(".hf-flow button", has_text="4000 later tokens").click()
    assert page.eval_on_selector_all(".hf-tok[data-row]", rows) == list(range(3000, 6000))


def advantages_on(page: Any) -> list[float]:
    return page.eval_on_selector_all('[data-panel="advantages"] .hf-bar', "es => es.map((e) => Number(e.dataset.value))")


def test_credit_recomputes_gae_as_torch_does(show: Any) -> None:
    batch = made.batch()
    page = show(hf.viz.credit_picture(batch, 6))
    rewards, values = (torch.tensor(batch[n][6]) for n in ("rewards", "values"))
    plain = made.batch(whiten=False)["advantages"][6]
    assert np.allclose(advantages_on(page), plain, atol=1e-5), "at the batch's own gamma and lambda: its advantages, unwhitened"
    agreement = page.locator(".hf-credit [data-gap]")
    assert float(agreement.get_attribute("data-gap")) < 1e-5
    assert "Equal to the batch's own advantages" in agreement.inner_text()
    assert "whitened over all its tokens" in agreement.inner_text()
    for gamma, lam in ((0.97, 0.8), (1.0, 1.0), (0.5, 0.0), (0.0, 0.3)):
        page.locator(".hf-gamma").fill(str(gamma))
        page.locator(".hf-lambda").fill(str(lam))
        wanted, _ = rlmath.gae(rewards, values, torch.tensor([len(values)]), gamma, lam)
        page.wait_for_function(
            "([g, l]) => [...document.querySelectorAll('.hf-credit output')].map((e) => e.textContent).join() === `${g},${l}`",
            arg=[f"{gamma:.3f}", f"{lam:.3f}"],
        )
        assert np.allclose(advantages_on(page), wanted, atol=1e-5)
    assert "Largest difference to the batch's own advantages" in agreement.inner_text()
    page.locator(".hf-reset").click()
    page.wait_for_function("() => document.querySelector('.hf-credit [data-gap]').textContent.startsWith('Equal')")


def test_credit_shows_what_arrives_at_the_chosen_token(show: Any) -> None:
    batch = made.batch()
    page = show(hf.viz.credit_picture(batch, 0, lam=0.9), scheme="dark")
    host = page.locator(".hf-credit .hf-host")
    host.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    shown = tip(page, "credit")
    assert shown["row in to_pandas"] == "3"
    assert number(shown["weight (γλ)^k"]) == 1.0
    bar = page.locator('[data-panel="deltas"] .hf-bar[data-k="8"]')
    bar.hover(force=True)
    shown = tip(page, "credit")
    assert number(shown["weight (γλ)^k"]) == pytest.approx(0.9**5, rel=1e-3)
    assert number(shown["arrives at token 3"]) == pytest.approx(0.9**5 * float(bar.get_attribute("data-value")), rel=2e-3)
    assert number(shown["the same, whitened"]) == pytest.approx(batch["advantages"][0][8], rel=2e-3)
    arriving = page.eval_on_selector_all(".hf-arriving", "es => es.map((e) => Number(e.dataset.value))")
    deltas = page.eval_on_selector_all('[data-panel="deltas"] .hf-bar', "es => es.map((e) => Number(e.dataset.value))")
    assert np.allclose(arriving, [0.9**k * d for k, d in enumerate(deltas[3:])])
    assert sum(arriving) == pytest.approx(advantages_on(page)[3]), "what arrives adds up to the advantage"
    slider = page.locator(".hf-lambda")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => document.querySelectorAll('.hf-credit output')[1].textContent === '0.895'")
    assert slider.get_attribute("data-lm-suppress-shortcuts") == "true"


@pytest.mark.parametrize("count", [1500, 9000])
def test_clip_slider_counts_as_the_loss_does(show: Any, count: int) -> None:
    from hfsdk.viz.clip.view import ClipPicture, view_of

    rng = np.random.default_rng(0)
    old, advantages = (rng.normal(-1, 1, count).astype(np.float32) for _ in range(2))
    new = (old + rng.normal(0, 0.2, count)).astype(np.float32)
    page = show(ClipPicture(view_of(new, old, advantages, low=0.2, high=0.2)))
    given, mass = [torch.tensor(x) for x in (new, old, advantages)], np.abs(advantages.astype(np.float64))
    words = page.locator(".hf-clip .hf-words")
    for clip in (0.2, 0.05, 0.37, 0.99):
        page.locator(".hf-clip input.hf-clip").fill(str(clip))
        page.wait_for_function(f"() => document.querySelector('.hf-clip output').textContent === '{clip:.2f}'")
        clipped = rlmath.policy_loss_terms(*given, clip, clip)[2].numpy()
        data = words.evaluate("e => ({...e.dataset})")
        assert int(data["clipped"]) == clipped.sum()
        assert int(data["positive"]) == (clipped & (advantages > 0)).sum()
        assert float(data["share"]) == pytest.approx(clipped.mean())
        assert float(data["mass"]) == pytest.approx(mass[clipped].sum() / mass.sum(), rel=1e-5)
        drawn = page.eval_on_selector_all(".hf-bin .hf-clipped", "es => es.reduce((s, e) => s + Number(e.dataset.count), 0)")
        assert drawn == clipped.sum()
    page.locator(".hf-clip .hf-host").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".hf-bin .hf-current").count() == 1
    assert "ratio" in page.locator(".hf-clip .hf-say").inner_text()
