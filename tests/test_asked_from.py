"""Warnings stand at the user's line."""

import sys
import threading
import warnings
from pathlib import Path

import hfsdk as hf
from hfsdk.core.user_line import user_frame, warn_user


def test_a_notice_names_the_line_that_brought_it(tmp_path):
    with hf.Session.simulated("1x1 A100-80GB") as session:
        target = tmp_path / "report.html"
        target.write_text("the user's own")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            line = sys._getframe().f_lineno + 1
            session.report(target)
    said = [one for one in caught if "replaced" in str(one.message)]
    assert [(Path(one.filename).name, one.lineno) for one in said] == [(Path(__file__).name, line)]


def test_a_thread_of_hfsdk_has_no_line_of_the_users(monkeypatch):
    found = []
    thread = threading.Thread(target=lambda: found.append(user_frame()))
    monkeypatch.setitem(globals(), "__name__", "hfsdk.fake")
    thread.start()
    thread.join()
    assert found == [None]


def test_a_warning_without_a_line_of_the_users_is_told_all_the_same(monkeypatch):
    monkeypatch.setattr("hfsdk.core.user_line.user_frame", lambda: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_user("a notice")
    assert [str(one.message) for one in caught] == ["a notice"]
