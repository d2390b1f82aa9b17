"""The interrupt button of a real Jupyter kernel, in cells of a simulated session."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import hfsdk as hf
from fire.trials import Note, TrialError
from hfsdk.core import errors

CEILING_S = 240.0

IDLE_S = 45.0
"""Ceiling from the interrupt to a kernel that takes the next cell."""

CELLS = (
    "_ = [DEEDS['train'](desk) for _ in range(12)]", "desk.session.train(desk.algorithm, desk.prompts, steps=20)",
    "_ = [DEEDS['train with saves'](desk) for _ in range(8)]", "_ = [DEEDS['place'](desk) for _ in range(400)]",
    "_ = [DEEDS['calls by hand'](desk) for _ in range(60)]", "_ = [DEEDS['rewind'](desk) for _ in range(20)]",
    "_ = [DEEDS['load'](desk) for _ in range(100)]", "desk.session.report(desk.folder / 'report.html')",
    "desk.session.plan(desk.algorithm, hf.Workload(prompts=8, prompt_tokens=8, response_tokens=8))",
    "desk.session.view(); desk.session.trace; desk.session.history.to_pandas()",
    "for _ in range(5): desk.open(); DEEDS['train'](desk); desk.session.close()\ndesk.open()",
)  # fmt: skip
SETUP = """
import sys, pathlib
sys.path[:0] = {paths!r}
import hfsdk as hf
from fire.lines import DEEDS, Desk, _over
desk = Desk(pathlib.Path({folder!r}))
"""
CHECK = """
if len(desk.session.roles) < 4 or "closed" in repr(desk.session):
    desk.open()
_over(desk)
print("same" if desk.step() == desk.expected else f"other: {desk.step()} {desk.expected}")
"""


class Kernel:
    """A kernel with a session in it."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3", startup_timeout=120, cwd=str(folder))
        self.seconds: dict[str, float] = {}
        paths = [str(Path(__file__).parents[k]) for k in (1, 2)]
        status, text = self.execute(SETUP.format(paths=paths, folder=str(folder)))
        if status != "ok":
            raise RuntimeError(text)

    def execute(self, code: str, presses: tuple[float, ...] = ()) -> tuple[str, str]:
        """Run a cell, interrupted after some seconds (more than once); returns the reply's status or error, and the output.

        ``"lost"`` where an interrupt met ipykernel between its cells, so that it never answers for this one and takes the next.
        """
        request = self.client.execute(code, store_history=False, allow_stdin=False)
        started, left, output = time.monotonic(), list(presses), []
        until = started + max([0.0, *presses]) + IDLE_S
        status, idle = "", False
        while not (status and idle):
            now = time.monotonic()
            if left and now - started >= left[0]:
                left.pop(0)
                self.manager.interrupt_kernel()
            if now > until:
                if presses and self.execute("1")[0] == "ok":
                    return "lost", "".join(output)
                raise TrialError("hang", f"the kernel is not idle {IDLE_S:g} s after {code!r}: {''.join(output)[-1500:]}")
            wait = max(0.001, min(0.2, left[0] - (now - started))) if left else 0.2
            message = self._next("iopub", wait)
            if message is not None and message["parent_header"].get("msg_id") == request:
                content = message["content"]
                if message["msg_type"] == "status" and content["execution_state"] == "idle":
                    idle = True
                output.append(content.get("text", "") if message["msg_type"] == "stream" else "")
            reply = self._next("shell", 0.001)
            if reply is not None and reply["parent_header"].get("msg_id") == request:
                content = reply["content"]
                status = "ok" if content["status"] == "ok" else content.get("ename", content["status"])
                output.append("" if status == "ok" else "\n".join(content.get("traceback", []))[-2500:])
        return status, "".join(output)

    def _next(self, channel: str, wait_s: float) -> Any:
        import queue

        try:
            get = self.client.get_iopub_msg if channel == "iopub" else self.client.get_shell_msg
            return get(timeout=wait_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def ground(folder: Path) -> Kernel:
    """Start the kernel."""
    os.environ.setdefault("JUPYTER_RUNTIME_DIR", str(folder / "jupyter"))
    return Kernel(folder)


TYPED = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, hf.HfsdkError)}


def trial(kernel: Kernel, note: Note) -> None:
    """Interrupt one cell; then the kernel takes the next one, and its numbers are right."""
    rng = note.rng
    code = rng.choice(CELLS)
    if code not in kernel.seconds:
        note.doing(f"undisturbed: {code}")
        started = time.monotonic()
        status, text = kernel.execute(code)
        if status != "ok":
            raise TrialError("unusable", text)
        kernel.seconds[code] = time.monotonic() - started
    at = 0.9 * rng.random() * kernel.seconds[code]
    presses = (at, at + rng.uniform(0.05, 0.3)) if rng.random() < 0.15 else (at,)
    note.count = len(presses)
    if "open" in code:
        note.tags.append("start-up")
    words = " and ".join(f"{seconds:.3f} s" for seconds in presses)
    note.doing(f"interrupt {words} after the cell began (it takes {kernel.seconds[code]:.2f} s): {code}")
    status, text = kernel.execute(code, presses)
    if status not in ("ok", "lost", "KeyboardInterrupt") and status not in TYPED:
        raise TrialError("bare error", f"{status}\n{text}")
    status, text = kernel.execute(CHECK)
    if status != "ok":
        raise TrialError("unusable", f"{status}\n{text}")
    if "same" not in text:
        raise TrialError("wrong state", text[-2500:])
