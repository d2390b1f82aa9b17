"""Simulation, plans and pictures need no Linux: outside the engines nothing is POSIX's alone, and a real session says what to do.

There is neither a Mac nor Windows here. Their Python is imitated in a process of its own: another ``sys.platform``, and without the
modules and names that theirs lacks.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from expect import each

ROOT = Path(__file__).parents[1]
ENGINES = ("ray", "worker", "training", "generation", "weights")
"""Rooms of ``hfsdk/engine`` that only real sessions import."""

POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
POSIX_NAMES = {
    "os": {
        "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "WNOHANG", "chown", "chroot", "fchmod", "fchown", "fork", "forkpty",
        "getegid", "geteuid", "getgid", "getgroups", "getloadavg", "getpgid", "getpgrp", "getsid", "getuid", "killpg", "lchown",
        "memfd_create", "mkfifo", "mknod", "nice", "openpty", "posix_fallocate", "pread", "pwrite", "sched_getaffinity",
        "sched_setaffinity", "sendfile", "setpgid", "setsid", "setuid", "statvfs", "sysconf", "uname", "wait3", "wait4",
    },
    "signal": {
        "SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGSTOP", "SIGUSR1", "SIGUSR2", "alarm", "pthread_kill",
        "pthread_sigmask", "setitimer", "siginterrupt", "sigwait",
    },
    "time": {"tzset"},
}  # fmt: skip
"""What ``os``, ``signal`` and ``time`` have on Linux and not on Windows."""

LINUX_PATHS = {
    "core/untrusted.py": {"/proc/self/fd"},
    "diagnose/step_export.py": {"/proc/cpuinfo"},
    "doctor/machine.py": {"/proc/meminfo", "/dev/shm"},
    "engine/calls/host_memory.py": {"/sys/fs/cgroup"},
    "engine/process/gloo_groups.py": {"/proc/self/fd"},
    "engine/process/gpus.py": {"/proc/driver/nvidia/version"},
    "session/start.py": {"/dev/nvidia0"},
}
"""Who may name such a path: it asks whether that is there, and goes on without."""

TEXT_CALLS = {"open": 1, "read_text": 0, "write_text": 1, "fdopen": 1}
"""Calls that decode or encode text, and how many arguments stand before the mode or the encoding."""
NO_TEXT = ("os", "tarfile", "zipfile", "self._weights", "store")
"""Whose ``open`` is another."""
STARTS = ("run", "Popen", "check_output")
"""Calls of ``subprocess`` that decode what they are told to."""


@cache
def all_files() -> list[tuple[str, ast.Module]]:
    paths = sorted((ROOT / "hfsdk").rglob("*.py"))
    return [(path.relative_to(ROOT / "hfsdk").as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def files(*, engines: bool) -> list[tuple[str, ast.Module]]:
    rooms = () if engines else tuple(f"engine/{room}/" for room in ENGINES)
    return [(name, tree) for name, tree in all_files() if not name.startswith(rooms)]


def posix_uses(tree: ast.AST) -> Iterator[str]:
    """What only POSIX has, but for what stands under a condition on ``sys.platform``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.IfExp) and "sys.platform" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (f"line {node.lineno}: {a.name}" for a in node.names if a.name.split(".")[0] in POSIX_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in POSIX_MODULES:
            yield f"line {node.lineno}: {node.module}"
        elif isinstance(node, ast.ImportFrom) and node.module in POSIX_NAMES:
            yield from (f"line {node.lineno}: {a.name}" for a in node.names if a.name in POSIX_NAMES[node.module])
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in POSIX_NAMES.get(node.value.id, ())
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        yield from posix_uses(node)


def without_encoding(tree: ast.AST) -> Iterator[str]:
    """Calls that read or write text in whatever encoding the system has."""
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        given = {keyword.arg for keyword in node.keywords}
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if "encoding" in given or name not in (*TEXT_CALLS, *STARTS):
            continue
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if name in STARTS:
            decodes = owner == "subprocess" and bool(given & {"text", "universal_newlines"})
        else:
            before = TEXT_CALLS[name] - (name == "open" and bool(owner))
            mode = node.args[before] if name in ("open", "fdopen") and len(node.args) > before else None
            decodes = owner not in NO_TEXT and not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
        if decodes:
            yield f"line {node.lineno}: {ast.unparse(node.func)}"


def told(found: list[tuple[str, str]]) -> list[str]:
    return [f"hfsdk/{name}, {what}" for name, what in found]


def test_nothing_outside_the_engines_needs_posix():
    assert told([(name, use) for name, tree in files(engines=False) for use in posix_uses(tree)]) == []


def test_who_names_paths_of_linux_is_known():
    found = {}
    for name, tree in files(engines=False):
        texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        if paths := {text for text in texts if text.startswith(("/dev/", "/proc/", "/sys/", "/tmp", "/var/", "/etc/"))}:
            found[name] = paths
    assert found == LINUX_PATHS


def test_every_text_that_is_read_or_written_is_utf_8():
    assert told([(name, use) for name, tree in files(engines=True) for use in without_encoding(tree)]) == []


@each(
    "code, noticed",
    [
        ("import fcntl", True), ("def f():\n    from pwd import getpwuid", True), ("import os\nos.geteuid()", True),
        ("from signal import SIGKILL", True), ("import os\nos.getpid()", False),
        ("import os, sys\nn = os.sched_getaffinity(0) if sys.platform == 'linux' else 1", False),
        ("import sys\nif sys.platform == 'win32':\n    pass\nelse:\n    import fcntl", False),
    ],
)  # fmt: skip
def test_the_check_of_posix_notices(code, noticed):
    assert bool(list(posix_uses(ast.parse(code)))) is noticed


@each(
    "code, noticed",
    [
        ("open(p)", True), ("p.open('w')", True), ("open(p, 'rb')", False), ("p.open('ab')", False), ("p.read_text()", True),
        ("p.write_text(x)", True), ("p.read_text(encoding='utf-8')", False), ("os.open(p, 0)", False),
        ("subprocess.run(c, text=True)", True), ("subprocess.run(c)", False),
    ],
)  # fmt: skip
def test_the_check_of_encodings_notices(code, noticed):
    assert bool(list(without_encoding(ast.parse(code)))) is noticed


def test_the_cell_for_colab_asks_for_what_the_package_declares():
    text = (ROOT / "docs" / "where-it-runs.md").read_text(encoding="utf-8")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]["notebook"]
    (line,) = re.findall(r"^%pip install --quiet ./hfsdk-repository (.*)$", text, re.MULTILINE)
    assert set(shlex.split(line)) <= set(declared)
    named = set(re.findall(r"[\w/.-]+\.lock", text))
    assert [path for path in named if not (ROOT / "requirements" / Path(path).name).is_file()] == []
    tested = re.findall(r"`(tests/[\w/.]+)`", text)
    assert [path for path in tested if not (ROOT / path).exists()] == []


IMITATED = """
import asyncio, concurrent.futures, importlib.metadata, logging, multiprocessing, os, pathlib, platform, shutil, signal, subprocess
import sys, tarfile, tempfile, types, zipfile
import cloudpickle, numpy, pandas, quickjs, tqdm.std
system, posix_modules, posix_names, engines = {system!r}, {modules!r}, {names!r}, {engines!r}
sys.platform = system
sys.modules.update(dict.fromkeys(engines))
if system == "win32":
    sys.modules.update(dict.fromkeys(posix_modules))
    for owner, gone in posix_names.items():
        for name in gone:
            vars(sys.modules[owner]).pop(name, None)
    sys.modules["msvcrt"] = types.ModuleType("msvcrt")
    sys.modules["msvcrt"].LK_NBLCK, sys.modules["msvcrt"].locking = 2, lambda fd, mode, num_bytes: None

    def unless_open(do):
        "What is open can be neither removed nor moved there, nor a folder that holds it."
        def checked(*paths, **options):
            for fd in os.listdir("/proc/self/fd"):
                there = os.path.join("/proc/self/fd", fd)
                held = os.readlink(there) if os.path.lexists(there) else ""
                for path in (os.path.realpath(p) for p in paths if isinstance(p, (str, pathlib.Path))):
                    if held == path or held.startswith(path + "/"):
                        raise PermissionError(13, "it is open", path)
            return do(*paths, **options)
        return checked

    for name in ("remove", "rename", "replace", "unlink"):
        setattr(os, name, unless_open(getattr(os, name)))
else:
    del os.sched_getaffinity
"""

USED = """
import hfsdk as hf
with hf.Session.simulated("1x8 A100-80GB", price_per_device_hour=2.0, wait=True) as session:
    actor = session.actor("tiny")
    session.critic("tiny"), session.reference(actor), session.reward(lambda completions: [0.0 for _ in completions])
    prompts = session.prompts(["The plot is ", "Die Flüsse "] * 8, batch_size=16)
    session.train(hf.PPO(max_new_tokens=16), prompts, steps=2, folder="saves", save_every=1, progress=False)
    session.load("saves")
    plan = session.plan(hf.PPO(max_new_tokens=16), hf.Workload(prompts=64, prompt_tokens=16, response_tokens=16))
    what_if = session.what_if(hf.PPO(max_new_tokens=16), hf.Workload(prompts=64, prompt_tokens=16, response_tokens=16))
    what_if.set(devices=4)
    for shown in (plan, what_if, session.trace):
        for ending in ("svg", "html", "txt"):
            hf.viz.picture(shown).save(f"{type(shown).__name__}.{ending}")
    session.report("report.html")
print(hf.doctor())
try:
    hf.Session(devices=1)
except hf.ModelNotFoundError as error:
    print("SAID", error)
"""


def imitated(system: str, folder: Path, code: str = USED) -> subprocess.CompletedProcess[str]:
    engines = ["torch", "ray", "vllm", "megatron", "transformers", "psutil", "safetensors", "IPython"]
    start = IMITATED.format(
        system=system, modules=sorted(POSIX_MODULES), names={k: sorted(v) for k, v in POSIX_NAMES.items()}, engines=engines
    )
    command = [sys.executable, "-X", "utf8=0", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + start + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, timeout=300)


@pytest.mark.parametrize(("system", "name", "linux"), [("darwin", "macOS", "a Linux machine"), ("win32", "Windows", "WSL2")])
def test_all_but_real_sessions_works(tmp_path, system, name, linux):
    done = imitated(system, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "only simulated sessions can run here" in done.stdout
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert f"this is {name}" in said
    assert "hf.Session.simulated" in said
    assert linux in said
    assert len([path for path in tmp_path.iterdir() if path.suffix in (".svg", ".html", ".txt")]) == 3 * 3 + 1
    assert {path.name for path in (tmp_path / "saves").iterdir()} == {"session.json", "state-2"}


def test_what_the_imitation_lacks_is_noticed(tmp_path):
    """Else it would prove nothing."""
    assert "ModuleNotFoundError" in imitated("win32", tmp_path, "import fcntl").stderr
    assert "AttributeError" in imitated("win32", tmp_path, "os.geteuid()").stderr
    assert "it is open" in imitated("win32", tmp_path, "file = open('a', 'w'); os.remove('a')").stderr
    assert "it is open" in imitated("win32", tmp_path, "file = open('b', 'w'); pathlib.Path('b').unlink()").stderr
    assert "AttributeError" in imitated("darwin", tmp_path, "os.sched_getaffinity(0)").stderr
