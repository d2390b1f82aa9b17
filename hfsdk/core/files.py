"""Files that a user asked for: written next to their place and renamed, never through a link; and checksums of files.

::

    report.html                    what was there stays whole until the new one is
    .report.html.1f0c.partial      the new one, as it is written; after a failure it is removed

A link in the place of the file is replaced by the file: what it pointed to stays as it is.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfsdk.core.errors import CheckpointError, OptionError, OutputError
from hfsdk.core.store import AnyPath, StorePath, is_address
from hfsdk.core.system import can_start_threads
from hfsdk.core.untrusted import has_file, open_file, read_file
from hfsdk.core.user_line import warn_user

SAVE = "save.json"
"""The file in which a save describes itself, in its folder: see ``hfsdk.state.checkpoint_index``."""

INDEX = "session.json"
"""The file in which a folder of saves lists them."""

FORMAT, WITHOUT_CHECKSUMS = 3, 2
"""Formats of saves: the one that is written, and the older one that can be read too."""

BLOCK_BYTES = 1 << 22
"""Bytes that are read at a time for a checksum."""

MOST_BYTES = 1 << 30
"""Largest index that is written and read; a history of 100,000 steps has about 150 MB."""

FULL_BYTES = 1 << 20
"""A disk with less than this free is full."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

MOST_THREADS = 8
"""Most threads that read files at the same time."""

_written: dict[str, tuple[int, int]] = {}
"""Files that this process wrote for the user -> (inode, time of change), to be quiet where a cell is run again."""


# -- writing


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Give a new, empty file next to ``path`` to write to; on leaving it takes that place, after a failure it is removed.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    partial = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.partial")
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_file(path: AnyPath, content: str | bytes) -> None:
    """Write a whole file next to its place and rename it; an object of a store is put there as it is.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    data = content.encode() if isinstance(content, str) else content
    if isinstance(path, StorePath):
        path.write_bytes(data)
        return
    with beside(path) as partial:
        partial.write_bytes(data)


def export(path: str | Path, content: str | bytes, what: str, notice: Callable[[str], object] | None = None) -> Path:
    """Write a file that the user asked for; say when that replaces one that this process did not write.

    Args:
        path: the file's path, a text or a ``Path``.
        content: all of it; text becomes UTF-8.
        what: for messages, e.g. ``"the report"``.
        notice: takes the notice's text; by default a warning.

    Returns:
        The path, as it was given.

    Raises:
        OptionError: ``path`` is no path, or a folder.
        OutputError: it cannot be written; what was there before stays.
    """
    target = as_path(path, what)
    try:
        replaced = is_strangers(target)
        if target.is_dir() and not target.is_symlink():
            raise OptionError(f"{what} is written to a file; {target} is a folder. Give a file's name in it.")
        write_file(target, content)
    except OSError as error:
        raise OutputError(f"cannot write {what} to {target}: {error.strerror or error}; what was there is unchanged") from error
    is_ours(target)
    if replaced:
        (notice or warn_user)(f"{what} replaced what was at {target}")
    return target


def is_strangers(path: AnyPath) -> bool:
    """Whether there is something that this process did not write for the user, or that was changed since."""
    there = _state_of(path)
    return there is not None and there != _written.get(_key(path))


def is_ours(path: AnyPath, content: bytes | None = None) -> None:
    """Note that this process wrote a file for the user; an object of a store need not be read where its content is given."""
    if isinstance(path, StorePath) and content is not None:
        _written[_key(path)] = len(content), zlib.crc32(content)
    else:
        _written[_key(path)] = _state_of(path) or (0, 0)


def _key(path: AnyPath) -> str:
    return path if isinstance(path, StorePath) else os.path.abspath(path)


def _state_of(path: AnyPath) -> tuple[int, int] | None:
    try:
        if isinstance(path, StorePath):
            content = path.read_bytes()
            return len(content), zlib.crc32(content)
        stat = path.lstat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def why_unwritten(folder: AnyPath, error: BaseException | str) -> str:
    """Say why files in a folder could not be written, and what to do; torch's own words for a full disk name neither."""
    if isinstance(folder, StorePath):
        return str(error).rstrip(".")
    # torch wraps the OSError that knows the errno, so the cause is looked for inside.
    cause = error
    while isinstance(cause, BaseException) and not isinstance(cause, OSError) and (cause.__cause__ or cause.__context__):
        cause = cause.__cause__ or cause.__context__ or cause
    number, text = getattr(cause, "errno", None), getattr(cause, "strerror", None) or str(error)
    if "inline_container" in text or "PytorchStreamWriter" in text:
        text = "a file could not be written to its end"
    try:
        free: int | None = shutil.disk_usage(existing_parent(folder)).free
    except OSError:
        free = None
    full = number in NO_ROOM or any(os.strerror(code) in text for code in NO_ROOM)
    # torch's writer reports a full disk without its errno; next to no room left tells the same.
    if not full and free is not None and free < FULL_BYTES:
        full, text = True, f"{os.strerror(errno.ENOSPC)}: {text}"
    if full:
        there = "" if free is None else f" ({free / 1e6:,.1f} MB are free)"
        return f"{text}{there}. Free some space, or give a folder on another disk"
    return text


def existing_parent(path: Path) -> Path:
    """Return a path, or of one that does not exist the innermost folder around it that does."""
    return next((folder for folder in (path, *path.parents) if folder.exists()), path)


def as_path(path: Any, what: str) -> Path:
    """Return a path as it was given.

    Raises:
        OptionError: it is none: neither a text nor a path, empty, with a zero character, or the address of a store.
    """
    if not isinstance(path, str | Path) or not str(path) or "\0" in str(path):
        raise OptionError(f"{what} goes to a path, e.g. 'runs/1' or a pathlib.Path; got {type(path).__name__} {str(path)[:100]!r}")
    if is_address(path):
        raise OptionError(f"{what} goes to a path; {str(path)[:100]!r} is of an object store, to which session.save alone writes")
    return Path(path)


# -- checksums


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of a file, which must be the same when it is read again."""

    num_bytes: int
    crc32: int | None
    """``None`` where a version of hfsdk wrote it that kept none."""

    @classmethod
    def of(cls, path: AnyPath) -> FileSum:
        """Read a file.

        Raises:
            OSError: it cannot be read.
        """
        total = crc = 0
        for block in path.blocks() if isinstance(path, StorePath) else _blocks(path):
            total, crc = total + len(block), zlib.crc32(block, crc)
        return cls(total, crc)


def _blocks(path: Path) -> Iterator[bytes]:
    with open_file(path.parent, path.name, error=CheckpointError) as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def content_of(path: AnyPath) -> bytes:
    """Return a file of a save that is read whole.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is no file, cannot be read or is too large.
    """
    if isinstance(path, StorePath):
        if path.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; no file of its kind is so large. Take another copy.")
        return path.read_bytes()
    if not has_file(path.parent, path.name):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return read_file(path.parent, path.name, most_bytes=MOST_BYTES, error=CheckpointError)


def parse_files(files: Any) -> dict[str, FileSum]:
    """Return the files of a save as its ``save.json`` has them: ``{"actor/common.pt": [bytes, checksum], ...}``.

    In format 2 a number of bytes alone. Each lies in the save's folder or in that of a role in it.

    Raises:
        ValueError: they are not of this form.
    """
    if not isinstance(files, dict):
        raise ValueError("files must be an object")
    sums = {}
    for name, noted in files.items():
        size, crc = noted if isinstance(noted, list) and len(noted) == 2 else (noted, None)
        parts = name.split("/")
        if len(parts) > 2 or not all(parts) or {".", ".."} & set(parts) or "\\" in name or "\0" in name:
            raise ValueError(f"the file {name[:100]!r} must be one like 'actor/common.pt'")
        if type(size) is not int or size < 0 or (crc is not None and (type(crc) is not int or not 0 <= crc < 2**32)):
            raise ValueError(f"the file {name[:100]!r} must have a number of bytes and a checksum")
        sums[name] = FileSum(size, crc)
    return sums


def check_files(folder: AnyPath, files: Mapping[str, FileSum], parts: Collection[str] | None = None) -> None:
    """Compare files with the sums noted when they were written: all sizes first, then every byte, several files at a time.

    Args:
        folder: the folder that has them.
        files: each file's sum, by path in the folder.
        parts: the files to read; by default all. Sizes of all are compared.

    Raises:
        CheckpointError: names the first that is missing or different.
    """
    sizes = folder.sizes() if isinstance(folder, StorePath) else None
    for name, noted in files.items():
        _check_size(folder, name, noted, sizes)
    chosen = [name for name in files if files[name].crc32 is not None and (parts is None or name in parts)]
    with _mapped() as mapped:
        for failure in mapped(lambda name: _difference(folder, name, files[name]), chosen):
            if failure:
                raise CheckpointError(failure)


@contextmanager
def _mapped() -> Iterator[Callable[..., Iterator[str]]]:
    """Give a ``map`` that works on several items at a time, where threads can be started."""
    if not can_start_threads():
        yield map
        return
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        yield threads.map


def _check_size(folder: AnyPath, name: str, noted: FileSum, sizes: Mapping[str, int] | None) -> None:
    path = folder / name
    try:
        if sizes is not None:
            there, size = name in sizes, sizes.get(name, 0)
        else:
            there, size = has_file(path.parent, path.name), 0
            if there:
                with open_file(path.parent, path.name, error=CheckpointError) as file:
                    size = os.fstat(file.fileno()).st_size
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if not there:
        raise CheckpointError(f"the checkpoint is incomplete: {path} is missing; take another copy")
    if size != noted.num_bytes:
        counts = f"{size} bytes, {noted.num_bytes} were saved"
        raise CheckpointError(f"the checkpoint is damaged: {path} has {counts}; take another copy")


def _difference(folder: AnyPath, name: str, noted: FileSum) -> str:
    path = folder / name
    try:
        read = FileSum.of(path)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if read == noted:
        return ""
    return (
        f"the checkpoint is damaged: {path} has other content than was saved (checksum {read.crc32:08x}, "
        f"{noted.crc32:08x} was saved); take another copy"
    )
