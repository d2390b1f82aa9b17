"""``WorkerForks``: workers on processors are forks of one process that has imported the engines, not new interpreters.

::

    this process -- starts -->  python -m hfsdk.engine.ray.fork_server      imports Ray, torch, Megatron and vLLM once, about ten
                                  |  listens at <folder of Ray>/forks         seconds of a core, while Ray starts
    raylet -- starts -->  fork_setup_worker.py -- asks -->  fork: a worker of Ray, as if that script had become one

What is imported is there once: in time, and in memory (its pages are shared until somebody writes to them). The server has one
thread and has computed nothing, so that its forks begin as a new process would. It ends when its starter does; workers, which know
their raylet, end with that.

Who starts many sessions in many processes, as the tests do, can have one process import for all of them: ``engines_imported()``
starts it, and the server of every Ray that is started while ``HFSDK_ENGINES`` names its socket is a fork of it.

Only Linux, and only without a GPU's driver: CUDA does not survive a fork, and starts threads. OpenMP, which reads its number of
threads once, has one in forks until a thread asks for more; a worker's lane does (``Worker.use_this_thread``).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from hfsdk.core import private_places
from hfsdk.engine.process import gpus, malloc_settings, startup
from hfsdk.engine.worker import environment
from hfsdk.engine.worker.environment import import_engines

SOCKET = "forks"
"""Name in the folder of Ray; ``fork_setup_worker.py`` knows it too."""

ENGINES = "HFSDK_ENGINES"
"""The environment variable with the socket of a process that has imported the engines already."""

STARTER = 0
"""The file descriptor of standard input, which is at its end when the server's starter has ended."""

ASK_S = 10.0
"""How long a request may take to come."""

START_S = 120.0
"""How long a server may take to be forked: the process with the engines may still import them."""

NO_JOB = "ffffffff"
"""How Ray writes that a worker takes the job of its first task; it reads that once, when it is imported."""

SCRIPT = str(Path(__file__).with_name("fork_setup_worker.py"))


def can_fork() -> bool:
    """Whether workers of this machine can be forks."""
    return sys.platform == "linux" and not gpus.has_driver()


class WorkerForks:
    """The server, as its starter sees it."""

    def __init__(self, folder: Path) -> None:
        """Start it; it imports while the caller goes on.

        Args:
            folder: the folder of Ray in which it listens.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(folder / SOCKET))  # here, so that whoever asks finds it and waits
        listener.listen(128)
        with listener, open(folder / f"{SOCKET}.log", "wb") as log:
            self._forked = _fork_of(os.environ.get(ENGINES), listener.fileno(), log.fileno())
            self._process = _started(folder, listener, log) if self._forked is None else None

    def end(self) -> None:
        """End it; its forks stay."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        elif self._forked is not None:
            os.close(self._forked)
            self._forked = None


def _started(folder: Path, listener: socket.socket, log: int | IO[bytes]) -> subprocess.Popen[bytes]:
    """Return a new process that imports the engines."""
    import_path = os.pathsep.join(place for place in sys.path if place)
    private = {"TMPDIR": str(folder)} | private_places.in_use(folder)  # torch looks for files there when it is imported
    variables = malloc_settings.variables(os.environ | private | {"PYTHONPATH": import_path, "OMP_NUM_THREADS": "1"})
    return subprocess.Popen(
        [sys.executable, "-m", __name__, f"--folder={folder}", str(listener.fileno())],
        stdin=subprocess.PIPE, stdout=log, stderr=log, env=variables, cwd="/", start_new_session=True,
        pass_fds=(listener.fileno(),),
    )  # fmt: skip


def _fork_of(engines: str | None, listener: int, log: int) -> int | None:
    """Have the server be a fork of a process that has imported the engines.

    Returns:
        What ends it when it is closed; ``None`` without such a process, or where that has other files of hfsdk.
    """
    if not engines:
        return None
    request = {"listens": True, "hfsdk": SCRIPT, "path": [place for place in sys.path if place]}
    theirs, own_end = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker, contextlib.suppress(OSError):
        asker.settimeout(START_S)
        asker.connect(engines)
        socket.send_fds(asker, [json.dumps(request).encode()], [theirs, log, log, listener])
        asker.shutdown(socket.SHUT_WR)
        if asker.recv(1) == b"+":
            os.close(theirs)
            return own_end
    os.close(theirs)
    os.close(own_end)
    return None


@contextlib.contextmanager
def engines_imported() -> Iterator[None]:
    """Have one process import the engines for every Ray that this process, or one that it starts, starts in the meantime."""
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        path = Path(folder)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path / SOCKET))
            listener.listen(128)
            process = _started(path, listener, subprocess.DEVNULL)
        os.environ[ENGINES] = str(path / SOCKET)
        try:
            yield
        finally:
            del os.environ[ENGINES]
            process.kill()
            process.communicate()


def serve(listener: socket.socket) -> dict[str, Any]:
    """Be the server. Returns in forks alone, with the request for one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave nothing to wait for
    while True:
        ready = wait([listener, STARTER])
        if STARTER in ready:  # the starter has ended
            os._exit(0)
        asker, _ = listener.accept()
        with asker, contextlib.suppress(OSError, ValueError):
            asker.settimeout(ASK_S)
            request, files = _read(asker)
            if not _ready_for(request):
                asker.sendall(b"-")
            elif os.fork() == 0:
                listener.close()
                for number, file in enumerate(files[:3]):
                    os.dup2(file, number)
                _close(files[:3])
                return request | {"more": files[3:]}
            else:
                asker.sendall(b"+")
            _close(files)


def _ready_for(request: dict[str, Any]) -> bool:
    """Whether this process can be forked for a request."""
    if "listens" in request:
        return request["hfsdk"] == SCRIPT and "ray" not in sys.modules
    _import_ray(request["environment"])
    return len(os.listdir("/proc/self/task")) == 1


def _import_ray(variables: dict[str, str]) -> None:
    """Import Ray, with what it reads once then: the raylet with which its workers end, and that they are of no job yet."""
    if "ray" not in sys.modules:
        os.environ.update({name: value for name, value in variables.items() if name.startswith("RAY_")} | {"RAY_JOB_ID": NO_JOB})
        with startup.importing(), _nothing_drawn():
            from hfsdk.engine.ray import worker_process  # noqa: F401


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Have classes of actors numbered by the system, so that each fork begins Ray's own random numbers for itself.

    Those begin when the first is drawn, which is for such a class. Forks would all go on from there, and two workers that start at
    once, name an object alike: Ray ends the second, and its starter waits for it for ever.
    """
    import ray.actor

    actors: Any = ray.actor  # mypy is told of no names that a module imports
    numbered = actors.ActorClassID
    actors.ActorClassID = SimpleNamespace(from_random=lambda: numbered(os.urandom(numbered.size())))
    try:
        yield
    finally:
        actors.ActorClassID = numbered


def _read(asker: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and the files that came with it."""
    content, files, _, _ = socket.recv_fds(asker, 2**16, 4)
    try:
        pieces = [content]
        while pieces[-1]:
            pieces.append(asker.recv(2**16))
        request: dict[str, Any] = json.loads(b"".join(pieces))
    except (OSError, ValueError):
        _close(files)
        raise
    return request, files


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def become(request: dict[str, Any]) -> None:
    """Be the worker of this request; this process then ends."""
    atexit.register(_leave)  # before Ray registers anything: it is the last to be called
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.setpgid(0, 0)  # Ray ends the whole group of a worker
    os.nice(max(0, request["nice"] - os.nice(0)))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # as Ray marks its workers
    with contextlib.suppress(OSError):
        os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # that of the server
    import numpy
    import ray._private.workers
    import ray._raylet

    compiled: Any = ray._raylet  # without types
    compiled.Config.initialize("")  # Ray reads its variables again
    random.seed()
    numpy.random.seed()
    script = os.path.join(os.path.dirname(ray._private.workers.__file__), "default_worker.py")
    sys.argv = [script, *request["arguments"]]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def _leave() -> None:
    """End at once: what was set aside is not taken apart, which some libraries would report as a leak."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def main(number: int) -> None:
    """Be the server, a server forked from it, or a worker; this process ends as one of them.

    Args:
        number: the number of the file on which it listens.
    """
    os.environ.update(environment.of_worker(1, False))
    with startup.not_there("ray"):  # which vLLM would import
        import_engines()
    request = serve(socket.socket(fileno=number))
    if "listens" in request:
        os.setsid()
        sys.path.extend(place for place in request["path"] if place not in sys.path)
        request = serve(socket.socket(fileno=request["more"][0]))
    become(request)


if __name__ == "__main__":
    main(int(sys.argv[2]))
