"""One save at a time: threads of this process take turns, other processes are refused.

A process that is killed leaves the lock open; what it had not finished stands in the lock's file, so that the next save removes
that and nothing else::

    folder/.hfsdk-saving      {"pid": 4711, "host": "node3", "left": ["state-3.partial", "state-3"]}

A store has no locks. Threads of this process take turns there too; other processes write under other names.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hfsdk.core.errors import CheckpointError
from hfsdk.core.store import AnyPath, StorePath

LOCK = ".hfsdk-saving"

OURS = re.compile(r"state-[0-9]{1,18}(-[0-9a-f]{8}|\.partial)?")
"""Names of folders that a save may remove where the lock's file names them."""

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Answers of a file system that knows no locks: threads take turns there all the same."""


LOOK_S = 0.01
"""How often who waits looks whether it is its turn."""


class Turns:
    """Turns: first come, first served; a turn may end on another thread than it began on.

    Without a lock: a Ctrl-C in the moment in which a ``with`` ends would leave it taken for ever. A deque's own methods are atomic.
    """

    def __init__(self) -> None:
        self._waiting: deque[object] = deque()

    def take(self, who: object) -> None:
        """Wait for the turn; where that is interrupted, :meth:`give` ends it."""
        self._waiting.append(who)
        while self._waiting[0] is not who:
            time.sleep(LOOK_S)

    def give(self, who: object) -> None:
        """End the turn, or the waiting for it; nothing where there is neither."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(who)


_turns: dict[str, Turns] = {}
"""The turns at each folder, of the sessions of this process."""


class FolderLock:
    """A lock that is held while a folder is saved to, so that other processes are refused.

    Attributes:
        left: the folders that a killed process had not finished, or not yet removed.
    """

    def __init__(self, folder: Path) -> None:
        """Name the folder; :meth:`acquire` locks it."""
        self._file = folder / LOCK
        self._turns = _turns.setdefault(str(folder), Turns())
        self._fd = -1
        self._locked = False
        self.left: list[str] = []

    def acquire(self) -> None:
        """Wait for the threads of this process that came before, and lock the folder.

        Whatever interrupts that, :meth:`release` lets go of what was taken.

        Raises:
            CheckpointError: another process is saving to it.
            OSError: it cannot be written.
        """
        self._turns.take(self)
        while not self._locked:
            self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            if not _lock(self._fd):
                folder = self._file.parent
                raise CheckpointError(f"another process{_owner(self._fd)} is saving to {folder}; wait for it, or save elsewhere")
            with contextlib.suppress(FileNotFoundError):
                self._locked = os.fstat(self._fd).st_ino == self._file.stat().st_ino
            if not self._locked:  # who held it has removed it in between: once more with the new file
                self._close()
        self.left = _left_in(self._fd)

    def note(self, left: Iterable[str]) -> None:
        """Write down what the next save may remove should this process end now.

        Raises:
            OSError: it cannot be written.
        """
        content = json.dumps({"pid": os.getpid(), "host": platform.node(), "left": list(left)}).encode()
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        os.write(self._fd, content)

    def release(self, *, keep: bool = False) -> None:
        """Let the next one in; nothing where the lock is not held.

        Args:
            keep: leave the file with its note: something it names could not be removed.
        """
        with contextlib.suppress(OSError):
            if self._locked and not keep:
                if sys.platform == "win32":  # where what is open cannot be removed, not even by who locks it next
                    self._close()
                self._file.unlink()
        self._locked = False
        self._close()
        self._turns.give(self)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            if fd >= 0:
                os.close(fd)


_left: dict[str, list[str]] = {}
"""The names that this process could not remove from a store, by address."""


class StoreTurn:
    """A turn at an address, with what a `FolderLock` has; ``left`` is what this process could not remove before."""

    def __init__(self, folder: StorePath) -> None:
        self._folder = str(folder)
        self._turns = _turns.setdefault(self._folder, Turns())
        self._locked = False
        self.left: list[str] = []

    def acquire(self) -> None:
        """Wait for the threads that came before."""
        self._turns.take(self)
        self._locked, self.left = True, _left.get(self._folder, [])

    def note(self, left: Iterable[str]) -> None:
        """Remember what the next save may remove."""
        _left[self._folder] = list(left)

    def release(self, *, keep: bool = False) -> None:
        """Let the next one in; ``keep``: something could not be removed."""
        if self._locked and not keep:
            _left.pop(self._folder, None)
        self._locked = False
        self._turns.give(self)


def lock_of(folder: AnyPath) -> FolderLock | StoreTurn:
    """Return the lock, or the turn, that a save to a folder or to a store waits for and holds."""
    return StoreTurn(folder) if isinstance(folder, StorePath) else FolderLock(folder)


def _lock(fd: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(fd, 1 << 30, os.SEEK_SET)  # a place that nobody reads
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in WITHOUT_LOCKS
    return True


def _content(fd: int) -> dict[str, Any]:
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        content = json.loads(os.read(fd, 1 << 16) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _owner(fd: int) -> str:
    content = _content(fd)
    pid, host = content.get("pid"), content.get("host")
    return f" ({pid} on {str(host)[:100]})" if isinstance(pid, int) else ""


def _left_in(fd: int) -> list[str]:
    names = _content(fd).get("left")
    return [name for name in names if isinstance(name, str) and OURS.fullmatch(name)] if isinstance(names, list) else []
