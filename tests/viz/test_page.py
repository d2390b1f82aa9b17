"""Pictures on a page: buttons, selectors, hovering and keys give the numbers of the nouns.

Here the page is one without a browser (:mod:`tests.viz.page`); ``test_page_browser.py`` opens the same pictures in chromium.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import hfsdk as hf
from hfsdk.algorithms import rlmath
from hfsdk.core.cluster import ClusterSpec
from hfsdk.core.layout import Layout
from hfsdk.core.placement import Placement, Pool
from hfsdk.core.roles import RoleSpec
from hfsdk.core.trace import Trace
from hfsdk.session.views import MemoryUse
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.frame import bytes_text, seconds_text
from hfsdk.viz.pictures.clip import ClipPicture, view_of
from hfsdk.viz.pictures.placement import PlacementPicture, placement_view
from tests.viz import demo, demo_plans
from tests.viz import token_batches as made
from tests.viz.bad_pictures import held_trace, rows_of, run_of
from tests.viz.page import Page
from tests.viz.test_dataflow_picture import AWKWARD, flow
from tests.viz.test_dataflow_picture import picture as dataflow
from tests.viz.test_resharding_picture import SPEC, report


@pytest.fixture
def show() -> Callable[[Any], Any]:
    """Open a picture on a page of its own."""
    return Page


@pytest.fixture
def frames() -> Callable[[Any], None]:
    """Wait until what was asked to be drawn is drawn: here it is at once."""
    return lambda page: None


def tip(page: Any) -> dict[str, str]:
    """The tooltip as label -> text."""
    found = page.locator(".hf-tip")
    return dict(zip(found.locator("dt").all_inner_texts(), found.locator("dd").all_inner_texts(), strict=True))


def tip_words(page: Any) -> str:
    """The whole tooltip; nothing where there is none."""
    found = page.locator(".hf-tip:not([hidden])")
    return str(found.inner_text()).replace("\t", "\n") if found.count() else ""


def rows(page: Any, css: str) -> list[int]:
    return sorted(page.eval_on_selector_all(css, "es => es.map((e) => Number(e.dataset.row))"))


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("∞", "inf"))


# ---------------------------------------------------------------- timeline


def test_the_critical_path_button_marks_its_calls_and_what_ran_for_them(show: Any, frames: Any) -> None:
    trace = demo.pools_trace()
    page = show(picture_of(trace))
    button = page.locator("button", has_text="critical path")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    frames(page)
    assert button.get_attribute("aria-pressed") == "true"
    path = {s.call_id for s in trace.critical_path()}
    frame = trace.to_pandas()
    on = frame["call_id"].isin(path)
    assert 0 < on.sum() < len(frame)
    assert rows(page, ".hf-critical") == frame.index[on].tolist()
    assert rows(page, ".hf-faded") == frame.index[~on].tolist()
    button.click()
    frames(page)
    assert page.locator(".hf-critical, .hf-faded").count() == 0


def test_the_critical_path_is_seen_without_a_click_where_some_calls_are_off_it(show: Any) -> None:
    trace = demo.pools_trace()
    page = show(picture_of(trace))
    frame, path = trace.to_pandas(), {s.call_id for s in trace.critical_path()}
    calls = frame["device"].isna()
    assert page.locator(".hf-on-path").count() == (frame["call_id"].isin(path) & calls).sum()
    assert page.locator(".hf-path-words").inner_text() == f"{len(path)} of {calls.sum()} calls are on the critical path"


def test_where_every_call_is_critical_a_line_says_so(show: Any) -> None:
    page = show(picture_of(demo.step_trace()))
    assert page.locator(".hf-path-words").inner_text() == "every call is on the critical path"
    assert page.locator(".hf-on-path").count() == 0
    assert not page.locator("button", has_text="critical path").is_visible(), "it would change nothing"


def test_the_step_selector_and_the_pipeline_button_zoom(show: Any, frames: Any) -> None:
    trace = demo.step_trace(steps=3)
    page = show(picture_of(trace))
    steps = page.get_by_label("step", exact=True)
    assert steps.locator("option").all_inner_texts() == ["all steps", "step 0", "step 1", "step 2"]
    steps.select_option("step 1")
    frames(page)
    shown = rows(page, ".hf-span")
    frame = trace.to_pandas()
    assert set(frame.index[frame["step"] == 1]) <= set(shown)
    assert frame.loc[shown, "step"].isin([1, 2]).all(), "the first call of the next step begins at the edge"
    assert f"of {trace.duration_s:.2f} s" in page.locator(".hf-info").inner_text()
    steps.select_option("all steps")
    frames(page)
    assert len(rows(page, ".hf-span")) == len(trace)
    page = show(picture_of(demo.pools_trace()))
    page.locator("button", has_text="pipeline").click()
    frames(page)
    assert "1.00 s of 1.70 s" in page.locator(".hf-info").inner_text(), "the update, from 0.7 s to the end"
    page.keyboard.press("Tab")
    assert page.locator("table", has_text="micro-batches").locator("td").all_inner_texts() == [
        text for device in (0, 1) for text in
        (f"actor.update, device {device}", "1", "300 ms", "500 ms", "200 ms", "20 %")
    ]  # fmt: skip


def test_several_traces_have_their_names_and_their_totals(show: Any) -> None:
    traces = {"one": demo.step_trace(), "two": demo.pools_trace()}
    page = show(hf.viz.timelines_picture(traces))
    assert page.locator(".hf-case").all_text_contents() == ["one", "two"]
    table = page.locator("table", has_text="device-seconds").locator("tbody tr")
    for row, trace in zip(table.all(), traces.values(), strict=True):
        total, idle = trace.device_seconds()
        words = row.locator("td").all_inner_texts()
        assert words[3:5] == [seconds_text(total), seconds_text(idle)]
    page.locator(f'.hf-span[data-row="{len(demo.pools_trace()) - 1}"]').last.hover()
    assert tip(page)["row"] == str(len(demo.pools_trace()) - 1), "the row of its own trace"


# ---------------------------------------------------------------- placement, comparison, memory, dashboard


def test_the_mesh_outlines_the_groups_of_a_rank(show: Any) -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    data = demo.placement_data(1, 8)
    mesh = layout.mesh()
    role = data["roles"][0]
    role |= {"train": str(layout), "rollout": None}
    role["shards"] = [
        dict(s, tp=mesh.coordinates(rank).tp, pp=mesh.coordinates(rank).pp, dp=mesh.coordinates(rank).dp, rollout_replica=None)
        for rank, s in enumerate(role["shards"])
    ]
    page = show(PlacementPicture(placement_view(data)))
    cells = page.locator(".hf-cell")
    assert cells.count() == 8
    here = mesh.coordinates(5)

    def group(axis: str) -> list[int]:
        others = [a for a in ("tp", "pp", "dp") if a != axis]
        found = [r for r in range(8) if all(getattr(mesh.coordinates(r), a) == getattr(here, a) for a in others)]
        return sorted(r for r in found if r != 5)

    page.locator('.hf-cell[data-rank="5"]').hover()
    for axis in ("tp", "pp", "dp"):
        found = page.eval_on_selector_all(f'.hf-shard[data-group="{axis}"]', "es => es.map((e) => Number(e.dataset.row))")
        assert sorted(found) == group(axis), "rows of the first role are its ranks"
        assert tip(page)[f"{axis} group"] == "ranks " + " ".join(map(str, sorted([5, *group(axis)])))
    assert page.locator('.hf-shard[data-group="self"]').count() == 1
    dashes = page.eval_on_selector_all(".hf-cell rect.hf-current", "es => es.map((e) => e.getAttribute('stroke-dasharray'))")
    assert sorted(map(str, dashes)) == ["1.5 2.5", "5 2", "None", "None"], "itself and tp solid, pp dashed, dp dotted"
    page.mouse.move(5, 5)
    assert page.locator("[data-group]").count() == 0
    page.get_by_label("order of the ranks").select_option("G numbers of the paper (tp, pp, dp)")
    number = 1 + here.dp * 4 + here.pp * 2 + here.tp
    assert page.locator('.hf-cell[data-rank="5"]').text_content() == f"G{number}"


def test_the_comparisons_bars_and_errors(show: Any) -> None:
    slow = [replace(s, duration_s=s.duration_s * (1.5 if s.method == "generate" else 0.8)) for s in demo.step_trace()]
    comparison = demo.step_trace().compare(Trace.of([replace(s, predicted=True) for s in slow], "said"))
    page = show(picture_of(comparison))
    frame = comparison.to_pandas()
    scale = None
    for i, row in frame.iterrows():
        mark = page.locator(f'.hf-row[data-row="{i}"]')
        assert float(mark.get_attribute("data-error")) == pytest.approx(row["error_s"], abs=1e-9)
        widths = [float(mark.locator(f".hf-bar-{k}").get_attribute("width")) for k in ("this", "other")]
        scale = scale or widths[0] / row["this_s"]
        assert widths == pytest.approx([scale * row["this_s"], scale * row["other_s"]])
        assert "hf-predicted" in mark.locator(".hf-bar-other").get_attribute("class")
        assert "hf-predicted" not in mark.locator(".hf-bar-this").get_attribute("class")
        sign = "+" if row["error_s"] >= 0 else "−"
        assert mark.locator(".hf-error-text").text_content().startswith(f"{sign}{abs(100 * row['error']):.0f} % ({sign}")
    page.locator('.hf-row[data-row="0"]').hover()
    assert tip(page) == {"row": "0", "PPO, step 0": "1.20 s", "said": "1.80 s", "error": "+50 % (+600 ms)"}
    page.locator(".hf-host").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator(".hf-current-row").get_attribute("data-row") == "1"
    assert page.locator(".hf-say").inner_text().startswith("actor.compute_log_probs, row 1, PPO, step 0 300 ms")


def test_the_memorys_bars_are_its_bytes(show: Any) -> None:
    model = hf.ModelSpec.preset("llama-7b")
    role = RoleSpec(name="actor", kind="actor", model=model, train=Layout(tp=2), rollout=Layout(tp=2), dtype="bf16")
    placement = Placement((Pool("all", (0, 1)),), {"actor": "all"})
    use = MemoryUse(held_trace(), (role,), placement, ClusterSpec.parse("1x2 H200"), "m")
    page = show(picture_of(use))
    frame = use.to_pandas()
    view = picture_of(use).view
    for device in (0, 1):
        drawn = page.locator(f'.hf-device-memory[data-device="{device}"]')
        mine = frame[frame["device"] == device]
        assert rows(page, f'[data-device="{device}"] .hf-held') == sorted(mine["row"])
        held = drawn.locator(f'.hf-held[data-row="{mine["row"].iloc[0]}"] rect')
        sizes = {e.get_attribute("data-part"): float(e.get_attribute("height")) for e in held.all()}
        one = sizes["weights"] / 1e9
        parts = ("weights", "optimizer", "kv_cache")
        assert sizes == pytest.approx({p: one * mine[f"{p}_bytes"].iloc[0] for p in parts})
        planned = view["devices"][device]["planned"]
        stack = {e.get_attribute("data-part"): float(e.get_attribute("height")) for e in drawn.locator(".hf-predicted rect").all()}
        wanted = {k: max(0.5, one * v) for k, v in planned.items() if v and k != "asked"}
        assert stack == pytest.approx(wanted)
    page.locator('[data-device="1"] .hf-held').first.hover()
    found = tip(page)
    assert (found["weights"], found["optimizer"], found["KV cache"]) == ("1.00 GB", "2.00 GB", "500 MB")
    assert (found["tensors in all"], found["resident (process)"]) == ("3.50 GB", "4.00 GB")
    page.locator('[data-device="1"] .hf-predicted').hover()
    assert tip(page)["in all"] == bytes_text(view["devices"][1]["planned"]["asked"])


def test_the_dashboard_opens_steps_by_click_and_key(show: Any) -> None:
    run = run_of(rows_of(None, 4))
    page = show(picture_of(run))
    assert page.locator(".hf-step .hf-title").inner_text().startswith("step 3")
    panel = page.locator('[data-curve="score_mean"]')
    panel.locator('circle[data-step="1"]').hover()
    assert tip(page)["score_mean"] == "1.5"
    assert tip(page)["busy_share"] == "150 %"
    panel.locator('circle[data-step="1"]').click()
    assert page.locator(".hf-step .hf-title").inner_text() == "step 1, 1.50 s"
    assert panel.locator(".hf-last").text_content() == "step 1: 1.5"
    widths = "es => es.map((e) => [e.dataset.call, Number(e.getAttribute('width'))])"
    calls = page.eval_on_selector_all(".hf-calls-bar rect", widths)
    assert [c for c, _ in calls] == [f"{role}.{method}" for role, method, *_ in demo.STEP]
    one = (calls[0][1] + 0.5) / 1.2
    assert [w for _, w in calls] == pytest.approx([one * seconds - 0.5 for *_, seconds, _ in demo.STEP])
    page.locator(".hf-host").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".hf-step .hf-title").inner_text() == "step 2, 2.50 s"
    assert page.locator(".hf-say").inner_text().startswith("step 2, score_mean 2.5, kl_mean 2.5")
    page.locator(".hf-step summary").click()
    numbers = dict(zip(*[iter(page.locator(".hf-step details td").all_inner_texts())] * 2, strict=True))
    assert numbers["own"] == "2.5"
    assert page.locator(".hf-predicted").count() == 0
    assert page.locator("button").count() == 0, "a frozen run has nothing to press"
    page.locator("summary", has_text="all curves").click()
    page.locator('[data-curve="own"]').wait_for()


# ---------------------------------------------------------------- tokens, credit, clip


def listed(page: Any) -> list[int]:
    return [int(e) for e in page.eval_on_selector_all(".hf-list tbody tr", "es => es.map((e) => e.dataset.sample)")]


def advantages_on(page: Any) -> list[float]:
    return page.eval_on_selector_all('[data-panel="advantages"] .hf-bar', "es => es.map((e) => Number(e.dataset.value))")


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
        shown, wanted = tip(page), frame.loc[row]
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


def test_samples_are_sorted_searched_filtered_and_grouped(show: Any) -> None:
    batch = made.batch()
    page = show(hf.viz.tokens_picture(batch))
    scores, owners = batch["scores"], batch.to_pandas("tokens")
    page.locator(".hf-sort").select_option("scores")
    assert listed(page) == np.argsort(-scores, kind="stable").tolist()
    page.locator('th[title="sort by scores"]').click()
    assert listed(page) == np.argsort(scores, kind="stable").tolist()
    for way in (-1, 1):
        page.locator(".hf-order").click()
        assert listed(page) == np.argsort(way * scores, kind="stable").tolist()
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
    assert tip(page)["position"] == "1"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".hf-tok.hf-current").get_attribute("data-row") is None, "before the response comes the prompt"
    assert tip(page)["position"] == "10 of the prompt"
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
    page = show(hf.viz.tokens_picture(batch, color="advantages"))
    first = page.locator('.hf-tok[data-row="0"]')
    assert "hf-nan" in first.get_attribute("class")
    first.hover()
    assert tip(page)["advantage"] == "NaN"
    page.locator('tr[data-sample="1"]').click()
    byte = page.locator(".hf-tok.hf-bytes").first
    assert byte.inner_text() == "\\xc3"
    byte.hover()
    assert tip(page)["part of"] == "byte token 1 of 2 of “ï”"
    page.locator('tr[data-sample="2"]').click()
    assert "".join(page.locator(".hf-tok[data-row]").all_inner_texts()[:9]) == "</script>"
    assert page.evaluate("() => window.hacked") is None
    page.locator('tr[data-sample="4"]').click()
    assert "(empty response)" in page.locator(".hf-pane").inner_text()


def test_long_responses_come_page_by_page(show: Any) -> None:
    batch = made.of_lengths([7000])
    page = show(hf.viz.tokens_picture(batch, [0]))
    rows = "es => es.map((e) => Number(e.dataset.row))"
    assert page.eval_on_selector_all(".hf-tok[data-row]", rows) == list(range(3000))
    page.locator(".hf-flow button", has_text="4000 later tokens").click()
    assert page.eval_on_selector_all(".hf-tok[data-row]", rows) == list(range(3000, 6000))


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
    page = show(hf.viz.credit_picture(batch, 0, lam=0.9))
    host = page.locator(".hf-credit .hf-host")
    host.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    shown = tip(page)
    assert shown["row in to_pandas"] == "3"
    assert number(shown["weight (γλ)^k"]) == 1.0
    bar = page.locator('[data-panel="deltas"] .hf-bar[data-k="8"]')
    bar.hover(force=True)
    shown = tip(page)
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


# ---------------------------------------------------------------- a plan, and what-if without a kernel


def test_the_drawn_numbers_are_the_plans(show: Any) -> None:
    plan = demo_plans.plan()
    page = show(picture_of(plan))
    calls = page.locator(".hf-plan-call")
    assert calls.evaluate_all("all => all.map((e) => e.dataset.call)") == [c.name for c in plan.calls]
    assert calls.evaluate_all("all => all.map((e) => Number(e.dataset.seconds))") == [c.seconds for c in plan.calls]
    assert page.locator(".hf-pool-devices rect").count() == 128
    assert float(page.locator(".hf-plan-memory").get_attribute("data-bytes")) == plan.memory[0].asked
    assert page.locator(".hf-plan-row").count() == 3
    assert "41.30 s" in page.locator(".hf-plan-row").first.inner_text()
    spoken = page.locator(".hf-plan-step svg").get_attribute("aria-label")
    assert spoken.startswith("The step as predicted: actor.generate 14.00 s")
    assert "Too close to call" in page.locator(".hf-plan-close").inner_text()
    assert page.locator(".hf-plan-sensitivity li").count() == 1
    fills = page.locator(".hf-plan-call > rect:nth-child(2)").evaluate_all("all => all.map((e) => e.getAttribute('fill'))")
    assert all(fill.startswith("url(#") for fill in fills), "predicted is hatched"
    widths = calls.locator("rect:nth-child(1)").evaluate_all("all => all.map((e) => Number(e.getAttribute('width')))")
    assert widths[0] / widths[7] == pytest.approx(plan.calls[0].seconds / plan.calls[7].seconds, rel=0.01)


def test_hover_tells_of_calls_pools_and_memory(show: Any) -> None:
    page = show(picture_of(demo_plans.plan()))
    page.locator('.hf-plan-call[data-call="actor.generate"]').hover()
    assert "actor.generate (predicted)" in tip_words(page)
    assert "decode\n12.00 s" in tip_words(page)
    page.locator(".hf-pool-devices rect").nth(70).hover()
    assert "128: 0-127" in tip_words(page)
    page.locator(".hf-plan-memory rect").nth(1).hover()
    assert "actor, all the time" in tip_words(page)
    page.locator(".hf-plan-bar").nth(1).hover()
    assert "50.40 s to 62.72 s" in tip_words(page)


def test_a_click_shows_the_blocks_and_the_step_of_a_runner_up(show: Any) -> None:
    page = show(picture_of(demo_plans.plan()))
    page.locator(".hf-plan-row").nth(1).click()
    pools = page.locator(".hf-plan-pool").evaluate_all("all => all.map((e) => e.dataset.pool)")
    assert pools == ["actor+reference", "critic+reward"]
    assert page.locator(".hf-pool-devices").evaluate_all("all => all.map((e) => e.dataset.devices)") == ["64", "64"]
    generate = page.locator('.hf-plan-call[data-call="actor.generate"]')
    assert float(generate.get_attribute("data-seconds")) == 28.0
    assert page.locator(".hf-plan-row[aria-current=true]").get_attribute("data-row") == "1"
    page.get_by_role("button", name="show plan 3").press("Enter")
    assert page.locator(".hf-plan-pool").count() == 4
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "show plan 3", "the focus stays"


def test_the_keyboard_chooses_plans_and_walks_over_marks(show: Any) -> None:
    page = show(picture_of(demo_plans.plan()))
    page.locator(".hf-host").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator(".hf-plan-row[aria-current=true]").get_attribute("data-row") == "1"
    assert "split" in page.locator(".hf-say").text_content()
    page.keyboard.press("ArrowUp")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "actor.generate" in tip_words(page)
    assert "actor.generate" in page.locator(".hf-say").text_content()
    page.keyboard.press("Escape")
    assert tip_words(page) == ""


def test_frozen_the_plan_stays_and_the_sliders_say_why_they_rest(show: Any) -> None:
    what_if = demo_plans.what_if().draw("response_tokens")
    page = show(picture_of(what_if))
    sliders = page.locator("input[type=range]")
    assert sliders.count() == 5
    assert all(sliders.evaluate_all("all => all.map((e) => e.disabled)"))
    assert all(page.locator("select").evaluate_all("all => all.map((e) => e.disabled)"))
    assert "without a kernel" in page.locator(".hf-frozen-note").inner_text()
    assert page.locator(".hf-plan-call").count() == 8
    assert page.locator(".hf-curve").count() == 2
    assert "from here: split" in page.locator(".hf-turn-name").first.text_content()
    page.locator(".hf-curve").first.hover()
    assert "a step takes" in tip_words(page)
    page.locator(".hf-plan-row").nth(2).click()
    assert page.locator(".hf-plan-pool").count() == 4, "what needs no kernel works"


# ---------------------------------------------------------------- a transition of weights


CROSSING = """root => [...root.querySelectorAll('.hf-matrix .hf-cell')].filter((c) => c.dataset.source !== c.dataset.target)
    .reduce((n, c) => n + Number(c.dataset.bytes), 0)"""


def arrived(page: Any) -> int:
    return int(page.locator('.hf-after[data-arrived="1"]').count())


def test_the_slider_moves_the_pieces_and_the_switch_the_grouping(show: Any) -> None:
    picture = hf.viz.grouping_picture(SPEC, "tp4 dp2", "tp2 dp4")
    strided, vanilla = picture.view["variants"]
    page = show(picture)
    root, slider = page.locator(".hf-reshard"), page.locator('input[type="range"]')
    assert root.evaluate(CROSSING) == strided["moved"]
    assert page.locator(".hf-sums").get_attribute("data-redundant") == "0"
    page.locator('[data-grouping="vanilla"]').click()
    assert root.evaluate(CROSSING) == vanilla["moved"]
    assert page.locator(".hf-sums").get_attribute("data-redundant") == str(vanilla["redundant"])
    aside = page.eval_on_selector_all('[data-part="aside"]', "nodes => nodes.reduce((n, e) => n + Number(e.dataset.bytes), 0)")
    assert aside == vanilla["redundant"] > 0
    page.locator('[data-grouping="strided"]').click()

    page.locator("select").select_option(label="model.layers.0.self_attn.qkv_proj.weight (× 2 layers)")
    qkv = strided["parameters"][0]
    assert root.evaluate(CROSSING) == sum(n for s, row in enumerate(qkv["matrix"]) for t, n in enumerate(row) if s != t)
    everything = sum(len(pieces) for pieces in qkv["after"])
    assert arrived(page) == everything
    slider.fill("0")
    assert "before" in page.locator(".hf-steplabel").inner_text()
    assert arrived(page) == 0
    slider.fill("1")
    own = page.locator('.hf-after[data-way="1"]')
    assert "copied on its own rank" in page.locator(".hf-steplabel").inner_text()
    assert arrived(page) == own.count() > 0
    slider.fill("2")
    assert "rank 0 sends" in page.locator(".hf-steplabel").inner_text()
    assert arrived(page) == own.count() + page.locator('.hf-after[data-way="2"][data-from="0"]').count()
    page.locator('.hf-after[data-rank="2"][data-from="0"]').first.hover()
    tip = page.locator(".hf-tip").inner_text()
    for words in ("rank 2 generates with q 0:64", "rank 0", "moved within a node", "8.19 kB"):
        assert words in tip
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert slider.input_value() == "3"
    page.locator(".hf-host").focus()
    page.keyboard.press("-")
    assert slider.input_value() == "2"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert "rank 0 trains k 0:32" in page.locator(".hf-say").inner_text()
    assert page.locator(".hf-current").count() == 1
    page.locator(".hf-matrix").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "rank 0 → rank 2" in page.locator(".hf-say").inner_text()
    assert "parameters 8" in page.locator(".hf-say").inner_text()


def test_measured_is_solid_and_large_plans_stay_light(show: Any) -> None:
    plan = hf.ReshardPlan.between(SPEC, "tp4", "tp2", nodes=2)
    large = hf.ReshardPlan.between(hf.ModelSpec.preset("llama-70b"), "tp8 pp8 dp2", "tp8 dp16", "bf16", nodes=8)
    planned, measured, many = (show(hf.viz.reshard_picture(one)).locator(".hf-reshard") for one in (plan, report(plan), large))
    fills = "nodes => nodes.map((n) => n.querySelector('rect').getAttribute('fill').startsWith('url('))"
    assert all(planned.locator(".hf-matrix .hf-cell").evaluate_all(fills))
    assert not any(measured.locator(".hf-matrix .hf-cell").evaluate_all(fills))
    assert planned.evaluate(CROSSING) == measured.evaluate(CROSSING) == plan.bytes_moved
    assert measured.locator('[data-name="wire"]').get_attribute("data-bytes") == str(max(map(plan.bytes_received, range(4))))
    planned.locator(".hf-matrix .hf-cell").first.hover()
    assert "not measured" in planned.locator(".hf-tip").inner_text()
    far = bytes_text(plan.bytes_by_link()["network"])
    assert f"network: {far} planned" in planned.locator(".hf-links").inner_text()
    assert many.locator(".hf-matrix text").count() == 32
    many.locator("select").select_option(index=1)
    assert "(8 of 128 ranks)" in many.locator(".hf-steplabel").inner_text()


# ---------------------------------------------------------------- dataflow


def numbers(page: Any, css: str) -> list[int]:
    found: list[int] = page.eval_on_selector_all(css, "nodes => nodes.map((n) => Number(n.dataset.bytes))")
    return found


def test_an_opened_edge_adds_up_and_answers_the_keyboard(show: Any) -> None:
    given = flow(4, per_node=2)
    page = show(dataflow(given))
    edge = given.edge(1, 2)
    assert page.locator(".hf-call").count() == 4
    page.locator('.hf-port[data-edge="0"]').click()
    assert sum(numbers(page, ".hf-cell")) == edge.bytes_read == 800
    assert numbers(page, ".hf-columns tbody td:nth-child(2)") == [400, edge.num_bytes, edge.bytes_read]
    page.locator('.hf-cell[data-writer="2"][data-reader="3"]').hover()
    tip = page.locator(".hf-tip").inner_text()
    for words in ("rank 2 → rank 3", "4-5", "100 B", "device 2, node 1, tp0 pp0 dp2", "same node: mapped, no copy"):
        assert words in tip
    page.locator(".hf-matrix").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator(".hf-cell .hf-current").count() == 1
    assert "rank 1 → rank 1" in page.locator(".hf-say").inner_text()
    page.keyboard.press("Escape")
    assert page.locator(".hf-cell").count() == 0

    page.locator(".hf-host").focus()  # the clicked row of a box is the current mark
    page.keyboard.press("ArrowRight")
    assert "critic.update" in page.locator(".hf-say").inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    assert "actor.generate #1 → " in page.locator(".hf-say").inner_text()
    assert page.locator(".hf-edgeline.hf-faded").count() == 3, "the other lines step back"
    page.keyboard.press("Enter")
    assert sum(numbers(page, ".hf-cell")) in (400, 800)
    page.keyboard.press("Escape")
    page.locator('.hf-call[data-call="4"]').hover()
    assert "pending" in page.locator(".hf-tip").inner_text()
    page.locator('.hf-port[data-edge="2"]').click()
    assert "nothing has been read yet" in page.locator(".hf-transfer").inner_text()


def test_network_prediction_large_and_awkward(show: Any) -> None:
    awkward = flow()
    calls = tuple(replace(call, role=AWKWARD, method=AWKWARD, line=AWKWARD) for call in awkward.calls)
    first, second, third, fourth = (
        show(dataflow(given)).locator(".hf-dataflow")
        for given in (
            flow(4, per_node=1, predicted=True), flow(128), replace(flow(), calls=(), edges=()),
            replace(awkward, calls=calls, title=AWKWARD),
        )
    )  # fmt: skip
    assert first.locator(".hf-edgeline.hf-predicted").count() == 1
    first.locator('.hf-port[data-edge="0"]').click()
    cell = first.locator('.hf-cell[data-writer="0"][data-reader="1"]')
    assert "⇄" in cell.text_content()
    assert cell.locator("rect").first.get_attribute("fill").startswith("url(#"), "predicted is hatched"
    cell.hover()
    assert "network" in first.locator(".hf-tip").inner_text()
    second.locator('.hf-port[data-edge="0"]').click()
    assert second.locator(".hf-cell").count() == 16
    assert "node 15" in second.locator(".hf-matrix").text_content()
    assert "no calls in this step yet" in third.text_content()
    assert fourth.locator(".hf-call").count() == 4
    assert "</script>" in fourth.text_content()
