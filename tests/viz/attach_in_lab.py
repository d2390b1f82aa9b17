"""A notebook whose kernel is killed in the middle of training, and whose next kernel comes back: for a test, and for pictures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.expect import until
from tests.viz import harness

NAME = "lab"
BEGIN = f"""
import warnings

import hfsdk as hf
from hfsdk.quickstart import beginnings

warnings.simplefilter("ignore")  # the suggested learning rate
session = hf.Session(devices=1, name="{NAME}", keep=True, seed=0)
actor = session.actor("tiny")
session.reference(actor)


def shouts(completions):
    "The share of letters in capitals: something easy to learn."
    return [sum(c.isupper() for c in text) / max(1, len(text)) for text in completions]


session.reward(shouts)
session.place("colocate")
prompts = session.prompts(beginnings(), batch_size=4)
session.train(hf.GRPO(n=2, max_new_tokens=12), prompts, steps=2000, wait=False)
""".strip()
TRACE = "session.trace"
ATTACH = f'import hfsdk as hf\n\nsession = hf.Session.attach("{NAME}")\nsession'
LIST = "hf.sessions()"
WATCH = "run = session.watch()\nrun"
HISTORY = "session.history"
ROWS = "run.history.tail(4)"
CLOSE = "session.close()\nhf.sessions()"


def wait_steps(notebook: harness.Notebook, steps: int, index: int = 0) -> None:
    """Wait until a dashboard, the last (-1) or by number, shows as many steps."""
    state = f"[...document.querySelectorAll('.hf-dashboard .hf-state')].at({index})?.textContent"
    notebook.page.wait_for_function(f"() => parseInt({state}) >= {steps}", timeout=180_000)


@contextmanager
def kept_state(folder: Path) -> Iterator[Path]:
    """Yield a folder for the state of kept sessions; at the end they are closed, and what held them has ended."""
    head = folder / "hfsdk" / "head.json"
    try:
        yield folder
    finally:
        if head.exists():
            code = "import hfsdk as hf\nfor one in hf.sessions(): one.close()"
            env = os.environ | {"XDG_STATE_HOME": str(folder), "PYTHONPATH": str(harness.REPOSITORY)}
            subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=180)
            until("the end of what held the sessions", lambda: not head.exists())
