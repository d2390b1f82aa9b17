"""The index of a folder of saves: read and checked as a whole before anything is believed.

::

    folder/
      session.json              the complete saves, the last one last, each with the checksum of its save.json
      state-3/save.json         every file of this save with size and checksum, its roles, the session's counters and history
      state-3/actor/...         a trained role (``hfsdk.engine.training.checkpoint``)

Format 2 had one save and no checksums: its ``session.json`` was the ``save.json`` as well.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hfsdk.core.checks import is_whole
from hfsdk.core.errors import CheckpointError, OptionError
from hfsdk.core.files import (
    FORMAT,
    INDEX,
    MOST_BYTES,
    SAVE,
    WITHOUT_CHECKSUMS,
    FileSum,
    as_path,
    content_of,
    is_ours,
    is_strangers,
    parse_files,
)
from hfsdk.core.store import AnyPath, StorePath, is_address, store_path
from hfsdk.core.untrusted import absolute, parse_json, shown_reason
from hfsdk.engine.controller.records import MAIN

STATE = re.compile(r"state-([0-9]{1,18})(-[0-9a-f]{8})?")
"""Name of a save's folder; ``.partial`` behind it while it is built. In a store a random end makes it one that none had before."""

BEST = "best"
"""Name of the folder, in a run's, of its best save."""

MOST_PARTS = 1 << 26
"""The number of values in an index: many times those of a history of 100,000 steps."""

_reported: set[AnyPath] = set()
"""Unfinished saves of which a notice was given."""

MOST = 2**62
"""The largest counter or place in a stream."""


@dataclass(frozen=True)
class Listed:
    """A save as the index names it."""

    state: str
    """Name of its folder."""
    sum: FileSum | None
    """The size and checksum of its ``save.json``; ``None`` in format 2."""


@dataclass(frozen=True)
class Save:
    """One complete save; everything in it has been checked but for the files themselves."""

    folder: AnyPath
    files: Mapping[str, FileSum]
    roles: Mapping[str, Mapping[str, Any]]
    session: Mapping[str, Any]

    @property
    def has_checksums(self) -> bool:
        """Whether damage inside the files would be seen."""
        return all(noted.crc32 is not None for noted in self.files.values())

    @property
    def has_weights(self) -> bool:
        """Whether a session with workers saved it; a simulated one has only numbers to keep."""
        return any(name.endswith(".distcp") for name in self.files)


@dataclass(frozen=True)
class Index:
    """The complete saves in a folder, the oldest first."""

    root: AnyPath
    saves: tuple[Listed, ...] = ()
    old: Mapping[str, Any] | None = None
    """The content of a ``session.json`` of format 2."""

    def find(self, state: str) -> Listed:
        """Return a save by the name of its folder.

        Raises:
            CheckpointError: the index does not name it.
        """
        for listed in self.saves:
            if listed.state == state:
                return listed
        there = ", ".join(listed.state for listed in self.saves)
        raise CheckpointError(f"{self.root} has no complete save {state}; its {INDEX} names {there}")

    def read(self, listed: Listed) -> Save:
        """Read and check what a save says of itself.

        Raises:
            CheckpointError: it is missing, damaged, or not what the index means.
        """
        folder = self.root / listed.state
        if self.old is not None:
            return _save(folder, self.root / INDEX, self.old)
        file = folder / SAVE
        content = _read(file, f"the checkpoint in {self.root} is incomplete: {file} is missing; take another copy")
        if FileSum(len(content), zlib.crc32(content)) != listed.sum:
            raise CheckpointError(f"the checkpoint is damaged: {file} is not the file that was saved; take another copy")
        return _save(folder, file, _parse(file, content))


def folder_of(folder: Any, what: str) -> AnyPath:
    """Return a folder as an absolute path, or as a place in a store.

    Raises:
        OptionError: it is no path and no address, or a package is missing.
        CheckpointError: there can be none of this name.
    """
    if isinstance(folder, str) and folder.startswith("file://"):
        folder = re.sub("^/(?=[A-Za-z]:)", "", unquote(urlsplit(folder).path))
    if isinstance(folder, str) and is_address(folder):
        return store_path(folder)
    if isinstance(folder, Path) and re.match(r"[a-z0-9+.-]{2,}:$", folder.parts[0] if folder.parts else ""):
        raise OptionError(f"a pathlib.Path loses a slash of an address; give it as a text: {folder.parts[0]}//... (got {folder})")
    return absolute(as_path(folder, what), error=CheckpointError)


def split(folder: AnyPath) -> tuple[AnyPath, str]:
    """Return the folder of saves and the save in it that a path means: ``"runs/a/state-2"``, or ``"runs/a"`` for the last."""
    is_save = STATE.fullmatch(folder.name) and (folder.parent / INDEX).is_file() and not (folder / INDEX).is_file()
    return (folder.parent, folder.name) if is_save else (folder, "")


def read_index(root: AnyPath) -> Index:
    """Read and check ``session.json``.

    Raises:
        CheckpointError: there is none, it is damaged, or not hfsdk's.
    """
    file = root / INDEX
    unfinished = root.is_dir() and any(STATE.match(path.name) for path in root.iterdir())
    what = "an unfinished save" if unfinished else "no checkpoint"
    missing = f"{root} holds {what} (there is no {INDEX}); give a folder that session.save(folder) finished"
    index = _parse(file, _read(file, missing))
    with _checking(file):
        _need(isinstance(index, dict), "it", "an object")
        if index.get("format") == WITHOUT_CHECKSUMS:
            _need(_is_state(index.get("state")), "state", "one like 'state-1'")
            return Index(root, (Listed(index["state"], None),), index)
        if is_whole(index.get("format")) and index["format"] != FORMAT:
            here = f"this version of hfsdk reads formats {WITHOUT_CHECKSUMS} and {FORMAT}"
            raise CheckpointError(f"{file} has format {str(index['format'])[:20]}; {here}")
        _need(index.get("format") == FORMAT, "format", f"{FORMAT}")
        saves = index.get("saves")
        _need(isinstance(saves, list) and saves, "saves", "a list of at least one save")
        listed = []
        for save in saves:
            _need(isinstance(save, list) and len(save) == 3 and _is_state(save[0]), "a save", "['state-1', bytes, checksum]")
            _need(_is_count(save[1]) and _is_count(save[2]), "a save", "['state-1', bytes, checksum]")
            listed.append(Listed(save[0], FileSum(save[1], save[2])))
        _need(len({each.state for each in listed}) == len(listed), "saves", "each named once")
        return Index(root, tuple(listed))


def save_bytes(files: Mapping[str, FileSum], roles: Mapping[str, Any], session: Mapping[str, Any]) -> bytes:
    """Return the content of a ``save.json``, checked as it will be when it is read: what is saved can be loaded.

    Raises:
        CheckpointError: it could not be.
    """
    noted = {name: [file_sum.num_bytes, file_sum.crc32] for name, file_sum in files.items()}
    content = {"format": FORMAT, "files": noted, "roles": roles, "session": session}
    try:
        _save(Path(), Path(SAVE), content)
    except CheckpointError as error:
        raise CheckpointError(f"this session cannot be saved: {error}") from None
    written = json.dumps(content, indent=1).encode()
    if len(written) > MOST_BYTES:
        rows = len(session["history"])
        raise CheckpointError(
            f"this session cannot be saved: the {rows:,} rows of its history take {len(written) / 1e6:,.0f} MB, more than the "
            f"{MOST_BYTES / 1e6:,.0f} MB that a save holds. session.history.to_pandas() keeps them; go on in a new session from "
            "actor.save_pretrained(folder)."
        )
    return written


def index_bytes(saves: Iterable[Listed]) -> bytes:
    """Return the content of a ``session.json``."""
    noted = [[save.state, save.sum.num_bytes, save.sum.crc32] for save in saves if save.sum is not None]
    return json.dumps({"format": FORMAT, "saves": noted}, indent=1).encode()


# -- reading


def _read(file: AnyPath, missing: str) -> bytes:
    try:
        return content_of(file)
    except FileNotFoundError:
        raise CheckpointError(missing) from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error


def _parse(file: AnyPath, content: bytes) -> Any:
    try:
        return parse_json(content, most_parts=MOST_PARTS)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{file} is damaged: {shown_reason(error)}") from None


def _save(folder: AnyPath, file: AnyPath, content: Any) -> Save:
    with _checking(file):
        _need(isinstance(content, dict), "it", "an object")
        try:
            files = parse_files(content.get("files"))
        except ValueError as error:
            raise _WrongError(str(error)) from None
        roles, session = content.get("roles"), content.get("session")
        _need(isinstance(roles, dict), "roles", "an object")
        for name, role in roles.items():
            _check_role(name, role)
        for name in files:
            _need("/" not in name or name.split("/")[0] in roles, f"the file {name[:100]!r}", "in a role's folder")
        _need(isinstance(session, dict), "session", "an object")
        _check_session(session)
        return Save(folder, files, roles, session)


class _WrongError(Exception):
    """A part of an index is not what it must be."""


@contextmanager
def _checking(file: AnyPath) -> Iterator[None]:
    """Raise what is wrong inside as damage of a file."""
    try:
        yield
    except _WrongError as error:
        raise CheckpointError(f"{file} is damaged or was not written by hfsdk: {error}") from None


def _need(fits: object, what: str, wanted: str) -> None:
    if not fits:
        raise _WrongError(f"{what} must be {wanted}")


def _is_state(value: object) -> bool:
    return isinstance(value, str) and STATE.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < MOST  # type: ignore[arg-type]


def _check_role(name: str, role: Any) -> None:
    _need(isinstance(role, dict), f"the role {name!r}", "an object")
    _need(name and "/" not in name and "\\" not in name and name not in (".", ".."), f"the role {name[:100]!r}", "a plain name")
    for key in ("kind", "name", "layout", "dtype"):
        _need(isinstance(role.get(key), str), f"{name}.{key}", "a text")
    _need(isinstance(role.get("model"), dict), f"{name}.model", "an object")
    _need(_is_count(role.get("num_updates", 0)), f"{name}.num_updates", "a whole number of at least 0")


def _check_session(session: Mapping[str, Any]) -> None:
    _need(type(session.get("seed")) is int and abs(session["seed"]) < 2**128, "session.seed", "a whole number")
    counters, positions = session.get("counters"), session.get("positions")
    _need(isinstance(counters, dict) and all(map(_is_number, counters.values())), "session.counters", "numbers by name")
    _need(isinstance(positions, dict) and all(map(_is_count, positions.values())), "session.positions", "whole numbers by stream")
    rows: Any = session.get("history")
    sources: Any = session.get("sources", {})
    _need(isinstance(rows, list) and all(isinstance(row, dict) for row in rows), "session.history", "a list of rows")
    _need(isinstance(sources, dict) and all(isinstance(x, str) for x in sources.values()), "session.sources", "texts by function")
    names = _check_branches(session.get("branches", []), len(rows))
    now = session.get("branch", MAIN)
    _need(isinstance(now, str) and now in names, "session.branch", "one of session.branches")
    for row in rows:
        _check_row(row, names)


def _check_branches(branches: Any, num_rows: int) -> set[str]:
    """Check the branches, and that each comes from the first one by its parents; return their names."""
    _need(isinstance(branches, list), "session.branches", "a list")
    parents = {MAIN: ""}
    for branch in branches:
        form = "[name, parent, snapshot, rows before it]"
        _need(isinstance(branch, list) and len(branch) == 4, "a branch", form)
        _need(all(isinstance(text, str) for text in branch[:3]) and branch[0], "a branch", form)
        _need(_is_count(branch[3]) and branch[3] <= num_rows, "a branch", form)
        parents[branch[0]] = branch[1]
    _need(len(branches) == len({branch[0] for branch in branches}), "session.branches", "each named once")
    # walk from each branch to one that is known to end at the root; meeting a name again on the way is a cycle
    rooted = {""}
    for name in parents:
        line = []
        while name not in rooted:
            _need(name in parents, "a branch's parent", "a branch")
            _need(name not in line, "session.branches", "without cycles")
            line.append(name)
            name = parents[name]
        rooted.update(line)
    return rooted - {""}


def _check_row(row: Mapping[str, Any], branches: set[str]) -> None:
    _need(row.get("kind", "step") in ("step", "update"), "a row's kind", "'step' or 'update'")
    branch = row.get("branch", MAIN)
    _need(isinstance(branch, str) and branch in branches, "a row's branch", "one of session.branches")
    for key in ("parent", "snapshot", "algorithm", "role", "line", "loss_function"):
        _need(row.get(key) is None or isinstance(row[key], str), f"a row's {key}", "a text")
    for key in ("step", "score_mean", "kl_mean", "updates"):
        value = row.get(key)
        fits = value is None or _is_number(value) or (isinstance(value, float) and not math.isfinite(value))
        _need(fits, f"a row's {key}", "a number")


def files_in(folder: AnyPath) -> list[str]:
    """Return every file of a folder, those of its folders included, by its path in it."""
    if isinstance(folder, StorePath):
        return sorted(folder.sizes())
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def states_in(root: AnyPath) -> Sequence[int]:
    """Return the numbers of all folders that look like saves, complete or not, ours or not."""
    matches = (STATE.match(path.name) for path in root.iterdir())
    return [int(match[1]) for match in matches if match]


def new_state(root: AnyPath, number: int) -> tuple[AnyPath, AnyPath]:
    """Return where a new save will be, and where it is built."""
    if isinstance(root, StorePath):
        state = root / f"state-{number}-{secrets.token_hex(4)}"
        return state, state
    return root / f"state-{number}", root / f"state-{number}.partial"


def tell_of_unfinished(index: Index, ours: Collection[str], notice: Callable[[str], None]) -> None:
    """Report of a store, once, the folders that no index names: nobody knows whether they are still being written."""
    if not isinstance(index.root, StorePath):
        return
    named = {*ours, *(save.state for save in index.saves)}
    left = [
        path for path in index.root.iterdir() if STATE.fullmatch(path.name) and path.name not in named and path not in _reported
    ]
    _reported.update(left)
    if left:
        notice(
            f"{index.root} has objects of unfinished saves, {', '.join(path.name for path in left)}: another process saves there "
            "now, or was killed while it did. hfsdk leaves them; if nothing saves there, remove them with the store's own tools"
        )


def tell_of_anothers(root: AnyPath, notice: Callable[[str], None]) -> None:
    """Say, once, that a folder has a save which this process neither made nor loaded: the next one there may remove it."""
    index = root / INDEX
    with suppress(CheckpointError):  # of one that cannot be read saving itself tells
        if is_strangers(index) and (saves := read_index(root).saves):
            notice(
                f"{root} has a save of another session, {saves[-1].state}: a save to this folder takes its place. "
                f"session.load({str(root)!r}) goes on from it; give another folder to keep it"
            )
            is_ours(index)
