"""Saving and loading a whole session.

::

    folder/
      session.json            which state is the last complete one, and everything small
      state-3/actor/...       each trained role, as its ranks write it

A save writes a new ``state-N`` beside the old one and then replaces ``session.json`` in one step, so that the folder holds a
complete save at every moment; older states are removed afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfsdk.engine import messages as m
from hfsdk.errors import CheckpointError
from hfsdk.protocol import ONE_TO_ALL

if TYPE_CHECKING:
    from hfsdk.models import ModelHandle
    from hfsdk.session.session import Session

FORMAT = 1
"""Version of the format."""

INDEX = "session.json"


def save_session(session: Session, folder: str | Path) -> Path:
    """Save a session; see ``Session.save``."""
    session.client.check_open()
    root = Path(folder).expanduser().resolve()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot save to {root}: {error}") from error
    number = 1 + max([int(p.name[6:].split(".")[0]) for p in root.glob("state-*") if p.name[6:].split(".")[0].isdigit()], default=0)
    building, state = root / f"state-{number}.partial", root / f"state-{number}"
    try:
        building.mkdir()
        trained = [h for h in session.roles if h.role.trainable]
        results = _on_roles(session, trained, "save_state", building)
        index = _index(session, trained, results, state.name, building)
        building.rename(state)
    except OSError as error:
        raise CheckpointError(f"cannot save to {root}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    fresh = root / f"{INDEX}.partial"
    fresh.write_text(json.dumps(index, indent=1))
    os.replace(fresh, root / INDEX)
    for handle in trained:
        session.client.send(m.Recover(handle.name, str(state)))
    for old in root.glob("state-*"):
        if old.name != state.name:
            shutil.rmtree(old, ignore_errors=True)
    return root


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
    _on_roles(session, trained, "load_state", state)
    for handle in trained:
        session.client.send(m.Recover(handle.name, str(state)))
    session.restore(index["session"])


def _on_roles(session: Session, handles: list[ModelHandle], method: str, folder: Path) -> dict[str, Any]:
    """Call a checkpoint method of several roles, then wait for all."""
    leases = []
    for handle in handles:
        session.ready(handle)  # its ranks write into, and read from, folder/<name>
        message = m.Submit(handle.name, method, "checkpoint", {}, (), 0, ONE_TO_ALL, {"folder": str(folder)})
        leases.append(session.client.submit(message))
    session.client.wait([lease.call_id for lease in leases], None)
    return {h.name: session.client.result(lease.call_id) for h, lease in zip(handles, leases, strict=True)}


def _index(session: Session, trained: list[ModelHandle], results: Mapping[str, Any], state: str, folder: Path) -> dict[str, Any]:
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    roles = {h.name: {**_identity(h), "num_updates": _updates(results[h.name])} for h in trained}
    return {"format": FORMAT, "state": state, "files": files, "roles": roles, "session": session.persistent()}


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
        for key, words in (("kind", "kind"), ("model", "model"), ("layout", "layout"), ("dtype", "dtype")):
            if saved[name][key] != role[key]:
                old = saved[name]["name"] if key == "model" else saved[name][key]
                new = role["name"] if key == "model" else role[key]
                detail = _differences(saved[name]["model"], role["model"]) if key == "model" else ""
                raise CheckpointError(
                    f"the checkpoint in {root} has {name} with {words} {old!r}; the session has {new!r}{detail}. "
                    "Declare the role as it was saved; to change the layout go through save_pretrained."
                )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    found = [f"{k} {old.get(k)} -> {new.get(k)}" for k in new if old.get(k) != new.get(k)]
    return f" ({', '.join(found)})"
