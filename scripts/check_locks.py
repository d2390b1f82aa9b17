"""Check requirements/*.lock for real: `make locks`, or python scripts/check_locks.py --uv UV [--install base cpu].

For each lock: every line is pinned and has a hash; each of its hashes is one that the package index publishes for that
version (uv asks the index again, from the pins alone); each package has a wheel for Python 3.11 and 3.12 on Linux. With
--install, pip then installs the named locks with --require-hashes into environments that are thrown away, which compares
the bytes of what is installed. torch's CPU build is not on PyPI: of it pip fetches what it finds and compares the bytes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
LOCKS = ("tools", "base", "cpu", "cuda")
TORCH = REQUIREMENTS / "torch-cpu.txt"
PLATFORM = "x86_64-unknown-linux-gnu"
PYTHONS = ("3.11", "3.12")
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


def published(uv: Path, entries: list[Pin], folder: Path) -> dict[str, frozenset[str]]:
    """Return the hashes that the package index publishes for each of these versions."""
    bare = folder / "bare.in"
    bare.write_text("\n".join(pin.requirement for pin in entries) + "\n", encoding="utf-8")
    text = run(uv, "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate", "--generate-hashes",
               "--python-version", PYTHONS[0], "--python-platform", PLATFORM, bare)  # fmt: skip
    return {pin.requirement: pin.hashes for pin in pins(text)}


def with_wheels(uv: Path, lock: Path, folder: Path) -> list[str]:
    """Return for each Python how many packages of a lock have a wheel; uv ends with an error where one has none."""
    said = []
    for python in PYTHONS:
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
    index = published(uv, asked, folder)
    foreign = {pin.requirement: found for pin in asked if (found := pin.hashes - index.get(pin.requirement, frozenset()))}
    bare = loose(entries)
    rest = folder / "asked.lock"
    rest.write_text("".join(map(str, asked)), encoding="utf-8")
    wheels = with_wheels(uv, rest, folder)
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


def install(name: str, folder: Path) -> None:
    """Install a lock into an environment that is thrown away, as `make setup` does."""
    environment = folder / f"venv-{name}"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", *WHEELS, "-r", REQUIREMENTS / f"{name}.lock")
    there = {line.lower().replace("_", "-") for line in run(python, "-m", "pip", "freeze", "--all").split()}
    wanted = [pin.requirement.lower() for pin in pins((REQUIREMENTS / f"{name}.lock").read_text(encoding="utf-8"))]
    missing = [pin for pin in wanted if re.sub(r"\[.*?\]", "", pin).replace("_", "-") not in there]
    print(f"{name}.lock: {len(wanted) - len(missing)} of {len(wanted)} packages installed with --require-hashes")
    for pin in missing:
        print(f"  missing: {pin}")


def main() -> None:
    """Check all locks; ends with status 1 where one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", type=Path, default=Path(".venv-lock/bin/uv"), help="as `make lock` installs it")
    parser.add_argument("--install", nargs="*", default=[], choices=LOCKS, help="install these locks for real")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        faults = sum(check(given.uv, name, Path(folder)) for name in LOCKS) + check_torch(Path(folder))
        for name in given.install:
            install(name, Path(folder))
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
