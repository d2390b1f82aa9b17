"""The import laws: arrows point down only, heavy packages stay where they belong, `import hfsdk` is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# bottom-up; a module may import what stands before it
NOUNS = [
    *["text", "errors", "upward", "rules", "checks", "files"],
    *["assets", "data", "functions", "table", "rope", "hf_config", "spec", "layout", "placement", "boxes", "resharding"],
    *["roles", "rollout_sizes", "training_choices"],
    *["pending", "tokens", "batch", "protocol", "dataflow", "comparison", "trace", "plan", "runtime"],
    *["rows", "snapshot", "history", "experiment"],
]
LAYERS = ["planner", "engine", "models", "algorithms", "session", "viz"]
TOP = ["__init__", "__main__", "doctor", "doctor_gpus", "quickstart", "testing"]
LEVEL = {name: level for level, name in enumerate([*NOUNS, *LAYERS])} | dict.fromkeys(TOP, 999)

HOMES = {
    "ray": ["engine/ray_*.py"],
    "megatron": ["engine/megatron_*.py", "engine/trainer*.py", "engine/cpu_support*.py"],
    "vllm": ["engine/rollout*.py", "engine/vllm_*.py", "engine/cpu_support*.py"],
    "ipywidgets": ["viz/*"],
    "anywidget": ["viz/*"],
    "matplotlib": ["viz/*"],
    "tensorboard": ["session/tracking.py"],
    "wandb": ["session/tracking.py"],
    "mlflow": ["session/tracking.py"],
    "torch": ["engine/*", "algorithms/*", "assets/*"],
}
TORCH_AT_MODULE_LEVEL = ["engine/*", "algorithms/rlmath.py"]  # rlmath is pure torch, and itself imported lazily
HEAVY = ["torch", "ray", "megatron", "vllm", "ipywidgets", "anywidget", "matplotlib", "datasets", "transformers",
         "tensorboard", "wandb", "mlflow"]


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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, str(name), at_import) for name in names)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            stack += [(child, False) for child in node.body] + [(child, at_import) for child in node.orelse]
            continue
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack += [(child, at_import and not lazy) for child in ast.iter_child_nodes(node)]


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def layer(module: str) -> str:
    """``hfsdk.engine.controller`` is in ``engine``; ``hfsdk`` itself is ``__init__``."""
    return module.split(".")[1] if "." in module else "__init__"


def layer_violations(imports: list[Import]) -> list[str]:
    wrong = []
    for item in imports:
        if item.target.split(".")[0] != "hfsdk":
            continue
        above, below = layer(item.importer), layer(item.target)
        unknown = [name for name in (above, below) if name not in LEVEL]
        if unknown:
            wrong.append(f"{item}: {unknown[0]} has no level; add it to the order in tests/test_import_laws.py")
        elif {above, below} == {"planner", "engine"}:
            wrong.append(f"{item}: engine and planner never import each other")
        elif above != below and above not in TOP and LEVEL[below] >= LEVEL[above]:
            wrong.append(f"{item}: {above} stands below {below}")
    return wrong


def home_violations(imports: list[Import]) -> list[str]:
    wrong = []
    for item in imports:
        package = item.target.split(".")[0]
        homes = HOMES.get(package)
        if homes and not any(fnmatch(item.file, home) for home in homes):
            wrong.append(f"{item}: {package} belongs in {', '.join(homes)}")
        lazily = not any(fnmatch(item.file, home) for home in TORCH_AT_MODULE_LEVEL)
        if package == "torch" and item.runs_at_import and lazily:
            wrong.append(f"{item}: here torch is imported inside functions only")
    return wrong


def cycles(imports: list[Import]) -> list[str]:
    """Import cycles among the modules that really run at import, each as ``a -> b -> a``."""
    edges: dict[str, set[str]] = {}
    for item in imports:
        if item.runs_at_import and item.target.split(".")[0] == "hfsdk" and item.target != item.importer:
            edges.setdefault(item.importer, set()).add(item.target)
    found, done = [], set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(edges.get(module, ())):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return found


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return imports_of(ROOT)


def test_arrows_point_down(imports):
    assert layer_violations(imports) == []


def test_heavy_packages_stay_at_home(imports):
    assert home_violations(imports) == []


def test_no_import_cycles(imports):
    assert cycles(imports) == []


def test_assets_and_data_import_only_errors_and_checks(imports):
    targets = {layer(i.target) for i in imports if layer(i.importer) in ("assets", "data") and "hfsdk" in i.target}
    assert targets <= {"errors", "checks", "assets", "data"}


def test_import_hfsdk_loads_nothing_heavy():
    result = run_python(f"import sys, hfsdk; print([name for name in {HEAVY} if name in sys.modules])")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["", *(f".{name}" for name in LAYERS if name != "engine")])
def test_every_layer_but_the_engine_imports_without_an_engine(package):
    """`pip install hfsdk` alone: simulation, planning and pictures with numpy and pandas."""
    blocked = [*HEAVY, "IPython", "psutil", "safetensors"]
    result = run_python(f"import sys; sys.modules.update(dict.fromkeys({blocked})); import hfsdk{package}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("file", "code", "complaint"),
    [
        ("spec.py", "from hfsdk.layout import Layout", "spec stands below layout"),
        ("spec.py", "def f():\n    import hfsdk.session.session", "spec stands below session"),
        ("layout.py", "import typing\nif typing.TYPE_CHECKING:\n    from hfsdk import batch", "below batch"),
        ("models/actor.py", "from ..session import history", "models stands below session"),
        ("models/actor.py", "import hfsdk", "models stands below __init__"),
        ("planner/search.py", "from hfsdk.engine import simulated", "never import each other"),
        ("engine/simulated.py", "from hfsdk.planner import model", "never import each other"),
        ("engine/worker.py", "import ray", "ray belongs in engine/ray_*.py"),
        ("engine/rollout.py", "from megatron.core import x", "megatron belongs in"),
        ("session/ui.py", "import matplotlib.pyplot as plt", "matplotlib belongs in viz/*"),
        ("engine/worker.py", "import importlib\nimportlib.import_module('vllm')", "vllm belongs in"),
        ("batch.py", "def f():\n    import torch", "torch belongs in"),
        ("algorithms/ppo.py", "import torch", "inside functions only"),
        ("gadgets.py", "import hfsdk.errors", "gadgets has no level"),
    ],
)
def test_the_checks_notice(tmp_path, file, code, complaint):
    others = ["batch.py", "engine/simulated.py", "planner/model.py", "session/session.py", "session/history.py"]
    for name in [file, *others]:
        path = tmp_path / "hfsdk" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "hfsdk" / file).write_text(code)
    found = imports_of(tmp_path)
    assert complaint in "\n".join(layer_violations(found) + home_violations(found))


def test_the_cycle_check_notices(tmp_path):
    package = tmp_path / "hfsdk" / "engine"
    package.mkdir(parents=True)
    (package / "a.py").write_text("from hfsdk.engine.b import x")
    (package / "b.py").write_text("from hfsdk.engine import c")
    (package / "c.py").write_text("import hfsdk.engine.a")
    assert cycles(imports_of(tmp_path)) == ["hfsdk.engine.a -> hfsdk.engine.b -> hfsdk.engine.c -> hfsdk.engine.a"]
    (package / "c.py").write_text("def f():\n    import hfsdk.engine.a")
    assert cycles(imports_of(tmp_path)) == []


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
