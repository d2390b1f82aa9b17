"""``StorePath``: a place in an object store, with the part of ``pathlib.Path`` that saves need; fsspec reaches it.

::

    s3://bucket/run1/session.json       an object: it appears whole, or not at all
    s3://bucket/run1                    no folder: what objects' names begin with

A store renames nothing and locks nothing. A refusal, or no answer, is a `CheckpointError` that names the address and the node, in
the words of the protocol's package. Each process opens a store with what its own node has of credentials; they are in no address,
no message and no order to a worker.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hfsdk.core.errors import CheckpointError, HfsdkError, OptionError

ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://(/*[^/].*)")

BLOCK_BYTES = 1 << 24
"""Bytes that are asked for at a time, of an object that is read from its beginning to its end."""

MOST_CHARACTERS = 300
"""Most characters that a message quotes of a store's answer."""

_stores: dict[str, Any] = {}
"""fsspec's file systems, by protocol; one that failed is made again, with the credentials that there are then."""


class StorePath(str):
    """A place in an object store, with as much of ``pathlib.Path`` as saves need; see :func:`store_path`."""

    __slots__ = ()

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self}/{name}")

    @property
    def name(self) -> str:
        """The part behind the last slash."""
        return self.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """The part before the last slash; for a bucket, itself."""
        before = self.rpartition("/")[0]
        return self if before.endswith("/") else StorePath(before)

    def resolve(self) -> StorePath:
        """Return itself: a store has no links."""
        return self

    # -- what is there

    def _info(self) -> Mapping[str, Any]:
        with _asking(self, "read") as store:
            try:
                info: Mapping[str, Any] = store.info(str(self))
            except FileNotFoundError:
                return {}
            return info

    def exists(self) -> bool:
        """Whether there is such an object, or one whose name begins so."""
        return bool(self._info())

    def is_file(self) -> bool:
        """Whether there is such an object."""
        return self._info().get("type") == "file"

    def is_dir(self) -> bool:
        """Whether there are objects whose names begin so."""
        return self._info().get("type") == "directory"

    def is_symlink(self) -> bool:
        """Say no."""
        return False

    def stat(self) -> SimpleNamespace:
        """Return the size of an object, as ``st_size``.

        Raises:
            FileNotFoundError: there is none.
        """
        info = self._info()
        if info.get("type") != "file":
            raise FileNotFoundError(str(self))
        return SimpleNamespace(st_size=int(info["size"]))

    def iterdir(self) -> Iterator[StorePath]:
        """Return the entries directly below it; none where there is nothing."""
        names: list[str] = []
        with _asking(self, "read") as store, suppress(FileNotFoundError):
            own_name = store._strip_protocol(str(self)).rstrip("/")
            children = {name.rstrip("/") for name in store.ls(str(self), detail=False)} - {own_name}
            names = sorted(name.rpartition("/")[2] for name in children)
        return iter([self / name for name in names])

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every object below it, by the rest of its name: one question, however many there are."""
        with _asking(self, "read") as store:
            try:
                objects = store.find(str(self), detail=True)
            except FileNotFoundError:
                return {}
            before = len(store._strip_protocol(str(self)).rstrip("/")) + 1
            return {name[before:]: int(info["size"]) for name, info in objects.items()}

    # -- reading

    def read_bytes(self) -> bytes:
        """Return an object.

        Raises:
            FileNotFoundError: there is none.
        """
        with _asking(self, "read") as store:
            return bytes(store.cat_file(str(self)))

    def blocks(self) -> Iterator[bytes]:
        """Read an object from its beginning to its end."""
        size = self.stat().st_size
        for start in range(0, size, BLOCK_BYTES):
            with _asking(self, "read") as store:
                block = bytes(store.cat_file(str(self), start=start, end=min(size, start + BLOCK_BYTES)))
            yield block

    def ranges(self, places: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Read parts of the objects below it, all at once: (rest of its name, first byte, number of bytes)."""
        paths, starts = [f"{self}/{name}" for name, *_ in places], [start for _, start, _ in places]
        with _asking(self, "read") as store:
            read = store.cat_ranges(paths, starts, [start + length for _, start, length in places], on_error="raise")
            for part in read:
                if isinstance(part, Exception):  # as older versions of fsspec give it
                    raise part
        for (name, start, length), part in zip(places, read, strict=True):
            if len(part) != length:
                raise CheckpointError(f"{self}/{name} ends before byte {start + length}; it is damaged, take another copy")
        return list(read)

    # -- writing

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Make sure that the store's package is here; folders there are none."""
        with _asking(self, "written"):
            pass

    def write_bytes(self, content: bytes) -> None:
        """Put a whole object in place of the old one."""
        with _asking(self, "written", missing=False) as store:
            store.pipe_file(str(self), content)

    def write(self) -> Upload:
        """Begin an object that is sent as it is written."""
        return Upload(self)

    def unlink(self) -> None:
        """Remove an object."""
        with _asking(self, "removed") as store:
            store.rm_file(str(self))

    def remove(self) -> None:
        """Remove every object below it."""
        with _asking(self, "removed") as store, suppress(FileNotFoundError):
            store.rm(str(self), recursive=True)


class Upload:
    """An object that is sent while it is written: there once it is closed."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        with _asking(path, "written", missing=False) as store:
            self._file = store.open(str(path), "wb")
        self._complete = False

    def write(self, data: Any) -> int:
        """Write, and send a part whenever enough has come together.

        Raises:
            CheckpointError: the store does not take it.
        """
        with _asking(self._path, "written", missing=False):
            return int(self._file.write(data))

    def close(self) -> None:
        """Send the rest.

        Raises:
            CheckpointError: the store does not take it.
        """
        with _asking(self._path, "written", missing=False):
            self._file.close()
        self._complete = True

    def discard(self) -> None:
        """Give up the parts that were sent, unless all were."""
        if self._complete:
            return
        with suppress(Exception):
            self._file.discard()
        with suppress(Exception):
            self._file.closed = True  # or the collector of garbage would send the rest


AnyPath = Path | StorePath


def is_address(path: object) -> bool:
    """Whether a path is rather the address of something."""
    return "://" in str(path)


def any_path(text: str) -> AnyPath:
    """Return the path, or the place in a store, that this text of our own means."""
    return StorePath(text) if is_address(text) else Path(text)


def store_path(address: str) -> StorePath:
    """Return a place in a store by the address that a user gave, once its protocol's package is found.

    Raises:
        OptionError: it is no address, it has a secret in it, or a package is missing.
        CheckpointError: the package does not take the credentials.
    """
    parts = ADDRESS.fullmatch(address)
    if parts is None or "::" in address:
        raise OptionError(f"an address in an object store looks like 's3://bucket/runs/1'; got {_without_secrets(address)[:100]!r}")
    if any(sign in address for sign in "*[]"):
        raise OptionError(
            f"an address in an object store has no '*', '[' or ']', which fsspec takes for patterns; got {address[:100]!r}"
        )
    if "?" in address or "#" in address or re.match(r"[^/]*:[^/]*@", parts[2]):
        raise OptionError(
            f"an address in an object store must have no password, '?' or '#': messages show it. Give {parts[1]}:// its "
            "credentials as its own package takes them, e.g. in environment variables or a file, on every node"
        )
    place = StorePath(address.rstrip("/"))
    place.mkdir()
    return place


def _store(protocol: str, path: StorePath) -> Any:
    """Return fsspec's file system of a protocol.

    Raises:
        OptionError: its package is not installed here.
    """
    if protocol in _stores:
        return _stores[protocol]
    here = f"{path} is reached by fsspec, from every node; on {platform.node()}"
    try:
        import fsspec
        from fsspec.registry import known_implementations
    except ImportError:
        raise OptionError(f"{here} it is not installed: pip install 'hfsdk[store]'") from None
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise OptionError(f"{here} it knows no {protocol}://; s3://, gs:// and abfs:// are some that it knows") from None
    except ImportError as error:
        package = known_implementations[protocol]["class"].split(".")[0]
        cure = f"pip install {package}" if package != "fsspec" else str(error)
        raise OptionError(f"{here} it lacks a package for {protocol}://: {cure}") from None
    more = {"auto_mkdir": True} if protocol == "local" else {}
    _stores[protocol] = kind(use_listings_cache=False, skip_instance_cache=True, **more)  # others write there too
    return _stores[protocol]


@contextmanager
def _asking(path: StorePath, done: str, *, missing: bool = True) -> Iterator[Any]:
    """Give the store, and turn its errors into ``CheckpointError``; with ``missing`` the caller gets ``FileNotFoundError``."""
    protocol = path.partition("://")[0]
    try:
        yield _store(protocol, path)
    except HfsdkError:
        raise
    except Exception as error:  # of whichever package
        if missing and isinstance(error, FileNotFoundError):
            raise FileNotFoundError(str(path)) from None
        _stores.pop(protocol, None)
        why = _without_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:MOST_CHARACTERS].rstrip(".")
        raise CheckpointError(
            f"{path} cannot be {done} from {platform.node()}: {why}. Check the address, the way to the store from this "
            "node, and what its credentials allow."
        ) from None


def _without_secrets(text: str) -> str:
    """Return a text without the passwords, tokens and signatures that an address may carry."""
    return re.sub(r"\?[^\s'\"]+", "?...", re.sub(r"://[^/\s'\"]*@", "://...@", text))
