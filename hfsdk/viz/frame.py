"""The frame around every picture: one view (plain data), one ES module, three hosts.

::

    nouns -> view (JSON data) --+--> Picture.to_text()     terminals, logs, text/plain
                                +--> Picture.to_svg()      papers, untrusted notebooks: static/NAME.js in a file (paper.py)
                                +--> Picture.to_html()     frozen: static/NAME.js with a tiny fake model, no kernel, no network
                                `--> LivePicture           live: the same static/NAME.js under anywidget, one trait ``view``

A saved notebook cannot show a live widget again, so :meth:`LivePicture.freeze` replaces the output by the frozen form when
the run ends. Predicted marks are hatched and outlined, measured ones solid, missing numbers say "not measured", and every
mark carries ``data-row``, its row number in the noun's ``to_pandas()``.

anywidget and IPython are imported inside functions: nothing here loads them before a live picture is shown.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import cache, wraps
from html import escape
from pathlib import Path
from typing import Annotated, Any, ClassVar

from hfsdk.core.checks import Within, checked
from hfsdk.core.errors import OptionError
from hfsdk.core.files import as_path, export
from hfsdk.core.placement import is_shadow
from hfsdk.core.system import can_start_threads, exiting
from hfsdk.viz.modules import esm, js_literal, static
from hfsdk.viz.plain import clean, plain
from hfsdk.viz.raster import NOTEBOOK_HINT, png_of

View = Mapping[str, Any]
"""The data of a picture, as JSON has it; each picture's module gives its schema as a ``TypedDict``."""

PUBLISH_INTERVAL_S = 0.2
LARGE_PUBLISH_INTERVAL_S = 1.0
LARGE_MARKS = 3000
"""Number of marks above which a timeline draws on a canvas and a live view is sent once per second."""

ROLE_COLORS = {"actor": "#3b76c4", "critic": "#e08a1e", "reference": "#2a9d8f", "reward": "#b5487f", "cost": "#7a6cc9"}
OTHER_COLORS = ("#6b8e23", "#8c6d46", "#4a90a4", "#a0528d", "#5d6d7e")
SHADOW_TONE = 0.42
"""How much lighter a shadow is than its role."""
PHASE_COLORS = {"generation": "#4f9d55", "preparation": "#b08d2f", "learning": "#c0604d"}
TRANSFER_COLOR = "#d64545"
"""Red is moving data, as in dask's task stream."""

_FAKE_MODEL = (
    "const model={get:(k)=>state[k],set(k,v){state[k]=v;(on['change:'+k]||[]).forEach((f)=>f())},save_changes(){},"
    "on(e,f){(on[e]=on[e]||[]).push(f)},off(e,f){on[e]=(on[e]||[]).filter((g)=>g!==f)},send(){}};"
)


# ---------------------------------------------------------------- text and colour, shared by the pictures


def role_colors(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return a colour per role name: by its kind where that is known and free, else one of the others.

    A shadow (``actor.rollout``) has a lighter tone of its role's.
    """
    colors: dict[str, str] = {}
    spare = list(OTHER_COLORS)
    owners = {name: name.rpartition(".")[0] for name in kinds if is_shadow(name)}
    trained = dict.fromkeys([n for n in (*kinds, *owners.values()) if n not in owners])
    for name, kind in {n: kinds.get(n, n) for n in trained}.items():
        wanted = ROLE_COLORS.get(name) or ROLE_COLORS.get(kind)
        if wanted is None or wanted in colors.values():
            wanted = spare.pop(0) if spare else OTHER_COLORS[len(colors) % len(OTHER_COLORS)]
        colors[name] = wanted
    return {name: shade(colors[owners[name]], SHADOW_TONE) if name in owners else colors[name] for name in kinds}


def shade(color: str, tone: float) -> str:
    """Mix a hex colour towards white (``tone`` > 0) or black (< 0)."""
    end = 255 if tone > 0 else 0
    return "#" + "".join(f"{round(c + (end - c) * abs(tone)):02x}" for c in channels(color))


def channels(color: str) -> tuple[int, int, int]:
    """Return red, green and blue of a hex colour, each 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def seconds_text(seconds: float | None) -> str:
    """Seconds for people: ``"1.20 s"``, ``"35.0 ms"``, ``"not measured"``."""
    if seconds is None or not math.isfinite(seconds):
        return "not measured"
    size = abs(seconds)
    if size >= 3600:
        return f"{seconds / 3600:.2f} h"
    if size >= 120:
        return f"{seconds / 60:.1f} min"
    if size >= 1:
        return f"{seconds:.2f} s"
    if size >= 1e-3:
        return f"{seconds * 1e3:.{0 if size >= 0.1 else 1}f} ms"
    return "0 s" if size == 0 else f"{seconds * 1e6:.0f} µs"


def bytes_text(num_bytes: float | None) -> str:
    """Bytes for people, in powers of 1000: ``"1.25 GB"``."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return "not measured"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= size:
            value = num_bytes / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{num_bytes:.0f} B"


def count_text(count: float | None) -> str:
    """Numbers for people: thousands apart, four digits."""
    if count is None or not math.isfinite(count):
        return "not measured"
    if float(count).is_integer() and abs(count) < 1e15:
        return f"{int(count):,}".replace(",", "\u202f")
    return f"{count:.0f}" if abs(count) >= 100 else f"{count:.4g}"


# ---------------------------------------------------------------- pages


_SCRIPT = re.compile("<script[^>]*>(.*?)</script>", re.DOTALL)
"""Scripts of ours: nothing in them ends like one, see :func:`js_literal`."""


def _script_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def content_policy(body: str) -> str:
    """Return a content security policy that lets a page ask no network, and run no script but the ones in ``body`` now.

    Styles are inline: pictures place what they draw by them.
    """
    return "; ".join([
        "default-src 'none'", " ".join(["script-src blob:", *map(_script_hash, _SCRIPT.findall(body))]),
        "style-src 'unsafe-inline'", "img-src data:", "base-uri 'none'", "form-action 'none'",
    ])  # fmt: skip


def html_page(title: str, body: str) -> str:
    """Return a complete, self-contained HTML page in both themes, with its policy (:func:`content_policy`)."""
    body = clean(body)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{content_policy(body)}"/><title>{escape(clean(title))}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/><meta name="color-scheme" content="light dark"/>'
        "<style>body{margin:0 auto;max-width:1240px;padding:12px;background:#fff}"
        f"@media (prefers-color-scheme:dark){{body{{background:#15181c}}}}</style></head><body>{body}</body></html>\n"
    )


# ---------------------------------------------------------------- pictures


class Picture:
    """One picture of one view. Subclasses give ``name`` (the ES module) and ``to_text``."""

    name: ClassVar[str] = ""

    def __init__(self, view: View) -> None:
        self.view: View = plain(view)

    def __init_subclass__(cls) -> None:
        """Have the text form of each kind of picture cleaned, with any texts in the view: it is printed in terminals."""
        super().__init_subclass__()
        if "to_text" in vars(cls):
            to_text = cls.to_text

            @wraps(to_text)
            def cleaned(self: Picture) -> str:
                return clean(to_text(self))

            cls.to_text = cleaned  # type: ignore[method-assign]

    def to_text(self) -> str:
        """Return the picture as text."""
        raise NotImplementedError

    def to_svg(self) -> str:
        """Return the picture as one static SVG document: its module's rendering, laid out on paper.

        Raises:
            ModuleNotFoundError: quickjs-ng is not installed.
        """
        return paper_svg(self.name, self.view)

    @checked
    def to_html(self, full: bool = False) -> str:
        """Return self-contained interactive HTML; ``full=True`` makes it a whole page.

        Without scripts (an untrusted notebook) the SVG is shown as an image.
        """
        uid = "hf-" + uuid.uuid4().hex[:12]
        script = (
            f'(async()=>{{const el=document.getElementById("{uid}");if(!el)return;const on={{}};'
            f"const state={{view:{js_literal(self.view)}}};{_FAKE_MODEL}"
            f'const url=URL.createObjectURL(new Blob([{js_literal(esm(self.name))}],{{type:"text/javascript"}}));'
            "const picture=(await import(url)).default;URL.revokeObjectURL(url);"
            'el.replaceChildren();picture.render({model,el});el.dataset.ready="1";})();'
        )
        body = (
            f'<div id="{uid}" class="hf-picture" data-picture="{self.name}">{self.placeholder()}</div>'
            f'<style>{static("frame.css")}</style><script type="module">{script}</script>'
        )
        return html_page(str(self.view.get("title", "hfsdk")), body) if full else body

    @checked
    def to_png(self, path: str | Path, zoom: Annotated[float, Within(above=0, most=20)] = 2.0) -> Path:
        """Write the static picture as PNG, ``zoom`` pixels to one of the SVG's; return the path.

        Raises:
            ModuleNotFoundError: resvg-py is not installed, or there is no font to draw letters with.
            OutputError: it cannot be written; what was there is unchanged.
        """
        return export(path, png_of(self.to_svg(), zoom), "the picture")

    @checked
    def save(self, path: str | Path) -> Path:
        """Write the picture in the format of the file's ending: ``.html`` (interactive, offline), ``.svg``, ``.png`` or ``.txt``.

        Raises:
            OptionError: another ending, or ``path`` is no path.
            OutputError: it cannot be written; what was there is unchanged.
            ModuleNotFoundError: resvg-py, which makes PNGs, is not installed.
        """
        target = as_path(path, "the picture")
        ending = target.suffix.lower()
        if ending == ".png":
            return self.to_png(target)
        forms = {".html": lambda: self.to_html(full=True), ".svg": self.to_svg, ".txt": self.to_text}
        if ending not in forms:
            raise OptionError(f"a picture is saved as .html, .svg, .png or .txt; got {target.name!r}")
        return export(target, forms[ending](), "the picture")

    def placeholder(self) -> str:
        """Return the static picture as an ``<img>``, which every notebook host keeps, trusted or not; else as text."""
        try:
            data = base64.b64encode(self.to_svg().encode()).decode()
        except ModuleNotFoundError:  # no engine draws files here: the text says the same
            return f"<pre>{escape(self.to_text())}</pre>"
        alt = escape(clean(str(self.view.get("summary", self.name))))
        return f'<img alt="{alt}" style="max-width:100%" src="data:image/svg+xml;base64,{data}"/>'

    def bundle(self) -> dict[str, str]:
        """Return the frozen MIME bundle: text and HTML, nothing that needs a kernel."""
        return {"text/plain": self.to_text(), "text/html": self.to_html()}

    def _repr_html_(self) -> str:
        return self.to_html()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.bundle()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.view.get('title', '')!r})"


class LivePicture:
    """A picture that changes while something runs.

    ``publish`` may be called from any thread and as often as one likes: its own thread sends the newest view, at most
    five times a second (once a second above 3,000 marks); where no thread can be started, ``publish`` sends it. ``freeze`` ends it.
    ``on_message`` takes what its buttons send. ``kept_as`` names the session it is of, where that outlives the kernel.

    Attributes:
        picture: the picture that is shown now.
        widget: the anywidget that shows it.

    Raises:
        ModuleNotFoundError: anywidget is not installed.
    """

    def __init__(self, picture: Picture, on_message: Callable[[Mapping[str, Any]], None] | None = None, kept_as: str = "") -> None:
        self.picture = picture
        self.widget = widget_class(picture.name)(view=picture.view, kept_as=kept_as)
        if on_message is not None:
            self.widget.on_msg(lambda _widget, content, _buffers: on_message(content))
        self._wake = threading.Condition()
        self._pending: View | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._sent_s = -math.inf

    def publish(self, view: View) -> None:
        """Show ``view`` soon; the last one given wins."""
        with self._wake:
            if self._closed:
                return
            # Views that nobody has seen yet are overwritten, not queued: only the newest is worth drawing.
            self._pending = view
            if not can_start_threads():
                self._send_if_due()
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._send, name=f"hfsdk-{self.picture.name}", daemon=True)
                self._thread.start()
            self._wake.notify()

    def display(self) -> Any:
        """Show the live picture under the running cell and return its display handle."""
        from IPython.display import display

        data, metadata = self._repr_mimebundle_()
        return display(data, metadata=metadata, raw=True, display_id=True)

    def end(self) -> None:
        """Send no more; ``picture`` is the last one given."""
        with self._wake:
            self._closed = True
            last = self._pending
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()  # it may still show the view before the last
        if last is not None:
            self.picture = type(self.picture)(last)

    def freeze(self, handle: Any) -> None:
        """Stop, and replace the output by the frozen picture, so that a saved notebook keeps it."""
        self.end()
        if exiting.is_set():
            return
        handle.update(self.picture.bundle(), raw=True)
        self.widget.close()

    def _send(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending is not None or self._closed)
                if self._closed or exiting.is_set():
                    return
                view, self._pending = self._pending, None
            assert view is not None
            # Outside the lock: sending may take long, and ``publish`` must not wait for it.
            self._show(view)
            time.sleep(_interval_s(view))

    def _send_if_due(self) -> None:
        view = self._pending
        if view is not None and time.monotonic() - self._sent_s >= _interval_s(view):
            self._pending, self._sent_s = None, time.monotonic()
            self._show(view)

    def _show(self, view: View) -> None:
        self.picture = type(self.picture)(view)
        self.widget.view = self.picture.view

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = self.widget._repr_mimebundle_()
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        still = {"text/plain": self.picture.to_text(), "text/html": self.picture.placeholder()}
        return {**(data or {}), **still}, metadata or {}


def _interval_s(view: View) -> float:
    return LARGE_PUBLISH_INTERVAL_S if len(view.get("marks", ())) > LARGE_MARKS else PUBLISH_INTERVAL_S


def follow(live: Any, take: Callable[[], Picture], running: Callable[[], bool], end: Callable[[], None]) -> None:
    """Publish until nothing runs, then ``end``; also where taking a view fails, with the last one taken."""
    try:
        while True:
            ended = not running()
            live.publish(take().view)
            if exiting.is_set() or (ended and not running()):  # asked twice: the last view shows nothing that began meanwhile
                return
            time.sleep(PUBLISH_INTERVAL_S)
    finally:
        end()


@cache
def widget_class(name: str) -> Any:
    """Return the anywidget that draws a kind of picture.

    Its traits are the ``view``, a ``key``, which tells two of them apart, and ``kept_as``, see :class:`LivePicture`.

    Raises:
        ModuleNotFoundError: anywidget is not installed.
    """
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"live pictures need {error.name}, which is not installed; {NOTEBOOK_HINT}", name=error.name
        ) from error

    members = {
        "_esm": esm(name),
        "_css": static("frame.css"),
        "view": traitlets.Dict().tag(sync=True),
        "key": traitlets.Unicode().tag(sync=True),
        "kept_as": traitlets.Unicode().tag(sync=True),
        "__module__": __name__,
    }
    return type(f"{name.capitalize()}Widget", (anywidget.AnyWidget,), members)


# -- pictures as files


def paper_svg(name: str, view: Any) -> str:
    """Return the picture of a view as one SVG document with its own background, in both themes.

    The picture's ES module renders as it does in a browser, and ``static/paper.js`` lays out what it rendered. Each drawing is made
    in its own QuickJS context: it keeps nothing and belongs to no thread.

    Args:
        name: the name of the picture's module, e.g. ``"timeline"``.
        view: the picture's content, as JSON data.

    Raises:
        ModuleNotFoundError: quickjs-ng is not installed, or cannot be imported because no thread can be started.
    """
    try:
        import quickjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "pictures as files need quickjs-ng, which is not installed; pip install quickjs-ng", name="quickjs"
        ) from error
    except RuntimeError as error:  # it starts a thread when it is imported
        raise ModuleNotFoundError(
            f"pictures as files need quickjs-ng, which cannot be imported: {error}", name="quickjs"
        ) from error
    context = quickjs.Context()
    context.eval(_program(name))
    svg: str = json.loads(context.get("draw")(json.dumps(view), static("frame.css")))
    return clean(svg)


@cache
def _program(name: str) -> str:
    """Return a script that defines ``draw(json, css)`` for one picture."""
    picture, paper = (f"(() => {{{esm(part).replace('export default', 'return')}}})()" for part in (name, "paper"))
    parts = f"const picture = {picture}, {{paper}} = {paper};"
    return f"{parts} globalThis.draw = (...given) => JSON.stringify(paper(picture, ...given));"
