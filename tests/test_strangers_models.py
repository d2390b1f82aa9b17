"""A model folder from a stranger: its weights and texts are read, its code is not, even where someone answers yes."""

from __future__ import annotations

import ast
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from expect import refuses

import hfsdk
from hfsdk.assets import model_folder
from hfsdk.assets.folder_tokenizer import FolderTokenizer
from hfsdk.assets.pretrained import load_tokenizer
from hfsdk.core.errors import UnsupportedModelError

NAMED = {
    "config.json": {"AutoConfig": "own_code.Config", "AutoModelForCausalLM": "own_code.Model"},
    "tokenizer_config.json": {"AutoTokenizer": [None, "own_code.Tokenizer"]},
}

LOADERS = ("from_pretrained", "EngineArgs")


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """``make(tokenizer_class, *files)``: a folder in which these files name code that touches a canary. Stdin says yes."""
    dynamic = pytest.importorskip("transformers.dynamic_module_utils")
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    folder = tmp_path / "stranger"

    def make(tokenizer_class, *files):
        shutil.copytree(model_folder("tiny"), folder)
        (folder / "own_code.py").write_text(f"open({str(folder / 'canary')!r}, 'w').close()\n")
        change(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class)
        for name in files:
            change(folder / name, auto_map=NAMED[name])
        return folder

    return make


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("files", [["tokenizer_config.json"], ["tokenizer_config.json", "config.json"]], ids=str)
def test_a_tokenizer_that_is_code_is_refused_and_not_run(stranger, files):
    folder = stranger("StrangersTokenizer", *files)
    for use in (lambda: load_tokenizer(folder), lambda: FolderTokenizer(folder).encode("one")):
        with refuses(UnsupportedModelError, "auto_map", "tokenizer_config.json", "runs no code"):
            use()
    assert not (folder / "canary").exists()


@pytest.mark.parametrize("files", [["tokenizer_config.json"], ["config.json"]], ids=str)
def test_a_folder_that_needs_no_code_of_its_own_is_read_without_it(stranger, files):
    folder = stranger("TokenizersBackend", *files)
    tokenizer = FolderTokenizer(folder)
    chat = tokenizer.encode_chat([{"role": "user", "content": "a film"}])
    assert "a film" in tokenizer.decode(chat)
    assert hfsdk.ModelSpec.from_folder(folder).num_layers > 0
    assert not (folder / "canary").exists()


def test_the_folder_would_run_its_code_where_transformers_asks(stranger):
    from transformers import AutoTokenizer

    folder = stranger("StrangersTokenizer", "tokenizer_config.json")
    with pytest.raises(AttributeError, match="own_code"):  # the code was run, and has no such class
        AutoTokenizer.from_pretrained(str(folder))
    assert (folder / "canary").exists()


def test_every_loader_in_the_package_says_that_it_trusts_no_code():
    loaders = []
    for path in Path(hfsdk.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(loader in text for loader in LOADERS):
            continue
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        asked = [call for call in calls if ast.unparse(call.func).split(".")[-1] in LOADERS]
        loaders += asked
        said = "trust_remote_code=False" in text or '"trust_remote_code": False' in text
        assert said or not asked, f"{path} loads with transformers or vLLM and does not say trust_remote_code=False"
    assert len(loaders) >= 4
