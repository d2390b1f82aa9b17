"""A picture on a page without a browser: its ES module in QuickJS, with as much of playwright's page as the tests use.

Events, selectors, focus and spoken words are real; nothing is laid out and nothing is painted, and time passes when a test says.
What hangs on boxes, colours, fonts or JupyterLab is for a browser.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hfsdk.viz.modules import esm, static


class Page:
    """The page of one picture.

    Attributes:
        keyboard: presses keys where the focus is.
        mouse: leaves what it was over.
    """

    def __init__(self, picture: Any, *, live: bool = False, kept_as: str = "") -> None:
        """Draw it; ``live`` with a kernel that hears what is sent, of a session that outlives it where ``kept_as`` names one."""
        import quickjs

        elements = static("dom.js").replace("export ", "")
        module = esm(picture.name).replace("export default", "return")
        self._context = quickjs.Context()
        self._context.eval(
            f"const picture = (() => {{{module}}})(), {{ PaperElement, furnish }} = (() => {{{elements}"
            f"return {{ PaperElement, furnish }}; }})();\n{(Path(__file__).parent / 'page.js').read_text(encoding='utf-8')}"
        )
        self.keyboard, self.mouse = Keyboard(self), Mouse(self)
        self.act("open", view=picture.view, live={"state": {"kept_as": kept_as}} if live else None)

    def act(self, name: str, **given: Any) -> Any:
        """Do what page.js calls so; return its answer."""
        return json.loads(self._context.get("act")(json.dumps({"name": name, **given})))

    def show(self, view: Any) -> None:
        """Give the picture a new view, as a kernel does."""
        self.act("view", view=view)

    def pass_time(self, ms: float) -> None:
        """Let timers of the next milliseconds run."""
        self.act("pass", ms=ms)

    def close(self) -> None:
        """Close the picture, as a notebook does when its cell is cleared."""
        self.act("close")

    def end_kernel(self, status: str = "restarting") -> None:
        """Say that the kernel has gone."""
        self.act("kernel", status=status)

    @property
    def sent(self) -> list[dict[str, Any]]:
        """What was sent to the kernel."""
        messages: list[dict[str, Any]] = self.act("sent")[0]
        return messages

    @property
    def interrupts(self) -> int:
        """How often the kernel was interrupted."""
        return int(self.act("sent")[1])

    @property
    def listeners(self) -> int:
        """How many wait for a new view or for the kernel's end."""
        return int(self.act("listeners"))

    def locator(self, css: str, has_text: str | None = None) -> Locator:
        return Locator(self, []).locator(css, has_text)

    def get_by_label(self, label: str, exact: bool = False) -> Locator:
        return Locator(self, [{"label": label, "exact": exact}])

    def get_by_role(self, role: str, name: str) -> Locator:
        return Locator(self, [{"role": role, "name": name}])

    def evaluate(self, script: str, argument: Any = None) -> Any:
        return self.act("evaluate", script=script, argument=argument)

    def eval_on_selector_all(self, css: str, script: str) -> Any:
        return self.locator(css).evaluate_all(script)

    def wait_for_function(self, script: str, arg: Any = None) -> None:
        """Check: what a browser would come to is there at once."""
        assert self.evaluate(script, arg), script


class Keyboard:
    """Keys, for what has the focus."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def press(self, key: str) -> None:
        self._page.act("press", key=key)

    def type(self, text: str) -> None:
        for key in text:
            self.press(key)


class Mouse:
    """A pointer; it is over elements that are hovered, and a place has none."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def move(self, x: float, y: float) -> None:
        self._page.act("away")


class Locator:
    """Elements of a page, looked for when they are asked for; what is done to one is done to exactly one."""

    def __init__(self, page: Page, steps: list[dict[str, Any]]) -> None:
        self._page, self._steps = page, steps

    def locator(self, css: str, has_text: str | None = None) -> Locator:
        return self._then({"css": css}, *([] if has_text is None else [{"text": has_text}]))

    def nth(self, k: int) -> Locator:
        return self._then({"nth": k})

    @property
    def first(self) -> Locator:
        return self.nth(0)

    @property
    def last(self) -> Locator:
        return self.nth(-1)

    def all(self) -> list[Locator]:
        return [self.nth(k) for k in range(self.count())]

    def count(self) -> int:
        return int(self.evaluate_all("all => all.length"))

    def evaluate(self, script: str) -> Any:
        return self._page.act("evaluate", steps=self._steps, script=script)

    def evaluate_all(self, script: str) -> Any:
        return self._page.act("evaluate", steps=self._steps, script=script, all=True)

    def inner_text(self) -> str:
        return str(self.evaluate("e => e.innerText"))

    def all_inner_texts(self) -> list[str]:
        return list(self.evaluate_all("all => all.map((e) => e.innerText)"))

    def text_content(self) -> str:
        return str(self.evaluate("e => e.textContent"))

    def all_text_contents(self) -> list[str]:
        return list(self.evaluate_all("all => all.map((e) => e.textContent)"))

    def get_attribute(self, name: str) -> Any:
        return self.evaluate(f"e => e.getAttribute({json.dumps(name)})")

    def input_value(self) -> str:
        return str(self.evaluate("e => e.value"))

    def is_visible(self) -> bool:
        return bool(self.evaluate("e => isShown(e)"))

    def is_hidden(self) -> bool:
        return not self.is_visible()

    def wait_for(self) -> None:
        """Check: what a browser would come to is there at once."""
        assert self.is_visible()

    def click(self) -> None:
        self._act("click")

    def hover(self, force: bool = False) -> None:
        self._act("hover")

    def focus(self) -> None:
        self._act("focus")

    def fill(self, value: str) -> None:
        self._act("fill", value)

    def press(self, key: str) -> None:
        self.focus()
        self._page.keyboard.press(key)

    def select_option(self, value: str | None = None, *, label: str | None = None, index: int | None = None) -> None:
        self._act("select", next(given for given in (value, label, index) if given is not None))

    def _act(self, action: str, value: Any = None) -> None:
        self._page.act("act", steps=self._steps, action=action, value=value)

    def _then(self, *steps: dict[str, Any]) -> Locator:
        return Locator(self._page, [*self._steps, *steps])
