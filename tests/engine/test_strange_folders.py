"""Real engines on folders of strangers: nothing makes a worker wait, and nothing is exported that was not read."""

import json
import os
import shutil
from pathlib import Path

import pytest
from spawn import run

from hfsdk.assets import model_folder
from hfsdk.core.errors import HfsdkError
from hfsdk.core.layout import Layout
from hfsdk.core.lora import LoRA
from hfsdk.core.roles import RoleSpec, RolloutOptions
from hfsdk.core.spec import ModelSpec
from tests.strange_folders import tensors_bytes

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")

SECRET = "a private key"


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def another_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}))


def odd_keys(folder):
    config = json.loads((folder / "config.json").read_text())
    odd = {"num_labels": 2**31, "initializer_range": "x", "use_cache": "/etc/passwd", "bos_token_id": [[]]}
    (folder / "config.json").write_text(json.dumps({**config, **odd}))


CHANGES = {
    "keys that nobody reads": odd_keys,
    "weights are a pipe": lambda folder: pipe(folder / "model.safetensors"),
    "a pipe beside the weights": lambda folder: pipe(folder / "more.safetensors"),
    "the index is a pipe": lambda folder: pipe(folder / "model.safetensors.index.json"),
    "the index leads elsewhere": lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(ModelSpec.from_folder(folder).tensors(), "../elsewhere.safetensors")})
    ),
    "the configuration is a pipe": lambda folder: pipe(folder / "config.json"),
    "the configuration is another": another_config,
    "weights of another model": lambda folder: (folder / "model.safetensors").write_bytes(
        tensors_bytes({**ModelSpec.from_folder(folder).tensors(), "somebody.weight": (2, 2)})
    ),
    "weights of another form": lambda folder: (folder / "model.safetensors").write_bytes(tensors_bytes({"lm_head.weight": (2, 2)})),
}
"""What becomes of a folder after its role was declared."""


def said(make):
    """Return what came of an engine: nothing, or the class and the text of its error."""
    try:
        make()
    except Exception as error:
        return type(error).__name__ if isinstance(error, HfsdkError) else f"raw {error!r}", str(error)
    return "", ""


def load_each(rank, world_size, folders, spec):
    """Load a trainer and a rollout of each folder, as a worker does after the roles were declared."""
    from hfsdk.engine.generation.rollout import Rollout
    from hfsdk.engine.process.recorder import Recorder
    from hfsdk.engine.training.megatron_groups import RoleGroups
    from hfsdk.engine.training.trainer import Trainer

    mesh = Layout().fill(world_size).mesh()
    groups, recorder = RoleGroups(mesh), Recorder(device=rank, rank=rank)

    def trainer(folder):
        Trainer(RoleSpec(name="actor", kind="actor", folder=folder, model=spec, dtype="fp32"), mesh, groups, recorder)

    def rollout(folder):
        options = RolloutOptions(max_model_len=128, max_num_seqs=4)
        Rollout(
            folder, spec, tp=1, rank=rank, world_size=world_size, dtype="fp32", options=options, seed=0,
            job_id=f"strange{os.getpid()}", recorder=recorder, load_weights=True, lora=LoRA(rank=2),
        ).close()  # fmt: skip

    return {name: (said(lambda: trainer(folder)), said(lambda: rollout(folder))) for name, folder in folders.items()}  # noqa: B023


def test_no_folder_makes_a_worker_wait(tmp_path):
    folders = {}
    shutil.copy(model_folder("tiny") / "model.safetensors", tmp_path / "elsewhere.safetensors")
    for name, change in {"as it is": lambda folder: None, **CHANGES}.items():
        folder = Path(shutil.copytree(model_folder("tiny"), tmp_path / name))
        change(folder)
        folders[name] = str(folder)
    spec = ModelSpec.from_folder(folders["as it is"])
    (found,) = run(load_each, 1, folders, spec)
    for name in ("as it is", "a pipe beside the weights", "keys that nobody reads"):
        assert found.pop(name) == (("", ""), ("", "")), name
    assert found["the configuration is a pipe"][0] == ("", ""), "a trainer has its numbers from where the role was declared"
    for name, (of_trainer, of_rollout) in found.items():
        only_rollout = name.startswith("the configuration") or name == "weights of another model"
        for error, text in [of_rollout] if only_rollout else [of_trainer, of_rollout]:
            assert error == "ModelNotFoundError", (name, error, text)
            assert f"{folders[name]}/" in text, (name, text)
            assert text.isprintable(), (name, text)


def save(rank, world_size, folder, spec, target):
    from hfsdk.engine.process.recorder import Recorder
    from hfsdk.engine.training.megatron_groups import RoleGroups
    from hfsdk.engine.training.trainer import Trainer

    mesh = Layout().fill(world_size).mesh()
    role = RoleSpec(name="actor", kind="actor", folder=folder, model=spec, dtype="fp32")
    return Trainer(role, mesh, RoleGroups(mesh), Recorder(device=rank, rank=rank)).save_folder(target)


def test_what_a_link_leads_to_is_not_exported_and_that_is_said(tmp_path):
    folder = Path(shutil.copytree(model_folder("tiny"), tmp_path / "folder"))
    (tmp_path / "key").write_text(SECRET)
    for name in ("tokenizer_x", "vocab.txt", "merges.txt"):
        (folder / name).symlink_to(tmp_path / "key")
    pipe(folder / "added_tokens.json")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").symlink_to(tmp_path / "key")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "auto_map": {"AutoModel": "somebody/else--own_code.Model"}}))
    (left_out,) = run(save, 1, str(folder), ModelSpec.from_folder(folder), str(tmp_path / "out"))
    named = ("vocab.txt", "merges.txt", "added_tokens.json", "additional_chat_templates")
    assert [name for name in named if not any(name in why for why in left_out)] == []
    assert len(left_out) == len(named)
    written = sorted((tmp_path / "out").iterdir())
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in written} == {"config.json", "model.safetensors", "generation_config.json", *tokenizer}
    for path in written:
        assert not path.is_symlink()
        assert SECRET.encode() not in path.read_bytes()
        assert path.suffix != ".json" or "auto_map" not in json.loads(path.read_text())
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model_folder("tiny") / "tokenizer.json").read_bytes()


def test_chat_templates_by_name_are_exported_and_replaced(tmp_path):
    folder = Path(shutil.copytree(model_folder("tiny"), tmp_path / "folder"))
    (folder / "additional_chat_templates").mkdir()
    template = folder / "additional_chat_templates" / "tool_use.jinja"
    for text in ("{{ messages }}", "{{ messages }}{{ tools }}"):
        template.write_text(text)
        assert run(save, 1, str(folder), ModelSpec.from_folder(folder), str(tmp_path / "out")) == [[]]
        assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == text
