"""A kernel for tests: a process that runs the code it is given, as a notebook's does, and may be killed."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Kernel:
    """``kernel.run(code)`` runs statements and returns the value of the last expression as JSON has it; an error as text."""

    def __init__(self, state):
        from hfsdk.engine.ray.fork_server import ENGINES  # here: kernels that run this file may have no Ray

        here = {name: value for name, value in os.environ.items() if name != ENGINES}  # what it starts is known by its state
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env=here | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(state), "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip

    def send(self, code):
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("answer "):
                found = json.loads(line.removeprefix("answer "))
                if "error" in found:
                    raise KernelError(found["error"], found["kind"])
                return found["value"]
        raise KernelError("the kernel is gone", "")

    def run(self, code):
        self.send(code)
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def interrupt(self):
        os.kill(self.process.pid, signal.SIGINT)

    def end(self):
        self.process.stdin.close()
        code = self.process.wait(60)
        self.process.stdout.close()
        return code


class KernelError(Exception):
    def __init__(self, text, kind):
        super().__init__(text)
        self.kind = kind


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = sys.modules["__main__"].__dict__
    while True:
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:  # it came when the cell was over
            continue
        if not line:
            return
        try:
            tree = ast.parse(json.loads(line))
            value = None
            last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            if last is not None:
                tree.body.pop()
            exec(compile(tree, "<cell>", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
            told = {"value": value}
        except BaseException as error:
            told = {"error": "".join(traceback.format_exception(error))[-3000:], "kind": type(error).__name__}
        with contextlib.suppress(BrokenPipeError):
            print("answer", json.dumps(told, default=repr), flush=True)


if __name__ == "__main__":
    main()
