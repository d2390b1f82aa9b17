"""A process has done with a Ray whose session has ended by itself: Ray would end whoever still used it a minute later."""

import pytest
from expect import until

pytest.importorskip("ray")


@pytest.fixture
def start(monkeypatch):
    from hfsdk.engine.ray import start as ray_start

    ended = []
    monkeypatch.setattr(ray_start, "_own_ray", {"lost", "other"})
    monkeypatch.setattr(ray_start, "FORGO_S", 0.05)
    monkeypatch.setattr(ray_start, "end", lambda: ended.append(set(ray_start._own_ray)))
    ray_start.ended = ended
    yield ray_start
    del ray_start.ended


def test_what_is_forgone_is_left_by_itself_and_the_last_one_ends_ray(start):
    start.forgo("nobody")
    start.forgo("lost")
    start.forgo("lost")
    until("the first one's leave", lambda: start._own_ray == {"other"})
    assert start.ended == []
    start.forgo("other")
    until("Ray's end", lambda: start.ended == [set()])
    assert start._forgone == set()


def test_a_new_session_does_not_wait_for_it(start, monkeypatch):
    monkeypatch.setattr(start, "FORGO_S", 600.0)
    monkeypatch.setattr(start.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(start.own_folders, "clear_left", lambda place: [])
    monkeypatch.setattr(start, "start", lambda num: [])
    start.forgo("lost")
    start.forgo("other")
    start.enter("new", 1, None)
    assert start.ended == [set()]
    assert start._own_ray == {"new"}
