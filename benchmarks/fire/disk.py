"""A full disk: a small tmpfs where one may be mounted, or a limit on the size of files.

The last complete save stays, and nothing half-written does.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fire.stage import Stage, ground, typed
from fire.trials import Note, TrialError

__all__ = ["CEILING_S", "ground", "trial"]

CEILING_S = 240.0

SPARE_BYTES = 64 * 2**20
"""What the disk has beyond two checkpoints: models, reports."""


def _save(stage: Stage, folder: Path) -> None:
    stage.session.save(folder / "checkpoint")


def _save_behind(stage: Stage, folder: Path) -> None:
    stage.session.save(folder / "checkpoint", wait=False).wait()


def _first_save(stage: Stage, folder: Path) -> None:
    stage.session.save(folder / "another")


def _train(stage: Stage, folder: Path) -> None:
    import hfsdk as hf

    stage.session.train(
        hf.PPO(max_new_tokens=4), stage.prompts, steps=1, save_every=1, folder=folder / "checkpoint", progress=False
    )  # fmt: skip


def _pretrained(stage: Stage, folder: Path) -> None:
    stage.actor.save_pretrained(folder / "model")


def _pretrained_again(stage: Stage, folder: Path) -> None:
    stage.critic.save_pretrained(folder / "written")


def _report(stage: Stage, folder: Path) -> None:
    stage.session.report(folder / "report.html")


def _trace(stage: Stage, folder: Path) -> None:
    stage.session.trace.snapshot().to_perfetto(folder / "trace.json")


DEEDS: dict[str, Callable[[Stage, Path], Any]] = {
    "save": _save, "save behind": _save_behind, "first save": _first_save, "train with saves": _train,
    "save_pretrained": _pretrained, "save_pretrained over one": _pretrained_again, "report": _report, "trace": _trace,
}  # fmt: skip

MINE = ("checkpoint/state-of-the-art/notes.txt", "checkpoint/state-7.txt", "written/notes.txt")
"""What the user keeps beside saves and models."""

OF_MEGABYTES = ("save", "save behind", "first save", "train with saves", "save_pretrained", "save_pretrained over one")


def trial(stage: Stage, note: Note) -> None:
    """Do one thing that writes, with room for a part of it; then look what is there."""
    rng = note.rng
    name = rng.choice(list(DEEDS))
    how = rng.choice(["tmpfs", "RLIMIT_FSIZE"])
    big = name in OF_MEGABYTES
    room = int(rng.random() * (16 * 2**20 if big else 20_000))
    note.doing(f"preparing {name}")
    stage.arrange("dp2")
    size = sum(path.stat().st_size for path in stage.checkpoint.rglob("*") if path.is_file())
    folder = stage.folder / "full-disk"
    with _disk(stage, folder, 2 * size + SPARE_BYTES, how, name) as full:
        note.doing(f"{name} with room for {room:,} bytes ({'ENOSPC' if full else 'EFBIG'})")
        _try(stage, folder, name, room, full)
    stage.prove("dp2")


def _try(stage: Stage, folder: Path, name: str, room: int, full: bool) -> None:
    shutil.copytree(stage.checkpoint, folder / "checkpoint")
    _pretrained_again(stage, folder)
    for mine in MINE:
        (folder / mine).parent.mkdir(exist_ok=True)
        (folder / mine).write_text("the user's own")
    before = _listing(folder)
    if full:
        _fill(folder, room)
    try:
        with typed(*([OSError] if name in ("report", "trace") else [])) as said, _limited(stage, None if full else max(room, 100)):
            DEEDS[name](stage, folder)
    finally:
        (folder / "ballast").unlink(missing_ok=True)
    if name == "train with saves":
        stage.session.load(stage.checkpoint)
    after = _listing(folder)
    if said and after != before:
        changed = sorted(set(after.items()) ^ set(before.items()))
        saves = {path.split("/")[0] for path, _ in changed}
        if saves != {"checkpoint"} or name not in ("save", "save behind", "train with saves"):
            raise TrialError("left behind", f"{said[0]}; half-written or replaced: {changed[:8]}")
        _one_save(folder / "checkpoint", said[0])
    if (folder / "checkpoint" / "session.json").exists() is False:
        raise TrialError("wrong state", "the complete save is gone")
    try:
        stage.session.load(folder / "checkpoint")
        stage.is_known()
    except TrialError:
        raise
    except Exception as error:
        raise TrialError("wrong state", f"the last complete save does not load: {type(error).__name__}: {error}") from error
    _again(stage, folder, name)
    lost = [mine for mine in MINE if not (folder / mine).exists()]
    if lost:
        raise TrialError("wrong state", f"it removed {', '.join(lost)}")


def _one_save(folder: Path, said: str) -> None:
    states = sorted(path.name for path in folder.glob("state-[0-9]*"))
    if len(states) != 1:
        raise TrialError("left behind", f"{said}, and {', '.join(states)} are there")


def _again(stage: Stage, folder: Path, name: str) -> None:
    """With room again, it goes through."""
    if name.startswith("train"):
        name = "save"
    with typed() as said:
        DEEDS[name](stage, folder)
    if said:
        with typed() as said:
            DEEDS[name](stage, folder)
    if said:
        raise TrialError("unusable", f"with room again {name} raises {said[0]}")


def _listing(folder: Path) -> dict[str, int]:
    """Return every file and its size; the time of the last save is not part of it."""
    found = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return {path: size for path, size in found.items() if path != "ballast" and not path.endswith((".lock", "lock"))}


def _fill(folder: Path, room: int) -> None:
    left = shutil.disk_usage(folder).free
    with (folder / "ballast").open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(1, left - room))


@contextlib.contextmanager
def _disk(stage: Stage, folder: Path, size: int, how: str, name: str) -> Iterator[bool]:
    """Give a folder, on a small disk where that is possible; says whether it is one."""
    folder.mkdir()
    mounted = (
        how == "tmpfs"
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _limit(rank: Any, size: int) -> None:
    """Runs on every rank: no file may grow beyond some bytes."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextlib.contextmanager
def _limited(stage: Stage, size: int | None) -> Iterator[None]:
    """Limit the size of the files that this process and the workers write; their logs are shorter than that."""
    if size is None:
        yield
        return
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    stage.actor.run(_limit, size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        stage.actor.run(_limit, hard)
