"""Check requirements/*.lock for real: `make locks`, or python scripts/check_locks.py --uv UV [--install base cpu].

For each lock: every line is pinned and has a hash; each of its hashes is one that the package index publishes for that
version (uv asks the index again, from the pins alone); each package has a wheel for Python 3.11 and 3.12 on Linux (a lock of one
Python: for that one). With --install, pip then installs the named locks with --require-hashes into environments that are thrown
away, which compares the bytes of what is installed; no two packages may own a file there, every requirement must hold, and the
engines be imported. torch's CPU build is not on PyPI: of it pip fetches what it finds and compares the bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
LOCKS = ("tools", "base", "docs", "cpu", "cuda-py311", "cuda-py312")
TORCH = REQUIREMENTS / "torch-cpu.txt"
PLATFORM = "x86_64-unknown-linux-gnu"
PYTHONS = ("3.11", "3.12")
ENGINES = ("torch", "vllm", "megatron.core", "ray", "transformers", "numpy", "pandas")
LEFT_LYING = {"build_backend.py"}
"""Files beside the packages that several wheels have by mistake: how each was built (flashinfer-python, torch-c-dlpack-ext).
Nothing imports them."""
WHEELS_FOR = "x86_64-manylinux_2_35"
WHEELS = ("--no-deps", "--only-binary", ":all:", "--require-hashes")


@dataclass(frozen=True)
class Pin:
    """One entry of a lock, e.g. ``numpy==2.4.6`` with its hashes."""

    requirement: str
    hashes: frozenset[str]

    def __str__(self) -> str:
        return " ".join([self.requirement, *(f"--hash=sha256:{one}" for one in sorted(self.hashes))]) + "\n"


def pins(text: str) -> list[Pin]:
    """Return the entries of a requirements file; an entry goes on over lines that end with a backslash."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.replace("\\\n", " ").splitlines())
    return [
        Pin(requirement=line.split(" ")[0], hashes=frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})(?!\S)", line)))
        for line in lines
        if line
    ]


def loose(entries: list[Pin]) -> list[str]:
    """Return the entries that are not pinned to one version with at least one hash."""
    return [pin.requirement for pin in entries if not (re.fullmatch(r"[\w.\-\[\]]+==[\w.+!]+", pin.requirement) and pin.hashes)]


def run(*command: str | Path) -> str:
    """Run a command and return its output; its errors are shown where it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stderr[-3000:]}")
    return result.stdout


def pythons_of(name: str) -> tuple[str, ...]:
    """Return the Pythons that a lock is for: its name ends with the one, as in ``cuda-py312``, or it is for all."""
    one = re.search(r"-py(\d)(\d+)$", name)
    return (f"{one[1]}.{one[2]}",) if one else PYTHONS


def owned_twice(owners: dict[str, list[str]]) -> list[str]:
    """Return which packages own the same files, and how many.

    Args:
        owners: package -> its files, as its ``RECORD`` has them.
    """
    by_file: dict[str, list[str]] = {}
    for package, files in owners.items():
        for file in set(files) - LEFT_LYING:
            by_file.setdefault(file, []).append(package)
    pairs: dict[tuple[str, ...], int] = {}
    for packages in by_file.values():
        if len(packages) > 1:
            pairs[tuple(sorted(packages))] = pairs.get(tuple(sorted(packages)), 0) + 1
    return [f"{' and '.join(packages)} own {count} files in common" for packages, count in sorted(pairs.items())]


def published(uv: Path, python: str, entries: list[Pin], folder: Path) -> dict[str, frozenset[str]]:
    """Return the hashes that the package index publishes for each of these versions."""
    bare = folder / "bare.in"
    bare.write_text("\n".join(pin.requirement for pin in entries) + "\n", encoding="utf-8")
    text = run(uv, "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate", "--generate-hashes",
               "--python-version", python, "--python-platform", PLATFORM, bare)  # fmt: skip
    return {pin.requirement: pin.hashes for pin in pins(text)}


def with_wheels(uv: Path, pythons: tuple[str, ...], lock: Path, folder: Path) -> list[str]:
    """Return for each Python how many packages of a lock have a wheel; uv ends with an error where one has none."""
    said = []
    for python in pythons:
        command = [uv, "pip", "install", "--dry-run", *WHEELS, "--python-version", python, "--python-platform", WHEELS_FOR]
        result = subprocess.run([*command, "--target", folder / python, "-r", lock], capture_output=True, text=True, check=False)
        count = result.stderr.count("\n + ")
        said.append(f"{count} wheels for {python}" + (f" ({result.stderr.strip()[-300:]})" if result.returncode else ""))
    return said


def check(uv: Path, name: str, folder: Path) -> int:
    """Compare a lock with the index; prints its counts and returns the number of faults."""
    lock = REQUIREMENTS / f"{name}.lock"
    entries = pins(lock.read_text(encoding="utf-8"))
    own = {pin.requirement for pin in pins(TORCH.read_text(encoding="utf-8"))}
    asked = [pin for pin in entries if pin.requirement not in own]
    index = published(uv, pythons_of(name)[0], asked, folder)
    foreign = {pin.requirement: found for pin in asked if (found := pin.hashes - index.get(pin.requirement, frozenset()))}
    bare = loose(entries)
    rest = folder / "asked.lock"
    rest.write_text("".join(map(str, asked)), encoding="utf-8")
    wheels = with_wheels(uv, pythons_of(name), rest, folder)
    print(
        f"{lock.name}: {len(entries)} packages, {sum(len(pin.hashes) for pin in entries)} hashes; "
        f"{len(bare)} lines without a pin and a hash; of {len(asked)} packages that the index carries "
        f"{len(foreign)} have a hash that it does not publish; {', '.join(wheels)}"
    )
    for fault in (*bare, *(f"{requirement}: {sorted(hashes)}" for requirement, hashes in foreign.items())):
        print(f"  {fault}")
    return len(bare) + len(foreign) + sum("(" in one for one in wheels)


def check_torch(folder: Path) -> int:
    """Let pip find the CPU build of torch as it is configured to, and compare its bytes."""
    command = (sys.executable, "-m", "pip", "download", "--quiet", *WHEELS, "-d", folder / "torch", "-r", TORCH)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [path.name for path in (folder / "torch").glob("*.whl")]
    print(f"{TORCH.name}: {'the bytes are right of ' + found[0] if found else 'pip found none: ' + result.stderr.strip()[-300:]}")
    return int(not found)


def install(name: str, folder: Path) -> int:
    """Install a lock into an environment that is thrown away, as `make setup` does; returns the number of faults."""
    environment = folder / f"venv-{name}"
    of_one = pythons_of(name)
    run(f"python{of_one[0]}" if len(of_one) == 1 else sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", *WHEELS, "-r", REQUIREMENTS / f"{name}.lock")
    there = {line.lower().replace("_", "-") for line in run(python, "-m", "pip", "freeze", "--all").split()}
    wanted = [pin.requirement.lower() for pin in pins((REQUIREMENTS / f"{name}.lock").read_text(encoding="utf-8"))]
    missing = [pin for pin in wanted if re.sub(r"\[.*?\]", "", pin).replace("_", "-") not in there]
    print(f"{name}.lock: {len(wanted) - len(missing)} of {len(wanted)} packages installed with --require-hashes")
    faults = [f"missing: {pin}" for pin in missing] + owned_twice(json.loads(run(python, "-c", OWNERS)))
    held = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    faults += held.stdout.splitlines() if held.returncode else []
    for module in [module for module in ENGINES if module.split(".")[0] in {pin.split("==")[0].split("-")[0] for pin in wanted}]:
        came = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True, check=False)
        faults += [f"import {module}: {came.stderr.strip().splitlines()[-1]}"] if came.returncode else []
    for fault in faults:
        print(f"  {fault}")
    shutil.rmtree(environment)
    return len(faults)


OWNERS = """
import importlib.metadata, json
print(json.dumps({d.metadata["Name"]: [str(f) for f in d.files or () if not str(f).startswith("..") and "__pycache__" not in str(f)]
                  for d in importlib.metadata.distributions()}))
"""
"""Prints the files of every package of an environment; scripts in its bin folder aside, which may be of one name."""


def main() -> None:
    """Check all locks; ends with status 1 where one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", type=Path, default=Path(".venv-lock/bin/uv"), help="as `make lock` installs it")
    parser.add_argument("--install", nargs="*", default=[], choices=LOCKS, help="install these locks for real")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        faults = sum(check(given.uv, name, Path(folder)) for name in LOCKS) + check_torch(Path(folder))
        faults += sum(install(name, Path(folder)) for name in given.install)
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
