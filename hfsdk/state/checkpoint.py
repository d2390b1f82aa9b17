"""Saving and loading a whole session.

::

    folder/
      session.json            the complete saves, and what each of their files must be (``hfsdk.state.checkpoint_index``)
      state-3/save.json       everything small of the last one
      state-3/actor/...       each trained role, in the format of megatron.core.dist_checkpointing: for any layout

A save writes a new ``state-N`` beside the old one and, when every file of it is complete, replaces ``session.json`` in one step, so
that the folder holds a complete save at every moment; older states are removed afterwards. A role's ranks write in the background
(``hfsdk.engine.training.checkpoint``), each its share: its pool is held only while they copy. Their checksums are made on
the way to the disk.

Nothing is removed or replaced but what the folder's own index, or the note of a save that was killed, names.

A store renames nothing: there a save is written under its name, which no other save has ever (``state-3-5f0c9a2e``), and is one
when ``session.json`` names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from hfsdk.core.arguments import Folder
from hfsdk.core.builtin import Method
from hfsdk.core.checks import is_whole
from hfsdk.core.errors import CheckpointError, HfsdkError, OptionError, SessionClosedError
from hfsdk.core.files import INDEX, SAVE, FileSum, check_files, existing_parent, is_ours, why_unwritten, write_file
from hfsdk.core.methods import LOAD_STATE, SAVE_STATE
from hfsdk.core.pending import Awaited
from hfsdk.core.roles import state_bytes
from hfsdk.core.store import AnyPath, StorePath
from hfsdk.core.system import can_start_threads
from hfsdk.core.text import printable
from hfsdk.engine.calls import messages as m
from hfsdk.engine.calls.host_memory import check_room
from hfsdk.engine.process.interrupts import held
from hfsdk.models import ModelHandle
from hfsdk.session.client import ControllerClient, uninterrupted
from hfsdk.session.context import Context
from hfsdk.session.placing import Deployment
from hfsdk.session.streams import StreamPlaces
from hfsdk.state.checkpoint_index import (
    Index,
    Listed,
    Save,
    files_in,
    folder_of,
    index_bytes,
    new_state,
    read_index,
    save_bytes,
    split,
    states_in,
    tell_of_anothers,
    tell_of_unfinished,
)
from hfsdk.state.folder_lock import Turns, lock_of
from hfsdk.state.history import HistoryLog

POLL_S = 0.02
"""The seconds between two looks at whether workers have written their files."""


class Saving(Awaited):
    """A save under way: the state is that of the moment ``save`` was called, whatever is trained meanwhile.

    Attributes:
        folder: the folder that is saved to; until it is complete, the folder holds the save before it.
    """

    def __init__(self, session: Saveable, folder: str | Path, keep: int, *, recovers: bool = True) -> None:
        """Name it; :meth:`run` or :meth:`run_in_background` starts it.

        Args:
            session: what is saved.
            folder: where to.
            keep: complete saves that the folder holds afterwards.
            recovers: whether roles come back from this save when a worker has died.
        """
        if not is_whole(keep) or keep < 1:
            raise OptionError(f"keep is how many complete saves the folder holds, at least 1; got keep={keep!r}")
        self.folder = folder_of(folder, "a save")
        self._session, self._keep, self._recovers = session, int(keep), recovers
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._looked = False
        self._trained = session.trained()
        self._calls: list[int] = []
        self._lock = lock_of(self.folder)
        self._names: list[str] = []
        """Names of folders that are not a save yet, or no longer: what a save after a kill may remove."""
        self._in_doubt = False
        """Whether a store was given the new index and has not answered: the next save sees which one is there."""

    def _begin(self) -> None:
        """Check what can be known before the ranks copy, make the new state's folder, and call them.

        Every role copies its state when its pool comes to it, in the order of the calls.
        """
        for handle in self._trained:
            self._session.deployment.ready(handle)
        self._session.turns.take(self)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        self._names = self._lock.left
        self._index = self._read_index()
        self._need_no_weights_there()
        tell_of_anothers(self.folder, self._session.context.notice)
        self._remove_what_is_left()
        tell_of_unfinished(self._index, self._names, self._session.context.notice)
        self._check_space()
        self._check_host_memory()
        number = 1 + max(states_in(self.folder), default=0)
        self._state, self._building = new_state(self.folder, number)
        self._names = [*self._names, self._building.name, self._state.name]
        self._lock.note(self._names)
        self._building.mkdir()
        self._session_state = json.loads(json.dumps(self._session.to_save(), default=_plain))
        _submit(self._session, self._trained, SAVE_STATE, Folder(folder=str(self._building)), self._calls)

    def _read_index(self) -> Index:
        if not (self.folder / INDEX).exists() and not (self.folder / INDEX).is_symlink():
            return Index(self.folder)
        try:
            return read_index(self.folder)
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot save to {self.folder}: there is a {INDEX} that hfsdk did not write, or it is damaged ({error}). Nothing "
                "was changed; move it away, or save to another folder."
            ) from None

    def _need_no_weights_there(self) -> None:
        """Keep a simulated session, which has no weights, from taking the place of those that a real one saved.

        Raises:
            CheckpointError: there are some.
        """
        if self._session.context.simulated:
            real = [listed.state for listed in self._index.saves if self._index.read(listed).has_weights]
            if real:
                raise CheckpointError(
                    f"cannot save to {self.folder}: {real[-1]} there has weights, and a simulated session has none to put in "
                    "their place; save to another folder."
                )

    def _check_space(self) -> None:
        """Refuse what cannot fit; the save before it stays until this one is complete.

        Raises:
            CheckpointError: says how much is needed and free.
        """
        if self._session.context.simulated or isinstance(self.folder, StorePath):
            return  # its files hold a number; what a store takes it does not say
        needed = sum(num_bytes(handle, handle.version > 0) for handle in self._trained)
        free = shutil.disk_usage(self.folder).free
        if free < needed + SPARE_BYTES:
            raise CheckpointError(
                f"cannot save to {self.folder}: the state takes {needed / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB free. "
                "The save before it, if there is one, is untouched. Free some space, or give a folder on another disk."
            )

    def _check_host_memory(self) -> None:
        """Refuse, or give a notice of, copies that hosts have not the memory for; they are there until all is written.

        Raises:
            CheckpointError: says how much is needed and free.
        """
        room = self._session.context.client.send(m.AskHostRoom(tuple(handle.name for handle in self._trained), unless_kept=False))
        advice = "Let snapshots go with session.forget(...), or place the roles over more nodes."
        if notice := check_room(room, f"the save to {self.folder}", advice):
            self._session.context.notice(notice)

    def run(self) -> None:
        """Save, and return when this is the folder's save.

        Raises:
            HfsdkError: it failed; the save before it is untouched.
        """
        self._guarded(self._begin, self._complete)

    def _guarded(self, *parts: Callable[[], None]) -> None:
        """Run parts of the save, the last one included; whatever happens, the folder is left to the next one."""
        with held(*_PASSING):
            try:
                with _disk_errors(self.folder):
                    for part in parts:
                        part()
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._release()
                self._over.set()

    def run_in_background(self) -> None:
        """Save in a thread once the roles have their calls to copy; :meth:`wait` says how it ended.

        Where no thread can be started it is over when this returns.

        Raises:
            HfsdkError: it cannot begin.
        """
        if not can_start_threads():
            self.run()
            return

        def run() -> None:
            with contextlib.suppress(BaseException):  # it is kept for whoever waits
                self._guarded(self._complete)

        thread = threading.Thread(target=run, name="hfsdk-save", daemon=True)
        with held(*_PASSING):
            try:
                with _disk_errors(self.folder):
                    self._begin()
                thread.start()
            except BaseException as error:
                if thread.ident is None:
                    self._looked = True  # by whoever called
                    try:
                        self._fail(error)
                    finally:
                        self._release()
                        self._over.set()
                raise

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        if not self._session.context.client.closed:
            _settle(self._session.context.client, self._calls)  # until then ranks may write

    def _complete(self) -> None:
        client = self._session.context.client
        results = _results(self._session, self._trained, self._calls)
        files: dict[str, FileSum] = {}
        for handle in self._trained:
            # the calls are over when the ranks have copied; their files are written behind them
            while (written := client.send(m.Saved(handle.name))) is None:
                time.sleep(POLL_S)
            files |= {f"{handle.name}/{name}": file_sum for name, file_sum in written.items()}
        for name in files_in(self._building):  # of a simulated session, which counts none
            if name not in files:
                files[name] = FileSum.of(self._building / name)
        updates = {name: _updates(result) for name, result in results.items()}
        roles = {h.name: {**identity(h), "num_updates": updates[h.name]} for h in self._trained}
        content = save_bytes(files, roles, self._session_state)
        older = self._older()
        total = FileSum(len(content), zlib.crc32(content))
        listed = Listed(self._state.name, total)
        index = index_bytes([*older, listed])
        write_file(self._building / SAVE, content)
        if isinstance(self._building, Path):
            # the index comes with the folder, so that putting it in place is one rename, also on a full disk
            write_file(self._building / INDEX, index)
            self._building.rename(self._state)
        else:
            check_files(self._building, {**files, SAVE: total}, parts=())  # that all nodes wrote into this store
        self._names = [*self._names, *(each.state for each in self._index.saves if each not in older)]
        self._lock.note(self._names)  # what the index names is kept all the same: it says until then that they are needed
        if isinstance(self._state, Path):
            os.replace(self._state / INDEX, self.folder / INDEX)
        else:
            self._in_doubt = True
            write_file(self.folder / INDEX, index)
            self._in_doubt = False
        is_ours(self.folder / INDEX, index)
        for handle in self._trained if self._recovers else ():
            client.send(m.Recover(handle.name, str(self._state), updates[handle.name]))

    def _older(self) -> list[Listed]:
        """Return the saves that stay beside this one; one of format 2 gets a ``save.json`` of its own."""
        older = (
            [listed for listed in self._index.saves if (self.folder / listed.state).is_dir()][1 - self._keep :]
            if self._keep > 1
            else []
        )
        if self._index.old is None:
            return older
        saves = []
        for listed in older:
            save = self._index.read(listed)
            content = save_bytes(save.files, save.roles, save.session)
            write_file(save.folder / SAVE, content)
            saves.append(Listed(listed.state, FileSum(len(content), zlib.crc32(content))))
        return saves

    def _remove_what_is_left(self) -> None:
        """Remove the folders that were noted and that the index does not name; what resists stays noted."""
        if self._in_doubt:
            return
        with contextlib.suppress(CheckpointError, OSError):
            named = {listed.state for listed in read_index(self.folder).saves} if (self.folder / INDEX).exists() else set()
            for name in self._names:
                path = self.folder / name
                if name in named or path.is_symlink():
                    continue
                if isinstance(path, StorePath):
                    path.remove()
                else:
                    shutil.rmtree(path, ignore_errors=True)
            late = self._failure is not None and isinstance(self.folder, StorePath)  # ranks may send until they hear of it
            self._names = [name for name in self._names if name not in named and (late or (self.folder / name).is_dir())]

    def _release(self) -> None:
        try:
            self._remove_what_is_left()
        finally:
            self._lock.release(keep=bool(self._names))
            self._session.turns.give(self)

    @property
    def done(self) -> bool:
        """Whether it is over, complete or failed."""
        return self._over.is_set()

    @property
    def looked(self) -> bool:
        """Whether someone has learned how it ended."""
        return self._looked

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the save is complete and return self; an interrupt ends the waiting only.

        Raises:
            TimeoutError: not complete after ``timeout`` seconds; it goes on.
            HfsdkError: the error that it failed with; the folder holds the save before it.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"the save to {self.folder} is not complete after {timeout:g} s; it goes on. Wait again.")
        self._looked = True
        if self._failure is not None:
            raise self._failure
        return self

    def settle(self) -> None:
        """Wait until it is over, however it ends."""
        self._over.wait()

    def __repr__(self) -> str:
        state = "saving" if not self.done else "saved" if self._failure is None else "failed"
        return printable(f"<{state}: {self.folder}>")


_PASSING = (Saving._begin.__code__, Saving._complete.__code__, ControllerClient.settle.__code__)
"""Functions in which a Ctrl-C ends a save: what they had begun is undone, and that is not interrupted."""


def load_session(session: Saveable, folder: str | Path) -> None:
    """Load what a save in a folder holds; see :meth:`hfsdk.state.saves.Saves.load`."""
    client, notice = session.context.client, session.context.notice
    client.check_open()
    root, state = split(folder_of(folder, "a checkpoint"))
    trained = session.trained()
    with _disk_errors(root, writes=False):
        save = _checked_save(session, root, state, trained)
    if not save.has_checksums:
        notice(f"{save.folder} was saved without checksums: damage inside its files is not seen; saving again adds them")
    calls: list[int] = []
    try:
        _submit(session, trained, LOAD_STATE, Folder(folder=str(save.folder), checked=True), calls)
        results = _results(session, trained, calls)
    except (HfsdkError, KeyboardInterrupt):
        _settle(client, calls)
        done = [h.name for h, call in zip(trained, calls, strict=False) if client.state(call) == "done"]
        if done:
            notice(f"{', '.join(done)} came from {save.folder} before loading ended: load it again, or another, or rewind")
        raise
    with uninterrupted():  # what roles come back from, numbers and history go over together
        for handle in trained:
            client.send(m.Recover(handle.name, str(save.folder), _updates(results[handle.name])))
        session.take(save.session)


def _checked_save(session: Saveable, root: AnyPath, state: str, trained: Sequence[ModelHandle]) -> Save:
    """Return the save of this name (the last one for ``""``) once all of it was compared.

    Raises:
        CheckpointError: it is damaged, not there, or of other roles.
    """
    while True:
        index = read_index(root)
        listed = index.find(state) if state else index.saves[-1]
        try:
            save = index.read(listed)
            for handle in trained:
                session.deployment.ready(handle)  # layouts are known once it is placed
            check_roles(root, save.roles, trained)
            check_files(save.folder, save.files)
            return save
        except CheckpointError as error:
            if not state and read_index(root) != index:
                continue  # another process has saved here meanwhile, and removed the one before
            raise CheckpointError(f"{error}{_others(index, listed)}") from error


def _others(index: Index, damaged: Listed) -> str:
    """Name the other saves whose files are there."""
    states = []
    for listed in index.saves:
        if listed != damaged:
            with contextlib.suppress(CheckpointError):
                save = index.read(listed)
                check_files(save.folder, save.files, parts=())
                states.append(listed.state)
    if not states:
        return ""
    return f" Other complete saves there: {', '.join(states)}; session.load({str(index.root / states[-1])!r}) loads that one."


@contextlib.contextmanager
def _disk_errors(folder: AnyPath, writes: bool = True) -> Iterator[None]:
    """Raise what the disk refuses as a CheckpointError."""
    what = "save to" if writes else "load from"
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"cannot {what} {folder}: {why_unwritten(folder, error) if writes else error.strerror or error}"
        ) from error


def _plain(value: object) -> object:
    """Return a number that an algorithm or a metric has counted with numpy as JSON takes it."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _submit(session: Saveable, handles: list[ModelHandle], method: Method, arguments: Folder, calls: list[int]) -> None:
    """Call a checkpoint method of several roles, adding to ``calls``; their ranks write into, and read from, ``folder/<name>``."""
    for handle in handles:
        session.deployment.ready(handle)
        calls.append(session.context.client.submit(m.Submit.of(handle.name, method, arguments)).call_id)


def _results(session: Saveable, handles: list[ModelHandle], calls: list[int]) -> dict[str, Any]:
    """Wait for such calls and return what each role answered."""
    session.context.client.wait(calls, None)
    return {handle.name: session.context.client.result(call) for handle, call in zip(handles, calls, strict=True)}


def _settle(client: ControllerClient, calls: list[int]) -> None:
    """Wait until such calls are over; saving or loading raises the first failure, and no later call the others."""
    client.settle(calls)
    with contextlib.suppress(SessionClosedError):
        client.send(m.AcknowledgeFailures(tuple(calls)))


def _updates(result: Any) -> int:
    return int(result.get("num_updates", 0)) if isinstance(result, Mapping) else 0


# -- the roles of a checkpoint, and the facts of them that must agree with the session's


def identity(handle: ModelHandle) -> dict[str, Any]:
    """Return the facts that must agree between a checkpoint and the role it is loaded into."""
    role = handle.role
    assert role.model is not None
    model = {k: v for k, v in asdict(role.model).items() if k != "name" and v is not None}  # older saves lack newer fields
    lora = None if role.lora is None else {k: v for k, v in asdict(role.lora).items() if k != "seed"}
    return {
        "kind": role.kind, "model": model, "name": str(role.model), "layout": str(role.train), "dtype": role.dtype, "lora": lora,
    }  # fmt: skip


def check_roles(root: AnyPath, saved: Mapping[str, Any], trained: Sequence[ModelHandle]) -> None:
    """Check that the roles of a checkpoint are those of the session.

    Raises:
        CheckpointError: names what differs, and what to do.
    """
    own = {h.name: identity(h) for h in trained}
    missing = [name for name in saved if name not in own]
    if missing:
        names = ", ".join(missing)
        raise CheckpointError(f"the checkpoint in {root} has {names}, which the session does not; declare {missing[0]} first")
    extra = [name for name in own if name not in saved]
    if extra:
        names = f"{', '.join(extra)}; it has {', '.join(saved)}"
        raise CheckpointError(f"the checkpoint in {root} has no {names}. Release {extra[0]} first.")
    for name, role in own.items():
        for key, words in (("kind", "kind"), ("model", "model"), ("dtype", "dtype"), ("lora", "LoRA")):
            if _as_json(saved[name].get(key)) != _as_json(role[key]):
                old = saved[name]["name"] if key == "model" else saved[name].get(key)
                new = role["name"] if key == "model" else role[key]
                detail = _differences(saved[name]["model"], role["model"]) if key == "model" else ""
                raise CheckpointError(
                    f"the checkpoint in {root} has {name} with {words} {old!r}; the session has {new!r}{detail}. "
                    "Declare the role as it was saved; only its layout may be another."
                )


def _as_json(value: Any) -> Any:
    """Return a value as JSON has it."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in value.items()} if isinstance(value, Mapping) else value


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    differences = [f"{k} {old.get(k)} -> {new.get(k)}" for k in new if old.get(k) != new.get(k)]
    return f" ({', '.join(differences)})"


# -- the part of a session that a checkpoint keeps, and takes the place of when it is loaded


@dataclass(eq=False)
class Saveable:
    """The part of a session that is saved and loaded, and the turns of those who save it."""

    context: Context
    deployment: Deployment
    places: StreamPlaces
    log: HistoryLog
    turns: Turns = field(default_factory=Turns)
    """The turns of the threads that save this session."""

    def trained(self) -> list[ModelHandle]:
        """Return the roles whose weights are saved."""
        return [handle for handle in self.deployment.book if handle.role.trainable]

    def to_save(self) -> dict[str, Any]:
        """Return a checkpoint's content besides weights."""
        context = self.context
        positions = self.places.positions()
        return {"seed": context.seed, "counters": context.kept_counters(), "positions": positions, **self.log.to_save()}

    def take(self, saved: Mapping[str, Any]) -> None:
        """Take over a checkpoint's content besides weights."""
        self.context.seed = int(saved["seed"])
        self.context.counters.replace(saved["counters"])
        self.log.take(saved)
        self.places.take(saved["positions"])


# -- whether a save will fit: said before anything is written

SPARE_BYTES = 1 << 20
"""The bytes of a save beside the numbers: indexes of files, the history."""


def check_space(session: Saveable, folder: AnyPath, num_saves: int, keep: int) -> None:
    """Refuse a run whose saves would not fit, before it begins; the one before stays until a new one is complete.

    A store is asked whether it answers: how much it takes it does not say.

    Raises:
        CheckpointError: says how much the saves take and how much is free.
    """
    if isinstance(folder, StorePath):
        folder.exists()
        return
    if session.context.simulated or not num_saves:
        return
    each = sum(num_bytes(handle, stepped=True) for handle in session.trained())
    there = len(states_in(folder)) if folder.is_dir() else 0
    # the oldest save goes only when a new one is complete: keep + 1 at a time
    more = max(1, min(num_saves, keep + 1 - there))
    needed, free = more * each + SPARE_BYTES, shutil.disk_usage(existing_parent(folder)).free
    if free < needed:
        raise CheckpointError(
            f"the saves of this run would not fit into {folder}: each takes {each / 1e6:,.1f} MB, with keep={keep} there are up to "
            f"{keep + 1} at a time, and the disk has {free / 1e6:,.1f} MB free. Free some space, or give a folder on another disk."
        )


def num_bytes(handle: ModelHandle, stepped: bool) -> int:
    """Return the bytes of a role's state in a save."""
    assert handle.role.learned is not None
    return handle.role.learned.num_parameters() * state_bytes(handle.role.dtype, stepped)
