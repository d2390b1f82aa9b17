"""The program that a Ray of our own runs where Ray would start Python for a worker: it has ``fork_server.py`` fork one.

Ray runs it as a script, in place of its own ``setup_worker.py`` (Ray looks for the end of that name) and ``default_worker.py``::

    python fork_setup_worker.py                       --temp-dir=FOLDER/r ...     a worker like any other
    python fork_setup_worker.py fork_setup_worker.py  --temp-dir=FOLDER/r ...     one with a runtime environment
                                   --language=PYTHON --serialized-runtime-env-context={"env_vars": {"RAY_...": ...}, ...}

It sends its arguments, environment and files, and ends: the worker registers by itself, with its own process id. Where there is no
server, or a runtime environment of which forks would have too little (libraries read variables when they are imported), it becomes
what Ray would have started. It imports neither Ray nor hfsdk, for what it spares is exactly that.
"""

from __future__ import annotations

import json
import os
import socket
import sys

TYPE_CHECKING = False  # as type checkers read it; the module typing takes a third of the time that this script does
if TYPE_CHECKING:
    from typing import Any

CONTEXT = "--serialized-runtime-env-context="
WAIT_S = 300.0


def forkable(context: dict[str, Any]) -> bool:
    """Whether a fork can have a runtime environment: variables that Ray reads when a worker begins, and nothing else."""
    variables = context.get("env_vars") or {}
    others = {name for name, value in context.items() if value and name not in ("env_vars", "py_executable")}
    return (
        not others and all(name.startswith("RAY_") for name in variables) and context.get("py_executable") in (None, sys.executable)
    )


def ask(path: str, request: dict[str, Any]) -> bool:
    """Have the server fork; return whether it did."""
    content = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.settimeout(WAIT_S)
        try:
            server.connect(path)
            sent = socket.send_fds(server, [content], [0, 1, 2])
            server.sendall(content[sent:])
            server.shutdown(socket.SHUT_WR)
            return server.recv(1) == b"+"
        except OSError:
            return False


def _folder_of(package: str) -> str:
    """Return where a package is, without importing it."""
    from importlib.util import find_spec

    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"{package} is not where {sys.executable} looks for packages")
    return os.path.dirname(spec.origin)


def _here() -> str:
    """Return this process's folder; that of a kernel may have been removed."""
    try:
        return os.getcwd()
    except OSError:
        return os.sep


def main() -> None:
    """Have a worker made for the arguments of this process."""
    arguments = [argument for argument in sys.argv[1:] if argument != __file__ and argument not in ("-s", "-S")]
    plain = [argument for argument in arguments if not argument.startswith((CONTEXT, "--language="))]
    contexts = [argument[len(CONTEXT) :] for argument in arguments if argument.startswith(CONTEXT)]
    context = json.loads(contexts[0]) if contexts else {}
    folder = next((a.partition("=")[2] for a in plain if a.startswith("--temp-dir=")), "")
    if folder and forkable(context):
        variables = {**os.environ, **(context.get("env_vars") or {})}
        request = {"arguments": plain, "environment": variables, "folder": _here(), "nice": os.nice(0)}
        if ask(os.path.join(os.path.dirname(folder), "forks"), request):
            return
    # no server, or one that could not fork: the worker begins as Ray would have begun it
    workers = os.path.join(_folder_of("ray"), "_private", "workers")
    before = [os.path.join(workers, "setup_worker.py")] if contexts else []
    os.execv(
        sys.executable, [sys.executable, *before, os.path.join(workers, "default_worker.py"), *(arguments if contexts else plain)]
    )


if __name__ == "__main__":
    main()
