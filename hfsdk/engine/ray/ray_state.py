"""What ``hf.doctor()`` sees of this user's Ray: its token, its place, the cluster of ``"auto"``, open ports, leftovers."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass

import psutil

from hfsdk.core.errors import PlacementError
from hfsdk.engine.ray import own_folders, ray_access


@dataclass(frozen=True)
class StateCheck:
    """One thing that was looked at."""

    name: str
    good: bool
    text: str


def look() -> list[StateCheck]:
    """Look at all of it; changes nothing and asks no network."""
    return [_mode(), _token(), _place(), _auto(), _ports(), _leftovers()]


def _mode() -> StateCheck:
    try:
        ray_access.check_mode()
    except PlacementError as error:
        return StateCheck("Ray's authentication", False, str(error))
    text = "by token, whenever hfsdk starts Ray; a cluster that is joined and has none is told of"
    return StateCheck("Ray's authentication", True, text)


def _token() -> StateCheck:
    path = ray_access.token_file()
    if path is None:
        return StateCheck("Ray's token", True, f"from {ray_access.TOKEN} in the environment")
    try:
        info = path.stat()
    except FileNotFoundError:
        return StateCheck("Ray's token", True, f"{path} is not there yet; the first session makes it, readable by you alone")
    except OSError as error:
        return StateCheck("Ray's token", False, f"{path} cannot be looked at: {error.strerror}")
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid not in (os.geteuid(), 0):
        return StateCheck("Ray's token", False, f"{path} belongs to another user, who knows what is in it: sessions refuse it")
    if mode & 0o077:
        text = f"{path} has mode {mode:04o}: others can read it. The next session makes it 0600; delete it to have a new one made"
        return StateCheck("Ray's token", False, text)
    return StateCheck("Ray's token", True, f"{path}, mode {mode:04o}")


def _place() -> StateCheck:
    try:
        place = ray_access.private_place()
    except PlacementError as error:
        return StateCheck("Ray's folder", False, str(error))
    return StateCheck(
        "Ray's folder", True, f"{place}/{own_folders.PREFIX}ray-..., of mode 0700, for as long as the session is open"
    )


def _auto() -> StateCheck:
    try:
        found = ray_access.find_cluster()
    except PlacementError as error:
        return StateCheck("hf.Session('auto')", not os.path.lexists(ray_access.address_file()), str(error))
    return StateCheck("hf.Session('auto')", True, f"joins {found.address}, as {found.source} says")


def _ports() -> StateCheck:
    listening = set()
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            ports = (c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN)
            listening |= {f"{process.name()} {port.laddr.ip}:{port.laddr.port}" for port in ports}
    return StateCheck("listening now", True, "; ".join(sorted(listening)) or "nothing of this process and those it started")


def _leftovers() -> StateCheck:
    places = {os.path.realpath(tempfile.gettempdir())}
    for tail in ("", ray_access.SOCKET_TAIL):
        with contextlib.suppress(PlacementError):
            places.add(ray_access.private_place(tail))
    left = [path for place in places for path in own_folders.left_in(place)]
    if not left:
        return StateCheck("leftovers", True, "none of killed sessions")
    return StateCheck("leftovers", False, f"{', '.join(map(str, left))} of killed sessions; the next session removes them")
