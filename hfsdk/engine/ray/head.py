"""The Ray of this machine's kept sessions: a process of its own holds it, so that it outlives every kernel.

::

    kernel 1 -- starts -->  python -m hfsdk.engine.ray.head      its Ray is as that of any session: own folder, user's token
                              | writes <state>/hfsdk/head.json       0600, with its address
                              | locks  <state>/hfsdk/head.alone      as long as it lives: there is one at a time
    kernel 1, 2 -- join -->   GCS, raylet, keepers and their workers
                              ends when no keeper was there for a while
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from hfsdk.core.errors import PlacementError
from hfsdk.engine.process.process_alive import is_there

START_S = 240.0
"""How long it may take to start: Ray tries several times on a busy machine."""

EMPTY_S = 5.0
"""How long it stays without a keeper."""

LOOK_S = 0.5

MOST_LOGS, LOG_S = 20, 7 * 86_400.0
"""How many files of what sessions have printed stay after their end, and how long."""

NAMESPACE = "hfsdk"
"""The namespace of the keepers' names in Ray."""


@dataclass(frozen=True)
class Head:
    """The place of this machine's Ray for kept sessions."""

    address: str
    pid: int
    started: float
    """Time at which the process started, as the system counts it."""

    @property
    def lives(self) -> bool:
        """Whether the process is there."""
        try:
            return is_there(self.pid, self.started)
        except psutil.Error:
            return False


def state_folder() -> Path:
    """Return the folder, of mode 0700, in which this user's kept sessions are written down.

    Raises:
        PlacementError: it cannot be made, or others can write to it.
    """
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(base) / "hfsdk"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
        if info.st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        if info.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise PlacementError(
            f"kept sessions are written down in {folder}, which cannot be used: {error}. Set XDG_STATE_HOME to a folder of yours."
        ) from error
    return folder


def log_file(name: str) -> str:
    """Return where the process that keeps a session writes what it prints."""
    logs = state_folder() / "logs"
    logs.mkdir(mode=0o700, exist_ok=True)
    _forget_old(logs)
    return str(logs / f"{name.replace('/', '_').replace(':', '-')}.log")


def _forget_old(logs: Path) -> None:
    """Remove what ended sessions have printed: beyond the last ``MOST_LOGS``, and what is older than ``LOG_S``."""
    logs_by_age = []
    for path in logs.glob("*.log"):
        with contextlib.suppress(OSError):
            logs_by_age.append((path.stat().st_mtime, path))
    for number, (written, path) in enumerate(sorted(logs_by_age, reverse=True)):
        if number < MOST_LOGS and time.time() - written < LOG_S:
            continue
        with contextlib.suppress(OSError), open(path, "rb+") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever writes to it holds it
            path.unlink()


def running() -> Head | None:
    """Return this machine's head, if there is one."""
    try:
        with open(state_folder() / "head.json", encoding="utf-8") as file:
            head = Head(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None
    return head if head.lives else None


def start() -> Head:
    """Start this machine's head, and wait until its Ray is up; the one there is, where it has one. Call it while :func:`staying`.

    Raises:
        PlacementError: it does not start; the message has what it said.
    """
    head = running()
    if head is not None:
        return head
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "hfsdk.engine.ray.head"], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            start_new_session=True, cwd="/", env=_environment(),
        )  # fmt: skip
        deadline = time.monotonic() + START_S
        try:
            while time.monotonic() < deadline:
                head = running()
                if head is not None:
                    if head.pid != process.pid:  # that of a kernel which was killed meanwhile: ours waits for its end
                        process.terminate()
                        process.wait()
                    return head
                if process.poll() is not None:
                    break
                time.sleep(0.05)
        except BaseException:
            process.terminate()
            raise
        process.kill()
        process.wait()
        said.seek(0)
        last = said.read()[-2000:].decode(errors="replace").strip()
    raise PlacementError(f"the Ray of kept sessions did not start: {last or f'nothing came for {START_S:g} s'}")


@contextmanager
def staying(*, wait: bool = True) -> Iterator[bool]:
    """Keep the head from ending, and others from starting one, meanwhile; without ``wait`` give whether it could be done."""
    with _locked("head.lock", fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB) as locked:
        yield locked


@contextmanager
def looking() -> Iterator[None]:
    """Keep the head from ending while this process joins it; others may do so too."""
    with _locked("head.looks", fcntl.LOCK_SH):
        yield


@contextmanager
def _locked(name: str, how: int) -> Iterator[bool]:
    """Hold a lock of the state folder meanwhile; give whether it could be had."""
    lock = os.open(state_folder() / name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, how)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


ENDS = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask a server to end."""


@contextmanager
def ends_held() -> Iterator[None]:
    """Let no thread of this process, nor of Ray in it, hear that it shall end, but :func:`await_end`: Ray would write about it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_end() -> None:
    """Wait until this process is asked to end."""
    signal.sigwait(ENDS)


def _environment() -> dict[str, str]:
    """Return the environment of the head: this process's, with what it imports from."""
    folders = [place for place in sys.path if place and os.path.isdir(os.path.join(place, "hfsdk"))]
    path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH", "")]))
    return os.environ | ({"PYTHONPATH": path} if path else {})


def _hold() -> None:
    """Be the head: start Ray, say where it is, end it when no keeper is left."""
    import ray

    from hfsdk.engine.ray import start as ray_start

    starter = os.getppid()
    with _locked("head.alone", fcntl.LOCK_EX):  # one before this one ends its Ray first
        if os.getppid() != starter:  # killed meanwhile
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        ray_start.start(None)
        try:
            me = psutil.Process()
            _write(Head(ray.get_runtime_context().gcs_address, me.pid, me.create_time()))
            _await_emptiness()
        finally:
            with contextlib.suppress(FileNotFoundError):
                (state_folder() / "head.json").unlink()
            ray_start.end()


def _await_emptiness() -> None:
    """Return when no keeper was there for a while, and nobody is about to join or to start one."""
    empty_s = time.monotonic()
    while True:
        time.sleep(LOOK_S)
        if keeper_names():
            empty_s = time.monotonic()
        if time.monotonic() - empty_s > EMPTY_S:
            with staying(wait=False) as alone, _locked("head.looks", fcntl.LOCK_EX | fcntl.LOCK_NB) as unseen:
                if alone and unseen and not keeper_names():
                    (state_folder() / "head.json").unlink()
                    return


def keeper_names() -> list[str]:
    """Return the names of the keepers that the Ray of this process has."""
    import ray

    return [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == NAMESPACE]


def _write(head: Head) -> None:
    folder = state_folder()
    fd, beside = tempfile.mkstemp(prefix=".head-", dir=folder)  # of mode 0600
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(asdict(head), file)
    os.replace(beside, folder / "head.json")


if __name__ == "__main__":
    _hold()
