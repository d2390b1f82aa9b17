"""Saving and loading a whole session.

::

    folder/
      session.json            which state is the last complete one, and everything small
      state-3/actor/...       each trained role, in the format of megatron.core.dist_checkpointing: for any layout

A save writes a new ``state-N`` beside the old one and, when every file of it is complete, replaces ``session.json`` in one step, so
that the folder holds a complete save at every moment; older states are removed afterwards. A role's ranks write in the background
(``hfsdk.engine.megatron_checkpoint``): its pool is held only while they copy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hfsdk.engine import messages as m
from hfsdk.errors import CheckpointError
from hfsdk.pending import Awaited
from hfsdk.protocol import ONE_TO_ALL

if TYPE_CHECKING:
    from hfsdk.models import ModelHandle
    from hfsdk.session.session import Session

FORMAT = 2
"""Version of the format."""

INDEX = "session.json"

POLL_S = 0.05
"""How often workers are asked whether their files are written."""


class Saving(Awaited):
    """A save under way: the state is that of the moment ``save`` was called, whatever is trained meanwhile.

    Attributes:
        folder: where it goes; until it is complete, the folder holds the save before it.
    """

    def __init__(self, session: Session, folder: str | Path) -> None:
        """Start it: every role copies its state when its pool comes to it, in the order of the calls."""
        self.folder = Path(folder).expanduser().resolve()
        self._session = session
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._looked = False
        numbers = [path.name[6:].split(".")[0] for path in self.folder.glob("state-*")]
        number = 1 + max((int(text) for text in numbers if text.isdigit()), default=0)
        self._building, self._state = self.folder / f"state-{number}.partial", self.folder / f"state-{number}"
        try:
            self._building.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"cannot save to {self.folder}: {error}") from error
        self._trained = [h for h in session.roles if h.role.trainable]
        try:
            self._kept = json.loads(json.dumps(session.persistent()))
            self._calls = _submit(session, self._trained, "save_state", self._building)
        except BaseException:
            shutil.rmtree(self._building, ignore_errors=True)
            raise

    def run(self) -> None:
        """Wait for the copies and the files, then make this the folder's save; called once, on any thread.

        Raises:
            HfsdkError: it failed; the save before it is untouched.
        """
        try:
            self._complete()
        except BaseException as error:
            self._failure = error
            self._session.client.settle(self._calls)
            raise
        finally:
            shutil.rmtree(self._building, ignore_errors=True)
            self._over.set()

    def run_in_background(self) -> None:
        """Start a thread that calls :meth:`run`; :meth:`wait` tells how it ended."""

        def run() -> None:
            with contextlib.suppress(BaseException):  # it is kept for whoever waits
                self.run()

        threading.Thread(target=run, name="hfsdk-save", daemon=True).start()

    def _complete(self) -> None:
        client = self._session.client
        results = _results(self._session, self._trained, self._calls)
        for handle in self._trained:
            while not client.send(m.Saved(handle.name)):
                time.sleep(POLL_S)
        updates = {name: _updates(result) for name, result in results.items()}
        roles = {h.name: {**_identity(h), "num_updates": updates[h.name]} for h in self._trained}
        paths = [path for path in sorted(self._building.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(self._building)): path.stat().st_size for path in paths}
        index = {"format": FORMAT, "state": self._state.name, "files": files, "roles": roles, "session": self._kept}
        fresh = self.folder / f"{INDEX}.partial"
        try:
            self._building.rename(self._state)
            with fresh.open("w") as file:
                json.dump(index, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self.folder / INDEX)
        except OSError as error:
            raise CheckpointError(f"cannot save to {self.folder}: {error}") from error
        for handle in self._trained:
            client.send(m.Recover(handle.name, str(self._state), updates[handle.name]))
        for old in self.folder.glob("state-*"):
            if old.name != self._state.name:
                shutil.rmtree(old, ignore_errors=True)

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
            HfsdkError: what it failed with; the folder holds the save before it.
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
        return f"<{state}: {self.folder}>"


def load_session(session: Session, folder: str | Path) -> None:
    """Load a session; see ``Session.load``."""
    session.client.check_open()
    root = Path(folder).expanduser().resolve()
    index = _read_index(root)
    state = root / index["state"]
    _check_files(root, state, index["files"])
    trained = [h for h in session.roles if h.role.trainable]
    for handle in trained:
        session.ready(handle)  # layouts are known once it is placed
    _check_roles(root, index["roles"], trained)
    results = _results(session, trained, _submit(session, trained, "load_state", state))
    for handle in trained:
        session.client.send(m.Recover(handle.name, str(state), _updates(results[handle.name])))
    session.restore(index["session"])


def _submit(session: Session, handles: list[ModelHandle], method: str, folder: Path) -> list[int]:
    """Call a checkpoint method of several roles; their ranks write into, and read from, ``folder/<name>``."""
    calls = []
    for handle in handles:
        session.ready(handle)
        message = m.Submit(handle.name, method, "checkpoint", {}, (), 0, ONE_TO_ALL, {"folder": str(folder)})
        calls.append(session.client.submit(message).call_id)
    return calls


def _results(session: Session, handles: list[ModelHandle], calls: list[int]) -> dict[str, Any]:
    """Wait for such calls and return what each role answered."""
    session.client.wait(calls, None)
    return {handle.name: session.client.result(call) for handle, call in zip(handles, calls, strict=True)}


def _identity(handle: ModelHandle) -> dict[str, Any]:
    """What must agree between a checkpoint and the role it is loaded into."""
    role = handle.role
    assert role.model is not None
    model = {k: v for k, v in asdict(role.model).items() if k != "name"}
    return {"kind": role.kind, "model": model, "name": str(role.model), "layout": str(role.train), "dtype": role.dtype}


def _updates(result: Any) -> int:
    return int(result.get("num_updates", 0)) if isinstance(result, Mapping) else 0


def _read_index(root: Path) -> dict[str, Any]:
    file = root / INDEX
    if not file.is_file():
        partial = list(root.glob("state-*")) if root.is_dir() else []
        what = "an unfinished save" if partial else "no checkpoint"
        raise CheckpointError(f"{root} holds {what} (there is no {INDEX}); give a folder that session.save(folder) finished")
    try:
        index: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if index.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {index.get('format')}; this version of hfsdk reads format {FORMAT}")
    return index


def _check_files(root: Path, state: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        path = state / name
        if not path.is_file():
            raise CheckpointError(f"the checkpoint in {root} is incomplete: {state.name}/{name} is missing; take another copy")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"the checkpoint in {root} is damaged: {state.name}/{name} has {path.stat().st_size} bytes, {size} were saved; "
                "take another copy"
            )


def _check_roles(root: Path, saved: Mapping[str, Any], trained: list[ModelHandle]) -> None:
    mine = {h.name: _identity(h) for h in trained}
    missing = [name for name in saved if name not in mine]
    if missing:
        names = ", ".join(missing)
        raise CheckpointError(f"the checkpoint in {root} has {names}, which the session does not; declare {missing[0]} first")
    extra = [name for name in mine if name not in saved]
    if extra:
        names = f"{', '.join(extra)}; it has {', '.join(saved)}"
        raise CheckpointError(f"the checkpoint in {root} has no {names}. Release {extra[0]} first.")
    for name, role in mine.items():
        for key, words in (("kind", "kind"), ("model", "model"), ("dtype", "dtype")):
            if saved[name][key] != role[key]:
                old = saved[name]["name"] if key == "model" else saved[name][key]
                new = role["name"] if key == "model" else role[key]
                detail = _differences(saved[name]["model"], role["model"]) if key == "model" else ""
                raise CheckpointError(
                    f"the checkpoint in {root} has {name} with {words} {old!r}; the session has {new!r}{detail}. "
                    "Declare the role as it was saved; only its layout may be another."
                )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    found = [f"{k} {old.get(k)} -> {new.get(k)}" for k in new if old.get(k) != new.get(k)]
    return f" ({', '.join(found)})"
