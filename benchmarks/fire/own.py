"""What a run of the campaign has started, found by a mark in its environment: looked for, waited for, ended. Never by name."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil

MARK = "HFSDK_UNDER_FIRE"
"""Environment variable that everything a trial starts inherits."""

ADAPTERS = "HFSDK_UNDER_FIRE_LORA"
"""Environment variable of a campaign's children whose trained roles have adapters of low rank."""

LORA = "LoRA"
"""Tag of trials with such roles."""

GONE_S = 10.0
"""How long what was ended may take to be gone."""

AGENTS = ("dashboard/agent.py", "runtime_env/agent/main.py")
"""Ray's own agents: after a kill -9 they end by themselves within a minute, or when the user's next session starts."""


def adapters(rank: int) -> dict[str, Any]:
    """Return the option by which a role has adapters, where this process is to use them; else none."""
    import hfsdk as hf

    return {"lora": hf.LoRA(rank=rank)} if ADAPTERS in os.environ else {}


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes that carry a mark, but for this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def words(process: psutil.Process) -> str:
    """Return a process' command line, shortened."""
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:160] or process.name()}"
    except psutil.Error:
        return f"{process.pid}"


def end(mark: str) -> None:
    """Kill what carries a mark and wait until it is gone."""
    until = time.monotonic() + GONE_S
    while (left := marked(mark)) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        time.sleep(0.1)


def left_behind(mark: str, folder: Path, jobs: Collection[str] = (), *, agents: bool = False) -> list[str]:
    """Return what is still there ``GONE_S`` after everything should be gone: processes, temporary folders, segments.

    Args:
        mark: of the processes.
        folder: their ``TMPDIR``.
        jobs: their sessions' names in shared memory.
        agents: whether Ray's agents count.
    """
    until = time.monotonic() + GONE_S
    while True:
        left = [words(p) for p in marked(mark)]
        left = [text for text in left if agents or not any(agent in text for agent in AGENTS)]
        left += [str(path) for path in folder.glob("hfsdk-*")]
        left += [str(path) for job in jobs for path in Path("/dev/shm").glob(f"hfsdk.{job}*")]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.25)
