"""Live pictures on a page without a browser: new views, buttons that a kernel hears, kernels that go, one question at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import hfsdk as hf
from hfsdk.viz.drawn import picture_of
from hfsdk.viz.pictures.dashboard import DashboardPicture, dashboard_view
from hfsdk.viz.pictures.what_if import WhatIfPicture, what_if_view
from tests.viz import demo, demo_plans
from tests.viz.bad_pictures import rows_of, run_of
from tests.viz.page import Page
from tests.viz.test_dataflow_picture import flow
from tests.viz.test_dataflow_picture import picture as dataflow
from tests.viz.test_page import numbers


def test_a_new_view_is_drawn_and_keeps_what_is_open() -> None:
    """Under anywidget the view changes while calls run."""
    early = flow(4)
    page = Page(dataflow(replace(early, calls=early.calls[:2], edges=early.edges[:1])))
    assert page.locator(".hf-call").count() == 2
    page.locator('.hf-port[data-edge="0"]').click()
    page.show(dataflow(flow(4)).view)
    assert page.locator(".hf-call").count() == 4
    assert sum(numbers(page, ".hf-cell")) == 800, "the opened edge stays open"


@pytest.mark.parametrize("live", [False, True])
def test_a_picture_that_is_closed_listens_to_nothing(live: bool) -> None:
    for picture in (dataflow(flow(4)), picture_of(demo.step_trace()), dashboard(), asked(demo_plans.what_if())):
        page = Page(picture, live=live)
        assert page.listeners > 0
        page.close()
        assert page.listeners == 0, picture.name


# ---------------------------------------------------------------- a run


def dashboard(**view: Any) -> DashboardPicture:
    """A run that goes on, as a kernel shows it."""
    made = dashboard_view(run_of(rows_of(None, 3)).view(), live=True)
    return DashboardPicture({**made, "state": "running", "steps_asked": 9, "background": True, **view})


def actions(page: Page) -> list[str]:
    return page.locator("[data-action]").all_inner_texts()


def press(page: Page, action: str) -> None:
    page.locator(f'[data-action="{action}"]').click()


def state_of(page: Page) -> str:
    return page.locator(".hf-state").inner_text()


def test_a_run_in_the_background_hears_its_buttons_by_message() -> None:
    page = Page(dashboard(), live=True)
    assert (state_of(page), actions(page)) == ("3 of 9 steps, running", ["pause", "stop"])
    press(page, "pause")
    page.show(dashboard(asked="pause").view)
    assert state_of(page) == "3 of 9 steps, running, pauses after this step"
    page.show(dashboard(state="paused").view)
    assert (state_of(page), actions(page)) == ("3 of 9 steps, paused", ["resume", "step", "stop"])
    for action in ("step", "resume", "stop"):
        press(page, action)
    page.show(dashboard(state="stopped").view)
    assert (state_of(page), actions(page)) == ("3 of 9 steps, stopped", [])
    assert page.sent == [{"action": action} for action in ("pause", "step", "resume", "stop")]
    assert page.interrupts == 0


def test_a_run_that_blocks_its_cell_is_interrupted_once_to_pause_and_twice_to_stop() -> None:
    page = Page(dashboard(background=False), live=True)
    press(page, "pause")
    page.pass_time(5000)
    assert page.interrupts == 1
    press(page, "stop")
    assert page.interrupts == 2
    page.pass_time(5000)
    assert page.interrupts == 3
    page = Page(dashboard(background=False), live=True)
    press(page, "stop")
    page.show(dashboard(background=False, state="paused").view)
    page.pass_time(5000)
    assert page.interrupts == 1, "it was heard: a second one would hit the next cell"


def test_steps_that_come_are_drawn_and_the_newest_is_open() -> None:
    page = Page(dashboard())
    points = page.locator('[data-curve="score_mean"] circle[data-step]')
    assert points.count() == 3
    page.show(dashboard_view(run_of(rows_of(None, 5)).view(), live=True))
    assert points.count() == 5
    assert page.locator(".hf-step .hf-title").inner_text().startswith("step 4, ")
    page.locator('[data-curve="score_mean"] circle[data-step="1"]').click()
    page.show(dashboard_view(run_of(rows_of(None, 6)).view(), live=True))
    assert page.locator(".hf-step .hf-title").inner_text().startswith("step 1, "), "a step that was opened stays open"


@pytest.mark.parametrize("status", ["restarting", "autorestarting", "terminating", "dead"])
def test_a_kernel_that_goes_takes_the_buttons_with_it_and_the_steps_can_still_be_opened(status: str) -> None:
    page = Page(dashboard(), live=True)
    page.end_kernel("idle")
    assert page.locator(".hf-lost").count() == 0
    page.end_kernel(status)
    words = page.locator(".hf-lost.hf-bad").inner_text()
    assert "the session, its models and what they learned are gone" in words
    assert 'session.train(..., save_every=10, folder="runs/1")' in words, "this run kept no save"
    assert 'resume="runs/1"' in words
    assert (state_of(page), actions(page)) == ("3 of 9 steps, unfinished", [])
    page.locator('[data-curve="score_mean"] circle[data-step="0"]').click()
    assert page.locator(".hf-step .hf-title").inner_text().startswith("step 0, ")


def test_a_run_that_saved_says_where_to_go_on_from() -> None:
    page = Page(dashboard(saved={"folder": "runs/x", "step": 2}), live=True)
    page.end_kernel()
    words = page.locator(".hf-lost").inner_text()
    assert "Its save after step 2 is in runs/x: run the notebook from its first cell" in words
    assert 'session.train(..., resume="runs/x") to go on from there' in words


def test_of_a_session_that_outlives_its_kernel_nothing_is_lost() -> None:
    for picture in (dashboard(), picture_of(demo.step_trace(running=True))):
        page = Page(picture, live=True, kept_as="lab")
        page.end_kernel()
        words = page.locator(".hf-lost").inner_text()
        assert 'the session "lab" goes on without it' in words
        assert 'hf.Session.attach("lab")' in words
        assert page.locator(".hf-lost.hf-bad").count() == 0
    page = Page(dashboard(), live=True, kept_as="lab")
    page.end_kernel()
    assert (state_of(page), actions(page)) == ("3 of 9 steps when the kernel ended", [])


# ---------------------------------------------------------------- what if


def asked(what_if: hf.WhatIf, request: int = 0) -> WhatIfPicture:
    return WhatIfPicture(what_if_view(what_if.view(), live=True, request=request))


def move(page: Page, name: str, stop: int) -> None:
    page.locator(f"input[name={name}]").fill(str(stop))


def test_one_question_is_under_way_at_most_and_the_newest_value_wins() -> None:
    what_if = demo_plans.what_if()
    page = Page(asked(what_if), live=True)
    stops = next(s["stops"] for s in asked(what_if).view["sliders"] if s["name"] == "response_tokens")
    for stop in range(4):
        move(page, "response_tokens", stop)
    assert page.sent == [{"set": {"response_tokens": stops[0]}, "request": 1}]
    what_if.attempt({"response_tokens": stops[0]})
    page.show(asked(what_if, 1).view)
    assert page.sent[1:] == [{"set": {"response_tokens": stops[3]}, "request": 2}], "what came between was dropped"
    what_if.attempt({"response_tokens": stops[3]})
    page.show(asked(what_if, 2).view)
    assert len(page.sent) == 2
    page.pass_time(5000)
    assert page.sent[2:] == [{"settle": "response_tokens", "request": 2}], "at rest the curve over what was dragged is asked for"
    page.pass_time(60_000)
    assert len(page.sent) == 3


def test_no_curve_is_asked_for_while_a_question_is_under_way() -> None:
    page = Page(asked(demo_plans.what_if()), live=True)
    move(page, "devices", 3)
    page.pass_time(10_000)
    assert [set(message) for message in page.sent] == [{"set", "request"}]
    assert "the kernel may be busy with a cell" in page.locator(".hf-status").inner_text()


def test_menus_ask_and_arrow_keys_move_a_slider() -> None:
    what_if = demo_plans.what_if()
    page = Page(asked(what_if), live=True)
    page.locator("select[name=placement]").select_option("standalone")
    assert page.sent == [{"set": {"placement": "standalone"}, "request": 1}]
    what_if.attempt({"placement": "standalone"})
    page.show(asked(what_if, 1).view)
    assert page.locator(".hf-plan-pool").count() == 4
    page.locator("input[name=prompts]").press("ArrowRight")
    assert page.sent[1]["set"]["prompts"] > what_if.question.prompts


def test_a_place_where_nothing_fits_is_told_and_the_plan_stays() -> None:
    what_if = demo_plans.what_if()
    page = Page(asked(what_if), live=True)
    what_if.attempt({"devices": 2})
    page.show(asked(what_if).view)
    assert "do not fit" in page.locator(".hf-what-if-error").inner_text()
    assert page.locator(".hf-plan-call").count() == 8
    what_if.attempt({"devices": 128})
    page.show(asked(what_if).view)
    assert page.locator(".hf-what-if-error").is_hidden()


def test_sliders_rest_when_the_kernel_has_gone() -> None:
    page = Page(asked(demo_plans.what_if()), live=True)
    assert not any(page.locator("input[type=range]").evaluate_all("all => all.map((e) => e.disabled)"))
    page.end_kernel()
    assert all(page.locator("input[type=range]").evaluate_all("all => all.map((e) => e.disabled)"))
    assert "kernel" in page.locator(".hf-lost").inner_text()
    assert page.locator(".hf-plan-call").count() == 8, "the last plan stays"
