"""Access to a Ray: its folder, its token, and whom the token is shown to. Looks at files and sockets; starts nothing.

A Ray that hfsdk starts lives in a folder of mode 0700 and refuses calls without the user's token, which is in a file of mode 0600.
``hf.Session("auto")`` joins only a cluster whose address the user or root wrote down, and whose port, where it is on this machine,
one of those two listens on: to nobody else is the token shown.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import secrets
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
from hfsdk.engine.process.process_alive import START_TOLERANCE_S, is_there

AUTH_MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"

SOCKET_CHARS = 107 if os.uname().sysname == "Linux" else 103
"""Longest path of a Unix socket (``sockaddr_un``)."""

SOCKET_TAIL = "/hfsdk-ray-12345678/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest path that Ray adds, for a socket, to the place of its folder."""

LISTENING = "0A"
"""State of a listening socket in ``/proc/net/tcp``."""

ADDRESS_CHARS = 200
"""An address file holds no more than this."""


# -- the folder


def private_place(tail: str = SOCKET_TAIL) -> str:
    """Return the first place for a folder of ours where nobody else can rename it, and that is short enough for sockets in it.

    The system's place for temporary files comes first, then the usual ones beside it.

    Args:
        tail: the longest path that a socket adds to the place; by default as in Ray's folder, ``""`` for one without sockets.

    Raises:
        PlacementError: there is none.
    """
    tried = list(dict.fromkeys(filter(None, (
        tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR", ""), "/var/tmp", "/dev/shm", str(Path.home()),
    ))))  # fmt: skip
    for place in tried:
        if (not tail or len(os.path.realpath(place)) + len(tail) <= SOCKET_CHARS) and _is_ours_there(place):
            return os.path.realpath(place)
    sockets = f"Ray's sockets need a folder whose path is at most {SOCKET_CHARS - len(tail)} characters long, that"
    raise PlacementError(
        f"{sockets if tail else 'a session needs a folder that'} can be "
        f"written, and in which other users cannot rename what is ours (mode 1777, not 0777); none of {', '.join(tried)} is one. "
        "Set TMPDIR to one."
    )


def _is_ours_there(place: str) -> bool:
    virtual = os.environ.get("VIRTUAL_ENV")
    if virtual and Path(place).is_relative_to(virtual):  # Ray refuses that
        return False
    return os.access(place, os.W_OK | os.X_OK) and open_to_all(Path(place)) is None


def open_to_all(path: Path) -> Path | None:
    """Return the folder, of a path and those above it, in which any user can rename what others own; ``None`` without one.

    Such a folder is writable by all and lacks the sticky bit. One that other users cannot get to does not count.
    """
    shared = None
    for folder in [*reversed(path.resolve().parents), path.resolve()]:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:  # others get no further
            return shared
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            shared = folder
    return shared


# -- the token


def token_file() -> Path | None:
    """Return where Ray reads this user's token, ``None`` where the environment gives the token itself."""
    if os.environ.get(TOKEN):
        return None
    named = os.environ.get(TOKEN_PATH)
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


def has_token() -> bool:
    """Return whether there is a token."""
    path = token_file()
    return path is None or path.exists()


def check_mode() -> None:
    """Check that the environment does not switch token authentication off.

    Raises:
        PlacementError: it does.
    """
    mode = os.environ.get(AUTH_MODE)
    if mode is not None and mode.lower() != "token":
        raise PlacementError(
            f"{AUTH_MODE}={mode} is set: a Ray without token authentication runs code for whoever reaches its ports, so hfsdk does "
            f"not start one. Unset {AUTH_MODE}, or set it to 'token'."
        )


def secure_token(*, make: bool = True) -> list[str]:
    """Have a token in a file that only this user can read, before Ray would make a readable one.

    Args:
        make: whether to make one where there is none.

    Returns:
        What the user has to know: a file that others could read, and is closed now.

    Raises:
        PlacementError: the file can be neither made nor closed.
    """
    path = token_file()
    if path is None:
        return []
    try:
        if not path.exists():
            if not make:
                return []
            _make_token(path)
        return _close_token(path)
    except OSError as error:
        raise PlacementError(
            f"Ray's token cannot be kept in {path}, readable by you alone: {error}. "
            f"Set {TOKEN_PATH} to a file in a folder of yours."
        ) from error


def _make_token(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, beside = tempfile.mkstemp(prefix=".auth_token-", dir=path.parent)  # of mode 0600
    try:
        os.write(fd, secrets.token_hex(32).encode())
        os.link(beside, path)  # whole or not there; another session's stays
    except FileExistsError:
        pass
    finally:
        os.close(fd)
        os.unlink(beside)


def _close_token(path: Path) -> list[str]:
    notices, me = [], os.geteuid()
    folder, info = path.parent.stat(), path.stat()
    if folder.st_mode & 0o022 and folder.st_uid == me and not folder.st_mode & stat.S_ISVTX:
        path.parent.chmod(stat.S_IMODE(folder.st_mode) & ~0o022)
        notices.append(f"other users could put another token into {path.parent}; its mode is {_octal(path.parent)} now.")
    # a token that somebody else has written admits them to all that it protects
    if info.st_uid not in (me, 0):
        raise PermissionError(f"it belongs to {_name(info.st_uid)}, who knows what is in it")
    if info.st_uid != me and info.st_mode & 0o077 & ~stat.S_IRGRP:
        raise PermissionError(f"it is root's and its mode is {_octal(path)}, so that others know what is in it")
    if info.st_mode & 0o077 and info.st_uid == me:
        path.chmod(0o600)
        notices.append(
            f"Ray's token {path} had mode {stat.S_IMODE(info.st_mode):04o} and is 0600 now. Whoever could read it may still know "
            "it: close your Ray clusters and delete the file to have a new one made."
        )
    return notices


def _octal(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):04o}"


# -- the address of "auto"


@dataclass(frozen=True)
class ClusterAddress:
    """A cluster's address and who says so."""

    address: str
    source: str


def address_file() -> Path:
    """Return the file in which ``ray start`` writes down the address of this machine's cluster."""
    place = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(place) / "ray" / "ray_current_cluster"


def find_cluster() -> ClusterAddress:
    """Return the cluster of this machine that ``"auto"`` means.

    That is the one of ``RAY_ADDRESS``, of this user's or root's address file, or of a process of theirs that serves one.

    Raises:
        PlacementError: there is none, or another user wrote the address or listens at it.
    """
    named = os.environ.get("RAY_ADDRESS", "")
    if named and named != "auto":
        if "://" in named or ":" not in named:
            raise PlacementError(f"RAY_ADDRESS={named} is not an address host:port; unset it, or give hf.Session the address")
        return ClusterAddress(named, "RAY_ADDRESS")
    path = address_file()
    served = list(_served_here())
    # anybody can write a file in /tmp, but not start a process as this user
    if served and not _is_trusted(path):
        return ClusterAddress(served[0], "a process of yours or of root's")
    if not os.path.lexists(path):
        raise PlacementError(
            f"no Ray cluster runs on this machine for you ({path} is not there, and no process serves one). Start one with "
            "`ray start --head`, or give its address as host:port."
        )
    cluster = ClusterAddress(_read_address(path), str(path))
    check_listener(cluster.address)
    return cluster


def _is_trusted(path: Path) -> bool:
    try:
        _read_address(path)
    except PlacementError:
        return False
    return True


def _read_address(path: Path) -> str:
    """Return the address in an address file.

    Raises:
        PlacementError: it is a link, not of this user or root, writable by others, or holds no address.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise PlacementError(f"{path}, which should hold the cluster's address, cannot be read: {error.strerror}") from None
    try:
        info = os.fstat(fd)
        who = "is not a file" if not stat.S_ISREG(info.st_mode) else ""
        who = who or ("" if info.st_uid in (os.geteuid(), 0) else f"was written by {_name(info.st_uid)}")
        who = who or ("can be written by other users" if info.st_mode & 0o022 else "")
        if who:
            raise PlacementError(
                f"{path} {who}: whoever listens at the address in it would be shown your Ray token, so hf.Session('auto') does not "
                "believe it. If you trust the cluster, give its address as host:port."
            )
        address = os.read(fd, ADDRESS_CHARS).decode(errors="replace").strip()
    finally:
        os.close(fd)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PlacementError(f"{path} holds no address host:port but {address!r}; delete it and start the cluster again")
    return address


def check_listener(address: str) -> None:
    """Check that, where an address is on this machine, this user or root listens at it: a file may outlive its cluster.

    Raises:
        PlacementError: another user does.
    """
    host, _, port = address.rpartition(":")
    if not _is_here(host.strip("[]")):
        return
    others = set(_listeners(int(port))) - {os.geteuid(), 0}
    if others:
        raise PlacementError(
            f"{_name(min(others))} listens at {address}, where a cluster of yours should be: your Ray token is not shown to "
            "others. If you trust that cluster, give its address as host:port."
        )


def _is_here(host: str) -> bool:
    try:
        resolved = socket.gethostbyname(host)
    except OSError:
        return False
    addresses = {address.address.partition("%")[0] for each in psutil.net_if_addrs().values() for address in each}
    return resolved.startswith("127.") or resolved in addresses or host in addresses


def _listeners(port: int) -> Iterator[int]:
    """Yield the user ids of the sockets that listen on a port of this machine; none where the system does not say."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="utf-8").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield int(fields[7])


def _served_here() -> Iterator[str]:
    """Yield the addresses of this user's and root's Ray clusters: of those with a fixed port, as ``ray start`` gives them."""
    for process in psutil.process_iter(["name", "uids", "cmdline"]):
        info = process.info
        if info["name"] != "gcs_server" or info["uids"] is None or info["uids"].real not in (os.geteuid(), 0):
            continue
        options = dict(option[2:].split("=", 1) for option in info["cmdline"] or () if option.startswith("--") and "=" in option)
        host, port = options.get("node-ip-address"), options.get("gcs_server_port", "0")
        if host and port.isdigit() and int(port):
            yield f"{host}:{port}"


def _name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


# -- temporary folders of this process, and those that killed processes have left

PREFIX = "hfsdk-"
OWNER = "owner.json"

END_S = 5.0
"""How long processes that were killed may take to be gone."""


@dataclass(eq=False)
class OwnFolder:
    """A temporary folder that only this user can open, and that is known to be this process's.

    ::

        /tmp/hfsdk-4f2a...-x1y2z3/     0700
            owner.json                 {"pid": 4711, "started": 1790000000.25, "host": "node7"}, locked while that process lives
            device0.log ...

    A folder is a leftover when its lock is free *and* no process has that id and start time. The lock alone would do on one
    machine; together they also hold where processes see each other under other ids (containers that share ``/tmp``) and where a
    clock was set. What a process of another machine made (``/tmp`` on a network, where a lock may hold on one machine alone) is
    left to that machine.
    """

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
        name: the purpose of the folder.
        place: the place; others can rename nothing of ours there (``ray_access.private_place``).

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
    owner_info = json.loads(os.read(owner, 4096))
    if owner_info.get("host", socket.gethostname()) != socket.gethostname():
        return True  # as far as can be told from here
    return is_there(int(owner_info["pid"]), float(owner_info["started"]))


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
            of_workers = bool(command) and (command[0].startswith("ray::") or "hfsdk.engine.ray.fork_server" in command)
            if named or (of_workers and any(file.path.startswith(inside) for file in process.open_files())):
                yield process


def end_new_children(path: Path, since: float) -> None:
    """End what an interrupted start of Ray began: helpers that name the folder, also those that are just being forked.

    Args:
        path: the folder of that Ray.
        since: time at which the start began, as ``time.time()``.
    """
    deadline, own_command = time.monotonic() + END_S, psutil.Process().cmdline()
    while True:
        end_processes(path)
        undecided = False
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                undecided |= child.create_time() > since - START_TOLERANCE_S and child.cmdline() == own_command
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
