"""Folders in which nobody else can put anything: for temporary files, and for compiled code, which is run where it is found.

::

    /tmp/torchinductor_ada/bisect/bisect_status.txt      torch reads it when it is imported. Others can be there first,
    /tmp/cache/..., /tmp/hf-model.lock                   with a pipe (torch waits for ever) or with code of their own
    /tmp/hfsdk-4f2a...-x1y2z3/                           0700, random: where the processes of a session have their temporary files
    ~/.cache/hfsdk/compiled/{inductor,triton,vllm}       0700: what the next session need not compile again

"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

from hfsdk.core.errors import PlacementError

COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
"""Variables that say where a library keeps its compiled code, with the folder of each."""


def in_use(place: Path) -> dict[str, str]:
    """Return the variables that a session's process lacks to keep out of places that others share.

    Args:
        place: a folder that this user alone can open.
    """
    temporary = {} if is_mine(Path(tempfile.gettempdir())) else {"TMPDIR": str(place)}
    cache = _compiled() or place
    return temporary | {name: str(cache / folder) for name, folder in COMPILED.items() if not os.environ.get(name)}


def keep_compiled() -> None:
    """Have this process keep compiled code where nobody else can put any, before it imports what makes torch's folder.

    transformers does, for a tokenizer. Where torch looks is set for the process, as torch itself does it; where the user
    has no private place the setting stays as it is.
    """
    name = next(iter(COMPILED))
    if sys.platform not in ("win32", "emscripten") and not os.environ.get(name) and (cache := _compiled()):
        os.environ[name] = str(cache / COMPILED[name])


def _compiled() -> Path | None:
    """Return where compiled code stays between sessions; ``None`` where others could put theirs, or where nothing can be made."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "hfsdk" / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = is_mine(folder) and os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return None
    return folder if usable else None


def is_mine(folder: Path) -> bool:
    """Return whether nobody but this user and root can put anything into a folder, or another in its place."""
    try:
        path = folder.resolve(strict=True)
        infos = [(each, each.stat()) for each in (path, *path.parents)]
    except OSError:
        return False
    for each, info in infos:
        if info.st_uid not in (_user(), 0):
            return False
        shared = info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not _is_own_group(info.st_gid))
        if shared and (each == path or not info.st_mode & stat.S_ISVTX):
            return False
    return infos[0][1].st_uid == _user()


def _is_own_group(gid: int) -> bool:
    """Return whether a group is of this user or of root alone, as many systems make one for each user."""
    if gid == 0:
        return True
    if sys.platform not in ("win32", "emscripten"):
        import grp
        import pwd

        try:
            group, user = grp.getgrgid(gid), pwd.getpwuid(_user())
        except KeyError:
            return False
        return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return False


def _user() -> int:
    """Return the id of this user as ``stat`` tells it: 0 where there are none."""
    return os.geteuid() if sys.platform not in ("win32", "emscripten") else 0


def enter(folder: Path) -> None:
    """Have a folder of mode 0700, whose name another process of this user chose and others may have read.

    Raises:
        PlacementError: another user made it, or others can open it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
        wrong = "is no folder"
    elif info.st_uid != _user():
        wrong = f"belongs to user {info.st_uid}"
    elif info.st_mode & 0o077:
        wrong = f"can be opened by others (mode {stat.S_IMODE(info.st_mode):04o})"
    else:
        return
    raise PlacementError(
        f"{folder} {wrong}: a session's files lie in folders that its user alone can open. Remove it, or set TMPDIR to a folder of "
        "yours before the session is opened."
    )
