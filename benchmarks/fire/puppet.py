"""A kernel that a trial plays with: a process that runs the cells it is sent, as a notebook's does, and may be killed.

python -m fire.puppet
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from fire.trials import TrialError

CELL_S = 120.0
"""Ceiling for a cell that is not said to take longer."""


class CellError(Exception):
    """A cell raised an error; ``typed`` where it is one of those that hfsdk promises."""

    def __init__(self, kind: str, text: str, typed: bool) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.typed = kind, text, typed


class Puppet:
    """See the module."""

    def __init__(self, state: Path, **environment: str) -> None:
        env = os.environ | {"XDG_STATE_HOME": str(state), "PYTHONWARNINGS": "ignore", **environment}
        env["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
        self.errors = state.parent / f"puppet-{time.monotonic_ns()}"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fire.puppet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=env, start_new_session=True,
            )  # fmt: skip
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                self._answers.put(json.loads(line.removeprefix("answer ")))
        self._answers.put(None)

    def send(self, code: str) -> None:
        """Start a cell."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answer(self, within_s: float = CELL_S) -> Any:
        """Return the value of the cell's last expression.

        Raises:
            CellError: what it raised.
            TrialError: a hang, an error that is a bare one, or the process has ended.
        """
        try:
            found = self._answers.get(timeout=max(0.001, within_s))
        except queue.Empty:
            with contextlib.suppress(OSError):
                self.process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            raise TrialError("hang", f"a cell was not done after {within_s:.0f} s: {self.said(6000)}") from None
        if found is None:
            raise TrialError("ended", f"the kernel ended by itself ({self.process.wait()}): {self.said()}")
        if "error" in found:
            if not found["typed"]:
                raise TrialError("bare error", f"{found['kind']}: {found['error']}")
            raise CellError(found["kind"], found["error"], found["typed"])
        return found["value"]

    def run(self, code: str, within_s: float = CELL_S) -> Any:
        """Run a cell."""
        self.send(code)
        return self.answer(within_s)

    @property
    def done(self) -> bool:
        """Whether an answer is there."""
        return not self._answers.empty()

    def said(self, most: int = 2500) -> str:
        """Return the end of its errors."""
        return self.errors.read_text(errors="replace")[-most:]

    def kill(self) -> None:
        """Kill -9 it, and nothing else."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def end(self, within_s: float = 30.0) -> None:
        """Have it end as a kernel does that is shut down.

        Raises:
            TrialError: it does not.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                self.process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            raise TrialError("hang", f"the kernel had not ended {within_s:.0f} s after it was asked: {self.said(6000)}") from None


def _is_typed(error: BaseException) -> bool:
    errors = sys.modules.get("hfsdk.core.errors")
    return isinstance(error, (TypeError, ValueError)) or (errors is not None and isinstance(error, errors.HfsdkError))


def _outcome(code: str, names: dict[str, Any]) -> dict[str, Any]:
    try:
        tree, value = ast.parse(code), None
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        return {"value": value}
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))[-3500:]
        return {"error": str(error)[:1500] if _is_typed(error) else trace, "kind": type(error).__name__, "typed": _is_typed(error)}


def main() -> None:
    """Run cells until there are none."""
    import faulthandler

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    names = sys.modules["__main__"].__dict__
    for line in sys.stdin:
        told = _outcome(json.loads(line), names)
        with contextlib.suppress(BrokenPipeError):
            print("answer", json.dumps(told, default=repr), flush=True)


if __name__ == "__main__":
    main()
