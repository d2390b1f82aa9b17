"""What a browser sees of a kept session: its run, where its roles live, where the time goes; the pictures of the notebook."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from html import escape
from http import HTTPStatus

from hfsdk.core.errors import HfsdkError, OptionError
from hfsdk.core.trace import Trace
from hfsdk.session.attach import sessions
from hfsdk.session.page_access import POLICY_BEGINS
from hfsdk.session.session import Session

REFRESH_S = 3

UNSEEN_S = 30.0
"""How long the server looks at a session after its page was asked for last."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 1100px; padding: 0 .8rem }
body { color: #1c1c1c; background: #fff }
h1 { font-size: 1.1rem; margin: .6rem 0 } h2 { font-size: 1rem; margin: 1rem 0 .3rem } section { overflow-x: auto }
@media (scripting: enabled) { .hf-picture:not([data-ready]) { visibility: hidden } }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #161616 } a { color: #8ab4f8 } }
"""


class Pages:
    """The pages of the server; it attaches to a session, to look, when somebody asks for its page."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._looking: dict[str, Session] = {}
        self._asked_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def page(self, name: str) -> tuple[HTTPStatus, str]:
        """Return the page of a session, or with no name the list of them."""
        try:
            with self._lock:
                if not name:
                    return HTTPStatus.OK, _html("kept sessions", self._list())
                return HTTPStatus.OK, _html(name, self._of(name))
        except HfsdkError as error:
            with self._lock:
                self._leave(name)
            return HTTPStatus.NOT_FOUND, _html("not found", f"<p>{escape(str(error))}</p>")

    def _list(self) -> str:
        found = sessions(self._address)
        rows = "".join(f'<li><a href="{escape(one.name)}">{escape(one.name)}</a>: {escape(one.words)}</li>' for one in found)
        return f"<ul>{rows}</ul>" if rows else "<p>no kept sessions</p>"

    def _of(self, name: str) -> str:
        self._asked_s[name] = time.monotonic()
        session = self._looking.get(name)
        if session is None or session.status == "closed":
            self._leave(name)
            session = self._looking[name] = Session.attach(name, self._address, read_only=True)
        from hfsdk.viz.drawn import picture_of

        parts = []
        if session.run is not None:
            parts.append(("the run", picture_of(session.run).to_html()))
        if session.placement.view()["devices"]:
            parts.append(("who lives where", picture_of(session.placement).to_html()))
        trace = _last_step(session)
        if len(trace):
            parts.append(("where the time goes", picture_of(trace).to_html()))
        text = "".join(f"<h2>{title}</h2><section>{html}</section>" for title, html in parts)
        return text or f"<p>{escape(repr(session))}</p>"

    def _leave(self, name: str) -> None:
        session = self._looking.pop(name, None)
        if session is not None:
            session.detach()

    def rest(self) -> None:
        """Leave sessions that have ended, or whose page nobody has asked for lately."""
        with self._lock:
            for name, session in list(self._looking.items()):
                if session.status == "closed" or time.monotonic() - self._asked_s.get(name, 0.0) > UNSEEN_S:
                    self._leave(name)

    def close(self) -> None:
        """Leave the sessions."""
        with self._lock:
            for session in self._looking.values():
                session.detach()
            self._looking.clear()


def _last_step(session: Session) -> Trace:
    """Return the trace of the run's last whole step, while it is kept; without one what there is of the current step."""
    ended = list(session.run.view()["trace_steps"].values()) if session.run is not None else []
    trace: Trace = session.trace.snapshot()
    if ended:
        with suppress(OptionError):
            trace = session.trace[ended[-1]].snapshot()
    return trace


def _html(title: str, body: str) -> str:
    from hfsdk.viz.frame import content_policy

    return (
        f'{POLICY_BEGINS}{content_policy(body)}"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH_S}"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>{body}</html>"
    )
