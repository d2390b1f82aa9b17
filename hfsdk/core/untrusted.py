"""Folders from elsewhere: the one place that opens a file of a stranger's folder.

A model, a tokenizer, adapters or a checkpoint may come from anybody. What is read of such a folder is

* of a plain name: no path, no ``..``, nothing absolute, no zero character;
* a regular file: a named pipe would wait for ever, a device may answer for ever, a link may lead to a private key;
* of a bounded size, and its JSON of a bounded depth and number of parts.

A link is followed to a file of the same folder, and of a folder of the Hugging Face hub's cache to a file next to it, since
snapshots consist of such links; one that leads anywhere else is refused::

    models--owner--name/
      blobs/3fe2...                                     the files
      snapshots/07db.../config.json -> ../../blobs/3fe2...

The file is looked at again when it is open: what is read is what was looked at, whatever happens to the name meanwhile. A library
that opens names by itself is given what was opened here: the bytes, a private copy (:func:`private_copy`), or the open file by
its descriptor (:func:`descriptor_path`).
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from hfsdk.core.errors import HfsdkError, ModelNotFoundError
from hfsdk.core.rules import shown
from hfsdk.core.system import temporary_folder

MOST_BYTES = {
    "*.safetensors.index.json": 100 << 20, "tokenizer.json": 256 << 20, "tekken.json": 256 << 20, "vocab.json": 256 << 20,
    "*.json": 16 << 20, "*.jinja": 4 << 20, "*": 256 << 20,
}  # fmt: skip
"""Largest file that is read whole, by its name; the first that fits counts. Gemma's ``tokenizer.json`` has 33 MB."""

MOST_DEPTH, MOST_PARTS = 100, 5_000_000
"""Limits of JSON: lists and objects in each other, and how many there are with all that is in them."""

MOST_NAMES = 100_000
"""Most names in a folder."""

KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFLNK: "a link",
}  # fmt: skip

_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))
_FOLDER_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"))

_LONE = re.compile(rb"\\u[dD][89a-fA-F]")


class _RefusedError(ValueError):
    """Why a file is not read; follows its path in a sentence."""


# -- opening


@contextmanager
def open_file(folder: str | Path, name: str, *, error: type[HfsdkError] = ModelNotFoundError) -> Iterator[BinaryIO]:
    """Open a regular file of a folder, for reading bytes.

    Args:
        folder: the folder; a link to a folder counts as one.
        name: the file's name, without any path.
        error: the class of error to raise.

    Raises:
        ModelNotFoundError: there is none, or something else; says what (or the ``error`` given).
    """
    with _telling(folder, name, error):
        file = os.fdopen(_open(os.fspath(folder), name), "rb")
    with file:
        yield file


def read_file(
    folder: str | Path, name: str, *, most_bytes: int | None = None, error: type[HfsdkError] = ModelNotFoundError
) -> bytes:
    """Return the content of a regular file of a folder.

    Args:
        folder: the folder that has the file.
        name: the file's name.
        most_bytes: that it may have; by default of its kind (:data:`MOST_BYTES`).
        error: the class of error to raise.

    Raises:
        ModelNotFoundError: as :func:`open_file`, and where it is larger.
    """
    most = most_bytes_of(name) if most_bytes is None else most_bytes
    with open_file(folder, name, error=error) as file, _telling(folder, name, error):
        size = os.fstat(file.fileno()).st_size
        # One byte more than allowed: the file may have grown since its size was asked.
        content = file.read(most + 1) if size <= most else b""
        if max(size, len(content)) > most:
            raise _RefusedError(f"has {max(size, len(content)):,} bytes; a file of this name has at most {most:,}")
        return content


def read_named(path: str | Path, most_bytes: int, *, error: type[HfsdkError]) -> bytes:
    """Return the content of one file that the user names: a link in its place is the user's own, and is followed.

    Raises:
        HfsdkError: the ``error`` given, as :func:`read_file`.
    """
    folder, name = os.path.split(os.path.realpath(path))
    return read_file(folder, name, most_bytes=most_bytes, error=error)


def read_json(folder: str | Path, name: str, *, error: type[HfsdkError] = ModelNotFoundError) -> dict[str, Any]:
    """Return the object that a JSON file of a folder is.

    Raises:
        ModelNotFoundError: as :func:`read_file`, and where it is no JSON, no object, or one that is nested without end.
    """
    content = read_file(folder, name, error=error)
    with _telling(folder, name, error):
        return _object(content)


def changed_json(folder: str | Path, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    """Return a JSON file's content for a copy: byte for byte as it is, unless something in it is to change.

    Entries that name further files are left out (:func:`without_files`).

    Args:
        folder: the folder that has the file.
        name: the file's name.
        change: returns the object to write, and leaves its argument as it is.

    Raises:
        ModelNotFoundError: as :func:`read_json`.
    """
    content = read_file(folder, name)
    with _telling(folder, name, ModelNotFoundError):
        content_object = _object(content)
    wanted = without_files(change(content_object))
    return content if wanted == content_object else json_bytes(wanted)


def _object(content: bytes) -> dict[str, Any]:
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {_json_kind(value)} and no object")
    return value


def absolute(path: str | Path, *, error: type[HfsdkError] = ModelNotFoundError) -> Path:
    """Return a path that the user gives as a whole one, which may lead to nothing.

    Raises:
        ModelNotFoundError: there can be nothing: it is too long, a loop of links, of a user who does not exist (or the ``error``).
    """
    try:
        resolved = Path(path).expanduser().resolve()
        resolved.exists()
    except (OSError, RuntimeError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{shown(str(path), 100)} is no folder: {reason}") from problem
    return resolved


def has_file(folder: str | Path, name: str) -> bool:
    """Whether a folder has anything of this name: opening it tells whether it can be read."""
    return os.path.lexists(os.path.join(folder, name))


def folders_with(folder: str | Path, name: str) -> list[str]:
    """Return the names of folders inside a folder that have a file of this name, sorted; none where it cannot be listed."""
    try:
        inside = file_names(folder)
    except HfsdkError:
        return []
    return [entry for entry in inside if has_file(os.path.join(folder, entry), name)]


def file_names(folder: str | Path, *, error: type[HfsdkError] = ModelNotFoundError) -> list[str]:
    """Return the names of all that is in a folder, sorted.

    Raises:
        ModelNotFoundError: it cannot be listed, or has too many.
    """
    names: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) > MOST_NAMES:
                    raise error(f"{folder} has more than {MOST_NAMES:,} files, and is no model. Give another folder.")
    except OSError as problem:
        raise error(f"{folder} cannot be listed: {problem.strerror or problem}. Check the folder and its permissions.") from None
    return sorted(names)


def regular_names(folder: str | Path, *, error: type[HfsdkError] = ModelNotFoundError) -> list[str]:
    """Return the names of the files of a folder that :func:`open_file` opens; pipes, links to elsewhere and folders are none.

    Raises:
        ModelNotFoundError: it cannot be listed.
    """
    return [name for name in file_names(folder, error=error) if _is_regular(os.fspath(folder), name)]


def _is_regular(folder: str, name: str) -> bool:
    try:
        parent, base = _place(folder, name)
        return stat.S_ISREG(os.lstat(os.path.join(parent, base)).st_mode)
    except (OSError, ValueError):
        return False


def _open(folder: str, name: str) -> int:
    """Return the descriptor of a regular file."""
    parent, base = _place(folder, name)
    _check_regular(os.lstat(os.path.join(parent, base)))  # before it is opened: opening a device or a pipe does something
    if os.open in os.supports_dir_fd:
        # By a descriptor of the folder: its path may be swapped for a link between the check and the open.
        place = os.open(parent, _FOLDER_FLAGS)
        try:
            file = os.open(base, _FLAGS, dir_fd=place)
        finally:
            os.close(place)
    else:
        file = os.open(os.path.join(parent, base), _FLAGS)
    try:
        _check_regular(os.fstat(file))
    except BaseException:
        os.close(file)
        raise
    return file


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "no file")
        raise _RefusedError(f"is {kind}, and of a folder only regular files are read")


def _place(folder: str, name: str) -> tuple[str, str]:
    """Return where a file of a folder really lies, as a folder and a name, after the one link that may lead there."""
    if not name or name in (".", "..") or re.search(r"[/\\\0]", name):
        raise _RefusedError("is no plain name of a file in the folder")
    real = os.path.realpath(folder)
    path = os.path.join(real, name)
    if not os.path.islink(path):
        return real, name
    text = os.readlink(path)
    # The link's text is worked out, not followed: following would open what it points at.
    parent, base = os.path.split(os.path.normpath(os.path.join(real, text)))
    above = (real, os.path.dirname(real))  # a snapshot of the hub's cache, or a folder in one
    snapshots = [os.path.dirname(place) for place in above if os.path.basename(os.path.dirname(place)) == "snapshots"]
    caches = [os.path.dirname(place) for place in snapshots]
    if base and parent in (real, *(os.path.join(cache, "blobs") for cache in caches)):
        return parent, base
    raise _RefusedError(
        f"is a link to {shown(text)}, which leads out of the folder, and is not followed. Where the folder is yours, put the file "
        "there"
    )


@contextmanager
def _telling(folder: str | Path, name: str, error: type[HfsdkError]) -> Iterator[None]:
    """Raise a file's problem as one sentence that names the file."""
    try:
        yield
    except _RefusedError as problem:
        raise error(f"{where(folder, name)} {problem}.") from None
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise error(f"{where(folder, name)} cannot be read: {reason}. Check the folder and its permissions.") from None
    except (ValueError, RecursionError, MemoryError) as problem:
        raise error(f"{where(folder, name)} is damaged: {shown_reason(problem)}. Take another copy.") from None


def where(folder: str | Path, name: str) -> str:
    """Return a file's path for a message; a name from a stranger gives a terminal no orders."""
    return f"{folder}/{name}" if name.isprintable() and len(name) < 200 else f"{folder}/{shown(name)}"


def shown_reason(problem: BaseException) -> str:
    """Return an error's text in one line."""
    return shown_text(str(problem)) or type(problem).__name__


def shown_text(text: str, most: int = 300) -> str:
    """Return a stranger's text in one printable line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 10 * most]).split())[:most].rstrip(". ")


def most_bytes_of(name: str) -> int:
    """Return how large a file of this name may be that is read whole."""
    return next(most for pattern, most in MOST_BYTES.items() if fnmatchcase(name, pattern))


# -- JSON


def parse_json(content: bytes, *, most_parts: int = MOST_PARTS) -> Any:
    """Return the value of JSON text.

    Args:
        content: the text, in UTF-8.
        most_parts: the most lists, objects and items of theirs, all together.

    Raises:
        ValueError: it is none, has a name twice (readers differ in which they take), a text without a UTF-8 form, or too much.
        RecursionError: it is nested without end.
    """
    # Counted before parsing: an object of a gigabyte would be built before a parser could refuse it.
    parts = content.count(b",") + content.count(b"[") + content.count(b"{")
    if parts > most_parts:
        raise ValueError(f"it has more than {most_parts:,} parts")
    value = json.loads(content.decode("utf-8"), object_pairs_hook=_each_once)
    _check_depth(value)
    # A lone surrogate is valid JSON and no text in UTF-8; it would fail later, where the text is printed or written.
    if _LONE.search(content):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(pairs)
    if len(by_name) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {shown(next(name for name in by_name if names.count(name) > 1))} twice")
    return by_name


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
        containers = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [part for parts in containers for part in parts if isinstance(part, dict | list)]


def _json_kind(value: Any) -> str:
    names = {list: "list", str: "text", bool: "truth value", type(None): "null"}
    return names.get(type(value), "number")


# -- for libraries that open names by themselves


@contextmanager
def private_copy(
    folder: str | Path,
    names: Sequence[str],
    *,
    change: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType({}),
    error: type[HfsdkError] = ModelNotFoundError,
) -> Iterator[str]:
    """Give a temporary folder with copies of some files of another, as far as that has them.

    Configurations are copied without what would have a library read further files (:func:`without_files`).

    Args:
        folder: the folder that the files are in.
        names: names of the files that are read whole.
        change: returns a configuration as it is to be written, by its name.
        error: the class of error to raise.

    Raises:
        ModelNotFoundError: one of them is there and is no file that can be read.
    """
    with temporary_folder("hfsdk-copy-") as copy:
        for name in names:
            if has_file(folder, name):
                if name.endswith("config.json"):
                    config = read_json(folder, name, error=error)
                    content = json_bytes(change[name](config) if name in change else config)
                else:
                    content = read_file(folder, name, error=error)
                Path(copy, name).write_bytes(content)
        yield copy


def without_files(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys by which it names files that transformers would read, wherever they lie.

    ``gguf_file``, ``vocab_file``, ``fast_tokenizer_files``, ``configuration_files`` and others like them; and ``init_inputs``,
    which are such names by their place.
    """
    return {key: value for key, value in config.items() if not key.endswith(("_file", "_files")) and key != "init_inputs"}


def json_bytes(config: dict[str, Any]) -> bytes:
    """Return the content of a configuration that names no files."""
    return (json.dumps(without_files(config), indent=2) + "\n").encode()


def descriptor_path(file: BinaryIO) -> str:
    """Return a path by which this process, and no other, opens a file that is open already, whatever its name means by now."""
    return f"/{'proc/self' if os.path.isdir('/proc/self/fd') else 'dev'}/fd/{file.fileno()}"
