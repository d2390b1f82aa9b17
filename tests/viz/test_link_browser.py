"""A served page in chromium: its link works wherever it is followed from, and its cookie goes nowhere else."""

from __future__ import annotations

import http.server
import threading
from http import HTTPStatus

import pytest

from hfsdk.kept.server import _html
from hfsdk.viz.pictures.placement import PlacementPicture, placement_view
from tests.session.served import Served, kept_session
from tests.viz import demo, harness

pytest.importorskip("playwright", reason="playwright is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH"),
]


@pytest.fixture
def another():
    """A server of another user at another port of this host; (port, the cookies that it was sent)."""
    sent = []

    class Notes(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            sent.append(self.headers.get("Cookie", ""))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<p>another</p>")

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Notes)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, sent
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_link_from_another_site_opens_the_page_and_its_cookie_goes_to_no_other_port(chromium, monkeypatch, another):
    with kept_session(monkeypatch), Served() as served:
        monkeypatch.setattr(served.server._pages, "page", lambda name: (HTTPStatus.OK, _html(f"run of {name}", "")))
        page = chromium.new_page()
        page.goto("about:blank")
        page.set_content(f'<a href="http://127.0.0.1:{served.port}{served.server.page_link("exp7")}">the run</a>')
        page.click("a")
        page.wait_for_selector("h1")
        assert page.text_content("h1") == "run of exp7"
        assert page.evaluate("document.cookie") == ""
        assert [text for text in served.said if "browser, or" in text] == [], "not even for an icon"
        shown = page.url
        page.reload()
        assert page.text_content("h1") == "run of exp7"
        port, sent = another
        for path in ("/", shown.partition(str(served.port))[2].rpartition("/")[0].rpartition("/")[0] + "/"):
            page.goto(f"http://127.0.0.1:{port}{path}")
        assert [cookie for cookie in sent if "hfsdk" in cookie] == []
        page.goto(shown)
        assert page.text_content("h1") == "run of exp7"
        page.goto(f"http://127.0.0.1:{port}/")
        asked = f"fetch('{shown}', {{mode: 'no-cors', credentials: 'include'}}).then(() => 'got', () => 'nothing')"
        assert page.evaluate(asked) == "nothing", "not even what it cannot read"
        page.goto(f"http://127.0.0.1:{port}/")
        page.set_content(f'<a href="{shown}">a page of another port leads here</a>')
        page.click("a")
        page.wait_for_load_state()
        assert page.query_selector("h1") is None
        page.close()


def test_a_served_page_draws_its_pictures_and_runs_nothing_else(chromium, monkeypatch):
    """Nor does it lie in another page's frame."""
    ran = "document.title = 'ran'"
    body = f"""{PlacementPicture(placement_view(demo.placement_data())).to_html()}
        <img src="data:," onerror="{ran}"><a id="link" href="javascript:{ran}">x</a>"""
    with kept_session(monkeypatch), Served() as served:
        monkeypatch.setattr(served.server._pages, "page", lambda name: (HTTPStatus.OK, _html("the page", body)))
        page = chromium.new_page()
        page.goto(f"http://127.0.0.1:{served.port}{served.server.page_link('exp7')}")
        page.wait_for_selector(".hf-picture[data-ready]")
        page.click("#link")
        page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: `" + ran + "`}))")
        assert page.title() == "the page"
        page.close()
