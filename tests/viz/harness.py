"""JupyterLab on the loopback and a headless chromium that can reach nothing else. Always stops what it started."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
KERNEL = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
"""The kernel of the notebook in front, in JupyterLab's own page."""
CEILING_MS = 180_000
"""Only bounds a hang: nothing that a test waits for takes as long."""
CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True,
    },
}  # fmt: skip


class Lab:
    """A JupyterLab server of its own: own configuration, settings, trust database and process group."""

    def __init__(self, root: Path, dark: bool = False, state: Path | None = None) -> None:
        self.root = root
        self._tmp = Path(tempfile.mkdtemp(prefix="hfsdk-lab-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.token = secrets.token_hex(16)
        settings = dict(SETTINGS)
        if dark:
            settings["@jupyterlab/apputils-extension/themes"] = {"theme": "JupyterLab Dark"}
        for name, value in settings.items():
            file = self._tmp / "settings" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(value))
        own = {"SETTINGS": "settings", "WORKSPACES": "workspaces"}
        env = dict(os.environ, JUPYTER_NO_CONFIG="1", PYTHONPATH=str(REPOSITORY), PYTHONDONTWRITEBYTECODE="1")
        env |= {f"JUPYTERLAB_{k}_DIR": str(self._tmp / v) for k, v in own.items()}
        env |= {f"JUPYTER_{k}_DIR": str(self._tmp / k.lower()) for k in ("CONFIG", "DATA", "RUNTIME")}
        env["IPYTHONDIR"] = str(self._tmp / "ipython")
        if state is not None:
            env["XDG_STATE_HOME"] = str(state)  # where kept sessions are found again
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read_on, name="lab-log", daemon=True)
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={self.port}",
                "--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={root}",
                "--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly", "--ServerApp.terminals_enabled=False",
            ],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        """Read what the server says until it names its address, and go on reading in a thread: a full pipe would stop it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._log.append(line)
            if f"http://127.0.0.1:{self.port}/lab" in line:
                self._reader.start()
                return
        raise RuntimeError("".join(self._log)[-3000:])

    def _read_on(self) -> None:
        with self._process.stdout as lines:
            self._log.extend(lines)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(10)  # a kernel that is just starting keeps it from ending by itself
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._tmp, ignore_errors=True)


class Notebook:
    """One notebook open in one browser page; keeps the console and every request that left the loopback."""

    def __init__(self, lab: Lab, page: Any) -> None:
        self.lab, self.page = lab, page
        self.console: list[str] = []
        self.outside: list[str] = []
        watch(page, self.console, self.outside)

    def open(self, name: str, kernel: bool = True) -> Notebook:
        workspace = secrets.token_hex(4)
        self.page.goto(f"http://127.0.0.1:{self.lab.port}/lab/workspaces/w{workspace}/tree/{name}?token={self.lab.token}&reset")
        self.page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.content?.widgets")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        if kernel:
            self.idle()
        return self

    def idle(self) -> None:
        """Wait for the kernel."""
        self.page.wait_for_function(f"() => {KERNEL.replace('.', '?.')}?.status === 'idle'")

    def run(self, *cells: int) -> None:
        """Start these cells, one after the other; :meth:`wait` waits for them."""
        self.page.evaluate(
            """(cells) => { window.__done = false; const { content } = window.jupyterapp.shell.currentWidget; (async () => {
            for (const cell of cells) { content.activeCellIndex = cell; content.deselectAll();
            await window.jupyterapp.commands.execute('notebook:run-cell'); } window.__done = true; })(); }""",
            list(cells),
        )

    def run_all(self) -> None:
        """Start all cells; :meth:`wait` waits for them."""
        self.page.evaluate(
            "() => { window.__done = false; window.jupyterapp.commands.execute('notebook:run-all-cells')"
            ".then(() => { window.__done = true; }); }"
        )

    def wait(self, timeout_s: float = CEILING_MS / 1000) -> None:
        self.page.wait_for_function("() => window.__done", timeout=timeout_s * 1000)
        errors = self.page.locator(
            '[data-mime-type="application/vnd.jupyter.stderr"], [data-mime-type="application/vnd.jupyter.error"]'
        )
        assert errors.all_inner_texts() == []

    def kill_kernel(self) -> None:
        """Kill the kernel's process as the system does it when memory runs out; return when JupyterLab says that it restarts it."""
        os.kill(int(python(self, "__import__('os').getpid()")), signal.SIGKILL)
        self.page.wait_for_selector('.jp-Dialog:has-text("appears to have died")')

    def accept_restart(self) -> None:
        """Close what JupyterLab says of that, and wait for the new kernel."""
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.page.wait_for_selector(".jp-Dialog", state="detached")
        self.idle()

    def save(self) -> None:
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save').then(() => true)")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()

    def complaints(self) -> list[str]:
        """Console errors, without the two that JupyterLab itself makes (missing extras answer 404)."""
        return [line for line in self.console if "404" not in line and "WebSocket" not in line]


def python(notebook: Notebook, code: str) -> str:
    """What an expression is in the kernel."""
    value: str = notebook.page.evaluate(
        f"""async (code) => {{
            const future = {KERNEL}.requestExecute({{code: "", store_history: false, user_expressions: {{value: code}}}});
            const found = (await future.done).content.user_expressions.value;
            return found.data ? found.data["text/plain"] : "ERROR " + found.evalue;
        }}""",
        code,
    )
    return value


def watch(page: Any, console: list[str], outside: list[str]) -> None:
    """Collect a page's console errors and its requests beyond the loopback."""
    page.on("console", lambda m: console.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: console.append(str(e)))
    local = ("http://127.0.0.1:", "ws://127.0.0.1:", "file:", "data:", "blob:", "about:")
    page.on("request", lambda r: None if r.url.startswith(local) else outside.append(r.url))


def write_notebook(path: Path, cells: list[str]) -> Path:
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook

    notebook = new_notebook(cells=[new_code_cell(c) for c in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, str(path))
    return path


class Chromium:
    """A chromium whose pages wait as long as anything here may take."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    def new_page(self, **options: Any) -> Any:
        """Open a page; what it waits for has ``CEILING_MS``, an axe or a kernel on a busy machine included."""
        page = self._browser.new_page(**options)
        page.set_default_timeout(CEILING_MS)
        return page


def frames(page: Any) -> None:
    """Wait until what was asked to be drawn is drawn: for two frames of the page."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@contextlib.contextmanager
def browser() -> Iterator[Chromium]:
    """Yield a chromium; its pages come from ``new_page(...)``."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=CHROMIUM_FLAGS, timeout=CEILING_MS)
        try:
            yield Chromium(chromium)
        finally:
            chromium.close()


@contextlib.contextmanager
def open_alone(path: Path, width: int, height: int, dark: bool = False, state: Path | None = None) -> Iterator[Notebook]:
    """Yield a notebook in a JupyterLab and a chromium of its own, with nothing beside it."""
    lab = Lab(path.parent, dark=dark, state=state)
    try:
        with browser() as chromium:
            size = {"width": width, "height": height}
            notebook = Notebook(lab, chromium.new_page(viewport=size, color_scheme="dark" if dark else "light")).open(path.name)
            notebook.page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
            try:
                yield notebook
            finally:
                notebook.close()
    finally:
        lab.close()
