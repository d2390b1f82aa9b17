"""Damaged checkpoints: every file of one, in every way.

``load`` must refuse each before it replaces anything, and run nothing of it.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hfsdk as hf
from fire.stage import Stage, ground
from fire.trials import Note, TrialError

__all__ = ["CEILING_S", "ground", "trial"]

CEILING_S = 180.0

AT_ONCE = 4
"""Damaged checkpoints of one trial."""

REFUSED_S = 60.0
"""Ceiling for saying no."""


class Hostile:
    """Unpickled, it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return open, (str(self.trace), "w")


def _truncated(path: Path, rng: random.Random, stage: Stage) -> None:
    size = path.stat().st_size
    os.truncate(path, rng.choice([0, max(0, size - 1), rng.randrange(max(1, size))]))


def _flipped(path: Path, rng: random.Random, stage: Stage) -> None:
    """Other bits, the same length: one, or eight bytes in a row."""
    data = bytearray(path.read_bytes())
    at, length = rng.randrange(len(data)), rng.choice([1, 8])
    for k in range(at, min(len(data), at + length)):
        data[k] ^= rng.randrange(1, 256)
    path.write_bytes(data)


def _zeroed(path: Path, rng: random.Random, stage: Stage) -> None:
    """A page that never reached the disk."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data)) // 4096 * 4096
    page = bytes(len(data[at : at + 4096]))
    data[at : at + 4096] = page if data[at : at + 4096] != page else b"\1" * len(page)
    path.write_bytes(data)


def _longer(path: Path, rng: random.Random, stage: Stage) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice([1, 4096])))


def _missing(path: Path, rng: random.Random, stage: Stage) -> None:
    path.unlink()


def _swapped(path: Path, rng: random.Random, stage: Stage) -> None:
    """Two files of a checkpoint have each other's content."""
    root = next(p for p in path.parents if (p / "session.json").exists())
    others = sorted(p for p in root.rglob("*") if p.is_file() and p != path and p.read_bytes() != path.read_bytes())
    other = rng.choice(others)
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def _foreign(path: Path, rng: random.Random, stage: Stage) -> None:
    """The same file of another save of the same session, one step later."""
    root = next(p for p in path.parents if (p / "session.json").exists())
    elsewhere = stage.folder / "later"
    if path.name == "session.json":
        shutil.copyfile(elsewhere / "session.json", path)
        return
    within = path.relative_to(root).parts[1:]
    (state,) = elsewhere.glob("state-*")
    data = state.joinpath(*within).read_bytes()
    if data == path.read_bytes():
        _flipped(path, rng, stage)
    else:
        path.write_bytes(data)


def _hostile(path: Path, rng: random.Random, stage: Stage) -> None:
    """A pickle that runs code, of the length that was saved where it fits."""
    found = pickle.dumps(Hostile(stage.folder / "ran"))
    path.write_bytes(found + bytes(max(0, path.stat().st_size - len(found))))


def _forged(path: Path, rng: random.Random, stage: Stage) -> None:
    """A pickle that runs code, and every checksum made to fit: somebody has made this checkpoint on purpose."""
    root = next(p for p in path.parents if (p / "session.json").exists())
    if path.suffix == ".json":
        path = rng.choice(sorted(p for p in root.rglob("*") if p.is_file() and p.suffix != ".json"))
    _hostile(path, rng, stage)
    (state,) = root.glob("state-*")
    save = state / "save.json"
    inner = json.loads(save.read_text())
    inner["files"][str(path.relative_to(state))] = [path.stat().st_size, zlib.crc32(path.read_bytes())]
    save.write_text(json.dumps(inner))
    outer = json.loads((root / "session.json").read_text())
    outer["saves"] = [[state.name, save.stat().st_size, zlib.crc32(save.read_bytes())]]
    (root / "session.json").write_text(json.dumps(outer))


def _a_folder(path: Path, rng: random.Random, stage: Stage) -> None:
    path.unlink()
    path.mkdir()


def _fuzzed(path: Path, rng: random.Random, stage: Stage) -> None:
    """JSON that parses and is wrong: a value of another type, a key that is missing, a path that leads out."""
    if path.suffix != ".json":
        _flipped(path, rng, stage)
        return
    index = json.loads(path.read_text())
    places: list[tuple[Any, Any]] = []
    _collect(index, places)
    within, key = rng.choice(places)
    how = rng.randrange(4)
    if how == 0 and isinstance(within, dict):
        del within[key]
    elif how == 1:
        within[key] = rng.choice([None, "", "..", "../x", "/etc", -1, 2**70, 1e400, [], {}, True, "\0", "a" * 5000])
    elif how == 2:
        within[key] = {"a": within[key]}
    else:
        index = rng.choice([[], None, 3, "text", {}, {"format": 2}])
    path.write_text(json.dumps(index))


def _collect(node: Any, places: list[tuple[Any, Any]]) -> None:
    pairs = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, value in pairs:
        places.append((node, key))
        _collect(value, places)


WITHIN = ("truncated", "flipped bytes", "a page of zeros", "fuzzed")
"""Ways that need a byte to change: a rank that has nothing to write leaves an empty file."""

FORGED = "hostile pickle with sums that fit"

WAYS: dict[str, Callable[[Path, random.Random, Stage], None]] = {
    "truncated": _truncated, "flipped bytes": _flipped, "a page of zeros": _zeroed, "longer": _longer, "missing": _missing,
    "swapped": _swapped, "foreign": _foreign, "hostile pickle": _hostile, FORGED: _forged,
    "a folder": _a_folder, "fuzzed": _fuzzed,
}  # fmt: skip


def trial(stage: Stage, note: Note) -> None:
    """Damage one file of a copy, load it, and look whether anything changed; then the same with another file or way."""
    rng, copy = note.rng, stage.folder / "damaged"
    note.count = 0
    for k in range(AT_ONCE):
        note.doing("preparing")
        _prepare(stage)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(stage.checkpoint, copy)
        path, way = _choice(AT_ONCE * note.number + k, copy, rng)
        note.count += 1
        original = path.read_bytes()
        way = way if original or way not in WITHIN else "longer"
        note.doing(f"{path.relative_to(copy)}: {way}")
        WAYS[way](path, rng, stage)
        same = path.is_file() and path.suffix == ".json" and _same_json(original, path.read_bytes())
        _refused(stage, copy, same=same, forged=way == FORGED)


def _choice(number: int, folder: Path, rng: random.Random) -> tuple[Path, str]:
    """Return a file and a way: all pairs come in turn, what is JSON in between."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = list(WAYS)
    path, way = files[number % len(files)], names[(number + number // len(files)) % len(names)]
    if rng.random() < 0.15:
        path = rng.choice([path for path in files if path.suffix == ".json"])
        way = rng.choice(["fuzzed", "fuzzed", "flipped bytes", "truncated", "foreign"])
    return path, way


def _prepare(stage: Stage) -> None:
    """Have another checkpoint to take foreign files from, and be in a state that neither of them is."""
    if not (stage.folder / "later" / "session.json").exists() or "damage" not in stage.known:
        stage.arrange("dp2", trained=True)
        stage.session.save(stage.folder / "later")
        stage.known["later"] = stage.digests()
        stage.step()
        stage.known["damage"] = stage.digests()
    if stage.digests() != stage.known["damage"]:  # other kinds were here since
        stage.arrange("dp2", trained=True)
        stage.step()


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def _refused(stage: Stage, folder: Path, *, same: bool, forged: bool) -> None:
    """Load, and look that it was refused and nothing replaced.

    Args:
        stage: with the session.
        folder: the damaged copy.
        same: the damage changed no meaning: it may load, what is loaded is looked at by the next kinds.
        forged: every checksum was made to fit: roles before the forged one may be replaced, and it must be said (nothing else
            is promised, see docs/reliability.md); where nothing reads the file it loads, and must be right.
    """
    before, started = stage.persistent(), time.monotonic()
    known = len(stage.session.messages)
    try:
        stage.session.load(folder)
        said = ""
    except hf.CheckpointError as error:
        said = str(error)
    except Exception as error:
        import traceback

        raise TrialError("bare error", f"{type(error).__name__}: {error}\n{traceback.format_exc()[-2500:]}") from error
    if (stage.folder / "ran").exists():
        (stage.folder / "ran").unlink()
        raise TrialError("wrong state", f"the hostile pickle ran; load said {said or 'nothing'}")
    if time.monotonic() - started > REFUSED_S:
        raise TrialError("hang", f"said no after {time.monotonic() - started:.0f} s")
    now = stage.digests()
    told = stage.session.messages[known:]
    replaced = now != stage.known["damage"] or stage.persistent() != before
    if said and replaced and not (forged and any("before loading ended" in text for text in told)):
        raise TrialError("wrong state", f"refused ({said}), and something was replaced all the same")
    if not said and not same and now != stage.known["checkpoint"]:
        later = now == stage.known["later"]
        words = "those of another save" if later else "none of those saved"
        raise TrialError("wrong state", f"loaded without a word; the weights are {words}")
    if not said and not same and not forged:
        raise TrialError("wrong state", "loaded without a word; the weights are right")
