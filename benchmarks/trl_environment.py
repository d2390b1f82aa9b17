"""An environment of TRL's own for the benchmarks that compare with it: only TRL is installed there, the rest is borrowed.

``trl_python("trl==1.12.0")`` returns its Python, making the environment where it is missing (seconds, a few MB). Packages that both
need, torch and transformers first, are those of the interpreter that runs the benchmark, so both compute with the same ones; what
TRL or peft need and that one lacks is installed beside TRL. TRL never enters the environment of hfsdk.

    trl-1.12.0/lib/python3.11/site-packages/   trl, and what was missing
                                  borrowed.pth   the folders of packages of this interpreter, searched after it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from common import say

ROOTS = ("trl", "peft", "vaderSentiment")
"""What the scripts that run there import, beside torch; what these need comes with them."""

NEEDED = """
import importlib.metadata as metadata, json, sys
from packaging.requirements import Requirement

missing, seen, waiting = [], set(), sys.argv[1:]
while waiting:
    need = Requirement(waiting.pop())
    if need.name in seen or (need.marker and not need.marker.evaluate({"extra": ""})):
        continue
    seen.add(need.name)
    try:
        waiting += metadata.requires(need.name) or []
    except metadata.PackageNotFoundError:
        missing.append(need.name + str(need.specifier))
print(json.dumps(sorted(missing)))
"""
"""Prints which of some packages, and of all that they need, are not installed."""


def trl_python(trl: str) -> Path:
    """Return the Python of an environment that has a version of TRL, making the environment where it is missing.

    Args:
        trl: the version, e.g. ``"trl==1.12.0"``.
    """
    from hfsdk.assets.cache import home

    folder = home() / trl.replace("==", "-")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    borrowed, done = "\n".join(package_folders()) + "\n", folder / "borrowed.txt"
    if done.is_file() and done.read_text() == borrowed:
        return python
    say(f"making an environment for {trl}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip())
    (own / "borrowed.pth").write_text(borrowed)
    wanted = [trl]
    while wanted:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *wanted], check=True)
        before, wanted = wanted, missing(python, ROOTS)
        if wanted == before or any(name.startswith("torch") for name in wanted):
            raise RuntimeError(f"TRL's environment lacks {', '.join(wanted)}; install them where hfsdk is, and try again")
    done.write_text(borrowed)
    return python


def package_folders() -> list[str]:
    """Return the folders from which this interpreter imports installed packages."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def missing(python: str | Path, roots: tuple[str, ...]) -> list[str]:
    """Return which of some packages, and of all that they need, an interpreter lacks, as pip is asked for them."""
    done = subprocess.run([str(python), "-c", NEEDED, *roots], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def child_environment(threads: int) -> dict[str, str]:
    """Return the variables of a process that runs there."""
    return {
        **os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
        "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
