"""Runs what `make check` leaves out: the nightly tests, kills and damage (under_fire), and mutations.

    python scripts/nightly.py                 # everything; after an interruption it goes on where it was
    python scripts/nightly.py --only tests    # or fire, mutations

What ended stands under ``out/nightly/`` by commit: a test that passed is not run again for the same commit. Of the mutations a
night tries a share, those that were tried longest ago (``out/nightly/mutations.json``). At the end it prints what failed and what
took longest, writes ``out/nightly/COMMIT.json``, and exits 1 if anything failed. Target: at most 75 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "nightly"
AT_MOST_MINUTES = 75
PARTS = ("tests", "fire", "mutations")
sys.path.insert(0, str(ROOT / "tests"))


def commit() -> str:
    """Return the short commit, with a hash of what is changed beside it."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout

    changed = git("diff", "HEAD")
    name = git("rev-parse", "--short", "HEAD").decode().strip()
    return f"{name}-{hashlib.sha256(changed).hexdigest()[:8]}" if changed else name


def run_tests(name: str) -> list[dict[str, Any]]:
    """Run the nightly tests that have not passed yet; return the last result of each, with its id, outcome and seconds."""
    from tiers import results_in

    results = OUT / f"{name}-tests.jsonl"
    command = [sys.executable, "-m", "pytest", "-n", "2", "--tier=nightly", f"--results={results}", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=ROOT, check=False)
    return list({line["test"]: line for line in results_in(results)}.values())


def run_fire(name: str) -> list[dict[str, Any]]:
    """Run kills, interrupts, damaged files and bad input once."""
    return [_once(f"{name}-fire.json", "under_fire", ["benchmarks/under_fire.py", "--minutes", "4", "--check"])]


def run_mutations(name: str) -> list[dict[str, Any]]:
    """Run a night's share of the mutations."""
    table = OUT / "mutations.json"
    return [_once(None, "mutations", ["scripts/mutate.py", "--check", "-j", "2", "--json", str(table), "--minutes", "45"])]


def _once(remembered: str | None, name: str, arguments: list[str]) -> dict[str, Any]:
    """Run a script; one that passed for this commit is not run again where ``remembered`` names a file."""
    path = OUT / remembered if remembered else None
    if path is not None and path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    began = time.monotonic()
    status = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode
    outcome = "failed" if status else "passed"
    result = {"test": name, "outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
    if path is not None and not status:
        path.write_text(json.dumps(result), encoding="utf-8")
    return result


def main() -> int:
    """Run the parts, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    chosen = parser.parse_args().only
    OUT.mkdir(parents=True, exist_ok=True)
    name, began, results = commit(), time.monotonic(), []
    run = {"tests": run_tests, "fire": run_fire, "mutations": run_mutations}
    minutes = {}
    for part in chosen:
        started = time.monotonic()
        results += run[part](name)
        minutes[part] = round((time.monotonic() - started) / 60, 1)
    failed = [result for result in results if result["outcome"] == "failed"]
    say = sys.stdout.write
    say(f"\n{len(results)} results of {name}, {len(failed)} failed; this time {(time.monotonic() - began) / 60:.0f} minutes")
    say(f" ({', '.join(f'{part} {value:g}' for part, value in minutes.items())}; at most {AT_MOST_MINUTES})\n")
    for title, rows in (("failed", failed), ("longest", sorted(results, key=lambda row: -row["seconds"])[:20])):
        say(f"{title}:\n" + "".join(f"  {row['seconds']:7.1f} s  {row['test']}\n" for row in rows))
    summary = {"commit": name, "minutes": minutes, "failed": [row["test"] for row in failed], "results": results}
    (OUT / f"{name}.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
