"""What the benchmarks share: measured figures against their targets, as a table, as JSON, and as an exit code.

report = Report("overhead", "2 processes of one thread")
report.add("warm step", 2.41, "s", at_most=3.0)
return report.finish(arguments)        # prints; 1 with --check when a target is missed
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number; without a target it is only reported."""

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def missed(self) -> bool:
        """Whether there is a target and it is not met; NaN meets none."""
        above = self.at_most is not None and not self.value <= self.at_most
        return above or (self.at_least is not None and not self.value >= self.at_least)

    @property
    def target(self) -> str:
        """The target in words, or nothing."""
        words = [f"<= {short(self.at_most)}"] * (self.at_most is not None)
        return " ".join(words + [f">= {short(self.at_least)}"] * (self.at_least is not None))


@dataclass
class Report:
    """The figures of one benchmark, and whatever else its JSON should keep."""

    benchmark: str
    uses: str
    """Processes and threads."""
    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def add(
        self, name: str, value: float, unit: str = "", *, at_most: float | None = None, at_least: float | None = None
    ) -> Figure:
        """Note a figure and return it."""
        figure = Figure(name=name, value=float(value), unit=unit, at_most=at_most, at_least=at_least)
        self.figures.append(figure)
        return figure

    @property
    def missed(self) -> list[Figure]:
        """Figures that miss their target."""
        return [figure for figure in self.figures if figure.missed]

    def table(self) -> str:
        """Return the figures as text."""
        marks = [("missed" if f.missed else "ok") if f.target else "" for f in self.figures]
        rows = [(f.name, f"{short(f.value)} {f.unit}".strip(), f.target, mark) for f, mark in zip(self.figures, marks, strict=True)]
        return table(("figure", "measured", "target", ""), rows)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        figures = [{**asdict(f), "missed": f.missed} for f in self.figures]
        return {"benchmark": self.benchmark, "uses": self.uses, "machine": machine(), "figures": figures, **self.details}

    def finish(self, arguments: argparse.Namespace) -> int:
        """Print the table, write the JSON that was asked for, and return the exit code."""
        print(f"\n{self.benchmark}: {self.uses}; {machine()['cores']} cores here\n\n{self.table()}\n", flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        for figure in self.missed:
            print(f"missed: {figure.name} is {short(figure.value)} {figure.unit} (target {figure.target})", flush=True)
        return 1 if arguments.check and self.missed else 0


def short(value: float | None) -> str:
    """Return a number with about four digits."""
    return "" if value is None else f"{value:.4g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text with aligned columns under a head."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def machine() -> dict[str, Any]:
    """Return what the numbers depend on, without naming the machine."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {"cores": os.cpu_count(), "load_1min": round(load, 2), "python": platform.python_version(), "system": platform.machine()}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all benchmarks take."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", metavar="FILE", help="write the figures and their details there")
    made.add_argument("--check", action="store_true", help="exit with 1 when a target is missed, naming it")
    return made


class Stopwatch:
    """Seconds by name: ``with watch("generate"): ...``; a name may come again."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)

    def lines(self) -> str:
        """Return one line: the last time of every name."""
        return ", ".join(f"{name} {times[-1]:.2f} s" for name, times in self.seconds.items())


class PeakMemory(threading.Thread):
    """Samples the summed PSS of a process and all it started, until stopped.

    The kernel goes through all pages for it, 20 ms a gigabyte, so it looks less often where that takes more than ``most_busy`` of
    the time: the processor that it uses is missed by what is measured.
    """

    def __init__(self, pid: int, every_s: float = 0.25, most_busy: float = 0.2) -> None:
        super().__init__(daemon=True)
        self.pid, self.every_s, self.most_busy, self.peak = pid, every_s, most_busy, 0
        self.at_peak: dict[str, int] = {}
        self._stop_asked = threading.Event()

    def run(self) -> None:
        import psutil

        took = 0.0
        while not self._stop_asked.wait(max(self.every_s, took * (1 / self.most_busy - 1))):
            began = time.monotonic()
            found: dict[str, int] = {}
            try:
                root = psutil.Process(self.pid)
                processes = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                try:
                    name, lines = process.name(), Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    continue
                found[name] = found.get(name, 0) + 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            if sum(found.values()) > self.peak:
                self.peak, self.at_peak = sum(found.values()), found
            took = time.monotonic() - began

    def stop(self) -> int:
        """Stop and return the peak in bytes."""
        self._stop_asked.set()
        self.join()
        return self.peak


def say(*words: object, sep: str = " ") -> None:
    """Print progress at once."""
    print(*words, sep=sep, flush=True)


def quiet_transformers() -> None:
    """Turn off transformers' progress bars and advice in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def write_gradients(rank: Any, path: str) -> None:
    """Runs on every rank: gather the whole gradient under Hugging Face names and write it on rank 0."""
    found = rank._hosted.trainer.gradients()
    if found is not None:
        import numpy as np

        np.savez(path, **{name: tensor.float().cpu().numpy() for name, tensor in found.items()})
