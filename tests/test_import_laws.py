"""The import laws: each folder imports what it says, heavy packages stay where they belong, no cycles, `import hfsdk` is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest
from expect import each

ROOT = Path(__file__).parents[1]

LAYERS = ["planner", "engine", "models", "algorithms", "state", "run", "diagnose", "kept", "session", "configs", "teach", "viz"]
TOP = ["hfsdk", "hfsdk.quickstart", "hfsdk.serve", "hfsdk.data", "hfsdk.testing"]
"""Modules beside the folders; ``data`` has a law of its own below."""

HOMES = {
    "ray": ["engine/ray/*"],
    "megatron": ["engine/training/*"],
    "vllm": ["engine/generation/*"],
    "ipywidgets": [],  # every live picture is one anywidget, without containers: marimo, VS Code and Colab need no more
    "anywidget": ["viz/*"],
    "matplotlib": ["viz/*"],
    "tensorboard": ["run/trackers.py"],
    "wandb": ["run/trackers.py"],
    "mlflow": ["run/trackers.py"],
    "fsspec": ["core/store.py"],
    "torch": [
        *(f"engine/{room}/*" for room in ("calls", "process", "weights", "training", "generation", "worker", "ray")),
        *["algorithms/*", "assets/*", "teach/*"],
    ],
}
TORCH_AT_MODULE_LEVEL = ["engine/*", "algorithms/rlmath.py", "algorithms/groups.py"]  # pure torch, themselves imported lazily
HEAVY = [
    "torch",
    "ray",
    "megatron",
    "vllm",
    "ipywidgets",
    "anywidget",
    "matplotlib",
    "datasets",
    "transformers",
    "tensorboard",
    "wandb",
    "mlflow",
    "fsspec",
]


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands, and the module it names."""

    file: str
    line: int
    importer: str
    target: str
    runs_at_import: bool

    def __str__(self) -> str:
        return f"hfsdk/{self.file}:{self.line} imports {self.target}"


def imports_of(root: Path) -> list[Import]:
    """All imports of the package ``hfsdk`` under ``root``, lazy and type-only ones included."""
    files = sorted((root / "hfsdk").rglob("*.py"))
    modules = {_module(root, file) for file in files}
    found = []
    for file in files:
        name = _module(root, file)
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for line, target, at_import in _targets(ast.parse(file.read_text(encoding="utf-8")), package, modules):
            found.append(Import(file.relative_to(root / "hfsdk").as_posix(), line, name, target, at_import))
    return found


def _module(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _targets(tree: ast.Module, package: str, modules: set[str]) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, module, runs when the file is imported) for every import, in functions and type blocks too."""
    stack: list[tuple[ast.AST, bool]] = [(tree, True)]
    while stack:
        node, at_import = stack.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, at_import
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                yield node.lineno, deeper if deeper in modules else base, at_import
        elif isinstance(node, ast.Call) and _called(node) in ("importlib.import_module", "__import__"):
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, str(name), at_import) for name in names)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            stack += [(child, False) for child in node.body] + [(child, at_import) for child in node.orelse]
            continue
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack += [(child, at_import and not lazy) for child in ast.iter_child_nodes(node)]


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def laws(root: Path) -> dict[str, list[str]]:
    """What each folder's ``__init__`` says it may import: ``May import: core, engine.calls.``; folder and folders are below hfsdk.

    A folder may also import itself and what lies in it.
    """
    allowed = {}
    for file in sorted((root / "hfsdk").rglob("__init__.py")):
        folder = ".".join(file.parent.relative_to(root / "hfsdk").parts)
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        said = re.search(r"May import: ([a-z_., \n]+)\.$", text, re.M)
        if folder:
            allowed[folder] = re.split(r",\s+", said[1]) if said and said[1] != "nothing" else []
            assert said, f"hfsdk/{folder}/__init__.py does not say what it may import (May import: core, resharding.)"
    return allowed


def law_violations(imports: list[Import], allowed: dict[str, list[str]]) -> list[str]:
    wrong = []
    for item in imports:
        if item.importer in TOP or item.target.split(".")[0] != "hfsdk":
            continue
        above = item.importer.removeprefix("hfsdk.")
        folder = next((f for f in sorted(allowed, key=len, reverse=True) if _inside(above, f)), None)
        below = item.target.removeprefix("hfsdk.")
        if folder is None:
            wrong.append(f"{item}: {item.importer} stands in no folder")
        elif not any(_inside(below, room) for room in [folder, *allowed[folder]]):
            wrong.append(f"{item}: {folder} may import {', '.join(allowed[folder]) or 'nothing'} and itself")
    return wrong


def _inside(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def home_violations(imports: list[Import]) -> list[str]:
    wrong = []
    for item in imports:
        package = item.target.split(".")[0]
        homes = HOMES.get(package)
        if homes is not None and not any(fnmatch(item.file, home) for home in homes):
            wrong.append(f"{item}: {package} belongs in {', '.join(homes) or 'no file'}")
        lazily = not any(fnmatch(item.file, home) for home in TORCH_AT_MODULE_LEVEL)
        if package == "torch" and item.runs_at_import and lazily:
            wrong.append(f"{item}: here torch is imported inside functions only")
    return wrong


def cycles(imports: list[Import]) -> list[str]:
    """Import cycles among the modules, over lazy and type-only imports too, each as ``a, b``: all modules that reach each other."""
    edges: dict[str, set[str]] = {}
    for item in imports:
        if item.target.split(".")[0] == "hfsdk" and item.target != item.importer:
            edges.setdefault(item.importer, set()).add(item.target)
    reached = {module: _reached(module, edges) for module in edges}
    rings = {tuple(sorted(m for m in reached if m in reached[start] and start in reached[m])) for start in reached}
    return [", ".join(ring) for ring in sorted(rings) if ring]


def _reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        new = edges.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def half_imported(imports: list[Import]) -> list[str]:
    """Imports that meet a module while it is being imported itself, whichever module of the package a process imports first.

    An import of a module imports the folders above it before, whose ``__init__`` may import others.
    """
    steps: dict[str, list[Import]] = {}
    for item in sorted((i for i in imports if i.runs_at_import and i.target.startswith("hfsdk")), key=lambda i: i.line):
        steps.setdefault(item.importer, []).append(item)
    wrong = set()

    def load(module: str, begun: list[str], done: set[str]) -> None:
        for name in _with_folders(module):
            if name in done or name in begun:
                continue
            begun.append(name)
            for item in steps.get(name, ()):
                if item.target in begun and not _inside(name, item.target):
                    wrong.add(f"{item}, which is being imported when {begun[0]} is the first")
                load(item.target, begun, done)
            begun.remove(name)
            done.add(name)

    for first in {item.importer for item in imports}:
        load(first, [], set())
    return sorted(wrong)


def _with_folders(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return imports_of(ROOT)


def test_every_folder_imports_what_it_says_and_nothing_else(imports):
    assert law_violations(imports, laws(ROOT)) == []


def test_what_the_folders_say_has_an_order():
    """Else two folders could allow each other; what lies in a folder counts as below it, and `hfsdk` as above all."""
    allowed = laws(ROOT)
    edges = {folder: {f"hfsdk.{room}" for room in rooms} for folder, rooms in allowed.items()}
    said = [Import("", 0, f"hfsdk.{folder}", room, True) for folder, rooms in edges.items() for room in rooms]
    assert cycles(said) == []


def test_heavy_packages_stay_at_home(imports):
    assert home_violations(imports) == []


def test_no_import_cycles(imports):
    assert not cycles(imports)


def test_every_module_can_be_the_first_that_is_imported(imports):
    assert half_imported(imports) == []


def test_a_folder_that_imports_what_imports_it_is_noticed():
    def at(line, importer, target):
        return Import("", line, importer, target, True)

    edges = [at(1, "hfsdk.a", "hfsdk.a.x"), at(1, "hfsdk.a.x", "hfsdk.b.y")]
    assert half_imported(edges) == []
    (wrong,) = half_imported([*edges, at(1, "hfsdk.b.y", "hfsdk.a.z")])
    assert "imports hfsdk.b.y, which is being imported when hfsdk.b.y is the first" in wrong


def test_data_imports_assets_errors_and_checks(imports):
    targets = {i.target for i in imports if i.importer == "hfsdk.data" and i.target.startswith("hfsdk")}
    assert targets == {"hfsdk.assets", "hfsdk.core.errors", "hfsdk.core.checks"}


def test_import_hfsdk_loads_nothing_heavy():
    code = f"import sys, hfsdk; print([name for name in {[*HEAVY, 'pandas']} if name in sys.modules]); hfsdk.Session"
    result = run_python(f"{code}; print(hfsdk.doctor)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("[]\n<function doctor"), "and a name stands for its function, whatever module it is in"


WITHOUT_ENGINES = """
import os, sys
sys.modules.update(dict.fromkeys({blocked}))
import hfsdk
for layer in {layers}:
    if not (child := os.fork()):
        try:
            __import__("hfsdk." + layer)
        except BaseException as error:
            print(layer, repr(error), flush=True)
        os._exit(0)
    if status := os.waitpid(child, 0)[1]:
        print(layer, "ended with", status)
print("all tried")
"""


def test_every_layer_but_the_engine_imports_without_an_engine():
    """`pip install hfsdk` alone: simulation, planning and pictures with numpy and pandas. Each layer is imported first."""
    blocked = [*HEAVY, "IPython", "psutil", "safetensors"]
    result = run_python(WITHOUT_ENGINES.format(blocked=blocked, layers=[name for name in LAYERS if name != "engine"]))
    assert (result.stdout, result.returncode) == ("all tried\n", 0), result.stderr


@each(
    "file, code, complaint",
    [
        ("core/spec.py", "def f():\n    import hfsdk.session.session", "core may import nothing and itself"),
        (
            "core/layout.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from hfsdk.planner import model",
            "core may import nothing",
        ),
        ("models/actor.py", "from ..session import history", "models may import core, engine.calls and itself"),
        ("models/actor.py", "import hfsdk", "models may import core"),
        ("models/actor.py", "from hfsdk.engine.ray import access", "models may import core"),
        ("engine/calls/messages.py", "from hfsdk.planner import model", "engine.calls may import core and itself"),
        ("engine/worker.py", "import ray", "ray belongs in engine/ray/*"),
        ("engine/generation/rollout.py", "from megatron.core import x", "megatron belongs in"),
        ("engine/controller/controller.py", "def f():\n    import torch", "torch belongs in"),
        ("viz/box.py", "def f():\n    from ipywidgets import HBox", "ipywidgets belongs in no file"),
        ("session/ui.py", "import matplotlib.pyplot as plt", "matplotlib belongs in viz/*"),
        ("engine/worker.py", "import importlib\nimportlib.import_module('vllm')", "vllm belongs in"),
        ("core/batch.py", "def f():\n    import torch", "torch belongs in"),
        ("algorithms/ppo.py", "import torch", "inside functions only"),
        ("gadgets.py", "import hfsdk.core.errors", "hfsdk.gadgets stands in no folder"),
    ],
)
def test_the_checks_notice(tmp_path, file, code, complaint):
    said = {"core": "nothing", "engine": "core", "engine/calls": "core", "models": "core, engine.calls", "planner": "core"}
    said |= dict.fromkeys(["session", "algorithms", "engine/generation", "engine/controller", "engine/ray"], "core")
    others = ["core/batch.py", "planner/model.py", "session/session.py", "session/history.py", "engine/ray/access.py"]
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    for name in [file, *others]:
        path = root / "hfsdk" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for folder, rooms in said.items():
        (root / "hfsdk" / folder).mkdir(parents=True, exist_ok=True)
        (root / "hfsdk" / folder / "__init__.py").write_text(f'"""A room.\n\nMay import: {rooms}.\n"""')
    (root / "hfsdk" / file).write_text(code)
    found = imports_of(root)
    assert complaint in "\n".join(law_violations(found, laws(root)) + home_violations(found))


@each("folder", ["core", "engine"])
@each("last", ["import hfsdk.{0}.a", "def f():\n    import hfsdk.{0}.a",
               "import typing\nif typing.TYPE_CHECKING:\n    from hfsdk.{0} import a"])  # fmt: skip
def test_modules_of_a_folder_import_each_other_as_long_as_there_is_no_cycle(tmp_path, folder, last):
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    package = root / "hfsdk" / folder
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""A room.\n\nMay import: nothing.\n"""')
    (package / "a.py").write_text(f"from hfsdk.{folder}.b import x")
    (package / "b.py").write_text(f"from hfsdk.{folder} import c")
    (package / "c.py").write_text("import json")
    assert cycles(imports_of(root)) == law_violations(imports_of(root), laws(root)) == []
    (package / "c.py").write_text(last.format(folder))
    assert cycles(imports_of(root)) == [", ".join(f"hfsdk.{folder}.{name}" for name in "abc")]


def test_an_interrupt_does_not_meet_an_import():
    """NumPy cannot be imported again by a process in which a Ctrl-C has met its import: the interrupt comes when it is whole."""
    script = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import hfsdk as hf

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy._core.numerictypes":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
assert "numpy" not in sys.modules
try:
    hf.Batch
except KeyboardInterrupt:
    print("interrupted")
import numpy
print(issubclass(numpy.dtype("float32").type, numpy.flexible), hf.Batch.__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.stdout.split() == ["interrupted", "False", "Batch"], done.stderr
