"""A folder that a stranger made: whatever its files are, it is loaded or refused in one sentence, and nothing else is opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from expect import CEILING_S, each, refuses

import hfsdk as hf
from hfsdk.assets import model_folder
from hfsdk.assets.pretrained import load_config, load_tokenizer
from hfsdk.core import system, untrusted
from hfsdk.core.chat_templates import apply_template
from hfsdk.core.errors import CheckpointError, ModelNotFoundError, OptionError
from hfsdk.core.files import FileSum, check_files
from hfsdk.core.tokenizer_files import NAMED_TEMPLATES, named_templates
from hfsdk.core.turn_ends import TurnEnds
from hfsdk.core.untrusted import parse_json, private_copy, read_file, read_json, regular_names
from hfsdk.core.weight_files import WEIGHTS, WeightFiles, weight_names
from hfsdk.core.whole_folders import check_model_weights
from hfsdk.engine.weights.model_folders import Manifest
from tests.session.scripted import ScriptedRuntime
from tests.strange_folders import INDEX, header_bytes, make_folder, tensors_bytes

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "folder")


@pytest.fixture
def session():
    with hf.Session(runtime=ScriptedRuntime()) as session:
        yield session


def tried(seed):
    """Return the report of ``tests/strange_folders.py``, from a process of its own: its audit hook stays for good."""
    words = [sys.executable, "-m", "tests.strange_folders", str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CEILING_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_damage_of_every_file_is_loaded_or_one_sentence_and_nothing_outside_is_opened():
    report = tried(seed=0)
    assert report["watched"] == (2 if sys.platform == "linux" else 1), "the watch sees an open"
    assert report["faults"] == []
    assert min(report["loaded"], report["refused"]) > 500


# -- where a file may lie


@pytest.fixture
def snapshot(tmp_path):
    """A folder as the hub's cache has it: links to files beside it."""
    cache = tmp_path / "models--some--model"
    real = make_folder(tmp_path / "real")
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "1f").mkdir(parents=True)
    for number, file in enumerate(sorted(real.iterdir())):
        file.rename(cache / "blobs" / f"{number:04x}")
        (cache / "snapshots" / "1f" / file.name).symlink_to(f"../../blobs/{number:04x}")
    return cache / "snapshots" / "1f"


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(snapshot, tmp_path):
    spec = hf.ModelSpec.from_folder(snapshot)
    with WeightFiles(snapshot) as files:
        check_model_weights(files, spec)
    assert load_tokenizer(snapshot).encode("a film")
    assert [mark.name for mark in Manifest.of(snapshot).files] == sorted(path.name for path in snapshot.iterdir())
    (tmp_path / "mine").symlink_to(snapshot)
    assert hf.ModelSpec.from_folder(tmp_path / "mine").num_layers == spec.num_layers, "a folder that the user names may be a link"


def test_chat_templates_by_name_are_read_as_the_files_beside_their_folder_are(snapshot, tmp_path):
    inside, blob = snapshot / NAMED_TEMPLATES, snapshot.parents[1] / "blobs" / "named"
    inside.mkdir()
    blob.write_text("{{ tools | length }}")
    (inside / "tool_use.jinja").symlink_to("../../../blobs/named")
    assert named_templates(snapshot) == {"tool_use.jinja": b"{{ tools | length }}"}
    assert load_tokenizer(snapshot).get_chat_template(tools=[{}]) == "{{ tools | length }}"
    for target in ("../../../secret", "../../secret", "../../../blobs/../secret", "/etc/hostname"):
        (inside / "tool_use.jinja").unlink()
        (inside / "tool_use.jinja").symlink_to(target)
        with refuses(ModelNotFoundError, "tool_use.jinja", "a link"):
            named_templates(snapshot)
    (inside / "tool_use.jinja").unlink()
    os.mkfifo(inside / "pipe.jinja")
    with refuses(ModelNotFoundError, "pipe.jinja", "a named pipe"):
        named_templates(snapshot)
    (inside / "pipe.jinja").unlink()
    for number in range(101):
        (inside / f"{number}.jinja").write_text("")
    with refuses(ModelNotFoundError, NAMED_TEMPLATES, 101, 100):
        named_templates(snapshot)
    inside.rename(tmp_path / "elsewhere")
    inside.symlink_to(tmp_path / "elsewhere")
    assert named_templates(snapshot) == {}, "a folder that leads elsewhere is none"


@each(
    "name, target",
    [
        ("to the cache's own folder", "../../secret"),
        ("to the folder of folders", "../secret"),
        ("below the files", "../../blobs/below/secret"),
        ("through the files", "../../blobs/../../secret"),
        ("to a link among the files", "../../blobs/link"),
        ("by its whole path", "/etc/hostname"),
    ],
)
def test_a_link_of_a_snapshot_leads_to_a_file_beside_it_and_nowhere_else(snapshot, name, target):
    cache = snapshot.parents[1]
    (cache / "blobs" / "below").mkdir(exist_ok=True)
    for place in (cache, cache.parent, cache / "snapshots", cache / "blobs" / "below"):
        (place / "secret").write_text("{}")
    link = cache / "blobs" / "link"
    link.unlink(missing_ok=True)
    link.symlink_to("../secret")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(target)
    with refuses(ModelNotFoundError, "config.json", "a link"):
        read_json(snapshot, "config.json")
    assert "config.json" not in regular_names(snapshot)


def test_a_snapshot_whose_files_are_a_link_is_not_followed(snapshot, tmp_path):
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with refuses(ModelNotFoundError, "config.json"):
        read_json(snapshot, "config.json")


def test_a_link_inside_the_folder_is_a_file_of_it_and_one_hop_long(folder):
    (folder / "again.json").symlink_to("config.json")
    assert read_json(folder, "again.json") == read_json(folder, "config.json")
    (folder / "twice.json").symlink_to("again.json")
    with refuses(ModelNotFoundError, "twice.json", "a link"):
        read_json(folder, "twice.json")


@each("name", ["", ".", "..", "../folder/config.json", "/etc/hostname", "a/b", "a\\b", "config.json\0"])
def test_a_name_is_no_path(folder, name):
    with refuses(ModelNotFoundError, "no plain name"):
        read_file(folder, name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read as another user")
def test_a_file_that_may_not_be_read_is_told(folder):
    (folder / "config.json").chmod(0o600)
    for place in (folder, *folder.parents[:3]):
        place.chmod(0o755)
    os.seteuid(65534)
    try:
        with refuses(ModelNotFoundError, "config.json", "Permission denied"):
            read_json(folder, "config.json")
    finally:
        os.seteuid(0)


# -- a folder that changes


def test_a_file_is_what_was_looked_at_whatever_its_name_means_meanwhile(folder, monkeypatch):
    safetensors = pytest.importorskip("safetensors")
    with WeightFiles(folder) as files:
        path = files.path(WEIGHTS)
        (folder / WEIGHTS).unlink()
        os.mkfifo(folder / WEIGHTS)
        with safetensors.safe_open(path, framework="np") as opened:
            assert set(opened.keys()) == set(files.files)
    before = untrusted._check_regular

    def swapped(found):
        monkeypatch.setattr(untrusted, "_check_regular", before)
        before(found)
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")

    monkeypatch.setattr(untrusted, "_check_regular", swapped)
    with refuses(ModelNotFoundError, "config.json", "named pipe"):
        read_json(folder, "config.json")


def test_a_library_gets_a_copy_that_only_its_user_can_list_and_that_goes(folder):
    with private_copy(folder, ["config.json", "merges.txt"]) as copy:
        assert os.listdir(copy) == ["config.json"]
        assert os.stat(copy).st_mode & 0o777 == 0o700
        assert read_json(copy, "config.json") == read_json(folder, "config.json")
    assert not os.path.exists(copy)


def test_a_process_that_may_be_killed_has_its_copies_where_somebody_removes_them(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(system, "_temporary", [])
    for place in (tmp_path / "one", tmp_path / "other"):
        place.mkdir()
        system.keep_temporary_in(place)
        with private_copy(folder, ["config.json"]) as copy:
            assert Path(copy).parent == place
    system.keep_nothing_temporary_in(tmp_path / "one")
    system.keep_nothing_temporary_in(tmp_path / "other")
    with private_copy(folder, ["config.json"]) as copy:
        assert tmp_path not in Path(copy).parents


@each("key", ["gguf_file", "vocab_file", "fast_tokenizer_files", "configuration_files", "init_inputs"])
def test_what_a_configuration_names_is_not_opened(folder, key):
    for name in ("config.json", "tokenizer_config.json"):
        whole = read_json(folder, name)
        (folder / name).write_text(json.dumps({**whole, key: ["/etc/hostname"]}))
        with private_copy(folder, [name]) as copy:
            assert read_json(copy, name) == {one: value for one, value in whole.items() if one != key}
        (folder / name).write_text(json.dumps(whole))


def test_keys_that_nobody_reads_reach_no_library(folder):
    whole = read_json(folder, "config.json")
    odd = {"num_labels": 2**31, "initializer_range": "x", "use_cache": "/etc/passwd", "rope_parameters": {"finetuned": 7}}
    (folder / "config.json").write_text(json.dumps({**whole, **odd}))
    config = load_config(folder)
    assert (config.num_labels, config.hidden_size, config.model_type) == (2, whole["hidden_size"], "llama")
    assert "finetuned" not in config.rope_parameters
    assert load_tokenizer(folder).encode("a film")


def test_a_number_of_a_tokenizer_that_asks_for_much_memory_is_refused(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 2**31}))
    with refuses(ModelNotFoundError, "tokenizer_config.json", "extra_ids", 2**31):
        load_tokenizer(folder)


# -- what is said where


def test_damage_is_told_where_the_role_is_declared(folder, session):
    shapes = hf.ModelSpec.from_folder(folder).tensors()
    (folder / WEIGHTS).write_bytes(tensors_bytes({**shapes, "model.norm.weight": (65,)}))
    before = session.view()["roles"]
    for kind in ("actor", "critic", "reward"):
        with refuses(ModelNotFoundError, WEIGHTS, "model.norm.weight", (65,), (64,)):
            getattr(session, kind)(str(folder))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1e400]}')
    with refuses(ModelNotFoundError, "generation_config.json", "eos_token_id"):
        session.actor(str(folder))
    assert session.view()["roles"] == before


def test_adapters_of_another_model_are_told_where_the_role_is_declared(folder, session, tmp_path):
    beside = tmp_path / "folder adapters"
    with refuses(ModelNotFoundError, "adapter_model.safetensors", "tiny"):
        session.actor("tiny", lora=str(beside), optimizer=hf.AdamW())


def test_layers_without_end_are_refused_before_a_list_of_them_is_made(folder):
    (folder / "config.json").write_text(json.dumps({**read_json(folder, "config.json"), "num_hidden_layers": 10**9}))
    with refuses(hf.UnsupportedModelError, "config.json", "num_hidden_layers", "10,000"):
        hf.ModelSpec.from_folder(folder)


@each("ids", [-1, 2**31, True, "5", 1.0, [[1]], {"a": 1}, list(range(2000))])
def test_ids_that_end_a_text_are_whole_numbers(folder, ids):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with refuses(ModelNotFoundError, "generation_config.json", "eos_token_id"):
        TurnEnds.of(folder)


@each("saved", [[0, 0], [0, -1], [0, 1e39], ["0", 1], [1], 5, None, [None, 1], [0, 1, 2], [0, True], [10**400, 1]])
def test_a_saved_normalisation_is_two_finite_numbers(folder, session, saved):
    (folder / "config.json").write_text(json.dumps({**read_json(folder, "config.json"), "hfsdk_score": saved}))
    with refuses(ModelNotFoundError, "config.json", "hfsdk_score"):
        session.reward(str(folder), name="judge")


def test_a_folder_that_leads_elsewhere_is_not_sent_to_other_nodes(folder, tmp_path):
    (tmp_path / "key.txt").write_text("secret")
    (folder / "vocab.txt").symlink_to(tmp_path / "key.txt")
    os.mkfifo(folder / "more.safetensors")
    assert not {"vocab.txt", "more.safetensors"} & {mark.name for mark in Manifest.of(folder).files}


def test_weights_are_those_that_the_index_names_and_a_pipe_beside_them_is_nobodys(tmp_path):
    folder = make_folder(tmp_path / "folder", in_two=True)
    os.mkfifo(folder / "model-3.safetensors")
    assert weight_names(folder) == set(hf.ModelSpec.from_folder(folder).tensors())
    (folder / "model-2.safetensors").unlink()
    with refuses(ModelNotFoundError, INDEX, "model-2.safetensors", "missing"):
        weight_names(folder)


def test_a_header_is_read_to_the_size_of_the_file_and_no_further(tmp_path):
    whole = tensors_bytes({"a": (4,)})
    (tmp_path / WEIGHTS).write_bytes(whole)
    assert weight_names(tmp_path) == {"a"}
    (tmp_path / WEIGHTS).write_bytes(header_bytes({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}) + b"xx")
    with refuses(ModelNotFoundError, WEIGHTS, "'a'", "F4"):  # one and a half bytes
        weight_names(tmp_path)
    twice = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    (tmp_path / WEIGHTS).write_bytes(header_bytes({"a": twice, "b": twice}) + bytes(8))
    with refuses(ModelNotFoundError, WEIGHTS, "'b'", "begins at byte 0", "ends at 8"):
        weight_names(tmp_path)


# -- JSON


@each(
    "content, reason",
    [
        (b"[" * 101 + b"]" * 101, "100 deep"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' twice"),
        (b"[" + b"0," * 5_000_001 + b"0]", "parts"),
        (b'"\\ud800"', "surrogates"),
        (b"\xff", "utf-8"),
        (b"1" * 5000, "digits"),
    ],
)
def test_json_is_bounded(content, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(content)


def test_json_of_models_is_taken():
    assert parse_json(b"[" * 100 + b"]" * 100)
    assert parse_json(b'{"a": "\\ud83d\\ude00", "b": [1, 2.5, null]}') == {"a": "\U0001f600", "b": [1, 2.5, None]}


def test_a_file_of_more_bytes_than_its_kind_has_is_not_read(folder, monkeypatch):
    monkeypatch.setitem(untrusted.MOST_BYTES, "*.json", 100)
    with refuses(ModelNotFoundError, "config.json", "at most 100"):
        read_json(folder, "config.json")


# -- chats


class Template:
    """What :func:`apply_template` needs of a tokenizer, with Jinja's own sandbox."""

    def __init__(self, text):
        environment = pytest.importorskip("jinja2.sandbox").ImmutableSandboxedEnvironment()
        self._template = environment.from_string(text)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return self._template.render(messages=messages)


CHAT = {"messages": [{"role": "user", "content": "a film"}]}


@each(
    "text, reason",
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1,000,000 lines"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "16,000,000 characters"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "1,000,000 lines"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_chat_template_comes_to_an_end(text, reason):
    before = sys.gettrace()
    with refuses(OptionError, "chat template of here", reason):
        apply_template(Template(text), CHAT, "here")
    assert sys.gettrace() is before


def test_a_chat_template_that_ends_is_as_it_was():
    assert (
        apply_template(Template("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"), CHAT, "here") == "user: a film"
    )


# -- checkpoints, baselines and configurations


def test_a_pipe_or_a_link_in_a_save_is_not_read(tmp_path):
    (tmp_path / "save").mkdir()
    file, other = tmp_path / "save" / "common.pt", tmp_path / "other"
    other.write_bytes(b"12345")
    noted = {"common.pt": FileSum.of(other)}
    os.mkfifo(file)
    with refuses(CheckpointError, "common.pt", "named pipe"):
        check_files(tmp_path / "save", noted)
    file.unlink()
    file.symlink_to(other)
    with refuses(CheckpointError, "common.pt", "a link"):
        check_files(tmp_path / "save", noted)


def test_every_file_of_a_save_is_regular(tmp_path):
    def simulated():
        return hf.Session.simulated("1x2 A100-80GB")

    with simulated() as session:
        session.actor("tiny", optimizer=hf.AdamW())
        session.place()
        session.save(tmp_path / "save")
    outside = tmp_path / "outside"
    for path in [path for path in (tmp_path / "save").rglob("*") if path.is_file()]:
        content = path.read_bytes()
        outside.write_bytes(content)
        for make in (os.mkfifo, lambda path: path.symlink_to(outside), lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
            path.unlink()
            make(path)
            with simulated() as session, refuses(CheckpointError, path.name):
                session.actor("tiny", optimizer=hf.AdamW())
                session.load(tmp_path / "save")
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            path.write_bytes(content)
    with simulated() as session:
        session.actor("tiny", optimizer=hf.AdamW())
        session.load(tmp_path / "save")


@each(
    "name", ["x" * 5000, "~nobody of this name/x", "loop", "loop/x", "pipe", "file/x", "a\0b", "\ud800", "a/" + "b" * 300, "../x"]
)
def test_a_path_that_leads_to_no_folder_is_told(tmp_path, session, name):
    (tmp_path / "loop").is_symlink() or (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "pipe").exists() or os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    path = name if name.startswith("~") else f"{tmp_path}/{name}"
    with refuses(hf.HfsdkError):
        session.actor(path)
    with refuses(hf.HfsdkError):
        session.actor("tiny", lora=path, optimizer=hf.AdamW())
    with hf.Session.simulated("1x2 A100-80GB") as simulated, refuses(hf.HfsdkError):
        simulated.actor(path)


def test_a_file_that_the_user_names_is_regular_and_may_be_a_link(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with refuses(OptionError, "pipe.yaml", "named pipe"):
        hf.explain(tmp_path / "pipe.yaml")
    (tmp_path / "real.yaml").write_text("a: 1\n")
    (tmp_path / "mine.yaml").symlink_to("real.yaml")
    assert untrusted.read_named(tmp_path / "mine.yaml", 100, error=OptionError) == b"a: 1\n"


def test_files_that_inherit_from_themselves_many_times_end(tmp_path):
    (tmp_path / "grpo.yaml").write_text("defaults: [grpo.yaml, grpo.yaml, grpo.yaml]\ngrpo: {num_prompts_per_step: 1}\n")
    with refuses(OptionError, "grpo.yaml", "more than 16"):
        hf.explain(tmp_path / "grpo.yaml")
    (tmp_path / "away.yaml").write_text("defaults: [/etc/base.yaml]\n")
    with refuses(OptionError, "away.yaml", "'/etc/base.yaml'"):
        hf.explain(tmp_path / "away.yaml")


def test_a_baseline_that_is_a_pipe_is_refused(tmp_path):
    from hfsdk.core.experiment import read_baseline

    os.mkfifo(tmp_path / "base.json")
    with refuses(OptionError, "base.json", "named pipe"):
        read_baseline(tmp_path / "base.json", 1, {})


# -- who opens


OPENERS = {
    "AutoTokenizer.from_pretrained": {"assets/pretrained.py", "assets/smollm2.py"},
    "AutoConfig.from_pretrained": {"assets/pretrained.py"},
    "AutoModelForCausalLM.from_pretrained": {"assets/smollm2.py"},
    "Tokenizer.from_file": set(),
    "Tokenizer.from_pretrained": {"assets/pretrained.py", "assets/smollm2.py"},
    "safe_open(": {"engine/training/megatron_folder.py"},
    "load_file(": set(),
    "EngineArgs(": {"engine/generation/rollout_engine.py"},
    "shutil.copy": set(),
}
"""Calls that open a file by its name -> where they may stand, each on what was checked before."""


def test_nobody_else_opens_a_strangers_file_by_its_name():
    package = Path(hf.__file__).parent
    texts = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    for call, places in OPENERS.items():
        assert {place for place, text in texts.items() if call in text} == places, call
    with pytest.raises(hf.ModelNotFoundError, match="no folder"):
        model_folder("x" * 5000)
