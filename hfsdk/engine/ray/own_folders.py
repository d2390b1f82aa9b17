"""Temporary folders of this process, and what processes that were killed left of theirs.

::

    /tmp/hfsdk-4f2a...-x1y2z3/     0700
        owner.json                 {"pid": 4711, "started": 1790000000.25, "host": "node7"}, locked as long as that process lives
        device0.log ...

A folder is a leftover when its lock is free *and* no process has that id and start time. The lock alone would do on one machine;
together they also hold where processes see each other under other ids (containers that share ``/tmp``) and where a clock was set.
What a process of another machine made (``/tmp`` on a network, where a lock may hold on one machine alone) is left to that machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from hfsdk.core.errors import PlacementError
from hfsdk.engine.process.lives import START_TOLERANCE_S, is_there

PREFIX = "hfsdk-"
OWNER = "owner.json"

END_S = 5.0
"""How long processes that were killed may take to be gone."""


@dataclass(eq=False)
class OwnFolder:
    """A temporary folder that only this user can open, and that is known to be this process's."""

    path: Path
    lock: int
    """File descriptor that holds the lock."""

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def create(name: str, place: str) -> OwnFolder:
    """Make a folder ``hfsdk-<name>-<random>`` of mode 0700.

    Args:
        name: what it is for.
        place: where; others can rename nothing of ours there (``ray_access.private_place``).

    Raises:
        PlacementError: it cannot be made there, or not be locked.
    """
    path: Path | None = None
    try:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-", dir=place))
        lock = os.open(path / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        me = psutil.Process()
        os.write(lock, json.dumps({"pid": me.pid, "started": me.create_time(), "host": socket.gethostname()}).encode())
    except OSError as error:
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
        raise PlacementError(
            f"a session needs a folder of its own in {place}, which cannot be made: {error.strerror or error}. Free some space, or "
            "set TMPDIR to a folder on a disk of this machine."
        ) from error
    return OwnFolder(path, lock)


def clear_left(place: str) -> list[Path]:
    """Remove what killed processes of this user left: their folders, the processes that belong to them, shared memory.

    What another user made, what a link leads to and what a living process owns is not touched.

    Args:
        place: folder to look in.

    Returns:
        The folders that were removed.
    """
    removed = []
    for path in left_in(place):
        lock = _lock(path)
        if lock is None:
            continue
        try:
            if not _lives(lock):
                end_processes(path)
                remove_segments(path.name.split("-")[1])
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
        finally:
            os.close(lock)
    return removed


def left_in(place: str) -> list[Path]:
    """Return this user's folders in a place whose processes have ended, as far as that shows without a lock."""
    folders = []
    for path in sorted(Path(place).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                continue
            fd = os.open(path / OWNER, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if not _lives(fd):
                    folders.append(path)
            finally:
                os.close(fd)
    return folders


def _lock(path: Path) -> int | None:
    """Return a file descriptor that holds a folder's lock, ``None`` where another process holds it."""
    try:
        lock = os.open(path / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _lives(owner: int) -> bool:
    """Return whether the process that an owner file names is there."""
    os.lseek(owner, 0, os.SEEK_SET)
    known = json.loads(os.read(owner, 4096))
    if known.get("host", socket.gethostname()) != socket.gethostname():
        return True  # as far as can be told from here
    return is_there(int(known["pid"]), float(known["started"]))


def end_processes(path: Path) -> list[int]:
    """Kill the helpers that Ray or a worker started for a folder of this user; return their ids when they are gone.

    Args:
        path: the folder. A process belongs to it when an option of its command line names the folder, or when it is one of those
            that Ray gives a title of its own (``ray::...``), or a fork without one yet, and it has a file of the folder open.
    """
    ended: list[psutil.Process] = []
    for _ in range(3):  # what is killed may just have started another
        running = [process for process in _belonging(path) if process not in ended]
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ended += running
        if not running:
            break
    psutil.wait_procs(ended, timeout=END_S)
    return [process.pid for process in ended]


def _belonging(path: Path) -> Iterator[psutil.Process]:
    inside, me = f"{path}{os.sep}", os.getpid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == me or process.uids().real != os.geteuid():
                continue
            command = process.cmdline()
            named = any(option.startswith("-") and f"={inside}" in f"{option}{os.sep}" for option in command)
            told = bool(command) and (command[0].startswith("ray::") or "hfsdk.engine.ray.worker_forks" in command)
            if named or (told and any(file.path.startswith(inside) for file in process.open_files())):
                yield process


def end_new_children(path: Path, since: float) -> None:
    """End what an interrupted start of Ray began: helpers that name the folder, also those that are just being forked.

    Args:
        path: the folder of that Ray.
        since: time at which the start began, as ``time.time()``.
    """
    deadline, mine = time.monotonic() + END_S, psutil.Process().cmdline()
    while True:
        end_processes(path)
        undecided = False
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                undecided |= child.create_time() > since - START_TOLERANCE_S and child.cmdline() == mine
        if not undecided or time.monotonic() > deadline:
            end_processes(path)
            return
        time.sleep(0.05)


def remove_segments(job_id: str) -> None:
    """Unlink this user's shared memory of a job, whose name begins with its id."""
    for path in Path("/dev/shm").glob(f"hfsdk.{job_id}*") if Path("/dev/shm").is_dir() else ():
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                path.unlink()
